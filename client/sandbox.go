package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Sandbox is a handle on one sandbox. Its SandboxInfo is what the server said last.
type Sandbox struct {
	SandboxInfo
	c *Client
}

func (s *Sandbox) path(parts ...string) string {
	p := "/sandboxes/" + url.PathEscape(s.ID)
	for _, part := range parts {
		p += "/" + url.PathEscape(part)
	}
	return p
}

// Refresh asks the server again.
func (s *Sandbox) Refresh(ctx context.Context) error {
	var info SandboxInfo
	if err := s.c.do(ctx, http.MethodGet, s.path(), nil, nil, &info); err != nil {
		return err
	}
	s.SandboxInfo = info
	return nil
}

// Kill ends the sandbox. A sandbox that has ended already is no error.
func (s *Sandbox) Kill(ctx context.Context) error {
	var info SandboxInfo
	err := s.c.do(ctx, http.MethodDelete, s.path(), nil, nil, &info)
	if KindOf(err) == Gone {
		return nil
	}
	if err == nil {
		s.SandboxInfo = info
	}
	return err
}

// SetTimeout gives the sandbox a new lifetime, counted from now.
func (s *Sandbox) SetTimeout(ctx context.Context, d time.Duration) error {
	return s.update(ctx, http.MethodPost, "timeout", TimeoutRequest{TimeoutSeconds: seconds(d)})
}

// SetNetwork changes what may leave the sandbox.
func (s *Sandbox) SetNetwork(ctx context.Context, n Network) error {
	return s.update(ctx, http.MethodPut, "network", n)
}

// Pause stops the sandbox with its memory until it is resumed. One that is paused already is no error.
func (s *Sandbox) Pause(ctx context.Context, req PauseRequest) error {
	return s.update(ctx, http.MethodPost, "pause", req)
}

// Resume lets a paused sandbox go on. One that runs already is no error.
func (s *Sandbox) Resume(ctx context.Context, req ResumeRequest) error {
	return s.update(ctx, http.MethodPost, "resume", req)
}

// Forks is what a fork made.
type Forks struct {
	Sandboxes   []*Sandbox
	NotCopied   []NotCopied // what the sandbox has and its copies do not
	StallMS     float64     // for how long the sandbox's kernel took no cell
	MemoryBytes int64       // what was copied beyond what every kernel of the template begins with
}

// Fork copies the sandbox: its files, and the memory of one of its kernels. It returns when every copy takes code.
func (s *Sandbox) Fork(ctx context.Context, req ForkRequest) (*Forks, error) {
	var result ForkResult
	if err := s.c.do(ctx, http.MethodPost, s.path("fork"), nil, req, &result); err != nil {
		return nil, err
	}
	f := &Forks{NotCopied: result.NotCopied, StallMS: result.StallMS, MemoryBytes: result.MemoryBytes}
	for _, info := range result.Sandboxes {
		f.Sandboxes = append(f.Sandboxes, &Sandbox{SandboxInfo: info, c: s.c})
	}
	return f, nil
}

// Snapshot makes a template of the sandbox's files, which only your tenant can use. The sandbox goes on meanwhile.
func (s *Sandbox) Snapshot(ctx context.Context, req SnapshotRequest) (*TemplateInfo, error) {
	var t TemplateInfo
	if err := s.c.do(ctx, http.MethodPost, s.path("snapshot"), nil, req, &t); err != nil {
		return nil, err
	}
	return &t, nil
}

func (s *Sandbox) update(ctx context.Context, method, what string, in any) error {
	var info SandboxInfo
	if err := s.c.do(ctx, method, s.path(what), nil, in, &info); err != nil {
		return err
	}
	s.SandboxInfo = info
	return nil
}

// Usage is what the sandbox uses now.
func (s *Sandbox) Usage(ctx context.Context) (SandboxUsage, error) {
	var u SandboxUsage
	err := s.c.do(ctx, http.MethodGet, s.path("usage"), nil, nil, &u)
	return u, err
}

