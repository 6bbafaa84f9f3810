package app_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

// wire carries connections to a database until it is cut.
type wire struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
	work  sync.WaitGroup
}

// newWire is a way to the same database that can be cut.
func newWire(t *testing.T, dsn config.DatabaseURL) (*wire, config.DatabaseURL) {
	t.Helper()
	u, err := url.Parse(string(dsn))
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	const name = ".s.PGSQL.5432"
	dir, err := os.MkdirTemp("", "wire")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{listener: l, to: filepath.Join(q.Get("host"), name), conns: map[net.Conn]bool{}}
	w.work.Go(w.serve)
	t.Cleanup(func() {
		l.Close()
		w.set(true)
		w.work.Wait()
		os.RemoveAll(dir)
	})
	q.Set("host", dir)
	u.RawQuery = q.Encode()
	return w, config.DatabaseURL(u.String())
}

func (w *wire) serve() {
	for {
		in, err := w.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("unix", w.to)
		if err != nil || !w.keep(in, out) {
			in.Close()
			continue
		}
		w.work.Go(func() { io.Copy(in, out); in.Close() })
		w.work.Go(func() { io.Copy(out, in); out.Close() })
	}
}

func (w *wire) keep(conns ...net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range conns {
		if w.cut {
			c.Close()
		} else {
			w.conns[c] = true
		}
	}
	return !w.cut
}

// set cuts the wire, or mends it.
func (w *wire) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	for c := range w.conns {
		if cut {
			c.Close()
			delete(w.conns, c)
		}
	}
}

// several starts servers that share a database, a driver and a volume, the first one first.
func several(t *testing.T, n int, change func(i int, cfg *config.Config)) (servers []*app.Server) {
	t.Helper()
	end := app.ShareDriver()
	t.Cleanup(func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	dsn := config.DatabaseURL(pgtest.URL(t))
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("e2b_"+strings.Repeat("0a", 20)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		cfg := testConfig(t)
		cfg.Database.URL, cfg.Server.Replicas, cfg.Auth.AdminKeyFile, cfg.AgentSandbox.Listen = dsn, n, key, "127.0.0.1:0"
		if change != nil {
			change(i, &cfg)
		}
		s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		servers = append(servers, s)
	}
	return servers
}

// soon waits until something is so.
func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); {
		if is() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("not within two minutes: %s", what)
}

