package native_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMaker_HostUnmounts checks that a maker does not keep a file system of the host's that was mounted when it began.
func TestMaker_HostUnmounts(t *testing.T) {
	world.open(t)
	dir := t.TempDir()
	run := func(name string, args ...string) string {
		t.Helper()
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	for _, program := range []string{"mkfs.ext4", "losetup"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	image, shared := filepath.Join(dir, "image"), filepath.Join(dir, "shared")
	disk := filepath.Join(shared, "disk")
	if err := os.MkdirAll(disk, 0o755); err != nil {
		t.Fatal(err)
	}
	run("truncate", "-s", "16M", image)
	run("mkfs.ext4", "-q", image)
	if err := unix.Mount(shared, shared, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(shared, unix.MNT_DETACH) })
	// Hosts with systemd have shared mounts; others tell nobody of an unmount.
	if err := unix.Mount("", shared, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	loop := run("losetup", "--find", "--show", image)
	t.Cleanup(func() { _ = exec.Command("losetup", "--detach", loop).Run() })
	if err := unix.Mount(loop, disk, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })

	m := newMaker(t)
	b := m.start(t)
	if err := unix.Unmount(disk, 0); err != nil {
		t.Fatal(err)
	}
	// The device is free when it can be opened for one alone, which a mounted one cannot.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		fd, err := unix.Open(loop, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is in use although the host has unmounted it: %v", loop, err)
		}
	}
	b.stop()
}
