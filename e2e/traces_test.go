package e2e_test

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/telemetry/otlptest"
)

// TestTraces follows a session of an agent from its own span down to the driver. The spans go straight to a double of a
// collector; the test below sends them through a real one, which takes minutes to build.
func TestTraces(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			double := otlptest.Start(t)
			follow(t, double, protocol, map[string]string{"http/protobuf": double.HTTP, "grpc": double.GRPC}[protocol])
		})
	}
}

// TestS2_40_S2_41_S2_59_TracesThroughACollector uses the collector's configuration that comes with the compose file.
func TestS2_40_S2_41_S2_59_TracesThroughACollector(t *testing.T) {
	if os.Getenv("COVE_E2E_FULL") == "" {
		t.Skip("builds a collector: set COVE_E2E_FULL=1")
	}
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			double := otlptest.Start(t)
			web, rpc := startCollector(t, double.HTTP)
			follow(t, double, protocol, map[string]string{"http/protobuf": web, "grpc": rpc}[protocol])
		})
	}
}

// The span that the agent of the test has open while it works.
const (
	agentTrace = "0af7651916cd43dd8448eb211c80319c"
	agentSpan  = "b7ad6b7169203331"
)

// within sends every request as part of the agent's span.
type within struct{ http.RoundTripper }

func (w within) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("traceparent", "00-"+agentTrace+"-"+agentSpan+"-01")
	return w.RoundTripper.RoundTrip(r)
}

const tracedSecret = "hunter2-in-the-sandbox"

