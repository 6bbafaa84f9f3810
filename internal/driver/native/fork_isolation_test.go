package native_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/test/slow"
)

// census counts everything of a maker that a fork can leave behind.
type census struct {
	Sandboxes, Pooled, Slots, Children, FDs, Goroutines, Loops, Groups, Mounts, Anchors, Zombies int
}

// widest makes the widest fork of all tests, once: after it the pool keeps as many bare shells and devices ready, and what is
// kept ready is no leak.
var widest sync.Once

// takeCensus waits until nothing is on its way in or out.
func takeCensus(t testing.TB) census {
	t.Helper()
	widest.Do(func() {
		parent := start(t)
		branches, _ := parent.fork(16)
		for _, b := range append(branches, parent) {
			b.stop()
		}
	})
	start(t).stop()
	// The shell that proves that a pool can be filled has no kernel that waits; the others have.
	for range 20 {
		if now, _ := countOnce(t); now.Children >= now.Pooled+now.Sandboxes {
			break
		}
		start(t).stop()
	}
	var last census
	same := 0
	for deadline := time.Now().Add(2 * time.Minute); same < 3; time.Sleep(40 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the maker does not come to rest: %+v", last)
		}
		now, busy := countOnce(t)
		if now == last && !busy {
			same++
		} else {
			same = 0
		}
		last = now
	}
	return last
}

func countOnce(t testing.TB) (c census, busy bool) {
	t.Helper()
	s, err := world.driver.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// A connection that was needed once, and who answers it, is kept.
	kept := world.driver.Connections()
	c = census{Sandboxes: s.Sandboxes, Pooled: s.Pooled, Slots: s.Slots, FDs: s.FDs - kept, Goroutines: s.Goroutine - kept}
	for _, z := range s.Zygotes {
		c.Children += z.Live
	}
	c.Anchors, c.Zombies = countProcesses(t, s.Zygotes)
	for _, name := range glob(t, "/sys/block/loop*/loop/backing_file") {
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), world.dir+"/") {
			c.Loops++
		}
	}
	c.Groups = len(glob(t, "/sys/fs/cgroup/cove-"+native.Tag(world.dir)+"/*/cgroup.procs")) +
		len(glob(t, "/sys/fs/cgroup/*/cove-"+native.Tag(world.dir)+"/*/cgroup.procs"))
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", world.driver.MakerPID()))
	if err != nil {
		t.Fatal(err)
	}
	c.Mounts = strings.Count(string(mounts), "\n")
	return c, s.Dying > 0 || s.Lacking > 0
}

// countProcesses counts those that the maker holds, and those that nobody has waited for.
func countProcesses(t testing.TB, zygotes []wire.ZygoteStats) (anchors, zombies int) {
	t.Helper()
	parents := map[string]bool{strconv.Itoa(world.driver.MakerPID()): true}
	for _, z := range zygotes {
		parents[strconv.Itoa(z.PID)] = true
	}
	tracers := threads(t)
	for _, proc := range glob(t, "/proc/[0-9]*") {
		status, err := readStatus(proc)
		switch {
		case err != nil: // it has ended meanwhile
		case tracers[status["TracerPid"]]:
			anchors++
		case strings.HasPrefix(status["State"], "Z") && parents[status["PPid"]]:
			zombies++
		}
	}
	return anchors, zombies
}

// threads of the maker: one of them holds the anchors.
func threads(t testing.TB) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, task := range glob(t, fmt.Sprintf("/proc/%d/task/*", world.driver.MakerPID())) {
		all[filepath.Base(task)] = true
	}
	return all
}

func readStatus(proc string) (map[string]string, error) {
	text, err := os.ReadFile(proc + "/status")
	status := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok {
			status[key] = strings.TrimSpace(value)
		}
	}
	return status, err
}

func glob(t testing.TB, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// compare fails when there is more than before.
func (c census) compare(t testing.TB) {
	t.Helper()
	// What was there before may have ended meanwhile; a pool that is not full again may hide something.
	c.await(t, func(now census, late bool) bool {
		return (late || now.Pooled == c.Pooled) && now.Sandboxes <= c.Sandboxes && now.Slots <= c.Slots && now.Children <= c.Children && now.FDs <= c.FDs &&
			now.Goroutines <= c.Goroutines && now.Loops <= c.Loops && now.Groups <= c.Groups && now.Mounts <= c.Mounts && now.Anchors <= c.Anchors && now.Zombies <= c.Zombies
	})
}

// compareLiving looks at sandboxes alone, and does not wait for the pool.
func (c census) compareLiving(t testing.TB) {
	t.Helper()
	c.await(t, func(now census, _ bool) bool {
		return now.Sandboxes <= c.Sandboxes && now.Slots-now.Pooled <= c.Slots-c.Pooled
	})
}

func (c census) await(t testing.TB, same func(now census, late bool) bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		now, _ := countOnce(t)
		late := time.Now().After(deadline)
		if same(now, late) {
			return
		}
		if late {
			t.Errorf("left behind: %s", cmp.Diff(c, now))
			return
		}
	}
}

// hostKernel is the default kernel's process as the host numbers it.
func (b *box) hostKernel() int {
	b.t.Helper()
	var inside struct {
		PID int
		NS  string
	}
	text := b.value(`import os, json; print(json.dumps({"PID": os.getpid(), "NS": os.readlink("/proc/self/ns/pid")}))`)
	if err := json.Unmarshal([]byte(text), &inside); err != nil {
		b.t.Fatal(err)
	}
	for _, proc := range glob(b.t, "/proc/[0-9]*") {
		if ns, err := os.Readlink(proc + "/ns/pid"); err != nil || ns != inside.NS {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(proc))
		if fields := strings.Fields(procStatus(b.t, pid)["NSpid"]); len(fields) > 0 && fields[len(fields)-1] == strconv.Itoa(inside.PID) {
			return pid
		}
	}
	b.t.Fatal("the kernel is not among the host's processes")
	return 0
}

