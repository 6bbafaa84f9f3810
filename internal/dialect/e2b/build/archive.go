package build

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/covehq/cove/internal/fault"
)

// What an archive may hold. Its bytes end up on the disk of a sandbox, which has a limit of its own.
const (
	maxEntries  = 200_000
	maxUnpacked = 16 << 30
	maxNames    = 64 << 20 // bytes of all names and targets together, which are held in memory
	maxPath     = 4096
)

// packed is one entry of an archive that may be unpacked.
type packed struct {
	path string // clean and relative; "." is the archive's own root
	kind byte   // tar.TypeReg, TypeDir, TypeSymlink or TypeLink
	mode uint32 // permission bits
	link string // of a symlink: where it points; of a link: path of the entry that it is another name of
}

func broken(err error) error {
	return fault.Wrap(fault.Invalid, err, "the uploaded files are not a whole tar archive")
}

// walkArchive yields the entries of a tar archive, which may be compressed by gzip. It refuses what would leave the directory
// that it is unpacked into, and what is neither a file nor a directory nor a link.
func walkArchive(r io.Reader, each func(packed, io.Reader) error) error {
	buffered := bufio.NewReaderSize(r, 64<<10)
	r = buffered
	if magic, err := buffered.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(buffered)
		if err != nil {
			return broken(err)
		}
		defer z.Close()
		r = z
	}
	left := &bounded{r: r, left: maxUnpacked}
	t := tar.NewReader(left)
	names := 0
	for n := 0; ; n++ {
		h, err := t.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, errUnpacked):
			return err
		case err != nil:
			return broken(err)
		case n >= maxEntries:
			return fault.New(fault.Invalid, "the uploaded files are more than %d", maxEntries)
		case h.Typeflag == tar.TypeXGlobalHeader:
			continue
		}
		p, err := readHeader(h)
		if err != nil {
			return err
		}
		if names += len(p.path) + len(p.link); names > maxNames {
			return fault.New(fault.Invalid, "the names of the uploaded files have more than %d bytes", maxNames)
		}
		if err := each(p, &content{t}); err != nil {
			return err
		}
	}
}

// content tells an archive that breaks off from a sandbox that does.
type content struct{ t *tar.Reader }

func (c *content) Read(p []byte) (int, error) {
	n, err := c.t.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, errUnpacked) {
		err = broken(err)
	}
	return n, err
}

func readHeader(h *tar.Header) (packed, error) {
	p := packed{kind: h.Typeflag, mode: uint32(h.Mode) & 0o777, link: h.Linkname}
	var err error
	if p.path, err = localPath(h.Name); err != nil {
		return p, err
	}
	switch p.kind {
	case tar.TypeReg, tar.TypeDir:
	case tar.TypeSymlink:
		// Where it points is the sandbox's own affair: it is never followed but in there.
		if p.link == "" || len(p.link) > maxPath || strings.ContainsRune(p.link, 0) {
			return p, fault.New(fault.Invalid, "the symbolic link %.200q points nowhere", h.Name)
		}
	case tar.TypeLink:
		if p.link, err = localPath(h.Linkname); err != nil {
			return p, err
		}
	default:
		return p, fault.New(fault.Invalid, "%.200q is neither a file nor a directory nor a link", h.Name)
	}
	return p, nil
}

// localPath cleans a path and refuses one that leads out.
func localPath(name string) (string, error) {
	clean := path.Clean(strings.TrimRight(name, "/"))
	if name == "" || len(name) > maxPath || strings.ContainsRune(name, 0) || strings.HasPrefix(name, "/") ||
		clean == ".." || strings.HasPrefix(clean, "../") {
		return "", fault.New(fault.Invalid, "the uploaded files hold the path %.200q, which leads out of them", name)
	}
	return clean, nil
}

var errUnpacked = fault.New(fault.Invalid, "the uploaded files are too large when unpacked")

// bounded ends a stream that is longer than allowed: a few bytes can stand for very many.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errUnpacked
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}
