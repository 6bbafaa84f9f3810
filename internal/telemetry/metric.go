package telemetry

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The Prometheus text format is a few lines per metric, and this server has nine metrics: that is less code than the
// client library brings modules.

// family is one metric with all its labels.
type family interface {
	write(w io.Writer)
}

type families struct{ list []family }

func (f *families) add(list ...family) { f.list = append(f.list, list...) }

func (f *families) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	for _, m := range f.list {
		m.write(w)
	}
}

// desc is what every family has.
type desc struct {
	name, help string
	labels     []string
}

func (d *desc) head(w io.Writer, kind string) {
	fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n", d.name, d.help, d.name, kind)
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// series spells the labels of one series; it is also the key it is kept by.
func (d *desc) series(values []string) string {
	parts := make([]string, len(d.labels))
	for i, l := range d.labels {
		parts[i] = l + `="` + escape.Replace(values[i]) + `"`
	}
	return strings.Join(parts, ",")
}

func braces(labels string) string {
	if labels == "" {
		return ""
	}
	return "{" + labels + "}"
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

type gauge struct {
	desc
	read func() map[string]float64
}

// newGauge asks read when somebody looks; label may be empty.
func newGauge(name, help, label string, read func() map[string]float64) *gauge {
	g := &gauge{desc: desc{name: name, help: help}, read: read}
	if label != "" {
		g.labels = []string{label}
	}
	return g
}

func (g *gauge) write(w io.Writer) {
	g.head(w, "gauge")
	now := g.read()
	for _, k := range slices.Sorted(maps.Keys(now)) {
		fmt.Fprintf(w, "%s%s %s\n", g.name, braces(g.series([]string{k})), number(now[k]))
	}
}

type counter struct {
	desc

	mu     sync.Mutex
	values map[string]uint64
}

func newCounter(name, help string, labels ...string) *counter {
	return &counter{desc: desc{name, help, labels}, values: map[string]uint64{}}
}

func (c *counter) inc(values ...string) {
	key := c.series(values)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.values[key]++
}

func (c *counter) write(w io.Writer) {
	c.mu.Lock()
	now := maps.Clone(c.values)
	c.mu.Unlock()
	c.head(w, "counter")
	for _, k := range slices.Sorted(maps.Keys(now)) {
		fmt.Fprintf(w, "%s%s %d\n", c.name, braces(k), now[k])
	}
}

type histogram struct {
	desc
	bounds []float64

	mu     sync.Mutex
	values map[string]*distribution
}

type distribution struct {
	counts []uint64 // one more than bounds
	sum    float64
}

func newHistogram(name, help string, bounds []float64, labels ...string) *histogram {
	return &histogram{desc: desc{name, help, labels}, bounds: bounds, values: map[string]*distribution{}}
}

func (h *histogram) observe(d time.Duration, values ...string) {
	key, v := h.series(values), d.Seconds()
	at, _ := slices.BinarySearch(h.bounds, v) // the first bound that is not below v
	h.mu.Lock()
	defer h.mu.Unlock()
	dist := h.values[key]
	if dist == nil {
		dist = &distribution{counts: make([]uint64, len(h.bounds)+1)}
		h.values[key] = dist
	}
	dist.counts[at]++
	dist.sum += v
}

func (h *histogram) write(w io.Writer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.head(w, "histogram")
	for _, k := range slices.Sorted(maps.Keys(h.values)) {
		h.distribution(w, k, h.values[k])
	}
}

func (h *histogram) distribution(w io.Writer, labels string, d *distribution) {
	prefix := labels
	if prefix != "" {
		prefix += ","
	}
	var total uint64
	for i, n := range d.counts {
		total += n
		bound := "+Inf"
		if i < len(h.bounds) {
			bound = number(h.bounds[i])
		}
		fmt.Fprintf(w, "%s_bucket{%sle=%q} %d\n", h.name, prefix, bound, total)
	}
	fmt.Fprintf(w, "%s_sum%s %s\n%s_count%s %d\n", h.name, braces(labels), number(d.sum), h.name, braces(labels), total)
}
