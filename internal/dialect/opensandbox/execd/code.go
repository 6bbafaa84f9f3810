package execd

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// codeRequest is what POST /code asks for.
type codeRequest struct {
	Code    string `json:"code"`
	Context *struct {
		ID       string `json:"id"`
		Language string `json:"language"`
	} `json:"context"`
}

func (h *Handler) runCode(c *call) error {
	var req codeRequest
	if err := c.decode(maxCode, true, &req); err != nil {
		return err
	}
	var id, language string
	if req.Context != nil {
		id, language = req.Context.ID, languageOf(req.Context.Language)
	}
	switch {
	case strings.TrimSpace(req.Code) == "":
		return invalid("there is no code to run")
	case len(req.Code) > sandbox.MaxCode:
		return &refusal{http.StatusRequestEntityTooLarge, codeBody, "the code is too long"}
	case id == "" && language == "": // as a command, then
		command := commandRequest{Command: req.Code}
		if err := command.check(); err != nil {
			return err
		}
		return h.perform(c, command)
	}
	name := cmp.Or(id, defaultContext(language))
	if id != "" {
		if _, err := h.existing(c, id); err != nil {
			return err
		}
	} else if err := h.ensure(c, name, language); err != nil {
		return h.tellFailure(c, name, err)
	}
	return h.execute(c, name, req.Code)
}

// languageOf takes short names, too; any case is fine.
func languageOf(name string) string {
	switch s := strings.ToLower(strings.TrimSpace(name)); s {
	case "py", "python3", "ipython":
		return agentapi.LanguagePython
	case "js", "node", "nodejs":
		return agentapi.LanguageJavaScript
	case "ts":
		return agentapi.LanguageTypeScript
	case "sh", "shell":
		return agentapi.LanguageBash
	default:
		return s
	}
}

// execute runs a cell and tells what it does. The cell goes on when its client leaves, and its context is busy until it ends.
func (h *Handler) execute(c *call, name, code string) error {
	entered := c.room.enter(name)
	if entered == nil {
		return h.tellFailure(c, name, fault.New(fault.Conflict, "session is busy: context %s runs other code", name))
	}
	ctx, cancel := h.lasting(c)
	events := h.run(ctx, c, entered, name, code)
	news, left := make(chan said, 16), make(chan struct{})
	h.work.Go(func() {
		defer cancel()
		defer close(news)
		leave := sync.OnceFunc(func() { c.room.leave(entered) })
		defer leave()
		for e, err := range events {
			if err != nil || e.Type == agentapi.EventEnd {
				leave() // before others hear of it: the next run may come at once
			}
			select {
			case news <- said{e, err}:
			case <-left:
			}
		}
	})
	defer close(left)
	return h.tellCode(c, name, news)
}

