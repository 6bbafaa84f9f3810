package unpack_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/fault"
)

// endless is a layer of one file whose content is a hole of many gigabytes.
func endless(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "endless"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "endless", Size: 40 << 30, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(head.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(40 << 30); err != nil {
		t.Fatal(err)
	}
	return f
}

// child finds the process that has been started by this one and reads layers.
func child(t *testing.T) int {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		tasks, _ := filepath.Glob("/proc/self/task/*/children")
		for _, task := range tasks {
			text, _ := os.ReadFile(task)
			for pid := range strings.FieldsSeq(string(text)) {
				line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
				status, _ := os.ReadFile("/proc/" + pid + "/status")
				if bytes.Contains(line, []byte("\x00inside\x00")) && bytes.Contains(status, []byte("Seccomp:\t2")) {
					var n int
					_, _ = fmt.Sscan(pid, &n)
					return n
				}
			}
		}
	}
	t.Fatal("the unpacker does not begin")
	return 0
}

func TestTheUnpackerHasNothingButItsTree(t *testing.T) {
	needsRoot(t)
	at := t.TempDir()
	fd, err := unix.OpenTree(unix.AT_FDCWD, at, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	tree := os.NewFile(uintptr(fd), at)
	defer tree.Close()
	blob := endless(t)
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() {
		_, err := unpack.Run(ctx, unpack.Jail{Program: []string{"/proc/self/exe", "unpack"}, Blob: blob, Tree: tree, Base: 0x7fff0000 - 1<<20},
			unpack.Request{DiffID: digest(nil), MaxBytes: 64 << 30, MaxFiles: 10})
		over <- err
	}()
	pid := child(t)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(filepath.Join(at, "endless")); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing is unpacked")
		}
	}
	proc := fmt.Sprintf("/proc/%d/", pid)
	status, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2", fmt.Sprintf("Uid:\t%d", 0x7fff0000-1<<20), "CapInh:\t0000000000000000", "CapAmb:\t0000000000000000", "CapBnd:\t000000000020001b"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	for _, namespace := range []string{"user", "mnt", "pid", "net", "ipc", "uts"} {
		own, _ := os.Readlink("/proc/self/ns/" + namespace)
		if other, err := os.Readlink(proc + "ns/" + namespace); err != nil || other == own {
			t.Errorf("%s: %q %v", namespace, other, err)
		}
	}
	mounts, err := os.ReadFile(proc + "mountinfo")
	if lines := strings.Split(strings.TrimSpace(string(mounts)), "\n"); err != nil || len(lines) != 1 || !strings.Contains(lines[0], "nosuid,nodev,noexec") {
		t.Errorf("%s %v", mounts, err)
	}
	entries, err := os.ReadDir(proc + "root")
	if err != nil || len(entries) != 1 || entries[0].Name() != "endless" {
		t.Errorf("%v %v", entries, err)
	}
	files, err := os.ReadDir(proc + "fd")
	for _, f := range files {
		to, _ := os.Readlink(proc + "fd/" + f.Name())
		if n := f.Name(); n != "0" && n != "1" && n != "2" && to != "/" && !strings.HasPrefix(to, "anon_inode:") && !strings.HasSuffix(to, "/endless") {
			t.Errorf("descriptor %s is %s", n, to)
		}
	}
	if err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-over; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("it lives: %v", err)
	}
}

func TestTheUnpackerIsStartedByTheMakerAlone(t *testing.T) {
	for _, args := range [][]string{nil, {"enter"}, {"enter", "{}", "0"}, {"inside"}, {"inside", "{"}, {"other", "x"}} {
		var says strings.Builder
		if status := unpack.Main(args, &says); status == 0 || says.Len() == 0 {
			t.Errorf("%q: %d %q", args, status, says.String())
		}
	}
}

