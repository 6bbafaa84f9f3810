package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	// drainSilence is how long the output of an ended process may be silent before we stop listening: a child that it
	// left behind may hold the pipe open for ever.
	drainSilence = 200 * time.Millisecond
	// drainLimit bounds listening to a child that never falls silent.
	drainLimit = 2 * time.Second
	// drainBytes is more than a pipe can hold by default limits: what was written before the end is read to its last byte.
	drainBytes = 1 << 20
	// joinedGrace is how long a client that has joined may hold up the others before it is dropped.
	joinedGrace = 20 * time.Second
)

// process is one command and those who listen to it.
type process struct {
	a          *Agent
	info       agentapi.Process
	disconnect agentapi.Disconnect
	timeout    time.Duration
	started    time.Time
	tree       tree
	input      *input
	pty        *os.File
	outputs    []*os.File
	done       chan struct{} // closed when its end has been told

	out sync.Mutex // held while a chunk goes to the listeners, so that they see one order

	mu      sync.Mutex
	sinks   []*link
	owner   *link
	parts   int // outputs not yet drained, the exit not yet known, kills under way: at zero the end is told
	exit    exit
	exited  bool
	asked   uint64           // signals that a client sent, as bits
	cause   agentapi.Outcome // why we ended it, when we did
	message string
	timer   *time.Timer
}

func (a *Agent) exec(l *link, params agentapi.ExecParams) error {
	p, err := a.startProcess(l, params)
	if err != nil {
		return err
	}
	p.follow(l)
	return nil
}

func (a *Agent) startProcess(l *link, params agentapi.ExecParams) (*process, error) {
	if params.TimeoutMS < 0 {
		return nil, fault.New(fault.Invalid, "a timeout cannot be negative")
	}
	u, err := a.user(params.User)
	if err != nil {
		return nil, err
	}
	params.Argv = settleProgram(params.Argv, params.Instead)
	p := &process{
		a: a, disconnect: params.Disconnect, timeout: time.Duration(params.TimeoutMS) * time.Millisecond,
		started: time.Now(), owner: l, sinks: []*link{l}, done: make(chan struct{}),
		info: agentapi.Process{ID: newID("p"), Argv: params.Argv, Cwd: params.Cwd, User: u.name, Tag: params.Tag, Env: params.Env, PTY: params.PTY != nil},
	}
	c := command{
		argv: params.Argv, env: params.Env, clean: params.CleanEnv, cwd: params.Cwd, user: u, tag: p.info.ID,
		limits: params.Limits, own: params.OwnPath,
	}
	if c.env, err = a.withEnvFile(params, u); err != nil {
		return nil, err
	}
	if p.info.Cwd == "" {
		p.info.Cwd, p.info.Here = a.workdir(u), true
	}
	if err := p.launch(c, params); err != nil {
		return nil, err
	}
	return p, nil
}

// launch opens the process's descriptors, starts it and puts it into the table; the started event goes out before any
// output can.
func (p *process) launch(c command, params agentapi.ExecParams) error {
	theirs, err := p.open(&c, params)
	defer func() { agentapi.CloseDescriptors(theirs) }()
	if err != nil {
		p.letGo()
		return err
	}
	p.parts = len(p.outputs) + 1
	p.out.Lock() // no output before started
	defer p.out.Unlock()
	closing, err := p.enter(c)
	if err != nil {
		p.letGo()
		return err
	}
	p.mu.Lock()
	sinks := p.sinks
	p.mu.Unlock()
	for _, s := range sinks {
		_ = s.event(agentapi.Event{Type: agentapi.EventStarted, PID: p.info.PID, ID: p.info.ID}) // who left is forgotten by follow
	}
	for i, f := range p.outputs {
		kind := agentapi.FrameStdout
		if i == 1 {
			kind = agentapi.FrameStderr
		}
		p.a.wg.Go(func() { p.pump(f, kind) })
	}
	if closing {
		p.a.wg.Go(func() { p.kill(agentapi.OutcomeInterrupted, "the sandbox is ending") })
	}
	return nil
}

