package pod

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

// cgroupDir is where a container sees its own cgroup.
const cgroupDir = "/sys/fs/cgroup"

// usage reads what the container's cgroup has counted, in either version. What is not there is zero: runtimes show different parts of it.
func usage(dir string) podapi.Usage {
	if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err == nil {
		return podapi.Usage{
			CPUMS: field(dir, "cpu.stat", "usage_usec") / 1000, MemoryBytes: number(dir, "memory.current"), PeakBytes: number(dir, "memory.peak"),
			Pids: int(number(dir, "pids.current")), OOMKills: int(field(dir, "memory.events", "oom_kill")),
		}
	}
	return podapi.Usage{
		CPUMS: number(dir, "cpuacct/cpuacct.usage") / 1e6, MemoryBytes: number(dir, "memory/memory.usage_in_bytes"),
		PeakBytes: number(dir, "memory/memory.max_usage_in_bytes"), Pids: int(number(dir, "pids/pids.current")),
		OOMKills: int(field(dir, "memory/memory.oom_control", "oom_kill")),
	}
}

func number(dir, name string) int64 {
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// field is one line of a file of names and numbers.
func field(dir, name, key string) int64 {
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			n, _ := strconv.ParseInt(v, 10, 64) // zero is what is not known
			return n
		}
	}
	return 0
}
