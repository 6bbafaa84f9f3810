package image_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// pullingDriver is a driver whose hosts pull images themselves.
type pullingDriver struct{ of *fakeImager }

func (d pullingDriver) AddImage(_ context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	d.of.mu.Lock()
	defer d.of.mu.Unlock()
	made := &template.Template{Name: req.Name, Tenant: req.Tenant, Digest: "of-" + req.Name, Env: req.Env, User: req.User, Workdir: req.Workdir, Image: &req.Image}
	d.of.templates[req.Tenant+"/"+req.Name] = made
	return made, nil
}

// openRemote is a service whose driver's hosts pull images themselves.
func openRemote(t *testing.T, change func(*image.Config)) *world {
	t.Helper()
	w := open(t, nil)
	w.Close()
	cfg := image.Config{Dir: filepath.Join(w.dir, "images"), Operator: acme, Platform: "linux/amd64"}
	if change != nil {
		change(&cfg)
	}
	s, err := image.Open(cfg, pullingDriver{w.driver}, w.driver, w.store, discard)
	must(t, err)
	t.Cleanup(s.Close)
	w.Service = s
	return w
}

func TestHostsThatPullNeedNoLayer(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, func(c *image.Config) { c.Insecure, c.MaxTenantBytes = []string{p.host()}, 10 })
	img := newImage(t, 3, 10_000)
	ref := p.push(t, "team/app:v1", img)
	made, err := w.Ensure(t.Context(), globex, template.PullRequest{Reference: ref})
	must(t, err)
	if made.Tenant != globex || made.Image.Reference != ref || made.Image.Digest != digestOf(t, img) || made.Env["GREETING"] != "hello=world" || made.Workdir != "/srv" || made.User != "app:staff" {
		t.Errorf("%+v %+v", made, made.Image)
	}
	if parts := p.asked("GET /v2/team/app/blobs/"); len(parts) != 1 {
		t.Errorf("%d parts were downloaded, besides the configuration none is needed", len(parts)-1)
	}
	if w.driver.count() != 0 || len(w.left()) != 0 {
		t.Errorf("%d layers were unpacked, %v is left", w.driver.count(), w.left())
	}
	t.Run("and the registry is not asked again", func(t *testing.T) {
		p.forget()
		again, err := w.Ensure(t.Context(), globex, template.PullRequest{Reference: ref})
		if err != nil || again.Name != made.Name || len(p.asked("")) != 0 {
			t.Errorf("%+v %v %d", again, err, len(p.asked("")))
		}
	})
	t.Run("what is there is listed, shown and removed", func(t *testing.T) {
		list, err := w.List(t.Context(), globex)
		if err != nil || len(list) != 1 || list[0].Reference != ref || list[0].Bytes == 0 {
			t.Errorf("%+v %v", list, err)
		}
		if list, err := w.List(t.Context(), acme); err != nil || len(list) != 0 {
			t.Errorf("another tenant sees %+v %v", list, err)
		}
		if _, err := w.Inspect(t.Context(), globex, digestOf(t, img)); err != nil {
			t.Error(err)
		}
		must(t, w.Remove(t.Context(), globex, ref))
		if _, err := w.driver.Resolve(t.Context(), globex, made.Name); !fault.Is(err, fault.NotFound) {
			t.Errorf("%v", err)
		}
		if _, _, err := w.Prune(t.Context(), globex); err != nil {
			t.Error(err)
		}
	})
	t.Run("an archive is not for them", func(t *testing.T) {
		_, err := w.Import(t.Context(), globex, "", strings.NewReader("x"), nil)
		wantKind(t, err, fault.Unsupported, "push the image")
	})
	t.Run("what no registry has is told at once", func(t *testing.T) {
		_, err := w.Ensure(t.Context(), globex, template.PullRequest{Reference: p.host() + "/team/none:v1"})
		wantKind(t, err, fault.NotFound, "there is no image")
	})
	t.Run("another platform is not for them", func(t *testing.T) {
		_, err := w.pull(globex, p.push(t, "arm:v1", configured(t, img, "arm64")))
		wantKind(t, err, fault.NotFound, "linux/arm64")
	})
}

func TestOneImageAtTwoPlacesIsTwo(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, nil)
	img := newImage(t, 1, 100)
	first, err := w.pull(acme, p.push(t, "a/app:v1", img))
	must(t, err)
	second, err := w.pull(acme, p.push(t, "b/app:v1", img))
	must(t, err)
	if first.Template == second.Template || first.Digest != second.Digest {
		t.Errorf("%+v %+v", first, second)
	}
	third, err := w.pull(acme, p.host()+"/a/app@"+first.Digest)
	if err != nil || third.Template != first.Template {
		t.Errorf("%+v %v", third, err)
	}
}

