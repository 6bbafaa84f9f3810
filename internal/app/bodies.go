package app

import "github.com/covehq/cove/internal/dialect/transfer"

// The most that the bodies of requests may take, and the least: with it a tenant's share holds the
// largest body of all, code for E2B's interpreter with every byte escaped.
const (
	maxBodies = 512 << 20
	minBodies = 128 << 20
)

// newBodies bounds the bodies of requests to an eighth of the host's memory, half of it for one
// tenant. A memory of zero is unknown.
func newBodies(memory int64) *transfer.Budget {
	total := int64(maxBodies)
	if memory > 0 {
		total = max(minBodies, min(maxBodies, memory/8))
	}
	return transfer.NewBudget(total, total/2)
}
