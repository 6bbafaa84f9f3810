package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"path"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// RunSpec is one cell.
type RunSpec struct {
	Code           string              `json:"code"`
	Env            map[string]string   `json:"env,omitempty"`
	Cwd            string              `json:"cwd,omitempty"`
	TimeoutMS      int64               `json:"timeout_ms,omitempty"`
	ToolCall       string              `json:"-"`
	Disconnect     agentapi.Disconnect `json:"-"`
	IdempotencyKey string              `json:"-"`
}

// Event is one thing that a run of a session tells: an event of the kernel's, or an artifact.
type Event struct {
	agentapi.Event
	Run      string             // with started
	Replayed bool               // with started: an earlier run with the same key is told again
	Artifact *artifact.Artifact // with EventArtifact
}

// EventArtifact tells a file that a run left. It comes before the end.
const EventArtifact agentapi.EventType = "artifact"

const (
	maxToolCall    = 255
	maxIdempotency = 255
	maxPath        = 4096
	// collectFor bounds how long files are taken out of a sandbox after a run.
	collectFor = 15 * time.Minute
	// awaitFor bounds how long a cell that was left is waited for: its interrupt, and the end of a kernel that does not hear it.
	awaitFor = 30 * time.Second
)

// keptRuns is what is kept of a session's runs: its log has them all.
var keptRuns = Kept{Answers: 256, Bytes: 64 << 20, Runs: 10_000}

func (s RunSpec) check() error {
	switch {
	case len(s.Code) > sandbox.MaxCode:
		return fault.New(fault.Invalid, "the code has %d bytes; at most %d are allowed", len(s.Code), sandbox.MaxCode)
	case s.TimeoutMS < 0:
		return fault.New(fault.Invalid, "a timeout cannot be negative")
	case utf8.RuneCountInString(s.ToolCall) > maxToolCall:
		return fault.New(fault.Invalid, "the name of the tool call has %d characters; at most %d are allowed", utf8.RuneCountInString(s.ToolCall), maxToolCall)
	case len(s.IdempotencyKey) > maxIdempotency:
		return fault.New(fault.Invalid, "the idempotency key has %d bytes; at most %d are allowed", len(s.IdempotencyKey), maxIdempotency)
	}
	return nil
}

// digest tells two runs under one idempotency key apart.
func (s RunSpec) digest() string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("a cell is plain data: %v", err))
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// teller passes events to a caller until that has heard enough.
type teller struct {
	yield func(Event, error) bool
	left  bool
}

func (t *teller) tell(e Event) bool {
	t.left = t.left || !t.yield(e, nil)
	return !t.left
}

func (t *teller) fail(err error) {
	if !t.left {
		t.left = true
		t.yield(Event{}, err)
	}
}

// Run runs one cell of a session, after those that came before it, and yields what it tells. What it left is kept and logged
// before its end is told, also when the caller leaves. A retry under the same idempotency key runs nothing: it is told what
// the first was.
func (m *Manager) Run(ctx context.Context, p auth.Principal, key string, spec RunSpec) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		t := &teller{yield: yield}
		if err := m.run(ctx, p, key, spec, t); err != nil {
			t.fail(err)
		}
	}
}

func (m *Manager) run(ctx context.Context, p auth.Principal, key string, spec RunSpec, t *teller) error {
	if err := spec.check(); err != nil {
		return err
	}
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return err
	}
	defer leave()
	if spec.IdempotencyKey != "" { // what has ended need not wait for what runs
		if earlier, err := m.earlier(ctx, e, spec); err != nil || earlier != nil && earlier.Outcome != "" {
			return m.again(earlier, err, t)
		}
	}
	done, err := e.cells.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	s, r, earlier, err := m.begin(ctx, e, spec)
	if err != nil || earlier != nil {
		return m.again(earlier, err, t)
	}
	return m.execute(ctx, p, e, s, r, spec, t)
}

// earlier finds the run of a session under the same key, which must have been for the same.
func (m *Manager) earlier(ctx context.Context, e *entry, spec RunSpec) (*Run, error) {
	if err := m.hold(ctx, e); err != nil {
		return nil, err
	}
	defer e.life.free()
	if e.s == nil {
		return nil, noSession(e.key)
	}
	return m.sameKey(ctx, e.s, spec)
}

