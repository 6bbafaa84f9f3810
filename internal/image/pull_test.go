package image_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func TestPull(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	img := newImage(t, 2, 5000)
	ref := p.push(t, "team/app:v1", img)
	var told []template.PullProgress
	got, err := w.Pull(t.Context(), acme, template.PullRequest{Reference: ref, Progress: func(p template.PullProgress) { told = append(told, p) }})
	must(t, err)
	c, err := img.ConfigFile()
	must(t, err)
	want := image.Info{
		Reference: ref, Digest: digestOf(t, img), Template: got.Template, Platform: "linux/amd64", Created: c.Created.Time, Pulled: got.Pulled, Bytes: got.Bytes,
		Layers: []string{c.RootFS.DiffIDs[0].String(), c.RootFS.DiffIDs[1].String()}, Entrypoint: []string{"/bin/entry"}, Cmd: []string{"serve"},
		Env: map[string]string{"PATH": "/bin", "GREETING": "hello=world"}, User: "app:staff", Workdir: "/srv", Labels: map[string]string{"maker": "us"}, Ports: []string{"80/tcp"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %+v\nwant %+v", got, want)
	}
	if got.Bytes < 10000 || time.Since(got.Pulled) > time.Minute || len(got.Template) != len("img-")+32 {
		t.Fatalf("odd: %+v", got)
	}
	if left := w.left(); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
	if last := told[len(told)-1]; told[0].Step != template.PullResolve || last.Step != template.PullDone || last.Layer != "" {
		t.Fatalf("told: %+v", told)
	}
	t.Run("a second create needs no registry", func(t *testing.T) {
		p.forget()
		for _, name := range []string{ref, got.Template} {
			tmpl, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: name})
			must(t, err)
			if tmpl.Name != got.Template || !slices.Equal(tmpl.Image.Ports, []string{"80/tcp"}) {
				t.Fatalf("%s is %+v", name, tmpl)
			}
		}
		if n := len(p.asked("")); n != 0 {
			t.Fatalf("%d requests", n)
		}
	})
	t.Run("a refresh of what is unchanged asks for the digest only", func(t *testing.T) {
		p.forget()
		_, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: ref, Refresh: true})
		must(t, err)
		if len(p.asked("HEAD /v2/team/app/manifests/v1")) != 1 || len(p.asked("GET /v2/team")) != 0 {
			t.Fatalf("asked %d requests", len(p.asked("")))
		}
	})
	t.Run("a refresh of what has moved pulls it, and the layers that are known stay", func(t *testing.T) {
		more, err := mutate.AppendLayers(img, mustLayer(t))
		must(t, err)
		p.push(t, "team/app:v1", more)
		tmpl, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: ref, Refresh: true})
		must(t, err)
		if tmpl.Image.Digest != digestOf(t, more) || w.driver.count() != 3 {
			t.Fatalf("%+v after %d unpacks", tmpl.Image, w.driver.count())
		}
	})
	t.Run("by digest", func(t *testing.T) {
		tmpl, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: strings.TrimSuffix(ref, ":v1") + "@" + digestOf(t, img)})
		must(t, err)
		if tmpl.Name != got.Template {
			t.Fatalf("another template: %s", tmpl.Name)
		}
	})
	t.Run("images are a tenant's own", func(t *testing.T) {
		all, err := w.List(t.Context(), globex)
		if err != nil || len(all) != 0 {
			t.Fatalf("%v %v", all, err)
		}
	})
}

func mustLayer(t *testing.T) v1.Layer {
	t.Helper()
	all, err := newImage(t, 1, 300).Layers()
	must(t, err)
	return all[0]
}

func TestEnsureWithoutRegistry(t *testing.T) {
	w := open(t, func(c *image.Config) {
		c.Map = map[string]string{"python:3.*-slim": "code-interpreter", "opensandbox/code-interpreter*": "code-interpreter", "gone:*": "no-such-template"}
	})
	for ref, want := range map[string]string{
		"python": "python", "base": "base", "python:3.12-slim": "code-interpreter", "docker.io/library/python:3.11.2-slim": "code-interpreter",
		"opensandbox/code-interpreter:v1.0.2": "code-interpreter", "opensandbox/code-interpreter": "code-interpreter",
	} {
		got, err := w.Ensure(t.Context(), globex, template.PullRequest{Reference: ref})
		if err != nil || got.Name != want {
			t.Errorf("%s is %v, %v", ref, got, err)
		}
	}
	for ref, kind := range map[string]fault.Kind{
		"": fault.Invalid, "UPPER": fault.Invalid, "a b": fault.Invalid, "user:secret@host/image": fault.Invalid, strings.Repeat("a", 5000): fault.Invalid,
		"x@sha256:12": fault.Invalid, "../etc/passwd": fault.Invalid,
	} {
		_, err := w.Ensure(t.Context(), globex, template.PullRequest{Reference: ref})
		wantKind(t, err, kind)
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("%v repeats a password", err)
		}
	}
	_, err := w.Ensure(t.Context(), globex, template.PullRequest{Reference: "python:3.12-slim", Platform: "linux/arm64"})
	wantKind(t, err, fault.NotFound, "linux/amd64")
	_, err = w.Ensure(t.Context(), globex, template.PullRequest{Reference: "python:3.12-slim", Platform: "linux"})
	wantKind(t, err, fault.Invalid, "os/arch")
}

