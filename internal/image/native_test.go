package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/resolver"
	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// TestMain is also the maker and its helpers: the driver starts its own program again with those commands.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "maker":
			if err := maker.Main(os.Args[2:], native.Tag, []string{"/proc/self/exe", "resolver"}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		case "resolver":
			os.Exit(resolver.Main(os.Args[2:], os.Stderr))
		case "unpack":
			os.Exit(unpack.Main(os.Args[2:], os.Stderr))
		}
	}
	os.Exit(m.Run())
}

// real is a service over a driver that makes sandboxes.
type real struct {
	*image.Service
	t       *testing.T
	dir     string
	manager *sandbox.Manager
}

// made are the templates of a real driver.
type made struct {
	*template.Store
	driver *native.Driver
}

func (m made) List(tenant string) []template.Info { return m.ListFor(tenant) }
func (m made) Resolve(ctx context.Context, tenant, name string) (*template.Template, error) {
	return m.ResolveFor(ctx, tenant, name)
}
func (m made) RemoveTemplate(ctx context.Context, tenant, name string) error {
	return m.driver.RemoveTemplate(ctx, tenant, name)
}

func openReal(t *testing.T) *real {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes real sandboxes, which needs root")
	}
	dir, err := os.MkdirTemp("", "cove-images")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	must(t, os.MkdirAll(filepath.Join(dir, "templates"), 0o755))
	driver, err := native.Open(t.Context(), native.Config{DataDir: dir, Log: log, Launch: native.LaunchSelf("--pool", "1")})
	must(t, err)
	t.Cleanup(func() {
		must(t, driver.Shutdown(context.Background())) // the test's own context is over
		must(t, driver.Close())
	})
	templates, err := template.Open(template.Options{Dir: filepath.Join(dir, "templates"), Log: log})
	must(t, err)
	db, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	must(t, err)
	t.Cleanup(func() { db.Close() })
	all := made{templates, driver}
	manager := sandbox.NewManager(sandbox.Config{}, driver, db, all, sandbox.NopObserver{}, log)
	must(t, manager.Open(t.Context()))
	t.Cleanup(func() { manager.Close() })
	s, err := image.Open(image.Config{Dir: filepath.Join(dir, "images"), Operator: acme, MaxBytes: 64 << 20}, driver, all, db, log)
	must(t, err)
	t.Cleanup(s.Close)
	return &real{s, t, dir, manager}
}

// run starts a sandbox from an image and returns what a shell says in it.
func (r *real) run(tenant, ref, line string) (string, error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	tmpl, err := r.Ensure(ctx, tenant, template.PullRequest{Reference: ref})
	if err != nil {
		return "", err
	}
	who := auth.Principal{Tenant: tenant}
	sb, _, err := r.manager.Create(ctx, who, sandbox.Spec{Template: tmpl.Name})
	if err != nil {
		return "", err
	}
	defer r.manager.Kill(context.WithoutCancel(ctx), who, sb.ID)
	stream, err := r.manager.Exec(ctx, who, sb.ID, agentapi.ExecParams{Argv: []string{"/bin/sh", "-c", line}})
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for e, err := range stream.Events() {
		if err != nil {
			return out.String(), err
		}
		out.Write(e.Data)
	}
	return strings.TrimSpace(out.String()), nil
}

// layerOf is a layer of the given files; one that ends in a slash is a directory.
func layerOf(t *testing.T, files ...tar.Header) v1.Layer {
	t.Helper()
	raw := tarOf(t, files...)
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil })
	must(t, err)
	return l
}

