// Package cgroup keeps a sandbox within its limits, on cgroup v1, v2 and hosts that have both. It works on
// descriptors that it opens once, so that its user may live in a mount namespace where no cgroup file system is left.
//
// Own code rather than a library: a sandbox is pooled with its descriptors open, and limits change on the create path
// where every write counts; the libraries made for container runtimes go by path and by process id.
package cgroup

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Version of the hierarchy that holds the controllers.
type Version int

// The versions.
const (
	V1 Version = 1
	V2 Version = 2
)

// needed are the controllers without which a limit would be missing; the first three are the limits themselves.
var needed = []string{"memory", "pids", "cpu"}

// wanted are used when they are there: accounting of CPU time and the freezer are controllers of their own on v1.
var wanted = []string{"cpuacct", "freezer"}

// Limits of one group; zero leaves a limit as it is.
type Limits struct {
	CPUs        float64
	MemoryBytes int64
	Pids        int
}

// Usage of one group.
type Usage struct {
	CPUMS       int64
	MemoryBytes int64
	PeakBytes   int64
	Pids        int
	OOMKills    int
}

// Root is the parent group of all sandboxes of one Cove.
type Root struct {
	version Version
	name    string
	dirs    []hierarchy
}

// hierarchy is one mounted tree: on v1 there is one for each controller (or pair), on v2 one for all.
type hierarchy struct {
	controllers []string
	joiner      string   // the file by which a process joins
	top         *os.File // where it is mounted
	dir         *os.File // the parent group
}

// Mount is a cgroup file system of this host.
type Mount struct {
	Path        string
	Version     Version
	Controllers []string
}

// Mounts reads what is mounted from a mountinfo file.
func Mounts(mountinfo string) ([]Mount, error) {
	data, err := os.ReadFile(mountinfo)
	if err != nil {
		return nil, err
	}
	return parseMounts(data)
}

func parseMounts(mountinfo []byte) ([]Mount, error) {
	var out []Mount
	scan := bufio.NewScanner(bytes.NewReader(mountinfo))
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		left, right, ok := strings.Cut(scan.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 3 {
			continue
		}
		switch r[0] {
		case "cgroup2":
			controllers, err := os.ReadFile(filepath.Join(l[4], "cgroup.controllers"))
			if err != nil {
				continue
			}
			out = append(out, Mount{l[4], V2, strings.Fields(string(controllers))})
		case "cgroup":
			var controllers []string
			for _, o := range strings.Split(r[2], ",") {
				if slices.Contains(needed, o) || slices.Contains(wanted, o) {
					controllers = append(controllers, o)
				}
			}
			if len(controllers) > 0 {
				out = append(out, Mount{l[4], V1, controllers})
			}
		}
	}
	return out, scan.Err()
}

// ErrMissing is a host on which a needed controller is not to be had.
var ErrMissing = errors.New("cgroup controller missing")

// Choose picks the mounts that give every needed controller: v2 when it has them all, else v1.
func Choose(mounts []Mount) ([]Mount, error) {
	for _, m := range mounts {
		if m.Version == V2 && containsAll(m.Controllers, needed) {
			return []Mount{m}, nil
		}
	}
	var chosen []Mount
	var have []string
	for _, m := range mounts {
		if m.Version == V1 && !containsAll(have, m.Controllers) {
			chosen = append(chosen, m)
			have = append(have, m.Controllers...)
		}
	}
	for _, n := range needed {
		if !slices.Contains(have, n) {
			return nil, fmt.Errorf("%w: %s", ErrMissing, n)
		}
	}
	return chosen, nil
}

func containsAll(have, want []string) bool {
	for _, w := range want {
		if !slices.Contains(have, w) {
			return false
		}
	}
	return true
}

// Open makes the parent group of that name in every hierarchy that is needed.
func Open(mounts []Mount, name string) (*Root, error) {
	chosen, err := Choose(mounts)
	if err != nil {
		return nil, err
	}
	r := &Root{version: chosen[0].Version, name: name}
	for _, m := range chosen {
		h, err := openHierarchy(m, name)
		if err != nil {
			r.Close()
			return nil, err
		}
		r.dirs = append(r.dirs, h)
	}
	return r, nil
}

