package pod

import (
	"cmp"
	"context"
	"maps"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
)

// life is the sandbox that this Pod has become. A Pod becomes one once, and never another's.
type life struct {
	boot  agentapi.Boot
	begun chan struct{} // closed when agent, answer and err say what came of it

	agent  *agent.Agent
	answer podapi.Booted
	err    error

	timer *time.Timer // of its deadline; guarded by the server's mu
}

// boot makes a sandbox of this Pod. A second order for the same one waits for the first and gets its answer: a server may have lost it.
func (s *server) boot(ctx context.Context, o podapi.Order) (podapi.Booted, error) {
	if o.Boot == nil || o.Boot.ID == "" {
		return podapi.Booted{}, fault.New(fault.Invalid, "a boot names its sandbox")
	}
	s.mu.Lock()
	l, first := s.life, s.life == nil
	if first {
		l = &life{boot: *o.Boot, begun: make(chan struct{})}
		s.life = l
	}
	s.mu.Unlock()
	if l.boot.ID != o.Boot.ID {
		return podapi.Booted{}, fault.New(fault.Conflict, "this Pod is another sandbox")
	}
	if !first {
		select {
		case <-l.begun:
			return l.answer, l.err
		case <-ctx.Done():
			return podapi.Booted{}, fault.New(fault.Timeout, "the sandbox is still starting")
		}
	}
	defer close(l.begun)
	l.err = s.begin(ctx, l, o.Left)
	return l.answer, l.err
}

func (s *server) begin(ctx context.Context, l *life, left time.Duration) (err error) {
	l.boot.Python, l.boot.Kernel = s.settings.Python, ""
	if l.boot.Python != "" || s.settings.Foreign { // whether the image has an interpreter is seen when somebody wants a kernel
		l.boot.Kernel = filepath.Join(s.settings.Dir, "kernel", "kernel.py")
	}
	if os.Getuid() == 0 {
		l.boot.User = cmp.Or(s.settings.User, l.boot.User)
	} else {
		l.boot.User, l.boot.Sudo = cmp.Or(l.boot.User, "user"), false
	}
	l.agent, err = agent.New(agent.Config{
		Boot: l.boot, PID1: os.Getpid() == 1, Home: s.home(), Shortages: func() int { return usage(cgroupDir).OOMKills },
	})
	if err != nil {
		return err
	}
	if err := s.deadline(left); err != nil {
		return err
	}
	if l.boot.Python == "" {
		return nil
	}
	return s.firstKernel(ctx, l)
}

// home is where the user of a hardened Pod lives. In a tenant's image that is where the image says, if the user can write there.
func (s *server) home() string {
	if s.settings.Foreign {
		if own := homeOf(os.Getuid()); own != "" && syscall.Access(own, accessWrite) == nil {
			return ""
		}
	}
	return s.settings.Home
}

const accessWrite = 2

// firstKernel gives a new sandbox its default kernel and returns when that takes cells.
func (s *server) firstKernel(ctx context.Context, l *life) error {
	client := agentapi.NewClient(l.dial)
	params := agentapi.KernelParams{Kernel: agentapi.DefaultKernel}
	err := s.bear(ctx, l, agentapi.DefaultKernel)
	l.answer.Warm = err == nil
	if err != nil { // no zygote, or one that has died: slower, and otherwise the same
		if _, err := client.KernelStart(ctx, agentapi.KernelStartParams{Kernel: agentapi.DefaultKernel}); err != nil {
			return err
		}
	}
	k, err := client.KernelWait(ctx, params)
	if err == nil && k.State == agentapi.KernelDead {
		err = fault.New(fault.Internal, "the kernel did not start: %s", k.Message)
	}
	l.answer.Kernel = err == nil
	return err
}

// kernel puts a fresh kernel of that name into the sandbox.
func (s *server) kernel(ctx context.Context, name string) error {
	l, err := s.living(ctx)
	if err != nil {
		return err
	}
	if s.zygote == nil {
		return fault.New(fault.Unsupported, "the template has no warm kernels")
	}
	return s.bear(ctx, l, cmp.Or(name, agentapi.DefaultKernel))
}

// bear hands a kernel to the agent: the one that waits, or a new one.
func (s *server) bear(ctx context.Context, l *life, name string) error {
	if s.zygote == nil {
		return fault.New(fault.Unsupported, "the template has no warm kernels")
	}
	s.mu.Lock()
	n := s.spare
	s.spare = nil
	s.mu.Unlock()
	env, err := s.environment(ctx, l)
	if err != nil {
		if n != nil {
			n.close()
		}
		return err
	}
	birth := agentapi.KernelBirth{Env: env, OpenFiles: l.boot.OpenFiles}
	if n != nil && n.settle(l.agent, name, birth) == nil {
		return nil
	}
	if n, err = s.zygote.fork(ctx, false); err != nil {
		return fault.Wrap(fault.Unsupported, err, "the Pod has no warm kernel any more")
	}
	return n.settle(l.agent, name, birth)
}

// environment is what a kernel sees, which is what commands see.
func (s *server) environment(ctx context.Context, l *life) (map[string]string, error) {
	who, err := agentapi.NewClient(l.dial).Account(ctx, agentapi.AccountParams{})
	if err != nil {
		return nil, err
	}
	env := map[string]string{
		"HOME": who.Home, "USER": who.Name, "LOGNAME": who.Name, "SHELL": "/bin/sh", "LANG": "C.UTF-8",
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	}
	maps.Copy(env, l.boot.Env)
	return env, nil
}

// deadline sets when the sandbox ends by itself, whether or not there is still a server.
func (s *server) deadline(left time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life == nil {
		return fault.New(fault.Conflict, "this Pod is not a sandbox yet")
	}
	if s.life.timer != nil {
		s.life.timer.Stop()
		s.life.timer = nil
	}
	if left > 0 {
		s.life.timer = time.AfterFunc(left, func() { s.exit(podapi.ExitExpired) })
	}
	return nil
}

func (s *server) status() podapi.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := podapi.Status{Warm: s.zygote != nil && !s.zygote.dead()}
	if s.life != nil {
		status.Sandbox = s.life.boot.ID
	}
	return status
}

// agent is who serves operations; nil until there is a sandbox.
func (s *server) agent() *agent.Agent {
	s.mu.Lock()
	l := s.life
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	select {
	case <-l.begun:
		return l.agent
	default:
		return nil
	}
}

func (s *server) living(ctx context.Context) (*life, error) {
	s.mu.Lock()
	l := s.life
	s.mu.Unlock()
	if l == nil {
		return nil, fault.New(fault.Conflict, "this Pod is not a sandbox yet")
	}
	select {
	case <-l.begun:
		return l, l.err
	case <-ctx.Done():
		return nil, fault.New(fault.Timeout, "the sandbox is still starting")
	}
}

// dial connects to the agent without leaving the process.
func (l *life) dial(context.Context) (net.Conn, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fault.Wrap(fault.Exhausted, err, "no connection to the agent can be made")
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
	go l.agent.HandleConn(theirs) // the agent's own: its Close waits for it
	return ours, nil
}
