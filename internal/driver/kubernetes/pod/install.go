package pod

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/kernel"
)

// Install puts this program and the kernel's files into a directory, which the container of the sandbox then has as a volume. It runs in an init
// container of Cove's own image: what the sandbox's image holds does not matter.
func Install(dir string) error {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	if err := write(filepath.Join(dir, podapi.ProgramName), self, 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		return err
	}
	if err := os.Symlink("../"+podapi.ProgramName, filepath.Join(dir, "bin", "sudo")); err != nil && !os.IsExist(err) {
		return err
	}
	return fs.WalkDir(kernel.Files(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(dir, "kernel", filepath.FromSlash(name))
		if d.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		source, err := kernel.Files().Open(name)
		if err != nil {
			return err
		}
		defer source.Close()
		return write(to, source, 0o644)
	})
}

// write makes a file, or leaves none: an init container may be started again.
func write(path string, from io.Reader, mode fs.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".install-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("install %s: %w", path, err)
		}
	}()
	if _, err := io.Copy(f, from); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