// open gives the process its descriptors and returns those that are to be closed here once it has them, also when it
// fails.
func (p *process) open(c *command, params agentapi.ExecParams) (theirs []int, err error) {
	if params.PTY != nil {
		return p.openTerminal(c, params)
	}
	if err := p.openPipes(params.Stdin, &theirs); err != nil {
		return theirs, explain(err, "pipe")
	}
	for _, fd := range theirs {
		c.files = append(c.files, uintptr(fd))
	}
	return theirs, nil
}

func (p *process) openTerminal(c *command, params agentapi.ExecParams) (theirs []int, err error) {
	master, slave, err := openPTY(*params.PTY, c.user)
	if err != nil {
		return nil, err
	}
	p.pty, p.outputs, p.input = master, []*os.File{master}, newInput(master, true)
	c.tty, c.files = true, []uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
	if _, ok := params.Env["TERM"]; !ok {
		c.env = withTerm(params.Env)
	}
	return []int{slave}, nil
}

// letGo closes our ends of a process that was not started.
func (p *process) letGo() {
	for _, f := range p.outputs {
		f.Close()
	}
	p.input.close()
}

// enter starts the process and puts it into the table; closing tells that the agent ends its processes already.
func (p *process) enter(c command) (closing bool, err error) {
	p.mu.Lock() // no end before the table knows it
	defer p.mu.Unlock()
	pid, err := p.a.start(c, p.onExit)
	if err != nil {
		return false, err
	}
	p.info.PID = pid
	p.tree = tree{tag: p.info.ID, self: p.a.pid(), root: func() int {
		if p.a.reaper.alive(pid) {
			return pid
		}
		return 0
	}}
	p.a.mu.Lock()
	p.a.processes[p.info.ID] = p
	closing = p.a.closed
	p.a.mu.Unlock()
	if p.timeout > 0 {
		p.timer = time.AfterFunc(p.timeout, p.expire)
	}
	return closing, nil
}

func withTerm(env map[string]string) map[string]string {
	with := map[string]string{"TERM": "xterm-256color"}
	for k, v := range env {
		with[k] = v
	}
	return with
}

func (p *process) openPipes(stdin bool, theirs *[]int) error {
	if stdin {
		var fds [2]int
		if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
			return err
		}
		*theirs = append(*theirs, fds[0])
		f, err := nonblocking(fds[1], "stdin")
		if err != nil {
			syscall.Close(fds[1])
			return err
		}
		p.input = newInput(f, false)
	} else {
		fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		*theirs = append(*theirs, fd)
	}
	for _, name := range []string{"stdout", "stderr"} {
		f, fd, err := outputPipe(name)
		if err != nil {
			return err
		}
		*theirs = append(*theirs, fd)
		p.outputs = append(p.outputs, f)
	}
	return nil
}

// outputPipe makes a pipe whose read end waits in the poller and whose write end is an ordinary one for a child.
func outputPipe(name string) (*os.File, int, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	f, err := nonblocking(fds[0], name)
	if err != nil {
		agentapi.CloseDescriptors(fds[:])
		return nil, -1, err
	}
	return f, fds[1], nil
}

// pump passes output on until its end; the listeners' pace is the process's pace.
func (p *process) pump(f *os.File, kind agentapi.FrameKind) {
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		p.part()
		return
	}
	for {
		b, n, err := readChunk(raw)
		if err == nil {
			p.emit(kind, b, n)
			chunks.Put(b)
			p.prolong(f)
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			p.drain(raw, kind)
			// A child that was left behind still writes here. It is heard by nobody, but must not die of it.
			p.a.keep(f)
			p.part()
			discard(f, raw)
			p.a.drop(f)
			return
		}
		p.part()
		return
	}
}

// drain takes what is in the pipe at this moment.
func (p *process) drain(raw syscall.RawConn, kind agentapi.FrameKind) {
	_ = raw.Control(func(fd uintptr) { // it fails for a pipe that is closed, and then there is nothing to take
		for total := 0; total < drainBytes; {
			b, n, err := tryChunk(int(fd))
			if err != nil {
				return
			}
			p.emit(kind, b, n)
			chunks.Put(b)
			total += n
		}
	})
}

