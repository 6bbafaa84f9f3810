package edge_test

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/edge"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/sandbox"
)

const (
	toEnvd        = "E2b-Sandbox-Port: 49983"
	toInterpreter = "E2b-Sandbox-Port: 49999"
)

func to(id string) string { return "E2b-Sandbox-Id: " + id }

func TestASandboxIsFoundByHostHeaderOrPath(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	for _, c := range []struct {
		name, path string
		headers    []string
		want       string
	}{
		{"host", "/x", []string{"Host: 49983-sba.cove.test"}, "envd /x sba of acme"},
		{"host with a port", "/x", []string{"Host: 49999-sba.cove.test:7443"}, "interpreter /x sba of acme"},
		{"host with a client", "/x", []string{"Host: 49983-sba-6532622b.cove.test"}, "envd /x sba of acme"},
		{"host in capitals", "/x", []string{"Host: 49983-SBA.Cove.Test."}, "envd /x sba of acme"},
		{"localhost", "/x", []string{"Host: 49983-sba.localhost:7070"}, "envd /x sba of acme"},
		{"host before headers", "/x", []string{"Host: 49983-sba.cove.test", to("other"), toInterpreter}, "envd /x sba of acme"},
		{"headers", "/cove/v1/x", []string{to("sba"), toEnvd}, "envd /cove/v1/x sba of acme"},
		{"headers with a client", "/x", []string{to("sba-c1"), toInterpreter}, "interpreter /x sba of acme"},
		{"path", "/kruise/sba/49983/x/y", nil, "envd /x/y sba of acme"},
		{"path without a rest", "/kruise/sba/49983", nil, "envd / sba of acme"},
		{"control plane", "/kruise/api/sandboxes", nil, "elsewhere"},
		{"api host", "/sandboxes", []string{"Host: api.cove.test"}, "elsewhere"},
		{"another domain", "/sandboxes", []string{"Host: 49983-sba.example.com"}, "elsewhere"},
		{"a label below", "/sandboxes", []string{"Host: 49983-sba.x.cove.test"}, "elsewhere"},
		{"no port", "/x", []string{to("sba")}, `{"sandboxId":"sba","message":"header E2b-Sandbox-Port is missing or not a port","code":400}`},
		{"no id", "/x", []string{to("../x"), toEnvd}, `{"code":400,"message":"header E2b-Sandbox-Id is not the id of a sandbox"}`},
		{"no such path", "/kruise/sba", nil, `{"code":400,"message":"want /kruise/{sandbox}/{port}/…"}`},
	} {
		if got := w.ask(t, "GET", c.path, "", c.headers...); got.body != c.want {
			t.Errorf("%s: %d %s, want %s", c.name, got.status, got.body, c.want)
		}
	}
}

func TestConnect_WithTheHeadersOfEnvd(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	for _, c := range []struct {
		name, method, path string
		headers            []string
		want               string
	}{
		{"the control plane's", "POST", "/sandboxes/sba/connect", []string{to("sba"), toEnvd}, "elsewhere"},
		{"its second version", "POST", "/v2/sandboxes/sba/connect", []string{to("sba"), toEnvd}, "elsewhere"},
		{"below its other path", "POST", "/kruise/api/sandboxes/sba/connect", []string{to("sba"), toEnvd}, "elsewhere"},
		{"another sandbox", "POST", "/sandboxes/sbb/connect", []string{to("sba"), toEnvd}, "envd /sandboxes/sbb/connect sba of acme"},
		{"another port", "POST", "/sandboxes/sba/connect", []string{to("sba"), toInterpreter}, "interpreter /sandboxes/sba/connect sba of acme"},
		{"another method", "GET", "/sandboxes/sba/connect", []string{to("sba"), toEnvd}, "envd /sandboxes/sba/connect sba of acme"},
		{"another path", "POST", "/sandboxes/sba/pause", []string{to("sba"), toEnvd}, "envd /sandboxes/sba/pause sba of acme"},
		{"a host that names the sandbox", "POST", "/sandboxes/sba/connect", []string{"Host: 49983-sba.cove.test", to("sba"), toEnvd}, "envd /sandboxes/sba/connect sba of acme"},
	} {
		if got := w.ask(t, c.method, c.path, "", c.headers...); got.body != c.want {
			t.Errorf("%s: %d %s, want %s", c.name, got.status, got.body, c.want)
		}
	}
}

