package cove

import (
	"io"
	"math"
	"net/http"
	"sync"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
)

// copies are the buffers that files pass through: a transfer takes one, however large the file.
var copies = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

func (a *API) readFile(c *call) error {
	q := c.query()
	params := agentapi.ReadParams{
		Path: q.required("path"), User: q.text("user"),
		Offset: q.integer("offset", 0, math.MaxInt64), Length: q.integer("length", 0, math.MaxInt64),
	}
	if q.err != nil {
		return q.err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}

	entry, content, err := agent.Read(c.ctx(), params)
	if err != nil {
		return err
	}
	defer content.Close()

	h := c.w.Header()
	// The sandbox's content never runs as a page of ours.
	h.Set("Content-Type", "application/octet-stream")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Last-Modified", entry.ModTime.UTC().Format(http.TimeFormat))
	c.w.WriteHeader(http.StatusOK)
	buf := copies.Get().(*[]byte)
	defer copies.Put(buf)
	// The bare struct hides ReaderFrom, which would bring a smaller buffer of its own.
	if _, err := io.CopyBuffer(struct{ io.Writer }{c.w}, struct{ io.Reader }{content}, *buf); err != nil {
		a.broken(c, err)
		panic(http.ErrAbortHandler) // the status is sent: only a cut connection still tells that this is not all
	}
	return nil
}

func (a *API) writeFile(c *call) error {
	q := c.query()
	params := agentapi.WriteParams{Path: q.required("path"), User: q.text("user"), Mode: q.octal("mode"), Append: q.flag("append")}
	if q.err != nil {
		return q.err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}

	entry, err := agent.Write(c.ctx(), params, &upload{c.w, c.r.Body})
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireEntry(&entry))
}

func (a *API) removeFile(c *call) error {
	q := c.query()
	params := agentapi.RemoveParams{Path: q.required("path"), User: q.text("user"), Recursive: q.flag("recursive")}
	if q.err != nil {
		return q.err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	if err := agent.Remove(c.ctx(), params); err != nil {
		return err
	}
	return c.nothing()
}

func (a *API) statFile(c *call) error {
	q := c.query()
	params := agentapi.PathParams{Path: q.required("path"), User: q.text("user")}
	if q.err != nil {
		return q.err
	}
	return a.entry(c, func(agent *agentapi.Client) (agentapi.Entry, error) { return agent.Stat(c.ctx(), params) })
}

func (a *API) listFiles(c *call) error {
	q := c.query()
	params := agentapi.ListParams{Path: q.required("path"), User: q.text("user"), Depth: int(q.integer("depth", 1, 64))}
	if q.err != nil {
		return q.err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}

	list, err := agent.List(c.ctx(), params)
	if err != nil {
		return err
	}

	out := client.EntryList{Entries: make([]client.Entry, len(list))}
	for i := range list {
		out.Entries[i] = wireEntry(&list[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) mkdir(c *call) error {
	var req client.MkdirRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	return a.entry(c, func(agent *agentapi.Client) (agentapi.Entry, error) {
		return agent.Mkdir(c.ctx(), agentapi.MkdirParams{Path: req.Path, User: req.User, Mode: req.Mode, Parents: req.Parents})
	})
}

func (a *API) move(c *call) error {
	var req client.MoveRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	return a.entry(c, func(agent *agentapi.Client) (agentapi.Entry, error) {
		return agent.Move(c.ctx(), agentapi.MoveParams{From: req.From, To: req.To, User: req.User})
	})
}

func (a *API) chmod(c *call) error {
	var req client.ChmodRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	return a.entry(c, func(agent *agentapi.Client) (agentapi.Entry, error) {
		return agent.Chmod(c.ctx(), agentapi.ChmodParams{Path: req.Path, User: req.User, Mode: req.Mode, Owner: req.Owner, Group: req.Group})
	})
}

// entry answers with the one entry that the agent was asked for.
func (a *API) entry(c *call, ask func(*agentapi.Client) (agentapi.Entry, error)) error {
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	e, err := ask(agent)
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireEntry(&e))
}

func (a *API) watch(c *call) error {
	q := c.query()
	params := agentapi.WatchParams{Path: q.required("path"), User: q.text("user"), Recursive: q.flag("recursive")}
	if q.err != nil {
		return q.err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	stream, err := agent.Watch(c.ctx(), params)
	if err != nil {
		return err
	}
	defer stream.Close()
	return a.stream(c, stream.Events())
}

func wireEntry(e *agentapi.Entry) client.Entry {
	return client.Entry{
		Name: e.Name, Path: e.Path, Type: string(e.Type), Size: e.Size, Mode: e.Mode, UID: e.UID, GID: e.GID,
		User: e.User, Group: e.Group, ModTime: e.ModTime, Target: e.Target, Xattrs: e.Xattrs,
	}
}
