package egress_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/opensandbox/egress"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// one is a domain with one sandbox, which takes every policy that can be enforced.
type one struct {
	mu sync.Mutex
	sb sandbox.Sandbox
}

func (o *one) Get(context.Context, auth.Principal, string) (sandbox.Sandbox, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sb.ID == "" {
		return sandbox.Sandbox{}, fault.New(fault.NotFound, "there is no sandbox")
	}
	return o.sb, nil
}

func (o *one) ChangeNetwork(_ context.Context, _ auth.Principal, _ string, c sandbox.NetworkChange) (sandbox.Sandbox, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := c.Network.Validate(); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := (policy.Rules{}).Check(*c.Network, o.sb.Tenant); err != nil {
		return sandbox.Sandbox{}, err
	}
	annotations, err := c.Annotate(o.sb)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	all := maps.Clone(o.sb.Annotations)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, annotations)
	o.sb.Network, o.sb.Annotations = *c.Network, all
	return o.sb, nil
}

func newOne() *one {
	return &one{sb: sandbox.Sandbox{ID: "sb1", State: sandbox.StateRunning, Network: policy.Network{Mode: policy.Internet}}}
}

func (o *one) ask(t testing.TB, method, path, body string) (int, map[string]any) {
	t.Helper()
	h := egress.New(o, slog.New(slog.DiscardHandler))
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r.WithContext(access.With(r.Context(), &access.Target{Sandbox: sandbox.Sandbox{ID: "sb1"}, Port: access.PortEgress})))
	var got map[string]any
	if w.Body.Len() > 0 {
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatalf("%s: %v", w.Body, err)
		}
	}
	return w.Code, got
}

// short is an answer in one line.
func short(got map[string]any) string {
	p, ok := got["policy"].(map[string]any)
	if !ok {
		return fmt.Sprint(got)
	}
	out := fmt.Sprint(got["mode"], " ", p["defaultAction"])
	for _, r := range p["egress"].([]any) {
		rule := r.(map[string]any)
		out += fmt.Sprint(" ", rule["action"], ":", rule["target"])
	}
	if got["reason"] != nil {
		out += fmt.Sprint(" (", got["reason"], ")")
	}
	return out
}

func TestAPolicyIsChanged(t *testing.T) {
	o := newOne()
	for i, step := range []struct{ method, body, want string }{
		{"GET", "", "allow_all allow"},
		{"PATCH", `[{"action":"deny","target":"198.51.100.7"}]`, "enforcing allow deny:198.51.100.7"},
		{"PATCH", `[{"action":"ALLOW","target":"198.51.100.7"},{"action":"deny","target":"198.51.100.7"},{"action":"deny","target":"203.0.113.0/24"}]`, "enforcing allow allow:198.51.100.7 deny:203.0.113.0/24"},
		{"DELETE", `["203.0.113.0/24","192.0.2.1"]`, "enforcing allow allow:198.51.100.7"},
		{"DELETE", `["192.0.2.1"]`, "enforcing allow allow:198.51.100.7 (no matching targets found)"},
		{"PUT", `{"egress":[{"action":"allow","target":"198.51.100.0/24"}]}`, "enforcing deny allow:198.51.100.0/24"},
		{"PATCH", `[]`, "enforcing deny allow:198.51.100.0/24"},
		{"POST", ``, "deny_all deny"},
		{"POST", `{"defaultAction":"allow"}`, "allow_all allow"},
		{"PUT", `null`, "deny_all deny"},
		{"GET", "", "deny_all deny"},
	} {
		status, got := o.ask(t, step.method, "/policy", step.body)
		if status != 200 || short(got) != step.want || got["status"] != "ok" || got["enforcementMode"] == "" {
			t.Fatalf("step %d: %d %s, want %s", i, status, short(got), step.want)
		}
	}
	if o.sb.Network.Mode != policy.None {
		t.Fatalf("in force is %+v", o.sb.Network)
	}
	facts, err := access.Decode(o.sb)
	if err != nil || !reflect.DeepEqual(facts.Policy.Default(), access.Deny) {
		t.Fatalf("%+v, %v", facts, err)
	}
}

func TestAPolicyThatNobodyAskedForIsTold(t *testing.T) {
	block := []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	single := []netip.Prefix{netip.MustParsePrefix("203.0.113.9/32")}
	for want, n := range map[string]policy.Network{
		"deny_all deny": {Mode: policy.None},
		"enforcing allow allow:203.0.113.9 deny:198.51.100.0/24": {Mode: policy.Internet, Allow: single, Deny: block},
		"enforcing deny deny:203.0.113.9 allow:198.51.100.0/24":  {Mode: policy.List, Allow: block, Deny: single},
	} {
		o := newOne()
		o.sb.Network = n
		if status, got := o.ask(t, "GET", "/policy", ""); status != 200 || short(got) != want {
			t.Errorf("%d %s, want %s", status, short(got), want)
		}
	}
}