func TestASandboxThatIsNotThereIsTheSameOnEveryPort(t *testing.T) {
	w := newWorld(t, nil)
	pausedFor := func(change func(*sandbox.Sandbox)) func(*sandbox.Sandbox) {
		return func(sb *sandbox.Sandbox) {
			sb.State = sandbox.StatePaused
			change(sb)
		}
	}
	w.domain.add("sbpaused", target.Options{}, pausedFor(func(*sandbox.Sandbox) {}))
	w.domain.add("sbcold", target.Options{}, pausedFor(func(sb *sandbox.Sandbox) { sb.AutoResume, sb.Cold = true, true }))
	w.domain.add("sbending", target.Options{}, func(sb *sandbox.Sandbox) { sb.State = sandbox.StateStopping })
	w.domain.add("sbended", target.Options{}, func(sb *sandbox.Sandbox) { sb.State = sandbox.StateEnded })
	for _, id := range []string{"sbpaused", "sbcold", "sbending", "sbended", "sbunknown"} {
		for _, port := range []string{"49983", "49999", "8080"} {
			got := w.ask(t, "GET", "/health", "", to(id), "E2b-Sandbox-Port: "+port)
			want := `{"sandboxId":"` + id + `","message":"The sandbox was not found","code":502}`
			if got.status != 502 || got.body != want || !strings.HasPrefix(got.header.Get("Content-Type"), "application/json") {
				t.Errorf("%s:%s: %d %s", id, port, got.status, got.body)
			}
		}
	}
	got := w.ask(t, "GET", "/", "", "Host: 8080-sbunknown.cove.test", "Accept: text/html,*/*")
	if got.status != 502 || !strings.HasPrefix(got.header.Get("Content-Type"), "text/html") || !strings.Contains(got.body, "The sandbox was not found") {
		t.Errorf("a person gets %d %v %s", got.status, got.header, got.body)
	}
}

func TestLookup_DatabaseAway(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.away = true
	for _, accept := range []string{"*/*", "text/html"} {
		got := w.ask(t, "GET", "/", "", to("sbunknown"), "E2b-Sandbox-Port: 8080", "Accept: "+accept)
		if got.status != 503 || got.header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %v %s", accept, got.status, got.header, got.body)
		}
	}
}

func TestWhatGuardsASandbox(t *testing.T) {
	w := newWorld(t, nil)
	port := portOf(t, echo(t))
	w.domain.add("sba", target.Options{Secure: true, PrivateTraffic: true}, nil)
	w.domain.add("sbopen", target.Options{}, nil)
	w.domain.add("sbsecure", target.Options{Secure: true}, nil)
	access, traffic := "X-Access-Token: "+tokens.Envd("sba"), "E2B-Traffic-Access-Token: "+tokens.Traffic("sba")
	asks := []string{"Origin: https://x.test", "Access-Control-Request-Method: POST"}
	for _, c := range []struct {
		name, method, id, port, path string
		headers                      []string
		want                         int
	}{
		{"no token", "POST", "sba", "49983", "/process.Process/List", nil, 401},
		{"wrong token", "POST", "sba", "49983", "/process.Process/List", []string{"X-Access-Token: " + tokens.Envd("sbopen")}, 401},
		{"a key is no token", "POST", "sba", "49983", "/process.Process/List", []string{"X-API-Key: e2b_0000000000000000000000000000000000000000"}, 401},
		{"token", "POST", "sba", "49983", "/process.Process/List", []string{access}, 200},
		{"health", "GET", "sba", "49983", "/health", nil, 200},
		{"health by another method", "POST", "sba", "49983", "/health", nil, 401},
		{"files are envd's affair", "GET", "sba", "49983", "/files", nil, 200},
		{"metrics", "GET", "sba", "49983", "/metrics", nil, 401},
		{"a browser asks first", "OPTIONS", "sba", "49983", "/files", asks, 200},
		{"options alone are no such question", "OPTIONS", "sba", "49983", "/metrics", nil, 401},
		{"internal", "POST", "sba", "49983", "/init", []string{access}, 404},
		{"internal", "POST", "sbopen", "49983", "/upgrade", nil, 404},
		{"execute without traffic token", "POST", "sba", "49999", "/execute", []string{access}, 403},
		{"execute without access token", "POST", "sba", "49999", "/execute", []string{traffic}, 401},
		{"execute", "POST", "sba", "49999", "/execute", []string{traffic, access}, 200},
		{"contexts", "POST", "sba", "49999", "/contexts", []string{traffic}, 200},
		{"contexts", "POST", "sba", "49999", "/contexts", nil, 403},
		{"port", "GET", "sba", port, "/", nil, 403},
		{"port with the wrong token", "GET", "sba", port, "/", []string{"E2B-Traffic-Access-Token: x"}, 403},
		{"port", "GET", "sba", port, "/", []string{traffic}, 200},
		{"public port", "GET", "sbsecure", port, "/", nil, 200},
		{"open", "POST", "sbopen", "49983", "/process.Process/List", nil, 200},
		{"open", "POST", "sbopen", "49999", "/execute", nil, 200},
	} {
		got := w.ask(t, c.method, c.path, "", append(c.headers, to(c.id), "E2b-Sandbox-Port: "+c.port)...)
		if got.status != c.want {
			t.Errorf("%s: %s %s: %d %s, want %d", c.name, c.method, c.path, got.status, got.body, c.want)
		}
		if got.status >= 400 && !strings.Contains(got.body, `"code":`+strconv.Itoa(c.want)) {
			t.Errorf("%s: %s", c.name, got.body)
		}
	}
}

