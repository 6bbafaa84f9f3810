package agent

import (
	"os"
	"syscall"
	"testing"
)

func TestANewDirectoryIsNotFollowedAway(t *testing.T) {
	parent, other := t.TempDir(), t.TempDir()
	if err := os.Chmod(other, 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := open(atFDCWD, parent, oPath|syscall.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(dir)
	if err := os.Symlink(other, parent+"/swapped"); err != nil { // where the new directory was a moment ago
		t.Fatal(err)
	}
	if err := os.WriteFile(parent+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"swapped", "file"} {
		if err := settleDir(dir, name, 0o777, &user{uid: os.Getuid(), gid: os.Getgid()}); err != syscall.ENOTDIR {
			t.Errorf("%s: %v", name, err)
		}
	}
	for p, want := range map[string]os.FileMode{other: 0o700, parent + "/file": 0o600} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s has become %v, %v", p, info.Mode(), err)
		}
	}
	for _, mode := range []uint32{0o777, 0o2770, 0o300} {
		if err := os.Mkdir(parent+"/new", 0o700); err != nil {
			t.Fatal(err)
		}
		var st syscall.Stat_t
		if err := settleDir(dir, "new", mode, nil); err != nil || syscall.Stat(parent+"/new", &st) != nil || st.Mode&0o7777 != mode {
			t.Errorf("%o: %v, has %o", mode, err, st.Mode)
		}
		if err := os.Remove(parent + "/new"); err != nil {
			t.Fatal(err)
		}
	}
}
