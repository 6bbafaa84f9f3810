package native_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
	"github.com/covehq/cove/test/slow"
)

// imageMaker is a maker without any template: images need none.
func imageMaker(t testing.TB) *ownMaker {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("real sandboxes need root")
	}
	dir, err := os.MkdirTemp("", "cove-image-maker")
	if err != nil {
		t.Fatal(err)
	}
	m := &ownMaker{dir: dir}
	t.Cleanup(func() {
		if m.driver != nil {
			if err := m.driver.Shutdown(context.Background()); err != nil { // the test's own context is over
				t.Error(err)
			}
			m.driver.Close()
		}
		log, _ := os.ReadFile(filepath.Join(dir, "maker", "log"))
		if t.Failed() || strings.Contains(string(log), "panic") || strings.Contains(string(log), "DATA RACE") {
			t.Logf("the maker says:\n%s", log)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.MkdirAll(m.templates(), 0o755); err != nil {
		t.Fatal(err)
	}
	if m.driver, err = native.Open(t.Context(), native.Config{DataDir: dir, Log: slog.Default(), Launch: native.LaunchSelf("--pool", "4")}); err != nil {
		t.Fatal(err)
	}
	if m.store, err = template.Open(template.Options{Dir: m.templates()}); err != nil {
		t.Fatal(err)
	}
	return m
}

// layerTar is a layer under way: a plain tar.
type layerTar struct {
	t   testing.TB
	out bytes.Buffer
	w   *tar.Writer
}

func newLayer(t testing.TB) *layerTar {
	l := &layerTar{t: t}
	l.w = tar.NewWriter(&l.out)
	return l
}

func (l *layerTar) add(h tar.Header, content []byte) *layerTar {
	l.t.Helper()
	h.Size, h.ModTime = int64(len(content)), time.Unix(1700000000, 0)
	if err := l.w.WriteHeader(&h); err != nil {
		l.t.Fatal(err)
	}
	if _, err := l.w.Write(content); err != nil {
		l.t.Fatal(err)
	}
	return l
}

func (l *layerTar) file(name, text string) *layerTar {
	return l.add(tar.Header{Name: name, Mode: 0o644}, []byte(text))
}

func (l *layerTar) dir(name string, mode int64) *layerTar {
	return l.add(tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode}, nil)
}

func (l *layerTar) link(name, to string) *layerTar {
	return l.add(tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, nil)
}

// host copies a program of this host, whatever links lead to it.
func (l *layerTar) host(name, from string) *layerTar {
	l.t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		l.t.Skipf("this host lacks %s: %v", from, err)
	}
	return l.add(tar.Header{Name: name, Mode: 0o755}, data)
}

func (l *layerTar) bytes() []byte {
	if err := l.w.Close(); err != nil {
		l.t.Fatal(err)
	}
	return l.out.Bytes()
}

// busybox is a small Linux whose every program is one static file.
func busybox(t testing.TB) *layerTar {
	l := newLayer(t).dir("bin", 0o755).host("bin/busybox", "/usr/bin/busybox")
	for _, name := range []string{"sh", "ls", "cat", "echo", "id", "pwd", "env", "stat", "touch", "rm", "mkdir", "hostname", "test", "readlink", "mount", "sleep", "nslookup", "chmod", "find", "wc"} {
		l.link("bin/"+name, "busybox")
	}
	return l.dir("etc", 0o755).file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1235::/home/app:/bin/sh\n").
		file("etc/group", "root:x:0:\napp:x:1235:\nstaff:x:50:app\n").dir("home/app", 0o755).dir("tmp", 0o1777)
}

// blob is a file to unpack, which is gone with the test.
func blob(t testing.TB, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "blob"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	return f
}

func diffID(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (m *ownMaker) unpack(t testing.TB, data []byte) string {
	t.Helper()
	l, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: diffID(data)}, blob(t, data))
	if err != nil {
		t.Fatalf("unpack: %v", err)
	}
	return l.DiffID
}

