package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// settle takes in that a session's sandbox has ended, if it has. The caller holds the entry.
func (m *Manager) settle(ctx context.Context, e *entry) error {
	s := *e.s
	if e.ending != nil || s.State == StateStarting || s.State != StateRunning && s.Told {
		return nil
	}
	sb, err := m.sandboxes.Get(ctx, owner(&s), s.Sandbox)
	if err == nil && sb.State == sandbox.StateStopping {
		sb, err = m.sandboxes.Kill(ctx, owner(&s), s.Sandbox) // joins the end that goes on
	}
	switch {
	case fault.Is(err, fault.NotFound): // so long ago that nobody knows
		sb = sandbox.Sandbox{ID: s.Sandbox, State: sandbox.StateEnded, CauseMessage: "it is not known any more", EndedAt: now()}
	case err != nil:
		return fmt.Errorf("look for the sandbox of session %s: %w", s.Key, err)
	case sb.State != sandbox.StateEnded:
		return nil
	}
	ctx, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if s.State == StateRunning {
		s.State, s.Stopped = stateAfter(sb.Cause), sb.EndedAt
		s.Lost = &Loss{Sandbox: sb.ID, Cause: sb.Cause, Message: sb.CauseMessage, At: sb.EndedAt}
		if err := m.save(ctx, e, s); err != nil {
			return err
		}
		m.log.Info("session lost its sandbox", "session", s.ID, "tenant", s.Tenant, "sandbox", sb.ID, "cause", sb.Cause)
	}
	if e.busy { // whoever ends the run comes here again
		return nil
	}
	return m.tellEnd(ctx, e, sb)
}

// stateAfter is where a session is whose sandbox ended without its owner's word.
func stateAfter(cause sandbox.Cause) State {
	switch cause {
	case sandbox.CauseIdle, sandbox.CauseExpired:
		return StateReaped
	case sandbox.CauseKilled, sandbox.CauseOOM, sandbox.CauseAgentDied, sandbox.CauseMakerDied, sandbox.CauseHostReboot,
		sandbox.CauseStartFail, sandbox.CauseShutdown, sandbox.CauseExited, sandbox.CauseFailed, sandbox.CauseEvicted, sandbox.CauseNodeLost,
		sandbox.CauseDeleted, sandbox.CauseHostDiskFull, sandbox.CauseDiskFailed, sandbox.CauseRecordLost:
		return StateLost
	}
	return StateLost
}

// tellEnd writes the end of a session's sandbox into its log, once: a crash may have come between the line and the row.
func (m *Manager) tellEnd(ctx context.Context, e *entry, sb sandbox.Sandbox) error {
	s := *e.s
	line := LogLine{
		Event: LogStopped, Sandbox: sb.ID, Cause: string(sb.Cause), Message: sb.CauseMessage, Runs: s.Runs, Failed: s.Failed,
		CPUMS: float64(sb.Usage.CPUMS), PeakBytes: sb.Usage.PeakBytes,
	}
	if s.State == StateLost {
		line.Event = LogSandboxLost
	}
	if s.State == StateStopped {
		line.Cause = "stopped"
	}
	if !sb.StartedAt.IsZero() && !sb.EndedAt.IsZero() {
		line.DurationMS = float64(sb.EndedAt.Sub(sb.StartedAt).Milliseconds())
	}
	if !e.log.ended(sb.ID) {
		if err := e.log.add(line); err != nil {
			return err
		}
	}
	s.Told = true
	if err := m.save(ctx, e, s); err != nil {
		return err
	}
	m.forgetFiles(s)
	m.writeNow(e)
	return nil
}

// forgetFiles lets go of what is known of the files of a sandbox that has ended.
func (m *Manager) forgetFiles(s Session) {
	if m.artifacts != nil {
		m.artifacts.Forget(s.ID)
	}
}

// Stop ends a session's sandbox by its owner's wish; what ran in it is told first. The session stays. One that has no sandbox is
// returned as it is, but for one that was lost: its owner knows then.
func (m *Manager) Stop(ctx context.Context, p auth.Principal, key string) (Session, error) {
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return Session{}, err
	}
	defer leave()
	if err := m.holdQuiet(ctx, e); err != nil {
		return Session{}, err
	}
	if e.s == nil {
		e.life.free()
		return Session{}, noSession(key)
	}
	err = m.stop(ctx, e) // frees
	if err != nil {
		return Session{}, err
	}
	return m.Get(ctx, p, key)
}

