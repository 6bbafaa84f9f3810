package native_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
	"github.com/covehq/cove/test/slow"
)

func from(t *template.Template) change { return func(r *sandbox.StartRequest) { r.Template = t } }

func (b *box) snapshot(name string) *template.Template {
	b.t.Helper()
	t, err := b.driver.Snapshot(b.t.Context(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: name, Description: "of " + b.id})
	if err != nil {
		b.t.Fatalf("snapshot: %v", err)
	}
	return t
}

// root runs a line as root of the sandbox; it must succeed.
func (b *box) root(line string) string {
	b.t.Helper()
	a := b.exec(agentapi.ExecParams{Argv: []string{"bash", "-c", line}, User: "root"})
	if a.end.ExitCode != 0 {
		b.t.Fatalf("%q ended %+v: %s%s", line, a.end, a.stdout, a.stderr)
	}
	return strings.TrimSpace(a.stdout)
}

// looks is what a sandbox shows of everything that a layer can say: new files, links, modes, owners, attributes, deleted
// files, replaced directories, and the same in a tree of its own.
const (
	change1 = `
cd /home/user && echo one > kept && echo two > changed && ln kept hard && ln -s kept soft && mkdir -m 1777 sticky && mkdir -m 2750 group
chown 1234:4321 changed && chmod 4755 changed
setfattr -n user.colour -v blue kept 2>/dev/null || python3 -c 'import os; os.setxattr("/home/user/kept", "user.colour", b"blue")'
rm /etc/hostname; rm -rf /etc/alternatives && mkdir /etc/alternatives && echo mine > /etc/alternatives/mine
mkdir -p /opt/deep/down && echo x > /opt/deep/down/file
echo tool > /usr/bin/cove-tool; rm /usr/bin/cal /usr/bin/tac; rm -rf /usr/share/doc; mkdir /usr/share/doc; mkfifo /home/user/pipe`
	look = `
cd /home/user && stat -c '%n %F %a %u:%g %h %s' kept changed hard soft sticky group pipe && cat kept changed && readlink soft
[ kept -ef hard ] && echo linked
python3 -c 'import os; print(os.getxattr("/home/user/kept", "user.colour"))'
ls -A /etc/alternatives /usr/share/doc; ls /etc/hostname /usr/bin/tac 2>&1; cat /usr/bin/cove-tool; find /opt -printf '%p %y %m %U\n' | sort
ls -l /usr/bin | wc -l; ls /etc | wc -l`
)

func TestSnapshotHoldsWhatTheSandboxShowed(t *testing.T) {
	m := newMaker(t)
	for _, kind := range []sandbox.Storage{sandbox.StorageVolatile, sandbox.StorageDurable} {
		t.Run(string(kind), func(t *testing.T) {
			parent := m.start(t, storage(kind))
			parent.root(strings.ReplaceAll(change1, "rm /usr/bin/cal ", "rm "))
			want := parent.root(look)
			made := parent.snapshot("first-" + string(kind))
			parent.root("echo later > /home/user/kept; rm -rf /opt/deep; touch /usr/bin/tac")

			first := m.start(t, from(made), storage(kind))
			if diff := cmp.Diff(want, first.root(look)); diff != "" {
				t.Errorf("a sandbox of the snapshot looks different: %s", diff)
			}
			// Changes above a snapshot, and what it hides stays hidden.
			first.root("rm /home/user/changed; rm -rf /etc/alternatives; echo again > /home/user/kept; touch /etc/hostname; mkdir /home/user/new")
			second := m.start(t, from(first.snapshot("second-"+string(kind))))
			if got := second.root("cat /home/user/kept; ls /home/user; ls /etc/alternatives /usr/bin/tac 2>&1; ls -A /etc/hostname /usr/share/doc"); got != first.root("cat /home/user/kept; ls /home/user; ls /etc/alternatives /usr/bin/tac 2>&1; ls -A /etc/hostname /usr/share/doc") ||
				strings.Contains(got, "changed") || !strings.Contains(got, "again") {
				t.Errorf("the snapshot of a snapshot shows %s", got)
			}
			if diff := cmp.Diff(want, m.start(t, from(made)).root(look)); diff != "" {
				t.Errorf("the first snapshot was changed by a sandbox above it: %s", diff)
			}
			third := m.start(t, from(second.snapshot("third-"+string(kind))))
			third.root("echo still writable > /home/user/kept && touch /usr/bin/tac /home/user/changed")
		})
	}
	t.Run("tmpfs is refused", func(t *testing.T) {
		b := m.start(t, storage(sandbox.StorageTmpfs))
		_, err := m.driver.Snapshot(t.Context(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: "x"})
		if !fault.Is(err, fault.Unsupported) {
			t.Errorf("got %v", err)
		}
	})
}

