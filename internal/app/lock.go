package app

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// ErrLocked is a data directory that another server uses.
var ErrLocked = errors.New("the data directory is in use")

// lock takes a data directory for this process; the kernel lets go of it however the process ends.
func lock(dataDir string) (unlock func() error, err error) {
	name := filepath.Join(dataDir, "lock")
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: a Cove server%s already runs on %s; stop it, or give this one another --data-dir", ErrLocked, holder(f), dataDir)
		}
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	// The number is for people; the lock itself is the kernel's.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	}
	return f.Close, nil
}

func holder(f *os.File) string {
	b := make([]byte, 16)
	n, _ := f.ReadAt(b, 0)
	if _, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err != nil {
		return ""
	}
	return " (pid " + strings.TrimSpace(string(b[:n])) + ")"
}
