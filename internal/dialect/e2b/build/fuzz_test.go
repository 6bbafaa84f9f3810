package build_test

import (
	"archive/tar"
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/fault"
)

// Whatever a client sends is refused as its own mistake, or is what it should be.

func FuzzName(f *testing.F) {
	for _, s := range []string{"a", "team/a:v1.0", ":x", "a/b/c", "A b", "ä", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ns, name, tag, err := build.ParseRef(text)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Error(err)
			}
			return
		}
		if name == "" || strings.ContainsAny(ns+name+tag, "/: \x00") || strings.ToLower(ns+name+tag) != ns+name+tag {
			t.Errorf("%q is %q %q %q", text, ns, name, tag)
		}
	})
}

func FuzzArchive(f *testing.F) {
	f.Add(archive(f, tar.Header{Name: "a", Typeflag: tar.TypeReg}, tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "a"}), "a*")
	f.Add(archive(f, tar.Header{Name: "../a", Typeflag: tar.TypeReg}), "x")
	f.Add([]byte{0x1f, 0x8b}, ".")
	f.Fuzz(func(t *testing.T, content []byte, src string) {
		var all []build.Packed
		err := build.WalkArchive(bytes.NewReader(content), func(p build.Packed, r io.Reader) error {
			all = append(all, p)
			if p.Path == "" || path.IsAbs(p.Path) || p.Path != path.Clean(p.Path) || p.Path == ".." || strings.HasPrefix(p.Path, "../") || p.Mode > 0o777 {
				t.Errorf("%+v", p)
			}
			_, err := io.Copy(io.Discard, io.LimitReader(r, 1<<20))
			return err
		})
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Error(err)
		}
		for _, to := range build.Destinations(src, "/d/e", true, all) {
			if to != "" && to != "/d/e" && !strings.HasPrefix(to, "/d/e/") {
				t.Errorf("%q leads to %q", src, to)
			}
		}
	})
}

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"name":"a:b","tags":["c"],"cpuCount":2,"memoryMB":1024}`))
	f.Add([]byte(`{"fromImage":"e2bdev/base","steps":[{"type":"COPY","args":["a","b","",""],"filesHash":"00","force":true}],"startCmd":"x"}`))
	f.Add([]byte(`{"fromTemplate":null,"steps":[{"args":null}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, decode := range []func(http.ResponseWriter, *http.Request) error{build.DecodeBuild, build.DecodeStart} {
			err := decode(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body)))
			if err != nil && !fault.Is(err, fault.Invalid) {
				t.Error(err)
			}
		}
	})
}
