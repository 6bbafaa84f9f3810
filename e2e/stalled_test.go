package e2e_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

const (
	stalledReaders = 500
	perReader      = 128 << 10 // bytes of the server's memory, with what its collector has not given back
)

// TestStalledReaders_Memory measures the server's memory with readers that take nothing of an endless answer.
func TestStalledReaders_Memory(t *testing.T) {
	slow.Test(t)
	s := newServer(t)
	var ids []string
	for range 5 { // a sandbox has 256 processes
		sb, err := s.Create(t.Context(), client.CreateRequest{TimeoutSeconds: 600})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
	}
	before := settled(t, s)
	for i := range stalledReaders {
		stall(t, s, ids[i%len(ids)], []string{"yes", strings.Repeat("a line of output ", 5)})
	}
	after := settled(t, s)
	each := (after - before) / stalledReaders
	t.Logf("%d stalled readers: the server's memory went from %d to %d MB, %d KB each", stalledReaders, before>>20, after>>20, each>>10)
	if each > perReader {
		t.Errorf("a stalled reader costs %d KB, more than %d", each>>10, perReader>>10)
	}
	if _, err := s.Templates(t.Context()); err != nil {
		t.Errorf("another client meanwhile: %v", err)
	}
}

// stall starts a command and reads the beginning of its answer.
func stall(t *testing.T, s *server, id string, argv []string) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	body, err := json.Marshal(client.ExecRequest{Argv: argv})
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(conn, "POST %s/sandboxes/%s/exec HTTP/1.1\r\nHost: cove\r\nX-API-Key: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		client.Prefix, id, s.key, len(body), body)
	resp, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("start a command: %v, %+v", err, resp)
	}
}

// settled is the server's memory once it has stopped growing.
func settled(t *testing.T, s *server) int64 {
	t.Helper()
	last, same := rss(s.cmd.Process.Pid), 0
	for deadline := time.Now().Add(time.Minute); same < 5 && time.Now().Before(deadline); {
		time.Sleep(200 * time.Millisecond)
		now := rss(s.cmd.Process.Pid)
		if same++; now > last+last/100 {
			same = 0
		}
		last = now
	}
	return last
}
