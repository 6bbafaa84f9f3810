package unpack_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/unpack"
)

// corpus is a layer of this host's own files: libraries, scripts and documentation, as images have them.
func corpus(b *testing.B) (plain string, digest string, size int64) {
	b.Helper()
	needsRoot(b)
	plain = filepath.Join(b.TempDir(), "layer.tar")
	var from []string
	for _, dir := range []string{"usr/lib/python3", "usr/lib/python3.11", "usr/lib/python3.13", "usr/share/zoneinfo"} {
		if _, err := os.Stat("/" + dir); err == nil {
			from = append(from, dir)
		}
	}
	out, err := exec.Command("tar", append([]string{"-C", "/", "-cf", plain}, from...)...).CombinedOutput()
	if err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	f, err := os.Open(plain)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	if size, err = io.Copy(sum, f); err != nil {
		b.Fatal(err)
	}
	return plain, "sha256:" + hex.EncodeToString(sum.Sum(nil)), size
}

// BenchmarkUnpack compares the unpacker, jail and digest included, with tar of the same file to the same file system.
func BenchmarkUnpack(b *testing.B) {
	plain, digest, size := corpus(b)
	zipped := plain + ".gz"
	if out, err := exec.Command("sh", "-c", "gzip -4 < "+plain+" > "+zipped).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	zstd := plain + ".zst"
	if out, err := exec.Command("zstd", "-q", "-3", plain, "-o", zstd).CombinedOutput(); err != nil {
		zstd = ""
		b.Logf("no zstd: %v: %s", err, out)
	}
	for _, name := range []string{plain, zipped, zstd} {
		if name == "" {
			continue
		}
		kind := strings.TrimPrefix(filepath.Ext(name), ".")
		each := func(b *testing.B, do func(dir string)) {
			b.SetBytes(size)
			for b.Loop() {
				b.StopTimer()
				unix.Sync() // what the one before has written is not this one's to wait for
				dir, err := os.MkdirTemp("", "cove-unpack")
				if err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				do(dir)
				b.StopTimer()
				if err := os.RemoveAll(dir); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		}
		b.Run(kind+"/tar", func(b *testing.B) {
			each(b, func(dir string) {
				var errs bytes.Buffer
				cmd := exec.Command("tar", "-C", dir, "--numeric-owner", "-xpf", name)
				cmd.Stderr = &errs
				if err := cmd.Run(); err != nil {
					b.Fatalf("%v: %s", err, errs.String())
				}
			})
		})
		b.Run(kind+"/unpack", func(b *testing.B) {
			each(b, func(dir string) {
				f, err := os.Open(name)
				if err != nil {
					b.Fatal(err)
				}
				defer f.Close()
				if _, err := runJail(b, dir, f, unpack.Request{DiffID: digest, MaxBytes: 64 << 30, MaxFiles: 1 << 20}); err != nil {
					b.Fatal(err)
				}
			})
		})
	}
}
