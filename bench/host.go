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
	Kernel   string    `json:"kernel"`
	Arch     string    `json:"arch"`
	Cores    int       `json:"cores"`
	MemoryMB int64     `json:"memory_mb"`
	Load     float64   `json:"load"` // average of the minute before
	Quiet    bool      `json:"quiet"`
	Date     time.Time `json:"date"`
	Version  string    `json:"version"`
	Seconds  float64   `json:"seconds"` // how long all of it took
}

func describeHost(ctx context.Context, cove string) host {
	h := host{Arch: runtime.GOARCH, Cores: runtime.NumCPU(), MemoryMB: meminfo("MemTotal") / 1e6, Date: time.Now().UTC().Truncate(time.Second)}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		h.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		first, _, _ := strings.Cut(string(text), " ")
		h.Load, _ = strconv.ParseFloat(first, 64)
	}
	h.Quiet = h.Load <= float64(h.Cores)/2
	if out, err := exec.CommandContext(ctx, cove, "version").Output(); err == nil {
		h.Version, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	}
	return h
}

func (h host) String() string {
	text := fmt.Sprintf("%s, kernel %s %s, %d cores, %d MB, load %.2f, %s", h.Version, h.Kernel, h.Arch, h.Cores, h.MemoryMB, h.Load, h.Date.Format(time.RFC3339))
	if !h.Quiet {
		text += fmt.Sprintf("\nThis machine is not quiet (load %.2f on %d cores): compare ratios, not milliseconds.", h.Load, h.Cores)
	}
	return text
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