func TestIsolationOfABranchIsThatOfAnySandbox(t *testing.T) {
	fresh, parent := start(t), start(t)
	parent.value("import mmap, numpy as np\nbig = np.ones(4 << 20); more = bytearray(b'x' * (9 << 20)); shared = mmap.mmap(-1, 8192); listed = sorted(p for p in __import__('os').listdir('/proc') if p.isdigit())")
	branches, _ := parent.fork(2)
	deep, _ := branches[0].fork(1)
	want := procStatus(t, fresh.hostKernel())
	parentPID := parent.hostKernel()
	zygote := procStatus(t, parentPID)["PPid"]
	seen := map[string]string{}
	for who, b := range map[string]*box{"parent": parent, "branch": branches[0], "sibling": branches[1], "branch of a branch": deep[0]} {
		pid := b.hostKernel()
		got := procStatus(t, pid)
		for _, key := range []string{"Seccomp", "Seccomp_filters", "NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Threads", "TracerPid"} {
			if got[key] != want[key] {
				t.Errorf("%s: %s is %s, a fresh kernel has %s", who, key, got[key], want[key])
			}
		}
		if g, w := len(strings.Fields(got["NSpid"])), len(strings.Fields(want["NSpid"])); g != w {
			t.Errorf("%s: lives in %d pid namespaces, a fresh kernel in %d", who, g, w)
		}
		if got["PPid"] != zygote {
			t.Errorf("%s: its parent is %s, not the zygote %s", who, got["PPid"], zygote)
		}
		for _, name := range []string{"uid_map", "ns/user", "ns/pid", "ns/mnt", "ns/net", "ns/ipc", "ns/uts", "ns/cgroup"} {
			path := fmt.Sprintf("/proc/%d/%s", pid, name)
			text, err := os.Readlink(path)
			if name == "uid_map" {
				var raw []byte
				raw, err = os.ReadFile(path)
				text = string(raw)
			}
			if err != nil {
				t.Fatal(err)
			}
			if other, ok := seen[name+text]; ok {
				t.Errorf("%s and %s share %s: %s", who, other, name, text)
			}
			seen[name+text] = who
		}
	}
	parent.says("the parent's processes", "import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()) == listed)", "True")
	t.Run("what it has open is its own", func(t *testing.T) { ownDescriptors(t, parent, append(branches, deep...)) })
	t.Run("what it maps is its own", func(t *testing.T) { ownMappings(t, append([]*box{parent}, append(branches, deep...)...)) })
	t.Run("what is refused is the same", func(t *testing.T) { sameRefusals(t, fresh, deep[0]) })
}

func ownDescriptors(t *testing.T, parent *box, branches []*box) {
	seen := map[string]string{}
	for _, b := range append([]*box{parent}, branches...) {
		dir := fmt.Sprintf("/proc/%d/fd", b.hostKernel())
		names, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		kinds := map[string]int{}
		for _, n := range names {
			target, err := os.Readlink(filepath.Join(dir, n.Name()))
			if err != nil {
				t.Fatal(err)
			}
			kind, _, _ := strings.Cut(target, ":")
			kinds[kind]++
			if owner, ok := seen[target]; ok && owner != b.id && kind != "/dev/null" {
				t.Errorf("%s and %s both have %s", b.id, owner, target)
			}
			seen[target] = b.id
		}
		// Standard input, the two pipes and what keeps them, and the kernel's socket.
		if diff := cmp.Diff(map[string]int{"/dev/null": 1, "pipe": 4, "socket": 1}, kinds); diff != "" {
			t.Errorf("%s: %s", b.id, diff)
		}
	}
}

// ownMappings checks that no two sandboxes map the same, beside what is their template's.
func ownMappings(t *testing.T, all []*box) {
	t.Helper()
	zygote := files(t, zygoteOf(t, all[0].hostKernel()))
	seen := map[string]string{}
	for _, b := range all {
		for file, line := range files(t, b.hostKernel()) {
			if _, common := zygote[file]; common {
				continue
			}
			if other, ok := seen[file]; ok {
				t.Errorf("%s and %s both map %s", b.id, other, line)
			}
			seen[file] = b.id
		}
	}
	if len(seen) == 0 {
		t.Error("nobody maps anything of its own: this test looks at nothing")
	}
}

// files that a process maps, as the host sees them.
func files(t *testing.T, pid int) map[string]string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); fields[4] != "0" {
			all[fields[3]+" "+fields[4]] = strings.TrimSpace(line)
		}
	}
	return all
}

func zygoteOf(t *testing.T, kernel int) int {
	t.Helper()
	pid, err := strconv.Atoi(procStatus(t, kernel)["PPid"])
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func sameRefusals(t *testing.T, fresh, branch *box) {
	for claim, run := range map[string]func(*box) string{
		"a cell":  func(b *box) string { return b.value(probe) },
		"command": func(b *box) string { return b.exec(agentapi.ExecParams{Argv: []string{"python3", "-c", probe}}).stdout },
		"root": func(b *box) string {
			return b.exec(agentapi.ExecParams{Argv: []string{"sudo", "python3", "-c", probe}}).stdout
		},
	} {
		want := checkProbe(t, run(fresh), claim == "root")
		got := checkProbe(t, run(branch), claim == "root")
		if diff := cmp.Diff(want.Results, got.Results); diff != "" {
			t.Errorf("%s: %s", claim, diff)
		}
		if diff := cmp.Diff(want.Info.Init, got.Info.Init); diff != "" {
			t.Errorf("%s: PID 1: %s", claim, diff)
		}
		if diff := cmp.Diff(len(want.Info.Mounts), len(got.Info.Mounts)); diff != "" {
			t.Errorf("%s: mounts: %s\n%v\n%v", claim, diff, want.Info.Mounts, got.Info.Mounts)
		}
	}
}

func TestForkedNetworkIsItsOwn(t *testing.T) {
	parent := start(t, network(policy.Network{Mode: policy.Internet}))
	parent.value("import socket, subprocess\nserver = socket.create_server(('0.0.0.0', 8123))\ndef own(): return subprocess.run(['hostname', '-I'], capture_output=True, text=True).stdout.split()")
	branches, _ := parent.fork(2, func(r *sandbox.ForkRequest) { r.Children[1].Network.Mode = policy.Internet })
	address := parent.value("print(own()[0])")
	other := branches[1].value("print(own()[0])")
	if address == other {
		t.Errorf("a branch has its parent's address %s", address)
	}
	for _, b := range branches {
		b.says("a neighbour's port", fmt.Sprintf(`
for a in (%q, %q):
    try: socket.create_connection((a, 8123), 1).close(); print("connected to", a)
    except OSError: pass`, address, other), "")
	}
	branches[1].says("its own port is free", "server.close(); server = socket.create_server(('0.0.0.0', 8123)); c = socket.create_connection(('127.0.0.1', 8123)); print(server.accept()[1][0])", "127.0.0.1")
}

// anchor is the process outside that shares the default kernel's memory.
func (b *box) anchor() int {
	b.t.Helper()
	kernel := b.hostKernel()
	tracers := threads(b.t)
	for _, proc := range glob(b.t, "/proc/[0-9]*") {
		pid, _ := strconv.Atoi(filepath.Base(proc))
		if status, err := readStatus(proc); err == nil && tracers[status["TracerPid"]] && sameMemory(pid, kernel) {
			return pid
		}
	}
	b.t.Fatalf("the kernel %d has no anchor", kernel)
	return 0
}

func sameMemory(a, b int) bool {
	const vm = 1 // KCMP_VM
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), vm, 0, 0, 0)
	return errno == 0 && order == 0
}

