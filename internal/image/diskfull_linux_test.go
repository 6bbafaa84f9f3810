package image_test

import (
	"bytes"
	"os"
	"testing"

	"archive/tar"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
)

func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a file system of its own needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no mount: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.Dir = dir })
	t.Cleanup(w.Close)
	_, err := w.pull(acme, p.push(t, "big:v1", newImage(t, 1, 1<<20)))
	wantKind(t, err, fault.DiskFull, "disk is full")
	_, err = w.importAll("big", tarOf(t, tar.Header{Name: "f", Uname: string(bytes.Repeat([]byte("x"), 1<<20))}))
	wantKind(t, err, fault.DiskFull, "disk is full")
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	if st.Bfree < st.Blocks*9/10 {
		t.Fatalf("%d of %d blocks are free after that", st.Bfree, st.Blocks)
	}
	if _, err := w.pull(acme, p.push(t, "small:v1", newImage(t, 1, 1000))); err != nil {
		t.Fatalf("a small one: %v", err)
	}
}