// run runs code in a context, which is a kernel but for languages that have none.
func (h *Handler) run(ctx context.Context, c *call, in *codeContext, name, code string) iter.Seq2[agentapi.Event, error] {
	if _, ok := programs[in.language]; ok {
		return h.runProgram(ctx, c, name, in.language, code)
	}
	events := h.sandboxes.Run(ctx, c.t.Who, c.id(), agentapi.RunParams{Kernel: name, Code: code, Disconnect: agentapi.DisconnectSurvive, Notebook: true})
	return func(yield func(agentapi.Event, error) bool) {
		for e, err := range events {
			if err == nil && e.Type == agentapi.EventStarted && c.room.begin(in) {
				_ = h.interruptKernel(ctx, c, name) // a cell that cannot be interrupted goes on, and tells so itself
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

func (h *Handler) interruptKernel(ctx context.Context, c *call, name string) error {
	agent, err := h.sandboxes.Agent(ctx, c.t.Who, c.id())
	if err != nil {
		return err
	}
	return ignore(agent.Interrupt(ctx, agentapi.KernelParams{Kernel: name}), fault.Gone)
}

// tellCode passes on what a cell tells.
func (h *Handler) tellCode(c *call, name string, news <-chan said) error {
	out := newStream(c.w)
	out.init(name)
	enc := &cellEncoder{out: out, begun: time.Now()}
	return h.pass(c, out, news, func(s said) bool {
		if s.err != nil {
			enc.fail(h.nameOf(c, s.err))
			return true
		}
		return enc.add(&s.event)
	})
}

// tellFailure tells in a stream why there is none: clients show that as an error of the code.
func (h *Handler) tellFailure(c *call, name string, err error) error {
	failed := h.nameOf(c, err)
	out := newStream(c.w)
	out.add(event{Type: "init", Text: name})
	out.add(event{Type: "error", Error: failed})
	_ = out.flush() // a client that has gone hears nothing
	return nil
}

func (h *Handler) nameOf(c *call, err error) *eventError {
	no := h.refusal(c, err)
	return &eventError{Name: no.code, Value: no.message, Traceback: []string{}}
}

// cellEncoder turns the events of one cell into those of a stream. Output is bytes, and a character may come in two pieces.
type cellEncoder struct {
	out    *stream
	begun  time.Time
	rest   [2][]byte // of stdout and stderr: the beginning of a character
	failed bool      // an error was told, which is the last event
}

var outputs = [2]string{"stdout", "stderr"}

// add tells an event and whether it was the last.
func (enc *cellEncoder) add(e *agentapi.Event) (last bool) {
	switch e.Type {
	case agentapi.EventStarted:
		if e.Count > 0 {
			enc.out.add(event{Type: "execution_count", Count: e.Count})
		}
	case agentapi.EventStdout:
		enc.output(0, e.Data)
	case agentapi.EventStderr:
		enc.output(1, e.Data)
	case agentapi.EventNotice:
		enc.output(1, []byte(e.Message+"\n"))
	case agentapi.EventResult:
		if !e.Result.Update { // clients have no results that change
			enc.out.add(event{Type: "result", Results: results(e.Result)})
		}
	case agentapi.EventError:
		value := e.Error.Value
		if value == "" && e.Error.Name == endNames[agentapi.OutcomeInterrupted] { // clients look for one
			value = "the cell was interrupted"
		}
		enc.fail(&eventError{Name: e.Error.Name, Value: value, Traceback: e.Error.Traceback})
	case agentapi.EventEnd:
		enc.end(e.End)
		return true
	case agentapi.EventFile, agentapi.EventSynced, agentapi.EventReady, agentapi.EventBranch:
	}
	return false
}

func (enc *cellEncoder) output(i int, data []byte) {
	if len(enc.rest[i]) > 0 {
		data = append(enc.rest[i], data...)
	}
	n := len(data) - unfinished(data)
	enc.rest[i] = bytes.Clone(data[n:])
	if n > 0 {
		enc.out.add(event{Type: outputs[i], Text: string(data[:n])})
	}
}

// fail tells an error; of several the first counts.
func (enc *cellEncoder) fail(e *eventError) {
	if enc.failed {
		return
	}
	enc.unfinished()
	if e.Traceback == nil {
		e.Traceback = []string{}
	}
	enc.failed = true
	enc.out.add(event{Type: "error", Error: e})
}

func (enc *cellEncoder) unfinished() {
	for i, rest := range enc.rest {
		if len(rest) > 0 {
			enc.out.add(event{Type: outputs[i], Text: string(rest)})
			enc.rest[i] = nil
		}
	}
}

// endNames are what the end of a cell is called that said nothing of an error itself.
var endNames = map[agentapi.Outcome]string{
	agentapi.OutcomeError: "ExecutionError", agentapi.OutcomeTimeout: "TimeoutError", agentapi.OutcomeInterrupted: "KeyboardInterrupt",
	agentapi.OutcomeKilled: "KernelKilled", agentapi.OutcomeOOM: "MemoryError", agentapi.OutcomeKernelDied: "KernelDied",
}

func (enc *cellEncoder) end(end *agentapi.End) {
	enc.unfinished()
	switch {
	case enc.failed:
	case end.Outcome == agentapi.OutcomeOK:
		enc.out.add(event{Type: "execution_complete", Took: took(time.Since(enc.begun))})
	default:
		enc.fail(&eventError{Name: cmp.Or(endNames[end.Outcome], "ExecutionError"), Value: end.Message})
	}
}

// results is a value in all its forms. Clients look for its text under a name of its own.
func results(r *agentapi.Result) map[string]json.RawMessage {
	out := map[string]json.RawMessage{}
	for mime, value := range r.Data {
		if string(value) == "null" {
			continue
		}
		if mime == "text/plain" {
			mime = "text"
		}
		out[mime] = value
	}
	return out
}

func (h *Handler) interruptCode(c *call) error {
	id := c.r.URL.Query().Get("id")
	if id == "" {
		return &refusal{http.StatusBadRequest, codeQuery, "the query parameter id names the context"}
	}
	if cmd, err := c.room.command(id); err == nil && cmd.running() { // code without a language is a command
		return h.interruptCommand(c)
	}
	known, err := h.existing(c, id)
	if err != nil {
		return err
	}
	switch _, ok := programs[known.Language]; {
	case ok:
		err = h.stopProgram(c, id, "SIGINT")
	case c.room.halt(id):
		err = h.interruptKernel(c.ctx(), c, id)
	}
	if err != nil {
		return err
	}
	return c.nothing()
}