// parkedAt is the address behind the call in which an anchor waits.
func parkedAt(t *testing.T, anchor int) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", anchor))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text))
	return fields[len(fields)-1]
}

// isGone waits for the end of a process; what took its number is no anchor of that kernel.
func isGone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		status, err := readStatus(fmt.Sprintf("/proc/%d", pid))
		if err != nil || status["TracerPid"] == "0" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still there: %s", pid, status["State"])
		}
	}
}

// TestAnchor looks at the process that every kernel has outside, which its sandbox's code must never run.
func TestAnchor(t *testing.T) {
	before := takeCensus(t)
	parent := start(t)
	parent.value("import os\nfiles = [open('/etc/passwd') for _ in range(20)]; x = 1")
	branches, _ := parent.fork(2)
	deep, _ := branches[0].fork(1)
	for who, b := range map[string]*box{"parent": parent, "branch": branches[0], "sibling": branches[1], "branch of a branch": deep[0]} {
		anchorIsHarmless(t, who, b)
	}
	t.Run("it ends with its kernel", func(t *testing.T) {
		b := branches[1]
		old := b.anchor()
		b.run("os._exit(3)")
		isGone(t, old)
		if err := b.driver.Kernel(t.Context(), b.id, agentapi.DefaultKernel); err != nil {
			t.Fatal(err)
		}
		anchorIsHarmless(t, "another kernel", b)
		after, _ := b.fork(1)
		after[0].stop()
	})
	t.Run("it ends with its sandbox", func(t *testing.T) {
		for _, b := range []*box{parent, deep[0]} {
			old := b.anchor()
			b.stop()
			isGone(t, old)
		}
	})
	t.Run("without it there are no forks, and the sandbox goes on", func(t *testing.T) {
		b := start(t)
		b.value("x = 1")
		old := b.anchor()
		if err := unix.Kill(old, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		isGone(t, old)
		cannotBeForked(t, b)
		b.stop()
	})
	for _, b := range branches {
		b.stop()
	}
	before.compare(t)
}

// cannotBeForked checks a sandbox whose kernel has lost its anchor: it goes on, and another kernel can be forked.
func cannotBeForked(t *testing.T, b *box) {
	t.Helper()
	for range 2 {
		if _, _, err := b.forkWithin(2*time.Minute, 2); !fault.Is(err, fault.Unavailable) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		b.says("the kernel goes on", "x = 5; print(x + 1)", "6")
	}
	if err := b.driver.Kernel(t.Context(), b.id, agentapi.DefaultKernel); err != nil {
		t.Fatal(err)
	}
	b.value("x = 7")
	branches, _ := b.fork(1)
	branches[0].says("a branch of another kernel", "print(x)", "7")
	branches[0].stop()
}

func anchorIsHarmless(t *testing.T, who string, b *box) {
	t.Helper()
	kernel, pid := b.hostKernel(), b.anchor()
	status := procStatus(t, pid)
	if !strings.HasPrefix(status["State"], "t") {
		t.Errorf("%s: the anchor is in state %s", who, status["State"])
	}
	zygote := procStatus(t, zygoteOf(t, kernel))
	for _, key := range []string{"Uid", "Gid", "CapPrm", "CapEff", "CapBnd", "Seccomp", "NoNewPrivs"} {
		if status[key] != zygote[key] {
			t.Errorf("%s: the anchor's %s is %s, its zygote's %s", who, key, status[key], zygote[key])
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	if len(fds) != 1 || fds[0].Name() != "3" {
		t.Errorf("%s: the anchor has open %v", who, fds)
	}
	for _, name := range []string{"cgroup"} {
		mine, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", kernel, name))
		its, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil || string(mine) != string(its) {
			t.Errorf("%s: the anchor's %s is %q, its kernel's %q", who, name, its, mine)
		}
	}
	// From inside, root or not, there is no such process.
	look := fmt.Sprintf(`
import os
try: os.kill(%d, 0); print("it can be reached")
except ProcessLookupError: pass
seen = [open("/proc/%%s/status" %% p).read() for p in os.listdir("/proc") if p.isdigit()]
print(len(seen) > 1, [s for s in seen if "State:\tt" in s or "TracerPid:\t0" not in s])`, pid)
	a := b.exec(agentapi.ExecParams{Argv: []string{"python3", "-c", look}, User: "root"})
	if strings.TrimSpace(a.stdout) != "True []" {
		t.Errorf("%s: root inside sees %s %s", who, a.stdout, a.stderr)
	}
}

// hostile is a kernel whose cell has put its own code where the kernel stands still to be copied. What it knows of the
// protocol is what any cell can read in the kernel's memory.
const hostile = `
import sys, os, socket, struct, ctypes, time, signal, mmap, threading, numpy as np
module = sys.modules["_cove_kernel"]; K = module.the_kernel
shim = K.brancher.way.lib
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p; libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]; libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
ARM = os.uname().machine == "aarch64"
LOOP, BAD, CALL = (b"\0\0\0\x14", b"\0\0\0\0", 4) if ARM else (b"\xeb\xfe", b"\x0f\x0b", 2)
big = np.ones(6 << 20)
held = []

def tell(**event): K.channel.send(2, module.encode_event(dict(type="branched", **event)))

def replace(do, event=True):
    """Have do(talk) run where the kernel would stand still."""
    def branch(descriptors):
        talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=descriptors[0]); descriptors.clear()
        do(talk)
        if event: tell()
    K.branch = branch

def stand(talk):
    talk.send(b"R"); talk.recv(1)

def text(part="shim"):
    """Where the shim's code is."""
    for line in open("/proc/self/maps"):
        if part in line and "r-xp" in line or part in line and "rwxp" in line: return [int(x, 16) for x in line.split()[0].split("-")]

def patch(at, code):
    low = at & ~4095
    assert libc.mprotect(low, (at + len(code) + 4095 & ~4095) - low, 7) == 0
    ctypes.memmove(at, code, len(code))

def scribble(seconds):
    end, n = time.time() + seconds, 0
    while time.time() < end: n += 1; big[:] = n
`

// withHostileKernel gives a sandbox a new kernel with that code. PC is the address of its anchor.
func (b *box) withHostileKernel(code string) {
	b.t.Helper()
	if err := b.driver.Kernel(b.t.Context(), b.id, agentapi.DefaultKernel); err != nil {
		b.t.Fatal(err)
	}
	at := parkedAt(b.t.(*testing.T), b.anchor())
	b.value("x = 1\nPC = " + at + hostile + code)
}

// TestIsolationHostileKernelCannotBeForkedWrongly has the kernel's own part played by code that means harm. Whatever it does,
// whoever asked hears of it in time, and nothing stays behind but the parent.
func TestIsolationHostileKernelCannotBeForkedWrongly(t *testing.T) {
	slow.Test(t)
	refusals := []fault.Kind{fault.Unavailable, fault.Denied, fault.Conflict, fault.Timeout, fault.Exhausted, fault.Gone}
	before := takeCensus(t)
	parent := start(t)
	alone := takeCensus(t)
	for i, c := range []struct {
		claim, code string
		kinds       []fault.Kind
		works       bool // the branch may come about
	}{
		{claim: "it says that it stands still, and then nothing", code: "replace(lambda talk: (held.append(talk), talk.send(b'R')), event=False)"},
		{claim: "it says that it was copied, and never stood still", code: "replace(held.append)"},
		{claim: "it says nothing at all", code: "replace(held.append, event=False)"},
		{claim: "it lets go of the socket", code: "replace(lambda talk: talk.close())"},
		{claim: "it stands still and lets go of the socket", code: "replace(lambda talk: (talk.send(b'R'), talk.close()))"},
		{claim: "it says why not, at length", code: "K.branch = lambda d: (d.clear(), tell(message='x' * 100_000))", kinds: []fault.Kind{fault.Conflict}},
		{claim: "it says twice that it was copied", code: "replace(lambda talk: (talk.close(), tell(), tell()))"},
		{claim: "it raises", code: "def branch(d): raise SystemError('no')\nK.branch = branch"},
		{claim: "it ends", code: "K.branch = lambda d: os._exit(9)"},
		{claim: "its word is another", code: "replace(lambda talk: (talk.send(b'X'), held.append(talk)))"},
		{claim: "its word is long", code: "replace(lambda talk: (talk.send(b'R' * 60_000), talk.recv(1)))"},
		{claim: "its word comes many times", code: "replace(lambda talk: ([talk.send(b'R') for _ in range(9)], talk.recv(1), held.append(talk)))"},
		{claim: "its word has descriptors with it", code: "replace(lambda talk: (socket.send_fds(talk, [b'R'], [0, 1, 2] * 20), socket.send_fds(talk, [b'R'], [0, 1, 2] * 20), talk.recv(1)))"},
		{claim: "it was never prepared to go on elsewhere", code: "replace(stand)"},
		{claim: "it goes on writing", code: "replace(lambda talk: (talk.send(b'R'), scribble(0.5), talk.recv(1)))"},
		{claim: "it ends when it should stand still", code: "replace(lambda talk: (talk.send(b'R'), os._exit(1)))"},
		{claim: "it becomes another program", code: "replace(lambda talk: (talk.send(b'R'), os.execv('/bin/sleep', ['sleep', '600'])))"},
		{claim: "it unmaps itself", code: "replace(lambda talk: (talk.send(b'R'), libc.munmap(0x1000, (1 << 47) - 0x2000)))"},
		{claim: "another process stands still for it", code: `
def branch(d):
    talk = d[0]; os.set_inheritable(talk, True); d.clear()
    import subprocess; held.append(subprocess.Popen(["python3", "-c", "import socket, time; s = socket.socket(fileno=%d); s.send(b'R'); time.sleep(600)" % talk], pass_fds=[talk])); os.close(talk); tell()
K.branch = branch`},
		{claim: "it has threads and does not say so", code: `
K.unbranchable = lambda: ""
for _ in range(3): threading.Thread(target=scribble, args=(3,), daemon=True).start()`, works: true},
		{claim: "a thread maps and unmaps", code: `
K.unbranchable = lambda: ""
def churn(end):
    while time.time() < end: libc.munmap(libc.mmap(None, 1 << 20, 3, 0x22, -1, 0), 1 << 20)
for _ in range(2): threading.Thread(target=churn, args=(time.time() + 3,), daemon=True).start()`, works: true},
		{claim: "a thread changes the code again and again", code: `
K.unbranchable = lambda: ""
own = ctypes.string_at(PC - CALL, CALL); patch(PC - CALL, own)
def churn(end):
    while time.time() < end: ctypes.memmove(PC - CALL, BAD, CALL); ctypes.memmove(PC - CALL, own, CALL)
threading.Thread(target=churn, args=(time.time() + 3,), daemon=True).start()`, works: true},
		{claim: "its branch goes on nowhere", code: `
real = K.brancher.way.branch
low, high = text(); own = ctypes.string_at(PC - CALL, CALL); patch(low, BAD * ((high - low) // CALL)); ctypes.memmove(PC - CALL, own, CALL)
replace(stand)`},
		{claim: "it takes away what a branch would go on with", code: `
for line in open("/proc/self/maps"):
    low, high = (int(x, 16) for x in line.split()[0].split("-"))
    if "shim" in line and "rw-p" in line: ctypes.memset(low, 0xff, high - low)
replace(stand)`},
		{claim: "what it says of its thread leads to the host's memory", code: `
address = ctypes.c_void_p.in_dll(shim, "cove_tid_address") if hasattr(shim, "cove_tid_address") else None
if address is not None: address.value = 0xffffffff81000000
replace(stand)`},
		{claim: "its branch does not say that it is ready", code: "K.say_ready = lambda **more: time.sleep(600)"},
		{claim: "its branch ends before it is ready", code: "K.say_ready = lambda **more: os._exit(7)"},
		{claim: "its branch speaks something else", code: "K.say_ready = lambda **more: (K.channel.sock.send(os.urandom(4096)), time.sleep(600))"},
		{claim: "what has been lost is a long story", code: "ready = K.say_ready; K.say_ready = lambda **more: ready(lost=[{'kind': 'k' * 10_000, 'what': 'w' * 100_000}] * 50)", works: true},
	} {
		t.Run(c.claim, func(t *testing.T) {
			parent.withHostileKernel(c.code)
			// Most of them let whoever asked wait for as long as they like.
			patience := 2 * time.Minute
			if c.kinds == nil {
				c.kinds = refusals
				if !c.works {
					patience = time.Second
				}
			}
			began := time.Now()
			boxes, forked, err := parent.forkWithin(patience, 1+i%3)
			took := time.Since(began)
			switch {
			case err == nil && !c.works:
				t.Errorf("the fork worked: %+v", forked)
			case err != nil && !slices.Contains(c.kinds, fault.KindOf(err)) && (patience > time.Second || !errors.Is(err, context.DeadlineExceeded)):
				t.Errorf("after %v: %s: %v", took, fault.KindOf(err), err)
			case took > patience+time.Minute:
				t.Errorf("took %v", took)
			}
			for _, n := range forked.NotCopied {
				if len(n.Kind)+len(n.What) > 1000 {
					t.Errorf("told %d bytes", len(n.Kind)+len(n.What))
				}
			}
			if err == nil {
				for _, b := range boxes {
					b.stop()
				}
			}
			if a := parent.sh("echo goes on"); a.stdout != "goes on\n" {
				t.Errorf("the sandbox: %+v", a)
			}
			alone.compareLiving(t)
		})
	}
	parent.stop()
	before.compare(t)
}

// TestIsolationHostileCodeAtTheAnchor has a kernel change the code that its anchor, outside, would run. The fork fails, says
// so, and costs that kernel its anchor; nothing of what was put there is done.
func TestIsolationHostileCodeAtTheAnchor(t *testing.T) {
	before := takeCensus(t)
	parent := start(t)
	for _, c := range []struct{ claim, code string }{
		{"an illegal instruction", "patch(PC - CALL, BAD)"},
		{"another call", `patch(PC - CALL, b"\x08\x15\x80\xd2\x01\0\0\xd4" if ARM else b"\xb8\x6e\0\0\0\x0f\x05")`},
		{"the end", `patch(PC - CALL, b"\xc8\x0b\x80\xd2\x01\0\0\xd4" if ARM else b"\xb8\xe7\0\0\0\x0f\x05")`},
		{"another argument", `patch(PC - CALL, b"\0\x04\0\x91\x01\0\0\xd4" if ARM else b"\xff\xc7\x0f\x05")`},
		{"a call by another architecture's numbers", `patch(PC - CALL, BAD if ARM else b"\xcd\x80")`},
		{"a trap", `patch(PC - CALL, b"\0\0\x20\xd4" if ARM else b"\xcc\xcc")`},
		{"nothing", "assert libc.munmap(PC & ~4095, 4096) == 0"},
		{"memory of its own", "assert libc.mmap(PC & ~4095, 4096, 7, 0x32, -1, 0) == PC & ~4095"},
		{"memory that cannot be run", "assert libc.mprotect(PC & ~4095, 4096, 3) == 0"},
		{"a file of the sandbox that is too short", "f = open('/home/user/short', 'w+b'); assert libc.mmap(PC & ~4095, 4096, 7, 0x12, f.fileno(), 0) == PC & ~4095"},
		{"no shim at all", "low, high = text(); assert libc.munmap(low, high - low) == 0"},
	} {
		t.Run(c.claim, func(t *testing.T) {
			parent.withHostileKernel("replace(stand)\n" + c.code)
			old := parent.anchor()
			cannotBeForked(t, parent)
			isGone(t, old)
		})
	}
	t.Run("the same code again, in memory of its own", func(t *testing.T) {
		parent.withHostileKernel(`
low, high = text(); own = ctypes.string_at(low, high - low)
assert libc.mmap(low, high - low, 7, 0x32, -1, 0) == low; ctypes.memmove(low, own, high - low)`)
		branches, _ := parent.fork(1)
		branches[0].says("a branch", "print(x)", "1")
		branches[0].stop()
	})
	parent.stop()
	before.compare(t)
}

// TestIsolationHostileAnchorKeepsNobodyWaiting has an anchor that, let go as far as its next call, never makes one. One thread
// holds the anchors of all tenants.
func TestIsolationHostileAnchorKeepsNobodyWaiting(t *testing.T) {
	before := takeCensus(t)
	parent, other := start(t), start(t)
	parent.withHostileKernel("replace(stand)\npatch(PC - CALL, LOOP)")
	anchor := parent.anchor()
	over := make(chan error, 1)
	go func() {
		_, _, err := parent.forkWithin(time.Minute, 1)
		over <- err
	}()
	awaitRunning(t, anchor)
	began := time.Now()
	branches, _ := other.fork(1)
	fresh := start(t)
	if err := fresh.driver.Kernel(t.Context(), fresh.id, "second"); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 45*time.Second {
		t.Errorf("others waited for %v", took)
	}
	parent.stop() // whoever is stopped takes its anchor along
	if err := <-over; err == nil {
		t.Error("the fork worked")
	}
	for _, b := range append(branches, other, fresh) {
		b.stop()
	}
	before.compare(t)
}

// awaitRunning waits until an anchor is on its way.
func awaitRunning(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if status := procStatus(t, pid); strings.HasPrefix(status["State"], "R") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the anchor was not let go")
		}
	}
}

// TestIsolationHostileBranchHasNoOtherRights has a branch jump into code of its kernel's, at once. It has what any kernel has.
func TestIsolationHostileBranchHasNoOtherRights(t *testing.T) {
	before := takeCensus(t)
	fresh, parent := start(t), start(t)
	kernel := fresh.hostKernel()
	want := procStatus(t, kernel)
	parent.withHostileKernel(`
low, high = text(); own = ctypes.string_at(PC - CALL, CALL); patch(low, LOOP * ((high - low) // CALL)); ctypes.memmove(PC - CALL, own, CALL)
replace(stand)`)
	over := make(chan error, 1)
	boxes, request := parent.forkRequest(1)
	ctx, giveUp := context.WithTimeout(t.Context(), 3*time.Minute)
	defer giveUp()
	go func() {
		_, _, err := parent.forkUntil(ctx, boxes, request)
		over <- err
	}()
	pid := awaitLooping(t, procStatus(t, kernel)["PPid"], over)
	got := procStatus(t, pid)
	for _, key := range []string{"Seccomp", "Seccomp_filters", "NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Threads", "TracerPid"} {
		if got[key] != want[key] {
			t.Errorf("its %s is %s, any kernel's %s", key, got[key], want[key])
		}
	}
	if inside := insideID(t, pid); inside != insideID(t, kernel) {
		t.Errorf("its id inside is %d", inside)
	}
	if len(strings.Fields(got["NSpid"])) != len(strings.Fields(want["NSpid"])) {
		t.Errorf("it lives in %s", got["NSpid"])
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	for fd, prefix := range []string{"/dev/null", "pipe:", "pipe:", "socket:"} {
		if target, err := os.Readlink(fmt.Sprintf("%s/%d", dir, fd)); err != nil || !strings.HasPrefix(target, prefix) {
			t.Errorf("descriptor %d is %s %v", fd, target, err)
		}
	}
	if n := len(glob(t, dir+"/*")); n != 4 {
		t.Errorf("it has %d descriptors", n)
	}
	giveUp()
	if err := <-over; err == nil {
		t.Error("the fork worked")
	}
	isGone(t, pid)
	parent.stop()
	fresh.stop()
	before.compare(t)
}

// awaitLooping finds the child of a zygote that does nothing but run.
func awaitLooping(t *testing.T, zygote string, over <-chan error) int {
	t.Helper()
	for deadline := time.Now().Add(150 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		for _, proc := range glob(t, "/proc/[0-9]*") {
			status, err := readStatus(proc)
			if err != nil || status["PPid"] != zygote || !strings.HasPrefix(status["State"], "R") || status["TracerPid"] != "0" {
				continue
			}
			// More than a kernel takes that is born for the pool meanwhile.
			if pid, _ := strconv.Atoi(filepath.Base(proc)); cpuTime(pid) > 300*time.Millisecond {
				return pid
			}
		}
		select {
		case err := <-over:
			t.Fatalf("the fork is over: %v", err)
		default:
		}
	}
	t.Fatal("no branch loops")
	return 0
}

// cpuTime is what a process has used, in its own code and in the host's.
func cpuTime(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond // a hundred ticks a second, on every Linux there is
}

// insideID is a process's id as its sandbox numbers it.
func insideID(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
	if err != nil {
		t.Fatal(err)
	}
	outside, _ := strconv.Atoi(strings.Fields(procStatus(t, pid)["Uid"])[0])
	for line := range strings.Lines(string(text)) {
		var in, out, n int
		if _, err := fmt.Sscan(line, &in, &out, &n); err == nil && outside >= out && outside < out+n {
			return in + outside - out
		}
	}
	return -1
}

// sharing is a kernel with every kind of memory that a fork of a process would share.
const sharing = `
import mmap, os, ctypes, numpy as np
from multiprocessing import shared_memory
os.chdir("/home/user")
def file(name): open(name, "wb").write(bytes(8192)); return os.open(name, os.O_RDWR)
def of(fd, **how): return mmap.mmap(fd, 8192, **how)
memfd = os.memfd_create("one"); os.ftruncate(memfd, 8192)
gone = file("gone"); kept = file("kept"); private = file("private"); gone_private = file("gone-private"); twice = file("twice"); shm = file("/dev/shm/own"); tmp = file("/tmp/own")
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
library = shared_memory.SharedMemory(create=True, size=8192)
sysv = libc.shmat(libc.shmget(0, 8192, 0o1600), None, 0)
kinds = {
    "anonymous": of(-1), "memfd": of(memfd), "gone": of(gone), "file": of(kept), "/dev/shm": of(shm), "/tmp": of(tmp), "/dev/zero": of(os.open("/dev/zero", os.O_RDWR)),
    "private file": of(private, flags=mmap.MAP_PRIVATE, prot=3), "gone private": of(gone_private, flags=mmap.MAP_PRIVATE, prot=3),
    "twice": of(twice), "once more": of(twice), "library": library.buf, "private": of(-1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "System V": (ctypes.c_char * 8192).from_address(sysv),
}
os.unlink("gone"); os.unlink("gone-private")
def put(word):
    for m in kinds.values(): m[4000:4000 + len(word)] = word
def get(): return sorted({bytes(m[4000:4008]).rstrip(b"\0").decode() for m in kinds.values()})
def differ(word): return sorted(k for k, m in kinds.items() if bytes(m[4000:4000 + len(word)]) != word)
put(b"common")
`

// TestIsolationBranchesShareNoMemory writes on one side and looks on the other, both ways, and at what the host says.
func TestIsolationBranchesShareNoMemory(t *testing.T) {
	before := takeCensus(t)
	parent := start(t)
	parent.value(sharing)
	branches, _ := parent.fork(2)
	deep, _ := branches[1].fork(1)
	family := []*box{parent, branches[0], branches[1], deep[0]}
	for _, b := range family {
		b.says(b.id+" after the fork", "print(get())", "['common']")
	}
	for i, b := range family {
		b.value(fmt.Sprintf("put(b'written%d')", i))
		for j, other := range family {
			word := "common"
			if j <= i {
				word = fmt.Sprintf("written%d", j)
			}
			other.says(fmt.Sprintf("%s when %s had written", other.id, b.id), fmt.Sprintf("print(differ(b'%s'))", word), "[]")
		}
	}
	ownMappings(t, family)
	// Memory that is shared stays shared with whom a branch itself forks.
	branches[0].says("a branch's own child", `
if os.fork() == 0:
    kinds["anonymous"][:5] = b"child"; kinds["file"][:5] = b"child"; kinds["memfd"][:5] = b"child"; os._exit(0)
os.wait(); print(kinds["anonymous"][:5], kinds["file"][:5], kinds["memfd"][:5], open("kept", "rb").read(5))`, "b'child' b'child' b'child' b'child'")
	for _, b := range family {
		b.stop()
	}
	before.compare(t)
}

// TestIsolationBranchOutlivesItsParent has a branch be all that is left: it costs the host what any sandbox does.
func TestIsolationBranchOutlivesItsParent(t *testing.T) {
	before := takeCensus(t)
	fresh := start(t)
	fresh.value("1")
	usual := takeCensus(t)
	fresh.stop()
	before.compare(t)
	parent := start(t)
	parent.value(sharing)
	parent.value("import shutil, ctypes\nsource = next(l.split()[-1] for l in open('/proc/self/maps') if '/libz' in l or '/libexpat' in l or '/libffi' in l); shutil.copy(source, '/home/user/lib.so'); lib = ctypes.CDLL('/home/user/lib.so')")
	old := files(t, parent.hostKernel())
	zygote := files(t, zygoteOf(t, parent.hostKernel()))
	branches, _ := parent.fork(1)
	parent.stop()
	for file, line := range files(t, branches[0].hostKernel()) {
		if _, common := zygote[file]; old[file] != "" && !common {
			t.Errorf("the branch maps its parent's %s", line)
		}
	}
	branches[0].says("the branch", "print(get())", "['common']")
	usual.compare(t)
	branches[0].stop()
	before.compare(t)
}

// onlyItsOwn checks that no process of another sandbox is charged to this one: its own, and the anchors of its kernels.
func (b *box) onlyItsOwn() {
	b.t.Helper()
	pid := b.hostKernel()
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		b.t.Fatal(err)
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		b.t.Fatal(err)
	}
	_, group, _ := strings.Cut(string(groups), "/cove-"+native.Tag(world.dir)+"/")
	group, _, _ = strings.Cut(group, "\n")
	anchor, looked := strconv.Itoa(b.anchor()), 0
	for _, pattern := range []string{"/sys/fs/cgroup/cove-%s/%s/cgroup.procs", "/sys/fs/cgroup/*/cove-%s/%s/cgroup.procs"} {
		for _, name := range glob(b.t, fmt.Sprintf(pattern, native.Tag(world.dir), group)) {
			text, err := os.ReadFile(name)
			if err != nil {
				b.t.Fatal(err)
			}
			for _, p := range strings.Fields(string(text)) {
				looked++
				if ns, err := os.Readlink("/proc/" + p + "/ns/pid"); err == nil && ns != own && p != anchor {
					line, _ := os.ReadFile("/proc/" + p + "/cmdline")
					b.t.Errorf("%s: process %s of another sandbox is charged to it: %q", filepath.Dir(name), p, line)
				}
			}
		}
	}
	if looked == 0 {
		b.t.Errorf("no process is in group %q", group)
	}
}

// TestIsolationStrangeAddressSpaces are large or cut into pieces, or map what cannot be opened again.
func TestIsolationStrangeAddressSpaces(t *testing.T) {
	slow.Test(t)
	for _, c := range []struct {
		claim, code, check, want string
		kind                     fault.Kind
	}{
		{claim: "many mappings", code: `
at = libc.mmap(None, 40_000 * 4096, 3, 0x22, -1, 0); ctypes.memset(at, 1, 40_000 * 4096)
for i in range(0, 40_000, 2): libc.mprotect(at + i * 4096, 4096, 1)
ctypes.memset(at + 39_999 * 4096, 7, 1)`, check: "print(sum(1 for l in open('/proc/self/maps')) > 39_000, ctypes.string_at(at + 39_999 * 4096, 2), ctypes.string_at(at + 20_000 * 4096, 1))", want: `True b'\x07\x01' b'\x01'`},
		{claim: "as many mappings as there can be", code: `
at = libc.mmap(None, 70_000 * 4096, 3, 0x22, -1, 0)
for i in range(0, 70_000, 2):
    if libc.mprotect(at + i * 4096, 4096, 1): break
count = sum(1 for l in open('/proc/self/maps'))`, check: "print(count > 65_000)", want: "True"},
		{claim: "a large reservation", code: "at = libc.mmap(None, 40 << 30, 3, 0x4022, -1, 0); ctypes.memset(at + (20 << 30), 7, 5000)", check: "print(ctypes.string_at(at + (20 << 30) + 4990, 12), ctypes.string_at(at, 2))", want: `b'\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x00\x00' b'\x00\x00'`},
		{claim: "no address left", code: `
size = 1 << 46
while size >= 1 << 21:
    if libc.mmap(None, size, 0, 0x4022, -1, 0) in (None, 2**64 - 1): size >>= 1`, check: "print(1)", want: "1"},
		{claim: "a large reservation that is shared", code: "at = libc.mmap(None, 40 << 30, 3, 0x4021, -1, 0); ctypes.memset(at, 7, 9)", kind: fault.Exhausted},
		{claim: "many files", code: "kept = []\nfor i in range(1100):\n    with open('/home/user/f%d' % i, 'w+b') as f: _ = f.write(b'%04d' % i * 1024); f.flush(); kept.append(libc.mmap(None, 4096, 1, 2, f.fileno(), 0))", check: "print(all(ctypes.string_at(a, 4) == b'%04d' % i for i, a in enumerate(kept)))", want: "True"},
		{claim: "a file in more pieces than are told", code: `
f = open("/home/user/pieces", "w+b"); f.truncate(40_000 * 4096); at = libc.mmap(None, 40_000 * 4096, 3, 2, f.fileno(), 0)
for i in range(0, 40_000, 2): ctypes.memset(at + i * 4096, 1, 1)`, kind: fault.Exhausted},
		{claim: "a mapping at the lowest address and one at the highest", code: "low = libc.mmap(0x10000, 4096, 3, 0x32, -1, 0); high = libc.mmap(0x7ffffffe0000, 4096, 3, 0x100022, -1, 0); ctypes.memset(low, 7, 9)", check: "print(ctypes.string_at(low, 2))", want: `b'\x07\x07'`},
		{claim: "shared memory that is sealed: it cannot be parted with", code: "at = libc.mmap(None, 4096, 3, 0x21, -1, 0); assert libc.syscall(462, ctypes.c_void_p(at), ctypes.c_size_t(4096), 0) == 0", kind: fault.Unavailable},
		{claim: "a file that may not be read any more", code: "f = open('/home/user/secret', 'w+b'); f.truncate(4096); at = libc.mmap(None, 4096, 1, 2, f.fileno(), 0); os.chmod('/home/user/secret', 0)", kind: fault.Unavailable},
		{claim: "a file's name that leads to something else", code: "f = open('/home/user/was', 'w+b'); f.write(b'old' * 2000); f.flush(); at = libc.mmap(None, 4096, 1, 2, f.fileno(), 0); os.rename('/home/user/was', '/home/user/is'); os.symlink('/etc/passwd', '/home/user/was')", check: "print(ctypes.string_at(at, 3))", want: "b'old'"},
		{claim: "a file that has another in its place", code: "f = open('/home/user/a', 'w+b'); f.write(b'old' * 2000); f.flush(); at = libc.mmap(None, 4096, 1, 2, f.fileno(), 0); open('/home/user/b', 'w').write('new' * 2000); os.rename('/home/user/b', '/home/user/a')", check: "print(ctypes.string_at(at, 3))", want: "b'old'"},
		{claim: "a mapping beyond the end of its file", code: "f = open('/home/user/short', 'w+b'); f.write(b'x' * 100); f.flush(); at = libc.mmap(None, 1 << 20, 1, 2, f.fileno(), 0)", check: "print(ctypes.string_at(at, 2))", want: "b'xx'"},
		{claim: "a mapping beyond the end of a file that is gone", code: "f = open('/home/user/short', 'w+b'); f.write(b'x' * 100); f.flush(); at = libc.mmap(None, 1 << 20, 1, 2, f.fileno(), 0); os.unlink('/home/user/short')", check: "print(ctypes.string_at(at, 2))", want: "b'xx'"},
	} {
		t.Run(c.claim, func(t *testing.T) {
			parent := start(t)
			parent.value("import ctypes, os\nlibc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p; libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]; libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]")
			parent.value(c.code)
			before := takeCensus(t)
			boxes, _, err := parent.forkWithin(2*time.Minute, 1)
			switch {
			case c.kind != "" && (!fault.Is(err, c.kind) || strings.Contains(err.Error(), "deadline")):
				t.Errorf("got %v", err)
			case c.kind == "" && err != nil:
				t.Errorf("got %v", err)
			case err == nil:
				boxes[0].says("the branch", c.check, c.want)
				boxes[0].stop()
			}
			before.compare(t)
			if c.check != "" {
				parent.says("the parent", c.check, c.want)
			}
			parent.stop()
		})
	}
}

// TestIsolationBranchLeavesNoMemoryBehind has a parent and its branches end one after the other: what they have in common is in
// memory once, as long as one of them lives, and then not at all.
func TestIsolationBranchLeavesNoMemoryBehind(t *testing.T) {
	const heap = 200 // MB
	before := takeCensus(t)
	idle := anonymous(t)
	parent := start(t)
	parent.value(fmt.Sprintf("import os\nblob = bytearray(os.urandom(1 << 20) * %d)", heap))
	branches, _ := parent.fork(4)
	for _, b := range branches {
		b.says("a branch reads", "print(sum(blob[::4096]) > 0)", "True")
	}
	atMost(t, "a parent and four branches", idle+heap+150)
	parent.stop()
	for _, b := range branches[:3] {
		b.stop()
	}
	atMost(t, "one branch", idle+heap+80)
	branches[3].says("the last", "print(sum(blob[::4096]) > 0)", "True")
	branches[3].stop()
	atMost(t, "nobody", idle+40)
	before.compare(t)
}

// atMost waits until no more than so many MB are in use by processes.
func atMost(t *testing.T, who string, most int) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		now := anonymous(t)
		if now <= most {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("%s: %d MB are in use, at most %d are to be", who, now, most)
			return
		}
	}
}

