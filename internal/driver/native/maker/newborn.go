package maker

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// newborn is a kernel in its sandbox that waits on its socket to be told whose it is. It may wait in the pool, forked
// ahead: then a create costs what a message costs.
type newborn struct {
	token  string
	socket *os.File // ours
	out    *os.File // read ends
	errs   *os.File
	pidfd  *os.File
	exit   chan exit // told once
	zygote *zygote
	anchor *trace.Process    // nil: it cannot be forked
	expect map[string]string // the environment that it has prepared for; nil: none
}

func (n *newborn) ended(e exit) { n.exit <- e }

// end ends a kernel that nobody got: without its socket it goes by itself.
func (n *newborn) end() {
	if n.anchor != nil {
		n.anchor.Kill()
	}
	n.close()
}

func (n *newborn) close() { wire.CloseAll([]*os.File{n.socket, n.out, n.errs, n.pidfd}) }

// bear forks a kernel into a shell. A zygote that dies meanwhile is replaced once.
func (m *Maker) bear(ctx context.Context, p *pool, s *shell, ahead bool) (*newborn, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for attempt := 0; ; attempt++ {
		z, err := p.zygote(ctx)
		if err != nil {
			return nil, err
		}
		n, err := m.bearFrom(ctx, z, s, forkOrder(p.template, ahead))
		z.release()
		if !errors.Is(err, errZygoteDied) || attempt == 1 {
			return n, err
		}
	}
}

// forkOrder says who and where a kernel of a template is.
func forkOrder(t *template.Template, ahead bool) zygoteRequest {
	who := kernelAccount(t)
	return zygoteRequest{UID: who.uid, GID: who.gid, Groups: []int{who.gid}, Cwd: t.Workdir, Ahead: ahead}
}

// newNewborn makes a kernel's ends of everything; those that it will get are the caller's to close.
func newNewborn(z *zygote) (_ *newborn, theirs []*os.File, err error) {
	n := &newborn{token: rand.Text(), exit: make(chan exit, 1), zygote: z}
	socket, given, err := wire.Pair(unix.SOCK_STREAM)
	if err != nil {
		return nil, nil, err
	}
	n.socket, theirs = socket, append(theirs, given)
	for _, end := range []**os.File{&n.out, &n.errs} {
		r, w, err := wire.Pipe()
		if err != nil {
			n.close()
			wire.CloseAll(theirs)
			return nil, nil, err
		}
		*end, theirs = r, append(theirs, w)
	}
	return n, theirs, nil
}

func (m *Maker) bearFrom(ctx context.Context, z *zygote, s *shell, r zygoteRequest) (_ *newborn, err error) {
	n, theirs, err := newNewborn(z)
	if err != nil {
		return nil, err
	}
	defer wire.CloseAll(theirs)
	defer func() {
		if err != nil {
			n.end()
		}
	}()
	s.moving.RLock()
	defer s.moving.RUnlock()
	joiners := s.group.Joiners()
	if len(joiners) == 0 {
		return nil, errEnded
	}
	give := append(append(append([]*os.File{}, theirs...), s.pidfd), joiners...)
	r.Op, r.Token = "fork", n.token
	pidfds, err := z.fork(ctx, r, n.ended, give...)
	if err != nil {
		return nil, err
	}
	n.pidfd = pidfds[0]
	if len(pidfds) == 1 {
		return n, nil
	}
	// Before anybody's code can run in it.
	if n.anchor, err = z.holdAnchor(pidfds[1]); err != nil {
		return nil, err
	}
	s.holds(n.anchor)
	return n, nil
}

// settle tells a newborn who it is and hands it to the sandbox's agent under a name. Its descriptors are given away or
// closed, whatever happens.
func (m *Maker) settle(l *live, n *newborn, name string) (err error) {
	defer n.leave(&err)
	if _, err := n.begin(l); err != nil {
		return err
	}
	return m.hand(l, n, name, agentapi.Message{Type: agentapi.MessageKernel})
}