func TestALayerIsAPlainFileThatCanBeRead(t *testing.T) {
	needsRoot(t)
	data := archive(t, file("a", "x"))
	name := filepath.Join(t.TempDir(), "blob")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for claim, c := range map[string]struct {
		name  string
		flags int
		kind  fault.Kind
	}{
		"to read":        {name, unix.O_RDONLY, ""},
		"to read, write": {name, unix.O_RDWR, ""},
		"only to write":  {name, unix.O_WRONLY, fault.Invalid},
		"only by name":   {name, unix.O_PATH, fault.Invalid},
		"a directory":    {filepath.Dir(name), unix.O_RDONLY, fault.Invalid},
		"a device":       {"/dev/zero", unix.O_RDONLY, fault.Invalid},
	} {
		t.Run(claim, func(t *testing.T) {
			fd, err := unix.Open(c.name, c.flags|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			blob := os.NewFile(uintptr(fd), c.name)
			defer blob.Close()
			_, err = runJail(t, t.TempDir(), blob, request(data))
			if c.kind == "" && err != nil || c.kind != "" && !fault.Is(err, c.kind) {
				t.Error(err)
			}
		})
	}
}

func TestTheUnpackersAnswerIsNotBelieved(t *testing.T) {
	r := unpack.Request{MaxBytes: 10, MaxFiles: 2}
	if got, err := unpack.DecodeAnswer([]byte(`{"result": {"bytes": 10, "files": 2}}`), r); err != nil || got.Bytes != 10 || got.Files != 2 {
		t.Errorf("%+v %v", got, err)
	}
	for _, text := range []string{
		"", "[]", `{"result": {"bytes": 11}}`, `{"result": {"bytes": -1}}`, `{"result": {"files": 3}}`, `{"result": {"files": -1}}`, `{"kind": "invalid", "message": "no"}`,
	} {
		if got, err := unpack.DecodeAnswer([]byte(text), r); err == nil {
			t.Errorf("%s: %+v", text, got)
		}
	}
}

func TestAFullDiskIsSaid(t *testing.T) {
	needsRoot(t)
	at := t.TempDir()
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no small disk to be had: %v", err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	data := archive(t, file("a", strings.Repeat("x", 1<<19)))
	if _, err := jailed(t, at, data, request(data)); !fault.Is(err, fault.DiskFull) || !strings.Contains(fault.Message(err), "disk is full") {
		t.Error(err)
	}
}

// TestRun_FewInodes unpacks a layer of more files than the file system has inodes.
func TestRun_FewInodes(t *testing.T) {
	needsRoot(t)
	at := t.TempDir()
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=64m,nr_inodes=20000"); err != nil {
		t.Skipf("no small disk to be had: %v", err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	entries := make([]entry, 21_000)
	for i := range entries {
		entries[i] = file(fmt.Sprint("f", i), "")
	}
	data := archive(t, entries...)
	r := request(data)
	r.MaxFiles, r.KeepFree = len(entries), 1
	if _, err := jailed(t, at, data, r); !fault.Is(err, fault.DiskFull) || !strings.Contains(fault.Message(err), "full of files") {
		t.Error(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		t.Fatal(err)
	}
	if st.Ffree < st.Files/50-256 { // the process looks once for each MiB, of which a file takes 4 KiB
		t.Errorf("%d inodes of %d are free", st.Ffree, st.Files)
	}
}

func TestRun_KeepFree(t *testing.T) {
	needsRoot(t)
	at := t.TempDir()
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=32m"); err != nil {
		t.Skipf("no small disk to be had: %v", err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	many := make([]entry, 6000) // each takes a block of 4 KiB
	for i := range many {
		many[i] = file(fmt.Sprint("f", i), "x")
	}
	for claim, entries := range map[string][]entry{"one large file": {file("a", strings.Repeat("x", 24<<20))}, "many small files": many} {
		t.Run(claim, func(t *testing.T) {
			tree := filepath.Join(at, strings.ReplaceAll(claim, " ", "-"))
			if err := os.Mkdir(tree, 0o755); err != nil {
				t.Fatal(err)
			}
			data := archive(t, entries...)
			r := request(data)
			r.MaxBytes, r.MaxFiles, r.KeepFree = 32<<20, len(entries), 16<<20
			if _, err := jailed(t, tree, data, r); !fault.Is(err, fault.DiskFull) || !strings.Contains(fault.Message(err), "disk is full") {
				t.Error(err)
			}
			var st unix.Statfs_t
			if err := unix.Statfs(at, &st); err != nil {
				t.Fatal(err)
			}
			if free := int64(st.Bavail) * st.Bsize; free < r.KeepFree-2<<20 {
				t.Errorf("%d bytes are free, and %d were to stay free", free, r.KeepFree)
			}
			if err := os.RemoveAll(tree); err != nil {
				t.Fatal(err)
			}
		})
	}
}
