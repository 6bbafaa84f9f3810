package maker_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func disks(t testing.TB, reflink bool) (maker.Disks, string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("disks are mounted, which needs root")
	}
	dir, err := os.MkdirTemp("", "cove-disks")
	if err != nil {
		t.Fatal(err)
	}
	return disksIn(t, dir, reflink), dir
}

func disksIn(t testing.TB, dir string, reflink bool) maker.Disks {
	t.Helper()
	var d maker.Disks
	t.Cleanup(func() {
		d.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
		// The last close of a mount ends its device a moment later.
		for deadline := time.Now().Add(2 * time.Minute); loopsIn(t, dir) > 0; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d loop devices are left", loopsIn(t, dir))
			}
		}
	})
	var err error
	if d, err = maker.OpenDisks(filepath.Join(dir, "disks"), reflink); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestLargeDiskIsCopiedByReference on a file system that can.
func TestLargeDiskIsCopiedByReference(t *testing.T) {
	for _, argv := range [][]string{{"mkfs.xfs", "-q"}, {"mkfs.btrfs", "-q"}} {
		t.Run(argv[0], func(t *testing.T) {
			if _, err := exec.LookPath(argv[0]); err != nil {
				t.Skip(err)
			}
			dir, free := mounted(t, 1<<30, argv...)
			d := disksIn(t, filepath.Join(dir, "data"), true)
			k := must[maker.Disk](t)(d.Make(2<<30, sandbox.StorageVolatile, maker.Frozen{}))
			defer k.Close()
			data := noise(t, 200<<20)
			if err := os.WriteFile(filepath.Join(k.At, "0/u/file"), data, 0o600); err != nil {
				t.Fatal(err)
			}
			frozen := must[maker.Frozen](t)(k.Freeze())
			defer frozen.Close()
			before := free()
			for range 5 { // would not fit
				child := must[maker.Disk](t)(d.Make(2<<30, sandbox.StorageVolatile, frozen))
				t.Cleanup(func() { child.Close() })
				if child.Below() != 0 {
					t.Error("a layer was stacked although a copy costs nothing")
				}
				if got, err := os.ReadFile(filepath.Join(child.At, "0/u/file")); err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d bytes of %d: %v", len(got), len(data), err)
				}
			}
			if taken := before - free(); taken > 50<<20 {
				t.Errorf("five copies took %d bytes", taken)
			}
		})
	}
}

// mounted is a file system of its own, and what is free in it.
func mounted(t *testing.T, size int64, mkfs ...string) (dir string, free func() int64) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-mounted")
	if err != nil {
		t.Fatal(err)
	}
	image := dir + ".img"
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
		os.Remove(dir)
		os.Remove(image)
	})
	if err := os.Truncate(image, size); err != nil {
		t.Fatal(err)
	}
	for _, argv := range [][]string{append(mkfs, image), {"mount", "-o", "loop", image, dir}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	return dir, func() int64 {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bfree) * st.Bsize
	}
}

func loopsIn(t testing.TB, dir string) int {
	t.Helper()
	names, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, name := range names {
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), dir+"/") {
			n++
		}
	}
	return n
}

