package maker

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// fork copies a running sandbox: its files, as a frozen disk, and the memory of one kernel.
//
// The kernel stands still between two cells while its anchor, outside the sandbox, is forked. That copy is the anchor of
// the first branch, and the other branches' are copies of it; each then sends a kernel into a shell like any other. So a
// kernel that can be forked may do nothing that another may not, and a branch owes nothing to its parent: not an id, not
// a namespace, not its life.
type fork struct {
	m       *Maker
	parent  *live
	from    origin
	request sandbox.ForkRequest
	talk    *net.UnixConn // to the kernel
	frozen  *frozenDisk
	bytes   uint64 // of memory
	parts   *parting
	babies  []*baby
}

// baby is one branch that is being made.
type baby struct {
	child  sandbox.ForkChild
	place  *place // until it has a shell
	shell  *shell
	anchor *trace.Process // until it has a kernel
	born   *newborn
	live   *live
}

// Fork makes copies of a running sandbox. talk is the maker's end of a socket whose other end goes to the kernel by way
// of the sandbox's agent, which the caller asks; cut is called when files and memory are those of one moment and the
// parent may go on.
func (m *Maker) Fork(ctx context.Context, r sandbox.ForkRequest, talk *net.UnixConn, cut func()) (_ *sandbox.Forked, tokens []string, channels []*os.File, err error) {
	parent, err := m.find(r.Parent)
	if err != nil {
		return nil, nil, nil, err
	}
	awake, err := parent.awake()
	if err != nil {
		return nil, nil, nil, err
	}
	defer awake()
	if len(r.Children) == 0 {
		return nil, nil, nil, fault.New(fault.Invalid, "a fork makes at least one sandbox")
	}
	for _, c := range r.Children {
		if err := cmp.Or(c.Network.Validate(), checkLimits(c.Limits)); err != nil {
			return nil, nil, nil, err
		}
	}
	if parent.shell.disk == nil {
		return nil, nil, nil, errNoDisk
	}
	// The space is taken when the kernel stands still: until then other starts may use it.
	if err := cmp.Or(m.space.check(parent.shell.disk.copyBytes(len(r.Children))), m.checkTenant(parent.tenant)); err != nil {
		return nil, nil, nil, err
	}
	f := &fork{m: m, parent: parent, request: r, talk: talk}
	stop := context.AfterFunc(ctx, func() { talk.Close() })
	defer stop()
	if f.from, err = parent.originOf(r.Kernel); err != nil {
		if fault.Is(err, fault.Conflict) {
			_, _ = talk.Read(make([]byte, 1)) // the agent knows better what is wrong with that kernel: let it speak first
		}
		return nil, nil, nil, err
	}
	defer f.from.zygote.release()
	defer f.close()
	defer func() {
		if err != nil {
			f.unmake(err)
			err = parent.whyEnding(err)
		}
	}()
	if err := f.guard(func() error { return f.run(ctx, cut) }); err != nil {
		return nil, nil, nil, err
	}
	for _, b := range f.babies {
		b.live.setDeadline(m, b.child.Deadline)
		c, err := m.channel(b.live)
		if err != nil {
			wire.CloseAll(channels)
			return nil, nil, nil, err
		}
		channels, tokens = append(channels, c), append(tokens, b.born.token)
	}
	return &sandbox.Forked{Memory: int64(f.bytes), NotCopied: f.withheld()}, tokens, channels, nil
}

// withheld names the variables that the parent was given and its branches were not.
func (f *fork) withheld() []sandbox.NotCopied {
	var all []sandbox.NotCopied
	for _, name := range slices.Sorted(maps.Keys(f.parent.given)) {
		if _, again := f.request.Children[0].Env[name]; !again && !f.request.Children[0].InheritEnv {
			all = append(all, sandbox.NotCopied{Kind: "environment", What: name})
		}
	}
	return all
}