func TestOperatorsAllowImagesByName(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, func(c *image.Config) { c.Pulls.Allow = []string{p.host() + "/team/*", "docker.io/library/python"} })
	_, err := w.pull(acme, p.push(t, "team/app:v1", newImage(t, 1, 100)))
	must(t, err)
	for _, ref := range []string{p.host() + "/team/deep/app:v1", p.host() + "/app:v1", "python.example/library/python:3", "docker.io/python/python", "docker.io/library/pythonic"} {
		p.forget()
		_, err := w.pull(acme, ref)
		wantKind(t, err, fault.Denied, "allows images by name")
		if len(p.asked("")) != 0 {
			t.Errorf("the registry was asked for %s", ref)
		}
	}
}

// A node may have credentials that open more than a tenant may see: so a registry gives an image to the tenant itself, or nobody runs it.
func TestNodesCredentialsAreNobodysElse(t *testing.T) {
	p := newPlace(t)
	docker := filepath.Join(t.TempDir(), "config.json")
	must(t, os.WriteFile(docker, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, p.host(), base64.StdEncoding.EncodeToString([]byte(user+":"+secret))), 0o600))
	ref := p.push(t, "secret/app:v1", newImage(t, 1, 100))
	p.behave(wantsBasic)
	ask := template.PullRequest{Reference: ref, Username: user, Password: secret}
	t.Run("with Secrets of the operator's", func(t *testing.T) {
		w := openRemote(t, func(c *image.Config) {
			c.Insecure, c.DockerConfig, c.Pulls.Credentials = []string{p.host()}, docker, true
		})
		_, err := w.pull(globex, ref)
		wantKind(t, err, fault.Denied, "login")
		if _, err := w.Pull(t.Context(), globex, ask); err != nil {
			t.Errorf("a tenant that may read it does not get it: %v", err)
		}
		_, err = w.pull("initech", ref)
		wantKind(t, err, fault.Denied, "login")
		if _, err := w.pull(acme, ref); err != nil {
			t.Errorf("the operator's own: %v", err)
		}
		must(t, w.Login(t.Context(), "initech", p.host(), user, secret))
		if _, err := w.pull("initech", ref); err != nil {
			t.Errorf("one who has logged in: %v", err)
		}
	})
	t.Run("without", func(t *testing.T) {
		p.forget()
		w := openRemote(t, func(c *image.Config) { c.Insecure, c.DockerConfig = []string{p.host()}, docker })
		_, err := w.Pull(t.Context(), globex, ask)
		wantKind(t, err, fault.Unsupported, "public image", "pull_secrets")
		wantKind(t, w.Login(t.Context(), globex, p.host(), user, secret), fault.Unsupported, "pull_secrets")
		_, err = w.pull(acme, ref)
		wantKind(t, err, fault.Denied)
		for _, r := range p.asked("") {
			if r.Header.Get("Authorization") != "" {
				t.Error("credentials were sent that nodes do not have")
			}
		}
	})
}

// pushChanged pushes an image with another manifest.
func (p *place) pushChanged(t *testing.T, repository string, img v1.Image, change func(*v1.Manifest)) string {
	t.Helper()
	ref := p.push(t, repository+":v1", img)
	m, err := img.Manifest()
	must(t, err)
	m = m.DeepCopy()
	change(m)
	body, err := json.Marshal(m)
	must(t, err)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, p.URL+"/v2/"+repository+"/manifests/v1", bytes.NewReader(body))
	must(t, err)
	req.Header.Set("Content-Type", string(m.MediaType))
	answer, err := http.DefaultClient.Do(req)
	must(t, err)
	answer.Body.Close()
	if answer.StatusCode != http.StatusCreated {
		t.Fatal(answer.Status)
	}
	return ref
}

func TestHostsAreSentNowhereElse(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, nil)
	elsewhere := []string{"http://169.254.169.254/latest/meta-data"}
	for name, change := range map[string]func(*v1.Manifest){
		"a layer":                   func(m *v1.Manifest) { m.Layers[1].URLs = elsewhere },
		"the configuration":         func(m *v1.Manifest) { m.Config.URLs = elsewhere },
		"a layer of Docker's":       func(m *v1.Manifest) { m.Layers[0].MediaType = types.DockerForeignLayer },
		"one not to be distributed": func(m *v1.Manifest) { m.Layers[0].MediaType = types.OCIRestrictedLayer },
		"and another without gzip":  func(m *v1.Manifest) { m.Layers[0].MediaType = types.OCIUncompressedRestrictedLayer },
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.pull(acme, p.pushChanged(t, "team/app", newImage(t, 2, 100), change))
			wantKind(t, err, fault.Unsupported, "other addresses")
		})
	}
}

// worded is an image with another configuration.
func worded(t *testing.T, change func(*v1.Config)) v1.Image {
	t.Helper()
	img := newImage(t, 1, 100)
	c, err := img.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	change(&c.Config)
	img, err = mutate.ConfigFile(img, c)
	must(t, err)
	return img
}

