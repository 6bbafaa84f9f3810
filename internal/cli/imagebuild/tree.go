package imagebuild

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// tree is files that can be copied into an image: those beside a Dockerfile, or those of another stage. Paths have no
// slash in front; "." is the root.
type tree interface {
	// stat tells about a path and follows links, without ever leaving the tree.
	stat(ctx context.Context, name string) (node, error)
	// below lists everything in a directory, at any depth, parents first. Links are not followed.
	below(ctx context.Context, name string) ([]node, error)
	// names lists the entries of a directory itself.
	names(ctx context.Context, name string) ([]string, error)
	open(ctx context.Context, name string) (io.ReadCloser, error)
}

// node is one file of a tree.
type node struct {
	path string // in the tree
	kind kind
	mode uint32 // permission bits with setuid, setgid and sticky
	size int64
	link string // target of a symbolic link
}

type kind byte

const (
	kindFile kind = 'f'
	kindDir  kind = 'd'
	kindLink kind = 'l'
)

// local is the directory of a build, without what its .dockerignore leaves out. No link in it leads out of it.
type local struct {
	dir    string
	root   *os.Root
	ignore ignore
}

// openLocal opens a directory; its ignore file may be one of the Dockerfile's own.
func openLocal(dir, dockerfile string) (*local, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	l := &local{dir: dir, root: root}
	for _, file := range []string{dockerfile + ".dockerignore", filepath.Join(dir, ".dockerignore")} {
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			l.ignore, err = parseIgnore(file, text)
		}
		if err != nil {
			root.Close()
			return nil, err
		}
		break
	}
	return l, nil
}

func (l *local) Close() error { return l.root.Close() }

func (l *local) stat(_ context.Context, name string) (node, error) {
	if l.isLeftOut(name) {
		return node{}, leftOut(name)
	}
	real, err := l.resolve(name)
	if err != nil {
		return node{}, l.explain(name, err)
	}
	if l.isLeftOut(real) { // a link does not lead round the ignore file
		return node{}, leftOut(name)
	}
	info, err := l.root.Lstat(real)
	if err != nil {
		return node{}, l.explain(name, err)
	}
	return l.node(real, info)
}

// isLeftOut tells whether .dockerignore leaves a path out, and all that is below it.
func (l *local) isLeftOut(name string) bool {
	return name != "." && l.ignore.excludes(name) && !(l.ignore.keeps() && l.isDir(name))
}

func leftOut(name string) error { return fmt.Errorf("%s is left out by .dockerignore", name) }

// maxLinks is how many links a path may lead over.
const maxLinks = 40

// resolve is a path without links, which all lead to somewhere in the directory.
func (l *local) resolve(name string) (string, error) {
	at, todo := ".", strings.Split(name, "/")
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if at == "." {
				return "", escapes(name)
			}
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		info, err := l.root.Lstat(next)
		if err != nil {
			return "", err
		}
		if info.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		target, err := l.root.Readlink(next)
		if err != nil {
			return "", err
		}
		if path.IsAbs(target) {
			return "", escapes(name)
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("%s leads over more than %d links", name, maxLinks)
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return at, nil
}

func escapes(name string) error {
	return fmt.Errorf("%s escapes from the directory of the build by a link", name)
}

func (l *local) isDir(name string) bool {
	info, err := l.root.Stat(name)
	return err == nil && info.IsDir()
}

// explain says in which directory something is not.
func (l *local) explain(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no %s in %s, where the build looks for files", name, l.dir)
	}
	return err
}

func (l *local) node(name string, info fs.FileInfo) (node, error) {
	n := node{path: name, mode: permissions(info.Mode()), size: info.Size()}
	switch mode := info.Mode(); {
	case mode.IsRegular():
		n.kind = kindFile
	case mode.IsDir():
		n.kind = kindDir
	case mode.Type() == fs.ModeSymlink:
		n.kind = kindLink
		target, err := l.root.Readlink(name)
		if err != nil {
			return n, err
		}
		n.link = target
	default:
		return n, fmt.Errorf("%s is neither a file nor a directory nor a link; add it to .dockerignore", name)
	}
	return n, nil
}

// permissions are a mode as chmod writes it.
func permissions(m fs.FileMode) uint32 {
	bits := uint32(m.Perm())
	for flag, bit := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if m&flag != 0 {
			bits |= bit
		}
	}
	return bits
}

func (l *local) below(ctx context.Context, name string) ([]node, error) {
	var all []node
	err := fs.WalkDir(l.root.FS(), name, func(p string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil || p == name {
			return err
		}
		if l.ignore.excludes(p) {
			if d.IsDir() && !l.ignore.keeps() {
				return fs.SkipDir
			}
			return nil
		}
		info, err := l.root.Lstat(p)
		if err != nil {
			return err
		}
		n, err := l.node(p, info)
		all = append(all, n)
		return err
	})
	return withParents(name, all), err
}

// withParents adds directories that were left out themselves and hold something that was not.
func withParents(root string, all []node) []node {
	known := map[string]bool{root: true, ".": true}
	var out []node
	var add func(dir string)
	add = func(dir string) {
		if !known[dir] {
			known[dir] = true
			add(path.Dir(dir))
			out = append(out, node{path: dir, kind: kindDir, mode: 0o755})
		}
	}
	for _, n := range all {
		add(path.Dir(n.path))
		known[n.path] = true
		out = append(out, n)
	}
	return out
}

func (l *local) names(_ context.Context, name string) ([]string, error) {
	real, err := l.resolve(name)
	if err != nil {
		return nil, l.explain(name, err)
	}
	entries, err := fs.ReadDir(l.root.FS(), real)
	if err != nil {
		return nil, l.explain(name, err)
	}
	seen := func(p string, e fs.DirEntry) bool { return !l.ignore.excludes(p) || l.ignore.keeps() && e.IsDir() }
	var all []string
	for _, e := range entries {
		if seen(path.Join(name, e.Name()), e) && seen(path.Join(real, e.Name()), e) {
			all = append(all, e.Name())
		}
	}
	return all, nil
}

func (l *local) open(_ context.Context, name string) (io.ReadCloser, error) { return l.root.Open(name) }

// glob is what a pattern finds in a tree, in order; a path without wildcards is itself, whether it is there or not.
func glob(ctx context.Context, t tree, pattern string) ([]string, error) {
	pattern = strings.TrimPrefix(path.Clean("/"+pattern), "/")
	if pattern == "" {
		return []string{"."}, nil
	}
	found := []string{"."}
	for part := range strings.SplitSeq(pattern, "/") {
		if !strings.ContainsAny(part, `*?[\`) {
			for i := range found {
				found[i] = path.Join(found[i], part)
			}
			continue
		}
		var next []string
		for _, dir := range found {
			names, err := t.names(ctx, dir)
			if err != nil {
				continue // a file, or nothing: nothing is below it
			}
			slices.Sort(names)
			for _, name := range names {
				ok, err := path.Match(part, name)
				if err != nil {
					return nil, fmt.Errorf("pattern %.60q: %w", part, err)
				}
				if ok {
					next = append(next, path.Join(dir, name))
				}
			}
		}
		if found = next; len(found) == 0 {
			return nil, fmt.Errorf("nothing is like %s", pattern)
		}
	}
	return found, nil
}
