package native_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
	"github.com/covehq/cove/test/slow"
)

type forkChange func(*sandbox.ForkRequest)

// fork makes branches of a box.
func (b *box) fork(n int, changes ...forkChange) ([]*box, sandbox.Forked) {
	b.t.Helper()
	boxes, forked, err := b.tryFork(n, changes...)
	if err != nil {
		b.t.Fatalf("fork: %v", err)
	}
	return boxes, forked
}

func (b *box) tryFork(n int, changes ...forkChange) ([]*box, sandbox.Forked, error) {
	b.t.Helper()
	return b.forkWithin(time.Minute, n, changes...)
}

// forkWithin gives up after a time.
func (b *box) forkWithin(limit time.Duration, n int, changes ...forkChange) ([]*box, sandbox.Forked, error) {
	b.t.Helper()
	boxes, r := b.forkRequest(n)
	for _, change := range changes {
		change(&r)
	}
	ctx, cancel := context.WithTimeout(b.t.Context(), limit)
	defer cancel()
	return b.forkUntil(ctx, boxes, r)
}

// forkUntil gives up with the context.
func (b *box) forkUntil(ctx context.Context, boxes []*box, r sandbox.ForkRequest) ([]*box, sandbox.Forked, error) {
	b.t.Helper()
	forked, err := b.driver.Fork(ctx, r)
	if err == nil {
		for _, c := range boxes {
			b.t.Cleanup(c.stop)
		}
	}
	return boxes, forked, err
}

func (b *box) forkRequest(n int) (boxes []*box, r sandbox.ForkRequest) {
	r.Parent = b.id
	for range n {
		c := &box{t: b.t, id: fmt.Sprintf("fk%d", world.next.Add(1)), driver: b.driver}
		c.agent = agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return c.driver.Dial(ctx, c.id) })
		r.Children = append(r.Children, sandbox.ForkChild{
			ID: c.id, Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128}, Network: policy.Network{Mode: policy.None},
		})
		boxes = append(boxes, c)
	}
	return boxes, r
}

// says checks what a cell prints.
func (b *box) says(who, code, want string) {
	b.t.Helper()
	if got := b.value(code); got != want {
		b.t.Errorf("%s: got %s, want %s", who, got, want)
	}
}

// usage is what the host charges a box.
func (b *box) usage() sandbox.Usage {
	b.t.Helper()
	u, err := b.driver.Usage(b.t.Context(), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	return u
}

// lost are the things of one kind that a fork did not copy.
func lost(f sandbox.Forked, kind string) (what []string) {
	for _, n := range f.NotCopied {
		if n.Kind == kind {
			what = append(what, n.What)
		}
	}
	return what
}

func TestForkCopiesVariablesAndFiles(t *testing.T) {
	parent := start(t)
	parent.value("x = list(range(1000)); d = {'a': x}; own = b'x' * (16 << 20); _ = open('/tmp/f', 'w').write('parent')")
	branches, forked := parent.fork(1)
	if forked.Stall <= 0 || forked.Memory < 8<<20 || forked.Memory > 64<<20 || len(forked.NotCopied) != 0 {
		t.Errorf("%+v", forked)
	}
	child := branches[0]
	child.says("in the branch", "print(sum(x) + len(d['a']))", "500500")
	child.says("file in the branch", "print(open('/tmp/f').read())", "parent")
	child.value("x = None; _ = open('/tmp/f', 'w').write('branch')")
	parent.says("in the parent", "print(len(x), open('/tmp/f').read())", "1000 parent")
}

// TestFork_BusySandbox forks a sandbox whose commands use up its little processor time: the copy waits seconds for its own.
func TestFork_BusySandbox(t *testing.T) {
	slow.Test(t)
	parent := start(t)
	parent.value("import subprocess; busy = [subprocess.Popen(['sh', '-c', 'while :; do :; done']) for _ in range(60)]")
	little := template.Limits{CPUs: 0.1, MemoryBytes: 512 << 20, Pids: 128}
	if err := parent.driver.Change(t.Context(), parent.id, sandbox.Change{Limits: &little}); err != nil {
		t.Fatal(err)
	}
	branches, _, err := parent.forkWithin(10*time.Minute, 1)
	if err != nil {
		t.Fatalf("fork: %v", err)
	}
	branches[0].says("the branch", "print(len(busy))", "60")
}

// TestForkCopiesWhatAKernelHolds has both sides use and change what they had in common.
func TestForkCopiesWhatAKernelHolds(t *testing.T) {
	for _, c := range []struct{ claim, before, parent, saysParent, branch, saysBranch string }{
		{
			claim:  "functions, classes and closures",
			before: "def add(a, b=2): return a + b\nclass C:\n    n = 1\n    def up(self): C.n += 1; return C.n\nc = C()\ndef counter():\n    n = 0\n    def f():\n        nonlocal n; n += 1; return n\n    return f\nup = counter(); up()",
			parent: "print(add(1), c.up(), up(), up())", saysParent: "3 2 2 3",
			branch: "print(add(2), c.up(), isinstance(c, C), up())", saysBranch: "4 2 True 2",
		}, {
			claim:  "a generator that is half consumed",
			before: "def g():\n    for i in range(10): yield i\ngen = g(); head = [next(gen) for _ in range(4)]\nnested = (x * y for x in g() for y in (1, 2)); n0 = [next(nested) for _ in range(3)]",
			parent: "print(list(gen), next(nested))", saysParent: "[4, 5, 6, 7, 8, 9] 2",
			branch: "print(next(gen), next(gen), list(nested)[:2])", saysBranch: "4 5 [2, 2]",
		}, {
			claim:  "a frame of pandas and its views",
			before: "import pandas as pd, numpy as np\ndf = pd.DataFrame({'a': np.arange(10_000), 'b': list('xy') * 5000}); view = df['a'].to_numpy()",
			parent: "df.loc[0, 'a'] = 5; print(df.a.sum(), df.groupby('b').a.sum().tolist())", saysParent: "49995005 [24995005, 25000000]",
			branch: "df['c'] = df.a * 2; print(df.c.sum(), df.b.value_counts().to_dict(), view[:3].tolist())", saysBranch: "99990000 {'x': 5000, 'y': 5000} [0, 1, 2]",
		}, {
			claim:  "a figure that is being drawn",
			before: "import matplotlib.pyplot as plt, io\nfrom matplotlib.figure import Figure\nfig = Figure(); ax = fig.subplots(); ax.plot([1, 2, 3])",
			parent: "ax.set_title('parent'); b = io.BytesIO(); fig.savefig(b); print(len(ax.lines), b.getvalue()[:4])", saysParent: `1 b'\x89PNG'`,
			branch: "ax.plot([3, 1]); b = io.BytesIO(); fig.savefig(b); print(len(ax.lines), ax.get_title() == '', b.getvalue()[:4])", saysBranch: `2 True b'\x89PNG'`,
		}, {
			claim:  "an open database in a file",
			before: "import sqlite3\ndb = sqlite3.connect('/home/user/data.db'); _ = db.execute('create table t (n)'); _ = db.executemany('insert into t values (?)', [(i,) for i in range(1000)]); db.commit()",
			parent: "_ = db.execute('insert into t values (1)'); db.commit(); print(db.execute('select count(*) from t').fetchone())", saysParent: "(1001,)",
			branch: "_ = db.execute('delete from t where n > 9'); db.commit(); print(db.execute('select sum(n) from t').fetchone(), sqlite3.connect('/home/user/data.db').execute('select count(*) from t').fetchone())", saysBranch: "(45,) (10,)",
		}, {
			claim:  "an open database in memory",
			before: "import sqlite3\nmem = sqlite3.connect(':memory:'); _ = mem.execute('create table t (n)'); _ = mem.execute('insert into t values (7)')",
			parent: "print(mem.execute('select * from t').fetchall())", saysParent: "[(7,)]",
			branch: "_ = mem.execute('insert into t values (8)'); mem.rollback(); print(mem.execute('select * from t').fetchall())", saysBranch: "[]",
		}, {
			claim:  "objects that point at each other, weakly too, and those with an end of their own",
			before: "import weakref, gc\nclass N:\n    def __del__(self): log.append(self.name)\nlog = []\na, b = N(), N(); a.name, b.name = 'a', 'b'; a.b, b.a = b, a; w = weakref.ref(a); weak = weakref.WeakValueDictionary(a=a)",
			parent: "print(w().b.name, len(weak), log)", saysParent: "b 1 []",
			branch: "del a, b; _ = gc.collect(); print(w(), len(weak), sorted(log))", saysBranch: "None 0 ['a', 'b']",
		}, {
			claim:  "an exception with its traceback",
			before: "try:\n    1/0\nexcept ZeroDivisionError as e: kept = e",
			parent: "import traceback; print(traceback.format_exception(kept)[-1].strip())", saysParent: "ZeroDivisionError: division by zero",
			branch: "import traceback; print(kept.__traceback__.tb_lineno, traceback.format_exception(kept)[-1].strip())", saysBranch: "2 ZeroDivisionError: division by zero",
		}, {
			claim:  "what was printed and not flushed",
			before: "import sys, io\nbuffered = io.BufferedWriter(io.FileIO('/home/user/late', 'w'), 1 << 16); _ = buffered.write(b'early ')",
			parent: "_ = buffered.write(b'parent'); buffered.close(); print(open('/home/user/late').read())", saysParent: "early parent",
			branch: "_ = buffered.write(b'branch'); buffered.close(); print(open('/home/user/late').read())", saysBranch: "early branch",
		},
	} {
		t.Run(c.claim, func(t *testing.T) {
			parent := start(t)
			parent.value(c.before)
			branches, _ := parent.fork(2)
			parent.says("the parent", c.parent, c.saysParent)
			for _, b := range branches {
				b.says("a branch", c.branch, c.saysBranch)
			}
		})
	}
}

func TestForkCopiesTheHistory(t *testing.T) {
	parent := start(t)
	count := func(b *box, code string) int {
		t.Helper()
		stream, err := b.agent.Run(t.Context(), agentapi.RunParams{Code: code})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for e, err := range stream.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == agentapi.EventStarted {
				n = e.Count
			}
		}
		return n
	}
	parent.run("6 * 7")
	parent.run("'second'")
	branches, _ := parent.fork(1)
	child := branches[0]
	for who, b := range map[string]*box{"parent": parent, "branch": child} {
		b.says(who, "print(Out[1], Out[2], In[1], _)", "42 second 6 * 7 second")
		if got := count(b, "1"); got != 4 {
			t.Errorf("the next cell of the %s is number %d", who, got)
		}
	}
	child.run("'of the branch'")
	parent.says("the parent's history", "print(len(In), 5 in Out)", "6 False")
	// What goes wrong is told with its lines, in cells from before the fork too.
	parent2 := start(t)
	parent2.value("def broken():\n    return 1/0  # here")
	branches, _ = parent2.fork(1)
	a := branches[0].run("broken()")
	if a.err == nil || a.err.Name != "ZeroDivisionError" || !strings.Contains(strings.Join(a.err.Traceback, "\n"), "# here") {
		t.Errorf("%+v", a.err)
	}
}

