package execd

import (
	"cmp"
	"net/http"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// codeContext is a kernel that somebody here has used or made; its name is its id.
type codeContext struct {
	language string
	busy     bool
	begun    bool // of the cell that makes it busy: its kernel may have to start first
	halted   bool // somebody interrupted that cell before
	order    int  // of its making
}

// wireContext is a context on the wire.
type wireContext struct {
	ID       string `json:"id"`
	Language string `json:"language"`
}

const maxContexts = 64 // of a sandbox

// defaultContext is the kernel that runs a language when no context is named.
func defaultContext(language string) string {
	if language == agentapi.LanguagePython {
		return agentapi.DefaultKernel
	}
	return language
}

// enter makes a context busy and returns it, or nil when it is busy or not there. Whoever entered goes by it and not by its name,
// which may be another's before the cell is over.
func (r *room) enter(name string) *codeContext {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx := r.contexts[name]
	if ctx == nil || ctx.busy {
		return nil
	}
	ctx.busy, ctx.begun, ctx.halted = true, false, false
	return ctx
}

func (r *room) leave(ctx *codeContext) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx.busy = false
}

// begin notes that a context's cell runs, and tells whether somebody has interrupted it before.
func (r *room) begin(ctx *codeContext) (halted bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx.begun = true
	return ctx.halted
}

// halt tells whether a context can be interrupted now. A cell that has not begun is remembered, and is interrupted when it has.
func (r *room) halt(name string) (now bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx := r.contexts[name]
	if ctx == nil || !ctx.busy || ctx.begun {
		return true
	}
	ctx.halted = true
	return false
}

// know remembers a context.
func (r *room) know(name, language string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.contexts[name] == nil && len(r.contexts) < 4*maxContexts { // what an agent tells is not to be trusted
		r.contexts[name] = &codeContext{language: language, order: len(r.contexts)}
	}
}

func (r *room) knows(name string) (wireContext, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx := r.contexts[name]
	if ctx == nil {
		return wireContext{}, false
	}
	return wireContext{name, ctx.language}, true
}

// existing is the context that a request names. One of a server before this one is known to the sandbox alone.
func (h *Handler) existing(c *call, id string) (wireContext, error) {
	if found, ok := c.room.knows(id); ok {
		return found, nil
	}
	agent, err := h.agent(c)
	if err != nil {
		return wireContext{}, err
	}
	kernels, err := agent.Kernels(c.ctx())
	if err != nil {
		return wireContext{}, err
	}
	at := slices.IndexFunc(kernels, func(k agentapi.Kernel) bool { return k.Name == id && id != agentapi.DefaultKernel })
	if at < 0 {
		return wireContext{}, &refusal{http.StatusNotFound, codeNoContext, "there is no context " + short(id)}
	}
	c.room.know(id, kernels[at].Language)
	return wireContext{id, kernels[at].Language}, nil
}

// ensure makes a language's own context, unless it is there.
func (h *Handler) ensure(c *call, name, language string) error {
	if _, ok := c.room.knows(name); ok {
		return nil
	}
	agent, err := h.agent(c)
	if err != nil {
		return err
	}
	kernels, err := agent.Kernels(c.ctx())
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(kernels, func(k agentapi.Kernel) bool { return k.Name == name }) {
		if err := h.startContext(c, sandbox.KernelSpec{Name: name, Language: language}); err != nil && !fault.Is(err, fault.Conflict) {
			return err
		}
	}
	c.room.know(name, language)
	return nil
}

// startContext makes a kernel. What is missing for it in the sandbox's image is the caller's business.
func (h *Handler) startContext(c *call, spec sandbox.KernelSpec) error {
	if _, ok := programs[spec.Language]; ok {
		return h.hasProgram(c, spec.Language)
	}
	if !slices.Contains(agentapi.Languages, spec.Language) {
		return &refusal{http.StatusBadRequest, codeUnsupported,
			"code in " + short(spec.Language) + " cannot be run here; there are " + strings.Join(agentapi.Languages, ", ") +
				" and go, where the image has what they need. Run other programs by a command"}
	}
	_, err := h.sandboxes.StartKernel(c.ctx(), c.t.Who, c.id(), spec)
	if fault.Is(err, fault.Unsupported) {
		return &refusal{http.StatusBadRequest, codeUnsupported, fault.Message(err)}
	}
	return err
}

