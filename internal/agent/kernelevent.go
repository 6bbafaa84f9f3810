package agent

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
)

// Bounds on what one kernel may tell. The kernel runs the user's code in its own process: nothing it says is trusted.
const (
	maxRunEvents   = 100_000   // events of one run
	maxRunBytes    = 512 << 20 // bytes of events of one run
	maxStrayEvents = 1_000     // events between runs, which are dropped
	maxTraceback   = 1_000     // lines
	maxErrorText   = 1 << 20   // bytes of the lines together, and of what the exception says
	maxErrorName   = 1 << 10
	maxMIMETypes   = 100
	maxMetadata    = 1 << 20 // bytes beside a result; more is left out, the result itself is not
	maxDisplayID   = 256
	maxLost        = 100
)

// DecodeKernelEvent reads a frame of a kernel and keeps only what that kind of event may say.
func DecodeKernelEvent(f agentapi.Frame) (agentapi.Event, error) {
	if f.Kind != agentapi.FrameEvent {
		return agentapi.Event{}, &agentapi.ProtocolError{Reason: fmt.Sprintf("the kernel sent a frame of kind %d", f.Kind)}
	}
	var in agentapi.Event
	if err := json.Unmarshal(f.Payload, &in); err != nil {
		return agentapi.Event{}, &agentapi.ProtocolError{Reason: "the kernel sent an event that is not JSON of the right shape"}
	}
	out := agentapi.Event{Type: in.Type, Time: in.Time}
	missing := false
	switch in.Type {
	case agentapi.EventReady:
		out.PID, out.Message = in.PID, clip(in.Message, 256)
		for _, lost := range in.Lost[:min(len(in.Lost), maxLost)] {
			out.Lost = append(out.Lost, agentapi.Lost{Kind: clip(lost.Kind, 16), What: clip(lost.What, 256)})
		}
	case agentapi.EventBranch:
		out.Message = clip(in.Message, 1024)
	case agentapi.EventStarted:
		out.Count = max(0, in.Count)
	case agentapi.EventResult:
		missing = in.Result == nil || len(in.Result.Data) > maxMIMETypes || len(in.Result.Metadata) > maxMIMETypes
		if in.Result != nil {
			boundResult(in.Result)
		}
		out.Result, out.Waits = in.Result, in.Waits
	case agentapi.EventError:
		missing = in.Error == nil
		if in.Error != nil {
			boundError(in.Error)
		}
		out.Error = in.Error
	case agentapi.EventNotice:
		out.Message = clip(in.Message, 4096)
	case agentapi.EventEnd:
		if in.End == nil {
			missing = true
			break
		}
		switch in.End.Outcome {
		case agentapi.OutcomeOK, agentapi.OutcomeError, agentapi.OutcomeInterrupted:
			out.End = &agentapi.End{Outcome: in.End.Outcome, Message: clip(in.End.Message, 4096), Usage: in.End.Usage}
			if len(in.End.Value) <= agentapi.MaxHolding {
				out.End.Value = in.End.Value
			}
			out.End.Usage.CPUMS, out.End.Usage.PeakBytes = max(0, in.End.Usage.CPUMS), max(0, in.End.Usage.PeakBytes)
		default:
			missing = true
		}
	default:
		return agentapi.Event{}, &agentapi.ProtocolError{Reason: fmt.Sprintf("the kernel sent an event of type %q", clip(string(in.Type), 32))}
	}
	if missing {
		return agentapi.Event{}, &agentapi.ProtocolError{Reason: fmt.Sprintf("the kernel sent an event %q without its content", in.Type)}
	}
	return out, nil
}

// boundResult leaves out what is told beside a result, where that is too much.
func boundResult(r *agentapi.Result) {
	r.ID = clip(r.ID, maxDisplayID)
	size := 0
	for name, value := range r.Metadata {
		size += len(name) + len(value)
	}
	if size > maxMetadata {
		r.Metadata = nil
	}
}

// boundError shortens an exception. Where it was raised is last in its traceback, and who called first.
func boundError(e *agentapi.CodeError) {
	e.Name, e.Value = clip(e.Name, maxErrorName), clip(e.Value, maxErrorText)
	if n := len(e.Traceback); n > maxTraceback {
		e.Traceback = slices.Concat(e.Traceback[:maxTraceback/2], []string{"…"}, e.Traceback[n-maxTraceback/2+1:])
	}
	size := 0
	for _, line := range e.Traceback {
		size += len(line)
	}
	if size <= maxErrorText {
		return
	}
	for i, line := range e.Traceback {
		e.Traceback[i] = clip(line, maxErrorText/len(e.Traceback))
	}
}

// clip shortens s to at most n bytes without splitting a character.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
