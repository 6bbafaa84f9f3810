package envd

import (
	"compress/gzip"
	"errors"
	"io"
	"mime"
	"net/http"
	"path"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

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
	f := transfer.NewFile(entry.Size, content, func(offset int64) (io.ReadCloser, error) {
		params.Offset = offset
		_, content, err := p.Read(ctx, params)
		return content, err
	})
	defer f.Close()

	describe(w.Header(), at)
	switch {
	case r.Header.Get("Range") == "" && wantsGzip(r.Header):
		w.Header().Set("Content-Encoding", "gzip")
		err = compress(w, f)
	case entry.Size == 0: // a file of /proc says nothing of its size
		err = transfer.Pour(w, f)
	default:
		http.ServeContent(w, r, path.Base(at), entry.ModTime, f)
		err = f.Err()
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
	if err := transfer.Pour(z, f); err != nil {
		return err
	}
	return z.Close()
}
