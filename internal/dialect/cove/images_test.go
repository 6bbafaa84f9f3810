package cove_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// shelf stands for whoever keeps images: it has what it was told to have, and says what it was asked.
type shelf struct {
	images map[string]*template.Template
	asked  []string
	slow   chan struct{} // a pull waits for it, if it is there
}

var debian = &template.Template{
	Name: "img-1", Digest: "d3", User: "root", Workdir: "/", Env: map[string]string{"A": "1"},
	Image: &template.Image{Reference: "docker.io/library/debian:13", Digest: "sha256:abc", Cmd: []string{"bash"}, Bytes: 5},
}

func (s *shelf) say(parts ...string) { s.asked = append(s.asked, strings.Join(parts, " ")) }

func (s *shelf) Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error) {
	s.say("ensure", tenant, r.Reference)
	if t := s.images[r.Reference]; t != nil {
		return t, nil
	}
	return nil, fault.New(fault.NotFound, "there is no image %s in its registry", r.Reference)
}

func (s *shelf) Pull(ctx context.Context, tenant string, r template.PullRequest) (client.ImageInfo, error) {
	s.say("pull", tenant, r.Reference, r.Username, r.Password, r.Platform)
	for i := range 1000 { // more often than anybody reads
		r.Progress(template.PullProgress{Step: template.PullDownload, Layer: "sha256:l", Done: int64(i + 1), Total: 1000})
	}
	if s.slow != nil {
		select {
		case <-s.slow:
		case <-ctx.Done():
			return client.ImageInfo{}, ctx.Err()
		}
	}
	if s.images[r.Reference] == nil {
		return client.ImageInfo{}, fault.New(fault.Unavailable, "the registry of %s cannot be reached; try again later", r.Reference)
	}
	return client.ImageInfo{Reference: r.Reference, Template: "img-1"}, nil
}

func (s *shelf) Import(_ context.Context, tenant, name string, r io.Reader) ([]client.ImageInfo, error) {
	b, err := io.ReadAll(r)
	s.say("import", tenant, name, string(b))
	return []client.ImageInfo{{Reference: name, Template: "img-2"}}, err
}

func (s *shelf) List(_ context.Context, tenant string) ([]client.ImageInfo, error) {
	s.say("list", tenant)
	return nil, nil
}

func (s *shelf) Inspect(_ context.Context, tenant, ref string) (client.ImageInfo, error) {
	s.say("inspect", tenant, ref)
	return client.ImageInfo{Reference: ref, Template: "img-1"}, nil
}

func (s *shelf) Remove(_ context.Context, tenant, ref string) error {
	s.say("remove", tenant, ref)
	return nil
}

func (s *shelf) Tag(_ context.Context, tenant, name, ref string, config template.Image) (client.ImageInfo, error) {
	s.say("tag", tenant, name, ref, strings.Join(config.Entrypoint, ","), strings.Join(config.Cmd, ","))
	return client.ImageInfo{Reference: ref, Template: name}, nil
}

func (s *shelf) Prune(_ context.Context, tenant string) (int64, []string, error) {
	s.say("prune", tenant)
	return 7, nil, nil
}

func (s *shelf) Login(_ context.Context, tenant, registry, username, password string) error {
	s.say("login", tenant, registry, username, password)
	return nil
}

func (s *shelf) Logout(_ context.Context, tenant, registry string) error {
	s.say("logout", tenant, registry)
	return nil
}

func (s *shelf) Logins(_ context.Context, tenant string) ([]string, error) {
	return []string{"ghcr.io"}, nil
}

func (s *shelf) Volumes(context.Context, auth.Principal) ([]sandbox.Volume, error) {
	return []sandbox.Volume{{Name: "data", Bytes: 10, Used: 2, InUse: 1}}, nil
}

func (s *shelf) CreateVolume(_ context.Context, p auth.Principal, name string, bytes int64) (sandbox.Volume, error) {
	if name == "data" {
		return sandbox.Volume{}, fault.New(fault.Conflict, "there is a volume data already")
	}
	return sandbox.Volume{Name: name, Bytes: bytes}, nil
}

func (s *shelf) RemoveVolume(_ context.Context, p auth.Principal, name string) error {
	s.say("remove volume", p.Tenant, name)
	return nil
}

func imageWorld(t *testing.T) (*world, *shelf) {
	t.Helper()
	w := newWorld(t)
	s := &shelf{images: map[string]*template.Template{"debian:13": debian, "python": python}}
	w.api.SetImages(s)
	w.api.SetVolumes(s)
	return w, s
}

func (s *shelf) want(t *testing.T, asked ...string) {
	t.Helper()
	if diff := cmp.Diff(asked, s.asked); diff != "" {
		t.Error(diff)
	}
	s.asked = nil
}

