package cli

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// overview is the whole of what `cove top` shows.
type overview struct {
	At          time.Time      `json:"at"`
	Server      string         `json:"server"`
	Host        *host          `json:"host,omitempty"`
	States      map[string]int `json:"states"`
	CPUPercent  float64        `json:"cpu_percent"`
	MemoryBytes int64          `json:"memory_bytes"`
	DiskBytes   int64          `json:"disk_bytes"`
	Pids        int            `json:"pids"`
	Sandboxes   []sample       `json:"sandboxes"`
}

// host is what this machine has; known only where the server runs on it.
type host struct {
	CPUs            int    `json:"cpus"`
	Load            string `json:"load"`
	MemoryBytes     int64  `json:"memory_bytes"`
	AvailableMemory int64  `json:"available_memory_bytes"`
}

func (a *invocation) top() *cobra.Command {
	var p pace
	c := &cobra.Command{
		Use:   "top",
		Short: "Watch the server and its busiest sandboxes",
		Long: "Watch an overview: this host, if the server runs on it, your sandboxes by state, what they use together, and the busiest of\n" +
			"them. q ends it. Where there is no terminal it is printed once; with --json it is an object a line.",
		Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.watch(c.Context(), &sampler{c: cl}, p, view{
				whole: true,
				value: func(all []sample) any { return a.survey(all) },
				each:  func(all []sample) []any { return []any{a.survey(all)} },
				lines: func(all []sample, width int, colour bool) []string { return a.survey(all).lines(width, colour) },
			})
		},
	}
	p.register(c)
	return c
}

// survey sums up samples, the busiest first.
func (a *invocation) survey(all []sample) *overview {
	o := &overview{At: time.Now(), Server: a.server, States: map[string]int{}, Sandboxes: []sample{}}
	if here(a.server) {
		o.Host = readHost()
	}
	for _, x := range all {
		o.States[x.State]++
		o.CPUPercent += x.CPUPercent
		o.MemoryBytes += x.MemoryBytes
		o.DiskBytes += x.DiskBytes
		o.Pids += x.Pids
		o.Sandboxes = append(o.Sandboxes, x)
	}
	slices.SortStableFunc(o.Sandboxes, func(x, y sample) int {
		return cmp.Or(cmp.Compare(y.CPUPercent, x.CPUPercent), cmp.Compare(y.MemoryBytes, x.MemoryBytes))
	})
	return o
}

func (o *overview) lines(width int, colour bool) []string {
	var states []string
	for _, state := range []string{"running", "paused", "starting", "stopping"} {
		if n := o.States[state]; n > 0 {
			states = append(states, fmt.Sprintf("%d %s", n, state))
		}
	}
	var head table
	quit := ""
	if width > 0 { // somebody watches
		quit = " (q quits)"
	}
	head.row(cell{"server", bold}, o.Server+", "+o.At.Format(time.TimeOnly)+quit)
	if h := o.Host; h != nil {
		head.row(cell{"host", bold}, fmt.Sprintf("%s, load %s, %s of %s memory available", count(h.CPUs, "CPU", "CPUs"), h.Load, size(h.AvailableMemory), size(h.MemoryBytes)))
	}
	head.row(cell{"sandboxes", bold}, cmp.Or(strings.Join(states, ", "), "none; `cove create` makes one"))
	head.row(cell{"together", bold}, fmt.Sprintf("%.1f %% CPU, %s memory, %s disk, %d pids", o.CPUPercent, size(o.MemoryBytes), size(o.DiskBytes), o.Pids))
	head.row("")
	var t table
	t.head("ID", "TEMPLATE", "STATE", ">CPU %", ">MEMORY", ">DISK", ">PIDS", "USED", "ENDS", "KEY")
	for _, x := range o.Sandboxes {
		t.row(x.ID, x.Template, stateCell(x.State), cpuCell(x.CPUPercent), size(x.MemoryBytes), size(x.DiskBytes), x.Pids,
			ago(x.info.LastUsed, o.At), ends(&x.info, o.At), cmp.Or(x.Key, "-"))
	}
	return append(head.lines(width, colour), t.lines(width, colour)...)
}

// here reports whether a server runs on this machine, as far as its address tells.
func here(server string) bool {
	u, err := url.Parse(server)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// readHost is nil where the kernel does not tell.
func readHost() *host {
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return nil
	}
	memory, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil
	}
	h := &host{CPUs: runtime.NumCPU(), Load: strings.Join(strings.Fields(string(load))[:3], " ")}
	for line := range strings.Lines(string(memory)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[1], 10, 64) // what is not a number is none of the two
		switch fields[0] {
		case "MemTotal:":
			h.MemoryBytes = kib << 10
		case "MemAvailable:":
			h.AvailableMemory = kib << 10
		}
	}
	return h
}
