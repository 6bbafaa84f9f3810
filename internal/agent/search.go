package agent

import (
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// maxLooked bounds how many names one search looks at: a tree may be as large as the sandbox likes to make it.
const maxLooked = 2_000_000

// search finds regular files by their names, however deep.
func (a *Agent) search(params agentapi.ListParams) ([]agentapi.Entry, error) {
	for _, pattern := range params.Names {
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, fault.New(fault.Invalid, "%q is not a pattern of names", pattern)
		}
	}
	s := &searching{patterns: params.Names, names: loadNames(), found: []agentapi.Entry{}}
	err := a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) error {
		fd, err := open(atFDCWD, p, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		return s.dir(fd, p, 0)
	})
	return s.found, err
}

// searching is a search under way.
type searching struct {
	patterns []string
	names    *names
	looked   int
	found    []agentapi.Entry
}

// dir looks through a directory in order of name; it takes fd over.
func (s *searching) dir(fd int, p string, depth int) error {
	dir := os.NewFile(uintptr(fd), p)
	defer dir.Close()
	if depth > maxDepth || depth > 0 && onProc(fd) { // of processes nobody looks for files
		return nil
	}
	children, err := dir.ReadDir(-1)
	if err != nil && len(children) == 0 {
		return nil // not ours to read
	}
	slices.SortFunc(children, func(x, y os.DirEntry) int { return strings.Compare(x.Name(), y.Name()) })
	for _, child := range children {
		if s.looked++; s.looked > maxLooked {
			return fault.New(fault.Exhausted, "%s: more than %d names; search in a smaller directory", p, maxLooked)
		}
		if err := s.child(fd, p, child, depth); err != nil {
			return err
		}
	}
	return nil
}

func (s *searching) child(dir int, p string, child os.DirEntry, depth int) error {
	at := path.Join(p, child.Name())
	if child.IsDir() {
		sub, err := open(dir, child.Name(), syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			return nil // gone meanwhile, or not ours to read
		}
		return s.dir(sub, at, depth+1)
	}
	if !child.Type().IsRegular() || !s.matches(child.Name()) {
		return nil
	}
	if len(s.found) >= maxEntries {
		return fault.New(fault.Exhausted, "%s: more than %d files match; search for less at once", p, maxEntries)
	}
	fd, err := open(dir, child.Name(), oPath|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	if e, err := entryOf(fd, at, s.names); err == nil {
		s.found = append(s.found, e)
	}
	return nil
}

func (s *searching) matches(name string) bool {
	return slices.ContainsFunc(s.patterns, func(pattern string) bool {
		ok, _ := path.Match(pattern, name) // the patterns were read before
		return ok
	})
}

// statx is the part of struct statx up to what is asked for; the kernel fills in 256 bytes.
type statx struct {
	mask  uint32
	_     [76]byte
	btime struct {
		sec  int64
		nsec uint32
		_    int32
	}
	_ [160]byte
}

const statxBtime = 0x800

// sysStatx is the number of a call that the syscall package does not know; zero: nor do we.
var sysStatx = map[string]uintptr{"amd64": 332, "arm64": 291}[runtime.GOARCH]

// born is when a file was made; zero where its file system does not know.
func born(fd int) time.Time {
	if sysStatx == 0 {
		return time.Time{}
	}
	var st statx
	empty := [1]byte{}
	_, _, errno := syscall.Syscall6(sysStatx, uintptr(fd), uintptr(unsafe.Pointer(&empty[0])), atEmptyPath, statxBtime, uintptr(unsafe.Pointer(&st)), 0)
	if errno != 0 || st.mask&statxBtime == 0 {
		return time.Time{}
	}
	return time.Unix(st.btime.sec, int64(st.btime.nsec)).UTC()
}
