package agent_test

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

func TestFilesAreFoundByTheirNames(t *testing.T) {
	h := newHome(t, agentapi.Boot{})
	for _, name := range []string{"a.py", "b/c.py", "b/d/e.txt", "b/d/f.py"} {
		at := filepath.Join(h.dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("a.py", filepath.Join(h.dir, "link.py")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/", filepath.Join(h.dir, "b", "root")); err != nil {
		t.Fatal(err)
	}
	list, err := h.List(t.Context(), agentapi.ListParams{Path: h.dir, Names: []string{"*.py", "e.*"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list {
		got = append(got, strings.TrimPrefix(e.Path, h.dir+"/"))
		if e.Type != agentapi.EntryFile || e.Size != 1 || e.Mode != 0o600 || !e.Born.IsZero() && time.Since(e.Born) > time.Minute {
			t.Fatalf("%+v", e)
		}
	}
	if want := []string{"a.py", "b/c.py", "b/d/e.txt", "b/d/f.py"}; !slices.Equal(got, want) {
		t.Fatalf("got %q", got)
	}
	if _, err := h.List(t.Context(), agentapi.ListParams{Path: h.dir, Names: []string{"["}}); !fault.Is(err, fault.Invalid) {
		t.Fatalf("a pattern that is none: %v", err)
	}
	if _, err := h.List(t.Context(), agentapi.ListParams{Path: h.dir + "/none", Names: []string{"*"}}); !fault.Is(err, fault.NotFound) {
		t.Fatalf("nowhere: %v", err)
	}
}

func TestAPortIsOpened(t *testing.T) {
	h := newHome(t, agentapi.Boot{})
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.Addr().(*net.TCPAddr).Port
	if err := h.Listen(t.Context(), agentapi.ListenParams{Port: port}); err != nil {
		t.Fatalf("where somebody listens already: %v", err)
	}
	free.Close()
	for range 2 {
		if err := h.Listen(t.Context(), agentapi.ListenParams{Port: port}); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := net.Dial("tcp4", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	for _, bad := range []int{-1, 0, 80, 65536} {
		if err := h.Listen(t.Context(), agentapi.ListenParams{Port: bad}); !fault.Is(err, fault.Invalid) {
			t.Fatalf("port %d: %v", bad, err)
		}
	}
}

func TestAProcessHasTheVariablesOfAFile(t *testing.T) {
	h := newHome(t, agentapi.Boot{})
	run := func() string {
		t.Helper()
		stream, err := h.Exec(t.Context(), agentapi.ExecParams{
			Argv: []string{"sh", "-c", `echo "$A $B"`}, EnvFile: "vars", Env: map[string]string{"B": "asked"},
		})
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		for e, err := range stream.Events() {
			if err != nil {
				t.Fatal(err)
			}
			out.Write(e.Data)
		}
		return out.String()
	}
	if got := run(); got != " asked\n" {
		t.Fatalf("without the file: %q", got)
	}
	if err := os.WriteFile(filepath.Join(h.dir, "vars"), []byte("A='of the file'\nB=not\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := run(); got != "of the file asked\n" {
		t.Fatalf("got %q", got)
	}
	if err := os.Remove(filepath.Join(h.dir, "vars")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(h.dir, "vars"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got := run(); got != " asked\n" {
		t.Fatalf("what is no file: %q", got)
	}
}
