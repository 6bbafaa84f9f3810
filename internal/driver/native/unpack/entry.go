package unpack

import (
	"archive/tar"
	"errors"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Names by which a layer says what of the layers below it is gone.
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	metaPrefix     = ".wh..wh." // what a file system of old kept for itself
)

// Overlays of sandboxes are mounted with userxattr, so the mark is one of the user's.
const (
	opaqueMark    = "user.overlay.opaque"
	overlayMarks  = "user.overlay."
	userMarks     = "user."
	xattrRecord   = "SCHILY.xattr."
	maxXattrName  = 255
	maxXattrValue = 64 << 10
)

// entry puts one entry of the tar into the tree.
func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	at, err := place(h, h.Name)
	if err != nil {
		return err
	}
	if err := u.count(); err != nil {
		return err
	}
	dir, base := split(at)
	if strings.HasPrefix(dir, metaPrefix) || strings.Contains(dir, "/"+metaPrefix) {
		return nil
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return u.whiteout(h, dir, base)
	}
	if at == "" && h.Typeflag != tar.TypeDir {
		return refused(h, "would replace the root directory")
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeRegA, tar.TypeCont, tar.TypeGNUSparse: //nolint:staticcheck // old archives have it
		return u.file(h, dir, base, content)
	case tar.TypeDir:
		return u.directory(h, at)
	case tar.TypeSymlink:
		return u.symlink(h, dir, base)
	case tar.TypeLink:
		return u.hardlink(h, dir, base)
	case tar.TypeFifo:
		return u.fifo(h, dir, base)
	case tar.TypeChar, tar.TypeBlock:
		return u.device(h, at)
	}
	return refused(h, "is of a kind (%q) that no file has", h.Typeflag)
}

func (u *unpacker) file(h *tar.Header, dir, base string, content io.Reader) error {
	if err := u.charge(h.Size); err != nil {
		return err
	}
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	var fd int
	err = u.anew(parent, base, func() (err error) {
		fd, err = retry(func() (int, error) {
			return unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, permissions(h)&0o777)
		})
		return err
	})
	if err != nil {
		return err
	}
	err = u.fill(fd, content, h.Size)
	if err == nil {
		err = u.dress(fd, h, true)
	}
	if err == nil {
		setTime(fd, timespec(h.ModTime))
	}
	return errors.Join(err, unix.Close(fd))
}

// fill writes a file's content.
func (u *unpacker) fill(fd int, content io.Reader, size int64) error {
	for size > 0 {
		n, err := io.ReadFull(content, u.buffer[:min(size, copySize)])
		if err != nil {
			return broken{err}
		}
		size -= int64(n)
		if err := u.space(int64(n)); err != nil {
			return err
		}
		for rest := u.buffer[:n]; len(rest) > 0; {
			n, err := retry(func() (int, error) { return unix.Write(fd, rest) })
			if err != nil {
				return err
			}
			rest = rest[n:]
		}
	}
	return nil
}

// dress gives an open file or directory its owner, mode and attributes. A fresh one is root's and has its mode, but for setuid
// and the like; those come after the owner, since a change of owner takes them away.
func (u *unpacker) dress(fd int, h *tar.Header, fresh bool) error {
	if uid, gid := u.owner(h); uid != 0 || gid != 0 || !fresh {
		if err := unix.Fchown(fd, uid, gid); err != nil {
			return err
		}
	}
	if mode := permissions(h); mode > 0o777 || !fresh {
		if err := unix.Fchmod(fd, mode); err != nil {
			return err
		}
	}
	for record, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(record, xattrRecord)
		if !ok || !strings.HasPrefix(name, userMarks) || strings.HasPrefix(name, overlayMarks) {
			continue // capabilities mean nothing where nothing gains any, and marks of overlays are ours to set
		}
		if len(name) > maxXattrName || len(value) > maxXattrValue {
			return refused(h, "has an extended attribute that is too large")
		}
		// A file system that has none, or too little room for this one, keeps the file without.
		_ = unix.Fsetxattr(fd, name, []byte(value), 0)
	}
	return nil
}

// Ids that a sandbox has are below maxID. Files of others belong to nobody there, as they would without a mapping.
const (
	maxID  = 1 << 16
	nobody = 65534
)

func (u *unpacker) owner(h *tar.Header) (uid, gid int) {
	uid, gid = h.Uid, h.Gid
	strange := func(id int) bool { return id < 0 || id >= maxID }
	if !strange(uid) && !strange(gid) {
		return uid, gid
	}
	u.result.Nobodys++
	if strange(uid) {
		uid = nobody
	}
	if strange(gid) {
		gid = nobody
	}
	return uid, gid
}

