package agent_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
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

func TestAPortSaysThatItIsWell(t *testing.T) {
	h := newHome(t, agentapi.Boot{})
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := free.Addr().(*net.TCPAddr)
	free.Close()
	if err := h.Listen(t.Context(), agentapi.ListenParams{Port: at.Port, Health: "/health"}); err != nil {
		t.Fatal(err)
	}
	silent, err := net.Dial("tcp4", at.String()) // does not hold up the others for long
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for path, want := range map[string]string{"/health": `200 "OK"`, "/execute": `404 {"detail":"Not Found"}`} {
		got, err := http.Get("http://" + at.String() + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(got.Body)
		got.Body.Close()
		if said := fmt.Sprintf("%d %s", got.StatusCode, body); err != nil || said != want {
			t.Errorf("%s: %s, %v", path, said, err)
		}
	}
	for _, odd := range []string{"GET\r\n\r\n", strings.Repeat("x", 10_000)} {
		conn, err := net.Dial("tcp4", at.String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, odd)
		if said, _ := io.ReadAll(conn); len(said) > 0 {
			t.Errorf("%.10q: %q", odd, said)
		}
		conn.Close()
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