// whyEnding explains a failure by the end of the sandbox, where it is ending.
func (l *live) whyEnding(err error) error {
	l.mu.Lock()
	cause := l.cause
	l.mu.Unlock()
	select {
	case <-l.shell.done:
	default:
		if cause == "" {
			return err
		}
	}
	return fault.Wrap(fault.Gone, err, "sandbox %s has ended", l.id)
}

// originOf finds what forks of a kernel are made from, and reserves its zygote.
func (l *live) originOf(kernel string) (origin, error) {
	if kernel == "" {
		kernel = agentapi.DefaultKernel
	}
	l.mu.Lock()
	from, known := l.kernels[kernel]
	l.mu.Unlock()
	switch {
	case !l.pool.warm():
		return origin{}, fault.New(fault.Unsupported, "template %s has no kernel that could be copied: it preloads nothing", l.template)
	case !known:
		return origin{}, fault.New(fault.Conflict, "there is no kernel %q that was forked from its template's: only their memory can be copied", kernel)
	case from.anchor == nil:
		return origin{}, fault.New(fault.Unsupported, "this host's Python cannot copy kernels: %s", from.zygote.ready.Reason)
	}
	if _, _, dead := from.zygote.load(); dead {
		return origin{}, fault.New(fault.Unavailable, "what the kernel %q was forked from has ended: its memory cannot be copied any more", kernel)
	}
	from.zygote.reserve()
	return from, nil
}

// close lets go of what only the making needs.
func (f *fork) close() {
	f.talk.Close()
	if f.frozen != nil {
		f.frozen.close()
	}
	for _, b := range f.babies {
		if b.place != nil {
			f.m.givePlace(*b.place)
		}
	}
}

// unmake ends every branch: a fork makes all of them or none.
func (f *fork) unmake(why error) {
	for _, b := range f.babies {
		if b.anchor != nil {
			b.anchor.Kill()
		}
		if b.born != nil {
			b.born.end()
		}
		switch {
		case b.live != nil:
			f.m.end(b.live, sandbox.CauseStartFail, sandbox.StartFailure(why))
		case b.shell != nil:
			b.shell.kill()
			f.m.retire(b.shell)
		}
	}
}

func (f *fork) run(ctx context.Context, cut func()) error {
	// While the kernel finishes its cell, which may take long, nothing is held.
	var work sync.WaitGroup
	work.Go(func() { _ = f.parent.shell.disk.sync() }) // the freeze does it too, and says what is wrong
	err := f.meet(ctx)
	work.Wait()
	if err != nil {
		return err
	}
	release, err := f.m.space.grant(f.parent.shell.disk.copyBytes(len(f.request.Children)))
	if err != nil {
		return err
	}
	defer release()
	defer f.parent.pool.serve()()
	var places, size, memory error
	work.Go(func() {
		if places = f.guard(f.gather); places == nil {
			size = f.guard(func() error { return f.from.anchor.Hold(f.measure) })
		}
	})
	// The processes stop for the copy of the disk, and the anchor is one of them: one after the other.
	f.frozen, err = f.parent.shell.freezeDisk()
	work.Wait()
	if err == nil {
		err = places
	}
	if err == nil && size != nil {
		err = whyNotCopied(size)
	}
	if err != nil {
		return err
	}
	// All copies are made before any of them is changed: each may be the original of the next. They begin in the parent's cgroup,
	// and nobody may stop what is there before they have left.
	var inside sync.WaitGroup
	inside.Add(len(f.babies))
	f.parent.shell.moving.RLock()
	go func() {
		inside.Wait()
		f.parent.shell.moving.RUnlock()
	}()
	copied := make(chan struct{})
	goOn := sync.OnceFunc(func() {
		_, _ = f.talk.Write([]byte{'D'}) // a kernel that does not listen is its own trouble
		cut()
	})
	work.Go(func() {
		defer close(copied)
		memory = f.guard(func() error { return f.copyMemory(goOn) })
	})
	err = f.each(func(b *baby) error {
		left := sync.OnceFunc(inside.Done)
		defer left()
		err := f.house(ctx, b)
		<-copied
		if err != nil || memory != nil {
			return err
		}
		return f.become(b, left)
	})
	work.Wait()
	goOn()
	if memory != nil {
		return memory
	}
	return err
}