func TestSnapshotNamesAndTenants(t *testing.T) {
	m := newMaker(t)
	b := m.start(t)
	ask := func(r sandbox.SnapshotRequest) error {
		r.ID = b.id
		_, err := m.driver.Snapshot(t.Context(), r)
		return err
	}
	made := b.snapshot("mine")
	want := &template.Snapshot{From: "base", Base: "base", Digest: buildTemplate(t, "base").Digest, Created: made.Snapshot.Created}
	if diff := cmp.Diff(want, made.Snapshot); diff != "" || made.Tenant != tenant || made.Name != "mine" || made.Description != "of "+b.id || time.Since(made.Snapshot.Created) > time.Minute {
		t.Errorf("%s\n%+v", diff, made)
	}
	for _, c := range []struct {
		claim   string
		request sandbox.SnapshotRequest
		kind    fault.Kind
	}{
		{"a name that is taken", sandbox.SnapshotRequest{Tenant: tenant, Name: "mine"}, fault.Conflict},
		{"the name of everybody's template", sandbox.SnapshotRequest{Tenant: tenant, Name: "python"}, fault.Conflict},
		{"a name that is none", sandbox.SnapshotRequest{Tenant: tenant, Name: "../mine"}, fault.Invalid},
		{"no name", sandbox.SnapshotRequest{Tenant: tenant}, fault.Invalid},
		{"another tenant's sandbox", sandbox.SnapshotRequest{Tenant: "other", Name: "stolen"}, fault.NotFound},
	} {
		if err := ask(c.request); !fault.Is(err, c.kind) {
			t.Errorf("%s: %v", c.claim, err)
		}
	}
	if _, err := m.driver.Snapshot(t.Context(), sandbox.SnapshotRequest{ID: "nobody", Tenant: tenant, Name: "y"}); !fault.Is(err, fault.NotFound) {
		t.Errorf("a sandbox that is not there: %v", err)
	}
	if err := m.driver.Prepare(t.Context(), "other", made); !fault.Is(err, fault.Unavailable) {
		t.Errorf("another tenant's template: %v", err)
	}
	for _, c := range []struct {
		tenant, name string
		kind         fault.Kind
	}{{"other", "mine", fault.NotFound}, {tenant, "python", fault.Denied}, {tenant, "nothing", fault.NotFound}, {tenant, "../base", fault.NotFound}} {
		if err := m.driver.RemoveTemplate(t.Context(), c.tenant, c.name); !fault.Is(err, c.kind) {
			t.Errorf("remove %s of %s: %v", c.name, c.tenant, err)
		}
	}
	for _, c := range []struct {
		tenant string
		want   []string
	}{{tenant, []string{"base", "code-interpreter", "mine", "python"}}, {"other", []string{"base", "code-interpreter", "python"}}} {
		var names []string
		for _, info := range m.store.ListFor(c.tenant) {
			names = append(names, info.Name)
		}
		if diff := cmp.Diff(c.want, names); diff != "" {
			t.Errorf("the templates of %s: %s", c.tenant, diff)
		}
	}
}