func openHierarchy(m Mount, name string) (hierarchy, error) {
	parent := filepath.Join(m.Path, name)
	if m.Version == V2 {
		if err := enable(m.Path); err != nil {
			return hierarchy{}, err
		}
	}
	if err := os.Mkdir(parent, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return hierarchy{}, fmt.Errorf("make cgroup: %w", err)
	}
	if m.Version == V2 {
		if err := enable(parent); err != nil {
			return hierarchy{}, err
		}
	}
	top, err := os.Open(m.Path)
	if err != nil {
		return hierarchy{}, err
	}
	dir, err := os.Open(parent)
	if err != nil {
		top.Close()
		return hierarchy{}, err
	}
	weigh(m, parent)
	h := hierarchy{controllers: m.Controllers, joiner: "tasks", top: top, dir: dir}
	if m.Version == V2 {
		h.controllers, h.joiner = append(slices.Clone(needed), wanted...), "cgroup.procs"
	}
	return h, nil
}

// weigh gives all sandboxes together the weight of eight of the host's own tasks: by default they would weigh as much as
// one, and a busy host would starve them. A comfort: a host that does not let us is served as well.
func weigh(m Mount, parent string) {
	if m.Version == V2 {
		_ = os.WriteFile(filepath.Join(parent, "cpu.weight"), []byte("800"), 0)
	} else if slices.Contains(m.Controllers, "cpu") {
		_ = os.WriteFile(filepath.Join(parent, "cpu.shares"), []byte("8192"), 0)
	}
}

// enable passes the needed controllers on to the children of a v2 group.
func enable(dir string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+strings.Join(needed, " +")), 0)
	if err != nil {
		return fmt.Errorf("delegate cgroup controllers: %w", err)
	}
	return nil
}

// Version tells which kind of hierarchy is in use.
func (r *Root) Version() Version { return r.version }

// Name is the parent group's name, as it appears in the kernel's messages.
func (r *Root) Name() string { return r.name }

// Close removes the parent groups, if they are empty, and lets go of the descriptors.
func (r *Root) Close() {
	for _, h := range r.dirs {
		_ = unix.Unlinkat(int(h.top.Fd()), r.name, unix.AT_REMOVEDIR)
		h.dir.Close()
		h.top.Close()
	}
	r.dirs = nil
}

// List names the groups that exist, from this run or an earlier one.
func (r *Root) List() ([]string, error) {
	seen := map[string]bool{}
	for _, h := range r.dirs {
		// A fresh descriptor: the held one keeps its read position.
		fd, err := unix.Openat(int(h.dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		d := os.NewFile(uintptr(fd), h.dir.Name())
		entries, err := d.ReadDir(-1)
		d.Close()
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() {
				seen[e.Name()] = true
			}
		}
	}
	names := make([]string, 0, len(seen))
	for n := range seen {
		names = append(names, n)
	}
	slices.Sort(names)
	return names, nil
}

// Group is the cgroup of one sandbox: one directory in each hierarchy.
type Group struct {
	root *Root
	name string

	mu    sync.Mutex
	parts []part // fewer with each hierarchy that it was removed from
}

type part struct {
	controllers []string
	parent      *os.File // of the hierarchy; not ours to close
	name        string
	join        *os.File
}

// New makes a group with these limits.
func (r *Root) New(name string, limits Limits) (*Group, error) {
	g := &Group{root: r, name: name}
	for _, h := range r.dirs {
		p, err := newPart(h, name)
		if err != nil {
			_ = g.Remove()
			return nil, fmt.Errorf("make cgroup %s: %w", name, err)
		}
		g.parts = append(g.parts, p)
	}
	if err := g.SetLimits(limits); err != nil {
		_ = g.Remove()
		return nil, err
	}
	return g, nil
}

func newPart(h hierarchy, name string) (part, error) {
	if err := unix.Mkdirat(int(h.dir.Fd()), name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return part{}, err
	}
	p, err := openPart(h, name)
	if err != nil {
		_ = unix.Unlinkat(int(h.dir.Fd()), name, unix.AT_REMOVEDIR)
	}
	return p, err
}

// openPart opens the file by which a process joins: on v1 that of its threads, since one thread that moves itself does
// not wait for every fork on the host to finish, as a move of a whole process does.
func openPart(h hierarchy, name string) (part, error) {
	fd, err := unix.Openat(int(h.dir.Fd()), name+"/"+h.joiner, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return part{}, err
	}
	return part{controllers: h.controllers, parent: h.dir, name: name, join: os.NewFile(uintptr(fd), h.joiner)}, nil
}

// Existing opens the group of that name that an earlier run left behind; hierarchies without it are left out.
func (r *Root) Existing(name string) *Group {
	g := &Group{root: r, name: name}
	for _, h := range r.dirs {
		if p, err := openPart(h, name); err == nil {
			g.parts = append(g.parts, p)
		}
	}
	return g
}

// Name of the group.
func (g *Group) Name() string { return g.name }

// Joiners are descriptors to which a process that has one thread writes "0" to join the group.
func (g *Group) Joiners() []*os.File {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]*os.File, len(g.parts))
	for i, p := range g.parts {
		out[i] = p.join
	}
	return out
}

