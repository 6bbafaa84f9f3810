package native_test

import (
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

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// census counts everything of a maker that a fork can leave behind.
type census struct {
	Sandboxes, Pooled, Slots, Children, FDs, Goroutines, Loops, Groups, Mounts int
}

// takeCensus waits until nothing is on its way in or out.
func takeCensus(t testing.TB) census {
	t.Helper()
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
	for deadline := time.Now().Add(30 * time.Second); same < 3; time.Sleep(40 * time.Millisecond) {
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
	c = census{Sandboxes: s.Sandboxes, Pooled: s.Pooled, Slots: s.Slots, FDs: s.FDs, Goroutines: s.Goroutine}
	for _, z := range s.Zygotes {
		c.Children += z.Live
	}
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
	return c, s.Dying > 0
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
			now.Goroutines <= c.Goroutines && now.Loops <= c.Loops && now.Groups <= c.Groups && now.Mounts <= c.Mounts
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
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(20 * time.Millisecond) {
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
	parent.value("import numpy as np\nbig = np.ones(4 << 20); more = bytearray(b'x' * (9 << 20)); listed = sorted(p for p in __import__('os').listdir('/proc') if p.isdigit())")
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
	t.Run("what it maps is its own", func(t *testing.T) { ownMappings(t, append(branches, deep...)) })
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

func ownMappings(t *testing.T, branches []*box) {
	for _, b := range branches {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", b.hostKernel()))
		if err != nil {
			t.Fatal(err)
		}
		shared := 0
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if strings.Contains(line, "memfd:") || fields[1][3] == 's' && strings.Contains(fields[1], "w") {
				t.Errorf("%s maps %s", b.id, line)
			}
			if strings.Contains(line, ".cove-branch") {
				shared++
			}
		}
		if shared == 0 {
			t.Errorf("%s shares no memory with its siblings: this test looks at nothing", b.id)
		}
	}
	// None of the ways to a mapping's file leads to one that can be written, for the user or for root.
	const attempt = `
import os, ctypes, sys, errno
pid = sys.argv[1] if len(sys.argv) > 1 else "self"
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.restype = ctypes.c_void_p; libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
opened = []
for line in open("/proc/%s/maps" % pid).read().splitlines():
    if ".cove-branch" not in line: continue
    span = line.split()[0]; low, high = (int(x, 16) for x in span.split("-"))
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDONLY):
        try: opened.append((flags, os.open("/proc/%s/map_files/%s" % (pid, span), flags)))
        except OSError: pass
    try: os.truncate("/proc/%s/map_files/%s" % (pid, span), 0); opened.append("truncate")
    except OSError: pass
    if pid == "self":
        if libc.madvise(low, high - low, 9) == 0: opened.append("MADV_REMOVE")
        if libc.mremap(low, 0, 4096, 1) not in (None, 2**64 - 1): opened.append("a second mapping")
for fd in os.listdir("/proc/%s/fd" % pid):
    try: target = os.readlink("/proc/%s/fd/%s" % (pid, fd))
    except OSError: continue
    if "cove" in target or "memfd" in target: opened.append(target)
print(opened)`
	b := branches[0]
	b.says("as the user", attempt, "[]")
	pid := b.value("import os; print(os.getpid())")
	for claim, p := range map[string]agentapi.ExecParams{
		"another process of the user": {Argv: []string{"python3", "-c", attempt, pid}},
		"root":                        {Argv: []string{"python3", "-c", attempt, pid}, User: "root"},
	} {
		if a := b.exec(p); strings.TrimSpace(a.stdout) != "[]" && !strings.Contains(a.stderr, "PermissionError") {
			t.Errorf("%s: %s %s", claim, a.stdout, a.stderr)
		}
	}
	b.says("the memory is still there", "print(float(big.sum()))", "4194304.0")
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

// hostile is a kernel whose cell has put its own code where the kernel makes copies of itself. What it knows of the protocol
// is what any cell can read in the kernel's memory.
const hostile = `
import sys, os, socket, struct, ctypes, time, signal, mmap, numpy as np
module = sys.modules["_cove_kernel"]; K = module.the_kernel
big = np.ones(6 << 20)  # memory of the kind that goes into a file of its own
held = []

def tell(**event): K.channel.send(2, module.encode_event(dict(type="branched", **event)))

def operations(fd):
    raw = os.pread(fd, 1 << 20, 0); count = struct.unpack_from("II", raw)[1]
    return [(32 + 48 * i, *struct.unpack_from("IIQQQQQ", raw, 32 + 48 * i)) for i in range(count)]

def write_all(fd, address, length, offset):
    while length:
        n = os.pwrite(fd, ctypes.string_at(address, min(length, 1 << 20)), offset); address += n; offset += n; length -= n

def serve(talk, on=lambda word, fds: None):
    """What the copy of a kernel does, in its own words."""
    talk.send(b"R")
    while True:
        data, fds, _, _ = socket.recv_fds(talk, 8, 8)
        if not data: os._exit(0)
        for at, kind, prot, address, length, offset, a, b in operations(fds[0]):
            if data == b"S" and kind == 6: write_all(fds[0], address, length, offset)
            if data == b"L" and kind == 7: write_all(fds[1], address, length, address); os.pwrite(fds[0], struct.pack("I", 9), at)
        on(data, fds)
        for fd in fds:
            if fd not in held: os.close(fd)
        talk.send(b"D")

def replace(copy, parent=lambda talk: None, event=True):
    """Have copy(talk) run in a fork of the kernel when it is to be copied."""
    def branch(descriptors):
        talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=descriptors[0]); descriptors.clear()
        if copy is not None and os.fork() == 0:
            try: copy(talk)
            finally: os._exit(0)
        parent(talk)
        if event: tell()
    K.branch = branch

def copies():
    """Processes whose parent is outside, other than the kernel."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, kernel):
            try: fields = open("/proc/%s/stat" % name).read().rpartition(")")[2].split()
            except OSError: continue
            if fields[1] == "0": yield int(name)
kernel = os.getpid()

def watch(act, seconds=20):
    """Another process of the sandbox, which waits for the real copy."""
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"watcher", 0, 0, 0)
        end = time.time() + seconds
        while time.time() < end:
            for pid in copies(): act(pid)
        os._exit(0)
`

// TestIsolationHostileKernelCannotBeForkedWrongly has the kernel's own part played by code that means harm. Whatever it does,
// whoever asked hears of it in time, and nothing stays behind but the parent.
func TestIsolationHostileKernelCannotBeForkedWrongly(t *testing.T) {
	refusals := []fault.Kind{fault.Unavailable, fault.Denied, fault.Conflict, fault.Timeout, fault.Exhausted, fault.Gone}
	parent := start(t)
	parent.value(hostile)
	before := takeCensus(t)
	for i, c := range []struct {
		claim, code string
		kinds       []fault.Kind
		works       bool // the branch may come about
		many        bool // and the pool has no shells for them
	}{
		{claim: "it answers itself, and then nothing", code: "replace(None, lambda talk: (held.append(talk), talk.send(b'R')))"},
		{claim: "it says that there is a copy, and there is none", code: "replace(None, held.append)"},
		{claim: "it says nothing at all", code: "replace(None, held.append, event=False)"},
		{claim: "its copy says nothing", code: "replace(lambda talk: time.sleep(600))"},
		{claim: "it lets go of the socket", code: "replace(None, lambda talk: talk.close())"},
		{claim: "it says why not, at length", code: "K.branch = lambda d: (d.clear(), tell(message='x' * 100_000))", kinds: []fault.Kind{fault.Conflict}},
		{claim: "it says twice that there is a copy", code: "replace(None, lambda talk: (talk.close(), tell(), tell()))"},
		{claim: "it raises", code: "def branch(d): raise SystemError('no')\nK.branch = branch"},
		{claim: "it ends", code: "K.branch = lambda d: os._exit(9)"},
		{claim: "it keeps a duplicate of what is sealed", code: "replace(lambda talk: serve(talk, lambda w, f: held.append(os.dup(f[1])) if w == b'L' else None))", kinds: []fault.Kind{fault.Denied}},
		{claim: "it gives what is sealed to another process", code: `
def pass_on(w, f):
    if w == b"L" and os.fork() == 0: time.sleep(600)
replace(lambda talk: serve(talk, pass_on))`, kinds: []fault.Kind{fault.Denied}},
		{claim: "it maps what is sealed", code: "replace(lambda talk: serve(talk, lambda w, f: held.append(mmap.mmap(f[1], 4096, offset=0)) if w == b'L' else None))", kinds: []fault.Kind{fault.Denied}},
		{claim: "it keeps what is sealed in a message", code: `
pair = socket.socketpair()
def post(w, f):
    if w == b"L": socket.send_fds(pair[0], [b"x"], [f[1]])
replace(lambda talk: serve(talk, post))`, kinds: []fault.Kind{fault.Denied}},
		{claim: "it opens what is sealed once more", code: `
def again(w, f):
    for flags in (os.O_RDWR, os.O_WRONLY):
        if w == b"L":
            try: held.append(os.open("/proc/self/fd/%d" % f[1], flags))
            except OSError: pass
replace(lambda talk: serve(talk, again))`},
		{claim: "it keeps the lists", code: "replace(lambda talk: serve(talk, lambda w, f: held.append(f[0])))"},
		{claim: "it tears up the lists", code: "replace(lambda talk: serve(talk, lambda w, f: (os.pwrite(f[0], os.urandom(4096), 0), os.ftruncate(f[0], 100))))"},
		{claim: "it makes the lists endless", code: "replace(lambda talk: serve(talk, lambda w, f: (os.pwrite(f[0], struct.pack('II', 0x6e617262, 0xffffffff), 0), os.ftruncate(f[0], 1 << 40))))"},
		{claim: "it asks for memory where the sandbox has its code", code: `
def aim(w, f):
    for at, kind, prot, address, length, offset, a, b in operations(f[0]):
        os.pwrite(f[0], struct.pack("IIQQQQQ", 8 if w == b"L" else 6, 7, 0x1000 if w == b"L" else 0xffffffff81000000, 1 << 46, 0, 0, 0), at)
replace(lambda talk: serve(talk, aim))`},
		{claim: "its first word is another", code: "replace(lambda talk: (talk.send(b'X'), time.sleep(600)))"},
		{claim: "its first word is long", code: "replace(lambda talk: (talk.send(b'R' * 60_000), time.sleep(600)))"},
		{claim: "its first word has descriptors with it", code: "replace(lambda talk: (socket.send_fds(talk, [b'R'], [0, 1, 2] * 20), socket.send_fds(talk, [b'D'], [0, 1, 2] * 20), time.sleep(600)))"},
		{claim: "it has answers ready before the questions", code: "replace(lambda talk: ([talk.send(b'R'), *(talk.send(b'D') for _ in range(5))], time.sleep(600)))"},
		{claim: "its copy says that it failed", code: "replace(lambda talk: (talk.send(b'R'), [(socket.recv_fds(talk, 8, 8), talk.send(b'E')) for _ in range(2)], time.sleep(600)))"},
		{claim: "its copy ends after its first word", code: "replace(lambda talk: talk.send(b'R'))"},
		{claim: "its copy ends in the middle", code: "replace(lambda talk: serve(talk, lambda w, f: os._exit(1)))"},
		{claim: "its copy ends while many branches are made", code: "replace(lambda talk: serve(talk, lambda w, f: os._exit(1)))", many: true},
		{claim: "its copy ends at the last moment of many branches", code: "replace(lambda talk: serve(talk, lambda w, f: os._exit(1) if w == b'S' else None))", many: true},
		{claim: "its copy ends at the last moment", code: "replace(lambda talk: serve(talk, lambda w, f: os._exit(1) if w == b'S' else None))"},
		{claim: "its copy becomes another program", code: "replace(lambda talk: (talk.send(b'R'), socket.recv_fds(talk, 8, 8), talk.send(b'D'), os.execv('/bin/sleep', ['sleep', '600'])))"},
		{claim: "its copy unmaps itself", code: `
libc = ctypes.CDLL(None); libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
replace(lambda talk: (talk.send(b"R"), socket.recv_fds(talk, 8, 8), talk.send(b"D"), libc.munmap(0x1000, (1 << 47) - 0x2000)))`},
		{claim: "another process kills the copy", code: "watch(lambda pid: os.kill(pid, 9))"},
		{claim: "another process stops the copy", code: "watch(lambda pid: os.kill(pid, 19))"},
		{claim: "the copy was never the kernel's", code: `
def branch(d):
    talk = d[0]; os.set_inheritable(talk, True); d.clear()
    import subprocess; held.append(subprocess.Popen(["python3", "-c", "import socket, time; s = socket.socket(fileno=%d); s.send(b'R'); time.sleep(600)" % talk], pass_fds=[talk])); os.close(talk); tell()
K.branch = branch`},
		{claim: "its branch does not say that it is ready", code: "K.say_ready = lambda **more: time.sleep(600)"},
		{claim: "its branch ends before it is ready", code: "K.say_ready = lambda **more: os._exit(7)"},
		{claim: "its branch speaks something else", code: "K.say_ready = lambda **more: (K.channel.sock.send(os.urandom(4096)), time.sleep(600))"},
		{claim: "what has been lost is a long story", code: "ready = K.say_ready; K.say_ready = lambda **more: ready(lost=[{'kind': 'k' * 10_000, 'what': 'w' * 100_000}] * 50)", works: true},
	} {
		t.Run(c.claim, func(t *testing.T) {
			if err := parent.driver.Kernel(t.Context(), parent.id, agentapi.DefaultKernel); err != nil {
				t.Fatal(err)
			}
			parent.value(hostile + c.code)
			// Most of them let whoever asked wait for as long as they like.
			patience := 20 * time.Second
			if c.kinds == nil && !c.works {
				c.kinds, patience = refusals, time.Second
			}
			n := 1 + i%2
			if c.many {
				n, patience = 3, 20*time.Second
				defer emptyPool(t)()
			}
			began := time.Now()
			boxes, forked, err := parent.forkWithin(patience, n)
			took := time.Since(began)
			switch {
			case err == nil && !c.works:
				t.Errorf("the fork worked: %+v", forked)
			case err != nil && !slices.Contains(c.kinds, fault.KindOf(err)) && (patience > time.Second || !errors.Is(err, context.DeadlineExceeded)):
				t.Errorf("after %v: %s: %v", took, fault.KindOf(err), err)
			case took > patience+20*time.Second:
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
			parent.sh("pkill -9 -x watcher; true") // it would take the next kernel for a copy
			if !c.many {
				before.compareLiving(t)
			}
		})
	}
	before.compare(t)
}

// emptyPool takes every shell that waits; the function gives them back.
func emptyPool(t *testing.T) (done func()) {
	t.Helper()
	var taken []*box
	for range 9 { // one more than a pool has
		taken = append(taken, start(t))
	}
	return func() {
		for _, b := range taken {
			b.stop()
		}
	}
}

// TestIsolationHostileCopyHasNoOffspring has the copy of a kernel, while it is charged to a branch, make processes there.
func TestIsolationHostileCopyHasNoOffspring(t *testing.T) {
	parent := start(t)
	parent.value(hostile)
	before := takeCensus(t)
	parent.value(`
libc, argv = ctypes.CDLL(None), (ctypes.c_char_p * 3)(b"offspring", b"600", None)
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def handler(n):
    if libc.syscall(libc_clone, 17, 0, 0, 0, 0) == 0:
        libc.execv(b"/bin/sleep", argv)
        os._exit(1)
libc_clone = 220 if os.uname().machine == "aarch64" else 56
libc.signal(signal.SIGUSR2, handler)
seen = {}
def poke(pid):
    if seen.setdefault(pid, 0) < 8: seen[pid] += 1; os.kill(pid, signal.SIGUSR2); time.sleep(0.002)
more = np.ones(40 << 20)
watch(poke, 5)`)
	boxes, _, err := parent.forkWithin(20*time.Second, 1, func(r *sandbox.ForkRequest) { r.Children[0].Limits.MemoryBytes = 1 << 30 })
	if err == nil {
		boxes[0].onlyItsOwn()
		boxes[0].says("the branch", "print(float(more.sum()))", "41943040.0")
		boxes[0].stop()
	}
	parent.sh("pkill -9 -x watcher; true")
	before.compare(t)
	parent.stop()
}

// onlyItsOwn checks that no process of another sandbox is charged to this one.
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
	looked := 0
	for _, pattern := range []string{"/sys/fs/cgroup/cove-%s/%s/cgroup.procs", "/sys/fs/cgroup/*/cove-%s/%s/cgroup.procs"} {
		for _, name := range glob(b.t, fmt.Sprintf(pattern, native.Tag(world.dir), group)) {
			text, err := os.ReadFile(name)
			if err != nil {
				b.t.Fatal(err)
			}
			for _, p := range strings.Fields(string(text)) {
				looked++
				if ns, err := os.Readlink("/proc/" + p + "/ns/pid"); err == nil && ns != own {
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

// TestIsolationStrangeAddressSpaces are large or cut into pieces.
func TestIsolationStrangeAddressSpaces(t *testing.T) {
	for _, c := range []struct {
		claim, code, check, want string
		kind                     fault.Kind
	}{
		{claim: "many mappings", code: `
at = libc.mmap(None, 40_000 * 4096, 3, 0x22, -1, 0); ctypes.memset(at, 1, 40_000 * 4096)
for i in range(0, 40_000, 2): libc.mprotect(at + i * 4096, 4096, 1)
ctypes.memset(at + 39_999 * 4096, 7, 1)`, check: "print(sum(1 for l in open('/proc/self/maps')) > 39_000, ctypes.string_at(at + 39_999 * 4096, 2), ctypes.string_at(at + 20_000 * 4096, 1))", want: `True b'\x07\x01' b'\x01'`},
		{claim: "a large reservation", code: "at = libc.mmap(None, 40 << 30, 3, 0x4022, -1, 0); ctypes.memset(at + (20 << 30), 7, 5000)", check: "print(ctypes.string_at(at + (20 << 30) + 4990, 12), ctypes.string_at(at, 2))", want: `b'\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x00\x00' b'\x00\x00'`},
		{claim: "too large a reservation", code: "at = libc.mmap(None, 100 << 30, 0, 0x4022, -1, 0)", kind: fault.Exhausted},
		{claim: "too many files", code: "for i in range(1100):\n    with open('/home/user/f%d' % i, 'w+b') as f: _ = f.write(b'x' * 4096); f.flush(); libc.mmap(None, 4096, 1, 2, f.fileno(), 0)", kind: fault.Exhausted},
		{claim: "a mapping at the lowest address and one at the highest", code: "low = libc.mmap(0x10000, 4096, 3, 0x32, -1, 0); high = libc.mmap(0x7ffffffe0000, 4096, 3, 0x100022, -1, 0); ctypes.memset(low, 7, 9)", check: "print(ctypes.string_at(low, 2))", want: `b'\x07\x07'`},
		{claim: "where the plan is put at first", code: "at = libc.mmap(0x100000000000, 8192, 3, 0x32, -1, 0); ctypes.memset(at, 7, 9)", check: "print(hex(at), ctypes.string_at(at, 2))", want: `0x100000000000 b'\x07\x07'`},
	} {
		t.Run(c.claim, func(t *testing.T) {
			parent := start(t)
			parent.value("import ctypes, os\nlibc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p; libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]; libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]")
			parent.value(c.code)
			before := takeCensus(t)
			boxes, _, err := parent.forkWithin(20*time.Second, 1)
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

// TestIsolationBranchLeavesNoMemoryBehind has branches read far beyond what was written to the file that they share, which gives
// it pages; what a branch took must go with it, although a sibling keeps the file.
func TestIsolationBranchLeavesNoMemoryBehind(t *testing.T) {
	parent := start(t)
	parent.value("import ctypes\nblob = bytearray(b'x' * (12 << 20))")
	const limit = 100 // MB
	branches, _ := parent.fork(3, func(r *sandbox.ForkRequest) {
		for i := range r.Children {
			r.Children[i].Limits.MemoryBytes = limit << 20
		}
	})
	shared := func() int {
		t.Helper()
		text, err := os.ReadFile("/proc/meminfo")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for line := range strings.Lines(string(text)) {
			if _, err := fmt.Sscanf(line, "Shmem: %d kB", &n); err == nil {
				return n >> 10
			}
		}
		t.Fatal("no Shmem in /proc/meminfo")
		return 0
	}
	before := shared()
	for _, b := range branches[:2] {
		b.run(`
libc = ctypes.CDLL(None, use_errno=True); libc.mremap.restype = ctypes.c_void_p; libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
for line in open("/proc/self/maps").read().splitlines():
    if ".cove-branch" in line:
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        at = libc.mremap(low, high - low, high - low + (300 << 20), 1)
        if at in (None, 2**64 - 1): continue
        for page in range(0, high - low + (300 << 20), 4096): ctypes.c_char.from_address(at + page).value
        break
else: print("nothing is shared")`)
		b.stop()
	}
	// What they read beside the kernel's memory is the file's until the last of them ends: at most what one may have.
	if more := shared() - before; more > limit+50 {
		t.Errorf("%d MB more than before are in use by branches that have ended", more)
	}
	branches[2].says("the sibling", "print(blob.count(b'x') == 12 << 20)", "True")
}

// TestForkOfASandboxThatEnds stops a parent, or kills its kernel, at any moment of a fork.
func TestForkOfASandboxThatEnds(t *testing.T) {
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
		work.Go(func() { boxes, _, err = parent.forkWithin(30*time.Second, 2) })
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
