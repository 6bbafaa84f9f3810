package native_test

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
	"github.com/covehq/cove/test/slow"
)

func mounts(all ...sandbox.Mount) change { return func(r *sandbox.StartRequest) { r.Mounts = all } }

func hostMount(source, target string) sandbox.Mount {
	return sandbox.Mount{Kind: sandbox.MountHost, Source: source, Target: target}
}

func readOnly(m sandbox.Mount) sandbox.Mount { m.ReadOnly = true; return m }

func sub(m sandbox.Mount, path string) sandbox.Mount { m.SubPath = path; return m }

func volume(name, target string) sandbox.Mount {
	return sandbox.Mount{Kind: sandbox.MountVolume, Source: name, Target: target, Create: true}
}

// alice owns directories on the host that sandboxes may write to. Nobody on this machine has her id.
const alice = 54321

// hostDir is a directory of the host, seen by everybody, in one that is too.
func hostDir(t *testing.T, owner int) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "cove-host-path")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755), os.Chown(dir, owner, owner))
	return dir
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (m *ownMaker) allow(t *testing.T, paths ...string) {
	t.Helper()
	must(t, native.AllowStorage(m.dir, native.Storage{HostPaths: paths, VolumeSize: 64 << 20}))
}

func (m *ownMaker) refused(t *testing.T, claim string, kind fault.Kind, words string, all ...sandbox.Mount) {
	t.Helper()
	b, err := m.tryStart(t, mounts(all...))
	if err == nil {
		b.stop()
	}
	if !fault.Is(err, kind) || !strings.Contains(fault.Message(err), words) {
		t.Errorf("%s: got %v", claim, err)
	}
}

func TestHostPathIsSeenReadOnly(t *testing.T) {
	m := newMaker(t)
	dir := hostDir(t, 0)
	must(t, os.Mkdir(dir+"/sub", 0o755), os.WriteFile(dir+"/sub/file", []byte("of the host"), 0o644), os.WriteFile(dir+"/secret", []byte("x"), 0o600))
	must(t, os.WriteFile(dir+"/tool", []byte("#!/bin/sh\nid -u\n"), 0o755), os.Chmod(dir+"/tool", 0o755|os.ModeSetuid))
	must(t, unix.Mknod(dir+"/device", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))), os.Chmod(dir+"/device", 0o666), unix.Mkfifo(dir+"/pipe", 0o666), os.Chmod(dir+"/pipe", 0o666))
	l, err := net.Listen("unix", dir+"/socket")
	must(t, err, os.Chmod(dir+"/socket", 0o777))
	defer l.Close()
	linked := hostDir(t, 0) + "/linked"
	must(t, os.Symlink(dir, linked))
	m.allow(t, dir, linked)

	b := m.start(t, mounts(readOnly(hostMount(dir, "/data")), readOnly(sub(hostMount(dir, "/deep/er/sub"), "sub")), readOnly(hostMount(linked+"/sub", "/by-link"))))
	defer b.stop()
	if got := b.root("cat /data/sub/file /deep/er/sub/file | sort -u | head -c 11; cat /by-link/file; cat /data/secret 2>&1; stat -c %u:%g /data/sub/file; /data/tool"); got !=
		"of the hostof the hostcat: /data/secret: Permission denied\n65534:65534\n0" {
		t.Errorf("root sees %q", got)
	}
	for claim, line := range map[string]string{
		"write a file": "echo x >> /data/sub/file", "make one": "touch /data/new", "remove one": "rm -f /data/sub/file", "change a mode": "chmod 777 /data/sub/file",
		"make a link out": "ln /data/sub/file /tmp/linked", "use a device": "head -c1 /data/device", "write to a pipe": "timeout 2 bash -c 'echo x > /data/pipe'",
		"change the time": "touch -d 2001-01-01 /data/sub/file", "remount it": "mount -o remount,rw /data", "leave it": "cat /data/../data/../../" + dir + "/sub/file",
		"connect to a socket":  `python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("/data/socket")'`,
		"see what is above it": "ls " + dir,
	} {
		if a := b.exec(agentapi.ExecParams{Argv: []string{"bash", "-c", line}, User: "root"}); a.end.ExitCode == 0 {
			t.Errorf("root could %s: %s", claim, a.stdout)
		}
	}
	// What changes on the host is seen.
	must(t, os.WriteFile(dir+"/sub/later", []byte("later"), 0o644))
	if got := b.root("cat /data/sub/later"); got != "later" {
		t.Errorf("a file that came later is %q", got)
	}
	// What is mounted there later is not.
	must(t, unix.Mount("tmpfs", dir+"/sub", "tmpfs", 0, ""))
	defer unix.Unmount(dir+"/sub", unix.MNT_DETACH)
	must(t, os.WriteFile(dir+"/sub/mounted", nil, 0o644))
	if got := b.root("ls /data/sub"); strings.Contains(got, "mounted") {
		t.Errorf("a later mount of the host is seen: %s", got)
	}
}

