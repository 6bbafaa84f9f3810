package agent

import (
	"bufio"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	// insistAfter is when a cell that still runs is interrupted a second time.
	insistAfter = time.Second
	// interruptCPU is how much processor time a kernel may use after its cell was interrupted,
	// before the agent kills it.
	//
	// On a busy machine a kernel can wait for seconds before it may run at all, so the agent does
	// not count the time on the clock.
	interruptCPU = 2 * time.Second
	// interruptGrace bounds the same for a kernel that uses no processor time.
	interruptGrace = 20 * time.Second
	// interruptCheck is how often the agent looks at an interrupted kernel.
	interruptCheck = 100 * time.Millisecond
	// deliverGrace is how long a client may take to read the end of a run whose kernel was killed.
	deliverGrace = 20 * time.Second
	// exitGrace is how long the agent waits at a dead kernel's socket, whose other end its children
	// may hold. What is in the socket then is still read.
	exitGrace = 100 * time.Millisecond
	// closeGrace is how long a kernel may live after it closed its socket, before the agent kills it.
	closeGrace = 10 * time.Second
	// exitDelay is how long the word about a dead kernel may take before the list of kernels shows it
	// as dead, for a reason that is not known.
	exitDelay = time.Second
	// wordGrace is how long the agent waits to hear why a dead kernel ended. The parent tells it:
	// the agent's reaper at once, the maker outside the sandbox when the host has named what it
	// killed. Nothing comes if the kernel's zygote is dead too.
	wordGrace = 50 * time.Second
	// readyGrace is how long a list of kernels waits for a warm one that has not yet said that it is ready.
	readyGrace = 5 * time.Second
	// maxPending is how much output between two cells waits for the next one.
	maxPending = 64 << 10
	// maxLastWords is how much is told of what a kernel said that died while it started.
	maxLastWords = 1 << 10
	// maxQueue is how many runs wait for one kernel.
	maxQueue = 256
)

// kernelExit is how a kernel's process ended, as its parent saw it.
type kernelExit struct {
	code   int
	signal string
	oom    bool
	text   string
}

// kernel is one interpreter. It runs the user's code in its own process, so its words are checked and it is never
// waited for without a way out.
type kernel struct {
	a     *Agent
	token string
	warm  bool
	conn  net.Conn
	pipes [2]*os.File // stdout, stderr
	fds   [2]int      // their descriptors, for reads that do not wait
	pidfd *os.File
	pfd   int
	tree  tree
	inter interpreter     // of a program that does not speak the protocol itself; nil for others
	exits chan kernelExit // its end, at most one
	ready chan struct{}   // closed when it takes cells, or has died
	gone  chan struct{}   // closed when its process has ended
	done  chan struct{}   // closed when it is dead and everything of it is let go

	dismissed chan struct{} // closed by the first kill: nothing waits for the word about it any more

	current atomic.Pointer[run] // changed under mu

	// out orders what goes to a run's client and is held while writing; it guards the pending output and the pipes'
	// descriptors. Before it reads a pipe, a pump waits on began until the current run has.
	out     sync.Mutex
	began   *sync.Cond
	pending []pendingOutput
	waiting int // bytes in pending
	shut    bool

	mu      sync.Mutex
	info    agentapi.Kernel
	queue   []*run
	stray   int
	killed  string // why we killed it
	asked   bool   // dismissed is closed
	over    bool   // it takes no runs any more, because why it died is known or will stay unknown
	isReady bool
}

// newKernel takes over the descriptors, also when it fails.
func (a *Agent) newKernel(name string, socket, stdout, stderr, pidfd int) (*kernel, error) {
	conn, err := agentapi.DescriptorConn(socket)
	if err != nil {
		agentapi.CloseDescriptors([]int{stdout, stderr, pidfd})
		return nil, fault.Wrap(fault.Internal, err, "kernel %s: its socket cannot be used", name)
	}
	k := &kernel{
		a: a, conn: conn, fds: [2]int{stdout, stderr}, pfd: pidfd,
		exits: make(chan kernelExit, 1), ready: make(chan struct{}), gone: make(chan struct{}), done: make(chan struct{}), dismissed: make(chan struct{}),
		info: agentapi.Kernel{Name: name, Language: agentapi.LanguagePython, State: agentapi.KernelStarting},
	}
	k.began = sync.NewCond(&k.out)
	for i, fd := range k.fds {
		_ = syscall.SetNonblock(fd, true) // it fails for what is no descriptor, and so does the first read
		k.pipes[i] = os.NewFile(uintptr(fd), "kernel output")
	}
	_ = syscall.SetNonblock(pidfd, true)
	k.pidfd = os.NewFile(uintptr(pidfd), "kernel pidfd")
	return k, nil
}

