package pod_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/driver/kubernetes/pod"
)

// tree writes files by name; a name that ends in a slash is a directory, a text that begins with an arrow a link.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		err := error(nil)
		if target, ok := strings.CutPrefix(text, "->"); ok {
			err = os.Symlink(target, at)
		} else {
			err = os.WriteFile(at, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestAVolumeHasWhatItsImageHasThere(t *testing.T) {
	from, to := tree(t, map[string]string{"main.py": "print()", "deep/er/x": "1", "link": "->main.py", "out": "->/etc/passwd"}), t.TempDir()
	old := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, mode := range map[string]os.FileMode{"main.py": 0o555, "deep/er": 0o555} {
		if err := os.Chmod(filepath.Join(from, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(filepath.Join(from, "main.py"), old, old); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(to+from, 0o777); err != nil { // where the volume is
		t.Fatal(err)
	}
	for range 2 { // an init container may be started again
		if err := pod.SeedTo(to, 100, from); err != nil {
			t.Fatal(err)
		}
	}
	at := to + from
	if text, err := os.ReadFile(filepath.Join(at, "deep/er/x")); err != nil || string(text) != "1" {
		t.Errorf("%q %v", text, err)
	}
	mode := os.FileMode(0o755)
	if os.Getuid() == 0 { // who may write anyway
		mode = 0o555
	}
	if info, err := os.Stat(filepath.Join(at, "main.py")); err != nil || info.Mode().Perm() != mode || !info.ModTime().Equal(old) {
		t.Errorf("%v %v", info, err)
	}
	if info, err := os.Stat(filepath.Join(at, "deep/er")); err != nil || info.Mode().Perm() != mode {
		t.Errorf("%v %v", info, err)
	}
	for name, want := range map[string]string{"link": "main.py", "out": "/etc/passwd"} {
		if target, err := os.Readlink(filepath.Join(at, name)); err != nil || target != want {
			t.Errorf("%s %v", target, err)
		}
	}
}

func TestRootLeavesFilesToTheirOwners(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("others are their only owner")
	}
	from, to := tree(t, map[string]string{"data": "1"}), t.TempDir()
	if err := os.MkdirAll(to+from, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "data"} {
		if err := os.Chown(filepath.Join(from, name), 999, 998); err != nil {
			t.Fatal(err)
		}
	}
	if err := pod.SeedTo(to, 100, from); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "data"} {
		info, err := os.Stat(filepath.Join(to+from, name))
		if err != nil {
			t.Fatal(err)
		}
		if stat := info.Sys().(*syscall.Stat_t); stat.Uid != 999 || stat.Gid != 998 {
			t.Errorf("%q is %d:%d's", name, stat.Uid, stat.Gid)
		}
	}
}

func TestAVolumeTakesNoMoreThanADiskHolds(t *testing.T) {
	from := tree(t, map[string]string{"a": strings.Repeat("x", 60), "b": strings.Repeat("x", 60)})
	to := t.TempDir()
	if err := os.MkdirAll(to+from, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := pod.SeedTo(to, 100, from); err == nil || !strings.Contains(err.Error(), "disk") {
		t.Errorf("%v", err)
	}
	if err := pod.SeedTo(to, 100, "/nowhere/at/all"); err != nil {
		t.Errorf("a directory that the image does not have: %v", err)
	}
}

func TestAVolumeThatHoldsTheVolumesIsNotCopiedIntoItself(t *testing.T) {
	from := tree(t, map[string]string{"kept": "1"})
	to := filepath.Join(from, "volumes") // on the same disk, as a node's runtime has it
	if err := os.MkdirAll(to+from, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := pod.SeedTo(to, 100, from); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(to+from, "kept")); err != nil || string(text) != "1" {
		t.Errorf("%q %v", text, err)
	}
	if _, err := os.Stat(filepath.Join(to+from, "volumes")); !os.IsNotExist(err) {
		t.Errorf("it is in itself: %v", err)
	}
}

func TestAVolumeIsNoCopyOfTheWholeImageOrOfTheKernels(t *testing.T) {
	for _, target := range []string{"/", "/proc", "/proc/sys/kernel", "/sys", "/dev"} {
		link, to := filepath.Join(t.TempDir(), "link"), t.TempDir()
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(to+link, 0o777); err != nil {
			t.Fatal(err)
		}
		if err := pod.SeedTo(to, 1<<20, link); err == nil || !strings.Contains(err.Error(), "link to "+target) {
			t.Errorf("%s: %v", target, err)
		}
		if left, err := os.ReadDir(to + link); err != nil || len(left) > 0 {
			t.Errorf("%s: %v %v", target, left, err)
		}
	}
}

func TestFilesThatDoNotSayHowLongTheyAreAreCounted(t *testing.T) {
	to := filepath.Join(t.TempDir(), "version")
	info, err := os.Stat("/proc/version")
	if err != nil || info.Size() != 0 {
		t.Skip("no file here says nothing of its size")
	}
	if err := pod.SeedFile(10, "/proc/version", to, info); err == nil || !strings.Contains(err.Error(), "disk") {
		t.Errorf("%v", err)
	}
	if copied, err := os.Stat(to); err != nil || copied.Size() > 11 {
		t.Errorf("%v %v", copied, err)
	}
}