func TestHostPathIsWrittenToByItsOwnerOnly(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	dir := hostDir(t, alice)
	must(t, os.WriteFile(dir+"/hers", []byte("a"), 0o600), os.Chown(dir+"/hers", alice, alice), os.WriteFile(dir+"/roots", []byte("r"), 0o666), os.Chmod(dir+"/roots", 0o666))
	l, err := net.Listen("unix", dir+"/socket")
	must(t, err, os.Chmod(dir+"/socket", 0o777))
	defer l.Close()
	m.allow(t, dir+":rw")
	b := m.start(t, mounts(hostMount(dir, "/data")))
	defer b.stop()
	if a := b.sh("cd /data && cat hers && echo b >> hers && mkdir -p d && echo c > d/new && cp /bin/true d/setuid && chmod 6755 d/setuid && ln -s / d/out && ls -ln hers"); a.end.ExitCode != 0 || !strings.Contains(a.stdout, "1000 1000") {
		t.Fatalf("%+v", a)
	}
	for name, want := range map[string]string{"hers": "ab\n", "d/new": "c\n"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		info, serr := os.Stat(filepath.Join(dir, name))
		must(t, err, serr)
		if st := info.Sys().(*syscall.Stat_t); string(text) != want || st.Uid != alice || st.Gid != alice {
			t.Errorf("%s is %q of %d:%d on the host", name, text, st.Uid, st.Gid)
		}
	}
	for _, who := range []string{"user", "root"} {
		for claim, line := range map[string]string{
			"write somebody else's file": "echo x >> /data/roots", "change its owner": "chown 1000 /data/roots", "change its mode": "chmod 4777 /data/roots",
			"make a device": "mknod /data/device c 1 5", "use a setuid file": `[ "$(python3 -c 'import os; print(os.stat("/data/d/setuid").st_mode & 0o4000)')" = 2048 ] && sudo -u nobody /data/d/setuid && false`,
			"link a file out of it": "ln /data/hers /home/user/linked", "link a file into it": "ln /etc/passwd /data/linked", "give a file away": "chown 33 /data/hers", "follow a link out": "cat /data/d/out" + dir + "/hers",
			"connect to root's socket": `python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("/data/socket")'`,
		} {
			if a := b.exec(agentapi.ExecParams{Argv: []string{"bash", "-c", line}, User: who}); a.end.ExitCode == 0 {
				t.Errorf("%s could %s: %s", who, claim, a.stdout)
			}
		}
	}
	if a := b.exec(agentapi.ExecParams{Argv: []string{"touch", "/data/as-root"}, User: "root"}); a.end.ExitCode == 0 {
		t.Error("root of the sandbox, who is nobody there, made a file")
	}
	// In a template whose user is root, root is her.
	m.borrow(t, "code-interpreter")
	must(t, os.MkdirAll(dir+"/for-root", 0o755), os.Chown(dir+"/for-root", alice, alice))
	r := m.start(t, from(buildTemplate(t, "code-interpreter")), mounts(hostMount(dir+"/for-root", "/data")))
	defer r.stop()
	r.root("echo x > /data/made")
	r.value("open('/data/made', 'a').write('y')")
	var st unix.Stat_t
	must(t, unix.Stat(dir+"/for-root/made", &st))
	if st.Uid != alice || st.Gid != alice || st.Size != 3 {
		t.Errorf("a file of the sandbox's root is %d:%d's with %d bytes", st.Uid, st.Gid, st.Size)
	}
}

