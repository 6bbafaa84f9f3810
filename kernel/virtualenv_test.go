package kernel_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

var (
	virtualenvMu   sync.Mutex
	virtualenvPath string
	virtualenvErr  error
)

// virtualenv makes the environment of these tests, once per user and Python, in the temporary folder.
func virtualenv(python string) (string, error) {
	virtualenvMu.Lock()
	defer virtualenvMu.Unlock()
	if virtualenvPath == "" && virtualenvErr == nil {
		virtualenvPath, virtualenvErr = makeVirtualenv(python)
	}
	return virtualenvPath, virtualenvErr
}

func makeVirtualenv(python string) (string, error) {
	version, err := exec.Command(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2], end='')").Output()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("cove-kernel-test-%d-python%s", os.Getuid(), version))
	path, done := filepath.Join(dir, "bin", "python"), filepath.Join(dir, "complete")
	if _, err := os.Stat(done); err == nil {
		return path, nil
	}
	if out, err := exec.Command(python, "-m", "venv", "--clear", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("venv: %w\n%s", err, out)
	}
	install := append([]string{"-m", "pip", "install", "--quiet", "--disable-pip-version-check"}, packages...)
	if out, err := exec.Command(path, install...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("pip: %w\n%s", err, out)
	}
	return path, os.WriteFile(done, nil, 0o644)
}
