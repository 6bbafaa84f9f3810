package session

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Request asks for a session's sandbox.
type Request struct {
	Spec
	Recreate bool // a sandbox that was lost is replaced
}

// Ensure returns a session with a living sandbox: the one it has, or a new one. However many ask at once, one sandbox is made.
// One that was lost is fault.Gone, unless the request says that it is to be replaced.
func (m *Manager) Ensure(ctx context.Context, p auth.Principal, key string, req Request) (_ Session, created bool, err error) {
	if err := req.check(); err != nil {
		return Session{}, false, err
	}
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return Session{}, false, err
	}
	defer leave()
	if err := m.holdQuiet(ctx, e); err != nil {
		return Session{}, false, err
	}
	defer e.life.free()
	s, err := m.next(ctx, e, req)
	if err != nil || s == nil {
		if err == nil {
			return m.shown(ctx, *e.s), false, nil
		}
		return Session{}, false, err
	}
	m.attend(p.Tenant)
	if err := m.start(ctx, p, e, *s); err != nil {
		return Session{}, false, err
	}
	return m.shown(ctx, *e.s), true, nil
}

// holdQuiet holds an entry that nobody is stopping.
func (m *Manager) holdQuiet(ctx context.Context, e *entry) error {
	for {
		if err := m.hold(ctx, e); err != nil {
			return err
		}
		ending := e.ending
		if ending == nil {
			return nil
		}
		e.life.free()
		select {
		case <-ending:
		case <-ctx.Done():
			return fault.Wrap(fault.Unavailable, context.Cause(ctx), "the caller left while the session was being stopped")
		}
	}
}

// next is the session for which a sandbox is to be made; nil where it has one that lives.
func (m *Manager) next(ctx context.Context, e *entry, req Request) (*Session, error) {
	if e.s == nil {
		s := Session{ID: newID("ses_"), Tenant: e.tenant, Key: e.key, State: StateStarting, Created: now(), Spec: req.Spec}
		return m.decided(s)
	}
	if err := m.settle(ctx, e); err != nil {
		return nil, err
	}
	if err := m.endAgain(ctx, e); err != nil {
		return nil, err
	}
	s := *e.s
	switch s.State {
	case StateRunning:
		return nil, nil
	case StateStopped:
		s.Lost = nil
	case StateReaped:
		if !req.Recreate && s.Storage != StorageBind && !s.Fresh {
			return nil, goneError(&s)
		}
	case StateLost:
		if !req.Recreate {
			return nil, goneError(&s)
		}
	case StateStarting:
		return nil, fault.New(fault.Conflict, "session %s is still being made", s.Key)
	}
	s.Spec = overlay(s.Spec, req.Spec)
	return m.decided(s)
}

// decided fills in what nobody said.
func (m *Manager) decided(s Session) (*Session, error) {
	s.Storage = cmp.Or(s.Storage, StorageTmpfs)
	s.Size = cmp.Or(s.Size, m.cfg.Size)
	s.Template = cmp.Or(s.Template, m.cfg.Template)
	s.Datasets.Access = cmp.Or(s.Datasets.Access, "none")
	if s.Storage == StorageBind {
		s.Volume = "session-" + s.ID // named before it is made, so that a crash leaves none that nobody knows
	}
	if s.IdleTimeout == 0 {
		s.IdleTimeout = cmp.Or(m.cfg.IdleTimeout, -1)
	}
	if s.Lifetime == 0 {
		s.Lifetime = cmp.Or(m.cfg.Lifetime, m.cfg.MaxLifetime, -1)
	}
	return &s, nil
}

// overlay is a spec with what another says in its place.
func overlay(old, with Spec) Spec {
	out := old
	if with.Template != "" {
		out.Template, out.Image = with.Template, with.Image
	}
	out.Storage = cmp.Or(with.Storage, old.Storage)
	out.Size = cmp.Or(with.Size, old.Size)
	out.IdleTimeout = cmp.Or(with.IdleTimeout, old.IdleTimeout)
	out.Lifetime = cmp.Or(with.Lifetime, old.Lifetime)
	out.Datasets = cmp.Or(with.Datasets, old.Datasets)
	out.KeepFiles = with.KeepFiles || old.KeepFiles
	out.Limits = cmp.Or(with.Limits, old.Limits)
	if with.Network != nil {
		out.Network = with.Network
	}
	if with.Env != nil {
		out.Env = with.Env
	}
	if with.Metadata != nil {
		out.Metadata = with.Metadata
	}
	return out
}