func TestHostPathsThatAreRefused(t *testing.T) {
	m := newMaker(t)
	dir, closed, rw := hostDir(t, alice), hostDir(t, 0), hostDir(t, alice)
	must(t, os.Chmod(closed, 0o700), os.Mkdir(dir+"/sub", 0o755), os.WriteFile(dir+"/file", nil, 0o644), os.Symlink("/etc", dir+"/link"), os.Symlink("sub", dir+"/inner"))
	must(t, os.Mkdir(rw+"/roots", 0o755), os.Mkdir(rw+"/rootgroup", 0o755), os.Chown(rw+"/rootgroup", alice, 0))
	m.refused(t, "nothing is allowed", fault.Denied, "operator allows", readOnly(hostMount(dir, "/data")))
	m.allow(t, dir, closed, rw+":rw")
	for _, c := range []struct {
		claim string
		kind  fault.Kind
		words string
		mount sandbox.Mount
	}{
		{"another path", fault.Denied, "operator allows", readOnly(hostMount("/etc", "/data"))},
		{"a path with the same beginning", fault.Denied, "operator allows", readOnly(hostMount(dir+"x", "/data"))},
		{"what is above it", fault.Denied, "operator allows", readOnly(hostMount("/var/tmp", "/data"))},
		{"to write where only reading is allowed", fault.Denied, "reading only", hostMount(dir, "/data")},
		{"a path that is not there", fault.NotFound, "is not there", readOnly(hostMount(dir+"/none", "/data"))},
		{"a file", fault.Invalid, "not a directory", readOnly(hostMount(dir+"/file", "/data"))},
		{"a link out", fault.Denied, "a link", readOnly(hostMount(dir+"/link", "/data"))},
		{"below a link out", fault.Denied, "a link", readOnly(sub(hostMount(dir, "/data"), "link/ssl"))},
		{"a link that stays inside", fault.Denied, "a link", readOnly(hostMount(dir+"/inner", "/data"))},
		{"a sub path that leads out", fault.Invalid, "sub path", readOnly(sub(hostMount(dir, "/data"), "../.."))},
		{"an absolute sub path", fault.Invalid, "sub path", readOnly(sub(hostMount(dir, "/data"), "/etc"))},
		{"a path with dots", fault.Invalid, "absolute path", readOnly(hostMount(dir+"/../../etc", "/data"))},
		{"a path that is not absolute", fault.Invalid, "absolute path", readOnly(hostMount("etc", "/data"))},
		{"a directory that not everybody may read", fault.Denied, "o+rx", readOnly(hostMount(closed, "/data"))},
		{"to write to root's", fault.Denied, "belongs to root", hostMount(rw+"/roots", "/data")},
		{"to write to root's group's", fault.Denied, "belongs to root", hostMount(rw+"/rootgroup", "/data")},
		{"a target over proc", fault.Invalid, "/proc", readOnly(hostMount(dir, "/proc"))},
		{"a target below proc", fault.Invalid, "/proc", readOnly(hostMount(dir, "/proc/sys"))},
		{"a target over dev", fault.Invalid, "/dev", readOnly(hostMount(dir, "/dev/shm"))},
		{"a target over what holds our own", fault.Invalid, "/run/cove", readOnly(hostMount(dir, "/run"))},
		{"the root", fault.Invalid, "no place", readOnly(hostMount(dir, "/"))},
		{"a target with dots", fault.Invalid, "no place", readOnly(hostMount(dir, "/a/../proc"))},
		{"a relative target", fault.Invalid, "no place", readOnly(hostMount(dir, "data"))},
		{"a target through a link of the template", fault.Invalid, "a link lies on the way", readOnly(hostMount(dir, "/var/run/cove"))},
		{"a target that is a link", fault.Invalid, "a link lies on the way", readOnly(hostMount(dir, "/var/run"))},
		{"a target that is a file", fault.Invalid, "else than a directory", readOnly(hostMount(dir, "/etc/passwd"))},
		{"a kind of mount that is none", fault.Invalid, "kind", sandbox.Mount{Kind: "nfs", Source: "/x", Target: "/data"}},
	} {
		m.refused(t, c.claim, c.kind, c.words, c.mount)
	}
	must(t, unix.Mount("proc", dir+"/sub", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""))
	m.refused(t, "the host's proc, mounted below", fault.Denied, "host's own", readOnly(hostMount(dir+"/sub", "/data")))
	m.refused(t, "a part of it", fault.Denied, "host's own", readOnly(hostMount(dir+"/sub/sys/kernel", "/data")))
	must(t, unix.Unmount(dir+"/sub", unix.MNT_DETACH))
	m.refused(t, "one target twice", fault.Invalid, "lie in each other", readOnly(hostMount(dir, "/data")), readOnly(hostMount(rw, "/data")))
	m.refused(t, "one target in another", fault.Invalid, "lie in each other", readOnly(hostMount(dir, "/data")), readOnly(hostMount(rw, "/data/x")))
	many := []sandbox.Mount{}
	for i := range 17 {
		many = append(many, readOnly(hostMount(dir, fmt.Sprintf("/m%d", i))))
	}
	m.refused(t, "too many", fault.Invalid, "too many", many...)
	b := m.start(t, mounts(many[:16]...))
	if got := b.root("ls -d /m*/sub | wc -l"); got != "16" {
		t.Errorf("of 16 mounts %s are there", got)
	}
	b.stop()

	// The list is root's, or it is nobody's.
	list := filepath.Join(m.dir, "maker", "host_paths.json")
	must(t, os.Chown(list, alice, alice))
	m.refused(t, "a list of somebody else's", fault.Denied, "not root's alone", readOnly(hostMount(dir, "/data")))
	must(t, os.Chown(list, 0, 0), os.Chmod(list, 0o666))
	m.refused(t, "a list that others can write", fault.Denied, "not root's alone", readOnly(hostMount(dir, "/data")))
	must(t, os.Remove(list), os.Symlink("/etc/passwd", list))
	m.refused(t, "a list that is a link", fault.Internal, "", readOnly(hostMount(dir, "/data")))
	m.allow(t, dir)
	m.start(t, mounts(readOnly(hostMount(dir, "/data")))).stop()
}