// anonymous is how many MB beside files the sandboxes and zygotes of this test's maker have, those that are gone included.
func anonymous(t *testing.T) int {
	t.Helper()
	total, found := 0, false
	for _, c := range []struct {
		pattern string
		keys    []string
	}{
		{"/sys/fs/cgroup/memory/cove-%s/memory.stat", []string{"total_rss", "total_shmem"}},
		{"/sys/fs/cgroup/cove-%s/memory.stat", []string{"anon", "shmem"}},
	} {
		text, err := os.ReadFile(fmt.Sprintf(c.pattern, native.Tag(world.dir)))
		if err != nil {
			continue
		}
		found = true
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if n, err := strconv.Atoi(value); err == nil && slices.Contains(c.keys, key) {
				total += n
			}
		}
	}
	if !found {
		t.Skip("this host counts memory in a place that the test does not know")
	}
	return total >> 20
}

// TestForkOfASandboxThatEnds stops a parent, or kills its kernel, at any moment of a fork.
func TestForkOfASandboxThatEnds(t *testing.T) {
	slow.Test(t)
	before := takeCensus(t)
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	worked := 0
	for i := range cycles(t, 20) {
		parent := start(t)
		parent.value("import numpy as np\nx = np.arange(1 << 20)")
		pause := time.Duration(random.Int64N(int64(80 * time.Millisecond)))
		var work sync.WaitGroup
		var boxes []*box
		var err error
		work.Go(func() { boxes, _, err = parent.forkWithin(2*time.Minute, 2) })
		time.Sleep(pause)
		if i%3 == 0 {
			_ = parent.exec(agentapi.ExecParams{Argv: []string{"sh", "-c", "pkill -9 -f zygote.py || pkill -9 python"}})
		} else {
			parent.stop()
		}
		work.Wait()
		switch {
		case err == nil:
			worked++
			for _, b := range boxes {
				b.says("a branch", "print(int(x.sum()))", fmt.Sprint((1<<20)*(1<<20-1)/2))
				b.stop()
			}
		case errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "deadline"):
			t.Errorf("seed %d, cycle %d, after %v: the fork hung: %v", seed, i, pause, err)
		case fault.KindOf(err) == fault.Internal:
			t.Errorf("seed %d, cycle %d, after %v: %v", seed, i, pause, err)
		}
		parent.stop()
	}
	t.Logf("seed %d: %d forks worked", seed, worked)
	before.compare(t)
}
