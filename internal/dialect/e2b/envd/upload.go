package envd

import (
	"compress/gzip"
	"context"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// written is a file of an upload, as the answer tells it.
type written struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func (h *Handler) upload(w http.ResponseWriter, r *http.Request) {
	files, err := h.receive(r)
	if err != nil {
		h.refuseFault(r.Context(), w, err)
		return
	}
	respond(w, http.StatusOK, files)
}

// receive writes the files of an upload, one after the other as they come.
func (h *Handler) receive(r *http.Request) ([]written, error) {
	p, at, err := h.file(r, target.OpWrite)
	if err != nil {
		return nil, err
	}
	xattrs, err := metadata(r.Header)
	if err != nil {
		return nil, err
	}
	body, err := decoded(r)
	if err != nil {
		return nil, err
	}
	up := &uploading{ctx: r.Context(), place: p, xattrs: xattrs, files: []written{}, taken: map[string]bool{}}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if r.URL.Query().Get("path") != "" {
		up.at = at
	}
	switch {
	case err == nil && kind == "application/octet-stream":
		if up.at == "" {
			return nil, fault.New(fault.Invalid, "an upload of application/octet-stream needs the query parameter path")
		}
		err = up.write(at, body)
	case err == nil && kind == "multipart/form-data" && params["boundary"] != "":
		err = up.parts(multipart.NewReader(body, params["boundary"]))
	default:
		err = fault.New(fault.Invalid, "an upload is multipart/form-data or application/octet-stream, not %.64q", r.Header.Get("Content-Type"))
	}
	return up.files, err
}

// decoded is a request's body without its content encoding.
func decoded(r *http.Request) (io.Reader, error) {
	switch coding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); coding {
	case "", "identity":
		return r.Body, nil
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "the body is not gzip: %v", err)
		}
		return z, nil
	default:
		return nil, fault.New(fault.Invalid, "unsupported Content-Encoding %.64q: use gzip or none", coding)
	}
}

// uploading is an upload under way.
type uploading struct {
	ctx    context.Context // of the request that it is; it lives no longer
	place  *place
	at     string // where the request says that its file goes; empty: each part says it
	xattrs map[string]string
	files  []written
	taken  map[string]bool // paths of files
}

// maxParts bounds an upload of many files, whatever they are called.
const maxParts = 10_000

// parts writes the file of each part that is called "file".
func (u *uploading) parts(in *multipart.Reader) error {
	for n := 0; ; n++ {
		part, err := in.NextRawPart()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "error reading multipart form: %v", err)
		}
		if n >= maxParts {
			return fault.New(fault.Invalid, "an upload has %d parts at most", maxParts)
		}
		if err := u.part(part); err != nil {
			return err
		}
	}
}

func (u *uploading) part(part *multipart.Part) error {
	name, file, err := disposition(part.Header.Get("Content-Disposition"))
	if err != nil {
		return err
	}
	if name != "file" {
		return nil
	}
	at := u.at
	if at == "" {
		if file == "" {
			return fault.New(fault.Invalid, "a part has no filename, and the request no path")
		}
		if at, err = u.place.resolve(u.ctx, file); err != nil {
			return err
		}
	}
	if u.taken[at] {
		return fault.New(fault.Invalid, "you cannot upload multiple files to the same path '%s' in one upload request, only the first specified file was uploaded", at)
	}
	return u.write(at, part)
}

// disposition reads a part's Content-Disposition by hand: a file's name is a whole path here, which multipart.Part cuts off.
func disposition(header string) (name, file string, err error) {
	kind, params, err := mime.ParseMediaType(header)
	if err != nil || kind != "form-data" {
		return "", "", fault.New(fault.Invalid, "a part has no usable Content-Disposition")
	}
	if strings.ContainsRune(params["filename"], 0) {
		return "", "", fault.New(fault.Invalid, "a part's filename holds a NUL byte")
	}
	return params["name"], params["filename"], nil
}

// write puts what comes into a file, in place.
func (u *uploading) write(at string, content io.Reader) error {
	from := &source{Reader: content}
	e, err := u.place.Write(u.ctx, agentapi.WriteParams{
		Path: at, User: u.place.user, Root: true, InPlace: true, Xattrs: u.xattrs, Family: metadataPrefix,
	}, from)
	if err != nil {
		return unwritten(at, from.failed, err)
	}
	u.taken[at] = true
	u.files = append(u.files, written{Name: e.Name, Path: e.Path, Type: "file", Metadata: metadataOf(u.xattrs)})
	return nil
}

// unwritten says why a file was not written: because of what came, or of where it should go.
func unwritten(at string, broken, err error) error {
	switch {
	case broken != nil:
		return fault.Wrap(fault.Invalid, broken, "error reading the upload: %v", broken)
	case fault.Is(err, fault.DiskFull):
		return fault.Wrap(fault.DiskFull, err, "not enough disk space available: %s", fault.Message(err))
	case fault.Is(err, fault.Invalid) && strings.HasSuffix(fault.Message(err), "is a directory"):
		return fault.Wrap(fault.Invalid, err, "path is a directory: %s", at)
	}
	return err
}

// source fills whole buffers, so that a small file is one write however its bytes came, and remembers whether it was the
// reading that failed.
type source struct {
	io.Reader
	failed error
}

func (s *source) Read(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var more int
		more, err = s.Reader.Read(p[n:])
		n += more
	}
	if err != nil && err != io.EOF {
		s.failed = err
	}
	return n, err
}
