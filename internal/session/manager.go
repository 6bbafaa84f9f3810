package session

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Sandboxes is what sessions ask of the domain.
type Sandboxes interface {
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error]
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	MoveKernel(ctx context.Context, p auth.Principal, id, name, cwd string) (agentapi.Kernel, error)
	Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error]
	Each(yield func(sandbox.Sandbox) bool)
	Fork(ctx context.Context, p auth.Principal, id string, spec sandbox.ForkSpec) (sandbox.ForkResult, error)
	Pause(ctx context.Context, p auth.Principal, id string, spec sandbox.PauseSpec) (sandbox.Sandbox, error)
	Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	CreateVolume(ctx context.Context, p auth.Principal, name string, bytes int64) (sandbox.Volume, error)
	RemoveVolume(ctx context.Context, p auth.Principal, name string) error
}

// Templates knows what a sandbox starts from.
type Templates interface {
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
}

// Artifacts keeps what runs leave.
type Artifacts interface {
	Collect(ctx context.Context, from *agentapi.Client, tenant string, o artifact.Origin, box artifact.Box) ([]artifact.Artifact, error)
	Keep(ctx context.Context, from *agentapi.Client, tenant string, o artifact.Origin, path string) (artifact.Artifact, error)
	Forget(session string)
}

// DatasetStore brings data into sandboxes.
type DatasetStore interface {
	// Mounts is what a sandbox of a session needs to see its data.
	Mounts(ctx context.Context, tenant, session, access, path string) ([]sandbox.Mount, error)
	// Place makes the links to staged data, after every start of a sandbox.
	Place(ctx context.Context, tenant, session string, agent *agentapi.Client) error
	// Seen is what a run can see now.
	Seen(ctx context.Context, tenant, session string) ([]artifact.Dataset, error)
	// Forget is called when a session is removed.
	Forget(ctx context.Context, tenant, session string) error
}

// Store keeps sessions over the life of a server; storetest has its contract as tests. Times are exact to a microsecond.
type Store interface {
	// PutSession adds a session or replaces the one of the same id. Another of the same tenant and key is fault.Conflict.
	PutSession(ctx context.Context, s Session) error
	// Session finds one by its key, or fault.NotFound.
	Session(ctx context.Context, tenant, key string) (Session, error)
	// SessionOfSandbox finds the one whose present or last sandbox this is, or fault.NotFound.
	SessionOfSandbox(ctx context.Context, tenant, sandbox string) (Session, error)
	// Sessions returns a page of a tenant's, those used last first.
	Sessions(ctx context.Context, tenant string, q Query) (Page, error)
	// UnsettledSessions are those of all tenants that have a sandbox, or an end that is not in their log.
	UnsettledSessions(ctx context.Context) ([]Session, error)
	// UnusedSessions are those of all tenants that have no sandbox and were not used since.
	UnusedSessions(ctx context.Context, since time.Time) ([]Session, error)
	// RemoveSession removes one with its runs and checkpoints; one that is not there is no error.
	RemoveSession(ctx context.Context, id string) error
	SessionCensus(ctx context.Context) (map[string]int, error)
	// CountSessions is how many a tenant has, whatever their state.
	CountSessions(ctx context.Context, tenant string) (int, error)
	// SessionIDs are those of all tenants.
	SessionIDs(ctx context.Context) ([]string, error)

	// BeginRun adds a run. Another of the same session and generation with the same key is fault.Conflict.
	BeginRun(ctx context.Context, r Run) error
	// EndRun replaces a run and its session at once, and forgets what is not kept any more of the runs before it.
	EndRun(ctx context.Context, r Run, s Session, keep Kept) error
	// DropRun forgets one that never began.
	DropRun(ctx context.Context, id string) error
	// RunByKey finds one by its idempotency key, and RunOf by its id, or fault.NotFound.
	RunByKey(ctx context.Context, session string, generation int, key string) (Run, error)
	RunOf(ctx context.Context, tenant, id string) (Run, error)
	// CutRuns marks runs without an end as cut off, and tells which they were: the server's own and
	// those of servers that are gone. An empty server is the only one, so it cuts all.
	CutRuns(ctx context.Context, server string, at time.Time) ([]Run, error)

	// PutCheckpoint adds one; RemoveCheckpoint of one that is not there is no error.
	PutCheckpoint(ctx context.Context, c Checkpoint) error
	Checkpoints(ctx context.Context, session string) ([]Checkpoint, error)
	AllCheckpoints(ctx context.Context) ([]Checkpoint, error)
	RemoveCheckpoint(ctx context.Context, session, id string) error
}

