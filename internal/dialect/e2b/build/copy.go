package build

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"path"
	"regexp"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// chunk is how much of a list of paths is given to one command.
const chunk = 1 << 20

var modeForm = regexp.MustCompile(`^[0-7]{3,5}$`)

// ownerForm is user[:group].
var ownerForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_.-]{0,64})?$`)

// copying is one COPY step.
type copying struct {
	site    *site
	hash    string
	from    source
	dest    string
	destDir bool // dest is a directory, whatever there is now
	owner   string
	mode    string

	files    []string          // written
	dirs     []string          // made
	links    []string          // made, as pairs of target and path
	hards    []string          // made, as pairs of target and path
	known    map[string]bool   // directories that are there
	unpacked map[string]string // where an entry of the archive went
}

// source is what a COPY step copies, as a place in the archive.
type source struct {
	prefix string // what paths lose; "." is nothing
	name   string // of a single file, which may go by another name where it is copied to; empty: a directory
}

// sourceOf looks at what was uploaded. A pattern stands for what lies below the directories that it names in full; one that
// found a single file is that file.
func sourceOf(src string, entries []packed) source {
	src = path.Clean("./" + src)
	parts := strings.Split(src, "/")
	glob := len(parts)
	for i, p := range parts {
		if strings.ContainsAny(p, "*?[{") {
			glob = i
			break
		}
	}
	if glob == len(parts) { // a file or a directory
		for _, e := range entries {
			if e.path == src && e.kind != tar.TypeDir {
				return source{prefix: path.Dir(src), name: src}
			}
		}
		return source{prefix: src}
	}
	prefix := path.Join(append([]string{"."}, parts[:glob]...)...)
	whole := strings.Trim(strings.Join(parts[glob:], ""), "*") == ""
	if len(entries) == 1 && entries[0].kind != tar.TypeDir && !whole {
		return source{prefix: path.Dir(entries[0].path), name: entries[0].path}
	}
	return source{prefix: prefix}
}

// below is a path as seen from the prefix; ok tells whether it lies there at all.
func (s source) below(p string) (rel string, ok bool) {
	switch {
	case s.prefix == ".":
		return p, true
	case p == s.prefix:
		return ".", true
	}
	return strings.CutPrefix(p, s.prefix+"/")
}

// doCopy puts uploaded files into the sandbox: args are source, destination, owner and mode.
func (s *site) doCopy(ctx context.Context, st step) error {
	args := append(st.Args, "", "", "", "")[:4]
	if args[0] == "" || args[1] == "" || st.FilesHash == "" {
		return fault.New(fault.Invalid, "%s needs a source, a destination and files", st.Type)
	}
	c := &copying{site: s, hash: st.FilesHash, mode: args[3], owner: args[2], known: map[string]bool{}, unpacked: map[string]string{}}
	if c.owner == "" {
		c.owner = s.owner()
	}
	if !ownerForm.MatchString(c.owner) {
		return fault.New(fault.Invalid, "'%.100s' is not an owner: use user or user:group", c.owner)
	}
	if c.mode != "" && !modeForm.MatchString(c.mode) {
		return fault.New(fault.Invalid, "'%.20s' is not a mode: use octal digits", c.mode)
	}
	c.owner = withGroup(c.owner)
	var err error
	if c.dest, c.destDir, err = s.absolute(ctx, args[1]); err != nil {
		return err
	}
	return wrapStep(c.perform(ctx, args[0]), "failed to copy '%.200s' to '%.200s'", args[0], args[1])
}

func (c *copying) perform(ctx context.Context, src string) error {
	var entries []packed
	if err := c.archive(ctx, func(p packed, _ io.Reader) error { entries = append(entries, p); return nil }); err != nil {
		return err
	}
	if len(entries) == 0 {
		return fault.New(fault.Invalid, "there are no files to copy")
	}
	c.from = sourceOf(src, entries)
	if err := c.prepare(ctx); err != nil {
		return err
	}
	if err := c.archive(ctx, func(p packed, r io.Reader) error { return c.unpack(ctx, p, r) }); err != nil {
		return err
	}
	return c.settle(ctx)
}

func (c *copying) archive(ctx context.Context, each func(packed, io.Reader) error) error {
	f, err := c.site.b.files.open(c.site.who.Tenant, c.hash)
	if fault.Is(err, fault.NotFound) {
		return fault.Wrap(fault.Invalid, err, "%s", fault.Message(err))
	}
	if err != nil {
		return err
	}
	defer f.Close()
	return walkArchive(stoppable{ctx, f}, each)
}

// stoppable is a stream that ends with its reader's context: a small archive can be long.
type stoppable struct {
	ctx context.Context
	r   io.Reader
}

func (s stoppable) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	return s.r.Read(p)
}

// prepare makes the directory that files go to.
func (c *copying) prepare(ctx context.Context) error {
	dir := c.dest
	if c.from.name != "" && !c.destDir {
		e, err := c.site.agent.Stat(ctx, agentapi.PathParams{Path: c.dest, User: "root"})
		if err != nil && !fault.Is(err, fault.NotFound) {
			return err
		}
		if c.destDir = err == nil && c.isDir(ctx, e); !c.destDir {
			dir = path.Dir(c.dest)
		}
	}
	c.known[dir] = true
	return c.site.root(ctx, nil, makeDir, dir, c.owner)
}

// isDir follows a symbolic link, as writing through it would.
func (c *copying) isDir(ctx context.Context, e agentapi.Entry) bool {
	if e.Type != agentapi.EntrySymlink {
		return e.Type == agentapi.EntryDir
	}
	return c.site.root(ctx, nil, `[ -d "$1" ]`, c.dest) == nil
}

// target is where an entry goes; ok tells whether it goes anywhere.
func (c *copying) target(p packed) (to string, ok bool) {
	if c.from.name != "" {
		if p.path != c.from.name {
			return "", false
		}
		if c.destDir {
			return path.Join(c.dest, path.Base(p.path)), true
		}
		return c.dest, true
	}
	rel, ok := c.from.below(p.path)
	return path.Join(c.dest, rel), ok
}

// unpack writes one entry. Everything is written as root and given to its owner in the end.
func (c *copying) unpack(ctx context.Context, p packed, r io.Reader) error {
	to, ok := c.target(p)
	if !ok {
		return nil
	}
	c.unpacked[p.path] = to
	if p.kind == tar.TypeDir {
		return c.mkdir(ctx, to, p.mode)
	}
	if err := c.mkdir(ctx, path.Dir(to), 0); err != nil {
		return err
	}
	switch p.kind {
	case tar.TypeSymlink:
		c.links = append(c.links, p.link, to)
	case tar.TypeLink:
		old, ok := c.unpacked[p.link]
		if !ok {
			return fault.New(fault.Invalid, "'%.200s' is a link to something that is not copied", p.path)
		}
		c.hards = append(c.hards, old, to)
	default:
		_, err := c.site.agent.Write(ctx, agentapi.WriteParams{Path: to, User: "root", Mode: p.mode}, r)
		if err != nil {
			return err
		}
		c.files = append(c.files, to)
	}
	return nil
}

// mkdir makes a directory with those above it. One that is there stays as it is.
func (c *copying) mkdir(ctx context.Context, dir string, mode uint32) error {
	if c.known[dir] || dir == "/" {
		return nil
	}
	_, err := c.site.agent.Stat(ctx, agentapi.PathParams{Path: dir, User: "root"})
	if err == nil {
		c.known[dir] = true // or a file, of which the next write tells
		return nil
	}
	if !fault.Is(err, fault.NotFound) {
		return err
	}
	if err := c.mkdir(ctx, path.Dir(dir), 0); err != nil {
		return err
	}
	if mode == 0 {
		mode = 0o755
	}
	if _, err := c.site.agent.Mkdir(ctx, agentapi.MkdirParams{Path: dir, User: "root", Mode: mode, Parents: true}); err != nil {
		return err
	}
	c.known[dir] = true
	c.dirs = append(c.dirs, dir)
	return nil
}

// settle makes links and gives everything to its owner.
func (c *copying) settle(ctx context.Context) error {
	own := append(append([]string{}, c.files...), c.dirs...)
	var links []string
	for i := 1; i < len(c.links); i += 2 {
		links = append(links, c.links[i])
	}
	for _, do := range []struct {
		paths  []string
		n      int // how many belong together
		script string
		args   []string
	}{
		{c.hards, 2, `exec xargs -0 -r -n 2 ln -fT --`, nil},
		{c.links, 2, `exec xargs -0 -r -n 2 ln -sfnT --`, nil},
		{append(own, links...), 1, `exec xargs -0 -r chown -h -- "$1"`, []string{c.owner}},
	} {
		if err := c.each(ctx, do.paths, do.n, do.script, do.args...); err != nil {
			return err
		}
	}
	if c.mode == "" {
		return nil
	}
	return c.each(ctx, append(append([]string{}, c.files...), c.dirs...), 1, `exec xargs -0 -r chmod -- "$1"`, c.mode)
}

// each gives paths to a command, as many at a time as fit.
func (c *copying) each(ctx context.Context, paths []string, n int, script string, args ...string) error {
	var list bytes.Buffer
	for i, p := range paths {
		list.WriteString(p)
		list.WriteByte(0)
		full := list.Len() >= chunk && (i+1)%n == 0
		if !full && i < len(paths)-1 {
			continue
		}
		if err := c.site.root(ctx, list.Bytes(), script, args...); err != nil {
			return err
		}
		list.Reset()
	}
	return nil
}