// minSize is the least that /session may hold.
const minSize = 1 << 20

func (s Spec) check() error {
	switch s.Storage {
	case "", StorageTmpfs, StorageDisk, StorageBind:
	default:
		return fault.New(fault.Invalid, "unknown storage %.40q: use %s, %s or %s", s.Storage, StorageTmpfs, StorageDisk, StorageBind)
	}
	if s.Size < 0 || s.Size > 0 && s.Size < minSize {
		return fault.New(fault.Invalid, "a session's files have at least %d bytes, not %d", minSize, s.Size)
	}
	switch s.Datasets.Access {
	case "", "none", "local_ro", "api":
	default:
		return fault.New(fault.Invalid, "unknown access to datasets %.40q: use none, local_ro or api", s.Datasets.Access)
	}
	if s.Datasets.Access == "local_ro" && s.Datasets.Path == "" {
		return fault.New(fault.Invalid, "access local_ro needs the path of a directory on the server's host")
	}
	return nil
}

// start makes a sandbox for a session. Its row is first, with the id that the sandbox will have: after a crash the next server
// finds both, or neither. The caller holds the entry.
func (m *Manager) start(ctx context.Context, p auth.Principal, e *entry, s Session) error {
	before := e.s
	starting := s
	if before != nil {
		starting = *before
		starting.Volume = s.Volume
	}
	starting.Next = sandbox.NewID()
	if err := m.add(ctx, e, starting); err != nil {
		return err
	}
	sb, err := m.make(ctx, p, s, starting.Next)
	if err != nil {
		return errors.Join(err, m.unmake(ctx, e, before, s, starting.Next))
	}
	s.Sandbox, s.Template, s.State, s.Fresh, s.Told, s.Stopped = sb.ID, sb.Template, StateRunning, true, false, time.Time{}
	s.Next = ""
	s.Generation++
	s.LastUsed = now()
	own, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if err := m.save(own, e, s); err != nil {
		return errors.Join(err, m.unmake(ctx, e, before, s, sb.ID))
	}
	m.log.Info("session has a sandbox", "session", s.ID, "tenant", s.Tenant, "sandbox", sb.ID, "generation", s.Generation)
	m.logged(e, LogLine{Event: LogStarted, Sandbox: sb.ID, Config: config(s, sb)})
	e.state = &PythonState{Time: now(), Variables: map[string]agentapi.Variable{}, Modules: []string{}} // a new kernel holds nothing
	m.writeNow(e)
	return nil
}

// add writes a session that may be one more of its tenant's. It refuses a new one that would use
// the reserve of the host's disk.
func (m *Manager) add(ctx context.Context, e *entry, s Session) error {
	if e.s == nil {
		if err := m.cfg.Space.Allow(diskspace.Step); err != nil {
			return err
		}
	}
	most := m.cfg.MaxPerTenant
	if e.s != nil || most == 0 {
		return m.save(ctx, e, s)
	}
	m.admitting.Lock()
	defer m.admitting.Unlock()
	n, err := m.store.CountSessions(ctx, s.Tenant)
	if err != nil {
		return fmt.Errorf("count sessions: %w", err)
	}
	if n >= most {
		return fault.New(fault.Exhausted, "there are %d sessions, and at most %d are allowed; remove some that are not used any more", n, most)
	}
	return m.save(ctx, e, s)
}

// unmake takes a start back that came to nothing.
func (m *Manager) unmake(ctx context.Context, e *entry, before *Session, s Session, sb string) error {
	ctx, cancel := onOwn(ctx, settleFor)
	defer cancel()
	if _, err := m.sandboxes.Kill(ctx, owner(&s), sb); err != nil && !fault.Is(err, fault.NotFound) {
		m.log.Warn("sandbox of a session that did not start is not stopped", "session", s.ID, "sandbox", sb, "error", err)
	}
	if before != nil {
		return m.save(ctx, e, *before)
	}
	return m.erase(ctx, e, s)
}

