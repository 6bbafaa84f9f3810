package agent

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	maxEntries = 50_000 // of one listing: its answer is one frame
	maxDepth   = 64
)

// doer says for whom a file operation is, and with whose rights.
type doer struct {
	user string
	root bool
}

// on does a file operation for a user and explains what went wrong with which path.
func (a *Agent) on(who doer, p string, f func(u user, p string) error) error {
	u, err := a.user(who.user)
	if err != nil {
		return err
	}
	p, err = target(p, u)
	if err != nil {
		return err
	}
	return explain(a.as(a.rights(u, who.root), func() error { return f(u, p) }), p)
}

// rights is whose rights count when something is done for u: with root the agent's own.
func (a *Agent) rights(u user, root bool) user {
	if root {
		return user{uid: a.uid}
	}
	return u
}

// owner is who gets what an operation with root's rights has made; nil: it is theirs already.
func (a *Agent) owner(u user, root bool) *user {
	if !root || u.uid == a.uid {
		return nil
	}
	return &u
}

func (a *Agent) stat(params agentapi.PathParams) (e agentapi.Entry, err error) {
	err = a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) (err error) {
		e, err = entryAt(p, loadNames())
		return err
	})
	return e, err
}

func (a *Agent) list(params agentapi.ListParams) (list []agentapi.Entry, err error) {
	depth := max(1, params.Depth)
	if depth > maxDepth {
		return nil, fault.New(fault.Invalid, "a listing goes at most %d levels deep", maxDepth)
	}
	if len(params.Names) > 0 {
		return a.search(params)
	}
	list = []agentapi.Entry{}
	err = a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) error {
		fd, err := open(atFDCWD, p, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		return listDir(fd, p, depth, loadNames(), &list)
	})
	return list, err
}

// listDir appends the entries of a directory in order of name, each followed by its own; it takes fd over.
func listDir(fd int, p string, depth int, n *names, list *[]agentapi.Entry) error {
	dir := os.NewFile(uintptr(fd), p)
	defer dir.Close()
	children, err := dir.Readdirnames(maxEntries + 1)
	if err != nil && len(children) == 0 && err.Error() != "EOF" {
		return err
	}
	slices.Sort(children)
	for _, name := range children {
		if len(*list) >= maxEntries {
			return fault.New(fault.Exhausted, "%s: more than %d entries; list less at once", p, maxEntries)
		}
		child, err := open(fd, name, oPath|syscall.O_NOFOLLOW, 0)
		if err != nil {
			continue // gone meanwhile, or a process under /proc
		}
		e, err := entryOf(child, path.Join(p, name), n)
		syscall.Close(child)
		if err != nil {
			continue
		}
		if e.Type == agentapi.EntrySymlink {
			e.Link = linked(fd, name)
		}
		*list = append(*list, e)
		if e.Type != agentapi.EntryDir || depth <= 1 {
			continue
		}
		sub, err := open(fd, name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue // not ours to read
		}
		if err := listDir(sub, e.Path, depth-1, n, list); err != nil {
			return err
		}
	}
	return nil
}

func (a *Agent) read(l *link, params agentapi.ReadParams) error {
	if params.Offset < 0 || params.Length < 0 {
		return fault.New(fault.Invalid, "offset and length cannot be negative")
	}
	var fd int
	var e agentapi.Entry
	err := a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) (err error) {
		if fd, err = openRegular(p); err != nil {
			return err
		}
		if e, err = entryOf(fd, p, loadNames()); err != nil {
			syscall.Close(fd)
		}
		return err
	})
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	if err := syscall.SetNonblock(fd, false); err != nil {
		return explain(err, params.Path)
	}
	if err := l.event(agentapi.Event{Type: agentapi.EventStarted, Entry: &e}); err != nil {
		return nil
	}
	return a.copyOut(l, fd, params)
}

func (a *Agent) copyOut(l *link, fd int, params agentapi.ReadParams) error {
	b := chunks.Get().(*chunk)
	defer chunks.Put(b)
	left := params.Length
	for at := params.Offset; ; {
		want := b[agentapi.HeaderSize:]
		if params.Length > 0 && left < int64(len(want)) {
			want = want[:left]
		}
		if len(want) == 0 {
			break
		}
		n, err := retry(func() (int, error) { return syscall.Pread(fd, want, at) })
		if err != nil {
			return explain(err, params.Path)
		}
		if n == 0 {
			break
		}
		if err := l.chunk(agentapi.FrameData, b, n); err != nil {
			return nil
		}
		at, left = at+int64(n), left-int64(n)
	}
	return l.answer(none{})
}

