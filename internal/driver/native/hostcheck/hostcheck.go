// Package hostcheck says whether this host can run the native driver, and what to do where it cannot. It looks and
// tries; it changes nothing and leaves nothing behind.
package hostcheck

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Level is how much a finding matters.
type Level string

// The levels, from nothing to do to cannot go on.
const (
	OK     Level = "ok"
	Note   Level = "note"   // worth knowing
	Warn   Level = "warn"   // works, with less safety, speed or function
	Refuse Level = "refuse" // unsafe, or cannot work
)

// Finding is one thing that was looked at.
type Finding struct {
	Name   string `json:"name"`
	Level  Level  `json:"level"`
	Detail string `json:"detail"`           // what was found and what it means
	Remedy string `json:"remedy,omitempty"` // what to do about it
}

// Options say what to look at.
type Options struct {
	DataDir string // where sandboxes and templates will live; need not exist yet
	// Root is put before every path of /proc, /sys and the like; with it set nothing is tried or looked for, only read. For tests.
	Root string
}

// Check looks at everything, in the order a person would want to read it.
func Check(ctx context.Context, options Options) []Finding {
	h := &host{options: options}
	checks := []func(context.Context, *host) []Finding{
		privilege, capabilities, tracing, kernel, container, userNamespaces, dataDir, copies, layers, seccompFilter, cgroups, pause, firewall, veth, forwarding,
		diskImages, memory, hugePages, sameMemory, hardware, clock, packages,
	}
	if options.Root == "" {
		checks = append(checks, compiler, python, tools)
	}
	var findings []Finding
	for _, check := range checks {
		if ctx.Err() != nil {
			break
		}
		findings = append(findings, check(ctx, h)...)
	}
	return findings
}

// Worst is the highest level among findings.
func Worst(findings []Finding) Level {
	order := []Level{OK, Note, Warn, Refuse}
	worst := 0
	for _, f := range findings {
		for i, level := range order {
			if f.Level == level {
				worst = max(worst, i)
			}
		}
	}
	return order[worst]
}

type host struct{ options Options }

// real says that probes may run: this is the host itself, and we are root on it.
func (h *host) real() bool { return h.options.Root == "" && os.Geteuid() == 0 }

func (h *host) path(name string) string { return filepath.Join(h.options.Root, name) }

// read is a small file's text, trimmed; empty where there is none.
func (h *host) read(name string) string {
	text, err := os.ReadFile(h.path(name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

func (h *host) exists(name string) bool {
	_, err := os.Stat(h.path(name))
	return err == nil
}

// number is a file's integer; otherwise where there is none.
func (h *host) number(name string, otherwise int64) int64 {
	n, err := strconv.ParseInt(h.read(name), 10, 64)
	if err != nil {
		return otherwise
	}
	return n
}

// field is the value behind "Key:" in files like /proc/meminfo.
func (h *host) field(name, key string) string {
	for line := range strings.Lines(h.read(name)) {
		if k, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func one(name string, level Level, remedy, format string, args ...any) []Finding {
	return []Finding{{Name: name, Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy}}
}

// notTried is what a probe says when it may not run.
func notTried(name string) []Finding {
	return one(name, Note, "run doctor as root", "not tried: that needs root")
}
