package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracing makes spans and sends them away. A nil one makes none and costs nothing: what it would wrap stays as it is.
type Tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// OpenTracing does what the standard OTEL_* variables say; it returns nil when they ask for no traces. The console
// exporter writes to console. Close it.
func OpenTracing(ctx context.Context, version string, console io.Writer, log *slog.Logger) (*Tracing, error) {
	name := traces.exporter(log)
	if name == exporterNone {
		return nil, nil
	}
	hearComplaints(log)
	exporter, err := newSpanExporter(ctx, name, console, log)
	if err != nil {
		return nil, fmt.Errorf("trace exporter: %w", err)
	}
	described, err := describe(ctx, version)
	if err != nil {
		return nil, errors.Join(err, exporter.Shutdown(ctx))
	}
	// The sampler, its argument, the sizes of batches and the limits of spans come from the environment.
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(described), sdktrace.WithBatcher(exporter))
	return &Tracing{provider: provider, tracer: provider.Tracer(scope, trace.WithInstrumentationVersion(version))}, nil
}

// newSpanExporter leaves headers, certificates, compression and timeouts to the exporter, which reads their variables.
func newSpanExporter(ctx context.Context, name string, console io.Writer, log *slog.Logger) (sdktrace.SpanExporter, error) {
	if name == exporterConsole {
		return stdouttrace.New(stdouttrace.WithWriter(console))
	}
	if err := traces.checkEndpoint(); err != nil {
		return nil, err
	}
	if traces.protocol(log) == protocolGRPC {
		return otlptracegrpc.New(ctx)
	}
	return otlptracehttp.New(ctx)
}

// Close sends what is left; whoever makes spans has stopped before.
func (t *Tracing) Close() error {
	if t == nil {
		return nil
	}
	return flush(t.provider.Shutdown)
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
