package sandbox_test

import (
	"context"
	"log/slog"
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func (d *fakeDriver) Volumes(_ context.Context, tenant string) ([]sandbox.Volume, error) {
	return []sandbox.Volume{{Name: "of-" + tenant}}, nil
}

func (d *fakeDriver) MakeVolume(_ context.Context, tenant string, v sandbox.Volume) (sandbox.Volume, error) {
	v.Name = tenant + "/" + v.Name
	return v, nil
}

func (d *fakeDriver) RemoveVolume(_ context.Context, tenant, name string) error {
	if tenant != "acme" || name != "mine" {
		return fault.New(fault.NotFound, "volume %s is not there", name)
	}
	return nil
}

// watched is a driver that somebody looks at.
type watched struct{ sandbox.Driver }

func (w watched) Unwrap() sandbox.Driver { return w.Driver }

func TestMounts(t *testing.T) {
	asked := []sandbox.Mount{
		{Kind: sandbox.MountVolume, Source: "data", SubPath: "a/b", Target: "/data", Create: true},
		{Kind: sandbox.MountHost, Source: "/srv/x", Target: "/mnt/x", ReadOnly: true},
	}
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"what is asked for reaches the driver and is shown": func(t *testing.T, w *world) {
			w.driver.caps.Mounts = true
			got := w.create(sandbox.Spec{Mounts: asked})
			for what, mounts := range map[string][]sandbox.Mount{"driver": w.driver.requests[0].Mounts, "answer": got.Mounts, "get": w.get(got.ID).Mounts} {
				if diff := cmp.Diff(asked, mounts); diff != "" {
					t.Errorf("%s: %s", what, diff)
				}
			}
			w.restart()
			if diff := cmp.Diff(asked, w.get(got.ID).Mounts); diff != "" {
				t.Errorf("after a restart: %s", diff)
			}
		},
		"a driver without them refuses": func(t *testing.T, w *world) {
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Mounts: asked})
			wantKind(t, err, fault.Unsupported)
			_, err = w.Volumes(t.Context(), acme)
			wantKind(t, err, fault.Unsupported)
		},
		"a driver that somebody watches has its volumes": func(t *testing.T, w *world) {
			w.driver.caps.Mounts = true
			m := sandbox.NewManager(w.cfg, watched{watched{w.driver}}, w.store, fakeTemplates{}, w.observer, slog.New(slog.DiscardHandler))
			if err := m.Open(t.Context()); err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if all, err := m.Volumes(t.Context(), acme); err != nil || len(all) != 1 {
				t.Errorf("%v %v", all, err)
			}
		},
		"volumes are the tenant's": func(t *testing.T, w *world) {
			w.driver.caps.Mounts = true
			all, err := w.Volumes(t.Context(), acme)
			if err != nil || len(all) != 1 || all[0].Name != "of-acme" {
				t.Errorf("%v %v", all, err)
			}
			made, err := w.CreateVolume(t.Context(), globex, "x", 64<<20)
			if err != nil || made.Name != "globex/x" || made.Bytes != 64<<20 {
				t.Errorf("%v %v", made, err)
			}
			for _, name := range []string{"", "..", "a/b", "-x", "a\n", strings.Repeat("a", 129)} {
				_, err := w.CreateVolume(t.Context(), acme, name, 0)
				wantKind(t, err, fault.Invalid)
				wantKind(t, w.RemoveVolume(t.Context(), acme, name), fault.Invalid)
			}
			for _, bytes := range []int64{-1, 1, 16<<20 - 1, 1 << 62} {
				_, err := w.CreateVolume(t.Context(), acme, "x", bytes)
				wantKind(t, err, fault.Invalid)
			}
			wantKind(t, w.RemoveVolume(t.Context(), globex, "mine"), fault.NotFound)
			if err := w.RemoveVolume(t.Context(), acme, "mine"); err != nil {
				t.Error(err)
			}
		},
	})
}