func TestSnapshotIsRemoved(t *testing.T) {
	m := newMaker(t)
	b := m.start(t)
	b.root("echo one > /home/user/file")
	made := b.snapshot("one")
	running := m.start(t, from(made))
	running.root("echo two > /home/user/more")
	running.snapshot("two")
	if err := m.driver.RemoveTemplate(t.Context(), tenant, "one"); !fault.Is(err, fault.Conflict) {
		t.Errorf("removed what another template is made from: %v", err)
	}
	for _, name := range []string{"two", "one"} {
		if err := m.driver.RemoveTemplate(t.Context(), tenant, name); err != nil {
			t.Fatal(err)
		}
	}
	if left := m.images(t); len(left) != 0 {
		t.Errorf("images left: %v", left)
	}
	if _, err := m.tryStart(t, from(made)); err == nil {
		t.Error("a sandbox was made from a removed template")
	}
	if got := running.root("cat /home/user/file /home/user/more"); got != "one\ntwo" {
		t.Errorf("a sandbox of a removed template reads %q", got)
	}
	// The same name again, made of a sandbox whose template is gone.
	again := running.snapshot("one")
	running.stop()
	if got := m.start(t, from(again)).root("cat /home/user/file /home/user/more"); got != "one\ntwo" {
		t.Errorf("reads %q", got)
	}
}