func TestHostPathsThatAreNotAllowed(t *testing.T) {
	dir, data := hostDir(t, 0), t.TempDir()
	must(t, os.Symlink(dir, dir+"/self"), os.Symlink("/", dir+"/all"), os.Symlink(data, dir+"/data"))
	for _, path := range []string{"", "relative", "/", "/proc", "/proc/1", "/sys/fs", "/dev", "/run/user", dir + "/none", dir + "/..", dir + ":rwx", dir + "/all", "/etc/passwd", data, filepath.Dir(data), data + "/maker", dir + "/data"} {
		if err := native.AllowStorage(data, native.Storage{HostPaths: []string{path}}); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", path, err)
		}
	}
	must(t, native.AllowStorage(data, native.Storage{HostPaths: []string{dir, dir + "/self", dir + ":rw"}}), native.AllowStorage(data, native.Storage{}))
	for _, sizes := range []native.Storage{{VolumeSize: 1}, {MaxVolumeSize: 1}, {VolumeSize: 1 << 30, MaxVolumeSize: 1 << 29}} {
		if err := native.AllowStorage(data, sizes); !fault.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", sizes, err)
		}
	}
}

func TestVolumesAreAsLargeAsTheOperatorSays(t *testing.T) {
	m := newMaker(t)
	const mib = 1 << 20
	for i, c := range []struct {
		rules      native.Storage
		asked, got int64 // zero: refused
	}{
		{native.Storage{}, 0, 10 << 30},
		{native.Storage{}, 11 << 30, 0},
		{native.Storage{VolumeSize: 64 * mib}, 0, 64 * mib},
		{native.Storage{VolumeSize: 64 * mib}, 128 * mib, 128 * mib},
		{native.Storage{MaxVolumeSize: 64 * mib}, 0, 64 * mib},
		{native.Storage{MaxVolumeSize: 64 * mib}, 32 * mib, 32 * mib},
		{native.Storage{VolumeSize: 32 * mib, MaxVolumeSize: 64 * mib}, 0, 32 * mib},
		{native.Storage{VolumeSize: 32 * mib, MaxVolumeSize: 64 * mib}, 65 * mib, 0},
		{native.Storage{MaxVolumeSize: 20 << 30}, 11 << 30, 11 << 30},
	} {
		must(t, native.AllowStorage(m.dir, c.rules))
		v, err := m.driver.MakeVolume(t.Context(), tenant, sandbox.Volume{Name: fmt.Sprintf("v%d", i), Bytes: c.asked})
		if v.Bytes != c.got || (c.got == 0) != fault.Is(err, fault.Denied) {
			t.Errorf("%+v, asked for %d: %d bytes, %v", c.rules, c.asked, v.Bytes, err)
		}
	}
}

