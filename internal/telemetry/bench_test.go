package telemetry_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/telemetry/otlptest"
)

// What a request pays before anybody answers it: without anything of this package, with metrics, with traces.
func BenchmarkRequest(b *testing.B) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /a/{id}/run", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	cfg := gateway.Config{Prefixes: map[string]http.Handler{"/a/": mux}, Metrics: http.NotFoundHandler(), Log: quiet}
	serve := func(b *testing.B, h http.Handler) {
		r := httptest.NewRequest("POST", "/a/1/run", nil)
		r.Header.Set("Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
		r.Header.Set("X-Request-Id", "r1")
		b.ReportAllocs()
		for b.Loop() {
			r.Pattern = ""
			h.ServeHTTP(httptest.NewRecorder(), r)
		}
	}
	b.Run("plain", func(b *testing.B) { serve(b, gateway.New(cfg)) })

	o := telemetry.New(quiet)
	cfg.Served = func(r *http.Request, a gateway.Answer) { o.Served(r, a.Request, a.Status, a.Received, a.Sent) }
	b.Run("metrics", func(b *testing.B) {
		var off *telemetry.Tracing
		serve(b, off.Handler(gateway.New(cfg)))
	})

	double := otlptest.Start(b)
	b.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", double.HTTP)
	b.Run("traces", func(b *testing.B) {
		on, err := telemetry.OpenTracing(b.Context(), "v1", io.Discard, quiet)
		if err != nil {
			b.Fatal(err)
		}
		defer on.Close()
		serve(b, on.Handler(gateway.New(cfg)))
	})
}
