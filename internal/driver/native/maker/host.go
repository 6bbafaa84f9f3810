package maker

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/seccomp"
	"github.com/covehq/cove/kernel"
)

// base is where sandboxes are put together, in the maker's private mount namespace. It must be searchable by ids that
// own nothing here, so it cannot lie below a data directory; /sys exists on every host and the maker does not need it.
const base = "/sys"

// host is what every shell is made from.
type host struct {
	shell *os.File // the shell program, sealed
	agent *os.File // the agent, sealed
	graft []byte   // what makes a copy of a kernel's memory a kernel
}

// prepareHost leaves a mount namespace with the few mounts that are needed, since every sandbox begins as a copy of it.
//
// The mounts are slaves of the host's: what the host unmounts goes here too. A private copy would keep the file system, and the
// device below it, in use for as long as the maker lives.
func prepareHost(dataDir, nameserver string) (*host, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return nil, fmt.Errorf("slave mounts: %w", err)
	}
	if err := prune(dataDir); err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", base, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=64m"); err != nil {
		return nil, fmt.Errorf("mount base: %w", err)
	}
	dirs := []string{"s", "r", "cove", "c", "e"}
	for i := range maxLayers {
		dirs = append(dirs, "l/"+strconv.Itoa(i))
	}
	for _, d := range dirs {
		if err := os.MkdirAll(filepath.Join(base, d), 0o755); err != nil {
			return nil, err
		}
	}
	if err := makeCove(filepath.Join(base, "cove"), nameserver); err != nil {
		return nil, fmt.Errorf("make cove: %w", err)
	}
	h := &host{}
	var err error
	if h.shell, err = sealed("shell"); err != nil {
		return nil, err
	}
	if h.agent, err = sealed("agent"); err != nil {
		return nil, err
	}
	if h.graft, err = embedded.ReadFile("embedded/graft"); err != nil {
		return nil, err
	}
	return h, nil
}

// onDisk are the file systems that may hold a template's layers; the rest of a host's mounts goes.
var onDisk = map[string]bool{"ext2": true, "ext3": true, "ext4": true, "xfs": true, "btrfs": true, "f2fs": true, "zfs": true, "bcachefs": true, "overlay": true, "erofs": true}

func prune(dataDir string) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	var doomed []string
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		left, right, _ := strings.Cut(scan.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 5 || len(r) < 1 {
			continue
		}
		at := unescape(l[4])
		keep := at == "/" || at == "/proc" || at == "/dev" || onDisk[r[0]] || within(dataDir, at)
		if !keep {
			doomed = append(doomed, at)
		}
	}
	if err := scan.Err(); err != nil {
		return err
	}
	for i := len(doomed) - 1; i >= 0; i-- {
		// Already gone with its parent, or a parent that holds one we keep: both are fine.
		if err := unix.Unmount(doomed[i], unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", doomed[i], err)
		}
	}
	return nil
}

func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// devices are all that a sandbox has.
var devices = []struct {
	name         string
	major, minor uint32
}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}

var deviceLinks = []struct{ name, target string }{
	{"ptmx", "pts/ptmx"}, {"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"},
}