const draw = `
import random, uuid, secrets, os, ssl, tempfile, numpy as np, hashlib, json, multiprocessing
print(json.dumps({
    "random": random.getrandbits(128), "numpy": np.random.bytes(16).hex(), "uuid4": str(uuid.uuid4()), "uuid1": str(uuid.uuid1()),
    "secrets": secrets.token_hex(16), "urandom": os.urandom(16).hex(), "ssl": ssl.RAND_bytes(16).hex(),
    "tempfile": os.path.basename(tempfile.mktemp()), "default_rng": np.random.default_rng().bytes(16).hex(),
    "authkey": hashlib.sha256(multiprocessing.current_process().authkey).hexdigest(),
}))`

func TestForkDoesNotShareRandomness(t *testing.T) {
	parent := start(t)
	parent.value(draw) // every source has been used
	siblings, _ := parent.fork(5)
	family := append([]*box{parent}, siblings...)
	for _, s := range siblings[:2] {
		children, _ := s.fork(2)
		family = append(family, children...)
	}
	seen := map[string]int{}
	for round := range 2 { // an answer that is only late would differ in the first round alone
		for i, b := range family {
			var got map[string]any
			if err := json.Unmarshal([]byte(b.value(draw)), &got); err != nil {
				t.Fatal(err)
			}
			if len(got) != 10 {
				t.Fatalf("only %d sources", len(got))
			}
			for source, value := range got {
				key := fmt.Sprint(source, " ", value)
				if first, ok := seen[key]; ok && (source != "authkey" || first != i) {
					t.Errorf("round %d: %s drew what %d had drawn: %s", round, family[i].id, first, key)
				}
				seen[key] = i
			}
		}
	}
	// What a cell seeded on purpose goes on where it was, in its own generators.
	seeded := start(t)
	seeded.value("import random, numpy as np\nr = random.Random(1); _ = r.random(); g = np.random.default_rng(1); _ = g.random()")
	branches, _ := seeded.fork(2)
	want := seeded.value("print(r.random(), g.random())")
	for _, b := range branches {
		b.says("a seeded generator", "print(r.random(), g.random())", want)
	}
}

func TestForkOpensFilesAgain(t *testing.T) {
	parent := start(t)
	parent.value(`
import os, socket, select, tempfile, struct
os.chdir("/home/user")
open("text", "w").write("0123456789" * 10)
r = open("text"); head = r.read(13)
w = open("written", "w"); _ = w.write("before "); w.flush()
a = open("log", "a"); _ = a.write("one\n"); a.flush()
both = open("both", "w+b", buffering=0); _ = both.write(b"abcdef"); _ = both.seek(2)
raw = os.open("text", os.O_RDONLY | os.O_CLOEXEC); _ = os.lseek(raw, 95, 0)
inherited = os.open("text", os.O_RDONLY); os.set_inheritable(inherited, True)
directory = os.open("/home/user", os.O_RDONLY | os.O_DIRECTORY)
moved = open("moved", "w"); os.rename("moved", "moved there")
null = open("/dev/null", "w"); chance = open("/dev/urandom", "rb")
high = os.dup2(raw, 200)
pid = os.getpid(); status = open("/proc/self/status")
numbers = [f.fileno() for f in (r, w, a, both)] + [raw, inherited, directory, high]
`)
	branches, forked := parent.fork(1)
	child := branches[0]
	if len(forked.NotCopied) != 0 {
		t.Errorf("not copied: %+v", forked.NotCopied)
	}
	child.says("positions", `print(head, r.read(3), os.read(raw, 99), os.read(high, 9), both.read())`, "0123456789012 345 b'56789' b'56789' b'cdef'")
	child.says("numbers", "print(numbers == [f.fileno() for f in (r, w, a, both)] + [raw, inherited, directory, high])", "True")
	child.says("inheritance", "print(os.get_inheritable(raw), os.get_inheritable(inherited))", "False True")
	child.says("writing", `
_ = w.write("branch"); w.flush(); _ = a.write("two\n"); a.flush(); _ = both.seek(0); _ = both.write(b"XY"); print(open("written").read(), open("log").read().split(), open("both").read())
moved.write("x"); moved.flush(); print(open("moved there").read(), null.write("gone"), len(chance.read(4)), sorted(os.listdir(directory))[:2])`,
		"before branch ['one', 'two'] XYcdef\nx 4 4 ['.cache', '.config']")
	child.says("a file that appends still does", `os.pwrite(a.fileno(), b"three\n", 0); print(open("log").read().split())`, "['one', 'two', 'three']")
	child.says("new files get other numbers", `new = [open("text") for _ in range(40)]; print(len({f.fileno() for f in new} & set(numbers)), r.read(2), all(f.read(2) == "01" for f in new))`, "0 67 True")
	parent.says("the parent", `
_ = w.write("parent"); w.flush(); _ = a.write("parent\n"); a.flush()
print(r.read(3), open("written").read(), open("log").read().split(), open("both").read(), os.path.getsize("moved there"))`, "345 before parent ['one', 'parent'] abcdef 0")
}

func TestForkTellsWhatItLost(t *testing.T) {
	parent := start(t)
	parent.value(`
import os, socket, select, tempfile, subprocess, pty, mmap
os.chdir("/home/user")
gone = open("gone", "w+"); _ = gone.write("secret"); gone.flush(); os.unlink("gone")
replaced = open("replaced", "w"); open("other", "w").write("other"); os.rename("other", "replaced")
nameless = tempfile.TemporaryFile(); _ = nameless.write(b"x"); nameless.flush()
pr, pw = os.pipe(); _ = os.write(pw, b"in the pipe")
os.mkfifo("fifo"); fifo = os.open("fifo", os.O_RDWR)
server = socket.create_server(("127.0.0.1", 8099)); client = socket.create_connection(("127.0.0.1", 8099)); peer, _ = server.accept()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one, two = socket.socketpair(); _ = one.send(b"x")
poll = select.epoll(); poll.register(client.fileno(), select.EPOLLIN)
memory = os.memfd_create("mine"); _ = os.write(memory, b"x")
shm = open("/dev/shm/mine", "w+"); _ = shm.write("x"); shm.flush()
master, slave = pty.openpty()
event = os.eventfd(0)
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)
last = open("last", "w+"); _ = last.write("still here"); last.flush()
`)
	branches, forked := parent.fork(1)
	child := branches[0]
	for kind, want := range map[string][]string{
		"file":   {"/home/user/gone (deleted)", "/home/user/replaced (deleted)", "/tmp/#", "eventpoll", "/memfd:mine", "/dev/shm/mine", "eventfd", "ptmx", "/dev/pts/"},
		"pipe":   {"pipe:[", "pipe:[", "/home/user/fifo", "pipe:["},
		"socket": {"socket:[", "socket:[", "socket:[", "socket:[", "socket:[", "socket:["},
	} {
		got := lost(forked, kind)
		for _, w := range want {
			i := slices.IndexFunc(got, func(s string) bool {
				return strings.HasPrefix(strings.TrimPrefix(s, "anon_inode:["), w) || strings.Contains(s, w)
			})
			if i < 0 {
				t.Errorf("no %s %q among %q", kind, w, got)
				continue
			}
			got = slices.Delete(got, i, i+1)
		}
		if len(got) > 0 {
			t.Errorf("also told as a lost %s: %q", kind, got)
		}
	}
	// Whatever is done with them ends at once, says so, and reaches no other descriptor.
	child.says("what was lost", `
import errno
def note(f):
    try: return f()
    except BlockingIOError: return "would block"
    except (OSError, ValueError, EOFError) as e: return errno.errorcode.get(getattr(e, "errno", None), type(e).__name__)
def flush(f): f.write("more"); f.flush()
said = [note(f) for f in (
    lambda: os.read(pr, 9), lambda: os.write(pw, b"x"), lambda: os.write(fifo, b"x"), lambda: client.recv(9), lambda: client.send(b"x"), lambda: peer.sendall(b"x"),
    lambda: udp.sendto(b"x", ("127.0.0.1", 9)), lambda: one.recv(9), lambda: two.send(b"x"), lambda: poll.poll(0.1), lambda: os.lseek(memory, 0, 0),
    lambda: os.read(event, 8), lambda: os.write(master, b"x"), lambda: flush(gone), lambda: flush(replaced), lambda: os.pread(nameless.fileno(), 9, 0), lambda: child.stdout.read())]
server.settimeout(1); said.append(note(server.accept))
print(said)
print(last.seek(0), last.read(), open("replaced").read(), os.path.exists("gone"), os.path.exists("/dev/shm/mine"))`,
		"[b'', 'EPIPE', 'EPIPE', b'', 'EPIPE', 'EPIPE', 'EISCONN', b'', 'EPIPE', 'EINVAL', 'ESPIPE', b'', 'EPIPE', 'EPIPE', 'EPIPE', 'ESPIPE', b'', 'EINVAL']\n0 still here other False False")
	child.says("they can be closed, and the numbers used again", `
for s in (server, client, peer, udp, one, two, poll): s.close()
for fd in (pr, pw, fifo, memory, master, slave, event): os.close(fd)
import gc; child = None; _ = gc.collect()
server = socket.create_server(("127.0.0.1", 8099)); client = socket.create_connection(("127.0.0.1", 8099)); peer, _ = server.accept(); client.send(b"new"); print(peer.recv(9), last.seek(0), last.read())`,
		"b'new' 0 still here")
	parent.says("the parent still has them", `
client.send(b"ping"); one.send(b"y"); print(os.read(pr, 20), peer.recv(9), two.recv(9), poll.poll(0), gone.seek(0), gone.read(), child.poll(), os.pread(memory, 9, 0))`,
		"b'in the pipe' b'ping' b'xy' [] 0 secret None b'x'")
}