func TestAnyServerServesEverySandbox(t *testing.T) {
	servers := several(t, 3, nil)
	ctx := t.Context()
	a, b := connect(t, servers[0]), connect(t, servers[1])
	made, err := a.Create(ctx, client.CreateRequest{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	sb, err := b.Get(ctx, made.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("a command", func(t *testing.T) {
		out, err := sb.Exec(ctx, client.ExecRequest{Command: "echo hello; exit 3"})
		if err != nil || out.Stdout != "hello\n" || out.ExitCode != 3 {
			t.Errorf("%+v, %v", out, err)
		}
	})
	t.Run("files of some size", func(t *testing.T) {
		text := strings.Repeat("0123456789abcdef", 1<<16)
		path := "moved-" + made.ID
		if _, err := sb.Files().WriteBytes(ctx, path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := sb.Files().Read(ctx, path); err != nil || string(got) != text {
			t.Errorf("%d of %d bytes, %v", len(got), len(text), err)
		}
		if err := sb.Files().Remove(ctx, path, false); err != nil {
			t.Error(err)
		}
	})
	t.Run("a request of E2B by its header", func(t *testing.T) {
		r := request(t, servers[1], "GET", "/health", "")
		r.Header.Set("E2b-Sandbox-Id", made.ID)
		r.Header.Set("E2b-Sandbox-Port", "49983")
		if status, body := do(t, r); status != http.StatusNoContent {
			t.Errorf("%d %s", status, body)
		}
	})
	t.Run("a third server", func(t *testing.T) {
		if status, body := do(t, request(t, servers[2], "GET", "/sandboxes/"+made.ID, "")); status != http.StatusOK || !strings.Contains(body, made.ID) {
			t.Errorf("%d %s", status, body)
		}
	})
	t.Run("who says to come from a server is believed nothing", func(t *testing.T) {
		r := request(t, servers[1], "GET", "/cove/v1/sandboxes/"+made.ID+"/usage", "")
		r.Header.Set("Cove-Via", "door=main&remote=127.0.0.1:1")
		if status, body := do(t, r); status != http.StatusOK {
			t.Errorf("%d %s", status, body)
		}
		r.Header.Del("X-Api-Key")
		if status, _ := do(t, r); status != http.StatusUnauthorized {
			t.Errorf("without a key: %d", status)
		}
	})
	t.Run("nobody but servers is let in where servers are", func(t *testing.T) {
		for name, certificates := range map[string][]tls.Certificate{"none": nil, "another": {someCertificate(t)}} {
			c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates}}}
			r, err := http.NewRequestWithContext(ctx, "GET", servers[0].PeerURL()+"/healthz", nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp, err := c.Do(r); err == nil {
				resp.Body.Close()
				t.Errorf("with %s: %d", name, resp.StatusCode)
			}
		}
	})
	t.Run("a thousand requests leave nothing behind", func(t *testing.T) {
		each := func(n int) {
			var work sync.WaitGroup
			for range 4 {
				work.Go(func() {
					for range n / 4 {
						if status, body := do(t, request(t, servers[1], "GET", "/cove/v1/sandboxes/"+made.ID+"/usage", "")); status != http.StatusOK {
							t.Errorf("%d %s", status, body)
							return
						}
					}
				})
			}
			work.Wait()
		}
		each(40)
		before := runtime.NumGoroutine()
		each(1000)
		// A few connections more may be kept than after the first; a thousand would not be overlooked.
		soon(t, "goroutines as before", func() bool { return runtime.NumGoroutine() <= before+100 })
	})
	t.Run("a kill", func(t *testing.T) {
		if err := sb.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		if got, err := a.Get(ctx, made.ID); err != nil || got.State != "ended" {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

func TestAKeyMeansOneSandboxOnAllServers(t *testing.T) {
	servers := several(t, 2, nil)
	a, b := connect(t, servers[0]), connect(t, servers[1])
	for round := range 100 {
		ids, errs, work := make([]string, 2), make([]error, 2), sync.WaitGroup{}
		for i, c := range []*client.Client{a, b} {
			work.Go(func() {
				sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base", Key: fmt.Sprint("k", round)})
				if errs[i] = err; err == nil {
					ids[i] = sb.ID
				}
			})
		}
		work.Wait()
		if err := errors.Join(errs...); err != nil || ids[0] != ids[1] {
			t.Fatalf("round %d: %v, %v", round, ids, err)
		}
		if sb, err := b.Get(t.Context(), ids[0]); err != nil || sb.Kill(t.Context()) != nil {
			t.Fatal(err)
		}
	}
}

func TestAnotherServerTakesOver(t *testing.T) {
	var w *wire
	volume := filepath.Join(t.TempDir(), "volume")
	servers := several(t, 2, func(i int, cfg *config.Config) {
		cfg.DataDir, cfg.Server.SharedVolume = volume, true
		if i == 0 {
			w, cfg.Database.URL = newWire(t, cfg.Database.URL)
		}
	})
	ctx := t.Context()
	a, b := connect(t, servers[0]), connect(t, servers[1])
	made, err := a.Create(ctx, client.CreateRequest{Template: "base", TimeoutSeconds: 300})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.OpenSession(ctx, "thread", client.SessionRequest{Template: "base"}); err != nil {
		t.Fatalf("a session, which the first server keeps: %v", err)
	}
	sb, err := b.Get(ctx, made.ID)
	if err != nil {
		t.Fatal(err)
	}
	status, text := do(t, request(t, servers[0], "POST", "/sandboxes", `{"templateID":"base","secure":true}`))
	var secure struct {
		ID    string `json:"sandboxID"`
		Token string `json:"envdAccessToken"`
	}
	if err := json.Unmarshal([]byte(text), &secure); err != nil || status != http.StatusCreated || secure.Token == "" {
		t.Fatalf("create by E2B: %d %s, %v", status, text, err)
	}
	begun, broken := make(chan struct{}), make(chan error, 1)
	go func() {
		var last error
		for e, err := range sb.ExecStream(ctx, client.ExecRequest{Command: "echo begun; sleep 60"}) {
			if last = err; err == nil && e.Type == client.EventStdout {
				close(begun)
			}
		}
		broken <- last
	}()
	<-begun
	name := servers[0].Name()

	w.set(true) // the first server does not reach the database, and nobody reaches it
	if err := servers[0].Cut(); err != nil {
		t.Fatal(err)
	}
	if err := <-broken; err == nil || !strings.Contains(err.Error(), "the server that ran this is gone") {
		t.Errorf("the stream ended with %v", err)
	}
	soon(t, "the next run works", func() bool {
		out, err := sb.Exec(ctx, client.ExecRequest{Command: "echo again"})
		return err == nil && out.Stdout == "again\n"
	})
	for token, want := range map[string]int{secure.Token: http.StatusOK, "another": http.StatusUnauthorized} {
		var status int
		var body string
		soon(t, "the other sandbox is taken over, too", func() bool {
			r := request(t, servers[1], "GET", "/files?path=/etc/hostname", "")
			r.Header.Set("E2b-Sandbox-Id", secure.ID)
			r.Header.Set("E2b-Sandbox-Port", "49983")
			r.Header.Set("X-Access-Token", token)
			status, body = do(t, r)
			return status != http.StatusBadGateway
		})
		if status != want {
			t.Errorf("with a token that the other server gave out: %d %s, want %d", status, body, want)
		}
	}
	soon(t, "the session goes on", func() bool {
		_, err := b.GetSession(ctx, "thread")
		return err == nil
	})
	soon(t, "the façade is there", func() bool { return facade(t, servers[1]) == http.StatusOK })

	w.set(false)
	soon(t, "the first server is back under another name", func() bool { return servers[0].Name() != name })
	if out, err := sb.Exec(ctx, client.ExecRequest{Command: "echo still"}); err != nil || out.Stdout != "still\n" {
		t.Errorf("%+v, %v", out, err)
	}
	if err := sb.Kill(ctx); err != nil {
		t.Error(err)
	}
}

func TestAServerThatLeavesHandsOver(t *testing.T) {
	servers := several(t, 2, nil)
	ctx := t.Context()
	a, b := connect(t, servers[0]), connect(t, servers[1])
	made, err := a.Create(ctx, client.CreateRequest{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := authorityOf(t, servers[0]), authorityOf(t, servers[1]); !a.Equal(b) {
		t.Error("clients that trust one server do not trust the other")
	}
	if status := facade(t, servers[1]); status != http.StatusOK {
		t.Errorf("the façade of the second server: %d", status)
	}
	if _, err := b.GetSession(ctx, "thread"); err == nil || !strings.Contains(err.Error(), "server.shared_volume") {
		t.Errorf("a session without a volume for all: %v", err)
	}
	if err := servers[0].Close(); err != nil {
		t.Fatal(err)
	}
	soon(t, "the sandbox is the other's", func() bool {
		sb, err := b.Get(ctx, made.ID)
		if err != nil {
			return false
		}
		out, err := sb.Exec(ctx, client.ExecRequest{Command: "echo on"})
		return err == nil && out.Stdout == "on\n"
	})
	soon(t, "the façade is the other's", func() bool { return facade(t, servers[1]) == http.StatusOK })
}

// facade asks a server's façade for the sandboxes that there are.
func facade(t *testing.T, s *app.Server) (status int) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "GET", s.FacadeURL()+"/apis/agents.x-k8s.io/v1alpha1/namespaces/default/sandboxes", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+string(s.Key))
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	resp, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

func request(t *testing.T, s *app.Server, method, path, body string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), method, s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Api-Key", string(s.Key))
	return r
}

func do(t *testing.T, r *http.Request) (status int, body string) {
	t.Helper()
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Error(err)
		return 0, ""
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return resp.StatusCode, string(text)
}

// authorityOf is who signed a façade's certificate.
func authorityOf(t *testing.T, s *app.Server) *x509.Certificate {
	t.Helper()
	conn, err := tls.Dial("tcp", strings.TrimPrefix(s.FacadeURL(), "https://"), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	chain := conn.ConnectionState().PeerCertificates
	return chain[len(chain)-1]
}

func someCertificate(t *testing.T) tls.Certificate {
	t.Helper()
	pair, _, err := app.OwnCertificate(t.TempDir(), "peer.cove", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return pair
}