// A sandbox that may write to a host path makes links of what others are given from below it, and moves it about.
func TestHostPathCannotBeTurnedIntoAnother(t *testing.T) {
	m := newMaker(t)
	dir := hostDir(t, alice)
	must(t, os.MkdirAll(dir+"/a/b", 0o755), os.Chown(dir+"/a", alice, alice), os.Chown(dir+"/a/b", alice, alice))
	m.allow(t, dir+":rw", dir+"/a")
	attacker := m.start(t, mounts(hostMount(dir, "/data")))
	defer attacker.stop()
	var over sync.WaitGroup
	stop := make(chan struct{})
	over.Go(func() {
		line := `cd /data; while [ ! -e stop ]; do mv a/b a/c; ln -s /etc a/b; rm a/b; mv a/c a/b; mv a z; ln -s / a; rm a; mv z a; done`
		attacker.exec(agentapi.ExecParams{Argv: []string{"timeout", "60", "bash", "-c", line}})
	})
	over.Go(func() {
		<-stop
		attacker.sh("touch /data/stop")
	})
	seen := 0
	for range 40 {
		b, err := m.tryStart(t, mounts(readOnly(sub(hostMount(dir+"/a", "/mine"), "b"))))
		if err != nil {
			if !fault.Is(err, fault.Denied) && !fault.Is(err, fault.NotFound) {
				t.Errorf("refused with %v", err)
			}
			continue
		}
		seen++
		if got := b.root("ls -A /mine; ls /mine/.. | head -3; cat /mine/passwd 2>/dev/null || true"); strings.Contains(got, "passwd") || strings.Contains(got, "root:") {
			t.Errorf("it has the host's files: %s", got)
		}
		b.stop()
	}
	close(stop)
	over.Wait()
	t.Logf("%d of 40 found the directory", seen)
}

