package native_test

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/template"
)

//go:embed testdata/probe.py
var probe string

type probed struct {
	Results map[string]string `json:"results"`
	Info    struct {
		UID        int               `json:"uid"`
		CapInh     string            `json:"CapInh"`
		CapPrm     string            `json:"CapPrm"`
		CapEff     string            `json:"CapEff"`
		CapBnd     string            `json:"CapBnd"`
		CapAmb     string            `json:"CapAmb"`
		NoNewPrivs string            `json:"NoNewPrivs"`
		Seccomp    string            `json:"Seccomp"`
		Pids       []int             `json:"pids"`
		FDs        map[string]string `json:"fds"`
		Env        map[string]string `json:"env"`
		Unix       []string          `json:"unix"`
		Mounts     []string          `json:"mounts"`
		UIDMap     []string          `json:"uid_map"`
		Cgroup     []string          `json:"cgroup"`
		Init       map[string]string `json:"init"`
	} `json:"info"`
}

// refusals are answers that mean no.
var refusals = []string{"EPERM", "EACCES", "ENOSYS", "EPROTONOSUPPORT", "ENOENT", "EROFS", "PermissionError", "empty"}

// permitted are the few attempts of the probe that may succeed, and for whom.
func permitted(name string, root bool) []string {
	switch name {
	case "netlink route":
		return []string{"ok"} // to read interfaces; changing them needs a capability
	case "signal pid 1":
		if root {
			return []string{"ok"} // taken and ignored: the kernel shields a PID 1 from its own namespace
		}
	case "trace by TIOCSTI":
		return []string{"EPERM"}
	case "raise a hard limit":
		return []string{"EPERM", "ValueError", "PermissionError"}
	}
	return refusals
}

// exact are attempts whose answer libraries rely on.
var exact = map[string]string{
	"clone3": "ENOSYS", "io_uring_setup": "ENOSYS", "io_uring_enter": "ENOSYS", "io_uring_register": "ENOSYS",
	"unshare user": "EPERM", "clone user": "EPERM", "setns": "EPERM", "mount": "EPERM", "ptrace": "EPERM", "ptrace pid 1": "EPERM", "bpf": "EPERM",
	"socket alg": "EPERM", "socket vsock": "EPERM", "socket packet": "EPERM", "raw icmp": "EPERM", "i386 socketcall": "EPERM", "x32 socket": "ENOSYS",
}

func checkProbe(t *testing.T, raw string, root bool) probed {
	t.Helper()
	var p probed
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		t.Fatalf("probe said %.2000q: %v", raw, err)
	}
	if len(p.Results) < 100 {
		t.Errorf("only %d attempts were made", len(p.Results))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Results)) {
		got := p.Results[name]
		if want, ok := exact[name]; ok {
			if got != want {
				t.Errorf("%s: got %s, want %s", name, got, want)
			}
			continue
		}
		if !slices.Contains(permitted(name, root), got) {
			t.Errorf("%s: got %s", name, got)
		}
	}
	return p
}

func TestIsolationKernelIsRefused(t *testing.T) {
	b := start(t)
	p := checkProbe(t, b.value(probe), false)
	if p.Info.UID != 1000 {
		t.Errorf("a cell runs as uid %d", p.Info.UID)
	}
	for name, target := range p.Info.FDs {
		if !strings.HasPrefix(target, "/dev/null") && !strings.HasPrefix(target, "pipe:") && !strings.HasPrefix(target, "socket:") && !strings.HasPrefix(target, "/proc/") {
			t.Errorf("descriptor %s is %s", name, target)
		}
	}
}

func TestIsolationCommandIsRefused(t *testing.T) {
	b := start(t)
	a := b.exec(agentapi.ExecParams{Argv: []string{"python3", "-c", probe}})
	p := checkProbe(t, a.stdout, false)
	if p.Info.UID != 1000 {
		t.Errorf("a command runs as uid %d", p.Info.UID)
	}
}