// TestForkWithManyFiles has more descriptors than are told one by one, and some in the places that a kernel likes for itself.
func TestForkWithManyFiles(t *testing.T) {
	parent := start(t, limits(func(l *template.Limits) { l.OpenFiles = 1024 }))
	parent.value(`
import os, socket
os.chdir("/home/user"); open("text", "w").write("0123456789")
files = [open("text") for _ in range(300)]; _ = [f.read(i % 10) for i, f in enumerate(files)]
pairs = [socket.socketpair() for _ in range(150)]
base = os.open("text", os.O_RDONLY)
taken = [n for n in list(range(880, 930)) + [1000, 1022, 1023] if not os.path.exists("/proc/self/fd/%d" % n)]
for n in taken: os.dup2(base, n)
`)
	branches, forked := parent.fork(1, func(r *sandbox.ForkRequest) { r.Children[0].Limits.OpenFiles = 1024 })
	if n := len(forked.NotCopied); n != 100 {
		t.Errorf("%d things are told", n)
	}
	child := branches[0]
	child.says("files", `print(sum(f.read(1) == str(i % 10) for i, f in enumerate(files)), all(os.pread(n, 2, 0) == b"01" for n in taken))`, "300 True")
	child.says("sockets", `print({a.recv(1) for a, b in pairs})`, "{b''}")
	grand, _ := child.fork(1, func(r *sandbox.ForkRequest) { r.Children[0].Limits.OpenFiles = 1024 })
	grand[0].says("a branch's branch", `print(all(os.pread(n, 2, 0) == b"01" for n in taken), {a.recv(1) for a, b in pairs})`, "True {b''}")
}

func TestForkOfAKernelWithThreads(t *testing.T) {
	t.Run("is refused while one runs, and works when it has ended", func(t *testing.T) {
		parent := start(t)
		parent.value("import threading\nstop = threading.Event(); th = threading.Thread(target=stop.wait); th.start()")
		_, _, err := parent.tryFork(1)
		want := `the kernel cannot be copied: the kernel has threads beside the one that runs cells (1), and a copy would lose them; let them end first (pools of threads, such as a ThreadPoolExecutor, have to be shut down)`
		if !fault.Is(err, fault.Conflict) || fault.Message(err) != want {
			t.Errorf("got %v", err)
		}
		parent.value("stop.set(); th.join()")
		branches, _ := parent.fork(1)
		branches[0].says("threads of a branch", `
done = []; th = threading.Thread(target=done.append, args=(1,)); th.start(); th.join(); print(done, threading.main_thread() is threading.current_thread(), threading.active_count())`, "[1] True 1")
		parent.says("threads of the parent", "th = threading.Thread(target=print, args=('runs',)); th.start(); th.join()", "runs")
	})
	t.Run("a pool has to be shut down", func(t *testing.T) {
		parent := start(t)
		parent.value("from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(3); r = list(pool.map(abs, range(-9, 0)))")
		if _, _, err := parent.tryFork(1); !fault.Is(err, fault.Conflict) || !strings.Contains(err.Error(), "ThreadPoolExecutor") {
			t.Errorf("got %v", err)
		}
		parent.value("pool.shutdown()")
		branches, _ := parent.fork(1)
		for who, b := range map[string]*box{"branch": branches[0], "parent": parent} {
			b.says(who, "with ThreadPoolExecutor(3) as p: print(sum(p.map(abs, range(-9, 0))))", "45")
		}
	})
	t.Run("locks that a thread left taken, and thread-local data, are as they were", func(t *testing.T) {
		parent := start(t)
		parent.value("import threading\nlock = threading.Lock(); lock.acquire(); r = threading.RLock(); r.acquire(); local = threading.local(); local.x = 7; c = threading.Condition()")
		branches, _ := parent.fork(1)
		for who, b := range map[string]*box{"branch": branches[0], "parent": parent} {
			b.says(who, "print(lock.locked(), lock.acquire(timeout=0.01), local.x); lock.release(); r.release()\nwith c: c.notify_all()\nprint(lock.acquire(timeout=1), r.acquire(timeout=1))", "True False 7\nTrue True")
		}
	})
	t.Run("of a library count too", func(t *testing.T) {
		parent := start(t)
		// As many as are asked for: by itself it has one for each processor, which on a small machine is one.
		parent.value("import os; os.environ['OMP_NUM_THREADS'] = '3'\nimport numpy as np\nfrom sklearn.cluster import KMeans\nfrom threadpoolctl import threadpool_limits")
		parent.says("the library", "with threadpool_limits(3, 'openmp'): m = KMeans(3, n_init=1).fit(np.random.rand(10_000, 4))\nprint(len(os.listdir('/proc/self/task')) >= 3)", "True")
		if _, _, err := parent.tryFork(1); !fault.Is(err, fault.Conflict) || !strings.Contains(err.Error(), "threads") {
			t.Errorf("got %v", err)
		}
		parent.says("the parent", "print(m.predict(np.random.rand(5, 4)).shape)", "(5,)")
	})
}

// begin runs a cell and returns when it has printed something.
func (b *box) begin(code string) (wait func() answer) {
	b.t.Helper()
	stream, err := b.agent.Run(b.t.Context(), agentapi.RunParams{Code: code})
	if err != nil {
		b.t.Fatal(err)
	}
	done := make(chan answer, 1)
	begun := make(chan struct{})
	go func() {
		var a answer
		first := true
		for e, err := range stream.Events() {
			if err != nil {
				a.end.Message = err.Error()
				break
			}
			if e.Type == agentapi.EventStdout {
				a.stdout += string(e.Data)
				if first {
					close(begun)
				}
				first = false
			}
			if e.Type == agentapi.EventEnd {
				a.end = *e.End
			}
		}
		if first {
			close(begun)
		}
		done <- a
	}()
	<-begun
	return func() answer { return <-done }
}

func TestForkOfABusyKernel(t *testing.T) {
	t.Run("is refused when asked so, and the cell goes on", func(t *testing.T) {
		parent := start(t)
		wait := parent.begin("import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\nx = 'done'")
		_, _, err := parent.tryFork(1, func(r *sandbox.ForkRequest) { r.Refuse = true })
		if !fault.Is(err, fault.Conflict) {
			t.Errorf("got %v", err)
		}
		parent.sh("touch /tmp/go")
		if a := wait(); a.end.Outcome != agentapi.OutcomeOK {
			t.Errorf("the cell ended %+v", a.end)
		}
		branches, _ := parent.fork(1, func(r *sandbox.ForkRequest) { r.Refuse = true })
		branches[0].says("an idle kernel", "print(x)", "done")
	})
	t.Run("is waited for, and the queue goes on in order", func(t *testing.T) {
		parent := start(t)
		wait := parent.begin("import os, time\nlog = ['first']\nprint('begun', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)")
		type result struct {
			boxes []*box
			err   error
		}
		forked := make(chan result, 1)
		go func() {
			boxes, _, err := parent.tryFork(1)
			forked <- result{boxes, err}
		}()
		// The fork has its place in the queue before the cells that follow. The agent does not tell
		// of it: a while is all that can be done from outside.
		time.Sleep(20 * time.Second)
		after := make(chan string, 2)
		for i := range 2 {
			go func() { after <- parent.run(fmt.Sprintf("log.append('after'); print(log, %d)", i)).end.Message }()
		}
		parent.sh("touch /tmp/go")
		wait()
		f := <-forked
		if f.err != nil {
			t.Fatal(f.err)
		}
		for range 2 {
			if m := <-after; m != "" {
				t.Error(m)
			}
		}
		f.boxes[0].says("the branch", "print(log)", "['first']")
		parent.says("the parent", "print(log)", "['first', 'after', 'after']")
	})
	t.Run("who gives up leaves nothing, and the kernel goes on", func(t *testing.T) {
		before := takeCensus(t)
		parent := start(t)
		wait := parent.begin("import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\nx = 1")
		for range 3 {
			if _, _, err := parent.forkWithin(100*time.Millisecond, 2); err == nil {
				t.Error("a busy kernel was forked")
			}
		}
		parent.sh("touch /tmp/go")
		wait()
		parent.says("the parent", "x += 1; print(x)", "2")
		branches, _ := parent.fork(1)
		branches[0].says("a later branch", "print(x)", "2")
		branches[0].stop()
		parent.stop()
		before.compare(t)
	})
}

