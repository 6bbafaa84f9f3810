package app_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/driver/native/hostcheck"
	"github.com/covehq/cove/internal/fault"
)

// TestDisk_FewInodes: all bytes of a file system are free, and hardly an inode.
func TestDisk_FewInodes(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m,nr_inodes=500"); err != nil {
		t.Skipf("no small disk to be had: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	if err := os.Mkdir(filepath.Join(dir, "server"), 0o700); err != nil {
		t.Fatal(err)
	}
	cfg := config.Config{DataDir: dir, Driver: config.DriverNative}
	cfg.Storage.Reserve = 1
	if err := errors.Join(app.SpaceCheck(cfg).Allow(1), app.CheckReserve(cfg)); err != nil {
		t.Fatalf("with free inodes: %v", err)
	}
	for i := range 495 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := app.SpaceCheck(cfg).Allow(1); !fault.Is(err, fault.DiskFull) || !strings.Contains(fault.Message(err), "full of files") {
		t.Errorf("the server's parts may write: %v", err)
	}
	if err := app.CheckReserve(cfg); err == nil || !strings.Contains(err.Error(), "inodes of 500 are free") {
		t.Errorf("/readyz says %v", err)
	}
	var said []string
	for _, f := range hostcheck.Check(t.Context(), hostcheck.Options{DataDir: dir}) {
		if f.Name == "disk space" && f.Level == hostcheck.Warn {
			said = append(said, f.Detail)
		}
	}
	if all := strings.Join(said, "; "); !strings.Contains(all, "nothing new is started") {
		t.Errorf("cove doctor says %q", all)
	}
}
