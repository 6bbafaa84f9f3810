package telemetry

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// The names of process_* and go_* are those that every Prometheus dashboard knows.
var processMetrics = []desc{
	{name: "go_goroutines", help: "Goroutines of the server."},
	{name: "process_cpu_seconds_total", kind: typeCounter, help: "CPU time of the server."},
	{name: "process_resident_memory_bytes", help: "Memory of the server."},
	{name: "process_open_fds", help: "File descriptors of the server."},
	{name: "process_start_time_seconds", help: "When the server started, since the epoch."},
}

var hostMetrics = []desc{
	{name: "cove_host_cpus", help: "Processors of the host."},
	{name: "cove_host_load1", help: "Load average of the host over a minute."},
	{name: "cove_host_memory_bytes", help: "Memory of the host."},
	{name: "cove_host_memory_available_bytes", help: "Memory of the host that could be used now."},
	{name: "cove_host_disk_free_bytes", help: "Free space where sandboxes write."},
}

var begun = time.Now()

// userHZ is the unit of times in /proc/PID/stat on every Linux that Go runs on.
const userHZ = 100

// readProcess leaves out what a host without /proc does not tell.
func readProcess(r *reading) {
	r.set("go_goroutines", float64(runtime.NumGoroutine()))
	r.set("process_start_time_seconds", float64(begun.UnixMilli())/1000)
	if fields := statFields(); len(fields) > 21 {
		user, errU := strconv.ParseFloat(fields[11], 64)
		system, errS := strconv.ParseFloat(fields[12], 64)
		if errU == nil && errS == nil {
			r.set("process_cpu_seconds_total", (user+system)/userHZ)
		}
		if pages, err := strconv.ParseFloat(fields[21], 64); err == nil {
			r.set("process_resident_memory_bytes", pages*float64(os.Getpagesize()))
		}
	}
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		r.set("process_open_fds", float64(len(entries)))
	}
}

// statFields are those of /proc/self/stat after the program's name, which may hold spaces: the state is the first.
func statFields() []string {
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return nil
	}
	return strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
}

func readHost(r *reading, free func() (int64, bool)) {
	r.set("cove_host_cpus", float64(runtime.NumCPU()))
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		first, _, _ := strings.Cut(string(text), " ")
		if load, err := strconv.ParseFloat(first, 64); err == nil {
			r.set("cove_host_load1", load)
		}
	}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			switch name, rest, _ := strings.Cut(line, ":"); name {
			case "MemTotal":
				r.setKB("cove_host_memory_bytes", rest)
			case "MemAvailable":
				r.setKB("cove_host_memory_available_bytes", rest)
			}
		}
	}
	if free == nil {
		return
	}
	if n, ok := free(); ok {
		r.set("cove_host_disk_free_bytes", float64(n))
	}
}

// setKB reads what /proc/meminfo says of one thing: "  1024 kB".
func (r *reading) setKB(name, text string) {
	if kb, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(text), "kB")), 64); err == nil {
		r.set(name, kb*1024)
	}
}