// TestWhoLeavesAtAnyMomentLeavesNothing has callers give up at every moment of a start and of a fork, also while the maker's
// answer is on its way to them.
func TestWhoLeavesAtAnyMomentLeavesNothing(t *testing.T) {
	parent := start(t)
	base := takeCensus(t)
	zygote := zygoteOf(t, parent.hostKernel())
	for limit := time.Millisecond; limit < 60*time.Millisecond; limit += time.Millisecond {
		if boxes, _, err := parent.forkWithin(limit, 2); err == nil {
			for _, b := range boxes {
				b.stop()
			}
		}
		if b, err := startWithin(t, limit/4); err == nil {
			b.stop()
		}
	}
	base.compareLiving(t)
	branches, _ := parent.fork(1)
	if now := zygoteOf(t, branches[0].hostKernel()); now != zygote {
		t.Errorf("the zygote was %d and is %d", zygote, now)
	}
}

// Sandboxes that nobody waits for any more are not made before those that somebody waits for.
func TestWhoLeavesHoldsNobodyUp(t *testing.T) {
	first := start(t)
	base := takeCensus(t)
	before := forksOf(t)
	const many = 300
	var left sync.WaitGroup
	var stayed atomic.Int32
	for range many {
		left.Go(func() {
			if b, err := startWithin(t, 5*time.Millisecond); err == nil {
				stayed.Add(1)
				b.stop()
			}
		})
	}
	left.Wait()
	start(t).stop()
	if n := stayed.Load(); n > many/2 {
		t.Fatalf("%d of %d did not leave: nothing is shown", n, many)
	}
	// With those that the pool makes ahead.
	if n := forksOf(t) - before - int(stayed.Load()); n > many/2 {
		t.Errorf("%d kernels were made for %d who had left", n, many)
	}
	first.says("another", "print(1 + 1)", "2")
	base.compareLiving(t)
}

func forksOf(t *testing.T) (n int) {
	t.Helper()
	stats, err := world.driver.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, z := range stats.Zygotes {
		n += z.Forks
	}
	return n
}

func TestForkKeepsSignals(t *testing.T) {
	parent := start(t)
	parent.value(`
import signal, os, time, faulthandler
got = []
signal.signal(signal.SIGUSR1, lambda n, f: got.append(n)); signal.signal(signal.SIGALRM, lambda n, f: got.append("alarm"))
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); faulthandler.enable()
`)
	branches, _ := parent.fork(2)
	for _, b := range append(branches, parent) {
		b.says("handlers", `
os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR2); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.2)
print(got, signal.sigpending() == {signal.SIGUSR2}, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR2}, faulthandler.is_enabled()); got.clear()`,
			"[10, 'alarm'] True True True")
		wait := b.begin("print('begun', flush=True)\nwhile True: time.sleep(0.01)")
		if err := b.agent.Interrupt(t.Context(), agentapi.KernelParams{Kernel: agentapi.DefaultKernel}); err != nil {
			t.Fatal(err)
		}
		if a := wait(); a.end.Outcome != agentapi.OutcomeInterrupted {
			t.Errorf("an interrupted cell ended %+v", a.end)
		}
		b.says("after the interrupt", "print(1 + 1)", "2")
	}
}

// TestForkUnderSignals forks a kernel that is hit by signals all the time.
func TestForkUnderSignals(t *testing.T) {
	parent := start(t)
	parent.value("import signal\nn = 0\ndef count(*_):\n    global n; n += 1\nsignal.signal(signal.SIGALRM, count); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)")
	for range 5 {
		branches, _ := parent.fork(2)
		for _, b := range branches {
			b.says("a timer is not copied", "import time; at = n; time.sleep(0.05); print(n == at, n > 0)", "True True")
			b.stop()
		}
	}
	parent.says("the parent's timer", "import time; at = n; time.sleep(0.05); print(n > at)", "True")
}

func TestForkOfForks(t *testing.T) {
	first := start(t)
	first.value("path = ['0']; big = bytearray(b'x' * (8 << 20)); _ = open('/home/user/path', 'w').write('0')")
	family := []*box{first}
	for depth := 1; depth <= 5; depth++ {
		branches, _ := family[depth-1].fork(1)
		b := branches[0]
		b.value(fmt.Sprintf("path.append('%d'); big[%d] = 65; _ = open('/home/user/path', 'a').write('%d')", depth, depth, depth))
		family = append(family, b)
	}
	first.stop() // the oldest first: nobody needs it
	check := func(depth int) {
		t.Helper()
		want := "012345"[:depth+1]
		family[depth].says("depth "+want, "print(''.join(path), open('/home/user/path').read(), big.count(65), len(big))", fmt.Sprintf("%s %s %d %d", want, want, depth, 8<<20))
	}
	for depth := 1; depth <= 5; depth++ {
		check(depth)
	}
	for _, depth := range []int{3, 1, 5} {
		family[depth].stop()
	}
	check(2)
	check(4)
	// Siblings end in any order, and the rest does not notice.
	siblings, _ := family[4].fork(4)
	for i, gone := range []int{2, 0, 3} {
		siblings[gone].stop()
		siblings[1].says("a sibling", fmt.Sprintf("big[%d] = 66; print(big.count(65), big.count(66))", 100+i), fmt.Sprintf("4 %d", i+1))
	}
	check(4)
}

func TestForkLeavesTheRestOfASandboxBehind(t *testing.T) {
	parent := start(t)
	parent.value("import os\nx = 1")
	parent.sh("exec -a left-behind sleep 600 & disown; sleep 0.1")
	if err := parent.driver.Kernel(t.Context(), parent.id, "second"); err != nil {
		t.Fatal(err)
	}
	a, err := collect(parent.agent.Run(t.Context(), agentapi.RunParams{Code: "y = 'second'", Kernel: "second"}))
	if err != nil || a.end.Outcome != agentapi.OutcomeOK {
		t.Fatalf("%+v %v", a, err)
	}
	branches, _ := parent.fork(1)
	child := branches[0]
	kernels, err := child.agent.Kernels(t.Context())
	if err != nil || len(kernels) != 1 || kernels[0].Name != agentapi.DefaultKernel || kernels[0].State != agentapi.KernelIdle {
		t.Errorf("%+v %v", kernels, err)
	}
	child.says("processes", "print(sorted(p for p in os.listdir('/proc') if p.isdigit()) == sorted(['1', str(os.getpid())]), os.getppid())", "True 0")
	if processes, err := child.agent.Processes(t.Context()); err != nil || len(processes) != 0 {
		t.Errorf("%+v %v", processes, err)
	}
	// The second kernel can be the one that is copied.
	branches, _ = parent.fork(1, func(r *sandbox.ForkRequest) { r.Kernel = "second" })
	branches[0].says("a branch of the second kernel", "print(y, 'x' in globals())", "second False")
	parent.says("the parent", "print(x)", "1")
}

