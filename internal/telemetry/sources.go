package telemetry

import (
	"context"
	"runtime"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// Sources is where metrics come from that nobody tells: they are asked when somebody looks.
type Sources struct {
	Version string
	Driver  string
	// Census counts the living sandboxes.
	Census func() map[sandbox.Standing]int
	// Shared tells whether a template is everybody's, so that its name may be shown; nil: all are.
	Shared func(template string) bool
	// Maker counts what makes sandboxes; nil where the driver has no maker.
	Maker func(context.Context) (Maker, error)
	// DiskFree is how many bytes sandboxes can still write; nil where nobody knows.
	DiskFree func() (int64, bool)
}

// Maker is what the maker holds.
type Maker struct {
	Sandboxes  int // that live
	Ending     int // whose remains are being removed
	Pooled     int // that wait for a create
	Slots      int // uid ranges and addresses that are in use
	FDs        int
	Goroutines int
	// Of all sandboxes together, zygotes and those that have ended included.
	CPUSeconds  float64
	MemoryBytes int64
	Zygotes     []Zygote
	Disk        *Disk // nil: not known
}

// Disk is what sandboxes, volumes and snapshots have of the host's disk, in bytes.
type Disk struct {
	Used     int64
	Promised int64 // what they may write beyond that
	Reserve  int64 // what stays free
}

// Zygote is one process that kernels are forked from.
type Zygote struct {
	Template    string
	Forks       int // since its start
	Children    int // that live
	MemoryBytes int64
}

// makerPatience is how long a scrape waits for the maker. Prometheus itself gives up after ten seconds,
// and a scrape may wait for the database too.
const makerPatience = 4 * time.Second

// Watch adds the metrics of these sources; it is called once, before Metrics is served.
func (o *Observer) Watch(s Sources) {
	if s.Shared != nil {
		o.shared = s.Shared
	}
	o.add(newGauges(func(r *reading) { r.set("cove_build_info", 1, s.Version, runtime.Version(), s.Driver) },
		desc{name: "cove_build_info", help: "What this server is; always 1.", labels: []string{"version", "go_version", "driver"}}))
	if s.Census != nil {
		o.add(newGauges(func(r *reading) { o.census(r, s.Census()) },
			desc{name: "cove_sandboxes", help: "Sandboxes that live now.", labels: []string{"state", "template"}}))
	}
	if s.Maker != nil {
		o.add(newGauges(func(r *reading) { o.maker(r, s.Maker) }, makerMetrics...))
	}
	o.add(newGauges(readProcess, processMetrics...), newGauges(func(r *reading) { readHost(r, s.DiskFree) }, hostMetrics...))
}

func (o *Observer) census(r *reading, now map[sandbox.Standing]int) {
	for _, s := range []sandbox.State{sandbox.StateRunning, sandbox.StatePaused} {
		r.set("cove_sandboxes", 0, string(s), "") // a graph of an idle server is a line at zero, not a gap
	}
	for s, n := range now {
		r.set("cove_sandboxes", float64(n), string(s.State), o.template(s.Template))
	}
}

var makerMetrics = []desc{
	{name: "cove_maker_up", help: "Whether the maker answers."},
	{name: "cove_maker_sandboxes", help: "Sandboxes that the maker holds."},
	{name: "cove_maker_ending", help: "Ended sandboxes whose remains are being removed."},
	{name: "cove_maker_slots", help: "Uid ranges and addresses in use, pooled sandboxes included."},
	{name: "cove_maker_open_fds", help: "File descriptors of the maker."},
	{name: "cove_maker_goroutines", help: "Goroutines of the maker."},
	{name: "cove_sandboxes_cpu_seconds_total", kind: typeCounter, help: "CPU time of all sandboxes since the maker began, zygotes included."},
	{name: "cove_sandboxes_memory_bytes", help: "Memory of all sandboxes, zygotes and page cache included."},
	{name: "cove_disk_used_bytes", help: "What disks of sandboxes, volumes and snapshots have on the host's disk."},
	{name: "cove_disk_promised_bytes", help: "What disks of sandboxes and volumes may write beyond that."},
	{name: "cove_disk_reserve_bytes", help: "Free bytes of the host's disk below which nothing new is started."},
	{name: "cove_pool_sandboxes", help: "Sandboxes made ahead that wait for a create."},
	{name: "cove_zygotes", help: "Processes that kernels are forked from.", labels: []string{"template"}},
	{name: "cove_zygote_children", help: "Living children of zygotes.", labels: []string{"template"}},
	{name: "cove_zygote_forks", help: "Forks that the living zygotes have made.", labels: []string{"template"}},
	{name: "cove_zygote_memory_bytes", help: "Memory of zygotes when they were ready.", labels: []string{"template"}},
}

func (o *Observer) maker(r *reading, ask func(context.Context) (Maker, error)) {
	// A scrape has no caller whose leaving should stop it: the answer is small and the time is bounded.
	ctx, cancel := context.WithTimeout(context.Background(), makerPatience)
	defer cancel()
	m, err := ask(ctx)
	if err != nil {
		r.set("cove_maker_up", 0)
		return
	}
	r.set("cove_maker_up", 1)
	r.set("cove_maker_sandboxes", float64(m.Sandboxes))
	r.set("cove_maker_ending", float64(m.Ending))
	r.set("cove_maker_slots", float64(m.Slots))
	r.set("cove_maker_open_fds", float64(m.FDs))
	r.set("cove_maker_goroutines", float64(m.Goroutines))
	r.set("cove_sandboxes_cpu_seconds_total", m.CPUSeconds)
	r.set("cove_sandboxes_memory_bytes", float64(m.MemoryBytes))
	if m.Disk != nil {
		r.set("cove_disk_used_bytes", float64(m.Disk.Used))
		r.set("cove_disk_promised_bytes", float64(m.Disk.Promised))
		r.set("cove_disk_reserve_bytes", float64(m.Disk.Reserve))
	}
	r.set("cove_pool_sandboxes", float64(m.Pooled))
	for _, z := range m.Zygotes {
		name := o.template(z.Template)
		r.set("cove_zygotes", 1, name)
		r.set("cove_zygote_children", float64(z.Children), name)
		r.set("cove_zygote_forks", float64(z.Forks), name)
		r.set("cove_zygote_memory_bytes", float64(z.MemoryBytes), name)
	}
}