func TestVolumesOutliveSandboxes(t *testing.T) {
	m := newMaker(t)
	m.allow(t)
	a := m.start(t, mounts(volume("work", "/data")))
	a.sh("echo one > /data/file; mkdir /data/d; cp /bin/true /data/setuid; chmod 4755 /data/setuid")
	a.root("echo two > /data/roots; chown 33:33 /data/d")
	b := m.start(t, mounts(readOnly(volume("work", "/mnt/other")), sub(volume("work", "/parts"), "x/y")))
	if got := b.root("cat /mnt/other/file /mnt/other/roots; stat -c %u:%g /mnt/other/file /mnt/other/d; touch /mnt/other/new 2>&1; grep -c ext4.*nosuid,nodev /proc/mounts"); got !=
		"one\ntwo\n1000:1000\n33:33\ntouch: cannot touch '/mnt/other/new': Read-only file system\n2" {
		t.Errorf("another sandbox sees %q", got)
	}
	if got := b.sh("echo part > /parts/file; cat /parts/file; ls -A /parts/..").stdout; !strings.HasPrefix(got, "part\n") || strings.Contains(got, "roots") {
		t.Errorf("a part of it shows %q", got)
	}
	if got := a.sh("cat /data/x/y/file; ls -A /data; df --output=size -B1M /data | tail -1").stdout; !strings.HasPrefix(got, "part\nd\nfile\nroots\nsetuid\nx\n") {
		t.Errorf("the first sees %q", got)
	}
	volumes, err := m.driver.Volumes(t.Context(), tenant)
	must(t, err)
	if len(volumes) != 1 || volumes[0].Name != "work" || volumes[0].Bytes != 64<<20 || volumes[0].InUse != 2 || volumes[0].Used == 0 || time.Since(volumes[0].Created) > time.Minute {
		t.Errorf("got %+v", volumes)
	}
	if err := m.driver.RemoveVolume(t.Context(), tenant, "work"); !fault.Is(err, fault.Conflict) {
		t.Errorf("removed while it is used: %v", err)
	}
	a.stop()
	b.stop()

	// It outlives the maker, whether that ends in peace or not.
	for _, end := range []func(*testing.T){m.shutdown, m.crash} {
		last := m.start(t, mounts(volume("work", "/data")))
		last.sh("echo more >> /data/file; sync /data/file")
		end(t)
		m.open(t)
	}
	m.borrow(t, "code-interpreter")
	c := m.start(t, from(buildTemplate(t, "code-interpreter")), mounts(volume("work", "/data")))
	if got := c.root("cat /data/file"); got != "one\nmore\nmore" {
		t.Errorf("after two makers the file is %q", got)
	}
	c.stop()
	must(t, m.driver.RemoveVolume(t.Context(), tenant, "work"))
	if volumes, err := m.driver.Volumes(t.Context(), tenant); err != nil || len(volumes) != 0 {
		t.Errorf("after it was removed: %v %v", volumes, err)
	}
}

func TestVolumesAreOneTenants(t *testing.T) {
	m := newMaker(t)
	m.allow(t)
	made, err := m.driver.MakeVolume(t.Context(), tenant, sandbox.Volume{Name: "mine", Bytes: 32 << 20})
	if err != nil || made.Bytes != 32<<20 || made.Name != "mine" {
		t.Fatalf("%+v %v", made, err)
	}
	if _, err := m.driver.MakeVolume(t.Context(), tenant, sandbox.Volume{Name: "mine"}); !fault.Is(err, fault.Conflict) {
		t.Errorf("made twice: %v", err)
	}
	for _, name := range []string{"", "../mine", "a/b", ".hidden", "a\x00b", strings.Repeat("x", 200)} {
		if _, err := m.driver.MakeVolume(t.Context(), tenant, sandbox.Volume{Name: name}); !fault.Is(err, fault.Invalid) {
			t.Errorf("the name %q: %v", name, err)
		}
	}
	if _, err := m.driver.MakeVolume(t.Context(), tenant, sandbox.Volume{Name: "small", Bytes: 1}); !fault.Is(err, fault.Invalid) {
		t.Errorf("one byte: %v", err)
	}
	if _, err := m.driver.MakeVolume(t.Context(), tenant, sandbox.Volume{Name: "large", Bytes: 11 << 30}); !fault.Is(err, fault.Denied) {
		t.Errorf("more than the operator allows: %v", err)
	}
	if other, err := m.driver.Volumes(t.Context(), "other"); err != nil || len(other) != 0 {
		t.Errorf("another tenant sees %v %v", other, err)
	}
	if err := m.driver.RemoveVolume(t.Context(), "other", "mine"); !fault.Is(err, fault.NotFound) {
		t.Errorf("another tenant's remove: %v", err)
	}
	there := volume("mine", "/data")
	there.Create = false
	stranger := func(r *sandbox.StartRequest) { r.Tenant = "other" }
	if _, err := m.tryStart(t, mounts(there), stranger); !fault.Is(err, fault.NotFound) || !strings.Contains(fault.Message(err), "volume mine") {
		t.Errorf("another tenant's sandbox: %v", err)
	}
	b := m.start(t, mounts(there))
	if a := b.sh("head -c 64M /dev/zero > /data/big"); a.end.ExitCode == 0 || !strings.Contains(a.stderr, "No space") {
		t.Errorf("more than fits: %+v", a)
	}
	b.sh("rm /data/big; ln -s / /data/link; echo x > /data/file")
	for _, path := range []string{"link", "link/etc", "file", "file/x"} {
		m.refused(t, "the sub path "+path, fault.Invalid, "link or a file", sub(there, path))
	}
	b.stop()
}