// images are the names of snapshots' images on disk.
func (m *ownMaker) images(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(m.templates(), "built", "layers", "*.img"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestSnapshotOutlivesItsMaker(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	b := m.start(t)
	b.root("echo one > /home/user/file")
	b.snapshot("kept")
	half := filepath.Join(m.templates(), "built", "layers", "snap-half-0.img")
	if err := os.WriteFile(half, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.crash(t)
	m.open(t)
	if _, err := os.Stat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Error("an image that no record names is still there")
	}
	made, err := m.store.ResolveFor(t.Context(), tenant, "kept")
	if err != nil {
		t.Fatal(err)
	}
	if got := m.start(t, from(made)).root("cat /home/user/file"); got != "one" {
		t.Errorf("reads %q", got)
	}
	if err := m.store.Verify(t.Context(), tenant, "kept"); err != nil {
		t.Error(err)
	}
	f, err := os.OpenFile(m.images(t)[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("changed"), 1<<20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := m.store.Verify(t.Context(), tenant, "kept"); err == nil {
		t.Error("a changed image is not noticed")
	}
}

// TestSnapshotIsOfOneMoment takes one while a program writes first one file and then another that says how far the first is.
func TestSnapshotIsOfOneMoment(t *testing.T) {
	m := newMaker(t)
	b := m.start(t)
	b.root(`
cat > /root/writer.py <<'END'
import os
data = os.open("/home/user/data", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
note = os.open("/home/user/note", os.O_CREAT | os.O_WRONLY)
n = 0
while n < 20_000_000:
    n += os.write(data, b"x" * 997)
    os.pwrite(note, b"%012d" % n, 0)
END
python3 /root/writer.py >/dev/null 2>&1 </dev/null & sleep 0.2`)
	for i := range 3 {
		made := b.snapshot(fmt.Sprint("moment", i))
		got := strings.Fields(m.start(t, from(made)).root("stat -c %s /home/user/data; cat /home/user/note"))
		size, _ := strconv.Atoi(got[0])
		noted, _ := strconv.Atoi(strings.TrimLeft(got[1], "0"))
		if noted > size || size > noted+997 || noted == 0 {
			t.Errorf("the data has %d bytes, the note says %d", size, noted)
		}
	}
}

func TestSnapshotWithAZygote(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	python := from(buildTemplate(t, "python"))
	b := m.start(t, python)
	b.value(`
import os, numpy
os.makedirs("/home/user/lib", exist_ok=True)
open("/home/user/lib/thing.py", "w").write("answer = 42")
print(numpy.__name__)`)
	// What a sandbox changes of Python itself must not run in a zygote.
	b.root(`d=$(python3 -c 'import numpy, os; print(os.path.dirname(numpy.__file__))'); echo 'open("/tmp/ran-outside", "w")' >> $d/__init__.py`)
	made := b.snapshot("lib")
	first := m.start(t, from(made))
	if got := first.value(`import sys; sys.path.insert(0, "/home/user/lib"); import thing, numpy, os; print(thing.answer, numpy.arange(3).sum(), os.path.exists("/tmp/ran-outside"))`); got != "42 3 False" {
		t.Errorf("got %q", got)
	}
	stats, err := m.driver.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(stats.Zygotes) != 1 || stats.Zygotes[0].Template != "python" {
		t.Errorf("zygotes: %+v", stats.Zygotes)
	}
	// The same with a maker that meets the snapshot before what it was made from.
	m.crash(t)
	m.open(t)
	if got := m.start(t, from(made)).value(`import numpy, os; print(numpy.arange(3).sum(), os.path.exists("/home/user/lib/thing.py"))`); got != "3 True" {
		t.Errorf("got %q", got)
	}
	plain := m.start(t, python)
	if got := plain.value(`import os; print(os.path.exists("/home/user/lib"))`); got != "False" {
		t.Errorf("a sandbox of the template shows the snapshot's files: %s", got)
	}
	if i := instance(t, m.driver, plain.id); i.Template != "python" {
		t.Errorf("listed as %+v", i)
	}
}

func TestUsageTellsTheDisk(t *testing.T) {
	b := start(t)
	disk := func() int64 {
		u, err := b.driver.Usage(t.Context(), b.id)
		if err != nil {
			t.Fatal(err)
		}
		return u.DiskBytes
	}
	before := disk()
	if before > 1<<20 {
		t.Errorf("an unused sandbox has %d bytes on disk", before)
	}
	b.value(`
f = open("/home/user/big", "wb"); f.write(b"x" * (8 << 20)); f.flush()
import os; os.fsync(f.fileno()); os.sync()`)
	for deadline := time.Now().Add(2 * time.Minute); disk() < before+8<<20; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("8 MiB later it has %d", disk())
		}
	}
	if now := disk(); now > before+9<<20 {
		t.Errorf("8 MiB are counted as %d", now-before)
	}
}

// TestSnapshotLeavesNothing counts what the maker and the host hold before and after.
func TestSnapshotLeavesNothing(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	cycle := func(i int) {
		b := m.start(t)
		b.root("dd if=/dev/urandom of=/home/user/file bs=1M count=3 2>/dev/null")
		first := m.start(t, from(b.snapshot(fmt.Sprint("a", i))))
		first.root("echo x > /home/user/more")
		second := m.start(t, from(first.snapshot(fmt.Sprint("b", i))))
		for _, b := range []*box{b, first, second} {
			b.stop()
		}
		for _, name := range []string{"b", "a"} {
			if err := m.driver.RemoveTemplate(t.Context(), tenant, fmt.Sprint(name, i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	cycle(0)
	before := m.rest(t)
	for i := range 4 {
		cycle(i + 1)
	}
	if diff := left(before, m.rest(t)); diff != "" {
		t.Error(diff)
	}
}

func TestSnapshotOfASandboxThatEnds(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	var before held
	for i := range 12 {
		if i == 1 {
			before = m.rest(t)
		}
		b := m.start(t)
		b.sh("(while :; do date >> /home/user/file; done) >/dev/null 2>&1 </dev/null & sleep 0.05")
		done := make(chan error, 1)
		go func() {
			_, err := m.driver.Snapshot(context.Background(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: "late"})
			done <- err
		}()
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		b.stop()
		err := <-done
		switch {
		case err == nil:
			if err := m.driver.RemoveTemplate(t.Context(), tenant, "late"); err != nil {
				t.Error(err)
			}
		case !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Gone):
			t.Errorf("snapshot: %v", err)
		}
	}
	if diff := left(before, m.rest(t)); diff != "" {
		t.Error(diff)
	}
}

// held is what may leak.
type held struct {
	Loops, Files, Slots, Pooled, Mounts int
	Images                              []string
}

// files counts what the maker has open, without sockets, pipes and processes: whether a kernel waits in a pooled shell is
// left to chance.
func (m *ownMaker) files(t *testing.T) int {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.driver.MakerPID()))
	if err != nil || len(links) == 0 {
		t.Fatalf("the maker's descriptors cannot be read: %v", err)
	}
	n := 0
	for _, link := range links {
		to, err := os.Readlink(link)
		if err == nil && strings.HasPrefix(to, "/") {
			n++
		}
	}
	return n
}

// rest waits until nothing is being made or taken apart, and counts.
func (m *ownMaker) rest(t *testing.T) held {
	t.Helper()
	var last held
	for deadline, same := time.Now().Add(60*time.Second), 0; same < 3; time.Sleep(100 * time.Millisecond) {
		s, err := m.driver.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		now := held{Loops: m.loops(t), Files: m.files(t), Slots: s.Slots, Pooled: s.Pooled, Mounts: mountsOf(t, m.driver.MakerPID()), Images: m.images(t)}
		if cmp.Equal(now, last) && settled(s) {
			same++
		} else {
			same = 0
		}
		last = now
		if time.Now().After(deadline) {
			t.Fatalf("it does not come to rest: %+v %+v", s, now)
		}
	}
	return last
}

// left is what is there now and was not before. Mounts may become fewer: those of the host that were there when the maker began go with their
// directories.
func left(before, now held) string {
	now.Mounts = max(now.Mounts, before.Mounts)
	return cmp.Diff(before, now)
}

// settled: two shells wait for the template of the tests, and nothing else is there.
func settled(s wire.Stats) bool {
	return s.Dying == 0 && s.Sandboxes == 0 && s.Pooled == 2 && s.Slots == 2
}

// loops counts the devices whose files lie in the maker's directory.
func (m *ownMaker) loops(t *testing.T) int {
	t.Helper()
	names, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, name := range names {
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), m.dir+"/") {
			n++
		}
	}
	return n
}

func mountsOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "\n")
}