// Run runs one cell and collects everything it said. An exception in the code is in the Output, not an error.
func (s *Sandbox) Run(ctx context.Context, req RunRequest) (*Output, error) {
	var out Output
	if err := s.c.do(ctx, http.MethodPost, s.path("run"), nil, req, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// RunCode runs one cell and yields each event as it happens. Leaving the loop leaves the run.
func (s *Sandbox) RunCode(ctx context.Context, req RunRequest) iter.Seq2[Event, error] {
	return s.stream(ctx, "run", req)
}

// Exec runs one command and collects everything it said. A non-zero exit is in the Output, not an error.
func (s *Sandbox) Exec(ctx context.Context, req ExecRequest) (*Output, error) {
	var out Output
	if err := s.c.do(ctx, http.MethodPost, s.path("exec"), nil, req, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// ExecStream runs one command and yields each event as it happens.
func (s *Sandbox) ExecStream(ctx context.Context, req ExecRequest) iter.Seq2[Event, error] {
	return s.stream(ctx, "exec", req)
}

func (s *Sandbox) stream(ctx context.Context, what string, in any) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		b, err := json.Marshal(in)
		if err != nil {
			yield(Event{}, fmt.Errorf("encode request: %w", err))
			return
		}
		resp, err := s.c.send(ctx, http.MethodPost, s.path(what), nil, bytes.NewReader(b), ndjson)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer resp.Body.Close()
		decodeEvents(resp.Body, yield)
	}
}

// errCut is a stream without a last word.
var errCut = errors.New("the stream was cut before the run ended: the server or the network went away")

func decodeEvents(r io.Reader, yield func(Event, error) bool) {
	dec := json.NewDecoder(r)
	for {
		var e Event
		if err := dec.Decode(&e); err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
			yield(Event{}, errCut)
			return
		} else if err != nil {
			yield(Event{}, fmt.Errorf("event stream: %w", err))
			return
		}
		if e.Type == EventFault && e.Fault != nil {
			yield(e, &Error{Kind: e.Fault.Kind, Message: e.Fault.Message})
			return
		}
		last := e.Type == EventEnd
		if last {
			// The end of the body is read so that the connection can be used again.
			_, _ = io.Copy(io.Discard, io.MultiReader(dec.Buffered(), io.LimitReader(r, 1<<10)))
		}
		if !yield(e, nil) || last {
			return
		}
	}
}

// Processes lists what was started by Exec and still runs.
func (s *Sandbox) Processes(ctx context.Context) ([]Process, error) {
	var list ProcessList
	err := s.c.do(ctx, http.MethodGet, s.path("processes"), nil, nil, &list)
	return list.Processes, err
}

// Signal sends a signal to a process by its id, tag or pid.
func (s *Sandbox) Signal(ctx context.Context, process string, req SignalRequest) error {
	return s.c.do(ctx, http.MethodPost, s.path("processes", process, "signal"), nil, req, nil)
}

// SignalPID sends a signal to a process by its pid inside the sandbox.
func (s *Sandbox) SignalPID(ctx context.Context, pid int, req SignalRequest) error {
	return s.Signal(ctx, strconv.Itoa(pid), req)
}

// Kernels lists the sandbox's interpreters.
func (s *Sandbox) Kernels(ctx context.Context) ([]Kernel, error) {
	var list KernelList
	err := s.c.do(ctx, http.MethodGet, s.path("kernels"), nil, nil, &list)
	return list.Kernels, err
}

// StartKernel starts another interpreter with variables of its own.
func (s *Sandbox) StartKernel(ctx context.Context, req KernelRequest) (Kernel, error) {
	var k Kernel
	err := s.c.do(ctx, http.MethodPost, s.path("kernels"), nil, req, &k)
	return k, err
}

// StopKernel ends an interpreter.
func (s *Sandbox) StopKernel(ctx context.Context, name string) error {
	return s.c.do(ctx, http.MethodDelete, s.path("kernels", name), nil, nil, nil)
}

// RestartKernel gives an interpreter a fresh start; its variables are gone.
func (s *Sandbox) RestartKernel(ctx context.Context, name string) (Kernel, error) {
	var k Kernel
	err := s.c.do(ctx, http.MethodPost, s.path("kernels", name, "restart"), nil, nil, &k)
	return k, err
}

// InterruptKernel stops the running cell; variables stay.
func (s *Sandbox) InterruptKernel(ctx context.Context, name string) error {
	return s.c.do(ctx, http.MethodPost, s.path("kernels", name, "interrupt"), nil, nil, nil)
}
