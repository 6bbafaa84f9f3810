package e2b

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

const maxPage = 100

// listV2 pages through the caller's sandboxes.
func (a *API) listV2(c *call) error {
	q, err := a.listing(c)
	if fault.Is(err, fault.NotFound) { // the template
		return a.answerList(c, sandbox.Page{})
	}
	if err != nil {
		return err
	}

	page, err := a.sandboxes.List(c.ctx(), c.who, q)
	if err != nil {
		return err
	}

	return a.answerList(c, page)
}

// listV1 is all that runs, in one piece.
func (a *API) listV1(c *call) error {
	metadata, err := ParseMetadata(c.r.URL.Query().Get("metadata"))
	if err != nil {
		return err
	}
	q := sandbox.ListQuery{
		States: []sandbox.State{sandbox.StateRunning}, Metadata: metadata, Without: build.Annotation, Limit: sandbox.MaxPage,
	}

	var all sandbox.Page
	for {
		page, err := a.sandboxes.List(c.ctx(), c.who, q)
		if err != nil {
			return err
		}
		all.Items = append(all.Items, page.Items...)
		if q.Cursor = page.Next; page.Next == "" {
			break
		}
	}

	return a.answerList(c, all)
}

// listing leaves out the sandboxes of builds, which are nobody's to see.
func (a *API) listing(c *call) (sandbox.ListQuery, error) {
	q := c.query()
	out := sandbox.ListQuery{
		States: states(q), StartedAfter: q.time("startedAfter"), Ascending: q.word("order", "desc", "asc", "desc") == "asc",
		Limit: int(q.integer("limit", maxPage, 1, maxPage)), Cursor: q.Get("nextToken"), Without: build.Annotation,
	}
	if q.err != nil {
		return out, q.err
	}
	var err error
	if out.Metadata, err = ParseMetadata(q.Get("metadata")); err != nil {
		return out, err
	}
	ref := q.Get("template")
	switch {
	case ref == "":
		return out, nil
	case strings.Contains(ref, ":"):
		return out, fault.New(fault.Invalid, "template: give an id or a name without a tag")
	}
	// To the domain each build of a template is another one: only we know its id.
	from, err := a.Resolve(c.ctx(), c.who, ref)
	out.Template, out.TemplateIn = from.ID, templateAnnotation
	return out, err
}

func states(q *query) []sandbox.State {
	var all []sandbox.State
	for _, s := range q.list("state") {
		switch s {
		case "running":
			all = append(all, sandbox.StateRunning)
		case "paused":
			all = append(all, sandbox.StatePaused)
		default:
			q.fail("query parameter state: %.40q is neither running nor paused", s)
		}
	}
	if len(all) == 0 {
		return []sandbox.State{sandbox.StateRunning, sandbox.StatePaused}
	}
	return all
}

func (a *API) answerList(c *call, page sandbox.Page) error {
	out := make([]Listed, 0, len(page.Items))
	for _, sb := range page.Items {
		o, err := target.Decode(sb)
		if err != nil {
			return err
		}
		out = append(out, a.wireListed(sb, o))
	}
	h := c.w.Header()
	h.Set("X-Total-Running", strconv.Itoa(a.sandboxes.Running(c.who, build.Annotation)))
	if page.Next != "" {
		h.Set("X-Next-Token", page.Next)
	}
	return c.answer(http.StatusOK, out)
}