func TestOfAnImageThatHostsPullLittleIsKept(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, nil)
	long := strings.Repeat("x", 70_000)
	made, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: p.push(t, "labels:v1", worded(t, func(c *v1.Config) { c.Labels = map[string]string{"doc": long} }))})
	if err != nil || made.Image.Labels != nil || made.Env["GREETING"] != "hello=world" {
		t.Errorf("%+v %v", made, err)
	}
	for name, change := range map[string]func(*v1.Config){
		"env":     func(c *v1.Config) { c.Env = append(c.Env, "LONG="+long) },
		"command": func(c *v1.Config) { c.Cmd = []string{long} },
		"escaped": func(c *v1.Config) { c.Cmd = []string{strings.Repeat("\x01", 20_000)} },
	} {
		_, err := w.pull(acme, p.push(t, name+":v1", worded(t, change)))
		wantKind(t, err, fault.Invalid, "too large")
	}
}

func TestATenantHasSoManyNamesOfImages(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, nil)
	ref := p.push(t, "app:v1", newImage(t, 1, 100))
	first, err := w.pull(acme, ref)
	must(t, err)
	_, err = w.Tag(t.Context(), acme, first.Template, "mine", template.Image{Cmd: []string{strings.Repeat("x", 40_000)}})
	wantKind(t, err, fault.Invalid, "too large")
	for n := range image.MaxNames - 1 {
		must(t, w.store.PutDocument(t.Context(), acme, "image-ref", fmt.Sprintf("docker.io/library/n:%d", n), fmt.Appendf(nil, `{"template":%q}`, first.Template)))
	}
	_, err = w.Tag(t.Context(), acme, first.Template, "mine", template.Image{})
	wantKind(t, err, fault.Exhausted, "names of images")
	before := len(w.driver.templates)
	_, err = w.pull(acme, p.push(t, "other:v1", newImage(t, 1, 100)))
	wantKind(t, err, fault.Exhausted, "names of images")
	if all := len(w.driver.templates); all != before {
		t.Errorf("%d templates are there that have no name", all-before)
	}
	if _, err := w.pull(acme, ref); err != nil {
		t.Errorf("one that has its name: %v", err)
	}
	if list, err := w.List(t.Context(), acme); err != nil || len(list) != image.MaxNames {
		t.Errorf("%d %v", len(list), err)
	}
}

func TestWhatCannotBeUsedAnyMoreCanBeRemoved(t *testing.T) {
	for name, remove := range map[string]func(w *world, ref string) error{
		"by its name": func(w *world, ref string) error { return w.Remove(t.Context(), acme, ref) },
		"by a prune": func(w *world, _ string) error {
			_, _, err := w.Prune(t.Context(), acme)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			w := openRemote(t, nil)
			before := len(w.driver.templates)
			ref := p.push(t, "app:v1", newImage(t, 1, 100))
			_, err := w.pull(acme, ref)
			must(t, err)
			w.driver.unusable = true
			must(t, remove(w, ref))
			if names, err := w.store.DocumentIDs(t.Context(), acme, "image-ref"); err != nil || len(names) != 0 || len(w.driver.templates) != before {
				t.Errorf("%v and %d templates are left, %v", names, len(w.driver.templates)-before, err)
			}
			wantKind(t, w.Remove(t.Context(), acme, ref), fault.NotFound, "no image")
		})
	}
}

func TestAListDoesNotRepeatWhatImagesSay(t *testing.T) {
	p := newPlace(t)
	w := openRemote(t, nil)
	ref := p.push(t, "app:v1", worded(t, func(c *v1.Config) { c.Labels, c.Cmd = map[string]string{"a": "b"}, []string{"run"} }))
	_, err := w.pull(acme, ref)
	must(t, err)
	list, err := w.List(t.Context(), acme)
	if err != nil || len(list) != 1 || list[0].Env != nil || list[0].Labels != nil || list[0].Cmd != nil || list[0].Digest == "" {
		t.Errorf("%+v %v", list, err)
	}
	if one, err := w.Inspect(t.Context(), acme, ref); err != nil || one.Labels["a"] != "b" || one.Env["GREETING"] == "" {
		t.Errorf("%+v %v", one, err)
	}
}

func TestNobodyLogsInWhereImagesAreOff(t *testing.T) {
	w := open(t, nil)
	p := newPlace(t)
	s, err := image.Open(image.Config{Dir: t.TempDir(), Pulls: image.Pulls{Off: "set this"}}, nil, w.driver, w.store, discard)
	must(t, err)
	t.Cleanup(s.Close)
	wantKind(t, s.Login(t.Context(), globex, p.host(), user, secret), fault.Unsupported, "set this")
	if len(p.asked("")) != 0 {
		t.Error("credentials were sent")
	}
}

func TestImagesThatAreOffSayHowToTurnThemOn(t *testing.T) {
	w := open(t, nil)
	s, err := image.Open(image.Config{Dir: t.TempDir(), Pulls: image.Pulls{Off: "set this"}}, nil, w.driver, w.store, discard)
	must(t, err)
	t.Cleanup(s.Close)
	_, err = s.Ensure(t.Context(), globex, template.PullRequest{Reference: "docker.io/library/alpine"})
	wantKind(t, err, fault.Unsupported, "set this")
	if found, err := s.Ensure(t.Context(), globex, template.PullRequest{Reference: "python"}); err != nil || found.Name != "python" {
		t.Errorf("%+v %v", found, err)
	}
}
