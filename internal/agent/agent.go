// Package agent is the process inside a sandbox: it runs commands, terminals, kernels and file operations for whoever
// holds a connection to it. It knows no SDK, no driver and no network beyond the sandbox's own loopback.
package agent

import (
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// Config says where an agent lives.
type Config struct {
	Boot      agentapi.Boot
	PID1      bool       // it is the sandbox's init: it reaps orphans and may become other users
	Home      string     // the home of the default user, where the agent is not root
	Shortages func() int // how often the kernel has ended something here for lack of memory; nil: whoever made the sandbox tells
	Sudo      string     // name of the sudo broker's abstract socket; empty: SudoSocket. Only with Boot.Sudo
}

// Agent serves connections until Close.
type Agent struct {
	cfg     Config
	uid     int
	started time.Time
	reaper  *reaper
	broker  *net.UnixListener

	wg     sync.WaitGroup // everything that runs on behalf of this agent
	ending chan struct{}  // closed when closed is set
	memory shortage
	sooner sooner

	mu        sync.Mutex
	closed    bool
	links     map[*link]struct{}
	channels  map[*net.UnixConn]struct{}
	processes map[string]*process
	ended     []ended // processes of the last moments
	kernels   map[string]*kernel
	tokens    map[string]*kernel // adopted kernels by the token of their exit
	arrived   chan struct{}      // closed and replaced at each adoption
	leftovers map[interface{ Close() error }]struct{}
}

// New makes an agent; it serves nothing until it is handed connections.
func New(cfg Config) (*Agent, error) {
	a := &Agent{
		cfg: cfg, uid: os.Getuid(), started: time.Now(),
		links:     map[*link]struct{}{},
		channels:  map[*net.UnixConn]struct{}{},
		processes: map[string]*process{},
		kernels:   map[string]*kernel{},
		tokens:    map[string]*kernel{},
		arrived:   make(chan struct{}),
		ending:    make(chan struct{}),
		memory:    shortage{told: make(chan struct{}), count: cfg.Shortages},
		leftovers: map[interface{ Close() error }]struct{}{},
	}
	a.memory.ending = a.ending
	if cfg.Shortages != nil {
		a.memory.known = cfg.Shortages()
	}
	a.reaper = newReaper(cfg.PID1)
	a.wg.Go(a.reaper.run)
	if cfg.PID1 {
		a.sooner.learn()
	}
	a.furnish()
	if cfg.Boot.Sudo {
		if err := a.listenSudo(); err != nil {
			a.Close()
			return nil, err
		}
	}
	if !cfg.Boot.Expected {
		a.serveBroker()
	}
	return a, nil
}

// become makes an agent that was started ahead somebody's. It has no connection yet; of what it was told before, its user, its
// programs and its broker are the template's and stay.
func (a *Agent) become(boot agentapi.Boot) {
	a.cfg.Boot, a.started = boot, time.Now() // nobody has been answered yet who could ask for them
	a.furnish()                              // again: its file tree may be another one now
	a.serveBroker()
}

// furnish makes what a sandbox begins with.
func (a *Agent) furnish() {
	if a.cfg.PID1 && a.cfg.Boot.OpenFiles > 0 {
		limitOpenFiles(a.cfg.Boot.OpenFiles)
	}
	a.makeWorkdir()
}

// limitOpenFiles sets what every process of the sandbox inherits. The agent itself needs some, whatever is asked.
func limitOpenFiles(n int) {
	var lim syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim) != nil {
		return
	}
	want := min(uint64(max(n, 256)), lim.Max)
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: want, Max: want})
}

// Close ends everything the agent started and returns when it is gone.
func (a *Agent) Close() {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		a.wg.Wait()
		return
	}
	a.closed = true
	close(a.ending)
	links, channels := a.links, a.channels
	var processes []*process
	for _, p := range a.processes {
		processes = append(processes, p)
	}
	var kernels []*kernel
	for _, k := range a.kernels {
		kernels = append(kernels, k)
	}
	leftovers := a.leftovers
	for l := range links {
		l.close()
	}
	for ch := range channels {
		ch.Close()
	}
	a.mu.Unlock()

	if a.broker != nil {
		a.broker.Close()
	}
	for _, p := range processes {
		p.kill(agentapi.OutcomeInterrupted, "the sandbox is ending")
	}
	for _, k := range kernels {
		k.kill("the sandbox is ending")
		<-k.done
	}
	for _, p := range processes {
		<-p.done
	}
	a.mu.Lock()
	for c := range leftovers {
		c.Close()
	}
	a.mu.Unlock()
	a.reaper.close()
	a.wg.Wait()
}

// keep remembers what must be closed when the agent ends; drop forgets it.
func (a *Agent) keep(c interface{ Close() error }) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leftovers[c] = struct{}{}
	if a.closed {
		c.Close()
	}
}

func (a *Agent) drop(c interface{ Close() error }) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.leftovers, c)
}

// spawn runs f as part of the agent, unless it is closing.
func (a *Agent) spawn(f func()) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	a.wg.Go(f)
	return true
}

// HandleConn serves the one operation of a connection and closes it.
func (a *Agent) HandleConn(nc net.Conn) { a.handle(nc, nil) }

