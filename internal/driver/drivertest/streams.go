package drivertest

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// changes watches a path and returns a function that waits until all of some changes were told.
func (s *box) changes(t *testing.T, p agentapi.WatchParams) func(want ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	stream, err := s.Watch(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	next, _ := pull(t, stream)
	var seen []string
	return func(want ...string) {
		t.Helper()
		for slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(seen, w) }) {
			e, err, ok := next()
			if err != nil || !ok {
				t.Fatalf("want %q, saw %q: %v", want, seen, err)
			}
			if e.File != nil {
				_, rest, _ := strings.Cut(e.File.Path, "/"+p.Path+"/")
				seen = append(seen, e.File.Op+" "+rest)
			}
		}
		seen = nil
	}
}

var watches = []claim{
	{"changes in a directory are told", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "watched/old", "1")
		expect := s.changes(t, agentapi.WatchParams{Path: "watched"})
		s.exec(t, sh("cd ~/watched && echo 1 >new"))
		expect("create new", "write new")
		s.exec(t, sh("cd ~/watched && chmod 600 new"))
		expect("chmod new")
		s.exec(t, sh("cd ~/watched && mv new newer"))
		expect("rename new", "create newer")
		s.exec(t, sh("cd ~/watched && rm newer"))
		expect("remove newer")
	}},
	{"a file operation is told as what it is", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "watched2/old", "1")
		expect := s.changes(t, agentapi.WatchParams{Path: "watched2"})
		s.put(t, "watched2/old", "2")
		expect("write old")
		s.put(t, "watched2/new", "2")
		expect("create new", "write new")
	}},
	{"a recursive watch follows new directories", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "watched3/a/b/c", "1")
		expect := s.changes(t, agentapi.WatchParams{Path: "watched3", Recursive: true})
		s.exec(t, sh("cd ~/watched3 && echo 2 >a/b/c"))
		expect("write a/b/c")
		s.exec(t, sh("cd ~/watched3 && mkdir -p x/y/z && echo 1 >x/y/z/f"))
		expect("create x", "create x/y", "create x/y/z", "create x/y/z/f")
		s.exec(t, sh("cd ~/watched3 && echo 3 >>x/y/z/f"))
		expect("write x/y/z/f")
	}},
	{"only directories are watched", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "not-a-dir", "1")
		_, err := s.Watch(t.Context(), agentapi.WatchParams{Path: "not-a-dir"})
		expectKind(t, err, fault.Invalid)
	}},
}

// echo is a server that answers each connection with all it was sent, once that is all.
const echo = `
import socket, sys
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True)
while True:
    c, _ = s.accept()
    data = b""
    while True:
        part = c.recv(65536)
        if not part: break
        data += part
    c.sendall(data); c.close()
`

func (s *box) echoPort(t *testing.T) int {
	t.Helper()
	_, next, _ := s.begin(t, t.Context(), agentapi.ExecParams{Argv: []string{s.b.Template.Python.Executable, "-c", echo}})
	e, err, ok := next()
	if err != nil || !ok {
		t.Fatal(err)
	}
	var port int
	if _, err := fmt.Sscan(string(e.Data), &port); err != nil {
		t.Fatalf("%q: %v", e.Data, err)
	}
	return port
}

var ports = []claim{
	{"a port inside is reached, with half close", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		port := s.echoPort(t)
		for _, size := range []int{0, 1, 3 << 20} {
			conn, err := s.DialPort(t.Context(), agentapi.DialParams{Port: port})
			if err != nil {
				t.Fatal(err)
			}
			sent := strings.Repeat("x", size)
			go func() {
				io.WriteString(conn, sent)
				conn.CloseWrite()
			}()
			got, err := io.ReadAll(conn)
			if err != nil || string(got) != sent {
				t.Errorf("%d bytes of %d came back: %v", len(got), size, err)
			}
			conn.Close()
		}
	}},
	{"a deadline on a port leaves it usable", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		conn, err := s.DialPort(t.Context(), agentapi.DialParams{Port: s.echoPort(t)})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("nothing was sent, and something came")
		}
		conn.SetReadDeadline(time.Time{})
		io.WriteString(conn, "hello")
		conn.CloseWrite()
		if got, err := io.ReadAll(conn); err != nil || string(got) != "hello" {
			t.Errorf("%q, %v", got, err)
		}
	}},
	{"a connection outlives the context it was dialed with", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		ctx, cancel := context.WithCancel(t.Context())
		conn, err := s.DialPort(ctx, agentapi.DialParams{Port: s.echoPort(t)})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		cancel()
		io.WriteString(conn, "hello")
		conn.CloseWrite()
		if got, err := io.ReadAll(conn); err != nil || string(got) != "hello" {
			t.Errorf("%q, %v", got, err)
		}
	}},
	{"a port where nothing listens is unavailable", needsNothing, func(t *testing.T, b *bench) {
		_, err := b.shared(t).DialPort(t.Context(), agentapi.DialParams{Port: 1})
		expectKind(t, err, fault.Unavailable)
	}},
	{"only loopback is dialed", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		_, err := s.DialPort(t.Context(), agentapi.DialParams{Port: 80, Host: "192.0.2.1"})
		expectKind(t, err, fault.Denied)
		_, err = s.DialPort(t.Context(), agentapi.DialParams{Port: 80, Host: "example.com"})
		expectKind(t, err, fault.Denied)
		_, err = s.DialPort(t.Context(), agentapi.DialParams{Port: 0})
		expectKind(t, err, fault.Invalid)
		_, err = s.DialPort(t.Context(), agentapi.DialParams{Port: 80, Network: "udp"})
		expectKind(t, err, fault.Unsupported)
	}},
}
