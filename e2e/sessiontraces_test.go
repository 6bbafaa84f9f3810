package e2e_test

import (
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/telemetry/otlptest"
)

// ask sends one request as part of the agent's span and returns what must be a success.
func (s *server) ask(t *testing.T, method, path, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+"/cove/v1"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", s.key)
	req.Header.Set("Accept", "application/json")
	resp, err := (&http.Client{Transport: within{http.DefaultTransport}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode >= 300 {
		t.Fatalf("%s %s: %d %s %v", method, path, resp.StatusCode, text, err)
	}
	return string(text)
}

func TestS2_24_S2_25_ARunOfASessionIsOneSpan(t *testing.T) {
	double := otlptest.Start(t)
	s := newServer(t, "OTEL_EXPORTER_OTLP_ENDPOINT="+double.HTTP)
	const code = "open('/session/artifacts/hunter2.txt', 'w').write('hunter2'); print('hunter2')"
	s.ask(t, "PUT", "/sessions/thread-1", `{"datasets": {"access": "api"}}`)
	s.ask(t, "PUT", "/sessions/thread-1/datasets/hunter2.csv", "a,b\n1,2\n")
	s.ask(t, "POST", "/sessions/thread-1/run", `{"code": "`+code+`", "timeout_seconds": 30}`)
	s.ask(t, "PUT", "/sessions/thread-1", `{}`)
	s.ask(t, "DELETE", "/sessions/thread-1", "")
	s.signal(t, syscall.SIGTERM)

	run := double.One(t, "sandbox.exec")
	want := map[string]any{
		"cove.tenant": "default", "cove.sandbox.id": run.Attributes["sandbox.id"], "sandbox.template": "python", "sandbox.driver": "native",
		"sandbox.session": "thread-1", "sandbox.kind": "cell", "sandbox.language": "python", "sandbox.outcome": "ok",
		"sandbox.code_length": int64(len(code)), "sandbox.timeout_s": 30.0, "sandbox.exit_code": int64(0), "sandbox.timed_out": false,
		"sandbox.stdout_bytes": int64(len("hunter2\n")), "sandbox.stderr_preview": "",
	}
	for _, name := range []string{"sandbox.id", "sandbox.mem_limit_mb", "sandbox.cpu_time_s", "sandbox.max_rss_bytes"} {
		if want[name] = run.Attributes[name]; want[name] == nil {
			t.Errorf("there is no %s", name)
		}
	}
	if diff := cmp.Diff(want, run.Attributes); diff != "" || !run.OK {
		t.Errorf("the run (-want +got):\n%s", diff)
	}
	kept := double.One(t, "sandbox.artifact.ingest").Attributes
	if kept["cove.artifacts.kept"] != int64(1) || kept["cove.artifacts.rejected"] != int64(0) || kept["cove.bytes"] != int64(7) || kept["sandbox.session"] != "thread-1" {
		t.Errorf("what was kept: %v", kept)
	}
	if staged := double.One(t, "sandbox.dataset.stage").Attributes; staged["cove.bytes"] != int64(8) {
		t.Errorf("what was staged: %v", staged)
	}
	opened := double.Named("session.open")
	if len(opened) != 2 || opened[0].Attributes["cove.created"] != true || opened[1].Attributes["cove.created"] != false || opened[1].Attributes["sandbox.session"] != "thread-1" {
		t.Errorf("what was opened: %+v", opened)
	}
	byID := map[string]otlptest.Span{}
	for _, span := range double.Spans() {
		byID[span.ID] = span
	}
	for _, name := range []string{"sandbox.exec", "sandbox.artifact.ingest"} {
		if got, want := line(byID, double.One(t, name)), agentSpan+" > POST /cove/v1/sessions/{key}/run > "+name; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if strings.Contains(string(double.Raw()), "hunter2") {
		t.Error("S2.63: code, output or the name of a file was exported")
	}
	for name, want := range map[string]map[string]float64{
		"cove_artifacts_total": {`{stored="new"}`: 1}, "cove_artifact_bytes_total": {`{stored="new"}`: 7},
		"cove_datasets_total": {`{stored="new"}`: 1}, "cove_dataset_bytes_total": {`{stored="new"}`: 8},
	} {
		for labels, n := range want {
			if got := double.Metrics()[name].Series[labels]; got != n {
				t.Errorf("%s%s is %v, want %v", name, labels, got, n)
			}
		}
	}
}
