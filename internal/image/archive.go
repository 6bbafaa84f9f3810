package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"github.com/covehq/cove/internal/fault"
)

// What an archive of images may have at most; a root file system is one layer and has other bounds.
const (
	maxMembers = 10_000
	maxEntries = 5_000_000
	maxImages  = 64
	maxLinks   = 4 // of a member that is a link to a link
	maxMember  = 1024
)

// archive is a tar in a file of ours, without compression.
type archive struct {
	file    *os.File
	size    int64
	diff    string            // digest of the whole file
	members map[string]member // by name; nil: too many for an archive of images
}

// member is a file of an archive, or a link to another.
type member struct {
	at, size int64
	link     string
}

// form is what kind of archive somebody has given us.
type form string

// The forms.
const (
	formDocker form = "docker" // of docker save
	formOCI    form = "oci"    // an OCI image layout
	formRootFS form = "rootfs" // a file system
)

var errNoTar = fault.New(fault.Invalid, "this is not an archive of images: a tar of docker save, of an OCI image layout or of a root file system is expected, plain or compressed with gzip or zstd")

// strangers are beginnings of files that are often taken for what is expected.
var strangers = map[string]string{
	"\xfd7zXZ\x00": "xz", "BZh": "bzip2", "PK\x03\x04": "zip", "7z\xbc\xaf": "7z", "hsqs": "SquashFS",
}

// copyPlain writes an archive to a file, without compression, and returns its length and digest.
func copyPlain(to io.Writer, from io.Reader, most int64, tell func(int64)) (int64, string, error) {
	head := make([]byte, 8)
	n, err := io.ReadFull(from, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return 0, "", err
	}
	head = head[:n]
	if n == 0 {
		return 0, "", fault.New(fault.Invalid, "the archive is empty")
	}
	for magic, called := range strangers {
		if strings.HasPrefix(string(head), magic) {
			return 0, "", fault.New(fault.Invalid, "this archive is %s; give it as tar, plain or compressed with gzip or zstd", called)
		}
	}
	plain, end, err := decompress(io.MultiReader(bytes.NewReader(head), from))
	if err != nil {
		return 0, "", errNoTar
	}
	defer end()
	sum := sha256.New()
	size, err := io.Copy(io.MultiWriter(&fileWriter{to, tell, 0}, sum), io.LimitReader(plain, most+1))
	return size, "sha256:" + hex.EncodeToString(sum.Sum(nil)), err
}

// fileWriter tells failures of our disk from those of whoever sends, and how far it is.
type fileWriter struct {
	to   io.Writer
	tell func(int64)
	n    int64
}

func (w *fileWriter) Write(p []byte) (int, error) {
	n, err := w.to.Write(p)
	w.n += int64(n)
	w.tell(w.n)
	if err != nil {
		return n, errors.Join(errFile, err)
	}
	return n, nil
}

// index reads the headers of an archive.
func (a *archive) index(ctx context.Context) error {
	if _, err := a.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	a.members = map[string]member{}
	// tar.Reader takes whole blocks and nothing beyond, and seeks where it can: where the file stands after a header is
	// where the member's bytes begin.
	r := tar.NewReader(a.file)
	for n := 0; ; n++ {
		h, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, tar.ErrInsecurePath): // the driver, which unpacks, refuses or confines those
		case err != nil:
			return fault.Wrap(fault.Invalid, err, "the archive is damaged or cut off")
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if n >= maxEntries {
			return fault.New(fault.Invalid, "the archive has more than %d files", maxEntries)
		}
		at, err := a.file.Seek(0, io.SeekCurrent)
		if err != nil {
			return err
		}
		a.note(h, at)
	}
}

// note keeps where a member is that could be one of an archive of images.
func (a *archive) note(h *tar.Header, at int64) {
	if a.members == nil || len(h.Name) > maxMember || len(h.Linkname) > maxMember || isSparse(h) {
		return
	}
	name := path.Clean("/" + h.Name)[1:]
	switch h.Typeflag {
	case tar.TypeReg:
		a.members[name] = member{at: at, size: h.Size}
	case tar.TypeSymlink:
		a.members[name] = member{link: path.Join("/", path.Dir(name), h.Linkname)[1:]}
	case tar.TypeLink:
		a.members[name] = member{link: path.Clean("/" + h.Linkname)[1:]}
	default:
		return
	}
	if len(a.members) > maxMembers {
		a.members = nil // of a file system
	}
}

// isSparse reports whether a member's bytes are not there as they are.
func isSparse(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return h.Typeflag == tar.TypeGNUSparse
}

// open finds a member; links lead within the archive only.
func (a *archive) open(name string) (*io.SectionReader, bool) {
	name = path.Clean("/" + name)[1:]
	for range maxLinks {
		m, ok := a.members[name]
		switch {
		case !ok:
			return nil, false
		case m.link == "":
			return io.NewSectionReader(a.file, m.at, m.size), true
		}
		name = m.link
	}
	return nil, false
}

// read is a member that is read whole.
func (a *archive) read(name string, most int64) ([]byte, bool) {
	r, ok := a.open(name)
	if !ok || r.Size() > most {
		return nil, false
	}
	raw := make([]byte, r.Size())
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, false
	}
	return raw, true
}

// saved is one image in the list that docker save writes.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// form tells by its content what an archive is.
func (a *archive) form() (form, []saved) {
	if raw, ok := a.read("manifest.json", maxManifest); ok {
		var list []saved
		if json.Unmarshal(raw, &list) == nil && len(list) > 0 && list[0].Config != "" {
			return formDocker, list
		}
	}
	_, layout := a.open("oci-layout")
	_, index := a.open("index.json")
	if layout && index {
		return formOCI, nil
	}
	return formRootFS, nil
}
