package drivertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// volumes are the driver's, which says that it has some.
func (b *bench) volumes(t *testing.T) sandbox.Volumer {
	t.Helper()
	v, ok := b.Driver.(sandbox.Volumer)
	if !ok {
		t.Fatal("a driver with mounts keeps no volumes")
	}
	return v
}

// volume makes one for one claim.
func (b *bench) volume(t *testing.T) string {
	t.Helper()
	v, name := b.volumes(t), fmt.Sprintf("claim-%08x", rand.Uint32())
	made, err := v.MakeVolume(t.Context(), b.Tenant, sandbox.Volume{Name: name, Bytes: 32 << 20})
	if err != nil || made.Name != name || made.Bytes != 32<<20 || made.InUse != 0 || time.Since(made.Created) > time.Minute {
		t.Fatalf("make volume: %+v %v", made, err)
	}
	t.Cleanup(func() { v.RemoveVolume(context.Background(), b.Tenant, name) }) // the test's own ctx is over
	return name
}

func with(mounts ...sandbox.Mount) func(*sandbox.StartRequest) {
	return func(r *sandbox.StartRequest) { r.Mounts = mounts }
}

func (b *bench) refuses(t *testing.T, kind fault.Kind, mounts ...sandbox.Mount) {
	t.Helper()
	req := b.request()
	req.Mounts = mounts
	err := b.Driver.Start(t.Context(), req)
	if err == nil {
		_ = b.Driver.Stop(t.Context(), req.ID, sandbox.CauseKilled)
	}
	expectKind(t, err, kind)
}

var mounts = []claim{
	{"what is written to a volume is there in the next sandbox, and at once in another", needsMounts, func(t *testing.T, b *bench) {
		mount := sandbox.Mount{Kind: sandbox.MountVolume, Source: b.volume(t), Target: "/data/here"}
		first, other := b.start(t, with(mount)), b.start(t, with(mount))
		first.exec(t, sh("echo one > /data/here/file"))
		if got := other.exec(t, sh("cat /data/here/file; echo two >> /data/here/file")); got.stdout != "one\n" {
			t.Errorf("another sandbox reads %+v", got)
		}
		for _, s := range []*box{first, other} {
			if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
				t.Fatal(err)
			}
		}
		mount.ReadOnly = true
		last := b.start(t, with(mount))
		if got := last.exec(t, sh("cat /data/here/file; echo x >> /data/here/file")); got.stdout != "one\ntwo\n" || got.end.ExitCode == 0 {
			t.Errorf("a later sandbox, which may only read it: %+v", got)
		}
	}},
	{"a part of a volume is all that is seen of it", needsMounts, func(t *testing.T, b *bench) {
		whole := sandbox.Mount{Kind: sandbox.MountVolume, Source: b.volume(t), Target: "/whole"}
		part := whole
		part.Target, part.SubPath = "/part", "a/b"
		s := b.start(t, with(whole, part))
		if got := s.exec(t, sh("echo x > /part/file; cat /whole/a/b/file; ls -A /part")); got.stdout != "x\nfile\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a volume is there until it is removed, and that is refused while it is used", needsMounts, func(t *testing.T, b *bench) {
		v, name := b.volumes(t), b.volume(t)
		s := b.start(t, with(sandbox.Mount{Kind: sandbox.MountVolume, Source: name, Target: "/data"}))
		expectKind(t, v.RemoveVolume(t.Context(), b.Tenant, name), fault.Conflict)
		all, err := v.Volumes(t.Context(), b.Tenant)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range all {
			if one.Name == name && one.InUse != 1 {
				t.Errorf("%+v", one)
			}
		}
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		if err := v.RemoveVolume(t.Context(), b.Tenant, name); err != nil {
			t.Errorf("remove: %v", err)
		}
		expectKind(t, v.RemoveVolume(t.Context(), b.Tenant, name), fault.NotFound)
		b.refuses(t, fault.NotFound, sandbox.Mount{Kind: sandbox.MountVolume, Source: name, Target: "/data"})
	}},
	{"a volume is one tenant's", needsMounts, func(t *testing.T, b *bench) {
		v, name := b.volumes(t), b.volume(t)
		expectKind(t, v.RemoveVolume(t.Context(), "somebody-else", name), fault.NotFound)
		if all, err := v.Volumes(t.Context(), "somebody-else"); err != nil || len(all) != 0 {
			t.Errorf("another tenant sees %v %v", all, err)
		}
		_, err := v.MakeVolume(t.Context(), b.Tenant, sandbox.Volume{Name: name})
		expectKind(t, err, fault.Conflict)
	}},
	{"mounts that make no sense are refused, and so is a host path that nobody allows", needsMounts, func(t *testing.T, b *bench) {
		name := b.volume(t)
		for _, target := range []string{"", "/", "data", "/proc", "/dev/x", "/a/../b", "/run"} {
			b.refuses(t, fault.Invalid, sandbox.Mount{Kind: sandbox.MountVolume, Source: name, Target: target})
		}
		b.refuses(t, fault.Invalid, sandbox.Mount{Kind: sandbox.MountVolume, Source: name, Target: "/a", SubPath: "../x"})
		b.refuses(t, fault.Invalid, sandbox.Mount{Kind: sandbox.MountVolume, Source: "../x", Target: "/a"})
		b.refuses(t, fault.Denied, sandbox.Mount{Kind: sandbox.MountHost, Source: "/etc", Target: "/a", ReadOnly: true})
	}},
}
