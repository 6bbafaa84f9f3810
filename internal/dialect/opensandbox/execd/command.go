package execd

import (
	"context"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// termGrace is how long an interrupted command may take to end by itself.
const termGrace = 3 * time.Second

// command is one that was started here, while it runs and after.
type command struct {
	id      string
	text    string
	started time.Time
	log     *journal // of a background command; nil: it is told as it comes

	// atEnd, if any, is called once with the command's end before others hear of it; nil: the end is not known.
	atEnd func(context.Context, *agentapi.End)

	done chan struct{} // closed when it is over

	mu       sync.Mutex
	over     bool
	exit     int // once over
	failed   string
	finished time.Time
	pressed  bool // somebody sees to it that it ends
}

// maxText is how much of a command's own text is kept.
const maxText = 4 << 10

func newCommand(text string) *command {
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return &command{id: newID(), text: text, started: time.Now(), done: make(chan struct{})}
}

func (cmd *command) running() bool {
	cmd.mu.Lock()
	defer cmd.mu.Unlock()
	return !cmd.over
}

// finish records how it ended.
func (cmd *command) finish(exit int, failed string) {
	cmd.mu.Lock()
	defer cmd.mu.Unlock()
	if cmd.over {
		return
	}
	cmd.over, cmd.exit, cmd.failed, cmd.finished = true, exit, failed, time.Now()
	close(cmd.done)
}

func (h *Handler) runCommand(c *call) error {
	var req commandRequest
	if err := c.decode(maxBody, true, &req); err != nil {
		return err
	}
	if err := req.check(); err != nil {
		return err
	}
	return h.perform(c, req)
}

// perform starts a command and tells what it does, or only that it has begun.
func (h *Handler) perform(c *call, req commandRequest) error {
	params, err := h.params(c, req)
	if err != nil {
		return err
	}
	if strings.Contains(req.text(), interpreterPort) {
		h.openInterpreterPort(c)
	}
	cmd := newCommand(req.text())
	if req.Background {
		cmd.log = h.journal(c, maxJournal)
	}
	told, err := h.begin(c, cmd, params, len(req.Argv) == 0)
	var missing *noProgram
	switch {
	case asNoProgram(err, &missing) && !req.Background:
		return tellMissing(c, cmd, missing)
	case err != nil:
		return err
	}
	if req.Background {
		return tellBackground(c, cmd, told)
	}
	return h.tell(c, cmd, told)
}

// telling is a command whose events somebody may listen to.
type telling struct {
	news <-chan said
	left func() // nobody listens any more
}

// said is what a run tells.
type said struct {
	event agentapi.Event
	err   error
}

// begin starts a command that goes on whether or not its client stays.
func (h *Handler) begin(c *call, cmd *command, params agentapi.ExecParams, shell bool) (*telling, error) {
	if err := c.room.admit(cmd); err != nil {
		return nil, err
	}
	ctx, cancel := h.lasting(c)
	params.Tag, params.Disconnect = cmd.id, agentapi.DisconnectSurvive
	stream, err := h.exec(ctx, c, params, shell)
	if err != nil {
		cancel()
		c.room.forget(cmd)
		return nil, err
	}
	news, left := make(chan said, 16), make(chan struct{})
	h.work.Go(func() {
		defer cancel()
		defer close(news)
		cmd.hear(ctx, stream, news, left)
	})
	return &telling{news, sync.OnceFunc(func() { close(left) })}, nil
}

// hear takes everything that a command tells, to its end. Whoever listens sets the pace; when nobody does, it is dropped.
func (cmd *command) hear(ctx context.Context, stream *agentapi.Stream, news chan<- said, left <-chan struct{}) {
	for e, err := range stream.Events() {
		if cmd.atEnd != nil && (err != nil || e.Type == agentapi.EventEnd) {
			cmd.atEnd(ctx, e.End)
		}
		switch {
		case err != nil:
			cmd.finish(-1, fault.Message(err))
		case e.Type == agentapi.EventStdout || e.Type == agentapi.EventStderr:
			cmd.log.write(e.Data)
		case e.Type == agentapi.EventEnd:
			exit, failed := verdict(e.End)
			cmd.finish(exit, failed)
		}
		if cmd.log != nil {
			continue
		}
		select {
		case news <- said{e, err}:
		case <-left:
		}
	}
}

// verdict is how a command ended: its status, and in words if it failed.
func verdict(end *agentapi.End) (exit int, failed string) {
	switch end.Outcome {
	case agentapi.OutcomeOK:
		return 0, ""
	case agentapi.OutcomeError:
		return end.ExitCode, "exit status " + strconv.Itoa(end.ExitCode)
	default: // a signal, and why
	}
	return -1, end.Message
}

// tell passes a command's output on, line by line, up to its end.
func (h *Handler) tell(c *call, cmd *command, told *telling) error {
	defer told.left()
	out := newStream(c.w)
	out.init(cmd.id)
	whole := keepsEnds(c.r.UserAgent())
	cut := [2]lines{{raw: whole}, {raw: whole}}
	return h.pass(c, out, told.news, func(s said) (last bool) {
		switch {
		case s.err != nil:
			endLines(out, &cut)
			err := h.refusal(c, s.err)
			out.add(failure("-1", err.message))
			return true
		case s.event.Type == agentapi.EventStdout:
			cut[0].next(s.event.Data, func(text string) { out.add(event{Type: "stdout", Text: text}) })
		case s.event.Type == agentapi.EventStderr:
			cut[1].next(s.event.Data, func(text string) { out.add(event{Type: "stderr", Text: text}) })
		case s.event.Type == agentapi.EventEnd:
			endLines(out, &cut)
			out.add(lastEvent(s.event.End, time.Since(cmd.started)))
			return true
		}
		return false
	})
}

// newer finds the major version of an official client.
var newer = regexp.MustCompile(`(?i)\bopensandbox[a-z-]*/([0-9]+)\.`)

// keepsEnds tells whether a client puts the texts of a command's output together as they are: official ones do from version
// 1 on. Those before, and whoever is not known, take each text for a line without its end.
func keepsEnds(agent string) bool {
	found := newer.FindStringSubmatch(agent)
	return len(found) == 2 && found[1] != "0"
}

func endLines(out *stream, cut *[2]lines) {
	cut[0].end(func(text string) { out.add(event{Type: "stdout", Text: text}) })
	cut[1].end(func(text string) { out.add(event{Type: "stderr", Text: text}) })
}

// lastEvent is the last event of a command.
func lastEvent(end *agentapi.End, lasted time.Duration) event {
	exit, failed := verdict(end)
	if failed == "" && end.Outcome == agentapi.OutcomeOK {
		return event{Type: "execution_complete", Took: took(lasted)}
	}
	return failure(strconv.Itoa(exit), failed)
}

func failure(exit, why string) event {
	return event{Type: "error", Error: &eventError{Name: "CommandExecError", Value: exit, Traceback: []string{why}}}
}

// pass turns what is said into events until the last. What is there at once travels together; while there is nothing, the
// client hears that it is waited for.
func (h *Handler) pass(c *call, out *stream, news <-chan said, add func(said) (last bool)) error {
	quiet := time.NewTimer(headerDelay)
	defer quiet.Stop()
	for {
		var err error
		last := false
		select {
		case s, more := <-news:
			if last = !more || add(s); !last {
				last = more && drainNews(out, news, add)
			}
			if last || out.ready() {
				err = out.flush()
			}
		case <-quiet.C:
			err = out.idle()
		case <-c.ctx().Done():
			panic(http.ErrAbortHandler) // the client left, or the sandbox has stopped
		}
		if last || err != nil {
			return nil
		}
		quiet.Reset(out.patience())
	}
}

// drainNews adds what has been said by now, as far as it fits into one write.
func drainNews(out *stream, news <-chan said, add func(said) bool) (last bool) {
	for out.buf.Len() < agentapi.ChunkSize {
		select {
		case s, more := <-news:
			if !more || add(s) {
				return true
			}
		default:
			return false
		}
	}
	return false
}

// tellBackground says that a command has begun, which is all that is told of it here.
func tellBackground(c *call, cmd *command, told *telling) error {
	told.left()
	out := newStream(c.w)
	out.add(event{Type: "init", Text: cmd.id})
	out.add(event{Type: "execution_complete", Took: took(time.Since(cmd.started))})
	_ = out.flush() // a client that has gone finds it by nothing; it runs
	return nil
}

// commandState is a command as it is now.
type commandState struct {
	ID       string     `json:"id"`
	Content  string     `json:"content"`
	Running  bool       `json:"running"`
	ExitCode *int       `json:"exit_code,omitempty"`
	Error    string     `json:"error,omitempty"`
	Started  time.Time  `json:"started_at"`
	Finished *time.Time `json:"finished_at,omitempty"`
}

// aboutCommand is /command/status/ID or /command/ID/logs, which a mux cannot tell apart.
func (h *Handler) aboutCommand(c *call) error {
	one, two := c.r.PathValue("one"), c.r.PathValue("two")
	switch {
	case one == "status":
		cmd, err := c.room.command(two)
		if err != nil {
			return err
		}
		return c.answer(cmd.state())
	case two == "logs":
		return h.commandLogs(c, one)
	}
	return noRoute(c)
}

func (cmd *command) state() commandState {
	cmd.mu.Lock()
	defer cmd.mu.Unlock()
	s := commandState{ID: cmd.id, Content: cmd.text, Running: !cmd.over, Started: cmd.started.UTC()}
	if cmd.over {
		exit, finished := cmd.exit, cmd.finished.UTC()
		s.ExitCode, s.Error, s.Finished = &exit, cmd.failed, &finished
	}
	return s
}

func (h *Handler) commandLogs(c *call, id string) error {
	cmd, err := c.room.command(id)
	if err != nil {
		return err
	}
	if cmd.log == nil {
		return invalid("command " + cmd.id + " was not started in the background: its output was told as it came")
	}
	var from int64
	if text := c.r.URL.Query().Get("cursor"); text != "" {
		if from, err = strconv.ParseInt(text, 10, 64); err != nil || from < 0 {
			return &refusal{http.StatusBadRequest, codeQuery, "cursor is a number that an answer before has told"}
		}
	}
	text, next := cmd.log.read(from, cmd.running())
	out := c.w.Header()
	out.Set("Content-Type", "text/plain; charset=utf-8")
	out.Set("X-Content-Type-Options", "nosniff")
	out.Set("EXECD-COMMANDS-TAIL-CURSOR", strconv.FormatInt(next, 10))
	out.Set("Content-Length", strconv.Itoa(len(text)))
	c.w.WriteHeader(http.StatusOK)
	_, _ = c.w.Write(text) // a client that has gone hears nothing
	return nil
}

// interruptCommand ends a command with all it started: first by asking, then without.
func (h *Handler) interruptCommand(c *call) error {
	id := c.r.URL.Query().Get("id")
	if id == "" {
		return &refusal{http.StatusBadRequest, codeQuery, "the query parameter id names the command"}
	}
	cmd, err := c.room.command(id)
	if err != nil {
		return err
	}
	if !cmd.running() {
		return &refusal{http.StatusNotFound, codeNoCommand, "command " + cmd.id + " has ended"}
	}
	agent, err := h.agent(c)
	if err != nil {
		return err
	}
	err = agent.Signal(c.ctx(), agentapi.SignalParams{Target: agentapi.Target{Tag: cmd.id}, Signal: "SIGTERM", Tree: true})
	if err != nil && !fault.Is(err, fault.NotFound) { // not found: it has ended just now
		return err
	}
	h.insist(cmd, agent)
	return c.nothing()
}

// insist kills a command that still runs after a while. Its end is heard elsewhere, whatever comes of this.
func (h *Handler) insist(cmd *command, agent *agentapi.Client) {
	cmd.mu.Lock()
	defer cmd.mu.Unlock()
	if cmd.over || cmd.pressed {
		return
	}
	cmd.pressed = true
	h.work.Go(func() {
		timer := time.NewTimer(termGrace)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-cmd.done:
			return
		case <-h.life.Done():
			return
		}
		ctx, cancel := context.WithTimeout(h.life, termGrace)
		defer cancel()
		_ = agent.Signal(ctx, agentapi.SignalParams{Target: agentapi.Target{Tag: cmd.id}, Signal: "SIGKILL", Tree: true})
	})
}
