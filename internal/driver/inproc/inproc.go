// Package inproc is the driver that everybody tests with: a real agent in a goroutine per sandbox, and no isolation.
// It knows nothing of namespaces or containers and must never serve anybody's code but our own tests'.
package inproc

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Config says where sandboxes live.
type Config struct {
	Dir    string // homes of sandboxes; empty: a temporary directory that Close removes
	Kernel string // path of kernel.py; empty: sandboxes have no kernel
}

// Driver implements sandbox.Driver.
type Driver struct {
	cfg  Config
	temp bool

	mu      sync.Mutex
	closed  bool
	living  map[string]*living
	ended   []sandbox.Ended // until Forget
	changed chan struct{}   // closed and replaced when ended grows
}

// living is one sandbox. What changes is guarded by the driver's mu.
type living struct {
	req   sandbox.StartRequest
	home  string
	start time.Time
	gone  chan struct{} // closed when nothing of it is left

	agent *agent.Agent
	timer *time.Timer
	ready bool
	cause sandbox.Cause // set by whoever ends it first
}

var _ sandbox.Driver = (*Driver)(nil)

// New makes a driver without sandboxes.
func New(cfg Config) (*Driver, error) {
	d := &Driver{cfg: cfg, living: map[string]*living{}, changed: make(chan struct{})}
	if cfg.Dir == "" {
		dir, err := os.MkdirTemp("", "cove-inproc-")
		if err != nil {
			return nil, err
		}
		d.cfg.Dir, d.temp = dir, true
	}
	return d, nil
}

// Caps says that there is no isolation.
func (d *Driver) Caps() sandbox.Caps {
	return sandbox.Caps{Name: "inproc", Isolation: "none", Disk: "none"}
}

// Prepare has nothing to make ready.
func (d *Driver) Prepare(context.Context, string, *template.Template) error { return nil }

// Start makes a home and an agent that lives in it.
func (d *Driver) Start(ctx context.Context, req sandbox.StartRequest) error {
	if req.ID == "" || filepath.Base(req.ID) != req.ID {
		return fault.New(fault.Invalid, "%q cannot name a sandbox", req.ID)
	}
	s, err := d.reserve(req)
	if err != nil {
		return err
	}
	if err := d.bring(ctx, s); err != nil {
		d.mu.Lock()
		delete(d.living, req.ID)
		d.mu.Unlock()
		s.destroy()
		close(s.gone)
		return err
	}
	return nil
}

// reserve takes the name, so that two starts of one sandbox cannot both succeed.
func (d *Driver) reserve(req sandbox.StartRequest) (*living, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fault.New(fault.Unavailable, "the driver is closed")
	}
	if _, ok := d.living[req.ID]; ok {
		return nil, fault.New(fault.Conflict, "the sandbox %s exists", req.ID)
	}
	s := &living{req: req, home: filepath.Join(d.cfg.Dir, req.ID), start: time.Now(), gone: make(chan struct{})}
	d.living[req.ID] = s
	return s, nil
}

func (d *Driver) bring(ctx context.Context, s *living) error {
	if err := os.MkdirAll(s.home, 0o755); err != nil {
		return fault.Wrap(fault.Internal, err, "start sandbox %s: its home cannot be made", s.req.ID)
	}
	boot := agentapi.Boot{ID: s.req.ID, Workdir: s.home, Env: map[string]string{"PATH": os.Getenv("PATH"), "HOME": s.home}, Kernel: d.cfg.Kernel}
	python := false
	if t := s.req.Template; t != nil {
		maps.Copy(boot.Env, t.Env)
		boot.Python = t.Python.Executable
		python = boot.Python != "" && boot.Kernel != ""
	}
	maps.Copy(boot.Env, s.req.Env)
	a, err := agent.New(agent.Config{Boot: boot, Home: s.home})
	if err != nil {
		return err
	}
	d.mu.Lock()
	s.agent = a
	d.mu.Unlock()
	if python {
		if err := startKernel(ctx, agentapi.NewClient(s.dial)); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.cause != "" {
		return fault.New(fault.Gone, "the sandbox %s was stopped while it started", s.req.ID)
	}
	s.ready = true
	d.schedule(s, s.req.Deadline)
	return nil
}

func startKernel(ctx context.Context, c *agentapi.Client) error {
	if _, err := c.KernelStart(ctx, agentapi.KernelStartParams{Kernel: agentapi.DefaultKernel}); err != nil {
		return err
	}
	k, err := c.KernelWait(ctx, agentapi.KernelParams{Kernel: agentapi.DefaultKernel})
	if err == nil && k.State == agentapi.KernelDead {
		err = fault.New(fault.Internal, "the kernel did not start: %s", k.Message)
	}
	return err
}

// schedule sets the deadline; mu is held.
func (d *Driver) schedule(s *living, deadline time.Time) {
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	s.req.Deadline = deadline
	if !deadline.IsZero() {
		s.timer = time.AfterFunc(time.Until(deadline), func() { d.end(s, sandbox.CauseExpired) })
	}
}

func (s *living) dial(context.Context) (net.Conn, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fault.Wrap(fault.Exhausted, err, "no connection to the sandbox can be made")
	}
	ours, err := agentapi.DescriptorConn(fds[0])
	if err != nil {
		syscall.Close(fds[1])
		return nil, err
	}
	theirs, err := agentapi.DescriptorConn(fds[1])
	if err != nil {
		ours.Close()
		return nil, err
	}
	go s.agent.HandleConn(theirs) // the agent's own: its Close waits for it
	return ours, nil
}

