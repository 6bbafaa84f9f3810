package maker

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// storage is what the operator says of volumes and of paths of the host: a file that root alone can write, since the server,
// which asks for them, is not to decide which there are.
type storage struct {
	HostPaths     []hostPath `json:"host_paths,omitempty"`
	VolumeSize    int64      `json:"volume_size,omitempty"`     // bytes; zero: defaultVolume
	MaxVolumeSize int64      `json:"max_volume_size,omitempty"` // zero: VolumeSize, or defaultVolume if that is more
	Reserve       int64      `json:"reserve,omitempty"`         // bytes of the file system that stay free; zero: defaultReserve
	MaxTenantSize int64      `json:"max_tenant_size,omitempty"` // bytes that one tenant may have there; zero: half of it
}

// usual is the size of a volume that says none.
func (s storage) usual() int64 {
	return cmp.Or(s.VolumeSize, min(defaultVolume, cmp.Or(s.MaxVolumeSize, defaultVolume)))
}

// most is the largest size that a volume may say.
func (s storage) most() int64 { return cmp.Or(s.MaxVolumeSize, max(s.usual(), defaultVolume)) }

// StorageRules is what the operator's configuration says of storage: host paths as they are written there, "/data" or
// "/scratch:rw", the size of volumes that say none (zero: 10 GiB, or the largest if that is less) and the largest that others
// may say (zero: that size, or 10 GiB if that is more), and how many bytes of the file system stay free (zero: the
// default) and how many one tenant may have (zero: half of them).
type StorageRules struct {
	HostPaths                 []string
	VolumeSize, MaxVolumeSize int64
	Reserve, MaxTenantSize    int64
}

func (r StorageRules) check() error {
	if err := sandbox.CheckVolumeSize(r.VolumeSize); err != nil {
		return fmt.Errorf("storage.volume_size: %w", err)
	}
	if err := sandbox.CheckVolumeSize(r.MaxVolumeSize); err != nil {
		return fmt.Errorf("storage.max_volume_size: %w", err)
	}
	if r.Reserve < 0 || r.MaxTenantSize < 0 {
		return fault.New(fault.Invalid, "storage.reserve and storage.max_tenant_size cannot be negative")
	}
	s := storage{VolumeSize: r.VolumeSize, MaxVolumeSize: r.MaxVolumeSize}
	if s.usual() > s.most() {
		return fault.New(fault.Invalid, "storage.max_volume_size: %d bytes are less than what a volume has that says nothing (%d, by storage.volume_size)", s.most(), s.usual())
	}
	return nil
}

// hostPath is a directory of the host that sandboxes may have, with what is below it.
type hostPath struct {
	Name  string `json:"name"` // as the operator calls it, and whoever asks for it
	Path  string `json:"path"` // the same, without links
	Write bool   `json:"write,omitempty"`
}

func storageFile(dataDir string) string { return filepath.Join(dataDir, "maker", "host_paths.json") }

// WriteStorage keeps the operator's rules for the maker.
func WriteStorage(dataDir string, rules StorageRules) error {
	if err := rules.check(); err != nil {
		return err
	}
	s := storage{VolumeSize: rules.VolumeSize, MaxVolumeSize: rules.MaxVolumeSize, Reserve: rules.Reserve, MaxTenantSize: rules.MaxTenantSize}
	for _, text := range rules.HostPaths {
		p, err := parseHostPath(text, dataDir)
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "storage.host_paths: %q: %v", text, err)
		}
		s.HostPaths = append(s.HostPaths, p)
	}
	return writeRules(dataDir, storageFile(dataDir), s)
}

// neverShown are parts of a host that are no files of anybody's.
var neverShown = []string{"/proc", "/sys", "/dev", "/run"}