// TestForkCopiesLargeMemory compares contents by hash, and then has both sides grow, shrink and give back what they share.
func TestForkCopiesLargeMemory(t *testing.T) {
	slow.Test(t)
	big := func(r *sandbox.ForkRequest) {
		for i := range r.Children {
			r.Children[i].Limits.MemoryBytes = 2 << 30
		}
	}
	roomy := limits(func(l *template.Limits) { l.MemoryBytes = 2 << 30 })
	const hash = `
def digest():
    h = hashlib.sha256()
    for a in arrays: h.update(memoryview(a).cast("B"))
    h.update("".join(strings).encode()); h.update(blob); h.update(repr(sorted(table.items())[::97]).encode())
    return h.hexdigest()[:16]
`
	parent := start(t, roomy)
	parent.value(`
import numpy as np, hashlib, gc, ctypes, sys, os
rng = np.random.default_rng(1)
arrays = [rng.random(8 << 20), rng.integers(0, 255, 64 << 20, dtype=np.uint8), np.zeros(4 << 20)]  # 64 MB each, and 32 MB of zeros
strings = ["a string, number %d" % i for i in range(700_000)]
blob = bytearray(rng.bytes(40 << 20))
table = {i: str(i) * 3 for i in range(200_000)}
libc = ctypes.CDLL(None); libc.malloc.restype = libc.realloc.restype = libc.calloc.restype = ctypes.c_void_p
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]; libc.free.argtypes = [ctypes.c_void_p]; libc.malloc.argtypes = [ctypes.c_size_t]
raw = libc.malloc(20 << 20); _ = ctypes.memset(raw, 7, 20 << 20)
` + hash)
	want := parent.value("print(digest())")
	branches, forked := parent.fork(2, big)
	if forked.Memory < 64<<20 {
		t.Errorf("copied %d bytes", forked.Memory)
	}
	for i, b := range append(branches, parent) {
		who := []string{"first branch", "second branch", "parent"}[i]
		b.says(who+": contents", "print(digest())", want)
		b.says(who+": lists grow in place and by move", "before = digest(); strings += ['x'] * 300_000; more = [i for i in range(2_000_000)]; del strings[700_000:]; print(digest() == before, sum(more))", "True 1999999000000")
		b.says(who+": a bytearray grows", "n = len(blob); head = bytes(blob); blob += b'y' * (60 << 20); print(len(blob) - n, bytes(blob[:n]) == head, blob.count(b'y', n) == 60 << 20); del blob[n:]; print(digest() == before)", "62914560 True True\nTrue")
		b.says(who+": an array grows", "a = arrays[0]; a.resize(12 << 20, refcheck=False); print(float(a[8 << 20:].sum())); a.resize(8 << 20, refcheck=False); print(digest() == before)", "0.0\nTrue")
		b.says(who+": malloc's own memory grows", `
raw = libc.realloc(raw, 90 << 20); print(ctypes.string_at(raw, 20 << 20) == b"\7" * (20 << 20))
_ = ctypes.memset(raw + (20 << 20), 9, 70 << 20); raw = libc.realloc(raw, 1 << 20); print(ctypes.string_at(raw, 1 << 20) == b"\7" * (1 << 20)); raw = libc.realloc(raw, 20 << 20); _ = ctypes.memset(raw, 7, 20 << 20)`, "True\nTrue")
		b.says(who+": in small steps", "grown = bytearray(rng.bytes(8 << 20)); first = hashlib.md5(grown).digest()\nfor _ in range(500): grown += b'z' * 9973\nprint(hashlib.md5(grown[:8 << 20]).digest() == first, len(grown)); del grown", fmt.Sprintf("True %d", 8<<20+500*9973))
	}
	// A branch of a branch shares the same files, and changes some of them.
	branches[0].value("arrays[0][::4096] += 1; arrays[1][:1 << 20] = 0; blob[1000] ^= 255; strings[5] = 'changed'; table[5] = 'changed'")
	changed := branches[0].value("print(digest())")
	again, _ := branches[0].fork(2, big)
	for _, b := range again {
		b.says("a branch's branch", "print(digest())", changed)
	}
	branches[0].stop()
	again[0].stop()
	again[1].says("after its parent's end", "print(digest())", changed)
	branches[1].says("the sibling", "print(digest())", want)
	for _, b := range []*box{again[1], branches[1], parent} {
		b.says("what was freed comes back as zeros", `
del arrays, blob, strings, table, a; _ = gc.collect(); libc.free(raw); libc.malloc_trim(0)
zeros = [np.zeros(n << 17) for n in (1, 8, 64, 256)] + [bytearray(n << 20) for n in (1, 8, 64)]
print([int(np.count_nonzero(np.frombuffer(z, dtype=np.uint8))) for z in zeros])
p = [libc.calloc(1, n << 20) for n in (1, 5, 30)]; print(all(ctypes.string_at(a, n << 20) == bytes(n << 20) for a, n in zip(p, (1, 5, 30)))); _ = [libc.free(ctypes.c_void_p(a)) for a in p]
del zeros; _ = gc.collect(); x = [str(i) for i in range(500_000)]; print(len(set(x)))`, "[0, 0, 0, 0, 0, 0, 0]\nTrue\n500000")
	}
}

// TestForkWithAnAllocatorOfItsOwn has pyarrow, whose pool drops pages and takes them for zeroed later.
func TestForkWithAnAllocatorOfItsOwn(t *testing.T) {
	parent := start(t, limits(func(l *template.Limits) { l.MemoryBytes = 1 << 30 }))
	parent.value(`
import numpy as np, pyarrow as pa, gc
held = {}
def fill(pool, n, v):
    b = pa.allocate_buffer(n, memory_pool=pool); np.frombuffer(b, dtype=np.uint8)[:] = v; return b
pools = [pa.default_memory_pool(), pa.system_memory_pool()]
for make in (pa.mimalloc_memory_pool, pa.jemalloc_memory_pool):
    try: pools.append(make())
    except NotImplementedError: pass
for pool in pools:
    held[pool.backend_name] = [fill(pool, n, 200 + i) for i, n in enumerate((5 << 20, 12 << 20, 33 << 20, 70_001))]
    for n in (6 << 20, 40 << 20, 9 << 20): fill(pool, n, 99)
    pool.release_unused()
def check():
    bad = []
    for pool in pools:
        for i, b in enumerate(held[pool.backend_name]):
            if not (np.frombuffer(b, dtype=np.uint8) == 200 + i).all(): bad.append((pool.backend_name, i))
        for _ in range(2):
            for n in (6 << 20, 20 << 20, 9 << 20, 100_000): fill(pool, n, 55)
            pool.release_unused()
            z = pa.allocate_buffer(7 << 20, memory_pool=pool, resizable=True); np.frombuffer(z, dtype=np.uint8)[:] = 3
            z.resize(30 << 20)
            if not (np.frombuffer(z, dtype=np.uint8)[: 7 << 20] == 3).all(): bad.append((pool.backend_name, "resize"))
            nulls = pa.nulls(3_000_000, pa.int64(), memory_pool=pool)
            if nulls.null_count != 3_000_000 or any(b is not None and np.frombuffer(b, dtype=np.uint8).any() for b in nulls.buffers()): bad.append((pool.backend_name, "nulls"))
            del z, nulls; gc.collect()
    return bad
table = pa.table({"a": np.arange(2_000_000), "s": pa.array(["x%d" % (i % 100) for i in range(200_000)] * 10)})
`)
	parent.says("the parent before", "print(check())", "[]")
	branches, _ := parent.fork(2, func(r *sandbox.ForkRequest) {
		for i := range r.Children {
			r.Children[i].Limits.MemoryBytes = 1 << 30
		}
	})
	for i, b := range append(branches, parent) {
		b.says(fmt.Sprint(i), "print(check(), sum(table['a'].to_numpy()), table.filter(pa.compute.equal(table['s'], 'x7')).num_rows if hasattr(pa, 'compute') else 20000)", "[] 1999999000000 20000")
		b.says(fmt.Sprint(i, ": freed and taken again"), "held = {p.backend_name: [fill(p, n, 200 + i) for i, n in enumerate((5 << 20, 12 << 20, 33 << 20, 70_001))] for p in pools}; _ = gc.collect(); [p.release_unused() for p in pools]; print(check())", "[]")
	}
}

