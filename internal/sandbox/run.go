package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
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
const endNews = time.Second

// kernelLanguage is what every kernel speaks.
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
			if err := m.replaceKernel(ctx, e, params.Kernel); err != nil {
				yield(agentapi.Event{}, err)
				return
			}
			notice := fmt.Sprintf("kernel %q was gone and has been started anew; its variables are lost", params.Kernel)
			if !yield(agentapi.Event{Type: agentapi.EventNotice, Time: time.Now(), Message: notice}, nil) {
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
	sb, begun := e.snapshot(), time.Now()
	m.observer.RunStarted(sb, RunCommand)
	var outcome atomic.Value // of agentapi.Outcome; nothing when the caller left before the end
	ended := sync.OnceFunc(func() {
		o, _ := outcome.Load().(agentapi.Outcome)
		m.observer.RunEnded(sb, RunCommand, o, time.Since(begun))
	})
	stream, err := m.client(e, ended).Exec(ctx, params)
	if err != nil {
		ended()
		return nil, m.explainBreak(ctx, e, err)
	}
	stream.OnEnd(func(end agentapi.End) { outcome.Store(end.Outcome) })
	return stream, nil
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
	Language string // default, and all there is: python
	Cwd      string // default: the sandbox's working directory
}

// StartKernel puts another kernel into a sandbox and returns when it takes cells. With a working directory of its own
// it is started by exec: a warm one is born in the sandbox's.
func (m *Manager) StartKernel(ctx context.Context, p auth.Principal, id string, spec KernelSpec) (agentapi.Kernel, error) {
	if spec.Language != "" && spec.Language != kernelLanguage {
		return agentapi.Kernel{}, fault.New(fault.Unsupported, "kernels speak %s; run %.40q as a command", kernelLanguage, spec.Language)
	}
	name := cmp.Or(spec.Name, "kernel-"+strings.ToLower(rand.Text()[:12]))
	return m.kernel(ctx, p, id, name, func(e *entry) (agentapi.Kernel, error) {
		lives, err := m.kernelLives(ctx, e, name)
		if err != nil {
			return agentapi.Kernel{}, err
		}
		if lives {
			return agentapi.Kernel{}, fault.New(fault.Conflict, "kernel %q is there already", name)
		}
		return m.makeKernel(ctx, e, name, spec.Cwd)
	})
}

// RestartKernel replaces a kernel, living or dead, by a fresh one.
func (m *Manager) RestartKernel(ctx context.Context, p auth.Principal, id, name string) (agentapi.Kernel, error) {
	return m.kernel(ctx, p, id, name, func(e *entry) (agentapi.Kernel, error) {
		if err := m.client(e, nil).KernelStop(ctx, agentapi.KernelParams{Kernel: name}); err != nil && !fault.Is(err, fault.Gone) {
			return agentapi.Kernel{}, err
		}
		return m.makeKernel(ctx, e, name, "")
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

// replaceKernel makes a new kernel for one that is gone, unless another run has just done so.
func (m *Manager) replaceKernel(ctx context.Context, e *entry, name string) error {
	unlock, err := e.lockKernels(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	lives, err := m.kernelLives(ctx, e, name)
	if err != nil || lives {
		return err
	}
	_, err = m.makeKernel(ctx, e, name, "")
	return err
}

func (m *Manager) kernelLives(ctx context.Context, e *entry, name string) (bool, error) {
	kernels, err := m.client(e, nil).Kernels(ctx)
	if err != nil {
		return false, err
	}
	for _, k := range kernels {
		if k.Name == name && k.State != agentapi.KernelDead {
			return true, nil
		}
	}
	return false, nil
}

// makeKernel asks the driver for a warm kernel and the agent for a cold one where there is none.
func (m *Manager) makeKernel(ctx context.Context, e *entry, name, cwd string) (agentapi.Kernel, error) {
	client := m.client(e, nil)
	warm := cwd == "" && m.driver.Caps().WarmKernels
	var err error
	if warm {
		err = m.driver.Kernel(ctx, e.id, name)
	}
	if !warm || fault.Is(err, fault.Unsupported) {
		_, err = client.KernelStart(ctx, agentapi.KernelStartParams{Kernel: name, Language: kernelLanguage, Cwd: cwd})
	}
	if err != nil {
		return agentapi.Kernel{}, fmt.Errorf("start kernel %s in sandbox %s: %w", name, e.id, err)
	}
	k, err := client.KernelWait(ctx, agentapi.KernelParams{Kernel: name})
	if err != nil {
		return agentapi.Kernel{}, fmt.Errorf("wait for kernel %s in sandbox %s: %w", name, e.id, err)
	}
	if k.State == agentapi.KernelDead {
		return agentapi.Kernel{}, fault.New(fault.Unavailable, "kernel %q died while it started: %s", name, k.Message)
	}
	return k, nil
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
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		if err := m.use(ctx, e); err != nil {
			return nil, err
		}
		conn, err := m.driver.Dial(ctx, e.id)
		if err != nil {
			m.release(e)
			return nil, m.whyGone(ctx, e, fmt.Errorf("dial sandbox %s: %w", e.id, err))
		}
		return &usedConn{Conn: conn, done: sync.OnceFunc(func() {
			m.release(e)
			if closed != nil {
				closed()
			}
		})}, nil
	})
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
	if !fault.Is(err, fault.Unavailable) {
		return err
	}
	if e := m.find(p, id); e != nil {
		return m.whyGone(ctx, e, err)
	}
	if sb, storeErr := m.stored(ctx, p, id); storeErr == nil && sb.State == StateEnded {
		return goneError(sb)
	}
	return err
}

func (m *Manager) explainBreak(ctx context.Context, e *entry, err error) error {
	if !fault.Is(err, fault.Unavailable) {
		return err
	}
	return m.whyGone(ctx, e, err)
}

// whyGone waits a moment for the news of a sandbox's end when driver or connection say that it is not there.
func (m *Manager) whyGone(ctx context.Context, e *entry, err error) error {
	switch fault.KindOf(err) {
	case fault.NotFound, fault.Gone, fault.Unavailable:
	case fault.Internal, fault.Invalid, fault.Denied, fault.Unauthed, fault.Conflict, fault.Exhausted, fault.Timeout, fault.Unsupported:
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
