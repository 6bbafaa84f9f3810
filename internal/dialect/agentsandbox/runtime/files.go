package runtime

import (
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// find finds what a request's path means.
func (rt *Runtime) find(c *call) (agent *agentapi.Client, at string, e agentapi.Entry, err error) {
	if err := place.Check(c.rest); err != nil {
		return nil, "", e, refused(http.StatusBadRequest, "%s", fault.Message(err))
	}
	agent, err = rt.sandboxes.Agent(c.ctx(), c.who, c.id)
	if err != nil {
		return nil, "", e, err
	}
	at, e, err = place.Readable(c.ctx(), agent, rt.home, c.rest)
	return agent, at, e, err
}

func (rt *Runtime) download(c *call) error {
	agent, at, e, err := rt.find(c)
	switch {
	case err != nil:
		return missing(err)
	case place.IsDir(e):
		return refused(http.StatusNotFound, "%.500s is a directory, not a file", at)
	}
	e, content, err := agent.Read(c.ctx(), agentapi.ReadParams{Path: at})
	if err != nil {
		return missing(err)
	}
	defer content.Close()
	describe(c.w.Header(), at)
	var from io.Reader = content
	if e.Size > 0 { // a file of /proc says nothing of its size
		c.w.Header().Set("Content-Length", strconv.FormatInt(e.Size, 10))
		from = io.LimitReader(content, e.Size) // it may grow meanwhile
	}
	c.w.WriteHeader(http.StatusOK)
	if err := transfer.Pour(c.w, from); err != nil {
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

// missing is an error about a path that is to be read: whatever stands in the way of it, there is no such file.
func missing(err error) error {
	if fault.Is(err, fault.Invalid) {
		return refused(http.StatusNotFound, "%s", fault.Message(err))
	}
	return err
}

// listed is an entry of a directory as clients read it: they know of two types only.
type listed struct {
	Name    string  `json:"name"`
	Size    int64   `json:"size"`
	Type    string  `json:"type"`
	ModTime float64 `json:"mod_time"`
}

func (rt *Runtime) list(c *call) error {
	agent, at, e, err := rt.find(c)
	switch {
	case err != nil:
		return missing(err)
	case !place.IsDir(e):
		return refused(http.StatusNotFound, "%.500s is not a directory", at)
	}
	entries, err := agent.List(c.ctx(), agentapi.ListParams{Path: at, Depth: 1})
	if err != nil {
		return missing(err)
	}
	out := make([]listed, 0, len(entries))
	for _, e := range entries {
		one := listed{Name: e.Name, Size: e.Size, Type: "file", ModTime: float64(e.ModTime.UnixMicro()) / 1e6}
		if place.IsDir(e) {
			one.Type = "directory"
		}
		out = append(out, one)
	}
	return c.answer(http.StatusOK, out)
}

// exists tells whether a command would find something there: a link that leads nowhere is nothing.
func (rt *Runtime) exists(c *call) error {
	_, _, e, err := rt.find(c)
	if err != nil && !place.Absent(err) && !fault.Is(err, fault.Denied) {
		return err
	}
	there := err == nil && (e.Type != agentapi.EntrySymlink || e.Link != nil)
	return c.answer(http.StatusOK, map[string]any{"path": c.rest, "exists": there})
}
