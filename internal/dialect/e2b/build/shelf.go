package build

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// The kinds of documents.
const (
	kindTemplate = "e2b.template"
	kindBuild    = "e2b.build"
	kindLog      = "e2b.log" // of builds that have ended; read when somebody asks
	kindLayer    = "e2b.layer"
	kindDoomed   = "e2b.doomed"
)

// shelf is what is known of one tenant's templates, in memory and in documents.
type shelf struct {
	tenant    string
	documents Documents

	preparing chan struct{} // full while an image is made ready; taken before the locks

	changing sync.Mutex // one change at a time, from reading to document; taken before mu

	mu        sync.RWMutex
	loaded    bool
	templates map[string]*entry
	aliases   map[string]string // to ids
	builds    map[string]*made
	layers    map[string]*layer
	doomed    map[string]bool // templates of the domain that could not be removed yet
	uses      map[string]use
}

func newShelf(tenant string, d Documents) *shelf {
	return &shelf{
		tenant: tenant, documents: d, preparing: make(chan struct{}, 1), templates: map[string]*entry{}, aliases: map[string]string{}, builds: map[string]*made{},
		layers: map[string]*layer{}, doomed: map[string]bool{}, uses: map[string]use{},
	}
}

// load reads the documents, once, and tells whether this was the time. Builds that an earlier server began are over.
func (s *shelf) load(ctx context.Context) (first bool, err error) {
	s.mu.RLock()
	loaded := s.loaded
	s.mu.RUnlock()
	if loaded {
		return false, nil
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded {
		return false, nil
	}
	if err := s.read(ctx); err != nil {
		return false, err
	}
	if err := s.endLeft(ctx); err != nil {
		return false, err
	}
	s.loaded = true
	return true, nil
}

// read takes the documents into memory; called with both locks held.
func (s *shelf) read(ctx context.Context) error {
	for kind, add := range map[string]func(sandbox.Document) error{
		kindTemplate: func(d sandbox.Document) error { return keep(d, s.templates) },
		kindBuild:    func(d sandbox.Document) error { return keep(d, s.builds) },
		kindLayer:    func(d sandbox.Document) error { return keep(d, s.layers) },
		kindDoomed:   func(d sandbox.Document) error { s.doomed[d.ID] = true; return nil },
	} {
		docs, err := s.documents.Documents(ctx, s.tenant, kind)
		if err != nil {
			return fmt.Errorf("read templates of tenant %s: %w", s.tenant, err)
		}
		for _, d := range docs {
			if err := add(d); err != nil {
				return fmt.Errorf("read %s %s of tenant %s: %w", kind, d.ID, s.tenant, err)
			}
		}
	}
	for id, e := range s.templates {
		s.aliases[e.Alias] = id
	}
	return nil
}

// named are the templates of the domain that the shelf knows of.
func (s *shelf) named() map[string]bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	names := maps.Clone(s.doomed)
	for _, m := range s.builds {
		names[m.Domain] = true
	}
	for _, l := range s.layers {
		names[l.Domain] = true
	}
	return names
}

func keep[T any](d sandbox.Document, into map[string]*T) error {
	v := new(T)
	if err := json.Unmarshal(d.Body, v); err != nil {
		return err
	}
	into[d.ID] = v
	return nil
}

// endLeft marks builds that nobody goes on with; called with both locks held.
func (s *shelf) endLeft(ctx context.Context) error {
	for id, m := range s.builds {
		if !m.Started || m.Status.ended() {
			continue
		}
		over := *m
		over.Status, over.Updated, over.Finished = StatusError, now(), now()
		over.Reason = &reason{Message: fault.Message(errShutdown), Step: stepFinalize, Entries: []line{}}
		if err := put(ctx, s, kindBuild, id, &over); err != nil {
			return err
		}
		s.builds[id] = &over
	}
	return nil
}

func now() time.Time { return time.Now().UTC().Truncate(time.Millisecond) }

func put[T any](ctx context.Context, s *shelf, kind, id string, v *T) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := s.documents.PutDocument(ctx, s.tenant, kind, id, body); err != nil {
		return fmt.Errorf("keep %s %s: %w", kind, id, err)
	}
	return nil
}

// find is the template of an id or an alias; nil: there is none.
func (s *shelf) find(r ref) *entry {
	if r.namespace != "" && r.namespace != Namespace(s.tenant) {
		return nil
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if e := s.templates[r.name]; e != nil {
		return e
	}
	return s.templates[s.aliases[r.name]]
}

func (s *shelf) build(id string) *made {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.builds[id]
}

// buildsOf are the builds of a template, newest first.
func (s *shelf) buildsOf(id string) []*made {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var all []*made
	for _, m := range s.builds {
		if m.Template == id {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b *made) int { return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID)) })
	return all
}

// all are the templates, newest first.
func (s *shelf) all() []*entry {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.SortedFunc(maps.Values(s.templates), func(a, b *entry) int {
		return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID))
	})
}

// used counts a start from a template.
func (s *shelf) used(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.uses[id]
	s.uses[id] = use{u.count + 1, now()}
}

func (s *shelf) useOf(id string) use {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.uses[id]
}

// log is what is kept of an ended build's log.
func (s *shelf) log(ctx context.Context, id string) ([]line, error) {
	body, err := s.documents.Document(ctx, s.tenant, kindLog, id)
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the log of build %s: %w", id, err)
	}
	var lines []line
	return lines, json.Unmarshal(body, &lines)
}

func errNoTemplate(name string) error {
	return fault.New(fault.NotFound, "template '%.140s' not found", name)
}

func errNoBuild(id string) error { return fault.New(fault.NotFound, "build '%.60s' not found", id) }
