// Package trace keeps processes stopped and has them make single system calls.
//
// The memory of such a process may belong to somebody else who is still running and may change any of it: its code is
// not to be trusted. So it never runs by itself. It is given registers, let go as far as the entry of a system call, and
// that call is looked at; a process that makes any other is killed.
package trace

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How long a stopped process may take before it is killed: hurry to reach the call that it was told to make, which is the
// next thing it does, and patience for the call itself. Copying a large memory takes longest.
//
// The process is in its sandbox's cgroup: where the sandbox is busy and has little processor time, or the host is
// overloaded, it waits seconds for a few microseconds of work.
const (
	hurry    = 10 * time.Second
	patience = 200 * time.Second
)

// ErrEnded is a process that has ended.
var ErrEnded = errors.New("the process has ended")

// ErrLate is a process that was killed because it took longer than its limit.
var ErrLate = errors.New("the process got too little processor time")

// ErrStrayed is a process that did something else than it was told to. It was killed.
var ErrStrayed = errors.New("the process did something else")

// Tracer is the one thread that stops processes: the host lets only that thread speak to them.
type Tracer struct {
	hurry time.Duration
	work  chan func()
	done  chan struct{}

	mu       sync.Mutex
	known    map[int]bool // whom it holds, by number
	over     bool
	awaiting sync.WaitGroup // who waits for one of them, elsewhere than on the thread
}

// New starts it.
func New() *Tracer {
	t := &Tracer{hurry: hurry, work: make(chan func()), done: make(chan struct{}), known: map[int]bool{}}
	go t.run()
	return t
}

// run is the thread. It is locked and never unlocked: it ends with the goroutine, and with it whom it holds. The first
// thread of a program does not: then another is taken, while this one is kept busy.
func (t *Tracer) run() {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		began := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(began)
			t.serve()
		}()
		<-began
		runtime.UnlockOSThread()
		return
	}
	t.serve()
}

func (t *Tracer) serve() {
	for {
		select {
		case f := <-t.work:
			f()
		case <-t.done:
			t.endAll()
			return
		}
	}
}

// endAll ends everybody whom it holds, and returns when nobody waits for them any more. With the thread they would end too,
// but as somebody else's children: the host would not tell who waits for them here.
func (t *Tracer) endAll() {
	t.mu.Lock()
	t.over = true
	for pid := range t.known {
		_ = unix.Kill(pid, unix.SIGKILL) // not reaped while the lock is held
	}
	t.mu.Unlock()
	t.awaiting.Wait()
}

// Close ends it, and every process that it holds.
func (t *Tracer) Close() { close(t.done) }

// do runs f on the thread.
func (t *Tracer) do(f func() error) (err error) {
	over := make(chan struct{})
	select {
	case t.work <- func() { defer close(over); err = guard(f) }:
		<-over
		return err
	case <-t.done:
		return ErrEnded
	}
}

// guard makes a defect an error: whoever runs us holds every sandbox of the host.
func guard(f func() error) (err error) {
	defer func() {
		if what := recover(); what != nil {
			err = fmt.Errorf("trace: %v", what)
		}
	}()
	return f()
}

// know notes a process that is ours to hold.
func (t *Tracer) know(pid int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known[pid] = true
}

// endOne ends one that nobody attends. On the thread, which holds it: the number is its own.
func (t *Tracer) endOne(pid int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = unix.Kill(pid, unix.SIGKILL)
	_, _ = unix.Wait4(pid, nil, unix.WALL, nil)
	delete(t.known, pid)
	return nil
}

// endStrays ends the copy of a process that was killed before it could tell which it is. On the thread, which holds it.
func (t *Tracer) endStrays() error {
	entries, _ := os.ReadDir("/proc") // what cannot be seen cannot be ended: it goes with the thread
	mine := []byte("\nTracerPid:\t" + strconv.Itoa(unix.Gettid()) + "\n")
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || t.known[pid] {
			continue
		}
		if status, _ := os.ReadFile("/proc/" + e.Name() + "/status"); bytes.Contains(status, mine) {
			_ = unix.Kill(pid, unix.SIGKILL) // held by us, so nobody has reaped it
			_, _ = unix.Wait4(pid, nil, unix.WALL, nil)
		}
	}
	return nil
}

