package agent

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const watchMask = syscall.IN_CREATE | syscall.IN_MODIFY | syscall.IN_DELETE | syscall.IN_MOVED_FROM | syscall.IN_MOVED_TO |
	syscall.IN_ATTRIB | syscall.IN_DELETE_SELF | syscall.IN_MOVE_SELF | syscall.IN_ONLYDIR | syscall.IN_EXCL_UNLINK

// maxWatches bounds one recursive watch; the kernel's own limit is shared by the host.
const maxWatches = 8192

// watcher is one watch: an inotify descriptor and the directories it covers.
type watcher struct {
	a         *Agent
	user      user
	rights    user
	link      *link
	recursive bool
	entries   bool
	file      *os.File
	fd        int

	mu     sync.Mutex      // held while changes are read and told
	dirs   map[int]string  // by watch descriptor
	drafts map[uint32]bool // our own temporary files on their way, by cookie: did the target exist
	seen   map[string]bool // told when their directory was first looked at: the kernel may tell of them again
	full   bool
	acting bool // with the watcher's rights
}

func (a *Agent) watch(l *link, params agentapi.WatchParams) error {
	w := &watcher{a: a, link: l, recursive: params.Recursive, entries: params.Entries,
		dirs: map[int]string{}, drafts: map[uint32]bool{}, seen: map[string]bool{}}
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return explain(err, "watch")
	}
	w.fd, w.file = fd, os.NewFile(uintptr(fd), "inotify")
	defer w.file.Close()
	if err := a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) error {
		w.user, w.rights = u, a.rights(u, params.Root)
		return w.add(p, false)
	}); err != nil {
		return err
	}
	if err := l.event(agentapi.Event{Type: agentapi.EventStarted}); err != nil {
		return nil
	}
	if w.full {
		_ = w.notice("more than the allowed number of directories: changes in some of them are not told")
	}
	done := make(chan struct{})
	if !a.spawn(func() { defer close(done); w.run() }) {
		return fault.New(fault.Unavailable, "the sandbox is ending")
	}
	w.obey()
	w.file.Close()
	l.close()
	<-done
	return nil
}

// obey does what the client asks until it leaves.
func (w *watcher) obey() {
	for {
		f, err := w.link.in.Read()
		if err != nil {
			return
		}
		var c agentapi.Control
		if f.Kind == agentapi.FrameControl && json.Unmarshal(f.Payload, &c) == nil && c.Sync != 0 {
			w.sync(c.Sync)
		}
	}
}

// sync tells what the kernel has noted until now, and then says so.
func (w *watcher) sync(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.drain(w.fd); err != syscall.EAGAIN {
		return // the client has left, or the watch is broken: run ends it
	}
	_ = w.link.event(agentapi.Event{Type: agentapi.EventSynced, Count: n})
}

// add watches a directory, and with recursive those below it. With tell, what is already in them is told as created:
// it may have been before the watch was.
func (w *watcher) add(p string, tell bool) error {
	if len(w.dirs) >= maxWatches {
		w.full = true
		return nil
	}
	dir, err := open(atFDCWD, p, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(dir), p)
	defer f.Close()
	if onProc(dir) {
		return syscall.EACCES
	}
	wd, err := syscall.InotifyAddWatch(w.fd, fdPath(dir), watchMask)
	if err == syscall.ENOSPC {
		return fault.New(fault.Exhausted, "%s: the host's limit of watches is reached", p)
	}
	if err != nil {
		return err
	}
	w.dirs[wd] = p
	if !w.recursive {
		return nil
	}
	children, _ := f.ReadDir(maxEntries)
	for _, child := range children {
		at := path.Join(p, child.Name())
		if tell && !isDraft(child.Name()) {
			w.discover(at, child)
		}
		if child.IsDir() {
			_ = w.add(at, tell) // one that may not be read, or went away, is not watched
		}
	}
	return nil
}

// discover tells of what is in a directory that was made while nobody watched it: made, and written if it holds anything.
// A client that left ends the watch by leaving.
func (w *watcher) discover(at string, child os.DirEntry) {
	if w.seen[at] {
		return
	}
	if len(w.seen) < maxEntries {
		w.seen[at] = true
	}
	_ = w.tell("create", at, child.IsDir())
	if info, err := child.Info(); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		_ = w.tell("write", at, false)
	}
}

func (w *watcher) run() {
	defer w.link.close()
	raw, err := w.file.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool { // it fails when the file is closed, which is how a watch ends
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.drain(int(fd)) != syscall.EAGAIN
	})
}

// drain tells all that is there now, and then returns EAGAIN; mu is held.
func (w *watcher) drain(fd int) error {
	for {
		b, n, err := tryChunk(fd)
		if err != nil {
			return err
		}
		err = w.decode(b[agentapi.HeaderSize : agentapi.HeaderSize+n])
		chunks.Put(b)
		if err != nil {
			return err
		}
	}
}