// handle serves a connection that may have come with a socket for a kernel, which is closed with it.
func (a *Agent) handle(nc net.Conn, talk *os.File) {
	l := newLink(nc)
	l.talk = talk
	if talk != nil {
		defer talk.Close()
	}
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		nc.Close()
		return
	}
	a.wg.Add(1)
	a.links[l] = struct{}{}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		delete(a.links, l)
		a.mu.Unlock()
		a.wg.Done()
	}()
	defer l.linger()
	defer func() {
		// One request that meets a defect of ours must not take PID 1, and the sandbox, with it.
		if r := recover(); r != nil {
			l.refuse(fault.Wrap(fault.Internal, fmt.Errorf("%v\n%s", r, debug.Stack()), "the agent met a defect: %v", r))
		}
	}()
	a.serve(l)
}

func (a *Agent) serve(l *link) {
	f, err := l.in.Read()
	if err != nil {
		return
	}
	req, err := agentapi.DecodeRequest(f)
	if err != nil {
		l.refuse(err)
		return
	}
	h, ok := handlers[req.Op]
	if !ok {
		l.refuse(fault.New(fault.Unsupported, "this agent does not know the operation %q", req.Op))
		return
	}
	h(a, l, req)
}

type handler func(*Agent, *link, agentapi.Request)

// handlers is filled in by init because the handlers themselves tell which operations there are.
var handlers map[agentapi.Op]handler

func init() {
	handlers = map[agentapi.Op]handler{
		agentapi.OpHello:       answer((*Agent).hello),
		agentapi.OpExec:        stream((*Agent).exec),
		agentapi.OpAttach:      stream((*Agent).attach),
		agentapi.OpProcesses:   answer((*Agent).listProcesses),
		agentapi.OpSignal:      answer((*Agent).signal),
		agentapi.OpStdin:       stream((*Agent).stdin),
		agentapi.OpResize:      answer((*Agent).resize),
		agentapi.OpRun:         stream((*Agent).run),
		agentapi.OpKernels:     answer((*Agent).listKernels),
		agentapi.OpKernelStart: answer((*Agent).kernelStart),
		agentapi.OpKernelWait:  stream((*Agent).kernelWait),
		agentapi.OpKernelStop:  answer((*Agent).kernelStop),
		agentapi.OpInterrupt:   answer((*Agent).interrupt),
		agentapi.OpStat:        answer((*Agent).stat),
		agentapi.OpList:        answer((*Agent).list),
		agentapi.OpRead:        stream((*Agent).read),
		agentapi.OpWrite:       stream((*Agent).write),
		agentapi.OpMkdir:       answer((*Agent).mkdir),
		agentapi.OpMove:        answer((*Agent).move),
		agentapi.OpRemove:      answer((*Agent).remove),
		agentapi.OpChmod:       answer((*Agent).chmod),
		agentapi.OpSymlink:     answer((*Agent).symlink),
		agentapi.OpWatch:       stream((*Agent).watch),
		agentapi.OpDial:        stream((*Agent).dial),
		agentapi.OpMetrics:     answer((*Agent).metrics),
		agentapi.OpAccount:     answer((*Agent).account),
		agentapi.OpListen:      answer((*Agent).listen),
		agentapi.OpBranch:      stream((*Agent).branch),
		agentapi.OpHalt:        stream((*Agent).halt),
		agentapi.OpCollect:     stream((*Agent).collect),
		agentapi.OpDiscard:     answer((*Agent).discard),
	}
}

// stream adapts an operation that speaks on its connection; an error it returns is a refusal.
func stream[P any](f func(*Agent, *link, P) error) handler {
	return func(a *Agent, l *link, req agentapi.Request) {
		params, err := agentapi.DecodeParams[P](req)
		if err == nil {
			err = f(a, l, params)
		}
		if err != nil {
			l.refuse(err)
		}
	}
}

// answer adapts an operation that only answers.
func answer[P, V any](f func(*Agent, P) (V, error)) handler {
	return stream(func(a *Agent, l *link, params P) error {
		value, err := f(a, params)
		if err != nil {
			return err
		}
		return l.answer(value)
	})
}

// none is the parameter or the answer of operations that have none.
type none struct{}

func (a *Agent) hello(none) (agentapi.Hello, error) {
	h := agentapi.Hello{Version: agentapi.Version, PID: os.Getpid()}
	for _, op := range agentapi.Ops {
		h.Ops = append(h.Ops, string(op))
	}
	return h, nil
}

func (a *Agent) metrics(none) (agentapi.Metrics, error) {
	m := agentapi.Metrics{Processes: a.countProcesses(), UptimeMS: time.Since(a.started).Milliseconds()}
	u, err := a.user("")
	if err != nil {
		return m, err
	}
	var st syscall.Statfs_t
	if syscall.Statfs(a.workdir(u), &st) == nil {
		m.DiskTotal = int64(st.Blocks) * st.Bsize
		m.DiskUsed = int64(st.Blocks-st.Bfree) * st.Bsize
	}
	return m, nil
}

func (a *Agent) countProcesses() int {
	if a.cfg.PID1 {
		return len(pids())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.processes) + len(a.kernels)
}

func (a *Agent) pid() int { return os.Getpid() }