// register puts a kernel into the table and starts listening to it. A living one of that name is a conflict for a
// kernel that we start, and killed for one that was adopted; its end is not waited for, because its exit may be the
// next message on the channel that brought the new one.
func (a *Agent) register(k *kernel) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	old, ok := a.kernels[k.info.Name]
	living := ok && !old.dead()
	if living && !k.warm {
		return fault.New(fault.Conflict, "the kernel %q is alive", k.info.Name)
	}
	if a.closed {
		return fault.New(fault.Unavailable, "the sandbox is ending")
	}
	if living {
		a.wg.Go(func() { old.kill("another kernel took its place") })
	}
	a.kernels[k.info.Name] = k
	if k.token != "" {
		a.tokens[k.token] = k
		close(a.arrived)
		a.arrived = make(chan struct{})
	}
	a.wg.Go(k.listen)
	if k.inter != nil {
		a.wg.Go(func() { k.inter.serve(k) })
	}
	a.wg.Go(func() { k.pump(0, agentapi.FrameStdout) })
	a.wg.Go(func() { k.pump(1, agentapi.FrameStderr) })
	a.wg.Go(k.watchExit)
	return nil
}

// Adopt takes a kernel that was forked outside the sandbox; descriptors are in the order of KernelDescriptors and are
// taken over. A living kernel of that name is killed first.
func (a *Agent) Adopt(ad agentapi.Adoption, fds []int) error {
	if len(fds) != agentapi.KernelDescriptors {
		agentapi.CloseDescriptors(fds)
		return fault.New(fault.Invalid, "a kernel comes with %d descriptors", agentapi.KernelDescriptors)
	}
	pid := pidOf(fds[3])
	k, err := a.newKernel(ad.Name, fds[0], fds[1], fds[2], fds[3])
	if err != nil {
		return err
	}
	k.token, k.warm = ad.Token, true
	k.info.PID, k.info.Warm, k.info.Cwd = pid, true, a.cfg.Boot.Workdir
	k.tree = tree{self: a.pid(), root: func() int {
		if k.ended() {
			return 0
		}
		return pid
	}}
	if err := a.register(k); err != nil {
		k.killProcess()
		k.letGo()
		return err
	}
	return nil
}

// Exited tells how an adopted kernel ended.
func (a *Agent) Exited(e agentapi.KernelExit) {
	a.mu.Lock()
	k := a.tokens[e.Token]
	delete(a.tokens, e.Token)
	a.mu.Unlock()
	if k != nil {
		k.exits <- kernelExit{code: e.Code, signal: e.Signal, oom: e.OOM, text: e.Message}
	}
}

// pidOf is the number, here, of the process that a pidfd names; zero when it has none.
func pidOf(pidfd int) int {
	// By itself: os.ReadFile would take ten system calls more, while somebody waits for the sandbox.
	fd, err := syscall.Open("/proc/self/fdinfo/"+itoa(pidfd), syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer syscall.Close(fd)
	raw := make([]byte, 512)
	n, err := syscall.Read(fd, raw)
	if err != nil {
		return 0
	}
	raw = raw[:n]
	for line := range strings.Lines(string(raw)) {
		if word, ok := strings.CutPrefix(line, "Pid:"); ok {
			if pid, err := strconv.Atoi(strings.TrimSpace(word)); err == nil && pid > 1 {
				return pid
			}
		}
	}
	return 0
}

// ends are the two sides of what joins a kernel to the agent.
type ends struct {
	ours   []int // socket, stdout, stderr
	theirs []int // stdin, stdout, stderr, socket: the order of their numbers in the kernel
}

func openEnds() (e ends, err error) {
	defer func() {
		if err != nil {
			agentapi.CloseDescriptors(append(e.ours, e.theirs...))
		}
	}()
	null, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return e, err
	}
	e.theirs = append(e.theirs, null)
	var pipes []int
	for range 2 {
		var pipe [2]int
		if err := syscall.Pipe2(pipe[:], syscall.O_CLOEXEC); err != nil {
			e.ours = pipes
			return e, err
		}
		pipes, e.theirs = append(pipes, pipe[0]), append(e.theirs, pipe[1])
	}
	e.ours = pipes
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return e, err
	}
	e.ours, e.theirs = append([]int{pair[0]}, pipes...), append(e.theirs, pair[1])
	return e, nil
}

