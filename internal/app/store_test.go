package app_test

import (
	"database/sql"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
	"github.com/covehq/cove/test/slow"
)

// startPostgres is a Postgres for one test, which may end it earlier.
func startPostgres(t *testing.T) (*pgtest.Server, config.DatabaseURL) {
	t.Helper()
	server, err := pgtest.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	dsn, err := server.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return server, config.DatabaseURL(dsn)
}

func TestS4_126_AServerKeepsItsStateInPostgres(t *testing.T) {
	postgres, dsn := startPostgres(t)
	cfg := testConfig(t)
	cfg.Database.URLFile = filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(cfg.Database.URLFile, []byte(string(dsn)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	kept := flow(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(cfg.DataDir, "server", "cove.db")); !os.IsNotExist(err) {
		t.Errorf("there is a SQLite file too: %v", err)
	}

	again, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if again.NewKey || again.Key != s.Key {
		t.Error("the key changed")
	}
	c := connect(t, again)
	if a, err := c.Artifact(t.Context(), kept); err != nil || a.Name != "kept.txt" {
		t.Errorf("an artifact after a restart: %+v, %v", a, err)
	}
	if info, err := c.GetSession(t.Context(), "thread"); err != nil || info.Key != "thread" {
		t.Errorf("a session after a restart: %+v, %v", info, err)
	}

	other := testConfig(t)
	other.Database = cfg.Database
	if _, err := app.Start(t.Context(), other, quiet, func(string) {}); err == nil || !strings.Contains(err.Error(), "set server.replicas") {
		t.Errorf("a second server that knows nothing of the first: %v", err)
	}

	postgres.Close()
	want := func() bool {
		resp, err := http.Get(again.URL + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return err == nil && resp.StatusCode == http.StatusServiceUnavailable && strings.Contains(string(body), `"database":"failed"`)
	}
	for end := time.Now().Add(2 * time.Minute); !want() && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
	if !want() {
		t.Error("a server without its database says that it is ready")
	}
	if _, err := c.GetSession(t.Context(), "thread"); err == nil || !strings.Contains(err.Error(), "the database does not answer") {
		t.Errorf("a caller is told %v", err)
	}
}

func connect(t *testing.T, s *app.Server) *client.Client {
	t.Helper()
	c, err := client.New(s.URL, string(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// flow does a little of everything that leaves rows, and returns the id of an artifact.
func flow(t *testing.T, s *app.Server) (artifact string) {
	t.Helper()
	ctx, c := t.Context(), connect(t, s)
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	sb, err := c.Create(ctx, client.CreateRequest{Template: "base", Metadata: map[string]string{"who": "me"}})
	check("create", err)
	out, err := sb.Exec(ctx, client.ExecRequest{Command: "echo hello"})
	check("exec", err)
	if out.Stdout != "hello\n" {
		t.Errorf("it said %q", out.Stdout)
	}
	listed := 0
	for info, err := range c.List(ctx, client.ListRequest{Metadata: map[string]string{"who": "me"}}) {
		check("list", err)
		if info.ID == sb.ID {
			listed++
		}
	}
	if listed != 1 {
		t.Errorf("the sandbox is listed %d times", listed)
	}
	_, err = c.OpenSession(ctx, "thread", client.SessionRequest{Template: "python"})
	check("open a session", err)
	_, err = c.RunInSession(ctx, "thread", client.SessionRunRequest{Code: "1 + 1"}, "once")
	check("run in a session", err)
	ran, err := c.RunInSession(ctx, "thread", client.SessionRunRequest{Code: "import os; open(os.path.expanduser('~/session/artifacts/kept.txt'), 'w').write('kept')"}, "")
	check("run in a session", err)
	for a, err := range c.Artifacts(ctx, client.ArtifactsRequest{}) {
		check("list artifacts", err)
		artifact = a.ID
	}
	if artifact == "" {
		t.Fatalf("nothing was kept of %+v", ran)
	}
	check("kill", sb.Kill(ctx))
	events := 0
	for e, err := range c.Events(ctx, client.EventsRequest{}) {
		check("events", err)
		if e.Sandbox == sb.ID {
			events++
		}
	}
	if events < 3 {
		t.Errorf("%d events of a sandbox that was created, started and killed", events)
	}
	return artifact
}

func TestDoctorLooksAtTheDatabase(t *testing.T) {
	_, dsn := startPostgres(t)
	secret := func(u *url.URL) config.DatabaseURL {
		q := u.Query()
		q.Set("password", "hunter2")
		u.RawQuery = q.Encode()
		return config.DatabaseURL(u.String())
	}
	good, err := url.Parse(string(dsn))
	if err != nil {
		t.Fatal(err)
	}
	bad := *good
	bad.Path = "/nope"
	file := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(file, []byte("hunter2"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		database    config.Database
		level, says string
	}{
		"SQLite":        {config.Database{}, "ok", "SQLite in "},
		"Postgres":      {config.Database{URL: secret(good)}, "ok", "Postgres 1"},
		"no such":       {config.Database{URL: secret(&bad)}, app.LevelRefuse, "CREATE DATABASE"},
		"no file":       {config.Database{URLFile: "/nonexistent/url"}, app.LevelRefuse, "no such file"},
		"a file of tea": {config.Database{URLFile: file}, app.LevelRefuse, "must hold one line"},
	} {
		cfg := testConfig(t)
		cfg.Database = c.database
		found := false
		for _, f := range app.Doctor(t.Context(), cfg) {
			if f.Name != "database" {
				continue
			}
			found = true
			if f.Level != c.level || !strings.Contains(f.Detail, c.says) || strings.Contains(f.Detail+f.Remedy, "hunter2") {
				t.Errorf("%s: %+v", name, f)
			}
		}
		if !found {
			t.Errorf("%s: no finding", name)
		}
		if _, err := app.Start(t.Context(), cfg, quiet, func(string) {}); c.level != "ok" && (err == nil || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%s: started: %v", name, err)
		}
	}
}

// TestDatabase_LockedByAnotherProcess: no sandbox could be created, and it is not this server's defect.
func TestDatabase_LockedByAnotherProcess(t *testing.T) {
	cfg := testConfig(t)
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ask := func(method, path string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, strings.NewReader(`{"template":"base"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", string(s.Key))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, string(body)
	}
	if resp, body := ask("POST", "/cove/v1/sandboxes"); resp.StatusCode != http.StatusCreated {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	other, err := sql.Open("sqlite", filepath.Join(cfg.DataDir, "server", "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	other.SetMaxOpenConns(1)
	if _, err := other.ExecContext(t.Context(), "BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	resp, body := ask("POST", "/cove/v1/sandboxes")
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "locked by another process") {
		t.Errorf("a create: %d %s", resp.StatusCode, body)
	}
	until := func(status int, says string) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			resp, body := ask("GET", "/readyz")
			if resp.StatusCode == status && strings.Contains(body, says) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("readiness is %d %s", resp.StatusCode, body)
			}
		}
	}
	until(http.StatusServiceUnavailable, `"database":"failed"`)
	if _, err := other.ExecContext(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	until(http.StatusOK, `"database":"ok"`)
}

// TestDatabase_Hangs: what needs the database is refused soon, and a living sandbox stays usable.
func TestDatabase_Hangs(t *testing.T) {
	slow.Test(t)
	_, dsn := startPostgres(t)
	proxy := pgtest.NewProxy(t, string(dsn))
	cfg := testConfig(t)
	cfg.Database.URL = config.DatabaseURL(proxy.URL)
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := connect(t, s)
	sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	proxy.Stall()
	var last time.Duration // that the last answer took
	ask := func(method, path, body string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", string(s.Key))
		begun := time.Now()
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		took := time.Since(begun)
		t.Logf("%s %s: %d after %v", method, path, resp.StatusCode, took.Round(time.Millisecond))
		last = took
		return resp, string(text)
	}
	for _, r := range [][3]string{
		{"GET", "/cove/v1/sandboxes", ""},
		{"GET", "/cove/v1/sandboxes/sbnone", ""},
		{"POST", "/cove/v1/sandboxes", `{"template":"base"}`},
		{"GET", "/cove/v1/sessions", ""},
		{"PUT", "/cove/v1/sessions/other", `{}`},
		{"GET", "/cove/v1/artifacts", ""},
		{"GET", "/cove/v1/keys", ""},
		{"GET", "/cove/v1/events", ""},
		{"GET", "/v2/sandboxes", ""},
		{"POST", "/sandboxes", `{"templateID":"base"}`},
		{"GET", "/v1/sandboxes", ""},
		{"POST", "/cove/v1/sandboxes/" + sb.ID + "/timeout", `{"timeout_seconds":60}`},
		{"POST", "/cove/v1/sessions/thread/run", `{"code":"1"}`},
		{"POST", "/sandboxes/" + sb.ID + "/timeout", `{"timeout":60}`},
		{"POST", "/v1/sandboxes/" + sb.ID + "/renew-expiration", `{"expiresAt":"2100-01-01T00:00:00Z"}`},
	} {
		// A request makes one call, or two with that for its key, and each has 0.5 s once the
		// database is suspect. A third wait shows in every attempt, a slow machine only in some.
		fastest := time.Hour
		for range 5 {
			resp, body := ask(r[0], r[1], r[2])
			if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "the database does not answer") {
				t.Errorf("%s %s: %d %s", r[0], r[1], resp.StatusCode, body)
			}
			if fastest = min(fastest, last); fastest < 1400*time.Millisecond {
				break
			}
		}
		if fastest >= 1400*time.Millisecond {
			t.Errorf("%s %s is answered after %v at best", r[0], r[1], fastest)
		}
	}
	// OpenSandbox's clients read no 503 of a create.
	resp, body := ask("POST", "/v1/sandboxes", `{"image":{"uri":"base"},"timeout":60,"resourceLimits":{"cpu":"1"},"entrypoint":["tail","-f","/dev/null"]}`)
	if resp.StatusCode != http.StatusInternalServerError || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "the database does not answer") {
		t.Errorf("a create in OpenSandbox's API: %d %v %s", resp.StatusCode, resp.Header, body)
	}
	if out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "echo hello"}); err != nil || out.Stdout != "hello\n" {
		t.Errorf("a living sandbox: %+v, %v", out, err)
	}
	if resp, body := ask("DELETE", "/cove/v1/sandboxes/"+sb.ID, ""); resp.StatusCode != http.StatusOK {
		t.Errorf("an end does not need the database: %d %s", resp.StatusCode, body)
	}
	proxy.Resume()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if resp, body := ask("GET", "/cove/v1/sandboxes", ""); resp.StatusCode == http.StatusOK {
			break
		} else if time.Now().After(end) {
			t.Fatalf("after the hang: %d %s", resp.StatusCode, body)
		}
	}
}
