package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// MaxForks is how many copies one fork makes at most.
const MaxForks = 100

// How long a fork that waits for its kernel may take.
const (
	defaultForkWait = 30 * time.Second
	maxForkWait     = time.Hour
)

// ForkSpec asks for copies of a running sandbox. They have its template, limits, network policy, storage, idle timeout
// and what belongs to it; everything else is said here.
type ForkSpec struct {
	Count       int           // 1 to MaxForks
	Kernel      string        // whose memory is copied; empty: the default kernel
	Refuse      bool          // a kernel that runs a cell is fault.Conflict at once, not waited for
	Wait        time.Duration // how long the fork may take when a busy kernel is waited for; zero: 30 s
	Lifetime    time.Duration // zero: the server's default; negative: none, where allowed
	Metadata    map[string]string
	Annotations map[string]string
	Env         map[string]string
	IDEnv       string // name of an environment variable that has the copy's id
	InheritEnv  bool   // what the parent was given at its create too, below Env
}

// ForkResult is what a fork made and did.
type ForkResult struct {
	Sandboxes []Sandbox
	Forked
}

func (s ForkSpec) validate() error {
	switch {
	case s.Count < 1 || s.Count > MaxForks:
		return fault.New(fault.Invalid, "a fork makes 1 to %d sandboxes, not %d", MaxForks, s.Count)
	case s.Wait < 0 || s.Wait > maxForkWait:
		return fault.New(fault.Invalid, "a fork waits for at most %v, not %v", maxForkWait, s.Wait)
	}
	return firstError(checkKernel(cmp.Or(s.Kernel, agentapi.DefaultKernel)), checkMetadata(s.Metadata), checkAnnotations(s.Annotations),
		checkEnv(s.Env), checkIDEnv(s.IDEnv))
}

// Fork copies a running sandbox, its files and the memory of one kernel, and returns when every copy can be used. It
// makes all copies or none; a caller who leaves before that leaves nothing behind.
func (m *Manager) Fork(ctx context.Context, p auth.Principal, id string, spec ForkSpec) (ForkResult, error) {
	begun := time.Now()
	if err := spec.validate(); err != nil {
		return ForkResult{}, err
	}
	lifetime, err := m.cfg.lifetime(spec.Lifetime)
	if err != nil {
		return ForkResult{}, err
	}
	parent, leave, err := m.enterUsable(ctx, p, id)
	if err != nil {
		return ForkResult{}, err
	}
	defer leave()
	if caps := m.driver.Caps(); !caps.Fork {
		return ForkResult{}, fault.New(fault.Unsupported, "the %s driver cannot fork sandboxes", caps.Name)
	}
	if !parent.touchFor(1) { // a paused one is not resumed for this: somebody wanted it to stand still
		return ForkResult{}, goneError(parent.snapshot())
	}
	defer m.release(parent)
	defer parent.forked()
	children, err := m.claimForks(parent.snapshot(), spec)
	if err != nil {
		return ForkResult{}, err
	}
	spec.Lifetime = lifetime
	forked, err := m.fork(ctx, parent, children, spec)
	m.observer.Forked(parent.snapshot(), spec.Count, time.Since(begun), forked.Stall, err)
	if err != nil {
		return ForkResult{}, err
	}
	result := ForkResult{Forked: forked}
	for _, e := range children {
		sb := e.snapshot()
		m.observer.Created(sb, time.Since(begun), nil)
		result.Sandboxes = append(result.Sandboxes, sb)
	}
	return result, nil
}