func TestForkCopiesMappings(t *testing.T) {
	parent := start(t)
	parent.value(`
import mmap, numpy as np, ctypes, os, sys, json, decimal, lzma, sqlite3, hashlib, shutil, sysconfig, gc
from multiprocessing import shared_memory
os.chdir("/home/user")
libc = ctypes.CDLL(None, use_errno=True); libc.mmap.restype = ctypes.c_void_p; libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]; libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
shared = mmap.mmap(-1, 3 << 20); shared[:5] = b"hello"; shared[-3:] = b"end"
private = mmap.mmap(-1, 20 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); private[5 << 20:(5 << 20) + 5] = b"there"
np.arange(1 << 18, dtype=np.int64).tofile("data"); np.arange(1 << 18, dtype=np.int64).tofile("copied"); np.arange(1 << 18, dtype=np.int64).tofile("read"); np.arange(1 << 18, dtype=np.int64).tofile("lost")
rw = np.memmap("data", dtype=np.int64, mode="r+"); rw[7] = -7
cow = np.memmap("copied", dtype=np.int64, mode="c"); cow[7] = -8
ro = np.memmap("read", dtype=np.int64, mode="r"); total = int(ro.sum())
gone = np.memmap("lost", dtype=np.int64, mode="r+"); gone[7] = -9; os.unlink("lost")
odd = "a name with  spaces (deleted)\\ and \n a line"; np.arange(4096, dtype=np.uint8).tofile(odd); strange = np.memmap(odd, dtype=np.uint8, mode="r")
shm = shared_memory.SharedMemory(create=True, size=1 << 20); shm.buf[:4] = b"shm!"
# A library of its own: loaded, then its file removed.
source = next(l.split()[-1] for l in open("/proc/self/maps") if "/libz" in l or "/libexpat" in l or "/libffi" in l)
name = os.path.basename(source); shutil.copy(source, "mine.so"); mine = ctypes.CDLL("/home/user/mine.so"); os.unlink("mine.so")
kept = shutil.copy(source, "kept.so"); keptlib = ctypes.CDLL("/home/user/kept.so")
def version(lib):
    for f in ("zlibVersion", "XML_ExpatVersion"):
        if hasattr(lib, f): getattr(lib, f).restype = ctypes.c_char_p; return getattr(lib, f)().decode()
    return str(hasattr(lib, "ffi_call"))
v = version(mine)
# Memory with rights of all kinds.
PAGE = 4096
at = libc.mmap(None, 16 * PAGE, 3, 0x22, -1, 0); ctypes.memset(at, 5, 16 * PAGE)
for i, prot in enumerate((0, 1, 2, 3, 4, 5)): assert libc.mprotect(at + 2 * i * PAGE, PAGE, prot) == 0
code = libc.mmap(None, PAGE, 3, 0x22, -1, 0); ctypes.memmove(code, b"\xb8\x2a\x00\x00\x00\xc3", 6); libc.mprotect(code, PAGE, 5)
hole = libc.mmap(None, 64 << 20, 3, 0x22, -1, 0); ctypes.memset(hole + (10 << 20), 6, PAGE); libc.munmap(hole + (30 << 20), 4 << 20); ctypes.memset(hole + (34 << 20), 6, PAGE)
deep = []
for _ in range(50_000): deep = [deep]
def recurse(n): return 0 if n == 0 else 1 + recurse(n - 1)
sys.setrecursionlimit(40_000); depth = recurse(30_000)
import functools
def through_c(n): return 0 if n == 0 else 1 + max(map(through_c, (n - 1,)))
nested = 0
for n in (500, 1000, 2000, 4000, 8000):
    try: nested = through_c(n)
    except RecursionError: break
ctx = decimal.Context(prec=50); third = ctx.divide(decimal.Decimal(1), 3); packed = lzma.compress(b"x" * 100_000)
`)
	branches, _ := parent.fork(2)
	check := func(b *box, who string) {
		t.Helper()
		b.says(who+": anonymous", "print(shared[:5], shared[-3:], private[5 << 20:(5 << 20) + 5], private[:3], private[19 << 20:(19 << 20) + 3])", `b'hello' b'end' b'there' b'\x00\x00\x00' b'\x00\x00\x00'`)
		b.says(who+": of files", "print(rw[7], rw[8], np.fromfile('data', dtype=np.int64)[7], cow[7], cow[8], np.fromfile('copied', dtype=np.int64)[7], int(ro.sum()) == total, gone[7], gone[8], int(strange.sum()) == 4096 * 255 // 2, bytes(shm.buf[:4]))",
			"-7 8 -7 -8 8 7 True -9 8 True b'shm!'")
		b.says(who+": code", "print(version(mine) == v, version(keptlib) == v, ctypes.CFUNCTYPE(ctypes.c_int)(code)())", "True True 42")
		b.says(who+": rights", `
maps = [l.split()[:2] for l in open("/proc/self/maps")]
def rights(a):
    for span, r in maps:
        lo, hi = (int(x, 16) for x in span.split("-"))
        if lo <= a < hi: return r
print([rights(at + 2 * i * PAGE) for i in range(6)], rights(at + PAGE), ctypes.string_at(at + 6 * PAGE, 2 * PAGE) == b"\5" * 2 * PAGE)
print([libc.mprotect(at + 2 * i * PAGE, PAGE, 3) for i in range(6)], ctypes.string_at(at, 16 * PAGE) == b"\5" * 16 * PAGE)
for i, prot in enumerate((0, 1, 2, 3, 4, 5)): libc.mprotect(at + 2 * i * PAGE, PAGE, prot)`,
			"['---p', 'r--p', '-w-p', 'rw-p', '--xp', 'r-xp'] rw-p True\n[0, 0, 0, 0, 0, 0] True")
		b.says(who+": holes", "print(ctypes.string_at(hole + (10 << 20), 2) , ctypes.string_at(hole, 2), rights(hole + (31 << 20)), ctypes.string_at(hole + (34 << 20), 2))", `b'\x06\x06' b'\x00\x00' None b'\x06\x06'`)
		b.says(who+": recursion", "print(depth, recurse(35_000), through_c(nested) == nested, third, len(lzma.decompress(packed)), sqlite3.connect(':memory:').execute('select 1').fetchone()[0])", "30000 35000 True 0.33333333333333333333333333333333333333333333333333 100000 1")
		b.says(who+": still recursive", "n = 0\nd = deep\nwhile d: d = d[0]; n += 1\nprint(n)", "50000")
	}
	for i, b := range branches {
		check(b, fmt.Sprintf("branch %d", i))
	}
	check(parent, "parent")
	// What is written afterwards is one's own, also where a mapping is shared.
	branches[0].value("shared[:5] = b'mine!'; rw[7] = 1; rw.flush(); gone[7] = 1; private[5 << 20:(5 << 20) + 5] = b'mine!'; cow[7] = 1; shm.buf[:4] = b'mine'")
	branches[0].says("a shared file mapping reaches its file", "print(np.fromfile('data', dtype=np.int64)[7])", "1")
	check(branches[1], "the sibling after a write")
	check(parent, "the parent after a write")
	grand, _ := branches[1].fork(1)
	check(grand[0], "a branch's branch")
}

// TestForkedMemoryGrows has what branches share grow and shrink by every amount.
func TestForkedMemoryGrows(t *testing.T) {
	parent := start(t)
	parent.value(`
import random
def make(seed): return bytearray(random.Random(seed).randbytes((8 << 20) + seed * (500 << 10)))
def grow(b):
    head, half = bytes(b), len(b) // 2
    b += b"y" * (60 << 20)
    assert b[:len(head)] == head and b.count(b"y", len(head)) == 60 << 20
    del b[half - 1:]
    b += b"z" * (70 << 20)
    assert b[:half - 1] == head[:half - 1] and b.count(b"z", half - 1) == 70 << 20
    b[:] = head
blobs = {seed: make(seed) for seed in range(5)}`)
	branches, _ := parent.fork(1)
	a := branches[0].run("for seed, b in blobs.items():\n    print(seed, end=' ', flush=True)\n    grow(b); assert b == make(seed)\n    del b[len(b) // 3:]; b += b'z' * (60 << 20)\n    blobs[seed] = None; del b")
	if a.end.Outcome != agentapi.OutcomeOK {
		t.Errorf("at %q: %v %s", a.stdout, a.err, a.end.Message)
	}
}

func TestForkEnvironment(t *testing.T) {
	parent := start(t, func(r *sandbox.StartRequest) {
		r.Env = map[string]string{"SECRET": "s3cret", "COMMON": "parent"}
	})
	parent.says("the parent", "import os; print(os.environ['SECRET'], os.environ['COMMON'], os.getenv('MPLBACKEND'))", "s3cret parent agg")
	parent.value("os.environ['SET_BY_A_CELL'] = '1'; token = os.environ['SECRET'][::-1]")
	branches, _ := parent.fork(2, func(r *sandbox.ForkRequest) {
		for i := range r.Children {
			r.Children[i].Env = map[string]string{"OWN": fmt.Sprint(i), "COMMON": "branch"}
		}
		r.Children[1].InheritEnv = true
	})
	for i, want := range []string{"None 0 branch agg None", "s3cret 1 branch agg None"} {
		b := branches[i]
		b.says("the kernel", "print(*(os.environ.get(k) for k in ('SECRET', 'OWN', 'COMMON', 'MPLBACKEND', 'SET_BY_A_CELL')))", want)
		show := `python3 -c "import os; print(*(os.environ.get(k) for k in ('SECRET', 'OWN', 'COMMON', 'MPLBACKEND', 'SET_BY_A_CELL')))"`
		b.says("a command of the kernel", "!"+show, want)
		if a := b.sh(show); strings.TrimSpace(a.stdout) != want {
			t.Errorf("a command sees %q, want %q", a.stdout, want)
		}
		b.says("libc's own", "import ctypes; g = ctypes.CDLL(None).getenv; g.restype = ctypes.c_char_p; print(g(b'SECRET'), g(b'OWN'))",
			[]string{"None b'0'", "b's3cret' b'1'"}[i])
		b.says("variables are memory, and copied", "print(token)", "terc3s")
		b.says("paths", "print(os.environ['HOME'], 'PATH' in os.environ, os.path.expanduser('~'))", "/home/user True /home/user")
	}
	// A branch's branch inherits what the branch was given, not what its parent was.
	grand, _ := branches[0].fork(1, func(r *sandbox.ForkRequest) { r.Children[0].InheritEnv = true })
	grand[0].says("a branch's branch", "print(*(os.environ.get(k) for k in ('SECRET', 'OWN', 'COMMON')))", "None 0 branch")
	if err := grand[0].driver.Kernel(t.Context(), grand[0].id, "second"); err != nil {
		t.Fatal(err)
	}
	a, err := collect(grand[0].agent.Run(t.Context(), agentapi.RunParams{Code: "import os; print(os.environ.get('SECRET'), os.environ.get('OWN'))", Kernel: "second"}))
	if err != nil || strings.TrimSpace(a.stdout) != "None 0" {
		t.Errorf("another kernel of it sees %q %v", a.stdout, err)
	}
}

func TestForkSurroundings(t *testing.T) {
	parent := start(t, limits(func(l *template.Limits) { l.OpenFiles = 700 }))
	parent.value(`
import os, resource, asyncio, time, locale, warnings, logging, atexit, ctypes
os.mkdir("/home/user/work"); os.chdir("/home/user/work"); os.umask(0o027); os.nice(3)
resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, 6 << 20)); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY)); resource.setrlimit(resource.RLIMIT_NOFILE, (500, 700))
os.environ["TZ"] = "Asia/Tokyo"; time.tzset()
async def once(): await asyncio.sleep(0.01); return 'awaited'
print(await once())
loop = asyncio.new_event_loop()
ctypes.CDLL(None).prctl(15, b"renamed", 0, 0, 0)
`)
	branches, _ := parent.fork(2, func(r *sandbox.ForkRequest) {
		r.Children[0].Limits.OpenFiles = 700
		r.Children[1].Limits.OpenFiles = 300
	})
	for i, b := range []*box{branches[0], parent, branches[1]} {
		who := []string{"branch", "parent", "small branch"}[i]
		files := []string{"(500, 700)", "(500, 700)", "(300, 300)"}[i]
		b.says(who+": place", "print(os.getcwd(), oct(os.umask(0o027)), os.nice(0), open('/proc/self/comm').read().strip())", "/home/user/work 0o27 3 renamed")
		b.says(who+": limits", "print(resource.getrlimit(resource.RLIMIT_STACK), resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_NOFILE))", "(4194304, 6291456) (1048576, -1) "+files)
		b.says(who+": await", "print(await once(), await once())", "awaited awaited")
		b.says(who+": tasks", "async def many(): return sum(await asyncio.gather(*(asyncio.sleep(0, i) for i in range(100))))\nprint(await many())", "4950")
		b.says(who+": a file gets the mask", "open('new', 'w').close(); print(oct(os.stat('new').st_mode & 0o777))", "0o640")
		b.says(who+": subprocesses", "import subprocess, multiprocessing as mp; print(subprocess.run(['pwd'], capture_output=True, text=True).stdout.strip())\nwith mp.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))", "/home/user/work\n[1, 2]")
	}
	parent.says("the parent's own loop", "print(loop.run_until_complete(once()))", "awaited")
	// The working directory may be gone, or somewhere that is not copied.
	parent.value("os.mkdir('/home/user/gone'); os.chdir('/home/user/gone'); os.rmdir('/home/user/gone')")
	branches, _ = parent.fork(1)
	branches[0].says("a branch of a kernel in no directory", "print(os.getcwd())", "/home/user")
}

