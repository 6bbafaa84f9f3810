package build_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/fault"
)

func walk(r io.Reader) (all []build.Packed, err error) {
	err = build.WalkArchive(r, func(p build.Packed, r io.Reader) error {
		all = append(all, p)
		_, err := io.Copy(io.Discard, r)
		return err
	})
	return all, err
}

func TestAnArchiveIsReadAsItIs(t *testing.T) {
	got, err := walk(bytes.NewReader(archive(t,
		tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "a", Typeflag: tar.TypeReg, Mode: 0o4755},
		tar.Header{Name: "d/./b", Typeflag: tar.TypeReg}, tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "../../etc"},
		tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "./a"})))
	want := []build.Packed{
		{Path: ".", Kind: tar.TypeDir, Mode: 0o755}, {Path: "a", Kind: tar.TypeReg, Mode: 0o755}, {Path: "d/b", Kind: tar.TypeReg, Mode: 0o644},
		{Path: "s", Kind: tar.TypeSymlink, Mode: 0o644, Link: "../../etc"}, {Path: "h", Kind: tar.TypeLink, Mode: 0o644, Link: "a"},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Error(err, diff)
	}
}

// manyNames is an archive of links whose names and targets are long.
func manyNames(t *testing.T) []byte {
	t.Helper()
	long := strings.Repeat("l", build.MaxPath-10)
	headers := make([]tar.Header, 9000)
	for i := range headers {
		headers[i] = tar.Header{Name: fmt.Sprintf("%s%06d", long, i), Typeflag: tar.TypeSymlink, Linkname: long}
	}
	return archive(t, headers...)
}

func TestBadArchivesAreRefused(t *testing.T) {
	whole := archive(t, tar.Header{Name: "a", Typeflag: tar.TypeReg})
	for name, content := range map[string][]byte{
		"no archive":              []byte(strings.Repeat("no archive at all ", 100)),
		"half of one":             whole[:len(whole)/2],
		"a way out":               archive(t, tar.Header{Name: "../a", Typeflag: tar.TypeReg}),
		"a way out in the middle": archive(t, tar.Header{Name: "a/../../b", Typeflag: tar.TypeReg}),
		"an absolute path":        archive(t, tar.Header{Name: "/etc/passwd", Typeflag: tar.TypeReg}),
		"a link to outside":       archive(t, tar.Header{Name: "a", Typeflag: tar.TypeLink, Linkname: "../../etc/shadow"}),
		"a device":                archive(t, tar.Header{Name: "a", Typeflag: tar.TypeBlock, Devmajor: 8}),
		"a pipe":                  archive(t, tar.Header{Name: "a", Typeflag: tar.TypeFifo}),
		"names without an end":    manyNames(t),
		"a path without an end":   archive(t, tar.Header{Name: strings.Repeat("a/", build.MaxPath) + "b", Typeflag: tar.TypeReg}),
	} {
		if got, err := walk(bytes.NewReader(content)); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v %v", name, got, err)
		}
	}
}

func TestWhereCopiedFilesGo(t *testing.T) {
	file := func(p string) build.Packed { return build.Packed{Path: p, Kind: tar.TypeReg} }
	dir := func(p string) build.Packed { return build.Packed{Path: p, Kind: tar.TypeDir} }
	for _, c := range []struct {
		name, src string
		destDir   bool
		entries   []build.Packed
		want      []string
	}{
		{"a file under another name", "a.txt", false, []build.Packed{file("a.txt")}, []string{"/d"}},
		{"a file into a directory", "x/a.txt", true, []build.Packed{file("x/a.txt")}, []string{"/d/a.txt"}},
		{"what a directory holds", "x", false, []build.Packed{dir("x"), file("x/a"), file("x/y/b")}, []string{"/d", "/d/a", "/d/y/b"}},
		{"everything", ".", false, []build.Packed{dir("."), file("a"), file("x/b")}, []string{"/d", "/d/a", "/d/x/b"}},
		{"what a pattern finds", "x/*", false, []build.Packed{file("x/a"), dir("x/y"), file("x/y/b")}, []string{"/d/a", "/d/y", "/d/y/b"}},
		{"the one file of a directory", "x/*", false, []build.Packed{file("x/a")}, []string{"/d/a"}},
		{"the one file that a pattern finds", "x/*.txt", false, []build.Packed{file("x/a.txt")}, []string{"/d"}},
		{"files that a pattern finds", "*.txt", true, []build.Packed{file("a.txt"), file("b.txt")}, []string{"/d/a.txt", "/d/b.txt"}},
		{"what was not asked for", "x", false, []build.Packed{file("x"), file("z")}, []string{"/d", ""}},
		{"a source with a detour", "./x/../y", false, []build.Packed{dir("y"), file("y/a")}, []string{"/d", "/d/a"}},
	} {
		if diff := cmp.Diff(c.want, build.Destinations(c.src, "/d", c.destDir, c.entries)); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}