func TestASandboxStartsFromAnImage(t *testing.T) {
	w, s := imageWorld(t)
	w.driver.templates.owned = append(w.driver.templates.owned, &template.Template{Name: "img-1", Tenant: "acme", Snapshot: &template.Snapshot{}})
	sb, err := w.client.Create(t.Context(), client.CreateRequest{Image: "debian:13"})
	if err != nil {
		t.Fatal(err)
	}
	if sb.Template != "img-1" || sb.Image != "debian:13" {
		t.Errorf("%+v", sb.SandboxInfo)
	}
	s.want(t, "ensure acme debian:13")
	for name, req := range map[string]client.CreateRequest{
		"both":               {Image: "debian:13", Template: "python"},
		"a start of nothing": {Start: true},
		"a wild mount":       {Mounts: []client.Mount{{Kind: "nfs", Source: "x", Target: "/x"}}},
	} {
		if _, err := w.client.Create(t.Context(), req); client.KindOf(err) != client.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := w.client.Create(t.Context(), client.CreateRequest{Image: "none"}); client.KindOf(err) != client.NotFound {
		t.Errorf("error is %v", err)
	}
}

func TestASandboxBeginsWithWhatItsImageStarts(t *testing.T) {
	w, s := imageWorld(t)
	made := filepath.Join(t.TempDir(), "made")
	for name, image := range map[string]template.Image{
		"app":    {Entrypoint: []string{"/bin/sh", "-c", `echo "$0 $1" > ` + made}, Cmd: []string{"a", "b"}},
		"broken": {Cmd: []string{"/no/such/program"}},
		"data":   {},
	} {
		own := &template.Template{Name: "img-" + name, Tenant: "acme", Image: &image, Snapshot: &template.Snapshot{}}
		s.images[name], w.driver.templates.owned = own, append(w.driver.templates.owned, own)
	}
	sb, err := w.client.Create(t.Context(), client.CreateRequest{Image: "app", Start: true})
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if text, _ := os.ReadFile(made); string(text) == "a b\n" {
			break
		} else if time.Now().After(end) {
			t.Fatalf("it has not begun: %q", text)
		}
	}
	if err := sb.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"broken", "data"} {
		if _, err := w.client.Create(t.Context(), client.CreateRequest{Image: name, Start: true}); err == nil {
			t.Errorf("%s has begun", name)
		}
	}
	for sb, err := range w.client.List(t.Context(), client.ListRequest{}) {
		if err != nil || sb.State != "ended" {
			t.Errorf("%+v %v is left", sb, err)
		}
	}
}

func TestPull(t *testing.T) {
	w, s := imageWorld(t)
	s.slow = make(chan struct{})
	var events []client.PullEvent
	info, err := w.client.PullImage(t.Context(), client.PullRequest{Reference: "debian:13", Username: "u", Password: "p", Platform: "linux/arm64"}, func(e client.PullEvent) {
		if events = append(events, e); len(events) == 1 {
			close(s.slow)
		}
	})
	if err != nil || info.Template != "img-1" {
		t.Fatalf("%+v, %v", info, err)
	}
	if len(events) == 0 || len(events) > 3 || events[len(events)-1] != (client.PullEvent{Type: "progress", Step: "download", Layer: "sha256:l", Done: 1000, Total: 1000}) {
		t.Errorf("events %+v", events)
	}
	s.want(t, "pull acme debian:13 u p linux/arm64")

	info, err = w.client.PullImage(t.Context(), client.PullRequest{Reference: "debian:13", IfMissing: true}, nil)
	want := &client.ImageInfo{
		Reference: "docker.io/library/debian:13", Digest: "sha256:abc", Template: "img-1", Bytes: 5, Cmd: []string{"bash"},
		User: "root", Workdir: "/", Env: map[string]string{"A": "1"},
	}
	if diff := cmp.Diff(want, info); err != nil || diff != "" {
		t.Error(err, diff)
	}
	info, err = w.client.PullImage(t.Context(), client.PullRequest{Reference: "python", IfMissing: true}, nil)
	if err != nil || info.Template != "python" || info.Digest != "d1" || info.Reference != "python" {
		t.Errorf("a template as an image: %+v, %v", info, err)
	}
	s.asked = nil

	// The first words have been sent, so the failure is the last line; without any it is a status.
	_, err = w.client.PullImage(t.Context(), client.PullRequest{Reference: "away"}, nil)
	var explained *client.Error
	if !errors.As(err, &explained) || explained.Kind != client.Unavailable || !strings.Contains(explained.Message, "cannot be reached") {
		t.Errorf("error is %v", err)
	}
	if _, err = w.client.PullImage(t.Context(), client.PullRequest{Reference: "away", IfMissing: true}, nil); client.KindOf(err) != client.NotFound {
		t.Errorf("error is %v", err)
	}
}

