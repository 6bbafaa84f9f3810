package execd

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"iter"
	"strings"
	"sync"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

//go:embed kernel.java
var javaKernel []byte

const (
	java          = "java"
	maxJavaFrame  = 1 << 20
	javaFrameHead = 5
)

// repl is a kernel of Java: a program of ours that the image's JDK runs, for as long as its context lives.
type repl struct {
	stream *agentapi.Stream
	out    <-chan said // what it tells; closed at its end
	stop   func()
	rest   []byte // of a frame that has not come whole

	mu          sync.Mutex // held for one message to it
	interrupted bool
}

// startJava starts one.
func (h *Handler) startJava(c *call, name string) (*repl, error) {
	agent, err := h.agent(c)
	if err != nil {
		return nil, err
	}
	home, err := h.home(c)
	if err != nil {
		return nil, err
	}
	file := tempDir(home) + "/.opensandbox-java/Kernel.java"
	ctx, cancel := h.lasting(c)
	_, err = agent.Write(ctx, agentapi.WriteParams{Path: file}, bytes.NewReader(javaKernel))
	if err != nil {
		cancel()
		return nil, err
	}
	stream, err := h.sandboxes.Exec(ctx, c.t.Who, c.id(), agentapi.ExecParams{
		// What it costs to start counts more than how fast it becomes.
		Argv:  []string{java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "--add-modules", "jdk.jshell", file},
		Stdin: true, Tag: name, Disconnect: agentapi.DisconnectKill, // nobody finds it again
	})
	if err != nil {
		cancel()
		return nil, err
	}
	out := make(chan said)
	h.work.Go(func() {
		defer cancel()
		defer close(out)
		for e, err := range stream.Events() {
			select {
			case out <- said{e, err}:
			case <-ctx.Done():
				return
			}
		}
	})
	return &repl{stream: stream, out: out, stop: cancel}, nil
}

// runJava runs a cell in a context's kernel, which is started when there is none.
func (h *Handler) runJava(c *call, in *codeContext, name, code string) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		r := c.room.kernelOf(in)
		if r == nil {
			var err error
			if r, err = h.startJava(c, name); err != nil {
				yield(agentapi.Event{}, err)
				return
			}
		}
		if err := r.send([]byte(code)); err != nil {
			r.stop()
			c.room.forgo(in, r)
			yield(agentapi.Event{}, err)
			return
		}
		halted, gone := c.room.sent(name, in, r)
		if gone { // deleted meanwhile: nobody could stop what runs there
			r.stop()
			yield(agentapi.Event{}, fault.New(fault.Gone, "the context was deleted"))
			return
		}
		if halted {
			_ = r.send(nil) // a kernel that has gone tells so below
		}
		if !r.follow(yield) {
			r.stop()
			c.room.forgo(in, r)
		}
	}
}

// send gives it code; nothing interrupts what runs.
func (r *repl) send(code []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.interrupted = len(code) == 0
	return r.stream.Stdin(append(binary.BigEndian.AppendUint32(nil, uint32(len(code))), code...))
}

// follow yields what a cell tells, to its end, and whether the kernel lives on.
func (r *repl) follow(yield func(agentapi.Event, error) bool) (lives bool) {
	failed := false
	for {
		kind, data, end, err := r.frame(yield)
		switch {
		case err != nil:
			yield(agentapi.Event{}, err)
			return false
		case end != nil:
			message := "the kernel of java ended: " + end.Message + "; variables are lost, the next run starts a fresh kernel"
			yield(agentapi.Event{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: agentapi.OutcomeKernelDied, Lost: true, Message: message}}, nil)
			return false
		case kind == 'D':
			yield(agentapi.Event{Type: agentapi.EventEnd, End: r.verdict(failed)}, nil)
			return true
		}
		failed = failed || kind == 'X'
		if !yield(javaEvent(kind, data), nil) {
			return false
		}
	}
}

