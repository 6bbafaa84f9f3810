package template

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Interpreter is a CPython of the host that sandboxes can use.
type Interpreter struct {
	Executable string   `json:"executable"` // without links
	Version    string   `json:"version"`
	Prefix     string   `json:"prefix"`
	Stdlib     string   `json:"stdlib"`
	Sites      []string `json:"sites"` // where it looks for packages, first is where pip installs
	PipWheel   string   `json:"pip_wheel,omitempty"`
	HasPip     bool     `json:"has_pip"`
	Stamp      string   `json:"stamp"` // changes when the host's Python does
}

// Minor is "3.13".
func (i *Interpreter) Minor() string {
	parts := strings.SplitN(i.Version, ".", 3)
	return parts[0] + "." + parts[1]
}

// private says that the prefix holds this interpreter and nothing else, so that all of it may be seen inside.
func (i *Interpreter) private() bool { return i.Prefix != "/usr" && i.Prefix != "/usr/local" }

// target is the directory inside which a tree of its own shows; empty when a host tree shows it already.
func (i *Interpreter) target() string {
	switch {
	case i.private():
		return i.Prefix
	case i.Prefix == "/usr/local":
		return i.Stdlib
	default:
		return ""
	}
}

const probe = `
import ssl, sqlite3, ctypes, zlib
import glob, importlib.util, json, os, site, sys, sysconfig
v = sys.version_info
if sys.implementation.name != "cpython" or v.releaselevel != "final" or sys.prefix != sys.base_prefix:
    sys.exit("not a released CPython outside a virtual environment")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("a free-threaded build: few packages have wheels for it")
wheel = ""
ensure = importlib.util.find_spec("ensurepip")
if ensure and ensure.origin:
    wheel = (sorted(glob.glob(os.path.join(os.path.dirname(ensure.origin), "_bundled", "pip-*.whl"))) or [""])[-1]
sites = site.getsitepackages()
sites.sort(key=lambda s: not s.startswith("/usr/local/"))
print(json.dumps({
    "executable": os.path.realpath(sys.executable), "version": "%d.%d.%d" % v[:3], "prefix": sys.prefix,
    "stdlib": sysconfig.get_path("stdlib"), "sites": sites, "pip_wheel": wheel,
    "has_pip": importlib.util.find_spec("pip") is not None,
}))
`

var executableName = regexp.MustCompile(`^python3(\.\d+)?$`)

// FindPython is the newest Python of the host that satisfies the first condition any satisfies. An error says
// what was looked at and why it did not do.
func FindPython(ctx context.Context, find []string) (*Interpreter, error) {
	return (&pythonCache{}).find(ctx, find, func() {})
}

// find is FindPython with the answers of earlier probes. probing is called before each interpreter that is started.
func (c *pythonCache) find(ctx context.Context, find []string, probing func()) (*Interpreter, error) {
	conditions, err := parseFind(find)
	if err != nil {
		return nil, err
	}
	candidates := pythonCandidates()
	if len(find) == 1 && path.IsAbs(find[0]) {
		candidates = find
	}
	var found []*Interpreter
	var rejected []string
	seen := map[string]bool{}
	for _, name := range candidates {
		real, err := filepath.EvalSymlinks(name)
		if err != nil || seen[real] {
			continue
		}
		seen[real] = true
		python, err := c.inspect(ctx, real, probing)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			rejected = append(rejected, fmt.Sprintf("%s (%v)", name, err))
			continue
		}
		found = append(found, python)
	}
	for _, condition := range conditions {
		fits := slices.Collect(func(yield func(*Interpreter) bool) {
			for _, python := range found {
				if condition.allows(python.Version) && !yield(python) {
					return
				}
			}
		})
		if len(fits) > 0 {
			return slices.MaxFunc(fits, func(a, b *Interpreter) int { return compareVersions(a.Version, b.Version) }), nil
		}
	}
	for _, python := range found {
		rejected = append(rejected, fmt.Sprintf("%s (%s)", python.Executable, python.Version))
	}
	return nil, fmt.Errorf("no Python %s on this host; looked at: %s", strings.Join(find, " or "), strings.Join(rejected, ", "))
}

func pythonCandidates() []string {
	var patterns []string
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/bin", "/usr/local/bin") {
		if path.IsAbs(dir) {
			patterns = append(patterns, dir+"/python3*")
		}
	}
	for _, home := range homes() {
		patterns = append(patterns, home+"/.pyenv/versions/*/bin/python3*", home+"/.local/share/uv/python/*/bin/python3*")
	}
	patterns = append(patterns, "/opt/python*/bin/python3*")
	var all []string
	for _, pattern := range patterns {
		names, _ := filepath.Glob(pattern) // the patterns above are well-formed
		all = append(all, slices.DeleteFunc(names, func(n string) bool { return !executableName.MatchString(filepath.Base(n)) })...)
	}
	return all
}