func TestWhoLeavesEndsTheirPartOfAPull(t *testing.T) {
	w, s := imageWorld(t)
	s.slow = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := w.client.PullImage(ctx, client.PullRequest{Reference: "debian:13"}, func(client.PullEvent) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	w.Close() // waits for the handler, which waits for the pull
}

func TestImagesRegistriesAndVolumes(t *testing.T) {
	w, s := imageWorld(t)
	ctx := t.Context()
	list, err := w.client.ImportImage(ctx, "mine:1", strings.NewReader("a tar"))
	if err != nil || len(list) != 1 || list[0].Reference != "mine:1" {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := w.client.Image(ctx, "ghcr.io/a/b@sha256:1"); err != nil {
		t.Error(err)
	}
	if _, err := w.client.TagImage(ctx, client.TagRequest{Template: "bld-1", Reference: "x:1", Entrypoint: []string{"a"}, Cmd: []string{"b", "c"}}); err != nil {
		t.Error(err)
	}
	if err := w.client.RemoveImage(ctx, "a/b:c"); err != nil {
		t.Error(err)
	}
	if r, err := w.client.PruneImages(ctx); err != nil || r.FreedBytes != 7 || r.Removed == nil {
		t.Errorf("%+v, %v", r, err)
	}
	if err := w.client.Login(ctx, client.LoginRequest{Registry: "r:5000", Username: "u", Password: "s3cret"}); err != nil {
		t.Error(err)
	}
	if list, err := w.client.Registries(ctx); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	if err := w.client.Logout(ctx, "r:5000"); err != nil {
		t.Error(err)
	}
	s.want(t, "import acme mine:1 a tar", "inspect acme ghcr.io/a/b@sha256:1", "tag acme bld-1 x:1 a b,c", "remove acme a/b:c", "prune acme",
		"login acme r:5000 u s3cret", "logout acme r:5000")

	volumes, err := w.client.Volumes(ctx)
	if diff := cmp.Diff([]client.Volume{{Name: "data", Bytes: 10, UsedBytes: 2, Sandboxes: 1}}, volumes); err != nil || diff != "" {
		t.Error(err, diff)
	}
	if v, err := w.client.CreateVolume(ctx, client.VolumeRequest{Name: "new", Bytes: 3}); err != nil || v.Bytes != 3 {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := w.client.CreateVolume(ctx, client.VolumeRequest{Name: "data"}); client.KindOf(err) != client.Conflict {
		t.Errorf("error is %v", err)
	}
	if err := w.client.RemoveVolume(ctx, "data"); err != nil {
		t.Error(err)
	}
	s.want(t, "remove volume acme data")
}

func TestBadInputAboutImages(t *testing.T) {
	w, s := imageWorld(t)
	for _, tc := range []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"POST", "/images/pull", ``, 400, "the request has no body"},
		{"POST", "/images/pull", `{"reference":""}`, 400, "the name of the image is missing"},
		{"POST", "/images/pull", `{"ref":"x"}`, 400, "unknown field"},
		{"GET", "/images/inspect", ``, 400, `\"ref\" is missing`},
		{"DELETE", "/images", ``, 400, `\"ref\" is missing`},
		{"DELETE", "/images?name=x", ``, 400, "unknown query parameter"},
		{"POST", "/images/tag", `{"template":"x","reference":""}`, 400, "the name of the image is missing"},
		{"POST", "/images/import?nam=x", `x`, 400, "unknown query parameter"},
		{"POST", "/registries", `{"registry":"x","username":"u"}`, 400, `field \"password\" is missing`},
		{"POST", "/registries", `{"registry":"x","username":"u","password":""}`, 400, "username and password"},
		{"POST", "/registries", `{"registry":"x","username":"u","password":5}`, 400, "wants a string"},
	} {
		status, body := w.do(t, tc.method, tc.path, tc.body)
		if status != tc.status || !strings.Contains(string(body), tc.says) {
			t.Errorf("%s %s %s: %d %s", tc.method, tc.path, tc.body, status, body)
		}
	}
	if len(s.asked) != 0 {
		t.Errorf("asked %q", s.asked)
	}
}

func TestAServerWithoutImagesSaysSo(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{"/images", "/images/inspect?ref=x", "/registries", "/volumes"} {
		status, body := w.do(t, "GET", path, "")
		var e client.ErrorBody
		if status != http.StatusNotImplemented || json.Unmarshal(body, &e) != nil || e.Error.Kind != client.Unsupported {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if _, err := w.client.Create(t.Context(), client.CreateRequest{Image: "x"}); client.KindOf(err) != client.Unsupported {
		t.Errorf("error is %v", err)
	}
}

func TestASnapshotHasDefaultsOfItsOwn(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	got, err := sb.Snapshot(t.Context(), client.SnapshotRequest{Name: "bld-1", Env: map[string]string{"A": "1"}, User: "app", Workdir: "/app"})
	if err != nil || got.Name != "bld-1" {
		t.Fatalf("%+v, %v", got, err)
	}
	want := sandbox.SnapshotRequest{ID: sb.ID, Tenant: "acme", Name: "bld-1", Env: map[string]string{"A": "1"}, User: "app", Workdir: "/app"}
	if diff := cmp.Diff(want, w.driver.snapshot); diff != "" {
		t.Error(diff)
	}
}