func TestIsolationRootInsideIsRefused(t *testing.T) {
	b := start(t)
	for claim, params := range map[string]agentapi.ExecParams{
		"by sudo": {Argv: []string{"sudo", "python3", "-c", probe}},
		"as root": {Argv: []string{"python3", "-c", probe}, User: "root"},
	} {
		t.Run(claim, func(t *testing.T) {
			a := b.exec(params)
			p := checkProbe(t, a.stdout, true)
			if p.Info.UID != 0 {
				t.Errorf("uid %d", p.Info.UID)
			}
		})
	}
}

// TestTrustTable asserts the cells of the table in docs/threat-model.md.
func TestTrustTableS0_71_S4_50(t *testing.T) {
	b := start(t)
	const nothing = "0000000000000000"
	// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SYS_CHROOT, AUDIT_WRITE, SETFCAP
	sudo := fmt.Sprintf("%016x", 1<<0|1<<1|1<<3|1<<4|1<<5|1<<6|1<<7|1<<10|1<<18|1<<29|1<<31)
	agent := fmt.Sprintf("%016x", 1<<0|1<<1|1<<3|1<<4|1<<5|1<<6|1<<7|1<<10|1<<18|1<<29|1<<31|1<<19)

	kernel := checkProbe(t, b.value(probe), false).Info
	command := checkProbe(t, b.exec(agentapi.ExecParams{Argv: []string{"python3", "-c", probe}}).stdout, false).Info
	root := checkProbe(t, b.exec(agentapi.ExecParams{Argv: []string{"sudo", "python3", "-c", probe}}).stdout, true).Info

	type row struct{ Prm, Eff, Inh, Amb, NoNewPrivs, Seccomp string }
	for _, c := range []struct {
		who  string
		got  row
		want row
	}{
		{"kernel", row{kernel.CapPrm, kernel.CapEff, kernel.CapInh, kernel.CapAmb, kernel.NoNewPrivs, kernel.Seccomp}, row{nothing, nothing, nothing, nothing, "1", "2"}},
		{"command", row{command.CapPrm, command.CapEff, command.CapInh, command.CapAmb, command.NoNewPrivs, command.Seccomp}, row{nothing, nothing, nothing, nothing, "1", "2"}},
		{"sudo's root", row{root.CapPrm, root.CapEff, root.CapInh, root.CapAmb, root.NoNewPrivs, root.Seccomp}, row{sudo, sudo, nothing, nothing, "1", "2"}},
		{"agent", row{root.Init["CapPrm"], root.Init["CapEff"], nothing, nothing, root.Init["NoNewPrivs"], root.Init["Seccomp"]}, row{agent, agent, nothing, nothing, "1", "2"}},
	} {
		if diff := cmp.Diff(c.want, c.got); diff != "" {
			t.Errorf("%s: %s", c.who, diff)
		}
	}
	if root.CapBnd != sudo {
		t.Errorf("root's bounding set is %s, want %s", root.CapBnd, sudo)
	}
	// What a thread of the agent could pass on, any command could have: it is started by one of them.
	threads := b.exec(agentapi.ExecParams{Argv: []string{"sh", "-c", "cat /proc/1/task/*/status"}, User: "root"}).stdout
	all, none, bound := strings.Count(threads, "\nCapInh:"), strings.Count(threads, "\nCapInh:\t"+nothing), strings.Count(threads, "\nCapBnd:\t"+sudo)
	if all < 2 || none != all || bound != all {
		t.Errorf("of %d threads of the agent %d have nothing to pass on, and %d the bounding set %s", all, none, bound, sudo)
	}
	if len(kernel.UIDMap) != 3 || kernel.UIDMap[0] != "0" || kernel.UIDMap[2] != "65536" {
		t.Errorf("uid map %v", kernel.UIDMap)
	}
	if base, _ := strconv.Atoi(kernel.UIDMap[1]); base < 1<<16 || base+65536 > 1<<31 {
		t.Errorf("host ids begin at %d", base)
	}

	stats, err := world.driver.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(stats.Zygotes) == 0 {
		t.Fatal("no zygote")
	}
	for _, z := range stats.Zygotes {
		status := procStatus(t, z.PID)
		uid, _ := strconv.Atoi(strings.Fields(status["Uid"])[0])
		if uid < 1<<16 || uid >= 0x20000000 {
			t.Errorf("zygote is uid %d", uid)
		}
		want := map[string]string{"CapInh": nothing, "CapPrm": nothing, "CapEff": nothing, "CapBnd": nothing, "CapAmb": nothing, "NoNewPrivs": "1", "Seccomp": "2", "Threads": "1"}
		for k, v := range want {
			if status[k] != v {
				t.Errorf("zygote %s is %s, want %s", k, status[k], v)
			}
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", z.PID))
		if err != nil || len(env) != 0 {
			t.Errorf("zygote was started with environment %q %v", env, err)
		}
		for _, ns := range []string{"mnt", "net", "ipc", "uts"} {
			ours, _ := os.Readlink("/proc/self/ns/" + ns)
			theirs, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", z.PID, ns))
			if ours == theirs || theirs == "" {
				t.Errorf("zygote shares the host's %s namespace", ns)
			}
		}
	}
	status := procStatus(t, world.driver.MakerPID())
	if uid := strings.Fields(status["Uid"]); uid[0] != "0" {
		t.Errorf("maker is uid %v", uid)
	}
	// No SYS_MODULE, SYS_RAWIO, SYS_BOOT, SYS_TIME, SYS_RESOURCE, BPF, NET_RAW, SETFCAP and the like.
	maker := fmt.Sprintf("%016x", 1<<0|1<<1|1<<3|1<<5|1<<6|1<<7|1<<8|1<<10|1<<12|1<<18|1<<19|1<<21|1<<27|1<<34)
	for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
		if status[set] != maker {
			t.Errorf("maker's %s is %s, want %s", set, status[set], maker)
		}
	}
}