func discard(f *os.File, raw syscall.RawConn) {
	f.SetReadDeadline(time.Time{})
	for {
		b, _, err := readChunk(raw)
		if err != nil {
			return
		}
		chunks.Put(b)
	}
}

// prolong waits for another silence after output that came when the process had ended.
func (p *process) prolong(f *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exited && time.Since(p.exit.at) < drainLimit {
		f.SetReadDeadline(time.Now().Add(drainSilence))
	}
}

func (p *process) emit(kind agentapi.FrameKind, b *chunk, n int) {
	p.out.Lock()
	defer p.out.Unlock()
	p.mu.Lock()
	sinks := p.sinks
	p.mu.Unlock()
	for _, s := range sinks {
		p.bound(s, sinks)
		if s.chunk(kind, b, n) != nil && s != p.owner { // an owner that fails is on its way out: its reader says so
			s.close() // and so does this one's, now
		}
	}
}

// bound limits how long a write to a listener may take. The process waits for its owner, and for whoever listens alone;
// but one who has joined must not stop what others hear.
func (p *process) bound(s *link, sinks []*link) {
	switch {
	case s == p.owner:
	case len(sinks) == 1:
		s.conn.SetWriteDeadline(time.Time{})
	default:
		s.conn.SetWriteDeadline(time.Now().Add(joinedGrace))
	}
}

// onExit is the reaper's word. It must not block.
func (p *process) onExit(e exit) {
	p.mu.Lock()
	p.exit, p.exited = e, true
	for _, f := range p.outputs {
		f.SetReadDeadline(e.at.Add(drainSilence))
	}
	p.mu.Unlock()
	p.part()
}

// part counts one part of the process's life as over; the last one tells the end.
func (p *process) part() {
	p.mu.Lock()
	p.parts--
	last := p.parts == 0
	p.mu.Unlock()
	if last {
		go p.finish() // owned by done, which Close waits for
	}
}

