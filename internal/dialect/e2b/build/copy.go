package build

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"path"
	"regexp"
	"strconv"
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
	ids     agentapi.Account // the owner's
	mode    *uint32          // of everything; nil: of each entry its own

	links    []string          // to make, as pairs of target and path
	hards    []string          // to make, as pairs of target and path
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
	c := &copying{site: s, hash: st.FilesHash, owner: args[2], known: map[string]bool{}, unpacked: map[string]string{}}
	if c.owner == "" {
		c.owner = s.owner()
	}
	if !ownerForm.MatchString(c.owner) {
		return fault.New(fault.Invalid, "'%.100s' is not an owner: use user or user:group", c.owner)
	}
	c.owner = strings.TrimSuffix(c.owner, ":") // his own group, which he has anyway
	var err error
	if c.mode, err = modeOf(args[3]); err != nil {
		return err
	}
	if c.dest, c.destDir, err = s.absolute(ctx, args[1]); err != nil {
		return err
	}
	return wrapStep(c.perform(ctx, args[0]), "failed to copy '%.200s' to '%.200s'", args[0], args[1])
}

func modeOf(text string) (*uint32, error) {
	if text == "" {
		return nil, nil
	}
	mode, err := strconv.ParseUint(text, 8, 16)
	if err != nil || !modeForm.MatchString(text) {
		return nil, fault.New(fault.Invalid, "'%.20s' is not a mode: use octal digits", text)
	}
	bits := uint32(mode) & 0o7777
	return &bits, nil
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
	var err error
	if c.ids, err = c.site.agent.Account(ctx, agentapi.AccountParams{User: c.owner}); err != nil {
		return err
	}
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
		if c.destDir = err == nil && isDir(e); !c.destDir {
			dir = path.Dir(c.dest)
		}
	}
	c.known[dir] = true
	return c.site.makeDir(ctx, dir, c.owner)
}

// isDir follows a symbolic link, as writing through it would.
func isDir(e agentapi.Entry) bool {
	return e.Type == agentapi.EntryDir || e.Link != nil && e.Link.Type == agentapi.EntryDir
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

// unpack writes one entry, for its owner and with root's rights. Links come in the end, when nothing is written through them.
func (c *copying) unpack(ctx context.Context, p packed, r io.Reader) error {
	to, ok := c.target(p)
	if !ok {
		return nil
	}
	if len(to) > maxPath {
		return fault.New(fault.Invalid, "the path '%.100s…' is too long", to)
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
		e, err := c.site.agent.Write(ctx, agentapi.WriteParams{Path: to, User: c.owner, Root: true, Mode: c.modeFor(p.mode)}, r)
		if err != nil {
			return err
		}
		return c.hand(ctx, e)
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
	e, err := c.site.agent.Mkdir(ctx, agentapi.MkdirParams{Path: dir, User: c.owner, Root: true, Mode: c.modeFor(mode)})
	if err != nil {
		return err
	}
	c.known[dir] = true
	return c.hand(ctx, e)
}

// modeFor is the mode that an entry gets; zero leaves it to the agent.
func (c *copying) modeFor(own uint32) uint32 {
	if c.mode != nil {
		return *c.mode
	}
	return own
}

// hand gives an entry to its owner where it is not his: a file that was there before stays somebody else's. So does what a link
// in its place leads to.
func (c *copying) hand(ctx context.Context, e agentapi.Entry) error {
	mode := e.Mode
	if c.mode != nil {
		mode = *c.mode // which may be none at all
	}
	if e.UID == c.ids.UID && e.GID == c.ids.GID && e.Mode == mode {
		return nil
	}
	_, err := c.site.agent.Chmod(ctx, agentapi.ChmodParams{
		Path: e.Path, User: "root", Owner: strconv.Itoa(c.ids.UID), Group: strconv.Itoa(c.ids.GID), Mode: &mode, NoFollow: true,
	})
	return err
}

// settle makes links.
func (c *copying) settle(ctx context.Context) error {
	if len(c.hards) > 0 {
		if err := c.site.needShell(ctx); err != nil {
			return err
		}
	}
	if err := c.pairs(ctx, c.hards, `exec xargs -0 -r -n 2 ln -fT --`); err != nil {
		return err
	}
	for i := 0; i+1 < len(c.links); i += 2 {
		if err := c.site.link(ctx, c.links[i], c.links[i+1], c.owner); err != nil {
			return err
		}
	}
	return nil
}

// pairs gives pairs of paths to a command, as many at a time as fit.
func (c *copying) pairs(ctx context.Context, paths []string, script string) error {
	var list bytes.Buffer
	for i, p := range paths {
		list.WriteString(p)
		list.WriteByte(0)
		full := list.Len() >= chunk && i%2 == 1
		if !full && i < len(paths)-1 {
			continue
		}
		if err := c.site.root(ctx, list.Bytes(), script); err != nil {
			return err
		}
		list.Reset()
	}
	return nil
}
