package template

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
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

// bytesOnDisk is what a file takes there; one that is not there takes nothing.
func bytesOnDisk(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
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
func groupOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Gid) }

// syncDir puts everything below dir on disk, so that a rename after it never names half a layer.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// imageSeal is over the blocks of an image that hold anything, and where they lie: a hole is as good as zeros.
func imageSeal(ctx context.Context, name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%d\n", info.Size())
	block, empty := make([]byte, 64<<10), make([]byte, 64<<10)
	for at := int64(0); ; at += int64(len(block)) {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return hex.EncodeToString(sum.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
		at = data / int64(len(block)) * int64(len(block))
		n, err := f.ReadAt(block, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if !bytes.Equal(block[:n], empty[:n]) {
			fmt.Fprintf(sum, "%d %d\n", at, n)
			sum.Write(block[:n])
		}
	}
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

// lockedByOther tells whether a process holds a record lock on a file, as fcntl takes it.
func lockedByOther(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	return unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock) == nil && lock.Type != unix.F_UNLCK
}
