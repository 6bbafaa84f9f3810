package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/template"
)

// onlyReader has an end that nobody knows before.
type onlyReader struct{ io.Reader }

func (w *world) importAll(name string, archive []byte) ([]image.Info, error) {
	return w.Import(w.t.Context(), acme, name, onlyReader{bytes.NewReader(archive)}, nil)
}

// saved is what docker save would write.
func saved(t *testing.T, images map[string]v1.Image) []byte {
	t.Helper()
	all := map[name.Reference]v1.Image{}
	for text, i := range images {
		ref, err := name.ParseReference(text)
		must(t, err)
		all[ref] = i
	}
	var b bytes.Buffer
	must(t, tarball.MultiRefWrite(all, &b))
	return b.Bytes()
}

// laidOut is an OCI image layout in a tar.
func laidOut(t *testing.T, add func(layout.Path)) []byte {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	must(t, err)
	add(p)
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	must(t, tw.AddFS(os.DirFS(dir)))
	must(t, tw.Close())
	return b.Bytes()
}

func zipped(t *testing.T, raw []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write(raw)
	must(t, errors.Join(err, z.Close()))
	return b.Bytes()
}

func tarOf(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, h := range headers {
		body := h.Uname // in the place of a field for it
		h.Uname, h.Mode = "", 0o755
		if h.Typeflag == 0 {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(body))
		}
		must(t, tw.WriteHeader(&h))
		_, err := io.WriteString(tw, body)
		must(t, err)
	}
	must(t, tw.Close())
	return b.Bytes()
}

func TestImport(t *testing.T) {
	img := newImage(t, 3, 1000)
	annotated := func(name string) layout.Option {
		return layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": name})
	}
	arm := configured(t, newImage(t, 1, 10), "arm64")
	rootfs := tarOf(t, tar.Header{Name: "bin/sh", Uname: "#!"}, tar.Header{Name: "etc/passwd", Uname: "root:x:0:0::/:/bin/sh"})
	for what, c := range map[string]struct {
		name    string
		archive []byte
		want    []string
		layers  int
	}{
		"docker save":           {"", saved(t, map[string]v1.Image{"app:v1": img}), []string{"docker.io/library/app:v1"}, 3},
		"docker save, renamed":  {"ghcr.io/other/name:x", saved(t, map[string]v1.Image{"app:v1": img}), []string{"ghcr.io/other/name:x"}, 3},
		"docker save of two":    {"", saved(t, map[string]v1.Image{"app:v1": img, "app:v2": img, "b:v1": newImage(t, 1, 10)}), []string{"docker.io/library/app:v1", "docker.io/library/app:v2", "docker.io/library/b:v1"}, 0},
		"an OCI layout":         {"", laidOut(t, func(p layout.Path) { must(t, p.AppendImage(img, annotated("quay.io/team/app:v1"))) }), []string{"quay.io/team/app:v1"}, 3},
		"one with a tag only":   {"app", laidOut(t, func(p layout.Path) { must(t, p.AppendImage(img, annotated("latest"))) }), []string{"docker.io/library/app:latest"}, 3},
		"one for two platforms": {"app", laidOut(t, func(p layout.Path) { must(t, p.AppendIndex(twoPlatforms(img, arm))) }), []string{"docker.io/library/app:latest"}, 3},
		"platforms in a row": {"app", laidOut(t, func(p layout.Path) {
			must(t, p.AppendImage(arm, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "arm64"})))
			must(t, p.AppendImage(img, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"})))
		}), []string{"docker.io/library/app:latest"}, 3},
		"a root file system":         {"root:1", rootfs, []string{"docker.io/library/root:1"}, 1},
		"an empty root file system":  {"scratch-like", tarOf(t), []string{"docker.io/library/scratch-like:latest"}, 1},
		"one with a manifest inside": {"root:1", tarOf(t, tar.Header{Name: "manifest.json", Uname: `{"name":"my web app"}`}, tar.Header{Name: "bin/sh"}), []string{"docker.io/library/root:1"}, 1},
	} {
		for _, compressed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, compressed %v", what, compressed), func(t *testing.T) {
				w := open(t, nil)
				archive := c.archive
				if compressed {
					archive = zipped(t, archive)
				}
				got, err := w.importAll(c.name, archive)
				must(t, err)
				names := namesOf(got)
				slices.Sort(names)
				if !slices.Equal(names, c.want) || c.layers > 0 && len(got[0].Layers) != c.layers {
					t.Fatalf("%v with %d layers", names, len(got[0].Layers))
				}
				for _, name := range names {
					_, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: name})
					must(t, err)
				}
				if left := w.left(); len(left) != 0 {
					t.Fatalf("left behind: %v", left)
				}
				_, err = w.importAll(c.name, archive)
				must(t, err) // once more changes nothing
			})
		}
	}
}

func twoPlatforms(amd, arm v1.Image) v1.ImageIndex {
	return mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: arm, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}},
		mutate.IndexAddendum{Add: amd, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
}