// stop is Stop of a held entry, which it frees: a run that goes on needs it to tell its end.
func (m *Manager) stop(ctx context.Context, e *entry) (err error) {
	defer func() { e.life.free() }()
	if err := m.settle(ctx, e); err != nil {
		return err
	}
	s := *e.s
	living := s.State == StateRunning || s.State == StateStopped && !s.Told // an earlier stop has failed
	if s.State == StateStopped && !living {
		return nil
	}
	ctx, cancel := onOwn(ctx, 2*settleFor)
	defer cancel()
	s.State = StateStopped
	if living {
		s.Stopped = now()
	}
	if err := m.save(ctx, e, s); err != nil || !living {
		return err
	}
	e.ending = make(chan struct{})
	defer func() { close(e.ending); e.ending = nil }()
	e.life.free()
	sb, killed := m.sandboxes.Kill(ctx, owner(&s), s.Sandbox)
	done, waited := e.cells.take(ctx)
	if waited == nil {
		defer done()
	}
	e.life <- struct{}{} // the deferred functions need it, whatever came
	if killed != nil && !fault.Is(killed, fault.NotFound) {
		return fmt.Errorf("stop session %s: %w", s.Key, killed)
	}
	if e.s == nil || e.s.Sandbox != s.Sandbox { // it has another
		return nil
	}
	return m.tellEnd(ctx, e, orUnknown(sb, s.Sandbox))
}

// orUnknown is a sandbox of which nobody knows more than its name, where there is none.
func orUnknown(sb sandbox.Sandbox, id string) sandbox.Sandbox {
	if sb.ID == "" {
		return sandbox.Sandbox{ID: id}
	}
	return sb
}

// endAgain ends the sandbox of a session that was stopped, where that failed then; the caller holds the entry.
func (m *Manager) endAgain(ctx context.Context, e *entry) error {
	if e.s.State != StateStopped || e.s.Told {
		return nil
	}
	sb, err := m.sandboxes.Kill(ctx, owner(e.s), e.s.Sandbox)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return fmt.Errorf("stop session %s: %w", e.key, err)
	}
	return m.tellEnd(ctx, e, orUnknown(sb, e.s.Sandbox))
}

// Remove ends a session and removes its log, its files and its checkpoints. Artifacts stay.
func (m *Manager) Remove(ctx context.Context, p auth.Principal, key string) error {
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return err
	}
	defer leave()
	if err := m.holdQuiet(ctx, e); err != nil {
		return err
	}
	if e.s == nil {
		e.life.free()
		return noSession(key)
	}
	id := e.s.ID
	if err := m.stop(ctx, e); err != nil {
		return err
	}
	ctx, cancel := onOwn(ctx, 4*settleFor)
	defer cancel()
	if err := m.holdQuiet(ctx, e); err != nil {
		return err
	}
	defer e.life.free()
	if e.s == nil || e.s.ID != id { // another has done so meanwhile
		return nil
	}
	if e.s.State == StateRunning {
		return fault.New(fault.Conflict, "session %s was opened again while it was being removed", key)
	}
	return m.erase(ctx, e, *e.s)
}

// erase removes everything of a session that has no sandbox; its row is last, so that what failed can be tried again.
func (m *Manager) erase(ctx context.Context, e *entry, s Session) error {
	checkpoints, err := m.store.Checkpoints(ctx, s.ID)
	if err != nil {
		return fmt.Errorf("remove session %s: %w", s.Key, err)
	}
	for _, c := range checkpoints {
		if err := m.dropCheckpoint(ctx, c); err != nil {
			return err
		}
	}
	if s.Volume != "" {
		if err := m.sandboxes.RemoveVolume(ctx, owner(&s), s.Volume); err != nil && !fault.Is(err, fault.NotFound) {
			return fmt.Errorf("remove the files of session %s: %w", s.Key, err)
		}
	}
	if m.datasets != nil {
		if err := m.datasets.Forget(ctx, s.Tenant, s.ID); err != nil {
			return fmt.Errorf("remove session %s: %w", s.Key, err)
		}
	}
	m.forgetFiles(s)
	e.forgetFiles()
	if err := os.RemoveAll(m.folder(s)); err != nil {
		return fmt.Errorf("remove the log of session %s: %w", s.Key, err)
	}
	if e.log != nil {
		e.log.removed()
	}
	if err := m.store.RemoveSession(ctx, s.ID); err != nil {
		return fmt.Errorf("remove session %s: %w", s.Key, err)
	}
	if e.log != nil {
		e.log.close()
	}
	e.s, e.log, e.state, e.loaded = nil, nil, nil, true
	m.pin(e, false)
	return nil
}