func sign(path string, op target.Operation, token, expires string) string {
	q := url.Values{"path": {path}, "signature": {target.Sign(path, op, "", token, expires)}}
	if expires != "" {
		q.Set("signature_expiration", expires)
	}
	return "/files?" + q.Encode()
}

func TestASignedURLFindsItsSandbox(t *testing.T) {
	w := newWorld(t, nil)
	for _, id := range []string{"sba", "sbb", "sbc"} {
		w.domain.add(id, target.Options{Secure: true}, nil)
	}
	for _, c := range []struct{ name, method, url, want string }{
		{"read", "GET", sign("a b.txt", "read", tokens.Envd("sbb"), ""), "envd /files sbb of acme"},
		{"write", "POST", sign("x", "write", tokens.Envd("sbc"), ""), "envd /files sbc of acme"},
		{"expired", "GET", sign("x", "read", tokens.Envd("sba"), "1"), `{"code":401,"message":"signature is already expired"}`},
		{"an expiry that is a word", "GET", sign("x", "read", tokens.Envd("sba"), "soon"), `{"code":401,"message":"invalid signature"}`},
		{"read is not write", "POST", sign("x", "read", tokens.Envd("sba"), ""), `{"code":401,"message":"invalid signature"}`},
		{"another path", "GET", strings.Replace(sign("x", "read", tokens.Envd("sba"), ""), "path=x", "path=y", 1), `{"code":401,"message":"invalid signature"}`},
		{"nobody's", "GET", sign("x", "read", "", ""), `{"code":401,"message":"invalid signature"}`},
		{"none", "GET", "/files?path=x", `{"code":401,"message":"missing signature query parameter"}`},
	} {
		if got := w.ask(t, c.method, c.url, ""); got.body != c.want {
			t.Errorf("%s: %d %s, want %s", c.name, got.status, got.body, c.want)
		}
	}
}

