package hostcheck

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/diskspace"
)

// mount is one line of mountinfo.
type mount struct {
	point, fstype, source string
	options               []string
}

// mounts reads mountinfo: "36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/vda rw".
func (h *host) mounts() []mount {
	var all []mount
	for line := range strings.Lines(h.read("/proc/self/mountinfo")) {
		before, after, ok := strings.Cut(line, " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 6 || len(rest) < 2 {
			continue
		}
		m := mount{point: unescape(fields[4]), fstype: rest[0], source: rest[1], options: strings.Split(fields[5], ",")}
		if len(rest) > 2 {
			m.options = append(m.options, strings.Split(rest[2], ",")...)
		}
		all = append(all, m)
	}
	return all
}

var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

// mountOf is the mount that a path lies on: the last of the longest.
func (h *host) mountOf(path string) mount {
	var best mount
	for _, m := range h.mounts() {
		inside := m.point == "/" || path == m.point || strings.HasPrefix(path, m.point+"/")
		if inside && len(m.point) >= len(best.point) {
			best = m
		}
	}
	return best
}

// standing is the data directory, or the nearest directory above it that exists.
func (h *host) standing() string {
	dir := h.options.DataDir
	if dir == "" {
		dir = "/var/lib"
	}
	if absolute, err := filepath.Abs(dir); err == nil {
		dir = absolute
	}
	for dir != "/" {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			return real
		}
		dir = filepath.Dir(dir)
	}
	return dir
}

const (
	littleSpace = 2 << 30
	fewInodes   = 100_000
)

func dataDir(_ context.Context, h *host) []Finding {
	const name = "data directory"
	dir := h.standing()
	m := h.mountOf(dir)
	var findings []Finding
	for _, bad := range []string{"ro", "noexec"} {
		if slices.Contains(m.options, bad) {
			findings = append(findings, one(name, Refuse, "choose another data directory, or remount without "+bad, "%s lies on %s, which is mounted %s", dir, m.point, bad)...)
		}
	}
	switch m.fstype {
	case "nfs", "nfs4", "cifs", "9p", "virtiofs", "fuse", "vboxsf":
		findings = append(findings, one(name, Refuse, "choose a local directory", "%s is on %s: an overlay cannot write there", dir, m.fstype)...)
	case "overlay":
		findings = append(findings, one(name, Warn, "put the data directory on a volume", "%s is on an overlay, which rarely carries another one", dir)...)
	case "ext4":
		detail := "%s is on ext4: creating and removing many sandboxes slows it down over minutes; XFS does not and can copy by reference"
		if entries, err := os.ReadDir(h.path("/proc/fs/jbd2")); err == nil && len(entries) == 0 {
			detail += "; it has no journal, so that a crash needs a check of the file system"
		}
		findings = append(findings, one(name, Note, "for many sandboxes, give the data directory an XFS volume", detail, dir)...)
	default:
		findings = append(findings, one(name, OK, "", "%s is on %s", dir, m.fstype)...)
	}
	if h.options.Root != "" {
		return findings
	}
	return append(findings, space(dir)...)
}

func space(dir string) []Finding {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return one("disk space", Warn, "", "%s: %v", dir, err)
	}
	free := int64(s.Bavail) * s.Bsize
	detail := fmt.Sprintf("%.1f GiB free in %s", float64(free)/(1<<30), dir)
	switch {
	case diskspace.CheckFiles(s.Files, s.Ffree) != nil:
		return one("disk space", Warn, "remove files, or make a file system with more inodes",
			"%s, but only %d inodes of %d, and 2 %% are kept: nothing new is started", detail, s.Ffree, s.Files)
	case free < littleSpace:
		return one("disk space", Warn, "free some, or choose another data directory", "%s: the python template alone takes about 1 GiB", detail)
	case s.Files > 0 && s.Ffree < fewInodes:
		return one("disk space", Warn, "make a file system with more inodes", "%s, but only %d more files", detail, s.Ffree)
	}
	return one("disk space", OK, "", "%s", detail)
}

// layers tries what every sandbox is made of: an overlay whose lower layer is an idmapped view of the host.
func layers(_ context.Context, h *host) []Finding {
	const name = "layers"
	if !strings.Contains(h.read("/proc/filesystems"), "overlay") && !h.real() {
		return one(name, Note, "modprobe overlay", "overlayfs is not loaded")
	}
	if !h.real() {
		return notTried(name)
	}
	data := h.standing()
	for _, lower := range []string{data, "/usr"} {
		if err := tryLayers(lower, data); err != nil {
			m := h.mountOf(lower)
			return one(name, Refuse, "use a local ext4, XFS or btrfs for the data directory and the host's own /usr, a kernel of 5.19 or later, and modprobe overlay",
				"an overlay over an idmapped %s (%s) with its upper layer in %s cannot be made: %v", lower, m.fstype, data, err)
		}
	}
	return one(name, OK, "", "overlays over idmapped %s and /usr work", data)
}

