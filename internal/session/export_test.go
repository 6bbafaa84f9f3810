package session

import "github.com/covehq/cove/internal/auth"

// Waiting is how many cells of a session wait for their turn.
func (m *Manager) Waiting(p auth.Principal, key string) int {
	e, leave, err := m.enter(p.Tenant, key)
	if err != nil {
		return 0
	}
	defer leave()
	e.cells.mu.Lock()
	defer e.cells.mu.Unlock()
	return len(e.cells.waiting)
}