func follow(t *testing.T, double *otlptest.Collector, protocol, endpoint string) {
	s := newServer(t, "OTEL_EXPORTER_OTLP_ENDPOINT="+endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL="+protocol, "OTEL_EXPORTER_OTLP_HEADERS=authorization="+tracedSecret)
	c, err := client.New(s.url, s.key, client.WithHTTPClient(&http.Client{Transport: within{http.DefaultTransport}}))
	if err != nil {
		t.Fatal(err)
	}
	s.Client = c
	sb := s.create(t, client.CreateRequest{Env: map[string]string{"TOKEN": tracedSecret}})
	sb.value("token = '" + tracedSecret + "'")
	told := sb.value("import os; os.environ['TRACEPARENT']")
	forks, err := sb.Fork(t.Context(), client.ForkRequest{Count: 2})
	if err != nil {
		t.Fatal(err)
	}
	yes := true
	if err := sb.Pause(t.Context(), client.PauseRequest{AutoResume: &yes}); err != nil {
		t.Fatal(err)
	}
	sb.sh("echo " + tracedSecret) // wakes it
	if err := sb.Pause(t.Context(), client.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := sb.Resume(t.Context(), client.ResumeRequest{}); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("traced-%d", time.Now().UnixNano())
	if _, err := sb.Snapshot(t.Context(), client.SnapshotRequest{Name: name}); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveTemplate(t.Context(), name); err != nil {
		t.Error(err)
	}
	sb.kill()
	if _, err := sb.Fork(t.Context(), client.ForkRequest{}); client.KindOf(err) != client.Gone {
		t.Errorf("fork of what has ended: %v", err)
	}
	checkMetrics(t, s)
	s.signal(t, syscall.SIGTERM) // what was not sent yet is sent now

	double.Await(t, "failed fork", func() bool { return len(double.Named("sandbox.fork")) == 2 })
	spans := double.Spans()
	byID := map[string]otlptest.Span{}
	for _, span := range spans {
		byID[span.ID] = span
		if span.Trace != agentTrace {
			t.Errorf("%s is in another trace", span.Name)
		}
	}
	for _, want := range []string{
		"POST /cove/v1/sandboxes > sandbox.create > driver.start",
		"POST /cove/v1/sandboxes/{id}/run > sandbox.exec",
		"POST /cove/v1/sandboxes/{id}/fork > sandbox.fork > driver.fork",
		"POST /cove/v1/sandboxes/{id}/pause > sandbox.pause > driver.pause",
		"POST /cove/v1/sandboxes/{id}/exec > sandbox.exec > driver.resume",
		"POST /cove/v1/sandboxes/{id}/resume > sandbox.resume > driver.resume",
		"POST /cove/v1/sandboxes/{id}/snapshot > sandbox.snapshot > driver.snapshot",
		"DELETE /cove/v1/sandboxes/{id} > sandbox.kill > driver.stop",
	} {
		if !slices.ContainsFunc(spans, func(s otlptest.Span) bool { return line(byID, s) == agentSpan+" > "+want }) {
			t.Errorf("no %s", want)
		}
	}
	if t.Failed() {
		for _, span := range spans {
			t.Logf("%s %v", line(byID, span), span.Attributes)
		}
	}
	checkPushed(t, double)
	fork := double.Named("sandbox.fork")
	if a := fork[0].Attributes; a["cove.fork.count"] != int64(2) || a["cove.fork.stall_ms"] != forks.StallMS || a["cove.fork.memory_bytes"] != forks.MemoryBytes || a["cove.sandbox.id"] != sb.ID || fork[0].Failed {
		t.Errorf("the fork says %+v, its caller was told %+v", fork[0], forks)
	}
	if !fork[1].Failed || fork[1].Attributes["error.type"] != "gone" || !strings.Contains(fork[1].Description, "has ended: killed") {
		t.Errorf("the fork that came to nothing: %+v", fork[1])
	}
	cells := double.Named("sandbox.exec")
	if a := cells[0].Attributes; a["sandbox.id"] != sb.ID || a["sandbox.template"] != "python" || a["sandbox.driver"] != "native" || a["sandbox.kind"] != "cell" ||
		a["sandbox.exit_code"] != int64(0) || a["sandbox.mem_limit_mb"] != sb.Limits.MemoryBytes>>20 || a["sandbox.stderr_preview"] != "" || !cells[0].OK {
		t.Errorf("the first cell says %v", a)
	}
	if want := "'00-" + agentTrace + "-" + cells[1].ID + "-01'"; told != want {
		t.Errorf("the cell was told %s, want %s", told, want)
	}
	if bytes.Contains(double.Raw(), []byte("hunter2")) {
		t.Error("a secret was exported")
	}
}

// line is a span with those above it, the caller's first.
func line(byID map[string]otlptest.Span, s otlptest.Span) string {
	if parent, ok := byID[s.Parent]; ok {
		return line(byID, parent) + " > " + s.Name
	}
	return s.Parent + " > " + s.Name
}

// checkMetrics looks at what the session above has left in the counts.
func checkMetrics(t *testing.T, s *server) {
	t.Helper()
	now := s.metrics(t)
	for name, want := range map[string]float64{
		"cove_maker_up": 1, `cove_creates_total{template="python",outcome="ok"}`: 3, `cove_create_seconds_count{template="python"}`: 1,
		`cove_forks_total{outcome="ok"}`: 1, "cove_fork_children_total": 2, "cove_fork_stall_seconds_count": 1,
		`cove_pauses_total{outcome="ok"}`: 2, `cove_resumes_total{outcome="ok"}`: 2, "cove_pause_seconds_count": 2, "cove_resume_seconds_count": 2,
		`cove_sandboxes{state="running",template="python"}`: 2, "cove_maker_sandboxes": 2, `cove_ends_total{cause="killed"}`: 1,
		`cove_runs_total{kind="cell",outcome="ok"}`: 2, `cove_runs_total{kind="command",outcome="ok"}`: 1, `cove_errors_total{kind="gone"}`: 1,
	} {
		if got, ok := now[name]; !ok || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	for _, name := range []string{
		`cove_zygotes{template="python"}`, `cove_zygote_children{template="python"}`, `cove_zygote_memory_bytes{template="python"}`,
		"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total", "cove_host_memory_available_bytes", "cove_host_disk_free_bytes",
		"cove_sandboxes_memory_bytes", "cove_sandboxes_cpu_seconds_total",
	} {
		if now[name] <= 0 {
			t.Errorf("%s is %v", name, now[name])
		}
	}
}

// checkPushed looks at the metrics that the server sent when it ended: those that were scraped before, under the same names.
func checkPushed(t *testing.T, double *otlptest.Collector) {
	t.Helper()
	double.Await(t, "metrics", func() bool { return len(double.Metrics()) > 0 })
	now := double.Metrics()
	for name, want := range map[string]map[string]float64{
		"cove_creates_total":       {`{outcome="ok",template="python"}`: 3},
		"cove_create_seconds":      {`{template="python"}`: 1},
		"cove_fork_children_total": {"": 2},
		"cove_maker_up":            {"": 1},
	} {
		for labels, n := range want {
			if got, ok := now[name].Series[labels]; !ok || got != n {
				t.Errorf("%s%s came as %v, want %v", name, labels, got, n)
			}
		}
	}
	if got := now["cove_runs_total"].Series[`{kind="cell",outcome="ok"}`]; got != 2 {
		t.Errorf("%v cells were counted", got)
	}
}

// startCollector builds a real collector and runs it until the test ends; it hands on what it gets.
func startCollector(t *testing.T, to string) (web, rpc string) {
	t.Helper()
	dir := t.TempDir()
	program, config := filepath.Join(dir, "collector"), filepath.Join(dir, "config.yml")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Dir = "collector"
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build collector: %v\n%s", err, out)
	}
	web, rpc = freePort(t), freePort(t)
	shipped, err := os.ReadFile(filepath.Join("..", "deploy", "compose", "collector.yml"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("0.0.0.0:4318", web, "0.0.0.0:4317", rpc, "http://tempo:4318", to, "http://prometheus:9090/api/v1/otlp", to,
		"service:\n", "service:\n  telemetry: {metrics: {level: none}}\n").Replace(string(shipped))
	if strings.Count(text, to) != 2 || !strings.Contains(text, web) || !strings.Contains(text, rpc) {
		t.Fatalf("the configuration is not what this test knows:\n%s", text)
	}
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd := exec.Command(program, "--config", config)
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the collector said:\n%s", &said)
		}
	})
	for _, address := range []string{web, rpc} {
		eventually(t, "the collector listens", time.Minute, func() bool {
			c, err := net.Dial("tcp", address)
			if err == nil {
				c.Close()
			}
			return err == nil
		})
	}
	return "http://" + web, "http://" + rpc
}

func TestS2_59_TheComposeFileMountsWhatThereIs(t *testing.T) {
	dir := filepath.Join("..", "deploy", "compose")
	text, err := os.ReadFile(filepath.Join(dir, "observability.yml"))
	if err != nil {
		t.Fatal(err)
	}
	mounts := regexp.MustCompile(`(\.\.?/[a-z/.]+):/`).FindAllStringSubmatch(string(text), -1)
	if len(mounts) != 6 {
		t.Errorf("there are %d mounts: %v", len(mounts), mounts)
	}
	for _, m := range mounts {
		if _, err := os.Stat(filepath.Join(dir, m[1])); err != nil {
			t.Error(err)
		}
	}
	for _, port := range regexp.MustCompile(`"([0-9.]*:?)[0-9]+:[0-9]+"`).FindAllStringSubmatch(string(text), -1) {
		if port[1] != "127.0.0.1:" {
			t.Errorf("a port is open to others: %s", port[0])
		}
	}
}

// freePort is an address that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
