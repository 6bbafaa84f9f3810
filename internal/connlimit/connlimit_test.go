package connlimit_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/covehq/cove/internal/connlimit"
)

// serve answers /wait when release is closed or the client has gone, and everything else at once.
func serve(t *testing.T, cfg connlimit.Config) (s *httptest.Server, waiting chan string) {
	t.Helper()
	release := make(chan struct{})
	waiting = make(chan string, 100)
	limiter := connlimit.New(cfg, slog.New(slog.DiscardHandler))
	s = httptest.NewUnstartedServer(limiter.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			waiting <- r.RemoteAddr
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		fmt.Fprint(w, "hello")
	})))
	s.Listener = limiter.Listener(s.Listener)
	s.Config.ConnContext, s.Config.ConnState = limiter.ConnContext, limiter.ConnState
	s.Start()
	t.Cleanup(func() { close(release); s.CloseClientConnections(); s.Close() })
	return s, waiting
}

// dial connects from an address of the loopback network.
func dial(t *testing.T, s *httptest.Server, from string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func ask(t *testing.T, c net.Conn, path string) error {
	t.Helper()
	c.SetDeadline(time.Now().Add(2 * time.Minute))
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	_, err = io.ReadAll(resp.Body)
	return err
}

// closed waits until the server has closed a connection.
func closed(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(2 * time.Minute))
	if n, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Fatalf("the connection is open: %d bytes, %v", n, err)
	}
}

func TestLimiter_SilentGiveWay(t *testing.T) {
	for name, cfg := range map[string]connlimit.Config{
		"share of an address": {PerAddress: 50},
		"total":               {Total: 50},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := serve(t, cfg)
			var silent []net.Conn
			for range 200 {
				silent = append(silent, dial(t, s, "127.0.0.1"))
			}
			for range 3 {
				if err := ask(t, dial(t, s, "127.0.0.1"), "/"); err != nil {
					t.Errorf("a client between silent connections: %v", err)
				}
			}
			for _, c := range silent[:150] {
				closed(t, c)
			}
		})
	}
}

func TestLimiter_IdleGiveWay(t *testing.T) {
	s, _ := serve(t, connlimit.Config{PerAddress: 2})
	first, second := dial(t, s, "127.0.0.1"), dial(t, s, "127.0.0.1")
	for _, c := range []net.Conn{first, second} {
		if err := ask(t, c, "/"); err != nil {
			t.Fatal(err)
		}
	}
	if err := ask(t, dial(t, s, "127.0.0.1"), "/"); err != nil {
		t.Fatal(err)
	}
	closed(t, first)
	if err := ask(t, second, "/"); err != nil {
		t.Errorf("the connection that was idle for less long: %v", err)
	}
}

func TestLimiter_BusyStay(t *testing.T) {
	s, waiting := serve(t, connlimit.Config{PerAddress: 2, Total: 5, Trusted: []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}})
	wait := func(from string) {
		t.Helper()
		fmt.Fprint(dial(t, s, from), "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
		<-waiting
	}
	wait("127.0.0.1")
	wait("127.0.0.1")
	closed(t, dial(t, s, "127.0.0.1"))
	if err := ask(t, dial(t, s, "127.0.0.2"), "/"); err != nil {
		t.Errorf("another address: %v", err)
	}
	for range 3 { // a trusted proxy has no share
		wait("127.0.0.9")
	}
	closed(t, dial(t, s, "127.0.0.3"))
}

func TestLimiter_RoomComesBack(t *testing.T) {
	s, _ := serve(t, connlimit.Config{PerAddress: 3, Total: 3})
	for range 20 {
		c := dial(t, s, "127.0.0.1")
		if err := ask(t, c, "/"); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
}

// pipes is a listener of connections that hold nothing, in false time.
type pipes struct {
	conns chan net.Conn
	ctx   context.Context
}

func (p pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.ctx.Done():
		return nil, net.ErrClosed
	}
}
func (pipes) Close() error   { return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// stalling serves an endless answer and hands out how long its handler took until a write failed.
func stalling(t *testing.T, reader func(net.Conn)) time.Duration {
	var took atomic.Int64
	synctest.Test(t, func(t *testing.T) {
		limiter := connlimit.New(connlimit.Config{Stall: 2 * time.Minute}, slog.New(slog.DiscardHandler))
		done := make(chan struct{})
		s := &http.Server{ConnContext: limiter.ConnContext, ConnState: limiter.ConnState,
			Handler: limiter.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				defer close(done)
				begun := time.Now()
				for {
					if _, err := w.Write(make([]byte, 64<<10)); err != nil {
						took.Store(int64(time.Since(begun)))
						return
					}
				}
			}))}
		ctx, stop := context.WithCancel(t.Context())
		p := pipes{make(chan net.Conn), ctx}
		go func() { _ = s.Serve(limiter.Listener(p)) }()
		ours, theirs := net.Pipe()
		p.conns <- theirs
		fmt.Fprint(ours, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		go reader(ours)
		<-done
		ours.Close()
		stop()
		s.Close()
	})
	return time.Duration(took.Load())
}