func TestAnImageItselfCanBeHadWhateverIsMapped(t *testing.T) {
	p := newPlace(t)
	ref := p.push(t, "a:1", newImage(t, 1, 1000))
	w := open(t, func(c *image.Config) { c.Map = map[string]string{ref: "base"} })
	for _, unmapped := range []bool{false, true} {
		got, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: ref, Unmapped: unmapped})
		if err != nil || (got.Image != nil) != unmapped {
			t.Errorf("%v: %+v, %v", unmapped, got, err)
		}
	}
}

func TestDriverWithoutImages(t *testing.T) {
	w := open(t, nil)
	s, err := image.Open(image.Config{Dir: t.TempDir()}, nil, w.driver, w.store, discard)
	must(t, err)
	defer s.Close()
	if got, err := s.Ensure(t.Context(), acme, template.PullRequest{Reference: "python"}); err != nil || got.Name != "python" {
		t.Fatalf("%v %v", got, err)
	}
	_, err = s.Ensure(t.Context(), acme, template.PullRequest{Reference: "alpine"})
	wantKind(t, err, fault.Unsupported)
}

func TestPlatforms(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	amd, arm := newImage(t, 1, 100), configured(t, newImage(t, 1, 100), "arm64")
	attest := configured(t, newImage(t, 1, 10), "amd64")
	platform := func(i v1.Image, os, arch string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: i, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch}}}
	}
	both := mutate.AppendManifests(empty.Index, platform(arm, "linux", "arm64"), platform(attest, "unknown", "unknown"), platform(amd, "linux", "amd64"))
	got, err := w.pull(acme, p.push(t, "two:both", both))
	must(t, err)
	if got.Digest != digestOf(t, amd) || got.Platform != "linux/amd64" {
		t.Fatalf("%+v", got)
	}
	one := p.push(t, "two:one", mutate.AppendManifests(empty.Index, platform(arm, "linux", "arm64"), platform(arm, "linux", "s390x")))
	_, err = w.pull(acme, one)
	wantKind(t, err, fault.NotFound, "linux/amd64", "linux/arm64", "linux/s390x", one)
	_, err = w.pull(acme, p.push(t, "two:arm", arm))
	wantKind(t, err, fault.NotFound, "linux/arm64")
	nested := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: both, Descriptor: v1.Descriptor{}})
	got, err = w.pull(acme, p.push(t, "two:nested", nested))
	must(t, err)
	if got.Digest != digestOf(t, amd) {
		t.Fatalf("%+v", got)
	}
}

func TestManyLayers(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	got, err := w.pull(acme, p.push(t, "deep:127", newImage(t, 127, 20)))
	must(t, err)
	if len(got.Layers) != 127 || w.driver.count() != 127 {
		t.Fatalf("%d layers, %d unpacked", len(got.Layers), w.driver.count())
	}
	_, err = w.pull(acme, p.push(t, "deep:128", newImage(t, 128, 20)))
	wantKind(t, err, fault.Invalid, "128 layers", "127")
}

func TestWrongContent(t *testing.T) {
	img := newImage(t, 1, 50_000)
	blob, diff, good := firstLayer(t, img)
	cases := map[string]struct {
		hook  func(http.ResponseWriter, *http.Request) bool
		kind  fault.Kind
		words string
	}{
		"a broken layer": {func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, blob.String()) {
				return false
			}
			bad := bytes.Clone(good)
			bad[len(bad)/2] ^= 1
			w.Write(bad)
			return true
		}, fault.Unavailable, "layer"},
		"a layer that goes on": {func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, blob.String()) {
				return false
			}
			w.Write(append(bytes.Clone(good), 1))
			return true
		}, fault.Unavailable, "more"},
		"another manifest than the digest says": {func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			fmt.Fprint(w, `{"schemaVersion":2}`)
			return true
		}, fault.Unavailable, "digest"},
		"an endless manifest": {func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			w.Write(bytes.Repeat([]byte(" "), 5<<20))
			return true
		}, fault.Unavailable, "more"},
	}
	for what, c := range cases {
		t.Run(what, func(t *testing.T) {
			w, p := open(t, nil), newPlace(t)
			p.behave(c.hook)
			ref := p.push(t, "app:v1", img)
			_, err := w.pull(acme, strings.TrimSuffix(ref, ":v1")+"@"+digestOf(t, img))
			wantKind(t, err, c.kind, c.words, p.host())
			if len(w.driver.layers) != 0 {
				t.Fatal("a layer was unpacked")
			}
			p.behave(nil)
			if _, err := w.pull(acme, ref); err != nil {
				t.Fatalf("after that, a good one: %v", err)
			}
			if w.driver.layers[diff].DiffID == "" {
				t.Fatal("it is not unpacked")
			}
		})
	}
}