// execKernel starts a program that finds its socket at descriptor 3.
func (a *Agent) execKernel(params agentapi.KernelStartParams, u user, argv []string) (*kernel, error) {
	e, err := openEnds()
	if err != nil {
		return nil, explain(err, "kernel descriptors")
	}
	defer agentapi.CloseDescriptors(e.theirs)
	return a.bear(params, command{argv: argv, cwd: params.Cwd, user: u}, e, nil)
}

// bear starts a kernel's process and takes our ends of it, also when that fails; inter, if any, stands between.
func (a *Agent) bear(params agentapi.KernelStartParams, c command, e ends, inter interpreter) (*kernel, error) {
	c.tag, c.pidfd, c.leads = newID("k"), new(int), true // an interrupt goes to the group it leads
	for _, fd := range e.theirs {
		c.files = append(c.files, uintptr(fd))
	}
	exits := make(chan kernelExit, 1)
	pid, err := a.start(c, func(x exit) { exits <- kernelExitOf(x) })
	if err != nil {
		agentapi.CloseDescriptors(e.ours)
		return nil, err
	}
	k, err := a.newKernel(params.Kernel, e.ours[0], e.ours[1], e.ours[2], *c.pidfd)
	if err != nil {
		_ = a.reaper.signal(pid, syscall.SIGKILL) // one that has ended needs none
		return nil, err
	}
	k.inter, k.exits = inter, exits
	k.info.PID, k.info.Language, k.info.Cwd = pid, params.Language, params.Cwd
	if k.info.Cwd == "" {
		k.info.Cwd = a.workdir(c.user)
	}
	k.tree = tree{tag: c.tag, self: a.pid(), root: func() int {
		if a.reaper.alive(pid) {
			return pid
		}
		return 0
	}}
	if err := a.register(k); err != nil {
		k.killProcess()
		k.letGo()
		return nil, err
	}
	return k, nil
}

func kernelExitOf(e exit) kernelExit {
	if e.status.Signaled() {
		return kernelExit{code: -1, signal: signalName(e.status.Signal())}
	}
	return kernelExit{code: e.status.ExitStatus()}
}

