package cove_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/dialect/cove"
)

// What a client that stalls can hold up. Time is false here and connections are pipes, which hold nothing: a peer that
// does not read is felt with the first byte.

// bubble is a server in a bubble, with a sandbox.
type bubble struct {
	*world
	conns    chan net.Conn
	stop     context.CancelCauseFunc // what a stopping server does to its requests
	handlers sync.WaitGroup
	in       string // the sandbox's path
}

func stalling(t *testing.T, claim func(t *testing.T, b *bubble)) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{world: newUnstarted(t), conns: make(chan net.Conn)}
		ctx, stop := context.WithCancelCause(t.Context())
		b.stop = stop
		b.Listener.Close()
		b.Listener = pipes{b.conns, ctx}
		b.Config.BaseContext = func(net.Listener) context.Context { return ctx }
		api := b.Config.Handler
		b.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b.handlers.Add(1)
			defer b.handlers.Done()
			api.ServeHTTP(w, r)
		})
		b.Start()
		t.Cleanup(b.Close)
		t.Cleanup(func() { stop(nil) })
		resp := b.ask(t, "POST", "/sandboxes", "Content-Length: 2\r\n", "{}")
		var sb client.SandboxInfo
		if err := json.Unmarshal(resp.body, &sb); err != nil || resp.StatusCode != 201 {
			t.Fatalf("create: %d %s", resp.StatusCode, resp.body)
		}
		b.in = "/sandboxes/" + sb.ID
		claim(t, b)
	})
}

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

type answer struct {
	*http.Response
	body []byte
}

// begin sends a request's head and what of its body there is.
func (b *bubble) begin(t *testing.T, method, path, header, body string) (net.Conn, *bufio.Reader) {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close() })
	b.conns <- theirs
	head := fmt.Sprintf("%s %s%s HTTP/1.1\r\nHost: cove\r\nX-API-Key: %s\r\n%s\r\n%s", method, client.Prefix, path, b.key, header, body)
	go func() { _, _ = io.WriteString(ours, head) }() // ends with the connection
	return ours, bufio.NewReader(ours)
}

func (b *bubble) ask(t *testing.T, method, path, header, body string) answer {
	t.Helper()
	conn, r := b.begin(t, method, path, header, body)
	defer conn.Close()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp, content}
}

// within fails unless all handlers return in that time.
func (b *bubble) within(t *testing.T, d time.Duration) {
	t.Helper()
	begun := time.Now()
	b.handlers.Wait()
	if took := time.Since(begun); took > d {
		t.Errorf("the handlers took %v", took)
	}
}

func TestAStoppingServerLeavesAClientThatDoesNotRead(t *testing.T) {
	stalling(t, func(t *testing.T, b *bubble) {
		conn, r := b.begin(t, "GET", b.in+"/exec", "Connection: Upgrade\r\nUpgrade: "+client.Protocol+"\r\n", "")
		if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 101 {
			t.Fatalf("%+v, %v", resp, err)
		}
		if err := client.WriteJSONFrame(conn, client.FrameStart, client.ExecRequest{Argv: []string{"yes"}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // until its first word finds no reader
		b.stop(cove.ErrShutdown)
		b.within(t, 2*time.Second)
	})
}

func TestAStoppingServerLeavesAClientThatNeverSaysWhatToRun(t *testing.T) {
	stalling(t, func(t *testing.T, b *bubble) {
		_, r := b.begin(t, "GET", b.in+"/exec", "Connection: Upgrade\r\nUpgrade: "+client.Protocol+"\r\n", "")
		if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 101 {
			t.Fatalf("%+v, %v", resp, err)
		}
		synctest.Wait()
		b.stop(cove.ErrShutdown)
		b.within(t, 3*time.Second)
	})
}

func TestABodyThatStallsIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		method, path, body, says string
		after                    time.Duration
	}{
		"of a request":                           {"POST", "/run", `{"code":`, "did not come within 30s", 30 * time.Second},
		"of an upload":                           {"PUT", "/files?path=a", "some bytes", "no byte came for 1m0s", time.Minute},
		"of a request for nothing that is there": {"POST", "/nothing", "{", "no POST", 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			stalling(t, func(t *testing.T, b *bubble) {
				begun := time.Now()
				resp := b.ask(t, c.method, b.in+c.path, "Content-Length: 1000\r\n", c.body)
				if took := time.Since(begun); took < c.after || took > c.after+time.Second {
					t.Errorf("after %v", took)
				}
				if resp.StatusCode/100 != 4 || !strings.Contains(string(resp.body), c.says) {
					t.Errorf("%d %s", resp.StatusCode, resp.body)
				}
				b.within(t, 0)
			})
		})
	}
}

func TestAnUploadMayBeSlowAndAnAnswerLong(t *testing.T) {
	stalling(t, func(t *testing.T, b *bubble) {
		conn, r := b.begin(t, "PUT", b.in+"/files?path=a", "Content-Length: 4\r\n", "")
		for range 4 {
			time.Sleep(50 * time.Second)
			if _, err := conn.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%+v, %v", resp, err)
		}
	})
	stalling(t, func(t *testing.T, b *bubble) {
		body := `{"code":"hang"}`
		_, r := b.begin(t, "POST", b.in+"/run", fmt.Sprintf("Content-Length: %d\r\n", len(body)), body)
		resp, err := http.ReadResponse(r, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%+v, %v", resp, err)
		}
		defer resp.Body.Close()
		lines := bufio.NewReader(resp.Body)
		if _, err := lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(4*time.Minute, func() { b.stop(cove.ErrShutdown) })
		begun := time.Now()
		_, err = io.ReadAll(lines)
		if took := time.Since(begun); took < 4*time.Minute {
			t.Errorf("the run was cut after %v: %v", took, err)
		}
	})
}