func (p *process) finish() {
	p.mu.Lock()
	if st := p.exit.status; st.Signaled() && st.Signal() == syscall.SIGKILL && p.asked&(1<<syscall.SIGKILL) == 0 && p.cause == "" {
		p.mu.Unlock()
		text, ok := p.a.memory.explains(p.exit.at)
		p.mu.Lock()
		if ok && p.cause == "" {
			p.cause, p.message = agentapi.OutcomeOOM, text
		}
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	end := p.end()
	sinks := p.sinks
	p.sinks = nil
	p.mu.Unlock()
	p.a.bury(p.info, end)
	p.input.close()
	close(p.done)
	p.out.Lock() // after the started event, however short the life was
	defer p.out.Unlock()
	for _, s := range sinks {
		p.bound(s, sinks)
		s.end(end)
	}
}

// end puts the process's end into words; mu is held.
func (p *process) end() agentapi.End {
	ru := p.exit.usage
	end := agentapi.End{Usage: agentapi.Usage{
		WallMS:    float64(p.exit.at.Sub(p.started).Microseconds()) / 1e3,
		CPUMS:     float64(ru.Utime.Nano()+ru.Stime.Nano()) / 1e6,
		PeakBytes: ru.Maxrss << 10,
	}}
	if st := p.exit.status; st.Signaled() {
		end.ExitCode, end.Signal, end.Outcome = -1, signalName(st.Signal()), agentapi.OutcomeKilled
		end.Message = "ended by " + end.Signal
		switch {
		case p.asked&(1<<st.Signal()) != 0:
			end.Outcome, end.Message = agentapi.OutcomeInterrupted, "ended by "+end.Signal+", as asked"
		case st.Signal() == syscall.SIGXCPU:
			end.Message = "ended by SIGXCPU: the run's limit of processor time is reached"
		case st.Signal() == syscall.SIGKILL:
			end.Message += ", which nobody here sent; lack of memory is the usual reason"
		}
	} else {
		end.ExitCode, end.Outcome = st.ExitStatus(), agentapi.OutcomeOK
		if end.ExitCode != 0 {
			end.Outcome = agentapi.OutcomeError
			end.Message = fmt.Sprintf("exited with status %d", end.ExitCode)
		}
	}
	if p.cause != "" {
		end.Outcome, end.Message = p.cause, p.message
	}
	return end
}

func (p *process) expire() {
	p.kill(agentapi.OutcomeTimeout, fmt.Sprintf("the time limit of %s passed; the command and all it started were killed", p.timeout))
}

// kill ends the process with everything it started; the end is told when all are gone.
func (p *process) kill(cause agentapi.Outcome, message string) {
	p.mu.Lock()
	if p.parts == 0 {
		p.mu.Unlock()
		return
	}
	p.parts++
	if p.cause == "" {
		p.cause, p.message = cause, message
	}
	p.mu.Unlock()
	p.tree.kill()
	p.part()
}

// follow reads what a client sends until it leaves or the end was told.
func (p *process) follow(l *link) {
	defer p.leave(l)
	for {
		f, err := l.in.Read()
		if err != nil {
			return
		}
		switch f.Kind {
		case agentapi.FrameStdin:
			if !p.input.write(l, f.Payload) {
				return
			}
		case agentapi.FrameEOF:
			p.input.end()
		case agentapi.FrameControl:
			var c agentapi.Control
			if json.Unmarshal(f.Payload, &c) == nil {
				p.control(c)
			}
		default:
			return
		}
	}
}

// control does what a client asks on its own connection. There is no answer: a process that has ended says so itself.
func (p *process) control(c agentapi.Control) {
	if c.Resize != nil && p.pty != nil {
		_ = p.resizeTo(*c.Resize)
	}
	if c.Interrupt {
		_ = p.signal(syscall.SIGINT)
	}
	if sig, err := parseSignal(c.Signal); err == nil {
		_ = p.signal(sig)
	}
}

// signal sends what a client asked for and remembers it: the end that follows is the client's doing.
func (p *process) signal(sig syscall.Signal) error {
	p.ask(sig)
	return p.a.reaper.signal(p.info.PID, sig)
}

func (p *process) ask(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked |= 1 << sig
}

func (p *process) resizeTo(size agentapi.PTYSize) error {
	raw, err := p.pty.SyscallConn()
	if err != nil {
		return err
	}
	var rerr error
	if err := raw.Control(func(fd uintptr) { rerr = resizePTY(int(fd), size) }); err != nil {
		return err
	}
	return rerr
}

// leave forgets a listener. A run whose own client leaves ends, unless it was told to survive.
func (p *process) leave(l *link) {
	l.close() // first: a chunk may be on its way to a client that reads no more
	p.mu.Lock()
	at := slices.Index(p.sinks, l)
	if at >= 0 {
		p.sinks = slices.Delete(slices.Clone(p.sinks), at, at+1)
	}
	over := p.parts == 0
	p.mu.Unlock()
	if !over && p.owner == l && p.disconnect != agentapi.DisconnectSurvive {
		p.kill(agentapi.OutcomeInterrupted, "the client left; the command and all it started were killed")
	}
}

func (a *Agent) attach(l *link, params agentapi.AttachParams) error {
	p, err := a.find(params.Target)
	if err != nil && params.Ended {
		return a.recall(l, params.Target)
	}
	if err != nil {
		return err
	}
	p.hurry()
	p.out.Lock()
	p.mu.Lock()
	joined := p.parts > 0
	if joined {
		p.sinks = append(slices.Clone(p.sinks), l)
	}
	p.mu.Unlock()
	if joined {
		err = l.event(agentapi.Event{Type: agentapi.EventStarted, PID: p.info.PID, ID: p.info.ID})
	}
	p.out.Unlock()
	if !joined && params.Ended {
		<-p.done // its end is being told to others
		return a.recall(l, agentapi.Target{ID: p.info.ID})
	}
	if !joined {
		return fault.New(fault.Gone, "the process has ended")
	}
	if err != nil {
		l.close()
	}
	p.follow(l)
	return nil
}

// hurry is for a newcomer: a write to one who joined before, and listened alone so far, now holds somebody up.
func (p *process) hurry() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sinks {
		if s != p.owner {
			s.conn.SetWriteDeadline(time.Now().Add(joinedGrace))
		}
	}
}

