package app_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/telemetry/otlptest"
)

// watched is a server whose spans come to a double as they end.
type watched struct {
	*client.Client
	double *otlptest.Collector
	server *app.Server
}

func watch(t *testing.T, capture bool) watched {
	t.Helper()
	clearOTEL(t)
	w := watched{double: otlptest.Start(t)}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", w.double.HTTP)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
	cfg := testConfig(t)
	cfg.Telemetry.CaptureOutput = capture
	var err error
	if w.server, err = app.Start(t.Context(), cfg, quiet, func(string) {}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.server.Close() })
	if w.Client, err = client.New(w.server.URL, string(w.server.Key), client.WithHTTPClient(&http.Client{Transport: traced{callerParent}})); err != nil {
		t.Fatal(err)
	}
	return w
}

// run does something that is one run, and gives its span.
func (w watched) run(t *testing.T, do func() error) otlptest.Span {
	t.Helper()
	before := len(w.double.Named("sandbox.exec"))
	if err := do(); err != nil {
		t.Fatal(err)
	}
	w.double.Await(t, "sandbox.exec", func() bool { return len(w.double.Named("sandbox.exec")) > before })
	all := w.double.Named("sandbox.exec")
	if len(all) != before+1 {
		t.Fatalf("one run is %d spans: %+v", len(all)-before, all[before:])
	}
	return all[before]
}

func (w watched) snippet(t *testing.T, req client.SnippetRequest) (client.SnippetResult, otlptest.Span) {
	t.Helper()
	var out client.SnippetResult
	req.Network = true // this driver cannot close one
	span := w.run(t, func() error {
		got, err := w.Snippet(t.Context(), req)
		if err == nil {
			out = *got
		}
		return err
	})
	return out, span
}

func TestS2_24_S2_25_S2_26_S2_27_S2_28_S2_29_S2_30_S2_33_S2_34_S2_35_S2_65_EachSnippetIsOneSpanWithTheSevenAttributes(t *testing.T) {
	w := watch(t, false)
	for claim, test := range map[string]struct {
		req         client.SnippetRequest
		exit        int64
		timedOut    bool
		description string
		outcome     string
	}{
		"S2.34 success is told":          {client.SnippetRequest{Code: "print('12345', '\u00e9')", TimeoutSeconds: 7.5, MemoryMB: 256}, 0, false, "", "ok"},
		"S2.33 so is an exception":       {client.SnippetRequest{Code: "print('12345', '\u00e9')\nraise ValueError('hunter2')"}, 1, false, "exited with status 1", "error"},
		"S2.28 and a status":             {client.SnippetRequest{Code: "print('12345', '\u00e9')\nimport sys; sys.exit(3)"}, 3, false, "exited with status 3", "error"},
		"S2.29 S2.33 and a lack of time": {client.SnippetRequest{Code: "print('12345', '\u00e9')\nwhile True: pass", TimeoutSeconds: 1.5}, -1, true, "timed out", "timeout"},
		"S2.28 and a signal":             {client.SnippetRequest{Code: "print('12345', '\u00e9')\nimport os; os.abort()"}, -6, false, "ended by SIGABRT", "killed"},
	} {
		t.Run(claim, func(t *testing.T) {
			begun := time.Now()
			out, span := w.snippet(t, test.req)
			if int64(out.ExitCode) != test.exit || out.TimedOut != test.timedOut || out.Stdout != "12345 \u00e9\n" {
				t.Errorf("the caller was told %+v", out)
			}
			timeout, memory := test.req.TimeoutSeconds, int64(test.req.MemoryMB)
			if timeout == 0 {
				timeout = 10
			}
			if memory == 0 {
				memory = 128
			}
			want := map[string]any{
				"cove.tenant": app.Tenant, "cove.sandbox.id": out.Sandbox, "sandbox.id": out.Sandbox, "sandbox.template": "python", "sandbox.driver": "inproc",
				"sandbox.kind": "snippet", "sandbox.language": "python", "sandbox.outcome": test.outcome,
				"sandbox.code_length": int64(utf8.RuneCountInString(test.req.Code)), "sandbox.timeout_s": timeout, "sandbox.mem_limit_mb": memory,
				"sandbox.exit_code": test.exit, "sandbox.timed_out": test.timedOut, "sandbox.stdout_bytes": int64(len(out.Stdout)), "sandbox.stderr_preview": "",
			}
			if test.outcome != "ok" {
				want["error.type"] = test.outcome
			}
			wantAttributes(t, span, want, "sandbox.cpu_time_s", "sandbox.max_rss_bytes")
			if span.OK != (test.outcome == "ok") || span.Failed == span.OK || span.Description != test.description {
				t.Errorf("its status: %+v", span)
			}
			if took := span.Ended.Sub(span.Begun); test.timedOut && (took < 1500*time.Millisecond || took > time.Since(begun)) {
				t.Errorf("S2.35: a run of 1.5 s is a span of %v", took)
			}
		})
	}
	if strings.Contains(string(w.double.Raw()), "hunter2") {
		t.Error("S2.63: what a run wrote is in a span")
	}
}

