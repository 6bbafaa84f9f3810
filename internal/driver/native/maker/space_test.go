package maker_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/fault"
)

func TestDefaultReserve(t *testing.T) {
	for _, c := range []struct{ total, want int64 }{
		{1 << 30, 1 << 30 / 10}, // a tenth of a small one
		{12 << 30, 1 << 30},
		{40 << 30, 2 << 30}, // a twentieth
		{1 << 40, 4 << 30},
	} {
		if got := maker.DefaultReserve(c.total); got != c.want {
			t.Errorf("of %d bytes %d stay free, want %d", c.total, got, c.want)
		}
	}
}

func TestLoopError(t *testing.T) {
	for record, want := range map[string]bool{
		"3,1,2,-;critical space allocation error, dev loop49, sector 8 op 0x1:(WRITE) flags 0x3000":           true,
		"3,1,2,-;I/O error, dev loop3, sector 8 op 0x1:(WRITE)":                                               true,
		"3,1,2,-;Buffer I/O error on dev loop49, logical block 8270, lost async page write":                   true,
		"4,1,2,-;EXT4-fs warning (device loop7): ext4_end_bio:343: I/O error 10 writing to inode 12 starting": true,
		"2,1,2,-;EXT4-fs error (device loop7): ext4_lookup:1":                                                 true,
		"4,1,2,-;EXT4-fs warning (device loop7): ext4_dx_add_entry:2461: Directory (ino: 2) index full":       false, // a sandbox can make it
		"3,1,2,-;I/O error, dev vda, sector 8 op 0x1:(WRITE)":                                                 false,
		"6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=;I/O error, dev loop3,pid=1,uid=1":   false,
		"6,1,2,-;EXT4-fs (loop67): mounted filesystem 994cf03f r/w without journal. Quota mode: none.":        false,
	} {
		if got := maker.LoopError.MatchString(record); got != want {
			t.Errorf("%q: %t", record, got)
		}
	}
}

// TestCheck_FewInodes: the bytes of a file system with few inodes are all free.
func TestCheck_FewInodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a file system")
	}
	dir, _ := mounted(t, 64<<20, "mkfs.ext4", "-q", "-F", "-N", "1024")
	s, _, err := maker.OpenSpace(dir, func(int64) int64 { return 1 })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ask := func() error {
		release, err := s.Grant(dir, 0)
		if err == nil {
			release()
		}
		return errors.Join(s.Check(0), err)
	}
	if err := ask(); err != nil {
		t.Errorf("with nearly all inodes free: %v", err)
	}
	file := func(i int) string { return filepath.Join(dir, fmt.Sprint(i)) }
	made := 0
	for ; ; made++ { // until there is no more
		if err := os.WriteFile(file(made), nil, 0o600); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := ask(); !fault.Is(err, fault.DiskFull) || !strings.Contains(err.Error(), "full of files") {
		t.Errorf("without a free inode: %v, want %s", err, fault.DiskFull)
	}
	for i := range min(made, 100) {
		if err := os.Remove(file(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := ask(); err != nil {
		t.Errorf("with 100 inodes free: %v", err)
	}
}

func TestGrant_InFlight(t *testing.T) {
	dir := t.TempDir()
	s, free, err := maker.OpenSpace(dir, func(free int64) (reserve int64) { return free / 2 })
	if err != nil {
		t.Fatal(err)
	}
	// Others write to this disk too, but hardly a sixth of what is free.
	third := free / 3
	release, err := s.Grant(dir, third)
	if err != nil {
		t.Fatalf("the first copy: %v", err)
	}
	if _, err := s.Grant(dir, third); !fault.Is(err, fault.DiskFull) {
		t.Errorf("a second copy beside the first: %v, want %s", err, fault.DiskFull)
	}
	if err := s.Check(third); !fault.Is(err, fault.DiskFull) {
		t.Errorf("a start beside the copy: %v, want %s", err, fault.DiskFull)
	}
	if err := s.Check(0); err != nil {
		t.Errorf("a start that writes nothing: %v", err)
	}
	release()
	release() // a second call gives nothing back
	again, err := s.Grant(dir, third)
	if err != nil {
		t.Errorf("after the first copy: %v", err)
	} else {
		defer again()
	}
	if _, err := s.Grant(dir, third); !fault.Is(err, fault.DiskFull) {
		t.Errorf("a copy beside that one: %v, want %s", err, fault.DiskFull)
	}
}
