package maker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// pool keeps shells and zygotes for one template of one tenant.
type pool struct {
	m        *Maker
	key      poolKey
	template *template.Template
	owner    int           // the uid of its zygotes, which owns its shells' user namespaces
	nursery  *pool         // whose zygotes bear its kernels; nil: its own
	images   []*frozenDisk // of the template, open as long as the pool is there
	size     int
	form     form
	limits   template.Limits
	ctx      context.Context // ends with the pool; owns its goroutines
	cancel   context.CancelFunc
	building chan struct{} // bounds how many shells are made at once
	refill   chan struct{}

	mu        sync.Mutex
	started   bool
	shells    []*shell
	bare      []*shell // without a kernel, for branches, which bring their own
	forks     int      // branches that somebody made at once, lately
	forksOver *time.Timer
	taken     time.Time // when somebody was last served
	serving   int       // requests that use the pool: creates, forks and preparations
	zygotes   []*zygote // the newest last
	nextZ     int
	zygoteErr error         // why the last zygote did not start
	failed    time.Time     // when that was
	making    chan struct{} // closed when the zygote that is being started is there or has failed

	removed bool // its template is; guarded by m.mu
}

// Rotation of zygotes: siblings share a hash seed and an address layout, and a zygote with many children forks slowly.
const (
	zygoteLive = 512
	zygoteAge  = 6 * time.Hour
	zygoteRest = 10 * time.Second // after a start that failed, while an old one still forks
)

// Variables for tests, in which fewer forks and a clock that jumps make a zygote old.
var (
	zygoteForks = 5000
	clock       = time.Now
)

const defaultDisk = 2 << 30

func newPool(m *Maker, key poolKey, t *template.Template) *pool {
	ctx, cancel := context.WithCancel(context.Background()) // owned by the pool, ended by close
	disk := t.Limits.DiskBytes
	if disk == 0 {
		disk = defaultDisk
	}
	return &pool{
		m: m, key: key, template: t, size: m.cfg.PoolSize, ctx: ctx, cancel: cancel,
		form:     form{storage: sandbox.StorageVolatile, disk: disk},
		limits:   poolLimits(t.Limits),
		building: make(chan struct{}, 2*runtime.NumCPU()), // each waits for the host for a part of its making
		refill:   make(chan struct{}, 1),
		taken:    time.Now(),
	}
}

// poolLimits is what a shell is born with: most likely what it will be asked for.
func poolLimits(t template.Limits) template.Limits {
	return template.Limits{CPUs: cmp.Or(t.CPUs, 1), MemoryBytes: cmp.Or(t.MemoryBytes, 512<<20), Pids: cmp.Or(t.Pids, 256)}
}

// prepare returns when a zygote is ready and at least one shell waits.
func (p *pool) prepare(ctx context.Context) error {
	if p.warm() {
		z, err := p.zygote(ctx)
		if err != nil {
			return err
		}
		z.release()
	}
	p.mu.Lock()
	first := !p.started
	if first {
		p.started = true
		p.m.wg.Add(1)
		go p.fill()
	}
	p.mu.Unlock()
	if !first {
		return nil
	}
	if p.m.space.check(0) != nil {
		return nil // it is made when there is space
	}
	// Prove that a shell can be made, so that the first caller is not the one who learns that it cannot.
	form := p.form
	form.ahead = true
	s, err := p.makeOne(ctx, form)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.shells = append(p.shells, s)
	p.mu.Unlock()
	return nil
}

// warm tells whether kernels are forked from a zygote.
func (p *pool) warm() bool {
	return p.template.Python.Executable != "" && len(p.template.Python.Preload) > 0
}

// fill keeps the pool full, off everybody's path.
func (p *pool) fill() {
	defer p.m.wg.Done()
	for {
		p.mu.Lock()
		short := p.size - len(p.shells)
		bare := short <= 0 && len(p.bare) < p.forks
		p.mu.Unlock()
		if short <= 0 && !bare {
			select {
			case <-p.refill:
				continue
			case <-p.ctx.Done():
				return
			}
		}
		if p.ctx.Err() != nil {
			return
		}
		if !p.calm() || !p.hasSpace() {
			continue
		}
		form := p.form
		form.ahead = true
		if bare {
			p.keepSpares()
			form = form.bare()
		}
		s, err := p.makeOne(p.ctx, form)
		if err == nil && p.warm() && !bare {
			// Not having one ahead is no failure: the create that gets this shell forks its own.
			if n, berr := p.m.bear(p.ctx, p, s, true); berr == nil {
				if n.prepare(p.template) == nil {
					s.kernel = n
				} else {
					n.end()
				}
			}
		}
		p.mu.Lock()
		if err == nil && p.ctx.Err() == nil {
			switch {
			case !bare:
				p.shells = append(p.shells, s)
				s = nil
			case len(p.bare) < p.forks: // still
				p.bare = append(p.bare, s)
				s = nil
			}
		}
		p.mu.Unlock()
		if s != nil {
			s.kill()
			p.m.retire(s)
		}
		if err != nil && p.ctx.Err() == nil {
			p.m.log.Error("fill pool", "template", p.template.Name, "error", err)
			select {
			case <-time.After(time.Second): // the host is in trouble; do not add to it
			case <-p.ctx.Done():
			}
		}
		if p.ctx.Err() != nil {
			return
		}
	}
}

