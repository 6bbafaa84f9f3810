package agentsandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// What a tenant may keep here. Objects are small, and all of them are in memory.
const (
	maxObjects      = 10_000   // of one kind
	maxTenantBytes  = 64 << 20 // of all objects
	maxHistoryBytes = 8 << 20  // of the changes of one kind
)

// store keeps the objects of all tenants: in memory, where they are read and watched, and as documents for the next server.
type store struct {
	documents Documents
	space     diskspace.Check
	history   int
	log       *slog.Logger

	mu     sync.Mutex
	last   uint64 // resource version
	realms map[string]*realm
}

func newStore(d Documents, space diskspace.Check, history int, log *slog.Logger) *store {
	return &store{documents: d, space: space, history: history, log: log, realms: map[string]*realm{}}
}

// next is a resource version that is higher than every one before, also those of an earlier server: it is the time, in
// microseconds, and higher than that of every object which another clock has dated.
func (s *store) next() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.advance()
}

// advance is next with mu held.
func (s *store) advance() uint64 {
	s.last = max(s.last+1, uint64(time.Now().UnixMicro()))
	return s.last
}

// raise makes the next version higher than one that another server gave.
func (s *store) raise(rv uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = max(s.last, rv)
}

// open reads what an earlier server has kept, and tells whose it is.
func (s *store) open(ctx context.Context) (tenants []string, err error) {
	for _, k := range kinds {
		owners, err := s.documents.DocumentOwners(ctx, k.document())
		if err != nil {
			return nil, fmt.Errorf("read the owners of %s: %w", k.resource, err)
		}
		for _, tenant := range owners {
			if err := s.load(ctx, s.realm(tenant), k); err != nil {
				return nil, err
			}
			if !slices.Contains(tenants, tenant) {
				tenants = append(tenants, tenant)
			}
		}
	}
	for _, tenant := range tenants {
		s.realm(tenant).begin(s.next())
	}
	return tenants, nil
}