// Config is what an operator decides about sessions.
type Config struct {
	Server      string        // this one's name among those of its database; empty: it is the only one
	Dir         string        // where logs lie
	Root        string        // of a session inside its sandbox; "/session"
	IdleTimeout time.Duration // zero: none
	Lifetime    time.Duration // of a sandbox; zero: none
	Size        int64         // of /session
	Retention   time.Duration // of a session that is not used any more; zero: for ever

	MaxLifetime   time.Duration   // that a sandbox may have; zero: any
	Limits        template.Limits // of a sandbox for which nobody says any
	MaxLimits     template.Limits
	Template      string // of a session for which nobody says any
	SweepInterval time.Duration

	MaxPerTenant int           // sessions; zero: any
	MaxLog       int64         // bytes of one session's log that tell everything; zero: 256 MiB
	MaxLogs      int64         // likewise of all logs of one tenant; zero: 4 GiB
	MaxFollowers int           // streams of logs that one tenant follows at the same time; zero: 64
	Grace        time.Duration // that work behind a run has when the server ends; zero: 5 s

	// Space is asked before rows and files grow. Where it refuses, no session is added, and runs,
	// logs and states are kept without their details.
	Space diskspace.Check
}

// Kept is how much of a session's runs outlives them. Code and answers of older cells are dropped, then their rows.
type Kept struct {
	Answers int   // cells back from the newest
	Bytes   int64 // of code and answers together, the newest first
	Runs    int   // rows
}

// Manager owns the sessions of a server.
type Manager struct {
	cfg       Config
	sandboxes Sandboxes
	templates Templates
	store     Store
	artifacts Artifacts    // nil: nothing is kept
	datasets  DatasetStore // nil: there are none
	log       *slog.Logger

	life context.Context // of the Manager
	quit context.CancelFunc
	work sync.WaitGroup // goroutines, and calls that outlive their callers

	mu      sync.Mutex
	closed  bool
	entries map[name]*entry
	follows map[string]int     // streams of logs, by tenant
	tenants map[string]bool    // whose events are heard
	waking  map[string]*waking // checkpoints that are being woken, by their sandboxes

	admitting sync.Mutex // held while a session is counted and added

	shelving sync.Mutex
	shelves  map[string]*shelf // what the logs of each tenant share
}

// name is how an entry is found.
type name struct{ tenant, key string }

// entry is a session in memory: while somebody uses it, and while it has a sandbox.
type entry struct {
	name
	cells queue // the order of runs
	life  lock  // guards what is below

	loaded bool
	s      *Session // nil: there is none
	log    *journal
	ending chan struct{} // closed when a stop that goes on is over; nil: none does
	busy   bool          // a cell runs, whose end comes into the log before that of its sandbox
	state  *PythonState  // what its kernel held last; nil: it is in its file, if anywhere
	late   bool          // its files are written soon
	drawn  int           // how often what its files tell was put together

	files   sync.Mutex // held while its files are written; guards what is below
	written int        // which of those drawn the files are of

	refs   int  // guarded by the Manager's mu
	pinned bool // likewise: one of refs is that it has a sandbox
}