// smallDisk is a directory on a file system of its own.
func smallDisk(t *testing.T, bytes int64, mkfs ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-small-disk")
	if err != nil {
		t.Fatal(err)
	}
	image := dir + ".img"
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, bytes); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the maker in it is gone
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
			err := unix.Unmount(dir, 0)
			if err == nil || errors.Is(err, unix.EINVAL) {
				break
			}
			if time.Now().After(deadline) {
				t.Errorf("unmount: %v", err)
				break
			}
		}
		os.Remove(dir)
		os.Remove(image)
	})
	for _, argv := range [][]string{append(mkfs, image), {"mount", "-o", "loop", image, dir}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%v: %v: %s", argv, err, out)
		}
	}
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o755); err != nil {
		t.Fatal(err)
	}
	return data
}

func TestSnapshotOnAFullDisk(t *testing.T) {
	buildTemplate(t, "base")
	dir := smallDisk(t, 256<<20, "mkfs.ext4", "-q", "-F", "-m", "0")
	m := newMakerAt(t, dir)
	b := m.start(t, storage(sandbox.StorageDurable))
	b.root("dd if=/dev/urandom of=/home/user/file bs=1M count=60 2>/dev/null; sync -f /home/user/file") // its own space is taken
	if err := unix.Fallocate(fill(t, dir), 0, 0, free(t, dir)-(20<<20)); err != nil {
		t.Fatal(err)
	}
	before := free(t, dir)
	_, err := m.driver.Snapshot(t.Context(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: "large"})
	if !fault.Is(err, fault.DiskFull) || !strings.Contains(fault.Message(err), "disk is full") {
		t.Errorf("got %v", err)
	}
	for deadline := time.Now().Add(2 * time.Minute); free(t, dir) < before-(2<<20); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes were free before, %d are now", before, free(t, dir))
		}
	}
	if left := m.images(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if len(m.store.ListFor(tenant)) != 3 {
		t.Errorf("templates: %+v", m.store.ListFor(tenant))
	}
	b.root("echo goes on > /home/user/file2; cat /home/user/file2")
}