func TestImportGivesWhatTheArchiveSays(t *testing.T) {
	w := open(t, nil)
	var told []template.PullProgress
	got, err := w.Import(t.Context(), acme, "", bytes.NewReader(saved(t, map[string]v1.Image{"app:v1": newImage(t, 1, 1000)})), func(p template.PullProgress) { told = append(told, p) })
	must(t, err)
	if i := got[0]; i.User != "app:staff" || i.Workdir != "/srv" || i.Cmd[0] != "serve" || i.Env["PATH"] != "/bin" || i.Bytes < 1000 || !strings.HasPrefix(i.Digest, "sha256:") {
		t.Fatalf("%+v", i)
	}
	if last := told[len(told)-1]; last.Step != template.PullDone || last.Layer != "" {
		t.Fatalf("%+v", told)
	}
}

// Docker once wrote a layer that two images share as a link.
func TestImportOfLinkedLayers(t *testing.T) {
	w := open(t, nil)
	img := newImage(t, 1, 100)
	_, _, layer := firstLayer(t, img)
	config, err := img.RawConfigFile()
	must(t, err)
	got, err := w.importAll("app", tarOf(t,
		tar.Header{Name: "a/layer.tar", Uname: string(layer)}, tar.Header{Name: "b/layer.tar", Typeflag: tar.TypeSymlink, Linkname: "../a/layer.tar"},
		tar.Header{Name: "c.json", Uname: string(config)}, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c.json","Layers":["b/layer.tar"]}]`}))
	if err != nil || len(got) != 1 {
		t.Fatalf("%v %v", got, err)
	}
}

func TestBadArchives(t *testing.T) {
	good := saved(t, map[string]v1.Image{"app:v1": newImage(t, 2, 5000)})
	config := `{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:` + strings.Repeat("a", 64) + `"]}}`
	docker := func(manifest string, more ...tar.Header) []byte {
		return tarOf(t, append(more, tar.Header{Name: "manifest.json", Uname: manifest}, tar.Header{Name: "c.json", Uname: config})...)
	}
	oci := func(index string) []byte {
		return tarOf(t, tar.Header{Name: "oci-layout", Uname: `{"imageLayoutVersion":"1.0.0"}`}, tar.Header{Name: "index.json", Uname: index})
	}
	damaged := laidOut(t, func(p layout.Path) {
		img := newImage(t, 1, 1000)
		must(t, p.AppendImage(img))
		blob, _, raw := firstLayer(t, img)
		raw[len(raw)/2] ^= 1
		must(t, os.WriteFile(filepath.Join(string(p), "blobs/sha256", blob.Hex), raw, 0o600))
	})
	bomb := zipped(t, make([]byte, 100<<20))
	for what, c := range map[string]struct {
		name    string
		archive []byte
		kind    fault.Kind
		words   string
	}{
		"nothing":                     {"x", nil, fault.Invalid, "empty"},
		"a text":                      {"x", []byte("hello, this is not a tar at all, only some text"), fault.Invalid, "damaged"},
		"a long text":                 {"x", bytes.Repeat([]byte("hello "), 1000), fault.Invalid, ""},
		"a zip":                       {"x", []byte("PK\x03\x04...."), fault.Invalid, "zip"},
		"xz":                          {"x", []byte("\xfd7zXZ\x00.."), fault.Invalid, "xz"},
		"half of it":                  {"x", good[:len(good)/2], fault.Invalid, ""},
		"half of it, compressed":      {"x", zipped(t, good)[:len(good)/2], fault.Invalid, "cut off"},
		"a bomb":                      {"x", bomb, fault.Exhausted, "larger"},
		"a file system without name":  {"", tarOf(t, tar.Header{Name: "bin/sh"}), fault.Invalid, "give one"},
		"a bad name":                  {"A B", good, fault.Invalid, "name of an image"},
		"a digest for a name":         {"x@sha256:" + strings.Repeat("0", 64), good, fault.Invalid, "digest"},
		"two and one name":            {"x", saved(t, map[string]v1.Image{"a:1": newImage(t, 1, 10), "b:1": newImage(t, 1, 10)}), fault.Invalid, "2 images"},
		"no configuration":            {"x", docker(`[{"Config":"none.json","Layers":["l"]}]`), fault.Invalid, "configuration"},
		"no layer":                    {"x", docker(`[{"Config":"c.json","Layers":["l"]}]`), fault.Invalid, "lacks layer 1"},
		"another number of layers":    {"x", docker(`[{"Config":"c.json","Layers":[]}]`), fault.Invalid, "1 layers"},
		"a layer that is another":     {"x", docker(`[{"Config":"c.json","Layers":["l"]}]`, tar.Header{Name: "l", Uname: "not it"}), fault.Invalid, "digest"},
		"a layer out of the archive":  {"x", docker(`[{"Config":"c.json","Layers":["../../etc/passwd"]}]`), fault.Invalid, "lacks layer"},
		"a link out of the archive":   {"x", docker(`[{"Config":"c.json","Layers":["l"]}]`, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}), fault.Invalid, "lacks layer"},
		"links in a circle":           {"x", docker(`[{"Config":"c.json","Layers":["l"]}]`, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "m"}, tar.Header{Name: "m", Typeflag: tar.TypeSymlink, Linkname: "l"}), fault.Invalid, "lacks layer"},
		"a bad tag":                   {"", docker(`[{"Config":"c.json","RepoTags":["A B"],"Layers":["l"]}]`, tar.Header{Name: "l"}), fault.Invalid, ""},
		"no tag":                      {"", docker(`[{"Config":"c.json","Layers":["l"]}]`, tar.Header{Name: "l"}), fault.Invalid, "give one"},
		"too many images":             {"", docker("[" + strings.Repeat(`{"Config":"c.json"},`, 99) + `{"Config":"c.json"}]`), fault.Invalid, "100 images"},
		"too many layers":             {"", docker(`[{"Config":"c.json","Layers":["` + strings.Repeat(`l","`, 127) + `l"]}]`), fault.Invalid, "128 layers"},
		"an index without manifests":  {"x", oci(`{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","size":1,"digest":"sha256:` + strings.Repeat("0", 64) + `"}]}`), fault.Invalid, "lacks a manifest"},
		"an index that is none":       {"x", oci(`[]`), fault.Invalid, "not a container image"},
		"an index that is a manifest": {"x", oci(`{"schemaVersion":2,"config":{"digest":"sha256:` + strings.Repeat("0", 64) + `"},"layers":[]}`), fault.Invalid, "not an index"},
		"an empty index":              {"x", oci(`{"schemaVersion":2,"manifests":[]}`), fault.Invalid, "no image"},
		"another platform":            {"x", saved(t, map[string]v1.Image{"a:1": configured(t, newImage(t, 1, 10), "arm64")}), fault.NotFound, "linux/arm64"},
		"a damaged layer":             {"x", damaged, fault.Invalid, "damaged"},
	} {
		t.Run(what, func(t *testing.T) {
			w := open(t, func(c *image.Config) { c.MaxBytes = 10 << 20 })
			_, err := w.importAll(c.name, c.archive)
			wantKind(t, err, c.kind, c.words)
			if left := w.left(); len(left) != 0 {
				t.Fatalf("left behind: %v", left)
			}
			if all, err := w.List(t.Context(), acme); err != nil || len(all) != 0 {
				t.Fatalf("%v %v", all, err)
			}
		})
	}
}