// New makes a Manager that Open makes answer. artifacts and datasets may be nil.
func New(cfg Config, sandboxes Sandboxes, templates Templates, store Store, artifacts Artifacts, datasets DatasetStore, log *slog.Logger) *Manager {
	cfg.Root = cmp.Or(cfg.Root, "/session")
	cfg.MaxLog, cfg.MaxLogs = cmp.Or(cfg.MaxLog, maxLog), cmp.Or(cfg.MaxLogs, maxLogs)
	cfg.Grace = cmp.Or(cfg.Grace, 5*time.Second)
	cfg.MaxFollowers = cmp.Or(cfg.MaxFollowers, 64)
	// Owned by the Manager and ended by Close.
	life, quit := context.WithCancel(context.Background())
	return &Manager{
		cfg: cfg, sandboxes: sandboxes, templates: templates, store: store, artifacts: artifacts, datasets: datasets, log: log,
		life: life, quit: quit, entries: map[name]*entry{}, follows: map[string]int{}, tenants: map[string]bool{}, waking: map[string]*waking{}, shelves: map[string]*shelf{},
	}
}

// Quit takes nothing new and lets what goes on come to its end soon: runs that nobody hears any more are left, and what follows
// on a run has a grace. Sandboxes live on.
func (m *Manager) Quit() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.quit()
}

// Close quits, waits for what goes on and lets go of everything.
func (m *Manager) Close() error {
	m.Quit()
	m.work.Wait()
	return nil
}

// enter finds or makes the entry of a key and makes Close wait until leave.
func (m *Manager) enter(tenant, key string) (e *entry, leave func(), err error) {
	if tenant == "" {
		return nil, nil, fault.New(fault.Unauthed, "a session needs an owner")
	}
	if err := CheckKey("session key", key); err != nil {
		return nil, nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, nil, fault.New(fault.Unavailable, "the server is shutting down; try again")
	}
	n := name{tenant, key}
	e = m.entries[n]
	if e == nil {
		e = &entry{name: n, life: newLock()}
		m.entries[n] = e
	}
	e.refs++
	m.work.Add(1)
	return e, func() { m.leave(e); m.work.Done() }, nil
}

// leave forgets an entry that nobody uses. What it knew is in the store and in its log.
func (m *Manager) leave(e *entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.refs--; e.refs == 0 {
		delete(m.entries, e.name)
	}
}

// hold takes the lock of an entry and reads its session; the caller frees it.
func (m *Manager) hold(ctx context.Context, e *entry) error {
	if err := e.life.take(ctx); err != nil {
		return err
	}
	if e.loaded {
		return nil
	}
	s, err := m.store.Session(ctx, e.tenant, e.key)
	switch {
	case fault.Is(err, fault.NotFound):
		e.s, e.log = nil, nil
	case err != nil:
		e.life.free()
		return fmt.Errorf("read session %s: %w", e.key, err)
	default:
		if err := m.keep(e, s); err != nil {
			e.life.free()
			return err
		}
	}
	e.loaded = true
	return nil
}

// keep makes a session the one of its entry.
func (m *Manager) keep(e *entry, s Session) error {
	if e.log == nil {
		all, err := m.shelf(s.Tenant)
		if err != nil {
			return err
		}
		log, err := openJournal(m.folder(s), m.cfg.MaxLog, all)
		if err != nil {
			return err
		}
		e.log = log
	}
	e.s = &s
	m.pin(e, s.State == StateRunning)
	return nil
}

// pin keeps an entry in memory while it has a sandbox: it is used again and again, and its log need not be opened each time.
func (m *Manager) pin(e *entry, running bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case running && !e.pinned:
		e.refs++
	case !running && e.pinned:
		e.refs-- // whoever holds it has another
	}
	e.pinned = running
}

// save writes a session and makes it the one of its entry.
func (m *Manager) save(ctx context.Context, e *entry, s Session) error {
	if err := m.store.PutSession(ctx, s); err != nil {
		return fmt.Errorf("record session %s: %w", s.Key, err)
	}
	return m.keep(e, s)
}

