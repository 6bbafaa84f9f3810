package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// MaxCode bounds the code of one cell; it travels in one frame of agentapi.MaxPayload.
const MaxCode = 8 << 20

// endNews is how long a broken connection waits for the news that its sandbox has ended, which tells why.
// Without it the caller reads that the sandbox does not answer, and tries again in vain. The
// caller of a connection that breaks while its sandbox lives gets the error this much later.
const endNews = 3 * time.Second

// kernelLanguage is what a kernel speaks for which nobody named a language, and what a warm one does.
const kernelLanguage = "python"

var kernelName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Agent returns a client of a running sandbox's agent. Every operation on it counts as use until it ends, and is refused
// once the sandbox has ended.
func (m *Manager) Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error) {
	e, err := m.usable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	return m.client(e, nil), nil
}

// PortAgent is Agent for connections to ports of a sandbox. They do not count as the tenant's
// operations: anyone may open them where the owner has made a port public.
func (m *Manager) PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error) {
	e, err := m.usable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	return m.limitedClient(e, m.ports, nil), nil
}

// Run runs one cell and yields what it tells. A kernel that is gone is replaced first, which a notice tells. Leaving the
// loop leaves the run; params say what that does to it.
func (m *Manager) Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		params.Kernel = cmp.Or(params.Kernel, agentapi.DefaultKernel)
		e, err := m.readyFor(ctx, p, id, checkRun(params))
		if err != nil {
			yield(agentapi.Event{}, err)
			return
		}
		defer m.release(e)
		sb, begun := e.snapshot(), time.Now()
		m.observer.RunStarted(sb, RunCell)
		var outcome agentapi.Outcome
		defer func() { m.observer.RunEnded(sb, RunCell, outcome, time.Since(begun)) }()
		for event, err := range m.run(ctx, e, params) {
			if err != nil {
				yield(agentapi.Event{}, m.explainBreak(ctx, e, err))
				return
			}
			if event.Type == agentapi.EventEnd {
				outcome = event.End.Outcome
			}
			if !yield(event, nil) {
				return
			}
		}
	}
}

// run is Run on a sandbox in use: one attempt, and a second one on a new kernel.
func (m *Manager) run(ctx context.Context, e *entry, params agentapi.RunParams) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		client := m.client(e, nil)
		stream, err := client.Run(ctx, params)
		if fault.Is(err, fault.Gone) && e.snapshot().State.usable() {
			lost, failed := m.replaceKernel(ctx, e, params.Kernel)
			if failed != nil {
				yield(agentapi.Event{}, failed)
				return
			}
			notice := fmt.Sprintf("kernel %q was gone and has been started anew; its variables are lost", params.Kernel)
			if lost && !yield(agentapi.Event{Type: agentapi.EventNotice, Time: time.Now(), Message: notice}, nil) {
				return
			}
			stream, err = client.Run(ctx, params)
		}
		if err != nil {
			yield(agentapi.Event{}, err)
			return
		}
		stream.Events()(yield)
	}
}

func checkRun(params agentapi.RunParams) error {
	switch {
	case len(params.Code) > MaxCode:
		return fault.New(fault.Invalid, "the code has %d bytes; at most %d are allowed", len(params.Code), MaxCode)
	case params.TimeoutMS < 0:
		return fault.New(fault.Invalid, "a timeout cannot be negative")
	case strings.ContainsRune(params.Cwd, 0):
		return fault.New(fault.Invalid, "%.60q is not a directory", params.Cwd)
	}
	for name, value := range params.Env { // whatever no process can have
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return fault.New(fault.Invalid, "%.60q is not a name for an environment variable, or its value is not text", name)
		}
	}
	if err := checkDisconnect(params.Disconnect); err != nil {
		return err
	}
	return checkKernel(params.Kernel)
}

func checkKernel(name string) error {
	if !kernelName.MatchString(name) {
		return fault.New(fault.Invalid, "kernel name %.70q: use up to 64 of letters, digits, '.', '_' and '-', a letter or digit first", name)
	}
	return nil
}

