package trace

import "time"

// PID is its number.
func (p *Process) PID() int { return p.pid }

// SetHurry changes how long a process may take to reach its call.
func (t *Tracer) SetHurry(d time.Duration) { t.hurry = d }
