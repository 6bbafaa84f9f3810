package imagebuild

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"sync"

	"github.com/covehq/cove/client"
)

// copying is one COPY.
type copying struct {
	sources []string
	texts   []inline
	dest    string // absolute
	into    bool   // dest is a directory, whatever is there
	owner   string // user[:group]; empty: root
	mode    uint32 // of files; zero: as they are

	local tree  // where the files are, or
	from  *base // whose they are

	items []item
}

// inline is a file whose text stands in the Dockerfile.
type inline struct{ name, text string }

// item is one file that is copied.
type item struct {
	node
	to string // below dest, with / between; empty: dest itself, or in it by its own name where dest is a directory
}

// find says what is copied where.
func (c *copying) find(ctx context.Context, t tree) error {
	found := 0
	for _, pattern := range c.sources {
		names, err := glob(ctx, t, pattern)
		if err != nil {
			return err
		}
		found += len(names)
		for _, name := range names {
			if err := c.add(ctx, t, name); err != nil {
				return err
			}
		}
	}
	if found+len(c.texts) > 1 {
		c.into = true
	}
	return nil
}

// add takes a file, or what is in a directory.
func (c *copying) add(ctx context.Context, t tree, name string) error {
	n, err := t.stat(ctx, name)
	if err != nil {
		return err
	}
	if n.kind != kindDir {
		c.items = append(c.items, item{node: n, to: path.Base(name)})
		return nil
	}
	c.items = append(c.items, item{node: n, to: "."})
	all, err := t.below(ctx, n.path)
	if err != nil {
		return err
	}
	for _, child := range all {
		rel := child.path
		if n.path != "." {
			rel = strings.TrimPrefix(rel, n.path+"/")
		}
		c.items = append(c.items, item{node: child, to: rel})
	}
	return nil
}

// hashNode is what a file holds.
func hashNode(ctx context.Context, t tree, n node) (string, error) {
	switch n.kind {
	case kindLink:
		return n.link, nil
	case kindDir:
		return "", nil
	case kindFile:
	}
	r, err := t.open(ctx, n.path)
	if err != nil {
		return "", err
	}
	defer r.Close()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// perform puts the files into the sandbox.
func (c *copying) perform(ctx context.Context, s *site) error {
	t := c.local
	if c.from != nil {
		source, end, err := s.b.openSource(ctx, c.from)
		if err != nil {
			return err
		}
		defer end()
		t = source
		if err := c.find(ctx, t); err != nil {
			return err
		}
	}
	w := &writing{copying: c, tree: t, site: s, made: map[string]bool{"/": true}, fresh: map[string]bool{}}
	single := len(c.items)+len(c.texts) == 1 && (len(c.items) == 0 || c.items[0].kind != kindDir)
	w.rename = single && !c.into && !s.isDir(ctx, c.dest)
	if err := w.owners(ctx); err != nil {
		return err
	}
	return w.all(ctx)
}

// writing is a copy on its way.
type writing struct {
	*copying
	tree   tree
	site   *site
	rename bool // the only file goes by the name of dest

	uid, gid string          // numbers of whom files go to; empty: root
	made     map[string]bool // directories that are there
	fresh    map[string]bool // of those, the ones that were not there before: nothing is in them
	links    []string        // target and path by turns

	packed bool       // all goes as an archive
	dirs   []outgoing // that go with it
}

// target is where an item goes.
func (w *writing) target(to string) string {
	if w.rename {
		return w.dest
	}
	return path.Join(w.dest, to)
}

// outgoing is a file on its way into the sandbox.
type outgoing struct {
	to   string
	mode uint32
	size int64
	open func() (io.ReadCloser, error)
}

// all makes directories one after the other, then files and links: many of them at once where the sandbox can unpack them.
func (w *writing) all(ctx context.Context) error {
	w.packed = len(w.items) >= many && w.site.hasTar(ctx)
	files, err := w.prepare(ctx)
	if err != nil {
		return err
	}
	if w.packed {
		return w.pack(ctx, files)
	}
	err = parallel(ctx, len(files), func(ctx context.Context, i int) error { return w.write(ctx, &files[i]) })
	if err != nil {
		return err
	}
	return w.site.link(ctx, w.links)
}

// prepare makes the directories and says what goes into them.
func (w *writing) prepare(ctx context.Context) ([]outgoing, error) {
	var files []outgoing
	add := func(f outgoing) {
		if w.mode != 0 {
			f.mode = w.mode
		}
		files = append(files, f)
	}
	for _, item := range w.items {
		to := w.target(item.to)
		dir, mode := path.Dir(to), uint32(0)
		switch item.kind {
		case kindDir:
			dir, mode = to, item.mode
		case kindLink:
			w.links = append(w.links, item.link, to)
		case kindFile:
			add(outgoing{to, item.mode, item.size, func() (io.ReadCloser, error) { return w.tree.open(ctx, item.path) }})
		}
		if err := w.mkdir(ctx, dir, mode); err != nil {
			return nil, err
		}
	}
	for _, t := range w.texts {
		to := w.target(t.name)
		if err := w.mkdir(ctx, path.Dir(to), 0); err != nil {
			return nil, err
		}
		add(outgoing{to, 0o644, int64(len(t.text)), func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(t.text)), nil }})
	}
	return files, nil
}

