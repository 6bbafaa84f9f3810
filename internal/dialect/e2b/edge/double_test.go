package edge_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/edge"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// domain is a double of the sandbox.Manager, with one real agent for every sandbox.
type domain struct {
	driver *inproc.Driver

	mu      sync.Mutex
	living  map[string]sandbox.Sandbox
	stopped map[string]chan struct{}
	resumed []time.Duration
	away    bool // the database does not answer
}

const agentID = "sbagent"

func newDomain(t *testing.T) *domain {
	t.Helper()
	d, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	base := &template.Template{Name: "base", Digest: "host", User: "user", Trees: []template.Tree{{Target: "/", Lower: []string{"/"}}}}
	if err := d.Start(t.Context(), sandbox.StartRequest{ID: agentID, Tenant: "acme", Template: base}); err != nil {
		t.Fatal(err)
	}
	return &domain{driver: d, living: map[string]sandbox.Sandbox{}, stopped: map[string]chan struct{}{}}
}

func (d *domain) add(id string, o target.Options, change func(*sandbox.Sandbox)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sb := sandbox.Sandbox{ID: id, Tenant: "acme", State: sandbox.StateRunning, Annotations: map[string]string{target.Annotation: o.Encode()}}
	if change != nil {
		change(&sb)
	}
	d.living[id], d.stopped[id] = sb, make(chan struct{})
	if sb.State != sandbox.StateRunning {
		close(d.stopped[id])
	}
}

func (d *domain) stop(id string, state sandbox.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sb := d.living[id]
	sb.State = state
	d.living[id] = sb
	close(d.stopped[id])
}

func (d *domain) Lookup(_ context.Context, id string) (auth.Principal, sandbox.Sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sb, ok := d.living[id]
	if d.away {
		return auth.Principal{}, sandbox.Sandbox{}, fault.New(fault.Unavailable, "the database does not answer")
	}
	if !ok {
		return auth.Principal{}, sandbox.Sandbox{}, fault.New(fault.NotFound, "there is no sandbox %q", id)
	}
	return auth.Principal{Tenant: sb.Tenant}, sb, nil
}

func (d *domain) Each(yield func(sandbox.Sandbox) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, sb := range d.living {
		if !yield(sb) {
			return
		}
	}
}

func (d *domain) Stopped(id string) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stopped[id]
}

func (d *domain) Resume(_ context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sb := d.living[id]
	if p.Tenant != sb.Tenant {
		return sandbox.Sandbox{}, fault.New(fault.NotFound, "not yours")
	}
	d.resumed = append(d.resumed, lifetime)
	sb.State = sandbox.StateRunning
	d.living[id], d.stopped[id] = sb, make(chan struct{})
	return sb, nil
}

func (d *domain) PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error) {
	return d.Agent(ctx, p, id)
}

func (d *domain) Agent(_ context.Context, p auth.Principal, _ string) (*agentapi.Client, error) {
	if p.Tenant != "acme" {
		return nil, fault.New(fault.NotFound, "not yours")
	}
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return d.driver.Dial(ctx, agentID) }), nil
}

var quiet = slog.New(slog.DiscardHandler)

var tokens = target.NewTokens([]byte("a secret of the server's that nobody knows"))

// world is an edge behind a server, with handlers that say who they are.
type world struct {
	*httptest.Server
	domain *domain
	client *http.Client
}

const domainName = "cove.test"

func newWorld(t *testing.T, change func(*edge.Config)) *world {
	t.Helper()
	return newWorldWith(t, change, say("envd"), say("interpreter"), (*httptest.Server).Start)
}

func newWorldWith(t *testing.T, change func(*edge.Config), envd, interpreter http.Handler, start func(*httptest.Server)) *world {
	t.Helper()
	w := &world{domain: newDomain(t)}
	cfg := edge.Config{Domain: domainName, Tokens: tokens, RetryFor: -1}
	if change != nil {
		change(&cfg)
	}
	e := edge.New(cfg, w.domain, envd, interpreter, quiet)
	w.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if !e.Matches(r) {
			io.WriteString(rw, "elsewhere")
			return
		}
		e.ServeHTTP(rw, r)
	}))
	start(w.Server)
	t.Cleanup(func() {
		w.Server.Close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	w.client = w.Client()
	w.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return w
}

// say answers with a name, the path and the sandbox that was found.
func say(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t := target.From(r.Context())
		t.Log(target.Line{Message: "heard"})
		io.WriteString(w, name+" "+r.URL.Path+" "+t.Sandbox.ID+" of "+t.Who.Tenant)
	})
}

type answer struct {
	status int
	header http.Header
	body   string
}

// ask sends a request; headers are "Name: value", and Host is one of them.
func (w *world) ask(t *testing.T, method, path, body string, headers ...string) answer {
	t.Helper()
	resp, err := w.try(t.Context(), method, path, strings.NewReader(body), headers...)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(b)}
}

func (w *world) try(ctx context.Context, method, path string, body io.Reader, headers ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, w.URL+path, body)
	if err != nil {
		return nil, err
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
		if name == "Host" {
			req.Host = value
		}
	}
	return w.client.Do(req)
}
