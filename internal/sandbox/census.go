package sandbox

// Standing is what a census counts by.
type Standing struct {
	State    State
	Template string
}

// Census counts the living sandboxes of all tenants, for the operator.
func (m *Manager) Census() map[Standing]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[Standing]int{}
	for _, e := range m.living {
		e.mu.Lock()
		standing := Standing{e.sb.State, e.sb.Template}
		e.mu.Unlock()
		if standing.State.Living() { // an end that the store could not take yet is kept in memory
			all[standing]++
		}
	}
	return all
}
