package e2e_test

import (
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/driver/native"
)

// What root can count on the host, without asking the server.

func processes() []int {
	entries, _ := os.ReadDir("/proc")
	var all []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, pid)
		}
	}
	return all
}

func cmdline(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.TrimRight(string(text), "\x00")
}

// status is one field of /proc/PID/status.
func status(pid int, field string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// rss is a process's memory in bytes.
func rss(pid int) int64 {
	kb, _ := strconv.ParseInt(strings.TrimSuffix(status(pid, "VmRSS"), " kB"), 10, 64)
	return kb << 10
}

// memory is how many bytes this server uses: its process, its maker and all of its sandboxes, with
// the page cache and the kernel's memory that are charged to them. Other programs on the host do
// not count.
func (s *server) memory(t testing.TB) int64 {
	t.Helper()
	total := rss(s.cmd.Process.Pid)
	if maker := makerPID(s.dir); maker != 0 {
		total += rss(maker)
	}
	counted := false
	for _, pattern := range []string{"/sys/fs/cgroup/cove-%s/memory.current", "/sys/fs/cgroup/*/cove-%s/memory.usage_in_bytes"} {
		found, _ := filepath.Glob(fmt.Sprintf(pattern, s.tag()))
		for _, name := range found {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			bytes, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			counted, total = true, total+bytes
		}
	}
	if !counted {
		t.Fatal("no cgroup of this server counts memory")
	}
	return total
}

// cgroups are the directories of this server's sandboxes in every hierarchy.
func (s *server) cgroups() []string {
	var all []string
	for _, pattern := range []string{"/sys/fs/cgroup/cove-", "/sys/fs/cgroup/*/cove-"} {
		roots, _ := filepath.Glob(pattern + s.tag())
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

// inside are the host's pids of everything in this server's cgroups and everything that descends from its maker.
func (s *server) inside() []int {
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
	for _, pid := range processes() {
		parent, _ := strconv.Atoi(status(pid, "PPid"))
		children[parent] = append(children[parent], pid)
	}
	var descend func(pid int)
	descend = func(pid int) {
		for _, child := range children[pid] {
			found[child] = true
			descend(child)
		}
	}
	if maker := makerPID(s.dir); maker != 0 {
		descend(maker)
	}
	return slices.Sorted(maps.Keys(found))
}

// initOf finds PID 1 of a sandbox on the host, by a process of it that everybody can tell from others.
func (s *server) initOf(t testing.TB, sb *sandbox) int {
	t.Helper()
	mark := fmt.Sprintf("%d.%d", time.Now().Unix(), time.Now().Nanosecond())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	defer func() { cancel(); <-done }()
	go func() {
		defer close(done)
		_, _ = sb.Exec(ctx, client.ExecRequest{Argv: []string{"sleep", mark}}) // cut when it has been seen
	}()
	var found int
	eventually(t, "the sandbox's PID 1 is found", 2*time.Minute, func() bool {
		for _, pid := range s.inside() {
			if cmdline(pid) != "sleep\x00"+mark {
				continue
			}
			ns, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
			for _, other := range s.inside() {
				theirs, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", other))
				if f := strings.Fields(status(other, "NSpid")); ns != "" && ns == theirs && len(f) > 1 && f[len(f)-1] == "1" {
					found = other
				}
			}
		}
		return found != 0
	})
	return found
}

// elements counts what sandboxes have in the sets of this server's nftables table; sets that packets fill empty
// themselves by their own clock and are not counted.
func (s *server) elements(t testing.TB) int {
	t.Helper()
	conn, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, table := range tables {
		if table.Name != "cove_"+s.tag() {
			continue
		}
		sets, err := conn.GetSets(table)
		if err != nil {
			t.Fatal(err)
		}
		for _, set := range sets {
			if set.Dynamic || set.HasTimeout {
				continue
			}
			list, err := conn.GetSetElements(set)
			if err != nil {
				t.Fatal(err)
			}
			n += len(list)
		}
	}
	return n
}

// census is everything that a sandbox or a request could leave behind, by name.
type census map[string]int

func (s *server) census(t testing.TB) census {
	t.Helper()
	c := census{"cgroups": len(s.cgroups()), "nft elements": s.elements(t)}

	pids := s.inside()
	c["processes"] = len(pids)
	spaces := map[string]bool{}
	for _, pid := range pids {
		names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/ns/*", pid))
		for _, name := range names {
			if target, err := os.Readlink(name); err == nil {
				spaces[target] = true
			}
		}
	}
	c["namespaces"] = len(spaces)

	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Name, "cv"+s.tag()+"-") {
			c["links"]++
		}
	}
	devices, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, name := range devices {
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), s.dir+"/") {
			c["loop devices"]++
		}
	}
	host, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	c["host mounts"] = strings.Count(string(host), s.dir)
	c["files"] = len(s.files(t))

	if maker := makerPID(s.dir); maker != 0 {
		mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", maker))
		if err != nil {
			t.Fatal(err)
		}
		c["maker's mounts"] = strings.Count(string(mounts), "\n")
		s.countMaker(t, c)
	}
	if s.cmd.ProcessState == nil {
		s.countServer(t, c)
	}
	return c
}

// countMaker asks the maker for what only it knows.
func (s *server) countMaker(t testing.TB, c census) {
	t.Helper()
	d, err := native.Open(t.Context(), native.Config{DataDir: s.dir})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	stats, err := d.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c["maker's sandboxes"], c["maker's dying"], c["maker's pool"], c["maker's slots"] = stats.Sandboxes, stats.Dying, stats.Pooled, stats.Slots
	c["maker's descriptors"], c["maker's goroutines"] = stats.FDs, stats.Goroutine
	c["zygotes"] = len(stats.Zygotes)
	for _, z := range stats.Zygotes {
		c["zygotes' children"] += z.Live
	}
}

func (s *server) countServer(t testing.TB, c census) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	// The database's readers are opened when several ask at once and kept: what the pool may hold counts as held.
	const pool = 2 * (1 + 4) // the writer and its readers, each with the log beside it
	database := 0
	for _, fd := range fds {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", s.cmd.Process.Pid, fd.Name()))
		if base := filepath.Base(target); base == "cove.db" || base == "cove.db-wal" {
			database++
		}
	}
	c["server's descriptors"] = len(fds) - database + max(database, pool)
	for _, pid := range processes() {
		if strings.Contains(cmdline(pid), s.dir) {
			c["programs of ours"]++ // server, maker and their helpers
		}
	}
	metrics := s.metrics(t)
	c["server's goroutines"] = int(metrics["go_goroutines"])
	for name, n := range metrics {
		if strings.HasPrefix(name, "cove_sandboxes{") {
			c["server's sandboxes"] += int(n)
		}
	}
	c["server's runs"] = int(metrics["cove_runs_active"])
}

// metrics reads what the server tells of itself, on a connection that is closed at once.
func (s *server) metrics(t testing.TB) map[string]float64 {
	t.Helper()
	h := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := h.Get(s.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	all := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), " ")
		if value, err := strconv.ParseFloat(text, 64); err == nil {
			all[name] = value
		}
	}
	return all
}

// files are the names below the data directory that a sandbox could have caused.
func (s *server) files(t testing.TB) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(path, s.dir)
		// The database's helpers come and go with connections to it.
		if err == nil && !d.IsDir() && !strings.HasPrefix(filepath.Base(name), "cove.db") && !strings.HasSuffix(name, "/log") {
			names = append(names, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// above is what there is more of than before.
func (c census) above(before census) []string {
	var more []string
	for _, what := range slices.Sorted(maps.Keys(c)) {
		if c[what] > before[what] {
			more = append(more, fmt.Sprintf("%s: %d before, %d now", what, before[what], c[what]))
		}
	}
	return more
}
