package app_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/telemetry/otlptest"
)

// clearOTEL makes a test say all that counts.
func clearOTEL(t *testing.T) {
	for _, name := range []string{
		"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL",
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
	} {
		t.Setenv(name, "") // so that it is put back
		os.Unsetenv(name)
	}
}

// What the caller of every request here says of itself.
const (
	callerTrace  = "4bf92f3577b34da6a3ce929d0e0e4736"
	callerSpan   = "00f067aa0ba902b7"
	callerParent = "00-" + callerTrace + "-" + callerSpan + "-01"
)

// traced is an HTTP client that somebody has instrumented.
type traced struct{ parent string }

func (c traced) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if c.parent != "" {
		r.Header.Set("Traceparent", c.parent)
		r.Header.Set("Tracestate", "vendor=1")
		r.Header.Set("Baggage", "user=hunter2-in-baggage")
	}
	return http.DefaultTransport.RoundTrip(r)
}

// serveTraced starts a server and gives a client whose requests belong to parent, if any.
func serveTraced(t *testing.T, parent string, log *slog.Logger) (*client.Client, *app.Server) {
	t.Helper()
	s, err := app.Start(t.Context(), testConfig(t), log, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c, err := client.New(s.URL, string(s.Key), client.WithHTTPClient(&http.Client{Transport: traced{parent}}))
	if err != nil {
		t.Fatal(err)
	}
	return c, s
}

func TestS2_36_S2_40_S2_41_S2_42_SpansReachACollectorUnderTheirCallersTrace(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			clearOTEL(t)
			double := otlptest.Start(t)
			endpoint := double.HTTP
			if protocol == "grpc" {
				endpoint = double.GRPC
			}
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
			t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
			t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=mine")
			t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=other")
			t.Setenv("OTEL_SERVICE_NAME", "my-cove")
			t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000") // nothing is sent before the server ends
			var logged bytes.Buffer
			c, s := serveTraced(t, callerParent, slog.New(slog.NewJSONHandler(&logged, nil)))

			sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base"})
			if err != nil {
				t.Fatal(err)
			}
			out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "echo $TRACEPARENT $TRACESTATE; exit 3"})
			if err != nil {
				t.Fatal(err)
			}
			if err := sb.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := sb.Exec(t.Context(), client.ExecRequest{Command: "true"}); client.KindOf(err) != client.Gone {
				t.Errorf("after its end: %v", err)
			}
			if n := len(double.Spans()); n != 0 {
				t.Errorf("%d spans came early", n)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}

			create, exec := double.One(t, "sandbox.create"), double.Named("sandbox.exec")
			if len(exec) != 2 {
				t.Fatalf("spans of commands: %+v", exec)
			}
			for name, span := range map[string]otlptest.Span{
				"POST /cove/v1/sandboxes": create, "POST /cove/v1/sandboxes/{id}/exec": exec[0], "DELETE /cove/v1/sandboxes/{id}": double.One(t, "sandbox.kill"),
			} {
				server := double.Named(name)[0]
				if server.Trace != callerTrace || server.Parent != callerSpan || server.Kind != "SPAN_KIND_SERVER" || server.State != "vendor=1" {
					t.Errorf("%s does not belong to its caller: %+v", name, server)
				}
				if span.Trace != callerTrace || span.Parent != server.ID || span.Begun.Before(server.Begun) || span.Ended.After(server.Ended) {
					t.Errorf("%s is not within %s: %+v", span.Name, name, span)
				}
				if _, route, _ := strings.Cut(name, " "); server.Attributes["http.route"] != route || server.Attributes["cove.request"] == "" {
					t.Errorf("%s says %v", name, server.Attributes)
				}
			}
			if start := double.One(t, "driver.start"); start.Parent != create.ID {
				t.Errorf("driver.start is not within sandbox.create: %+v", start)
			}
			wantAttributes(t, create, map[string]any{
				"cove.tenant": app.Tenant, "cove.sandbox.id": sb.ID, "cove.template": "base", "cove.created": true,
			})
			wantAttributes(t, exec[0], map[string]any{
				"cove.tenant": app.Tenant, "cove.sandbox.id": sb.ID, "sandbox.id": sb.ID, "sandbox.template": "base", "sandbox.driver": "inproc", "sandbox.kind": "command",
				"sandbox.code_length": int64(len("echo $TRACEPARENT $TRACESTATE; exit 3")), "sandbox.timeout_s": 0.0, "sandbox.mem_limit_mb": int64(512),
				"sandbox.outcome": "error", "sandbox.exit_code": int64(3), "sandbox.timed_out": false, "sandbox.stdout_bytes": int64(len(out.Stdout)),
				"sandbox.stderr_preview": "", "error.type": "error",
			}, "sandbox.cpu_time_s", "sandbox.max_rss_bytes")
			wantAttributes(t, exec[1], map[string]any{
				"cove.tenant": app.Tenant, "cove.sandbox.id": sb.ID, "sandbox.id": sb.ID, "sandbox.template": "base", "sandbox.driver": "inproc", "sandbox.kind": "command",
				"sandbox.code_length": int64(len("true")), "sandbox.timeout_s": 0.0, "sandbox.mem_limit_mb": int64(512),
				"sandbox.timed_out": false, "sandbox.stdout_bytes": int64(0), "sandbox.stderr_preview": "", "error.type": "gone",
			})
			if !exec[0].Failed || !exec[1].Failed || create.Failed {
				t.Error("a span's status is not how it ended")
			}
			refused := double.Named("POST /cove/v1/sandboxes/{id}/exec")[1]
			if refused.Attributes["error.type"] != "gone" || refused.Attributes["http.response.status_code"] != int64(410) || refused.Failed {
				t.Errorf("the request that was refused: %+v", refused)
			}

			inside := "00-" + callerTrace + "-" + exec[0].ID + "-01 vendor=1\n"
			if out.Stdout != inside {
				t.Errorf("the command was told %q, want %q", out.Stdout, inside)
			}
			for key, want := range map[string]any{"service.name": "my-cove", "deployment.environment": "test", "service.version": "dev"} {
				if create.Resource[key] != want {
					t.Errorf("resource %s is %v, want %v", key, create.Resource[key], want)
				}
			}
			for _, h := range double.Headers() {
				if h.Get("X-Tenant") != "mine" {
					t.Errorf("headers %v", h)
				}
			}
			if bytes.Contains(double.Raw(), []byte("hunter2")) {
				t.Error("baggage is in a span")
			}
			wantLogged(t, logged.Bytes(), create.Trace, create.Parent)
		})
	}
}

