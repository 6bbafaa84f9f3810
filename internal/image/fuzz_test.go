package image_test

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/covehq/cove/internal/image"
)

// A name that is taken means the same when it is completed, and no name is a path out of its place.
func FuzzReference(f *testing.F) {
	for _, s := range []string{"python", "python:3.12-slim", "ghcr.io/a/b@sha256:" + strings.Repeat("0", 64), "localhost:5000/x", "docker.io/library/x", "a/../b", "u:p@h/x", "*", "[::1]:5/x:y"} {
		f.Add(s, "python:3.*", "template")
	}
	f.Fuzz(func(t *testing.T, text, pattern, name string) {
		full, mapped, err := image.Complete(text, map[string]string{pattern: name})
		if err != nil {
			return
		}
		again, _, err := image.Complete(full, map[string]string{"x": "y"})
		if err != nil || again != full {
			t.Fatalf("%q is %q is %q, %v", text, full, again, err)
		}
		if strings.Contains(full, "/../") || strings.Contains(full, "//") || strings.ContainsAny(full, " \n\x00") {
			t.Fatalf("%q is %q", text, full)
		}
		if mapped != "" && (mapped != name || strings.Contains(full, "@")) {
			t.Fatalf("%q is mapped to %q by %q", text, mapped, pattern)
		}
		if host, err := image.ParseRegistry(text); err == nil && strings.ContainsAny(host, "/@ \n") {
			t.Fatalf("%q is the registry %q", text, host)
		}
	})
}

// A star stands for any text without a slash.
func FuzzMatches(f *testing.F) {
	f.Add("python:3.*-slim", "python:3.12-slim")
	f.Add("a*b*c", "aXbbYc")
	f.Add("**", "x/y")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		if len(pattern) > 12 || len(text) > 24 {
			return
		}
		if got, want := image.Matches(pattern, text), slowly(pattern, text); got != want {
			t.Fatalf("%q matches %q: %v", pattern, text, got)
		}
	})
}

func slowly(pattern, text string) bool {
	switch {
	case pattern == "":
		return text == ""
	case pattern[0] == '*':
		return slowly(pattern[1:], text) || text != "" && text[0] != '/' && slowly(pattern, text[1:])
	}
	return text != "" && text[0] == pattern[0] && slowly(pattern[1:], text[1:])
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"sha256:`+strings.Repeat("0", 64)+`","platform":{"os":"linux","architecture":"amd64"}}]}`), []byte(`{}`))
	f.Add([]byte(`{"schemaVersion":2,"config":{"digest":"sha256:`+strings.Repeat("0", 64)+`"},"layers":[]}`), []byte(`{"os":"linux","architecture":"amd64","config":{"Env":["A=b"]}}`))
	f.Fuzz(func(_ *testing.T, manifest, config []byte) { _ = image.Describe(manifest, config, "linux/amd64") })
}

func FuzzDockerConfig(f *testing.F) {
	f.Add([]byte(`{"auths":{"x.io":{"auth":"dTpw"}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if bytes.Contains(bytes.ToLower(text), []byte("cred")) || bytes.Contains(text, []byte(`\`)) {
			return // that would run programs
		}
		_, _, _ = image.DockerConfig(t.Context(), text, "x.io")
	})
}

// Whatever an archive says, nothing is read but what is in it.
func FuzzArchive(f *testing.F) {
	t := &testing.T{}
	f.Add(saved(t, map[string]v1.Image{"app:v1": newImage(t, 1, 10)}))
	f.Add(tarOf(t, tar.Header{Name: "oci-layout"}, tar.Header{Name: "index.json", Uname: `{"schemaVersion":2,"manifests":[]}`}))
	f.Add(tarOf(t, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "l"}, tar.Header{Name: "manifest.json", Uname: `[{"Config":"l","Layers":["l"]}]`}))
	service, err := image.Open(image.Config{Dir: f.TempDir(), Platform: "linux/amd64"}, nil, nil, nil, discard)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(service.Close)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, raw []byte) {
		file, err := os.Create(filepath.Join(dir, "archive"))
		must(t, err)
		defer file.Close()
		_, err = file.Write(raw)
		must(t, err)
		_, _, _ = service.Archived(t.Context(), file)
	})
}
