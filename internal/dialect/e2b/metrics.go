package e2b

import (
	"math"
	"net/http"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Metric is what a sandbox used at one time.
type Metric struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int       `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       int64     `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      int64     `json:"memCache"` // nothing: what is cached is the host's
	DiskUsed      int64     `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

func wireMetric(s sandbox.Sample) Metric {
	return Metric{
		Timestamp: s.At, TimestampUnix: s.At.Unix(), CPUCount: cpus(s.CPUs), CPUUsedPct: math.Round(s.CPUPercent*100) / 100,
		MemUsed: s.MemoryBytes, MemTotal: s.MemoryLimit, DiskUsed: s.DiskBytes, DiskTotal: s.DiskLimit,
	}
}

// latest is how far from now a time may be and still be one.
const latest = math.MaxInt32 * 2

func (a *API) metrics(c *call) error {
	q := c.query()
	start, end := q.integer("start", 0, 0, latest), q.integer("end", 0, 0, latest)
	if q.err != nil {
		return q.err
	}
	if _, err := a.find(c); err != nil {
		return err
	}
	var from, to time.Time
	if start > 0 {
		from = time.Unix(start, 0)
	}
	if end > 0 {
		to = time.Unix(end+1, 0).Add(-1) // to the end of that second: SDKs cut off what comes behind it
	}

	samples, err := a.sandboxes.History(c.ctx(), c.who, c.id, from, to)
	if err != nil {
		return err
	}

	out := make([]Metric, 0, len(samples))
	for _, s := range samples {
		out = append(out, wireMetric(s))
	}
	return c.answer(http.StatusOK, out)
}

// latestMetrics is the last figure of each of some sandboxes; those that are not there are left out.
func (a *API) latestMetrics(c *call) error {
	q := c.query()
	ids := q.list("sandbox_ids")
	if q.err != nil {
		return q.err
	}
	if len(ids) == 0 || len(ids) > maxPage {
		return fault.New(fault.Invalid, "sandbox_ids: give 1 to %d ids", maxPage)
	}

	out := map[string]Metric{}
	for _, text := range ids {
		id, err := sandboxID(text)
		if err != nil {
			return err
		}
		samples, err := a.sandboxes.History(c.ctx(), c.who, id, time.Time{}, time.Time{})
		if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Gone) {
			continue
		}
		if err != nil {
			return err
		}
		if len(samples) > 0 {
			out[id] = wireMetric(samples[len(samples)-1])
		}
	}

	return c.answer(http.StatusOK, map[string]any{"sandboxes": out})
}
