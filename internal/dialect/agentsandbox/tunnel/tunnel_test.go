package tunnel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"

	"github.com/covehq/cove/internal/dialect/agentsandbox/tunnel"
	"github.com/covehq/cove/internal/fault"
)

// The client of these tests is the one that kubectl is made of.

// serve is a server whose tunnels lead to wherever dial says.
func serve(t *testing.T, dial tunnel.Dial) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { tunnel.Serve(w, r, dial) }))
	t.Cleanup(s.Close)
	return s
}

// ways are the two in which a client may come.
var ways = map[string]func(t *testing.T, s *httptest.Server) httpstream.Dialer{
	"SPDY": func(t *testing.T, s *httptest.Server) httpstream.Dialer {
		t.Helper()
		transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{Host: s.URL})
		if err != nil {
			t.Fatal(err)
		}
		return spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", at(t, s))
	},
	"WebSocket": func(t *testing.T, s *httptest.Server) httpstream.Dialer {
		t.Helper()
		d, err := portforward.NewSPDYOverWebsocketDialer(at(t, s), &rest.Config{Host: s.URL})
		if err != nil {
			t.Fatal(err)
		}
		return d
	},
}

func at(t *testing.T, s *httptest.Server) *url.URL {
	t.Helper()
	u, err := url.Parse(s.URL + "/api/v1/namespaces/default/pods/x/portforward")
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// forward begins to forward a free port to port 80, and gives its address.
func forward(t *testing.T, d httpstream.Dialer) (address string, stop func()) {
	t.Helper()
	stopping, ready := make(chan struct{}), make(chan struct{})
	pf, err := portforward.New(d, []string{"0:80"}, stopping, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- pf.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(2 * time.Minute):
		t.Fatal("the tunnel is not ready in time")
	}
	ports, err := pf.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		close(stopping)
		<-ended
	})
	t.Cleanup(stop)
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local), stop
}

func dialTo(l net.Listener) tunnel.Dial {
	return func(ctx context.Context, port int) (net.Conn, error) {
		if port != 80 {
			return nil, fault.New(fault.Invalid, "port %d", port)
		}
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	}
}

// listen answers connections one after the other by handle, each in a goroutine.
func listen(t *testing.T, handle func(*net.TCPConn)) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() { l.Close(); work.Wait() })
	return l
}

func dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(5 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

func TestForward(t *testing.T) {
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			echo := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
			address, _ := forward(t, way(t, serve(t, dialTo(echo))))
			t.Run("bytes come back as they went, on many connections at once", func(t *testing.T) {
				var clients sync.WaitGroup
				for i := range 20 {
					c := dial(t, address)
					clients.Go(func() {
						sent := bytes.Repeat([]byte{byte(i), 0, 255}, 100_000)
						go func() {
							_, _ = c.Write(sent)
							_ = c.CloseWrite()
						}()
						if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, sent) {
							t.Errorf("%d of %d bytes came back, %v", len(got), len(sent), err)
						}
					})
				}
				clients.Wait()
			})
			t.Run("a client that says nothing more hears the rest", func(t *testing.T) {
				late := listen(t, func(c *net.TCPConn) {
					got, _ := io.ReadAll(c)
					_, _ = c.Write(append([]byte("heard "), got...))
				})
				address, _ := forward(t, way(t, serve(t, dialTo(late))))
				c := dial(t, address)
				_, _ = io.WriteString(c, "all")
				_ = c.CloseWrite()
				if got, err := io.ReadAll(c); string(got) != "heard all" || err != nil {
					t.Errorf("%q, %v", got, err)
				}
			})
			t.Run("a port that closes at once is the end of that connection only", func(t *testing.T) {
				shy := listen(t, func(*net.TCPConn) {})
				address, _ := forward(t, way(t, serve(t, dialTo(shy))))
				for range 3 {
					if got, err := io.ReadAll(dial(t, address)); len(got) != 0 || err != nil {
						t.Errorf("%q, %v", got, err)
					}
				}
			})
		})
	}
}

func TestClientLeaves(t *testing.T) {
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			came, gone := make(chan struct{}, 1), make(chan struct{}, 1)
			deaf := listen(t, func(c *net.TCPConn) {
				if _, err := c.Read(make([]byte, 1)); err == nil {
					came <- struct{}{}
				}
				_, _ = io.Copy(io.Discard, c)
				gone <- struct{}{}
			})
			begun := runtime.NumGoroutine()
			s := serve(t, dialTo(deaf))
			address, stop := forward(t, way(t, s))
			c := dial(t, address)
			if _, err := io.WriteString(c, "x"); err != nil {
				t.Fatal(err)
			}
			wait(t, came, "the connection is there")
			c.Close()
			wait(t, gone, "the port hears that the client of one connection has left")
			d := dial(t, address)
			if _, err := io.WriteString(d, "x"); err != nil {
				t.Fatal(err)
			}
			wait(t, came, "the second connection is there")
			stop()
			wait(t, gone, "the port hears that the tunnel has ended")
			d.Close()
			s.CloseClientConnections()
			s.Close()
			for deadline := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > begun+2; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					buf := make([]byte, 1<<16)
					t.Fatalf("%d goroutines, there were %d before\n%s", runtime.NumGoroutine(), begun, buf[:runtime.Stack(buf, true)])
				}
			}
		})
	}
}

func wait(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(2 * time.Minute):
		t.Fatalf("not in time: %s", what)
	}
}