// claimForks enters the children of a fork into memory, all or none. They have no deadline yet: their lives begin when the
// kernel's turn has come, which may be long after this.
func (m *Manager) claimForks(parent Sandbox, spec ForkSpec) ([]*entry, error) {
	if err := m.cfg.Networks.Check(parent.Network, parent.Tenant); err != nil {
		return nil, err
	}
	if err := m.roomForRows(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.admit(parent.Tenant, spec.Count); err != nil {
		return nil, err
	}
	children := make([]*entry, spec.Count)
	for i := range children {
		children[i] = m.enlist(Sandbox{
			Tenant: parent.Tenant, Template: parent.Template, TemplateDigest: parent.TemplateDigest, State: StateStarting,
			ForkedFrom: parent.ID, IdleTimeout: parent.IdleTimeout, IdleAction: parent.IdleAction, AutoResume: parent.AutoResume,
			DeadlineAction: parent.DeadlineAction, ColdPause: parent.ColdPause, ResumeLifetime: parent.ResumeLifetime,
			Limits: parent.Limits, Network: parent.Network, Storage: parent.Storage, Metadata: maps.Clone(spec.Metadata),
			Annotations: maps.Clone(spec.Annotations), Mounts: slices.Clone(parent.Mounts),
		}, -1, "", "")
	}
	return children, nil
}

// fork makes the claimed children run, or records why they do not. Until it returns nobody else asks the driver to stop
// one of them; who wants the end of one ends the whole fork.
func (m *Manager) fork(ctx context.Context, parent *entry, children []*entry, spec ForkSpec) (Forked, error) {
	forkCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.life, cancel)()
	defer func() {
		for _, e := range children {
			m.decided(e)
		}
	}()
	for _, e := range children {
		e.mu.Lock()
		e.cancel = cancel
		e.mu.Unlock()
	}
	free, err := m.forks.take(forkCtx, parent.tenant)
	if err != nil {
		return Forked{}, m.unfork(ctx, nil, children, err)
	}
	defer free()
	recorded := m.recordForks(ctx, children, cancel) // while the driver works, as for a create
	forked, err := m.forkWithin(forkCtx, parent, children, spec)
	if unrecorded := <-recorded; unrecorded != nil {
		return Forked{}, m.unfork(ctx, nil, children, unrecorded)
	}
	if err == nil {
		err = m.beginForks(forkCtx, parent, children, spec.Lifetime)
	}
	if err != nil {
		return Forked{}, m.unfork(ctx, children, nil, err)
	}
	for _, e := range children {
		m.clock.update(e)
	}
	return forked, nil
}

// recordForks writes the rows of children, and calls off the fork when it cannot. Who learns of the end of one meanwhile
// records that once its row is there.
func (m *Manager) recordForks(ctx context.Context, children []*entry, cancel context.CancelFunc) <-chan error {
	done, born := make(chan error, 1), make([]Record, len(children))
	for i, e := range children {
		born[i] = e.record()
		e.saving.Lock()
	}
	go func() {
		err := m.writeAll(ctx, born, m.store.InsertAll, LifecycleEvent{Type: LifecycleCreated})
		for _, e := range children {
			e.saving.Unlock()
		}
		if err != nil {
			err = fmt.Errorf("record %d forks: %w", len(children), err)
			cancel()
		}
		done <- err
	}()
	return done
}

// forkWithin bounds the driver, as startWithin does.
func (m *Manager) forkWithin(ctx context.Context, parent *entry, children []*entry, spec ForkSpec) (Forked, error) {
	limit := m.cfg.StartTimeout
	late := fault.New(fault.Unavailable, "sandbox %s was not forked within %v; the host may be overloaded, try again", parent.id, limit)
	if !spec.Refuse {
		limit = cmp.Or(spec.Wait, defaultForkWait)
		late = fault.New(fault.Timeout, "sandbox %s was not forked within %v: its kernel is busy or the host is; wait longer, or interrupt the kernel", parent.id, limit)
	}
	req := ForkRequest{Parent: parent.id, Kernel: spec.Kernel, Refuse: spec.Refuse}
	for _, e := range children {
		sb := e.snapshot()
		child := ForkChild{ID: e.id, Limits: sb.Limits, Network: sb.Network, Env: withID(maps.Clone(spec.Env), spec.IDEnv, e.id), InheritEnv: spec.InheritEnv}
		if spec.Lifetime > 0 && !sb.pausesAtDeadline() { // at the latest, should nobody be there any more to say when
			child.Deadline = deadlineOf(now(), limit+spec.Lifetime)
		}
		req.Children = append(req.Children, child)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late)
	defer cancel()
	forked, err := m.driver.Fork(ctx, req)
	if err == nil {
		return forked, nil
	}
	if errors.Is(context.Cause(ctx), late) {
		return Forked{}, fault.Wrap(fault.KindOf(late), err, "%s", fault.Message(late))
	}
	return Forked{}, m.whyGone(ctx, parent, fmt.Errorf("fork sandbox %s: %w", parent.id, err))
}

