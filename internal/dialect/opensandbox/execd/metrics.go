package execd

import (
	"encoding/json"
	"math"
	"net/http"
	"runtime"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// watchEvery is the pace of measurements that are told again and again.
const watchEvery = time.Second

// measured is what a sandbox uses now, of what it may.
type measured struct {
	CPUs      float64 `json:"cpu_count"`
	CPU       float64 `json:"cpu_used_pct"` // of all those together, 0 to 100
	Total     float64 `json:"mem_total_mib"`
	Used      float64 `json:"mem_used_mib"`
	Timestamp int64   `json:"timestamp"` // milliseconds
}

// reading is one look at what the sandbox has used so far.
type reading struct {
	at  time.Time
	cpu int64 // milliseconds
}

// measure looks at a sandbox. How busy it is follows from an earlier look; without one, from the domain's last samples.
func (h *Handler) measure(c *call, before *reading) (measured, error) {
	u, err := h.sandboxes.Usage(c.ctx(), c.t.Who, c.id())
	if err != nil {
		return measured{}, err
	}
	samples, err := h.sandboxes.History(c.ctx(), c.t.Who, c.id(), time.Time{}, time.Time{})
	if err != nil {
		return measured{}, err
	}
	var last sandbox.Sample
	if len(samples) > 0 {
		last = samples[len(samples)-1]
	}
	now := time.Now()
	m := measured{CPUs: last.CPUs, CPU: last.CPUPercent, Timestamp: now.UnixMilli()}
	if m.CPUs <= 0 {
		m.CPUs = float64(runtime.NumCPU())
	}
	if !before.at.IsZero() {
		m.CPU = 100 * float64(u.CPUMS-before.cpu) / (float64(now.Sub(before.at).Microseconds()) / 1e3) / m.CPUs
	}
	*before = reading{now, u.CPUMS}
	m.CPU = math.Round(100*min(max(m.CPU, 0), 100)) / 100
	limit := max(last.MemoryLimit, c.t.Sandbox.Limits.MemoryBytes, u.MemoryBytes)
	m.Total, m.Used = mib(limit), mib(u.MemoryBytes)
	return m, nil
}

func mib(bytes int64) float64 { return math.Round(float64(bytes)/(1<<20)*100) / 100 }

func (h *Handler) metrics(c *call) error {
	m, err := h.measure(c, &reading{})
	if err != nil {
		return err
	}
	c.w.Header().Set("Cache-Control", "no-store")
	return c.answer(m)
}

// watchMetrics tells measurements until its client leaves or the sandbox ends.
func (h *Handler) watchMetrics(c *call) error {
	leave, err := h.sandboxes.Watch(c.t.Who)
	if err != nil {
		return err
	}
	defer leave()
	var before reading
	m, err := h.measure(c, &before)
	if err != nil {
		return err
	}
	out := newStream(c.w)
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		line, err := json.Marshal(m)
		if err != nil {
			return err
		}
		out.buf.Write(append(line, "\n\n"...))
		if out.flush() != nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-h.life.Done():
			return nil
		case <-c.ctx().Done():
			panic(http.ErrAbortHandler)
		}
		if m, err = h.measure(c, &before); err != nil {
			return nil
		}
	}
}
