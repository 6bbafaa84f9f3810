package envd

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"path"
	"strings"
	"sync"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// copies are the buffers that files pass through: a transfer takes one, however large the file.
var copies = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

func (h *Handler) download(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	p, at, err := h.file(r, target.OpRead)
	if err != nil {
		h.refuseFault(ctx, w, err)
		return
	}
	params := agentapi.ReadParams{Path: at, User: p.user, Root: true}
	entry, content, err := p.Read(ctx, params)
	if err != nil {
		h.refuseFault(ctx, w, unreadable(at, err))
		return
	}
	f := &file{ctx: ctx, place: p, params: params, size: entry.Size, open: content}
	defer f.Close()

	describe(w.Header(), at)
	switch {
	case r.Header.Get("Range") == "" && wantsGzip(r.Header):
		w.Header().Set("Content-Encoding", "gzip")
		err = compress(w, f)
	case entry.Size == 0: // a file of /proc says nothing of its size
		err = pour(w, f)
	default:
		http.ServeContent(w, r, path.Base(at), entry.ModTime, f)
		err = f.failed
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the status is sent: only a cut connection still tells that this is not all
	}
}

// file is the place and the path of a request for files, once it has shown that it may.
func (h *Handler) file(r *http.Request, op target.Operation) (*place, string, error) {
	if err := h.permit(r, op); err != nil {
		return nil, "", err
	}
	q := r.URL.Query()
	p, err := h.at(r.Context(), q.Get("username"))
	var unknown errUser
	if errors.As(err, &unknown) {
		return nil, "", fault.New(fault.Unauthed, "error looking up user '%s': user: unknown user %s", string(unknown), string(unknown))
	}
	if err != nil {
		return nil, "", err
	}
	at, err := p.resolve(r.Context(), q.Get("path"))
	return p, at, err
}

func unreadable(at string, err error) error {
	switch {
	case fault.Is(err, fault.NotFound):
		return fault.Wrap(fault.NotFound, err, "path '%s' does not exist", at)
	case fault.Is(err, fault.Invalid) && strings.HasSuffix(fault.Message(err), "is a directory"):
		return fault.Wrap(fault.Invalid, err, "path '%s' is a directory", at)
	}
	return err
}

// describe says what a file is called. What a sandbox holds may be opened as a page, but never as one of ours.
func describe(out http.Header, at string) {
	disposition := mime.FormatMediaType("inline", map[string]string{"filename": path.Base(at)})
	if disposition == "" {
		disposition = "inline"
	}
	out.Set("Content-Disposition", disposition)
	kind := mime.TypeByExtension(path.Ext(at))
	if kind == "" {
		kind = "application/octet-stream"
	}
	out.Set("Content-Type", kind)
	out.Set("X-Content-Type-Options", "nosniff")
	out.Set("Content-Security-Policy", "sandbox")
	out.Set("Cache-Control", "no-cache")
	out.Add("Vary", "Accept-Encoding")
}

// wantsGzip is true for a client that asks for gzip and nothing else: most name it among others because they could, and on
// a short way the work costs more than the bytes.
func wantsGzip(header http.Header) bool {
	coding, weight, _ := strings.Cut(header.Get("Accept-Encoding"), ";")
	return strings.EqualFold(strings.TrimSpace(coding), "gzip") && strings.ReplaceAll(weight, " ", "") != "q=0"
}

func compress(w http.ResponseWriter, f io.Reader) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	if err := pour(z, f); err != nil {
		return err
	}
	return z.Close()
}

func pour(w io.Writer, r io.Reader) error {
	buf := copies.Get().(*[]byte)
	defer copies.Put(buf)
	// The bare structs hide ReaderFrom and WriterTo, which would bring buffers of their own.
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *buf)
	return err
}

// file reads a sandbox's file from wherever it is put; a place is opened when it is first read.
type file struct {
	ctx    context.Context // of the request that it serves; it lives no longer
	place  *place
	params agentapi.ReadParams
	size   int64
	at     int64
	open   io.ReadCloser // at params.Offset+what was read; nil: not open
	failed error
}

func (f *file) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return 0, errors.New("before the beginning of the file")
	}
	f.at = offset
	return offset, nil
}

func (f *file) Read(p []byte) (int, error) {
	if f.open == nil || f.at != f.params.Offset {
		f.Close()
		f.params.Offset = f.at
		_, content, err := f.place.Client.Read(f.ctx, f.params)
		if err != nil {
			f.failed = err
			return 0, err
		}
		f.open = content
	}
	n, err := f.open.Read(p)
	f.at += int64(n)
	f.params.Offset = f.at // where the open one stands now
	if err != nil && err != io.EOF {
		f.failed = err
	}
	return n, err
}

func (f *file) Close() error {
	if f.open != nil {
		f.open.Close()
		f.open = nil
	}
	return nil
}