// find holds an entry whose session is there; done gives everything back.
func (m *Manager) find(ctx context.Context, p auth.Principal, key string) (e *entry, done func(), err error) {
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return nil, nil, err
	}
	if err := m.hold(ctx, e); err != nil {
		leave()
		return nil, nil, err
	}
	if e.s == nil || e.s.State == StateStarting {
		e.life.free()
		leave()
		return nil, nil, noSession(key)
	}
	return e, func() { e.life.free(); leave() }, nil
}

func noSession(key string) error {
	return fault.New(fault.NotFound, "there is no session %q; open it first", key)
}

func owner(s *Session) auth.Principal { return auth.Principal{Tenant: s.Tenant} }

// Get tells about a session, also when its sandbox is gone.
func (m *Manager) Get(ctx context.Context, p auth.Principal, key string) (Session, error) {
	return m.Resolve(ctx, p, key)
}

// Resolve finds a session as it is now.
func (m *Manager) Resolve(ctx context.Context, p auth.Principal, key string) (Session, error) {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return Session{}, err
	}
	defer done()
	if err := m.settle(ctx, e); err != nil {
		return Session{}, err
	}
	return m.shown(ctx, *e.s), nil
}

// shown is a session with what its sandbox knows better.
func (m *Manager) shown(ctx context.Context, s Session) Session {
	if s.State == StateRunning {
		if sb, err := m.sandboxes.Get(ctx, owner(&s), s.Sandbox); err == nil {
			s.Deadline = sb.Deadline
		}
	}
	return s
}

// List returns a page of the caller's sessions. It asks no sandbox: one that has just ended may be told as running.
func (m *Manager) List(ctx context.Context, p auth.Principal, q Query) (Page, error) {
	if q.Limit < 0 || q.Limit > sandbox.MaxPage {
		return Page{}, fault.New(fault.Invalid, "a page has 1 to %d sessions, not %d", sandbox.MaxPage, q.Limit)
	}
	if q.Limit == 0 {
		q.Limit = sandbox.DefaultPage
	}
	for _, s := range q.States {
		if !s.Known() {
			return Page{}, fault.New(fault.Invalid, "unknown state %.40q: use running, stopped, lost or reaped", s)
		}
	}
	page, err := m.store.Sessions(ctx, p.Tenant, q)
	if err != nil {
		return Page{}, fmt.Errorf("list sessions: %w", err)
	}
	return page, nil
}

// Census counts the sessions of all tenants by state.
func (m *Manager) Census(ctx context.Context) (map[string]int, error) {
	return m.store.SessionCensus(ctx)
}

// Agent is a client of a session's living sandbox; one that is gone is fault.Gone.
func (m *Manager) Agent(ctx context.Context, p auth.Principal, key string) (*agentapi.Client, error) {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := m.ready(ctx, e); err != nil {
		return nil, err
	}
	return m.sandboxes.Agent(ctx, p, e.s.Sandbox)
}

// ready refuses what has no living sandbox; the caller holds the entry.
func (m *Manager) ready(ctx context.Context, e *entry) error {
	if err := m.settle(ctx, e); err != nil {
		return err
	}
	switch s := e.s; s.State {
	case StateRunning:
		return nil
	case StateStopped:
		return fault.New(fault.Conflict, "session %s is stopped; open it again to start a new sandbox", s.Key)
	case StateLost, StateReaped:
		return goneError(s)
	case StateStarting:
		return noSession(s.Key)
	}
	return fault.New(fault.Internal, "session %s has an unknown state %q", e.key, e.s.State)
}

// goneError says how a session's sandbox ended and what is left.
func goneError(s *Session) error {
	loss := s.Lost
	if loss == nil {
		loss = &Loss{Sandbox: s.Sandbox}
	}
	why := string(loss.Cause)
	if loss.Message != "" {
		why += " (" + loss.Message + ")"
	}
	left := "its files and variables are gone, what was kept as artifacts is not"
	if s.Storage == StorageBind {
		left = "its variables are gone, the files in /session are kept"
	}
	return fault.New(fault.Gone, "the sandbox of session %s has ended: %s; %s. Open the session with recreate to go on in a new sandbox", s.Key, why, left)
}

