// Package maker is the one privileged process of Cove: it makes sandboxes and zygotes, hands descriptors to the server
// and ends what has reached its deadline. It follows no path of a sandbox, reads nothing that they wrote but single bytes
// while one is forked, and lives on when the server dies.
package maker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/cgroup"
	"github.com/covehq/cove/internal/driver/native/network"
	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Config is everything the maker is told; it reads no file of its own but the host's.
type Config struct {
	DataDir   string // holds maker/: socket, disks
	Templates string // where root has built templates
	Tag       string // at most three characters, unique on this host: names cgroups, links and tables
	ServerUID int    // who may speak to the maker, besides root
	PoolSize  int    // shells kept ready for each template and tenant
	Network   bool
	Resolver  []string // argv of the DNS forwarder, run without privileges
	Host      *os.File // the mount namespace that it was started in; nil: no host path can be in a sandbox
	Ready     func()   // called once the maker answers
	Log       *slog.Logger

	Connections int // of the server at the same time; zero: 4,096
	Pools       int // in use or kept ready at the same time; zero: as many as the host's memory allows
}

// Maker makes sandboxes.
type Maker struct {
	cfg       Config
	log       *slog.Logger
	host      *host
	groups    *cgroup.Root
	net       *network.Network // nil: sandboxes have loopback only
	disks     *disks
	volumes   *volumes
	space     *diskSpace
	slots     *slots
	oom       *oomLog
	bootID    string
	templates *template.Store
	images    layerStore      // unpacked layers of container images
	wg        sync.WaitGroup  // goroutines that end with the maker
	closed    chan struct{}   // closed when closing is set
	crowd     sync.Once       // logs that connections were closed
	suspect   chan struct{}   // full when a loop device had an error
	life      context.Context // of work that outlives its caller; ends with the maker
	die       context.CancelFunc

	mu          sync.Mutex
	closing     bool
	resolver    *os.Process // nil: none
	pools       map[poolKey]*pool
	sandboxes   map[string]*live
	dying       map[*shell]struct{}
	lastCallers []*net.UnixConn   // see keepUntilExit
	spoilt      map[string]bool   // digests of templates that no longer match
	changed     map[string]string // those of the operator: the digest by name

	unmappedMu sync.Mutex
	unmapped   *os.File // see strangers; nil: not needed yet

	ends *journal
}

// poolKey is what shells and zygotes are made for. Tenants never share one.
type poolKey struct{ tenant, digest string }

// origin is what a kernel was forked from, and what forks of it are made from.
type origin struct {
	zygote *zygote
	anchor *trace.Process // nil: it cannot be forked
}

// live is a sandbox that was started.
type live struct {
	id       string
	tenant   string
	template string
	pool     *pool
	shell    *shell
	started  time.Time
	env      map[string]string
	given    map[string]string // what of it came with the request that made it
	limits   template.Limits
	over     chan struct{} // closed when its end is recorded
	turn     sync.RWMutex  // whoever pauses or resumes it has it alone

	mu        sync.Mutex
	paused    bool
	held      bool              // stopped by spaceWatch
	forked    bool              // a kernel was forked into it
	kernels   map[string]origin // of each kernel
	deadline  time.Time
	timer     *time.Timer
	cause     sandbox.Cause // first one wins
	message   string
	usage     sandbox.Usage // at the moment it was told to stop
	insisting *time.Timer   // see insist
	ended     bool          // its PID 1 has ended
}

