package agentapi

import (
	"encoding/json"
	"fmt"

	"github.com/covehq/cove/internal/fault"
)

// Ops lists every operation.
var Ops = []Op{
	OpHello, OpExec, OpAttach, OpProcesses, OpSignal, OpStdin, OpResize, OpRun, OpKernels, OpKernelStart,
	OpKernelWait, OpKernelStop, OpInterrupt, OpStat, OpList, OpRead, OpWrite, OpMkdir, OpMove, OpRemove, OpChmod, OpSymlink,
	OpWatch, OpDial, OpMetrics, OpAccount, OpListen, OpBranch, OpHalt, OpCollect, OpDiscard,
}

// DecodeRequest reads the first frame of a connection.
func DecodeRequest(f Frame) (Request, error) {
	if f.Kind != FrameRequest {
		return Request{}, fault.New(fault.Invalid, "a connection begins with a request")
	}
	var req Request
	if err := json.Unmarshal(f.Payload, &req); err != nil {
		return Request{}, fault.Wrap(fault.Invalid, err, "the request is not JSON of the right shape")
	}
	return req, nil
}

// DecodeParams reads a request's parameters; none is the zero value.
func DecodeParams[T any](req Request) (T, error) {
	var params T
	if len(req.Params) == 0 {
		return params, nil
	}
	if err := json.Unmarshal(req.Params, &params); err != nil {
		return params, fault.Wrap(fault.Invalid, err, "parameters of %s: %v", req.Op, err)
	}
	return params, nil
}

// DecodeMessage reads a channel message that came with so many descriptors and refuses one that is not whole.
func DecodeMessage(payload []byte, descriptors int) (Message, error) {
	if len(payload) > MaxMessage {
		return Message{}, &ProtocolError{fmt.Sprintf("message of %d bytes is over the limit of %d", len(payload), MaxMessage)}
	}
	var m Message
	if err := json.Unmarshal(payload, &m); err != nil {
		return Message{}, &ProtocolError{"message: " + err.Error()}
	}
	want := 0
	whole := true
	switch m.Type {
	case MessageBoot:
		along := m.Kernel != nil || m.Channel
		whole = m.Boot != nil && (m.Kernel == nil || m.Kernel.Name != "") && !(along && m.Boot.Expected)
		if m.Kernel != nil {
			want += KernelDescriptors
		}
		if m.Channel {
			want++
		}
	case MessageConn, MessageChannel:
		want = 1
	case MessageBranch:
		want = 2
	case MessageKernel:
		want, whole = KernelDescriptors, m.Kernel != nil && m.Kernel.Name != ""
	case MessageExit:
		whole = m.Exit != nil
	case MessageOOM:
		whole = m.Text != ""
	default:
		return Message{}, &ProtocolError{fmt.Sprintf("unknown message %q", m.Type)}
	}
	if !whole {
		return Message{}, &ProtocolError{fmt.Sprintf("message %q without its content", m.Type)}
	}
	if descriptors != want {
		return Message{}, &ProtocolError{fmt.Sprintf("message %q came with %d descriptors, not %d", m.Type, descriptors, want)}
	}
	return m, nil
}
