package testserver

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"

	"github.com/covehq/cove/internal/driver/native"
)

// What root can count on the host, without asking the server.

// Processes are the ids of all processes on the host.
func Processes() []int {
	entries, _ := os.ReadDir("/proc")
	var all []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, pid)
		}
	}
	return all
}

// Cmdline is a process's arguments, separated by NUL.
func Cmdline(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.TrimRight(string(text), "\x00")
}

// Status is one field of /proc/PID/status; empty if there is no such process.
func Status(pid int, field string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// RSS is a process's memory in bytes.
func RSS(pid int) int64 {
	kb, _ := strconv.ParseInt(strings.TrimSuffix(Status(pid, "VmRSS"), " kB"), 10, 64)
	return kb << 10
}

// MakerPID finds the maker of the data directory by its command line; 0 is none. A process that the
// maker has just made carries that command line too, until it runs another program.
func (s *Server) MakerPID() int {
	var found []int
	for _, pid := range Processes() {
		argv := strings.Split(Cmdline(pid), "\x00")
		i := slices.Index(argv, "--data-dir")
		if i > 1 && i+1 < len(argv) && argv[i+1] == s.Dir && argv[1] == "maker" && !strings.HasPrefix(Status(pid, "State"), "Z") {
			found = append(found, pid)
		}
	}
	for _, pid := range found {
		if parent, _ := strconv.Atoi(Status(pid, "PPid")); !slices.Contains(found, parent) {
			return pid
		}
	}
	return 0
}

// ChildrenOfMaker are the maker's children whose command line holds the words.
func (s *Server) ChildrenOfMaker(words string) (pids []int) {
	maker := strconv.Itoa(s.MakerPID())
	for _, pid := range Processes() {
		if maker != "0" && Status(pid, "PPid") == maker && strings.Contains(Cmdline(pid), words) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// cgroups are the directories of this server's sandboxes in every hierarchy.
func (s *Server) cgroups() []string {
	var all []string
	for _, pattern := range []string{"/sys/fs/cgroup/cove-", "/sys/fs/cgroup/*/cove-"} {
		roots, _ := filepath.Glob(pattern + s.Tag())
		for _, root := range roots {
			_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					all = append(all, path)
				}
				return nil // a group may go while it is looked at
			})
		}
	}
	return all
}

// Inside are the processes in this server's cgroups and all that descend from its maker.
func (s *Server) Inside() []int {
	found := map[int]bool{}
	for _, dir := range s.cgroups() {
		text, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		for _, word := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				found[pid] = true
			}
		}
	}
	children := map[int][]int{}
	for _, pid := range Processes() {
		parent, _ := strconv.Atoi(Status(pid, "PPid"))
		children[parent] = append(children[parent], pid)
	}
	var descend func(pid int)
	descend = func(pid int) {
		for _, child := range children[pid] {
			found[child] = true
			descend(child)
		}
	}
	if maker := s.MakerPID(); maker != 0 {
		descend(maker)
	}
	return slices.Sorted(maps.Keys(found))
}

// links are the network interfaces of this server.
func (s *Server) links() (names []string) {
	all, _ := net.Interfaces()
	for _, l := range all {
		if strings.HasPrefix(l.Name, "cv"+s.Tag()+"-") {
			names = append(names, l.Name)
		}
	}
	return names
}

// loops are the loop devices whose files are below the data directory.
func (s *Server) loops() (n int) {
	devices, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, name := range devices {
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), s.Dir+"/") {
			n++
		}
	}
	return n
}

// elements counts what sandboxes have in this server's nftables table; ok is whether there is a table. Sets that packets
// fill empty themselves by their own clock and are not counted.
func (s *Server) elements() (n int, ok bool, err error) {
	conn, err := nftables.New()
	if err != nil {
		return 0, false, err
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return 0, false, err
	}
	for _, table := range tables {
		if table.Name != "cove_"+s.Tag() {
			continue
		}
		sets, err := conn.GetSets(table)
		if err != nil {
			return 0, true, err
		}
		for _, set := range sets {
			if set.Dynamic || set.HasTimeout {
				continue
			}
			list, err := conn.GetSetElements(set)
			if err != nil {
				return 0, true, err
			}
			n += len(list)
		}
		return n, true, nil
	}
	return 0, false, nil
}

// Leftovers is what is on the host of a server whose processes have ended; a clean end leaves nothing.
func (s *Server) Leftovers() (left []string) {
	say := func(n int, what string) {
		if n > 0 {
			left = append(left, fmt.Sprintf("%d %s", n, what))
		}
	}
	ours, self := 0, os.Getpid()
	for _, pid := range Processes() {
		line := Cmdline(pid)
		if pid != self && strings.Contains(line, s.Dir) && !strings.HasPrefix(line, "sh\x00-c\x00cat") && !strings.HasPrefix(Status(pid, "State"), "Z") {
			ours++
		}
	}
	say(ours, "processes with the data directory in their command line")
	say(len(s.Inside()), "processes in cgroups or below the maker")
	say(len(s.links()), "links")
	say(s.loops(), "loop devices")
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	say(strings.Count(string(mounts), s.Dir+"/"), "mounts")
	return left
}

// Census is everything that a sandbox or a request could leave behind, by name.
type Census map[string]int

// Count takes a census.
func (s *Server) Count(ctx context.Context) (Census, error) {
	c := Census{"cgroups": len(s.cgroups()), "links": len(s.links()), "loop devices": s.loops()}
	n, _, err := s.elements()
	if err != nil {
		return nil, err
	}
	c["nft elements"] = n
	pids := s.Inside()
	c["processes"] = len(pids)
	host, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	c["host mounts"] = strings.Count(string(host), s.Dir)
	c["files"] = s.files()
	if s.MakerPID() == 0 {
		return c, nil
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", s.MakerPID()))
	if err != nil {
		return nil, err
	}
	c["maker's mounts"] = strings.Count(string(mounts), "\n")
	return c, s.countMaker(ctx, c)
}

// countMaker asks the maker for what only it knows.
func (s *Server) countMaker(ctx context.Context, c Census) error {
	d, err := native.Open(ctx, native.Config{DataDir: s.Dir})
	if err != nil {
		return err
	}
	defer d.Close()
	stats, err := d.Stats(ctx)
	if err != nil {
		return err
	}
	c["maker's sandboxes"], c["maker's dying"], c["maker's pool"], c["maker's slots"] = stats.Sandboxes, stats.Dying, stats.Pooled, stats.Slots
	for _, z := range stats.Zygotes {
		c["zygotes"]++
		c["zygotes' children"] += z.Live
	}
	return nil
}

// files counts the names below the data directory that a sandbox could have caused.
func (s *Server) files() (n int) {
	_ = filepath.WalkDir(s.Dir, func(path string, d fs.DirEntry, err error) error {
		base := filepath.Base(path)
		// The database's helpers come and go with connections to it.
		if err == nil && !d.IsDir() && !strings.HasPrefix(base, "cove.db") && base != "log" && base != ".ready" {
			n++
		}
		return nil
	})
	return n
}

// Above is what there is more of than before.
func (c Census) Above(before Census) (more []string) {
	for _, what := range slices.Sorted(maps.Keys(c)) {
		if c[what] > before[what] {
			more = append(more, fmt.Sprintf("%s: %d before, %d now", what, before[what], c[what]))
		}
	}
	return more
}