func (a *Agent) find(t agentapi.Target) (*process, error) {
	if t.Name == "" {
		return a.findBy(t)
	}
	pid, _ := strconv.Atoi(t.Name) // zero, which is no process's, when it is not a number
	for _, t := range []agentapi.Target{{ID: t.Name}, {Tag: t.Name}, {PID: pid}} {
		if p, err := a.findBy(t); err == nil {
			return p, nil
		}
	}
	return nil, fault.New(fault.NotFound, "no process %.64q: it has ended, or it never was", t.Name)
}

func (a *Agent) findBy(t agentapi.Target) (*process, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if p, ok := a.processes[t.ID]; ok && t.ID != "" {
		return p, nil
	}
	for _, p := range a.processes {
		if t.ID == "" && (t.Tag != "" && p.info.Tag == t.Tag || t.Tag == "" && t.PID > 0 && p.info.PID == t.PID) {
			return p, nil
		}
	}
	return nil, fault.New(fault.NotFound, "no such process: it has ended, or it never was")
}

func (a *Agent) listProcesses(none) ([]agentapi.Process, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := []agentapi.Process{}
	for _, p := range a.processes {
		list = append(list, p.info)
	}
	slices.SortFunc(list, func(x, y agentapi.Process) int { return x.PID - y.PID })
	return list, nil
}

func (a *Agent) signal(params agentapi.SignalParams) (none, error) {
	sig, err := parseSignal(params.Signal)
	if err != nil {
		return none{}, err
	}
	p, err := a.find(params.Target)
	if err != nil {
		return none{}, err
	}
	if params.Tree && sig == syscall.SIGKILL {
		p.kill(agentapi.OutcomeInterrupted, "killed with all it started, as asked")
		return none{}, nil
	}
	if params.Tree {
		p.ask(sig)
		p.tree.signal(sig)
		return none{}, nil
	}
	return none{}, explain(p.signal(sig), "signal")
}

func (a *Agent) resize(params agentapi.ResizeParams) (none, error) {
	p, err := a.find(params.Target)
	if err != nil {
		return none{}, err
	}
	if p.pty == nil {
		return none{}, fault.New(fault.Conflict, "the process has no terminal")
	}
	return none{}, explain(p.resizeTo(params.Size), "terminal")
}

func (a *Agent) stdin(l *link, params agentapi.StdinParams) error {
	p, err := a.find(params.Target)
	if err != nil {
		return err
	}
	if params.PTY != nil && *params.PTY != (p.pty != nil) {
		return wrongInput(*params.PTY)
	}
	if p.input == nil {
		return fault.New(fault.Conflict, "the process was started without stdin")
	}
	for {
		f, err := l.in.Read()
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "the client left")
		}
		switch f.Kind {
		case agentapi.FrameStdin:
			if !p.input.write(l, f.Payload) {
				return fault.New(fault.Gone, "the process does not read its stdin any more")
			}
		case agentapi.FrameEOF:
			if err := p.input.flush(); err != nil {
				return fault.New(fault.Gone, "the process does not read its stdin any more")
			}
			if params.Close {
				p.input.end()
			}
			return l.answer(none{})
		default:
			return fault.New(fault.Invalid, "unexpected frame among stdin")
		}
	}
}

func wrongInput(wantsPTY bool) error {
	if wantsPTY {
		return fault.New(fault.Conflict, "the process has no terminal")
	}
	return fault.New(fault.Conflict, "the process has a terminal: input goes to that")
}

var errInputClosed = fmt.Errorf("stdin is closed: %w", io.ErrClosedPipe)