// load reads a tenant's objects of a kind. One that cannot be read is left as it is, and keeps nobody else's from being served.
func (s *store) load(ctx context.Context, r *realm, k *kind) error {
	docs, err := s.documents.Documents(ctx, r.tenant, k.document())
	if err != nil {
		return fmt.Errorf("read the %s of %s: %w", k.resource, r.tenant, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range docs {
		o, err := readDocument(k, d)
		if err != nil {
			s.log.Error("object is not what a server wrote; it is not served, and its sandbox is left alone",
				"kind", k.resource, "object", d.ID, "tenant", r.tenant, "error", err)
			r.shelves[k].unread[d.ID] = true
			continue
		}
		s.raise(o.rv)
		r.shelves[k].objects[d.ID] = o
		r.bytes += o.size
	}
	return nil
}

func readDocument(k *kind, d sandbox.Document) (*object, error) {
	var e envelope
	if err := json.Unmarshal(d.Body, &e); err != nil {
		return nil, err
	}
	body, err := decodeFields(e.Body)
	if err != nil {
		return nil, err
	}
	o := &object{kind: k, size: len(d.Body), version: e.Version, id: e.ID, held: e.Held, born: e.Born, network: e.Network, body: body}
	if o.path() != d.ID {
		return nil, fmt.Errorf("it says that it is %.300q", o.path())
	}
	_, _ = fmt.Sscan(text(o.body, "metadata", "resourceVersion"), &o.rv) // one that is not there is zero
	return o, nil
}

// realm is what a tenant has.
func (s *store) realm(tenant string) *realm {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.realms[tenant]
	if r == nil {
		rv := s.advance()
		r = &realm{store: s, tenant: tenant, last: rv, shelves: map[*kind]*shelf{}}
		for _, k := range kinds {
			r.shelves[k] = &shelf{objects: map[string]*object{}, unread: map[string]bool{}, floor: rv, more: make(chan struct{})}
		}
		s.realms[tenant] = r
	}
	return r
}

// realm is the objects of one tenant. No other tenant's are reached from it.
type realm struct {
	store  *store
	tenant string

	writes sync.Mutex // held by whoever changes something, while it is written too

	mu      sync.Mutex
	last    uint64 // resource version of the last change
	bytes   int
	shelves map[*kind]*shelf
	watches int
}

// begin forgets what happened up to a version, for whoever watches.
func (r *realm) begin(rv uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = rv
	for _, s := range r.shelves {
		s.floor = rv
	}
}

// unreadable tells whether the claim or the Sandbox of a name is kept and cannot be read.
func (r *realm) unreadable(p path) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shelves[claimKind].unread[p.String()] || r.shelves[sandboxKind].unread[p.String()]
}

// shelf is the objects of one kind, and what happened to them lately.
type shelf struct {
	objects map[string]*object // by namespace/name
	unread  map[string]bool    // those that are kept and cannot be read, until somebody writes others in their place
	events  []event
	bytes   int           // of the events
	floor   uint64        // what happened up to here is not in events
	more    chan struct{} // closed by the next change
}

// event is one change.
type event struct {
	rv       uint64
	now, was *object // nil: it is not there any more, or was not there before
}

// path names an object within its kind.
type path struct{ namespace, name string }

func (p path) String() string { return p.namespace + "/" + p.name }

// get finds an object, or nil.
func (r *realm) get(k *kind, namespace, name string) *object {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shelves[k].objects[path{namespace, name}.String()]
}

// list are the objects of a namespace, or of all if it is empty, by their names, and the version that they are of.
func (r *realm) list(k *kind, namespace string) (all []*object, rv uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.shelves[k].objects {
		if namespace == "" || o.namespace() == namespace {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, byPath)
	return all, r.last
}

func byPath(a, b *object) int {
	return cmp.Or(strings.Compare(a.namespace(), b.namespace()), strings.Compare(a.name(), b.name()))
}

// version is that of the last change.
func (r *realm) version() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// names are those of all claims and sandboxes.
func (r *realm) names() []path {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[path]bool{}
	for _, k := range []*kind{claimKind, sandboxKind} {
		for _, o := range r.shelves[k].objects {
			seen[path{o.namespace(), o.name()}] = true
		}
	}
	var all []path
	for p := range seen {
		all = append(all, p)
	}
	return all
}

// namespaces are those that have objects.
func (r *realm) namespaces() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[string]bool{}
	for _, s := range r.shelves {
		for _, o := range s.objects {
			seen[o.namespace()] = true
		}
	}
	var all []string
	for name := range seen {
		all = append(all, name)
	}
	return all
}

// byID finds the Sandbox of a sandbox, or nil.
func (r *realm) byID(id string) *object {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.shelves[sandboxKind].objects {
		if o.id == id {
			return o
		}
	}
	return nil
}

// create puts an object where none is, and where it uses none of the reserve of the host's disk.
func (r *realm) create(ctx context.Context, o *object) (*object, error) {
	r.writes.Lock()
	defer r.writes.Unlock()
	if r.get(o.kind, o.namespace(), o.name()) != nil {
		return nil, exists(o.kind, o.name())
	}
	if err := r.store.space.Allow(diskspace.Step); err != nil {
		return nil, err
	}
	return r.put(ctx, o, nil)
}

// update puts what change makes of an object in its place; change gives back the same one to leave it.
func (r *realm) update(ctx context.Context, k *kind, namespace, name string, change func(*object) (*object, error)) (*object, error) {
	r.writes.Lock()
	defer r.writes.Unlock()
	old := r.get(k, namespace, name)
	if old == nil {
		return nil, notFound(k, name)
	}
	o, err := change(old)
	if err != nil || o == old {
		return old, err
	}
	return r.put(ctx, o, old)
}

// put writes an object and then shows it; called with writes held.
func (r *realm) put(ctx context.Context, o, old *object) (*object, error) {
	o.rv = r.store.next()
	o.setMeta("resourceVersion", formatVersion(o.rv))
	doc := []byte(encode(o.document()))
	o.size = len(doc)
	if err := r.admit(o, old); err != nil {
		return nil, err
	}
	if err := r.store.documents.PutDocument(ctx, r.tenant, o.kind.document(), o.path(), doc); err != nil {
		return nil, fmt.Errorf("keep %s %s: %w", o.kind.resource, o.path(), err)
	}
	r.publish(o, old)
	return o, nil
}

// show shows a change of an object's status and then writes it, since what it says can be found out again. Whoever waits for a
// sandbox does not wait for a disk. The object must still be the one of that uid.
func (r *realm) show(ctx context.Context, k *kind, namespace, name, uid string, change func(*object) *object) (*object, error) {
	r.writes.Lock()
	defer r.writes.Unlock()
	old := r.get(k, namespace, name)
	if old == nil || old.uid() != uid {
		return nil, notFound(k, name)
	}
	o := change(old)
	if o == old {
		return old, nil
	}
	o.rv = r.store.next()
	o.setMeta("resourceVersion", formatVersion(o.rv))
	doc := []byte(encode(o.document()))
	o.size = len(doc)
	r.publish(o, old)
	if err := r.store.documents.PutDocument(ctx, r.tenant, k.document(), o.path(), doc); err != nil {
		return o, fmt.Errorf("keep the status of %s %s: %w", k.resource, o.path(), err)
	}
	return o, nil
}

// remove takes an object away, unless check objects.
func (r *realm) remove(ctx context.Context, k *kind, namespace, name string, check func(*object) error) (*object, error) {
	r.writes.Lock()
	defer r.writes.Unlock()
	old := r.get(k, namespace, name)
	if old == nil {
		return nil, notFound(k, name)
	}
	if err := check(old); err != nil {
		return nil, err
	}
	err := r.store.documents.DeleteDocument(ctx, r.tenant, k.document(), old.path())
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, fmt.Errorf("delete %s %s: %w", k.resource, old.path(), err)
	}
	r.publish(nil, old)
	return old, nil
}

