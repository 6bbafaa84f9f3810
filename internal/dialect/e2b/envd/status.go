package envd

import (
	"math"
	"net/http"
	"runtime"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
)

func (h *Handler) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

// metricsBody is what envd measures from inside; here it is the domain's newest sample.
type metricsBody struct {
	TS          int64   `json:"ts"`
	CPUCount    int64   `json:"cpu_count"`
	CPUUsedPct  float64 `json:"cpu_used_pct"`
	MemTotal    int64   `json:"mem_total"`
	MemUsed     int64   `json:"mem_used"`
	MemCache    int64   `json:"mem_cache"`
	MemTotalMiB int64   `json:"mem_total_mib"`
	MemUsedMiB  int64   `json:"mem_used_mib"`
	DiskUsed    int64   `json:"disk_used"`
	DiskTotal   int64   `json:"disk_total"`
}

func (h *Handler) metrics(w http.ResponseWriter, r *http.Request) {
	t := target.From(r.Context())
	samples, err := h.sandboxes.History(r.Context(), t.Who, t.Sandbox.ID, time.Time{}, time.Time{})
	if err != nil {
		h.refuseFault(r.Context(), w, err)
		return
	}
	m := metricsBody{TS: time.Now().Unix(), CPUCount: int64(runtime.NumCPU())}
	if len(samples) > 0 {
		s := samples[len(samples)-1]
		if s.CPUs > 0 {
			m.CPUCount = int64(math.Ceil(s.CPUs))
		}
		m.TS, m.CPUUsedPct = s.At.Unix(), math.Round(s.CPUPercent*100)/100
		m.MemTotal, m.MemUsed = s.MemoryLimit, s.MemoryBytes
		m.MemTotalMiB, m.MemUsedMiB = s.MemoryLimit>>20, s.MemoryBytes>>20
		m.DiskUsed, m.DiskTotal = s.DiskBytes, s.DiskLimit
	}
	w.Header().Set("Cache-Control", "no-store")
	respond(w, http.StatusOK, m)
}

// envs is the environment that the sandbox was made with.
func (h *Handler) envs(w http.ResponseWriter, r *http.Request) {
	p, err := h.at(r.Context(), "")
	if err != nil {
		h.refuseFault(r.Context(), w, err)
		return
	}
	who, err := p.who(r.Context())
	if err != nil {
		h.refuseFault(r.Context(), w, err)
		return
	}
	env := who.Env
	if env == nil {
		env = map[string]string{}
	}
	w.Header().Set("Cache-Control", "no-store")
	respond(w, http.StatusOK, env)
}

// begin is how E2B's orchestrator tells its daemon what a sandbox is to be. Here the create has said all of it, and the edge
// lets nobody but the server itself come this far.
func (h *Handler) begin(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusNoContent)
}