// meet waits until the kernel stands still.
func (f *fork) meet(ctx context.Context) error {
	var word [1]byte
	n, err := f.talk.Read(word[:])
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil || n != 1 || word[0] != 'R' {
		return fault.New(fault.Unavailable, "the kernel did not stand still to be copied")
	}
	return nil
}

// copyMemory makes the branches' anchors, the first from the kernel's own: then the kernel may go on, unless it has memory
// that is copied later.
func (f *fork) copyMemory(goOn func()) error {
	from := f.from.anchor
	for i, b := range f.babies {
		a, err := from.Fork()
		if err != nil {
			return whyNotCopied(err)
		}
		b.anchor = a
		if i > 0 {
			continue
		}
		from = a
		if err := a.Hold(f.part); err != nil {
			return whyNotCopied(err)
		}
		if f.parts.copies == 0 {
			goOn()
		}
	}
	return nil
}

// whyNotCopied explains a fork that the host refused: the copy begins as one of the parent's processes.
func whyNotCopied(err error) error {
	switch {
	case errors.Is(err, unix.EAGAIN):
		return fault.Wrap(fault.Exhausted, err, "the sandbox has as many processes as it may have, and its branches begin there, each with one")
	case errors.Is(err, unix.ENOMEM):
		return fault.Wrap(fault.Exhausted, err, "the sandbox has no memory left to be forked")
	case errors.Is(err, trace.ErrLate):
		return errNoTime(err)
	case fault.KindOf(err) != fault.Internal:
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "the kernel's memory could not be copied")
}

// errNoTime explains a fork whose processes waited too long for a processor.
func errNoTime(err error) error {
	return fault.Wrap(fault.Unavailable, err, "the kernel's memory could not be copied in time: the sandbox or the host is too busy; stop what runs in the sandbox or try again later")
}

// measure refuses a copy that a branch could not hold. Pages that are not written again stay charged to whoever wrote
// them first, so this is what bounds them.
func (f *fork) measure(pid int) error {
	has, err := ownBytes(pid)
	if err != nil {
		return err
	}
	had, err := ownBytes(f.from.zygote.pid)
	if err != nil {
		return err
	}
	f.bytes = has - min(had, has)
	return f.fits(f.bytes)
}

// fits refuses what a branch could not hold.
func (f *fork) fits(bytes uint64) error {
	for _, c := range f.request.Children {
		if limit := c.Limits.MemoryBytes; limit > 0 && bytes > uint64(limit) {
			return errTooLittle
		}
	}
	return nil
}

var errTooLittle = fault.New(fault.Exhausted, "the branch's memory limit is too small for a copy of the kernel")

// guard makes a defect of ours a failure of this fork: the maker holds every sandbox of the host.
func (f *fork) guard(do func() error) (err error) {
	defer func() {
		if what := recover(); what != nil {
			f.m.log.Error("fork panicked", "panic", what, "stack", string(debug.Stack()))
			err = fault.New(fault.Internal, "the maker failed at fork")
		}
	}()
	return do()
}

// each does something for every branch at once.
func (f *fork) each(do func(*baby) error) error {
	errs := make([]error, len(f.babies))
	var work sync.WaitGroup
	for i, b := range f.babies {
		work.Go(func() { errs[i] = f.guard(func() error { return do(b) }) })
	}
	work.Wait()
	return errors.Join(errs...)
}

