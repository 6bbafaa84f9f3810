package agent

import (
	"encoding/json"
	"net"
	"path"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// SudoSocket is the abstract name of the sudo broker. Abstract names belong to a network namespace, so each sandbox has
// its own, and nobody inside can take it away.
const SudoSocket = "cove-sudo"

// maxSudo bounds commands at a time.
const maxSudo = 256

// hangupGrace is how long a command may take to end after SIGHUP, when the sudo that started it has
// died.
const hangupGrace = 20 * time.Second

// sudoRequest is what our sudo asks of the broker; its three standard descriptors come with the first byte.
type sudoRequest struct {
	Argv []string          `json:"argv"`
	Env  map[string]string `json:"env,omitempty"`
	Cwd  string            `json:"cwd,omitempty"`
	User string            `json:"user,omitempty"`
	Home bool              `json:"home,omitempty"` // start in the user's home
}

func (a *Agent) sudoName() string {
	if a.cfg.Sudo != "" {
		return a.cfg.Sudo
	}
	return SudoSocket
}

// listenSudo lets the default user become root without setuid programs: the sandbox runs with no_new_privs, and what
// root may do is bounded by the agent's own bounding set.
func (a *Agent) listenSudo() error {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + a.sudoName(), Net: "unix"})
	if err != nil {
		return fault.Wrap(fault.Internal, err, "sudo broker")
	}
	a.broker = ln
	return nil
}

// serveBroker answers those who ask for sudo. It is called when the agent knows whose it is: what they start has its limits.
func (a *Agent) serveBroker() {
	ln := a.broker
	if ln == nil {
		return
	}
	slots := make(chan struct{}, maxSudo)
	a.wg.Go(func() {
		for {
			conn, err := ln.AcceptUnix()
			if err != nil {
				return
			}
			select {
			case slots <- struct{}{}:
			default:
				conn.Close()
				continue
			}
			if !a.spawn(func() { defer func() { <-slots }(); a.serveSudo(conn) }) {
				conn.Close()
			}
		}
	})
}

func (a *Agent) serveSudo(conn *net.UnixConn) {
	l := newLink(conn)
	a.keep(conn)
	defer a.drop(conn)
	defer conn.Close()
	if err := a.mayBecomeRoot(conn); err != nil {
		l.refuse(err)
		return
	}
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	fds, err := agentapi.ReceiveDescriptors(conn, 3)
	if err != nil {
		return
	}
	f, err := l.in.Read()
	if err != nil {
		agentapi.CloseDescriptors(fds)
		return
	}
	conn.SetReadDeadline(time.Time{})
	var req sudoRequest
	if f.Kind != agentapi.FrameRequest || json.Unmarshal(f.Payload, &req) != nil {
		agentapi.CloseDescriptors(fds)
		l.refuse(fault.New(fault.Invalid, "not a sudo request"))
		return
	}
	s, err := a.startSudo(l, req, fds)
	agentapi.CloseDescriptors(fds)
	if err != nil {
		l.refuse(err)
		return
	}
	s.follow()
}

// mayBecomeRoot asks the kernel who is at the other end.
func (a *Agent) mayBecomeRoot(conn *net.UnixConn) error {
	u, err := a.user("")
	if err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *syscall.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) {
		cred, cerr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil || cerr != nil {
		return fault.New(fault.Denied, "who asks cannot be told")
	}
	if int(cred.Uid) != u.uid && cred.Uid != 0 {
		return fault.New(fault.Denied, "uid %d may not use sudo; only %s may", cred.Uid, u.name)
	}
	return nil
}

// sudoCommand is one command that runs on behalf of a sudo.
type sudoCommand struct {
	a    *Agent
	link *link
	pid  int
	tree tree
	done chan struct{}

	mu    sync.Mutex
	over  bool
	timer *time.Timer
}

func (a *Agent) startSudo(l *link, req sudoRequest, fds []int) (*sudoCommand, error) {
	name := req.User
	if name == "" {
		name = "root"
	}
	u, err := a.user(name)
	if err != nil {
		return nil, err
	}
	tag := newID("s")
	if outer := req.Env[runVariable]; outer != "" {
		tag = outer // what ends the run that called sudo ends this too
	}
	cwd := req.Cwd
	if req.Home || !path.IsAbs(cwd) {
		cwd = u.home
	}
	s := &sudoCommand{a: a, link: l, done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	pid, err := a.start(command{
		argv: req.Argv, env: req.Env, cwd: cwd, user: u, tag: tag,
		files: []uintptr{uintptr(fds[0]), uintptr(fds[1]), uintptr(fds[2])},
	}, s.onExit)
	if err != nil {
		return nil, err
	}
	s.pid = pid
	s.tree = tree{self: a.pid(), root: func() int {
		if a.reaper.alive(pid) {
			return pid
		}
		return 0
	}}
	return s, nil
}

func (s *sudoCommand) onExit(e exit) {
	end := agentapi.End{Outcome: agentapi.OutcomeOK, ExitCode: e.status.ExitStatus()}
	if e.status.Signaled() {
		end.ExitCode, end.Signal = -1, signalName(e.status.Signal())
	}
	s.mu.Lock()
	s.over = true
	if s.timer != nil {
		s.timer.Stop()
	}
	s.mu.Unlock()
	s.a.wg.Go(func() { defer close(s.done); s.link.end(end) })
}

// follow passes signals on. A caller that dies takes its command along: first politely, then surely.
func (s *sudoCommand) follow() {
	for {
		f, err := s.link.in.Read()
		if err != nil {
			break
		}
		var c agentapi.Control
		if f.Kind == agentapi.FrameControl && json.Unmarshal(f.Payload, &c) == nil {
			if sig, err := parseSignal(c.Signal); err == nil {
				s.signal(sig)
			}
		}
	}
	s.mu.Lock()
	if !s.over {
		_ = s.a.reaper.signal(s.pid, syscall.SIGHUP)
		s.timer = time.AfterFunc(hangupGrace, s.tree.kill)
	}
	s.mu.Unlock()
	s.a.mu.Lock()
	closing := s.a.closed
	s.a.mu.Unlock()
	if closing {
		s.tree.kill()
	}
	<-s.done
}

// signal passes one on, unless the command has ended. What a terminal sends goes to the command's whole group, as the terminal would have done.
func (s *sudoCommand) signal(sig syscall.Signal) {
	switch sig {
	case syscall.SIGINT, syscall.SIGQUIT, syscall.SIGWINCH:
		_ = s.a.reaper.signalGroup(s.pid, sig)
	default:
		_ = s.a.reaper.signal(s.pid, sig)
	}
}
