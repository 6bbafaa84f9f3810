package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// Templates finds what a sandbox starts from, by name and from memory: it is asked on every create.
type Templates interface {
	// Resolve finds a template that everybody may use or the tenant's own. Any other name is fault.NotFound; one that is
	// known and cannot be used yet is fault.Unavailable.
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
}

// Manager owns the life of every sandbox of a server. Living sandboxes are in its memory and in the Store; the memory
// is the authority while the server lives, the Store and the Driver together are when it is gone.
type Manager struct {
	cfg       Config
	driver    Driver
	store     Store
	templates Templates
	observer  Observer
	log       *slog.Logger

	clock  *clock
	slots  *slots // of creates
	forks  *slots // of forks: one that waits for a busy kernel must not hold up a create
	rates  *rates
	ends   *endCounter
	events *eventFeed
	uses   templateUses // creates and removals, by template
	// Connections to ports have a quota of their own: visitors of a public port must not use up what its
	// owner may do in sandboxes.
	operations, ports *operationQuota

	cancel context.CancelFunc // ends life
	life   context.Context    // of this Manager: the parent of all work that outlives its caller

	// What Reconcile saw the last time: nobody else reads it.
	strays  map[string]time.Time // instances without a row, by when they were first seen
	missing map[string]bool      // sandboxes without an instance
	orphans map[string]bool      // rows of this server's that it does not have

	work sync.WaitGroup // goroutines and calls that Close waits for; entered only under mu

	mu      sync.Mutex
	open    bool
	server  string            // as Config has it; another one after the others took this one for dead
	foreign map[string]Ended  // ends of sandboxes that are not this server's, until their rows have ended
	living  map[string]*entry // by id
	byKey   map[claimKey]*entry
	byIdem  map[claimKey]*entry
	tenants map[string]int // number of living
}

type claimKey struct{ tenant, key string }

// NewManager makes a Manager that refuses everything until Open.
func NewManager(cfg Config, d Driver, s Store, t Templates, o Observer, log *slog.Logger) *Manager {
	cfg = cfg.withDefaults()
	// Owned by the Manager and ended by Close: work that must not stop when a caller leaves.
	life, cancel := context.WithCancel(context.Background())
	return &Manager{
		cfg: cfg, driver: d, store: s, templates: t, observer: o, log: log,
		clock: newClock(), rates: newRates(cfg.CreateRate), ends: newEndCounter(cfg.MaxEnded), events: newEventFeed(s, cfg.Server != "", cfg.MaxEventStreams),
		operations: newOperationQuota(cfg.MaxOperations, "operations going on in sandboxes"),
		ports:      newOperationQuota(cfg.MaxOperations, "connections to ports of sandboxes"),
		slots:      newSlots(cfg.MaxStarting, cfg.MaxQueued), forks: newSlots(cfg.MaxStarting, cfg.MaxQueued),
		cancel: cancel, life: life, server: cfg.Server, foreign: map[string]Ended{}, strays: map[string]time.Time{}, missing: map[string]bool{}, orphans: map[string]bool{},
		living: map[string]*entry{}, byKey: map[claimKey]*entry{}, byIdem: map[claimKey]*entry{}, tenants: map[string]int{},
	}
}

// Close ends the Manager's own work and waits for it. Sandboxes live on; the next server's Open finds them.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.open = false
	m.mu.Unlock()
	m.cancel()
	m.work.Wait()
	return nil
}

// Caps is what the driver can do.
func (m *Manager) Caps() Caps { return m.driver.Caps() }

// Prepare makes the next create of a tenant's template fast; an empty name is the default template.
func (m *Manager) Prepare(ctx context.Context, tenant, name string) error {
	if name == "" {
		name = m.cfg.DefaultTemplate
	}
	t, err := m.templates.Resolve(ctx, tenant, name)
	if err != nil {
		return err
	}
	if err := m.driver.Prepare(ctx, tenant, t); err != nil {
		return fmt.Errorf("prepare template %s: %w", name, err)
	}
	return nil
}

// Get returns a sandbox of the caller's tenant; an ended one too, until its retention has passed.
func (m *Manager) Get(ctx context.Context, p auth.Principal, id string) (Sandbox, error) {
	if e := m.find(p, id); e != nil {
		return e.snapshot(), nil
	}
	return m.stored(ctx, p, id)
}

