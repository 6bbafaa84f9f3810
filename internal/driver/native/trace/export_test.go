package trace

// PID is its number.
func (p *Process) PID() int { return p.pid }