// writers is how many files are on their way at once.
const writers = 8

// parallel does something n times, several at once, and gives the first failure.
func parallel(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var work sync.WaitGroup
	for range min(writers, n) {
		work.Go(func() {
			for i := range next {
				if err := do(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		next <- i
	}
	close(next)
	work.Wait()
	return context.Cause(ctx)
}

func (w *writing) write(ctx context.Context, f *outgoing) error {
	r, err := f.open()
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := w.site.files.Write(ctx, f.to, struct{ io.Reader }{r}, client.WriteOptions{Mode: f.mode}); err != nil {
		return fmt.Errorf("write %s: %w", f.to, err)
	}
	return w.own(ctx, f.to)
}

func (w *writing) own(ctx context.Context, to string) error {
	if w.uid == "" {
		return nil
	}
	_, err := w.site.files.Chown(ctx, to, w.uid, w.gid)
	return err
}

// owners finds the numbers of --chown once. A user without a group has the group of the same number, as Docker has it.
func (w *writing) owners(ctx context.Context) error {
	if w.owner == "" {
		return nil
	}
	user, group, _ := strings.Cut(w.owner, ":")
	const probe = "/.cove-owner"
	if _, err := w.site.files.WriteBytes(ctx, probe, nil); err != nil {
		return err
	}
	e, err := w.site.files.Chown(ctx, probe, user, group)
	if err := errors.Join(err, w.site.files.Remove(ctx, probe, false)); err != nil {
		return fmt.Errorf("--chown=%s: %w", w.owner, err)
	}
	w.uid, w.gid = strconv.Itoa(e.UID), strconv.Itoa(e.GID)
	if group == "" {
		w.gid = w.uid
	}
	return nil
}

// mkdir makes a directory with those above it, and leaves one alone that is there. Zero is the usual mode.
func (w *writing) mkdir(ctx context.Context, dir string, mode uint32) error {
	if w.made[dir] {
		return nil
	}
	if !w.fresh[path.Dir(dir)] && w.site.isDir(ctx, dir) {
		w.made[dir] = true
		return nil
	}
	if err := w.mkdir(ctx, path.Dir(dir), 0); err != nil {
		return err
	}
	w.fresh[dir] = true
	if w.packed && w.fresh[path.Dir(dir)] {
		w.made[dir] = true
		w.dirs = append(w.dirs, outgoing{to: dir, mode: cmp.Or(mode, 0o755)})
		return nil
	}
	if _, err := w.site.files.Mkdir(ctx, dir); err != nil {
		return fmt.Errorf("make directory %s: %w", dir, err)
	}
	w.made[dir] = true
	if mode != 0 && mode != 0o755 {
		if _, err := w.site.files.Chmod(ctx, dir, mode); err != nil {
			return err
		}
	}
	return w.own(ctx, dir)
}