func TestConn_ReaderThatTakesNothingIsCut(t *testing.T) {
	if took := stalling(t, func(net.Conn) {}); took != 2*time.Minute {
		t.Errorf("cut after %v, want 2m", took)
	}
	// The reader's last byte is a part of a write: the write waits for the rest, which is no
	// progress.
	took := stalling(t, func(c net.Conn) {
		for range 3 {
			time.Sleep(5 * time.Second)
			_, _ = c.Read(make([]byte, 1))
		}
	})
	if least := 15*time.Second + 2*time.Minute; took < least || took > least+12*time.Second {
		t.Errorf("a reader that stops after 15s was cut after %v, want 2m to 2m12s later", took)
	}
}

// TestConn_CutIsAReset checks that the kernel keeps nothing of a connection that was cut: the peer
// gets a reset, not an orderly end after all that was buffered.
func TestConn_CutIsAReset(t *testing.T) {
	endless := func(w io.Writer) error {
		for {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return err
			}
		}
	}
	for name, of := range map[string]struct {
		handler http.HandlerFunc
		begin   func(t *testing.T, c net.Conn)
	}{
		"HTTP/1.1": {func(w http.ResponseWriter, _ *http.Request) { _ = endless(w) }, get},
		"hijacked": {func(w http.ResponseWriter, _ *http.Request) {
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_ = endless(c)
			c.Close()
		}, get},
		"HTTP/2 over TLS": {func(w http.ResponseWriter, _ *http.Request) { _ = endless(w) }, getOverTLS},
	} {
		t.Run(name, func(t *testing.T) {
			limiter := connlimit.New(connlimit.Config{Stall: time.Second}, slog.New(slog.DiscardHandler))
			done := make(chan struct{})
			s := httptest.NewUnstartedServer(limiter.Handler(http.HandlerFunc(
				func(w http.ResponseWriter, r *http.Request) {
					defer close(done)
					of.handler(w, r)
				})))
			s.Listener = limiter.Listener(s.Listener)
			ended := make(chan struct{}, 1)
			s.Config.ConnContext = limiter.ConnContext
			s.Config.ConnState = func(c net.Conn, state http.ConnState) {
				limiter.ConnState(c, state)
				if state == http.StateClosed {
					ended <- struct{}{}
				}
			}
			if s.EnableHTTP2 = name == "HTTP/2 over TLS"; s.EnableHTTP2 {
				s.StartTLS()
			} else {
				s.Start()
			}
			defer s.Close()
			c := dial(t, s, "127.0.0.1")
			of.begin(t, c)
			<-done
			if name != "hijacked" {
				<-ended
			}
			if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the connection ended with %v, want a reset", err)
			}
		})
	}
}

// get asks for an answer and reads none of it.
func get(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
}

// getOverTLS is get over HTTP/2, with room for as much as there is: only the connection stalls.
func getOverTLS(t *testing.T, c net.Conn) {
	t.Helper()
	over := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	frames := http2.NewFramer(over, over)
	_, err := io.WriteString(over, http2.ClientPreface)
	err = errors.Join(err,
		frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30}),
		frames.WriteWindowUpdate(0, 1<<30), frames.WriteHeaders(requestHeaders()))
	if err != nil {
		t.Fatal(err)
	}
}

// requestHeaders are of a GET on stream 1.
func requestHeaders() http2.HeadersFrameParam {
	var head bytes.Buffer
	headers := hpack.NewEncoder(&head)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "cove.test"}, {":path", "/"}} {
		_ = headers.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	return http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true}
}