// beginForks makes the children running sandboxes, and records that the parent was forked.
func (m *Manager) beginForks(ctx context.Context, parent *entry, children []*entry, lifetime time.Duration) error {
	if ctx.Err() != nil {
		return waitError(ctx, "sandbox "+parent.id+" to be forked")
	}
	for _, e := range children { // whoever finds one of them running changes its deadline after us
		unlock, err := e.lockChanges(ctx)
		if err != nil {
			return err
		}
		defer unlock() //nolint:gocritic // all of them are held until all are told
	}
	deadline := deadlineOf(now(), lifetime)
	told := make(chan error, 1) // while the rows are written
	go func() { told <- m.setDeadlines(ctx, children, deadline) }()
	err := m.startForks(ctx, parent, children, deadline)
	if err := errors.Join(<-told, err); err != nil {
		return err
	}
	ids := make([]string, len(children))
	for i, e := range children {
		ids[i] = e.id
	}
	// Conflict: the parent has ended since, which its children survive.
	err = m.save(ctx, parent, LifecycleEvent{Type: LifecycleForked, Message: strings.Join(ids, ", ")})
	if err != nil && !fault.Is(err, fault.Conflict) {
		return fmt.Errorf("record fork of sandbox %s: %w", parent.id, err)
	}
	return nil
}

// startForks makes the children running sandboxes and records them.
func (m *Manager) startForks(ctx context.Context, parent *entry, children []*entry, deadline time.Time) error {
	for _, e := range children {
		e.mu.Lock()
		e.sb.Deadline = deadline
		e.mu.Unlock()
		if !e.begin(now()) {
			return goneError(e.snapshot())
		}
	}
	err := m.saveAll(ctx, children, LifecycleEvent{Type: LifecycleForked, Message: parent.id}, LifecycleEvent{Type: LifecycleStarted})
	if err != nil && !fault.Is(err, fault.Conflict) {
		return fmt.Errorf("record the start of %d forks: %w", len(children), err)
	}
	if err != nil { // one of them ended before this was written
		return goneError(ended(children))
	}
	return nil
}

// ended is the first that does not run any more.
func ended(entries []*entry) Sandbox {
	for _, e := range entries {
		if sb := e.snapshot(); sb.State == StateEnded {
			return sb
		}
	}
	return entries[0].snapshot()
}

// setDeadlines tells the driver of all at once.
func (m *Manager) setDeadlines(ctx context.Context, children []*entry, deadline time.Time) error {
	errs := make([]error, len(children))
	var work sync.WaitGroup
	for i, e := range children {
		if sb := e.snapshot(); deadline.IsZero() || sb.pausesAtDeadline() {
			continue
		}
		work.Go(func() {
			if err := m.driver.Change(ctx, e.id, Change{Deadline: &deadline}); err != nil {
				errs[i] = fmt.Errorf("set deadline of sandbox %s: %w", e.id, err)
			}
		})
	}
	work.Wait()
	return errors.Join(errs...)
}

// unfork ends the children of a fork that came to nothing: those that have a row, and those that never had one.
func (m *Manager) unfork(ctx context.Context, recorded, unrecorded []*entry, err error) error {
	for _, e := range unrecorded {
		_ = m.discard(ctx, e, err) // hands err back
	}
	result, interrupted := err, error(nil)
	for _, e := range recorded {
		why := m.abandon(ctx, e, err)
		if fault.Is(why, fault.Gone) && !fault.Is(err, fault.Gone) {
			interrupted = fault.Wrap(fault.Conflict, why, "the fork was given up, because a copy was ended while it was made: %s", fault.Message(why))
		} else {
			result = why
		}
	}
	if interrupted != nil && ctx.Err() == nil {
		return interrupted
	}
	return result
}
