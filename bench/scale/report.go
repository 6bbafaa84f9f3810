package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// machine is what the numbers are worth nothing without.
type machine struct {
	CPU   string    `json:"cpu"`
	Cores int       `json:"cores"`
	Load  string    `json:"load"` // averages, before it began
	Date  time.Time `json:"date"`
}

func describe() machine {
	load, _ := os.ReadFile("/proc/loadavg") // not everywhere
	m := machine{Cores: runtime.NumCPU(), Date: time.Now().UTC().Truncate(time.Second), Load: strings.Join(strings.Fields(string(load))[:3], " ")}
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if name, found := strings.CutPrefix(line, "model name"); found {
			m.CPU = strings.Trim(name, "\t :\n")
		}
	}
	return m
}

// tables are for docs/scale.md.
func tables(all []result) string {
	var b strings.Builder
	b.WriteString("\n| servers | Pods that wait | filled, Pods/s | claims/s | p50 ms | p99 ms | writes lost | writes per claim | watch bytes per claim, each server | CPU per claim: API, etcd, servers, ms |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		c := r.Claim
		fmt.Fprintf(&b, "| %d | %d | %.0f | %.0f | %.1f | %.1f | %d of %d | %.2f | %.0f | %.1f, %.1f, %.1f |\n", r.Servers, r.Pods, r.Fill, c.PerSecond, c.P50, c.P99,
			c.Lost, c.N, c.Writes, c.Watch, c.APICPU, c.EtcdCPU, c.ServerCPU)
	}
	b.WriteString("\n| servers | Pods that wait | sandboxes/s | p50 ms | p99 ms | writes of Cove's | of the nodes | watch bytes, each server | CPU: API, etcd, servers, ms |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		if c := r.Come; c != nil {
			fmt.Fprintf(&b, "| %d | %d | %.0f | %.1f | %.1f | %.2f | %.2f | %.0f | %.1f, %.1f, %.1f |\n", r.Servers, r.Pods, c.PerSecond, c.P50, c.P99,
				c.Writes, c.NodeWrites, c.Watch, c.APICPU, c.EtcdCPU, c.ServerCPU)
		}
	}
	b.WriteString("\n| Pods | heap of a server, MB | resident, MB | API server resident, MB |\n|---|---|---|---|\n")
	for _, r := range all {
		if r.Servers == 1 {
			fmt.Fprintf(&b, "| %d | %.0f | %.0f | %.0f |\n", r.Pods, r.HeapMB, r.ServerMB, r.APIMB)
		}
	}
	return b.String()
}

func write(file string, m machine, all []result) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(struct {
		Machine machine  `json:"machine"`
		Rounds  []result `json:"rounds"`
	}{m, all}); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o644)
}
