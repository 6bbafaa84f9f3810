package sandbox

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// sweep removes ended sandboxes once their retention has passed.
func (m *Manager) sweep() {
	every := min(max(m.cfg.Retention/24, time.Minute), time.Hour)
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		m.rates.sweep()
		if n, err := m.store.Prune(m.life, now().Add(-m.cfg.Retention)); err != nil && m.life.Err() == nil {
			m.log.Warn("ended sandboxes are not pruned", "error", err)
		} else if n > 0 {
			m.log.Info("ended sandboxes pruned", "count", n)
		}
		select {
		case <-m.life.Done():
			return
		case <-ticker.C:
		}
	}
}

// boundEnded removes the oldest ended sandboxes of each tenant that may have more than
// Config.MaxEnded, until the Manager closes.
//
// Without it a tenant that creates and ends sandboxes all day fills the disk with rows.
func (m *Manager) boundEnded() {
	for {
		select {
		case <-m.life.Done():
			return
		case <-m.ends.due:
		}
		for _, tenant := range m.ends.take() {
			n, err := m.store.PruneTenant(m.life, tenant, m.cfg.MaxEnded)
			if err != nil && m.life.Err() == nil { // the tenant's next ends try again
				m.log.Warn("ended sandboxes of a tenant are not pruned", "tenant", tenant, "error", err)
			}
			if n > 0 {
				m.log.Info("the oldest ended sandboxes of a tenant are removed before their retention has passed",
					"tenant", tenant, "count", n, "kept", m.cfg.MaxEnded)
			}
		}
	}
}

// endCounter counts the recorded ends of each tenant, so that its rows are counted only once in
// step ends.
type endCounter struct {
	step int           // zero: it counts nothing
	due  chan struct{} // has a value when take has a tenant to give

	mu   sync.Mutex
	ends map[string]int // by tenant, since take gave it
}

// newEndCounter makes a counter for at most so many ended sandboxes of a tenant, and a twentieth
// more.
func newEndCounter(most int) *endCounter {
	c := &endCounter{due: make(chan struct{}, 1), ends: map[string]int{}}
	if most > 0 {
		c.step = max(1, most/20)
	}
	return c
}

func (c *endCounter) add(tenant string) {
	if c.step == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ends[tenant]++; c.ends[tenant] < c.step {
		return
	}
	select {
	case c.due <- struct{}{}:
	default:
	}
}

// take gives the tenants with step ends or more, and counts them anew.
func (c *endCounter) take() (tenants []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, tenant := range slices.Sorted(maps.Keys(c.ends)) {
		if c.ends[tenant] >= c.step {
			tenants = append(tenants, tenant)
			delete(c.ends, tenant)
		}
	}
	return tenants
}
