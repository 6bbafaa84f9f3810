package template

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/covehq/cove/internal/fault"
)

// builderVersion changes when the same inputs would give another result.
const builderVersion = 4

// Progress is one thing a build tells; Total is zero where it is not known.
type Progress struct {
	Step        string
	Done, Total int64
	Message     string
}

// The steps of a build, in order.
const (
	StepWait     = "wait"     // for another builder
	StepPython   = "python"   // look for an interpreter
	StepFiles    = "files"    // copy and write
	StepPackages = "packages" // download and unpack
	StepCompile  = "compile"
	StepPrepare  = "prepare" // import everything once, inside the template
)

// build is one run over a chain of definitions; it holds the lock.
type build struct {
	store    *Store
	links    []*Definition
	all      *Definition
	python   *Interpreter // nil: none
	targets  []string
	lowers   map[string]string // target → host directory at the bottom
	progress func(Progress)
	warnings []string
	again    map[string]bool // directories of layers that are built although their key has not changed
}

// built describes a finished layer; it is written into the layer's directory.
type built struct {
	Name     string   `json:"name"`
	Key      string   `json:"key"`            // of what it was made from
	Digest   string   `json:"digest"`         // of what it contains, without bytecode: the same wherever the inputs are
	Seal     string   `json:"seal"`           // of everything it contains: for Verify
	Census   census   `json:"census"`         // of its names and sizes: for Check
	Salt     string   `json:"salt,omitempty"` // of a layer that was built again because it was damaged: its templates have another digest
	Warnings []string `json:"warnings,omitempty"`

	dir string
}

func (b *build) run(ctx context.Context) (*record, error) {
	if err := b.findPython(ctx); err != nil {
		return nil, err
	}
	if err := b.planTrees(); err != nil {
		return nil, err
	}
	b.warnings = append(b.warnings, missingTools()...)
	var layers []*built
	for i := range b.links {
		made, err := b.layer(ctx, i, layers)
		if err != nil {
			return nil, fmt.Errorf("build template %s: %w", b.links[i].Name, err)
		}
		layers = append(layers, made)
	}
	t := b.compose(layers)
	r := &record{Template: t}
	contents := []string{}
	for _, made := range layers {
		r.Layers = append(r.Layers, filepath.Base(made.dir))
		contents = append(contents, made.Digest+made.Salt)
	}
	bare := *t
	bare.Trees, bare.Warnings = nil, nil // where the layers lie is not what they are
	t.Digest = digestOf(struct {
		Template Template
		Targets  []string
		Contents []string
		Python   *Interpreter
	}{bare, b.targets, contents, b.pythonFacts()})
	return r, nil
}

// repair is run, and builds layers again whose content is not what was built.
func (b *build) repair(ctx context.Context) (*record, error) {
	if old, err := b.store.loadRecord(b.store.built(b.all.Name + ".json")); err == nil {
		if b.again, err = b.store.damagedLayers(ctx, old); err != nil {
			return nil, err
		}
	}
	return b.run(ctx)
}

// rebuild is repair, and builds the last layer again if nothing else has changed.
func (b *build) rebuild(ctx context.Context) (*record, error) {
	b.store.pythons.forget()
	old, _ := b.store.loadRecord(b.store.built(b.all.Name + ".json")) // without one there is nothing to replace
	r, err := b.repair(ctx)
	if err != nil || old == nil || r.Template.Digest != old.Template.Digest {
		return r, err
	}
	b.again, b.warnings = map[string]bool{r.Layers[len(r.Layers)-1]: true}, nil
	return b.run(ctx)
}

func (b *build) findPython(ctx context.Context) error {
	if len(b.all.Python.Find) == 0 {
		return nil
	}
	looking := sync.OnceFunc(func() {
		b.progress(Progress{Step: StepPython, Message: "looking for Python " + strings.Join(b.all.Python.Find, " or ")})
	})
	python, err := b.store.pythons.find(ctx, b.all.Python.Find, looking)
	switch {
	case err == nil:
		b.python = python
	case ctx.Err() != nil:
		return ctx.Err()
	case b.all.Python.Optional:
		b.warnings = append(b.warnings, err.Error()+"; apt install python3 python3-pip")
	default:
		return fault.Wrap(fault.Unsupported, err, "template %s needs a Python that this host lacks: apt install python3 python3-pip, or name one in python.find", b.all.Name)
	}
	return nil
}

