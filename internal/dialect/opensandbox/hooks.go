package opensandbox

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// Hook is a command that runs to its end before a sandbox's entrypoint starts. No shell reads it.
type Hook struct {
	Command []string `json:"command"`
	Timeout *int64   `json:"timeoutSeconds"`
}

// How long a hook may take, in seconds: when nobody says, and at most.
const (
	hookTimeout = 60
	mostHook    = 3 * 3600
)

// parseHooks reads what is to run besides the entrypoint; nil: nothing.
func parseHooks(raw json.RawMessage) (*Hook, error) {
	if !given(raw) {
		return nil, nil
	}
	var hooks map[string]json.RawMessage
	if json.Unmarshal(raw, &hooks) != nil {
		return nil, invalid("lifecycle is not a JSON object")
	}
	for name, hook := range hooks {
		if name != "preStart" && !empty(hook) {
			return nil, told(http.StatusBadRequest, codeUnsupported, "lifecycle.%.40s is not served here yet; only preStart is", name)
		}
	}
	if empty(hooks["preStart"]) {
		return nil, nil
	}
	var h Hook
	if err := transfer.Decode(hooks["preStart"], &h); err != nil {
		return nil, invalid("lifecycle.preStart: %s", fault.Message(err))
	}
	switch {
	case len(h.Command) == 0 || strings.TrimSpace(h.Command[0]) == "":
		return nil, invalid("lifecycle.preStart.command names no program")
	case h.Timeout != nil && (*h.Timeout < 1 || *h.Timeout > mostHook):
		return nil, invalid("lifecycle.preStart.timeoutSeconds: want 1 to %d", mostHook)
	}
	return &h, nil
}

func (h *Hook) seconds() int64 {
	if h.Timeout == nil {
		return hookTimeout
	}
	return *h.Timeout
}

// prepare runs a hook to its end. What it prints is nobody's to keep: there may be secrets in it.
func (a *API) prepare(ctx context.Context, who auth.Principal, id string, h *Hook) error {
	stream, err := a.sandboxes.Exec(ctx, who, id, agentapi.ExecParams{Argv: h.Command, TimeoutMS: h.seconds() * 1000, Disconnect: agentapi.DisconnectKill})
	if err != nil {
		return hookFault(err)
	}
	defer stream.Close()
	for e, err := range stream.Events() {
		switch {
		case err != nil:
			return hookFault(err)
		case e.Type != agentapi.EventEnd:
		case e.End.Outcome == agentapi.OutcomeOK:
			return nil
		case e.End.Outcome == agentapi.OutcomeError:
			return told(http.StatusBadRequest, codeStart, "the preStart hook ended with exit status %d; run it as a command to see what it prints", e.End.ExitCode)
		default:
			return told(http.StatusBadRequest, codeStart, "the preStart hook failed: %s", e.End.Message)
		}
	}
	return told(http.StatusInternalServerError, codeStart, "the preStart hook broke off")
}

// hookFault is why a hook did not run: mostly, that it is not there.
func hookFault(err error) error {
	switch fault.KindOf(err) {
	case fault.Invalid, fault.NotFound, fault.Denied, fault.Unsupported:
		return withStatus(http.StatusBadRequest, codeStart, fault.Wrap(fault.Invalid, err, "the preStart hook cannot be started: %s", fault.Message(err)))
	case fault.Internal, fault.DiskFull, fault.Unavailable, fault.Timeout:
		return withStatus(http.StatusInternalServerError, codeStart, err)
	case fault.Gone: // its time passed, or somebody ended it
		return withStatus(http.StatusConflict, codeStart, fault.Wrap(fault.Conflict, err, "the sandbox ended while its preStart hook ran: %s", fault.Message(err)))
	case fault.Unauthed, fault.Conflict, fault.Exhausted:
	}
	return err
}