func (w *watcher) decode(p []byte) error {
	for len(p) >= syscall.SizeofInotifyEvent {
		wd, mask, cookie, size := int(int32(native.Uint32(p))), native.Uint32(p[4:]), native.Uint32(p[8:]), int(native.Uint32(p[12:]))
		p = p[syscall.SizeofInotifyEvent:]
		if size > len(p) {
			return io.ErrUnexpectedEOF
		}
		name := string(bytes.TrimRight(p[:size], "\x00"))
		p = p[size:]
		if err := w.change(wd, mask, cookie, name); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) change(wd int, mask, cookie uint32, name string) error {
	if mask&syscall.IN_Q_OVERFLOW != 0 {
		return w.notice("changes came faster than they could be told, and some were lost; look at the directory itself")
	}
	dir, known := w.dirs[wd]
	if mask&syscall.IN_IGNORED != 0 {
		delete(w.dirs, wd)
		return nil
	}
	if !known {
		return nil
	}
	isDir := mask&syscall.IN_ISDIR != 0
	at := dir
	if name != "" {
		at = path.Join(dir, name)
	}
	if isDraft(name) {
		if mask&syscall.IN_MOVED_FROM != 0 {
			w.drafts[cookie] = strings.HasPrefix(name, tempOld)
		}
		return nil
	}
	if w.knows(mask, at) {
		return nil
	}
	for _, op := range w.ops(mask, cookie, name, dir) {
		if err := w.tell(op, at, isDir); err != nil {
			return err
		}
	}
	if isDir && w.recursive && mask&(syscall.IN_CREATE|syscall.IN_MOVED_TO) != 0 {
		_ = w.as(func() error { return w.add(at, true) }) // as in add: what may not be read is not watched
	}
	if isDir && mask&syscall.IN_MOVED_FROM != 0 {
		w.forget(at)
	}
	return nil
}

// knows reports whether a creation was told already.
func (w *watcher) knows(mask uint32, at string) bool {
	if !w.seen[at] || mask&(syscall.IN_CREATE|syscall.IN_DELETE|syscall.IN_MOVED_FROM|syscall.IN_MOVED_TO) == 0 {
		return false
	}
	delete(w.seen, at)
	return mask&syscall.IN_CREATE != 0
}

// ops names what a change is to those who watch.
func (w *watcher) ops(mask, cookie uint32, name, dir string) []string {
	switch {
	case mask&syscall.IN_MOVED_TO != 0:
		existed, ours := w.drafts[cookie]
		delete(w.drafts, cookie)
		switch {
		case ours && existed:
			return []string{"write"}
		case ours:
			return []string{"create", "write"}
		}
		return []string{"create"}
	case mask&syscall.IN_CREATE != 0:
		return []string{"create"}
	case mask&syscall.IN_MODIFY != 0:
		return []string{"write"}
	case mask&syscall.IN_DELETE != 0, mask&syscall.IN_DELETE_SELF != 0 && w.isTop(dir):
		return []string{"remove"}
	case mask&syscall.IN_MOVED_FROM != 0, mask&syscall.IN_MOVE_SELF != 0 && w.isTop(dir):
		return []string{"rename"}
	case mask&syscall.IN_ATTRIB != 0 && (name != "" || w.isTop(dir)):
		return []string{"chmod"}
	}
	return nil
}

// isTop reports whether no watched directory holds dir: its own end is then told by nobody else.
func (w *watcher) isTop(dir string) bool {
	for _, other := range w.dirs {
		if other == path.Dir(dir) {
			return false
		}
	}
	return true
}

// forget stops watching what was moved away: its old name would be told otherwise, and what takes that name would not.
func (w *watcher) forget(p string) {
	moved := func(at string) bool { return at == p || strings.HasPrefix(at, p+"/") }
	maps.DeleteFunc(w.seen, func(at string, _ bool) bool { return moved(at) })
	var gone []int
	for wd, dir := range w.dirs {
		if moved(dir) {
			gone = append(gone, wd)
		}
	}
	slices.Sort(gone)
	for _, wd := range gone {
		_, _ = syscall.InotifyRmWatch(w.fd, uint32(wd))
		delete(w.dirs, wd)
	}
}

func (w *watcher) tell(op, p string, isDir bool) error {
	e := &agentapi.FileEvent{Op: op, Path: p, IsDir: isDir}
	if w.entries && (op == "create" || op == "write" || op == "chmod") {
		e.Entry = w.entry(p)
	}
	return w.link.event(agentapi.Event{Type: agentapi.EventFile, File: e})
}

// as does f with the watcher's rights; within f it may be called again, which would otherwise end them too early.
func (w *watcher) as(f func() error) error {
	if w.acting {
		return f()
	}
	w.acting = true
	defer func() { w.acting = false }()
	return w.a.as(w.rights, f)
}

// entry describes what changed, if it is still there.
func (w *watcher) entry(p string) (found *agentapi.Entry) {
	_ = w.as(func() error {
		e, err := entryAt(p, loadNames())
		if err == nil {
			found = &e
		}
		return err
	})
	return found
}

func (w *watcher) notice(message string) error {
	return w.link.event(agentapi.Event{Type: agentapi.EventNotice, Message: message})
}

func isDraft(name string) bool {
	return strings.HasPrefix(name, tempNew) || strings.HasPrefix(name, tempOld)
}