func parseHostPath(text, dataDir string) (hostPath, error) {
	path, mode, _ := strings.Cut(text, ":")
	if mode != "" && mode != "rw" && mode != "ro" {
		return hostPath{}, errors.New("write a path, or a path and :rw")
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
		return hostPath{}, errors.New("it must be a plain absolute path below /")
	}
	// Links above it are the operator's. From then on none is followed.
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return hostPath{}, err
	}
	if info, err := os.Stat(real); err != nil || !info.IsDir() {
		return hostPath{}, errors.New("it is not a directory")
	}
	if data, err := filepath.EvalSymlinks(dataDir); err == nil {
		dataDir = data
	}
	if real == "/" || within(dataDir, real) || within(real, dataDir) {
		return hostPath{}, errors.New("sandboxes must not see the server's own data directory")
	}
	for _, own := range neverShown {
		if within(real, own) {
			return hostPath{}, fmt.Errorf("%s is the host's own", own)
		}
	}
	return hostPath{path, real, mode == "rw"}, nil
}

// readStorage reads what the operator allows now; a file that is not root's alone is refused, and none allows nothing.
func readStorage(dataDir string) (storage, error) {
	var s storage
	return s, readRules(storageFile(dataDir), "host paths", &s)
}

// find is the innermost allowed directory that a path lies in, and the rest of the way.
func (s storage) find(path string) (best hostPath, rest string, ok bool) {
	for _, p := range s.HostPaths {
		if within(path, p.Name) && len(p.Name) > len(best.Name) {
			best, ok = p, true
		}
	}
	rest, _ = filepath.Rel(best.Name, path)
	return best, rest, ok
}

// showHostPath opens a path of the host that the operator allows.
func (m *Maker) showHostPath(s *shell, t *template.Template, asked sandbox.Mount) (*os.File, error) {
	allowed, err := readStorage(m.cfg.DataDir)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(asked.Source, asked.SubPath)
	if !within(path, asked.Source) {
		return nil, fault.New(fault.Invalid, "the sub path %q leads out of %s", asked.SubPath, asked.Source)
	}
	from, rest, ok := allowed.find(path)
	if !ok {
		return nil, fault.New(fault.Denied, "the host path %s is not one that this server's operator allows (storage.host_paths)", asked.Source)
	}
	if !asked.ReadOnly && !from.Write {
		return nil, fault.New(fault.Denied, "the host path %s is allowed for reading only: ask for it read-only, or have the operator allow %s:rw", asked.Source, from.Name)
	}
	if m.cfg.Host == nil {
		return nil, fault.New(fault.Unsupported, "this maker cannot see the host's paths")
	}
	var mount *os.File
	var st unix.Stat_t
	err = onThrowawayThread(func() (err error) {
		mount, err = m.cloneHostDir(from.Path, rest, &st)
		return err
	})
	if err == nil {
		if asked.ReadOnly {
			err = m.showToRead(mount, path, st)
		} else {
			err = m.showToWrite(mount, path, st, s, t)
		}
	}
	if err != nil && mount != nil {
		mount.Close()
	}
	if err != nil {
		return nil, whyNotShown(err, path)
	}
	return mount, nil
}

// cloneHostDir finds a directory as the operator sees it, in the mount namespace that the maker was started in, and copies its
// mount. It enters that namespace: the thread is not of use for anything else afterwards.
func (m *Maker) cloneHostDir(root, rest string, st *unix.Stat_t) (*os.File, error) {
	if err := m.enterHost(); err != nil {
		return nil, err
	}
	// A sandbox may have made a link of what is above the directory, if that is a host path too.
	fd, err := unix.Openat2(unix.AT_FDCWD, root, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: root, Err: err}
	}
	allowed := os.NewFile(uintptr(fd), root)
	defer allowed.Close()
	dir, err := beneath(allowed, rest)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err := unix.Fstat(int(dir.Fd()), st); err != nil {
		return nil, err
	}
	if err := plainFiles(dir); err != nil {
		return nil, err
	}
	return cloneDir(dir)
}

// enterHost brings the calling thread to where the operator sees files.
func (m *Maker) enterHost() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(int(m.cfg.Host.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the host's mounts: %w", err)
	}
	return nil
}

