package execd

import (
	"net/http"
	"path"
	"strconv"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const maxDepth = 64 // of a listing

func (h *Handler) makeDirectories(c *call) error {
	var req map[string]permission
	if err := c.decode(maxBody, true, &req); err != nil {
		return err
	}
	p, err := h.place(c)
	if err != nil {
		return err
	}
	for name, want := range req {
		at, err := p.at(name)
		if err != nil {
			return err
		}
		mode, err := modeOf(want.Mode)
		if err != nil {
			return err
		}
		if _, err := p.Mkdir(c.ctx(), agentapi.MkdirParams{Path: at, User: p.user, Parents: true}); err != nil {
			return fileError(err)
		}
		if err := p.settle(c.ctx(), at, want, mode); err != nil {
			return fileError(err)
		}
	}
	return c.nothing()
}

func (h *Handler) removeDirectories(c *call) error {
	err := h.each(c, func(p *place, _, at string) error {
		if path.Clean(at) == "/" {
			return &refusal{http.StatusBadRequest, codeFile, "the root directory stays"}
		}
		e, err := p.Stat(c.ctx(), agentapi.PathParams{Path: at, User: p.user})
		if err == nil && e.Type != agentapi.EntryDir {
			return &refusal{http.StatusBadRequest, codeFile, at + " is not a directory"}
		}
		if err == nil {
			err = p.Remove(c.ctx(), agentapi.RemoveParams{Path: at, User: p.user, Recursive: true})
		}
		return ignore(err, fault.NotFound)
	})
	if err != nil {
		return err
	}
	return c.nothing()
}

func (h *Handler) listDirectory(c *call) error {
	p, at, err := h.onePath(c)
	if err != nil {
		return err
	}
	depth := 1
	if text := c.r.URL.Query().Get("depth"); text != "" {
		if depth, err = strconv.Atoi(text); err != nil || depth < 1 || depth > maxDepth {
			return &refusal{http.StatusBadRequest, codeQuery, "depth is a number from 1 to " + strconv.Itoa(maxDepth)}
		}
	}
	e, err := p.Stat(c.ctx(), agentapi.PathParams{Path: at, User: p.user})
	switch {
	case err != nil:
		return fileError(err)
	case e.Type != agentapi.EntryDir:
		return &refusal{http.StatusBadRequest, codeFile, at + " is not a directory"}
	}
	list, err := p.List(c.ctx(), agentapi.ListParams{Path: at, User: p.user, Depth: depth})
	if err != nil {
		return tooMany(err)
	}
	return c.answerEntries(list)
}

// onePath is the one path that a request's query names.
func (h *Handler) onePath(c *call) (*place, string, error) {
	list, err := c.paths()
	if err != nil {
		return nil, "", err
	}
	p, err := h.place(c)
	if err != nil {
		return nil, "", err
	}
	at, err := p.at(list[0])
	return p, at, err
}

// tooMany says what to do about a listing that is too long.
func tooMany(err error) error {
	if fault.Is(err, fault.Exhausted) {
		return &refusal{http.StatusBadRequest, codeFile, fault.Message(err)}
	}
	return fileError(err)
}

func (c *call) answerEntries(list []agentapi.Entry) error {
	out := make([]fileInfo, len(list))
	for i := range list {
		out[i] = infoOf(&list[i])
	}
	return c.answer(out)
}

func (h *Handler) searchFiles(c *call) error {
	names, err := patterns(c.r.URL.Query().Get("pattern"))
	if err != nil {
		return err
	}
	p, at, err := h.onePath(c)
	if err != nil {
		return err
	}
	list, err := p.List(c.ctx(), agentapi.ListParams{Path: at, User: p.user, Names: names})
	if err != nil {
		return tooMany(err)
	}
	return c.answerEntries(list)
}