func (m *Manager) stored(ctx context.Context, p auth.Principal, id string) (Sandbox, error) {
	r, err := m.store.Get(ctx, id)
	if fault.Is(err, fault.NotFound) || err == nil && (r.Tenant != p.Tenant || p.Tenant == "") {
		return Sandbox{}, fault.New(fault.NotFound, "there is no sandbox %.64q", id)
	}
	if err != nil {
		return Sandbox{}, fmt.Errorf("read sandbox %s: %w", id, err)
	}
	return r.Sandbox, nil
}

// List returns a page of the caller's sandboxes.
func (m *Manager) List(ctx context.Context, p auth.Principal, q ListQuery) (Page, error) {
	switch {
	case q.Limit < 0 || q.Limit > MaxPage:
		return Page{}, fault.New(fault.Invalid, "a page has 1 to %d sandboxes, not %d", MaxPage, q.Limit)
	case q.Limit == 0:
		q.Limit = DefaultPage
	}
	for _, s := range q.States {
		if !s.Known() {
			return Page{}, fault.New(fault.Invalid, "unknown state %.40q", s)
		}
	}
	page, err := m.store.List(ctx, p.Tenant, q)
	if err != nil {
		return Page{}, fmt.Errorf("list sandboxes: %w", err)
	}
	m.refresh(&page, p)
	return page, nil
}

// refresh replaces rows by what memory knows better: when a sandbox was last used.
func (m *Manager) refresh(page *Page, p auth.Principal) {
	for i := range page.Items {
		if e := m.find(p, page.Items[i].ID); e != nil {
			page.Items[i].LastUsed = e.snapshot().LastUsed
		}
	}
}

// Usage is what a sandbox uses now, or used until it ended.
func (m *Manager) Usage(ctx context.Context, p auth.Principal, id string) (Usage, error) {
	e := m.find(p, id)
	if e == nil {
		sb, err := m.stored(ctx, p, id)
		return sb.Usage, err
	}
	u, err := m.driver.Usage(ctx, id)
	if err == nil {
		return u, nil
	}
	if sb := e.snapshot(); sb.State == StateEnded {
		return sb.Usage, nil
	}
	return Usage{}, fmt.Errorf("usage of sandbox %s: %w", id, err)
}

// find returns the caller's sandbox while it is in memory: until its end is recorded.
func (m *Manager) find(p auth.Principal, id string) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.living[id]; e != nil && e.tenant == p.Tenant && p.Tenant != "" {
		return e
	}
	return nil
}

// enterUsable is usable and makes Close wait until leave.
func (m *Manager) enterUsable(ctx context.Context, p auth.Principal, id string) (e *entry, leave func(), err error) {
	leave, err = m.enter()
	if err != nil {
		return nil, nil, err
	}
	if e, err = m.usable(ctx, p, id); err != nil {
		leave()
		return nil, nil, err
	}
	return e, leave, nil
}

// usable returns a sandbox that runs or is paused; one that has ended is fault.Gone.
func (m *Manager) usable(ctx context.Context, p auth.Principal, id string) (*entry, error) {
	e := m.find(p, id)
	if e == nil {
		sb, err := m.stored(ctx, p, id)
		if err != nil {
			return nil, err
		}
		return nil, goneError(sb)
	}
	if sb := e.snapshot(); !sb.State.usable() {
		return nil, goneError(sb)
	}
	return e, nil
}

// goneError says why a sandbox cannot be used.
func goneError(sb Sandbox) error {
	switch sb.State {
	case StateStarting:
		return fault.New(fault.Conflict, "sandbox %s is still starting", sb.ID)
	case StateRunning: // it ended for its driver and not yet for us
		return fault.New(fault.Unavailable, "sandbox %s does not answer", sb.ID)
	case StatePaused:
		return fault.New(fault.Conflict, "sandbox %s is paused; resume it first", sb.ID)
	case StateStopping:
		return fault.New(fault.Gone, "sandbox %s is ending: %s", sb.ID, causeText(sb))
	case StateEnded:
		if sb.Cause == causeMoved {
			return fault.Wrap(fault.Unavailable, ErrMoved, "sandbox %s was taken over by another server; try again", sb.ID)
		}
		return fault.New(fault.Gone, "sandbox %s has ended: %s", sb.ID, causeText(sb))
	}
	return fault.New(fault.Internal, "sandbox %s has an unknown state %q", sb.ID, sb.State)
}

