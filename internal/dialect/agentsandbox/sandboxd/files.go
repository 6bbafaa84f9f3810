package sandboxd

import (
	"bufio"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// find finds what a request's path means. The home is made by the first who asks for it: what is
// in one that is not there is not there either.
func (h *Handler) find(c *call) (agent *agentapi.Client, at string, e agentapi.Entry, err error) {
	if err := place.Check(c.path); err != nil {
		return nil, "", e, err
	}
	if agent, err = h.sandboxes.Agent(c.ctx(), c.who, c.id); err != nil {
		return nil, "", e, err
	}
	if place.IsHome(h.home, c.path) {
		if _, err := place.MakeHome(c.ctx(), agent, h.home); err != nil {
			return nil, "", e, err
		}
	}
	at, e, err = place.Readable(c.ctx(), agent, h.home, c.path)
	if place.Absent(err) {
		err = fault.Wrap(fault.NotFound, err, "%s", fault.Message(err))
	}
	return agent, at, e, err
}

// entry is one of a directory as clients read it.
type entry struct {
	Name     string `json:"name"`
	Size     int64  `json:"size"`
	Type     string `json:"type"`
	Modified string `json:"modified_at"`
	Mode     string `json:"mode"`
}

func (h *Handler) read(c *call) error {
	agent, at, e, err := h.find(c)
	if err != nil {
		return err
	}
	if place.IsDir(e) {
		return h.list(c, agent, at)
	}
	c.w.Header().Set("Content-Type", "application/octet-stream")
	c.w.Header().Set("X-Content-Type-Options", "nosniff")
	c.w.Header().Set("Content-Security-Policy", "sandbox")
	if c.r.Method == http.MethodHead {
		c.w.WriteHeader(http.StatusOK)
		return nil
	}
	e, content, err := agent.Read(c.ctx(), agentapi.ReadParams{Path: at})
	if err != nil {
		return err
	}
	defer content.Close()
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

func (h *Handler) list(c *call, agent *agentapi.Client, at string) error {
	found, err := agent.List(c.ctx(), agentapi.ListParams{Path: at, Depth: 1})
	if err != nil {
		return err
	}
	entries := make([]entry, 0, len(found))
	for _, e := range found {
		one := entry{Name: e.Name, Size: e.Size, Type: "file", Modified: e.ModTime.UTC().Format(time.RFC3339Nano), Mode: fmt.Sprintf("%04o", e.Mode&0o7777)}
		switch {
		case place.IsDir(e):
			one.Type = "directory"
		case e.Type == agentapi.EntrySymlink && e.Link == nil:
			one.Type = "symlink" // it leads nowhere
		}
		entries = append(entries, one)
	}
	answer(c.w, http.StatusOK, map[string]any{"path": c.path, "entries": entries})
	return nil
}

// write makes a file of the body, or of the first file of a form.
func (h *Handler) write(c *call) error {
	mode, err := modeOf(c.r.URL.Query().Get("mode"))
	if err != nil {
		return err
	}
	body, err := content(c.r)
	if err != nil {
		return err
	}
	agent, err := h.sandboxes.Agent(c.ctx(), c.who, c.id)
	if err != nil {
		return err
	}
	if _, err := place.MakeHome(c.ctx(), agent, h.home); err != nil {
		return err
	}
	at, err := place.Writable(c.ctx(), agent, h.home, c.path)
	if err != nil {
		return err
	}
	from := &source{Reader: body}
	_, err = agent.Write(c.ctx(), agentapi.WriteParams{Path: at, Mode: mode}, from)
	switch {
	case from.failed != nil && c.ctx().Err() == nil:
		return fault.Wrap(fault.Invalid, from.failed, "the body did not come whole")
	case err != nil:
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func modeOf(text string) (uint32, error) {
	if text == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(text, 8, 32)
	if err != nil || mode > 0o7777 {
		return 0, fault.New(fault.Invalid, "mode %.20q: use octal digits such as 0644", text)
	}
	return uint32(mode), nil
}

// content is what a request wants to be written.
func content(r *http.Request) (io.Reader, error) {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" {
		return bufio.NewReaderSize(r.Body, 64<<10), nil
	}
	part, err := multipart.NewReader(bufio.NewReaderSize(r.Body, 64<<10), params["boundary"]).NextRawPart()
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "the form has no part")
	}
	return part, nil
}

// source remembers whether it was the reading that failed.
type source struct {
	io.Reader
	failed error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && err != io.EOF {
		s.failed = err
	}
	return n, err
}

func (h *Handler) remove(c *call) error {
	agent, at, _, err := h.find(c)
	if err != nil {
		return err
	}
	if at == "/" || at == h.home {
		return fault.New(fault.Denied, "%s itself stays; remove what is in it", at)
	}
	if err := agent.Remove(c.ctx(), agentapi.RemoveParams{Path: at, Recursive: c.r.URL.Query().Get("recursive") == "true"}); err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *Handler) health(c *call) error {
	agent, err := h.sandboxes.Agent(c.ctx(), c.who, c.id)
	if err != nil {
		return err
	}
	m, err := agent.Metrics(c.ctx())
	if err != nil {
		return err
	}
	answer(c.w, http.StatusOK, map[string]any{"status": "ok", "uptime_seconds": m.UptimeMS / 1000})
	return nil
}

// metadata tells the part of the environment that is there to be told.
func (h *Handler) metadata(c *call) error {
	agent, err := h.sandboxes.Agent(c.ctx(), c.who, c.id)
	if err != nil {
		return err
	}
	account, err := agent.Account(c.ctx(), agentapi.AccountParams{})
	if err != nil {
		return err
	}
	env := map[string]string{}
	for name, value := range account.Env {
		if strings.HasPrefix(name, "SANDBOX_") && !secret(name) {
			env[name] = value
		}
	}
	answer(c.w, http.StatusOK, map[string]any{"env": env})
	return nil
}

// secret tells whether a variable's name says that its value is nobody's business.
func secret(name string) bool {
	for _, word := range []string{"SECRET", "TOKEN", "KEY", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH"} {
		if strings.Contains(strings.ToUpper(name), word) {
			return true
		}
	}
	return false
}
