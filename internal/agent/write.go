package agent

import (
	"io"
	"path"
	"strings"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// draft is a file being written: beside its final name until it is whole, or in place where that cannot be.
type draft struct {
	a      *Agent
	user   user
	rights user // whose rights count
	path   string
	dir    int
	name   string
	linked bool   // the path named a link, and dir and name are where it leads
	temp   string // empty: in place
	fd     int
	mode   uint32 // to set at the end; zero: as it is
	params agentapi.WriteParams
}

func (a *Agent) write(l *link, params agentapi.WriteParams) error {
	for name := range params.Xattrs {
		if !strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "user.overlay.") {
			return fault.New(fault.Invalid, "attribute %q: only names that begin with user. can be set", name)
		}
	}
	var d *draft
	err := a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) (err error) {
		if err := makeDirs(path.Dir(p), 0o755, a.owner(u, params.Root)); err != nil {
			return err
		}
		d, err = newDraft(a, u, p, params)
		return err
	})
	if err != nil {
		return err
	}
	defer d.close()
	if err := d.receive(l); err != nil {
		return explain(err, d.path)
	}
	e, err := d.publish()
	if err != nil {
		return explain(err, d.path)
	}
	return l.answer(e)
}

// newDraft opens the file to write, as whoever this thread is.
func newDraft(a *Agent, u user, p string, params agentapi.WriteParams) (*draft, error) {
	d := &draft{a: a, user: u, rights: a.rights(u, params.Root), path: p, fd: -1, dir: -1, params: params, mode: params.Mode & 0o7777}
	err := d.locate()
	if err == nil {
		err = d.open()
	}
	if err != nil {
		d.release() // there is no temporary file yet
		return nil, err
	}
	return d, nil
}

// locate finds the directory and the name to write to; a symbolic link is followed, as by any program that writes.
func (d *draft) locate() error {
	p := d.path
	for range 40 {
		dir, name, err := openParent(p)
		if err != nil {
			return err
		}
		to, err := readlinkat(dir, name)
		if err != nil {
			d.dir, d.name = dir, name
			return nil
		}
		syscall.Close(dir)
		d.linked = true
		if !strings.HasPrefix(to, "/") {
			to = path.Dir(p) + "/" + to
		}
		p = to // not cleaned: ".." after a link means the link's own parent
		if strings.HasSuffix(p, "/..") || strings.HasSuffix(p, "/.") || strings.HasSuffix(p, "/") {
			return syscall.EISDIR
		}
	}
	return syscall.ELOOP
}

func (d *draft) open() error {
	flags := syscall.O_WRONLY | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	if d.params.InPlace {
		return d.overwrite(flags)
	}
	if d.params.Append {
		flags |= syscall.O_APPEND | syscall.O_CREAT
		mode := d.mode
		if mode == 0 {
			mode = 0o644
		}
		return d.inPlace(flags, mode)
	}
	old, err := open(d.dir, d.name, flags, 0)
	if err == syscall.ENOENT {
		if d.mode == 0 {
			d.mode = 0o644
		}
		return d.beside(false, nil)
	}
	if err != nil && err != syscall.ETXTBSY { // a running program is replaced, not written into
		return err
	}
	var st syscall.Stat_t
	if err == nil {
		defer syscall.Close(old)
		if err := requireRegular(old, d.path); err != nil {
			return err
		}
		err = syscall.Fstat(old, &st)
	} else {
		err = syscall.Stat(fdPath(d.dir)+"/"+d.name, &st)
	}
	if err != nil {
		return err
	}
	if d.mode == 0 {
		d.mode = st.Mode & 0o7777
	}
	if int(st.Uid) != d.user.uid && d.user.uid != 0 && !d.params.Root {
		return d.inPlace(flags|syscall.O_TRUNC, 0) // a new file could not be given to its owner
	}
	return d.beside(true, &st)
}

// beside writes a temporary file; where the directory does not allow one, the file itself is written.
func (d *draft) beside(exists bool, st *syscall.Stat_t) error {
	d.temp = tempName(exists)
	fresh := func() (err error) {
		d.fd, err = open(d.dir, d.temp, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_NOFOLLOW, 0o600)
		return err
	}
	owner := d.a.owner(d.user, d.params.Root)
	if !exists && owner != nil && d.a.as(*owner, fresh) == nil {
		return nil
	}
	if err := fresh(); err != nil {
		d.temp = ""
		if (err == syscall.EACCES || err == syscall.EROFS) && exists {
			return d.inPlace(syscall.O_WRONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_TRUNC, 0)
		}
		return err
	}
	if exists {
		if int(st.Uid) != d.user.uid || int(st.Gid) != d.user.gid {
			_ = syscall.Fchown(d.fd, int(st.Uid), int(st.Gid)) // only root may give away: for others it becomes the writer's
		}
		return nil
	}
	if owner != nil && !d.linked {
		return syscall.Fchown(d.fd, owner.uid, owner.gid)
	}
	return nil
}

