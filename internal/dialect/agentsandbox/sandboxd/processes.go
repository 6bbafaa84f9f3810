package sandboxd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd/processpb"
	"github.com/covehq/cove/internal/fault"
)

// processes is the service of processes.
type processes struct{ *Handler }

// maxOutput is how much of a command's output one answer holds: clients of gRPC take messages of up to 4 MiB.
const maxOutput = 3 << 19

// Start runs a process and streams what it tells. It ends when its client leaves.
func (s *processes) Start(ctx context.Context, req *connect.Request[processpb.StartRequest], out *connect.ServerStream[processpb.StartResponse]) error {
	params, err := s.params(req.Msg.GetConfig())
	if err != nil {
		return s.failed(ctx, err)
	}
	params.Stdin = true
	if pty := req.Msg.GetPty(); pty != nil {
		if params.PTY, err = sizeOf(pty.GetCols(), pty.GetRows()); err != nil {
			return s.failed(ctx, err)
		}
	}
	stream, err := s.exec(ctx, params)
	if err != nil {
		return s.failed(ctx, err)
	}
	for e, err := range stream.Events() {
		if err != nil {
			return s.failed(ctx, err)
		}
		if told := eventOf(e); told != nil {
			if err := out.Send(told); err != nil {
				return err
			}
		}
	}
	return nil
}

// eventOf is an event in the words of this service; nil: it has none for it.
func eventOf(e agentapi.Event) *processpb.StartResponse {
	switch e.Type {
	case agentapi.EventStarted:
		return &processpb.StartResponse{Event: &processpb.StartResponse_Init{Init: &processpb.InitEvent{ProcessId: int32(e.PID)}}} // Linux has fewer than 2^22
	case agentapi.EventStdout:
		return &processpb.StartResponse{Event: &processpb.StartResponse_Stdout{Stdout: e.Data}}
	case agentapi.EventStderr:
		return &processpb.StartResponse{Event: &processpb.StartResponse_Stderr{Stderr: e.Data}}
	case agentapi.EventEnd:
		return &processpb.StartResponse{Event: &processpb.StartResponse_Exit{Exit: &processpb.ExitEvent{ExitCode: exitOf(e.End)}}}
	default:
		return nil
	}
}

// exitOf is how a process ended, as shells write it.
func exitOf(end *agentapi.End) int32 {
	status := end.Status()
	if status < 0 {
		status = 128 - status
	}
	return int32(status) // 0 to 255, or a signal's number and 128
}

// Execute runs a command to its end.
func (s *processes) Execute(ctx context.Context, req *connect.Request[processpb.ExecuteRequest]) (*connect.Response[processpb.ExecuteResponse], error) {
	params, err := s.params(req.Msg.GetConfig())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	stream, err := s.exec(ctx, params)
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	var stdout, stderr limited
	answer := &processpb.ExecuteResponse{}
	for e, err := range stream.Events() {
		switch {
		case err != nil:
			return nil, s.failed(ctx, err)
		case e.Type == agentapi.EventStdout:
			stdout.write(e.Data)
		case e.Type == agentapi.EventStderr:
			stderr.write(e.Data)
		case e.Type == agentapi.EventEnd:
			answer.ExitCode = exitOf(e.End)
		}
	}
	if n := stdout.dropped + stderr.dropped; n > 0 {
		fmt.Fprintf(&stderr.kept, "\n[%d bytes of output are left out: use Start for more than an answer holds]\n", n)
	}
	answer.Stdout, answer.Stderr = stdout.kept.Bytes(), stderr.kept.Bytes()
	return connect.NewResponse(answer), nil
}

// limited keeps the beginning of an output.
type limited struct {
	kept    bytes.Buffer
	dropped int
}

func (l *limited) write(p []byte) {
	fits := min(len(p), maxOutput-l.kept.Len())
	l.kept.Write(p[:fits])
	l.dropped += len(p) - fits
}

// WriteStdin sends bytes to a process that Start began, or ends its input.
func (s *processes) WriteStdin(ctx context.Context, req *connect.Request[processpb.WriteStdinRequest]) (*connect.Response[processpb.WriteStdinResponse], error) {
	agent, to, err := s.process(ctx, req.Msg.GetProcessId())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	params := agentapi.StdinParams{Target: to, Close: req.Msg.GetEof() != nil}
	if err := agent.Stdin(ctx, params, bytes.NewReader(req.Msg.GetInput())); err != nil {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&processpb.WriteStdinResponse{}), nil
}

