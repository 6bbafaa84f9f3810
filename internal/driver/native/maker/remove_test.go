package maker_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/maker"
)

// deepTree makes directories below each other, with a file and a link in each.
func deepTree(t *testing.T, at string, levels int, name string) {
	t.Helper()
	fd, err := unix.Open(at, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range levels {
		err := errors.Join(unix.Mkdirat(fd, name, 0o755), unix.Symlinkat("/", fd, "link"), unix.Mknodat(fd, "file", unix.S_IFREG|0o600, 0))
		if err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
}

func TestADeepTreeIsRemovedWithFewDescriptors(t *testing.T) {
	around := t.TempDir()
	kept := filepath.Join(around, "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, make := range map[string]func(at string){
		"nothing":       func(string) {},
		"a file":        func(at string) { _ = os.WriteFile(at, nil, 0o600) },
		"a link":        func(at string) { _ = os.Symlink(around, at) },
		"short names":   func(at string) { _ = os.Mkdir(at, 0o755); deepTree(t, at, 5000, "d") },
		"long names":    func(at string) { _ = os.Mkdir(at, 0o755); deepTree(t, at, 500, strings.Repeat("n", 255)) },
		"a link inside": func(at string) { _ = os.Mkdir(at, 0o755); _ = os.Symlink(around, at+"/l") },
		"many files": func(at string) {
			for i := range 3000 {
				_ = os.MkdirAll(filepath.Join(at, strings.Repeat("x", i%200+1), string(rune('a'+i%26))), 0o755)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			at := filepath.Join(around, "tree")
			make(at)
			fewDescriptors(t)
			if err := maker.RemoveTree(at); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("it is there: %v", err)
			}
			if _, err := os.Lstat(kept); err != nil {
				t.Error(err)
			}
		})
	}
}

// fewDescriptors bounds how many this process can have until the test's end.
func fewDescriptors(t *testing.T) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
}