// admit keeps a tenant within bounds; called with writes held.
func (r *realm) admit(o, old *object) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	grown := o.size
	if old != nil {
		grown -= old.size
	} else if len(r.shelves[o.kind].objects) >= maxObjects {
		return forbidden(o.kind, o.name(), "exceeded quota: there are %d %s, which is the limit; delete some first", maxObjects, o.kind.resource)
	}
	if grown > 0 && r.bytes+grown > maxTenantBytes {
		return forbidden(o.kind, o.name(), "exceeded quota: all objects together have %d bytes, which is near the limit; delete some first", r.bytes)
	}
	return nil
}

// publish makes a change visible; called with writes held.
func (r *realm) publish(o, old *object) {
	at, rv := o, uint64(0)
	if o == nil {
		at, rv = old, r.store.next()
	} else {
		rv = o.rv
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.shelves[at.kind]
	if old != nil {
		r.bytes -= old.size
	}
	if o == nil {
		delete(s.objects, at.path())
	} else {
		delete(s.unread, at.path())
		s.objects[at.path()] = o
		r.bytes += o.size
	}
	r.last = rv
	s.add(event{rv, o, old}, r.store.history)
}

// add remembers a change and forgets the oldest where there are too many; called with the realm's mu held.
func (s *shelf) add(e event, most int) {
	s.events = append(s.events, e)
	s.bytes += e.size()
	drop := 0
	for len(s.events)-drop > most || s.bytes > maxHistoryBytes && len(s.events)-drop > 1 {
		s.bytes -= s.events[drop].size()
		s.floor = s.events[drop].rv
		drop++
	}
	s.events = slices.Delete(s.events, 0, drop)
	close(s.more)
	s.more = make(chan struct{})
}

// size counts what an event keeps alive that nobody else does.
func (e event) size() int {
	if e.was != nil {
		return e.was.size
	}
	return e.now.size
}

// since are the changes after a version, and what is closed by the next; ok is false when some of them are forgotten.
func (r *realm) since(k *kind, rv uint64) (events []event, more <-chan struct{}, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.shelves[k]
	if rv < s.floor {
		return nil, nil, false
	}
	i, _ := slices.BinarySearchFunc(s.events, rv+1, func(e event, rv uint64) int { return cmp.Compare(e.rv, rv) })
	return slices.Clone(s.events[i:min(len(s.events), i+batch)]), s.more, true
}

// batch is how many changes a watch takes at a time.
const batch = 100

// watch counts a watch, unless there are too many.
func (r *realm) watch(most int) (done func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.watches >= most {
		return nil, false
	}
	r.watches++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.watches--
	}, true
}
