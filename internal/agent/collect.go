package agent

import (
	"bufio"
	"cmp"
	"errors"
	"io"
	"math"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// maxCollectDepth bounds how deep below the directory a collection looks, maxCollectLooked how many names it looks at.
const (
	maxCollectDepth  = 32
	maxCollectLooked = 200_000
)

// A collection happens beside code that may change the directory at any moment, with the purpose of leading it astray. So
// nothing is named by a path of more than one part: each directory is opened below the one before without following a link,
// and what is opened is looked at once more before it is read.

// collect walks the directory first, with the user's rights, and then opens and sends one file after the other.
func (a *Agent) collect(l *link, params agentapi.CollectParams) error {
	box, err := a.openBox(params.User, params.Path)
	if err != nil {
		return err
	}
	defer box.close()
	w := walk{most: params.MaxFiles, seen: map[agentapi.Mark]bool{}}
	if w.most <= 0 || w.most > agentapi.MaxCollected {
		w.most = agentapi.MaxCollected
	}
	for mark := range slices.Chunk(params.Seen, len(agentapi.Mark{})) {
		if len(mark) == len(agentapi.Mark{}) {
			w.seen[agentapi.Mark(mark)] = true
		}
	}
	if err := a.as(box.user, func() error { return w.dir(box.root, "", 0) }); err != nil {
		return explain(err, box.path)
	}
	out := newSender(l.conn, params)
	if out.event(agentapi.Event{Type: agentapi.EventStarted}) != nil {
		return nil
	}
	for rest := w.found; len(rest) > 0; {
		n := together(rest)
		if a.sendFound(out, box, rest[:n]) != nil {
			return nil // the client has left
		}
		rest = rest[n:]
	}
	if out.w.Flush() != nil {
		return nil
	}
	return l.answer(agentapi.Collected{More: w.more})
}

// box is a directory that is collected, or from which files are discarded.
type box struct {
	user user
	path string
	root int
	dir  int    // of the file before; −1: none
	name string // of dir
}

// openBox opens the directory without following a link in its place.
func (a *Agent) openBox(name, p string) (*box, error) {
	b := &box{root: -1, dir: -1}
	err := a.on(doer{user: name}, p, func(u user, p string) (err error) {
		b.user, b.path = u, p
		b.root, err = open(atFDCWD, p, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err == syscall.ELOOP || err == syscall.ENOTDIR {
			return fault.New(fault.Invalid, "%s is not a directory, or a link is in its place", p)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func (b *box) close() {
	b.leave()
	syscall.Close(b.root)
}

func (b *box) leave() {
	if b.dir >= 0 && b.dir != b.root {
		syscall.Close(b.dir)
	}
	b.dir = -1
}

// enter opens a directory below the box, part by part; the one that was entered last is kept, because files come sorted.
func (b *box) enter(name string) (int, error) {
	if b.dir >= 0 && b.name == name {
		return b.dir, nil
	}
	b.leave()
	at := b.root
	for part := range strings.SplitSeq(name, "/") {
		if part == "" {
			continue
		}
		if part == "." || part == ".." {
			return -1, syscall.EINVAL
		}
		next, err := open(at, part, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if at != b.root {
			syscall.Close(at)
		}
		if err != nil {
			return -1, err
		}
		at = next
	}
	b.dir, b.name = at, name
	return at, nil
}

// walk looks for files.
type walk struct {
	most   int
	seen   map[agentapi.Mark]bool
	looked int // names
	found  []agentapi.Found
	more   bool
}

// dir looks through a directory in order of name. Its descriptor stays the caller's.
func (w *walk) dir(fd int, rel string, depth int) error {
	names, err := namesOf(fd, maxCollectLooked-w.looked+1)
	if err != nil {
		return err
	}
	// They count from when they are held: directories within directories would hold as many each.
	if w.looked += len(names); w.looked > maxCollectLooked {
		w.more = true
		names = names[:len(names)-(w.looked-maxCollectLooked)]
		w.looked = maxCollectLooked
	}
	for _, name := range names {
		if len(w.found) >= w.most {
			w.more = true
			return nil
		}
		if err := w.entry(fd, name, path.Join(rel, name), depth); err != nil {
			return err
		}
	}
	return nil
}

// namesOf lists a directory, up to so many names, through a descriptor of its own, so that fd can be listed again.
func namesOf(fd, most int) ([]string, error) {
	again, err := open(fd, ".", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(again), "")
	defer f.Close()
	names, err := f.Readdirnames(most)
	if err != nil && !errors.Is(err, io.EOF) && len(names) == 0 {
		return nil, err
	}
	slices.Sort(names)
	return names, nil
}

func (w *walk) entry(dir int, name, rel string, depth int) error {
	var st syscall.Stat_t
	if err := lstatat(dir, name, &st); err != nil {
		return nil // gone meanwhile
	}
	if st.Mode&syscall.S_IFMT == syscall.S_IFDIR {
		return w.enter(dir, name, rel, depth, &st)
	}
	f := foundOf(rel, &st)
	switch {
	case st.Mode&syscall.S_IFMT == syscall.S_IFLNK:
		f.Refused = "it is a symbolic link, and links are not followed: copy the file itself"
	case st.Mode&syscall.S_IFMT != syscall.S_IFREG:
		f.Refused = "it is not a regular file"
	}
	w.tell(f)
	return nil
}

func (w *walk) enter(dir int, name, rel string, depth int, st *syscall.Stat_t) error {
	if depth >= maxCollectDepth || len(rel) > agentapi.MaxCollectedPath {
		f := foundOf(rel, st)
		f.Refused = "the directory lies too deep"
		w.tell(f)
		return nil
	}
	sub, err := open(dir, name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		f := foundOf(rel, st)
		f.Refused = fault.Message(explain(err, "the directory"))
		w.tell(f)
		return nil
	}
	defer syscall.Close(sub)
	return w.dir(sub, rel, depth+1)
}

// tell adds what the client has not seen as it is now.
func (w *walk) tell(f agentapi.Found) {
	if !utf8.ValidString(f.Path) {
		f.Path, f.Refused = strings.ToValidUTF8(f.Path, "�"), "its name is not UTF-8: rename it"
	}
	if len(f.Path) > agentapi.MaxCollectedPath {
		f.Path, f.Refused = strings.TrimRight(strings.ToValidUTF8(f.Path[:agentapi.MaxCollectedPath], ""), "/"), "its path is too long"
	}
	if len(w.seen) > 0 && w.seen[f.Mark()] {
		return
	}
	w.found = append(w.found, f)
}

func foundOf(rel string, st *syscall.Stat_t) agentapi.Found {
	return agentapi.Found{Path: rel, Size: st.Size, Mod: st.Mtim.Nano(), Change: st.Ctim.Nano(), Inode: st.Ino}
}

// sender puts small files together into one write.
type sender struct {
	w    *bufio.Writer
	most int64 // of one file
	left int64 // of all that follow
}

func newSender(to io.Writer, params agentapi.CollectParams) *sender {
	s := &sender{w: bufio.NewWriterSize(to, 64<<10), most: math.MaxInt64, left: math.MaxInt64}
	if params.MaxBytes > 0 {
		s.most = params.MaxBytes
	}
	if params.MaxTotal > 0 {
		s.left = params.MaxTotal
	}
	return s
}

func (s *sender) event(e agentapi.Event) error {
	e.Time = time.Now()
	return agentapi.WriteJSON(s.w, agentapi.FrameEvent, e)
}

// Becoming the user costs more than opening a file, so some are opened at once: few, and none behind one that takes long to
// send, so that what is opened is soon read.
const (
	togetherFiles = 32
	togetherBytes = 256 << 10
)

// together is how many of the files are opened at once, at least one.
func together(files []agentapi.Found) int {
	bytes := int64(0)
	for i, f := range files {
		if bytes += f.Size; i > 0 && (i == togetherFiles || bytes > togetherBytes) {
			return i
		}
	}
	return len(files)
}

// sendFound sends files, or why they are not sent. An error means that nobody listens any more.
func (a *Agent) sendFound(out *sender, b *box, files []agentapi.Found) error {
	fds, errs := slices.Repeat([]int{-1}, len(files)), make([]error, len(files))
	defer func() {
		for _, fd := range fds {
			if fd >= 0 {
				syscall.Close(fd)
			}
		}
	}()
	err := a.as(b.user, func() error {
		for i, f := range files {
			if f.Refused == "" {
				fds[i], errs[i] = b.openFound(f.Path)
			}
		}
		return nil
	})
	for i, f := range files {
		if err := out.found(f, fds[i], cmp.Or(err, errs[i])); err != nil {
			return err
		}
	}
	return nil
}

// openFound opens a file that the walk has seen.
func (b *box) openFound(p string) (int, error) {
	dir, name := path.Split(p)
	parent, err := b.enter(dir)
	if err != nil {
		return -1, err
	}
	return open(parent, name, syscall.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// found tells a file as it is before its first byte is read, and sends it unless something is against that.
func (s *sender) found(f agentapi.Found, fd int, err error) error {
	if f.Refused == "" && err == nil {
		f, err = look(f.Path, fd)
	}
	if errors.Is(err, syscall.ENOENT) {
		return nil // gone meanwhile: it was never here
	}
	switch {
	case f.Refused != "":
	case err != nil:
		f.Refused = fault.Message(explain(err, "the file"))
	case f.Size > s.most:
		f.Refused = agentapi.TooLarge
	case f.Size > s.left:
		f.Refused = agentapi.NoRoom
	}
	if err := s.event(agentapi.Event{Type: agentapi.EventFound, Found: &f}); err != nil || f.Refused != "" {
		return err
	}
	return s.file(fd, f.Size)
}

// look tells what was opened, which may be another file than the walk has seen.
func look(p string, fd int) (agentapi.Found, error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return agentapi.Found{Path: p}, err
	}
	f := foundOf(p, &st)
	if st.Nlink == 0 { // removed since it was opened
		return f, syscall.ENOENT
	}
	return f, regular(&st, "the file")
}

// file sends a file's bytes. One that goes on beyond the limit, however small it was, or that cannot be read breaks off.
func (s *sender) file(fd int, size int64) error {
	b := chunks.Get().(*chunk)
	defer chunks.Put(b)
	for at := int64(0); ; {
		n, err := retry(func() (int, error) { return syscall.Pread(fd, b[agentapi.HeaderSize:], at) })
		if err != nil {
			return s.event(agentapi.Event{Type: agentapi.EventNotice, Message: fault.Message(explain(err, "the file"))})
		}
		if n == 0 {
			return agentapi.WriteFrame(s.w, agentapi.FrameEOF, nil)
		}
		if at += int64(n); at > s.most || int64(n) > s.left {
			return s.event(agentapi.Event{Type: agentapi.EventNotice, Message: "it grew while it was read, beyond the size that is kept"})
		}
		s.left -= int64(n)
		agentapi.PutHeader(b[:], agentapi.FrameData, n)
		if _, err := s.w.Write(b[:agentapi.HeaderSize+n]); err != nil {
			return err
		}
		if at == size && agentapi.HeaderSize+n < len(b) { // less came than there was room for: that was the end
			return agentapi.WriteFrame(s.w, agentapi.FrameEOF, nil)
		}
	}
}

// discard removes files that nobody touched since they were told.
func (a *Agent) discard(params agentapi.DiscardParams) (d agentapi.Discarded, err error) {
	if len(params.Files) > agentapi.MaxCollected {
		return d, fault.New(fault.Invalid, "at most %d files are discarded at once", agentapi.MaxCollected)
	}
	b, err := a.openBox(params.User, params.Path)
	if err != nil {
		return d, err
	}
	defer b.close()
	err = a.as(b.user, func() error {
		emptied := map[string]bool{}
		for _, f := range params.Files {
			if b.discard(f) {
				d.Files++
				emptied[path.Dir(f.Path)] = true
			}
		}
		b.leave()
		b.prune(emptied)
		return nil
	})
	return d, err
}

// discard removes a file if it is still what was told.
func (b *box) discard(f agentapi.Found) bool {
	dir, name := path.Split(f.Path)
	if name == "" || name == "." || name == ".." {
		return false
	}
	parent, err := b.enter(dir)
	if err != nil {
		return false
	}
	var st syscall.Stat_t
	return lstatat(parent, name, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && foundOf(f.Path, &st).Same(f) && unlinkat(parent, name, 0) == nil
}

// prune removes directories that are empty now, and those above them, the deepest first.
func (b *box) prune(emptied map[string]bool) {
	for len(emptied) > 0 {
		above := map[string]bool{}
		for dir := range emptied {
			if dir == "." || dir == "/" {
				continue
			}
			up, name := path.Split(dir)
			parent, err := b.enter(up)
			if err == nil && unlinkat(parent, name, atRemoveDir) == nil {
				above[path.Clean("./"+up)] = true
			}
			b.leave()
		}
		emptied = above
	}
}