// SendSignal sends one of three signals to a process and all it started.
func (s *processes) SendSignal(ctx context.Context, req *connect.Request[processpb.SendSignalRequest]) (*connect.Response[processpb.SendSignalResponse], error) {
	name, ok := map[processpb.Signal]string{
		processpb.Signal_SIGNAL_SIGINT: "SIGINT", processpb.Signal_SIGNAL_SIGKILL: "SIGKILL", processpb.Signal_SIGNAL_SIGTERM: "SIGTERM",
	}[req.Msg.GetSignal()]
	if !ok {
		return nil, s.failed(ctx, fault.New(fault.Invalid, "signal %d: use SIGINT, SIGKILL or SIGTERM", req.Msg.GetSignal()))
	}
	agent, to, err := s.process(ctx, req.Msg.GetProcessId())
	if err == nil {
		err = agent.Signal(ctx, agentapi.SignalParams{Target: to, Signal: name, Tree: true})
	}
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

// ResizeTTY changes the size of a process's terminal.
func (s *processes) ResizeTTY(ctx context.Context, req *connect.Request[processpb.ResizeTTYRequest]) (*connect.Response[processpb.ResizeTTYResponse], error) {
	size, err := sizeOf(req.Msg.GetCols(), req.Msg.GetRows())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	agent, to, err := s.process(ctx, req.Msg.GetProcessId())
	if err == nil {
		err = agent.Resize(ctx, agentapi.ResizeParams{Target: to, Size: *size})
	}
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&processpb.ResizeTTYResponse{}), nil
}

func sizeOf(cols, rows uint32) (*agentapi.PTYSize, error) {
	if cols == 0 || rows == 0 || cols > 1<<16-1 || rows > 1<<16-1 {
		return nil, fault.New(fault.Invalid, "a terminal has from 1 to 65535 columns and rows")
	}
	return &agentapi.PTYSize{Rows: uint16(rows), Cols: uint16(cols)}, nil
}

func visitOf(ctx context.Context) visit { return ctx.Value(visitKey{}).(visit) }

// process names one that Start began.
func (s *processes) process(ctx context.Context, id int32) (*agentapi.Client, agentapi.Target, error) {
	if id <= 0 {
		return nil, agentapi.Target{}, fault.New(fault.Invalid, "process %d is none that was started", id)
	}
	v := visitOf(ctx)
	agent, err := s.sandboxes.Agent(ctx, v.who, v.id)
	return agent, agentapi.Target{PID: int(id)}, err
}

// params says what is to run in the agent's words.
func (s *processes) params(c *processpb.ProcessConfig) (agentapi.ExecParams, error) {
	p := agentapi.ExecParams{Argv: c.GetCommand(), Env: c.GetEnvVars(), Cwd: path.Join(s.home, c.GetCwd())}
	if path.IsAbs(c.GetCwd()) {
		p.Cwd = path.Clean(c.GetCwd())
	}
	if len(p.Argv) == 0 || p.Argv[0] == "" {
		return p, fault.New(fault.Invalid, "there is no command to run")
	}
	for _, text := range append([]string{p.Cwd}, p.Argv...) {
		if strings.ContainsRune(text, 0) {
			return p, fault.New(fault.Invalid, "a command cannot hold a NUL byte")
		}
	}
	for name, value := range p.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return p, fault.New(fault.Invalid, "an environment variable has a name or value that no process can have")
		}
	}
	return p, nil
}

// exec starts a process. The home is made when it is not there.
func (s *processes) exec(ctx context.Context, params agentapi.ExecParams) (*agentapi.Stream, error) {
	v := visitOf(ctx)
	stream, err := s.sandboxes.Exec(ctx, v.who, v.id, params)
	if params.Cwd != s.home || !fault.Is(err, fault.NotFound) || !strings.HasPrefix(fault.Message(err), "working directory ") {
		return stream, err
	}
	agent, err := s.sandboxes.Agent(ctx, v.who, v.id)
	if err == nil {
		_, err = place.MakeHome(ctx, agent, s.home)
	}
	if err != nil {
		return nil, err
	}
	return s.sandboxes.Exec(ctx, v.who, v.id, params)
}

// failed is an error in the words of gRPC.
func (s *processes) failed(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the time given is over; the process was killed"))
	}
	if ctx.Err() != nil {
		return connect.NewError(connect.CodeCanceled, ctx.Err())
	}
	err = s.explain(ctx, visitOf(ctx), err)
	return connect.NewError(codeOf(fault.KindOf(err)), errors.New(fault.Message(err)))
}

func codeOf(kind fault.Kind) connect.Code {
	switch kind {
	case fault.Invalid:
		return connect.CodeInvalidArgument
	case fault.Denied:
		return connect.CodePermissionDenied
	case fault.Unauthed:
		return connect.CodeUnauthenticated
	case fault.NotFound, fault.Gone:
		return connect.CodeNotFound
	case fault.Conflict:
		return connect.CodeFailedPrecondition
	case fault.Exhausted, fault.DiskFull:
		return connect.CodeResourceExhausted
	case fault.Timeout:
		return connect.CodeDeadlineExceeded
	case fault.Unavailable:
		return connect.CodeUnavailable
	case fault.Unsupported:
		return connect.CodeUnimplemented
	case fault.Internal:
	}
	return connect.CodeInternal
}