// Process is one that is stopped.
type Process struct {
	t     *Tracer
	pid   int
	pidfd *os.File
	park  registers // of a call that can be made again
	gone  chan struct{}
	late  atomic.Bool // killed by watch

	turn    sync.Mutex
	reaping sync.RWMutex
	reaped  bool
}

// Every clone is followed, and nobody outlives us.
const options = unix.PTRACE_O_EXITKILL | unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEVFORK

// Seize stops a process that waits in ppoll, or is about to, for good. pidfd is its, does not block, and is taken over.
func (t *Tracer) Seize(pid int, pidfd *os.File) (*Process, error) {
	p := &Process{t: t, pid: pid, pidfd: pidfd, gone: make(chan struct{})}
	err := t.do(func() error {
		if err := ptrace(unix.PTRACE_SEIZE, pid, 0, options); err != nil {
			return err
		}
		t.know(pid)
		return nil
	})
	if err != nil {
		_ = signal(pidfd, unix.SIGKILL)
		pidfd.Close()
		return nil, fmt.Errorf("seize process: %w", err)
	}
	go p.attend()
	if err := p.Hold(func(int) error { return p.seize() }); err != nil {
		p.Kill()
		return nil, fmt.Errorf("seize process: %w", err)
	}
	return p, nil
}

func (p *Process) seize() error {
	defer p.watch(p.t.hurry)()
	for begun := time.Now(); ; time.Sleep(20 * time.Microsecond) {
		if _, err := p.let(unix.PTRACE_INTERRUPT, nil); err != nil {
			return err
		}
		err := p.t.do(func() error {
			if err := p.park.get(p.pid); err != nil {
				return err
			}
			if p.park.parked() {
				return p.undisturbed()
			}
			return ptrace(unix.PTRACE_CONT, p.pid, 0, 0)
		})
		switch {
		case err != nil || p.park.parked():
			return err
		case time.Since(begun) > p.t.hurry/2:
			return ErrStrayed // it stops when it is told to, and never in its call
		}
	}
}

// undisturbed makes sure that the host never sends it elsewhere: with a restartable sequence registered it would, to where
// its memory says.
func (p *Process) undisturbed() error {
	var rseq struct {
		area                           uint64
		size, signature, flags, unused uint32
	}
	_, _, e := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_GET_RSEQ_CONFIGURATION, uintptr(p.pid), unsafe.Sizeof(rseq), uintptr(unsafe.Pointer(&rseq)), 0, 0)
	switch {
	case errors.Is(e, unix.EIO): // a host without them
		return nil
	case e != 0:
		return failure(unix.PTRACE_GET_RSEQ_CONFIGURATION, e)
	case rseq.area != 0:
		return p.strayed()
	}
	return nil
}

// let has it go on, with other registers if there are any, until it stops again. Only that is the thread's to say: one that
// takes long keeps nobody waiting but whoever asked.
func (p *Process) let(request int, with *registers) (status unix.WaitStatus, err error) {
	soon := false
	err = p.t.do(func() error {
		if err := p.release(request, with); err != nil {
			return err
		}
		status, soon, err = p.glance()
		return err
	})
	if err != nil || soon {
		return status, err
	}
	return p.awaitOutside()
}

func (p *Process) release(request int, with *registers) error {
	if with != nil {
		if err := with.set(p.pid); err != nil {
			return err
		}
	}
	return ptrace(request, p.pid, 0, 0)
}

// moment is how long a look at a process lasts: most stop again within a few microseconds, and waking somebody up to wait
// for them takes longer.
const moment = 100 * time.Microsecond

// glance is await for one that stops soon.
func (p *Process) glance() (status unix.WaitStatus, stopped bool, err error) {
	for begun := time.Now(); time.Since(begun) < moment; {
		var info siginfo
		err := info.wait(p.pid, unix.WEXITED|unix.WSTOPPED|unix.WNOWAIT|unix.WNOHANG)
		if err != nil && !errors.Is(err, unix.EINTR) || info.signo != 0 {
			status, err = p.await()
			return status, true, err
		}
	}
	return 0, false, nil
}

