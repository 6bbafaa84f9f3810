package agent

import (
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

const (
	maxXattrs    = 64
	maxXattrSize = 4 << 10
)

// entryAt describes what a path names, without following a last link.
func entryAt(p string, n *names) (agentapi.Entry, error) {
	fd, err := open(atFDCWD, p, oPath|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return agentapi.Entry{}, err
	}
	defer syscall.Close(fd)
	e, err := entryOf(fd, p, n)
	if err == nil && e.Type == agentapi.EntrySymlink {
		e.Link = linked(atFDCWD, p)
	}
	return e, err
}

// linked follows a symbolic link; nil when it leads nowhere, or where the caller may not look.
func linked(dir int, name string) *agentapi.Linked {
	fd, err := open(dir, name, oPath, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil {
		return nil
	}
	return &agentapi.Linked{Path: procPath(fd), Type: entryType(st.Mode), Mode: st.Mode & 0o7777}
}

func entryType(mode uint32) agentapi.EntryType {
	switch mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return agentapi.EntryFile
	case syscall.S_IFDIR:
		return agentapi.EntryDir
	case syscall.S_IFLNK:
		return agentapi.EntrySymlink
	default:
		return agentapi.EntryOther
	}
}

func special(mode uint32) agentapi.Special {
	switch mode & syscall.S_IFMT {
	case syscall.S_IFIFO:
		return agentapi.SpecialPipe
	case syscall.S_IFSOCK:
		return agentapi.SpecialSocket
	case syscall.S_IFCHR:
		return agentapi.SpecialChar
	case syscall.S_IFBLK:
		return agentapi.SpecialBlock
	default:
		return ""
	}
}

func entryOf(fd int, p string, n *names) (agentapi.Entry, error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return agentapi.Entry{}, err
	}
	e := agentapi.Entry{
		Name: path.Base(p), Path: p, Type: entryType(st.Mode), Size: st.Size, Mode: st.Mode & 0o7777,
		UID: int(st.Uid), GID: int(st.Gid), User: n.users[int(st.Uid)], Group: n.groups[int(st.Gid)],
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec).UTC(), Born: born(fd),
	}
	switch e.Type {
	case agentapi.EntryFile, agentapi.EntryDir:
		e.Xattrs = userXattrs(fd)
	case agentapi.EntrySymlink:
		e.Target, _ = readlinkat(fd, "")
	case agentapi.EntryOther:
		e.Special = special(st.Mode)
	}
	return e, nil
}

func userXattrs(fd int) map[string]string {
	p := fdPath(fd)
	size, err := syscall.Listxattr(p, nil)
	if err != nil || size <= 0 || size > 64<<10 {
		return nil
	}
	buf := make([]byte, size)
	if size, err = syscall.Listxattr(p, buf); err != nil {
		return nil
	}
	var found map[string]string
	value := make([]byte, maxXattrSize)
	for name := range strings.SplitSeq(string(buf[:size]), "\x00") {
		if !strings.HasPrefix(name, "user.") || len(found) >= maxXattrs || strings.HasPrefix(name, "user.overlay.") {
			continue
		}
		n, err := syscall.Getxattr(p, name, value)
		if err != nil {
			continue
		}
		if found == nil {
			found = map[string]string{}
		}
		found[name] = string(value[:n])
	}
	return found
}