func fill(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(filepath.Join(dir, "filler"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func free(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bfree) * st.Bsize
}

// TestMakerThatDiesWhileADiskIsFrozen leaves processes that cannot even be killed; the next maker thaws the disk.
func TestMakerThatDiesWhileADiskIsFrozen(t *testing.T) {
	m := newMaker(t)
	b := m.start(t)
	b.root("echo mine > /home/user/whose")
	pids := b.hostPIDs()
	at, err := os.MkdirTemp("", "cove-frozen")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(at)
	m.freezeByHand(t, at)
	b.sh("(sync -f /home/user/whose; echo x > /home/user/stuck) >/dev/null 2>&1 </dev/null &")
	time.Sleep(100 * time.Millisecond)
	m.crash(t)
	m.open(t)
	waitDead(t, pids)
}

// freezeByHand freezes the disk that holds the test's file.
func (m *ownMaker) freezeByHand(t *testing.T, at string) {
	t.Helper()
	names, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(text), m.dir+"/") {
			continue
		}
		if err := unix.Mount("/dev/"+strings.Split(name, "/")[3], at, "ext4", 0, ""); err != nil {
			continue
		}
		_, err = os.Stat(filepath.Join(at, "0/u/home/user/whose"))
		if err == nil {
			err = exec.Command("fsfreeze", "--freeze", at).Run()
			if err != nil {
				t.Error(err)
			}
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
			return
		}
		if err := unix.Unmount(at, 0); err != nil {
			t.Error(err)
		}
	}
	t.Fatal("the sandbox's disk is not found")
}

func BenchmarkSnapshot(b *testing.B) {
	s := start(b)
	s.value("1")
	ctx := context.Background()
	for b.Loop() {
		name := fmt.Sprintf("bench-%d", os.Getpid())
		if _, err := s.driver.Snapshot(ctx, sandbox.SnapshotRequest{ID: s.id, Tenant: tenant, Name: name}); err != nil {
			b.Fatal(err)
		}
		if err := s.driver.RemoveTemplate(ctx, tenant, name); err != nil {
			b.Fatal(err)
		}
	}
}

