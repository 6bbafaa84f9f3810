package native

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/covehq/cove/internal/fault"
)

// Tag names what belongs to one data directory on this host: three letters of its path's hash.
func Tag(dataDir string) string {
	sum := sha256.Sum256([]byte(dataDir))
	return hex.EncodeToString(sum[:])[:3]
}

// LaunchSelf starts this program's own maker command as root, detached, and waits until it is ready. It outlives its
// starter: the sandboxes are its.
func LaunchSelf(extra ...string) func(ctx context.Context, dataDir string) error {
	return func(ctx context.Context, dataDir string) error {
		argv := append([]string{"/proc/self/exe", "maker", "--data-dir", dataDir}, extra...)
		if os.Geteuid() != 0 {
			return fault.New(fault.Denied,
				"sandboxes are made by a small root process, the maker; start it once with: sudo %s maker --data-dir %s --server-uid %d", os.Args[0], dataDir, os.Getuid())
		}
		if err := os.MkdirAll(filepath.Join(dataDir, "maker"), 0o755); err != nil {
			return err
		}
		logFile, err := os.OpenFile(filepath.Join(dataDir, "maker", "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		defer logFile.Close()
		ready, theirs, err := os.Pipe()
		if err != nil {
			return err
		}
		defer ready.Close()
		cmd := exec.Command(argv[0], append(argv[1:], "--ready-fd", "3")...) //nolint:gosec // our own program
		cmd.Stdout, cmd.Stderr = logFile, logFile
		cmd.ExtraFiles = []*os.File{theirs}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
		err = cmd.Start()
		theirs.Close()
		if err != nil {
			return err
		}
		defer cmd.Process.Release() //nolint:errcheck // nothing to do about it
		return awaitReady(ctx, ready, logFile.Name())
	}
}

// awaitReady reads the maker's verdict: "ok" or the error it ended with.
func awaitReady(ctx context.Context, ready *os.File, log string) error {
	defer context.AfterFunc(ctx, func() { ready.Close() })()
	buf := make([]byte, 4096)
	n, err := ready.Read(buf)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if string(buf[:n]) == "ok" {
		return nil
	}
	if n > 0 {
		return errors.New(string(buf[:n]))
	}
	return fmt.Errorf("the maker ended at once; see %s: %w", log, err)
}
