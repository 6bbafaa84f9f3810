package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// host is what a number is worth nothing without.
type host struct {
	Kernel   string            `json:"kernel"`
	Arch     string            `json:"arch"`
	CPU      string            `json:"cpu,omitempty"`
	Cores    int               `json:"cores"`
	MemoryMB int64             `json:"memory_mb"`
	Cgroup   string            `json:"cgroup"` // v1 or v2: where the limits of memory are
	Load     float64           `json:"load"`   // average of the minute before
	Quiet    bool              `json:"quiet"`
	Date     time.Time         `json:"date"`
	Version  string            `json:"version"`
	Seconds  float64           `json:"seconds"`           // how long all of it took
	Peers    map[string]string `json:"peers,omitempty"`   // their versions
	Skipped  []skipped         `json:"skipped,omitempty"` // who did not take part
}

// skipped is a peer that is not in the results.
type skipped struct {
	Subject string `json:"subject"`
	Reason  string `json:"reason"`
}

// describeHost waits for a quiet machine, if it was told to, and says what it found.
func describeHost(ctx context.Context, o options) host {
	quiet := awaitQuiet(ctx, o.quiet)
	h := host{
		Arch: runtime.GOARCH, CPU: cpuName(), Cores: runtime.NumCPU(), MemoryMB: meminfo("MemTotal") / 1e6, Cgroup: cgroupVersion(),
		Load: load(), Quiet: quiet, Date: time.Now().UTC().Truncate(time.Second),
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		h.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	if out, err := exec.CommandContext(ctx, o.cove, "version").Output(); err == nil {
		h.Version, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	}
	return h
}

func (h host) String() string {
	text := fmt.Sprintf("%s, kernel %s %s, cgroup %s, %d cores (%s), %d MB, load %.2f, %s",
		h.Version, h.Kernel, h.Arch, h.Cgroup, h.Cores, h.CPU, h.MemoryMB, h.Load, h.Date.Format(time.RFC3339))
	if !h.Quiet {
		text += fmt.Sprintf("\nThis machine was not quiet (load %.2f on %d cores): compare ratios, not milliseconds.", h.Load, h.Cores)
	}
	return text
}

// awaitQuiet waits at most that long until the machine does little else, and tells whether it does.
func awaitQuiet(ctx context.Context, limit time.Duration) bool {
	cores := float64(runtime.NumCPU())
	if limit > 0 {
		fmt.Fprintf(os.Stderr, "waiting up to %v for a quiet machine\n", limit)
	}
	last := cpuTimes()
	err := poll(ctx, max(limit, time.Millisecond), time.Second, func() (bool, error) {
		now := cpuTimes()
		busy := now.busySince(last)
		last = now
		return load() < cores/2 && busy < 0.1, nil
	})
	return err == nil || limit == 0 && load() <= cores/2
}

// cpuTime is what /proc/stat counts for all processors together.
type cpuTime struct{ idle, total float64 }

func cpuTimes() (t cpuTime) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t
	}
	first, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(first)[1:] {
		v, _ := strconv.ParseFloat(field, 64)
		if i == 3 || i == 4 { // idle, and idle while a disk works
			t.idle += v
		}
		if i < 8 { // the rest is in these already
			t.total += v
		}
	}
	return t
}

// busySince is the share of the time in between that the processors worked.
func (t cpuTime) busySince(before cpuTime) float64 {
	if t.total <= before.total {
		return 1 // not long enough ago to tell
	}
	return 1 - (t.idle-before.idle)/(t.total-before.total)
}

// load is the average of the last minute.
func load() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}

func cpuName() string {
	text, _ := os.ReadFile("/proc/cpuinfo") // not everywhere
	for line := range strings.Lines(string(text)) {
		if name, found := strings.CutPrefix(line, "model name"); found {
			return strings.Trim(name, "\t :\n")
		}
	}
	return "unknown"
}

func cgroupVersion() string {
	if text, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && strings.Contains(string(text), "memory") {
		return "v2"
	}
	return "v1"
}

// meminfo is a field of /proc/meminfo in bytes.
func meminfo(field string) int64 { return kilobytes("/proc/meminfo", field) }

// memory is a field of a process's file in /proc in bytes; zero when the process is gone.
func memory(pid int, file, field string) int64 {
	return kilobytes(fmt.Sprintf("/proc/%d/%s", pid, file), field)
}

func kilobytes(file, field string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n << 10
		}
	}
	return 0
}