// bare is a form for branches, whose files it is given later: until then it needs no image and no device, which would only
// have to be taken away while somebody waits.
func (f form) bare() form {
	f.storage, f.disk = sandbox.StorageTmpfs, bareDisk
	return f
}

// bareDisk holds the few directories that mounts need.
const bareDisk = 1 << 20

func (p *pool) keepSpares() {
	p.mu.Lock()
	n := p.forks + 1 // the files are frozen into one
	p.mu.Unlock()
	if err := p.m.disks.keepSpares(n, p.form.disk); err != nil {
		p.m.log.Warn("prepare disks", "error", err) // a comfort
	}
}

// quiet is how long after a create a pool waits before it makes the next shell: whoever was just served wants the
// processors for a first cell.
const quiet = 25 * time.Millisecond

// calm waits until nobody is being served and nobody was for a while. In a burst every caller makes its own shell: a pool
// that filled at the same time would only take processors away from them. It reports false when the caller should look
// again.
func (p *pool) calm() bool {
	p.mu.Lock()
	rest := quiet - time.Since(p.taken)
	if p.serving > 0 {
		rest = quiet
	}
	p.mu.Unlock()
	if rest <= 0 {
		return true
	}
	timer := time.NewTimer(rest)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.refill:
	case <-p.ctx.Done():
	}
	return false
}

// fullRest is how long a pool waits before it looks again whether the host's disk has space.
const fullRest = time.Second

// hasSpace waits while the host's disk is full: what is kept ready must not take what the sandboxes that live still need. It
// reports false when the caller should look again.
func (p *pool) hasSpace() bool {
	if p.m.space.check(0) == nil {
		return true
	}
	timer := time.NewTimer(fullRest)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.ctx.Done():
	}
	return false
}

// idle reports whether no request is using the pool. One that was given up while its zygote started
// is idle too.
func (p *pool) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.serving == 0
}

func (p *pool) lastUse() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken
}

// serve counts a request that uses the pool, until the request calls done.
func (p *pool) serve() (done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.serving++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.serving--
		p.taken = time.Now()
	}
}

func (p *pool) makeOne(ctx context.Context, f form) (*shell, error) {
	select {
	case p.building <- struct{}{}:
		defer func() { <-p.building }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	s, err := p.m.makeShell(ctx, p.template, p.owner, f, p.limits)
	if err != nil {
		return nil, err
	}
	if p.m.net != nil {
		// Nobody lives in it yet: give it the usual policy now rather than on the create path.
		if err := p.m.setNetwork(s, policy.Network{Mode: policy.Internet}); err != nil {
			s.kill()
			p.m.retire(s)
			return nil, err
		}
	}
	return s, nil
}

// take gets a shell: a pooled one that is still alive, or a new one.
func (p *pool) take(ctx context.Context, f form) (*shell, error) {
	if f.disk == 0 {
		f.disk = p.form.disk
	}
	if f.storage == "" {
		f.storage = p.form.storage
	}
	if f == p.form {
		if s := p.popLiving(); s != nil {
			return s, nil
		}
	}
	return p.makeOne(ctx, f)
}

// Forks come in rows: after one, as many shells and disks are kept ready as it had branches.
const (
	maxBare  = 16
	forkRest = 10 * time.Minute // without a fork, until they are given up
)

func (p *pool) expectForks(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return
	}
	p.forks = min(max(p.forks, n), maxBare, 2*p.size)
	if p.forksOver == nil {
		p.forksOver = time.AfterFunc(forkRest, p.forgetForks)
	}
	p.forksOver.Reset(forkRest)
	p.wakeFill()
}

func (p *pool) forgetForks() {
	p.mu.Lock()
	bare := p.bare
	p.bare, p.forks = nil, 0
	p.mu.Unlock()
	for _, s := range bare {
		s.kill()
		p.m.retire(s)
	}
	_ = p.m.disks.keepSpares(0, p.form.disk)
}

