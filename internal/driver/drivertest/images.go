package drivertest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// layer is a tar of files by name; one that is a program is this host's busybox.
func layer(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for name, text := range files {
		if text == program {
			data, err := os.ReadFile("/usr/bin/busybox")
			if err != nil {
				t.Skipf("no static program at hand: apt install busybox-static: %v", err)
			}
			text = string(data)
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

const program = "a program"

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (b *bench) imager() sandbox.Imager { return b.Driver.(sandbox.Imager) }

func (b *bench) unpack(t *testing.T, digest string, data []byte) (sandbox.Layer, error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "blob")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return b.imager().Unpack(t.Context(), sandbox.LayerRequest{DiffID: digest}, f)
}

// image makes a template of an image for one claim.
func (b *bench) image(t *testing.T, change func(*sandbox.ImageRequest), layers ...[]byte) *template.Template {
	t.Helper()
	r := sandbox.ImageRequest{
		Tenant: b.Tenant, Name: fmt.Sprintf("img-%016x%016x", rand.Uint64(), rand.Uint64()), Description: "of a claim",
		Image: template.Image{Reference: "registry.test/claim:1", Platform: "linux/amd64"},
	}
	for _, data := range layers {
		l, err := b.unpack(t, digestOf(data), data)
		if err != nil {
			t.Fatalf("unpack: %v", err)
		}
		r.Image.Layers = append(r.Image.Layers, l.DiffID)
	}
	if change != nil {
		change(&r)
	}
	made, err := b.imager().AddImage(t.Context(), r)
	if err != nil {
		t.Fatalf("add image: %v", err)
	}
	t.Cleanup(func() { // the test's own ctx is over
		_ = b.Driver.RemoveTemplate(context.Background(), r.Tenant, r.Name) // the claim may have done so
		if _, err := b.imager().PruneLayers(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return made
}

// pulled asks for a template of the image that hosts can pull.
func (b *bench) pulled() sandbox.ImageRequest {
	r := sandbox.ImageRequest{
		Tenant: b.Tenant, Name: fmt.Sprintf("img-%016x%016x", 3, 4), Image: b.Image, Env: map[string]string{"COLOUR": "blue"}, Workdir: "/tmp/deep",
	}
	if r.Image.Digest == "" {
		r.Image = template.Image{Reference: "registry.test/claim:1", Digest: digestOf([]byte("a manifest"))}
	}
	return r
}

var images = []claim{
	{"a driver is an Imager if it says so", needsNothing, func(t *testing.T, b *bench) {
		if _, is := b.Driver.(sandbox.Imager); is != b.Driver.Caps().Images {
			t.Errorf("%v, says %v", is, b.Driver.Caps().Images)
		}
	}},
	{"a driver keeps images or has them pulled, and never both", needsNothing, func(t *testing.T, b *bench) {
		caps := b.Driver.Caps()
		if _, is := b.Driver.(sandbox.Puller); (caps.Images || caps.Pulls) && !is || caps.Images && caps.Pulls {
			t.Errorf("%v, says %+v", is, caps)
		}
	}},
	{"an image that hosts pull is the same template each time, and its tenant's", needsPulls, func(t *testing.T, b *bench) {
		r := b.pulled()
		first, err := b.Driver.(sandbox.Puller).AddImage(t.Context(), r)
		if err != nil || first.Tenant != b.Tenant || first.Name != r.Name || first.Image == nil || first.Image.Digest != r.Image.Digest || first.Env["COLOUR"] != "blue" {
			t.Fatalf("%+v %v", first, err)
		}
		second, err := b.Driver.(sandbox.Puller).AddImage(t.Context(), r)
		if err != nil || second.Digest != first.Digest {
			t.Errorf("%+v %v", second, err)
		}
		r.Image.Digest = digestOf([]byte("another"))
		if third, err := b.Driver.(sandbox.Puller).AddImage(t.Context(), r); err != nil || third.Digest == first.Digest {
			t.Errorf("%+v %v", third, err)
		}
	}},
	{"an image that hosts pull has a name, a tenant and a digest", needsPulls, func(t *testing.T, b *bench) {
		for _, spoil := range []func(*sandbox.ImageRequest){
			func(r *sandbox.ImageRequest) { r.Name = "other" }, func(r *sandbox.ImageRequest) { r.Tenant = "" },
			func(r *sandbox.ImageRequest) { r.Image.Digest = "latest" }, func(r *sandbox.ImageRequest) { r.User = "a b" },
		} {
			r := b.pulled()
			spoil(&r)
			_, err := b.Driver.(sandbox.Puller).AddImage(t.Context(), r)
			expectKind(t, err, fault.Invalid)
		}
	}},
	{"a sandbox starts from an image that its host pulls, with its variables and directory", needsPulledImage, func(t *testing.T, b *bench) {
		made, err := b.Driver.(sandbox.Puller).AddImage(t.Context(), b.pulled())
		if err != nil {
			t.Fatal(err)
		}
		s := b.from(t, made)
		if got := s.exec(t, agentapi.ExecParams{Argv: []string{"/bin/sh", "-c", "pwd; echo $COLOUR; echo kept > here; cat here"}}); got.stdout != "/tmp/deep\nblue\nkept\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a sandbox starts from an image, with its files, variables, directory and user", needsImages, func(t *testing.T, b *bench) {
		lower := layer(t, map[string]string{"busybox": program, "kept": "1", "gone": "x", "over": "old"})
		upper := layer(t, map[string]string{".wh.gone": "", "over": "new"})
		made := b.image(t, func(r *sandbox.ImageRequest) {
			r.Env, r.Workdir, r.User = map[string]string{"COLOUR": "blue"}, "/work", "123:456"
		}, lower, upper)
		if made.Image == nil || made.User != "123:456" || made.Python.Executable != "" || made.Tenant != b.Tenant {
			t.Errorf("%+v", made)
		}
		s := b.from(t, made)
		script := "/busybox cat /kept /over; test -e /gone && echo there; /busybox pwd; echo $COLOUR; /busybox id -u; /busybox id -g"
		if got := s.exec(t, agentapi.ExecParams{Argv: []string{"/busybox", "sh", "-c", script}}); got.stdout != "1new/work\nblue\n123\n456\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"an image that was added is only returned", needsImages, func(t *testing.T, b *bench) {
		made := b.image(t, nil, layer(t, map[string]string{"a": "1"}))
		again, err := b.imager().AddImage(t.Context(), sandbox.ImageRequest{Tenant: b.Tenant, Name: made.Name, Image: *made.Image})
		if err != nil || again.Digest != made.Digest {
			t.Errorf("%+v %v", again, err)
		}
	}},
	{"a layer that is not what its image says is refused", needsImages, func(t *testing.T, b *bench) {
		data := layer(t, map[string]string{"a": "1"})
		digest := digestOf([]byte("another"))
		_, err := b.unpack(t, digest, data)
		expectKind(t, err, fault.Invalid)
		if found, err := b.imager().Layers(t.Context(), []string{digest}); err != nil || len(found) != 0 {
			t.Errorf("%+v %v", found, err)
		}
		_, err = b.unpack(t, "sha256:../../x", data)
		expectKind(t, err, fault.Invalid)
	}},
	{"no more layers are asked about at once than an image can have", needsImages, func(t *testing.T, b *bench) {
		ids := slices.Repeat([]string{digestOf([]byte("never"))}, template.MaxImageLayers+1)
		if found, err := b.imager().Layers(t.Context(), ids[1:]); err != nil || len(found) != 0 {
			t.Errorf("%+v %v", found, err)
		}
		_, err := b.imager().Layers(t.Context(), ids)
		expectKind(t, err, fault.Invalid)
	}},
	{"to ask about a layer does not keep it", needsImages, func(t *testing.T, b *bench) {
		made := b.image(t, nil, layer(t, map[string]string{"unlike": "any other"}))
		if err := b.Driver.RemoveTemplate(t.Context(), b.Tenant, made.Name); err != nil {
			t.Fatal(err)
		}
		if found, err := b.imager().Layers(t.Context(), made.Image.Layers); err != nil || len(found) != 1 {
			t.Fatalf("%+v %v", found, err)
		}
		if _, err := b.imager().PruneLayers(t.Context()); err != nil {
			t.Fatal(err)
		}
		if found, err := b.imager().Layers(t.Context(), made.Image.Layers); err != nil || len(found) != 0 {
			t.Errorf("%+v %v", found, err)
		}
	}},
	{"an image of layers that are not there is refused", needsImages, func(t *testing.T, b *bench) {
		r := sandbox.ImageRequest{Tenant: b.Tenant, Name: fmt.Sprintf("img-%016x%016x", 1, 2), Image: template.Image{Layers: []string{digestOf([]byte("never"))}}}
		_, err := b.imager().AddImage(t.Context(), r)
		expectKind(t, err, fault.Conflict)
		r.Name, r.Image.Layers = "other", nil
		_, err = b.imager().AddImage(t.Context(), r)
		expectKind(t, err, fault.Invalid)
	}},
	{"an image is removed by its owner, and what runs from it goes on", needsImages, func(t *testing.T, b *bench) {
		made := b.image(t, nil, layer(t, map[string]string{"busybox": program, "kept": "1"}))
		s := b.from(t, made)
		expectKind(t, b.Driver.RemoveTemplate(t.Context(), "somebody else", made.Name), fault.NotFound)
		if err := b.Driver.RemoveTemplate(t.Context(), b.Tenant, made.Name); err != nil {
			t.Fatal(err)
		}
		if _, err := b.imager().PruneLayers(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := s.exec(t, agentapi.ExecParams{Argv: []string{"/busybox", "cat", "/kept"}}); got.stdout != "1" {
			t.Errorf("%+v", got)
		}
		again, err := b.imager().AddImage(t.Context(), sandbox.ImageRequest{Tenant: b.Tenant, Name: made.Name, Image: *made.Image})
		if err != nil || again.Digest != made.Digest {
			t.Fatalf("the same again: %+v %v", again, err)
		}
		if got := b.from(t, again).exec(t, agentapi.ExecParams{Argv: []string{"/busybox", "cat", "/kept"}}); got.stdout != "1" {
			t.Errorf("%+v", got)
		}
	}},
	{"a snapshot of a sandbox from an image outlives the image", needsImages, func(t *testing.T, b *bench) {
		if !b.Driver.Caps().Snapshot {
			t.Skip("the driver says that it cannot take snapshots")
		}
		made := b.image(t, nil, layer(t, map[string]string{"busybox": program, "kept": "1"}))
		s := b.from(t, made)
		s.exec(t, agentapi.ExecParams{Argv: []string{"/busybox", "cp", "/kept", "/more"}})
		snap := s.snapshot(t)
		if snap.Image == nil || snap.Image.Reference != made.Image.Reference {
			t.Errorf("%+v", snap.Image)
		}
		if err := b.Driver.RemoveTemplate(t.Context(), b.Tenant, made.Name); err != nil {
			t.Fatal(err)
		}
		if _, err := b.imager().PruneLayers(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := b.from(t, snap).exec(t, agentapi.ExecParams{Argv: []string{"/busybox", "cat", "/kept", "/more"}}); got.stdout != "11" {
			t.Errorf("%+v", got)
		}
	}},
}