func procStatus(t testing.TB, pid int) map[string]string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			out[k] = strings.TrimSpace(v)
		}
	}
	return out
}

func TestIsolationS0_63_S0_67_S0_70_HostSecretsAreNotThere(t *testing.T) {
	t.Setenv("COVE_TEST_SECRET", "hunter2-in-the-environment")
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("hunter2-in-a-file"), 0o644); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", "@cove-test-abstract")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	b := start(t)
	out := b.value(fmt.Sprintf(`
import os, socket, json
said = {}
def note(name, f):
    try: said[name] = f() or "ok"
    except Exception as e: said[name] = type(e).__name__
note("host file", lambda: open(%q).read())
note("through proc root", lambda: open("/proc/self/root" + %q).read())
note("shadow", lambda: open("/etc/shadow").read())
note("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\0cove-test-abstract"))
note("docker socket", lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"))
note("secret in env", lambda: str([k for k, v in os.environ.items() if "hunter2" in v]))
note("host process", lambda: str([p for p in os.listdir("/proc") if p.isdigit() and int(p) > 5000]))
note("ssh keys", lambda: str(os.listdir(os.path.expanduser("~root") + "/.ssh")))
print(json.dumps(said))
`, secret, secret))
	var got map[string]string
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"host file": "FileNotFoundError", "through proc root": "FileNotFoundError", "shadow": "PermissionError", "abstract socket": "ConnectionRefusedError",
		"docker socket": "FileNotFoundError", "secret in env": "[]", "host process": "[]", "ssh keys": "PermissionError",
	}
	if got["ssh keys"] == "FileNotFoundError" {
		want["ssh keys"] = "FileNotFoundError"
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestIsolationS0_63_S4_51_Neighbours(t *testing.T) {
	a, b := start(t), start(t)
	a.value(`open("/tmp/mine", "w").write("a"); open("/home/user/mine", "w").write("a"); shared = 1`)
	if got := b.value(`import os; print(os.path.exists("/tmp/mine"), os.path.exists("/home/user/mine"), "shared" in globals())`); got != "False False False" {
		t.Errorf("a neighbour's state is visible: %s", got)
	}
	address := a.value(`
import socket, subprocess
print(subprocess.run("hostname -I", shell=True, capture_output=True, text=True).stdout.split()[0])
server = socket.create_server(("0.0.0.0", 8123))
`)
	if out := b.value(fmt.Sprintf(`
import socket
try:
    socket.create_connection((%q, 8123), 2); print("connected")
except OSError as e: print("refused")
`, address)); out != "refused" {
		t.Errorf("a neighbour's port answered: %s", out)
	}
}

// TestIsolationS0_65_Network tries what must not be reachable from a sandbox that may reach the internet.
func TestIsolationS0_65_Network(t *testing.T) {
	host, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	go func() {
		for {
			c, err := host.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "host service")
			c.Close()
		}
	}()
	port := host.Addr().(*net.TCPAddr).Port
	var targets []string
	addresses, _ := net.InterfaceAddrs()
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			targets = append(targets, fmt.Sprintf("(%q, %d)", p.Addr(), port))
		}
	}
	for _, fixed := range []string{"169.254.169.254", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "127.0.0.1", "10.213.0.1"} {
		targets = append(targets, fmt.Sprintf("(%q, %d)", fixed, port), fmt.Sprintf("(%q, 80)", fixed))
	}
	for claim, n := range map[string]policy.Network{"internet": {Mode: policy.Internet}, "none": {Mode: policy.None}} {
		t.Run(claim, func(t *testing.T) {
			b := start(t, network(n))
			out := b.value(`
import socket
for target in [` + strings.Join(targets, ", ") + `]:
    try:
        socket.create_connection(target, 1).close(); print("reached", target)
    except OSError: pass
`)
			if out != "" {
				t.Error(out)
			}
		})
	}
}