func (r *repl) verdict(failed bool) *agentapi.End {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.interrupted:
		return &agentapi.End{Outcome: agentapi.OutcomeInterrupted, Message: "the cell was interrupted; variables are kept"}
	case failed:
		return &agentapi.End{Outcome: agentapi.OutcomeError}
	}
	return &agentapi.End{Outcome: agentapi.OutcomeOK}
}

// javaEvent is a frame in the words of every other kernel.
func javaEvent(kind byte, data []byte) agentapi.Event {
	switch kind {
	case 'E':
		return agentapi.Event{Type: agentapi.EventStderr, Data: data}
	case 'R':
		text, _ := json.Marshal(string(data)) // a text can always be one
		return agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Data: map[string]json.RawMessage{"text/plain": text}, Main: true}}
	case 'X':
		name, value, _ := strings.Cut(string(data), "\n")
		return agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: name, Value: value, Traceback: []string{value}}}
	default:
		return agentapi.Event{Type: agentapi.EventStdout, Data: data}
	}
}

// frame reads one frame, or how the process ended. What the JDK itself says on standard error is passed on.
func (r *repl) frame(yield func(agentapi.Event, error) bool) (kind byte, data []byte, end *agentapi.End, err error) {
	for {
		kind, data, rest, err := cutFrame(r.rest)
		if err != nil || kind != 0 {
			r.rest = rest
			return kind, data, nil, err
		}
		s, more := <-r.out
		switch {
		case !more:
			return 0, nil, nil, fault.New(fault.Unavailable, "the connection to the kernel of java broke")
		case s.err != nil:
			return 0, nil, nil, s.err
		case s.event.Type == agentapi.EventStdout:
			r.rest = append(r.rest, s.event.Data...)
		case s.event.Type == agentapi.EventStderr:
			yield(s.event, nil)
		case s.event.Type == agentapi.EventEnd:
			return 0, nil, s.event.End, nil
		}
	}
}

// cutFrame takes the first frame off what has come; kind is zero when it has not come whole.
func cutFrame(in []byte) (kind byte, data, rest []byte, err error) {
	if len(in) < javaFrameHead {
		return 0, nil, in, nil
	}
	n := int(binary.BigEndian.Uint32(in[1:javaFrameHead]))
	if in[0] == 0 || n > maxJavaFrame {
		return 0, nil, nil, fault.New(fault.Unavailable, "the kernel of java does not speak its protocol any more")
	}
	if len(in) < javaFrameHead+n {
		return 0, nil, in, nil
	}
	rest = in[javaFrameHead+n:]
	if len(rest) == 0 {
		rest = nil // what a long frame took is not kept
	}
	return in[0], bytes.Clone(in[javaFrameHead : javaFrameHead+n]), rest, nil
}

func (r *room) repl(name string) *repl {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ctx := r.contexts[name]; ctx != nil {
		return ctx.repl
	}
	return nil
}

func (r *room) kernelOf(ctx *codeContext) *repl {
	r.mu.Lock()
	defer r.mu.Unlock()
	return ctx.repl
}

// sent notes that a context's kernel has its cell, and tells whether somebody has interrupted that meanwhile, or deleted the context.
func (r *room) sent(name string, ctx *codeContext, to *repl) (halted, gone bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.contexts[name] != ctx {
		return false, true
	}
	ctx.repl, ctx.sent = to, true
	return ctx.halted, false
}

// halt is the kernel whose cell is to be interrupted; nil: there is none, or the cell has not got there and is remembered.
func (r *room) halt(name string) *repl {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx := r.contexts[name]
	switch {
	case ctx == nil || !ctx.busy:
		return nil
	case !ctx.sent:
		ctx.halted = true
		return nil
	}
	return ctx.repl
}

// forgo makes a context be without the kernel that it had.
func (r *room) forgo(ctx *codeContext, had *repl) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ctx.repl == had {
		ctx.repl = nil
	}
}
