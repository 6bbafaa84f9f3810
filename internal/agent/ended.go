package agent

import (
	"slices"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	// endedFor is how long the end of a process can still be asked for: whoever was cut off comes back within that.
	endedFor = 30 * time.Second
	// maxEnded bounds how many are remembered.
	maxEnded = 1024
)

// ended is what is left of a process.
type ended struct {
	id, tag string
	pid     int
	end     agentapi.End
	at      time.Time
}

// bury moves a process from the living to the ended, at once: there is no moment in which it is neither.
func (a *Agent) bury(info agentapi.Process, end agentapi.End) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.processes, info.ID)
	a.ended = append(a.recent(), ended{id: info.ID, tag: info.Tag, pid: info.PID, end: end, at: time.Now()})
	if over := len(a.ended) - maxEnded; over > 0 {
		a.ended = slices.Delete(a.ended, 0, over)
	}
}

// recent forgets what ended too long ago; mu is held.
func (a *Agent) recent() []ended {
	first := slices.IndexFunc(a.ended, func(e ended) bool { return time.Since(e.at) < endedFor })
	if first < 0 {
		return nil
	}
	return slices.Delete(a.ended, 0, first)
}

// recall tells the end of a process that has ended a moment ago; of several the last, since numbers and tags come again.
func (a *Agent) recall(l *link, t agentapi.Target) error {
	a.mu.Lock()
	a.ended = a.recent()
	var found *ended
	for _, e := range slices.Backward(a.ended) {
		if t.ID != "" && e.id == t.ID || t.ID == "" && (t.Tag != "" && e.tag == t.Tag || t.Tag == "" && t.PID > 0 && e.pid == t.PID) {
			found = &e
			break
		}
	}
	a.mu.Unlock()
	if found == nil {
		return fault.New(fault.NotFound, "no such process: it has ended, or it never was")
	}
	if l.event(agentapi.Event{Type: agentapi.EventStarted, PID: found.pid, ID: found.id}) == nil {
		l.end(found.end)
	}
	return nil
}
