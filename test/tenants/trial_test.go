package tenants_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sort"
	"strings"
	"testing"
)

// kind is what one tenant may have of a route that another tenant's things are named in.
type kind int

const (
	// owned: another tenant is answered as for a thing that was never there.
	owned kind = iota
	// empty is owned, where such an answer is a success with nothing in it.
	empty
	// listing: each sees its own things only.
	listing
	// apart: each tenant has names of its own, so that the request succeeds and concerns its own things.
	apart
	// public: everybody gets the same answer.
	public
	// admin: both are refused; only an admin's key passes.
	admin
	// unserved: the server does not serve it to anybody.
	unserved
	// known: by design of the protocol, who knows the id may do this. Each has a reason, which docs/threat-model.md gives too.
	known
)

// trial is one request of one route, and what another tenant may have of it.
type trial struct {
	dialect string
	route   string // as the dialect's table has it
	about   string // which of several requests of the route
	kind    kind
	path    string // behind the dialect's base, with names of things; empty: the route's
	header  map[string]string
	body    string
	method  string // empty: the route's
	// fresh makes the things that the request uses up; the names it returns go before A's own. It may register a cleanup.
	fresh func(w *world, p *tenant) things
	// after waits for what A's own request began.
	after func(w *world, p *tenant, about things)
	// parent is the thing that holds the others of the request: B also tries with its own parent and A's other things.
	parent string
	reason string // of kind known
	// refusal is another status by which the route says that there is no such thing, beside 401, 403 and 404.
	refusal int
	// want is what A's answer holds, with names of things, so that a listing which lists nothing is a broken trial.
	want string
	// wantStatus is A's, where it is no 2xx.
	wantStatus int
	// differs says why B's answer tells a thing that is there from one that is not.
	differs string
}

func (tr trial) title() string {
	title := tr.dialect + " " + tr.route
	if tr.about != "" {
		title += " (" + tr.about + ")"
	}
	return title
}

func (w *world) request(tr trial) request {
	method, path, ok := strings.Cut(tr.route, " ")
	if !ok {
		method, path = http.MethodGet, tr.route
	}
	if tr.method != "" {
		method = tr.method
	}
	if tr.path != "" {
		path = tr.path
	}
	path = sandboxPrefix[tr.dialect] + path
	header := credentials(tr.dialect)
	maps.Copy(header, tr.header)
	if tr.body != "" && header["Content-Type"] == "" {
		header["Content-Type"] = "application/json"
	}
	return request{method, w.base(tr.dialect), path, header, tr.body}
}

// normal is an answer without what differs between two that mean the same: the names that the request held, and times.
func normal(r reply, about things, names []string) string {
	body := r.body
	names = slices.Clone(names)
	sort.Slice(names, func(i, j int) bool { return len(about[names[i]]) > len(about[names[j]]) })
	for _, name := range names {
		if value := about[name]; value != "" {
			body = strings.ReplaceAll(body, value, "$"+name)
		}
	}
	var heads []string
	for name := range r.header {
		if name != "Date" && name != "Content-Length" && name != "Connection" {
			heads = append(heads, name)
		}
	}
	slices.Sort(heads)
	return fmt.Sprintf("%d %s %v %s", r.status, r.header.Get("Content-Type"), heads, body)
}

// try runs a trial: B first, then a look at whether A's things are as they were, then A itself.
func (w *world) try(t *testing.T, tr trial) {
	t.Helper()
	outer := w.T
	w.T = t
	defer func() { w.T = outer }()
	about := w.a.own
	if tr.fresh != nil {
		about = about.with(tr.fresh(w, w.a))
	}
	r := w.request(tr)
	result := row{route: tr.title(), verdict: holds}
	if tr.kind == known {
		result.verdict += ": " + tr.reason
	}
	defer func() {
		if t.Failed() {
			result.verdict = broken
		}
		addRow(result)
	}()
	before := w.state(w.a)
	result.b = w.tryB(t, tr, r, about)
	for _, change := range changes(before, w.state(w.a)) {
		t.Errorf("B's requests changed what A has: %s", change)
	}
	result.a = w.tryA(t, tr, r, about)
	if tr.after != nil {
		tr.after(w, w.a, about)
	}
}