func TestBranchesHaveTheMountsOfTheirParent(t *testing.T) {
	m := newMaker(t)
	dir := hostDir(t, 0)
	must(t, os.WriteFile(dir+"/file", []byte("host"), 0o644))
	m.allow(t, dir)
	b := m.start(t, mounts(readOnly(hostMount(dir, "/data")), volume("shared", "/shared")))
	b.value("x = 1; f = open('/shared/of-parent', 'w'); f.write('parent'); f.flush(); import mmap; g = open('/data/file'); mm = mmap.mmap(g.fileno(), 0, prot=mmap.PROT_READ)")
	children, _ := b.fork(2)
	for i, c := range children {
		if got := c.value(fmt.Sprintf("print(x, open('/data/file').read(), open('/shared/of-parent').read(), mm[:4]); open('/shared/of-%d', 'w').write('child')", i)); got != "1 host parent b'host'" {
			t.Errorf("a branch sees %s", got)
		}
	}
	if got := b.value("import os; print(sorted(os.listdir('/shared')))"); got != "['of-0', 'of-1', 'of-parent']" {
		t.Errorf("the parent sees %s", got)
	}
	if v, err := m.driver.Volumes(t.Context(), tenant); err != nil || v[0].InUse != 3 {
		t.Errorf("%+v %v", v, err)
	}
	// A snapshot is of the sandbox's own files.
	made := b.snapshot("without")
	c := m.start(t, from(made))
	if got := c.root("ls -A /data /shared"); got != "/data:\n\n/shared:" {
		t.Errorf("a snapshot holds %q", got)
	}
	c.stop()
	m.allow(t)
	if _, _, err := b.tryFork(1); !fault.Is(err, fault.Denied) {
		t.Errorf("a path that is not allowed any more: %v", err)
	}
	for _, c := range append(children, b) {
		c.stop()
	}
}

func TestMountsLeaveNothingBehind(t *testing.T) {
	m := newMaker(t)
	dir := hostDir(t, alice)
	m.allow(t, dir+":rw")
	all := []sandbox.Mount{hostMount(dir, "/data"), readOnly(hostMount(dir, "/again")), volume("v", "/v"), sub(volume("v", "/w"), "a/b")}
	m.start(t).stop()
	m.start(t, mounts(all...)).stop()
	before := m.rest(t)
	for i := range 4 {
		b := m.start(t, mounts(all...))
		switch i {
		case 1:
			b.pause()
		case 2:
			b.snapshot(fmt.Sprint("snap", i))
			must(t, m.driver.RemoveTemplate(t.Context(), tenant, fmt.Sprint("snap", i)))
		case 3:
			b.value("x = 1")
			children, _ := b.fork(1)
			children[0].stop()
		}
		b.stop()
		m.refused(t, "a target in a file", fault.Invalid, "", volume("v", "/v"), readOnly(hostMount(dir, "/etc/passwd/x")))
		m.refused(t, "nothing there", fault.NotFound, "", volume("v", "/v"), hostMount(dir+"/none", "/x"))
	}
	must(t, m.driver.RemoveVolume(t.Context(), tenant, "v"))
	if after := m.rest(t); after.Loops > before.Loops || after.Files > before.Files+1 || after.Mounts > before.Mounts || after.Slots != before.Slots {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if text, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(text), dir) || strings.Contains(string(text), m.dir) {
		t.Errorf("the host has mounts of ours: %v\n%s", err, text)
	}
	// With the maker everything goes, and its devices too.
	b := m.start(t, mounts(all...))
	_ = b
	m.crash(t)
	for deadline := time.Now().Add(2 * time.Minute); m.loops(t) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			out, _ := exec.Command("losetup", "-a").CombinedOutput()
			t.Fatalf("devices are left: %s", out)
		}
	}
	m.open(t)
}

