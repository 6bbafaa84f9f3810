package edge_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/edge"
	"github.com/covehq/cove/internal/dialect/e2b/target"
)

// TestALongHeadIsNotKept: what a port answers with is in our memory until its end.
func TestALongHeadIsNotKept(t *testing.T) {
	port := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Long", strings.Repeat("a", 512<<10))
	}))
	port.Config.Protocols = new(http.Protocols)
	port.Config.Protocols.SetHTTP1(true)
	port.Config.Protocols.SetUnencryptedHTTP2(true)
	port.Start()
	t.Cleanup(port.Close)
	w := newWorldWith(t, nil, say("envd"), say("interpreter"), startHTTP2)
	w.domain.add("sba", target.Options{}, nil)
	for _, kind := range []string{"text/plain", "application/grpc"} {
		got := w.ask(t, "POST", "/", "x", to("sba"), "E2b-Sandbox-Port: "+portOf(t, port), "Content-Type: "+kind)
		if got.status != 502 || got.header.Get("X-Long") != "" {
			t.Errorf("%s: %d", kind, got.status)
		}
	}
}

func TestStrangersDoNotLockTheOwnerOut(t *testing.T) {
	in, out := make(chan struct{}), make(chan struct{})
	slow := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { in <- struct{}{}; <-out })
	w := newWorldWith(t, func(c *edge.Config) { c.MaxRequests = 2 }, say("envd"), slow, (*httptest.Server).Start)
	w.domain.add("sba", target.Options{Secure: true}, nil)
	access := "X-Access-Token: " + tokens.Envd("sba")
	done := make(chan error)
	go func() {
		resp, err := w.try(t.Context(), "GET", "/contexts", nil, to("sba"), toInterpreter)
		if err == nil {
			resp.Body.Close()
		}
		done <- err
	}()
	<-in
	for _, c := range []struct {
		name, method, path string
		headers            []string
		want               int
	}{
		{"a second stranger", "GET", "/health", nil, 429},
		{"one whose token is wrong", "GET", "/health", []string{"X-Access-Token: x"}, 429},
		{"one who may not at all takes no place", "GET", "/metrics", nil, 401},
		{"the owner", "GET", "/health", []string{access}, 200},
		{"a signature", "GET", sign("x", target.OpRead, tokens.Envd("sba"), ""), nil, 200},
	} {
		if got := w.ask(t, c.method, c.path, "", append(c.headers, to("sba"), toEnvd)...); got.status != c.want {
			t.Errorf("%s: %d %s", c.name, got.status, got.body)
		}
	}
	close(out)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := w.ask(t, "GET", "/health", "", to("sba"), toEnvd); got.status != 200 {
		t.Errorf("a stranger afterwards: %d", got.status)
	}
}

func TestAPageByHeaderSpeaksForNobody(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	got := w.ask(t, "GET", "/", "", to("sba"), "E2b-Sandbox-Port: "+portOf(t, echo(t)))
	if got.status != 200 || len(got.header.Values("Set-Cookie")) > 0 || got.header.Get("Strict-Transport-Security") != "" ||
		!strings.HasPrefix(got.header.Get("Content-Security-Policy"), "sandbox ") {
		t.Errorf("%d %v", got.status, got.header)
	}
}

// TestARefusalDoesNotWaitForTheBody: a refusal that waits comes five seconds late at every try. One
// that is quicker once does not wait; on a machine under load that may not be the first.
func TestARefusalDoesNotWaitForTheBody(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{Secure: true}, nil)
	const tries = 10
	for try := range tries {
		took := refusal(t, w)
		if took < 4*time.Second {
			return
		}
		t.Logf("try %d took %v", try, took)
	}
	t.Errorf("no refusal of %d came at once", tries)
}

// refusal sends the first byte of a body to be refused, and is how long the answer takes.
func refusal(t *testing.T, w *world) time.Duration {
	t.Helper()
	conn, err := net.Dial("tcp", w.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	begun := time.Now()
	conn.SetReadDeadline(begun.Add(2 * time.Minute))
	io.WriteString(conn, "POST /metrics HTTP/1.1\r\nHost: 49983-sba.cove.test\r\nContent-Length: 1000\r\n\r\na")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	took := time.Since(begun)
	if resp.StatusCode != 401 || !resp.Close {
		t.Errorf("%s after %v, close: %v", resp.Status, took, resp.Close)
	}
	return took
}
