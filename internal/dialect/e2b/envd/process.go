package envd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// processes is the service process.Process.
type processes struct{ *Handler }

type lifetimeKey struct{}

// takeLifetime takes the deadline of a Start out of Connect's hands: it is the command's, not the stream's, and holds
// whether or not the client stays.
func takeLifetime(r *http.Request) *http.Request {
	const header = "Connect-Timeout-Ms"
	text := r.Header.Get(header)
	ms, err := strconv.ParseInt(text, 10, 64)
	if err != nil || len(text) > 10 || ms < 0 {
		return r // none, or one that Connect refuses
	}
	r.Header.Del(header)
	return r.WithContext(context.WithValue(r.Context(), lifetimeKey{}, ms))
}

func (s *processes) Start(ctx context.Context, req *connect.Request[envdpb.StartRequest], out *connect.ServerStream[envdpb.StartResponse]) error {
	params, err := execParams(ctx, req.Msg)
	if err != nil {
		return s.failed(ctx, err)
	}
	if err := s.settle(ctx, req.Header(), &params); err != nil {
		return err
	}

	if slices.ContainsFunc(params.Argv, asksInterpreter) {
		s.openInterpreter(ctx)
	}

	t := target.From(ctx)
	stream, err := s.sandboxes.Exec(ctx, t.Who, t.Sandbox.ID, params)
	if err != nil {
		return s.notStarted(ctx, err)
	}
	defer stream.Close()

	tell := newTeller(out, req.Header(), &envdpb.StartResponse{Event: alive})
	defer tell.close()
	end, err := follow(stream, params.PTY != nil, func(e *envdpb.ProcessEvent) error {
		if begun := e.GetStart(); begun != nil {
			logStart(t, params, begun.GetPid())
		}
		return tell.send(&envdpb.StartResponse{Event: e})
	})
	if err != nil {
		return s.failed(ctx, err)
	}
	logEnd(t, params, end)
	if end.Outcome == agentapi.OutcomeTimeout {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New(end.Message))
	}
	return tell.send(&envdpb.StartResponse{Event: endEvent(end)})
}

// health is the path at which a code interpreter says that it can run code.
const health = "/health"

// asksInterpreter tells whether a command looks at the port of the code interpreter, inside the sandbox.
func asksInterpreter(arg string) bool {
	return strings.Contains(arg, ":"+strconv.Itoa(target.PortInterpreter)+health)
}

// openInterpreter lets the port of the code interpreter answer there. In E2B's image a server listens on it; here code is run by
// the agent, so the agent listens, once somebody asks. What hinders it is the asker's to find out.
func (s *processes) openInterpreter(ctx context.Context) {
	t := target.From(ctx)
	agent, err := s.sandboxes.Agent(ctx, t.Who, t.Sandbox.ID)
	if err == nil {
		err = agent.Listen(ctx, agentapi.ListenParams{Port: target.PortInterpreter, Health: health})
	}
	if err != nil {
		s.log.Debug("the interpreter's port is not open", "sandbox", t.Sandbox.ID, "error", err)
	}
}

// The shells of a sandbox: the SDKs put every command into the first, which not all images have.
const (
	bash = "/bin/bash"
	sh   = "/bin/sh"
)

// wrapped tells whether an SDK has put a command into a shell, or started one at a terminal, by options that every shell has.
func wrapped(argv []string) bool {
	switch len(argv) {
	case 3:
		return argv[1] == "-i" && argv[2] == "-l"
	case 4:
		return argv[1] == "-l" && argv[2] == "-c"
	}
	return false
}

// settle finds out what a request leaves to the sandbox: who the user is, and where a home is. Most leave nothing.
func (s *processes) settle(ctx context.Context, header http.Header, params *agentapi.ExecParams) error {
	params.User = basicUser(header)
	if params.User == "" && !strings.HasPrefix(params.Cwd, "~") {
		return nil
	}
	p, err := s.rpc(ctx, header)
	if err != nil {
		return err
	}
	if params.Cwd == "" {
		return nil
	}
	if params.Cwd, err = p.resolve(ctx, params.Cwd); err != nil {
		return s.failed(ctx, err)
	}
	return nil
}

