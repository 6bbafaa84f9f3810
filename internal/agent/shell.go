package agent

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

// shell makes a kernel of bash: orders are its standard input.
//
// Bash is an interactive one without a terminal: only that goes on with its next line when an interrupt has ended this one.
type shell struct {
	*translator
	cells int // so far; numbers them
}

// Bash misses an interrupt that comes while it starts a command, and half a line that it reads when one comes: so both are
// said again until the cell has ended.
const (
	repeatAfter = 100 * time.Millisecond
	maxRepeats  = 15
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
	t, far, err := openTranslator()
	if err != nil {
		return nil, explain(err, "kernel descriptors")
	}
	t.repeat = repeatAfter
	s := &shell{translator: t}
	// Its first standard error is nowhere.
	e := ends{ours: far.ours, theirs: []int{far.orders, far.stdout, far.null, far.words, far.stderr}}
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
	s.hear(func(req agentapi.KernelRequest) error { return s.run(k, words, req) })
}

func (s *shell) run(k *kernel, words *bufio.Reader, req agentapi.KernelRequest) error {
	s.cells++
	begin, end := shellCell(req, s.cells)
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