// Note adds a line to a session's log.
func (m *Manager) Note(ctx context.Context, p auth.Principal, key string, line LogLine) error {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return err
	}
	defer done()
	if line.Sandbox == "" {
		line.Sandbox = e.s.Sandbox
	}
	return e.log.add(line)
}

// RunOf finds a run of a session that is still there.
func (m *Manager) RunOf(ctx context.Context, tenant, run string) (Run, error) {
	return m.store.RunOf(ctx, tenant, run)
}

// newID names a session or a run.
func newID(prefix string) string { return prefix + strings.ToLower(rand.Text()[:20]) }

// now is exact to what the store keeps.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// settleFor bounds what has to come to an end although its caller has left.
const settleFor = 30 * time.Second

// afterRun is a context for what follows on a run, which its caller's end does not end. The server's does, after a grace: a sandbox
// must not hold that up, and what is not collected by then is still there.
func (m *Manager) afterRun(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	own, cancel := onOwn(ctx, limit)
	var late *time.Timer
	ready := make(chan struct{})
	stop := context.AfterFunc(m.life, func() { late = time.AfterFunc(m.cfg.Grace, cancel); close(ready) })
	return own, func() {
		if !stop() {
			<-ready
			late.Stop()
		}
		cancel()
	}
}

// onOwn is a context that outlives its caller; the Manager's Close waits for what is done with it.
func onOwn(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), limit)
}

var errNoArtifacts = fault.New(fault.Unsupported, "this server keeps no artifacts")

// KeepFile keeps one file of a session's sandbox as an artifact.
func (m *Manager) KeepFile(ctx context.Context, p auth.Principal, key, path, toolCall string) (artifact.Artifact, error) {
	if m.artifacts == nil {
		return artifact.Artifact{}, errNoArtifacts
	}
	if utf8.RuneCountInString(toolCall) > maxToolCall || len(path) > maxPath {
		return artifact.Artifact{}, fault.New(fault.Invalid, "a path has at most %d bytes, and the name of a tool call %d characters", maxPath, maxToolCall)
	}
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return artifact.Artifact{}, err
	}
	defer leave()
	s, agent, err := m.reach(ctx, p, e)
	if err != nil {
		return artifact.Artifact{}, err
	}
	kept, err := m.artifacts.Keep(ctx, agent, p.Tenant, m.origin(ctx, s, Run{ToolCall: toolCall}), path)
	if err != nil {
		return artifact.Artifact{}, err
	}
	return kept, m.noteArtifacts(ctx, e, s, Run{ToolCall: toolCall}, []artifact.Artifact{kept})
}

// reach is a session with a living sandbox and that sandbox's agent, for work that does not hold the session.
func (m *Manager) reach(ctx context.Context, p auth.Principal, e *entry) (Session, *agentapi.Client, error) {
	if err := m.hold(ctx, e); err != nil {
		return Session{}, nil, err
	}
	defer e.life.free()
	if e.s == nil {
		return Session{}, nil, noSession(e.key)
	}
	if err := m.ready(ctx, e); err != nil {
		return Session{}, nil, err
	}
	agent, err := m.sandboxes.Agent(ctx, p, e.s.Sandbox)
	return *e.s, agent, err
}

// noteArtifacts counts and logs what was kept outside of a run.
func (m *Manager) noteArtifacts(ctx context.Context, e *entry, s Session, r Run, all []artifact.Artifact) error {
	ctx, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if err := m.hold(ctx, e); err != nil {
		return err
	}
	defer e.life.free()
	if e.s == nil || e.s.ID != s.ID {
		return nil
	}
	now := *e.s
	now.Artifacts += kept(all)
	return errors.Join(m.save(ctx, e, now), e.log.add(artifactLine(s, r, all)))
}

func kept(all []artifact.Artifact) (n int) {
	for _, a := range all {
		if a.ID != "" {
			n++
		}
	}
	return n
}
