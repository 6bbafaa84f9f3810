package template

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

// pythonCache keeps the answers of interpreters that were started to ask for their version and paths. A host with ten of
// them takes seconds to ask them all, and a start of the server needs the answer several times.
type pythonCache struct {
	file string // where the answers are kept between processes; empty: nowhere

	mu     sync.Mutex
	loaded bool
	known  map[string]probed // by the path of the executable
}

// probed is the answer of one interpreter. It holds for as long as none of its files changes.
type probed struct {
	Stamp  string       `json:"stamp"`
	Watch  []string     `json:"watch"`
	Python *Interpreter `json:"python,omitempty"`
	Error  string       `json:"error,omitempty"` // why it cannot be used
}

// packageDatabases change with every package that is installed on the host.
var packageDatabases = []string{"/var/lib/dpkg/status", "/var/lib/rpm", "/usr/lib/sysimage/rpm"}

// inspect asks an interpreter, unless it has answered before and is the same. The checks of trust are made each time.
func (c *pythonCache) inspect(ctx context.Context, executable string, probing func()) (*Interpreter, error) {
	if err := trusted(executable); err != nil {
		return nil, err
	}
	if !isELF(executable) {
		return nil, errors.New("a script, not an interpreter")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.load()
	known, ok := c.known[executable]
	if !ok || known.Stamp != identityOf(known.Watch) {
		probing()
		python, err := probePython(ctx, executable)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if errors.Is(err, errNoAnswer) {
			return nil, err
		}
		known = probed{Watch: watchFor(executable, python), Python: python}
		if err != nil {
			known.Python, known.Error = nil, err.Error()
		}
		known.Stamp = identityOf(known.Watch)
		c.known[executable] = known
		c.save()
	}
	if known.Python == nil {
		return nil, errors.New(known.Error)
	}
	python := *known.Python
	var err error
	python.Stamp, err = stampOf(python.Executable, python.Stdlib, path.Join(python.Stdlib, "os.py"))
	return &python, err
}

// watchFor are the files that an interpreter's answer depends on. One that was rejected may lack a library, which a
// package brings.
func watchFor(executable string, python *Interpreter) []string {
	if python == nil {
		return append([]string{executable, path.Join(path.Dir(path.Dir(executable)), "lib")}, packageDatabases...)
	}
	return slices.Concat([]string{executable, python.Stdlib, path.Join(python.Stdlib, "ensurepip/_bundled")}, python.Sites)
}

// identityOf changes when one of the files is replaced, changed, made or removed.
func identityOf(names []string) string {
	var all []string
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			all = append(all, name)
			continue
		}
		inode := info.Sys().(*syscall.Stat_t).Ino
		all = append(all, fmt.Sprintf("%s %d %d %d", name, inode, info.Size(), info.ModTime().UnixNano()))
	}
	return digestOf(all)
}

// forget has every interpreter asked again.
func (c *pythonCache) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.loaded, c.known = true, map[string]probed{}
}

// load reads what an earlier process was told. A file that cannot be read costs new probes and nothing else.
func (c *pythonCache) load() {
	if c.loaded {
		return
	}
	c.loaded, c.known = true, map[string]probed{}
	if text, err := os.ReadFile(c.file); err == nil && json.Unmarshal(text, &c.known) != nil || c.known == nil {
		c.known = map[string]probed{}
	}
}

func (c *pythonCache) save() {
	if c.file == "" || os.Geteuid() != 0 {
		return
	}
	if _, err := os.Stat(filepath.Dir(c.file)); err == nil {
		_ = writeJSON(c.file, c.known) // the next process asks again
	}
}
