package hostcheck

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/template"
)

func privilege(_ context.Context, h *host) []Finding {
	const name = "privilege"
	if os.Geteuid() == 0 {
		return one(name, OK, "", "running as root: the maker needs it, everything else drops it")
	}
	if _, err := exec.LookPath("sudo"); err == nil {
		return one(name, Note, "start the maker by sudo or by its systemd unit", "not root, but sudo is there; only the maker needs root")
	}
	return one(name, Refuse, "start as root, or install sudo", "neither root nor sudo: sandboxes cannot be made")
}

// needed are the capabilities of the maker, wanted those it uses where it has them. Numbers as in linux/capability.h.
var (
	needed = map[string]uint{"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7, "NET_ADMIN": 12, "SYS_PTRACE": 19, "SYS_ADMIN": 21}
	wanted = map[string]uint{"MKNOD": 27, "SYS_RESOURCE": 24}
)

func capabilities(_ context.Context, h *host) []Finding {
	const name = "capabilities"
	bounding, err := strconv.ParseUint(h.field("/proc/self/status", "CapBnd"), 16, 64)
	if err != nil {
		return one(name, Warn, "mount /proc", "cannot be read from /proc/self/status")
	}
	lack := func(set map[string]uint) []string {
		var missing []string
		for _, capability := range sorted(set) {
			if bounding&(1<<set[capability]) == 0 {
				missing = append(missing, "CAP_"+capability)
			}
		}
		return missing
	}
	if missing := lack(needed); len(missing) > 0 {
		return one(name, Refuse, "run outside a container, or give it these capabilities", "root here lacks %s, which the maker needs", strings.Join(missing, ", "))
	}
	if missing := lack(wanted); len(missing) > 0 {
		return one(name, Note, "", "root here lacks %s: hard limits cannot be raised and the maker cannot be spared from the OOM killer", strings.Join(missing, ", "))
	}
	return one(name, OK, "", "everything the maker needs")
}

// tracing is how a kernel's anchor is held, see the maker.
func tracing(_ context.Context, h *host) []Finding {
	const name, file = "tracing", "/proc/sys/kernel/yama/ptrace_scope"
	if h.number(file, 0) >= 3 {
		return one(name, Refuse, "set kernel.yama.ptrace_scope to 2 or less, and restart the host: 3 cannot be undone", "%s is 3: nobody may stop a process, not even root, and kernels could not be forked from a zygote", file)
	}
	if h.number("/proc/sys/fs/suid_dumpable", 0) == 1 {
		return one(name, Refuse, "set fs.suid_dumpable to 0 or 2, also in /etc/sysctl.d", "/proc/sys/fs/suid_dumpable is 1: a process that gives up its rights is open to its user before it is ready for that")
	}
	return one(name, OK, "", "root may stop processes")
}

// flaw is a published kernel flaw that code inside a sandbox could reach: it writes memory or cached files that it
// may only read, and all sandboxes share the templates' page cache.
type flaw struct {
	name       string
	introduced version
	fixed      []version // the first fixed release of each series; the last also fixes everything later
}

var flaws = []flaw{
	{"CVE-2022-2590 (copy-on-write of shared memory)", version{5, 16, 0}, []version{{6, 0, 0}}},
	{"CVE-2023-3269 (StackRot, use after free in stack expansion)", version{6, 1, 0}, []version{{6, 1, 37}, {6, 3, 11}, {6, 4, 1}}},
}

var floor = version{5, 19, 0}

type version [3]int

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

func (v version) less(o version) bool {
	for i := range v {
		if v[i] != o[i] {
			return v[i] < o[i]
		}
	}
	return false
}

func (f flaw) in(v version) bool {
	if v.less(f.introduced) {
		return false
	}
	for _, fixed := range f.fixed {
		if v[0] == fixed[0] && v[1] == fixed[1] {
			return v.less(fixed)
		}
	}
	return v.less(f.fixed[len(f.fixed)-1])
}

func parseVersion(release string) (version, bool) {
	var v version
	release, _, _ = strings.Cut(release, "-")
	for i, part := range strings.SplitN(release, ".", 4) {
		if i == len(v) {
			break
		}
		digits := strings.TrimRightFunc(part, func(r rune) bool { return r < '0' || r > '9' })
		n, err := strconv.Atoi(digits)
		if err != nil {
			return v, false
		}
		v[i] = n
	}
	return v, v[0] > 0
}

func kernel(_ context.Context, h *host) []Finding {
	const name = "kernel"
	release := h.read("/proc/sys/kernel/osrelease")
	v, ok := parseVersion(release)
	if !ok {
		return one(name, Warn, "", "version %q cannot be read", release)
	}
	if v.less(floor) {
		return one(name, Refuse, "install a kernel of 5.19 or later; 6.1 or later is better", "%s: overlays over idmapped layers came with 5.19", release)
	}
	var known []string
	for _, f := range flaws {
		if f.in(v) {
			known = append(known, f.name)
		}
	}
	if len(known) > 0 {
		return one(name, Warn, "install the distribution's latest kernel and check that its changelog names these",
			"%s: releases of this number had %s; the distribution may have repaired it", release, strings.Join(known, ", "))
	}
	return one(name, OK, "", "%s", release)
}

func container(_ context.Context, h *host) []Finding {
	const name = "container"
	kind := h.read("/run/systemd/container")
	if kind == "" && (h.exists("/.dockerenv") || h.exists("/run/.containerenv")) {
		kind = "a container image's root"
	}
	root := h.mountOf("/")
	if root.fstype == "overlay" {
		return one(name, Warn, "put the data directory on a volume; if layers are refused below, run on the host itself",
			"the root file system is an overlay: this is a container, and /usr of a container usually cannot be shown idmapped")
	}
	if kind != "" {
		return one(name, Note, "", "signs of a container or of its image (%s); what matters is tried below", kind)
	}
	return one(name, OK, "", "not inside a container")
}

func userNamespaces(_ context.Context, h *host) []Finding {
	const name = "user namespaces"
	if !h.exists("/proc/self/ns/user") && h.options.Root == "" {
		return one(name, Refuse, "use a kernel with CONFIG_USER_NS", "the kernel has none")
	}
	for _, s := range []struct{ file, bad, remedy string }{
		{"/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=65536"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"},
	} {
		if h.read(s.file) == s.bad {
			return one(name, Refuse, s.remedy+", and in /etc/sysctl.d", "%s is %s: the maker creates them without privilege, so that nobody privileged owns a sandbox", s.file, s.bad)
		}
	}
	restricted := h.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1"
	if limit := h.number("/proc/sys/user/max_user_namespaces", 1<<31); limit < 4096 {
		return one(name, Warn, "sysctl -w user.max_user_namespaces=65536", "at most %d at once: each sandbox takes one", limit)
	}
	const apparmor = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or load an AppArmor profile for cove with the userns rule"
	if h.real() {
		if err := tryUserNamespace(); err != nil {
			remedy := "ask what forbids it: seccomp of a surrounding container, an LSM, a sysctl"
			if restricted {
				remedy = apparmor
			}
			return one(name, Refuse, remedy, "a process without privilege cannot create a sandbox's namespaces: %v", err)
		}
	}
	if restricted {
		return one(name, Warn, apparmor, "AppArmor restricts user namespaces that unprivileged processes create: inside them capabilities may be missing")
	}
	if !h.real() {
		return notTried(name)
	}
	return one(name, OK, "", "all seven kinds of namespace can be created without privilege")
}

func seccompFilter(_ context.Context, h *host) []Finding {
	const name = "seccomp"
	actions := " " + h.read("/proc/sys/kernel/seccomp/actions_avail") + " "
	for _, action := range []string{"errno", "kill_process"} {
		if !strings.Contains(actions, " "+action+" ") {
			return one(name, Refuse, "use a kernel with CONFIG_SECCOMP_FILTER", "filters cannot answer %s: sandboxes would run without one", action)
		}
	}
	return one(name, OK, "", "filters with errno and kill_process")
}

func memory(_ context.Context, h *host) []Finding {
	kib := func(key string) int64 {
		n, _ := strconv.ParseInt(strings.TrimSuffix(h.field("/proc/meminfo", key), " kB"), 10, 64)
		return n
	}
	total, available, swap := kib("MemTotal"), kib("MemAvailable"), kib("SwapTotal")
	text := fmt.Sprintf("%d MiB, %d MiB available, %d MiB swap", total>>10, available>>10, swap>>10)
	switch {
	case total == 0:
		return one("memory", Warn, "mount /proc", "cannot be read from /proc/meminfo")
	case available < 1<<20:
		return one("memory", Warn, "add memory, or lower the templates' limits", "%s: one sandbox of the python template may use 1 GiB", text)
	case swap > 0:
		return one("memory", Note, "encrypt swap or switch it off where tenants must not meet on a disk", "%s; what sandboxes hold in memory may be written to swap", text)
	}
	return one("memory", OK, "", "%s", text)
}

func hugePages(_ context.Context, h *host) []Finding {
	const name = "huge pages"
	mode := h.read("/sys/kernel/mm/transparent_hugepage/enabled")
	switch {
	case mode == "" || strings.Contains(mode, "[never]"):
		return one(name, Note, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled", "off: forking a kernel from its zygote copies more page tables and takes longer")
	case h.options.Root == "" && !canCollapse():
		return one(name, Note, "a kernel of 6.1 or later collapses on request", "%s, but memory cannot be collapsed on request: forks take longer", mode)
	}
	return one(name, OK, "", "%s; memory can be collapsed on request", mode)
}

func sameMemory(_ context.Context, h *host) []Finding {
	if h.read("/sys/kernel/mm/ksm/run") == "1" {
		return one("same-page merging", Warn, "echo 2 > /sys/kernel/mm/ksm/run", "KSM merges equal pages of different tenants where processes ask for it: how long a write takes tells what a neighbour holds")
	}
	return one("same-page merging", OK, "", "off")
}

func hardware(_ context.Context, h *host) []Finding {
	var findings []Finding
	if h.read("/sys/devices/system/cpu/smt/active") == "1" {
		findings = append(findings, one("hyper-threading", Note, "nosmt on the kernel's command line, where tenants must not share a core", "on: sandboxes of different tenants may share a core and its caches")...)
	}
	entries, err := os.ReadDir(h.path("/sys/devices/system/cpu/vulnerabilities"))
	if err != nil {
		return findings // kernels of some virtual machines do not tell
	}
	var open []string
	for _, e := range entries {
		if strings.HasPrefix(h.read("/sys/devices/system/cpu/vulnerabilities/"+e.Name()), "Vulnerable") {
			open = append(open, e.Name())
		}
	}
	if len(open) > 0 {
		return append(findings, one("cpu flaws", Warn, "update microcode and kernel; do not switch mitigations off", "the kernel reports no mitigation for %s: sandboxes may read each other's memory", strings.Join(open, ", "))...)
	}
	return append(findings, one("cpu flaws", OK, "", "%d known to the kernel, each mitigated or not of this CPU", len(entries))...)
}

// released is before any clock that is right.
var released = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

func clock(_ context.Context, h *host) []Finding {
	const name = "clock"
	source := h.read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	switch {
	case time.Now().Before(released):
		return one(name, Warn, "start a time service", "it is %s here: deadlines, signatures and TLS will be wrong", time.Now().Format(time.DateOnly))
	case source == "hpet" || source == "acpi_pm" || source == "jiffies":
		return one(name, Warn, "look in dmesg why tsc was given up", "%s is slow: every reading of the time enters the kernel", source)
	}
	return one(name, OK, "", "%s", source)
}

func compiler(_ context.Context, h *host) []Finding {
	for _, cc := range []string{"cc", "gcc", "clang"} {
		if at, err := exec.LookPath(cc); err == nil {
			return one("compiler", OK, "", "%s: only needed to build Cove, and inside for pip packages without wheels", at)
		}
	}
	return one("compiler", Note, "apt install gcc libc6-dev", "none: fine for a built Cove; packages that must be compiled cannot be, inside")
}

func python(ctx context.Context, h *host) []Finding {
	const remedy = "apt install python3 python3-pip, or install a newer one by pyenv or uv"
	p, err := template.FindPython(ctx, []string{">=3.12,<3.15", ">=3.9,<3.15"})
	switch {
	case err != nil:
		return one("python", Warn, remedy, "the python template cannot be built: %v", err)
	case !p.HasPip && p.PipWheel == "":
		return one("python", Warn, "apt install python3-pip", "%s %s has no pip, which installs the template's packages", p.Executable, p.Version)
	case p.Minor() == "3.9" || p.Minor() == "3.10" || p.Minor() == "3.11":
		return one("python", Note, remedy, "%s %s; from 3.12 on kernels share more memory", p.Executable, p.Version)
	}
	return one("python", OK, "", "%s %s", p.Executable, p.Version)
}

func tools(_ context.Context, h *host) []Finding {
	missing := template.MissingTools()
	if len(missing) == 0 {
		return one("tools", OK, "", "bash, git, curl and the like are there for sandboxes; sudo is Cove's own")
	}
	var packages []string
	for _, tool := range missing {
		packages = append(packages, template.Tools[tool])
	}
	return one("tools", Warn, "apt install "+strings.Join(packages, " "), "%s missing on this host and so in every sandbox of base and python", strings.Join(missing, ", "))
}

// packages looks at the database of the host's package manager, of which every sandbox has a copy.
func packages(_ context.Context, h *host) []Finding {
	const name = "packages"
	dir := h.path(template.DpkgDir)
	switch {
	case !h.exists(template.DpkgDir):
		return nil // another package manager
	case template.DpkgBusy(dir):
		return one(name, Note, "", "the host's package manager is at work: templates are built when it has finished")
	case template.DpkgInterrupted(dir):
		return one(name, Warn, "dpkg --configure -a", "the host's package manager was interrupted: templates cannot be built")
	}
	if h.options.Root == "" && os.Geteuid() != 0 {
		return one(name, Note, "", "only root can see whether the host's package manager is at work")
	}
	return one(name, OK, "", "the host's package manager is at rest")
}
