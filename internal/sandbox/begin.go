package sandbox

import (
	"context"
	"fmt"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// BeginTag names what a sandbox has begun with among its processes.
const BeginTag = "entrypoint"

// Begin starts the process that a new sandbox is for, which goes on when everybody has left. A sandbox whose process does not start is ended.
func (m *Manager) Begin(ctx context.Context, p auth.Principal, id string, argv []string) error {
	stream, err := m.Exec(ctx, p, id, agentapi.ExecParams{Argv: argv, Disconnect: agentapi.DisconnectSurvive, Tag: BeginTag})
	if err == nil {
		return stream.Close()
	}
	// Its caller may have left, and must leave nothing behind.
	if _, killed := m.Kill(context.WithoutCancel(ctx), p, id); killed != nil && !fault.Is(killed, fault.NotFound) {
		m.log.Warn("sandbox that could not begin is not ended yet", "sandbox", id, "tenant", p.Tenant, "error", killed)
	}
	return fmt.Errorf("begin with %q: %w", argv[0], err)
}