// use is for one at a time, and for as long as the number is its own.
func (p *Process) use(f func() error) error {
	p.turn.Lock()
	defer p.turn.Unlock()
	return p.whyEnded(p.Hold(func(int) error { return f() }))
}

// Resume is the address that the process had in a register where it was seized.
func (p *Process) Resume() uint64 { return p.park.kept() }

// Gone is closed when it has ended.
func (p *Process) Gone() <-chan struct{} { return p.gone }

// Kill ends it, at any time and more than once.
func (p *Process) Kill() { _ = signal(p.pidfd, unix.SIGKILL) }

// Hold calls f with its number, which is nobody else's meanwhile.
func (p *Process) Hold(f func(pid int) error) error {
	p.reaping.RLock()
	defer p.reaping.RUnlock()
	if p.reaped {
		return ErrEnded
	}
	return f(p.pid)
}

// attend reaps it: who holds a process is told of its end before its parent is. Nobody else here does.
func (p *Process) attend() {
	defer close(p.gone)
	defer p.pidfd.Close()
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool {
		// Only when it has ended: whatever is asked for, a wait also takes the news that a stopped process has stopped.
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n > 0
	})
	p.reaping.Lock()
	defer p.reaping.Unlock()
	p.reaped = true
	p.t.mu.Lock() // until then it looks like one that nobody knows
	defer p.t.mu.Unlock()
	for {
		if _, err := unix.Wait4(p.pid, nil, unix.WNOHANG|unix.WALL, nil); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	delete(p.t.known, p.pid)
}

// watch kills the process when what comes takes too long.
func (p *Process) watch(patience time.Duration) (stop func()) {
	timer := time.AfterFunc(patience, func() {
		p.late.Store(true)
		p.Kill()
	})
	return func() { timer.Stop() }
}

// whyEnded says that a process was killed for its lateness, where it was.
func (p *Process) whyEnded(err error) error {
	if errors.Is(err, ErrEnded) && p.late.Load() {
		return fmt.Errorf("%w: it did not finish its system call in time", ErrLate)
	}
	return err
}

// await waits until it has stopped, and says why it did. One that has ended is left to attend.
func (p *Process) await() (unix.WaitStatus, error) {
	for {
		var info siginfo
		err := info.wait(p.pid, unix.WEXITED|unix.WSTOPPED|unix.WNOWAIT)
		if err == nil && (info.code == trapped || info.code == halted) {
			info = siginfo{}
			err = info.wait(p.pid, unix.WSTOPPED|unix.WNOHANG) // its end is left to attend, should it come now
		}
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil || info.code != trapped && info.code != halted:
			return 0, ErrEnded
		}
		return unix.WaitStatus(info.status)<<8 | stopped, nil
	}
}

// awaitOutside is await elsewhere than on the thread, which does not end meanwhile.
func (p *Process) awaitOutside() (unix.WaitStatus, error) {
	p.t.mu.Lock()
	if p.t.over {
		p.t.mu.Unlock()
		return 0, ErrEnded
	}
	p.t.awaiting.Add(1)
	p.t.mu.Unlock()
	defer p.t.awaiting.Done()
	return p.await()
}

// CLD_TRAPPED and CLD_STOPPED: why a process is waited for; and what is in the last byte of a stopped one's status.
const trapped, halted, stopped = 4, 5, 0x7f

// siginfo is how a wait describes a process.
type siginfo struct {
	signo, _, code, _ int32
	pid, uid, status  int32
	_                 [128 - 7*4]byte
}

func (s *siginfo) wait(pid, options int) error {
	return unix.Waitid(unix.P_PID, pid, (*unix.Siginfo)(unsafe.Pointer(s)), options|unix.WALL, nil)
}

func event(s unix.WaitStatus) int { return int(s) >> 16 }

func atCall(s unix.WaitStatus) bool { return s.StopSignal() == unix.SIGTRAP|0x80 }