// image makes a template of layers, lowest first.
func (m *ownMaker) image(t testing.TB, change func(*sandbox.ImageRequest), layers ...[]byte) *template.Template {
	t.Helper()
	r := sandbox.ImageRequest{Tenant: tenant, Image: template.Image{Reference: "test.local/image:latest", Platform: "linux/amd64"}}
	for _, data := range layers {
		r.Image.Layers = append(r.Image.Layers, m.unpack(t, data))
	}
	if change != nil {
		change(&r)
	}
	sum := sha256.Sum256(fmt.Append(nil, r.Image.Layers, r.Env, r.User, r.Workdir))
	r.Name = "img-" + hex.EncodeToString(sum[:16])
	made, err := m.driver.AddImage(t.Context(), r)
	if err != nil {
		t.Fatalf("add image: %v", err)
	}
	return made
}

// from starts a sandbox of a template.
func (m *ownMaker) from(t testing.TB, made *template.Template) *box {
	t.Helper()
	b, err := m.tryFrom(t, made)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (m *ownMaker) tryFrom(t testing.TB, made *template.Template) (*box, error) {
	t.Helper()
	b := &box{t: t, id: fmt.Sprintf("im%d", world.next.Add(1)), driver: m.driver}
	b.agent = newAgent(b)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	err := m.driver.Start(ctx, sandbox.StartRequest{
		ID: b.id, Tenant: made.Tenant, Template: made, Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128, OpenFiles: 1024},
		Network: policy.Network{Mode: policy.Internet}, Deadline: time.Now().Add(5 * time.Minute),
	})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { b.stop() })
	return b, nil
}

func (b *box) say(argv ...string) string {
	b.t.Helper()
	a := b.exec(agentapi.ExecParams{Argv: argv})
	if a.end.Outcome != agentapi.OutcomeOK {
		b.t.Fatalf("%q ended %+v: %s%s", argv, a.end, a.stdout, a.stderr)
	}
	return strings.TrimSpace(a.stdout)
}

func TestASandboxStartsFromAnImage(t *testing.T) {
	m := imageMaker(t)
	made := m.image(t, func(r *sandbox.ImageRequest) {
		r.Env, r.Workdir = map[string]string{"COLOUR": "blue"}, "/srv/app"
	}, busybox(t).file("greeting", "one").file("gone", "x").dir("full", 0o755).file("full/old", "x").bytes(),
		newLayer(t).file("greeting", "two").file(".wh.gone", "").dir("full", 0o755).file("full/.wh..wh..opq", "").file("full/new", "x").bytes())
	b := m.from(t, made)
	for _, c := range []struct{ line, want string }{
		{"cat /greeting; test -e /gone || echo gone; ls /full", "twogone\nnew"},
		{"id", "uid=0(root) gid=0(root) groups=0(root)"},
		{"pwd; echo $COLOUR $HOME $USER", "/srv/app\nblue /root root"},
		{"hostname; cat /etc/hostname; cat /etc/hosts | head -1", "sandbox\nsandbox\n127.0.0.1 localhost sandbox"},
		{"cat /etc/resolv.conf | head -1 | cut -d' ' -f1", "nameserver"},
		{"stat -c '%a %u' /tmp /run /root /etc", "1777 0\n755 0\n700 0\n755 0"},
		{"touch /new && rm /greeting && ls /new; test -e /greeting || echo removed", "/new\nremoved"},
	} {
		if got := b.say("sh", "-c", strings.ReplaceAll(c.line, "head", "busybox head")); strings.ReplaceAll(got, "busybox ", "") != c.want {
			t.Errorf("%s:\n%q, not\n%q", c.line, got, c.want)
		}
	}
	if got := m.from(t, made).say("cat", "/greeting"); got != "two" {
		t.Errorf("another sandbox sees what the first did: %q", got)
	}
	if infos := m.store.ListFor(tenant); !slices.ContainsFunc(infos, func(i template.Info) bool {
		return i.Name == made.Name && i.Source == template.SourceImage && i.From == "test.local/image:latest"
	}) {
		t.Errorf("%+v", infos)
	}
	if resolved, err := m.store.ResolveFor(t.Context(), tenant, made.Name); err != nil || resolved.Digest != made.Digest {
		t.Errorf("%+v %v", resolved, err)
	}
	if _, err := m.store.ResolveFor(t.Context(), "somebody", made.Name); !fault.Is(err, fault.NotFound) {
		t.Error(err)
	}
}