func TestIsolationS0_61_S0_62_RemovingEverythingHarmsOnlyItself(t *testing.T) {
	before := fingerprint(t)
	neighbour := start(t)
	b := start(t)
	b.exec(agentapi.ExecParams{Argv: []string{"sudo", "bash", "-c", "rm -rf --no-preserve-root / 2>/dev/null; true"}, TimeoutMS: 60_000})
	if got := neighbour.value("import pandas; print(pandas.DataFrame({'a': [1, 2]}).a.sum())"); got != "3" {
		t.Errorf("the neighbour says %s", got)
	}
	if usage, err := world.driver.Usage(t.Context(), b.id); err != nil || usage.Pids == 0 {
		t.Errorf("the sandbox cannot be inspected any more: %+v %v", usage, err)
	}
	b.stop()
	if got := start(t).value("import numpy; print(numpy.arange(4).sum())"); got != "6" {
		t.Errorf("a new sandbox says %s", got)
	}
	if after := fingerprint(t); after != before {
		t.Errorf("host files changed: %s, before %s", after, before)
	}
}

// fingerprint is a cheap look at what a sandbox shares with the host: names, sizes and times.
func fingerprint(t *testing.T) string {
	t.Helper()
	roots := []string{"/usr/bin", "/etc"}
	for _, tree := range buildTemplate(t, "python").Trees {
		roots = append(roots, tree.Lower[0])
	}
	out, err := exec.Command("sh", "-c", "find "+strings.Join(roots, " ")+" -maxdepth 4 -printf '%p %s %T@ %m %u\\n' 2>/dev/null | sort | sha256sum").Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestIsolationLimits(t *testing.T) {
	t.Run("memory: touching more than the limit kills the kernel and says why", func(t *testing.T) {
		b := start(t, limits(func(l *template.Limits) { l.MemoryBytes = 256 << 20 }))
		for claim, code := range map[string]string{
			"one big array":  "import numpy as np\nx = np.ones((100000, 100000))",
			"a leak":         "leak = []\nwhile True: leak.append(bytearray(1 << 20))",
			"a child's leak": "import subprocess\nprint(subprocess.run(['python3', '-c', 'x = bytearray(1 << 30)']).returncode)",
		} {
			a := b.run(code)
			switch {
			case claim == "a child's leak":
				if strings.TrimSpace(a.stdout) != "-9" && strings.TrimSpace(a.stdout) != "1" {
					t.Errorf("%s: %+v %s", claim, a.end, a.stdout)
				}
				continue
			case a.err != nil && strings.Contains(a.err.Name, "MemoryError"):
				continue
			case a.end.Outcome != agentapi.OutcomeOOM || !a.end.Lost || !strings.Contains(a.end.Message, "memory"):
				t.Errorf("%s: ended %+v %v", claim, a.end, a.err)
			}
			if err := world.driver.Kernel(t.Context(), b.id, agentapi.DefaultKernel); err != nil {
				t.Fatal(err)
			}
			if got := b.value("print(1)"); got != "1" {
				t.Errorf("%s: the next kernel says %s", claim, got)
			}
		}
	})
	t.Run("S0.66 pids: a fork bomb hits its limit", func(t *testing.T) {
		b := start(t, limits(func(l *template.Limits) { l.Pids = 64 }))
		a := b.exec(agentapi.ExecParams{Argv: []string{"bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 1"}, TimeoutMS: 5000})
		if usage, err := world.driver.Usage(t.Context(), b.id); err != nil || usage.Pids > 64 {
			t.Errorf("usage %+v %v", usage, err)
		}
		_ = a
	})
	t.Run("S0.69 disk: a filler meets the end of its disk", func(t *testing.T) {
		b := start(t, limits(func(l *template.Limits) { l.DiskBytes = 64 << 20 }))
		a := b.sh("dd if=/dev/zero of=/tmp/fill bs=1M count=200 2>&1; df -k /tmp | tail -1")
		if !strings.Contains(a.stdout, "No space left") && !strings.Contains(a.stdout, "quota") {
			t.Errorf("dd said %s", a.stdout)
		}
	})
	t.Run("open files", func(t *testing.T) {
		b := start(t, limits(func(l *template.Limits) { l.OpenFiles = 64 }))
		out := b.value(`
held = []
try:
    while len(held) < 500: held.append(open("/dev/null"))
    print("no limit")
except OSError as e: print(e.errno, len(held) < 64)
held.clear()
`)
		if out != "24 True" {
			t.Errorf("got %s", out)
		}
	})
	t.Run("S0.56 cpu: two busy processes get one CPU together", func(t *testing.T) {
		b := start(t)
		before, err := world.driver.Usage(t.Context(), b.id)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		b.sh("for i in 1 2 3 4; do timeout 2 sh -c 'while :; do :; done' & done; wait")
		wall := time.Since(began)
		after, err := world.driver.Usage(t.Context(), b.id)
		if err != nil {
			t.Fatal(err)
		}
		if used := time.Duration(after.CPUMS-before.CPUMS) * time.Millisecond; used > wall*5/4+200*time.Millisecond {
			t.Errorf("used %v of CPU in %v", used, wall)
		}
	})
}

// The agent is the last to go: with it the sandbox is lost.
func TestOutOfMemoryTakesKernelsBeforeTheAgent(t *testing.T) {
	b := start(t)
	if got := b.value(`own, agent = (int(open(f"/proc/{pid}/oom_score_adj").read()) for pid in ("self", 1)); print(own - agent)`); got != "500" {
		t.Errorf("a kernel goes %s sooner than the agent", got)
	}
}

func TestOutOfMemoryNamesItsVictim(t *testing.T) {
	b := start(t, limits(func(l *template.Limits) { l.MemoryBytes = 128 << 20 }))
	a := b.exec(agentapi.ExecParams{Argv: []string{"python3", "-c", "x = bytearray(1 << 30)"}})
	if a.end.Outcome != agentapi.OutcomeOOM || !strings.Contains(a.end.Message, "python3") || !strings.Contains(a.end.Message, "MiB") {
		t.Errorf("a command: %+v", a.end)
	}
	a = b.run("x = [bytearray(1 << 20) for _ in range(1 << 20)]")
	if a.end.Outcome != agentapi.OutcomeOOM || !a.end.Lost || !strings.Contains(a.end.Message, "python3") {
		t.Errorf("a cell: %+v", a.end)
	}
}
