package e2e_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/subtle"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

const (
	registryUser     = "reader"
	registryPassword = "correct-horse"
)

// testRegistry serves images that are made here: what is below private/ wants a password, /asked tells how many
// downloads a repository has had, and one layer is never the bytes that its digest promises.
type testRegistry struct {
	host  string
	store http.Handler
	asked atomic.Int64

	mu     sync.Mutex
	blobs  map[string]int // downloads by repository
	broken string         // the digest of the layer that comes wrong
	open   bool           // while images are put in
}

func startRegistry(t *testing.T) *testRegistry {
	t.Helper()
	return startRegistryAt(t, "127.0.0.1:0")
}

func startRegistryAt(t *testing.T, address string) *testRegistry {
	t.Helper()
	images, err := testImages()
	if err != nil {
		t.Fatal(err)
	}
	r := &testRegistry{store: registry.New(registry.Logger(log.New(io.Discard, "", 0))), blobs: map[string]int{}, open: true}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: r}}
	server.Start()
	t.Cleanup(server.Close)
	r.host = l.Addr().String()
	for _, ref := range slices.Sorted(maps.Keys(images)) {
		tag, err := name.NewTag(r.host + "/" + ref)
		if err == nil {
			err = remote.Write(tag, images[ref])
		}
		if err != nil {
			t.Fatalf("push %s: %v", ref, err)
		}
	}
	layers, err := images["broken:1"].Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[len(layers)-1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	r.broken, r.open = digest.String(), false
	r.mu.Unlock()
	return r
}