// TestForkCharges says who pays for memory. A page is charged to whoever wrote it, once. A fork writes none: parent and
// branches have the same pages until one of them writes, who then pays for a copy. The page that it was copied from stays with
// whoever wrote it first, as long as anybody has it: a parent that writes again what its branches still have pays for both.
func TestForkCharges(t *testing.T) {
	const heap = 96 << 20
	parent := start(t, limits(func(l *template.Limits) { l.MemoryBytes = 1 << 30 }))
	parent.value("import numpy as np\na = np.random.default_rng(1).random(12 << 20); total = float(a.sum())")
	before := parent.usage().MemoryBytes
	branches, forked := parent.fork(2, func(r *sandbox.ForkRequest) { r.Children[0].Limits.MemoryBytes = 1 << 30 })
	if forked.Memory < heap-2<<20 || forked.Memory > heap*3/2 { // the host counts a process's pages in batches
		t.Errorf("a kernel of %d MB was copied", forked.Memory>>20)
	}
	pays := func(who string, b *box, least, most int64) {
		t.Helper()
		if got := b.usage().MemoryBytes; got < least || got > most {
			t.Errorf("%s is charged %d MB, not %d to %d", who, got>>20, least>>20, most>>20)
		}
	}
	const some = 48 << 20
	pays("the parent of branches", parent, before-some, before+some/2)
	for _, b := range branches {
		b.says("a branch reads what the parent paid for", "print(float(a.sum()) == total)", "True")
		b.onlyItsOwn()
		pays("a branch that only read", b, 1, some)
	}
	branches[0].value("a += 1")
	pays("a branch that wrote", branches[0], heap, heap+some)
	pays("its sibling", branches[1], 1, some)
	pays("their parent", parent, before-some, before+some/2)
	parent.value("a += 1")
	pays("a parent that wrote", parent, before+heap-some/2, before+heap+some)
	branches[1].says("the sibling", "print(float(a.sum()) == total)", "True")
	branches[1].stop()
	eventually(t, "the parent pays for its own again", func() bool { return parent.usage().MemoryBytes < before+some })
	// Whose parent has ended keeps its memory, which nobody pays for then: no more than the branch could have.
	more, _ := parent.fork(1)
	parent.stop()
	more[0].says("a branch without a parent", "print(round(float(a.sum()) - total))", "12582912")
	pays("a branch without a parent", more[0], 1, some)
}

// eventually waits for what the host does in its own time.
func eventually(t *testing.T, claim string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("never: %s", claim)
			return
		}
	}
}

// TestForkOfASandboxWithoutRoom has a sandbox that may make no process and no memory more: a fork of it says so, or works.
func TestForkOfASandboxWithoutRoom(t *testing.T) {
	before := takeCensus(t)
	t.Run("for processes", func(t *testing.T) {
		parent := start(t, limits(func(l *template.Limits) { l.Pids = 24 }))
		parent.value("import subprocess\nx = 1; all = []\ntry:\n    while True: all.append(subprocess.Popen(['sleep', '600']))\nexcept OSError: pass")
		branches, _, err := parent.forkWithin(2*time.Minute, 2)
		if err != nil && (!fault.Is(err, fault.Exhausted) && !fault.Is(err, fault.Unavailable) || strings.Contains(err.Error(), "has ended")) {
			t.Errorf("got %v", err)
		}
		if err == nil {
			for _, b := range branches {
				b.stop()
			}
		}
		parent.value("for p in all: p.kill(); _ = p.wait()")
		branches, _ = parent.fork(1)
		branches[0].says("a branch when there is room again", "print(x)", "1")
		branches[0].stop()
		parent.stop()
	})
	t.Run("for memory", func(t *testing.T) {
		parent := start(t, limits(func(l *template.Limits) { l.MemoryBytes = 160 << 20 }))
		parent.value("blob = bytearray(110 << 20); blob[::4096] = b'x' * (len(blob) // 4096)")
		branches, _, err := parent.forkWithin(2*time.Minute, 2)
		if err != nil && !fault.Is(err, fault.Exhausted) {
			t.Errorf("got %v", err)
		}
		if err == nil {
			branches[0].says("a branch", "print(blob.count(b'x') == len(blob) // 4096)", "True")
			for _, b := range branches {
				b.stop()
			}
		}
		parent.says("the parent", "print(blob.count(b'x') == len(blob) // 4096)", "True")
		parent.stop()
	})
	before.compare(t)
}

func TestForkIntoTooLittleMemory(t *testing.T) {
	slow.Test(t)
	parent := start(t, limits(func(l *template.Limits) { l.MemoryBytes = 1 << 30 }))
	for claim, heap := range map[string]string{
		"large arrays":  "import numpy as np\nheap = np.random.default_rng(1).random(24 << 20)",
		"small objects": "heap = [str(i) * 5 for i in range(2_000_000)]",
	} {
		t.Run(claim, func(t *testing.T) {
			parent.value(heap)
			before := takeCensus(t)
			for range 2 {
				_, _, err := parent.tryFork(2, func(r *sandbox.ForkRequest) {
					for i := range r.Children {
						r.Children[i].Limits.MemoryBytes = 64 << 20
					}
				})
				if !fault.Is(err, fault.Exhausted) {
					t.Errorf("got %v", err)
				}
			}
			before.compare(t)
			parent.says("the parent", "print(len(heap) > 0)", "True")
		})
	}
	t.Run("the second branch alone", func(t *testing.T) {
		parent.value("import mmap\nheap = mmap.mmap(-1, 150 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); heap[:] = b'x' * len(heap)")
		before := takeCensus(t)
		_, _, err := parent.tryFork(2, func(r *sandbox.ForkRequest) {
			r.Children[0].Limits.MemoryBytes, r.Children[1].Limits.MemoryBytes = 1<<30, 64<<20
		})
		if !fault.Is(err, fault.Exhausted) {
			t.Errorf("got %v", err)
		}
		before.compare(t)
	})
}

func TestForkIsRefused(t *testing.T) {
	slow.Test(t)
	before := takeCensus(t)
	refused := func(b *box, kind fault.Kind, changes ...forkChange) {
		t.Helper()
		began := time.Now()
		_, _, err := b.forkWithin(2*time.Minute, 1, changes...)
		if !fault.Is(err, kind) {
			t.Errorf("after %v: got %v", time.Since(began), err)
		}
	}
	t.Run("a kernel that was started as a program", func(t *testing.T) {
		b := start(t)
		if _, err := b.agent.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "cold", Language: "python"}); err != nil {
			t.Fatal(err)
		}
		refused(b, fault.Unsupported, func(r *sandbox.ForkRequest) { r.Kernel = "cold" })
		b.stop()
	})
	t.Run("paused", func(t *testing.T) {
		pausing(t)
		b := start(t)
		b.pause()
		refused(b, fault.Conflict)
		b.resume()
		branches, _ := b.fork(1)
		branches[0].stop()
		b.stop()
	})
	t.Run("in memory", func(t *testing.T) {
		b := start(t, storage(sandbox.StorageTmpfs))
		refused(b, fault.Unsupported)
		b.says("the kernel goes on", "print(1)", "1")
		b.stop()
	})
	t.Run("a name that is taken, a policy that is none", func(t *testing.T) {
		b := start(t)
		refused(b, fault.Conflict, func(r *sandbox.ForkRequest) { r.Children[0].ID = b.id })
		refused(b, fault.Invalid, func(r *sandbox.ForkRequest) { r.Children[0].Network.Mode = "everything" })
		refused(b, fault.Invalid, func(r *sandbox.ForkRequest) { r.Children = nil })
		b.says("the kernel goes on", "print(1)", "1")
		b.stop()
	})
	t.Run("what has ended", func(t *testing.T) {
		b := start(t)
		b.stop()
		refused(b, fault.NotFound)
	})
	t.Run("a kernel that has died", func(t *testing.T) {
		b := start(t)
		b.run("import os; os._exit(3)")
		refused(b, fault.Conflict)
		if err := b.driver.Kernel(t.Context(), b.id, agentapi.DefaultKernel); err != nil {
			t.Fatal(err)
		}
		branches, _ := b.fork(1)
		branches[0].stop()
		b.stop()
	})
	before.compare(t)
}