// popBare gives a shell for a branch, or nil.
func (p *pool) popBare() *shell {
	p.mu.Lock()
	if n := len(p.bare); n > 0 {
		s := p.bare[n-1]
		p.bare = p.bare[:n-1]
		p.mu.Unlock()
		select {
		case <-s.done:
			p.m.retire(s)
			return p.popBare()
		default:
			return s
		}
	}
	p.mu.Unlock()
	return p.popLiving()
}

// wakeFill has the pool look at what it lacks.
func (p *pool) wakeFill() {
	select {
	case p.refill <- struct{}{}:
	default:
	}
}

// popLiving gives a pooled shell that is still alive, or nil.
func (p *pool) popLiving() *shell {
	for {
		s := p.pop()
		if s == nil {
			return nil
		}
		select {
		case <-s.done:
			p.m.retire(s)
		default:
			return s
		}
	}
}

func (p *pool) pop() *shell {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.shells)
	if n == 0 {
		return nil
	}
	s := p.shells[0]
	p.shells = p.shells[1:]
	p.wakeFill()
	return s
}

// zygote gives one that can take another child, and starts one when there is none. One start at a time.
func (p *pool) zygote(ctx context.Context) (*zygote, error) {
	if p.nursery != nil {
		return p.nursery.zygote(ctx)
	}
	for {
		p.mu.Lock()
		z, spare := p.usable()
		if z != nil {
			if !spare && p.making == nil && time.Since(p.failed) > zygoteRest {
				p.startNext() // before it is needed
			}
			z.reserve()
			p.mu.Unlock()
			return z, nil
		}
		if p.making == nil {
			p.startNext()
		}
		making := p.making
		p.mu.Unlock()
		select {
		case <-making:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-p.ctx.Done():
			return nil, fault.New(fault.Unavailable, "the maker is shutting down")
		}
		p.mu.Lock()
		err := p.zygoteErr
		p.mu.Unlock()
		if errors.Is(err, errHollow) {
			return nil, err // its sentence is for the caller
		}
		if err != nil {
			return nil, fault.Wrap(fault.Unavailable, err, "the kernel of template %s cannot be started", p.template.Name)
		}
	}
}

// usable picks the zygote with the fewest children and tells whether there is room to spare. One that is old goes on until
// there is a younger one, which takes seconds to start: it is started while the last has a tenth of its forks and its age left.
// Called with p.mu.
func (p *pool) usable() (best *zygote, spare bool) {
	room, fewest, aged := 0, 2*zygoteLive, true // rather a slow fork than none, while the next zygote starts
	var idle []*zygote
	kept := p.zygotes[:0]
	for _, z := range p.zygotes {
		living, forks, dead := z.load()
		if dead {
			continue
		}
		kept = append(kept, z)
		age := clock().Sub(z.born)
		old := forks >= zygoteForks || age > zygoteAge
		if old && living == 0 {
			idle = append(idle, z)
		}
		if forks < zygoteForks*9/10 && age < zygoteAge*9/10 {
			room += max(zygoteLive-living, 0)
		}
		if living < 2*zygoteLive && (aged && !old || old == aged && living < fewest) {
			best, fewest, aged = z, living, old
		}
	}
	if !aged { // somebody else is there
		for _, z := range idle {
			z.stop()
		}
		kept = slices.DeleteFunc(kept, func(z *zygote) bool { return slices.Contains(idle, z) })
	}
	p.zygotes = kept
	return best, room > zygoteLive/8
}

// startNext starts a zygote in the background. Called with p.mu.
func (p *pool) startNext() {
	done := make(chan struct{})
	p.making = done
	p.nextZ++
	name := fmt.Sprintf("zy%d-%d", p.owner-firstOwner, p.nextZ)
	p.m.wg.Add(1)
	go func() {
		defer p.m.wg.Done()
		z, err := p.m.startZygote(p.ctx, p.template, p.owner, name)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.zygoteErr = err; err != nil {
			p.failed = time.Now()
			if p.ctx.Err() == nil { // why is for whoever needs one: the words of a template are not for the log
				p.m.log.Warn("zygote did not start", "template", p.template.Name, "tenant", p.key.tenant)
			}
		} else {
			p.zygotes = append(p.zygotes, z)
			p.m.log.Info("zygote ready", "template", p.template.Name, "tenant", p.key.tenant, "pid", z.pid, "seconds", z.ready.Seconds, "rss_kb", z.ready.RSSKB)
			if p.ctx.Err() != nil {
				z.stop()
			}
		}
		p.making = nil
		close(done)
	}()
}

func (p *pool) close() {
	p.cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range append(p.shells, p.bare...) {
		s.kill()
		p.m.retire(s)
	}
	p.shells, p.bare = nil, nil
	if p.forksOver != nil {
		p.forksOver.Stop()
	}
	for _, z := range p.zygotes {
		z.stop()
	}
	closeAll(p.images)
	p.images = nil
}
