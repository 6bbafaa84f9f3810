package agent

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

// shell makes a kernel of bash. It is the kernel's end of the socket, feeds bash's standard input and hears on a pipe what
// bash says of itself; output goes through the kernel's own pipes, as every kernel's does.
//
// Bash is an interactive one without a terminal: only that goes on with its next line when an interrupt has ended this one.
type shell struct {
	conn   net.Conn // to the agent's side of the kernel
	orders *os.File // bash's standard input
	words  *os.File
	cells  int // so far; numbers them

	mu          sync.Mutex
	phase       phase
	interrupted bool // an interrupt came in this cell
}

// Bash misses an interrupt that comes while it starts a command, and half a line that it reads when one comes: so both are
// said again until the cell has ended.
const (
	repeatAfter = 100 * time.Millisecond
	maxRepeats  = 15
)

type phase int

const (
	phaseIdle    phase = iota
	phaseOrdered       // bash reads the cell; an interrupt would leave half of it to be read as commands
	phaseRunning
)

// What bash is told about its descriptors: words come on 3, standard error on 4, so that what it says of the missing
// terminal is not heard. Both move away from where scripts put theirs.
const (
	wordsFD    = "198"
	shellSetup = "exec 2>&4 4>&- " + wordsFD + ">&3 3>&-; set +o history +H; unset HISTFILE; PS1= PS2=; builtin printf 'ready %s\\n' \"$BASH_VERSION\" >&" + wordsFD + "\n"
)

// shellKernel starts bash.
func (a *Agent) shellKernel(params agentapi.KernelStartParams, u user) (*kernel, error) {
	if err := a.needs(params.Language, "bash", u); err != nil {
		return nil, err
	}
	e, s, err := openShell()
	if err != nil {
		return nil, explain(err, "kernel descriptors")
	}
	defer agentapi.CloseDescriptors(e.theirs)
	c := command{
		argv: []string{"bash", "--noprofile", "--norc", "--noediting", "-i"}, cwd: params.Cwd, user: u,
		env: map[string]string{"PS1": "", "PS2": "", "HISTFILE": "", "TERM": "dumb"},
	}
	k, err := a.bear(params, c, e, s)
	if err != nil {
		s.close()
	}
	return k, err
}

// openShell makes what joins bash to us: theirs are its descriptors 0 to 4.
func openShell() (e ends, s *shell, err error) {
	var all []int
	defer func() {
		if err != nil {
			agentapi.CloseDescriptors(all)
			e = ends{}
		}
	}()
	pipe := func() (r, w int, err error) {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return 0, 0, err
		}
		all = append(all, p[0], p[1])
		return p[0], p[1], nil
	}
	var read, write [4]int // stdin, stdout, stderr, words
	for i := range read {
		if read[i], write[i], err = pipe(); err != nil {
			return e, nil, err
		}
	}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return e, nil, err
	}
	all = append(all, pair[0])
	null, err := syscall.Open("/dev/null", syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		agentapi.CloseDescriptors(pair[1:])
		return e, nil, err
	}
	all = append(all, null)
	conn, err := agentapi.DescriptorConn(pair[1])
	if err != nil {
		return e, nil, err
	}
	_ = syscall.SetNonblock(write[0], true) // so that a close ends a write that waits
	_ = syscall.SetNonblock(read[3], true)
	s = &shell{conn: conn, orders: os.NewFile(uintptr(write[0]), "orders"), words: os.NewFile(uintptr(read[3]), "words")}
	return ends{ours: []int{pair[0], read[1], read[2]}, theirs: []int{read[0], write[1], null, write[3], write[2]}}, s, nil
}

// close lets go of bash; a kernel without a shell has none to let go of.
func (s *shell) close() {
	if s == nil {
		return
	}
	s.conn.Close()
	s.orders.Close()
	s.words.Close()
}