func execParams(ctx context.Context, m *envdpb.StartRequest) (agentapi.ExecParams, error) {
	p := agentapi.ExecParams{
		Argv: append([]string{m.GetProcess().GetCmd()}, m.GetProcess().GetArgs()...), Env: m.GetProcess().GetEnvs(),
		Cwd: m.GetProcess().GetCwd(), Tag: m.GetTag(), Stdin: m.Stdin == nil || m.GetStdin(),
		Disconnect: agentapi.DisconnectSurvive,
	}
	p.TimeoutMS, _ = ctx.Value(lifetimeKey{}).(int64)
	if p.Argv[0] == "" {
		return p, fault.New(fault.Invalid, "there is no command to start")
	}
	if p.Argv[0] == bash && wrapped(p.Argv) {
		p.Instead = sh
	}
	if m.GetPty() != nil {
		size := ptySize(m.GetPty())
		p.PTY = &size
	}
	return p, nil
}

func ptySize(p *envdpb.PTY) agentapi.PTYSize {
	clamp := func(n uint32) uint16 { return uint16(min(n, math.MaxUint16)) }
	return agentapi.PTYSize{Rows: clamp(p.GetSize().GetRows()), Cols: clamp(p.GetSize().GetCols())}
}

// notStarted says why there is no process: what the request named is not there, or cannot be run.
func (s *processes) notStarted(ctx context.Context, err error) error {
	err = s.explain(ctx, err)
	switch fault.KindOf(err) {
	case fault.NotFound, fault.Denied, fault.Conflict, fault.Exhausted, fault.DiskFull:
		err = fault.Wrap(fault.Invalid, err, "error starting process: %s", fault.Message(err))
	case fault.Internal, fault.Invalid, fault.Unauthed, fault.Timeout, fault.Unavailable, fault.Gone, fault.Unsupported:
	}
	return s.failed(ctx, err)
}

// alive is the event that only says so.
var alive = &envdpb.ProcessEvent{Event: &envdpb.ProcessEvent_Keepalive{Keepalive: &envdpb.ProcessEvent_KeepAlive{}}}

// follow passes on what a process tells, up to its end.
func follow(stream *agentapi.Stream, pty bool, send func(*envdpb.ProcessEvent) error) (*agentapi.End, error) {
	for e, err := range stream.Events() {
		if err != nil {
			return nil, err
		}
		if e.Type == agentapi.EventEnd {
			return e.End, nil
		}
		if event := processEvent(&e, pty); event != nil {
			if err := send(event); err != nil {
				return nil, err
			}
		}
	}
	return nil, fault.New(fault.Unavailable, "the connection to the sandbox broke")
}

func processEvent(e *agentapi.Event, pty bool) *envdpb.ProcessEvent {
	data := &envdpb.ProcessEvent_DataEvent{}
	switch {
	case e.Type == agentapi.EventStarted:
		return &envdpb.ProcessEvent{Event: &envdpb.ProcessEvent_Start{Start: &envdpb.ProcessEvent_StartEvent{Pid: uint32(e.PID)}}}
	case e.Type == agentapi.EventStdout && pty:
		data.Output = &envdpb.ProcessEvent_DataEvent_Pty{Pty: e.Data}
	case e.Type == agentapi.EventStdout:
		data.Output = &envdpb.ProcessEvent_DataEvent_Stdout{Stdout: e.Data}
	case e.Type == agentapi.EventStderr:
		data.Output = &envdpb.ProcessEvent_DataEvent_Stderr{Stderr: e.Data}
	default:
		return nil
	}
	return &envdpb.ProcessEvent{Event: &envdpb.ProcessEvent_Data{Data: data}}
}

// endEvent says how a process ended in the words of Go's os/exec, which SDKs show and the CLI compares.
func endEvent(end *agentapi.End) *envdpb.ProcessEvent {
	e := &envdpb.ProcessEvent_EndEvent{ExitCode: int32(end.ExitCode), Exited: end.Signal == ""}
	e.Status = "exit status " + strconv.Itoa(end.ExitCode)
	if !e.Exited {
		e.ExitCode, e.Status = -1, "signal: "+signalText(end.Signal)
	}
	if e.ExitCode != 0 {
		e.Error = &e.Status
	}
	return &envdpb.ProcessEvent{Event: &envdpb.ProcessEvent_End{End: e}}
}