// Open takes over what an earlier server left: runs that it did not see the end of are cut off, sandboxes that are no session's
// are ended, sessions whose sandboxes are gone learn why. Then it sweeps.
func (m *Manager) Open(ctx context.Context) error {
	cut, err := m.store.CutRuns(ctx, m.cfg.Server, now())
	if err != nil {
		return fmt.Errorf("find runs that were cut off: %w", err)
	}
	slices.SortFunc(cut, func(a, b Run) int { return cmp.Or(cmp.Compare(a.Cell, b.Cell), a.Started.Compare(b.Started)) })
	cutOf := map[string][]Run{}
	for _, r := range cut {
		cutOf[r.Session] = append(cutOf[r.Session], r)
	}
	sessions, err := m.store.UnsettledSessions(ctx)
	if err != nil {
		return fmt.Errorf("read sessions: %w", err)
	}
	sessions = append(sessions, m.cutSettled(ctx, sessions, cutOf)...)
	mine := map[string]bool{}
	for _, s := range sessions {
		if s.State == StateRunning {
			mine[s.Sandbox] = true
		}
	}
	if err := m.recoverCheckpoints(ctx, mine); err != nil {
		return err
	}
	m.endStrays(ctx, mine)
	for _, s := range sessions {
		if err := m.recover(ctx, s, cutOf[s.ID]); err != nil {
			m.log.Warn("session is not settled", "session", s.ID, "tenant", s.Tenant, "error", err)
		}
	}
	if m.cfg.Retention > 0 {
		m.work.Go(m.sweep)
	}
	m.work.Go(m.reportLost)
	return nil
}

// cutSettled are the sessions of runs that were cut off after the end of their sandbox had been told.
func (m *Manager) cutSettled(ctx context.Context, known []Session, cutOf map[string][]Run) (more []Session) {
	unknown := maps.Clone(cutOf)
	for _, s := range known {
		delete(unknown, s.ID)
	}
	for id, runs := range unknown {
		s, err := m.store.SessionOfSandbox(ctx, runs[0].Tenant, runs[0].Sandbox)
		if err != nil || s.ID != id {
			m.log.Warn("runs were cut off whose session has gone on", "session", id, "tenant", runs[0].Tenant, "runs", len(runs), "error", err)
			continue
		}
		more = append(more, s)
	}
	return more
}

// endStrays ends sandboxes that carry a session's name and are not its present one: nobody could ever reach them.
func (m *Manager) endStrays(ctx context.Context, mine map[string]bool) {
	for sb := range m.sandboxes.Each {
		if sb.Annotations[AnnotationID] == "" || mine[sb.ID] {
			continue
		}
		m.log.Warn("ending a sandbox that no session has", "sandbox", sb.ID, "tenant", sb.Tenant)
		if _, err := m.sandboxes.Kill(ctx, auth.Principal{Tenant: sb.Tenant}, sb.ID); err != nil && !fault.Is(err, fault.NotFound) {
			m.log.Warn("sandbox that no session has is not stopped", "sandbox", sb.ID, "error", err)
		}
	}
}

// recover brings one session to where it was before a start that a crash cut short, tells of the runs that were cut off, and
// takes in the end of its sandbox.
func (m *Manager) recover(ctx context.Context, s Session, cut []Run) error {
	e, leave, err := m.enter(s.Tenant, s.Key)
	if err != nil {
		return err
	}
	defer leave()
	if err := m.hold(ctx, e); err != nil {
		return err
	}
	defer e.life.free()
	if e.s == nil {
		return nil
	}
	if e.s.State == StateStarting {
		return m.erase(ctx, e, *e.s)
	}
	if s := *e.s; s.Next != "" || len(cut) > 0 {
		s.Next = ""
		for _, r := range cut {
			if r.Cell > s.Runs {
				s.Runs, s.Failed = r.Cell, s.Failed+1
			}
		}
		if err := m.save(ctx, e, s); err != nil {
			return err
		}
	}
	for _, r := range cut {
		m.logged(e, r.cutLine())
	}
	m.attend(s.Tenant)
	return m.settle(ctx, e)
}

// cutLine is a run as the log tells it whose server did not see its end.
func (r Run) cutLine() LogLine {
	failed := false
	return LogLine{
		Event: LogExecution, Sandbox: r.Sandbox, Run: r.ID, Cell: r.Cell, ToolCall: r.ToolCall, Code: r.Code, Success: &failed, Outcome: r.Outcome,
		Error: cutOff, Message: cutOff,
	}
}

