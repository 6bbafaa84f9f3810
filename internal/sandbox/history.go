package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
)

// How usage is sampled. A round may cost a fiftieth of a core: one that costs more makes the next come later, so that many
// sandboxes are sampled less often instead of at the cost of their work. One sample costs the native driver some 130 µs:
// from 750 sandboxes on the time between two grows, and is 7 s with 1,000.
const (
	sampleEvery   = 5 * time.Second
	sampleSeldom  = time.Minute
	sampleShare   = 50
	sampleWorkers = 2
	sampleFor     = 5 * time.Second
	maxSamples    = 720
)

// Sample is what a sandbox used at one moment of its life.
type Sample struct {
	At          time.Time
	CPUs        float64 // how many it may use
	CPUPercent  float64 // of those, since the sample before; 0 to 100
	MemoryBytes int64
	MemoryLimit int64
	DiskBytes   int64
	DiskLimit   int64
}

// History is what a sandbox used between two times, oldest first; a zero time is no bound. It is kept in memory, for an
// hour or somewhat more and until the sandbox ends. One that was never sampled yet is sampled now.
func (m *Manager) History(ctx context.Context, p auth.Principal, id string, from, to time.Time) ([]Sample, error) {
	e := m.find(p, id)
	if e == nil {
		_, err := m.stored(ctx, p, id)
		return nil, err
	}
	if e.history.len() == 0 && e.state() == StateRunning {
		if err := m.sample(ctx, e); err != nil {
			return nil, m.whyGone(ctx, e, fmt.Errorf("usage of sandbox %s: %w", id, err))
		}
	}
	return e.history.between(from, to), nil
}

// sampling samples every running sandbox again and again, until the Manager closes.
func (m *Manager) sampling() {
	timer := time.NewTimer(sampleEvery)
	defer timer.Stop()
	for {
		select {
		case <-m.life.Done():
			return
		case <-timer.C:
		}
		begun := time.Now()
		m.sampleAll()
		timer.Reset(min(max(sampleEvery, sampleShare*sampleWorkers*time.Since(begun)), sampleSeldom))
	}
}

func (m *Manager) sampleAll() {
	todo := make(chan *entry)
	var work sync.WaitGroup
	for range sampleWorkers {
		work.Go(func() {
			for e := range todo {
				_ = m.sample(m.life, e) // the next round tries again, and an end is told by others
			}
		})
	}
	for _, e := range m.entries() {
		if e.state() == StateRunning && m.life.Err() == nil {
			todo <- e
		}
	}
	close(todo)
	work.Wait()
}

func (m *Manager) sample(ctx context.Context, e *entry) error {
	ctx, cancel := context.WithTimeout(ctx, sampleFor)
	defer cancel()
	u, err := m.driver.Usage(ctx, e.id)
	if err != nil {
		return err
	}
	e.mu.Lock()
	limits, started := e.sb.Limits, e.sb.StartedAt
	e.mu.Unlock()
	e.history.add(now(), started, u, Sample{
		CPUs: limits.CPUs, MemoryBytes: u.MemoryBytes, MemoryLimit: limits.MemoryBytes,
		DiskBytes: u.DiskBytes, DiskLimit: limits.DiskBytes,
	})
	return nil
}

// history is the last samples of a sandbox.
type history struct {
	mu      sync.Mutex
	ring    []Sample // grows to maxSamples
	next    int      // which one is overwritten next, once it is full
	at      time.Time
	cpuTime time.Duration
}

func (h *history) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.ring)
}

// add appends a sample; its share of the CPU is counted from the one before, the first one's from the start.
func (h *history) add(at, started time.Time, u Usage, s Sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at.IsZero() {
		h.at = started
	}
	spent, passed := time.Duration(u.CPUMS)*time.Millisecond-h.cpuTime, at.Sub(h.at)
	if passed <= 0 { // another sampled it at the same moment
		return
	}
	if s.CPUs > 0 {
		over := max(passed, time.Second) // a moment after its start is all work and says nothing
		s.CPUPercent = min(100, max(0, 100*spent.Seconds()/over.Seconds()/s.CPUs))
	}
	s.At, h.at, h.cpuTime = at, at, h.cpuTime+spent
	if len(h.ring) < maxSamples {
		h.ring = append(h.ring, s)
		return
	}
	h.ring[h.next] = s
	h.next = (h.next + 1) % maxSamples
}

func (h *history) between(from, to time.Time) (samples []Sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.ring {
		s := h.ring[(h.next+i)%len(h.ring)]
		if s.At.Before(from) || !to.IsZero() && s.At.After(to) {
			continue
		}
		samples = append(samples, s)
	}
	return samples
}