func noise(t testing.TB, size int) []byte {
	t.Helper()
	data := make([]byte, size)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	return data
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestDiskIsCopied(t *testing.T) {
	for _, storage := range []sandbox.Storage{sandbox.StorageVolatile, sandbox.StorageDurable} {
		for _, size := range []int{0, 1 << 20, maker.SmallLayer + 8<<20} {
			t.Run(fmt.Sprintf("%s, %d bytes", storage, size), func(t *testing.T) {
				d, _ := disks(t, false)
				parent := must[maker.Disk](t)(d.Make(256<<20, storage, maker.Frozen{}))
				defer parent.Close()
				data := noise(t, size)
				file := filepath.Join(parent.At, "0/u/file")
				if err := os.WriteFile(file, data, 0o600); err != nil {
					t.Fatal(err)
				}
				// As an overlay that promises nothing after a crash leaves it.
				mark(t, parent)
				frozen := must[maker.Frozen](t)(parent.Freeze())
				if err := os.WriteFile(file, []byte("later"), 0o600); err != nil {
					t.Fatalf("the disk is not thawed: %v", err)
				}
				first := must[maker.Disk](t)(d.Make(256<<20, storage, frozen))
				defer first.Close()
				second := must[maker.Disk](t)(d.Make(256<<20, storage, frozen))
				defer second.Close()
				check := func(at string) {
					t.Helper()
					if got, err := os.ReadFile(filepath.Join(at, "0/u/file")); err != nil || !bytes.Equal(got, data) {
						t.Errorf("%d bytes of %d: %v", len(got), len(data), err)
					}
				}
				if size <= maker.SmallLayer {
					if first.Below() != 0 {
						t.Errorf("a small layer is shared")
					}
					for _, child := range []maker.Disk{first, second} {
						check(child.At)
						unmarked(t, child)
					}
					if err := os.WriteFile(filepath.Join(first.At, "0/u/file"), []byte("mine"), 0o600); err != nil {
						t.Fatal(err)
					}
					check(second.At)
					frozen.Close()
					return
				}
				if first.Below() != 1 || second.Below() != 1 || first.Bytes() > 1<<20 {
					t.Errorf("a large layer was copied: %d layers, %d bytes", first.Below(), first.Bytes())
				}
				// A branch of a branch has both.
				grown := must[maker.Frozen](t)(first.Freeze())
				third := must[maker.Disk](t)(d.Make(256<<20, storage, grown))
				grown.Close()
				if third.Below() != 1 {
					t.Errorf("the branch of a branch has %d layers", third.Below())
				}
				third.Close()
				one, closeOne := show(t, frozen)
				defer closeOne()
				two, closeTwo := show(t, frozen)
				defer closeTwo()
				check(one)
				frozen.Close() // the others still have it
				check(two)
				if err := os.WriteFile(filepath.Join(one, "0/u/more"), nil, 0o600); !errors.Is(err, unix.EROFS) {
					t.Errorf("a frozen disk takes writes: %v", err)
				}
			})
		}
	}
}

// TestCopiesOfCopiesAreUnmarked has each be used by an overlay that leaves its mark: the next is not refused, although there
// are only two work directories.
func TestCopiesOfCopiesAreUnmarked(t *testing.T) {
	d, _ := disks(t, false)
	at := must[maker.Disk](t)(d.Make(256<<20, sandbox.StorageVolatile, maker.Frozen{}))
	for range 4 {
		mark(t, at)
		frozen := must[maker.Frozen](t)(at.Freeze())
		at.Close()
		at = must[maker.Disk](t)(d.Make(256<<20, sandbox.StorageVolatile, frozen))
		frozen.Close()
		unmarked(t, at)
	}
	at.Close()
}

// mark does what a volatile overlay does in its work directory.
func mark(t *testing.T, d maker.Disk) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(d.At, "0", d.Work(), "work/incompat/volatile"), 0o700); err != nil {
		t.Fatal(err)
	}
}

func unmarked(t *testing.T, d maker.Disk) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(d.At, "0", d.Work(), "work/incompat")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mark of a volatile overlay is left: %v", err)
	}
}

func show(t *testing.T, f maker.Frozen) (string, func()) {
	t.Helper()
	at, done, err := f.Show()
	if err != nil {
		t.Fatal(err)
	}
	return at, done
}

