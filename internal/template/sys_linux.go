package template

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The driver mounts overlays with userxattr, so that the mark of an opaque directory is one that the layers'
// idmapped mounts let through.
const opaqueMark = "user.overlay.opaque"

func setOpaque(dir string) error {
	if err := unix.Setxattr(dir, opaqueMark, []byte("y"), 0); err != nil {
		return &fs.PathError{Op: "set " + opaqueMark, Path: dir, Err: err}
	}
	return nil
}

func isOpaque(dir string) bool {
	var value [1]byte
	n, err := unix.Lgetxattr(dir, opaqueMark, value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

func makeWhiteout(at string) error {
	if err := unix.Mknod(at, unix.S_IFCHR, 0); err != nil {
		return &fs.PathError{Op: "make whiteout", Path: at, Err: err}
	}
	return nil
}

func ownerOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }

// syncDir puts everything below dir on disk, so that a rename after it never names half a layer.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// lockFile waits for an exclusive lock that ends with this process at the latest.
func lockFile(ctx context.Context, name string, waiting func()) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for first := true; ; first = false {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, err
		}
		if first {
			waiting()
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}
