package e2e_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// TestOpenSandboxBench is a benchmark of many minutes: `make bench-opensandbox` asks for it.
func TestOpenSandboxBench(t *testing.T) {
	out := os.Getenv("COVE_OPENSANDBOX_BENCH")
	if out == "" {
		t.Skip("make bench-opensandbox runs it")
	}
	tools := openSandboxPackages(t)
	w := newOpenSandboxWorld(t)
	rootfs := benchRootfs(t)
	layers, size := benchLayers(t)
	w.registry.push(t, "big:1", layers...)
	script, err := filepath.Abs("../bench/opensandbox/bench.py")
	if err != nil {
		t.Fatal(err)
	}
	env := append(w.suite(t), "COVE_URL="+w.url, "COVE_API_KEY="+w.key,
		"OPENSANDBOX_DISABLE_METRICS=1", // a report of the SDK's own that is sent while the next thing is measured
		"OPENSANDBOX_BENCH_IMAGE="+w.registry.host+"/python:1", "OPENSANDBOX_BENCH_BIG="+w.registry.host+"/big:1", "OPENSANDBOX_BENCH_ROOTFS="+rootfs,
		"OPENSANDBOX_BENCH_LAYERS="+strings.Join(layers, ":"), fmt.Sprintf("OPENSANDBOX_BENCH_LAYERS_BYTES=%d", size),
		"OPENSANDBOX_BENCH_COVE="+binary.path, fmt.Sprintf("OPENSANDBOX_BENCH_PROCESSES=%d,%d", w.cmd.Process.Pid, makerPID(w.dir)))
	runSuite(t, []string{filepath.Join(tools.python, "bin", "python"), "-B", script, out}, env)
}

// benchRootfs is the image that both sides run, as one archive.
func benchRootfs(t *testing.T) string {
	t.Helper()
	images, err := testImages()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "rootfs.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := mutate.Extract(images["python:1"])
	defer files.Close()
	if _, err := io.Copy(f, files); err != nil {
		t.Fatal(err)
	}
	return path
}

// benchLayers are layers of a real size and shape: programs, and thousands of small files.
func benchLayers(t *testing.T) (paths []string, unpacked int64) {
	t.Helper()
	for i, parts := range [][]string{{"usr/bin"}, {"usr/lib/python3", "usr/share/perl", "usr/share/zoneinfo", "usr/include", "usr/share/doc"}} {
		plain := filepath.Join(t.TempDir(), fmt.Sprintf("layer%d.tar", i))
		argv := []string{"--create", "--ignore-failed-read", "--file", plain, "--directory", "/"}
		for _, part := range parts {
			if _, err := os.Stat("/" + part); err == nil {
				argv = append(argv, part)
			}
		}
		if out, err := exec.Command("tar", argv...).CombinedOutput(); err != nil {
			t.Fatalf("tar: %v\n%s", err, out)
		}
		info, err := os.Stat(plain)
		if err != nil {
			t.Fatal(err)
		}
		unpacked += info.Size()
		if out, err := exec.Command("gzip", "-1", plain).CombinedOutput(); err != nil {
			t.Fatalf("gzip: %v\n%s", err, out)
		}
		paths = append(paths, plain+".gz")
	}
	return paths, unpacked
}

// push puts one more image into the registry, of layers that are files.
func (r *testRegistry) push(t *testing.T, ref string, files ...string) {
	t.Helper()
	b := &imageBuilder{images: map[string]v1.Image{}}
	var layers []v1.Layer
	for _, path := range files {
		l, err := tarball.LayerFromFile(path)
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, l)
	}
	img := b.image(ref, v1.Config{}, layers...)
	tag, err := name.NewTag(r.host + "/" + ref)
	if b.err != nil || err != nil {
		t.Fatal(b.err, err)
	}
	if err := remote.Write(tag, img); err != nil {
		t.Fatal(err)
	}
}