func TestTrafficResumesWhatMayBe(t *testing.T) {
	pause := func(sb *sandbox.Sandbox) {
		sb.State, sb.AutoResume, sb.ResumeLifetime = sandbox.StatePaused, true, 5*time.Minute
	}
	future := strconv.FormatInt(time.Now().Add(time.Hour).Unix(), 10)
	access := "X-Access-Token: " + tokens.Envd("sba")
	for _, c := range []struct {
		name, method, path string
		headers            []string
		want               int
		resumed            bool
	}{
		{"without a token", "POST", "/process.Process/List", []string{toEnvd}, 403, false},
		{"health too", "GET", "/health", []string{toEnvd}, 403, false},
		{"health", "GET", "/health", []string{toEnvd, access}, 200, true},
		{"a question", "OPTIONS", "/files", []string{toEnvd, "Origin: https://x.test", "Access-Control-Request-Method: POST"}, 200, false},
		{"files without a signature", "GET", "/files?path=x", []string{toEnvd}, 403, false},
		{"files with an old one", "GET", sign("x", "read", tokens.Envd("sba"), "1"), []string{toEnvd}, 403, false},
		{"files with an empty time", "GET", sign("x", "read", tokens.Envd("sba"), "") + "&signature_expiration=", []string{toEnvd}, 403, false},
		{"files", "GET", sign("x", "read", tokens.Envd("sba"), future), []string{toEnvd}, 200, true},
		{"rpc", "POST", "/process.Process/List", []string{toEnvd, access}, 200, true},
		{"a port without its token", "GET", "/", []string{"E2b-Sandbox-Port: 1"}, 403, false},
		{"a port", "GET", "/", []string{"E2b-Sandbox-Port: 1", "E2b-Traffic-Access-Token: " + tokens.Traffic("sba")}, 502, true},
	} {
		w := newWorld(t, nil)
		w.domain.add("sba", target.Options{Secure: true, PrivateTraffic: true}, pause)
		got := w.ask(t, c.method, c.path, "", append(c.headers, to("sba"))...)
		if got.status != c.want || (len(w.domain.resumed) > 0) != c.resumed {
			t.Errorf("%s: %d %s, resumed %v", c.name, got.status, got.body, w.domain.resumed)
		}
		if c.resumed && !slices.Equal(w.domain.resumed, []time.Duration{5 * time.Minute}) {
			t.Errorf("%s: resumed for %v", c.name, w.domain.resumed)
		}
	}
}

// TestAStrangerResumesOnlyWhatIsPublic: the SDKs force some of it.
func TestAStrangerResumesOnlyWhatIsPublic(t *testing.T) {
	for _, c := range []struct {
		name, method, path, port string
		private                  bool
		headers                  []string
		want                     int
		resumed                  bool
	}{
		{"contexts", "POST", "/contexts", "49999", false, nil, 200, true},
		{"a context", "DELETE", "/contexts/x", "49999", false, nil, 200, true},
		{"health", "GET", "/health", "49999", false, nil, 502, false},
		{"nothing", "GET", "/contextsx", "49999", false, nil, 502, false},
		{"execute", "POST", "/execute", "49999", false, nil, 403, false},
		{"health with a token", "GET", "/health", "49999", false, []string{"X-Access-Token: " + tokens.Envd("sba")}, 200, true},
		{"health with the traffic's token", "GET", "/health", "49999", true, []string{"E2b-Traffic-Access-Token: " + tokens.Traffic("sba")}, 200, true},
		{"contexts that are not public", "POST", "/contexts", "49999", true, nil, 403, false},
		{"a public port", "GET", "/", "1", false, nil, 502, true},
		{"a private port", "GET", "/", "1", true, nil, 403, false},
	} {
		w := newWorld(t, nil)
		w.domain.add("sba", target.Options{Secure: true, PrivateTraffic: c.private}, func(sb *sandbox.Sandbox) {
			sb.State, sb.AutoResume = sandbox.StatePaused, true
		})
		got := w.ask(t, c.method, c.path, "", append(c.headers, to("sba"), "E2b-Sandbox-Port: "+c.port)...)
		if got.status != c.want || (len(w.domain.resumed) > 0) != c.resumed {
			t.Errorf("%s: %d %s, resumed %v", c.name, got.status, got.body, w.domain.resumed)
		}
		if c.want == 502 && !c.resumed && !strings.Contains(got.body, "The sandbox was not found") {
			t.Errorf("%s: %s", c.name, got.body)
		}
	}
}