// ErrGone is a group that was removed.
var ErrGone = errors.New("cgroup is gone")

// part gives a copy of the part with a controller; its methods work by name and say so when the group is gone.
func (g *Group) part(controller string) part {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.parts {
		if slices.Contains(p.controllers, controller) {
			return p
		}
	}
	return part{}
}

func (p part) write(file, value string) error {
	if p.parent == nil {
		return ErrGone
	}
	fd, err := unix.Openat(int(p.parent.Fd()), p.name+"/"+file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: file, Err: err}
	}
	defer unix.Close(fd)
	if _, err := retry(func() (int, error) { return unix.Write(fd, []byte(value)) }); err != nil {
		return &fs.PathError{Op: "write " + value, Path: file, Err: err}
	}
	return nil
}

// retry asks again when a signal came first: the runtime sends some to its own threads, and a limit of memory is not set
// while one waits.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func (p part) read(file string) (string, error) {
	if p.parent == nil {
		return "", ErrGone
	}
	fd, err := unix.Openat(int(p.parent.Fd()), p.name+"/"+file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &fs.PathError{Op: "open", Path: file, Err: err}
	}
	defer unix.Close(fd)
	var text []byte
	buf := make([]byte, 4096)
	for {
		n, err := retry(func() (int, error) { return unix.Read(fd, buf) })
		if err != nil {
			return "", &fs.PathError{Op: "read", Path: file, Err: err}
		}
		if n == 0 {
			return string(text), nil
		}
		text = append(text, buf[:n]...)
	}
}

func (p part) number(file string) int64 {
	text, err := p.read(file)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	return n
}

// field reads "key value" lines.
func (p part) field(file, key string) int64 {
	text, err := p.read(file)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			n, _ := strconv.ParseInt(v, 10, 64)
			return n
		}
	}
	return 0
}

const period = 100_000 // µs

// SetLimits changes the limits of a living group.
func (g *Group) SetLimits(l Limits) error {
	if l.MemoryBytes > 0 {
		if err := g.setMemory(l.MemoryBytes); err != nil {
			return fmt.Errorf("limit memory of %s: %w", g.name, err)
		}
	}
	if l.Pids > 0 {
		if err := g.part("pids").write("pids.max", strconv.Itoa(l.Pids)); err != nil {
			return fmt.Errorf("limit processes of %s: %w", g.name, err)
		}
	}
	if l.CPUs > 0 {
		if err := g.setCPU(l.CPUs); err != nil {
			return fmt.Errorf("limit CPU of %s: %w", g.name, err)
		}
	}
	return nil
}