// settleWith is settle for the default kernel of an agent that begins with it and with a channel. It tells whether the kernel had
// nothing left to do.
func (m *Maker) settleWith(l *live, n *newborn, boot agentapi.Message, channel *os.File) (ready bool, err error) {
	defer n.leave(&err)
	if err := m.hand(l, n, agentapi.DefaultKernel, boot, channel); err != nil {
		return false, err
	}
	return n.begin(l) // last, because it wakes a process that may take the processor from whoever wakes it
}

// leave gives up our ends of a newborn, and the newborn where it could not be settled.
func (n *newborn) leave(err *error) {
	if *err != nil && n.anchor != nil {
		n.anchor.Kill()
	}
	n.close()
}

// begin tells a newborn who it is, and whether that is what it expected. What is this sandbox's alone goes by the kernel's own
// socket: the zygote's memory is every later child's.
func (n *newborn) begin(l *live) (same bool, err error) {
	birth := agentapi.KernelBirth{Env: l.kernelEnv(), OpenFiles: l.limits.OpenFiles}
	if n.expect != nil && maps.Equal(n.expect, birth.Env) {
		birth.Env, birth.Same = nil, true
	}
	return birth.Same, n.tell(birth)
}

// tellTime is how long a kernel or an agent may take to read what it is told.
const tellTime = 30 * time.Second

func (n *newborn) tell(birth agentapi.KernelBirth) error {
	if err := n.socket.SetWriteDeadline(time.Now().Add(tellTime)); err != nil {
		return err
	}
	err := agentapi.WriteJSON(n.socket, agentapi.FrameControl, birth)
	switch {
	case errors.Is(err, unix.EPIPE):
		return errNewbornDied
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Wrap(fault.Unavailable, err, "the kernel did not read its environment within %v: the host may be overloaded, try again", tellTime)
	case err != nil:
		return fault.Wrap(fault.Invalid, err, "the environment is too large")
	}
	return nil
}

// hand gives a newborn to the sandbox's agent in a message, and passes on how it ends.
func (m *Maker) hand(l *live, n *newborn, name string, in agentapi.Message, more ...*os.File) error {
	before := l.oomKills()
	in.Kernel = &agentapi.Adoption{Name: name, Token: n.token}
	if err := l.shell.tell(in, append([]*os.File{n.socket, n.out, n.errs, n.pidfd}, more...)...); err != nil {
		return err
	}
	l.keep(name, n)
	go func() { // ends with the kernel, or with the sandbox
		select {
		case e := <-n.exit:
			if n.anchor != nil {
				n.anchor.Kill()
				l.shell.awaitFreed(n.anchor)
			}
			m.kernelExit(l, n.token, before, e)
		case <-l.shell.done:
		}
	}()
	return nil
}

// prepare tells a newborn in the pool what most callers want, so that it need not be done while one waits.
func (n *newborn) prepare(t *template.Template) error {
	env := kernelEnv(t, t.Env)
	if err := n.tell(agentapi.KernelBirth{Env: env, Expected: true}); err != nil {
		return err
	}
	n.expect = env
	return nil
}

var errEnded = fault.New(fault.Gone, "the sandbox was ended while it was made")

var errNewbornDied = errors.New("the kernel that waited has died")

// fork gives a sandbox a kernel of that name: the one that waits in its shell, or a new one.
func (m *Maker) fork(ctx context.Context, l *live, name string) (token string, err error) {
	if n := l.shell.takeKernel(); n != nil {
		err := m.settle(l, n, name)
		if !errors.Is(err, errNewbornDied) {
			return n.token, err
		}
	}
	n, err := m.bear(ctx, l.pool, l.shell, false)
	if err != nil {
		return "", err
	}
	return n.token, m.settle(l, n, name)
}

func (l *live) kernelEnv() map[string]string { return kernelEnv(l.pool.template, l.env) }

// kernelEnv is the environment of a template's kernel: what every process has, and more.
func kernelEnv(t *template.Template, more map[string]string) map[string]string {
	who := kernelAccount(t)
	env := map[string]string{
		"HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": "/bin/bash", "LANG": "C.UTF-8",
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	}
	maps.Copy(env, more)
	return env
}