// interruptible says whether a signal may be sent now; one that comes too early is sent when it may.
func (s *shell) interruptible() bool {
	if s == nil {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.interrupted = s.phase != phaseIdle
	if s.phase == phaseRunning {
		_ = s.words.SetReadDeadline(time.Now().Add(repeatAfter)) // whoever waits for the end insists then
	}
	return s.phase == phaseRunning
}

// serve is the kernel: it ends when bash does, or when the agent lets go of it.
func (s *shell) serve(k *kernel) {
	defer s.conn.Close()
	words := bufio.NewReaderSize(s.words, 512)
	if _, err := s.orders.WriteString(shellSetup); err != nil {
		return
	}
	version, err := word(words, "ready ")
	if err != nil || s.tell(agentapi.Event{Type: agentapi.EventReady, Message: "bash " + version}) != nil {
		return
	}
	requests := agentapi.NewReader(bufio.NewReaderSize(s.conn, 4<<10))
	for count := 1; ; {
		f, err := requests.Read()
		if err != nil {
			return
		}
		req, err := agentapi.DecodeParams[agentapi.KernelRequest](agentapi.Request{Op: agentapi.OpRun, Params: f.Payload})
		if err != nil || f.Kind != agentapi.FrameRequest {
			continue
		}
		if err := s.run(k, words, req, count); err != nil {
			return
		}
		if !req.Silent {
			count++
		}
	}
}

func (s *shell) run(k *kernel, words *bufio.Reader, req agentapi.KernelRequest, count int) error {
	if err := s.tell(agentapi.Event{Type: agentapi.EventStarted, Count: count}); err != nil {
		return err
	}
	if strings.Contains(req.Code, "\x00") {
		return s.over(agentapi.OutcomeError, agentapi.CodeError{Name: "ValueError", Value: "the code holds a NUL byte, which no shell can read"})
	}
	s.cells++
	begin, end := shellCell(req, s.cells)
	s.enter(phaseOrdered)
	if _, err := s.orders.WriteString(begin + end); err != nil {
		return err
	}
	if _, err := word(words, "begin"); err != nil {
		return err
	}
	if s.enter(phaseRunning) {
		k.sigint()
	}
	text, err := s.await(k, words, end)
	if err != nil {
		return err
	}
	interrupted := s.enter(phaseIdle)
	status, err := strconv.Atoi(text)
	switch {
	case err != nil:
		return err
	case interrupted && status != 0:
		return s.over(agentapi.OutcomeInterrupted, agentapi.CodeError{Name: "KeyboardInterrupt", Value: "the cell was interrupted"})
	case status != 0:
		return s.over(agentapi.OutcomeError, agentapi.CodeError{Name: "ExitCode", Value: text})
	}
	return s.tell(agentapi.Event{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: agentapi.OutcomeOK}})
}

// await waits for the end of the cell and gives its status.
func (s *shell) await(k *kernel, words *bufio.Reader, end string) (string, error) {
	name := "end " + strconv.Itoa(s.cells) + " "
	for repeats := 0; ; repeats++ {
		status, err := word(words, name)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return status, err
		}
		if repeats >= maxRepeats { // whoever interrupts again gets one more
			s.wait(time.Time{})
			continue
		}
		k.sigint()
		if _, err := s.orders.WriteString(end); err != nil {
			return "", err
		}
		s.wait(time.Now().Add(repeatAfter))
	}
}

// wait says until when the end of a cell is waited for before an interrupt is said again; zero: for good.
func (s *shell) wait(until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.words.SetReadDeadline(until) // a pipe of ours takes one
}

// enter changes the phase and says whether an interrupt came in the one before.
func (s *shell) enter(p phase) (interrupted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	interrupted = s.interrupted
	s.phase = p
	if p != phaseRunning {
		s.interrupted = false
		_ = s.words.SetReadDeadline(time.Time{})
	}
	return interrupted
}

func (s *shell) over(outcome agentapi.Outcome, e agentapi.CodeError) error {
	if err := s.tell(agentapi.Event{Type: agentapi.EventError, Error: &e}); err != nil {
		return err
	}
	return s.tell(agentapi.Event{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: outcome}})
}

func (s *shell) tell(e agentapi.Event) error {
	e.Time = time.Now()
	return agentapi.WriteJSON(s.conn, agentapi.FrameEvent, e)
}

// word waits for a line that begins so and gives the rest of it. What else is written there is an end that was asked for
// twice, or a cell's own doing.
func word(words *bufio.Reader, begins string) (string, error) {
	for {
		line, err := words.ReadSlice('\n')
		if err == bufio.ErrBufferFull {
			continue
		}
		if err != nil {
			return "", err
		}
		if rest, found := strings.CutPrefix(strings.TrimSuffix(string(line), "\n"), begins); found {
			return rest, nil
		}
	}
}

// shellCell is what bash reads to run one cell: two commands, since an interrupt ends only the first. Variables and directory
// are put back by the second, which may be said again. The empty line before that is what a syntax error in the first spoils.
func shellCell(req agentapi.KernelRequest, number int) (begin, end string) {
	var before, after strings.Builder
	for i, name := range slices.Sorted(maps.Keys(req.Env)) {
		if !shellName(name) {
			continue
		}
		had, old := fmt.Sprintf("__cove_had%d", i), fmt.Sprintf("__cove_old%d", i)
		fmt.Fprintf(&before, "%s=${%s+x}; %s=${%s-}; export %s=%s; ", had, name, old, name, name, quoted(req.Env[name]))
		fmt.Fprintf(&after, "if [ \"${%s+x}\" ]; then if [ \"$%s\" ]; then %s=$%s; else unset %s; fi; unset %s %s; fi; ", had, had, name, old, name, had, old)
	}
	if req.Cwd != "" {
		fmt.Fprintf(&before, "__cove_cwd=$PWD; cd -- %s && ", quoted(req.Cwd))
		after.WriteString("if [ \"${__cove_cwd+x}\" ]; then cd -- \"$__cove_cwd\"; unset __cove_cwd; fi; ")
	}
	begin = "builtin printf 'begin\\n' >&" + wordsFD + "; " + before.String() + "eval " + quoted(req.Code) + " </dev/null " + wordsFD + ">&-\n"
	end = "\n{ __cove_status=$?; " + after.String() + "builtin printf 'end %d %d\\n' " + strconv.Itoa(number) + " $__cove_status >&" + wordsFD + "; } 2>/dev/null\n"
	return begin, end
}

// shellName says whether a variable of a shell can have that name.
func shellName(name string) bool {
	for i, c := range name {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}

func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