func (g *Group) setMemory(limit int64) error {
	p, value := g.part("memory"), strconv.FormatInt(limit, 10)
	if g.root.version == V2 {
		if err := p.write("memory.max", value); err != nil {
			return err
		}
		// Without swap accounting in the kernel the file is not there, and there is nothing to limit.
		if err := p.write("memory.swap.max", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	// Memory alone may not exceed memory and swap together: raise the outer limit first, lower it last.
	outer := p.write("memory.memsw.limit_in_bytes", value)
	if err := p.write("memory.limit_in_bytes", value); err != nil {
		return err
	}
	if outer != nil && !errors.Is(outer, fs.ErrNotExist) {
		if err := p.write("memory.memsw.limit_in_bytes", value); err != nil {
			return err
		}
	}
	// Buffers of TCP are an account of their own on v1, without which a sandbox could fill the host's.
	err := p.write("memory.kmem.tcp.limit_in_bytes", strconv.FormatInt(limit/4, 10))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (g *Group) setCPU(cpus float64) error {
	p, quota := g.part("cpu"), strconv.FormatInt(int64(cpus*period), 10)
	if g.root.version == V2 {
		return p.write("cpu.max", quota+" "+strconv.Itoa(period))
	}
	return p.write("cpu.cfs_quota_us", quota)
}

// Usage reads the group's accounting; what cannot be read is zero.
func (g *Group) Usage() Usage {
	var u Usage
	memory, pids := g.part("memory"), g.part("pids")
	u.Pids = int(pids.number("pids.current"))
	u.OOMKills = g.OOMKills()
	if g.root.version == V2 {
		u.MemoryBytes, u.PeakBytes = memory.number("memory.current"), memory.number("memory.peak")
		u.CPUMS = g.part("cpu").field("cpu.stat", "usage_usec") / 1000
		return u
	}
	u.MemoryBytes, u.PeakBytes = memory.number("memory.usage_in_bytes"), memory.number("memory.max_usage_in_bytes")
	u.CPUMS = g.part("cpuacct").number("cpuacct.usage") / 1_000_000
	return u
}

// Usage reads the accounting of all groups together, those that have ended included.
func (r *Root) Usage() Usage { return r.all().Usage() }

// all is the group above all groups.
func (r *Root) all() *Group {
	all := &Group{root: r, name: r.name}
	for _, h := range r.dirs {
		all.parts = append(all.parts, part{controllers: h.controllers, parent: h.top, name: r.name})
	}
	return all
}

// Unwritten is how many bytes of files all groups together have written to memory and the kernel has yet to write to disks.
func (r *Root) Unwritten() int64 { return r.all().Unwritten() }

// Unwritten is how many bytes of files the group has written to memory and the kernel has yet to write to disks.
func (g *Group) Unwritten() int64 {
	text, err := g.part("memory").read("memory.stat")
	if err != nil {
		return 0
	}
	want := []string{"file_dirty", "file_writeback"}
	if g.root.version == V1 {
		want = []string{"total_dirty", "total_writeback"}
	}
	var sum int64
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && slices.Contains(want, k) {
			n, _ := strconv.ParseInt(v, 10, 64)
			sum += n
		}
	}
	return sum
}

// OOMKills counts the processes that were killed because the group was out of memory.
func (g *Group) OOMKills() int {
	p := g.part("memory")
	if g.root.version == V2 {
		return int(p.field("memory.events", "oom_kill"))
	}
	return int(p.field("memory.oom_control", "oom_kill"))
}

// Processes lists the process ids in the group, as its reader's pid namespace sees them.
func (g *Group) Processes() []int {
	g.mu.Lock()
	parts := slices.Clone(g.parts)
	g.mu.Unlock()
	seen := map[int]bool{}
	for _, p := range parts {
		text, err := p.read("cgroup.procs")
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(text) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
				seen[pid] = true
			}
		}
	}
	out := make([]int, 0, len(seen))
	for pid := range seen {
		out = append(out, pid)
	}
	return out
}

// Kill sends SIGKILL to everything in the group, frozen or not; call it until Remove succeeds.
func (g *Group) Kill() {
	// On v1 a frozen task does not even die: it is thawed when its end is already waiting for it, so that it does nothing
	// else first. On v2 it does die.
	defer func() { _ = g.Thaw() }()
	if g.root.version == V2 && g.part("memory").write("cgroup.kill", "1") == nil {
		return
	}
	for _, pid := range g.Processes() {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// Remove removes the group. EBUSY means that something in it still dies: try again later. When it succeeds the
// descriptors are closed.
func (g *Group) Remove() error {
	if len(g.Processes()) > 0 { // before anything that costs more
		return fmt.Errorf("remove cgroup %s: %w", g.name, unix.EBUSY)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var first error
	var left []part
	for _, p := range g.parts {
		if slices.Contains(p.controllers, "memory") && g.root.version == V1 {
			p.forgetPages()
		}
		err := unix.Unlinkat(int(p.parent.Fd()), g.name, unix.AT_REMOVEDIR)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			first = cmp.Or(first, fmt.Errorf("remove cgroup %s: %w", g.name, err))
			left = append(left, p)
			continue
		}
		p.join.Close()
	}
	g.parts = left
	return first
}

// forgetPages takes back what is charged to a group of version 1 without processes: pages that stay charged would keep
// the dead group's accounting alive. Where there are none, all that the host would do is look for objects of its own in vain.
func (p part) forgetPages() {
	if text, err := p.read("memory.stat"); err == nil && !holdsPages(text) {
		return
	}
	_ = p.write("memory.force_empty", "0")
}

// holdsPages reports whether memory.stat of version 1 counts pages of any kind that a group can leave behind.
func holdsPages(stat string) bool {
	for line := range strings.Lines(stat) {
		switch name, value, _ := strings.Cut(strings.TrimSpace(line), " "); name {
		case "cache", "rss", "inactive_anon", "active_anon", "inactive_file", "active_file", "unevictable":
			if value != "0" {
				return true
			}
		case "hierarchical_memory_limit":
			return false // what follows says the same again for groups below, of which there are none
		}
	}
	return true // not what it is known to look like
}