// make creates a sandbox and makes it a session's: its directories, its data, its working directory.
func (m *Manager) make(ctx context.Context, p auth.Principal, s Session, id string) (sandbox.Sandbox, error) {
	spec, err := m.sandboxSpec(ctx, p, s)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	spec.ID = id
	sb, _, err := m.sandboxes.Create(ctx, p, spec)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := m.furnish(ctx, p, s, id); err != nil {
		return sandbox.Sandbox{}, fmt.Errorf("prepare the sandbox of session %s: %w", s.Key, err)
	}
	return sb, nil
}

// The places below a session's root.
const (
	artifactsDir = "artifacts"
	dataDir      = "data"
)

// furnish makes what a session's code finds.
func (m *Manager) furnish(ctx context.Context, p auth.Principal, s Session, id string) error {
	agent, err := m.sandboxes.Agent(ctx, p, id)
	if err != nil {
		return err
	}
	if _, err := agent.Mkdir(ctx, agentapi.MkdirParams{Path: m.cfg.Root, Parents: true, Root: true}); err != nil {
		return err
	}
	if s.Storage == StorageBind {
		if err := m.own(ctx, agent); err != nil {
			return err
		}
	}
	if err := m.makeDirs(ctx, s, agent); err != nil {
		return err
	}
	if m.datasets != nil && s.Datasets.Access == "api" {
		if err := m.datasets.Place(ctx, s.Tenant, s.ID, agent); err != nil {
			return err
		}
	}
	_, err = m.sandboxes.MoveKernel(ctx, p, id, agentapi.DefaultKernel, m.cfg.Root)
	return err
}

// makeDirs makes the places of a session, as its user: what files of an earlier sandbox have put there instead may be a link, and
// must not keep the session from being opened.
func (m *Manager) makeDirs(ctx context.Context, s Session, agent *agentapi.Client) error {
	for _, dir := range []string{artifactsDir, dataDir} {
		_, err := agent.Mkdir(ctx, agentapi.MkdirParams{Path: path.Join(m.cfg.Root, dir), Parents: true})
		if err == nil {
			continue
		}
		switch fault.KindOf(err) {
		case fault.Conflict, fault.Invalid, fault.Denied, fault.DiskFull, fault.NotFound:
			m.log.Warn("a directory of a session cannot be made", "session", s.ID, "tenant", s.Tenant, "directory", dir, "error", err)
		case fault.Internal, fault.Exhausted, fault.Unauthed, fault.Timeout, fault.Unavailable, fault.Gone, fault.Unsupported:
			return err
		}
	}
	return nil
}

// own gives a volume to the user who works in it: it is root's when it is new.
func (m *Manager) own(ctx context.Context, agent *agentapi.Client) error {
	who, err := agent.Account(ctx, agentapi.AccountParams{})
	if err != nil {
		return err
	}
	mode := uint32(0o755)
	_, err = agent.Chmod(ctx, agentapi.ChmodParams{Path: m.cfg.Root, User: "root", Owner: strconv.Itoa(who.UID), Group: strconv.Itoa(who.GID), Mode: &mode})
	return err
}