// deepTemplate is base with so many directories more, each of which adds a file and changes one that all have. Every tree of base
// has its share of them.
func (m *ownMaker) deepTemplate(t *testing.T, n int) *template.Template {
	t.Helper()
	deep := *buildTemplate(t, "base")
	deep.Name, deep.Digest = "deep", fmt.Sprintf("%064x", n)
	deep.Trees = slices.Clone(deep.Trees)
	for i := range n {
		tree := &deep.Trees[i%len(deep.Trees)]
		dir := filepath.Join(m.templates(), "built", "layers", fmt.Sprint("deep", i))
		must(t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, fmt.Sprint("file", i)), nil, 0o644), os.WriteFile(filepath.Join(dir, "uppermost"), fmt.Append(nil, i), 0o644))
		tree.Lower = slices.Insert(slices.Clone(tree.Lower), 0, dir)
	}
	text, err := json.Marshal(map[string]any{"template": &deep})
	must(t, err, os.WriteFile(filepath.Join(m.templates(), "deep.toml"), []byte("name = 'deep'\nfrom = 'base'\n"), 0o644))
	must(t, os.WriteFile(filepath.Join(m.templates(), "built", "deep.json"), text, 0o644))
	return &deep
}

func TestTemplateOfManyLayers(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	dir := hostDir(t, 0)
	m.allow(t, dir)
	base := buildTemplate(t, "base")
	own := 0
	for _, tree := range base.Trees {
		own += len(tree.Lower)
	}
	var all []sandbox.Mount
	for i := range 16 { // the most descriptors that a shell is ever given
		all = append(all, readOnly(hostMount(dir, fmt.Sprintf("/m%d", i))))
	}
	for _, n := range []int{127, 199 - own} {
		deep := m.deepTemplate(t, n)
		b := m.start(t, from(deep), mounts(all...))
		var places []string
		for _, tree := range deep.Trees {
			places = append(places, tree.Target)
		}
		want := ""
		for i := range places {
			last := n - 1 - (n-1-i)%len(places)
			want += fmt.Sprintln(last)
		}
		line := "for d in " + strings.Join(places, " ") + "; do cat $d/uppermost; echo; touch $d/new || exit 1; done"
		if got := b.root(line) + "\n"; got != want {
			t.Errorf("%d layers: the uppermost files are %q, want %q", n, got, want)
		}
		if got := b.root("ls " + strings.Join(places, " ") + " | grep -c '^file'"); got != fmt.Sprint(n) {
			t.Errorf("of %d layers %s are there", n, got)
		}
		if n == 127 {
			plain := m.start(t, from(deep)) // its branch is a pooled shell that gets another file tree
			for _, parent := range []*box{b, plain} {
				parent.value("x = 1; open('/tmp/made', 'w')")
				branches, _ := parent.fork(1)
				branches[0].root("cat /tmp/made && ls /file126")
				branches[0].stop()
			}
			plain.stop()
		}
		b.stop()
	}
	b, err := m.tryStart(t, from(m.deepTemplate(t, 201-own)))
	if err == nil {
		b.stop()
	}
	if !fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "at most 200") {
		t.Errorf("too many layers: %v", err)
	}
}
