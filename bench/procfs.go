package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

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