func TestNoImages(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	for what, c := range map[string]struct {
		manifest, kind string
		want           fault.Kind
		words          string
	}{
		"schema 1":         {`{"schemaVersion":1,"fsLayers":[{"blobSum":"x"}]}`, "application/vnd.docker.distribution.manifest.v1+prettyjws", fault.Unsupported, "first schema"},
		"a chart":          {`{"schemaVersion":2,"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","digest":"sha256:` + strings.Repeat("0", 64) + `","size":2},"layers":[]}`, "application/vnd.oci.image.manifest.v1+json", fault.Unsupported, "helm"},
		"an encrypted one": {`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:` + strings.Repeat("0", 64) + `","size":2},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip+encrypted","digest":"sha256:` + strings.Repeat("0", 64) + `","size":2}]}`, "application/vnd.oci.image.manifest.v1+json", fault.Unsupported, "encrypted"},
		"both":             {`{"schemaVersion":2,"manifests":[],"layers":[]}`, "application/vnd.oci.image.manifest.v1+json", fault.Invalid, "not a container image"},
		"nothing":          {`{}`, "application/vnd.oci.image.manifest.v1+json", fault.Invalid, "not a container image"},
		"no JSON":          {`<html>`, "text/html", fault.Invalid, "not a container image"},
		"a bad digest":     {`{"schemaVersion":2,"config":{"digest":"md5:1"},"layers":[]}`, "", fault.Invalid, "not a container image"},
	} {
		t.Run(what, func(t *testing.T) {
			p.behave(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.Contains(r.URL.Path, "/manifests/") {
					return false
				}
				w.Header().Set("Content-Type", c.kind)
				fmt.Fprint(w, c.manifest)
				return true
			})
			_, err := w.pull(acme, p.host()+"/odd:v1")
			wantKind(t, err, c.want, c.words)
		})
	}
}

func TestTooLarge(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.MaxBytes = 20_000 })
	_, err := w.pull(acme, p.push(t, "big:compressed", newImage(t, 3, 10_000)))
	wantKind(t, err, fault.Exhausted, "larger")
	if n := len(p.asked("GET /v2/big/blobs")); n != 1 { // its configuration
		t.Fatalf("%d downloads", n)
	}
	w.driver.onUnpack = func(_ context.Context, r sandbox.LayerRequest) error {
		if r.MaxBytes != 20_000 {
			t.Errorf("the driver was told %d", r.MaxBytes)
		}
		return fault.New(fault.Exhausted, "the layer is too large")
	}
	_, err = w.pull(acme, p.push(t, "big:unpacked", newImage(t, 1, 1000)))
	wantKind(t, err, fault.Exhausted, "the layer is too large", "big:unpacked")
	if left := w.left(); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
}

func TestUnknownDeniedUnreachable(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	ref := p.push(t, "app:v1", newImage(t, 1, 100))
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	dead.Close()
	var status int
	p.behave(func(w http.ResponseWriter, r *http.Request) bool {
		return status != 0 && strings.Contains(r.URL.Path, "/manifests/") && complain(w, status, "WHY")
	})
	for _, c := range []struct {
		ref    string
		status int
		kind   fault.Kind
		words  string
	}{
		{p.host() + "/nobody/knows:me", 0, fault.NotFound, "there is no image"},
		{p.host() + "/app:v2", 0, fault.NotFound, "app:v2"},
		{ref, 401, fault.Denied, "login"},
		{ref, 403, fault.Denied, "login"},
		{ref, 429, fault.Unavailable, "limits"},
		{ref, 500, fault.Unavailable, "status 500"},
		{dead.Addr().String() + "/app:v1", 0, fault.Unavailable, "takes no connections"},
		{"no-such-host.invalid/app:v1", 0, fault.Unavailable, "host name"},
	} {
		status = c.status
		_, err := w.pull(acme, c.ref)
		wantKind(t, err, c.kind, c.words, c.ref)
	}
}
