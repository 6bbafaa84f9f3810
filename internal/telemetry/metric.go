package telemetry

import (
	"bufio"
	"cmp"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// The Prometheus text format is a few lines per metric: that is less code than the client library brings modules.

// family is one metric, or several that are read together, with all their labels: as Prometheus reads it and as OTLP
// sends it.
type family interface {
	write(w *bufio.Writer)
	data(now time.Time) []metricdata.Metrics
}

type families struct{ list []family }

func (f *families) add(list ...family) { f.list = append(f.list, list...) }

func (f *families) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	out := bufio.NewWriter(w)
	for _, m := range f.list {
		m.write(out)
	}
	_ = out.Flush() // whoever asked has gone: nobody to tell
}

// The types of a metric.
const (
	typeCounter   = "counter"
	typeGauge     = "gauge"
	typeHistogram = "histogram"
)

// desc is what every metric has.
type desc struct {
	name, kind, help string
	labels           []string
}

func (d *desc) head(w io.StringWriter) {
	put(w, "# HELP ", d.name, " ", d.help, "\n# TYPE ", d.name, " ", d.kind, "\n")
}

// line writes one series; extra is a label of the format's own, such as le.
func (d *desc) line(w io.StringWriter, suffix string, values labels, extra, number string) {
	put(w, d.name, suffix)
	open := "{"
	for i, name := range d.labels {
		put(w, open, name, `="`, escape.Replace(values[i]), `"`)
		open = ","
	}
	if extra != "" {
		put(w, open, extra)
		open = ","
	}
	if open == "," {
		put(w, "}")
	}
	put(w, " ", number, "\n")
}

// put writes to a buffer, which keeps its error until it is flushed.
func put(w io.StringWriter, parts ...string) {
	for _, p := range parts {
		_, _ = w.WriteString(p)
	}
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// labels are the values of a metric's labels, in their order. An array is its own key: counting allocates nothing.
type labels [3]string

func labelsOf(values []string) (l labels) {
	copy(l[:], values)
	return l
}

func compareLabels(a, b labels) int {
	return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1]), cmp.Compare(a[2], b[2]))
}

// gauges are metrics that are read when somebody looks, all at once: they may come from one answer of another process.
type gauges struct {
	list []desc
	read func(*reading)
}

func newGauges(read func(*reading), list ...desc) *gauges {
	for i := range list {
		list[i].kind = cmp.Or(list[i].kind, typeGauge)
	}
	return &gauges{list: list, read: read}
}

// reading is what gauges were when somebody looked.
type reading struct{ values map[string]map[labels]float64 }

// set tells a value; several of the same labels are added up.
func (r *reading) set(name string, v float64, values ...string) {
	if r.values[name] == nil {
		r.values[name] = map[labels]float64{}
	}
	r.values[name][labelsOf(values)] += v
}

// now asks for all of them.
func (g *gauges) now() map[string]map[labels]float64 {
	r := reading{map[string]map[labels]float64{}}
	g.read(&r)
	return r.values
}

func (g *gauges) write(w *bufio.Writer) {
	now := g.now()
	for i := range g.list {
		d := &g.list[i]
		d.head(w)
		series := now[d.name]
		for _, l := range slices.SortedFunc(maps.Keys(series), compareLabels) {
			d.line(w, "", l, "", number(series[l]))
		}
	}
}

type counter struct {
	desc

	mu     sync.Mutex
	values map[labels]uint64
}

// newCounter counts from zero: a metric without labels is there before the first time.
func newCounter(name, help string, names ...string) *counter {
	c := &counter{desc: desc{name, typeCounter, help, names}, values: map[labels]uint64{}}
	if len(names) == 0 {
		c.values[labels{}] = 0
	}
	return c
}

func (c *counter) inc(values ...string) { c.add(1, values...) }

// add counts n more; zero makes the series known, so that its first rise is seen as one.
func (c *counter) add(n uint64, values ...string) {
	l := labelsOf(values)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.values[l] += n
}

func (c *counter) now() map[labels]uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.values)
}

func (c *counter) write(w *bufio.Writer) {
	now := c.now()
	c.head(w)
	for _, l := range slices.SortedFunc(maps.Keys(now), compareLabels) {
		c.line(w, "", l, "", strconv.FormatUint(now[l], 10))
	}
}

type histogram struct {
	desc
	bounds []float64 // in seconds
	le     []string  // the label of each, and of the last bucket, which has no bound

	mu     sync.Mutex
	values map[labels]*distribution
}

type distribution struct {
	counts []uint64 // one more than bounds
	sum    float64
}

func newHistogram(name, help string, bounds []float64, names ...string) *histogram {
	h := &histogram{desc: desc{name, typeHistogram, help, names}, bounds: bounds, values: map[labels]*distribution{}}
	for _, b := range bounds {
		h.le = append(h.le, `le="`+number(b)+`"`)
	}
	h.le = append(h.le, `le="+Inf"`)
	if len(names) == 0 {
		h.values[labels{}] = h.distribution()
	}
	return h
}

func (h *histogram) distribution() *distribution {
	return &distribution{counts: make([]uint64, len(h.bounds)+1)}
}

func (h *histogram) observe(d time.Duration, values ...string) {
	l, v := labelsOf(values), d.Seconds()
	at, _ := slices.BinarySearch(h.bounds, v) // the first bound that is not below v
	h.mu.Lock()
	defer h.mu.Unlock()
	dist := h.values[l]
	if dist == nil {
		dist = h.distribution()
		h.values[l] = dist
	}
	dist.counts[at]++
	dist.sum += v
}

func (h *histogram) write(w *bufio.Writer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.head(w)
	for _, l := range slices.SortedFunc(maps.Keys(h.values), compareLabels) {
		var total uint64
		for i, n := range h.values[l].counts {
			total += n
			h.line(w, "_bucket", l, h.le[i], strconv.FormatUint(total, 10))
		}
		h.line(w, "_sum", l, "", number(h.values[l].sum))
		h.line(w, "_count", l, "", strconv.FormatUint(total, 10))
	}
}