// planTrees decides which trees the template has: its root, what the definitions allow of the host, and where the
// interpreter lives.
func (b *build) planTrees() error {
	b.lowers = map[string]string{"/": ""}
	for _, tree := range b.all.Host.Trees {
		if info, err := os.Stat(tree); err != nil || !info.IsDir() {
			return b.all.invalid("host.trees", "%s is no directory on this host", tree)
		}
		b.lowers[tree] = tree
	}
	for _, name := range systemLinks {
		if info, err := os.Lstat(name); err == nil && info.IsDir() && b.lowers["/usr"] != "" {
			b.lowers[name] = name // a host that keeps /bin and /lib apart from /usr
		}
	}
	if b.python != nil && b.python.target() != "" {
		b.lowers[b.python.target()] = b.python.target()
	}
	b.targets = sortedKeys(b.lowers) // a parent sorts before what lies below it
	return nil
}

// compose is the template that these layers make.
func (b *build) compose(layers []*built) *Template {
	t := &Template{
		Name: b.all.Name, Description: b.all.Description, User: b.all.User, Workdir: b.all.Workdir,
		Sudo: b.all.Sudo != nil && *b.all.Sudo, Limits: b.all.Limits.limits(), Env: map[string]string{},
	}
	home := homeOf(b.all.User)
	if t.Workdir == "" {
		t.Workdir = home
	}
	for key, value := range b.all.Env {
		t.Env[key] = expand(value)
	}
	for _, target := range b.targets {
		tree := Tree{Target: target}
		for _, made := range slices.Backward(layers) {
			slot := (&layer{dir: made.dir}).slot(target)
			if _, err := os.Stat(slot); err == nil {
				tree.Lower = append(tree.Lower, slot)
			}
		}
		if host := b.lowers[target]; host != "" {
			tree.Lower = append(tree.Lower, host)
		}
		t.Trees = append(t.Trees, tree)
	}
	paths := []string{home + "/.local/bin", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	if p := b.python; p != nil {
		t.Python = Python{
			Executable: p.Executable, Version: p.Version, Preload: unique(b.all.Python.Preload),
			Warmup: b.all.Python.Warmup, UserSite: userSite(p, home),
		}
		if p.private() {
			paths = slices.Insert(paths, 1, path.Join(p.Prefix, "bin"))
		}
	}
	if t.Env["PATH"] == "" {
		t.Env["PATH"] = strings.Join(paths, ":")
	}
	t.Warnings = slices.Clone(b.warnings)
	for _, made := range layers {
		t.Warnings = append(t.Warnings, made.Warnings...)
	}
	return t
}

func unique(names []string) []string {
	var once []string
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once
}

func userSite(p *Interpreter, home string) string {
	return home + "/.local/lib/python" + p.Minor() + "/site-packages"
}

// layer returns the layer of one definition, made now or earlier from the same inputs.
func (b *build) layer(ctx context.Context, i int, below []*built) (*built, error) {
	key := b.key(i)
	dir := filepath.Join(b.store.layers(), b.links[i].Name+"-"+key[:16])
	again := b.again[filepath.Base(dir)]
	if made, err := readLayer(dir); !again && err == nil && made.Key == key {
		return made, nil
	}
	if !again {
		if err := os.RemoveAll(dir); err != nil { // without its description: not ours to trust
			return nil, err
		}
	}
	tmp, err := os.MkdirTemp(b.store.layers(), halfBuilt)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(filepath.Join(tmp, "trees"), 0o755); err != nil { // a definition may add no file at all
		return nil, err
	}
	l := &layer{dir: tmp, targets: b.targets, hidden: b.all.Host.Hide, rootMode: b.rootMode()}
	if err := b.fill(ctx, l, i, below); err != nil {
		return nil, err
	}
	made := &built{Name: b.links[i].Name, Key: key, Salt: b.store.saltOf(dir), Warnings: l.warnings, dir: dir}
	if again {
		made.Salt = rand.Text()
	}
	if made.Census, err = takeCensus(filepath.Join(tmp, "trees")); err != nil {
		return nil, err
	}
	if made.Digest, made.Seal, err = digestTree(filepath.Join(tmp, "trees")); err != nil {
		return nil, err
	}
	if err := writeJSON(filepath.Join(tmp, "layer.json"), made); err != nil {
		return nil, err
	}
	if err := syncDir(tmp); err != nil {
		return nil, err
	}
	if again { // a build that fails leaves the earlier layer where it is
		if err := b.store.putAside(filepath.Base(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		delete(b.again, filepath.Base(dir))
	}
	return made, os.Rename(tmp, dir)
}

func readLayer(dir string) (*built, error) {
	made := &built{dir: dir}
	text, err := os.ReadFile(filepath.Join(dir, "layer.json"))
	if err != nil {
		return nil, err
	}
	return made, json.Unmarshal(text, made)
}

// key is over everything a layer is made from: its recipe, and what it takes from the host.
func (b *build) key(i int) string {
	return digestOf(struct{ Recipe, Host string }{b.recipe(i), b.hostStamp(i)})
}

// recipe is over the definitions of a layer and of those below it, and the interpreter. It leaves out the state of the
// host, so that a package that is installed on the host has only the lowest layer built again and no Python package
// downloaded.
func (b *build) recipe(i int) string {
	d, parent := b.links[i], ""
	if i > 0 {
		parent = b.recipe(i - 1)
	}
	return digestOf(struct {
		Version    int
		Definition *Definition
		Lock       string
		Parent     string
		Python     *Interpreter
		Targets    []string
		Nameserver string
	}{builderVersion, d, string(d.lock), parent, b.pythonFacts(), b.targets, b.store.options.Nameserver})
}

// pythonFacts is the interpreter without the pip that installs its packages: any pip installs the same ones.
func (b *build) pythonFacts() *Interpreter {
	if b.python == nil {
		return nil
	}
	facts := *b.python
	facts.HasPip, facts.PipWheel = false, ""
	return &facts
}

// hostStamp changes when a file of the host does that the definition copies. That of the lowest definition, which shows
// the host's trees, changes too with what is installed there, as the package manager's own database tells.
func (b *build) hostStamp(i int) string {
	d := b.links[i]
	watched := slices.Concat(d.etcPaths(), d.Host.Copy)
	if i == 0 || len(d.Host.Trees) > 0 {
		watched = slices.Concat(watched, systemLinks, packageDatabases)
	}
	var all []string
	for _, at := range watched {
		_ = filepath.WalkDir(at, func(at string, e fs.DirEntry, err error) error {
			if err != nil {
				return nil // what cannot be read is not copied either
			}
			for _, stat := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
				if info, err := stat(at); err == nil && !info.IsDir() {
					all = append(all, fmt.Sprintf("%s %s %d %d", at, info.Mode(), info.Size(), info.ModTime().UnixNano()))
				}
			}
			return nil
		})
	}
	return digestOf(all)
}

func (b *build) rootMode() fs.FileMode {
	if b.python != nil && within("/root", b.python.Prefix) {
		return 0o711
	}
	return 0o700
}

// fill makes what one definition adds.
func (b *build) fill(ctx context.Context, l *layer, i int, below []*built) error {
	d := b.links[i]
	b.progress(Progress{Step: StepFiles, Message: d.Name})
	steps := []func() error{
		func() error { return b.fillHost(ctx, l, d) },
		func() error { return d.fillOwn(l) },
		func() error { return b.fillHome(l, i, below) },
	}
	if i == 0 {
		steps = slices.Insert(steps, 0, func() error { return b.skeleton(l) })
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	if b.python == nil {
		return nil
	}
	if i == b.pythonLink() {
		if err := b.fillInterpreter(l); err != nil {
			return err
		}
	}
	if len(d.lock) > 0 {
		if err := l.installPackages(ctx, b.python, d.lock, b.progress); err != nil {
			return fault.Wrap(fault.Unavailable, err, "packages of template %s cannot be installed", d.Name)
		}
	}
	return b.prepare(ctx, l, i, below)
}

// pythonLink is the first definition that asks for Python.
func (b *build) pythonLink() int {
	return slices.IndexFunc(b.links, func(d *Definition) bool { return len(d.Python.Find) > 0 })
}

// fillHost copies what the definition allows of the host and hides what it may not show.
func (b *build) fillHost(ctx context.Context, l *layer, d *Definition) error {
	visible := func(p string) bool {
		if within("/etc", p) {
			return !forbidden(p)
		}
		for _, hidden := range b.all.Host.Hide {
			if within(hidden, p) {
				return false
			}
		}
		return slices.ContainsFunc(slices.Concat(b.all.Host.Trees, systemLinks), func(tree string) bool { return within(tree, p) })
	}
	for _, from := range slices.Concat(d.etcPaths(), d.Host.Copy) {
		copyTree := func() error { return l.copyTree(from, visible) }
		if isDpkg(from) {
			whole := copyTree
			copyTree = func() error { return l.copyDpkg(ctx, from, b.progress, whole) }
		}
		if err := copyTree(); err != nil {
			return err
		}
	}
	if err := forgetOwners(l); err != nil {
		return err
	}
	for _, tree := range d.Host.Trees {
		if err := l.mkdir(tree); err != nil {
			return err
		}
		if err := l.mountPoint(tree); err != nil {
			return err
		}
	}
	for _, hidden := range d.Host.Hide {
		if err := l.hide(hidden); err != nil {
			return err
		}
	}
	return nil
}

// etcPaths are the files and directories below /etc that a definition names and this host has.
func (d *Definition) etcPaths() []string {
	var all []string
	for _, pattern := range d.Host.Etc {
		names, _ := filepath.Glob("/etc/" + pattern) // validated
		all = append(all, names...)
	}
	return all
}

// fillOwn writes the definition's files and links, then hides the private parts of its host trees.
func (d *Definition) fillOwn(l *layer) error {
	for _, name := range slices.Sorted(maps.Keys(d.Files)) {
		content := strings.TrimPrefix(expand(d.Files[name]), "\n")
		if err := l.write(name, []byte(content), 0o644); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Links)) {
		if err := l.link(name, d.Links[name]); err != nil {
			return err
		}
	}
	for _, tree := range d.Host.Trees {
		if err := l.whiteoutPrivate(tree); err != nil {
			return err
		}
	}
	return nil
}

// fillInterpreter shows the interpreter without what the host's users installed for it.
func (b *build) fillInterpreter(l *layer) error {
	p := b.python
	if target := p.target(); target != "" {
		if err := l.mkdir(target); err != nil {
			return err
		}
		if err := l.mountPoint(target); err != nil {
			return err
		}
		if err := l.hide(p.Sites[0]); err != nil {
			return err
		}
		if err := l.whiteoutPrivate(target); err != nil {
			return err
		}
	}
	if err := l.mkdir(userSite(p, userHome)); err != nil {
		return err
	}
	if err := l.mkdir(userHome + "/.local/bin"); err != nil {
		return err
	}
	if p.Prefix == "/usr/local" {
		if err := l.copyShared(p); err != nil {
			return err
		}
	}
	links := map[string]string{"python": p.Executable, "python3": p.Executable}
	if p.private() {
		links["pip"], links["pip3"] = path.Join(p.Prefix, "bin/pip3"), path.Join(p.Prefix, "bin/pip3")
	}
	for name, target := range links {
		if err := l.link("/usr/local/bin/"+name, target); err != nil {
			return err
		}
	}
	return nil
}

// copyShared brings the interpreter out of a prefix that it shares with others: the program and its library. Its
// standard library is a tree of its own.
func (l *layer) copyShared(p *Interpreter) error {
	libraries, err := filepath.Glob(path.Join(p.Prefix, "lib", "libpython"+p.Minor()+"*.so*"))
	if err != nil {
		return err
	}
	all := func(string) bool { return true }
	for _, name := range append(libraries, p.Executable) {
		if err := l.copyTree(name, all); err != nil {
			return err
		}
	}
	return nil
}

// Try runs a command in a throwaway copy of the template: as nobody, without a network, seeing only the template's
// trees; scratch is an empty directory to mount on. It exists to build and to check templates; a sandbox is much
// more. It returns what the command wrote.
func (t *Template) Try(ctx context.Context, scratch string, argv ...string) ([]byte, error) {
	return t.try(ctx, scratch, argv, nil)
}

// importAll imports modules. It refuses a package without its __init__.py, as zygotes do: see hollow in
// kernel/zygote.py.
const importAll = `import importlib
for m in %s:
    spec = getattr(importlib.import_module(m), "__spec__", None)
    if type(getattr(spec, "submodule_search_locations", None)).__name__ == "_NamespacePath":
        raise ImportError(m + " is a directory without an __init__.py")
`

// prepare imports what zygotes will import, inside the template, and keeps what that left in the home directory:
// a package that does not work here is found now, and caches are made once.
func (b *build) prepare(ctx context.Context, l *layer, i int, below []*built) error {
	d := b.links[i]
	if len(d.Python.Preload) == 0 && d.Python.Prepare == "" {
		return nil
	}
	b.progress(Progress{Step: StepPrepare, Message: d.Name})
	modules, err := json.Marshal(d.Python.Preload)
	if err != nil {
		return err
	}
	code := fmt.Sprintf(importAll, modules) + d.Python.Prepare
	t := b.compose(append(slices.Clone(below), &built{dir: l.dir}))
	scratch := filepath.Join(l.dir, "scratch")
	if err := os.Mkdir(scratch, 0o755); err != nil {
		return err
	}
	_, err = t.try(ctx, scratch, []string{b.python.Executable, "-s", "-c", code}, l.keepHome)
	if err := errors.Join(err, os.Remove(scratch)); err != nil {
		return fault.Wrap(fault.Unavailable, err, "template %s does not work on this host", d.Name)
	}
	return nil
}
