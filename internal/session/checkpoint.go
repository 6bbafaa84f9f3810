package session

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// maxCheckpoints is how many a session has; the oldest make room for a new one.
const maxCheckpoints = 50

// What the metadata of a checkpoint may hold.
const (
	maxMetadata      = 64
	maxMetadataBytes = 16 << 10
)

// Checkpoint keeps a session as it is, its files and the memory of its kernel, in a copy of its sandbox that sleeps. A cell that
// runs is waited for. One with an id that is there already is returned as it is, and created is false.
func (m *Manager) Checkpoint(ctx context.Context, p auth.Principal, key, id string, metadata map[string]string) (_ Checkpoint, created bool, err error) {
	if id == "" {
		id = newID("chk_")
	}
	if err := errors.Join(CheckKey("checkpoint id", id), checkMetadata(metadata)); err != nil {
		return Checkpoint{}, false, err
	}
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return Checkpoint{}, false, err
	}
	defer leave()
	done, err := e.cells.take(ctx) // the copy is of a kernel between two cells
	if err != nil {
		return Checkpoint{}, false, err
	}
	defer done()
	if err := m.hold(ctx, e); err != nil {
		return Checkpoint{}, false, err
	}
	defer e.life.free()
	if e.s == nil {
		return Checkpoint{}, false, noSession(key)
	}
	all, err := m.store.Checkpoints(ctx, e.s.ID)
	if err != nil {
		return Checkpoint{}, false, fmt.Errorf("read checkpoints of session %s: %w", key, err)
	}
	if at := slices.IndexFunc(all, func(c Checkpoint) bool { return c.ID == id }); at >= 0 {
		return all[at], false, nil
	}
	if err := m.ready(ctx, e); err != nil {
		return Checkpoint{}, false, err
	}
	c, err := m.copySession(ctx, p, e, Checkpoint{ID: id, Session: e.s.ID, Tenant: p.Tenant, Metadata: metadata})
	if err != nil {
		return Checkpoint{}, false, err
	}
	for len(all) >= maxCheckpoints {
		if err := m.dropCheckpoint(ctx, all[0]); err != nil {
			m.log.Warn("an old checkpoint is not removed", "session", e.s.ID, "checkpoint", all[0].ID, "error", err)
		}
		all = all[1:]
	}
	return c, true, nil
}

func checkMetadata(metadata map[string]string) error {
	size := 0
	for k, v := range metadata {
		size += len(k) + len(v)
	}
	if len(metadata) > maxMetadata || size > maxMetadataBytes {
		return fault.New(fault.Invalid, "metadata has at most %d keys and %d bytes", maxMetadata, maxMetadataBytes)
	}
	return nil
}

// copySession forks a session's sandbox and lets the copy sleep. A crash before its row leaves a copy that the next server ends.
func (m *Manager) copySession(ctx context.Context, p auth.Principal, e *entry, c Checkpoint) (Checkpoint, error) {
	s := e.s
	if s.Storage != StorageDisk {
		return Checkpoint{}, fault.New(fault.Unsupported, "a checkpoint needs a session with storage disk: files of storage %s cannot be copied with the kernel", s.Storage)
	}
	forked, err := m.copySandbox(ctx, p, *s, s.Sandbox, map[string]string{AnnotationKey: s.Key, AnnotationID: s.ID, AnnotationCheckpoint: c.ID})
	if err != nil {
		return Checkpoint{}, err
	}
	c.Sandbox, c.NotCopied, c.Created = forked.Sandboxes[0].ID, forked.NotCopied, now()
	own, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if err = m.sleep(own, p, c.Sandbox); err == nil {
		err = m.store.PutCheckpoint(own, c)
	}
	if err != nil {
		_, killed := m.sandboxes.Kill(own, p, c.Sandbox)
		return Checkpoint{}, errors.Join(fmt.Errorf("keep checkpoint %s of session %s: %w", c.ID, s.Key, err), killed)
	}
	m.logged(e, LogLine{Event: LogCheckpoint, Sandbox: s.Sandbox, Checkpoint: c.ID, Runs: s.Runs})
	return c, nil
}

func (m *Manager) copySandbox(ctx context.Context, p auth.Principal, s Session, from string, annotations map[string]string) (sandbox.ForkResult, error) {
	forked, err := m.sandboxes.Fork(ctx, p, from, sandbox.ForkSpec{
		Count: 1, Lifetime: s.Lifetime, Annotations: annotations, Metadata: maps.Clone(s.Metadata), InheritEnv: true,
	})
	if err != nil {
		return sandbox.ForkResult{}, fmt.Errorf("copy the sandbox of session %s: %w", s.Key, err)
	}
	return forked, nil
}

// sleep pauses a copy for as long as it may.
func (m *Manager) sleep(ctx context.Context, p auth.Principal, id string) error {
	never := false
	_, err := m.sandboxes.Pause(ctx, p, id, sandbox.PauseSpec{Lifetime: -1, AutoResume: &never})
	if fault.Is(err, fault.Invalid) { // the operator bounds pauses
		_, err = m.sandboxes.Pause(ctx, p, id, sandbox.PauseSpec{AutoResume: &never})
	}
	return err
}