func TestCheckMounts(t *testing.T) {
	host := func(source, target string) sandbox.Mount {
		return sandbox.Mount{Kind: sandbox.MountHost, Source: source, Target: target}
	}
	data := func(source string) sandbox.Mount {
		return sandbox.Mount{Kind: sandbox.MountData, Source: source, Target: "/datasets", ReadOnly: true}
	}
	for claim, mounts := range map[string][]sandbox.Mount{
		"no kind":                      {{Source: "/a", Target: "/b"}},
		"no target":                    {host("/a", "")},
		"the root":                     {host("/a", "/")},
		"a relative target":            {host("/a", "b")},
		"a target with dots":           {host("/a", "/b/../c")},
		"a target with two slashes":    {host("/a", "//b")},
		"a target with an end":         {host("/a", "/b/")},
		"a target with a zero":         {host("/a", "/b\x00c")},
		"a target that is too long":    {host("/a", "/"+strings.Repeat("b", 247))},
		"over proc":                    {host("/a", "/proc")},
		"below dev":                    {host("/a", "/dev/pts")},
		"over sys":                     {host("/a", "/sys")},
		"over what holds our own":      {host("/a", "/run")},
		"below our own":                {host("/a", "/run/cove/kernel")},
		"a relative source":            {host("a", "/b")},
		"a source with dots":           {host("/a/..", "/b")},
		"a host path that is made":     {{Kind: sandbox.MountHost, Source: "/a", Target: "/b", Create: true}},
		"a volume that is a path":      {{Kind: sandbox.MountVolume, Source: "/a", Target: "/b"}},
		"a volume without a name":      {{Kind: sandbox.MountVolume, Target: "/b"}},
		"a sub path that leads out":    {{Kind: sandbox.MountVolume, Source: "a", SubPath: "..", Target: "/b"}},
		"an absolute sub path":         {{Kind: sandbox.MountVolume, Source: "a", SubPath: "/x", Target: "/b"}},
		"a sub path with dots":         {{Kind: sandbox.MountVolume, Source: "a", SubPath: "x/./y", Target: "/b"}},
		"a sub path that is not UTF-8": {{Kind: sandbox.MountVolume, Source: "a", SubPath: "\xff", Target: "/b"}},
		"datasets that are a path":     {data("../x")},
		"datasets without a name":      {data("")},
		"datasets to write":            {{Kind: sandbox.MountData, Source: "a", Target: "/b"}},
		"a part of datasets":           {{Kind: sandbox.MountData, Source: "a", SubPath: "x", Target: "/b", ReadOnly: true}},
		"one target twice":             {host("/a", "/b"), host("/c", "/b")},
		"one in another":               {host("/a", "/b/c"), host("/c", "/b")},
		"too many":                     make([]sandbox.Mount, 17),
	} {
		if err := sandbox.CheckMounts(mounts); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", claim, err)
		}
	}
	good := []sandbox.Mount{host("/", "/host"), host("/a", "/b"), host("/a", "/bc"), host("/a b/ü", "/run/x"), host("/a", "/process"), data("ses_1-A"), {Kind: sandbox.MountVolume, Source: "A.b-c_1", SubPath: "x/..y", Target: "/root"}}
	if err := sandbox.CheckMounts(good); err != nil {
		t.Error(err)
	}
}

// FuzzCheckMounts: what passes names places that cannot be read in another way.
func FuzzCheckMounts(f *testing.F) {
	f.Add("/data", "/target", "sub/path", "volume")
	f.Add("/a/../b", "/proc/../x", "../..", "../v")
	f.Add("/\x00", "/run/cove", "a//b", "")
	f.Fuzz(func(t *testing.T, source, target, sub, name string) {
		for _, m := range []sandbox.Mount{
			{Kind: sandbox.MountHost, Source: source, SubPath: sub, Target: target},
			{Kind: sandbox.MountVolume, Source: name, SubPath: sub, Target: target},
		} {
			err := sandbox.CheckMounts([]sandbox.Mount{m})
			if err != nil {
				if !fault.Is(err, fault.Invalid) {
					t.Fatalf("refused with %v", err)
				}
				continue
			}
			if path.Clean(m.Target) != m.Target || !path.IsAbs(m.Target) || m.Target == "/" || len(m.Target) > 247 {
				t.Fatalf("the target %q passed", m.Target)
			}
			for _, own := range []string{"/proc", "/dev", "/sys", "/run/cove"} {
				if m.Target == own || strings.HasPrefix(m.Target, own+"/") || strings.HasPrefix(own, m.Target+"/") {
					t.Fatalf("the target %q passed", m.Target)
				}
			}
			if m.SubPath != "" && (path.IsAbs(m.SubPath) || !strings.HasPrefix(path.Join("/x", m.SubPath), "/x/") || strings.Contains(m.SubPath, "\x00")) {
				t.Fatalf("the sub path %q passed", m.SubPath)
			}
			if m.Kind == sandbox.MountVolume && strings.ContainsAny(m.Source, "/\x00") {
				t.Fatalf("the volume %q passed", m.Source)
			}
		}
	})
}
