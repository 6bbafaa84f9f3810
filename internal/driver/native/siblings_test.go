package native_test

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// What one sandbox leaves for, or takes from, another of the same zygote or host.

func TestIsolationSecretsDoNotPassThroughTheZygote(t *testing.T) {
	secret := "sekrit-" + strconv.Itoa(os.Getpid()) + "-of-the-first"
	first := start(t, func(r *sandbox.StartRequest) { r.Env = map[string]string{"CUSTOMER_SECRET": secret} })
	if got := first.value(`import os; print(os.environ["CUSTOMER_SECRET"])`); got != secret {
		t.Fatalf("the first sandbox has %q", got)
	}
	first.stop()
	// The searcher never has it whole, neither in its code nor in what the code becomes: each character of the pattern stands alone.
	// With a mark of its own in place of the secret it shows that it finds what is there.
	search := func(b *box, what string) string {
		pattern := ""
		for _, c := range what {
			pattern += "[" + string(c) + "]"
		}
		return b.value(`
import re
needle, hits = re.compile(rb"` + pattern + `"), 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        span, rights = line.split()[:2]
        if "rw" not in rights or "[v" in line: continue
        low, high = (int(x, 16) for x in span.split("-"))
        high = min(high, low + (256 << 20))  # the arena's reserve beyond that was never touched
        for at in range(low, high, 1 << 20):
            try:
                memory.seek(at)
                data = memory.read(min((1 << 20) + 64, high - at))
            except (OSError, OverflowError, ValueError): continue
            hits += len(needle.findall(data))
print(hits)
`)
	}
	second := start(t, func(r *sandbox.StartRequest) {
		r.Env = map[string]string{"OWN_MARK": "mark-" + secret[len("sekrit-"):]}
	})
	if found := search(second, secret); found != "0" {
		t.Errorf("the first sandbox's secret is %s times in a sibling's memory", found)
	}
	if found := search(second, "mark-"+secret[len("sekrit-"):]); found == "0" {
		t.Error("the search does not find what is there")
	}
}

func TestIsolationSharedFilesTellNothing(t *testing.T) {
	watcher, victim := start(t), start(t)
	watcher.value(`
import ctypes, os, fcntl
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init1(os.O_NONBLOCK)
watched = ["/dev/null", "/dev/urandom", "/dev/zero", "/run/cove/resolv.conf", "/run/cove/bin/sudo", "/etc/resolv.conf", "/usr/bin/id", "/etc/passwd"]
for path in watched:
    assert libc.inotify_add_watch(fd, path.encode(), 0xfff) > 0, path
locked = open("/run/cove/resolv.conf")
fcntl.flock(locked, fcntl.LOCK_EX)
os.open("/dev/zero", os.O_RDONLY)
own = os.read(fd, 4096)
print(len(own) > 0)
`)
	if got := victim.value(`
import fcntl, subprocess
subprocess.run("cat /dev/null; head -c 1 /dev/zero /dev/urandom > /dev/null; sudo id; cat /run/cove/resolv.conf /etc/resolv.conf /etc/passwd", shell=True, capture_output=True)
f = open("/run/cove/resolv.conf")
try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print("free")
except OSError: print("locked by a stranger")
`); got != "free" {
		t.Error(got)
	}
	if got := watcher.value(`
try: print(len(os.read(fd, 65536)), "bytes of a neighbour's deeds")
except BlockingIOError: print("nothing")
`); got != "nothing" {
		t.Error(got)
	}
}

func TestIsolationTerminalsAreNotTakenFromOthers(t *testing.T) {
	hog, neighbour := start(t, limits(func(l *template.Limits) { l.OpenFiles = 4096 })), start(t)
	out := hog.value(`
import os
held = []
try:
    while len(held) < 4000: held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError: pass
print(len(held))
`)
	if n, err := strconv.Atoi(out); err != nil || n > 256 {
		t.Errorf("one sandbox has %s terminals", out)
	}
	if got := neighbour.value(`import pty; print(len(pty.openpty()))`); got != "2" {
		t.Errorf("the neighbour got %s", got)
	}
}

// TestIsolationNetworkBuffersAreMemory fills loopback connections that nobody reads.
func TestIsolationNetworkBuffersAreMemory(t *testing.T) {
	before := tcpBytes(t)
	b := start(t, limits(func(l *template.Limits) { l.MemoryBytes, l.OpenFiles = 256<<20, 4096 }))
	b.value(`
import socket
server = socket.create_server(("127.0.0.1", 0), backlog=512)
held = []
for i in range(100):
    c = socket.socket()
    c.settimeout(0.05)
    try:
        c.connect(server.getsockname()); s, _ = server.accept()
        held += [c, s]
        c.setblocking(False)
        for _ in range(200): c.send(b"x" * 65536)
    except OSError: pass
`)
	if grown := tcpBytes(t) - before; grown > 128<<20 {
		t.Errorf("a sandbox of 256 MiB holds %d MiB of network buffers beside it", grown>>20)
	}
}

// tcpBytes is what all TCP sockets of the host hold.
func tcpBytes(t *testing.T) int64 {
	t.Helper()
	data, err := os.ReadFile("/proc/net/sockstat")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) > 10 && f[0] == "TCP:" && f[9] == "mem" {
			pages, _ := strconv.ParseInt(f[10], 10, 64)
			return pages * int64(os.Getpagesize())
		}
	}
	t.Fatalf("sockstat says %s", data)
	return 0
}

// TestIsolationAKernelThatWaitedIsClean is about kernels that were forked ahead and have rehearsed.
func TestIsolationAKernelThatWaitedIsClean(t *testing.T) {
	start(t).stop()
	waitForPool(t)
	got := start(t).value(`print([n for n in ("x", "df", "pd", "np", "f") if n in globals()], In[:1], Out)`)
	if got != "[] [''] {}" {
		t.Errorf("a fresh kernel has %s", got)
	}
}

// waitForPool returns when shells with kernels wait in the pool.
func waitForPool(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		s, err := world.driver.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Pooled >= 4 && s.Dying == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the pool does not fill: %+v", s)
		}
	}
}

func TestStorageIsWhatWasAsked(t *testing.T) {
	for kind, want := range map[sandbox.Storage]string{sandbox.StorageVolatile: "fsync=volatile", sandbox.StorageDurable: "", sandbox.StorageTmpfs: "fsync=volatile"} {
		t.Run(string(kind), func(t *testing.T) {
			b := start(t, storage(kind), limits(func(l *template.Limits) { l.DiskBytes = 64 << 20 }))
			a := b.sh("grep ' / ' /proc/self/mounts; dd if=/dev/zero of=/tmp/fill bs=1M count=100 conv=fsync 2>&1 | tail -1; stat -c %s /tmp/fill; rm /tmp/fill; echo again > /tmp/x && sync -f /tmp/x && cat /tmp/x")
			if strings.Contains(a.stdout, "volatile") != (want != "") || !strings.HasSuffix(a.stdout, "again\n") {
				t.Errorf("%s %s", a.stdout, a.stderr)
			}
			if strings.Contains(a.stdout, "\n104857600\n") {
				t.Errorf("100 MiB fitted into 64: %s", a.stdout)
			}
		})
	}
}