// small is a Linux of one program.
func small(t *testing.T) v1.Layer {
	t.Helper()
	program, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Skipf("this host has no busybox: %v", err)
	}
	return layerOf(t, tar.Header{Name: "bin/busybox", Uname: string(program)}, tar.Header{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		tar.Header{Name: "etc/passwd", Uname: "root:x:0:0:root:/root:/bin/sh\napp:x:1234:50::/srv:/bin/sh\n"}, tar.Header{Name: "etc/group", Uname: "staff:x:50:\n"},
		tar.Header{Name: "lower", Uname: "lower"}, tar.Header{Name: "both", Uname: "lower"}, tar.Header{Name: "gone", Uname: "x"})
}

func TestFromARegistryToASandbox(t *testing.T) {
	r, p := openReal(t), newPlace(t)
	i, err := mutate.AppendLayers(empty.Image, small(t), layerOf(t, tar.Header{Name: "both", Uname: "upper"}, tar.Header{Name: ".wh.gone"}))
	must(t, err)
	ref := p.push(t, "small:v1", configured(t, i, "amd64"))
	const line = `busybox cat /lower /both; test -e /gone || echo :gone; echo $GREETING $PWD; busybox id -un`
	const want = "lowerupper:gone\nhello=world /srv\napp"
	got, err := r.run(acme, ref, line)
	if err != nil || got != want {
		t.Fatalf("%q %v", got, err)
	}
	t.Run("without the registry", func(t *testing.T) {
		p.Close()
		if got, err := r.run(acme, ref, line); err != nil || got != want {
			t.Fatalf("%q %v", got, err)
		}
		_, err := r.run(globex, ref, line)
		wantKind(t, err, fault.Denied)
	})
	t.Run("from an archive, by another tenant, with the same layers", func(t *testing.T) {
		_, err := r.Import(t.Context(), globex, "", bytes.NewReader(saved(t, map[string]v1.Image{"theirs:v1": configured(t, i, "amd64")})), nil)
		must(t, err)
		if got, err := r.run(globex, "theirs:v1", line); err != nil || got != want {
			t.Fatalf("%q %v", got, err)
		}
	})
	t.Run("removed by both, nothing is left", func(t *testing.T) {
		must(t, r.Remove(t.Context(), acme, ref))
		if got, err := r.run(globex, "theirs:v1", line); err != nil || got != want {
			t.Fatalf("%q %v", got, err)
		}
		must(t, r.Remove(t.Context(), globex, "theirs:v1"))
		_, _, err := r.Prune(t.Context(), globex)
		must(t, err)
		left, err := filepath.Glob(filepath.Join(r.dir, "templates/images", strings.Repeat("[0-9a-f]", 64)))
		if err != nil || len(left) != 0 {
			t.Fatalf("left: %v %v", left, err)
		}
	})
}

func TestHostileLayersOfARegistry(t *testing.T) {
	r, p := openReal(t), newPlace(t)
	for what, c := range map[string]struct {
		layer v1.Layer
		kind  fault.Kind
	}{
		"a path out of the tree": {layerOf(t, tar.Header{Name: "../../../../tmp/cove-escape", Uname: "x"}), fault.Invalid},
		"a link out of the tree": {layerOf(t, tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "../../../../etc/passwd"}), fault.Invalid},
		"a device":               {layerOf(t, tar.Header{Name: "srv/mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}), fault.Invalid},
		"a bomb":                 {layerOf(t, tar.Header{Name: "zeroes", Uname: strings.Repeat("\x00", 65<<20)}), fault.Exhausted},
	} {
		t.Run(what, func(t *testing.T) {
			i, err := mutate.AppendLayers(empty.Image, c.layer)
			must(t, err)
			_, err = r.Pull(t.Context(), acme, template.PullRequest{Reference: p.push(t, "bad:v1", configured(t, i, "amd64"))})
			wantKind(t, err, c.kind, "bad:v1")
			if _, err := os.Lstat("/tmp/cove-escape"); err == nil {
				t.Fatal("it escaped")
			}
			if left, _ := filepath.Glob(filepath.Join(r.dir, "images/*/*")); len(left) > 1 {
				t.Fatalf("left: %v", left)
			}
		})
	}
}