func TestConn_SlowReaderIsNotCut(t *testing.T) {
	took := stalling(t, func(c net.Conn) {
		for range 30 { // a byte every 100 seconds, for 50 minutes
			time.Sleep(100 * time.Second)
			_, _ = c.Read(make([]byte, 1))
		}
		c.Close()
	})
	if took < 50*time.Minute {
		t.Errorf("a slow reader was cut after %v", took)
	}
}

// stallTime is short for a test, and long for a write on a busy machine.
const stallTime = 3 * time.Second

// serveStreams serves h over HTTP/2 without TLS, with stallTime.
func serveStreams(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	limiter := connlimit.New(connlimit.Config{Stall: stallTime}, slog.New(slog.DiscardHandler))
	s := httptest.NewUnstartedServer(limiter.Handler(h))
	s.Listener = limiter.Listener(s.Listener)
	s.Config.ConnContext = limiter.ConnContext
	s.Config.Protocols = h2c()
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func h2c() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
}

func TestStream_StalledReader(t *testing.T) {
	failed := make(chan error, 1)
	s := serveStreams(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/quiet" { // writes nothing for longer than the stall time
			_, _ = w.Write([]byte("a"))
			_ = http.NewResponseController(w).Flush()
			time.Sleep(stallTime + time.Second)
			_, _ = w.Write([]byte("b"))
			return
		}
		for {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				failed <- err
				return
			}
		}
	})
	client := &http.Client{Transport: &http.Transport{Protocols: h2c()}}
	defer client.CloseIdleConnections()
	resp, err := client.Get(s.URL + "/endless") // its body is never read
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.ProtoMajor != 2 {
		t.Fatalf("the answer is %s", resp.Proto)
	}
	quiet, err := client.Get(s.URL + "/quiet")
	if err != nil {
		t.Fatal(err)
	}
	defer quiet.Body.Close()
	if text, err := io.ReadAll(quiet.Body); err != nil || string(text) != "ab" {
		t.Errorf("a stream that is quiet for a while: %q, %v", text, err)
	}
	select {
	case <-failed:
	case <-time.After(time.Minute):
		t.Error("the stream with the stalled reader goes on")
	}
}

// TestStream_ShortAnswerStalled gives a stream no room for an answer that its handler has left in a
// buffer: net/http writes it after the handler.
func TestStream_ShortAnswerStalled(t *testing.T) {
	s := serveStreams(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1000)) })
	c := dial(t, s, "127.0.0.1")
	frames := http2.NewFramer(c, c)
	_, err := io.WriteString(c, http2.ClientPreface)
	err = errors.Join(err, frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}),
		frames.WriteHeaders(requestHeaders()))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	for {
		frame, err := frames.ReadFrame()
		if err != nil {
			t.Fatalf("the stream is not reset: %v", err)
		}
		if frame.Header().Type == http2.FrameRSTStream {
			return
		}
	}
}

// serveWaiting answers like serve, over HTTP/2 too, and without a key for /refused.
func serveWaiting(t *testing.T, cfg connlimit.Config) (s *httptest.Server, waiting chan string) {
	t.Helper()
	waiting = make(chan string, 100)
	limiter := connlimit.New(cfg, slog.New(slog.DiscardHandler))
	s = httptest.NewUnstartedServer(limiter.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/refused":
			http.Error(w, "no key", http.StatusUnauthorized)
		case "/wait":
			waiting <- r.RemoteAddr
			<-r.Context().Done()
		default:
			fmt.Fprint(w, "hello")
		}
	})))
	s.Listener = limiter.Listener(s.Listener)
	s.Config.ConnContext, s.Config.ConnState = limiter.ConnContext, limiter.ConnState
	s.Config.Protocols = h2c()
	s.Config.Protocols.SetHTTP1(true)
	s.Start()
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s, waiting
}

// h2conn is a client of HTTP/2 that gives the server no room for bodies.
type h2conn struct {
	*testing.T
	net.Conn
	frames *http2.Framer
	block  bytes.Buffer
	head   *hpack.Encoder
	last   uint32
}

