package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/telemetry/otlptest"
)

var seriesLine = regexp.MustCompile(`(?m)^([a-z0-9_]+)(\{.*\})? (\S+)$`)

// scraped are the series that Prometheus sees, histograms by their count, with labels in the order of their names.
func scraped(text string) map[string]float64 {
	all := map[string]float64{}
	for _, m := range seriesLine.FindAllStringSubmatch(text, -1) {
		name, bucket := strings.CutSuffix(m[1], "_bucket")
		if bucket || strings.HasSuffix(name, "_sum") || strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "cove_host_") {
			continue // what changes between two looks is left out
		}
		labels := strings.Split(strings.Trim(m[2], "{}"), ",")
		slices.Sort(labels)
		key := strings.TrimSuffix(name, "_count")
		if m[2] != "" {
			key += "{" + strings.Join(labels, ",") + "}"
		}
		all[key], _ = strconv.ParseFloat(m[3], 64)
	}
	return all
}

func TestS4_128_MetricsOverOTLPAreThoseOfPrometheus(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			double := otlptest.Start(t)
			setOTEL(t, map[string]string{
				"OTEL_EXPORTER_OTLP_ENDPOINT": map[string]string{"http/protobuf": double.HTTP, "grpc": double.GRPC}[protocol], "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
				"OTEL_METRIC_EXPORT_INTERVAL": "3600000", "OTEL_SERVICE_NAME": "my-cove", "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=mine",
			})
			o := telemetry.New(quiet)
			o.Watch(sources())
			o.WatchSessions(func(context.Context) (map[string]int, error) { return map[string]int{"running": 2, "stopped": 1}, nil })
			push, err := telemetry.OpenPush(t.Context(), o, "v1", io.Discard, quiet)
			if err != nil {
				t.Fatal(err)
			}
			sb := sandbox.Sandbox{ID: "a", Template: "python"}
			o.Created(sb, 4*time.Millisecond, nil)
			o.RunStarted(sb, sandbox.RunSnippet)
			o.RunEnded(sb, sandbox.RunSnippet, "ok", 30*time.Millisecond)
			o.ArtifactKept(100, false)
			want := scraped(scrape(o))
			if err := push.Close(); err != nil { // which sends what there is
				t.Fatal(err)
			}
			got := map[string]float64{}
			for name, m := range double.Metrics() {
				if m.Resource["service.name"] != "my-cove" || m.Description == "" {
					t.Errorf("%s comes with %v and %q", name, m.Resource, m.Description)
				}
				for labels, v := range m.Series {
					got[name+labels] = v
				}
			}
			maps.DeleteFunc(got, func(name string, _ float64) bool {
				return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "cove_host_")
			})
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-scraped +sent:\n%s", diff)
			}
			created := double.Metrics()["cove_create_seconds"]
			key := `{template="python"}`
			if created.Type != "histogram" || created.Sums[key] != .004 || created.Buckets[key][3] != 1 || created.Bounds[3] != .005 {
				t.Errorf("the histogram came as %+v", created)
			}
			for name, kind := range map[string]string{
				"process_cpu_seconds_total": "counter", "cove_creates_total": "counter", "cove_sandboxes": "gauge", "cove_host_cpus": "gauge",
			} {
				if got := double.Metrics()[name].Type; got != kind {
					t.Errorf("%s is a %s, want a %s", name, got, kind)
				}
			}
			for _, h := range double.Headers() {
				if h.Get("X-Tenant") != "mine" {
					t.Errorf("headers %v", h)
				}
			}
		})
	}
}

