package sandbox_test

import (
	"context"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
)

// TestRealAgent goes through one life with a real agent behind the Manager, over two servers, in real time.
func TestRealAgent(t *testing.T) {
	signals := make(chan os.Signal, 1) // os/signal keeps one goroutine for ever once anybody has listened, as the agent does
	signal.Notify(signals, syscall.SIGCHLD)
	signal.Stop(signals)
	before := runtime.NumGoroutine()
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	driver, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	serve := func() *sandbox.Manager {
		m := sandbox.NewManager(sandbox.Config{}, driver, store, fakeTemplates{}, sandbox.NopObserver{}, slog.New(slog.DiscardHandler))
		if err := m.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		return m
	}
	m := serve()
	sb, _, err := m.Create(t.Context(), acme, sandbox.Spec{Template: "base", Env: map[string]string{"GREETING": "hello"}})
	if err != nil {
		t.Fatal(err)
	}
	if out := output(t, m, sb.ID, `printf %s "$GREETING"`); out != "hello" {
		t.Errorf("the command said %q", out)
	}
	client, err := m.Agent(t.Context(), acme, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write(t.Context(), agentapi.WriteParams{Path: "kept.txt"}, strings.NewReader("kept")); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	m = serve()
	if client, err = m.Agent(t.Context(), acme, sb.ID); err != nil {
		t.Fatal(err)
	}
	_, file, err := client.Read(t.Context(), agentapi.ReadParams{Path: "kept.txt"})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(file); string(b) != "kept" || err != nil {
		t.Errorf("after the restart the file holds %q, %v", b, err)
	}
	file.Close()
	if _, err := m.SetLifetime(t.Context(), acme, sb.ID, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for e := range m.Events(ctx, acme, sandbox.EventQuery{Sandbox: sb.ID, Follow: true}) {
		if e.Type == sandbox.LifecycleEnded {
			break
		}
	}
	if sb, err := m.Get(t.Context(), acme, sb.ID); err != nil || sb.Cause != sandbox.CauseExpired {
		t.Errorf("sandbox is %s by %q, %v", sb.State, sb.Cause, err)
	}
	if _, err := client.Hello(t.Context()); !fault.Is(err, fault.Gone) {
		t.Errorf("after the end: %v", err)
	}
	for _, c := range []io.Closer{m, driver, store} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for end := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond) // database/sql closes without waiting
	}
	if n := runtime.NumGoroutine(); n > before {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines before, %d after:\n%s", before, n, buf[:runtime.Stack(buf, true)])
	}
}

func output(t *testing.T, m *sandbox.Manager, id, script string) string {
	t.Helper()
	stream, err := m.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"/bin/sh", "-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	var out []byte
	for e, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == agentapi.EventStdout {
			out = append(out, e.Data...)
		}
	}
	return string(out)
}

// BenchmarkCreate is what the domain adds to a driver that takes no time.
func BenchmarkCreate(b *testing.B) {
	store, err := sqlstore.Open(filepath.Join(b.TempDir(), "cove.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	driver := newFakeDriver()
	m := sandbox.NewManager(sandbox.Config{}, driver, store, fakeTemplates{}, sandbox.NopObserver{}, slog.New(slog.DiscardHandler))
	if err := m.Open(b.Context()); err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	for b.Loop() {
		if _, _, err := m.Create(b.Context(), acme, sandbox.Spec{}); err != nil {
			b.Fatal(err)
		}
	}
}