// gather takes shells from the pool. What the pool does not have gets a place, and is made when the files are known.
func (f *fork) gather() error {
	p := f.parent.pool
	pooled := f.parent.shell.form.mounts == nil // a shell of the pool has no mounts
	if pooled {
		defer p.expectForks(len(f.request.Children))
	}
	for _, c := range f.request.Children {
		b := &baby{child: c}
		if pooled {
			b.shell = p.popBare()
		}
		f.babies = append(f.babies, b)
		if b.shell == nil {
			at, err := f.m.takePlace(poolLimits(c.Limits))
			if err != nil {
				return err
			}
			b.place = &at
			continue
		}
		if n := b.shell.takeKernel(); n != nil {
			n.end() // a branch brings its own
		}
		if err := b.shell.setLimits(poolLimits(c.Limits)); err != nil {
			return err
		}
	}
	return nil
}

// house gives a branch the frozen files, its limits, its network and an agent that knows whose it is: a shell from the
// pool is furnished anew, where there was none it is made.
func (f *fork) house(ctx context.Context, b *baby) error {
	if err := f.shelter(ctx, b); err != nil {
		return err
	}
	env := map[string]string{}
	if b.child.InheritEnv {
		env = f.parent.given
	}
	l := f.m.newLive(b.child.ID, f.parent.pool, b.shell, b.child.Limits, merge(env, b.child.Env))
	if err := f.m.register(l); err != nil {
		return err
	}
	b.live = l
	go f.m.attendLive(l) // counted by register
	l.turn.RLock()
	defer l.turn.RUnlock()
	if err := f.m.adjust(l, b.child.Limits, b.child.Network); err != nil {
		return err
	}
	return l.shell.tell(l.boot())
}

func (f *fork) shelter(ctx context.Context, b *baby) (err error) {
	p := f.parent.pool
	select {
	case p.building <- struct{}{}:
		defer func() { <-p.building }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	want := f.parent.shell.form
	want.from, want.owns, want.ahead = f.frozen, len(f.babies) == 1, false
	if b.shell != nil {
		return f.m.reroot(b.shell, p.template, want)
	}
	at := *b.place
	b.place = nil // makeShellAt takes it over
	b.shell, err = f.m.makeShellAt(ctx, at, p.template, p.owner, want, poolLimits(b.child.Limits))
	return err
}

// become sends a kernel into a branch, and says when the copy has left the parent's cgroup.
func (f *fork) become(b *baby, left func()) error {
	select {
	case <-b.shell.done: // whoever asked has left, and ends what there is
		return fault.New(fault.Gone, "sandbox %s was ended while it was made", b.child.ID)
	default:
	}
	a := b.anchor
	b.anchor = nil // whoever makes the kernel has it now
	var err error
	if b.born, err = f.m.graft(a, f.from.zygote, b.shell, kernelAccount(f.parent.pool.template), f.parts, b.child.Limits.OpenFiles); err == nil {
		left()
		b.live.turn.RLock()
		defer b.live.turn.RUnlock()
		err = f.m.settle(b.live, b.born, agentapi.DefaultKernel)
	}
	switch {
	case err == nil:
		return nil
	case b.shell.group.OOMKills() > 0:
		return errTooLittle
	case errors.Is(err, trace.ErrLate):
		return errNoTime(err)
	case fault.KindOf(err) != fault.Internal:
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "a branch could not be put together")
}

// part finds what a copy still has in common with the kernel.
func (f *fork) part(pid int) error {
	base, err := f.from.zygote.maps()
	if err != nil {
		return err
	}
	kernel, err := readMaps(pid, base.kept)
	if err != nil {
		return err
	}
	pagemap, err := os.Open("/proc/" + strconv.Itoa(pid) + "/pagemap")
	if err != nil {
		return ended(err)
	}
	defer pagemap.Close()
	if f.parts, err = part(kernel, base.all, look{writtenBy(pagemap), shownBy(pid)}); err != nil {
		return err
	}
	return f.fits(f.parts.copies)
}