// Dial opens a connection to a sandbox's agent.
func (d *Driver) Dial(ctx context.Context, id string) (net.Conn, error) {
	s, err := d.find(id)
	if err != nil {
		return nil, err
	}
	return s.dial(ctx)
}

func (d *Driver) find(id string) (*living, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s, ok := d.living[id]
	if !ok || !s.ready || s.cause != "" {
		return nil, fault.New(fault.NotFound, "there is no sandbox %s", id)
	}
	return s, nil
}

// Kernel is not ours to give: the agent starts kernels by exec.
func (d *Driver) Kernel(_ context.Context, id, _ string) error {
	if _, err := d.find(id); err != nil {
		return err
	}
	return fault.New(fault.Unsupported, "this driver has no warm kernels")
}

// Change moves the deadline; network and limits mean nothing here.
func (d *Driver) Change(_ context.Context, id string, change sandbox.Change) error {
	s, err := d.find(id)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if change.Deadline != nil {
		d.schedule(s, *change.Deadline)
	}
	return nil
}

// Usage knows nothing: a goroutine has no accounting of its own.
func (d *Driver) Usage(_ context.Context, id string) (sandbox.Usage, error) {
	_, err := d.find(id)
	return sandbox.Usage{}, err
}

// Stop ends a sandbox and returns when nothing of it is left. One that is not there has been stopped.
func (d *Driver) Stop(_ context.Context, id string, cause sandbox.Cause) error {
	d.mu.Lock()
	s, ok := d.living[id]
	d.mu.Unlock()
	if ok {
		d.end(s, cause)
	}
	return nil
}

// end ends a sandbox once, whoever asks first, and tells it.
func (d *Driver) end(s *living, cause sandbox.Cause) {
	d.mu.Lock()
	first := s.cause == ""
	if first {
		s.cause = cause
	}
	if !first || !s.ready { // one that still starts is undone by its Start
		d.mu.Unlock()
		<-s.gone
		return
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	d.mu.Unlock()

	s.destroy()
	d.mu.Lock()
	delete(d.living, s.req.ID)
	d.ended = append(d.ended, sandbox.Ended{ID: s.req.ID, Cause: cause, At: time.Now()})
	close(d.changed)
	d.changed = make(chan struct{})
	d.mu.Unlock()
	close(s.gone)
}

func (s *living) destroy() {
	if s.agent != nil {
		s.agent.Close()
	}
	os.RemoveAll(s.home)
}

// List lists what lives.
func (d *Driver) List(context.Context) ([]sandbox.Instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := []sandbox.Instance{}
	for _, s := range d.living {
		i := sandbox.Instance{ID: s.req.ID, Tenant: s.req.Tenant, Deadline: s.req.Deadline, Started: s.start}
		if s.req.Template != nil {
			i.Template = s.req.Template.Name
		}
		list = append(list, i)
	}
	slices.SortFunc(list, func(x, y sandbox.Instance) int { return cmp.Compare(x.ID, y.ID) })
	return list, nil
}

// Ended yields ends until ctx is done: first those that nobody has asked to forget.
func (d *Driver) Ended(ctx context.Context) iter.Seq2[sandbox.Ended, error] {
	return func(yield func(sandbox.Ended, error) bool) {
		told := map[string]time.Time{}
		for {
			d.mu.Lock()
			var news []sandbox.Ended
			for _, e := range d.ended {
				if at, ok := told[e.ID]; !ok || !at.Equal(e.At) {
					news = append(news, e)
				}
			}
			changed, closed := d.changed, d.closed
			d.mu.Unlock()
			for _, e := range news {
				told[e.ID] = e.At
				if !yield(e, nil) {
					return
				}
			}
			if closed {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}

// Forget drops ends that somebody has recorded.
func (d *Driver) Forget(_ context.Context, ids ...string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = slices.DeleteFunc(d.ended, func(e sandbox.Ended) bool { return slices.Contains(ids, e.ID) })
	return nil
}

// Close ends every sandbox: they live in this process.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.closed = true
	all := slices.Collect(maps.Values(d.living))
	d.mu.Unlock()
	for _, s := range all {
		d.end(s, sandbox.CauseShutdown)
	}
	d.mu.Lock()
	close(d.changed)
	d.changed = make(chan struct{})
	d.mu.Unlock()
	if d.temp {
		return os.RemoveAll(d.cfg.Dir)
	}
	return nil
}

var errIsolation = fault.New(fault.Unsupported, "the in-process driver has nothing to copy or stop: use the native driver")

// Fork is not possible here.
func (d *Driver) Fork(context.Context, sandbox.ForkRequest) (sandbox.Forked, error) {
	return sandbox.Forked{}, errIsolation
}

// Pause is not possible here.
func (d *Driver) Pause(context.Context, string) error { return errIsolation }

// Resume is not possible here.
func (d *Driver) Resume(context.Context, string) error { return errIsolation }

// Snapshot is not possible here.
func (d *Driver) Snapshot(context.Context, sandbox.SnapshotRequest) (*template.Template, error) {
	return nil, errIsolation
}

// RemoveTemplate is not possible here.
func (d *Driver) RemoveTemplate(context.Context, string, string) error { return errIsolation }
