package maker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// volumes are disks of tenants that outlive sandboxes: file systems in image files, like a sandbox's own disk but with a name
// and a journal. One is mounted while somebody has it, and every sandbox sees that mount with its own ids.
type volumes struct {
	dir    string
	mark   string        // on their loop devices
	making chan struct{} // full while somebody makes one: they are counted, and the host's disk is not for many at once

	closing sync.WaitGroup // mounts that are being closed: what was written goes to the host's disk first

	mu   sync.Mutex
	used map[string]*volume // by path
}

// volume is one that somebody uses or is about to.
type volume struct {
	all  *volumes
	path string
	refs int // guarded by all.mu; the last one forgets it

	users    atomic.Int32  // shells that have it; changed by who has the turn, read by everybody
	turn     chan struct{} // full while somebody has it: what follows is theirs
	device   string
	mount    *os.File // keeps the device
	root     atomic.Pointer[os.File]
	cut      atomic.Bool  // it takes no more writes until it is mounted anew
	question syncQuestion // whether it has failed
}

const (
	defaultVolume = 10 << 30
	maxVolumes    = 100 // of one tenant
	volumeSuffix  = ".img"
	halfMade      = ".half-"
)

// lockTime is how long a volume is waited for that mounts of an earlier time still hold: they go with the last process in them.
const lockTime = 15 * time.Second

// makeTime is how long it may take to make one, others before it included.
const makeTime = 2 * time.Minute

func openVolumes(dir, mark string) (*volumes, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := rootsOwn(dir); err != nil {
		return nil, err
	}
	left, err := filepath.Glob(filepath.Join(dir, "*", halfMade+"*"))
	for _, name := range left {
		err = errors.Join(err, os.Remove(name))
	}
	return &volumes{dir: dir, mark: mark, making: make(chan struct{}, 1), used: map[string]*volume{}}, err
}

// tenantDir holds a tenant's volumes. What a tenant is called may be no name for a file.
func (v *volumes) tenantDir(tenant string) string {
	sum := sha256.Sum256([]byte(tenant))
	return filepath.Join(v.dir, hex.EncodeToString(sum[:16]))
}

func (v *volumes) path(tenant, name string) (string, error) {
	if err := sandbox.CheckVolumeName(name); err != nil {
		return "", err
	}
	return filepath.Join(v.tenantDir(tenant), name+volumeSuffix), nil
}

// take gives a volume's entry, which the caller gives back.
func (v *volumes) take(path string) *volume {
	v.mu.Lock()
	defer v.mu.Unlock()
	u := v.used[path]
	if u == nil {
		u = &volume{all: v, path: path, turn: make(chan struct{}, 1)}
		v.used[path] = u
	}
	u.refs++
	return u
}

func (u *volume) give() {
	u.all.mu.Lock()
	defer u.all.mu.Unlock()
	if u.refs--; u.refs == 0 {
		delete(u.all.used, u.path)
	}
}

// hold takes a volume and waits for one's turn at it; done gives both back.
func (v *volumes) hold(ctx context.Context, path string) (u *volume, done func(), err error) {
	u = v.take(path)
	select {
	case u.turn <- struct{}{}:
		return u, func() { <-u.turn; u.give() }, nil
	case <-ctx.Done():
		u.give()
		return nil, nil, context.Cause(ctx)
	}
}

// users of a volume, whoever has the turn at it.
func (v *volumes) users(path string) int {
	v.mu.Lock()
	defer v.mu.Unlock()
	if u := v.used[path]; u != nil {
		return int(u.users.Load())
	}
	return 0
}

// Volumes are those of a tenant, by name.
func (m *Maker) Volumes(tenant string) ([]sandbox.Volume, error) {
	entries, err := os.ReadDir(m.volumes.tenantDir(tenant))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	all := []sandbox.Volume{}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), volumeSuffix)
		if !ok || sandbox.CheckVolumeName(name) != nil {
			continue
		}
		if one, err := m.volumes.describe(tenant, name); err == nil { // else it was removed since
			all = append(all, one)
		}
	}
	return all, nil
}

func (v *volumes) describe(tenant, name string) (sandbox.Volume, error) {
	path, err := v.path(tenant, name)
	if err != nil {
		return sandbox.Volume{}, err
	}
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st); err != nil {
		return sandbox.Volume{}, err
	}
	made := sandbox.Volume{Name: name, Bytes: int64(st.Size), Used: int64(st.Blocks) * 512}
	if st.Mask&unix.STATX_BTIME != 0 {
		made.Created = time.Unix(st.Btime.Sec, int64(st.Btime.Nsec))
	}
	made.InUse = v.users(path)
	return made, nil
}