func (h *Handler) createContext(c *call) error {
	var req struct {
		Language string  `json:"language"`
		Cwd      *string `json:"cwd"`
	}
	if err := c.decode(maxBody, true, &req); err != nil {
		return err
	}
	language := languageOf(req.Language)
	if language == "" {
		return invalid("a context needs a language")
	}
	known, ok := c.room.reserve()
	if !ok {
		return &refusal{http.StatusTooManyRequests, codeRuntime, "too many contexts in this sandbox: delete one first"}
	}
	defer known()
	spec := sandbox.KernelSpec{Name: newID(), Language: language}
	if req.Cwd != nil && *req.Cwd != "" {
		home, err := h.home(c)
		if err != nil {
			return err
		}
		spec.Cwd = expand(*req.Cwd, home, nil)
	}
	if err := h.startContext(c, spec); err != nil {
		return err
	}
	c.room.know(spec.Name, language)
	return c.answer(wireContext{spec.Name, language})
}

// reserve keeps a place for a context that is being made, until it is known or has failed; false: there is none left.
func (r *room) reserve() (done func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.contexts)+r.making >= maxContexts {
		return nil, false
	}
	r.making++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.making--
	}, true
}

func (h *Handler) listContexts(c *call) error {
	list, err := h.contexts(c, languageOf(c.r.URL.Query().Get("language")))
	if err != nil {
		return err
	}
	return c.answer(list)
}

// contexts are those of a language, or all: what the sandbox has, but for a kernel that nobody asked for.
func (h *Handler) contexts(c *call, language string) ([]wireContext, error) {
	agent, err := h.agent(c)
	if err != nil {
		return nil, err
	}
	kernels, err := agent.Kernels(c.ctx())
	if err != nil {
		return nil, err
	}
	for _, k := range kernels {
		if k.Name != agentapi.DefaultKernel {
			c.room.know(k.Name, k.Language)
		}
	}
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	list := []wireContext{}
	for name, ctx := range c.room.contexts {
		if language == "" || ctx.language == language {
			list = append(list, wireContext{name, ctx.language})
		}
	}
	slices.SortFunc(list, func(a, b wireContext) int {
		return cmp.Or(cmp.Compare(c.room.contexts[a.ID].order, c.room.contexts[b.ID].order), strings.Compare(a.ID, b.ID))
	})
	return list, nil
}

func (h *Handler) getContext(c *call) error {
	found, err := h.existing(c, c.r.PathValue("id"))
	if err != nil {
		return err
	}
	return c.answer(found)
}

func (h *Handler) deleteContext(c *call) error {
	found, err := h.existing(c, c.r.PathValue("id"))
	if err != nil {
		return err
	}
	if err := h.stopContext(c, found.ID); err != nil {
		return err
	}
	return c.nothing()
}

func (h *Handler) deleteContexts(c *call) error {
	language := c.r.URL.Query().Get("language")
	if language == "" {
		return &refusal{http.StatusBadRequest, codeQuery, "the query parameter language says whose contexts to delete"}
	}
	list, err := h.contexts(c, languageOf(language))
	if err != nil {
		return err
	}
	for _, found := range list {
		if err := h.stopContext(c, found.ID); err != nil {
			return err
		}
	}
	return c.nothing()
}

// stopContext ends a kernel; one that has ended before is only forgotten.
func (h *Handler) stopContext(c *call, id string) error {
	var err error
	if known, _ := c.room.knows(id); programs[known.Language].needs != "" {
		err = h.stopProgram(c, id, "SIGKILL")
	} else {
		err = h.sandboxes.StopKernel(c.ctx(), c.t.Who, c.id(), id)
	}
	if ignore(err, fault.Gone) != nil {
		return err
	}
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	delete(c.room.contexts, id)
	return nil
}