// strayed kills it.
func (p *Process) strayed() error {
	p.Kill()
	return ErrStrayed
}

// call has it make one system call and no other. If that makes a process, it is returned too, stopped.
func (p *Process) call(number uintptr, args ...uintptr) (result int64, child int, err error) {
	want := p.park
	want.order(number, args)
	var status unix.WaitStatus
	soon := false
	stop := p.watch(p.t.hurry)
	err = p.t.do(func() (err error) {
		if err = p.release(unix.PTRACE_SYSCALL, &want); err != nil {
			return err
		}
		if status, soon, err = p.glance(); err != nil || !soon {
			return err
		}
		stop()
		result, child, err = p.through(status, number, args)
		return err
	})
	if err != nil || soon {
		stop()
		return result, child, err
	}
	status, err = p.awaitOutside()
	stop()
	if err != nil {
		return 0, 0, err
	}
	err = p.t.do(func() (err error) {
		result, child, err = p.through(status, number, args)
		return err
	})
	return result, child, err
}

// through sees the process through the call at whose entry it stopped. It runs on the tracer's thread
// and blocks it for up to patience: a child must be known before the thread serves anything else.
func (p *Process) through(status unix.WaitStatus, number uintptr, args []uintptr) (result int64, child int, err error) {
	defer p.watch(patience)()
	own, err := p.enters(number, args)
	if err != nil {
		return 0, 0, err
	}
	if !atCall(status) || !own {
		return 0, 0, p.strayed()
	}
	for {
		if err := ptrace(unix.PTRACE_SYSCALL, p.pid, 0, 0); err != nil {
			return 0, child, err
		}
		if status, err = p.await(); err != nil {
			return 0, child, err
		}
		switch event(status) {
		case 0:
			if !atCall(status) {
				return 0, child, p.strayed()
			}
			var now registers
			err := now.get(p.pid)
			return now.result(), child, err
		case unix.PTRACE_EVENT_FORK, unix.PTRACE_EVENT_CLONE, unix.PTRACE_EVENT_VFORK:
			n, err := unix.PtraceGetEventMsg(p.pid)
			if err != nil {
				return 0, 0, ErrEnded
			}
			child = int(n)
			p.t.know(child)
		default:
			return 0, child, p.strayed()
		}
	}
}

// entry is struct ptrace_syscall_info at the entry of a call.
type entry struct {
	op     uint8
	_      [3]uint8
	arch   uint32
	_, _   uint64
	number uint64
	args   [6]uint64
	_      uint64
}

const entering = 1 // PTRACE_SYSCALL_INFO_ENTRY

// enters tells whether it is about to make that call, by this architecture's numbers.
func (p *Process) enters(number uintptr, args []uintptr) (bool, error) {
	want := entry{op: entering, arch: architecture, number: uint64(number)}
	for i, a := range args {
		want.args[i] = uint64(a)
	}
	var is entry
	n, _, e := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(p.pid), unsafe.Sizeof(is), uintptr(unsafe.Pointer(&is)), 0, 0)
	return n >= unsafe.Offsetof(is.args)+unsafe.Sizeof(is.args) && is.op == want.op && is.arch == want.arch && is.number == want.number && is.args == want.args,
		failure(unix.PTRACE_GET_SYSCALL_INFO, e)
}

// Call has it make one system call.
func (p *Process) Call(number uintptr, args ...uintptr) (result int64, err error) {
	err = p.use(func() (err error) {
		result, _, err = p.call(number, args...)
		if err == nil {
			err = failed(result)
		}
		return err
	})
	return result, err
}

func failed(result int64) error {
	if result < 0 && result > -4096 {
		return unix.Errno(-result)
	}
	return nil
}