// Open prepares the host: cgroups, network, private mounts; and clears what an earlier maker left behind.
func Open(cfg Config) (*Maker, error) {
	m := &Maker{
		cfg: cfg, log: cfg.Log, slots: newSlots(), closed: make(chan struct{}), suspect: make(chan struct{}, 1),
		pools: map[poolKey]*pool{}, sandboxes: map[string]*live{}, dying: map[*shell]struct{}{}, spoilt: map[string]bool{}, changed: map[string]string{}, ends: newJournal(),
	}
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		m.bootID = strings.TrimSpace(string(id))
	}
	var undo undo
	defer undo.run()
	var cancel context.CancelFunc
	m.life, cancel = context.WithCancel(context.Background()) // owned by the maker, ended by Close
	m.die = cancel
	undo.add(cancel)
	var err error
	if m.templates, err = template.Open(template.Options{Dir: cfg.Templates, Readers: filepath.Join(cfg.DataDir, "server"), Log: m.log}); err != nil {
		return nil, err
	}
	if err := m.templates.CleanSnapshots(m.life); err != nil {
		return nil, err
	}
	if err := m.openImages(); err != nil {
		return nil, err
	}

	// Order: what needs the host's mounts first, then the pruning, then what lives in the pruned namespace.
	mounts, err := cgroup.Mounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	m.groups, err = cgroup.Open(mounts, "cove-"+cfg.Tag)
	if err != nil {
		return nil, err
	}
	undo.add(m.groups.Close)
	disksDir := filepath.Join(cfg.DataDir, "maker", "disks")
	thawLeft(disksDir)
	if err := m.sweepGroups(); err != nil {
		return nil, err
	}
	m.oom = followOOM(m.log, "/"+m.groups.Name()+"/", liveGroups{m}, m.tellShortage, m.suspectDisks)
	undo.add(m.oom.close)
	if cfg.Network {
		m.net, err = network.Open(network.Options{Tag: cfg.Tag, Log: m.log})
		if err != nil {
			return nil, fmt.Errorf("network: %w", err)
		}
		undo.add(func() { _ = m.net.Close() })
		if err := m.startResolver(); err != nil {
			return nil, err
		}
	}
	m.disks, err = openDisks(disksDir)
	if err != nil {
		return nil, err
	}
	if m.volumes, err = openVolumes(filepath.Join(cfg.DataDir, "maker", "volumes"), m.disks.mark); err != nil {
		return nil, err
	}
	if m.space, err = openSpace(disksDir); err != nil {
		return nil, err
	}
	undo.add(func() { m.space.dir.Close() })
	nameserver := ""
	if m.net != nil {
		nameserver = m.net.Gateway().String()
	}
	m.host, err = prepareHost(cfg.DataDir, nameserver)
	if err != nil {
		return nil, err
	}
	m.wg.Go(m.keepHouse)
	m.wg.Go(m.watchSpace)
	m.wg.Go(m.watchDisks)
	m.wg.Go(m.countKept)
	undo.release()
	return m, nil
}

// sweepGroups kills and removes what an earlier maker of this name left: its sandboxes ended with it, but a process
// of theirs may still be dying.
func (m *Maker) sweepGroups() error {
	names, err := m.groups.List()
	if err != nil {
		return err
	}
	deadline := time.Now().Add(50 * time.Second)
	for _, name := range names {
		g := m.groups.Existing(name)
		for {
			g.Kill()
			err := g.Remove()
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("clear what an earlier run left: %w", err)
			}
			time.Sleep(10 * time.Millisecond) // a dying process tells nobody when it has left its cgroup
		}
	}
	return nil
}

// Prepare makes a tenant's template ready: its zygote runs and its pool fills.
func (m *Maker) Prepare(ctx context.Context, tenant, name, digest string) error {
	if err := checkTenantName(tenant); err != nil {
		return err
	}
	t, err := m.ownTemplate(ctx, tenant, name, digest)
	if err != nil {
		return err
	}
	if err := checkTemplate(t); err != nil {
		return err
	}
	p, done, err := m.poolFor(tenant, t)
	if err != nil {
		return err
	}
	defer done()
	return p.prepare(ctx)
}

// ownTemplate reads a template where root built it. A caller only names it: whoever could say which directories of this
// host make a sandbox could read all of them.
func (m *Maker) ownTemplate(ctx context.Context, tenant, name, digest string) (*template.Template, error) {
	for range 2 {
		t, err := m.templates.ResolveFor(ctx, tenant, name)
		if err == nil && t.Digest == digest {
			return t, nil
		}
		if err := m.templates.Refresh(); err != nil {
			return nil, err
		}
	}
	if t, err := m.templates.Earlier(name, digest); err == nil {
		return t, nil // it was built again between the caller's look and now
	}
	return nil, fault.New(fault.Unavailable, "template %q was removed or built again while a sandbox was to be made from it; try again", name)
}