func TestS2_31_S2_33_S2_63_StderrIsInASpanOnlyWhereItIsAskedFor(t *testing.T) {
	w := watch(t, true)
	long := strings.Repeat("\u00e9", 300)
	for claim, test := range map[string]struct {
		do                   func() error
		preview, description string
	}{
		"a snippet that fails": {func() error {
			_, err := w.Snippet(t.Context(), client.SnippetRequest{Code: "import sys; sys.exit('" + long + "')", Network: true})
			return err
		}, strings.Repeat("\u00e9", 200), strings.Repeat("\u00e9", 120)},
		"a snippet that ends well": {func() error {
			_, err := w.Snippet(t.Context(), client.SnippetRequest{Code: "import sys; print('by the way', file=sys.stderr)", Network: true})
			return err
		}, "by the way\n", ""},
		"a cell that raises": {func() error { return w.cell(t, "raise ValueError('what it says')") }, "ValueError: what it says", "ValueError: what it says"},
		"no text": {func() error {
			_, err := w.Snippet(t.Context(), client.SnippetRequest{Code: "import os; os.write(2, b'\\xff\\xfe'); os._exit(1)", Network: true})
			return err
		}, "\uFFFD", "\uFFFD"},
	} {
		span := w.run(t, test.do)
		if span.Attributes["sandbox.stderr_preview"] != test.preview || span.Description != test.description {
			t.Errorf("%s: %q and %q", claim, span.Attributes["sandbox.stderr_preview"], span.Description)
		}
	}
}

// cell runs code in a kernel of a sandbox of its own.
func (w watched) cell(t *testing.T, code string) error {
	sb, err := w.Create(t.Context(), client.CreateRequest{Template: "python"})
	if err != nil {
		return err
	}
	_, err = sb.Run(t.Context(), client.RunRequest{Code: code, TimeoutSeconds: 20})
	return err
}

func TestS2_28_ACellHasAnExitCodeToo(t *testing.T) {
	w := watch(t, false)
	for code, want := range map[string]struct {
		exit     int64
		timedOut bool
	}{"1": {0, false}, "1/0": {1, false}, "import time; time.sleep(60)": {-1, true}} {
		sb, err := w.Create(t.Context(), client.CreateRequest{Template: "python"})
		if err != nil {
			t.Fatal(err)
		}
		span := w.run(t, func() error {
			_, err := sb.Run(t.Context(), client.RunRequest{Code: code, TimeoutSeconds: 1})
			return err
		})
		if a := span.Attributes; a["sandbox.exit_code"] != want.exit || a["sandbox.timed_out"] != want.timedOut || a["sandbox.timeout_s"] != 1.0 || a["sandbox.kind"] != "cell" {
			t.Errorf("%s: %v", code, a)
		}
	}
}