func (a *Agent) kernel(name string) (*kernel, error) {
	if name == "" {
		name = agentapi.DefaultKernel
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	k, ok := a.kernels[name]
	if !ok {
		return nil, fault.New(fault.Gone, "there is no kernel %q", name)
	}
	return k, nil
}

func (a *Agent) listKernels(none) ([]agentapi.Kernel, error) {
	a.mu.Lock()
	kernels := make([]*kernel, 0, len(a.kernels))
	for _, k := range a.kernels {
		kernels = append(kernels, k)
	}
	a.mu.Unlock()
	list := []agentapi.Kernel{}
	for _, k := range kernels {
		k.settle()
		list = append(list, k.describe())
	}
	slices.SortFunc(list, func(x, y agentapi.Kernel) int { return strings.Compare(x.Name, y.Name) })
	return list, nil
}

func (a *Agent) kernelWait(l *link, params agentapi.KernelParams) error {
	left := l.left(a)
	k, err := a.awaitKernel(params, left)
	if err != nil {
		return err
	}
	select {
	case <-k.ready:
	case <-left:
		return nil
	}
	if params.Cwd != "" {
		k.mu.Lock()
		k.info.Cwd = params.Cwd
		k.mu.Unlock()
	}
	return l.answer(k.describe())
}

// awaitKernel finds a kernel. One that is named by its token may not be here yet: it comes by the channel, while its
// asker came by another way; left is closed when the asker has gone.
func (a *Agent) awaitKernel(params agentapi.KernelParams, left <-chan struct{}) (*kernel, error) {
	for params.Token != "" {
		a.mu.Lock()
		k, arrived := a.kernels[params.Kernel], a.arrived
		a.mu.Unlock()
		if k != nil && k.token == params.Token {
			return k, nil
		}
		select {
		case <-arrived:
		case <-left:
			return nil, fault.New(fault.Gone, "there is no kernel %q", params.Kernel)
		}
	}
	return a.kernel(params.Kernel)
}

func (a *Agent) kernelStop(params agentapi.KernelParams) (none, error) {
	k, err := a.kernel(params.Kernel)
	if err != nil {
		return none{}, err
	}
	k.kill("it was stopped")
	<-k.done
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.kernels[k.info.Name] == k {
		delete(a.kernels, k.info.Name)
	}
	return none{}, nil
}

func (a *Agent) interrupt(params agentapi.KernelParams) (none, error) {
	k, err := a.kernel(params.Kernel)
	if err != nil {
		return none{}, err
	}
	k.interruptRun(k.current.Load())
	return none{}, nil
}

// settle gives a warm kernel a moment to say that it is ready: nobody waited for that when its sandbox was made.
func (k *kernel) settle() {
	if !k.warm {
		return
	}
	select {
	case <-k.ready:
	case <-time.After(readyGrace):
	}
}

func (k *kernel) describe() agentapi.Kernel {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.info
}

func (k *kernel) dead() bool {
	select {
	case <-k.done:
		return true
	default:
		return k.describe().State == agentapi.KernelDead
	}
}

// kill ends the kernel with what it started; listen tells the rest.
func (k *kernel) kill(why string) {
	k.mu.Lock()
	dead := k.info.State == agentapi.KernelDead
	if k.killed == "" && !dead {
		k.killed = why
	}
	if !k.asked {
		k.asked = true
		close(k.dismissed)
	}
	k.mu.Unlock()
	if dead {
		return
	}
	if r := k.current.Load(); r != nil {
		// A client that does not read must not hold up the end of its kernel.
		r.link.conn.SetWriteDeadline(time.Now().Add(deliverGrace))
	}
	k.killProcess()
	k.expectEnd()
}

// expectEnd bounds reading from a kernel that ends, and writing to it: its children may hold the socket and do neither.
func (k *kernel) expectEnd() { k.conn.SetDeadline(time.Now().Add(exitGrace)) }

func (k *kernel) killProcess() {
	k.tree.kill()
	raw, err := k.pidfd.SyscallConn()
	if err == nil {
		// It fails for a kernel that has ended, or that was let go of because it had.
		_ = raw.Control(func(fd uintptr) { _ = pidfdSignal(int(fd), syscall.SIGKILL, 0) })
	}
}

// ended reports whether the kernel's process is no more.
func (k *kernel) ended() (over bool) {
	raw, err := k.pidfd.SyscallConn()
	if err != nil {
		return true
	}
	if raw.Control(func(fd uintptr) { over = readable(int(fd)) }) != nil {
		return true
	}
	return over
}

// readable reports whether a descriptor has something to tell now; a pidfd has when its process ended.
func readable(fd int) bool {
	fds := []pollfd{{fd: int32(fd), events: pollIn}}
	var now syscall.Timespec
	n, err := poll(fds, &now)
	return err != nil || n > 0
}

// watchExit notices the end of a kernel whose children hold its socket open.
func (k *kernel) watchExit() {
	raw, err := k.pidfd.SyscallConn()
	if err != nil {
		return
	}
	if raw.Read(func(fd uintptr) bool { return readable(int(fd)) }) == nil {
		close(k.gone)
		k.expectEnd()
	}
}

// listen hears the kernel until it dies or breaks the protocol.
func (k *kernel) listen() {
	in := bufio.NewReaderSize(&remainder{conn: k.conn}, 4<<10)
	frames := agentapi.NewReader(in)
	for {
		f, err := frames.Read()
		if err == nil {
			var e agentapi.Event
			if e, err = DecodeKernelEvent(f); err == nil {
				err = k.hear(e, len(f.Payload))
			}
			if len(f.Payload) > agentapi.ChunkSize {
				frames = agentapi.NewReader(in) // a large result's buffer is not kept
			}
		}
		if err != nil {
			k.die(err)
			return
		}
	}
}

func (k *kernel) becomeReady(e agentapi.Event) error {
	k.mu.Lock()
	if k.isReady {
		k.mu.Unlock()
		return &agentapi.ProtocolError{Reason: "the kernel said twice that it is ready"}
	}
	k.isReady = true
	k.info.State = agentapi.KernelIdle
	k.info.IPython = strings.HasPrefix(e.Message, "ipython")
	k.info.Lost = e.Lost
	close(k.ready)
	next := k.next()
	k.mu.Unlock()
	k.send(next)
	return nil
}

// remainder reads a connection, and after its deadline what has come by then.
//
// A read of net.Conn fails at the deadline even when bytes wait: an agent that did not run for a
// while would lose the last frames of a kernel.
type remainder struct {
	conn net.Conn
	late int // bytes read after the deadline
}

func (r *remainder) Read(b []byte) (int, error) {
	n, err := r.conn.Read(b)
	if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) || r.late >= drainBytes {
		return n, err
	}
	socket, ok := r.conn.(syscall.Conn)
	if !ok {
		return 0, err
	}
	raw, rerr := socket.SyscallConn()
	if rerr != nil {
		return 0, err
	}
	_ = raw.Control(func(fd uintptr) { // it fails for a connection that is closed: nothing can be read
		n, _ = retry(func() (int, error) { return syscall.Read(int(fd), b) })
	})
	if n <= 0 {
		return 0, err
	}
	r.late += n
	return n, nil
}
