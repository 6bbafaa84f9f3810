package agent

import (
	"bufio"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

// interpreter makes a kernel of a program that does not speak the protocol itself.
type interpreter interface {
	serve(k *kernel)
	// interruptible says whether a signal may be sent now; one that comes too early is sent when it may.
	interruptible() bool
	close()
}

// translator is the kernel's end of the socket for such a program: it gives orders on one pipe and hears on another what the
// program says of itself. Output goes through the kernel's own pipes, as every kernel's does.
type translator struct {
	conn   net.Conn // to the agent's side of the kernel
	orders *os.File
	words  *os.File
	repeat time.Duration // after which an interrupt is said again; zero: never

	mu          sync.Mutex
	phase       phase
	interrupted bool // an interrupt came in this cell
}

type phase int

const (
	phaseIdle    phase = iota
	phaseOrdered       // the program reads the cell; an interrupt would hit the reading
	phaseRunning
)

// far are the program's ends of what joins it to us, and ours that its kernel takes.
type far struct {
	orders, stdout, stderr, words int
	null                          int
	ours                          []int
}

func openTranslator() (t *translator, f far, err error) {
	var all []int
	defer func() {
		if err != nil {
			agentapi.CloseDescriptors(all)
		}
	}()
	var read, write [4]int // orders, stdout, stderr, words
	for i := range read {
		var pipe [2]int
		if err := syscall.Pipe2(pipe[:], syscall.O_CLOEXEC); err != nil {
			return t, f, err
		}
		read[i], write[i] = pipe[0], pipe[1]
		all = append(all, pipe[0], pipe[1])
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return t, f, err
	}
	all = append(all, null)
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return t, f, err
	}
	all = append(all, pair[0])
	conn, err := agentapi.DescriptorConn(pair[1])
	if err != nil {
		return t, f, err
	}
	_ = syscall.SetNonblock(write[0], true) // so that a close ends a write that waits
	_ = syscall.SetNonblock(read[3], true)
	t = &translator{conn: conn, orders: os.NewFile(uintptr(write[0]), "orders"), words: os.NewFile(uintptr(read[3]), "words")}
	return t, far{read[0], write[1], write[2], write[3], null, []int{pair[0], read[1], read[2]}}, nil
}

// close lets go of the program.
func (t *translator) close() {
	t.conn.Close()
	t.orders.Close()
	t.words.Close()
}

func (t *translator) interruptible() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.interrupted = t.phase != phaseIdle
	if t.phase == phaseRunning && t.repeat > 0 {
		_ = t.words.SetReadDeadline(time.Now().Add(t.repeat)) // whoever waits for the end insists then
	}
	return t.phase == phaseRunning
}

// wait says until when the end of a cell is waited for before an interrupt is said again; zero: for good.
func (t *translator) wait(until time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.words.SetReadDeadline(until) // a pipe of ours takes one
}

// enter changes the phase and says whether an interrupt came in the one before.
func (t *translator) enter(p phase) (interrupted bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	interrupted = t.interrupted
	t.phase = p
	if p != phaseRunning {
		t.interrupted = false
		_ = t.words.SetReadDeadline(time.Time{})
	}
	return interrupted
}

// hear has every cell run that the agent asks for, and counts them; it ends with the first that cannot be, or with the agent.
func (t *translator) hear(run func(req agentapi.KernelRequest) error) {
	requests := agentapi.NewReader(bufio.NewReaderSize(t.conn, 4<<10))
	for count := 1; ; {
		f, err := requests.Read()
		if err != nil {
			return
		}
		req, err := agentapi.DecodeParams[agentapi.KernelRequest](agentapi.Request{Op: agentapi.OpRun, Params: f.Payload})
		if err != nil || f.Kind != agentapi.FrameRequest {
			continue
		}
		t.enter(phaseOrdered) // before others hear of it and may interrupt it
		if err := t.tell(agentapi.Event{Type: agentapi.EventStarted, Count: count}); err != nil {
			return
		}
		if strings.Contains(req.Code, "\x00") {
			t.enter(phaseIdle)
			err = t.over(agentapi.OutcomeError, agentapi.CodeError{Name: "ValueError", Value: "the code holds a NUL byte, which this language cannot have"})
		} else {
			err = run(req)
		}
		if err != nil {
			return
		}
		if !req.Silent {
			count++
		}
	}
}

func (t *translator) over(outcome agentapi.Outcome, e agentapi.CodeError) error {
	if err := t.tell(agentapi.Event{Type: agentapi.EventError, Error: &e}); err != nil {
		return err
	}
	return t.tell(agentapi.Event{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: outcome}})
}

func (t *translator) tell(e agentapi.Event) error {
	e.Time = time.Now()
	return agentapi.WriteJSON(t.conn, agentapi.FrameEvent, e)
}