func TestMetricsAreSentAgainAndAgain(t *testing.T) {
	double := otlptest.Start(t)
	setOTEL(t, map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": double.HTTP + "/v1/metrics", "OTEL_METRIC_EXPORT_INTERVAL": "20"})
	o := telemetry.New(quiet)
	push, err := telemetry.OpenPush(t.Context(), o, "v1", io.Discard, quiet)
	if err != nil {
		t.Fatal(err)
	}
	for n := range 3 {
		o.ArtifactKept(1, true)
		double.Await(t, "count", func() bool {
			return double.Metrics()["cove_artifacts_total"].Series[`{stored="shared"}`] == float64(n+1)
		})
	}
	if err := push.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestWhoAsksForNoMetricsGetsNone(t *testing.T) {
	for claim, set := range map[string]map[string]string{
		"nothing is set":               nil,
		"none is asked for":            {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
		"prometheus, which scrapes":    {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
		"the endpoint is of traces":    {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"},
		"everything is off":            {"OTEL_SDK_DISABLED": "true", "OTEL_METRICS_EXPORTER": "otlp"},
		"the endpoint is of the other": {"OTEL_TRACES_EXPORTER": "otlp"},
	} {
		setOTEL(t, set)
		push, err := telemetry.OpenPush(t.Context(), telemetry.New(quiet), "v1", io.Discard, quiet)
		if push != nil || err != nil || push.Close() != nil {
			t.Errorf("%s: %v, %v", claim, push, err)
		}
	}
}

func TestMetricsThatCannotBeSentStopNothingButAWrongAddressDoes(t *testing.T) {
	setOTEL(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})
	if _, err := telemetry.OpenPush(t.Context(), telemetry.New(quiet), "v1", io.Discard, quiet); err == nil || !strings.Contains(err.Error(), "want a URL") {
		t.Errorf("an address that is no URL: %v", err)
	}
	setOTEL(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "100"})
	var logged bytes.Buffer
	push, err := telemetry.OpenPush(t.Context(), telemetry.New(quiet), "v1", io.Discard, slog.New(slog.NewTextHandler(&logged, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if err := push.Close(); err != nil || !strings.Contains(logged.String(), "may be lost") {
		t.Errorf("without a collector: %v, logged %s", err, &logged)
	}
}

func TestTheConsoleExporterWritesMetrics(t *testing.T) {
	setOTEL(t, map[string]string{"OTEL_METRICS_EXPORTER": "console"})
	var out bytes.Buffer
	push, err := telemetry.OpenPush(t.Context(), telemetry.New(quiet), "v1", &out, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if err := push.Close(); err != nil {
		t.Fatal(err)
	}
	var written struct {
		ScopeMetrics []struct{ Metrics []struct{ Name string } }
	}
	if err := json.Unmarshal(out.Bytes(), &written); err != nil || len(written.ScopeMetrics) != 1 || len(written.ScopeMetrics[0].Metrics) == 0 {
		t.Errorf("it wrote %.300s: %v", out.Bytes(), err)
	}
}

func TestWhatIsKeptIsCounted(t *testing.T) {
	o := telemetry.New(quiet)
	o.ArtifactKept(100, false)
	o.ArtifactKept(50, true)
	o.ArtifactRejected("too_large")
	o.ArtifactRejected("by\"caller")
	o.DatasetStaged(1<<30, false)
	o.DatasetRejected("tenant_quota")
	o.LinkRefused("expired")
	o.WatchSessions(func(context.Context) (map[string]int, error) { return map[string]int{"running": 3}, nil })
	wantLines(t, scrape(o),
		`cove_artifacts_total{stored="new"} 1`, `cove_artifacts_total{stored="shared"} 1`,
		`cove_artifact_bytes_total{stored="new"} 100`, `cove_artifact_bytes_total{stored="shared"} 50`,
		`cove_artifacts_rejected_total{reason="too_large"} 1`, `cove_artifacts_rejected_total{reason="other"} 1`, `cove_artifacts_rejected_total{reason="changed"} 0`,
		`cove_datasets_total{stored="new"} 1`, `cove_dataset_bytes_total{stored="new"} 1073741824`, `cove_datasets_rejected_total{reason="tenant_quota"} 1`,
		`cove_links_refused_total{reason="expired"} 1`, `cove_links_refused_total{reason="signature"} 0`,
		`cove_sessions{state="running"} 3`,
	)
	away := telemetry.New(quiet)
	away.WatchSessions(func(context.Context) (map[string]int, error) { return nil, errors.New("database is away") })
	if strings.Contains(scrape(away), "\ncove_sessions{") {
		t.Error("what nobody could tell is told")
	}
}