// TestStalledPort has a port that takes nothing, until nothing more goes into the tunnel: it must end all the same.
func TestStalledPort(t *testing.T) {
	held, release := make(chan struct{}, 1), make(chan struct{})
	defer close(release)
	stalled := listen(t, func(*net.TCPConn) { held <- struct{}{}; <-release })
	served := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(served)
		tunnel.ServeFor(w, r, dialTo(stalled), time.Second)
	}))
	t.Cleanup(s.Close)
	address, stop := forward(t, ways["SPDY"](t, s))
	c := dial(t, address)
	var sent atomic.Int64
	go func() { _, _ = io.Copy(&counting{c, &sent}, endless{}) }()
	wait(t, held, "the connection is there")
	full := false
	for before := int64(-1); !full; { // a tenth of a second in which nothing went in
		now := sent.Load()
		full, before = now == before && now > 0, now
		<-time.After(100 * time.Millisecond)
	}
	stop()
	wait(t, served, "the tunnel has ended")
}

// counting counts what was written.
type counting struct {
	io.Writer
	bytes *atomic.Int64
}

func (c *counting) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.bytes.Add(int64(n))
	return n, err
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestDialFails(t *testing.T) {
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			conn, _, err := way(t, serve(t, func(context.Context, int) (net.Conn, error) {
				return nil, fault.Wrap(fault.Unavailable, errors.New("secret detail"), "nothing listens there")
			})).Dial("portforward.k8s.io")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			failure := open(t, conn, "error", "80", "1")
			open(t, conn, "data", "80", "1")
			if got, err := io.ReadAll(failure); string(got) != "nothing listens there" || err != nil {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func open(t *testing.T, conn httpstream.Connection, kind, port, request string) httpstream.Stream {
	t.Helper()
	s, err := conn.CreateStream(headers(kind, port, request))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func headers(kind, port, request string) http.Header {
	h := http.Header{}
	for name, value := range map[string]string{"streamType": kind, "port": port, "requestID": request} {
		if value != "" {
			h.Set(name, value)
		}
	}
	return h
}

func TestStreamRefusals(t *testing.T) {
	echo := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	connect := func(t *testing.T) httpstream.Connection {
		t.Helper()
		conn, _, err := ways["SPDY"](t, serve(t, dialTo(echo))).Dial("portforward.k8s.io")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	for name, h := range map[string]http.Header{
		"no port":             headers("data", "", "1"),
		"a port of zero":      headers("data", "0", "1"),
		"a port beyond all":   headers("data", "65536", "1"),
		"a port that is text": headers("data", "http", "1"),
		"an unknown type":     headers("stdin", "80", "1"),
		"no type":             headers("", "80", "1"),
	} {
		t.Run("a stream with "+name+" is refused", func(t *testing.T) {
			if _, err := connect(t).CreateStream(h); err == nil {
				t.Error("it was taken")
			}
		})
	}
	t.Run("a client without request ids is understood", func(t *testing.T) {
		conn := connect(t)
		open(t, conn, "error", "80", "")
		data := open(t, conn, "data", "80", "")
		_, _ = io.WriteString(data, "hello")
		_ = data.Close()
		if got, err := io.ReadAll(data); string(got) != "hello" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("streams without their other half are bounded", func(t *testing.T) {
		conn := connect(t)
		for i := range 64 {
			open(t, conn, "error", "80", fmt.Sprint(i))
		}
		over := open(t, conn, "error", "80", "over")
		if got, err := io.ReadAll(over); len(got) != 0 || err != nil { // it was reset
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("a second stream of a kind is refused, and one of another port", func(t *testing.T) {
		conn := connect(t)
		open(t, conn, "error", "80", "1")
		for _, port := range []string{"80", "81"} {
			kind := map[string]string{"80": "error", "81": "data"}[port]
			if got, err := io.ReadAll(open(t, conn, kind, port, "1")); len(got) != 0 || err != nil {
				t.Errorf("%q, %v", got, err)
			}
		}
		data := open(t, conn, "data", "80", "1")
		_, _ = io.WriteString(data, "still")
		_ = data.Close()
		if got, err := io.ReadAll(data); string(got) != "still" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	})
}

func TestHandshakeRefusals(t *testing.T) {
	s := serve(t, func(context.Context, int) (net.Conn, error) { return nil, errors.New("never") })
	for _, tc := range []struct {
		name, method string
		headers      map[string]string
	}{
		{"a plain request", "GET", nil},
		{"SPDY without a version", "POST", map[string]string{"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}},
		{"SPDY with another version", "POST", map[string]string{"Connection": "Upgrade", "Upgrade": "SPDY/3.1", "X-Stream-Protocol-Version": "v4.channel.k8s.io"}},
		{"a WebSocket of another protocol", "GET", map[string]string{
			"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol": "v5.channel.k8s.io",
		}},
	} {
		t.Run(tc.name+" is refused", func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), tc.method, s.URL, nil)
			if err != nil {
				t.Fatal(err)
			}
			for name, value := range tc.headers {
				req.Header.Set(name, value)
			}
			resp, err := s.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(body), `"kind":"Status"`) {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
}

func TestPipe(t *testing.T) {
	one, other := tunnel.Pipe()
	go func() {
		_, _ = io.WriteString(one, "request")
		_ = one.(interface{ CloseWrite() error }).CloseWrite()
	}()
	if got, err := io.ReadAll(other); string(got) != "request" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	go func() {
		_, _ = io.WriteString(other, "answer")
		_ = other.Close()
	}()
	if got, err := io.ReadAll(one); string(got) != "answer" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := other.Write([]byte("x")); err == nil {
		t.Error("a closed end takes bytes")
	}
	three, _ := tunnel.Pipe()
	if err := three.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := three.Read(make([]byte, 1)); err == nil || !err.(net.Error).Timeout() {
		t.Errorf("a deadline that is over: %v", err)
	}
}