func TestAnImagesUserIsHonoured(t *testing.T) {
	m := imageMaker(t)
	layer := busybox(t).bytes()
	for _, c := range []struct{ user, want, home string }{
		{"", "uid=0(root) gid=0(root) groups=0(root)", "/root root"},
		{"app", "uid=1234(app) gid=1235(app) groups=50(staff),1235(app)", "/home/app app"},
		{"1234", "uid=1234(app) gid=1235(app) groups=50(staff),1235(app)", "/home/app app"},
		{"app:staff", "uid=1234(app) gid=50(staff) groups=50(staff)", "/home/app app"},
		{"1234:77", "uid=1234(app) gid=77 groups=77", "/home/app app"},
		{"4321", "uid=4321 gid=0(root) groups=0(root)", "/ 4321"},
		{"4321:1235", "uid=4321 gid=1235(app) groups=1235(app)", "/ 4321"},
	} {
		t.Run(c.user, func(t *testing.T) {
			b := m.from(t, m.image(t, func(r *sandbox.ImageRequest) { r.User, r.Workdir = c.user, "/made/for/it" }, layer))
			if got := b.say("id"); got != c.want {
				t.Errorf("%q, not %q", got, c.want)
			}
			if got := b.say("sh", "-c", "echo $HOME $USER; pwd; touch here && echo mine"); got != c.home+"\n/made/for/it\nmine" {
				t.Errorf("%q", got)
			}
		})
	}
	t.Run("nobody", func(t *testing.T) {
		b := m.from(t, m.image(t, func(r *sandbox.ImageRequest) { r.User = "ghost" }, layer))
		_, err := collect(b.agent.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"id"}}))
		if !fault.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "ghost") {
			t.Error(err)
		}
		if got := b.exec(agentapi.ExecParams{Argv: []string{"id", "-u"}, User: "root"}); got.stdout != "0\n" {
			t.Errorf("%+v", got)
		}
	})
}

func TestAnImageOfOneProgramStarts(t *testing.T) {
	m := imageMaker(t)
	b := m.from(t, m.image(t, nil, newLayer(t).host("busybox", "/usr/bin/busybox").bytes()))
	if got := b.say("/busybox", "sh", "-c", "/busybox id -u; /busybox pwd; /busybox ls /; echo $HOME $PATH"); got !=
		"0\n/\nbusybox\ndev\netc\nproc\nroot\nrun\nsys\ntmp\n/root /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" {
		t.Errorf("%q", got)
	}
	if _, err := collect(b.agent.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", "true"}})); !fault.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "sh: no such command") {
		t.Errorf("a command without its shell: %v", err)
	}
	for _, language := range agentapi.Languages {
		_, err := b.agent.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "k", Language: language})
		if !fault.Is(err, fault.Unsupported) || !strings.Contains(err.Error(), "image or template has no ") {
			t.Errorf("%s: %v", language, err)
		}
	}
	if err := b.driver.Kernel(t.Context(), b.id, "k"); !fault.Is(err, fault.Unsupported) {
		t.Errorf("a kernel from a zygote: %v", err)
	}
	if _, err := b.driver.Fork(t.Context(), sandbox.ForkRequest{Parent: b.id, Children: []sandbox.ForkChild{{ID: "child"}}}); err == nil {
		t.Error("it was forked")
	} else {
		t.Log(err)
	}
}

