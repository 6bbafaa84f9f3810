package edge_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/edge"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/sandbox"
)

func startHTTP2(s *httptest.Server) {
	s.EnableHTTP2 = true
	s.StartTLS()
}

// echo is a server inside of the sandbox that tells what reached it.
func echo(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Set-Cookie", "session=1; Domain=cove.test; Path=/")
		w.Header().Add("Set-Cookie", "cove_session=evil")
		w.Header().Set("Strict-Transport-Security", "max-age=1")
		var lines []string
		for name, values := range r.Header {
			for _, v := range values {
				lines = append(lines, name+": "+v)
			}
		}
		slices.Sort(lines)
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s host %s\n%s\n\n%s", r.Method, r.RequestURI, r.Host, strings.Join(lines, "\n"), body)
	}))
	t.Cleanup(s.Close)
	return s
}

func portOf(t *testing.T, s *httptest.Server) string {
	t.Helper()
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u.Port()
}

func TestAPortIsReachedByHostHeaderAndPath(t *testing.T) {
	for _, start := range []func(*httptest.Server){(*httptest.Server).Start, startHTTP2} {
		w := newWorldWith(t, nil, say("envd"), say("interpreter"), start)
		w.domain.add("sba", target.Options{}, nil)
		port := portOf(t, echo(t))
		for _, c := range []struct {
			path    string
			headers []string
			want    string
		}{
			{"/a//b%2Fc?q=1;2", []string{"Host: " + port + "-sba.cove.test"}, "POST /a//b%2Fc?q=1;2 host " + port + "-sba.cove.test\n"},
			{"/x", []string{to("sba"), "E2b-Sandbox-Port: " + port}, "POST /x host " + strings.SplitN(w.URL, "//", 2)[1] + "\n"},
			{"/kruise/sba/" + port + "/x%2Fy?z", nil, "POST /x%2Fy?z host "},
			{"/kruise/sba/" + port, nil, "POST / host "},
		} {
			got := w.ask(t, "POST", c.path, "the body", c.headers...)
			if got.status != 200 || !strings.HasPrefix(got.body, c.want) || !strings.HasSuffix(got.body, "\n\nthe body") {
				t.Errorf("%s: %d %s", c.path, got.status, got.body)
			}
		}
	}
}

func TestWhatIsOursNeverReachesASandbox(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{Secure: true, PrivateTraffic: true}, nil)
	key := "e2b_0123456789abcdef0123456789abcdef01234567"
	got := w.ask(t, "GET", "/", "", to("sba"), "E2b-Sandbox-Port: "+portOf(t, echo(t)),
		"X-API-Key: "+key, "Authorization: Bearer "+key, "X-Access-Token: "+tokens.Envd("sba"), "E2b-Traffic-Access-Token: "+tokens.Traffic("sba"),
		"Cookie: a=1; cove_session=secret; b=2", "Cookie: __Host-cove_csrf=secret", "X-Mine: kept")
	for _, ours := range []string{key, tokens.Envd("sba"), tokens.Traffic("sba"), "secret", "E2b-Sandbox", "Authorization", "X-Api-Key"} {
		if strings.Contains(got.body, ours) {
			t.Errorf("%q reached the sandbox:\n%s", ours, got.body)
		}
	}
	if got.status != 200 || !strings.Contains(got.body, "X-Mine: kept") || !strings.Contains(got.body, "Cookie: a=1; b=2") {
		t.Errorf("%d %s", got.status, got.body)
	}
	got = w.ask(t, "GET", "/", "", to("sba"), "E2b-Sandbox-Port: "+portOf(t, echo(t)), "E2b-Traffic-Access-Token: "+tokens.Traffic("sba"),
		"X-API-Key: theirs", "Authorization: Bearer theirs", "X-Access-Token: theirs")
	for _, theirs := range []string{"X-Api-Key: theirs", "Authorization: Bearer theirs", "X-Access-Token: theirs"} {
		if !strings.Contains(got.body, theirs) {
			t.Errorf("%s was taken:\n%s", theirs, got.body)
		}
	}
}

func TestAPageSpeaksForNobodyElse(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	port := portOf(t, echo(t))
	byHost := w.ask(t, "GET", "/", "", "Host: "+port+"-sba.cove.test")
	if got := byHost.header.Values("Set-Cookie"); !slices.Equal(got, []string{"session=1; Path=/"}) {
		t.Errorf("by host it sets %q", got)
	}
	if byHost.header.Get("Content-Security-Policy") != "" {
		t.Error("an origin of its own is narrowed")
	}
	byPath := w.ask(t, "GET", "/kruise/sba/"+port+"/", "")
	if got := byPath.header.Values("Set-Cookie"); !slices.Equal(got, []string{"session=1; Path=/kruise/sba/" + port + "/"}) {
		t.Errorf("by path it sets %q", got)
	}
	csp := byPath.header.Get("Content-Security-Policy")
	if !strings.HasPrefix(csp, "sandbox ") || strings.Contains(csp, "same-origin") || byPath.header.Get("Strict-Transport-Security") != "" {
		t.Errorf("by path it says %v", byPath.header)
	}
	if got := w.ask(t, "GET", "/kruise/sba/"+port+"/sw.js", "", "Service-Worker: script"); got.status != 403 {
		t.Errorf("a service worker for our origin: %d", got.status)
	}
}