func TestDeletedFilesAreNotCopied(t *testing.T) {
	d, _ := disks(t, false)
	k := must[maker.Disk](t)(d.Make(512<<20, sandbox.StorageVolatile, maker.Frozen{}))
	defer k.Close()
	file := filepath.Join(k.At, "0/u/file")
	if err := os.WriteFile(file, noise(t, 128<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	large := must[maker.Frozen](t)(k.Freeze())
	large.Close()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	frozen := must[maker.Frozen](t)(k.Freeze())
	defer frozen.Close()
	info, err := frozen.Image().Stat()
	if err != nil {
		t.Fatal(err)
	}
	if blocks := info.Sys().(*syscall.Stat_t).Blocks * 512; blocks > maker.SmallLayer {
		t.Errorf("the copy of an empty disk has %d bytes", blocks)
	}
}

func TestTwoCopiesAtOnce(t *testing.T) {
	d, _ := disks(t, false)
	k := must[maker.Disk](t)(d.Make(256<<20, sandbox.StorageVolatile, maker.Frozen{}))
	defer k.Close()
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() {
			f, err := k.Freeze()
			if err == nil {
				f.Close()
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestNoRoomForACopy(t *testing.T) {
	d, dir := disks(t, false)
	k := must[maker.Disk](t)(d.Make(256<<20, sandbox.StorageVolatile, maker.Frozen{}))
	defer k.Close()
	if err := os.WriteFile(filepath.Join(k.At, "0/u/file"), noise(t, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	// The copy goes to a file system that is too small for it.
	small := filepath.Join(dir, "disks")
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	_, err := k.Freeze()
	if uerr := unix.Unmount(small, 0); uerr != nil {
		t.Errorf("something holds the file system of the copy: %v", uerr)
	}
	if !fault.Is(err, fault.DiskFull) {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(filepath.Join(k.At, "0/u/file"), []byte("goes on"), 0o600); err != nil {
		t.Error(err)
	}
}

// TestSlowDisk has one size whose file system takes as long as the test likes to make.
func TestSlowDisk(t *testing.T) {
	const slow, other = 96 << 20, 64 << 20
	d, dir := disks(t, false)
	real := must[string](t)(exec.LookPath("mkfs.ext4"))
	gate, calls := filepath.Join(dir, "gate"), filepath.Join(dir, "calls")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	// The gate says how mkfs ends.
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *master-%d-*) echo >> %s; read verdict < %s; [ $verdict = good ] || exit 1;; esac\nexec %s \"$@\"\n", slow, calls, gate, real)
	if err := os.WriteFile(filepath.Join(dir, "mkfs.ext4"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	// One asks and fails; whoever asks later tries again, once for all.
	for round, c := range []struct {
		verdict string
		callers int
	}{{"bad", 1}, {"good", 3}} {
		results := make(chan error, c.callers)
		for range c.callers {
			go func() {
				k, err := d.Make(slow, sandbox.StorageVolatile, maker.Frozen{})
				if err == nil {
					k.Close()
				}
				results <- err
			}()
		}
		for bytes.Count(read(calls), []byte("\n")) <= round {
			time.Sleep(time.Millisecond) // until mkfs has begun
		}
		k := must[maker.Disk](t)(d.Make(other, sandbox.StorageVolatile, maker.Frozen{}))
		k.Close()
		if len(results) != 0 {
			t.Errorf("the slow one is there already: %v", <-results)
		}
		if err := os.WriteFile(gate, []byte(c.verdict+"\n"), 0); err != nil {
			t.Fatal(err)
		}
		for range c.callers {
			if err := <-results; (err == nil) != (c.verdict == "good") {
				t.Errorf("mkfs was %s, a caller got %v", c.verdict, err)
			}
		}
	}
	if n := bytes.Count(read(calls), []byte("\n")); n != 2 {
		t.Errorf("mkfs was called %d times", n)
	}
}

func read(path string) []byte {
	data, _ := os.ReadFile(path)
	return data
}

func BenchmarkFreezeDisk(b *testing.B) {
	for _, size := range []int{64 << 10, 4 << 20, 24 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			d, _ := disks(b, false)
			k := must[maker.Disk](b)(d.Make(2<<30, sandbox.StorageVolatile, maker.Frozen{}))
			defer k.Close()
			data := noise(b, size)
			var freeze, make time.Duration
			for i := 0; b.Loop(); i++ {
				if err := os.WriteFile(filepath.Join(k.At, "0/u/file"), data, 0o600); err != nil {
					b.Fatal(err)
				}
				begin := time.Now()
				f := must[maker.Frozen](b)(k.Freeze())
				middle := time.Now()
				c := must[maker.Disk](b)(d.Make(2<<30, sandbox.StorageVolatile, f))
				freeze, make = freeze+middle.Sub(begin), make+time.Since(middle)
				c.Close()
				f.Close()
			}
			b.ReportMetric(float64(freeze.Microseconds())/float64(b.N)/1000, "freeze-ms")
			b.ReportMetric(float64(make.Microseconds())/float64(b.N)/1000, "make-ms")
		})
	}
}