const cutOff = "the run was cut off when the server stopped; how far it came is not known"

// attend begins to hear how sandboxes of a tenant end, if nobody does yet.
func (m *Manager) attend(tenant string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tenants[tenant] || m.closed {
		return
	}
	m.tenants[tenant] = true
	m.work.Go(func() { m.listen(auth.Principal{Tenant: tenant}) })
}

// How soon something that failed in the background is tried again, the first time and after many.
const (
	retryFirst = 50 * time.Millisecond
	retryMost  = 10 * time.Second
)

// listen hears a tenant's events until the Manager or the domain ends. What happened before is passed over, and not even read: a
// tenant may have had a million sandboxes.
func (m *Manager) listen(who auth.Principal) {
	q := sandbox.EventQuery{Last: true, Internal: true}
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		var failed error
		for event, err := range m.sandboxes.Events(m.life, who, q) {
			if failed = err; err != nil {
				break
			}
			q.After, pause = event.Seq, retryFirst
			if q.Follow && event.Type == sandbox.LifecycleEnded {
				m.heard(who, event.Sandbox)
			}
		}
		if m.life.Err() != nil || failed == nil && q.Follow {
			return
		}
		if failed == nil { // from here on everything is heard, so now is the time to look how things are
			q.Follow, q.Last = true, false
			m.lookAll(who.Tenant)
			continue
		}
		m.log.Warn("events of sandboxes cannot be read; trying again", "tenant", who.Tenant, "error", failed)
		select {
		case <-time.After(pause):
		case <-m.life.Done():
			return
		}
	}
}

// lookAll looks at every session of a tenant that has a sandbox, or is about to: it may have ended before anybody listened.
func (m *Manager) lookAll(tenant string) {
	m.mu.Lock()
	var all []string
	for n := range m.entries {
		if n.tenant == tenant {
			all = append(all, n.key)
		}
	}
	m.mu.Unlock()
	for _, key := range all {
		m.learn(name{tenant, key}, "")
	}
}

// heard takes in that a sandbox has ended. Where that fails, whoever uses the session next finds out.
func (m *Manager) heard(who auth.Principal, id string) {
	s, err := m.store.SessionOfSandbox(m.life, who.Tenant, id)
	if err == nil {
		m.learn(name{s.Tenant, s.Key}, id)
		return
	}
	if !fault.Is(err, fault.NotFound) && m.life.Err() == nil {
		m.log.Warn("the session of a sandbox that ended cannot be read", "sandbox", id, "error", err)
	}
}

// learn settles a session whose sandbox may have ended; empty is whichever it has.
func (m *Manager) learn(of name, id string) {
	e, leave, err := m.enter(of.tenant, of.key)
	if err != nil {
		return
	}
	defer leave()
	if err := m.hold(m.life, e); err != nil {
		return
	}
	defer e.life.free()
	if e.s == nil || id != "" && e.s.Sandbox != id {
		return
	}
	if err := m.settle(m.life, e); err != nil && m.life.Err() == nil {
		m.log.Warn("the end of a session's sandbox is not recorded yet", "session", e.s.ID, "tenant", e.tenant, "error", err)
	}
}

// sweep removes sessions that nobody has used for their retention.
func (m *Manager) sweep() {
	every := m.cfg.SweepInterval
	if every == 0 {
		every = min(max(m.cfg.Retention/24, time.Minute), time.Hour)
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if err := m.sweepOnce(); err != nil && m.life.Err() == nil {
			m.log.Warn("unused sessions are not removed", "error", err)
		}
		select {
		case <-m.life.Done():
			return
		case <-ticker.C:
		}
	}
}

func (m *Manager) sweepOnce() error {
	unused, err := m.store.UnusedSessions(m.life, now().Add(-m.cfg.Retention))
	if err != nil {
		return err
	}
	var all []error
	for _, s := range unused {
		err := m.Remove(m.life, owner(&s), s.Key)
		if err != nil && !fault.Is(err, fault.NotFound) {
			all = append(all, err)
			continue
		}
		m.log.Info("unused session removed", "session", s.ID, "tenant", s.Tenant)
	}
	return errors.Join(all...)
}

// logged adds a line that tells what has happened already: a failure is the operator's to know.
func (m *Manager) logged(e *entry, line LogLine) {
	if err := e.log.add(line); err != nil {
		m.log.Error("a line is missing in the log of a session", "session", e.s.ID, "tenant", e.s.Tenant, "event", line.Event, "error", err)
	}
}
