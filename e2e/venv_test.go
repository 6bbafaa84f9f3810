package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Packages of other people, installed once per machine by their lock files, and the suites that use them.

// suiteLimit is how long one suite may take before something hangs.
const suiteLimit = 30 * time.Minute

// testCache is the folder of what all tests on this machine share.
func testCache() (string, error) {
	if cache := os.Getenv("COVE_TEST_CACHE"); cache != "" {
		return cache, nil
	}
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "cove-test"), err
}

// venv gives a virtual environment with the packages of a lock file, all of them by their hashes.
func venv(name, lock string) (string, error) { return venvBy("python3", name, lock) }

// venvBy makes it with a Python of one's choice.
func venvBy(python, name, lock string) (string, error) {
	return installed(name, lock, func(dir, lock string) [][]string {
		return [][]string{
			{python, "-m", "venv", dir},
			{filepath.Join(dir, "bin", "pip"), "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", lock},
		}
	})
}

// newerPython finds a Python of 3.12 or later, which some packages need and a stable distribution may not have.
func newerPython() (string, error) {
	candidates := []string{"python3", "python3.12", "python3.13", "python3.14"}
	if home, err := os.UserHomeDir(); err == nil {
		more, _ := filepath.Glob(filepath.Join(home, ".pyenv", "versions", "3.1[2-9]*", "bin", "python3")) // the pattern is a good one
		candidates = append(candidates, more...)
	}
	for _, python := range candidates {
		if exec.Command(python, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 12))").Run() == nil {
			return python, nil
		}
	}
	return "", errors.New("no Python of 3.12 or later is here")
}

// nodeModules gives the node_modules of a package-lock.json, by the Node.js that a virtual environment has.
func nodeModules(name, lock, venv string) (string, error) {
	dir, err := installed(name, lock, func(dir, lock string) [][]string {
		return [][]string{
			{"cp", lock, filepath.Join(filepath.Dir(lock), "package.json"), dir},
			{filepath.Join(venv, "bin", "npm"), "ci", "--prefix", dir, "--no-audit", "--no-fund", "--ignore-scripts"},
		}
	})
	return filepath.Join(dir, "node_modules"), err
}

// installed gives the directory that commands made for a lock file, now or earlier. A half-made one is made anew: the
// mark of completeness is written last.
func installed(name, lock string, commands func(dir, lock string) [][]string) (string, error) {
	cache, err := testCache()
	if err != nil {
		return "", err
	}
	if lock, err = filepath.Abs(lock); err != nil {
		return "", err
	}
	text, err := os.ReadFile(lock)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	dir := filepath.Join(cache, name+"-"+hex.EncodeToString(sum[:6]))
	mark := filepath.Join(dir, "complete")
	if _, err := os.Stat(mark); err == nil {
		return dir, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, argv := range commands(dir, lock) {
		if err := install(argv); err != nil {
			return "", err
		}
	}
	return dir, os.WriteFile(mark, nil, 0o644)
}

func install(argv []string) error {
	cmd := exec.Command(argv[0], argv[1:]...)
	// npm is a script that finds its node by the path.
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(argv[0])+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// pytest is the command that runs tests of a directory with the packages of a virtual environment. Arguments that are no
// options are files of the directory; without one it is the whole of it.
func pytest(t *testing.T, venv, dir string, args ...string) []string {
	t.Helper()
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	command := []string{filepath.Join(venv, "bin", "python"), "-B", "-m", "pytest", "--rootdir", dir, "-c", filepath.Join(dir, "pytest.ini"), "--durations=5"}
	named := false
	for _, arg := range args {
		if !strings.HasPrefix(arg, "-") {
			arg, named = filepath.Join(dir, arg), true
		}
		command = append(command, arg)
	}
	if !named {
		command = append(command, dir)
	}
	return command
}

// nodeTests is the command that runs tests of a directory, copied to where node_modules is next to them.
func nodeTests(t *testing.T, venv, modules, dir string, files ...string) []string {
	t.Helper()
	own := t.TempDir()
	if err := os.CopyFS(own, mjsFiles{os.DirFS(dir)}); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(modules, filepath.Join(own, "node_modules")); err != nil {
		t.Fatal(err)
	}
	command := []string{filepath.Join(venv, "bin", "node"), "--test", "--test-force-exit", "--test-reporter=spec", "--test-concurrency=1"}
	for _, file := range files {
		command = append(command, filepath.Join(own, file))
	}
	return command
}

// mjsFiles is a directory with nothing in it but modules.
type mjsFiles struct{ fs.FS }

func (f mjsFiles) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(f.FS, name)
	kept := entries[:0]
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".mjs") {
			kept = append(kept, e)
		}
	}
	return kept, err
}

// runSuite runs a command with an environment that has nothing of this machine's own E2B settings; what it says is told
// when it fails.
func runSuite(t *testing.T, command, env []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), suiteLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	for _, pair := range os.Environ() {
		if !strings.HasPrefix(pair, "E2B_") || strings.HasPrefix(pair, "E2B_SUITE_") || strings.HasPrefix(pair, "E2B_BENCH_") {
			cmd.Env = append(cmd.Env, pair)
		}
	}
	cmd.Env = append(cmd.Env, env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("%s: %v\n%s", strings.Join(command, " "), err, &out)
		return
	}
	t.Logf("%s", lastLines(out.String(), 40))
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