func TestRefusals(t *testing.T) {
	many := `[` + strings.TrimSuffix(strings.Repeat(`{"action":"deny","target":"192.0.2.1"},`, 5000), ",") + `]`
	for name, c := range map[string]struct {
		method, path, body string
		status             int
	}{
		"a name":                   {"PATCH", "/policy", `[{"action":"allow","target":"pypi.org"}]`, 400},
		"a private network":        {"PATCH", "/policy", `[{"action":"allow","target":"10.0.0.0/8"}]`, 400},
		"no target":                {"PATCH", "/policy", `[{"action":"allow"}]`, 400},
		"an action nobody knows":   {"PATCH", "/policy", `[{"action":"ask","target":"192.0.2.1"}]`, 400},
		"a patch that is no array": {"PATCH", "/policy", `{}`, 400},
		"a patch of nothing":       {"PATCH", "/policy", ``, 400},
		"no JSON":                  {"PUT", "/policy", `{`, 400},
		"a default nobody knows":   {"PUT", "/policy", `{"defaultAction":"ask"}`, 400},
		"targets that are none":    {"DELETE", "/policy", `[1]`, 400},
		"too many rules":           {"PATCH", "/policy", many, 413},
		"too many bytes":           {"PUT", "/policy", strings.Repeat(" ", 2<<20), 413},
		"the wrong method":         {"OPTIONS", "/policy", ``, 405},
		"credentials":              {"POST", "/credential-vault", `{}`, 501},
		"credentials by name":      {"GET", "/credential-vault/credentials/x", ``, 501},
		"something else":           {"GET", "/x", ``, 404},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOne()
			status, got := o.ask(t, c.method, c.path, c.body)
			if status != c.status || got["code"] == "" || got["message"] == "" || len(fmt.Sprint(got["message"])) > 400 {
				t.Fatalf("%d %v", status, got)
			}
			if o.sb.Network.Mode != policy.Internet || o.sb.Annotations != nil {
				t.Fatalf("something was changed: %+v", o.sb)
			}
		})
	}
	paused := newOne()
	paused.sb.State = sandbox.StatePaused
	if status, got := paused.ask(t, "PATCH", "/policy", `[{"action":"deny","target":"192.0.2.1"}]`); status != 409 {
		t.Fatalf("paused: %d %v", status, got)
	}
	if status, got := (&one{}).ask(t, "GET", "/policy", ""); status != 404 {
		t.Fatalf("gone: %d %v", status, got)
	}
	if status, _ := newOne().ask(t, "GET", "/healthz", ""); status != http.StatusOK {
		t.Fatal(status)
	}
}

func TestPatchesAtOnceAreAllKept(t *testing.T) {
	o := newOne()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			o.ask(t, "PATCH", "/policy", fmt.Sprintf(`[{"action":"deny","target":"192.0.2.%d"}]`, i))
		})
	}
	all.Wait()
	if _, got := o.ask(t, "GET", "/policy", ""); strings.Count(short(got), "deny:") != 8 {
		t.Fatalf("%s", short(got))
	}
}

func FuzzPolicy(f *testing.F) {
	for _, seed := range []string{`{"defaultAction":"deny","egress":[{"action":"allow","target":"192.0.2.0/24"}]}`, `[]`, `null`, `["192.0.2.1"]`, `[{"action":"deny","target":"::1"}]`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		for _, method := range []string{"PUT", "PATCH", "DELETE"} {
			o := newOne()
			status, got := o.ask(t, method, "/policy", body)
			switch {
			case status == 200:
				if err := o.sb.Network.Validate(); err != nil {
					t.Fatalf("%s %q is in force: %v", method, body, err)
				}
			case status != 400 && status != 413, got["code"] == nil, got["message"] == nil:
				t.Fatalf("%s %q: %d %v", method, body, status, got)
			}
		}
	})
}

func TestEveryKindOfFailureHasItsStatus(t *testing.T) {
	for _, kind := range fault.Kinds {
		status, code := egress.StatusOf(kind)
		if code == "" || (status == 500) != (kind == fault.Internal) || http.StatusText(status) == "" {
			t.Errorf("%v is %d %s", kind, status, code)
		}
	}
}

// timed is an answer whose connection keeps the deadlines of its reads.
type timed struct {
	*httptest.ResponseRecorder
	deadlines []time.Time
}

func (w *timed) SetReadDeadline(t time.Time) error {
	w.deadlines = append(w.deadlines, t)
	return nil
}

func TestABodyComesInTime(t *testing.T) {
	for path, read := range map[string]bool{"/policy": true, "/nothing": false} {
		w := &timed{ResponseRecorder: httptest.NewRecorder()}
		r := httptest.NewRequest("POST", path, strings.NewReader(`{"defaultAction":"allow"}`))
		target := &access.Target{Sandbox: sandbox.Sandbox{ID: "sb1"}, Port: access.PortEgress}
		egress.New(newOne(), slog.New(slog.DiscardHandler)).ServeHTTP(w, r.WithContext(access.With(r.Context(), target)))
		if len(w.deadlines) == 0 || time.Until(w.deadlines[0]) > time.Minute || w.deadlines[len(w.deadlines)-1].IsZero() != read {
			t.Errorf("%s: %d, %v", path, w.Code, w.deadlines)
		}
	}
}