func checkDisconnect(d agentapi.Disconnect) error {
	switch d {
	case "", agentapi.DisconnectKill, agentapi.DisconnectSurvive:
		return nil
	}
	return fault.New(fault.Invalid, "unknown disconnect %.40q: use %s or %s", d, agentapi.DisconnectKill, agentapi.DisconnectSurvive)
}

// Exec starts a command. Its stream counts as use until it is closed.
func (m *Manager) Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error) {
	e, err := m.readyFor(ctx, p, id, checkExec(params))
	if err != nil {
		return nil, err
	}
	defer m.release(e)
	sb, kind, begun := e.snapshot(), ExecKind(params), time.Now()
	m.observer.RunStarted(sb, kind)
	var outcome atomic.Value // of agentapi.Outcome; nothing when the caller left before the end
	ended := sync.OnceFunc(func() {
		o, _ := outcome.Load().(agentapi.Outcome)
		m.observer.RunEnded(sb, kind, o, time.Since(begun))
	})
	stream, err := m.client(e, ended).Exec(ctx, params)
	if err != nil {
		ended()
		return nil, m.explainBreak(ctx, e, err)
	}
	stream.OnEnd(func(end agentapi.End) { outcome.Store(end.Outcome) })
	return stream, nil
}

// ExecKind is what an Exec with these is.
func ExecKind(params agentapi.ExecParams) RunKind {
	if params.Snippet != nil {
		return RunSnippet
	}
	return RunCommand
}

func checkExec(params agentapi.ExecParams) error {
	switch {
	case len(params.Argv) == 0 || params.Argv[0] == "":
		return fault.New(fault.Invalid, "a command needs a program to run")
	case params.TimeoutMS < 0:
		return fault.New(fault.Invalid, "a timeout cannot be negative")
	}
	return checkDisconnect(params.Disconnect)
}

// KernelSpec asks for a kernel. What it leaves open is decided here.
type KernelSpec struct {
	Name     string // default: one that nobody has
	Language string // default: python; which others there are is for the agent to say
	Cwd      string // default: the sandbox's working directory
}

// MaxKernels bounds the living kernels of a sandbox. Each is a process with threads of its own, and the sandbox's limit of
// processes alone would let a caller start hundreds.
const MaxKernels = 64

// StartKernel puts another kernel into a sandbox and returns when it takes cells.
func (m *Manager) StartKernel(ctx context.Context, p auth.Principal, id string, spec KernelSpec) (agentapi.Kernel, error) {
	name := cmp.Or(spec.Name, "kernel-"+strings.ToLower(rand.Text()[:12]))
	return m.kernel(ctx, p, id, name, func(e *entry) (agentapi.Kernel, error) {
		old, err := m.placeForKernel(ctx, e, name)
		if err != nil {
			return agentapi.Kernel{}, err
		}
		if old != nil && old.State != agentapi.KernelDead {
			return agentapi.Kernel{}, fault.New(fault.Conflict, "kernel %q is there already", name)
		}
		return m.addKernel(ctx, e, agentapi.KernelStartParams{
			Kernel: name, Language: cmp.Or(spec.Language, kernelLanguage), Cwd: spec.Cwd,
		})
	})
}

// addKernel makes a kernel that was not there before. One whose asker does not hear of it is ended: nobody else knows its
// name, while one that takes another's place is there for whoever runs the next cell.
func (m *Manager) addKernel(ctx context.Context, e *entry, params agentapi.KernelStartParams) (_ agentapi.Kernel, err error) {
	client := m.client(e, nil)
	warm, err := m.bearKernel(ctx, client, e.id, params)
	if err != nil {
		return agentapi.Kernel{}, err
	}
	defer func() {
		if err != nil {
			endKernel(ctx, client, params.Kernel)
		}
	}()
	k, err := m.awaitKernel(ctx, client, e.id, params, warm)
	if err == nil && ctx.Err() != nil { // the answer and the caller's leaving have crossed
		return agentapi.Kernel{}, waitError(ctx, "kernel "+params.Kernel)
	}
	return k, err
}