func checkTemplate(t *template.Template) error {
	if t == nil || t.Digest == "" || len(t.Trees) == 0 || t.Trees[0].Target != "/" {
		return fault.New(fault.Invalid, "a template needs a digest and a tree for /")
	}
	if len(t.Trees) > maxTrees {
		return fault.New(fault.Invalid, "template %s has %d trees, at most %d are possible", t.Name, len(t.Trees), maxTrees)
	}
	images := t.Images()
	for _, tree := range t.Trees {
		if !filepath.IsAbs(tree.Target) || filepath.Clean(tree.Target) != tree.Target || len(tree.Target) > maxTarget || len(tree.Lower) <= len(images) {
			return fault.New(fault.Invalid, "template %s: tree %q is not usable", t.Name, tree.Target)
		}
		if !slices.Equal(tree.Lower[:len(images)], images) {
			return fault.New(fault.Invalid, "template %s: tree %q has other images than the rest", t.Name, tree.Target)
		}
		for _, path := range tree.Lower {
			if !filepath.IsAbs(path) {
				return fault.New(fault.Invalid, "template %s: layer %q is not an absolute path", t.Name, path)
			}
		}
	}
	if layers := countLayers(t); layers > maxLayers {
		return fault.New(fault.Invalid, "template %s has %d layers, at most %d are possible", t.Name, layers, maxLayers)
	}
	return nil
}

// poolFor finds or makes a pool, and closes idle pools if there are too many. The pool is not
// closed before the caller calls done.
func (m *Maker) poolFor(tenant string, t *template.Template) (p *pool, done func(), err error) {
	for {
		p, done, err = m.poolNow(tenant, t)
		closed := false
		switch {
		case errors.Is(err, errTenantPools):
			closed = m.closeIdle(func(p *pool) bool { return p.key.tenant == tenant })
		case errors.Is(err, errManyPools):
			closed = m.closeIdle(func(*pool) bool { return true })
		}
		if !closed {
			return p, done, err
		}
	}
}

var (
	errManyPools   = errors.New("too many pools")
	errTenantPools = errors.New("too many pools of one tenant")
)

func (m *Maker) poolNow(tenant string, t *template.Template) (p *pool, done func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return nil, nil, fault.New(fault.Unavailable, "the maker is shutting down")
	}
	if p, err = m.findPool(tenant, t); err != nil {
		return nil, nil, err
	}
	return p, p.serve(), nil
}

// findPool finds or makes one. Called with m.mu.
func (m *Maker) findPool(tenant string, t *template.Template) (*pool, error) {
	if m.spoilt[t.Digest] {
		return nil, errSpoilt(t.Name)
	}
	key := poolKey{tenant, t.Digest}
	if p := m.pools[key]; p != nil {
		return p, nil
	}
	if err := m.checkPools(tenant); err != nil {
		return nil, err
	}
	p := newPool(m, key, t)
	if err := m.equipPool(p); err != nil {
		closeAll(p.images)
		return nil, err
	}
	m.pools[key] = p
	return p, nil
}

// equipPool opens a template's images and finds out whose zygotes serve it. Called with m.mu.
func (m *Maker) equipPool(p *pool) (err error) {
	for _, path := range p.template.Images() {
		image, err := m.disks.open(path)
		if err != nil {
			return err
		}
		p.images = append(p.images, image)
	}
	if p.template.Snapshot != nil && p.warm() {
		// Kernels of a snapshot come from the zygotes of the template that the operator built: what a sandbox has changed
		// must not run outside of one, where neither its limits nor its end apply.
		if p.nursery, err = m.findPool(p.key.tenant, p.template.Base()); err != nil {
			return err
		}
		p.owner = p.nursery.owner
		return nil
	}
	p.owner, err = m.slots.takeOwner()
	return err
}

// pool finds a pool that was prepared. The pool is not closed before the caller calls done.
func (m *Maker) pool(key poolKey) (p *pool, done func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return nil, nil, fault.New(fault.Unavailable, "the maker is shutting down")
	}
	p = m.pools[key]
	if p == nil || p.removed {
		return nil, nil, fault.New(fault.NotFound, "template %s is not prepared for this tenant", key.digest)
	}
	if m.spoilt[key.digest] {
		return nil, nil, errSpoilt(p.template.Name)
	}
	return p, p.serve(), nil
}

// servePool keeps the pool of a sandbox from being closed until done is called, though the sandbox end.
func (m *Maker) servePool(l *live) (done func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sandboxes[l.id] != l {
		return nil, fault.New(fault.Gone, "sandbox %s has ended", l.id)
	}
	return l.pool.serve(), nil
}

