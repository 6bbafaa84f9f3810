package e2e_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// smallServer has its data directory on a file system of its own.
func smallServer(t *testing.T, bytes int64, env ...string) *server {
	t.Helper()
	s := makeServer(t, env...)
	at := s.dir + ".small"
	image := s.dir + ".img"
	t.Cleanup(func() {
		if err := errors.Join(os.RemoveAll(filepath.Dir(s.dir)), os.Remove(image)); err != nil && !errors.Is(err, unix.EBUSY) {
			t.Error(err)
		}
	})
	if err := errors.Join(os.RemoveAll(s.dir), os.Mkdir(at, 0o755), os.WriteFile(image, nil, 0o600), os.Truncate(image, bytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		eventually(t, "the file system is not used any more", 2*time.Minute, func() bool {
			err := unix.Unmount(at, 0)
			return err == nil || errors.Is(err, unix.EINVAL)
		})
	})
	for _, argv := range [][]string{{"mkfs.ext4", "-q", "-F", "-m", "0", image}, {"mount", "-o", "loop", image, at}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	s.dir = filepath.Join(at, "data")
	shared, err := templates()
	if err == nil { // links to layers take no room, and snapshots are beside them
		err = errors.Join(os.Mkdir(s.dir, 0o755), borrow(shared, filepath.Join(s.dir, "templates")))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the maker's log:\n%s", s.makerLog())
		}
		s.close()
	})
	s.start(t)
	return s
}

// fill leaves so many bytes of the data directory's file system; the function frees it again.
func (s *server) fill(t *testing.T, leave int64) (free func()) {
	t.Helper()
	name := filepath.Join(filepath.Dir(s.dir), "filler")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := int64(0); ; { // what is freed a moment later is filled too
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		more := int64(st.Bavail)*st.Bsize - leave
		if more < 64<<10 {
			break
		}
		if err := unix.Fallocate(int(f.Fd()), 0, size, more); err != nil && !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		size += more
	}
	return func() { _ = os.Remove(name) }
}

// TestForkOnAFullDisk: the caller hears that it is the server's disk, the sandbox goes on, and nothing is left.
func TestForkOnAFullDisk(t *testing.T) {
	slow.Test(t)
	s := smallServer(t, 4<<30) // sparse: a sandbox may have 2 GiB, and a server wants room for one
	l := &leaker{s: s, t: t}
	parent := s.create(t, client.CreateRequest{})
	parent.sh("head -c 20000000 /dev/urandom > large; sync -f large")
	parent.value("x = 41")
	sum := parent.sh("sha256sum large")
	forks := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		made, err := parent.Fork(ctx, client.ForkRequest{Count: 2})
		if err != nil {
			return err
		}
		for _, b := range made.Sandboxes {
			branch := &sandbox{t, b}
			if got := branch.value("x + 1"); got != "42" {
				t.Errorf("a branch says %s", got)
			}
			if got := branch.sh("sha256sum large"); got != sum {
				t.Errorf("a branch has %s, not %s", got, sum)
			}
			branch.kill()
		}
		return nil
	}
	if err := forks(); err != nil { // what is kept ready after forks is there in both counts
		t.Fatal(err)
	}
	l.burst(8) // and so are the server's connections to its maker and its database
	eventually(t, "the pool is full", patience, func() bool {
		stats := census{}
		s.countMaker(t, stats)
		return stats["maker's dying"] == 0 && stats["maker's pool"] >= 2
	})
	before := l.settled(nil)
	rows := func() (living int) {
		for sb, err := range s.List(t.Context(), client.ListRequest{States: []string{"starting", "running", "paused", "stopping"}}) {
			if err != nil {
				t.Fatal(err)
			}
			if sb.ID != parent.ID {
				living++
			}
		}
		return living
	}
	for _, c := range []struct {
		claim string
		leave int64
	}{{"there is room for rows and not for files", 6 << 20}, {"there is no room at all", 0}} {
		t.Run(c.claim, func(t *testing.T) {
			// Files that are written back on the full disk would be the parent's growth. The maker
			// looks at the disk each second.
			parent.sh("sync")
			time.Sleep(2 * time.Second)
			free := s.fill(t, c.leave)
			defer free()
			for range 5 { // more than one, so that what leaks adds up
				expect(t, forks(), client.DiskFull, "the server's disk is full")
			}
			if got := parent.value("x + 1"); got != "42" {
				t.Errorf("the parent says %s", got)
			}
			if got := parent.sh("sha256sum large"); got != sum {
				t.Errorf("the parent has %s, not %s", got, sum)
			}
			eventually(t, "no row of a branch lives", patience, func() bool { return rows() == 0 })
			if more := l.settled(before).above(before); len(more) != 0 {
				t.Errorf("left behind:\n%s", strings.Join(more, "\n"))
			}
			free()
			parent.sh("echo more > more; sync -f more; cat more")
			if err := forks(); err != nil {
				t.Errorf("a fork when there is room again: %v", err)
			}
			if more := l.settled(before).above(before); len(more) != 0 {
				t.Errorf("left behind in the end:\n%s", strings.Join(more, "\n"))
			}
		})
	}
}