// Checkpoints are a session's, oldest first.
func (m *Manager) Checkpoints(ctx context.Context, p auth.Principal, key string) ([]Checkpoint, error) {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return nil, err
	}
	defer done()
	return m.store.Checkpoints(ctx, e.s.ID)
}

// RemoveCheckpoint removes a checkpoint with its sandbox.
func (m *Manager) RemoveCheckpoint(ctx context.Context, p auth.Principal, key, id string) error {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return err
	}
	defer done()
	c, err := m.checkpoint(ctx, e.s, id)
	if err != nil {
		return err
	}
	return m.dropCheckpoint(ctx, c)
}

func (m *Manager) checkpoint(ctx context.Context, s *Session, id string) (Checkpoint, error) {
	all, err := m.store.Checkpoints(ctx, s.ID)
	if err != nil {
		return Checkpoint{}, fmt.Errorf("read checkpoints of session %s: %w", s.Key, err)
	}
	for _, c := range all {
		if c.ID == id {
			return c, nil
		}
	}
	return Checkpoint{}, fault.New(fault.NotFound, "session %s has no checkpoint %.140q; the oldest are removed when there are more than %d", s.Key, id, maxCheckpoints)
}

func (m *Manager) dropCheckpoint(ctx context.Context, c Checkpoint) error {
	if _, err := m.sandboxes.Kill(ctx, auth.Principal{Tenant: c.Tenant}, c.Sandbox); err != nil && !fault.Is(err, fault.NotFound) {
		return fmt.Errorf("end checkpoint %s: %w", c.ID, err)
	}
	if err := m.store.RemoveCheckpoint(ctx, c.Session, c.ID); err != nil {
		return fmt.Errorf("remove checkpoint %s: %w", c.ID, err)
	}
	return nil
}

// recoverCheckpoints adds the sandboxes of checkpoints to those that are somebody's, and lets those sleep that a crash has left
// awake.
func (m *Manager) recoverCheckpoints(ctx context.Context, mine map[string]bool) error {
	all, err := m.store.AllCheckpoints(ctx)
	if err != nil {
		return fmt.Errorf("read checkpoints: %w", err)
	}
	for _, c := range all {
		mine[c.Sandbox] = true
		p := auth.Principal{Tenant: c.Tenant}
		if sb, err := m.sandboxes.Get(ctx, p, c.Sandbox); err != nil || sb.State != sandbox.StateRunning {
			continue
		}
		if err := m.sleep(ctx, p, c.Sandbox); err != nil {
			m.log.Warn("a checkpoint is awake", "session", c.Session, "checkpoint", c.ID, "sandbox", c.Sandbox, "error", err)
		}
	}
	return nil
}

// Restore puts a session back to a checkpoint: a copy of the checkpoint's sandbox takes the place of the one it has, which ends.
// Another key becomes that instead, and is made where it is not there; empty is the checkpoint's own session.
func (m *Manager) Restore(ctx context.Context, p auth.Principal, key, id, into string) (Session, error) {
	source, c, err := m.wanted(ctx, p, key, id)
	if err != nil {
		return Session{}, err
	}
	if into == "" {
		into = key
	}
	if into != key && source.Datasets.Access == "api" {
		return Session{}, fault.New(fault.Conflict, "a checkpoint of a session with staged datasets can only be restored into that session: the data is its own")
	}
	e, leave, err := m.enter(p.Tenant, into)
	if err != nil {
		return Session{}, err
	}
	defer leave()
	m.attend(p.Tenant)
	done, err := m.holdTurn(ctx, e)
	if err != nil {
		return Session{}, err
	}
	defer done()
	target := Session{ID: newID("ses_"), Tenant: e.tenant, Key: e.key, Created: now()}
	if e.s != nil {
		if err := errors.Join(m.settle(ctx, e), m.endAgain(ctx, e)); err != nil {
			return Session{}, err
		}
		target = *e.s
	}
	sb, err := m.wake(ctx, p, source, c, target)
	if err != nil {
		return Session{}, err
	}
	if err := m.swap(ctx, p, e, target, source, c, sb); err != nil {
		return Session{}, err
	}
	return m.shown(ctx, *e.s), nil
}

// holdTurn holds an entry of which no cell runs and that nobody is stopping. A stop waits for the turn, so it is not kept from it.
func (m *Manager) holdTurn(ctx context.Context, e *entry) (done func(), err error) {
	for {
		turn, err := e.cells.take(ctx)
		if err != nil {
			return nil, err
		}
		if err := m.hold(ctx, e); err != nil {
			turn()
			return nil, err
		}
		if e.ending == nil {
			return func() { e.life.free(); turn() }, nil
		}
		e.life.free()
		turn()
		if err := m.holdQuiet(ctx, e); err != nil {
			return nil, err
		}
		e.life.free()
	}
}

