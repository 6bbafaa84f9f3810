package hostcheck_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/hostcheck"
)

// good is a host with nothing to complain about.
var good = map[string]string{
	"/proc/sys/kernel/osrelease":                                       "6.12.9-amd64\n",
	"/proc/self/status":                                                "Name:\tx\nCapBnd:\t000001ffffffffff\n",
	"/proc/self/mountinfo":                                             "1 0 8:1 / / rw,relatime - xfs /dev/sda1 rw\n2 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
	"/sys/fs/cgroup/cgroup.controllers":                                "cpuset cpu io memory pids\n",
	"/proc/sys/user/max_user_namespaces":                               "96000\n",
	"/proc/sys/kernel/seccomp/actions_avail":                           "kill_process kill_thread trap errno user_notif trace log allow\n",
	"/proc/meminfo":                                                    "MemTotal:       32000000 kB\nMemAvailable:   30000000 kB\nSwapTotal:             0 kB\n",
	"/proc/filesystems":                                                "nodev\toverlay\n\text4\n",
	"/proc/sys/net/ipv4/ip_forward":                                    "1\n",
	"/dev/loop-control":                                                "",
	"/sys/kernel/mm/ksm/run":                                           "0\n",
	"/sys/kernel/mm/transparent_hugepage/enabled":                      "always [madvise] never\n",
	"/sys/devices/system/cpu/vulnerabilities/meltdown":                 "Not affected\n",
	"/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
}

