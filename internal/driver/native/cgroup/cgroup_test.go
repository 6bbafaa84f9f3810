package cgroup_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/cgroup"
)

func TestChoose(t *testing.T) {
	v1 := func(path string, controllers ...string) cgroup.Mount {
		return cgroup.Mount{Path: path, Version: cgroup.V1, Controllers: controllers}
	}
	v2 := func(controllers ...string) cgroup.Mount {
		return cgroup.Mount{Path: "/v2", Version: cgroup.V2, Controllers: controllers}
	}
	separate := []cgroup.Mount{v1("/memory", "memory"), v1("/pids", "pids"), v1("/cpu", "cpu", "cpuacct"), v1("/freezer", "freezer")}
	for _, c := range []struct {
		claim  string
		mounts []cgroup.Mount
		want   []string
	}{
		{"v2 with every controller is enough", []cgroup.Mount{v2("cpu", "memory", "pids", "io")}, []string{"/v2"}},
		{"v1 mounts one by one", separate, []string{"/memory", "/pids", "/cpu", "/freezer"}},
		{"a hybrid host keeps its controllers on v1", append([]cgroup.Mount{v2("hugetlb")}, separate...), []string{"/memory", "/pids", "/cpu", "/freezer"}},
		{"v2 wins where both have them", append(separate, v2("cpu", "memory", "pids")), []string{"/v2"}},
		{"the same controller mounted twice is used once", append(separate, v1("/again", "memory")), []string{"/memory", "/pids", "/cpu", "/freezer"}},
	} {
		t.Run(c.claim, func(t *testing.T) {
			chosen, err := cgroup.Choose(c.mounts)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, m := range chosen {
				got = append(got, m.Path)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("a host without the pids controller is refused", func(t *testing.T) {
		_, err := cgroup.Choose([]cgroup.Mount{v1("/memory", "memory"), v1("/cpu", "cpu")})
		if !errors.Is(err, cgroup.ErrMissing) || !strings.Contains(err.Error(), "pids") {
			t.Errorf("got %v", err)
		}
	})
}

// TestFakeV2Tree uses a directory that looks like cgroup v2, because the controllers of a host that has them on v1
// cannot be moved: it shows which files are written, not that a kernel obeys them.
func TestFakeV2Tree(t *testing.T) {
	top := t.TempDir()
	group := filepath.Join(top, "cove-t", "sb1")
	if err := os.MkdirAll(group, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	write(filepath.Join(top, "cgroup.controllers"), "cpuset cpu io memory pids\n")
	for _, dir := range []string{top, filepath.Dir(group)} {
		write(filepath.Join(dir, "cgroup.subtree_control"), "")
	}
	for _, f := range []string{"cgroup.procs", "memory.max", "memory.swap.max", "pids.max", "cpu.max", "cgroup.kill"} {
		write(filepath.Join(group, f), "")
	}
	write(filepath.Join(group, "memory.current"), "1048576\n")
	write(filepath.Join(group, "memory.peak"), "2097152\n")
	write(filepath.Join(group, "memory.events"), "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
	write(filepath.Join(group, "pids.current"), "7\n")
	write(filepath.Join(group, "cpu.stat"), "usage_usec 1500000\nuser_usec 1\n")
	mountinfo := filepath.Join(top, "mountinfo")
	write(mountinfo, fmt.Sprintf("36 25 0:31 / %s rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n", top))

	mounts, err := cgroup.Mounts(mountinfo)
	if err != nil {
		t.Fatal(err)
	}
	root, err := cgroup.Open(mounts, "cove-t")
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if root.Version() != cgroup.V2 {
		t.Errorf("version %d", root.Version())
	}
	g, err := root.New("sb1", cgroup.Limits{CPUs: 1.5, MemoryBytes: 64 << 20, Pids: 32})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range []string{"memory.max", "memory.swap.max", "pids.max", "cpu.max"} {
		got[f] = read(filepath.Join(group, f))
	}
	got["delegated"] = read(filepath.Join(top, "cgroup.subtree_control"))
	want := map[string]string{
		"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "32", "cpu.max": "150000 100000", "delegated": "+memory +pids +cpu",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	usage := cgroup.Usage{CPUMS: 1500, MemoryBytes: 1 << 20, PeakBytes: 2 << 20, Pids: 7, OOMKills: 2}
	if diff := cmp.Diff(usage, g.Usage()); diff != "" {
		t.Error(diff)
	}
	if root.Freezer() {
		t.Error("a kernel without cgroup.freeze has a freezer")
	}
	if err := g.Freeze(); !errors.Is(err, cgroup.ErrNoFreezer) {
		t.Errorf("freeze without a freezer: %v", err)
	}
	for _, dir := range []string{filepath.Dir(group), group} {
		write(filepath.Join(dir, "cgroup.freeze"), "0")
	}
	events := filepath.Join(group, "cgroup.events")
	write(events, "populated 1\nfrozen 1\n")
	if err := g.Freeze(); err != nil || read(filepath.Join(group, "cgroup.freeze")) != "1" {
		t.Errorf("freeze: %v; cgroup.freeze holds %q", err, read(filepath.Join(group, "cgroup.freeze")))
	}
	if err := g.Thaw(); err != nil || read(filepath.Join(group, "cgroup.freeze")) != "0" {
		t.Errorf("thaw: %v; cgroup.freeze holds %q", err, read(filepath.Join(group, "cgroup.freeze")))
	}
	write(events, "populated 1\nfrozen 0\n")
	if err := g.Freeze(); !errors.Is(err, cgroup.ErrBusy) || read(filepath.Join(group, "cgroup.freeze")) != "0" {
		t.Errorf("freeze of what does not stop: %v; cgroup.freeze holds %q", err, read(filepath.Join(group, "cgroup.freeze")))
	}
	g.Kill()
	if got := read(filepath.Join(group, "cgroup.kill")); got != "1" {
		t.Errorf("cgroup.kill holds %q", got)
	}
}

// TestThisHost uses the hierarchies that this machine really has.
func TestThisHost(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes cgroups and needs root")
	}
	mounts, err := cgroup.Mounts("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	root, err := cgroup.Open(mounts, fmt.Sprintf("cove-test-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	g, err := root.New("sb", cgroup.Limits{CPUs: 1, MemoryBytes: 32 << 20, Pids: 16})
	if err != nil {
		t.Fatal(err)
	}
	names, err := root.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"sb"}, names); diff != "" {
		t.Error(diff)
	}

	// A shell that joins by the descriptors, as a sandbox does, then eats more than it may.
	joiners := g.Joiners()
	script := ""
	for i := range joiners {
		script += fmt.Sprintf("echo 0 >&%d; ", 3+i)
	}
	cmd := exec.Command("sh", "-c", script+"head -c 100m /dev/zero | tail -c 100m | wc -c")
	cmd.ExtraFiles = joiners
	out, _ := cmd.CombinedOutput()
	if kills := g.OOMKills(); kills == 0 {
		t.Errorf("100 MB fitted into 32 MiB: %s", out)
	}
	if u := g.Usage(); u.PeakBytes < 16<<20 || u.PeakBytes > 33<<20 {
		t.Errorf("peak %d", u.PeakBytes)
	}

	sleeper := exec.Command("sh", "-c", script+"exec sleep 600")
	sleeper.ExtraFiles = joiners
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(2 * time.Minute); len(g.Processes()) == 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if err := g.Remove(); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a group with a process was removed: %v", err)
	}
	g.Kill()
	if err := sleeper.Wait(); err == nil {
		t.Error("the sleeper ended by itself")
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		if err = g.Remove(); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
	if left, _ := root.List(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestALimitIsSetWhileSignalsCome: the host refuses to set one while a signal waits, and the runtime sends some at any time.
func TestALimitIsSetWhileSignalsCome(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes cgroups and needs root")
	}
	mounts, err := cgroup.Mounts("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	root, err := cgroup.Open(mounts, fmt.Sprintf("cove-test-signals-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, thread, stop := os.Getpid(), unix.Gettid(), make(chan struct{})
	var sender sync.WaitGroup
	sender.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Tgkill(self, thread, unix.SIGURG) // what the runtime preempts with
			}
		}
	})
	for i := range 200 {
		g, err := root.New("sb", cgroup.Limits{CPUs: 1, MemoryBytes: 32 << 20, Pids: 16})
		if err != nil {
			t.Errorf("group %d: %v", i, err)
			break
		}
		if err := g.Remove(); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	sender.Wait()
}

// TestFreezer stops processes of this machine: one that burns the processor, and one that has children all the time.
func TestFreezer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes cgroups and needs root")
	}
	mounts, err := cgroup.Mounts("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("cove-freeze-%d", os.Getpid())
	t.Run("of the hierarchy in use", func(t *testing.T) {
		root, err := cgroup.Open(mounts, name)
		if err != nil {
			t.Fatal(err)
		}
		freezes(t, root)
	})
	for _, m := range mounts {
		if m.Version == cgroup.V2 {
			t.Run("of v2", func(t *testing.T) {
				root, err := cgroup.OpenBare(m.Path, name+"-v2")
				if err != nil {
					t.Fatal(err)
				}
				freezes(t, root)
			})
		}
	}
}

func freezes(t *testing.T, root *cgroup.Root) {
	t.Helper()
	defer root.Close()
	if !root.Freezer() {
		t.Skip("no freezer here")
	}
	g, err := root.New("sb", cgroup.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	joiners := g.Joiners()
	script := ""
	for i := range joiners {
		script += fmt.Sprintf("echo 0 >&%d; ", 3+i)
	}
	cmd := exec.Command("sh", "-c", script+"(while :; do :; done) & while :; do /bin/true; done")
	cmd.ExtraFiles = joiners
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	grows := func() bool {
		before := g.Usage().CPUMS
		for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			if g.Usage().CPUMS > before {
				return true
			}
		}
		return false
	}
	// What was exiting when the group stood still ends first, so the first look may be too early.
	rests := func() bool {
		for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); {
			before := g.Usage().CPUMS
			time.Sleep(20 * time.Millisecond)
			if g.Usage().CPUMS == before {
				return true
			}
		}
		return false
	}
	if !grows() {
		t.Fatal("nothing runs")
	}
	for range 20 {
		if err := g.Freeze(); err != nil {
			t.Fatal(err)
		}
		if !rests() {
			t.Error("a frozen group goes on")
		}
		if err := g.Thaw(); err != nil {
			t.Fatal(err)
		}
	}
	if !grows() {
		t.Error("nothing runs after the thaw")
	}

	// What joins a frozen group stops; and all of it can be killed as it stands.
	if err := g.Freeze(); err != nil {
		t.Fatal(err)
	}
	marker := filepath.Join(t.TempDir(), "ran")
	late := exec.Command("sh", "-c", script+"echo x > "+marker+"; exec sleep 600")
	late.ExtraFiles = joiners
	if err := late.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	if _, err := os.Stat(marker); err == nil {
		t.Error("a process ran in a frozen group")
	}
	g.Kill()
	for _, c := range []*exec.Cmd{cmd, late} {
		if err := c.Wait(); err == nil {
			t.Error("ended by itself")
		}
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		g.Kill()
		if err = g.Remove(); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
	if err := g.Thaw(); err != nil {
		t.Errorf("thaw of a group that is gone: %v", err)
	}
}

func FuzzMounts(f *testing.F) {
	f.Add("36 25 0:31 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n")
	f.Add("30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
	f.Fuzz(func(t *testing.T, text string) {
		file := filepath.Join(t.TempDir(), "mountinfo")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		mounts, err := cgroup.Mounts(file)
		if err == nil {
			_, _ = cgroup.Choose(mounts)
		}
	})
}