// RestartKernel replaces a kernel, living or dead, by a fresh one.
func (m *Manager) RestartKernel(ctx context.Context, p auth.Principal, id, name string) (agentapi.Kernel, error) {
	return m.kernel(ctx, p, id, name, func(e *entry) (agentapi.Kernel, error) {
		old, err := m.placeForKernel(ctx, e, name)
		if err != nil {
			return agentapi.Kernel{}, err
		}
		if err := m.client(e, nil).KernelStop(ctx, agentapi.KernelParams{Kernel: name}); err != nil && !fault.Is(err, fault.Gone) {
			return agentapi.Kernel{}, err
		}
		return m.makeKernel(ctx, m.client(e, nil), e.id, m.like(old, name))
	})
}

// MoveKernel gives a kernel another working directory, which also the kernel has that takes its place one day. One that is
// not there is made.
func (m *Manager) MoveKernel(ctx context.Context, p auth.Principal, id, name, cwd string) (agentapi.Kernel, error) {
	return m.kernel(ctx, p, id, name, func(e *entry) (agentapi.Kernel, error) {
		old, err := m.placeForKernel(ctx, e, name)
		if err != nil {
			return agentapi.Kernel{}, err
		}
		if old == nil || old.State == agentapi.KernelDead {
			return m.makeKernel(ctx, m.client(e, nil), e.id, agentapi.KernelStartParams{Kernel: name, Language: kernelLanguage, Cwd: cwd})
		}
		return moveKernel(ctx, m.client(e, nil), name, cwd)
	})
}

// StopKernel ends a kernel with everything it started.
func (m *Manager) StopKernel(ctx context.Context, p auth.Principal, id, name string) error {
	_, err := m.kernel(ctx, p, id, name, func(e *entry) (agentapi.Kernel, error) {
		return agentapi.Kernel{}, m.client(e, nil).KernelStop(ctx, agentapi.KernelParams{Kernel: name})
	})
	return err
}

// kernel does something to a sandbox's kernels while nobody else does.
func (m *Manager) kernel(ctx context.Context, p auth.Principal, id, name string, do func(*entry) (agentapi.Kernel, error)) (agentapi.Kernel, error) {
	e, err := m.readyFor(ctx, p, id, checkKernel(name))
	if err != nil {
		return agentapi.Kernel{}, err
	}
	defer m.release(e)
	unlock, err := e.lockKernels(ctx)
	if err != nil {
		return agentapi.Kernel{}, err
	}
	defer unlock()
	k, err := do(e)
	if err != nil {
		return agentapi.Kernel{}, m.explainBreak(ctx, e, err)
	}
	return k, nil
}

