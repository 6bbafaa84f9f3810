package pod

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

func TestUsageIsReadFromEitherVersion(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  podapi.Usage
	}{
		"version 2": {map[string]string{
			"cgroup.controllers": "cpu memory pids\n", "cpu.stat": "usage_usec 2500000\nuser_usec 1\n", "memory.current": "1024\n", "memory.peak": "4096\n",
			"memory.events": "low 0\noom 3\noom_kill 2\n", "pids.current": "7\n",
		}, podapi.Usage{CPUMS: 2500, MemoryBytes: 1024, PeakBytes: 4096, Pids: 7, OOMKills: 2}},
		"version 1": {map[string]string{
			"cpuacct/cpuacct.usage": "2500000000\n", "memory/memory.usage_in_bytes": "1024\n", "memory/memory.max_usage_in_bytes": "4096\n",
			"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "pids/pids.current": "7\n",
		}, podapi.Usage{CPUMS: 2500, MemoryBytes: 1024, PeakBytes: 4096, Pids: 7, OOMKills: 2}},
		"none":    {nil, podapi.Usage{}},
		"nothing": {map[string]string{"cgroup.controllers": "", "memory.current": "max\n", "cpu.stat": "x\n"}, podapi.Usage{}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range c.files {
				path := filepath.Join(dir, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := usage(dir); got != c.want {
				t.Errorf("%+v, not %+v", got, c.want)
			}
		})
	}
}