func causeText(sb Sandbox) string {
	if sb.CauseMessage == "" {
		return string(sb.Cause)
	}
	return string(sb.Cause) + " (" + sb.CauseMessage + ")"
}

// enter makes Close wait until leave is called.
func (m *Manager) enter() (leave func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.open {
		return nil, fault.New(fault.Unavailable, "the server is starting or shutting down; try again")
	}
	m.work.Add(1)
	return m.work.Done, nil
}

// save writes a living sandbox as it is now. Saves of one sandbox never overtake each other. An end is written by
// settle alone, with its event: for everybody else what has ended is fault.Conflict.
func (m *Manager) save(ctx context.Context, e *entry, events ...LifecycleEvent) error {
	e.saving.Lock()
	defer e.saving.Unlock()
	if err := m.enroll(ctx, e); err != nil {
		return err
	}
	r := e.record()
	if r.State == StateEnded {
		return fault.Wrap(fault.Conflict, goneError(r.Sandbox), "sandbox %s has ended", e.id)
	}
	err := m.write(ctx, r, m.store.Save, events...)
	if errors.Is(err, ErrMoved) {
		m.lose(e)
	}
	return err
}

// saveAll is save for several, all or none.
func (m *Manager) saveAll(ctx context.Context, entries []*entry, events ...LifecycleEvent) error {
	for _, e := range entries {
		e.saving.Lock()
	}
	defer func() {
		for _, e := range entries {
			e.saving.Unlock()
		}
	}()
	records := make([]Record, len(entries))
	for i, e := range entries {
		records[i] = e.record()
		if records[i].State == StateEnded {
			return fault.Wrap(fault.Conflict, goneError(records[i].Sandbox), "sandbox %s has ended", e.id)
		}
	}
	return m.writeAll(ctx, records, m.store.SaveAll, events...)
}

// writeAll is write for several, which all have the same events.
func (m *Manager) writeAll(ctx context.Context, records []Record, write func(context.Context, []Entry) error, events ...LifecycleEvent) error {
	all := make([]Entry, len(records))
	for i, r := range records {
		r.BootID = m.cfg.BootID
		all[i] = Entry{r, stamp(r, slices.Clone(events))}
	}
	err := write(context.WithoutCancel(ctx), all)
	if err == nil {
		for tenant := range tenantsOf(records) {
			m.events.tell(tenant)
		}
	}
	return err
}

// tenantsOf are those that own the records, each once.
func tenantsOf(records []Record) map[string]bool {
	tenants := map[string]bool{}
	for i := range records {
		tenants[records[i].Tenant] = true
	}
	return tenants
}

// stamp says whose events they are, and when they were if nobody has.
func stamp(r Record, events []LifecycleEvent) []LifecycleEvent {
	for i := range events {
		events[i].Sandbox, events[i].Tenant = r.ID, r.Tenant
		if events[i].At.IsZero() {
			events[i].At = now()
		}
	}
	return events
}

// write is not stopped by a caller who leaves: the change has happened and the row must say so. The caller holds saving.
func (m *Manager) write(ctx context.Context, r Record, write func(context.Context, Record, ...LifecycleEvent) error, events ...LifecycleEvent) error {
	r.BootID = m.cfg.BootID
	err := write(context.WithoutCancel(ctx), r, stamp(r, events)...)
	if err == nil && len(events) > 0 {
		m.events.tell(r.Tenant)
	}
	return err
}

// now is a time that survives a Store unchanged.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// deadlineOf is zero for a negative lifetime: none.
func deadlineOf(from time.Time, lifetime time.Duration) time.Time {
	if lifetime < 0 {
		return time.Time{}
	}
	return from.Add(lifetime).Truncate(time.Microsecond)
}

var idText = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewID is a DNS label of 26 characters with 120 random bits: an id is not a secret, but it cannot be guessed.
func NewID() string {
	var b [15]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the process instead
	return "sb" + idText.EncodeToString(b[:])
}

// waitError says which wait a caller gave up.
func waitError(ctx context.Context, what string) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fault.Wrap(fault.Timeout, ctx.Err(), "the time given has passed while waiting for %s", what)
	}
	return fault.Wrap(fault.Unavailable, ctx.Err(), "gave up waiting for %s", what)
}