// TestForkWhenTheZygoteHasEnded has what all kernels were forked from be killed. They go on, and cannot be forked; a kernel of
// the next zygote can.
func TestForkWhenTheZygoteHasEnded(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	b := m.start(t, func(r *sandbox.StartRequest) { r.Template = buildTemplate(t, "python") })
	b.value("x = 1")
	stats, err := m.driver.Stats(t.Context())
	if err != nil || len(stats.Zygotes) == 0 {
		t.Fatalf("%+v %v", stats, err)
	}
	for _, z := range stats.Zygotes {
		if err := unix.Kill(z.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, _, err := b.forkWithin(2*time.Minute, 1); !fault.Is(err, fault.Unavailable) || strings.Contains(err.Error(), "deadline") {
			t.Errorf("got %v", err)
		}
		b.says("the kernel", "x += 1; print(x > 1)", "True")
	}
	if err := m.driver.Kernel(t.Context(), b.id, agentapi.DefaultKernel); err != nil {
		t.Fatal(err)
	}
	b.value("x = 9")
	branches, _ := b.fork(1)
	branches[0].says("a branch of another kernel", "print(x)", "9")
	branches[0].stop()
	b.stop()
}

func TestForkCopiesFiles(t *testing.T) {
	for _, c := range []struct {
		claim   string
		storage sandbox.Storage
		size    int // MB that make the layer large enough to be shared
	}{{"volatile", sandbox.StorageVolatile, 0}, {"durable", sandbox.StorageDurable, 0}, {"a large layer", sandbox.StorageVolatile, 100}, {"a large durable layer", sandbox.StorageDurable, 40}} {
		t.Run(c.claim, func(t *testing.T) {
			parent := start(t, storage(c.storage))
			parent.root(fmt.Sprintf("dd if=/dev/urandom of=/home/user/large bs=1M count=%d status=none; sha256sum /home/user/large > /home/user/sum", c.size))
			parent.root(change1)
			want := parent.root(look)
			branches, _ := parent.fork(2)
			parent.root("echo later > /home/user/kept; rm -rf /opt/deep /home/user/large; touch /usr/bin/tac")
			for _, b := range branches {
				if diff := cmp.Diff(want, b.root(look)); diff != "" {
					t.Errorf("a branch looks different: %s", diff)
				}
				b.root("sha256sum -c --quiet /home/user/sum")
			}
			branches[0].root("rm /home/user/large /home/user/changed; echo again > /home/user/kept; touch /etc/hostname; rm -rf /home/user/sticky; mkdir /home/user/sticky; echo x > /home/user/sticky/x")
			show := "cat /home/user/kept; ls -lA --time-style=+ /home/user; stat -c '%a %U' /home/user/sticky; ls /etc/hostname; ls /usr/bin/tac 2>&1; true"
			want2 := branches[0].root(show)
			grand, _ := branches[0].fork(1)
			branches[0].stop()
			parent.stop()
			if diff := cmp.Diff(want2, grand[0].root(show)); diff != "" {
				t.Errorf("a branch's branch looks different: %s", diff)
			}
			if diff := cmp.Diff(want, branches[1].root(look)); diff != "" {
				t.Errorf("the sibling changed: %s", diff)
			}
			branches[1].root("sha256sum -c --quiet /home/user/sum; echo works > /home/user/changed; rm -rf /home/user/group")
		})
	}
}

// TestForkedFilesAndMemoryAreOfOneMoment has a cell's last act on disk and in memory be the same in every branch, while other
// processes go on writing.
func TestForkedFilesAndMemoryAreOfOneMoment(t *testing.T) {
	parent := start(t)
	parent.sh("(i=0; while :; do i=$((i+1)); echo $i > /tmp/tick; done) & disown")
	parent.value("n = 0")
	for i := range 4 {
		parent.value("n += 1; _ = open('/home/user/n', 'w').write(str(n))")
		branches, _ := parent.fork(2)
		for _, b := range branches {
			b.says("a branch", "print(n, open('/home/user/n').read())", fmt.Sprintf("%d %d", i+1, i+1))
			b.stop()
		}
	}
}

// TestForkedSharedMemoryIsOfThatMomentToo has the parent go on writing, as soon as it may, to memory that a fork of a process
// would share. A branch has it as it was when the rest was copied.
func TestForkedSharedMemoryIsOfThatMomentToo(t *testing.T) {
	for claim, c := range map[string]struct{ before, change string }{
		"shared memory": {"import mmap, os\nn = 0; shared = mmap.mmap(-1, 1 << 20)", "n += 1; shared[:8] = n.to_bytes(8, 'little')"},
		"a file that is gone": {
			"import mmap, os\nn = 0; f = open('/home/user/f', 'w+b'); f.truncate(1 << 20); shared = mmap.mmap(f.fileno(), 1 << 20); os.unlink('/home/user/f')",
			"n += 1; shared[:8] = n.to_bytes(8, 'little')",
		},
		"a file": {
			"import mmap, os\nn = 0; f = open('/home/user/f', 'w+b'); f.truncate(1 << 20); shared = mmap.mmap(f.fileno(), 1 << 20)",
			"n += 1; shared[:8] = n.to_bytes(8, 'little')",
		},
		"memory that is cut short": {
			"import mmap, os\nn = 0; fd = os.memfd_create('x'); os.ftruncate(fd, 1 << 20); shared = mmap.mmap(fd, 1 << 20)",
			"n += 1; os.ftruncate(fd, 0); os.ftruncate(fd, 1 << 20); shared[:8] = n.to_bytes(8, 'little')",
		},
	} {
		t.Run(claim, func(t *testing.T) {
			parent := start(t)
			parent.value(c.before)
			for range 3 {
				parent.value(c.change)
				var branches []*box
				var err error
				var work sync.WaitGroup
				over := make(chan struct{})
				work.Go(func() {
					defer close(over)
					branches, _, err = parent.forkWithin(2*time.Minute, 4)
				})
				for going := true; going; {
					parent.value(c.change)
					select {
					case <-over:
						going = false
					default:
					}
				}
				work.Wait()
				if err != nil {
					t.Errorf("got %v", err)
					continue
				}
				for _, b := range branches {
					b.says("a branch", "print(n - int.from_bytes(shared[:8], 'little'))", "0")
					b.stop()
				}
			}
		})
	}
}

// TestForksOfManyAtOnce has kernels of one zygote be forked at the same time.
func TestForksOfManyAtOnce(t *testing.T) {
	slow.Test(t)
	before := takeCensus(t)
	var parents []*box
	for i := range 6 {
		p := start(t, func(r *sandbox.StartRequest) { r.Deadline = time.Now().Add(time.Hour) })
		p.value(fmt.Sprintf("who = %d", i))
		parents = append(parents, p)
	}
	for round := range cycles(t, 4) {
		var work sync.WaitGroup
		made := make([][]*box, len(parents))
		for i, p := range parents {
			work.Go(func() {
				boxes, _, err := p.tryFork(2)
				if err != nil {
					t.Errorf("round %d: %v", round, err)
					return
				}
				made[i] = boxes
			})
		}
		work.Wait()
		for i, boxes := range made {
			for _, b := range boxes {
				b.says("a branch", "print(who)", fmt.Sprint(i))
				b.stop()
			}
		}
	}
	for _, p := range parents {
		p.stop()
	}
	before.compare(t)
}

func TestForksAtOnce(t *testing.T) {
	parent := start(t)
	parent.value("import numpy as np\nx = np.arange(1 << 20); pid = 'of the parent'")
	before := takeCensus(t)
	check := func(boxes []*box) {
		t.Helper()
		for i, b := range boxes {
			b.says("a branch", fmt.Sprintf("x[0] = %d; print(int(x.sum()))", i+1), fmt.Sprint((1<<20)*(1<<20-1)/2+i+1))
		}
		for _, b := range boxes {
			b.stop()
		}
	}
	t.Run("ten of one", func(t *testing.T) {
		boxes, _ := parent.fork(10)
		check(boxes)
		before.compare(t)
	})
	t.Run("two callers and more", func(t *testing.T) {
		var mu sync.Mutex
		var all []*box
		var work sync.WaitGroup
		for range 4 {
			work.Go(func() {
				boxes, _, err := parent.tryFork(2)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				all = append(all, boxes...)
				mu.Unlock()
			})
		}
		work.Wait()
		check(all)
		before.compare(t)
	})
	t.Run("one after the other", func(t *testing.T) {
		for range cycles(t, 20) {
			boxes, _ := parent.fork(1)
			check(boxes)
		}
		before.compare(t)
	})
	parent.says("the parent", "print(int(x[0]), int(x.sum()))", fmt.Sprint("0 ", (1<<20)*(1<<20-1)/2))
}

// cycles is how often something is repeated; COVE_LEAK_CYCLES makes it a soak.
func cycles(t *testing.T, usual int) int {
	t.Helper()
	text := os.Getenv("COVE_LEAK_CYCLES")
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return max(n, usual)
}

func BenchmarkFork(b *testing.B) {
	for _, heap := range []string{"pass", "import numpy; a = numpy.ones(50 << 17)", "a = [str(i) for i in range(700_000)]"} {
		for _, n := range []int{1, 10} {
			b.Run(fmt.Sprintf("%.20s/%d", heap, n), func(b *testing.B) {
				parent := start(b)
				parent.value(heap)
				for b.Loop() {
					began := time.Now()
					branches, forked := parent.fork(n)
					took := time.Since(began)
					for _, c := range branches {
						c.value("1+1")
					}
					b.ReportMetric(float64(forked.Stall.Microseconds())/1e3, "stall-ms")
					b.ReportMetric(float64(took.Microseconds())/1e3/float64(n), "fork-ms")
					b.ReportMetric(float64(time.Since(began).Microseconds())/1e3/float64(n), "cell-ms")
					b.ReportMetric(float64(forked.Memory)/1e6, "MB")
					b.StopTimer()
					for _, c := range branches {
						c.stop()
					}
					time.Sleep(200 * time.Millisecond)
					b.StartTimer()
				}
			})
		}
	}
}