func TestS2_32_WhatWasAskedForIsInTheSpanOfARunThatCouldNotBegin(t *testing.T) {
	w := watch(t, false)
	sb, err := w.Create(t.Context(), client.CreateRequest{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	span := w.run(t, func() error {
		if _, err := sb.Exec(t.Context(), client.ExecRequest{Argv: []string{"/no/such"}, TimeoutSeconds: 2}); err == nil {
			t.Error("it ran")
		}
		return nil
	})
	if a := span.Attributes; a["sandbox.code_length"] != int64(8) || a["sandbox.timeout_s"] != 2.0 || a["sandbox.mem_limit_mb"] != int64(512) || !span.Failed {
		t.Errorf("it says %v", a)
	}
}

func TestS2_61_S2_62_ParallelSnippetsAreSiblingsAndOverlap(t *testing.T) {
	w := watch(t, false)
	const n = 4
	here := t.TempDir() // the sandboxes of this driver see the host's files
	var all sync.WaitGroup
	for i := range n {
		code := fmt.Sprintf("import os, time\nopen('%s/%d', 'w').close()\nwhile len(os.listdir('%[1]s')) < %[3]d: time.sleep(0.01)", here, i, n)
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			out, err := w.Snippet(ctx, client.SnippetRequest{Code: code, TimeoutSeconds: 120, Network: true})
			if err != nil || out.ExitCode != 0 {
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
	all.Wait()
	w.double.Await(t, "all spans", func() bool {
		return len(w.double.Named("sandbox.exec")) == n && len(w.double.Named("POST /cove/v1/snippets")) == n
	})
	requests, runs := w.double.Named("POST /cove/v1/snippets"), w.double.Named("sandbox.exec")
	latest, first := runs[0].Begun, runs[0].Ended
	for i := range n {
		if requests[i].Trace != callerTrace || requests[i].Parent != callerSpan || runs[i].Trace != callerTrace {
			t.Errorf("a run is not of its caller's span: %+v below %+v", runs[i], requests[i])
		}
		if runs[i].Begun.After(latest) {
			latest = runs[i].Begun
		}
		if runs[i].Ended.Before(first) {
			first = runs[i].Ended
		}
	}
	if !latest.Before(first) {
		t.Errorf("the last began %v after the first had ended", latest.Sub(first))
	}
}

func TestS2_24_EachRunIsOneSpanThroughEveryDialect(t *testing.T) {
	clearOTEL(t)
	double := otlptest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", double.HTTP)
	s := startE2B(t, testConfig(t), nil)
	headers := func(more ...string) map[string]string {
		all := map[string]string{"Traceparent": callerParent, "X-API-Key": string(s.Key)}
		for i := 0; i < len(more); i += 2 {
			all[more[i]] = more[i+1]
		}
		return all
	}
	e2b := s.create(t, s.URL)
	open := s.createOpen(t, "python", map[string]string{"OPEN-SANDBOX-API-KEY": string(s.Key)})
	runs := []struct {
		path, body string
		headers    map[string]string
		kind       string
		length     int64
	}{
		{"/execute", `{"code": "print(10)"}`, headers("E2b-Sandbox-Id", e2b.ID, "E2b-Sandbox-Port", "49999", "X-Access-Token", e2b.Token), "cell", 9},
		{"/sandboxes/" + open + "/proxy/44772/command", `{"command": "echo 1"}`, headers(), "command", 6},
		{"/sandboxes/" + open + "/proxy/44772/code", `{"code": "print(1)", "context": {"language": "python"}}`, headers(), "cell", 8},
		{"/cove/v1/sandboxes/" + open + "/exec", `{"command": "true"}`, headers(), "command", 4},
		{"/cove/v1/sandboxes/" + open + "/run", `{"code": "1"}`, headers(), "cell", 1},
	}
	for _, r := range runs {
		if resp, body := s.ask(t, "POST", s.URL+r.path, r.body, r.headers); resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s", r.path, resp.StatusCode, body)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	var spans []otlptest.Span
	for _, span := range double.Named("sandbox.exec") {
		if span.Trace == callerTrace { // an image's own program is a run as well, but nobody's who asked now
			spans = append(spans, span)
		}
	}
	if len(spans) != len(runs) {
		t.Fatalf("%d runs are %d spans: %+v", len(runs), len(spans), spans)
	}
	for i, r := range runs {
		if a := spans[i].Attributes; a["sandbox.kind"] != r.kind || a["sandbox.code_length"] != r.length || a["sandbox.exit_code"] != int64(0) || !spans[i].OK {
			t.Errorf("%s: %v", r.path, a)
		}
	}
}

func TestS2_36_ARunIsToldItsCallersTraceAlsoByAServerThatMakesNoSpans(t *testing.T) {
	clearOTEL(t)
	c, _ := serveTraced(t, callerParent, quiet)
	sb, err := c.Create(t.Context(), client.CreateRequest{Template: "python"})
	if err != nil {
		t.Fatal(err)
	}
	out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "echo $TRACEPARENT $TRACESTATE"})
	if want := callerParent + " vendor=1\n"; err != nil || out.Stdout != want {
		t.Errorf("a command was told %q, %v", out.Stdout, err)
	}
	out, err = sb.Run(t.Context(), client.RunRequest{Code: "import os; print(os.environ.get('TRACEPARENT'))"})
	if err != nil || out.Stdout != callerParent+"\n" {
		t.Errorf("a cell was told %q, %v", out.Stdout, err)
	}
	out, err = sb.Exec(t.Context(), client.ExecRequest{Command: "echo [$TRACEPARENT]", Env: map[string]string{"TRACEPARENT": ""}, CleanEnv: true})
	if err != nil || out.Stdout != "[]\n" {
		t.Errorf("a clean environment has %q, %v", out.Stdout, err)
	}
}