// specials are file systems that are the kernel's own words, and no files of anybody's, wherever they are mounted.
var specials = map[int64]bool{
	unix.PROC_SUPER_MAGIC: true, unix.SYSFS_MAGIC: true, unix.CGROUP_SUPER_MAGIC: true, unix.CGROUP2_SUPER_MAGIC: true,
	unix.DEBUGFS_MAGIC: true, unix.TRACEFS_MAGIC: true, unix.SECURITYFS_MAGIC: true, unix.BPF_FS_MAGIC: true,
	unix.BINFMTFS_MAGIC: true, unix.DEVPTS_SUPER_MAGIC: true, unix.NSFS_MAGIC: true,
}

func plainFiles(dir *os.File) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &fs); err != nil {
		return err
	}
	if specials[int64(fs.Type)] {
		return fault.New(fault.Denied, "what is mounted there is the host's own, and no sandbox may have it")
	}
	return nil
}

const safely = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// showToRead maps nobody: a sandbox sees what everybody on the host may read, and can neither write to a pipe nor connect to a
// socket there, since the kernel writes to no file whose owner it cannot tell.
func (m *Maker) showToRead(mount *os.File, path string, st unix.Stat_t) error {
	if st.Mode&0o005 != 0o005 {
		return fault.New(fault.Denied, "%s is not for everybody on the server to read, and a sandbox is nobody there: chmod o+rx, or have the operator allow it with :rw", path)
	}
	return m.unowned(mount, safely|unix.MOUNT_ATTR_RDONLY)
}

// unowned shows files as nobody's.
func (m *Maker) unowned(mount *os.File, set uint64) error {
	userns, err := m.strangers()
	if err != nil {
		return err
	}
	err = setAttr(mount, set, userns)
	if errors.Is(err, unix.EINVAL) { // a file system that knows no mapping, such as NFS: ids are still nobody's in the sandbox
		err = setAttr(mount, set, nil)
	}
	return err
}

// strangers is a user namespace that maps an id that no file has. It stays: all mounts that are only read have the same.
func (m *Maker) strangers() (*os.File, error) {
	m.unmappedMu.Lock()
	defer m.unmappedMu.Unlock()
	if m.unmapped != nil {
		return m.unmapped, nil
	}
	const nobodysFile = "4294967294 65534 1\n"
	var err error
	m.unmapped, err = m.newUserns(nobodysFile, nobodysFile)
	return m.unmapped, err
}

// showToWrite makes the owner of a directory and the sandbox's default user one, for this directory and below. Nobody else is
// mapped, so that nothing of anybody else's can be written there, or be made.
func (m *Maker) showToWrite(mount *os.File, path string, st unix.Stat_t, s *shell, t *template.Template) error {
	if st.Uid == 0 || st.Gid == 0 {
		return fault.New(fault.Denied, "%s belongs to root, or to root's group, and no sandbox may write in their name: chown it on the server to the user and group whose files these shall be", path)
	}
	who, ok := commandAccount(t)
	if !ok {
		return fault.New(fault.Unsupported, "a host path can be written to by a user that is given as a number; the image's is %q", t.User)
	}
	base := uidBase(s.slot)
	userns, err := m.newUserns(fmt.Sprintf("%d %d 1\n", st.Uid, base+who.uid), fmt.Sprintf("%d %d 1\n", st.Gid, base+who.gid))
	if err != nil {
		return err
	}
	defer userns.Close()
	err = setAttr(mount, safely, userns)
	if errors.Is(err, unix.EINVAL) {
		return fault.Wrap(fault.Unsupported, err, "the file system of %s cannot show files under other ids, so no sandbox can write there: ask for it read-only", path)
	}
	return err
}

// whyNotShown explains a path of the host that could not be opened.
func whyNotShown(err error, path string) error {
	switch {
	case fault.KindOf(err) != fault.Internal:
		return err
	case errors.Is(err, unix.ENOENT):
		return fault.Wrap(fault.NotFound, err, "the host path %s is not there", path)
	case errors.Is(err, unix.ENOTDIR):
		return fault.Wrap(fault.Invalid, err, "the host path %s is not a directory", path)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return fault.Wrap(fault.Denied, err, "a link lies on the way to the host path %s, and none is followed", path)
	}
	return err
}
