package runtime

import (
	"bufio"
	"context"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/fault"
)

// maxParts is how many parts of an upload are looked at: clients send one.
const maxParts = 32

// upload writes the part "file" to where its filename says. It passes through: neither memory nor this host's disk holds it.
func (rt *Runtime) upload(c *call) error {
	kind, params, err := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return refused(http.StatusBadRequest, "an upload is multipart/form-data with a part named file, whose filename is where it goes")
	}
	body := bufio.NewReaderSize(c.r.Body, 256<<10) // multipart's own reads are small ones
	part, name, err := filePart(multipart.NewReader(body, params["boundary"]))
	if err != nil {
		return err
	}
	agent, err := rt.sandboxes.Agent(c.ctx(), c.who, c.id)
	if err != nil {
		return err
	}
	at, err := place.Writable(c.ctx(), agent, rt.home, name)
	if err != nil {
		return err
	}
	if err := write(c.ctx(), agent, at, part); err != nil {
		return err
	}
	return c.answer(http.StatusOK, map[string]string{"message": "the file is at " + at})
}

// filePart finds the part that is the file.
func filePart(in *multipart.Reader) (part *multipart.Part, name string, err error) {
	for range maxParts {
		part, err := in.NextRawPart()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, "", unread(err)
		}
		d := parseDisposition(part.Header.Get("Content-Disposition"))
		if d.name == "file" {
			return part, d.filename, nil
		}
	}
	return nil, "", refused(http.StatusBadRequest, "the upload has no part named file")
}

func unread(err error) error {
	return refused(http.StatusBadRequest, "the upload cannot be read: %s", strings.TrimPrefix(err.Error(), "multipart: "))
}

// write makes a file, and the directories above it. When the content does not come whole, nothing appears.
func write(ctx context.Context, agent *agentapi.Client, at string, content io.Reader) error {
	from := &source{Reader: content}
	_, err := agent.Write(ctx, agentapi.WriteParams{Path: at}, from)
	switch {
	case from.failed != nil && ctx.Err() == nil:
		return unread(from.failed)
	case fault.Is(err, fault.Conflict):
		return refused(http.StatusConflict, "%s", fault.Message(err))
	}
	return err
}

// source fills whole buffers, so that a small file is one write however its bytes came, and remembers whether it was the reading
// that failed.
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
