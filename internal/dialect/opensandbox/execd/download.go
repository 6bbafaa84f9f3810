package execd

import (
	"bufio"
	"errors"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/transfer"
)

func (h *Handler) download(c *call) error {
	lines, byLine, err := c.lineRange()
	if err != nil {
		return err
	}
	p, at, err := h.onePath(c)
	if err != nil {
		return err
	}
	params := agentapi.ReadParams{Path: at, User: p.user}
	entry, content, err := p.Read(c.ctx(), params)
	if err != nil {
		return fileError(err)
	}
	f := transfer.NewFile(entry.Size, content, func(offset int64) (io.ReadCloser, error) {
		params.Offset = offset
		_, content, err := p.Read(c.ctx(), params)
		return content, err
	})
	defer f.Close()
	describe(c.w.Header(), at)
	switch {
	case byLine:
		c.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		err = lines.copy(c.w, f)
	case entry.Size == 0: // a file of /proc says nothing of its size
		err = transfer.Pour(c.w, f)
	default:
		w := &rangeWriter{ResponseWriter: c.w, c: c}
		http.ServeContent(w, c.r, path.Base(at), entry.ModTime, f)
		err = f.Err()
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the status is sent: only a cut connection still tells that this is not all
	}
	return nil
}

// describe says what a file is called. What a sandbox holds may be opened as a page, but never as one of ours.
func describe(out http.Header, at string) {
	disposition := mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(at)})
	if disposition == "" {
		disposition = "attachment"
	}
	out.Set("Content-Disposition", disposition)
	out.Set("Content-Type", "application/octet-stream")
	out.Set("X-Content-Type-Options", "nosniff")
	out.Set("Content-Security-Policy", "sandbox")
	out.Set("Cache-Control", "no-cache")
}

// rangeWriter tells a range that cannot be had in the words of this API.
type rangeWriter struct {
	http.ResponseWriter
	c       *call
	refused bool
}

func (w *rangeWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *rangeWriter) WriteHeader(status int) {
	if status != http.StatusRequestedRangeNotSatisfiable {
		w.ResponseWriter.WriteHeader(status)
		return
	}
	w.refused = true
	w.Header().Del("Content-Disposition")
	w.c.answerWith(status, map[string]string{"code": codeFile, "message": "the file has no such range"})
}

func (w *rangeWriter) Write(b []byte) (int, error) {
	if w.refused {
		return len(b), nil
	}
	return w.ResponseWriter.Write(b)
}

// lineRange is a part of a text by its lines.
type lineRange struct {
	skip int64 // lines before it
	most int64 // lines of it; negative: all
}

// lineRange reads offset, which counts lines from 1, and limit.
func (c *call) lineRange() (r lineRange, given bool, err error) {
	r.most = -1
	q := c.r.URL.Query()
	for name, into := range map[string]*int64{"offset": &r.skip, "limit": &r.most} {
		text := q.Get(name)
		if text == "" {
			continue
		}
		given = true
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 1 {
			return r, true, &refusal{http.StatusBadRequest, codeQuery, name + " is a number of lines, from 1"}
		}
		*into = n
	}
	r.skip = max(0, r.skip-1)
	if given && c.r.Header.Get("Range") != "" {
		return r, true, &refusal{http.StatusBadRequest, codeQuery, "offset and limit count lines, a Range counts bytes: give one of them"}
	}
	return r, given, nil
}

func (r lineRange) copy(w io.Writer, f io.Reader) error {
	in := bufio.NewReaderSize(f, 64<<10)
	for line := int64(0); r.most < 0 || line < r.skip+r.most; {
		part, err := in.ReadSlice('\n')
		if line >= r.skip {
			if _, werr := w.Write(part); werr != nil {
				return werr
			}
		}
		switch {
		case err == nil:
			line++
		case errors.Is(err, io.EOF):
			return nil
		case !errors.Is(err, bufio.ErrBufferFull): // a line that is longer than the buffer comes in pieces
			return err
		}
	}
	return nil
}