// wantAttributes compares all attributes of a span; of those in also only the presence counts.
func wantAttributes(t *testing.T, s otlptest.Span, want map[string]any, also ...string) {
	t.Helper()
	for _, name := range also {
		v, ok := s.Attributes[name]
		if !ok {
			t.Errorf("%s has no %s", s.Name, name)
		}
		want[name] = v
	}
	if diff := cmp.Diff(want, s.Attributes); diff != "" {
		t.Errorf("attributes of %s (-want +got):\n%s", s.Name, diff)
	}
}

// wantLogged looks for the line of a request that leads to its span.
func wantLogged(t *testing.T, text []byte, trace, span string) {
	t.Helper()
	for line := range bytes.Lines(text) {
		var entry map[string]any
		if json.Unmarshal(line, &entry) == nil && entry["msg"] == "request" && entry["trace_id"] == trace && entry["span_id"] == span {
			return
		}
	}
	t.Errorf("no request is logged with span %s:\n%s", span, text)
}

func TestS2_63_SecretsAreInNoSpan(t *testing.T) {
	clearOTEL(t)
	double := otlptest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", double.HTTP)
	c, s := serveTraced(t, callerParent, quiet)
	const secret = "hunter2-of-the-caller"
	sb, err := c.Create(t.Context(), client.CreateRequest{
		Template: "python", Env: map[string]string{"TOKEN": secret}, Metadata: map[string]string{"note": secret}, Key: secret,
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := sb.Run(t.Context(), client.RunRequest{
		Code: "import os; print('" + secret + "', os.environ['MORE'], os.environ['TRACEPARENT'])", Env: map[string]string{"MORE": secret},
	})
	if err != nil || !strings.Contains(out.Stdout, secret+" "+secret+" 00-"+callerTrace+"-") {
		t.Fatalf("the cell said %+v, %v", out, err)
	}
	// Whatever a request gets wrong, and whatever its run says: these are the ways in which a sentence could quote it.
	failing := []func() error{
		func() error {
			_, err := sb.Run(t.Context(), client.RunRequest{Code: "raise ValueError('" + secret + "')"})
			return err
		},
		func() error {
			_, err := sb.Run(t.Context(), client.RunRequest{Code: "1", Kernel: secret + " "})
			return err
		},
		func() error {
			_, err := sb.Run(t.Context(), client.RunRequest{Code: "1", Cwd: "/" + secret})
			return err
		},
		func() error {
			_, err := sb.Exec(t.Context(), client.ExecRequest{Argv: []string{"/" + secret, secret}, Env: map[string]string{"TOKEN": secret}})
			return err
		},
		func() error {
			_, err := sb.Exec(t.Context(), client.ExecRequest{Command: "cat; exit 1", Stdin: secret, Tag: secret, Cwd: "/tmp"})
			return err
		},
		func() error {
			_, err := sb.Exec(t.Context(), client.ExecRequest{Command: "true", User: secret})
			return err
		},
		func() error {
			_, err := sb.Files().Stat(t.Context(), "/"+secret)
			return err
		},
		func() error {
			_, err := c.Create(t.Context(), client.CreateRequest{Template: "base", Env: map[string]string{"TOKEN=" + secret: ""}})
			return err
		},
		func() error {
			_, err := c.Create(t.Context(), client.CreateRequest{Template: "base", Storage: secret})
			return err
		},
		func() error {
			_, err := c.Create(t.Context(), client.CreateRequest{Template: secret})
			return err
		},
		func() error {
			_, err := c.Get(t.Context(), "sb/../"+strings.ToUpper(secret)+"?"+secret)
			return err
		},
	}
	refused := 0
	for _, f := range failing {
		if f() != nil {
			refused++
		}
	}
	if refused < 4 {
		t.Errorf("only %d of these requests were refused: the test has lost its point", refused)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if len(double.Named("sandbox.exec")) < 3 || len(double.Named("sandbox.create")) != 4 {
		t.Fatalf("these are not all spans: %+v", double.Spans())
	}
	if raw := bytes.ToLower(double.Raw()); bytes.Contains(raw, []byte("hunter2")) {
		t.Errorf("a secret was exported: %q", around(raw, "hunter2"))
	}
	if bytes.Contains(double.Raw(), []byte(string(s.Key))) {
		t.Error("the API key was exported")
	}
	cell := double.Named("sandbox.exec")[0]
	wantAttributes(t, cell, map[string]any{
		"cove.tenant": app.Tenant, "cove.sandbox.id": sb.ID, "sandbox.id": sb.ID, "sandbox.template": "python", "sandbox.driver": "inproc", "sandbox.kind": "cell", "sandbox.language": "python",
		"sandbox.timeout_s": 0.0, "sandbox.mem_limit_mb": int64(512), "sandbox.outcome": "ok", "sandbox.exit_code": int64(0), "sandbox.timed_out": false,
		"sandbox.stdout_bytes": int64(len(out.Stdout)), "sandbox.stderr_preview": "",
	}, "sandbox.code_length", "sandbox.cpu_time_s", "sandbox.max_rss_bytes")
	for _, span := range double.Spans() {
		if span.Events != 0 || span.Links != 0 || span.DroppedAttributeCount != 0 {
			t.Errorf("%s has more than was looked at: %+v", span.Name, span)
		}
	}
}

func around(text []byte, word string) []byte {
	at := bytes.Index(text, []byte(word))
	return text[max(0, at-80):min(len(text), at+80)]
}

func TestARunIsToldItsTraceOnlyWhenTheCallerHasOne(t *testing.T) {
	clearOTEL(t)
	double := otlptest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", double.HTTP)
	c, s := serveTraced(t, "", quiet)
	sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "echo [$TRACEPARENT]"})
	if err != nil || out.Stdout != "[]\n" {
		t.Errorf("the command was told %q, %v", out.Stdout, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if server := double.One(t, "POST /cove/v1/sandboxes"); server.Parent != "" {
		t.Errorf("a request without a caller's span has a parent: %+v", server)
	}
}

func TestTracesAreOffUnlessTheStandardVariablesAsk(t *testing.T) {
	double := otlptest.Start(t)
	for name, set := range map[string]map[string]string{
		"nothing is said":         {},
		"only a name is given":    {"OTEL_SERVICE_NAME": "cove"},
		"the SDK is disabled":     {"OTEL_EXPORTER_OTLP_ENDPOINT": double.HTTP, "OTEL_SDK_DISABLED": "true"},
		"the exporter is none":    {"OTEL_EXPORTER_OTLP_ENDPOINT": double.HTTP, "OTEL_TRACES_EXPORTER": "none"},
		"nothing is sampled":      {"OTEL_EXPORTER_OTLP_ENDPOINT": double.HTTP, "OTEL_TRACES_SAMPLER": "always_off"},
		"the caller samples none": {"OTEL_EXPORTER_OTLP_ENDPOINT": double.HTTP, "OTEL_TRACES_SAMPLER": "parentbased_always_on"},
	} {
		t.Run(name, func(t *testing.T) {
			clearOTEL(t)
			for k, v := range set {
				t.Setenv(k, v)
			}
			c, s := serveTraced(t, strings.TrimSuffix(callerParent, "1")+"0", quiet) // not sampled
			sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base"})
			if err != nil {
				t.Fatal(err)
			}
			if out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "true"}); err != nil || out.ExitCode != 0 {
				t.Errorf("a command: %+v, %v", out, err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if all := double.Spans(); len(all) != 0 {
				t.Errorf("spans came: %+v", all)
			}
		})
	}
}

func TestAnEndpointThatIsNoURLIsRefusedAtTheStart(t *testing.T) {
	for _, endpoint := range []string{"collector:4318", "127.0.0.1:4318", "http://", "ftp://x"} {
		clearOTEL(t)
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
		_, err := app.Start(t.Context(), testConfig(t), quiet, func(string) {})
		if err == nil || !strings.Contains(err.Error(), "OTEL_EXPORTER_OTLP_ENDPOINT: want a URL such as") {
			t.Errorf("%s: %v", endpoint, err)
		}
	}
}

func TestACollectorThatIsAwayIsNobodysFailure(t *testing.T) {
	clearOTEL(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1") // nobody listens there
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
	c, s := serveTraced(t, "", quiet)
	if _, err := c.Create(t.Context(), client.CreateRequest{Template: "base"}); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