func TestTheHostIsMasked(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{MaskHost: "app.example.com:${PORT}"}, nil)
	port := portOf(t, echo(t))
	if got := w.ask(t, "GET", "/", "", "Host: "+port+"-sba.cove.test"); !strings.HasPrefix(got.body, "GET / host app.example.com:"+port+"\n") {
		t.Error(got.body)
	}
}

func TestAClosedPortIsTold(t *testing.T) {
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	port := freePort(t)
	want := fmt.Sprintf(`{"sandboxId":"sba","message":"The sandbox is running but port is not open","port":%s,"code":502}`, port)
	if got := w.ask(t, "GET", "/", "", to("sba"), "E2b-Sandbox-Port: "+port); got.status != 502 || got.body != want {
		t.Errorf("%d %s", got.status, got.body)
	}
	page := w.ask(t, "GET", "/", "", "Host: "+port+"-sba.cove.test", "Accept: text/html")
	if page.status != 502 || !strings.Contains(page.body, "port is not open") || !strings.HasPrefix(page.header.Get("Content-Type"), "text/html") {
		t.Errorf("%d %s", page.status, page.body)
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func TestAPortThatIsAboutToOpenIsWaitedFor(t *testing.T) {
	w := newWorld(t, func(c *edge.Config) { c.RetryFor = 20 * time.Second })
	w.domain.add("sba", target.Options{}, nil)
	port := freePort(t)
	got := make(chan answer)
	go func() { got <- w.ask(t, "GET", "/", "", to("sba"), "E2b-Sandbox-Port: "+port) }()
	l, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		t.Skip("somebody took the port")
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "late") })}
	go s.Serve(l)
	defer s.Close()
	if a := <-got; a.body != "late" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// TestEventsPassAsTheyCome reads one before the next is written.
func TestEventsPassAsTheyCome(t *testing.T) {
	next := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			<-next
		}
	}))
	defer s.Close()
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	resp, err := w.try(t.Context(), "GET", "/", nil, to("sba"), "E2b-Sandbox-Port: "+portOf(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	for i := range 3 {
		line, err := lines.ReadString('\n')
		if err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("%q, %v", line, err)
		}
		lines.ReadString('\n')
		next <- struct{}{}
	}
}

// TestAnUpgradedConnectionPassesBothWays is what a WebSocket is to us; it ends with its sandbox.
func TestAnUpgradedConnectionPassesBothWays(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" || r.Header.Get("Sec-Websocket-Key") != "k" {
			t.Errorf("the port heard %v", r.Header)
		}
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		line, _ := rw.ReadString('\n')
		io.WriteString(conn, strings.ToUpper(line))
		io.Copy(io.Discard, rw)
	}))
	defer s.Close()
	w := newWorld(t, nil)
	w.domain.add("sba", target.Options{}, nil)
	conn, err := net.Dial("tcp", w.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s-sba.cove.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n", portOf(t, s))
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("%v, %v", resp, err)
	}
	io.WriteString(conn, "hello\n")
	if line, err := r.ReadString('\n'); line != "HELLO\n" {
		t.Fatalf("%q, %v", line, err)
	}
	w.domain.stop("sba", sandbox.StateEnded)
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if b, err := io.ReadAll(r); len(b) > 0 || err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("after the end: %q, %v", b, err)
	}
}

// TestGRPCPassesAsHTTP2, trailers included: it cannot be spoken otherwise.
func TestGRPCPassesAsHTTP2(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status")
		io.WriteString(w, r.Proto)
		w.Header().Set("Grpc-Status", "0")
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	defer s.Close()
	w := newWorldWith(t, nil, say("envd"), say("interpreter"), startHTTP2)
	w.domain.add("sba", target.Options{}, nil)
	resp, err := w.try(t.Context(), "POST", "/pkg.Service/Method", strings.NewReader("x"),
		"Host: "+portOf(t, s)+"-sba.cove.test", "Content-Type: application/grpc")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); string(b) != "HTTP/2.0" || err != nil || resp.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("%d %q, %v, %v", resp.StatusCode, b, err, resp.Trailer)
	}
}

// TestAPythonServer is the one that people start first.
func TestAPythonServer(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	port := freePort(t)
	cmd := exec.Command(python, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", t.TempDir())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	w := newWorld(t, func(c *edge.Config) { c.RetryFor = 20 * time.Second })
	w.domain.add("sba", target.Options{}, nil)
	for range 3 {
		if got := w.ask(t, "GET", "/", "", "Host: "+port+"-sba.cove.test"); got.status != 200 || !strings.Contains(got.body, "Directory listing") {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
}