// branch forks a sandbox once.
func (m *ownMaker) branch(t *testing.T, parent *box) *box {
	t.Helper()
	m.next++
	b := &box{t: t, id: fmt.Sprintf("own%d", m.next), driver: m.driver}
	b.agent = agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return b.driver.Dial(ctx, b.id) })
	_, err := m.driver.Fork(t.Context(), sandbox.ForkRequest{Parent: parent.id, Children: []sandbox.ForkChild{{
		ID: b.id, Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128, OpenFiles: 1024}, Network: policy.Network{Mode: policy.None},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestBranchesOfALargeLayer share it, below disks of their own; what they do not share they may stack.
func TestBranchesOfALargeLayer(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	parent := m.start(t, from(buildTemplate(t, "python")))
	parent.root(change1 + "\nhead -c 60000000 /dev/urandom > /home/user/large")
	want := parent.root(look + "\nsha256sum /home/user/large")
	first := m.branch(t, parent)
	parent.root("rm /home/user/large; echo later > /home/user/kept")
	show := look + "\nsha256sum /home/user/large"
	if diff := cmp.Diff(want, first.root(show)); diff != "" {
		t.Errorf("a branch looks different: %s", diff)
	}
	small := first.root("rm /opt/deep/down/file; echo branch > /home/user/kept; head -c 1000000 /dev/urandom | tee /home/user/small | sha256sum")
	parent.stop()
	second := m.branch(t, first)
	if got := second.root("cat /home/user/kept; ls /opt/deep/down; sha256sum < /home/user/small"); got != "branch\n"+small {
		t.Errorf("a branch of a branch shows %q", got)
	}
	second.root("head -c 50000000 /dev/urandom > /home/user/large2; rm -r /opt/deep")
	sums := second.root("cd /home/user; sha256sum large large2 small kept; ls /opt")
	third := m.branch(t, second)
	if got := third.root("cd /home/user; sha256sum large large2 small kept; ls /opt"); got != sums {
		t.Errorf("a third shows %s, not %s", got, sums)
	}
	made := third.snapshot("deep")
	for _, b := range []*box{first, second, third} {
		b.stop()
	}
	if got := len(made.Images()); got != 3 {
		t.Errorf("the snapshot has %d images", got)
	}
	m.crash(t)
	m.open(t)
	b := m.start(t, from(made))
	if got := b.root("cd /home/user; sha256sum large large2 small kept; ls /opt"); got != sums {
		t.Errorf("a snapshot of a branch shows %s, not %s", got, sums)
	}
	if err := m.store.Verify(t.Context(), tenant, "deep"); err != nil {
		t.Error(err)
	}
}

// TestTooManyLayers ends a line of branches with a sentence, and with nothing half made.
func TestTooManyLayers(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	b := m.start(t)
	var names []string
	for i := 0; ; i++ {
		b.root(fmt.Sprint("echo ", i, " >> /home/user/file"))
		name := fmt.Sprint("layer", i)
		made, err := m.driver.Snapshot(t.Context(), sandbox.SnapshotRequest{ID: b.id, Tenant: tenant, Name: name})
		if fault.Is(err, fault.Exhausted) && i > 10 {
			break
		}
		if err != nil || i > 60 {
			t.Fatalf("snapshot %d: %v", i, err)
		}
		names = append(names, name)
		b.stop()
		b = m.start(t, from(made))
	}
	if got := b.root("wc -l < /home/user/file"); got != fmt.Sprint(len(names)+1) {
		t.Errorf("after %d layers the file has %s lines", len(names), got)
	}
	if got := len(m.images(t)); got != len(names) {
		t.Errorf("%d images for %d templates", got, len(names))
	}
}

// TestSnapshotOfLinks has links in the places where something is mounted when a sandbox starts. A sandbox cannot put most of
// them there itself: so root writes them into the image. None is followed out of the new root.
func TestSnapshotOfLinks(t *testing.T) {
	slow.Test(t)
	outside, err := os.MkdirTemp("", "cove-outside")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(outside)
	if err := os.Chmod(outside, 0o777); err != nil { // or it would be safe by its mode alone
		t.Fatal(err)
	}
	m := newMaker(t)
	b := m.start(t)
	b.root("touch /etc/mine")
	b.snapshot("links0") // one that nobody changes, so that what is kept once is there in both counts
	m.start(t, from(b.snapshot("links1"))).stop()
	b.stop()
	remove := func(name string) {
		if err := m.driver.RemoveTemplate(t.Context(), tenant, name); err != nil {
			t.Error(err)
		}
	}
	remove("links0")
	remove("links1")
	before := m.rest(t)
	for _, c := range []struct {
		claim string
		links map[string]string
		says  string // why it does not start; empty: it does
	}{
		{"/dev out of the root", map[string]string{"dev": outside}, "/dev of the new root: not a directory"},
		{"/proc out of the root by its parents", map[string]string{"proc": "../../../../../.." + outside}, "/proc of the new root: not a directory"},
		{"/usr out of the root", map[string]string{"usr": outside}, "/usr of the new root: not a directory"},
		{"/run out of the root", map[string]string{"run": outside}, "/run of the new root: no such file"},
		{"/run to where the shell stands", map[string]string{"run": "/proc/self/cwd"}, "/run of the new root: no such file"},
		{"/run/cove out of the root", map[string]string{"run/cove": outside}, "/run/cove of the new root: not a directory"},
		{"/dev and /proc to each other", map[string]string{"dev": "proc", "proc": "dev"}, "/dev of the new root: not a directory"},
		{"/proc to the root itself", map[string]string{"proc": "/"}, "/proc of the new root: not a directory"},
		{"/dev to /proc", map[string]string{"dev": "/proc"}, "/dev of the new root: not a directory"},
		{"resolv.conf to itself", map[string]string{"etc/resolv.conf": "resolv.conf"}, "/etc/resolv.conf of the new root: too many"},
		{"resolv.conf to where the shell stands", map[string]string{"etc/resolv.conf": "/proc/self/cwd/e"}, "/etc/resolv.conf of the new root: too many"},
		{"resolv.conf out of the root", map[string]string{"etc/resolv.conf": outside + "/file"}, ""},
		{"resolv.conf to another file", map[string]string{"etc/resolv.conf": "mine"}, ""},
		{"/run to a directory of the sandbox", map[string]string{"run": "/var/../home"}, ""},
		{"/sys and /tmp out of the root", map[string]string{"sys": outside, "tmp": outside}, ""},
	} {
		t.Run(c.claim, func(t *testing.T) {
			parent := m.start(t)
			parent.root("touch /etc/mine")
			made := parent.snapshot("links")
			parent.stop()
			defer remove("links")
			plant(t, made.Images()[0], c.links)
			b, err := m.tryStart(t, from(made))
			if err == nil {
				defer b.stop()
			}
			switch {
			case c.says == "" && err != nil:
				t.Errorf("it does not start: %v", err)
			case c.says == "":
				want := "kernel\nproc\ndevtmpfs"
				got := b.root("ls -d /run/cove/kernel >/dev/null && echo kernel; stat -f -c %T /proc; stat -f -c %T /dev | sed s/^tmpfs/devtmpfs/; cat /proc/keys 2>/dev/null; true")
				if got != want {
					t.Errorf("it shows %q, not %q", got, want)
				}
			case err == nil || !strings.Contains(err.Error(), c.says):
				t.Errorf("got %v, want %s", err, c.says)
			}
		})
		if left, err := os.ReadDir(outside); err != nil || len(left) != 0 {
			t.Fatalf("%s: outside is %v %v", c.claim, left, err)
		}
	}
	if diff := left(before, m.rest(t)); diff != "" {
		t.Error(diff)
	}
}

// plant puts links into the first tree of a snapshot's image.
func plant(t *testing.T, image string, links map[string]string) {
	t.Helper()
	at := t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop", image, at).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	defer func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Error(err)
		}
	}()
	for name, target := range links {
		path := filepath.Join(at, "0/u", name)
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
	}
}

// TestForkOfASnapshotOfLinks: /sys is where a pooled shell's new files are put together, and a sandbox's root can replace it.
func TestForkOfASnapshotOfLinks(t *testing.T) {
	slow.Test(t)
	m := newMaker(t)
	first := m.start(t, from(buildTemplate(t, "python")))
	first.root("rmdir /sys && ln -s /etc /sys && echo mine > /home/user/kept")
	branch := m.branch(t, first)
	if got := branch.root("readlink /sys; cat /home/user/kept; stat -f -c %T /proc; ls /run/cove/kernel | wc -l"); !strings.HasPrefix(got, "/etc\nmine\nproc\n") {
		t.Errorf("a branch shows %q", got)
	}
	made := first.snapshot("links")
	first.stop()
	branch.stop()
	parent := m.start(t, from(made))
	parent.value("x = 41")
	eventually(t, "shells of the snapshot wait", func() bool {
		s, err := m.driver.Stats(t.Context())
		return err == nil && s.Pooled >= 4
	})
	request := sandbox.ForkRequest{Parent: parent.id, Children: []sandbox.ForkChild{{
		ID: "refused", Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128, OpenFiles: 1024}, Network: policy.Network{Mode: policy.None},
	}}}
	if _, err := m.driver.Fork(t.Context(), request); err == nil || !strings.Contains(err.Error(), "/sys of the new root: not a directory") {
		t.Errorf("got %v", err)
	}
	if got := parent.value("print(x + 1)"); got != "42" {
		t.Errorf("after a refused fork the parent says %s", got)
	}
	if got := parent.root("stat -f -c %T /etc; cat /home/user/kept"); got != parent.root("stat -f -c %T /home; echo mine") {
		t.Errorf("the link was followed: %q", got)
	}
	if list, err := m.driver.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%+v %v", list, err)
	}
}
