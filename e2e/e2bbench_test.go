package e2e_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/covehq/cove/test/slow"
)

// TestE2BBench is a benchmark of many minutes: `make bench-e2b` asks for it.
func TestE2BBench(t *testing.T) {
	out := os.Getenv("COVE_E2B_BENCH")
	if out == "" {
		t.Skip("make bench-e2b runs it")
	}
	tools := e2bPackages(t)
	s := newServer(t)
	nothing := httptest.NewServer(doNothing())
	defer nothing.Close()
	script, err := filepath.Abs("../bench/e2b/bench.py")
	if err != nil {
		t.Fatal(err)
	}
	runSuite(t, []string{filepath.Join(tools.python, "bin", "python"), "-B", script, out}, append(s.e2b(), "E2B_NOTHING_URL="+nothing.URL))
}

// TestE2BLargeFiles holds the server to its memory while a hundred megabytes go up and come down.
func TestE2BLargeFiles(t *testing.T) {
	slow.Test(t)
	tools := e2bPackages(t)
	s := newServer(t)
	env := s.e2b()
	runSuite(t, tools.pytest(t, "test_files.py", "-k=text_comes_back"), env)
	before := s.peak(t, true)
	runSuite(t, tools.pytest(t, "test_files.py", "-k=hundred_megabytes"), env)
	if grown := s.peak(t, false) - before; grown > 32<<20 {
		t.Errorf("the server needed %d MB more for a file of 100 MB", grown>>20)
	}
}

// peak is the most memory that the server has had, of all time or since it was last asked to forget.
func (s *server) peak(t *testing.T, forget bool) int64 {
	t.Helper()
	if forget {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.cmd.Process.Pid), []byte("5"), 0); err != nil {
			t.Fatal(err)
		}
	}
	kb, err := strconv.ParseInt(strings.TrimSuffix(status(s.cmd.Process.Pid, "VmHWM"), " kB"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

// doNothing answers what the SDK asks in a benchmark and does nothing for it: what is left is the SDK's own time.
func doNothing() http.Handler {
	var made atomic.Int64
	big := bytes.Repeat([]byte("x"), 100<<20)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v2/sandboxes", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprintf(w, `{"templateID":"t","sandboxID":"nothing%d","clientID":"c","envdVersion":"0.6.13","envdAccessToken":"x"}`, made.Add(1))
	})
	mux.HandleFunc("DELETE /sandboxes/{id}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("POST /execute", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, `{"type":"number_of_executions","execution_count":1}`+"\n"+
			`{"type":"result","text":"2","is_main_result":true}`+"\n"+`{"type":"end_of_execution"}`+"\n")
	})
	mux.HandleFunc("POST /process.Process/Start", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/connect+json")
		_, _ = w.Write(frame(0, `{"event":{"start":{"pid":1}}}`))
		_, _ = w.Write(frame(0, `{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}`))
		_, _ = w.Write(frame(2, `{}`))
	})
	mux.HandleFunc("POST /files", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `[{"name":"f","path":"/tmp/f","type":"file"}]`)
	})
	mux.HandleFunc("GET /files", func(w http.ResponseWriter, r *http.Request) {
		body := big
		if r.FormValue("path") == "/tmp/small" {
			body = big[:1024]
		}
		_, _ = w.Write(body)
	})
	return mux
}

// frame is one envelope of Connect.
func frame(flags byte, body string) []byte {
	n := len(body)
	return append([]byte{flags, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, body...)
}
