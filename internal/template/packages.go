package template

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// installPackages puts the locked wheels into the layer: pip unpacks them, no code of theirs runs.
func (l *layer) installPackages(ctx context.Context, python *Interpreter, lock []byte, progress func(Progress)) error {
	stage := filepath.Join(l.dir, "stage")
	lockFile := filepath.Join(l.dir, "requirements.lock")
	if err := os.WriteFile(lockFile, lock, 0o600); err != nil {
		return err
	}
	pip, err := pipCommand(ctx, python)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, pip[0], append(pip[1:], "install",
		"--require-hashes", "--only-binary", ":all:", "--no-deps", "--no-compile", "--ignore-installed", "--no-user",
		"--no-input", "--no-warn-script-location", "--progress-bar", "off", "--root", stage, "-r", lockFile)...)
	cmd.Env = pipEnvironment()
	cmd.Dir = "/"
	together(cmd)
	if err := runPip(cmd, countApplicable(lock, python.Minor()), progress); err != nil {
		return err
	}
	if err := l.takeStage(stage); err != nil {
		return err
	}
	if err := l.compile(ctx, python, progress); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(stage), os.Remove(lockFile))
}

// pipCommand is the interpreter's own pip, or the one that came with it unused.
func pipCommand(ctx context.Context, python *Interpreter) ([]string, error) {
	if python.HasPip {
		return []string{python.Executable, "-I", "-m", "pip"}, nil
	}
	if python.PipWheel != "" {
		return []string{python.Executable, "-I", path.Join(python.PipWheel, "pip")}, nil
	}
	// pip 22.3 and later can install for another interpreter.
	for _, find := range []string{">=3.12", ">=3.9"} {
		if other, err := FindPython(ctx, []string{find}); err == nil && other.HasPip {
			return []string{other.Executable, "-I", "-m", "pip", "--python", python.Executable}, nil
		}
	}
	return nil, fmt.Errorf("%s has no pip: apt install python3-pip python3-venv", python.Executable)
}

// pipEnvironment keeps what says where packages come from and drops what says where they go.
func pipEnvironment() []string {
	dropped := []string{"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_VIRTUALENV", "PIP_NO_BINARY", "PIP_PYTHON", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_LOG", "PIP_QUIET", "PIP_DRY_RUN"}
	kept := []string{"PATH", "HOME", "LANG", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC",
		"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"}
	env := []string{"PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_ROOT_USER_ACTION=ignore", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PYTHONUNBUFFERED=1"}
	for _, entry := range os.Environ() {
		key, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(key, "PIP_") && !slices.Contains(dropped, key) || slices.Contains(kept, strings.ToUpper(key)) {
			env = append(env, entry)
		}
	}
	return env
}

var collecting = regexp.MustCompile(`^(?:Collecting|Processing) (\S+)`)

func runPip(cmd *exec.Cmd, total int64, progress func(Progress)) error {
	var complaints tail
	cmd.Stderr = &complaints
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	var done int64
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		switch line := lines.Text(); {
		case collecting.MatchString(line):
			progress(Progress{Step: StepPackages, Done: done, Total: total, Message: collecting.FindStringSubmatch(line)[1]})
			done = min(done+1, total)
		case strings.HasPrefix(line, "Installing collected"):
			progress(Progress{Step: StepPackages, Done: total, Total: total, Message: "unpacking"})
		}
	}
	_, drained := io.Copy(io.Discard, out) // after a line beyond the buffer: pip must not block on us
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("pip install: %w: %s", err, strings.TrimSpace(complaints.String()))
	}
	return errors.Join(lines.Err(), drained)
}

// tail keeps the end of what is written.
type tail struct{ bytes.Buffer }

func (t *tail) Write(p []byte) (int, error) {
	n, err := t.Buffer.Write(p)
	if t.Len() > 4096 {
		t.Next(t.Len() - 4096)
	}
	return n, err
}

var (
	lockEntry   = regexp.MustCompile(`(?m)^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)\s*(?:;\s*([^\\\n]*))?`)
	markerBound = regexp.MustCompile(`^python_version (>=|<|==) "(\d+\.\d+)"$`)
)

// countApplicable is how many packages of a lock this Python gets; a marker it does not know counts.
func countApplicable(lock []byte, minor string) int64 {
	var n int64
	for _, m := range lockEntry.FindAllStringSubmatch(string(lock), -1) {
		var r versionRange
		for part := range strings.SplitSeq(strings.TrimSpace(m[3]), " and ") {
			if b := markerBound.FindStringSubmatch(strings.TrimSpace(part)); b != nil {
				r = append(r, versionBound{b[1], b[2]})
			}
		}
		if r.allows(minor) {
			n++
		}
	}
	return n
}

// aWhileAgo is when every installed file claims to be from: bytecode records it, so it is the same in every build.
var aWhileAgo = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// fixedHashes makes the order of sets, and with it bytecode and caches, the same in every build. It is why these
// runs are isolated by an environment of their own and not by -I, which would ignore it.
const fixedHashes = "PYTHONHASHSEED=0"

// takeStage moves what pip unpacked into the layer's trees.
func (l *layer) takeStage(stage string) error {
	return filepath.WalkDir(stage, func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		inside := path.Join("/", strings.TrimPrefix(at, stage))
		switch {
		case e.IsDir():
			return l.mkdir(inside)
		case !e.Type().IsRegular():
			return fmt.Errorf("pip left %s, which is no file", inside)
		}
		to := l.place(inside)
		if err := os.Rename(at, to); err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		if info, err := os.Stat(to); err != nil {
			return err
		} else if info.Mode()&0o111 != 0 {
			mode = 0o755
		}
		if err := own(to, 0, mode); err != nil {
			return err
		}
		return os.Chtimes(to, aWhileAgo, aWhileAgo)
	})
}

// together has a command that is given up end with everything that it has started: compileall's workers would hold its output, and go on.
func together(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
}

// compile makes bytecode once, for all sandboxes: it reads the packages' code and does not run it.
func (l *layer) compile(ctx context.Context, python *Interpreter, progress func(Progress)) error {
	progress(Progress{Step: StepCompile, Message: "bytecode"})
	inside := python.Sites[0]
	at := l.place(inside)
	cmd := exec.CommandContext(ctx, python.Executable, "-s", "-m", "compileall", "-q", "-j", "0",
		"-s", at, "-p", inside, "--invalidation-mode", "timestamp", at)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", fixedHashes}
	together(cmd)
	// Some packages ship files for other versions of Python or templates that do not compile; that is their business.
	if out, err := cmd.CombinedOutput(); err != nil && ctx.Err() != nil {
		return fmt.Errorf("compile bytecode: %w: %s", err, lastLine(string(out), "no output"))
	}
	return filepath.WalkDir(at, func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o755)
		if !e.IsDir() {
			if filepath.Ext(at) != ".pyc" {
				return nil
			}
			mode = 0o644
		}
		return own(at, 0, mode)
	})
}