func (u *unpacker) directory(h *tar.Header, at string) error {
	if at != "" {
		dir, base := split(at)
		parent, err := u.parent(dir)
		if err != nil {
			return err
		}
		if err := u.makeDir(parent, base); err != nil {
			return err
		}
	}
	fd, err := u.tree.open(at, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	u.times[at] = timespec(h.ModTime)
	return u.dress(fd, h, false) // it may have been there, as somebody else's
}

// makeDir leaves a directory there that is one already, and hides what lies below in place of a whiteout.
func (u *unpacker) makeDir(parent int, base string) error {
	err := u.mkdir(parent, base)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	kind, err := kindOf(parent, base)
	if err != nil || kind == unix.S_IFDIR {
		return err
	}
	if err := u.tree.remove(parent, base); err != nil {
		return err
	}
	if err := u.mkdir(parent, base); err != nil || kind != unix.S_IFCHR {
		return err
	}
	return setOpaque(parent, base)
}

// mkdir bounds how deep a tree becomes: by links, short names lead ever further down.
func (u *unpacker) mkdir(parent int, base string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(parent, "", &st, unix.AT_EMPTY_PATH); err != nil {
		return err
	}
	far := u.far[st.Ino] + 1 + len(base)
	if far > maxFar {
		return unix.ENAMETOOLONG
	}
	if err := unix.Mkdirat(parent, base, 0o755); err != nil {
		return err
	}
	if err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	u.far[st.Ino] = far
	return nil
}

// parent is the directory that something comes to lie in. Directories that no entry names are root's.
func (u *unpacker) parent(at string) (int, error) {
	fd, err := u.tree.dir(at)
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		return fd, err
	}
	dir, base := split(at)
	parent, perr := u.parent(dir)
	if perr != nil {
		return -1, perr
	}
	if errors.Is(err, unix.ENOTDIR) {
		if kind, kerr := kindOf(parent, base); kerr != nil || kind != unix.S_IFCHR {
			return -1, err // a file, and no whiteout
		}
	}
	if err := u.count(); err != nil {
		return -1, err
	}
	if err := u.makeDir(parent, base); err != nil {
		return -1, err
	}
	return u.tree.dir(at)
}

// anew does what makes a new file; one that is there gives way, since the last of a name counts.
func (u *unpacker) anew(parent int, base string, make func() error) error {
	err := make()
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if err := u.tree.remove(parent, base); err != nil {
		return err
	}
	return make()
}

func (u *unpacker) symlink(h *tar.Header, dir, base string) error {
	if h.Linkname == "" || len(h.Linkname) > maxPath || strings.IndexByte(h.Linkname, 0) >= 0 {
		return refused(h, "is a link to no name")
	}
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	if err := u.anew(parent, base, func() error { return unix.Symlinkat(h.Linkname, parent, base) }); err != nil {
		return err
	}
	return u.dressByName(h, parent, base)
}

// dressByName is dress for what cannot be opened: links and fifos.
func (u *unpacker) dressByName(h *tar.Header, parent int, base string) error {
	if uid, gid := u.owner(h); uid != 0 || gid != 0 {
		if err := unix.Fchownat(parent, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	mtime := timespec(h.ModTime)
	return unix.UtimesNanoAt(parent, base, []unix.Timespec{mtime, mtime}, unix.AT_SYMLINK_NOFOLLOW)
}

// hardlink makes another name of a file of this layer. Archives name only those: what a builder links to it has copied up.
func (u *unpacker) hardlink(h *tar.Header, dir, base string) error {
	target, err := place(h, h.Linkname)
	if err != nil || target == "" {
		return refused(h, "is a hard link to %.200q, a place outside of the layer", h.Linkname)
	}
	toDir, toBase := split(target)
	if target == strings.TrimPrefix(dir+"/"+base, "/") {
		return nil // to itself
	}
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	return u.anew(parent, base, func() error {
		to, err := u.tree.dir(toDir) // each time: it may have gone with what gave way
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return refused(h, "is a hard link to %.200q, which is not in the layer", h.Linkname)
		}
		if err != nil {
			return err
		}
		if kind, err := kindOf(to, toBase); err != nil || kind == unix.S_IFDIR || kind == unix.S_IFCHR {
			return refused(h, "is a hard link to %.200q, which is not a file of the layer", h.Linkname)
		}
		return unix.Linkat(to, toBase, parent, base, 0)
	})
}

func (u *unpacker) fifo(h *tar.Header, dir, base string) error {
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	if err := u.anew(parent, base, func() error { return unix.Mknodat(parent, base, unix.S_IFIFO|permissions(h), 0) }); err != nil {
		return err
	}
	return u.dressByName(h, parent, base)
}

// device leaves out the devices that old base images have below /dev, where each sandbox gets its
// own, and refuses those elsewhere.
func (u *unpacker) device(h *tar.Header, at string) error {
	if strings.HasPrefix(at, "dev/") {
		u.result.Skipped++
		return nil
	}
	return refused(h, "is a device, which a sandbox cannot have")
}

// whiteout hides files of lower layers. What this layer itself has of that name stays: a directory then hides the one below.
func (u *unpacker) whiteout(h *tar.Header, dir, base string) error {
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	switch {
	case base == opaqueName:
		parent, err := u.parent(dir)
		if err != nil {
			return err
		}
		return unix.Fsetxattr(parent, opaqueMark, []byte("y"), 0)
	case strings.HasPrefix(base, metaPrefix):
		return nil
	case hidden == "" || hidden == "." || hidden == "..":
		return refused(h, "hides a place outside of the layer")
	}
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	err = unix.Mknodat(parent, hidden, unix.S_IFCHR, 0)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if kind, err := kindOf(parent, hidden); err != nil || kind != unix.S_IFDIR {
		return err
	}
	return setOpaque(parent, hidden)
}

func permissions(h *tar.Header) uint32 { return uint32(h.Mode) & 0o7777 }

func timespec(t time.Time) unix.Timespec {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return unix.Timespec{}
	}
	return ts
}
