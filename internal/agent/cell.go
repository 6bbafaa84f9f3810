package agent

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// pendingOutput came when no cell ran.
type pendingOutput struct {
	kind agentapi.FrameKind
	data []byte
}

// run is one cell on its way through a kernel.
type run struct {
	params  agentapi.RunParams
	link    *link
	started atomic.Bool
	begin   time.Time
	events  int
	bytes   int

	branch   bool // no cell: the kernel is copied
	refuse   bool // rather than wait
	others   []agentapi.Lost
	branched atomic.Bool // the copy stands
	left     atomic.Bool // nobody waits for it any more

	// guarded by the kernel's mu
	released bool // of a branch: the kernel goes on
	timer    *time.Timer
	grace    *time.Timer
	cause    agentapi.Outcome // why we interrupted it, when we did
}

// run is the operation: it queues the cell, then hears its client until the cell has ended.
func (a *Agent) run(l *link, params agentapi.RunParams) error {
	if params.TimeoutMS < 0 {
		return fault.New(fault.Invalid, "a timeout cannot be negative")
	}
	k, err := a.kernel(params.Kernel)
	if err != nil {
		return err
	}
	r := &run{params: params, link: l}
	if err := k.enqueue(r); err != nil {
		return err
	}
	defer k.leave(r)
	for {
		f, err := l.in.Read()
		if err != nil {
			return nil
		}
		if f.Kind != agentapi.FrameControl {
			continue
		}
		if interrupts(f.Payload) {
			k.interruptRun(r)
		}
	}
}

func (k *kernel) enqueue(r *run) error {
	next, err := k.admit(r)
	k.send(next)
	return err
}

func (k *kernel) admit(r *run) (next *run, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over {
		return nil, fault.New(fault.Gone, "the kernel %q is gone: %s", k.info.Name, k.info.Message)
	}
	if len(k.queue) >= maxQueue {
		return nil, fault.New(fault.Exhausted, "%d runs already wait for the kernel %q", maxQueue, k.info.Name)
	}
	starts := !k.isReady && !k.warm // a warm one is ready in a moment
	if r.refuse && (k.current.Load() != nil || len(k.queue) > 0 || starts) {
		return nil, fault.New(fault.Conflict, "the kernel %q is busy", k.info.Name)
	}
	k.queue = append(k.queue, r)
	return k.next(), nil
}

// next makes the first waiting run the current one, if the kernel is free; mu is held. The caller sends it.
func (k *kernel) next() *run {
	if !k.isReady || k.current.Load() != nil || len(k.queue) == 0 || k.info.State == agentapi.KernelDead {
		return nil
	}
	r := k.queue[0]
	k.queue = k.queue[1:]
	r.begin = time.Now()
	k.current.Store(r)
	k.info.State = agentapi.KernelBusy
	if r.params.TimeoutMS > 0 {
		r.timer = time.AfterFunc(time.Duration(r.params.TimeoutMS)*time.Millisecond, func() { k.stop(r, agentapi.OutcomeTimeout) })
	}
	return r
}

func (k *kernel) send(r *run) {
	if r == nil {
		return
	}
	if r.branch {
		k.sendBranch(r)
		return
	}
	err := agentapi.WriteJSON(k.conn, agentapi.FrameRequest, agentapi.KernelRequest{
		ID: newID("r"), Code: r.params.Code, Env: r.params.Env, Cwd: r.params.Cwd, Silent: r.params.Silent,
		Rich: r.params.Rich, Notebook: r.params.Notebook, State: r.params.State,
	})
	var protocol *agentapi.ProtocolError
	if errors.As(err, &protocol) { // a request fits into a frame, so this one's wrapping did not
		k.finish(r, refusal(fault.New(fault.Invalid, "the code is too long")))
	}
	// Any other error is a kernel that died: whoever listens to it says so.
}

// interruptRun sends SIGINT to the running cell, which is then its caller's doing.
func (k *kernel) interruptRun(r *run) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r == nil || k.current.Load() != r {
		return
	}
	if r.cause == "" {
		r.cause = agentapi.OutcomeInterrupted
	}
	k.sigint()
	k.nudge(r, 0)
}

// nudges are when SIGURG follows an interrupt.
var nudges = []time.Duration{100 * time.Millisecond, time.Second, 5 * time.Second}

// nudge has a Python kernel look at its signals. A SIGINT that comes just before a system call that
// waits does not end that call. A second SIGINT would interrupt a cell that has taken the first, and
// SIGURG does nothing to it.
func (k *kernel) nudge(r *run, n int) {
	if k.inter != nil || n == len(nudges) {
		return
	}
	time.AfterFunc(nudges[n], func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.current.Load() != r {
			return
		}
		_ = pidfdSignal(k.pfd, syscall.SIGURG, 0)
		k.nudge(r, n+1)
	})
}