// overwrite makes the file if there is none, gives it to the user, and only then empties it: the order that watchers see.
func (d *draft) overwrite(flags int) error {
	made, err := d.create(flags)
	if err != nil {
		return err
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(d.fd, &st); err != nil {
		return err
	}
	if d.givable(made, int(st.Uid)) {
		if err := syscall.Fchown(d.fd, d.user.uid, d.user.gid); err != nil {
			return err
		}
	}
	if d.params.Append {
		_, err := syscall.Seek(d.fd, 0, io.SeekEnd)
		return err
	}
	if st.Size == 0 {
		return nil // emptying what is empty would be told as a write
	}
	return syscall.Ftruncate(d.fd, 0)
}

// givable says whether the file may be made the user's. What is somebody else's stays theirs: else code in the sandbox
// would lay a link to root's file where its owner writes next, and get that file. What root writes may become root's.
func (d *draft) givable(made bool, uid int) bool {
	return uid == d.user.uid || d.user.uid == 0 || made && !d.linked
}

// create makes the file, as the user where the user may, so that it is never seen as anybody else's; or it opens the one
// that is there.
func (d *draft) create(flags int) (made bool, err error) {
	fresh := func() error { return d.inPlace(flags|syscall.O_CREAT|syscall.O_EXCL, 0o644) }
	if d.a.owner(d.user, d.params.Root) != nil && d.a.as(d.user, fresh) == nil {
		return true, nil
	}
	for range 10 { // somebody may make and remove it all the time
		if err = fresh(); err != syscall.EEXIST {
			return err == nil, err
		}
		if err = d.inPlace(flags, 0); err != syscall.ENOENT {
			return false, err
		}
	}
	return false, err
}

func (d *draft) inPlace(flags int, mode uint32) error {
	fd, err := open(d.dir, d.name, flags, mode)
	if err != nil {
		return err
	}
	d.fd = fd
	if d.params.Mode == 0 {
		d.mode = 0
	}
	return requireRegular(fd, d.path)
}

// receive copies what the client sends; without its EOF nothing is published.
func (d *draft) receive(l *link) error {
	for {
		f, err := l.in.Read()
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "%s: the client left before the file was whole", d.path)
		}
		switch f.Kind {
		case agentapi.FrameData:
			if err := writeAll(d.fd, f.Payload); err != nil {
				return err
			}
		case agentapi.FrameEOF:
			return nil
		default:
			return fault.New(fault.Invalid, "unexpected frame among file data")
		}
	}
}

// publish puts the file under its name.
func (d *draft) publish() (e agentapi.Entry, err error) {
	err = d.a.as(d.rights, func() error {
		if err := d.dropFamily(); err != nil {
			return err
		}
		for name, value := range d.params.Xattrs {
			if err := syscall.Setxattr(fdPath(d.fd), name, []byte(value), 0); err != nil {
				return explain(err, "attribute "+name)
			}
		}
		if d.mode != 0 {
			if err := syscall.Fchmod(d.fd, d.mode); err != nil {
				return err
			}
		}
		if d.temp != "" {
			if err := syscall.Renameat(d.dir, d.temp, d.dir, d.name); err != nil {
				return err
			}
			d.temp = ""
		}
		e, err = entryOf(d.fd, d.path, loadNames())
		return err
	})
	return e, err
}

// dropFamily removes the attributes that the new ones replace.
func (d *draft) dropFamily() error {
	if d.params.Family == "" {
		return nil
	}
	for name := range userXattrs(d.fd) {
		if _, stays := d.params.Xattrs[name]; stays || !strings.HasPrefix(name, d.params.Family) {
			continue
		}
		if err := syscall.Removexattr(fdPath(d.fd), name); err != nil {
			return explain(err, "attribute "+name)
		}
	}
	return nil
}

// close lets go of everything, and of the temporary file if it was not published.
func (d *draft) close() {
	if d.temp != "" {
		_ = d.a.as(d.rights, func() error { return unlinkat(d.dir, d.temp, 0) }) // a draft is hidden, and its name says what it is
	}
	d.release()
}

func (d *draft) release() {
	for _, fd := range []int{d.fd, d.dir} {
		if fd >= 0 {
			syscall.Close(fd)
		}
	}
}