// sandboxSpec is the sandbox that a session needs. A volume is made for it, where its files are to outlive it.
func (m *Manager) sandboxSpec(ctx context.Context, p auth.Principal, s Session) (sandbox.Spec, error) {
	spec := sandbox.Spec{
		Template: s.Template, Lifetime: s.Lifetime, IdleTimeout: s.IdleTimeout, Limits: s.Limits, Network: s.Network,
		Env: maps.Clone(s.Env), Metadata: maps.Clone(s.Metadata),
		Annotations: map[string]string{AnnotationKey: s.Key, AnnotationID: s.ID},
	}
	if s.Image != "" {
		spec.Annotations["image"] = s.Image // by which the API shows it
	}
	switch s.Storage {
	case StorageTmpfs:
		spec.Storage = sandbox.StorageTmpfs
		spec.Limits.DiskBytes = cmp.Or(s.Limits.DiskBytes, s.Size)
		memory, err := m.memoryFor(ctx, s, spec.Limits.DiskBytes)
		if err != nil {
			return spec, err
		}
		spec.Limits.MemoryBytes = memory
	case StorageDisk:
		spec.Limits.DiskBytes = cmp.Or(s.Limits.DiskBytes, s.Size)
	case StorageBind:
		if err := m.makeVolume(ctx, p, s); err != nil {
			return spec, err
		}
		spec.Mounts = append(spec.Mounts, sandbox.Mount{Kind: sandbox.MountVolume, Source: s.Volume, Target: m.cfg.Root})
	}
	mounts, err := m.dataMounts(ctx, s)
	spec.Mounts = slices.Concat(spec.Mounts, mounts)
	return spec, err
}

// memoryFor is what a sandbox may use: files in memory count as memory, so there is room for both. What was asked for holds.
func (m *Manager) memoryFor(ctx context.Context, s Session, files int64) (int64, error) {
	if s.Limits.MemoryBytes > 0 {
		return s.Limits.MemoryBytes, nil
	}
	t, err := m.templates.Resolve(ctx, s.Tenant, s.Template)
	if err != nil {
		return 0, fmt.Errorf("resolve template: %w", err)
	}
	memory := cmp.Or(t.Limits.MemoryBytes, m.cfg.Limits.MemoryBytes)
	if memory == 0 {
		return 0, nil
	}
	if most := m.cfg.MaxLimits.MemoryBytes; most > 0 {
		return min(memory+files, most), nil
	}
	return memory + files, nil
}

// minVolume is the least that a volume holds.
const minVolume = 16 << 20

func (m *Manager) makeVolume(ctx context.Context, p auth.Principal, s Session) error {
	_, err := m.sandboxes.CreateVolume(ctx, p, s.Volume, max(s.Size, minVolume))
	if err != nil && !fault.Is(err, fault.Conflict) { // a sandbox before this one has it, or an attempt that came to nothing
		return fmt.Errorf("make the files of session %s: %w", s.Key, err)
	}
	return nil
}

func (m *Manager) dataMounts(ctx context.Context, s Session) ([]sandbox.Mount, error) {
	if s.Datasets.Access == "none" {
		return nil, nil
	}
	if m.datasets == nil {
		return nil, fault.New(fault.Unsupported, "this server keeps no datasets")
	}
	return m.datasets.Mounts(ctx, s.Tenant, s.ID, s.Datasets.Access, s.Datasets.Path)
}

// started is what the log tells about a new sandbox. Values of the environment may be secrets: only its names are told.
type started struct {
	Session     string          `json:"session_id"`
	Generation  int             `json:"generation"`
	Template    string          `json:"template"`
	Image       string          `json:"image,omitempty"`
	Storage     Storage         `json:"session_storage"`
	SizeBytes   int64           `json:"size_bytes"`
	Datasets    string          `json:"dataset_access"`
	IdleSeconds float64         `json:"idle_timeout_seconds,omitempty"`
	Deadline    *time.Time      `json:"deadline,omitempty"`
	KeepFiles   bool            `json:"keep_files,omitempty"`
	Limits      template.Limits `json:"limits"`
	Network     string          `json:"network"`
	Env         []string        `json:"env,omitempty"`
}

func config(s Session, sb sandbox.Sandbox) json.RawMessage {
	c := started{
		Session: s.Key, Generation: s.Generation, Template: sb.Template, Image: s.Image, Storage: s.Storage, SizeBytes: s.Size,
		Datasets: s.Datasets.Access, IdleSeconds: sb.IdleTimeout.Seconds(), KeepFiles: s.KeepFiles, Limits: sb.Limits,
		Network: string(sb.Network.Mode), Env: slices.Sorted(maps.Keys(s.Env)),
	}
	if !sb.Deadline.IsZero() {
		c.Deadline = &sb.Deadline
	}
	text, err := json.Marshal(c)
	if err != nil {
		panic(fmt.Sprintf("a sandbox is plain data: %v", err))
	}
	return text
}