func (a *Agent) mkdir(params agentapi.MkdirParams) (e agentapi.Entry, err error) {
	mode := params.Mode & 0o7777
	if mode == 0 {
		mode = 0o755 // of the parents too
	}
	err = a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) error {
		if params.Parents {
			if err := makeDirs(p, mode, a.owner(u, params.Root)); err != nil {
				return err
			}
		} else if err := makeDir(p, mode, a.owner(u, params.Root)); err != nil {
			return err
		}
		var err error
		e, err = entryAt(p, loadNames())
		return err
	})
	return e, err
}

func makeDir(p string, mode uint32, owner *user) error {
	dir, name, err := openParent(p)
	if err != nil {
		return err
	}
	defer syscall.Close(dir)
	if err := syscall.Mkdirat(dir, name, mode); err != nil {
		return err
	}
	return settleDir(dir, name, mode, owner)
}

// settleDir gives a new directory to its owner and sets the mode that was asked for, past the umask. It holds on to what
// it found: code in the sandbox may put a link where the directory was, and root's rights would be led through it.
func settleDir(dir int, name string, mode uint32, owner *user) error {
	fd, err := open(dir, name, oPath|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0) // a mode may forbid its owner to read
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	if owner != nil {
		if err := chownFD(fd, owner.uid, owner.gid); err != nil {
			return err
		}
	}
	return syscall.Chmod(fdPath(fd), mode)
}

func (a *Agent) move(params agentapi.MoveParams) (e agentapi.Entry, err error) {
	err = a.on(doer{params.User, params.Root}, params.From, func(u user, from string) error {
		to, err := target(params.To, u)
		if err != nil {
			return err
		}
		if err := makeDirs(path.Dir(to), 0o755, a.owner(u, params.Root)); err != nil {
			return explain(err, to)
		}
		if err := rename(from, to); err != nil {
			return err
		}
		e, err = entryAt(to, loadNames())
		return err
	})
	return e, err
}

func rename(from, to string) error {
	fromDir, fromName, err := openParent(from)
	if err != nil {
		return err
	}
	defer syscall.Close(fromDir)
	toDir, toName, err := openParent(to)
	if err != nil {
		return explain(err, to)
	}
	defer syscall.Close(toDir)
	err = syscall.Renameat(fromDir, fromName, toDir, toName)
	if err != syscall.EXDEV {
		return err
	}
	// Two trees of the sandbox: copy beside the destination, put it in place at once, then remove the source.
	temp := tempName(false)
	if err = copyTree(fromDir, fromName, toDir, temp, 0); err == nil {
		err = syscall.Renameat(toDir, temp, toDir, toName)
	}
	if err != nil {
		_ = removeTree(toDir, temp, 0) // why the move came to nothing is what counts
		return err
	}
	return removeTree(fromDir, fromName, 0)
}

// maxNesting bounds recursion over trees that the sandbox may have made as deep as it likes.
const maxNesting = 2000

func copyTree(fromDir int, fromName string, toDir int, toName string, depth int) error {
	if depth > maxNesting {
		return syscall.ENAMETOOLONG
	}
	fd, err := open(fromDir, fromName, oPath|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return err
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFLNK:
		to, err := readlinkat(fd, "")
		if err != nil {
			return err
		}
		return symlinkat(to, toDir, toName)
	case syscall.S_IFREG:
		return copyFile(fromDir, fromName, toDir, toName, &st)
	case syscall.S_IFDIR:
		return copyDir(fromDir, fromName, toDir, toName, &st, depth)
	default:
		return fault.New(fault.Invalid, "%s: only files, directories and links can be moved between file systems", fromName)
	}
}

