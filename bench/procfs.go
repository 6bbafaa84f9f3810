package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// How long the processors are looked at, what part of that they have nothing to do when they are idle, and how long that
// is waited for.
const (
	idleWindow   = 50 * time.Millisecond
	idlePart     = 0.9
	idlePatience = 2 * time.Second
)

// awaitIdle returns when the processors have had next to nothing to do for a moment, or have been busy for too long.
func awaitIdle(ctx context.Context) {
	for begun := time.Now(); time.Since(begun) < idlePatience; {
		idle, all := processorTimes()
		select {
		case <-time.After(idleWindow):
		case <-ctx.Done():
			return
		}
		idleThen, allThen := processorTimes()
		if float64(idleThen-idle) >= idlePart*float64(allThen-all) {
			return
		}
	}
}

// processorTimes are the ticks that all processors were idle, and all ticks.
func processorTimes() (idle, all int64) {
	text, _ := os.ReadFile("/proc/stat") // nothing: always idle
	first, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(strings.TrimPrefix(first, "cpu")) {
		n, _ := strconv.ParseInt(field, 10, 64)
		all += n
		if i == 3 || i == 4 { // idle, and idle while a disk is waited for
			idle += n
		}
	}
	return idle, all
}

// descriptors is how many a process has open.
func descriptors(pid int) int {
	all, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)) // none: it is gone
	return len(all)
}

// groups are the directories of the maker's cgroups that hold memory, one for each sandbox. The maker keeps zygotes beside
// them, so a zygote's own entry in /proc leads there.
func (w *world) groups(ctx context.Context) (all []string) {
	s, err := w.driver.Stats(ctx)
	if err != nil || len(s.Zygotes) == 0 {
		return nil
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", s.Zygotes[0].PID))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 || !(part[1] == "memory" || part[1] == "") {
			continue
		}
		found, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", part[1], filepath.Dir(part[2]), "sb*")) // the pattern is ours
		if len(found) > len(all) {
			all = found
		}
	}
	return all
}

// processes are those in sandboxes.
func (w *world) processes(ctx context.Context) (all []int) {
	for _, dir := range w.groups(ctx) {
		text, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // it may have ended
		for field := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil && !stopped(pid) {
				all = append(all, pid)
			}
		}
	}
	return all
}

// stopped tells a kernel's anchor: its memory is the kernel's, which is counted already.
func stopped(pid int) bool {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)) // it may have ended
	_, rest, _ := strings.Cut(string(text), ") ")
	return strings.HasPrefix(rest, "t")
}
