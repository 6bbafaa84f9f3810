package interpreter

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

func (in *Interpreter) execute(c *call) error {
	body, err := c.body()
	if err != nil {
		return err
	}
	done, err := transfer.DecodeTurn(c.ctx(), body)
	if err != nil {
		return err
	}
	req, err := decodeExecution(body)
	done()
	if err != nil {
		return c.unprocessable(err)
	}
	name, language, err := in.kernelFor(c, &req)
	if err != nil {
		return err
	}

	ctx, leave := context.WithCancel(c.ctx())
	defer leave()
	events := in.sandboxes.Run(ctx, c.t.Who, c.id(), agentapi.RunParams{
		Kernel: name, Code: *req.Code, Env: req.env(), Disconnect: agentapi.DisconnectKill, Rich: true,
	})

	out := newOutput(c)
	out.enc.apart = language == agentapi.LanguageJava
	return in.stream(c, events, out, leave)
}

// unprocessable answers a body of the wrong shape; other errors are passed on.
func (c *call) unprocessable(err error) error {
	var shape *unprocessable
	if !errors.As(err, &shape) {
		return err
	}
	detail(c.w, http.StatusUnprocessableEntity, []any{shape})
	return nil
}

// said is what the goroutine that hears a run passes to the one that writes.
type said struct {
	event agentapi.Event
	err   error
}

// stream passes a run on, line by line. Lines that are there at once travel together; while there are none, the client
// hears that it is waited for.
func (in *Interpreter) stream(c *call, events iter.Seq2[agentapi.Event, error], out *output, leave func()) error {
	news := make(chan said, 64)
	left := make(chan struct{})
	var hearing sync.WaitGroup
	hearing.Go(func() { hear(c, events, news, left) })
	defer hearing.Wait()
	defer close(left)
	defer leave() // which ends the run
	quiet := time.NewTimer(headerDelay)
	defer quiet.Stop()
	for {
		select {
		case s, more := <-news:
			if !more {
				return nil
			}
			if err := out.pass(s, news); err != nil {
				return in.broken(c, out, err)
			}
		case <-quiet.C:
			if err := out.idle(); err != nil {
				return nil
			}
		case <-c.ctx().Done():
			return in.broken(c, out, c.ctx().Err())
		}
		quiet.Reset(out.patience())
	}
}

// hear passes a run's events on until it ends or nobody listens.
func hear(c *call, events iter.Seq2[agentapi.Event, error], news chan<- said, left <-chan struct{}) {
	defer close(news)
	for e, err := range events {
		tellOwner(c, &e)
		if err == nil && unsaid(&e) {
			continue
		}
		select {
		case news <- said{e, err}:
		case <-left:
			return
		}
		if err != nil {
			return
		}
	}
}

// tellOwner writes what a sandbox's owner would ask about later into the sandbox's log.
func tellOwner(c *call, e *agentapi.Event) {
	switch {
	case e.Type == agentapi.EventNotice:
		c.t.Log(target.Line{At: time.Now(), Level: "warn", Logger: "interpreter", Message: e.Message})
	case e.Type == agentapi.EventEnd && e.End != nil && e.End.Lost:
		c.t.Log(target.Line{At: time.Now(), Level: "error", Logger: "interpreter", Message: e.End.Message})
	}
}

// output is an answer that has begun, or not yet.
type output struct {
	w       http.ResponseWriter
	flusher *http.ResponseController
	begun   bool
	told    bool // there are lines of what the run has said
	buf     bytes.Buffer
	enc     encoder
}

func newOutput(c *call) *output {
	return &output{w: c.w, flusher: http.NewResponseController(c.w)}
}

// pass writes what was said, together with what else has been said by now.
func (o *output) pass(s said, news <-chan said) error {
	for later := true; ; {
		if s.err != nil {
			return s.err
		}
		lines, err := o.enc.lines(&s.event)
		if err != nil {
			return err
		}
		o.buf.Write(lines)
		quiet := len(lines) == 0 || s.event.Type == agentapi.EventStarted
		o.told, later = o.told || !quiet, later && quiet
		if o.buf.Len() > agentapi.ChunkSize {
			return o.flush()
		}
		select {
		case next, more := <-news:
			if !more {
				return o.flush()
			}
			s = next
		default:
			if later { // it can wait for what comes next
				return nil
			}
			return o.flush()
		}
	}
}

// patience is how long nothing may be written.
func (o *output) patience() time.Duration {
	wait := keepalive
	if !o.begun || o.buf.Len() > 0 {
		wait = headerDelay
	}
	if held, since := o.enc.holds(); held {
		wait = min(wait, max(0, lineDelay-time.Since(since)))
	}
	return wait
}

// errLeft is a client that is gone.
var errLeft = errors.New("the client has left")

func (o *output) flush() error {
	o.begin()
	_, err := o.buf.WriteTo(o.w)
	o.buf = bytes.Buffer{} // what a large result took is not kept
	if err != nil {
		return errLeft
	}
	if o.flusher.Flush() != nil {
		return errLeft
	}
	return nil
}

// idle sends what has waited, or says that the run goes on.
func (o *output) idle() error {
	if !o.begun || o.buf.Len() > 0 {
		return o.flush()
	}
	if held := o.enc.held(false); held != nil {
		o.buf.Write(held)
	} else {
		o.buf.WriteString(`{"type":"keepalive"}` + "\n")
	}
	return o.flush()
}

func (o *output) begin() {
	if o.begun {
		return
	}
	o.begun = true
	h := o.w.Header()
	h.Set("Content-Type", "application/x-ndjson")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	o.w.WriteHeader(http.StatusOK)
}

// broken is a run that cannot be told to its end. Where the sandbox is gone the connection is cut: the SDKs then ask
// whether it still runs, and say that it was killed.
func (in *Interpreter) broken(c *call, out *output, err error) error {
	if errors.Is(err, errLeft) {
		return nil
	}
	if held, _ := out.enc.holds(); !out.begun && !out.told && !held && c.ctx().Err() == nil {
		return err
	}
	if c.ctx().Err() != nil || in.gone(c, err) {
		panic(http.ErrAbortHandler)
	}
	if fault.Is(err, fault.Internal) {
		in.log.Error("run failed", "sandbox", c.id(), "error", err)
	}
	out.buf.Write(appendLine(out.enc.held(true), wireError{Type: "error", Name: "ExecutionAborted", Value: fault.Message(err)}))
	out.buf.Write(lastLine)
	_ = out.flush()
	return nil
}

// traceback is one text, as notebooks show it.
func traceback(lines []string) string { return strings.Join(lines, "\n") }