func TestAMuslProgramRuns(t *testing.T) {
	compiler, err := exec.LookPath("musl-gcc")
	if err != nil {
		t.Skip("needs musl-gcc, which builds a program of another libc than the host's: apt install musl-tools")
	}
	dir := t.TempDir()
	source, program := filepath.Join(dir, "hello.c"), filepath.Join(dir, "hello")
	text := "#include <pwd.h>\n#include <stdio.h>\n#include <unistd.h>\nint main(void) { puts(getpwuid(getuid())->pw_name); }\n"
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(compiler, "-o", program, source).CombinedOutput(); err != nil {
		t.Skipf("needs a musl-gcc that works: %v: %s", err, out)
	}
	m := imageMaker(t)
	b := m.from(t, m.image(t, func(r *sandbox.ImageRequest) { r.User = "app" }, newLayer(t).host("bin/hello", program).
		host("lib/ld-musl-x86_64.so.1", "/lib/ld-musl-x86_64.so.1").file("etc/passwd", "app:x:1234:1234::/:/bin/sh\n").bytes()))
	if got := b.say("hello"); got != "app" {
		t.Errorf("%q", got)
	}
}

func TestPlacesOfAnImage(t *testing.T) {
	m := imageMaker(t)
	for _, c := range []struct {
		claim string
		layer *layerTar
		fails string
	}{
		{"var/run leads to run, as everywhere", busybox(t).dir("run", 0o755).dir("var", 0o755).link("var/run", "/run"), ""},
		{"run leads to var/run, as long ago", busybox(t).dir("var/run", 0o755).link("run", "var/run"), ""},
		{"the names of others are links", busybox(t).link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf").link("etc/hosts", "/nowhere").link("etc/hostname", "/proc/self/mem"), ""},
		{"the names of others are directories", busybox(t).dir("etc/resolv.conf", 0o755).dir("etc/hosts", 0o755), ""},
		{"no etc at all", newLayer(t).host("bin/sh", "/usr/bin/busybox").host("bin/cat", "/usr/bin/busybox").host("bin/test", "/usr/bin/busybox"), ""},
		{"tmp leads elsewhere", newLayer(t).host("bin/sh", "/usr/bin/busybox").host("bin/cat", "/usr/bin/busybox").host("bin/test", "/usr/bin/busybox").link("tmp", "/etc"), ""},
		{"proc leads elsewhere", busybox(t).link("proc", "/etc"), "/proc of the new root"},
		{"dev leads elsewhere", busybox(t).link("dev", "../../../../tmp"), "/dev of the new root"},
		{"dev is a file", busybox(t).file("dev", "x"), "/dev of the new root"},
	} {
		t.Run(c.claim, func(t *testing.T) {
			made := m.image(t, nil, c.layer.bytes())
			b, err := m.tryFrom(t, made)
			if c.fails != "" {
				if err == nil || !strings.Contains(err.Error(), c.fails) {
					t.Errorf("%v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := b.say("sh", "-c", "cat /etc/hostname /etc/hosts /etc/resolv.conf; test -d /run/cove/kernel && test -c /dev/null && test -e /proc/1/status && echo all there")
			if !strings.HasPrefix(got, "sandbox\n127.0.0.1 localhost sandbox\n") || !strings.Contains(got, "nameserver ") || !strings.HasSuffix(got, "all there") {
				t.Errorf("%q", got)
			}
		})
	}
}

func TestAnImageOfManyLayers(t *testing.T) {
	slow.Test(t)
	m := imageMaker(t)
	layers := [][]byte{busybox(t).bytes()}
	for i := 1; i < template.MaxImageLayers; i++ {
		l := newLayer(t).file(fmt.Sprint("n/", i), "x").file("top", fmt.Sprint(i))
		if i%10 == 5 {
			l = newLayer(t) // an empty one, of which there are more
		}
		layers = append(layers, l.bytes())
	}
	made := m.image(t, nil, layers...)
	b := m.from(t, made)
	if got := b.say("sh", "-c", "cat /top; ls /n | wc -l"); got != "126113" {
		t.Errorf("%q", got)
	}
	b.say("sh", "-c", "echo kept > /kept")
	from, err := b.driver.Snapshot(t.Context(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: "deep"})
	if err != nil {
		t.Fatal(err)
	}
	if got := m.from(t, from).say("cat", "/kept", "/top"); got != "kept\n126" {
		t.Errorf("%q", got)
	}
	r := sandbox.ImageRequest{Tenant: tenant, Name: made.Name, Image: *made.Image}
	r.Image.Layers = append(slices.Clone(r.Image.Layers), r.Image.Layers[0])
	if _, err := m.driver.AddImage(t.Context(), r); !fault.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

// layersOnDisk are the names in the directory of layers, without what all images share.
func (m *ownMaker) layersOnDisk(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(m.templates(), "images"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "frame-") {
			names = append(names, e.Name())
		}
	}
	return names
}

func (m *ownMaker) prune(t testing.TB) int64 {
	t.Helper()
	freed, err := m.driver.PruneLayers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return freed
}

func TestLayersLiveAsLongAsSomebodyNeedsThem(t *testing.T) {
	m := imageMaker(t)
	base, one, two := busybox(t).bytes(), newLayer(t).file("one", "1").bytes(), newLayer(t).file("two", "22").bytes()
	first, second := m.image(t, nil, base, one), m.image(t, nil, base, two)
	if got := m.layersOnDisk(t); len(got) != 3 {
		t.Fatalf("layers are not shared: %q", got)
	}
	remove := func(name string) {
		t.Helper()
		if err := m.driver.RemoveTemplate(t.Context(), tenant, name); err != nil {
			t.Fatal(err)
		}
	}
	if m.prune(t) != 0 || len(m.layersOnDisk(t)) != 3 {
		t.Error("a layer went that an image needs")
	}
	b := m.from(t, first)
	remove(first.Name)
	if m.prune(t) != 0 || b.say("cat", "/one") != "1" {
		t.Error("a layer went that a sandbox needs")
	}
	snap, err := m.driver.Snapshot(t.Context(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: "above"})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.driver.Stop(t.Context(), b.id, sandbox.CauseKilled); err != nil {
		t.Fatal(err)
	}
	remove(second.Name)
	if freed := m.prune(t); freed != 2 || len(m.layersOnDisk(t)) != 2 {
		t.Errorf("%d bytes freed, %q are left", freed, m.layersOnDisk(t))
	}
	if got := m.from(t, snap).say("cat", "/one"); got != "1" {
		t.Errorf("%q", got)
	}
}

func TestOneImageTakesNoLayerFromAnotherThatIsOnItsWay(t *testing.T) {
	m := imageMaker(t)
	base := busybox(t).bytes()
	id := m.unpack(t, base)
	coming := sandbox.ImageRequest{Tenant: "other", Name: "img-0123456789abcdef0123456789abcdef", Image: template.Image{Reference: "test.local/other:1", Layers: []string{id}}}
	if _, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: id, For: coming.Claim()}, blob(t, base)); err != nil {
		t.Fatal(err)
	}
	first := m.image(t, nil, base)
	if err := m.driver.RemoveTemplate(t.Context(), tenant, first.Name); err != nil {
		t.Fatal(err)
	}
	if freed := m.prune(t); freed != 0 {
		t.Errorf("%d bytes were freed of what another image waits for", freed)
	}
	if _, err := m.driver.AddImage(t.Context(), coming); err != nil {
		t.Fatal(err)
	}
	if err := m.driver.RemoveTemplate(t.Context(), "other", coming.Name); err != nil {
		t.Fatal(err)
	}
	if freed := m.prune(t); freed == 0 {
		t.Error("a layer stays that nobody waits for")
	}
}

func TestUnpackingIsShared(t *testing.T) {
	m := imageMaker(t)
	data := busybox(t).bytes()
	var callers sync.WaitGroup
	for range 8 {
		file := blob(t, data)
		callers.Go(func() {
			if l, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: diffID(data)}, file); err != nil || l.Files == 0 {
				t.Errorf("%+v %v", l, err)
			}
		})
	}
	callers.Wait()
	log, err := os.ReadFile(filepath.Join(m.dir, "maker", "log"))
	if n := strings.Count(string(log), "layer unpacked"); err != nil || n != 1 {
		t.Errorf("unpacked %d times: %v", n, err)
	}
	found, err := m.driver.Layers(t.Context(), []string{diffID(data), diffID(nil)})
	if err != nil || len(found) != 1 || found[0].DiffID != diffID(data) {
		t.Errorf("%+v %v", found, err)
	}
	t.Run("one that is broken does not spoil another's", func(t *testing.T) {
		data := newLayer(t).file("a", strings.Repeat("x", 1<<20)).bytes()
		var callers sync.WaitGroup
		for i := range 4 {
			content, broken := data, i%2 == 0
			if broken {
				content = data[:1<<19]
			}
			file := blob(t, content)
			callers.Go(func() {
				_, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: diffID(data)}, file)
				if err != nil && !broken {
					t.Error(err)
				}
			})
		}
		callers.Wait()
	})
}

