package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/trace"

	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/telemetry/otlptest"
)

// setOTEL makes these the only variables that count.
func setOTEL(t *testing.T, set map[string]string) {
	t.Helper()
	for _, line := range os.Environ() {
		if name, _, _ := strings.Cut(line, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "") // so that it is put back
			os.Unsetenv(name)
		}
	}
	for name, value := range set {
		t.Setenv(name, value)
	}
}

func TestS2_64_WithoutTracingNothingIsMade(t *testing.T) {
	setOTEL(t, nil)
	off, err := telemetry.OpenTracing(t.Context(), "v1", io.Discard, quiet)
	if off != nil || err != nil {
		t.Fatalf("it is on: %v, %v", off, err)
	}
	driver, logs := struct{ sandbox.Driver }{}, slog.DiscardHandler
	request(off, telemetry.New(quiet), func(ctx context.Context) {
		if trace.SpanContextFromContext(ctx).IsValid() {
			t.Error("there is a span")
		}
	})
	if off.Driver(driver) != sandbox.Driver(driver) || off.LogHandler(logs) != logs {
		t.Error("a wrapper is in the way although nobody wants traces")
	}
	if err := off.Close(); err != nil {
		t.Error(err)
	}
}

// request sends one request through a traced handler.
func request(tracing *telemetry.Tracing, o *telemetry.Observer, answer func(context.Context)) {
	handler := tracing.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		r.Pattern = "GET /x/{id}"
		answer(r.Context())
		o.Served(r, "r1", 200, 0, 0)
	}))
	handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/x/1", nil))
}

func TestTheConsoleExporterWritesWhereItIsTold(t *testing.T) {
	setOTEL(t, map[string]string{"OTEL_TRACES_EXPORTER": "console"})
	var out bytes.Buffer
	tracing, err := telemetry.OpenTracing(t.Context(), "v1", &out, quiet)
	if err != nil {
		t.Fatal(err)
	}
	request(tracing, telemetry.New(quiet), func(context.Context) {})
	if err := tracing.Close(); err != nil {
		t.Fatal(err)
	}
	var span struct{ Name string }
	if err := json.Unmarshal(out.Bytes(), &span); err != nil || span.Name != "GET /x/{id}" {
		t.Errorf("it wrote %s: %v", out.Bytes(), err)
	}
}

func TestWhatIsNotSupportedIsWarnedOfAndLeftAside(t *testing.T) {
	double := otlptest.Start(t)
	for name, value := range map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_TRACES_EXPORTER": "zipkin"} {
		setOTEL(t, map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": double.HTTP + "/v1/traces", name: value})
		var logged bytes.Buffer
		tracing, err := telemetry.OpenTracing(t.Context(), "v1", io.Discard, slog.New(slog.NewTextHandler(&logged, nil)))
		if err != nil {
			t.Fatal(err)
		}
		before := len(double.Spans())
		request(tracing, telemetry.New(quiet), func(context.Context) {})
		if err := tracing.Close(); err != nil {
			t.Fatal(err)
		}
		if len(double.Spans()) != before+1 || !strings.Contains(logged.String(), "value="+value) {
			t.Errorf("%s=%s: %d spans came, logged %s", name, value, len(double.Spans())-before, &logged)
		}
		os.Unsetenv(name)
	}
}

func TestPagesForMachinesAreNotTraced(t *testing.T) {
	double := otlptest.Start(t)
	setOTEL(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": double.HTTP, "OTEL_TRACES_SAMPLER": "always_on"})
	tracing, err := telemetry.OpenTracing(t.Context(), "v1", io.Discard, quiet)
	if err != nil {
		t.Fatal(err)
	}
	handler := tracing.Handler(http.NotFoundHandler())
	for _, path := range []string{"/healthz", "/readyz", "/metrics", "/else"} {
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("BREW", path, nil))
	}
	if err := tracing.Close(); err != nil {
		t.Fatal(err)
	}
	if all := double.Spans(); len(all) != 1 || all[0].Name != "_OTHER" {
		t.Errorf("spans %+v", all)
	}
}

func TestALogLineLeadsToItsSpan(t *testing.T) {
	double := otlptest.Start(t)
	setOTEL(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": double.HTTP})
	tracing, err := telemetry.OpenTracing(t.Context(), "v1", io.Discard, quiet)
	if err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	log := slog.New(tracing.LogHandler(slog.NewTextHandler(&logged, nil))).With("a", 1)
	request(tracing, telemetry.New(quiet), func(ctx context.Context) { log.InfoContext(ctx, "within") })
	log.Info("without")
	if err := tracing.Close(); err != nil {
		t.Fatal(err)
	}
	span := double.Spans()[0]
	within, without, _ := strings.Cut(logged.String(), "\n")
	if !strings.Contains(within, "a=1 trace_id="+span.Trace+" span_id="+span.ID) || strings.Contains(without, "trace_id") {
		t.Errorf("logged\n%s", &logged)
	}
}