func (s *processes) Connect(ctx context.Context, req *connect.Request[envdpb.ConnectRequest], out *connect.ServerStream[envdpb.ConnectResponse]) error {
	which, err := selected(req.Msg.GetProcess())
	if err != nil {
		return s.failed(ctx, err)
	}
	p, err := s.rpc(ctx, req.Header())
	if err != nil {
		return err
	}

	known, _, err := p.process(ctx, which)
	if err != nil {
		return s.failed(ctx, err)
	}
	stream, err := p.Attach(ctx, agentapi.AttachParams{Target: which, Ended: true})
	if err != nil {
		return s.unknown(ctx, which, err)
	}
	defer stream.Close()

	tell := newTeller(out, req.Header(), &envdpb.ConnectResponse{Event: alive})
	defer tell.close()
	end, err := follow(stream, known.PTY, func(e *envdpb.ProcessEvent) error {
		return tell.send(&envdpb.ConnectResponse{Event: e})
	})
	if err != nil {
		return s.failed(ctx, err)
	}
	return tell.send(&envdpb.ConnectResponse{Event: endEvent(end)})
}

// process looks for a living process.
func (p *place) process(ctx context.Context, which agentapi.Target) (agentapi.Process, bool, error) {
	list, err := p.Processes(ctx)
	for _, known := range list {
		if which.PID != 0 && known.PID == which.PID || which.Tag != "" && known.Tag == which.Tag {
			return known, true, err
		}
	}
	return agentapi.Process{}, false, err
}

func selected(s *envdpb.ProcessSelector) (agentapi.Target, error) {
	switch which := s.GetSelector().(type) {
	case *envdpb.ProcessSelector_Pid:
		if which.Pid > 0 && which.Pid <= math.MaxInt32 {
			return agentapi.Target{PID: int(which.Pid)}, nil
		}
		return agentapi.Target{}, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", which.Pid))
	case *envdpb.ProcessSelector_Tag:
		if which.Tag != "" {
			return agentapi.Target{Tag: which.Tag}, nil
		}
	}
	return agentapi.Target{}, fault.New(fault.Invalid, "the request names no process: give a pid or a tag")
}

// unknown is what went wrong with a process that the request named. What is in the way of an input or a new size is E2B's
// "internal".
func (s *processes) unknown(ctx context.Context, which agentapi.Target, err error) error {
	switch err = s.explain(ctx, err); fault.KindOf(err) {
	case fault.NotFound:
		text := fmt.Sprintf("process with pid %d not found", which.PID)
		if which.Tag != "" {
			text = "process with tag " + which.Tag + " not found"
		}
		return connect.NewError(connect.CodeNotFound, errors.New(text))
	case fault.Conflict, fault.Gone:
		return connect.NewError(connect.CodeInternal, errors.New(fault.Message(err)))
	case fault.Internal, fault.Invalid, fault.Denied, fault.Unauthed, fault.Exhausted, fault.DiskFull, fault.Timeout, fault.Unavailable, fault.Unsupported:
	}
	return s.failed(ctx, err)
}

func (s *processes) List(ctx context.Context, req *connect.Request[envdpb.ListRequest]) (*connect.Response[envdpb.ListResponse], error) {
	p, err := s.rpc(ctx, req.Header())
	if err != nil {
		return nil, err
	}
	list, err := p.Processes(ctx)
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	var answer envdpb.ListResponse
	for _, known := range list {
		info := &envdpb.ProcessInfo{
			Pid:    uint32(known.PID),
			Config: &envdpb.ProcessConfig{Cmd: known.Argv[0], Args: known.Argv[1:], Envs: known.Env},
		}
		if !known.Here {
			info.Config.Cwd = &known.Cwd
		}
		if known.Tag != "" {
			info.Tag = &known.Tag
		}
		answer.Processes = append(answer.Processes, info)
	}
	return connect.NewResponse(&answer), nil
}

// maxLogged bounds how much of a command a log line shows.
const maxLogged = 200

func logStart(t *target.Target, p agentapi.ExecParams, pid uint32) {
	t.Log(target.Line{At: time.Now(), Level: "info", Logger: "process", Message: "process started",
		Fields: map[string]string{"cmd": logged(p), "pid": strconv.FormatUint(uint64(pid), 10)}})
}

func logEnd(t *target.Target, p agentapi.ExecParams, end *agentapi.End) {
	t.Log(target.Line{At: time.Now(), Level: "info", Logger: "process", Message: "process ended",
		Fields: map[string]string{"cmd": logged(p), "status": endEvent(end).GetEnd().GetStatus()}})
}

// logged is a command as a log shows it: not the shell that every command of an SDK is wrapped in.
func logged(p agentapi.ExecParams) string {
	words := p.Argv
	if (words[0] == bash || words[0] == sh) && wrapped(words) && len(words) == 4 {
		words = words[3:]
	}
	text := strings.ToValidUTF8(strings.Join(words, " "), "\uFFFD")
	if short := []rune(text); len(short) > maxLogged {
		return string(short[:maxLogged]) + "…"
	}
	return text
}