// look checks a fake host: the good one with some files changed; "-" removes one.
func look(t *testing.T, changed map[string]string) map[string]hostcheck.Finding {
	t.Helper()
	root := t.TempDir()
	for _, files := range []map[string]string{good, changed} {
		for name, text := range files {
			at := filepath.Join(root, name)
			if text == "-" {
				if err := os.Remove(at); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	found := map[string]hostcheck.Finding{}
	for _, f := range hostcheck.Check(t.Context(), hostcheck.Options{Root: root, DataDir: "/"}) {
		if old, twice := found[f.Name]; !twice || old.Level == hostcheck.OK {
			found[f.Name] = f
		}
	}
	return found
}

func TestFindings(t *testing.T) {
	const v1 = "1 0 8:1 / / rw - xfs /dev/sda1 rw\n"
	for _, c := range []struct {
		claim   string
		changed map[string]string
		name    string
		level   hostcheck.Level
		says    string
	}{
		{"a current kernel is fine", nil, "kernel", hostcheck.OK, "6.12.9"},
		{"a kernel before idmapped layers is refused", map[string]string{"/proc/sys/kernel/osrelease": "5.15.0-91-generic"}, "kernel", hostcheck.Refuse, "5.19"},
		{"a kernel of a flawed number is warned of", map[string]string{"/proc/sys/kernel/osrelease": "6.1.20"}, "kernel", hostcheck.Warn, "CVE-2023-3269"},
		{"a repaired release of that series is fine", map[string]string{"/proc/sys/kernel/osrelease": "6.1.37"}, "kernel", hostcheck.OK, "6.1.37"},
		{"a flawed number between series is warned of", map[string]string{"/proc/sys/kernel/osrelease": "6.2.16-300.fc38"}, "kernel", hostcheck.Warn, "StackRot"},
		{"missing SYS_ADMIN is refused", map[string]string{"/proc/self/status": "CapBnd:\t00000000a80425fb\n"}, "capabilities", hostcheck.Refuse, "CAP_SYS_ADMIN"},
		{"processes are open too early", map[string]string{"/proc/sys/fs/suid_dumpable": "1\n"}, "tracing", hostcheck.Refuse, "suid_dumpable"},
		{"nobody may trace", map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "3\n"}, "tracing", hostcheck.Refuse, "ptrace_scope"},
		{"missing SYS_RESOURCE is a note", map[string]string{"/proc/self/status": "CapBnd:\t000001fffeffffff\n"}, "capabilities", hostcheck.Note, "CAP_SYS_RESOURCE"},
		{"no user namespaces are refused", map[string]string{"/proc/sys/user/max_user_namespaces": "0"}, "user namespaces", hostcheck.Refuse, "max_user_namespaces"},
		{"Debian's old switch is refused", map[string]string{"/proc/sys/kernel/unprivileged_userns_clone": "0"}, "user namespaces", hostcheck.Refuse, "unprivileged_userns_clone"},
		{"Ubuntu's switch is warned of", map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, "user namespaces", hostcheck.Warn, "AppArmor"},
		{"no seccomp is refused", map[string]string{"/proc/sys/kernel/seccomp/actions_avail": "-"}, "seccomp", hostcheck.Refuse, "filters"},
		{"cgroup v2 with its controllers is fine", nil, "cgroups", hostcheck.OK, "v2 with cpu, memory, pids"},
		{"cgroup v2 without memory is refused", map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpu pids"}, "cgroups", hostcheck.Refuse, "memory"},
		{"no cgroups are refused", map[string]string{"/proc/self/mountinfo": v1}, "cgroups", hostcheck.Refuse, "none mounted"},
		{"a hybrid layout is fine", map[string]string{"/sys/fs/cgroup/cgroup.controllers": "-", "/proc/self/mountinfo": v1 +
			"2 1 0:1 / /cg/unified rw - cgroup2 cgroup2 rw\n3 1 0:2 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" +
			"4 1 0:3 / /cg/memory rw - cgroup cgroup rw,memory\n5 1 0:4 / /cg/pids rw - cgroup cgroup rw,pids\n6 1 0:5 / /cg/freezer rw - cgroup cgroup rw,freezer\n"},
			"cgroups", hostcheck.OK, "hybrid"},
		{"cgroup v2 has a freezer", nil, "pause", hostcheck.OK, "v2"},
		{"v1 with its freezer can pause", map[string]string{"/proc/self/mountinfo": v1 + "2 1 0:1 / /cg/cpu rw - cgroup cgroup rw,cpu\n3 1 0:5 / /cg/freezer rw - cgroup cgroup rw,freezer\n"},
			"pause", hostcheck.OK, "v1 at /cg/freezer"},
		{"v1 without a freezer cannot, whatever a bare v2 has", map[string]string{"/sys/fs/cgroup/cgroup.controllers": "-", "/proc/self/mountinfo": v1 +
			"2 1 0:1 / /cg/unified rw - cgroup2 cgroup2 rw\n3 1 0:2 / /cg/cpu rw - cgroup cgroup rw,cpu\n"}, "pause", hostcheck.Warn, "cannot be paused"},
		{"XFS copies by reference", nil, "copies of files", hostcheck.OK, "instant"},
		{"ext4 does not", map[string]string{"/proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"}, "copies of files", hostcheck.Note, "XFS or btrfs"},
		{"a noexec data directory is refused", map[string]string{"/proc/self/mountinfo": "1 0 8:1 / / rw,noexec - xfs /dev/sda1 rw\n"}, "data directory", hostcheck.Refuse, "noexec"},
		{"a network file system is refused", map[string]string{"/proc/self/mountinfo": "1 0 8:1 / / rw - nfs4 server:/ rw\n"}, "data directory", hostcheck.Refuse, "nfs4"},
		{"ext4 is a note", map[string]string{"/proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"}, "data directory", hostcheck.Note, "XFS"},
		{"an overlay root is warned of", map[string]string{"/proc/self/mountinfo": "1 0 8:1 / / rw - overlay overlay rw\n"}, "container", hostcheck.Warn, "overlay"},
		{"no forwarding is a note", map[string]string{"/proc/sys/net/ipv4/ip_forward": "0"}, "forwarding", hostcheck.Note, "off"},
		{"no loop devices are warned of", map[string]string{"/dev/loop-control": "-"}, "disk limit", hostcheck.Warn, "loop"},
		{"little memory is warned of", map[string]string{"/proc/meminfo": "MemTotal: 900000 kB\nMemAvailable: 500000 kB\nSwapTotal: 0 kB\n"}, "memory", hostcheck.Warn, "MiB"},
		{"swap is a note", map[string]string{"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nSwapTotal: 1024 kB\n"}, "memory", hostcheck.Note, "1 MiB swap"},
		{"huge pages off are a note", map[string]string{"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "huge pages", hostcheck.Note, "off"},
		{"same-page merging is warned of", map[string]string{"/sys/kernel/mm/ksm/run": "1"}, "same-page merging", hostcheck.Warn, "KSM"},
		{"hyper-threading is a note", map[string]string{"/sys/devices/system/cpu/smt/active": "1"}, "hyper-threading", hostcheck.Note, "core"},
		{"an open CPU flaw is warned of", map[string]string{"/sys/devices/system/cpu/vulnerabilities/mds": "Vulnerable: no microcode"}, "cpu flaws", hostcheck.Warn, "mds"},
		{"a slow clock is warned of", map[string]string{"/sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, "clock", hostcheck.Warn, "hpet"},
	} {
		t.Run(c.claim, func(t *testing.T) {
			got := look(t, c.changed)[c.name]
			if got.Level != c.level || !strings.Contains(got.Detail+got.Remedy, c.says) {
				t.Errorf("got %+v, want %s and %q", got, c.level, c.says)
			}
			if (got.Level == hostcheck.Warn || got.Level == hostcheck.Refuse) && got.Remedy == "" {
				t.Errorf("%s has no remedy", got.Name)
			}
		})
	}
}

func TestThisHost(t *testing.T) {
	data := t.TempDir()
	before := traces(t, data)
	findings := hostcheck.Check(t.Context(), hostcheck.Options{DataDir: filepath.Join(data, "not", "yet", "there")})
	after := traces(t, data)
	// A thread's namespaces go when the kernel has reaped it, a moment after the probe returned.
	for deadline := time.Now().Add(2 * time.Minute); !slices.Equal(before, after) && time.Now().Before(deadline); after = traces(t, data) {
		time.Sleep(10 * time.Millisecond)
	}
	if !slices.Equal(before, after) {
		t.Errorf("probes left something behind:\nbefore %q\nafter  %q", before, after)
	}
	for _, f := range findings {
		t.Logf("%-6s %-18s %s  → %s", f.Level, f.Name, f.Detail, f.Remedy)
		if f.Detail == "" || (f.Level == hostcheck.Warn || f.Level == hostcheck.Refuse) && f.Remedy == "" {
			t.Errorf("%+v does not explain itself", f)
		}
	}
	if len(findings) < 20 {
		t.Errorf("only %d findings", len(findings))
	}
}

func TestAStoppedCheckStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if findings := hostcheck.Check(ctx, hostcheck.Options{}); len(findings) != 0 {
		t.Errorf("got %+v", findings)
	}
}

func TestWorst(t *testing.T) {
	if got := hostcheck.Worst([]hostcheck.Finding{{Level: hostcheck.OK}, {Level: hostcheck.Refuse}, {Level: hostcheck.Note}}); got != hostcheck.Refuse {
		t.Errorf("got %s", got)
	}
}

// traces is everything a probe could leave: files, mounts, namespaces and devices of ours, groups, descriptors.
func traces(t *testing.T, data string) []string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "cove-doctor") || strings.Contains(line, data) { // others on this machine mount too
			all = append(all, line)
		}
	}
	for _, pattern := range []string{data + "/*", "/proc/self/fd/*", "/sys/class/net/covedoctor*", "/sys/fs/cgroup/cove-doctor*", "/sys/fs/cgroup/*/cove-doctor*"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(pattern, "/fd/") {
			names = slices.DeleteFunc(names, func(n string) bool {
				to, err := os.Readlink(n)
				return err != nil || strings.HasPrefix(to, "anon_inode:") || strings.HasPrefix(to, "/proc/")
			})
		}
		all = append(all, names...)
	}
	own := map[string]bool{}
	for _, ns := range []string{"mnt", "net", "user", "pid"} {
		links, err := filepath.Glob("/proc/self/task/*/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if to, err := os.Readlink(link); err == nil {
				own[to] = true
			}
		}
	}
	for ns := range own {
		all = append(all, ns)
	}
	slices.Sort(all)
	return all
}

func TestPackages(t *testing.T) {
	if f := look(t, nil)["packages"]; f.Level != "" {
		t.Errorf("without dpkg: %+v", f)
	}
	if f := look(t, map[string]string{"/var/lib/dpkg/status": ""})["packages"]; f.Level != hostcheck.OK {
		t.Errorf("at rest: %+v", f)
	}
	f := look(t, map[string]string{"/var/lib/dpkg/status": "", "/var/lib/dpkg/updates/0001": "x"})["packages"]
	if f.Level != hostcheck.Warn || f.Remedy != "dpkg --configure -a" {
		t.Errorf("interrupted: %+v", f)
	}
}

func TestPackages_ManagerAtWork(t *testing.T) {
	root := t.TempDir()
	lock := filepath.Join(root, "var/lib/dpkg/lock-frontend")
	if err := os.MkdirAll(filepath.Dir(lock), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(lock)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	for _, found := range hostcheck.Check(t.Context(), hostcheck.Options{Root: root, DataDir: "/"}) {
		if found.Name == "packages" {
			if found.Level != hostcheck.Note || !strings.Contains(found.Detail, "at work") {
				t.Errorf("got %+v", found)
			}
			return
		}
	}
	t.Error("the package manager was not looked at")
}