// sigint reaches the kernel and, where it leads a process group, the commands that the cell waits for.
func (k *kernel) sigint() {
	if k.inter != nil && !k.inter.interruptible() {
		return
	}
	if pidfdSignal(k.pfd, syscall.SIGINT, pidfdSignalGroup) != nil {
		_ = pidfdSignal(k.pfd, syscall.SIGINT, 0) // a kernel that is gone needs no interrupt
	}
}

// stop interrupts a run and kills its kernel when that does not help.
func (k *kernel) stop(r *run, cause agentapi.Outcome) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current.Load() != r || r.grace != nil {
		return
	}
	r.cause = cause
	k.sigint()
	k.nudge(r, 0)
	since := interruption{began: time.Now(), cpu: k.cpu()}
	// The first may have come before the kernel could take it, or met code that swallows it.
	r.grace = time.AfterFunc(insistAfter, func() { k.insist(r, since) })
}

func (k *kernel) insist(r *run, since interruption) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current.Load() != r {
		return
	}
	k.sigint()
	r.grace = time.AfterFunc(interruptCheck, func() { k.giveUp(r, since) })
}

// giveUp kills the kernel of a cell that does not stop, once it has had its time to.
func (k *kernel) giveUp(r *run, since interruption) {
	k.mu.Lock()
	current := k.current.Load() == r
	over := since.over(time.Now(), k.cpu())
	if current && !over {
		r.grace = time.AfterFunc(interruptCheck, func() { k.giveUp(r, since) })
	}
	k.mu.Unlock()
	if current && over {
		k.kill("the cell did not stop when it was interrupted")
	}
}

// interruption is what the clocks showed when a cell was interrupted.
type interruption struct {
	began time.Time
	cpu   time.Duration // of the kernel's process
}

// over reports whether the kernel has had time enough to stop the cell.
func (p interruption) over(now time.Time, cpu time.Duration) bool {
	waited := now.Sub(p.began)
	// Several threads use two seconds of processor time in less.
	return waited >= interruptGrace || waited >= interruptCPU && cpu-p.cpu >= interruptCPU
}

// cpu is the processor time that the kernel's process has used; zero when that cannot be read.
func (k *kernel) cpu() time.Duration {
	if k.info.PID == 0 {
		return 0
	}
	st, _ := readStat(k.info.PID)
	return st.cpu
}

// leave is a client that went away, or the end of the run.
func (k *kernel) leave(r *run) {
	r.link.close()
	k.mu.Lock()
	at := slices.Index(k.queue, r)
	if at >= 0 {
		k.queue = slices.Delete(k.queue, at, at+1)
	}
	running := k.current.Load() == r
	k.mu.Unlock()
	if r.branch {
		k.leaveBranch(r, running)
		return
	}
	if running && r.params.Disconnect != agentapi.DisconnectSurvive {
		k.stop(r, agentapi.OutcomeInterrupted)
	}
}

func (k *kernel) hear(e agentapi.Event, size int) error {
	if e.Type == agentapi.EventReady {
		return k.becomeReady(e)
	}
	r := k.current.Load()
	if r != nil && r.branch && e.Type == agentapi.EventBranch {
		k.hearBranch(r, e)
		return nil
	}
	if r == nil || r.branch || !r.started.Load() && e.Type != agentapi.EventStarted {
		k.stray++
		if k.stray > maxStrayEvents {
			return &agentapi.ProtocolError{Reason: "the kernel flooded its agent between cells"}
		}
		return nil
	}
	r.events++
	r.bytes += size
	if r.events > maxRunEvents || r.bytes > maxRunBytes {
		return &agentapi.ProtocolError{Reason: "the cell displayed more than a run may"}
	}
	if e.Type == agentapi.EventEnd {
		k.stray = 0
		end := k.verdict(r, *e.End)
		end.Empty = r.params.Box != "" && vacant(r.params.Box)
		k.finish(r, end)
		return nil
	}
	k.pass(r, e)
	return nil
}