func dialH2(t *testing.T, s *httptest.Server, from string) *h2conn {
	t.Helper()
	c := &h2conn{T: t, Conn: dial(t, s, from)}
	c.frames, c.head, c.last = http2.NewFramer(c, c), hpack.NewEncoder(&c.block), 1
	c.frames.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	_, err := io.WriteString(c, http2.ClientPreface)
	if err := errors.Join(err, c.frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	return c
}

// begin sends a request and returns its stream.
func (c *h2conn) begin(path string) (stream uint32) {
	c.Helper()
	c.block.Reset()
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "cove.test"}, {":path", path}} {
		_ = c.head.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	stream, c.last = c.last, c.last+2
	err := c.frames.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: c.block.Bytes(), EndStream: true, EndHeaders: true})
	if err != nil {
		c.Fatal(err)
	}
	return stream
}

// until reads frames until one is what is wanted.
func (c *h2conn) until(is func(http2.Frame) bool) http2.Frame {
	c.Helper()
	for {
		frame, err := c.frames.ReadFrame()
		if err != nil {
			c.Fatalf("the frame does not come: %v", err)
		}
		if is(frame) {
			return frame
		}
	}
}

// status waits for the head of an answer. It reports whether the answer ended with it.
func (c *h2conn) status(stream uint32) (status string, over bool) {
	c.Helper()
	head := c.until(func(f http2.Frame) bool {
		return f.Header().Type == http2.FrameHeaders && f.Header().StreamID == stream
	}).(*http2.MetaHeadersFrame)
	return head.PseudoValue("status"), head.StreamEnded()
}

// TestLimiter_StalledAnswersCount leaves short answers in net/http's buffer, for want of a window.
func TestLimiter_StalledAnswersCount(t *testing.T) {
	s, _ := serveWaiting(t, connlimit.Config{StreamsPerAddress: 3, Stall: time.Minute})
	stalled := dialH2(t, s, "127.0.0.1")
	if err := stalled.frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		stalled.begin("/")
	}
	other := dialH2(t, s, "127.0.0.1")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if status, _ := other.status(other.begin("/")); status == "503" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("answers that wait for their reader do not count")
		}
	}
}

func TestLimiter_StreamsOfAnAddress(t *testing.T) {
	for name, cfg := range map[string]connlimit.Config{
		"share of an address": {StreamsPerAddress: 3, Stall: time.Minute},
		"total":               {TotalStreams: 3, Stall: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Trusted = []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}
			s, waiting := serveWaiting(t, cfg)
			first, second := dialH2(t, s, "127.0.0.1"), dialH2(t, s, "127.0.0.1")
			one := first.begin("/wait")
			first.begin("/wait")
			second.begin("/wait")
			for range 3 {
				<-waiting
			}
			if status, over := second.status(second.begin("/")); status != "503" || !over {
				t.Errorf("one more on another connection: %s, over: %v", status, over)
			}
			if err := ask(t, dial(t, s, "127.0.0.1"), "/"); err != nil {
				t.Errorf("HTTP/1: %v", err)
			}
			if cfg.StreamsPerAddress > 0 {
				for _, from := range []string{"127.0.0.2", "127.0.0.9"} {
					c := dialH2(t, s, from)
					if status, _ := c.status(c.begin("/")); status != "200" {
						t.Errorf("another address: %s", status)
					}
				}
				proxy := dialH2(t, s, "127.0.0.9")
				for range 5 {
					proxy.begin("/wait")
					<-waiting
				}
			}
			if err := first.frames.WriteRSTStream(one, http2.ErrCodeCancel); err != nil {
				t.Fatal(err)
			}
			deadline := time.Now().Add(30 * time.Second)
			for time.Now().Before(deadline) {
				if status, _ := second.status(second.begin("/")); status == "200" {
					return
				}
			}
			t.Error("a stream that has ended counts")
		})
	}
}

// TestStream_RefusalStalled takes longer than the ten seconds that a refusal has.
func TestStream_RefusalStalled(t *testing.T) {
	t.Parallel()
	s, _ := serveWaiting(t, connlimit.Config{Stall: time.Hour})
	c := dialH2(t, s, "127.0.0.1")
	other, refused := c.begin("/"), c.begin("/refused")
	begun := time.Now()
	reset := c.until(func(f http2.Frame) bool { return f.Header().Type == http2.FrameRSTStream })
	if took := time.Since(begun); reset.Header().StreamID != refused || took > 40*time.Second {
		t.Errorf("stream %d is reset after %v, want %d, and not %d, after 10s", reset.Header().StreamID, took, refused, other)
	}
}
