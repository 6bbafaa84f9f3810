package envd

import (
	"bytes"
	"context"
	"io"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/fault"
)

// bytesOf is an input's content, and whether it is for a terminal.
func bytesOf(in *envdpb.ProcessInput) (content []byte, pty bool, err error) {
	switch in := in.GetInput().(type) {
	case *envdpb.ProcessInput_Stdin:
		return in.Stdin, false, nil
	case *envdpb.ProcessInput_Pty:
		return in.Pty, true, nil
	}
	return nil, false, fault.New(fault.Invalid, "the input is neither stdin nor pty")
}

func (s *processes) SendInput(ctx context.Context, req *connect.Request[envdpb.SendInputRequest]) (*connect.Response[envdpb.SendInputResponse], error) {
	content, pty, err := bytesOf(req.Msg.GetInput())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	which, err := selected(req.Msg.GetProcess())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	p, err := s.rpc(ctx, req.Header())
	if err != nil {
		return nil, err
	}
	if err := p.Stdin(ctx, agentapi.StdinParams{Target: which, PTY: &pty}, bytes.NewReader(content)); err != nil {
		return nil, s.unknown(ctx, which, err)
	}
	return connect.NewResponse(&envdpb.SendInputResponse{}), nil
}

// CloseStdin is the same as often as it is asked; a process without stdin has it closed already.
func (s *processes) CloseStdin(ctx context.Context, req *connect.Request[envdpb.CloseStdinRequest]) (*connect.Response[envdpb.CloseStdinResponse], error) {
	which, err := selected(req.Msg.GetProcess())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	p, err := s.rpc(ctx, req.Header())
	if err != nil {
		return nil, err
	}
	known, lives, err := p.process(ctx, which)
	if err == nil && lives && known.PTY {
		err = fault.New(fault.Conflict, "a terminal's input is not closed; send Ctrl+D (0x04) instead")
	}
	if err == nil && !lives {
		err = fault.New(fault.NotFound, "no such process")
	}
	if err == nil {
		err = p.Stdin(ctx, agentapi.StdinParams{Target: which, Close: true}, bytes.NewReader(nil))
		if fault.Is(err, fault.Conflict) || fault.Is(err, fault.Gone) {
			err = nil
		}
	}
	if err != nil {
		return nil, s.unknown(ctx, which, err)
	}
	return connect.NewResponse(&envdpb.CloseStdinResponse{}), nil
}

func (s *processes) StreamInput(ctx context.Context, in *connect.ClientStream[envdpb.StreamInputRequest]) (*connect.Response[envdpb.StreamInputResponse], error) {
	which, err := startOfInput(in)
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	p, err := s.rpc(ctx, in.RequestHeader())
	if err != nil {
		return nil, err
	}
	known, lives, err := p.process(ctx, which)
	if err == nil && !lives {
		err = fault.New(fault.NotFound, "no such process")
	}
	if err != nil {
		return nil, s.unknown(ctx, which, err)
	}
	messages := &inputReader{in: in, pty: known.PTY}
	if err := p.Stdin(ctx, agentapi.StdinParams{Target: which, PTY: &known.PTY}, messages); err != nil {
		return nil, s.unknown(ctx, which, err)
	}
	return connect.NewResponse(&envdpb.StreamInputResponse{}), nil
}

// startOfInput reads the message that says whose input follows.
func startOfInput(in *connect.ClientStream[envdpb.StreamInputRequest]) (agentapi.Target, error) {
	for in.Receive() {
		switch e := in.Msg().GetEvent().(type) {
		case *envdpb.StreamInputRequest_Start:
			return selected(e.Start.GetProcess())
		case *envdpb.StreamInputRequest_Keepalive:
		default:
			return agentapi.Target{}, fault.New(fault.Invalid, "a stream of input begins with a start that names the process")
		}
	}
	if err := in.Err(); err != nil {
		return agentapi.Target{}, err
	}
	return agentapi.Target{}, fault.New(fault.Invalid, "the stream of input is empty: it begins with a start that names the process")
}

// inputReader reads the content of the messages of a stream.
type inputReader struct {
	in   *connect.ClientStream[envdpb.StreamInputRequest]
	pty  bool
	left []byte
}

func (r *inputReader) Read(p []byte) (int, error) {
	for len(r.left) == 0 {
		if !r.in.Receive() {
			if err := r.in.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		if err := r.take(r.in.Msg()); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

func (r *inputReader) take(m *envdpb.StreamInputRequest) error {
	switch e := m.GetEvent().(type) {
	case *envdpb.StreamInputRequest_Data:
		content, pty, err := bytesOf(e.Data.GetInput())
		if err == nil && pty != r.pty {
			err = fault.New(fault.Conflict, "the input is not for what the process has: a terminal wants pty, others stdin")
		}
		r.left = content
		return err
	case *envdpb.StreamInputRequest_Keepalive:
		return nil
	}
	return fault.New(fault.Invalid, "a stream of input has one start, and then data")
}