// MakeVolume makes an empty one.
func (m *Maker) MakeVolume(ctx context.Context, tenant string, want sandbox.Volume) (sandbox.Volume, error) {
	if err := sandbox.CheckVolumeSize(want.Bytes); err != nil {
		return sandbox.Volume{}, err
	}
	path, err := m.volumes.path(tenant, want.Name)
	if err != nil {
		return sandbox.Volume{}, err
	}
	if err := m.checkTenant(tenant); err != nil {
		return sandbox.Volume{}, err
	}
	u, done, err := m.volumes.hold(ctx, path)
	if err != nil {
		return sandbox.Volume{}, err
	}
	defer done()
	if err := m.makeVolume(ctx, u, want.Bytes); err != nil {
		return sandbox.Volume{}, err
	}
	m.log.Info("volume made", "tenant", tenant, "volume", want.Name)
	return m.volumes.describe(tenant, want.Name)
}

// makeVolume is for who has the turn at it.
func (m *Maker) makeVolume(ctx context.Context, u *volume, size int64) error {
	name := strings.TrimSuffix(filepath.Base(u.path), volumeSuffix)
	if _, err := os.Lstat(u.path); err == nil {
		return fault.New(fault.Conflict, "there is a volume %s already", name)
	}
	s, err := readStorage(m.cfg.DataDir)
	if err != nil {
		return err
	}
	if most := s.most(); size > most {
		return fault.New(fault.Denied, "a volume of %d bytes is larger than this server's operator allows (%d, by storage.max_volume_size)", size, most)
	}
	if size == 0 {
		size = s.usual()
	}
	if err := m.space.check(0); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, makeTime, fault.New(fault.Timeout, "the volume %s could not be made within %v", name, makeTime))
	defer cancel()
	select {
	case u.all.making <- struct{}{}:
		defer func() { <-u.all.making }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return u.make(ctx, size)
}

// make makes the volume's file, for who makes the only one now.
func (u *volume) make(ctx context.Context, size int64) error {
	if err := os.MkdirAll(filepath.Dir(u.path), 0o700); err != nil {
		return err
	}
	there, err := os.ReadDir(filepath.Dir(u.path))
	if err != nil {
		return err
	}
	if len(there) >= maxVolumes {
		return fault.New(fault.Exhausted, "there are %d volumes, and no more are possible: remove one that is not needed", len(there))
	}
	f, err := os.CreateTemp(filepath.Dir(u.path), halfMade+"*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := u.all.format(ctx, f, size); err != nil {
		return fmt.Errorf("make volume: %w", fullHost(err))
	}
	return os.Rename(f.Name(), u.path)
}

// format makes an empty file system in which everybody in a sandbox may write.
func (v *volumes) format(ctx context.Context, f *os.File, size int64) error {
	if err := f.Truncate(size); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-i", "16384", "-O", "^resize_inode,has_journal",
		"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0", f.Name()).CombinedOutput()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("mkfs.ext4 (package e2fsprogs): %w: %s", err, out)
	}
	loop, err := attachLoop(f, v.mark, 0)
	if err != nil {
		return err
	}
	defer loop.Close()
	mount, err := mountImage(loop.Name())
	if err != nil {
		return err
	}
	defer mount.Close()
	root, err := openRoot(mount)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Chmod(0o777); err != nil {
		return err
	}
	_ = unix.Unlinkat(int(root.Fd()), "lost+found", unix.AT_REMOVEDIR) // its mode would puzzle whoever lists the volume
	return unix.Syncfs(int(root.Fd()))
}

// fullHost says in plain words that the host's disk is full.
func fullHost(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fault.Wrap(fault.DiskFull, err, "the server's disk is full")
	}
	return err
}

// RemoveVolume removes one that nobody uses, with everything in it.
func (m *Maker) RemoveVolume(ctx context.Context, tenant, name string) error {
	path, err := m.volumes.path(tenant, name)
	if err != nil {
		return err
	}
	u, done, err := m.volumes.hold(ctx, path)
	if err != nil {
		return err
	}
	defer done()
	if n := u.users.Load(); n > 0 {
		return fault.New(fault.Conflict, "the volume %s is in use; end the sandboxes that have it first (%d)", name, n)
	}
	if err := os.Remove(path); errors.Is(err, os.ErrNotExist) {
		return errNoVolume(name)
	} else if err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(path)) // when it was the last
	m.log.Info("volume removed", "tenant", tenant, "volume", name)
	return nil
}

func errNoVolume(name string) error { return fault.New(fault.NotFound, "volume %s is not there", name) }