func diskImages(_ context.Context, h *host) []Finding {
	const name = "disk limit"
	mkfs := ""
	for _, at := range []string{"mkfs.ext4", "/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"} {
		if found, err := exec.LookPath(at); err == nil {
			mkfs = found
			break
		}
	}
	switch {
	case !h.exists("/dev/loop-control"):
		return one(name, Warn, "modprobe loop; in a container, give it /dev/loop-control", "no loop devices: a sandbox on disk has no size limit of its own; tmpfs storage has one")
	case mkfs == "":
		return one(name, Warn, "apt install e2fsprogs", "no mkfs.ext4: a sandbox on disk has no size limit of its own; tmpfs storage has one")
	}
	return one(name, OK, "", "sparse images on loop devices, made by %s", mkfs)
}

var wantedControllers = []string{"cpu", "memory", "pids"}

// hierarchies is where this host's cgroups are mounted.
type hierarchies struct {
	v1 map[string]string // controller → mount point
	v2 string            // empty: none
}

func (h *host) hierarchies() hierarchies {
	found := hierarchies{v1: map[string]string{}}
	for _, m := range h.mounts() {
		switch m.fstype {
		case "cgroup2":
			found.v2 = m.point
		case "cgroup":
			for _, option := range m.options {
				found.v1[option] = m.point
			}
		}
	}
	return found
}

func cgroups(_ context.Context, h *host) []Finding {
	const name = "cgroups"
	found := h.hierarchies()
	offered := strings.Fields(h.read(filepath.Join(found.v2, "cgroup.controllers")))
	have, missing := map[string]string{}, []string{}
	for _, controller := range wantedControllers {
		switch {
		case found.v1[controller] != "":
			have[controller] = found.v1[controller]
		case found.v2 != "" && slices.Contains(offered, controller):
			have[controller] = found.v2
		default:
			missing = append(missing, controller)
		}
	}
	kind := "v2"
	if len(found.v1) > 0 {
		kind = "v1"
		if found.v2 != "" {
			kind = "hybrid"
		}
	}
	switch {
	case found.v2 == "" && len(found.v1) == 0:
		return one(name, Refuse, "mount cgroup2 on /sys/fs/cgroup", "none mounted: sandboxes would have no limits")
	case len(missing) > 0:
		return one(name, Refuse, "boot with systemd.unified_cgroup_hierarchy=1, or delegate these controllers to Cove (Delegate=yes in its unit)", "%s, without %s: sandboxes would have no such limit", kind, strings.Join(missing, ", "))
	}
	if h.real() {
		for _, controller := range sorted(have) {
			if err := tryCgroup(have[controller]); err != nil {
				return one(name, Refuse, "mount the cgroup file system writable, or let systemd delegate a subtree", "%s, but %s cannot be used: %v", kind, controller, err)
			}
		}
	}
	return one(name, OK, "", "%s with %s", kind, strings.Join(sorted(have), ", "))
}

// pause tells which freezer stops the processes of a paused sandbox: that of the hierarchy which has the limits.
func pause(_ context.Context, h *host) []Finding {
	const name = "pause"
	found := h.hierarchies()
	offered := strings.Fields(h.read(filepath.Join(found.v2, "cgroup.controllers")))
	unified := found.v2 != ""
	for _, controller := range wantedControllers {
		unified = unified && slices.Contains(offered, controller)
	}
	switch {
	case unified:
		return one(name, OK, "", "sandboxes can be paused: the freezer of cgroup v2 at %s", found.v2)
	case found.v1["freezer"] == "":
		return one(name, Warn, "mount -t cgroup -o freezer freezer /sys/fs/cgroup/freezer", "no cgroup freezer beside the v1 controllers: sandboxes cannot be paused, and forks wait longer for their disk")
	case h.real():
		if err := tryCgroup(found.v1["freezer"]); err != nil {
			return one(name, Warn, "mount the freezer's cgroup file system writable", "sandboxes cannot be paused: the freezer at %s cannot be used: %v", found.v1["freezer"], err)
		}
	}
	return one(name, OK, "", "sandboxes can be paused: the freezer of cgroup v1 at %s", found.v1["freezer"])
}

// copies tells what a fork or a snapshot of a sandbox with many files costs.
func copies(_ context.Context, h *host) []Finding {
	const (
		name   = "copies of files"
		remedy = "put the data directory on XFS or btrfs"
	)
	dir := h.standing()
	fstype := h.mountOf(dir).fstype
	instant := fstype == "xfs" || fstype == "btrfs" || fstype == "bcachefs"
	if h.real() {
		instant = tryReflink(dir) == nil
	}
	if instant {
		return one(name, OK, "", "%s copies by reference: forks of large layers are instant", fstype)
	}
	return one(name, Note, remedy, "%s does not copy by reference: forks and snapshots of large layers are copied, and the sandbox's writers wait meanwhile", fstype)
}
