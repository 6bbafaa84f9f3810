package fleet

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Door is one way into a server. Each server has the same ones.
type Door struct {
	Name string
	// Native is the beginning of paths that say themselves what they are about: of such a request only the host counts
	// more, no header. Empty: there are none.
	Native string
	// First tells of a request that the first server answers, whatever else it says; nil: none is.
	First func(*http.Request) bool
	// Refuse says in the words of the door that the caller should try again; nil: in those that all dialects of sandboxes read.
	Refuse func(w http.ResponseWriter, message string)
	// Lost answers a request that another server had begun before it was gone, if asking again would do it twice; it tells whether it has.
	// nil: whatever was begun may be asked for again.
	Lost func(w http.ResponseWriter, r *http.Request, message string) bool
}

// Elsewhere finds who answers a request instead of this server; nil: nobody does.
func (f *Fleet) Elsewhere(d Door) func(*http.Request) http.Handler {
	refuse := d.Refuse
	if refuse == nil {
		refuse = Refuse
	}
	later := func(message string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "2")
			refuse(w, message)
		})
	}
	return func(r *http.Request) http.Handler {
		if isForwarded(r) { // from a server that knew better
			return nil
		}
		id := d.named(r)
		switch {
		case id != "":
		case d.First != nil && d.First(r):
			return f.toFirst(d, later)
		default:
			id = inPath(r.URL.Path)
		}
		if id == "" {
			return nil
		}
		return f.toOwner(r.Context(), d, id, later)
	}
}

func (f *Fleet) toFirst(d Door, later func(string) http.Handler) http.Handler {
	first, mine := f.First()
	f.mu.Lock()
	office := f.office
	f.mu.Unlock()
	switch {
	case !mine:
		return f.forward(first, d, later)
	case !office || f.silent():
		return later("another server did this and is gone; this one takes over, try again")
	}
	return nil
}

func (f *Fleet) toOwner(ctx context.Context, d Door, id string, later func(string) http.Handler) http.Handler {
	f.mu.Lock()
	domain := f.domain
	f.mu.Unlock()
	if domain == nil || domain.Has(id) {
		if f.silent() {
			return later("this server does not reach its database, so that the sandbox may be another server's by now; try again")
		}
		return nil
	}
	server, err := f.owners.of(ctx, f.store, id)
	switch {
	case fault.Is(err, fault.NotFound): // it has ended or never was: whoever is asked can tell
		return nil
	case err != nil:
		return later("it cannot be told where the sandbox is, since the database does not answer; try again")
	case server == f.Me():
		return nil
	}
	owner, lives := f.member(server)
	if !lives && f.lookAgain() { // it may have joined a moment ago
		owner, lives = f.member(server)
	}
	if !lives {
		return later("the server of this sandbox is gone; another takes over, try again")
	}
	return f.forward(owner, d, later)
}

// sandboxID is what sandboxes are called, at the beginning of a name.
var sandboxID = regexp.MustCompile(`^sb[a-z2-7]{24}(?:[^a-z0-9]|$)`)

func idIn(text string) string {
	if !sandboxID.MatchString(text) {
		return ""
	}
	return text[:26]
}

// named is the sandbox that host or header name, which count more than the path.
func (d Door) named(r *http.Request) string {
	label, _, _ := strings.Cut(r.Host, ".")
	if _, name, ok := strings.Cut(strings.ToLower(label), "-"); ok {
		if id := idIn(name); id != "" {
			return id
		}
	}
	if d.Native != "" && strings.HasPrefix(r.URL.Path, d.Native) {
		return ""
	}
	return idIn(r.Header.Get("E2b-Sandbox-Id"))
}

// deepest is how many parts of a path are looked at: what follows a sandbox's id is its own.
const deepest = 5

func inPath(path string) string {
	for range deepest {
		part, rest, more := strings.Cut(path, "/")
		if id := idIn(part); id != "" {
			return id
		}
		if !more {
			break
		}
		path = rest
	}
	return ""
}

// How long it is remembered whose a sandbox is, and how many of them; and how many are asked for at once, since nobody has been
// asked for a key yet.
const (
	rememberOwner  = 2 * time.Second
	rememberNobody = 200 * time.Millisecond
	mostRemembered = 10000
	mostLookups    = 4
)

// owners remembers for a moment which servers sandboxes belong to. Ids that somebody made up take no place from those that are.
type owners struct {
	lookups chan struct{}

	mu     sync.Mutex
	known  map[string]owner
	nobody map[string]owner
}

type owner struct {
	server string
	err    error // why it has none
	until  time.Time
}

func newOwners() *owners {
	return &owners{lookups: make(chan struct{}, mostLookups), known: map[string]owner{}, nobody: map[string]owner{}}
}

func (o *owners) of(ctx context.Context, store Store, id string) (string, error) {
	if found, ok := o.remembered(id); ok {
		return found.server, found.err
	}
	select {
	case o.lookups <- struct{}{}:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	defer func() { <-o.lookups }()
	if found, ok := o.remembered(id); ok { // somebody asked while this one waited
		return found.server, found.err
	}
	server, err := store.Owner(ctx, id)
	switch {
	case err == nil:
		o.remember(o.known, id, owner{server, nil, time.Now().Add(rememberOwner)})
	case fault.Is(err, fault.NotFound):
		o.remember(o.nobody, id, owner{"", err, time.Now().Add(rememberNobody)})
	}
	return server, err
}

func (o *owners) remembered(id string) (owner, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, all := range []map[string]owner{o.known, o.nobody} {
		if found, ok := all[id]; ok && time.Now().Before(found.until) {
			return found, true
		}
	}
	return owner{}, false
}

func (o *owners) remember(all map[string]owner, id string, found owner) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(all) >= mostRemembered {
		clear(all)
	}
	all[id] = found
}

func (o *owners) clear() {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.known)
	clear(o.nobody)
}