func TestImportProvesItsLayers(t *testing.T) {
	w := open(t, nil)
	img := newImage(t, 1, 1000)
	_, diff, _ := firstLayer(t, img)
	_, err := w.importAll("", saved(t, map[string]v1.Image{"app:v1": img}))
	must(t, err)
	config, err := img.RawConfigFile()
	must(t, err)
	_, err = w.Import(t.Context(), globex, "x", bytes.NewReader(tarOf(t, tar.Header{Name: "l", Uname: "anything"},
		tar.Header{Name: "c.json", Uname: string(config)}, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c.json","Layers":["l"]}]`})), nil)
	wantKind(t, err, fault.Invalid, "digest")
	if _, err := w.store.Document(t.Context(), globex, "image-layer", diff); !fault.Is(err, fault.NotFound) {
		t.Fatal("who lied is believed")
	}
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }

func TestImportOfABrokenStream(t *testing.T) {
	w := open(t, nil)
	good := tarOf(t, tar.Header{Name: "bin/sh", Uname: strings.Repeat("x", 10_000)})
	_, err := w.Import(t.Context(), acme, "x", io.MultiReader(bytes.NewReader(good[:3000]), failingReader{errors.New("cut")}), nil)
	wantKind(t, err, fault.Invalid, "cut off")
	if left := w.left(); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
}

func TestImportsTakeTurns(t *testing.T) {
	w := open(t, nil)
	archive := tarOf(t, tar.Header{Name: "f", Mode: 0o644})
	started, done := make(chan struct{}, 3), make(chan error, 3)
	slow := func(name string) *io.PipeWriter {
		r, send := io.Pipe()
		go func() {
			_, err := w.Import(t.Context(), acme, name, &noticed{Reader: r, started: started}, nil)
			r.CloseWithError(io.ErrClosedPipe)
			done <- err
		}()
		return send
	}
	senders := []*io.PipeWriter{slow("a"), slow("b")}
	<-started
	<-started
	senders = append(senders, slow("c"))
	_, err := w.Import(t.Context(), globex, "x", bytes.NewReader(archive), nil)
	must(t, err)
	if len(started) != 0 {
		t.Fatal("a third archive of one tenant is read at once")
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Import(gone, acme, "d", bytes.NewReader(archive), nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("who has left got %v", err)
	}
	for _, send := range senders {
		go func() { _, _ = send.Write(archive); send.Close() }()
	}
	for range senders {
		must(t, <-done)
	}
}

// noticed tells when it is read.
type noticed struct {
	io.Reader
	once    sync.Once
	started chan<- struct{}
}

func (n *noticed) Read(p []byte) (int, error) {
	n.once.Do(func() { n.started <- struct{}{} })
	return n.Reader.Read(p)
}