// replaceKernel makes a new kernel for one that is gone, unless another run has just done so. Nothing is lost where there
// never was one: a sandbox of an image has no kernel before its first cell.
func (m *Manager) replaceKernel(ctx context.Context, e *entry, name string) (lost bool, err error) {
	unlock, err := e.lockKernels(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	old, err := m.placeForKernel(ctx, e, name)
	if old == nil && name != agentapi.DefaultKernel && (err == nil || fault.Is(err, fault.Exhausted)) {
		return false, fault.New(fault.NotFound, "sandbox %s has no kernel %q", e.id, name)
	}
	if err != nil || old != nil && old.State != agentapi.KernelDead {
		return true, err
	}
	_, err = m.makeKernel(ctx, m.client(e, nil), e.id, m.like(old, name))
	return old != nil, err
}

// placeForKernel returns the kernel that has a name, living or dead, or nil. It fails with
// fault.Exhausted, and still returns the kernel, if a living one would be one too many.
//
// Callers hold the lock of the sandbox's kernels, so that two of them do not take the last place.
func (m *Manager) placeForKernel(ctx context.Context, e *entry, name string) (*agentapi.Kernel, error) {
	kernels, err := m.client(e, nil).Kernels(ctx)
	if err != nil {
		return nil, err
	}
	var old *agentapi.Kernel
	living := 0
	for i, k := range kernels {
		if k.Name == name {
			old = &kernels[i]
		} else if k.State != agentapi.KernelDead {
			living++
		}
	}
	if living >= MaxKernels {
		return old, fault.New(fault.Exhausted, "a sandbox has at most %d kernels; end one first", MaxKernels)
	}
	return old, nil
}

// like asks for a kernel that takes the place of another.
func (m *Manager) like(old *agentapi.Kernel, name string) agentapi.KernelStartParams {
	params := agentapi.KernelStartParams{Kernel: name, Language: kernelLanguage}
	if old != nil {
		params.Language, params.Cwd = cmp.Or(old.Language, kernelLanguage), old.Cwd
	}
	return params
}

// makeKernel makes a kernel and returns it when it takes cells.
func (m *Manager) makeKernel(ctx context.Context, client *agentapi.Client, id string, params agentapi.KernelStartParams) (agentapi.Kernel, error) {
	warm, err := m.bearKernel(ctx, client, id, params)
	if err != nil {
		return agentapi.Kernel{}, err
	}
	return m.awaitKernel(ctx, client, id, params, warm)
}

// bearKernel asks the driver for a warm kernel and the agent for a cold one where there is none. It does so to the end
// although its caller may have left: whether there is a kernel now would be known to nobody otherwise.
func (m *Manager) bearKernel(ctx context.Context, client *agentapi.Client, id string, params agentapi.KernelStartParams) (warm bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	warm = params.Language == kernelLanguage && m.driver.Caps().WarmKernels
	if warm {
		err = m.driver.Kernel(ctx, id, params.Kernel)
	}
	if !warm || fault.Is(err, fault.Unsupported) {
		warm = false
		_, err = client.KernelStart(ctx, params)
	}
	if err != nil {
		return false, fmt.Errorf("start kernel %s in sandbox %s: %w", params.Kernel, id, err)
	}
	return warm, nil
}

// awaitKernel returns a kernel when it takes cells where it was asked to be.
func (m *Manager) awaitKernel(ctx context.Context, client *agentapi.Client, id string, params agentapi.KernelStartParams, warm bool) (agentapi.Kernel, error) {
	name := params.Kernel
	k, err := client.KernelWait(ctx, agentapi.KernelParams{Kernel: name})
	if err != nil {
		return agentapi.Kernel{}, fmt.Errorf("wait for kernel %s in sandbox %s: %w", name, id, err)
	}
	if k.State == agentapi.KernelDead {
		return agentapi.Kernel{}, fault.New(fault.Unavailable, "kernel %q died while it started: %s", name, k.Message)
	}
	if warm && params.Cwd != "" && params.Cwd != k.Cwd {
		return moveKernel(ctx, client, name, params.Cwd)
	}
	return k, nil
}

// endKernel ends a kernel that is not what was asked for. The caller's context may be what failed; the error that is told
// says why there is no kernel.
func endKernel(ctx context.Context, client *agentapi.Client, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	_ = client.KernelStop(ctx, agentapi.KernelParams{Kernel: name})
}

// moveKernel gives a warm kernel a working directory of its own: it was born in the sandbox's. One that cannot go there is
// ended.
func moveKernel(ctx context.Context, client *agentapi.Client, name, cwd string) (_ agentapi.Kernel, err error) {
	defer func() {
		if err != nil {
			endKernel(ctx, client, name)
		}
	}()
	path, err := json.Marshal(cwd) // JSON's strings are Python's
	if err != nil {
		return agentapi.Kernel{}, fault.Wrap(fault.Invalid, err, "working directory %.200q", cwd)
	}
	stream, err := client.Run(ctx, agentapi.RunParams{Kernel: name, Code: "__import__('os').chdir(" + string(path) + ")", Silent: true})
	if err != nil {
		return agentapi.Kernel{}, err
	}
	for event, eventErr := range stream.Events() {
		if err = eventErr; err == nil && event.Type == agentapi.EventError {
			err = fault.New(fault.Invalid, "working directory %.200q: %s", cwd, event.Error.Value)
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		return agentapi.Kernel{}, err
	}
	return client.KernelWait(ctx, agentapi.KernelParams{Kernel: name, Cwd: cwd})
}

func (e *entry) lockKernels(ctx context.Context) (unlock func(), err error) {
	select {
	case e.kernels <- struct{}{}:
		return func() { <-e.kernels }, nil
	case <-ctx.Done():
		return nil, waitError(ctx, "another kernel of sandbox "+e.id)
	}
}

// readyFor returns a sandbox that is running, or was paused and has been resumed, and counts as used until release; bad, if any, is why the request itself
// is refused.
func (m *Manager) readyFor(ctx context.Context, p auth.Principal, id string, bad error) (*entry, error) {
	if bad != nil {
		return nil, bad
	}
	e, err := m.usable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	if err := m.use(ctx, e); err != nil {
		return nil, err
	}
	return e, nil
}

func (m *Manager) release(e *entry) {
	if e.release() {
		m.clock.update(e)
	}
}

// client dials through the Manager; closed, if any, is called when a connection is.
func (m *Manager) client(e *entry, closed func()) *agentapi.Client {
	return m.limitedClient(e, m.operations, closed)
}

// limitedClient is client under a quota of the tenant's.
func (m *Manager) limitedClient(e *entry, quota *operationQuota, closed func()) *agentapi.Client {
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		if !quota.acquire(e.tenant) {
			return nil, quota.limitError()
		}
		if err := m.use(ctx, e); err != nil {
			quota.release(e.tenant)
			return nil, err
		}
		conn, err := m.driver.Dial(ctx, e.id)
		if err != nil {
			quota.release(e.tenant)
			m.release(e)
			return nil, m.whyGone(ctx, e, fmt.Errorf("dial sandbox %s: %w", e.id, err))
		}
		stay := context.AfterFunc(e.here, func() { conn.Close() })
		return &usedConn{Conn: conn, done: sync.OnceFunc(func() {
			stay()
			quota.release(e.tenant)
			m.release(e)
			if closed != nil {
				closed()
			}
		})}, nil
	})
}

