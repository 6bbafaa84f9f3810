package unpack_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/fault"
)

// TestMain is also the unpacker: Run starts its own program again.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "unpack" {
		os.Exit(unpack.Main(os.Args[2:], os.Stderr))
	}
	unix.Umask(0)
	os.Exit(m.Run())
}

var then = time.Unix(1700000000, 0)

// entry is one of a tar; its text is its content.
type entry struct {
	tar.Header
	text string
}

func file(name, text string) entry { return entry{tar.Header{Name: name, Mode: 0o644}, text} }
func dir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}
func symlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, ""}
}
func hardlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}, ""}
}
func device(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}, ""}
}
func (e entry) with(f func(*tar.Header)) entry {
	f(&e.Header)
	return e
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		h := e.Header
		if h.ModTime.IsZero() {
			h.ModTime = then
		}
		if h.Typeflag == 0 {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(e.text))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func request(data []byte) unpack.Request {
	return unpack.Request{DiffID: digest(data), MaxBytes: 1 << 20, MaxFiles: 1000}
}

// plainly unpacks in this process.
func plainly(t testing.TB, at string, blob []byte, r unpack.Request) (unpack.Result, error) {
	t.Helper()
	root, err := unix.Open(at, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	return unpack.Layer(context.Background(), root, bytes.NewReader(blob), r)
}

// jailed unpacks as the maker does.
func jailed(t testing.TB, at string, blob []byte, r unpack.Request) (unpack.Result, error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "blob")
	if err := os.WriteFile(name, blob, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return runJail(t, at, f, r)
}

func runJail(t testing.TB, at string, blob *os.File, r unpack.Request) (unpack.Result, error) {
	t.Helper()
	fd, err := unix.OpenTree(unix.AT_FDCWD, at, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	tree := os.NewFile(uintptr(fd), at)
	defer tree.Close()
	return unpack.Run(context.Background(), unpack.Jail{Program: []string{"/proc/self/exe", "unpack"}, Blob: blob, Tree: tree, Base: 0x7fff0000 - 1<<20}, r)
}

func needsRoot(t testing.TB) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of a layer have owners")
	}
}

// describe lists a tree: kind, mode, owner, links, content.
func describe(t testing.TB, root string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(root, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(root, at)
		line := fmt.Sprintf("%s %o %d:%d", rel, st.Mode, st.Uid, st.Gid)
		switch info.Mode().Type() {
		case 0:
			text, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %.40q", text)
			if st.Nlink > 1 {
				line += fmt.Sprintf(" ×%d", st.Nlink)
			}
		case fs.ModeSymlink:
			to, err := os.Readlink(at)
			if err != nil {
				return err
			}
			line += " → " + to
		case fs.ModeDir:
			var value [8]byte
			if n, err := unix.Lgetxattr(at, "user.overlay.opaque", value[:]); err == nil {
				line += " opaque=" + string(value[:n])
			}
		}
		all = append(all, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

var layers = []struct {
	claim string
	in    []entry
	want  []string // beside the root
}{
	{"files, directories and links are as the layer says", []entry{
		dir("./"), dir("usr/"), dir("usr/bin/"),
		file("usr/bin/tool", "x").with(func(h *tar.Header) { h.Mode = 0o4755; h.Uid, h.Gid = 12, 34 }),
		symlink("usr/bin/alias", "/etc/../anything"), hardlink("usr/bin/same", "usr/bin/tool"),
		dir("tmp").with(func(h *tar.Header) { h.Mode = 0o1777 }),
		{tar.Header{Name: "run/pipe", Typeflag: tar.TypeFifo, Mode: 0o600}, ""},
	}, []string{
		"run 40755 0:0", "run/pipe 10600 0:0", "tmp 41777 0:0", "usr 40755 0:0", "usr/bin 40755 0:0",
		"usr/bin/alias 120777 0:0 → /etc/../anything", `usr/bin/same 104755 12:34 "x" ×2`, `usr/bin/tool 104755 12:34 "x" ×2`,
	}},
	{"a leading slash means the layer's root", []entry{file("/etc/x", "1"), hardlink("/etc/y", "/etc/x")},
		[]string{"etc 40755 0:0", `etc/x 100644 0:0 "1" ×2`, `etc/y 100644 0:0 "1" ×2`}},
	{"the last of a name counts, whatever the first was", []entry{
		file("a", "1"), file("a", "2"), dir("b/"), file("b/x", "1"), file("b", "2"), file("c", "1"), dir("c/"), file("c/x", "2"), symlink("d", "c"), dir("d"),
	}, []string{`a 100644 0:0 "2"`, `b 100644 0:0 "2"`, "c 40755 0:0", `c/x 100644 0:0 "2"`, "d 40755 0:0"}},
	{"a directory of two entries has what the second says", []entry{
		dir("a").with(func(h *tar.Header) { h.Uid, h.Mode = 5, 0o700 }), file("a/x", ""), dir("a").with(func(h *tar.Header) { h.Mode = 0o711 }),
	}, []string{"a 40711 0:0", `a/x 100644 0:0 ""`}},
	{"a whiteout hides a file", []entry{file("etc/.wh.gone", ""), file(".wh.alsogone", "")},
		[]string{"alsogone 20000 0:0", "etc 40755 0:0", "etc/gone 20000 0:0"}},
	{"an opaque directory hides what is below it", []entry{dir("etc"), file("etc/.wh..wh..opq", ""), file("etc/x", "1")},
		[]string{"etc 40755 0:0 opaque=y", `etc/x 100644 0:0 "1"`}},
	{"what a layer has itself is not hidden by its whiteout", []entry{
		file("a", "1"), file(".wh.a", ""), file(".wh.b", ""), file("b", "1"),
		dir("c"), file("c/x", "1"), file(".wh.c", ""), file(".wh.d", ""), dir("d"), file(".wh.e", ""), file("e/x", "1"),
	}, []string{`a 100644 0:0 "1"`, `b 100644 0:0 "1"`, "c 40755 0:0 opaque=y", `c/x 100644 0:0 "1"`, "d 40755 0:0 opaque=y", "e 40755 0:0 opaque=y", `e/x 100644 0:0 "1"`}},
	{"what an old file system kept for itself is left out", []entry{file(".wh..wh.aufs", "x"), file(".wh..wh.plnk/1.2", "x"), file("a", "")}, []string{`a 100644 0:0 ""`}},
	{"devices below dev are left out", []entry{dir("dev"), device("dev/null"), device("dev/a/b")}, []string{"dev 40755 0:0"}},
	{"a link of the layer that stays in it is followed", []entry{dir("usr/lib"), symlink("lib", "usr/lib"), file("lib/x", "1"), dir("lib/d"), hardlink("y", "lib/x")},
		[]string{"lib 120777 0:0 → usr/lib", "usr 40755 0:0", "usr/lib 40755 0:0", "usr/lib/d 40755 0:0", `usr/lib/x 100644 0:0 "1" ×2`, `y 100644 0:0 "1" ×2`}},
	{"long names are kept", []entry{file(strings.Repeat("d", 200)+"/"+strings.Repeat("f", 255), "1")},
		[]string{strings.Repeat("d", 200) + " 40755 0:0", strings.Repeat("d", 200) + "/" + strings.Repeat("f", 255) + ` 100644 0:0 "1"`}},
	{"owners that a sandbox does not have are nobody", []entry{file("a", "").with(func(h *tar.Header) { h.Uid, h.Gid = 1<<20, 7 })}, []string{`a 100644 65534:7 ""`}},
	{"an empty layer has nothing", nil, nil},
}

func TestLayersAreUnpacked(t *testing.T) {
	needsRoot(t)
	for _, way := range []struct {
		name string
		do   func(testing.TB, string, []byte, unpack.Request) (unpack.Result, error)
	}{{"plainly", plainly}, {"jailed", jailed}} {
		for _, c := range layers {
			t.Run(way.name+"/"+c.claim, func(t *testing.T) {
				at, data := t.TempDir(), archive(t, c.in...)
				if err := os.Chmod(at, 0o755); err != nil {
					t.Fatal(err)
				}
				if _, err := way.do(t, at, data, request(data)); err != nil {
					t.Fatal(err)
				}
				if got := describe(t, at)[1:]; !slices.Equal(got, c.want) {
					t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
				}
			})
		}
	}
}

func bomb(name string, size int64) entry {
	return entry{tar.Header{Name: name, Mode: 0o644, Typeflag: tar.TypeReg, Size: size}, ""}
}

// cutArchive has a header whose content never comes.
func cutArchive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

func compressed(t testing.TB, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestHostileLayersAreRefused(t *testing.T) {
	needsRoot(t)
	many := make([]entry, 1001)
	for i := range many {
		many[i] = file(fmt.Sprint("f", i), "")
	}
	whole := archive(t, file("a", strings.Repeat("x", 100000)))
	long := strings.Repeat(strings.Repeat("d", 199)+"/", 10)
	for _, c := range []struct {
		claim string
		blob  []byte
		kind  fault.Kind
		says  string
	}{
		{"a name that climbs out", archive(t, file("../evil", "x")), fault.Invalid, "outside"},
		{"a name that climbs out in its middle", archive(t, file("a/../../evil", "x")), fault.Invalid, "outside"},
		{"a file behind an absolute link", archive(t, symlink("a", "/"), file("a/evil", "x")), fault.Invalid, "leads out"},
		{"a file behind a link that climbs out", archive(t, symlink("a", "../.."), file("a/evil", "x")), fault.Invalid, "leads out"},
		{"a file behind a chain of links", archive(t, symlink("b", ".."), symlink("a", "b"), file("a/evil", "x")), fault.Invalid, "leads out"},
		{"a directory behind a link", archive(t, symlink("a", "/"), dir("a/evil")), fault.Invalid, "leads out"},
		{"a link behind a link", archive(t, symlink("a", "/"), symlink("a/evil", "x")), fault.Invalid, "leads out"},
		{"a whiteout behind a link", archive(t, symlink("a", "/"), file("a/.wh.evil", "x")), fault.Invalid, "leads out"},
		{"an opaque mark behind a link", archive(t, symlink("a", "/"), file("a/.wh..wh..opq", "x")), fault.Invalid, "leads out"},
		{"a link that goes round", archive(t, symlink("a", "b"), symlink("b", "a"), file("a/evil", "x")), fault.Invalid, "leads out"},
		{"a hard link that climbs out", archive(t, hardlink("evil", "../../etc/shadow")), fault.Invalid, "outside"},
		{"a hard link to an absolute place", archive(t, hardlink("evil", "/etc/shadow")), fault.Invalid, "not in the layer"},
		{"a hard link behind a link", archive(t, symlink("a", "/"), hardlink("evil", "a/etc/shadow")), fault.Invalid, "leads out"},
		{"a hard link to a directory", archive(t, dir("a"), hardlink("evil", "a")), fault.Invalid, "not a file"},
		{"a hard link to a whiteout", archive(t, file(".wh.a", ""), hardlink("evil", "a")), fault.Invalid, "not a file"},
		{"a device", archive(t, device("etc/evil")), fault.Invalid, "device"},
		{"a block device", archive(t, entry{tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}, ""}), fault.Invalid, "device"},
		{"a name that is too long", archive(t, file(strings.Repeat("x", 256), "x")), fault.Invalid, "255 bytes"},
		{"a path that is too long", archive(t, file(strings.Repeat("x/", 2500)+"x", "x")), fault.Invalid, "3600 bytes"},
		{"a directory that short names lead far down to", archive(t, dir(long), symlink("l", long), dir("l/"+long)), fault.Invalid, "too long"},
		{"a file that links lead far down to", archive(t, dir(long), symlink("l", long), file("l/"+long+"f", "x")), fault.Invalid, "too long"},
		{"a whiteout of the root", archive(t, file(".wh.", "")), fault.Invalid, "outside"},
		{"a whiteout of what is above", archive(t, file("a/.wh...", "")), fault.Invalid, "outside"},
		{"a root that is a file", archive(t, file("./", "x").with(func(h *tar.Header) { h.Typeflag = tar.TypeSymlink; h.Linkname = "/" }).empty()), fault.Invalid, "root directory"},
		{"a file below a file", archive(t, file("a", "x"), file("a/b", "x")), fault.Invalid, "no directory"},
		{"too many files", archive(t, many...), fault.Exhausted, "1000 files"},
		{"too many directories that no entry names", archive(t, file(strings.Repeat("d/", 1001)+"x", "")), fault.Exhausted, "1000 files"},
		{"more bytes than the limit", archive(t, file("a", strings.Repeat("x", 1<<20)), file("b", "x")), fault.Exhausted, "1048576 bytes"},
		{"ten gigabytes of zeros", compressed(t, cutArchive(t, bomb("zeros", 10<<30))), fault.Exhausted, "1048576 bytes"},
		{"a negative size", bytes.Replace(archive(t, file("a", "x")), []byte("00000000001\x00"), []byte("-0000000001\x00"), 1), fault.Invalid, "broken"},
		{"padding without an end", compressed(t, make([]byte, 100<<20)), fault.Exhausted, "larger than the limit"},
		{"a tar that is cut off", whole[:50000], fault.Invalid, "broken"},
		{"a gzip that is cut off", compressed(t, whole)[:100], fault.Invalid, "broken"},
		{"no archive at all", []byte("<html>not found</html>" + strings.Repeat(" ", 1000)), fault.Invalid, "broken"},
		{"a compression that layers do not have", []byte{0xfd, '7', 'z', 'X', 'Z', 0, 1, 2, 3}, fault.Invalid, "xz"},
	} {
		t.Run(c.claim, func(t *testing.T) {
			around := t.TempDir()
			at := filepath.Join(around, "in")
			if err := os.Mkdir(at, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(around, "etc"), []byte("mine"), 0o600); err != nil {
				t.Fatal(err)
			}
			r := request(nil)
			_, err := plainly(t, at, c.blob, r)
			if !fault.Is(err, c.kind) || !strings.Contains(fault.Message(err), c.says) {
				t.Errorf("plainly: %v", err)
			}
			if err := os.RemoveAll(at); err != nil {
				t.Fatal(err)
			}
			if got := describe(t, around); len(got) != 2 || !strings.HasSuffix(got[1], `"mine"`) {
				t.Errorf("something outside was touched: %q", got)
			}
		})
	}
	t.Run("another digest than the image says", func(t *testing.T) {
		data := archive(t, file("a", "x"))
		_, err := plainly(t, t.TempDir(), data, request([]byte("else")))
		if !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "changed or is broken") {
			t.Error(err)
		}
	})
}

func (e entry) empty() entry { e.text = ""; return e }

func TestCompression(t *testing.T) {
	needsRoot(t)
	data := archive(t, file("a", strings.Repeat("hello ", 10000)))
	var z bytes.Buffer
	w, err := zstd.NewWriter(&z)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, blob := range map[string][]byte{
		"plain": data, "gzip": compressed(t, data), "zstd": z.Bytes(), "gzip in two parts": append(compressed(t, data[:5000]), compressed(t, data[5000:])...),
	} {
		t.Run(name, func(t *testing.T) {
			result, err := plainly(t, t.TempDir(), blob, request(data))
			if err != nil || result.Bytes != 60000 || result.Files != 1 {
				t.Errorf("%+v %v", result, err)
			}
		})
	}
}

func TestAttributes(t *testing.T) {
	needsRoot(t)
	at := t.TempDir()
	data := archive(t, dir("d").with(func(h *tar.Header) { h.ModTime = then.Add(time.Hour) }), file("d/f", "x").with(func(h *tar.Header) {
		h.Format, h.ModTime = tar.FormatPAX, then.Add(1234567*time.Nanosecond)
		h.PAXRecords = map[string]string{
			"SCHILY.xattr.user.mine": "kept", "SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.security.capability": "\x01\x00",
			"SCHILY.xattr.trusted.overlay.opaque": "y",
		}
	}))
	if _, err := jailed(t, at, data, request(data)); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(at, "d"))
	if err != nil || !info.ModTime().Equal(then.Add(time.Hour)) {
		t.Errorf("directory: %v %v", info, err)
	}
	f := filepath.Join(at, "d/f")
	if info, err := os.Stat(f); err != nil || !info.ModTime().Equal(then.Add(1234567*time.Nanosecond)) {
		t.Errorf("file: %v %v", info, err)
	}
	names := make([]byte, 1000)
	n, err := unix.Listxattr(f, names)
	if err != nil || string(names[:n]) != "user.mine\x00" {
		t.Errorf("%q %v", names[:n], err)
	}
}

func FuzzLayer(f *testing.F) {
	for _, c := range layers {
		f.Add(archive(f, c.in...))
	}
	f.Add(compressed(f, archive(f, file("a", "x"))))
	f.Fuzz(func(t *testing.T, blob []byte) {
		around := t.TempDir()
		at := filepath.Join(around, "in")
		if err := os.Mkdir(at, 0o755); err != nil {
			t.Fatal(err)
		}
		r := unpack.Request{DiffID: digest(blob), MaxBytes: 1 << 16, MaxFiles: 100}
		_, err := plainly(t, at, blob, r)
		if err != nil && fault.Message(err) == "" {
			t.Error(err)
		}
		if names, err := os.ReadDir(around); err != nil || len(names) != 1 {
			t.Errorf("something outside was touched: %v %v", names, err)
		}
	})
}