func (w *world) tryA(t *testing.T, tr trial, r request, about things) string {
	t.Helper()
	got := w.do(r, filler(t, w.a, about))
	switch tr.kind {
	case admin:
		if got.status != http.StatusForbidden {
			t.Errorf("a key that is no admin's: %v, want 403", got)
		}
		r.header["Authorization"] = "Bearer " + w.admin
		if got := w.do(r, filler(t, w.a, about)); !got.ok() {
			t.Errorf("broken trial: with an admin's key: %v", got)
		}
	case unserved:
		if got.status != http.StatusNotImplemented {
			t.Errorf("%v, want 501", got)
		}
	default:
		if !got.ok() && got.status != tr.wantStatus {
			t.Errorf("broken trial: A's own request is refused: %v", got)
		}
	}
	if tr.want != "" {
		if want := fill(t, tr.want, w.a, about); !strings.Contains(got.body, want) {
			t.Errorf("broken trial: A's own answer has no %q: %v", want, got)
		}
	}
	return status(got)
}

func (w *world) tryB(t *testing.T, tr trial, r request, about things) string {
	t.Helper()
	got := w.do(r, filler(t, w.b, about))
	if tr.kind != known {
		w.keepsSecrets(t, "B's answer", r, about, got)
	}
	switch tr.kind {
	case owned, empty:
		return w.sameAsGhost(t, tr, r, about, got)
	case listing, apart:
		if !got.ok() && got.status != tr.wantStatus {
			t.Errorf("B's own request is refused: %v", got)
		}
	case public, known:
		if !got.ok() && got.status != tr.wantStatus {
			t.Errorf("what everybody may do is refused: %v", got)
		}
	case admin:
		if got.status != http.StatusForbidden {
			t.Errorf("%v, want 403", got)
		}
	case unserved:
		if got.status != http.StatusNotImplemented {
			t.Errorf("%v, want 501", got)
		}
	}
	return status(got)
}

// sameAsGhost compares B's answer for A's thing with that for a thing that was never there.
func (w *world) sameAsGhost(t *testing.T, tr trial, r request, about things, got reply) string {
	t.Helper()
	names := r.named()
	if len(names) == 0 {
		t.Fatalf("broken trial: the request names nothing of A's")
	}
	w.compare(t, tr, r, about, names, got)
	if slices.Contains(names, tr.parent) && len(names) > 1 {
		mixed := about.with(things{tr.parent: w.b.own[tr.parent]})
		answer := w.do(r, filler(t, w.b, mixed))
		w.keepsSecrets(t, "B's answer for its own "+tr.parent, r, mixed, answer)
		w.compare(t, tr, r, mixed, slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == tr.parent }), answer)
	}
	return status(got)
}

func (w *world) compare(t *testing.T, tr trial, r request, about things, names []string, got reply) {
	t.Helper()
	ghosts := things{}
	for _, name := range names {
		ghosts[name] = ghost(about[name])
	}
	nowhere := about.with(ghosts)
	never := w.do(r, filler(t, w.b, nowhere))
	refusals := []int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, tr.refusal}
	if tr.kind == empty && got.ok() {
		refusals = []int{got.status}
	}
	if got.err != nil || !slices.Contains(refusals, got.status) {
		t.Errorf("B is not refused: %v", got)
	}
	if a, b := normal(got, about, names), normal(never, nowhere, names); a != b && tr.differs == "" {
		t.Errorf("B can tell A's thing from none:\n A's:  %s\n none: %s", a, b)
	}
}

// keepsSecrets fails if an answer to B holds what is A's and was in none of B's requests.
func (w *world) keepsSecrets(t *testing.T, what string, r request, about things, got reply) {
	t.Helper()
	texts := []string{fill(t, r.path, w.b, about), fill(t, r.body, w.b, about)}
	for _, value := range r.header {
		texts = append(texts, fill(t, value, w.b, about))
	}
	sent := strings.Join(texts, "\n")
	for mark := range w.a.marks {
		if strings.Contains(sent, mark) {
			w.b.knows[mark] = true
		}
	}
	all := got.body
	if text, err := json.Marshal(got.header); err == nil {
		all += string(text)
	}
	for mark := range w.a.marks {
		if strings.Contains(all, mark) && !w.b.knows[mark] {
			t.Errorf("%s holds %q, which is A's: %v", what, mark, got)
		}
	}
}

func status(r reply) string {
	if r.err != nil {
		return "no answer"
	}
	return fmt.Sprint(r.status)
}