// direct dials past the Manager's own account of the sandbox: for what the Manager does to one between two states, while it
// holds the lock of changes.
func (m *Manager) direct(e *entry) *agentapi.Client {
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return m.driver.Dial(ctx, e.id) })
}

// usedConn counts as use of its sandbox until it is closed.
type usedConn struct {
	net.Conn
	done func()
}

func (c *usedConn) Close() error {
	defer c.done()
	return c.Conn.Close()
}

// Explain turns the error of a stream that broke into why its sandbox ended, if it has; another error stays as it is.
func (m *Manager) Explain(ctx context.Context, p auth.Principal, id string, err error) error {
	if !fault.Is(err, fault.Unavailable) || errors.Is(err, ErrStoreLate) {
		return err
	}
	if e := m.find(p, id); e != nil {
		return m.whyGone(ctx, e, err)
	}
	sb, storeErr := m.stored(ctx, p, id)
	switch {
	case storeErr != nil:
		return err
	case sb.State == StateEnded:
		return goneError(sb)
	case m.cfg.Server != "":
		return fault.Wrap(fault.Unavailable, ErrMoved, "sandbox %s was taken over by another server; try again", id)
	}
	return err
}

func (m *Manager) explainBreak(ctx context.Context, e *entry, err error) error {
	if !fault.Is(err, fault.Unavailable) {
		return err
	}
	return m.whyGone(ctx, e, err)
}

// whyGone waits for the news of a sandbox's end when driver or connection say that it is not there.
func (m *Manager) whyGone(ctx context.Context, e *entry, err error) error {
	switch fault.KindOf(err) {
	case fault.NotFound, fault.Gone, fault.Unavailable:
	case fault.Internal, fault.Invalid, fault.Denied, fault.Unauthed, fault.Conflict, fault.Exhausted, fault.DiskFull, fault.Timeout, fault.Unsupported:
		return err
	}
	if ctx.Err() != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, endNews)
	defer cancel()
	select {
	case <-e.ended:
	case <-ctx.Done():
	}
	if sb := e.snapshot(); !sb.State.usable() {
		return goneError(sb)
	}
	if fault.Is(err, fault.Unavailable) {
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "sandbox %s does not answer", e.id)
}