// TestAStreamIsCutWhenItsSandboxStops: the end must not look like one.
func TestAStreamIsCutWhenItsSandboxStops(t *testing.T) {
	for _, start := range []func(*httptest.Server){(*httptest.Server).Start, startHTTP2} {
		for _, polite := range []bool{true, false} {
			refused := make(chan error, 1)
			stream := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.WriteString(w, "first")
				w.(http.Flusher).Flush()
				<-r.Context().Done()
				if polite { // a handler that ends its stream as it should
					_, err := io.WriteString(w, "last")
					refused <- err
					return
				}
				refused <- r.Context().Err()
			})
			w := newWorldWith(t, nil, stream, stream, start)
			w.domain.add("sba", target.Options{}, nil)
			resp, err := w.try(t.Context(), "POST", "/process.Process/Start", nil, to("sba"), toEnvd)
			if err != nil {
				t.Fatal(err)
			}
			first := make([]byte, 5)
			if _, err := io.ReadFull(resp.Body, first); err != nil {
				t.Fatal(err)
			}
			w.domain.stop("sba", sandbox.StateStopping)
			rest, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil || len(rest) > 0 {
				t.Errorf("%s: the stream ended with %q and %v", resp.Proto, rest, err)
			}
			if err := <-refused; err == nil {
				t.Errorf("%s: the handler was not told", resp.Proto)
			}
			if got := w.ask(t, "GET", "/health", "", to("sba"), toEnvd); got.status != 502 {
				t.Errorf("then health is %d", got.status)
			}
		}
	}
}

// TestAnUploadIsCutToo: a handler that waits for its client's next byte must not wait for ever, nor begin to.
func TestAnUploadIsCutToo(t *testing.T) {
	for name, wait := range map[string]func(r *http.Request){
		"while it waits": func(*http.Request) {},
		"before it does": func(r *http.Request) { <-r.Context().Done() },
	} {
		t.Run(name, func(t *testing.T) {
			begun := make(chan struct{})
			upload := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				r, done := transfer.Patient(w, r)
				defer done()
				io.ReadFull(r.Body, make([]byte, 1))
				close(begun)
				wait(r)
				io.Copy(io.Discard, r.Body)
			})
			w := newWorldWith(t, nil, upload, upload, (*httptest.Server).Start)
			w.domain.add("sba", target.Options{}, nil)
			conn, err := net.Dial("tcp", w.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			io.WriteString(conn, "POST /files HTTP/1.1\r\nHost: 49983-sba.cove.test\r\nContent-Length: 9\r\n\r\na")
			<-begun
			w.domain.stop("sba", sandbox.StatePaused)
			conn.SetReadDeadline(time.Now().Add(10 * time.Second))
			if b, err := io.ReadAll(conn); len(b) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("answered %q, %v", b, err)
			}
		})
	}
}

func TestOneSandboxCannotTakeAllRequests(t *testing.T) {
	in, out := make(chan struct{}), make(chan struct{})
	slow := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { in <- struct{}{}; <-out })
	w := newWorldWith(t, func(c *edge.Config) { c.MaxRequests = 1 }, slow, say("interpreter"), (*httptest.Server).Start)
	w.domain.add("sba", target.Options{}, nil)
	w.domain.add("sbb", target.Options{}, nil)
	done := make(chan error)
	go func() {
		resp, err := w.try(t.Context(), "GET", "/", nil, to("sba"), toEnvd)
		if err == nil {
			resp.Body.Close()
		}
		done <- err
	}()
	<-in
	if got := w.ask(t, "GET", "/", "", to("sba"), toInterpreter); got.status != 429 {
		t.Errorf("the second: %d %s", got.status, got.body)
	}
	if got := w.ask(t, "GET", "/", "", to("sbb"), toInterpreter); got.status != 200 {
		t.Errorf("another's: %d %s", got.status, got.body)
	}
	close(out)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := w.ask(t, "GET", "/", "", to("sba"), toInterpreter); got.status != 200 {
		t.Errorf("afterwards: %d %s", got.status, got.body)
	}
}

func TestTheDataPlaneWritesTheSandboxesLog(t *testing.T) {
	lines := make(chan string, 1)
	w := newWorld(t, func(c *edge.Config) {
		c.Lines = func(id string) func(target.Line) { return func(l target.Line) { lines <- id + " " + l.Message } }
	})
	w.domain.add("sba", target.Options{}, nil)
	w.ask(t, "GET", "/", "", to("sba"), toEnvd)
	if got := <-lines; got != "sba heard" {
		t.Error(got)
	}
}
