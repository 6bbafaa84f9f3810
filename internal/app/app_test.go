package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/template"
)

func testConfig(t *testing.T) config.Config {
	cfg := config.Default()
	cfg.Listen, cfg.DataDir, cfg.Driver, cfg.ShutdownGrace = "127.0.0.1:0", filepath.Join(t.TempDir(), "data"), config.DriverInproc, time.Second
	return cfg
}

var quiet = slog.New(slog.DiscardHandler)

func TestASecondServerOnADataDirectoryIsRefused(t *testing.T) {
	cfg := testConfig(t)
	first, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	_, err = app.Start(t.Context(), cfg, quiet, func(string) {})
	if !errors.Is(err, app.ErrLocked) || !strings.Contains(err.Error(), "already runs on") {
		t.Errorf("the second: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Errorf("closing twice: %v", err)
	}
	again, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatalf("after the first has gone: %v", err)
	}
	if again.NewKey || again.Key != first.Key {
		t.Error("the key changed")
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestAStartThatFailsLeavesNothingBehind(t *testing.T) {
	cfg := testConfig(t)
	cfg.Sandbox.DefaultTemplate = "nope"
	before := runtime.NumGoroutine()
	for range 3 {
		if _, err := app.Start(t.Context(), cfg, quiet, func(string) {}); err == nil || !strings.Contains(err.Error(), `"nope"`) {
			t.Fatalf("started: %v", err)
		}
	}
	for deadline := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines before, %d after", before, after)
	}
	cfg.Sandbox.DefaultTemplate = ""
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatalf("and the data directory is free: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestRunAnnouncesServesAndWithdraws(t *testing.T) {
	cfg := testConfig(t)
	cfg.ReadyFile = filepath.Join(t.TempDir(), "ready.json")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var out bytes.Buffer
	done := make(chan error, 1)
	go func() { done <- app.Run(ctx, cfg, &out, io.Discard, true) }()

	address := await(t, cfg.ReadyFile, done)
	info, err := os.Stat(cfg.ReadyFile)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the ready file holds a key: %v %v", info.Mode(), err)
	}
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200, "/nothing": 404, "/cove/v1/sandboxes": 401} {
		resp, err := http.Get(address.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want || resp.Header.Get("X-Request-Id") == "" {
			t.Errorf("%s: %d, want %d; request %q", path, resp.StatusCode, want, resp.Header.Get("X-Request-Id"))
		}
	}
	found, err := app.Find(t.Context(), cfg.DataDir)
	if err != nil || found != address {
		t.Errorf("found %+v, %v; want %+v", found, err, address)
	}
	c, err := client.New(address.URL, address.APIKey)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if list, err := c.Templates(t.Context()); err != nil || len(list) == 0 {
		t.Errorf("templates %v, %v", list, err)
	}

	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, paste := range []string{address.URL, " run -c", "E2B_API_URL=" + address.URL + " E2B_SANDBOX_URL=" + address.URL + " E2B_API_KEY="} {
		if !strings.Contains(out.String(), paste) {
			t.Errorf("it said %q and not %q", out.String(), paste)
		}
	}
	if _, err := app.Find(t.Context(), cfg.DataDir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after its end it is found: %v", err)
	}
}

func TestAStreamThatOutlivesTheGraceIsToldWhy(t *testing.T) {
	cfg := testConfig(t)
	cfg.ShutdownGrace = 50 * time.Millisecond
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := client.New(s.URL, string(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	var last error
	for e, err := range sb.ExecStream(t.Context(), client.ExecRequest{Command: "echo here; sleep 60"}) {
		last = err
		if e.Type == client.EventStdout {
			go s.Close() // the test's own Close waits for it
		}
	}
	if last == nil {
		t.Error("the stream ended without a word")
	}
}

func TestAServerStopsAlthoughACellRunsThatNobodyHears(t *testing.T) {
	cfg := testConfig(t)
	cfg.ShutdownGrace = 50 * time.Millisecond
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := client.New(s.URL, string(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.OpenSession(t.Context(), "thread-1", client.SessionRequest{Template: "python"}); err != nil {
		t.Fatal(err)
	}
	forever := client.SessionRunRequest{Code: "import time\nwhile True: time.sleep(1)", OnDisconnect: "survive"}
	for e, err := range c.StreamInSession(t.Context(), "thread-1", forever, "") {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == client.EventStarted {
			break
		}
	}
	stopped := make(chan error, 1)
	go func() { stopped <- s.Close() }()
	select {
	case err := <-stopped:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Minute):
		t.Fatal("the server waits for a cell that never ends")
	}
}

func await(t *testing.T, file string, done chan error) app.Address {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-done:
			t.Fatalf("the server ended: %v", err)
		default:
		}
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		var a app.Address
		if err := json.Unmarshal(text, &a); err != nil {
			t.Fatalf("half a ready file: %q", text)
		}
		return a
	}
	t.Fatal("no ready file")
	return app.Address{}
}

func TestAPauseWithoutALimitIsSaidInTheDomainsWords(t *testing.T) {
	for configured, want := range map[time.Duration]time.Duration{0: -1, time.Hour: time.Hour} {
		cfg := config.Default()
		cfg.Sandbox.PausedLifetime, cfg.Sandbox.StartTimeout = configured, 20*time.Second
		got := app.SandboxConfig(cfg, template.Limits{})
		if got.PausedLifetime != want || got.StartTimeout != 20*time.Second || got.Validate() != nil {
			t.Errorf("%v is %v, %v", configured, got.PausedLifetime, got.StartTimeout)
		}
	}
}

func TestBar(t *testing.T) {
	for _, c := range []struct {
		done, total int64
		want        string
	}{
		{0, 0, ""}, {0, 40, " [....................] 0/40"}, {10, 40, " [#####...............] 10/40"}, {41, 40, " [####################] 41/40"},
	} {
		if got := app.Bar(c.done, c.total); got != c.want {
			t.Errorf("%d of %d: %q", c.done, c.total, got)
		}
	}
}