func copyDir(fromDir int, fromName string, toDir int, toName string, st *syscall.Stat_t, depth int) error {
	if err := syscall.Mkdirat(toDir, toName, 0o700); err != nil {
		return err
	}
	from, err := open(fromDir, fromName, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	src := os.NewFile(uintptr(from), fromName)
	defer src.Close()
	to, err := open(toDir, toName, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(to)
	children, err := src.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range children {
		if err := copyTree(from, name, to, name, depth+1); err != nil {
			return err
		}
	}
	keepMeta(to, st)
	return nil
}

func copyFile(fromDir int, fromName string, toDir int, toName string, st *syscall.Stat_t) error {
	from, err := open(fromDir, fromName, syscall.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(from)
	to, err := open(toDir, toName, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer syscall.Close(to)
	b := chunks.Get().(*chunk)
	defer chunks.Put(b)
	for {
		n, err := retry(func() (int, error) { return syscall.Read(from, b[:]) })
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		if err := writeAll(to, b[:n]); err != nil {
			return err
		}
	}
	for name, value := range userXattrs(from) {
		_ = syscall.Setxattr(fdPath(to), name, []byte(value), 0) // as cp does: where they cannot be kept, the content is
	}
	keepMeta(to, st)
	return nil
}

// keepMeta gives a copy its source's owner, mode and time, each where allowed.
func keepMeta(fd int, st *syscall.Stat_t) {
	_ = syscall.Fchown(fd, int(st.Uid), int(st.Gid))
	_ = syscall.Fchmod(fd, st.Mode&0o7777)
	now := syscall.NsecToTimeval(time.Now().UnixNano())
	_ = syscall.Futimes(fd, []syscall.Timeval{now, syscall.NsecToTimeval(st.Mtim.Nano())})
}

func writeAll(fd int, p []byte) error {
	for len(p) > 0 {
		n, err := retry(func() (int, error) { return syscall.Write(fd, p) })
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

func (a *Agent) remove(params agentapi.RemoveParams) (none, error) {
	return none{}, a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) error {
		dir, name, err := openParent(p)
		if err != nil {
			return err
		}
		defer syscall.Close(dir)
		if params.Recursive {
			return removeTree(dir, name, 0)
		}
		err = unlinkat(dir, name, 0)
		if err == syscall.EISDIR {
			err = unlinkat(dir, name, atRemoveDir)
		}
		if err == syscall.ENOTEMPTY {
			return fault.New(fault.Conflict, "%s: the directory is not empty; ask for recursive removal", p)
		}
		return err
	})
}

// removeTree removes by descriptor, so that a directory swapped for a link meanwhile leads nowhere.
func removeTree(dir int, name string, depth int) error {
	err := unlinkat(dir, name, 0)
	if err != syscall.EISDIR {
		return err
	}
	if depth > maxNesting {
		return syscall.ENAMETOOLONG
	}
	if err := removeChildren(dir, name, depth); err != nil {
		return err
	}
	return unlinkat(dir, name, atRemoveDir)
}

func removeChildren(dir int, name string, depth int) error {
	fd, err := open(dir, name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err == syscall.EACCES {
		return nil // an empty one can still go
	}
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	children, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, child := range children {
		if err := removeTree(fd, child, depth+1); err != nil && err != syscall.ENOENT {
			return err
		}
	}
	return nil
}

func (a *Agent) chmod(params agentapi.ChmodParams) (e agentapi.Entry, err error) {
	uid, gid := -1, -1
	if params.Owner != "" {
		owner, ok := lookupUser(params.Owner)
		if !ok {
			return e, fault.New(fault.NotFound, "there is no user %q in the sandbox", params.Owner)
		}
		uid = owner.uid
	}
	if params.Group != "" {
		var ok bool
		if gid, ok = lookupGroup(params.Group); !ok {
			return e, fault.New(fault.NotFound, "there is no group %q in the sandbox", params.Group)
		}
	}
	err = a.on(doer{user: params.User}, params.Path, func(u user, p string) error {
		flags := oPath
		if params.NoFollow {
			flags |= syscall.O_NOFOLLOW
		}
		fd, err := open(atFDCWD, p, flags, 0)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		if onProc(fd) {
			return syscall.EACCES
		}
		if e, err = entryOf(fd, p, loadNames()); err != nil {
			return err
		}
		if uid >= 0 || gid >= 0 {
			if err := chownFD(fd, uid, gid); err != nil {
				return err
			}
		}
		if params.Mode != nil && e.Type != agentapi.EntrySymlink {
			if err := syscall.Chmod(fdPath(fd), *params.Mode&0o7777); err != nil {
				return err
			}
		}
		e, err = entryOf(fd, p, loadNames())
		return err
	})
	return e, err
}

// Temporary files of a write tell watchers what to make of the rename that follows.
const (
	tempNew = ".cove-new-"
	tempOld = ".cove-old-"
)

func tempName(exists bool) string {
	if exists {
		return fmt.Sprintf("%s%016x", tempOld, rand.Uint64())
	}
	return fmt.Sprintf("%s%016x", tempNew, rand.Uint64())
}

var native = binary.NativeEndian