// Fork makes a copy of it, stopped like itself. Its parent is the parent of the process.
func (p *Process) Fork() (copied *Process, err error) {
	err = p.use(func() error {
		result, pid, err := p.call(unix.SYS_CLONE, unix.CLONE_PARENT, 0, 0, 0, 0)
		if pid == 0 && err != nil {
			_ = p.t.do(p.t.endStrays)
		}
		if pid == 0 {
			return cmp.Or(err, failed(result), ErrEnded)
		}
		// Whatever happened to the process, its copy is held by us and waits.
		fd, ferr := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
		if ferr != nil {
			_ = p.t.do(func() error { return p.t.endOne(pid) }) // a thread that has ended has taken it with it
			return errors.Join(err, ferr)
		}
		copied = &Process{t: p.t, pid: pid, pidfd: os.NewFile(uintptr(fd), "pidfd"), park: p.park, gone: make(chan struct{})}
		go copied.attend()
		defer copied.watch(p.t.hurry)()
		_, werr := copied.awaitOutside()
		if werr == nil {
			werr = p.t.do(copied.undisturbed)
		}
		return cmp.Or(err, copied.whyEnded(werr))
	})
	if err != nil {
		if copied != nil {
			copied.Kill()
		}
		return nil, fmt.Errorf("fork process: %w", err)
	}
	return copied, nil
}

// Run lets it go on from an address with a stack and an argument, to where it traps with a value. Only for a process
// whose memory is nobody else's, and code that was written there by us.
func (p *Process) Run(at, stack, arg uint64) (value int64, err error) {
	err = p.use(func() error {
		r := p.park
		r.start(at, stack, arg)
		value, err = p.toTrap(&r)
		return err
	})
	return value, err
}

// Continue lets it go on from a trap to the next.
func (p *Process) Continue() error {
	return p.use(func() error {
		_, err := p.toTrap(nil)
		return err
	})
}

func (p *Process) toTrap(with *registers) (int64, error) {
	defer p.watch(patience)()
	status, err := p.let(unix.PTRACE_CONT, with)
	if err != nil {
		return 0, err
	}
	if status.StopSignal() != unix.SIGTRAP || event(status) != 0 {
		return 0, fmt.Errorf("%w: %s", p.strayed(), unix.SignalName(status.StopSignal()))
	}
	var now registers
	err = p.t.do(func() error {
		if err := now.get(p.pid); err != nil {
			return err
		}
		return now.passTrap(p.pid)
	})
	return now.result(), err
}

// Write puts bytes into its memory.
func (p *Process) Write(at uint64, data []byte) error {
	var f *os.File
	err := p.Hold(func(pid int) (err error) {
		f, err = os.OpenFile("/proc/"+strconv.Itoa(pid)+"/mem", os.O_WRONLY, 0)
		return err
	})
	if err != nil {
		return ErrEnded
	}
	defer f.Close()
	if _, err := f.WriteAt(data, int64(at)); err != nil {
		return fmt.Errorf("write to process: %w", err)
	}
	return nil
}

// Descriptor gives one of its descriptors.
func (p *Process) Descriptor(number int) (*os.File, error) {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd, getErr := -1, error(nil)
	if err := raw.Control(func(pidfd uintptr) { fd, getErr = unix.PidfdGetfd(int(pidfd), number, 0) }); err != nil {
		return nil, err
	}
	if getErr != nil {
		return nil, fmt.Errorf("take descriptor: %w", getErr)
	}
	return os.NewFile(uintptr(fd), "taken"), nil
}

func signal(pidfd *os.File, sig unix.Signal) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	return errors.Join(err, sendErr)
}

func ptrace(request, pid int, addr, data uintptr) error {
	_, _, e := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(pid), addr, data, 0, 0)
	return failure(request, e)
}

// regset reads or writes the general registers.
func regset(request, pid int, at unsafe.Pointer, size uintptr) error {
	const general = 1 // NT_PRSTATUS
	v := unix.Iovec{Base: (*byte)(at)}
	v.SetLen(int(size))
	_, _, e := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(pid), general, uintptr(unsafe.Pointer(&v)), 0, 0)
	return failure(request, e)
}

func failure(request int, e unix.Errno) error {
	switch {
	case e == 0:
		return nil
	case errors.Is(e, unix.ESRCH):
		return ErrEnded
	}
	return fmt.Errorf("ptrace %d: %w", request, e)
}
