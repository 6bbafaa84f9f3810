package envd

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
)

// signals are those that end processes, by the names that the agent gives them.
var signals = map[string]syscall.Signal{
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "ILL": syscall.SIGILL, "TRAP": syscall.SIGTRAP,
	"ABRT": syscall.SIGABRT, "BUS": syscall.SIGBUS, "FPE": syscall.SIGFPE, "KILL": syscall.SIGKILL, "USR1": syscall.SIGUSR1,
	"SEGV": syscall.SIGSEGV, "USR2": syscall.SIGUSR2, "PIPE": syscall.SIGPIPE, "ALRM": syscall.SIGALRM, "TERM": syscall.SIGTERM,
	"STKFLT": syscall.SIGSTKFLT, "XCPU": syscall.SIGXCPU, "XFSZ": syscall.SIGXFSZ, "VTALRM": syscall.SIGVTALRM,
	"PROF": syscall.SIGPROF, "IO": syscall.SIGIO, "PWR": syscall.SIGPWR, "SYS": syscall.SIGSYS,
}

// signalText is a signal as Go prints it: "killed" for SIGKILL.
func signalText(name string) string {
	if sig, ok := signals[strings.TrimPrefix(name, "SIG")]; ok {
		return sig.String()
	}
	if n, err := strconv.Atoi(strings.TrimPrefix(name, "signal ")); err == nil {
		return syscall.Signal(n).String()
	}
	return name
}

func (s *processes) SendSignal(ctx context.Context, req *connect.Request[envdpb.SendSignalRequest]) (*connect.Response[envdpb.SendSignalResponse], error) {
	var name string
	switch req.Msg.GetSignal() {
	case envdpb.Signal_SIGNAL_SIGTERM:
		name = "SIGTERM"
	case envdpb.Signal_SIGNAL_SIGKILL:
		name = "SIGKILL"
	case envdpb.Signal_SIGNAL_UNSPECIFIED:
		fallthrough
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("invalid signal: "+req.Msg.GetSignal().String()))
	}
	which, err := selected(req.Msg.GetProcess())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	p, err := s.rpc(ctx, req.Header())
	if err != nil {
		return nil, err
	}
	if err := p.Signal(ctx, agentapi.SignalParams{Target: which, Signal: name}); err != nil {
		return nil, s.unknown(ctx, which, err)
	}
	return connect.NewResponse(&envdpb.SendSignalResponse{}), nil
}

func (s *processes) Update(ctx context.Context, req *connect.Request[envdpb.UpdateRequest]) (*connect.Response[envdpb.UpdateResponse], error) {
	which, err := selected(req.Msg.GetProcess())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	p, err := s.rpc(ctx, req.Header())
	if err != nil {
		return nil, err
	}
	if req.Msg.GetPty() != nil {
		if err := p.Resize(ctx, agentapi.ResizeParams{Target: which, Size: ptySize(req.Msg.GetPty())}); err != nil {
			return nil, s.unknown(ctx, which, err)
		}
	}
	return connect.NewResponse(&envdpb.UpdateResponse{}), nil
}