// homes are those of whoever asks: this user, the one behind sudo, root.
func homes() []string {
	var dirs []string
	if home, err := os.UserHomeDir(); err == nil {
		dirs = append(dirs, home)
	}
	for _, id := range []string{os.Getenv("SUDO_UID"), "0"} {
		if u, err := user.LookupId(id); err == nil && !slices.Contains(dirs, u.HomeDir) {
			dirs = append(dirs, u.HomeDir)
		}
	}
	return dirs
}

// errNoAnswer is a probe that could not start, was killed or took too long. It says something of the
// host's load and nothing of the interpreter, so that it is not kept.
var errNoAnswer = errors.New("the interpreter did not answer")

// probePython runs one interpreter, isolated from the environment, and asks for its version and paths.
func probePython(ctx context.Context, executable string) (*Interpreter, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, executable, "-I", "-c", probe)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"}
	cmd.Dir = "/"
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Exited() {
			return nil, errors.New(lastLine(string(exit.Stderr), err.Error()))
		}
		return nil, fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	python := &Interpreter{}
	if err := json.Unmarshal(out, python); err != nil {
		return nil, fmt.Errorf("unreadable answer: %w", err)
	}
	if !within(python.Prefix, python.Executable) || !within(python.Prefix, python.Stdlib) || len(python.Sites) == 0 || strings.ContainsAny(python.Prefix, ":,\\\n") {
		return nil, fmt.Errorf("an unusual layout: prefix %s, standard library %s", python.Prefix, python.Stdlib)
	}
	return python, nil
}

// trusted refuses a file that somebody other than root or whoever asked could replace: it will be run as root.
func trusted(name string) error {
	asker, err := strconv.Atoi(os.Getenv("SUDO_UID"))
	if err != nil {
		asker = os.Getuid()
	}
	for at := name; ; at = filepath.Dir(at) {
		info, err := os.Lstat(at)
		if err != nil {
			return err
		}
		sticky := info.IsDir() && info.Mode()&os.ModeSticky != 0
		if owner := ownerOf(info); owner != 0 && owner != asker || info.Mode().Perm()&0o022 != 0 && !sticky {
			return fmt.Errorf("others than root may change %s", at)
		}
		if at == "/" {
			return nil
		}
	}
}

func isELF(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	var magic [4]byte
	_, err = f.Read(magic[:])
	return err == nil && string(magic[:]) == "\x7fELF"
}

// stampOf changes when one of the files does.
func stampOf(names ...string) (string, error) {
	var all []string
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			return "", err
		}
		all = append(all, fmt.Sprintf("%s %d %d", name, info.Size(), info.ModTime().UnixNano()))
	}
	return digestOf(all), nil
}

// versionRange is the conjunction of bounds like >=3.12 and <3.15; with a path in place of bounds, anything.
type versionRange []versionBound

type versionBound struct {
	op, version string
}

var boundPattern = regexp.MustCompile(`^(>=|<|==)\s*(\d+\.\d+)$`)

func parseFind(find []string) ([]versionRange, error) {
	if len(find) == 1 && path.IsAbs(find[0]) {
		return []versionRange{nil}, nil
	}
	var ranges []versionRange
	for _, text := range find {
		var r versionRange
		for part := range strings.SplitSeq(text, ",") {
			m := boundPattern.FindStringSubmatch(strings.TrimSpace(part))
			if m == nil {
				return nil, fmt.Errorf("%q is not a condition like \">=3.12,<3.15\" nor the only, absolute path", text)
			}
			r = append(r, versionBound{m[1], m[2]})
		}
		ranges = append(ranges, r)
	}
	return ranges, nil
}

func (r versionRange) allows(version string) bool {
	for _, b := range r {
		c := compareVersions(version, b.version)
		switch b.op {
		case ">=":
			if c < 0 {
				return false
			}
		case "<":
			if c >= 0 {
				return false
			}
		case "==":
			if !strings.HasPrefix(version+".", b.version+".") {
				return false
			}
		}
	}
	return true
}

func compareVersions(a, b string) int {
	number := func(parts []string) []int {
		var n []int
		for _, p := range parts {
			i, _ := strconv.Atoi(p) // both come from a pattern of digits
			n = append(n, i)
		}
		return n
	}
	return slices.Compare(number(strings.Split(a, ".")), number(strings.Split(b, ".")))
}

// within says that name is dir or below it.
func within(dir, name string) bool {
	return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/")
}

func lastLine(text, otherwise string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return last
	}
	return otherwise
}