// makeDev makes a read-only /dev, attached nowhere. Each sandbox has its own: through shared device files they could
// watch each other.
func makeDev() (*os.File, error) {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fsfd)
	for name, value := range map[string]string{"mode": "0755", "size": "64k"} {
		if err := unix.FsconfigSetString(fsfd, name, value); err != nil {
			return nil, err
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, err
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	dev := os.NewFile(uintptr(fd), "dev")
	err = fillDev(fd)
	if err == nil {
		err = setAttr(dev, unix.MOUNT_ATTR_RDONLY, nil)
	}
	if err != nil {
		dev.Close()
		return nil, fmt.Errorf("make dev: %w", err)
	}
	return dev, nil
}

func fillDev(fd int) error {
	for _, d := range devices {
		if err := unix.Mknodat(fd, d.name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return err
		}
		if err := unix.Fchmodat(fd, d.name, 0o666, 0); err != nil { // whatever the umask is
			return err
		}
	}
	for _, dir := range []string{"shm", "pts"} {
		if err := unix.Mkdirat(fd, dir, 0o755); err != nil {
			return err
		}
	}
	for _, l := range deviceLinks {
		if err := unix.Symlinkat(l.target, fd, l.name); err != nil {
			return err
		}
	}
	return nil
}

// makeCove makes what every sandbox sees at /run/cove: the kernel's files, sudo, and what hides parts of /proc.
func makeCove(at, nameserver string) error {
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=64m"); err != nil {
		return err
	}
	err := fs.WalkDir(kernel.Files(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(at, "kernel", name)
		if d.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		data, err := fs.ReadFile(kernel.Files(), name)
		if err != nil {
			return err
		}
		return os.WriteFile(to, data, 0o644)
	})
	if err != nil {
		return err
	}
	agent, err := embedded.ReadFile("embedded/agent")
	if err != nil {
		return missing("agent", err)
	}
	for _, dir := range []string{"bin", "empty"} {
		if err := os.Mkdir(filepath.Join(at, dir), 0o755); err != nil {
			return err
		}
	}
	files := []struct {
		name string
		data []byte
		mode os.FileMode
	}{
		{"bin/sudo", agent, 0o755},
		{"delta.bpf", seccomp.Bytes(seccomp.Delta()), 0o644},
		{"hidden", nil, 0},
		{"resolv.conf", []byte(resolvConf(nameserver)), 0o644},
	}
	for _, f := range files {
		to := filepath.Join(at, f.name)
		if err := os.WriteFile(to, f.data, f.mode); err != nil {
			return err
		}
		if err := os.Chmod(to, f.mode); err != nil {
			return err
		}
	}
	return freezeMount(at)
}

// freezeMount makes a mount read-only. A child of ours that is just being started, such as the resolver, has a copy of
// whatever was open when it was forked, until its exec: it is waited for.
func freezeMount(at string) error {
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, "")
		if !errors.Is(err, unix.EBUSY) || time.Since(begun) > 10*time.Second {
			return err
		}
	}
}

func resolvConf(nameserver string) string {
	if nameserver == "" {
		return "# no network\n"
	}
	return "nameserver " + nameserver + "\noptions edns0 timeout:3 attempts:2\n"
}

func missing(name string, err error) error {
	return fmt.Errorf("this binary was built without the %s program; build it with make: %w", name, err)
}

// sealed puts an embedded program into a memory file that nobody can change, so that no sandbox can reach a host
// binary through /proc/self/exe.
//
// Were it executable and not readable, the kernel would guard whoever runs it even better: but then the zygote could
// not enter the sandbox by its PID 1 either.
func sealed(name string) (*os.File, error) {
	data, err := embedded.ReadFile("embedded/" + name)
	if err != nil {
		return nil, missing(name, err)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(data); err != nil {
		f.Close()
		return nil, err
	}
	seals := unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		f.Close()
		return nil, fmt.Errorf("seal %s: %w", name, err)
	}
	return f, nil
}

// EnterPrivateMounts gives the calling program a mount namespace of its own and the few capabilities of makerBound,
// and starts it again with them; it returns only on failure. Go has many threads, and namespaces and capabilities
// belong to one: hence the exec.
func EnterPrivateMounts(argv []string) error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("private mount namespace: %w", err)
	}
	for c := range uintptr(64) {
		if makerBound>>c&1 == 1 {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // past the last capability of this kernel
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return unix.Exec("/proc/self/exe", argv, os.Environ())
}

// cloneTree copies a mount by path, so that it can be given away.
func cloneTree(path string) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("clone mount %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// setAttr changes a mount that is not attached anywhere yet. What the host mounts below it later does not come along.
func setAttr(mount *os.File, set uint64, userns *os.File) error {
	attr := unix.MountAttr{Attr_set: set, Propagation: unix.MS_PRIVATE}
	if userns != nil {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(userns.Fd())
	}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("set attributes of %s: %w", mount.Name(), err)
	}
	return nil
}
