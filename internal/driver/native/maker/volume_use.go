package maker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// showVolume opens a volume, or a directory of it, for a shell, which has it from then on.
func (m *Maker) showVolume(ctx context.Context, s *shell, asked sandbox.Mount, userns *os.File) (*os.File, error) {
	path, err := m.volumes.path(s.form.mounts.tenant, asked.Source)
	if err != nil {
		return nil, err
	}
	u, done, err := m.volumes.hold(ctx, path)
	if err != nil {
		return nil, err
	}
	defer done()
	if asked.Create {
		if err := m.makeVolume(ctx, u, 0); err != nil && !fault.Is(err, fault.Conflict) {
			return nil, err
		}
	}
	if err := u.use(ctx); err != nil {
		return nil, err
	}
	if slices.Contains(s.volumes, u) {
		u.leave() // it counts once
	} else {
		s.volumes = append(s.volumes, m.volumes.take(path))
	}
	mount, err := u.show(asked.SubPath)
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", asked.Source, err)
	}
	var set uint64
	if asked.ReadOnly {
		set = unix.MOUNT_ATTR_RDONLY
	}
	if err := setAttr(mount, safely|set, userns); err != nil {
		mount.Close()
		return nil, err
	}
	return mount, nil
}

// leaveVolumes gives up what a shell had; the last one's mount goes with its namespace.
func (s *shell) leaveVolumes() {
	for _, u := range s.volumes {
		u.turn <- struct{}{} // while somebody uses it nobody waits for anything in their turn
		u.leave()
		<-u.turn
		u.give()
	}
	s.volumes = nil
}

// use counts another user and mounts it for the first. It is for who has the turn, like leave and show.
func (u *volume) use(ctx context.Context) error {
	if u.users.Load() == 0 {
		u.cut.Store(false)
		if err := u.open(ctx); err != nil {
			return err
		}
	}
	if err := u.checkCut(); err != nil {
		if u.users.Load() == 0 {
			u.unmount()
		}
		return err
	}
	u.users.Add(1)
	return nil
}

// checkCut refuses a volume that takes no more writes.
func (u *volume) checkCut() error {
	if u.cut.Load() {
		return fault.New(fault.Unavailable, "the volume was being filled when the server's disk was nearly full, and the sandboxes that have it are ending; try again")
	}
	return nil
}

func (u *volume) leave() {
	if u.users.Add(-1) == 0 {
		u.unmount()
	}
}

// unmount gives the device back when what was written is on the host's disk.
func (u *volume) unmount() {
	mount := u.mount
	u.mount = nil
	if root := u.root.Swap(nil); root != nil {
		root.Close()
	}
	u.all.closing.Go(func() { mount.Close() })
}

// open puts the image behind a device and mounts it; the space of what is deleted goes back to the host (discard).
//
// Two devices with one image would ruin it, and mounts of an earlier use, or of an earlier maker, may still be there: so the
// device holds a lock. It is one with the file that the device has open, and ends when the device lets go of it.
func (u *volume) open(ctx context.Context) error {
	image, err := os.OpenFile(u.path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return errNoVolume(strings.TrimSuffix(filepath.Base(u.path), volumeSuffix))
	}
	if err != nil {
		return err
	}
	defer image.Close()
	if err := lockImage(ctx, image); err != nil {
		return err
	}
	loop, err := attachLoop(image, u.all.mark, unix.LO_FLAGS_DIRECT_IO)
	if err != nil {
		return err
	}
	defer loop.Close()
	if u.mount, err = mountImage(loop.Name(), "discard"); err != nil {
		return err
	}
	root, err := openRoot(u.mount)
	if err != nil {
		u.mount.Close()
		return err
	}
	u.root.Store(root)
	u.device = loop.Name()
	return nil
}

// lockImage asks again and again: nobody tells when a namespace is gone.
func lockImage(ctx context.Context, image *os.File) error {
	for begun, wait := time.Now(), time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		err := unix.Flock(int(image.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Since(begun) > lockTime {
			return fault.Wrap(fault.Unavailable, err, "a sandbox that has ended still holds the volume; try again")
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// show mounts the volume once more, or only a directory of it, attached nowhere.
func (u *volume) show(sub string) (mount *os.File, err error) {
	if sub == "" {
		return mountImage(u.device, "discard")
	}
	err = onThrowawayThread(func() error {
		mount, err = u.showDir(sub)
		return err
	})
	return mount, err
}

// showDir gives a mount of one directory, which is made where it is missing. Before Linux 6.15 only what is attached can be
// cloned: that happens in a mount namespace that ends with the thread.
func (u *volume) showDir(sub string) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, err
	}
	unix.Umask(0) // of this thread: what is made is for everybody in the sandbox
	whole, err := mountImage(u.device, "discard")
	if err != nil {
		return nil, err
	}
	defer whole.Close()
	if err := unix.MoveMount(int(whole.Fd()), "", unix.AT_FDCWD, base+"/s", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	at, err := openRoot(whole)
	if err != nil {
		return nil, err
	}
	defer func() { at.Close() }()
	for name := range strings.SplitSeq(sub, "/") {
		next, err := stepInto(at, name)
		if err != nil {
			return nil, err
		}
		at.Close()
		at = next
	}
	return cloneDir(at)
}

// stepInto opens a directory of a volume by one name, and makes it if there is nothing of that name.
func stepInto(dir *os.File, name string) (*os.File, error) {
	err := unix.Mkdirat(int(dir.Fd()), name, 0o777)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fullHost(err)
	}
	next, err := beneath(dir, name)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return nil, fault.Wrap(fault.Invalid, err, "%q in the volume is a link or a file; the sub path must be a directory", name)
	}
	return next, err
}
