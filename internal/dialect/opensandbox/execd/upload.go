package execd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	maxParts    = 20_000   // of an upload: two for each file
	maxMetadata = 64 << 10 // bytes of what is said of one file
	maxAhead    = 1 << 20  // bytes of what is said of files that have not come yet
)

// fileMetadata is what an upload says of a file before the file itself.
type fileMetadata struct {
	Path string `json:"path"`
	permission
	said int // the bytes that said so
}

// upload writes files as they come, one after the other: neither memory nor this host's disk has to hold them.
func (h *Handler) upload(c *call) error {
	kind, params, err := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return &refusal{http.StatusBadRequest, codeFile, "an upload is multipart/form-data"}
	}
	p, err := h.place(c)
	if err != nil {
		return err
	}
	up := &uploading{place: p}
	body := bufio.NewReaderSize(c.r.Body, 256<<10) // multipart's own reads are small ones
	if err := up.parts(c.ctx(), multipart.NewReader(body, params["boundary"])); err != nil {
		return err
	}
	return c.nothing()
}

// uploading is an upload under way.
type uploading struct {
	place *place
	next  []*fileMetadata // of files that have not come yet, in their order
	ahead int             // bytes of it
	files int
}

func (u *uploading) parts(ctx context.Context, in *multipart.Reader) error {
	for n := 0; ; n++ {
		part, err := in.NextRawPart()
		switch {
		case err == io.EOF && len(u.next) > 0:
			return &refusal{http.StatusBadRequest, codeContent, "the file of " + short(u.next[0].Path) + " is missing"}
		case err == io.EOF && u.files == 0:
			return &refusal{http.StatusBadRequest, codeFile, "the upload has no files: each is a part metadata and a part file"}
		case err == io.EOF:
			return nil
		case err != nil:
			return unread(err)
		case n >= maxParts:
			return &refusal{http.StatusBadRequest, codeFile, "the upload has too many files"}
		}
		if err := u.part(ctx, part); err != nil {
			return err
		}
	}
}

// unread is an upload that did not come whole.
func unread(err error) error {
	return &refusal{http.StatusBadRequest, codeContent, "the upload cannot be read: " + strings.TrimPrefix(err.Error(), "multipart: ")}
}

func (u *uploading) part(ctx context.Context, part *multipart.Part) error {
	switch part.FormName() {
	case "metadata":
		return u.metadata(part)
	case "file":
		return u.file(ctx, part)
	}
	return nil // what nobody knows is passed over
}

func (u *uploading) metadata(part io.Reader) error {
	raw, err := io.ReadAll(io.LimitReader(part, maxMetadata+1))
	if err != nil {
		return unread(err)
	}
	m, err := decodeMetadata(raw)
	if err != nil {
		return err
	}
	m.said = len(raw)
	if u.ahead += m.said; u.ahead > maxAhead {
		return &refusal{http.StatusBadRequest, codeContent, "the file of " + short(u.next[0].Path) + " is missing: too much is said of files before they come"}
	}
	u.next = append(u.next, m)
	return nil
}

// decodeMetadata reads what is said of a file.
func decodeMetadata(raw []byte) (*fileMetadata, error) {
	var m fileMetadata
	if len(raw) > maxMetadata || json.Unmarshal(raw, &m) != nil {
		return nil, &refusal{http.StatusBadRequest, codeMetadata, "a part metadata is not the JSON of a path, an owner, a group and a mode"}
	}
	if m.Path == "" || strings.ContainsRune(m.Path, 0) || strings.HasSuffix(m.Path, "/") {
		return nil, &refusal{http.StatusBadRequest, codeMetadata, "a part metadata has no path that a file could have"}
	}
	if _, err := modeOf(m.Mode); err != nil {
		return nil, &refusal{http.StatusBadRequest, codeMetadata, err.Error()}
	}
	return &m, nil
}

func (u *uploading) file(ctx context.Context, part io.Reader) error {
	if len(u.next) == 0 {
		return &refusal{http.StatusBadRequest, codeMetadata, "a part file comes without a part metadata before it"}
	}
	m := u.next[0]
	u.next, u.ahead = u.next[1:], u.ahead-m.said
	u.files++
	at, err := u.place.at(m.Path)
	if err != nil {
		return err
	}
	mode, err := modeOf(m.Mode)
	if err != nil {
		return err
	}
	from := &source{Reader: part}
	_, err = u.place.Write(ctx, agentapi.WriteParams{Path: at, User: u.place.user, Mode: mode}, from)
	switch {
	case from.failed != nil && ctx.Err() == nil:
		return unread(from.failed)
	case err != nil:
		return unwritten(err)
	case m.Owner == nil && m.Group == nil:
		return nil
	}
	return fileError(u.place.settle(ctx, at, m.permission, mode))
}

// unwritten says why there is no file: what should be its parent is none, the disk is full.
func unwritten(err error) error {
	if fault.Is(err, fault.DiskFull) {
		return &refusal{http.StatusInsufficientStorage, codeFile, "not enough disk space: " + fault.Message(err)}
	}
	return fileError(err)
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
	if err != nil && !errors.Is(err, io.EOF) {
		s.failed = err
	}
	return n, err
}