func TestUnpackingLeavesNothingBehind(t *testing.T) {
	m := imageMaker(t)
	m.unpack(t, busybox(t).bytes())
	stats := func() wire.Stats {
		s, err := m.driver.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	settled := func() bool { return stats().Slots == 0 }
	wait := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); !f(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, stats())
			}
		}
	}
	wait("the first is not over", settled)
	before := stats()
	for i := range 10 {
		m.unpack(t, newLayer(t).file("a", fmt.Sprint(i)).bytes())
		data := newLayer(t).file("../a", fmt.Sprint(i)).bytes()
		if _, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: diffID(data)}, blob(t, data)); err == nil {
			t.Error("unpacked")
		}
	}
	wait("something is left", func() bool {
		now := stats()
		return now.Slots == 0 && now.FDs <= before.FDs && now.Goroutine <= before.Goroutine
	})
	if got := m.layersOnDisk(t); len(got) != 11 || slices.ContainsFunc(got, func(name string) bool { return strings.HasPrefix(name, ".") }) {
		t.Errorf("%q", got)
	}
}

// inventory is every file below a directory with what can be seen of it from outside, but for seals: those come when they come.
func inventory(t testing.TB, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || strings.HasSuffix(d.Name(), "seal") {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() {
			all = append(all, fmt.Sprintf("%s %s", at, info.Mode()))
		} else {
			all = append(all, fmt.Sprintf("%s %s %d %s", at, info.Mode(), info.Size(), info.ModTime()))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestHostileLayersTouchNothing(t *testing.T) {
	m := imageMaker(t)
	m.image(t, nil, busybox(t).bytes())
	around := filepath.Dir(m.dir)
	evil := filepath.Join(around, "cove-evil")
	before := inventory(t, m.templates())
	for name, l := range map[string]*layerTar{
		"a name that climbs out":       newLayer(t).file("../../../../../../"+evil, "x"),
		"an absolute name":             newLayer(t).file(evil, "x").add(tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}, nil),
		"a file behind a link":         newLayer(t).link("a", around).file("a/cove-evil", "x"),
		"a file behind many links":     newLayer(t).link("a", "../../../../../../../../").file("a"+evil, "x"),
		"a hard link out":              newLayer(t).add(tar.Header{Name: "a", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}, nil),
		"a device":                     newLayer(t).add(tar.Header{Name: "a", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}, nil),
		"a whiteout of what is above":  newLayer(t).file(".wh...", ""),
		"a file in place of the root":  newLayer(t).link("./", "/"),
		"a second root, by a hard one": newLayer(t).dir("a", 0o755).add(tar.Header{Name: "b", Typeflag: tar.TypeLink, Linkname: "."}, nil),
	} {
		t.Run(name, func(t *testing.T) {
			data := l.bytes()
			_, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: diffID(data)}, blob(t, data))
			if !fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "the layer cannot be used") {
				t.Error(err)
			}
		})
	}
	t.Run("ten gigabytes of zeros", func(t *testing.T) {
		var out bytes.Buffer
		z := gzip.NewWriter(&out)
		w := tar.NewWriter(z)
		if err := w.WriteHeader(&tar.Header{Name: "zeros", Size: 10 << 30, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(w, zeros{}, 64<<20); err != nil { // what follows is never read
			t.Fatal(err)
		}
		z.Close()
		began := time.Now()
		_, err := m.driver.Unpack(t.Context(), sandbox.LayerRequest{DiffID: diffID(nil), MaxBytes: 1 << 30}, blob(t, out.Bytes()))
		if !fault.Is(err, fault.Exhausted) || time.Since(began) > time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
	if after := inventory(t, m.templates()); !slices.Equal(before, after) {
		t.Errorf("the store has changed: %d files, now %d", len(before), len(after))
	}
	if _, err := os.Lstat(evil); err == nil {
		t.Error("something was written outside")
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestALayerThatIsLeftHalfwayIsCleanedUp(t *testing.T) {
	m := imageMaker(t)
	m.image(t, nil, busybox(t).bytes())
	// A file that never ends, as far as the unpacker can see.
	endless, err := os.Create(filepath.Join(t.TempDir(), "endless"))
	if err != nil {
		t.Fatal(err)
	}
	defer endless.Close()
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "endless", Size: 60 << 30, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if _, err := endless.Write(head.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := endless.Truncate(60 << 30); err != nil {
		t.Fatal(err)
	}
	images := filepath.Join(m.templates(), "images")
	begun := func() bool {
		half, _ := filepath.Glob(filepath.Join(images, ".unpacking-*", "tree", "endless"))
		return len(half) == 1
	}
	await := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %q", what, m.layersOnDisk(t))
			}
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := m.driver.Unpack(ctx, sandbox.LayerRequest{DiffID: diffID(nil)}, endless)
		left <- err
	}()
	await("it does not begin", begun)
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	await("what a caller left is there", func() bool { return len(m.layersOnDisk(t)) == 1 })

	again, abandon := context.WithCancel(t.Context())
	driver := m.driver // another comes while it waits
	go func() {
		_, err := driver.Unpack(again, sandbox.LayerRequest{DiffID: diffID(nil)}, endless)
		left <- err
	}()
	defer func() {
		abandon()
		if err := <-left; err == nil {
			t.Error("a layer whose maker has died is unpacked")
		}
	}()
	await("it does not begin again", begun)
	crashed := m.driver.MakerPID()
	unpacker := openUnpacker(t, crashed)
	if err := unix.Kill(crashed, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// It is readable when the process has ended, whether somebody has reaped it or not.
	ended := []unix.PollFd{{Fd: int32(unpacker), Events: unix.POLLIN}}
	n, err := unix.Poll(ended, 20_000)
	for err == unix.EINTR {
		n, err = unix.Poll(ended, 20_000)
	}
	if n != 1 {
		t.Fatalf("the unpacker outlives its maker: %v", err)
	}
	m.driver.Close()
	if err := os.Mkdir(filepath.Join(images, strings.Repeat("ab", 32)), 0o755); err != nil { // as if the power had gone
		t.Fatal(err)
	}
	if m.driver, err = native.Open(t.Context(), native.Config{DataDir: m.dir, Log: slog.Default(), Launch: native.LaunchSelf("--pool", "1")}); err != nil {
		t.Fatal(err)
	}
	if got := m.layersOnDisk(t); len(got) != 1 {
		t.Errorf("%q", got)
	}
}

// openUnpacker finds the process that a maker has started to read a layer, as a pidfd.
func openUnpacker(t testing.TB, maker int) int {
	t.Helper()
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", maker))
	for _, task := range tasks {
		children, _ := os.ReadFile(task)
		for child := range strings.FieldsSeq(string(children)) {
			line, _ := os.ReadFile("/proc/" + child + "/cmdline")
			if !bytes.Contains(line, []byte("\x00unpack\x00inside\x00")) {
				continue
			}
			pid, err := strconv.Atoi(child)
			if err != nil {
				t.Fatal(err)
			}
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Close(fd) })
			return fd
		}
	}
	t.Fatal("nobody unpacks")
	return -1
}