// wanted is a checkpoint with the session that it is of.
func (m *Manager) wanted(ctx context.Context, p auth.Principal, key, id string) (Session, Checkpoint, error) {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return Session{}, Checkpoint{}, err
	}
	defer done()
	c, err := m.checkpoint(ctx, e.s, id)
	return *e.s, c, err
}

// maxWaking is how many wait for a copy of one checkpoint.
const maxWaking = 16

// waking is the lock of a checkpoint while somebody wakes it.
type waking struct {
	lock
	users int
}

// turnToWake waits until nobody else wakes a checkpoint. Each has a lock of its own: what one does to a tenant's own sandbox makes
// nobody else wait.
func (m *Manager) turnToWake(ctx context.Context, c Checkpoint) (done func(), err error) {
	m.mu.Lock()
	w := m.waking[c.Sandbox]
	if w == nil {
		w = &waking{lock: newLock()}
		m.waking[c.Sandbox] = w
	}
	if w.users > maxWaking {
		m.mu.Unlock()
		return nil, fault.New(fault.Exhausted, "%d others wait for checkpoint %s already; try again when some are done", maxWaking, c.ID)
	}
	w.users++
	m.mu.Unlock()
	leave := func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if w.users--; w.users == 0 {
			delete(m.waking, c.Sandbox)
		}
	}
	if err := w.take(ctx); err != nil {
		leave()
		return nil, err
	}
	return func() { w.free(); leave() }, nil
}

// wake makes a running copy of a checkpoint for a session, and the checkpoint sleeps on then. Several may want the same one at
// once: one after the other.
func (m *Manager) wake(ctx context.Context, p auth.Principal, source Session, c Checkpoint, target Session) (sandbox.Sandbox, error) {
	done, err := m.turnToWake(ctx, c)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	defer done()
	if _, err := m.sandboxes.Resume(ctx, p, c.Sandbox, source.Lifetime); err != nil {
		if fault.Is(err, fault.Gone) || fault.Is(err, fault.NotFound) {
			return sandbox.Sandbox{}, fault.Wrap(fault.Gone, err, "checkpoint %s is gone: %s", c.ID, fault.Message(err))
		}
		return sandbox.Sandbox{}, fmt.Errorf("wake checkpoint %s: %w", c.ID, err)
	}
	forked, err := m.copySandbox(ctx, p, source, c.Sandbox, map[string]string{AnnotationKey: target.Key, AnnotationID: target.ID})
	own, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if slept := m.sleep(own, p, c.Sandbox); slept != nil {
		m.log.Warn("a checkpoint is awake", "session", c.Session, "checkpoint", c.ID, "sandbox", c.Sandbox, "error", slept)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return forked.Sandboxes[0], nil
}

// swap makes a sandbox the present one of a session and ends the one that it had.
func (m *Manager) swap(ctx context.Context, p auth.Principal, e *entry, s, source Session, c Checkpoint, sb sandbox.Sandbox) error {
	ctx, cancel := onOwn(ctx, 2*settleFor)
	defer cancel()
	old := ""
	if s.State == StateRunning {
		old = s.Sandbox
	}
	s.Spec = source.Spec
	s.Sandbox, s.State, s.Template, s.Fresh, s.Told, s.LastUsed = sb.ID, StateRunning, sb.Template, false, false, now()
	s.Stopped = time.Time{}
	s.Generation++
	if err := m.add(ctx, e, s); err != nil {
		_, killed := m.sandboxes.Kill(ctx, p, sb.ID)
		return errors.Join(err, killed)
	}
	if old != "" {
		if _, err := m.sandboxes.Kill(ctx, p, old); err != nil && !fault.Is(err, fault.NotFound) {
			m.log.Warn("sandbox that a restored session had is not stopped", "session", s.ID, "sandbox", old, "error", err)
		}
	}
	m.forgetFiles(s)
	m.remember(ctx, p, e, sb.ID)
	line := LogLine{Event: LogRestored, Sandbox: sb.ID, Checkpoint: c.ID, Runs: s.Runs}
	if old != "" {
		line.Message = "sandbox " + old + " has ended for it"
	}
	m.logged(e, line)
	m.writeNow(e)
	return nil
}

// remember tells the agent of a copy where its kernel works, for one that takes its place; the kernel itself is where it was.
func (m *Manager) remember(ctx context.Context, p auth.Principal, e *entry, id string) {
	agent, err := m.sandboxes.Agent(ctx, p, id)
	if err == nil {
		_, err = agent.KernelWait(ctx, agentapi.KernelParams{Kernel: agentapi.DefaultKernel, Cwd: m.cfg.Root})
	}
	if err == nil && m.datasets != nil && e.s.Datasets.Access == "api" {
		err = m.datasets.Place(ctx, e.tenant, e.s.ID, agent)
	}
	if err != nil {
		m.log.Warn("restored session is not prepared", "session", e.s.ID, "sandbox", id, "error", err)
	}
}