// pass sends an event after the output that came before it. What cannot be sent is dropped, here and in output: its
// client has left, and the goroutine that reads from it decides what that means.
func (k *kernel) pass(r *run, e agentapi.Event) {
	k.out.Lock()
	defer k.out.Unlock()
	if e.Type != agentapi.EventStarted {
		waits := e.Waits
		e.Waits = false
		k.drain(r)
		_ = r.link.event(e)
		if waits {
			k.sayPassed()
		}
		return
	}
	if r.started.Swap(true) {
		return
	}
	e.PID = k.info.PID
	_ = r.link.event(e)
	for _, p := range k.pending {
		_ = r.link.frame(p.kind, p.data)
	}
	k.pending, k.waiting = nil, 0
	k.began.Broadcast()
}

// passed is a frame of control that says nothing else.
var passed = func() (b [agentapi.HeaderSize]byte) {
	agentapi.PutHeader(b[:], agentapi.FrameControl, 0)
	return b
}()

// sayPassed lets the kernel print on. One that does not listen hears nothing, and is not waited for.
func (k *kernel) sayPassed() {
	conn, ok := k.conn.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := conn.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) {
			_, _ = syscall.SendmsgN(int(fd), passed[:], nil, nil, syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
		})
	}
}

// drain passes on what is in both pipes now; out is held.
func (k *kernel) drain(r *run) {
	for i, kind := range [2]agentapi.FrameKind{agentapi.FrameStdout, agentapi.FrameStderr} {
		for total := 0; total < drainBytes && !k.shut; {
			b, n, err := tryChunk(k.fds[i])
			if err != nil {
				break
			}
			k.output(r, kind, b, n)
			chunks.Put(b)
			total += n
		}
	}
}

// output sends bytes to the current run, or keeps a little for the next; out is held.
func (k *kernel) output(r *run, kind agentapi.FrameKind, b *chunk, n int) {
	if r != nil && !r.branch {
		_ = r.link.chunk(kind, b, n)
		return
	}
	if k.waiting+n <= maxPending {
		data := append([]byte(nil), b[agentapi.HeaderSize:agentapi.HeaderSize+n]...)
		k.pending = append(k.pending, pendingOutput{kind, data})
		k.waiting += n
	}
}

// pump passes output on as it comes.
func (k *kernel) pump(i int, kind agentapi.FrameKind) {
	raw, err := k.pipes[i].SyscallConn()
	if err != nil {
		return
	}
	for {
		var rerr error
		werr := raw.Read(func(fd uintptr) bool {
			rerr = k.pumpOnce(int(fd), kind)
			return rerr != syscall.EAGAIN
		})
		if werr != nil || rerr != nil {
			return
		}
	}
}

func (k *kernel) pumpOnce(fd int, kind agentapi.FrameKind) error {
	k.out.Lock()
	defer k.out.Unlock()
	r := k.current.Load()
	for r != nil && !r.branch && !r.started.Load() && !k.shut {
		k.began.Wait()
		r = k.current.Load()
	}
	b, n, err := tryChunk(fd)
	if err != nil {
		return err
	}
	k.output(r, kind, b, n)
	chunks.Put(b)
	return nil
}

// verdict says how a cell ended: what the kernel says, unless we interrupted it.
func (k *kernel) verdict(r *run, end agentapi.End) agentapi.End {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !r.params.State { // a kernel tells only what it was asked for
		end.Value = nil
	}
	switch {
	case r.cause == agentapi.OutcomeTimeout:
		end.Outcome = agentapi.OutcomeTimeout
		end.Message = fmt.Sprintf("the time limit of %s passed and the cell was interrupted; variables are kept", time.Duration(r.params.TimeoutMS)*time.Millisecond)
	case end.Outcome == agentapi.OutcomeInterrupted:
		end.Message = "the cell was interrupted; variables are kept"
	}
	return end
}

// finish ends a run and begins the next.
func (k *kernel) finish(r *run, end agentapi.End) {
	end.Usage.WallMS = float64(time.Since(r.begin).Microseconds()) / 1e3
	k.out.Lock()
	k.drain(r)
	k.mu.Lock()
	r.stopTimers()
	k.current.Store(nil)
	if k.info.State == agentapi.KernelBusy {
		k.info.State = agentapi.KernelIdle
	}
	next := k.next()
	k.mu.Unlock()
	k.began.Broadcast()
	k.out.Unlock()
	if next == nil {
		r.link.end(end)
		return
	}
	k.a.wg.Go(func() { r.link.end(end) }) // a slow client does not hold up the next run
	k.send(next)
}

func (r *run) stopTimers() {
	for _, t := range []*time.Timer{r.timer, r.grace} {
		if t != nil {
			t.Stop()
		}
	}
}

func interrupts(payload []byte) bool {
	c, err := agentapi.DecodeParams[agentapi.Control](agentapi.Request{Params: payload})
	return err == nil && (c.Interrupt || c.Signal == "SIGINT")
}