func (m *Maker) find(id string) (*live, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.sandboxes[id]
	if l == nil {
		return nil, fault.New(fault.NotFound, "no sandbox %s", id)
	}
	return l, nil
}

// Close ends every sandbox and zygote and puts the host back.
func (m *Maker) Close() error {
	m.mu.Lock()
	m.closing = true
	close(m.closed)
	m.die()
	lives := make([]*live, 0, len(m.sandboxes))
	for _, l := range m.sandboxes {
		lives = append(lives, l)
	}
	pools := make([]*pool, 0, len(m.pools))
	for _, p := range m.pools {
		pools = append(pools, p)
	}
	m.mu.Unlock()
	for _, l := range lives {
		m.end(l, sandbox.CauseShutdown, "")
	}
	for _, p := range pools {
		p.close()
	}
	m.mu.Lock()
	if m.resolver != nil {
		_ = m.resolver.Kill()
	}
	m.mu.Unlock()
	m.wg.Wait()
	m.oom.close()
	var errs []error
	if m.net != nil {
		errs = append(errs, m.net.Close())
	}
	m.volumes.closing.Wait()
	if m.unmapped != nil {
		m.unmapped.Close()
	}
	m.disks.close()
	m.space.dir.Close()
	m.groups.Close()
	return errors.Join(errs...)
}

// startResolver binds the DNS sockets and gives them to a process without privileges.
func (m *Maker) startResolver() error {
	if len(m.cfg.Resolver) == 0 {
		return nil
	}
	udp, tcp, err := m.net.ListenDNS()
	if err != nil {
		return fmt.Errorf("bind resolver: %w", err)
	}
	m.wg.Go(func() { m.keepResolver(udp, tcp) })
	return nil
}

// undo is a ladder's list of steps back.
type undo struct{ steps []func() }

func (u *undo) add(f func()) { u.steps = append(u.steps, f) }
func (u *undo) release()     { u.steps = nil }
func (u *undo) run() {
	for i := len(u.steps) - 1; i >= 0; i-- {
		u.steps[i]()
	}
}

// slots hand out what is numbered: uid ranges, addresses, owners of namespaces.
type slots struct {
	mu     sync.Mutex
	free   []int
	next   int
	used   int
	owners int // that were handed out at least once

	freeOwners []int // given back, the oldest first
}

// Ids stay below 2^31; a sandbox has 65,536 of its own, a pool's owner one that is mapped in no sandbox.
const (
	idsPerSandbox = 1 << 16
	firstOwner    = 0x1fff0000
	maxOwners     = 0xffff
	firstBase     = 0x20000000
	maxSlots      = 16000
)

// restingSlots is how many slots stay unused after their sandbox's end; the one that ended first is used again first. What the host's
// network remembers of them is cleared meanwhile, for many at once and not while somebody waits for a sandbox.
const restingSlots = 256

func newSlots() *slots { return &slots{} }

func (s *slots) take() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) > restingSlots || s.next == maxSlots && len(s.free) > 0 {
		slot := s.free[0]
		s.free = s.free[1:]
		s.used++
		return slot, nil
	}
	if s.next == maxSlots {
		return 0, fault.New(fault.Exhausted, "this host holds at most %d sandboxes", maxSlots)
	}
	s.next++
	s.used++
	return s.next - 1, nil
}

func (s *slots) give(slot int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, slot)
	s.used--
}

func (s *slots) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

func (s *slots) takeOwner() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners < maxOwners {
		s.owners++
		return firstOwner + s.owners, nil
	}
	if len(s.freeOwners) == 0 {
		return 0, fault.New(fault.Exhausted, "too many templates and tenants on this host")
	}
	owner := s.freeOwners[0]
	s.freeOwners = s.freeOwners[1:]
	return owner, nil
}

// giveOwner takes back the owner of a pool that was closed. Its processes may still be ending, and
// some of the kernel's objects with them: so it is used again only when no new one is left, and then
// after all that were given back before it.
func (s *slots) giveOwner(owner int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freeOwners = append(s.freeOwners, owner)
}

func uidBase(slot int) int { return firstBase + slot*idsPerSandbox }

func groupName(slot int) string { return "sb" + strconv.Itoa(slot) }

func isGone(err error) bool { return errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrProcessDone) }
