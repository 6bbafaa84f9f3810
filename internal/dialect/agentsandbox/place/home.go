package place

import (
	"context"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// MakeHome makes the directory that processes start in. It does no harm again.
func MakeHome(ctx context.Context, agent *agentapi.Client, home string) (agentapi.Entry, error) {
	e, err := agent.Mkdir(ctx, agentapi.MkdirParams{Path: home, Parents: true, Root: true})
	if fault.Is(err, fault.Denied) { // an agent that is not root may still find it writable
		e, err = agent.Mkdir(ctx, agentapi.MkdirParams{Path: home, Parents: true})
	}
	return e, err
}