// sameKey looks in the present generation alone: in another sandbox, such as that of a checkpoint, the same code runs again.
func (m *Manager) sameKey(ctx context.Context, s *Session, spec RunSpec) (*Run, error) {
	if spec.IdempotencyKey == "" {
		return nil, nil
	}
	r, err := m.store.RunByKey(ctx, s.ID, s.Generation, spec.IdempotencyKey)
	switch {
	case fault.Is(err, fault.NotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for an earlier run: %w", err)
	case r.Digest != spec.digest():
		return nil, fault.New(fault.Conflict, "the idempotency key %.64q belongs to run %s, which was for other code; use another key", spec.IdempotencyKey, r.ID)
	}
	return &r, nil
}

// begin makes the row of a run whose turn has come, or finds that it ran before.
func (m *Manager) begin(ctx context.Context, e *entry, spec RunSpec) (Session, Run, *Run, error) {
	if err := m.hold(ctx, e); err != nil {
		return Session{}, Run{}, nil, err
	}
	defer e.life.free()
	if e.s == nil {
		return Session{}, Run{}, nil, noSession(e.key)
	}
	if earlier, err := m.sameKey(ctx, e.s, spec); err != nil || earlier != nil {
		return Session{}, Run{}, earlier, err
	}
	if err := m.ready(ctx, e); err != nil {
		return Session{}, Run{}, nil, err
	}
	s := *e.s
	r := Run{
		ID: newID("run_"), Session: s.ID, Tenant: s.Tenant, Sandbox: s.Sandbox, Server: m.cfg.Server, Cell: s.Runs + 1, Generation: s.Generation, ToolCall: spec.ToolCall, Started: now(),
	}
	if m.cfg.Space.Allow(diskspace.Step) == nil {
		r.Code, _ = clip(spec.Code, maxLogCode)
	}
	if spec.IdempotencyKey != "" {
		r.Key, r.Digest = spec.IdempotencyKey, spec.digest()
	}
	if err := m.store.BeginRun(ctx, r); err != nil {
		return Session{}, Run{}, nil, fmt.Errorf("record a run of session %s: %w", s.Key, err)
	}
	e.busy = true
	return s, r, nil, nil
}

// again tells what an earlier run told.
func (m *Manager) again(r *Run, err error, t *teller) error {
	switch {
	case err != nil:
		return err
	case r.Outcome == OutcomeCut:
		return fault.New(fault.Conflict, "run %s under this idempotency key was cut off when the server stopped; how far it came is not known, and it is not run again: use another key", r.ID)
	case r.Outcome == "": // its turn is over, and it has no end
		return fault.New(fault.Conflict, "run %s under this idempotency key has no recorded end, and it is not run again: use another key", r.ID)
	case len(r.Answer) == 0:
		return fault.New(fault.Conflict, "run %s under this idempotency key ended (%s); its answer is not kept any more, and it is not run again: use another key", r.ID, r.Outcome)
	}
	var a answer
	if err := json.Unmarshal(r.Answer, &a); err != nil {
		return fmt.Errorf("read the answer of run %s: %w", r.ID, err)
	}
	return a.tell(r.ID, t)
}

// execute runs a cell and sees to everything that follows, whoever still listens.
func (m *Manager) execute(ctx context.Context, p auth.Principal, e *entry, s Session, r Run, spec RunSpec, t *teller) error {
	rec := &recorder{keep: r.Key != ""}
	failed := m.stream(ctx, p, s, r, spec, rec, t)
	if failed != nil && !rec.started {
		own, cancel := onOwn(ctx, settleFor)
		defer cancel()
		return errors.Join(failed, m.store.DropRun(own, r.ID), m.lookAgain(own, e))
	}
	if failed != nil && m.life.Err() != nil {
		return fault.Wrap(fault.Unavailable, failed, "the server is shutting down") // its row has no end: the next server says that it was cut off
	}
	if failed == nil && rec.end.Outcome == "" { // its caller left
		rec.end = agentapi.End{Outcome: agentapi.OutcomeInterrupted, Message: "its caller left, and the cell was interrupted; variables are kept"}
		m.await(ctx, p, s, rec)
	}
	var files []artifact.Artifact
	if failed == nil {
		files = m.collect(ctx, p, s, r, rec)
	}
	own, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if err := m.finish(own, e, s, r, spec, rec, files, failed); err != nil {
		return err
	}
	if failed != nil {
		return m.whyFailed(own, e, failed)
	}
	for _, e := range rec.late {
		t.tell(Event{Event: e})
	}
	for i := range files {
		t.tell(Event{Event: agentapi.Event{Type: EventArtifact, Time: now()}, Artifact: &files[i]})
	}
	t.tell(Event{Event: agentapi.Event{Type: agentapi.EventEnd, Time: now(), End: &rec.end}})
	return nil
}

// whyFailed says what became of the session, where a run failed because its sandbox is gone.
func (m *Manager) whyFailed(ctx context.Context, e *entry, failed error) error {
	if !fault.Is(failed, fault.Gone) || m.hold(ctx, e) != nil {
		return failed
	}
	defer e.life.free()
	switch {
	case e.s == nil:
		return fault.Wrap(fault.Gone, failed, "session %s was removed while the cell ran", e.key)
	case e.s.State == StateStopped:
		return fault.Wrap(fault.Gone, failed, "session %s was stopped while the cell ran", e.key)
	case e.s.State == StateLost || e.s.State == StateReaped:
		return fault.Wrap(fault.Gone, failed, "the cell began and did not come to its end: %s", fault.Message(goneError(e.s)))
	}
	return failed
}

// lookAgain is the end of a run that never began: its sandbox may be gone.
func (m *Manager) lookAgain(ctx context.Context, e *entry) error {
	if err := m.hold(ctx, e); err != nil {
		return err
	}
	defer e.life.free()
	e.busy = false
	if e.s == nil {
		return nil
	}
	return m.settle(ctx, e)
}

// stream runs the cell and passes on what it tells but its end, which rec has then. It returns without an end and without an
// error when the caller has left a run that does not survive that.
func (m *Manager) stream(ctx context.Context, p auth.Principal, s Session, r Run, spec RunSpec, rec *recorder, t *teller) error {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(m.life, cancel)()
	survives := spec.Disconnect == agentapi.DisconnectSurvive
	if !survives {
		defer context.AfterFunc(ctx, cancel)()
	}
	params := agentapi.RunParams{
		Code: spec.Code, Env: spec.Env, Cwd: spec.Cwd, TimeoutMS: spec.TimeoutMS, State: true, Disconnect: spec.Disconnect,
		Box: m.box(),
	}
	for event, err := range m.sandboxes.Run(own, p, s.Sandbox, params) {
		if err != nil {
			if rec.started && ctx.Err() != nil && !survives && m.life.Err() == nil {
				return nil
			}
			return err
		}
		if event.Type == agentapi.EventEnd {
			if event.End.Outcome == agentapi.OutcomeRefused && event.End.Fault != nil {
				return fault.New(event.End.Fault.Kind, "%s", event.End.Fault.Message)
			}
			rec.end = *event.End
			return nil
		}
		rec.add(event)
		told := Event{Event: event}
		if event.Type == agentapi.EventStarted {
			told.Run = r.ID
		}
		if !t.left && !t.tell(told) && !survives {
			return nil
		}
	}
	return nil
}

// await returns when a cell that was left has really ended: an empty one is run behind it, which tells what the kernel holds.
func (m *Manager) await(ctx context.Context, p auth.Principal, s Session, rec *recorder) {
	ctx, cancel := m.afterRun(ctx, awaitFor)
	defer cancel()
	agent, err := m.sandboxes.Agent(ctx, p, s.Sandbox)
	if err != nil {
		return
	}
	stream, err := agent.Run(ctx, agentapi.RunParams{Kernel: agentapi.DefaultKernel, Silent: true, State: true})
	if err != nil && !fault.Is(err, fault.Gone) { // what it holds is not known
		return
	}
	if err != nil { // the cell did not stop otherwise
		rec.end.Lost, rec.end.Message = true, "its caller left, and the kernel was ended with the cell; variables are lost"
		return
	}
	defer stream.Close()
	for event, err := range stream.Events() {
		if err != nil {
			return
		}
		if event.Type == agentapi.EventEnd && event.End != nil {
			rec.end.Value, rec.end.Lost = event.End.Value, event.End.Lost
		}
	}
}

// box is the directory of which an agent may say that nothing is in it; a path below a home is none that it knows.
func (m *Manager) box() string {
	if !path.IsAbs(m.cfg.Root) {
		return ""
	}
	return path.Join(m.cfg.Root, artifactsDir)
}

// collect keeps what a run left. What cannot be kept is told and does not make the run fail.
func (m *Manager) collect(ctx context.Context, p auth.Principal, s Session, r Run, rec *recorder) []artifact.Artifact {
	if m.artifacts == nil || rec.end.Empty {
		return nil
	}
	ctx, cancel := m.afterRun(ctx, collectFor)
	defer cancel()
	agent, err := m.sandboxes.Agent(ctx, p, s.Sandbox)
	var files []artifact.Artifact
	if err == nil {
		box := artifact.Box{Dir: path.Join(m.cfg.Root, artifactsDir), Keep: s.KeepFiles}
		files, err = m.artifacts.Collect(ctx, agent, s.Tenant, m.origin(ctx, s, r), box)
	}
	if err != nil {
		m.log.Warn("what a run left was not collected", "session", s.ID, "tenant", s.Tenant, "run", r.ID, "error", err)
		rec.notice("not every file in " + path.Join(m.cfg.Root, artifactsDir) + " was kept: " + fault.Message(err))
	}
	return files
}

// origin says who made a file, and from what.
func (m *Manager) origin(ctx context.Context, s Session, r Run) artifact.Origin {
	o := artifact.Origin{Session: s.ID, Key: s.Key, Sandbox: s.Sandbox, Run: r.ID, Cell: r.Cell, ToolCall: r.ToolCall}
	if s.Datasets.Path != "" {
		o.Datasets = append(o.Datasets, artifact.Dataset{ID: s.Datasets.Path})
	}
	if m.datasets == nil || s.Datasets.Access != "api" {
		return o
	}
	seen, err := m.datasets.Seen(ctx, s.Tenant, s.ID)
	if err != nil {
		m.log.Warn("the datasets of a session cannot be read", "session", s.ID, "tenant", s.Tenant, "error", err)
	}
	o.Datasets = append(o.Datasets, seen...)
	return o
}

// finish records how a run ended: its row, its session, its lines in the log, and what the kernel holds.
func (m *Manager) finish(ctx context.Context, e *entry, of Session, r Run, spec RunSpec, rec *recorder, files []artifact.Artifact, failed error) error {
	r.Ended, r.Outcome = now(), string(rec.end.Outcome)
	if failed != nil {
		r.Outcome = OutcomeFailed
	}
	if r.Key != "" && m.cfg.Space.Allow(diskspace.Step) == nil {
		r.Answer = rec.answer(files, failed)
	}
	if err := m.hold(ctx, e); err != nil {
		return err
	}
	defer e.life.free()
	e.busy = false
	if e.s == nil || e.s.ID != of.ID { // removed meanwhile
		return nil
	}
	s := *e.s
	s.Runs++
	if r.Outcome != string(agentapi.OutcomeOK) {
		s.Failed++
	}
	s.Artifacts += kept(files)
	s.LastUsed = r.Ended
	if s.Sandbox == of.Sandbox {
		s.Fresh = false
	}
	if err := m.store.EndRun(ctx, r, s, keptRuns); err != nil {
		return fmt.Errorf("record the end of run %s: %w", r.ID, err)
	}
	if err := m.keep(e, s); err != nil {
		return err
	}
	m.logged(e, rec.line(r, spec, failed))
	if len(files) > 0 {
		m.logged(e, artifactLine(of, r, files))
	}
	if state, ok := rec.state(); ok {
		e.state = &state
	}
	m.writeSoon(e)
	return m.settle(ctx, e)
}

func artifactLine(s Session, r Run, files []artifact.Artifact) LogLine {
	return LogLine{
		Event: LogArtifacts, Sandbox: s.Sandbox, Run: r.ID, Cell: r.Cell, ToolCall: r.ToolCall, Count: len(files), Artifacts: logArtifacts(files),
		Truncated: len(files) > maxLogFiles,
	}
}
