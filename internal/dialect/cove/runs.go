package cove

import (
	"bytes"
	"encoding/json"
	"iter"
	"mime"
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func (a *API) run(c *call) error {
	var req client.RunRequest
	if err := c.decode(maxCode, &req); err != nil {
		return err
	}
	params, err := runParams(req)
	if err != nil {
		return err
	}

	events := a.sandboxes.Run(c.ctx(), c.who, c.id(), params)

	return a.tell(c, events)
}

func runParams(req client.RunRequest) (agentapi.RunParams, error) {
	ms, err := milliseconds("timeout_seconds", req.TimeoutSeconds)
	if err != nil {
		return agentapi.RunParams{}, err
	}
	leaving, err := disconnect(req.OnDisconnect)
	return agentapi.RunParams{
		Kernel: req.Kernel, Code: req.Code, Env: req.Env, Cwd: req.Cwd, TimeoutMS: ms, Disconnect: leaving, Silent: req.Silent,
	}, err
}

func (a *API) exec(c *call) error {
	var req client.ExecRequest
	if err := c.decode(maxCode, &req); err != nil {
		return err
	}
	if req.PTY != nil {
		return fault.New(fault.Invalid, "a terminal needs an interactive command: GET this path with Upgrade: %s", client.Protocol)
	}
	params, err := execParams(req)
	if err != nil {
		return err
	}
	params.Stdin = req.Stdin != ""

	stream, err := a.sandboxes.Exec(c.ctx(), c.who, c.id(), params)
	if err != nil {
		return err
	}
	var feeding sync.WaitGroup
	defer feeding.Wait()
	defer stream.Close() // before Wait: a command that reads nothing must not hold the feeder
	if params.Stdin {
		feeding.Go(func() { feed(stream, req.Stdin) })
	}

	return a.tell(c, stream.Events())
}

// feed gives a command its stdin while its output is read. A command that ends early has no use for the rest.
func feed(stream *agentapi.Stream, stdin string) {
	for len(stdin) > 0 {
		n := min(len(stdin), agentapi.ChunkSize)
		if stream.Stdin([]byte(stdin[:n])) != nil {
			return
		}
		stdin = stdin[n:]
	}
	_ = stream.CloseStdin()
}

func execParams(req client.ExecRequest) (agentapi.ExecParams, error) {
	p := agentapi.ExecParams{
		Argv: req.Argv, Env: req.Env, CleanEnv: req.CleanEnv, Cwd: req.Cwd, User: req.User, PTY: (*agentapi.PTYSize)(req.PTY), Tag: req.Tag,
	}
	switch {
	case len(req.Argv) > 0 && req.Command != "":
		return p, fault.New(fault.Invalid, "give either argv or command, not both")
	case req.Command != "":
		p.Argv = []string{"/bin/sh", "-c", req.Command}
	case len(req.Argv) == 0 || req.Argv[0] == "":
		return p, fault.New(fault.Invalid, "nothing to run: give argv (a list) or command (a line for /bin/sh)")
	}
	if strings.ContainsRune(strings.Join(p.Argv, ""), 0) {
		return p, fault.New(fault.Invalid, "an argument holds a zero byte")
	}
	if req.Limits != nil {
		p.Limits = agentapi.RunLimits(*req.Limits)
	}
	var err error
	if p.TimeoutMS, err = milliseconds("timeout_seconds", req.TimeoutSeconds); err != nil {
		return p, err
	}
	p.Disconnect, err = disconnect(req.OnDisconnect)
	return p, err
}

func disconnect(text string) (agentapi.Disconnect, error) {
	switch d := agentapi.Disconnect(text); d {
	case "", agentapi.DisconnectKill, agentapi.DisconnectSurvive:
		return d, nil
	}
	return "", fault.New(fault.Invalid, "unknown on_disconnect %q: use kill or survive", text)
}

// tell answers with a run, as the client wants it.
func (a *API) tell(c *call, events iter.Seq2[agentapi.Event, error]) error {
	if wantsJSON(c.r.Header.Get("Accept")) {
		return a.collect(c, events)
	}
	return a.stream(c, events)
}

// wantsJSON is true when the first type the client accepts is plain JSON.
func wantsJSON(accept string) bool {
	first, _, _ := strings.Cut(accept, ",")
	kind, _, err := mime.ParseMediaType(first)
	return err == nil && kind == "application/json"
}

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// maxPooled is the largest buffer that is kept for the next stream.
const maxPooled = 64 << 10

func putBuffer(b *[]byte) {
	if cap(*b) <= maxPooled {
		buffers.Put(b)
	}
}

// stream passes each event on as it comes; the client's reading sets the pace.
func (a *API) stream(c *call, events iter.Seq2[agentapi.Event, error]) error {
	return streamed(a, c, events, func(b []byte, enc *encoder, e *agentapi.Event) ([]byte, error) {
		if err := refused(e); err != nil {
			return b, err
		}
		return enc.append(b, e)
	})
}

// streamed passes on what events are as lines.
func streamed[E any](a *API, c *call, events iter.Seq2[E, error], add func(b []byte, enc *encoder, e *E) ([]byte, error)) error {
	out := newLines(c)
	buf := buffers.Get().(*[]byte)
	defer func() { putBuffer(buf) }()
	var enc encoder
	var none E
	for e, err := range events {
		if err == nil {
			*buf, err = add((*buf)[:0], &enc, &e)
			e = none // its output is free while the client takes the line
		}
		if err != nil {
			if out.begun {
				_ = out.raw(enc.release((*buf)[:0]))
			}
			return out.fail(a, err, func(f *client.Fault) any { return client.Event{Type: client.EventFault, Fault: f} })
		}
		if out.raw(*buf) != nil {
			return nil // the client has left; leaving the loop leaves the run
		}
	}
	return nil
}

// refused is the fault of an operation that never began.
func refused(e *agentapi.Event) error {
	if e.Type == agentapi.EventEnd && e.End != nil && e.End.Outcome == agentapi.OutcomeRefused && e.End.Fault != nil {
		return fault.New(e.End.Fault.Kind, "%s", e.End.Fault.Message)
	}
	return nil
}

// What a collected answer holds at most; the run goes on and the rest is dropped.
const (
	maxCollectedOutput  = 4 << 20  // of each stream
	maxCollectedResults = 32 << 20 // notices and all that belongs to a result included
	collectedCost       = 256      // of a result or notice beside its text: there may be very many
)

func (a *API) collect(c *call, events iter.Seq2[agentapi.Event, error]) error {
	var got collector
	for e, err := range events {
		if err == nil {
			err = refused(&e)
		}
		if err != nil {
			return err
		}
		got.add(&e)
	}
	return c.answer(http.StatusOK, got.output())
}

// collector gathers a run in bounded memory.
type collector struct {
	out            client.Output
	stdout, stderr bytes.Buffer
	results        int
}

func (g *collector) add(e *agentapi.Event) {
	switch e.Type {
	case agentapi.EventStdout:
		g.keep(&g.stdout, e.Data)
	case agentapi.EventStderr:
		g.keep(&g.stderr, e.Data)
	case agentapi.EventStarted:
		g.out.Count = e.Count
	case agentapi.EventResult:
		g.result(e.Result)
	case agentapi.EventError:
		g.out.Error = (*client.CodeError)(e.Error)
	case agentapi.EventNotice:
		if g.room(len(e.Message)) {
			g.out.Notices = append(g.out.Notices, e.Message)
		}
	case agentapi.EventEnd:
		if e.End != nil {
			g.out.End = *wireEnd(e.End)
		}
	case agentapi.EventFile, agentapi.EventReady:
	}
}

func (g *collector) keep(b *bytes.Buffer, data []byte) {
	room := maxCollectedOutput - b.Len()
	if len(data) > room {
		data = data[:room]
		g.out.Truncated = true
	}
	b.Write(data)
}

func (g *collector) result(r *agentapi.Result) {
	if r == nil {
		return
	}
	size := 0
	for _, part := range []map[string]json.RawMessage{r.Data, r.Metadata} {
		for k, v := range part {
			size += len(k) + len(v)
		}
	}
	if g.room(size) {
		g.out.Results = append(g.out.Results, client.Result(*r))
	}
}

// room says whether there is room for one thing more.
func (g *collector) room(size int) bool {
	g.results += collectedCost + size
	if g.results > maxCollectedResults {
		g.out.Truncated = true
		return false
	}
	return true
}

func (g *collector) output() *client.Output {
	g.out.Stdout, g.out.StdoutBase64 = textOf(g.stdout.Bytes())
	g.out.Stderr, g.out.StderrBase64 = textOf(g.stderr.Bytes())
	if g.out.Results == nil {
		g.out.Results = []client.Result{}
	}
	return &g.out
}

// textOf is data as text, and also as bytes when text cannot hold it.
func textOf(data []byte) (string, []byte) {
	// A character cut by the size limit is not a sign of binary data.
	if cut := data[:len(data)-unfinished(data)]; len(data) == maxCollectedOutput && utf8.Valid(cut) {
		return string(cut), nil
	}
	if utf8.Valid(data) {
		return string(data), nil
	}
	return strings.ToValidUTF8(string(data), "\uFFFD"), data
}

func (a *API) processes(c *call) error {
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	list, err := agent.Processes(c.ctx())
	if err != nil {
		return err
	}
	out := client.ProcessList{Processes: make([]client.Process, len(list))}
	for i, p := range list {
		out.Processes[i] = client.Process{ID: p.ID, PID: p.PID, Argv: p.Argv, Cwd: p.Cwd, User: p.User, Tag: p.Tag, PTY: p.PTY}
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) signal(c *call) error {
	var req client.SignalRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}

	target := agentapi.Target{Name: c.r.PathValue("process")}
	if err := agent.Signal(c.ctx(), agentapi.SignalParams{Target: target, Signal: req.Signal, Tree: req.Tree}); err != nil {
		return err
	}

	return c.nothing()
}

func (a *API) kernels(c *call) error {
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	list, err := agent.Kernels(c.ctx())
	if err != nil {
		return err
	}
	out := client.KernelList{Kernels: make([]client.Kernel, len(list))}
	for i := range list {
		out.Kernels[i] = wireKernel(&list[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) startKernel(c *call) error {
	var req client.KernelRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}

	k, err := a.sandboxes.StartKernel(c.ctx(), c.who, c.id(), sandbox.KernelSpec(req))
	if err != nil {
		return err
	}

	return c.answer(http.StatusCreated, wireKernel(&k))
}

func (a *API) stopKernel(c *call) error {
	if err := a.sandboxes.StopKernel(c.ctx(), c.who, c.id(), c.r.PathValue("kernel")); err != nil {
		return a.noKernel(c, err)
	}
	return c.nothing()
}

func (a *API) restartKernel(c *call) error {
	k, err := a.sandboxes.RestartKernel(c.ctx(), c.who, c.id(), c.r.PathValue("kernel"))
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireKernel(&k))
}

func (a *API) interruptKernel(c *call) error {
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	if err := agent.Interrupt(c.ctx(), agentapi.KernelParams{Kernel: c.r.PathValue("kernel")}); err != nil {
		return a.noKernel(c, err)
	}
	return c.nothing()
}

// noKernel turns the agent's fault.Gone for an unknown kernel into fault.NotFound.
//
// The agent says Gone so that a run makes a new kernel. For clients Gone means that the sandbox has
// ended, and of a living sandbox only the kernel is missing.
func (a *API) noKernel(c *call, err error) error {
	if !fault.Is(err, fault.Gone) {
		return err
	}
	sb, readErr := a.sandboxes.Get(c.ctx(), c.who, c.id())
	if readErr != nil || sb.State == sandbox.StateStopping || sb.State == sandbox.StateEnded {
		return err
	}
	return fault.Wrap(fault.NotFound, err, "sandbox %s has no kernel %q", c.id(), c.r.PathValue("kernel"))
}

func wireKernel(k *agentapi.Kernel) client.Kernel {
	return client.Kernel{
		Name: k.Name, Language: k.Language, State: string(k.State), PID: k.PID, Cwd: k.Cwd, Message: k.Message, IPython: k.IPython, Warm: k.Warm,
	}
}

// frame encodes an event for an interactive command.
func frame(e *agentapi.Event) (client.FrameKind, []byte, error) {
	switch e.Type {
	case agentapi.EventStdout:
		return client.FrameStdout, e.Data, nil
	case agentapi.EventStderr:
		return client.FrameStderr, e.Data, nil
	}
	b, err := json.Marshal(wireEvent(e))
	return client.FrameEvent, b, err
}
