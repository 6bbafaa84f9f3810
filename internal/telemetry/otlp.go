package telemetry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
)

// scope says whose spans and metrics these are.
const scope = "github.com/covehq/cove"

// signal is a kind of telemetry, as the standard variables write it.
type signal string

const (
	traces  signal = "TRACES"
	metrics signal = "METRICS"
)

// The exporters that OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER can name.
const (
	exporterNone       = "none"
	exporterOTLP       = "otlp"
	exporterConsole    = "console"
	exporterPrometheus = "prometheus" // of metrics; they are at /metrics in any case
)

// The protocols of OTLP.
const (
	protocolHTTP = "http/protobuf"
	protocolGRPC = "grpc"
)

// exporter is where a signal goes. Without a word about it there must be an endpoint: an exporter that nobody listens to
// would only fill the log.
func (s signal) exporter(log *slog.Logger) string {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return exporterNone
	}
	variable := "OTEL_" + string(s) + "_EXPORTER"
	switch name := os.Getenv(variable); {
	case name == exporterNone, name == exporterOTLP, name == exporterConsole:
		return name
	case name == exporterPrometheus && s == metrics:
		return exporterNone
	case name != "": // the specification wants a warning and the default
		log.Warn("unknown "+variable+"; use otlp, console or none", "value", name)
	}
	if _, endpoint := s.endpoint(); endpoint == "" {
		return exporterNone
	}
	return exporterOTLP
}

// endpoint is where OTLP goes, and the variable that says so.
func (s signal) endpoint() (name, value string) {
	for _, name := range []string{"OTEL_EXPORTER_OTLP_" + string(s) + "_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		if value := os.Getenv(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// checkEndpoint refuses what exporters would misread: "collector:4318" is a scheme to them, and they send to nowhere.
func (s signal) checkEndpoint() error {
	name, value := s.endpoint()
	if value == "" {
		return nil
	}
	if u, err := url.Parse(value); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("%s: want a URL such as http://127.0.0.1:4318", name)
	}
	return nil
}

func (s signal) protocol(log *slog.Logger) string {
	own := os.Getenv("OTEL_EXPORTER_OTLP_" + string(s) + "_PROTOCOL")
	switch protocol := cmp.Or(own, os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), protocolHTTP); protocol {
	case protocolGRPC, protocolHTTP:
		return protocol
	default:
		log.Warn("unsupported OTEL_EXPORTER_OTLP_PROTOCOL; using "+protocolHTTP, "value", protocol)
		return protocolHTTP
	}
}

// describe is what this server says of itself. Later ones win: what the operator says counts more.
func describe(ctx context.Context, version string) (*resource.Resource, error) {
	described, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "cove"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return described, nil
}

// flushFor bounds how long the last spans and metrics may hold up the end of a server.
const flushFor = 5 * time.Second

// flush sends what is left. The server is stopping, and its context with it: the last words have a clock of their own.
func flush(shutdown func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), flushFor)
	defer cancel()
	if err := shutdown(ctx); err != nil {
		otel.Handle(err) // telemetry is lost and nothing else: no reason to call the shutdown a failure
	}
	return nil
}

// complaints logs what the SDK cannot return to anybody, such as a collector that is away. One a minute is enough.
type complaints struct {
	log *slog.Logger

	mu   sync.Mutex
	last time.Time
}

func hearComplaints(log *slog.Logger) { otel.SetErrorHandler(&complaints{log: log}) }

func (c *complaints) Handle(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.last) < time.Minute {
		return
	}
	c.last = time.Now()
	c.log.Warn("traces or metrics may be lost", "error", err)
}
