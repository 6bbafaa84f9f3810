package telemetry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracing makes spans and sends them away. A nil one makes none and costs nothing: what it would wrap stays as it is.
type Tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// The exporters that OTEL_TRACES_EXPORTER can name.
const (
	exporterNone    = "none"
	exporterOTLP    = "otlp"
	exporterConsole = "console"
)

// The protocols of OTLP.
const (
	protocolHTTP = "http/protobuf"
	protocolGRPC = "grpc"
)

// OpenTracing does what the standard OTEL_* variables say; it returns nil when they ask for no traces. The console
// exporter writes to console. Close it.
func OpenTracing(ctx context.Context, version string, console io.Writer, log *slog.Logger) (*Tracing, error) {
	name := exporterName(log)
	if name == exporterNone {
		return nil, nil
	}
	otel.SetErrorHandler(&complaints{log: log})
	exporter, err := newExporter(ctx, name, console, log)
	if err != nil {
		return nil, fmt.Errorf("trace exporter: %w", err)
	}
	// Later ones win: what the operator says of this service counts more than what it says of itself.
	described, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "cove"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, errors.Join(fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err), exporter.Shutdown(ctx))
	}
	// The sampler, its argument, the sizes of batches and the limits of spans come from the environment.
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(described), sdktrace.WithBatcher(exporter))
	return &Tracing{provider: provider, tracer: provider.Tracer("github.com/covehq/cove", trace.WithInstrumentationVersion(version))}, nil
}

// exporterName is where spans go. Without a word about it there must be an endpoint: an exporter that nobody listens to
// would only fill the log.
func exporterName(log *slog.Logger) string {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return exporterNone
	}
	switch name := os.Getenv("OTEL_TRACES_EXPORTER"); name {
	case exporterNone, exporterOTLP, exporterConsole:
		return name
	case "":
	default: // the specification wants a warning and the default
		log.Warn("unknown OTEL_TRACES_EXPORTER; use otlp, console or none", "value", name)
	}
	if _, endpoint := endpoint(); endpoint == "" {
		return exporterNone
	}
	return exporterOTLP
}

// endpoint is where OTLP goes, and the variable that says so.
func endpoint() (name, value string) {
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		if value := os.Getenv(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// newExporter leaves headers, certificates, compression and timeouts to the exporter, which reads their variables.
func newExporter(ctx context.Context, name string, console io.Writer, log *slog.Logger) (sdktrace.SpanExporter, error) {
	if name == exporterConsole {
		return stdouttrace.New(stdouttrace.WithWriter(console))
	}
	if name, value := endpoint(); value != "" {
		// The exporters would take "collector:4318" for a scheme and send to nowhere.
		if u, err := url.Parse(value); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return nil, fmt.Errorf("%s: want a URL such as http://127.0.0.1:4318", name)
		}
	}
	switch protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), protocolHTTP); protocol {
	case protocolGRPC:
		return otlptracegrpc.New(ctx)
	case protocolHTTP:
	default:
		log.Warn("unsupported OTEL_EXPORTER_OTLP_PROTOCOL; using "+protocolHTTP, "value", protocol)
	}
	return otlptracehttp.New(ctx)
}

// flushFor bounds how long the last spans may hold up the end of a server.
const flushFor = 5 * time.Second

// Close sends what is left; whoever makes spans has stopped before.
func (t *Tracing) Close() error {
	if t == nil {
		return nil
	}
	// The server is stopping, and its context with it: the last spans have a clock of their own.
	ctx, cancel := context.WithTimeout(context.Background(), flushFor)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		otel.Handle(err) // spans are lost and nothing else: no reason to call the shutdown a failure
	}
	return nil
}

// complaints logs what the SDK cannot return to anybody, such as a collector that is away. One a minute is enough.
type complaints struct {
	log *slog.Logger

	mu   sync.Mutex
	last time.Time
}

func (c *complaints) Handle(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.last) < time.Minute {
		return
	}
	c.last = time.Now()
	c.log.Warn("traces may be lost", "error", err)
}

// LogHandler names the span in every log line that is written for a request, so that one leads to the other.
func (t *Tracing) LogHandler(next slog.Handler) slog.Handler {
	if t == nil {
		return next
	}
	return spanLog{next}
}

type spanLog struct{ slog.Handler }

func (h spanLog) Handle(ctx context.Context, r slog.Record) error {
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		r = r.Clone()
		r.AddAttrs(slog.String("trace_id", span.TraceID().String()), slog.String("span_id", span.SpanID().String()))
	}
	return h.Handler.Handle(ctx, r)
}

func (h spanLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return spanLog{h.Handler.WithAttrs(attrs)}
}

func (h spanLog) WithGroup(name string) slog.Handler { return spanLog{h.Handler.WithGroup(name)} }