func (r *testRegistry) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	r.mu.Lock()
	open, broken := r.open, r.broken
	repository, digest, isBlob := strings.Cut(strings.TrimPrefix(q.URL.Path, "/v2/"), "/blobs/")
	if isBlob && q.Method == http.MethodGet && !open {
		r.blobs[repository]++
	}
	downloads := r.blobs[q.URL.Query().Get("blobs")]
	r.mu.Unlock()
	if q.URL.Path == "/asked" {
		_, _ = fmt.Fprint(w, downloads)
		return
	}
	r.asked.Add(1)
	if user, password, _ := q.BasicAuth(); strings.HasPrefix(q.URL.Path, "/v2/private/") && !open &&
		subtle.ConstantTimeCompare([]byte(user+":"+password), []byte(registryUser+":"+registryPassword)) != 1 {
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"a password is wanted"}]}`)
		return
	}
	if rest, ok := strings.CutPrefix(q.URL.Path, "/v2/private/"); ok && !open { // whatever it is called, so that each test has one that nobody has pulled
		called, rest, _ := strings.Cut(rest, "/")
		repository := "busybox"
		if strings.HasPrefix(called, "bash") {
			repository = "bash"
		}
		q = q.Clone(q.Context())
		q.URL.Path = "/v2/private/" + repository + "/" + rest
	}
	if isBlob && digest == broken && !open && q.Method == http.MethodGet {
		w = &corrupted{ResponseWriter: w}
	}
	r.store.ServeHTTP(w, q)
}

// corrupted changes the last byte of everything that is written.
type corrupted struct{ http.ResponseWriter }

func (c *corrupted) Write(p []byte) (int, error) {
	q := bytes.Clone(p)
	if len(q) > 0 {
		q[len(q)-1] ^= 0xff
	}
	return c.ResponseWriter.Write(q)
}

// testImages are made once: names below the registry, and images of the userlands that a machine has.
var testImages = sync.OnceValues(func() (map[string]v1.Image, error) {
	base, err := busyboxLayer()
	if err != nil {
		return nil, err
	}
	b := &imageBuilder{images: map[string]v1.Image{}}
	busybox := b.image("busybox:1", v1.Config{Env: []string{"PATH=/bin"}, Cmd: []string{"sh"}}, base)
	b.images["private/busybox:1"], b.images["once:1"] = busybox, busybox
	b.image("shared:1", v1.Config{}, base, b.layer(file("/shared", 0o644, strings.Repeat("shared", 100_000))))
	b.image("broken:1", v1.Config{}, base, b.layer(file("/broken", 0o644, "these bytes come wrong")))
	b.image("hostile:1", v1.Config{}, base, b.layer(file("../../../../../../tmp/cove-e2e-escaped", 0o644, "out")))
	b.image("configured:1", v1.Config{
		Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}, User: "app", WorkingDir: "/srv/place", Entrypoint: []string{"sleep"}, Cmd: []string{"1000"},
	}, base, b.layer(
		file("/etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234:app:/home/app:/bin/sh\n"), file("/etc/group", 0o644, "root:x:0:\napp:x:1234:\n"),
		owned(dir("/home/app", 0o755), 1234), owned(dir("/srv/place", 0o755), 1234),
	))
	b.image("layers:1", v1.Config{}, base,
		b.layer(file("/data/kept", 0o644, "kept\n"), file("/data/gone", 0o644, "gone\n"), link("/data/link", "kept"), hard("/data/hard", "/data/kept"), file("/data/opaque/old", 0o644, "")),
		b.layer(file("/data/.wh.gone", 0o644, ""), file("/data/opaque/.wh..wh..opq", 0o644, ""), file("/data/opaque/new", 0o644, "")))
	b.image("scratch:1", v1.Config{}, b.layer(hostFile("/busybox", "/bin/busybox"), dir("/data", 0o755)))
	if bash, err := programFiles("/bin/bash"); err != nil {
		b.err = err
	} else {
		b.images["private/bash:1"] = b.image("bash:1", v1.Config{Env: []string{"PATH=/bin:/usr/bin", "FROM_IMAGE=yes"}, WorkingDir: "/srv"}, base, b.layer(bash...))
	}
	deep := []v1.Layer{base}
	for i := range 100 {
		deep = append(deep, b.layer(file(fmt.Sprintf("/layers/%03d", i), 0o644, "")))
	}
	b.image("deep:1", v1.Config{}, deep...)
	if python, err := pythonFiles(); err != nil {
		b.err = err
	} else {
		b.image("python:1", v1.Config{Env: []string{"PATH=/bin:/usr/bin"}}, base, b.layer(python...))
	}
	if b.err == nil {
		b.images["foreign:1"], b.err = foreign(busybox)
	}
	return b.images, b.err
})

// foreign is an image for a machine that nobody has.
func foreign(img v1.Image) (v1.Image, error) {
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Architecture = "s390x"
	return mutate.ConfigFile(img, config)
}

// imageBuilder remembers its first error, so that a list of images reads as one.
type imageBuilder struct {
	images map[string]v1.Image
	err    error
}

func (b *imageBuilder) image(ref string, config v1.Config, layers ...v1.Layer) v1.Image {
	if b.err != nil {
		return nil
	}
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err == nil {
		var now *v1.ConfigFile
		if now, err = img.ConfigFile(); err == nil {
			now = now.DeepCopy()
			now.Architecture, now.OS, now.Config = runtime.GOARCH, "linux", config
			img, err = mutate.ConfigFile(img, now)
		}
	}
	if err != nil {
		b.err = fmt.Errorf("image %s: %w", ref, err)
		return nil
	}
	b.images[ref] = img
	return img
}

func (b *imageBuilder) layer(entries ...entry) v1.Layer {
	if b.err != nil {
		return nil
	}
	l, err := layerOf(entries)
	if err != nil {
		b.err = err
	}
	return l
}

// entry is one file of a layer; a host's file is read when the layer is made.
type entry struct {
	tar.Header
	text string
	from string
}

func file(name string, mode int64, text string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode}, text: text}
}

func dir(name string, mode int64) entry {
	return entry{Header: tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode}}
}

func link(name, target string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}}
}

func hard(name, target string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target, Mode: 0o644}}
}

func hostFile(name, from string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755}, from: from}
}

func owned(e entry, id int) entry {
	e.Uid, e.Gid = id, id
	return e
}

func layerOf(entries []entry) (v1.Layer, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		data := []byte(e.text)
		if e.from != "" {
			var err error
			if data, err = os.ReadFile(e.from); err != nil {
				return nil, err
			}
		}
		h := e.Header
		h.Name, h.Linkname = strings.TrimPrefix(h.Name, "/"), strings.TrimPrefix(h.Linkname, "/")
		if h.Typeflag == tar.TypeSymlink {
			h.Linkname = e.Linkname
		}
		h.Size = int64(len(data))
		if err := w.WriteHeader(&h); err != nil {
			return nil, err
		}
		if _, err := w.Write(data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil },
		tarball.WithCompressionLevel(gzip.BestSpeed))
}

// busyboxLayer is a userland without a C library: one static program with many names.
func busyboxLayer() (v1.Layer, error) {
	out, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("these tests make images of /bin/busybox: install busybox-static: %w", err)
	}
	entries := []entry{
		hostFile("/bin/busybox", "/bin/busybox"), dir("/tmp", 0o1777), dir("/root", 0o700), dir("/usr/bin", 0o755),
		file("/etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
		file("/etc/group", 0o644, "root:x:0:\nnogroup:x:65534:\n"), file("/etc/made-by", 0o644, "the test\n"),
	}
	for applet := range strings.FieldsSeq(string(out)) {
		if applet != "busybox" {
			entries = append(entries, link("/bin/"+applet, "busybox"))
		}
	}
	return layerOf(entries)
}

// pythonFiles are the host's Python and the libraries that it links, and nothing else of the host.
func pythonFiles() ([]entry, error) {
	out, err := exec.Command("/usr/bin/python3", "-IS", "-c", "import os, sys, sysconfig; print(os.path.realpath(sys.executable)); print(sysconfig.get_path('stdlib'))").Output()
	if err != nil {
		return nil, fmt.Errorf("these tests make an image of /usr/bin/python3: %w", err)
	}
	lines := strings.Fields(string(out))
	program, stdlib := lines[0], lines[1]
	entries := []entry{hostFile(program, program), link("/usr/bin/python3", program)}
	libraries := map[string]bool{}
	if err := linked(program, libraries); err != nil {
		return nil, err
	}
	err = filepath.WalkDir(stdlib, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch d.Name() {
		case "__pycache__", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "pydoc_data", "dist-packages", "site-packages", "distutils":
			return fs.SkipDir
		}
		switch ext := filepath.Ext(path); {
		case d.Type().IsRegular() && ext == ".so":
			if err := linked(path, libraries); err != nil {
				return err
			}
			entries = append(entries, hostFile(path, path))
		case d.Type().IsRegular() && ext == ".py":
			entries = append(entries, hostFile(path, path))
		}
		return nil
	})
	for _, lib := range slices.Sorted(maps.Keys(libraries)) {
		entries = append(entries, hostFile(lib, lib))
	}
	return entries, err
}

// programFiles are a program of the host and the libraries that it links.
func programFiles(program string) ([]entry, error) {
	libraries := map[string]bool{}
	if err := linked(program, libraries); err != nil {
		return nil, err
	}
	entries := []entry{hostFile(program, program)}
	for _, lib := range slices.Sorted(maps.Keys(libraries)) {
		entries = append(entries, hostFile(lib, lib))
	}
	return entries, nil
}

// linked adds the libraries that a program loads, under the names that it loads them by.
func linked(program string, into map[string]bool) error {
	out, err := exec.Command("ldd", program).Output()
	if err != nil {
		return fmt.Errorf("ldd %s: %w", program, err)
	}
	for line := range strings.Lines(string(out)) {
		for word := range strings.FieldsSeq(line) {
			if strings.HasPrefix(word, "/") {
				into[word] = true
			}
		}
	}
	return nil
}
