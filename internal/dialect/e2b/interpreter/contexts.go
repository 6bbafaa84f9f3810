package interpreter

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// wireContext is a context on the wire.
type wireContext struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

// defaultContext is the kernel that runs a language when no context is named.
func defaultContext(language string) string {
	if language == agentapi.LanguagePython {
		return agentapi.DefaultKernel
	}
	return language
}

// initial are the languages whose default contexts are there from the start; their kernels are made at first use.
var initial = []string{agentapi.LanguagePython, agentapi.LanguageJavaScript}

// maxContexts is how many a sandbox may have: the SDKs make them without a token, so anybody may.
const maxContexts = 64

// underway counts what has begun and not ended, by sandbox.
type underway struct {
	mu sync.Mutex
	by map[string]int
}

// begin tells how many there are now, with this one.
func (u *underway) begin(id string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.by[id]++
	return u.by[id]
}

func (u *underway) end(id string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.by[id]--; u.by[id] == 0 {
		delete(u.by, id)
	}
}

func (in *Interpreter) create(c *call) error {
	body, err := c.body()
	if err != nil {
		return err
	}
	if len(body) == 0 {
		body = []byte("{}")
	}
	req, err := decode[creation](body)
	if err != nil {
		return c.unprocessable(err)
	}

	begun := c.in.making.begin(c.id())
	defer c.in.making.end(c.id())
	kernels, err := in.kernels(c)
	if err != nil {
		return asFailure(err)
	}
	if len(kernels)+begun > maxContexts {
		return &refusal{http.StatusTooManyRequests, fmt.Sprintf("a sandbox has at most %d contexts: remove one first", maxContexts)}
	}
	k, err := in.sandboxes.StartKernel(c.ctx(), c.t.Who, c.id(), sandbox.KernelSpec{
		Name: newContextID(time.Now()), Language: languageOf(req.Language), Cwd: text0(req.Cwd),
	})
	if err != nil {
		return asFailure(err)
	}

	return c.answer(wire(k))
}

func wire(k agentapi.Kernel) wireContext {
	return wireContext{ID: k.Name, Language: k.Language, Cwd: k.Cwd}
}

// asFailure is a context that could not be made: 500, but for a sandbox that is gone, a bound, and a language that the template
// does not have.
func asFailure(err error) error {
	switch fault.KindOf(err) {
	case fault.Gone, fault.Unavailable, fault.Internal, fault.Unsupported, fault.Exhausted, fault.DiskFull:
		return err
	default: // the caller's doing
	}
	return &refusal{http.StatusInternalServerError, fault.Message(err)}
}

func (in *Interpreter) list(c *call) error {
	kernels, err := in.kernels(c)
	if err != nil {
		return err
	}
	slices.SortStableFunc(kernels, func(a, b agentapi.Kernel) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
	})
	out := make([]wireContext, len(kernels))
	for i, k := range kernels {
		out[i] = wire(k)
	}
	return c.answer(out)
}

// kernels are those of the sandbox and those that are there from the start and were not needed yet.
func (in *Interpreter) kernels(c *call) ([]agentapi.Kernel, error) {
	agent, err := in.sandboxes.Agent(c.ctx(), c.t.Who, c.id())
	if err != nil {
		return nil, err
	}
	kernels, err := agent.Kernels(c.ctx())
	if err != nil {
		return nil, err
	}
	cwd := "/home/user"
	if at := find(kernels, agentapi.DefaultKernel); at >= 0 {
		cwd = kernels[at].Cwd
	}
	for _, language := range initial {
		if name := defaultContext(language); find(kernels, name) < 0 {
			kernels = append(kernels, agentapi.Kernel{Name: name, Language: language, Cwd: cwd})
		}
	}
	return kernels, nil
}

func find(kernels []agentapi.Kernel, name string) int {
	return slices.IndexFunc(kernels, func(k agentapi.Kernel) bool { return k.Name == name })
}

// rank puts the default contexts first; the ids of the others sort by their age.
func rank(k agentapi.Kernel) int {
	at := slices.IndexFunc(agentapi.Languages, func(language string) bool { return k.Name == defaultContext(language) })
	if at < 0 {
		return len(agentapi.Languages)
	}
	return at
}

// existing is the context that a path names.
func (in *Interpreter) existing(c *call, id string) (agentapi.Kernel, error) {
	kernels, err := in.kernels(c)
	if err != nil {
		return agentapi.Kernel{}, err
	}
	at := find(kernels, id)
	if at < 0 {
		return agentapi.Kernel{}, &refusal{http.StatusNotFound, fmt.Sprintf("Context %s not found", id)}
	}
	return kernels[at], nil
}

func (in *Interpreter) remove(c *call) error {
	k, err := in.existing(c, c.r.PathValue("id"))
	if err != nil {
		return err
	}

	if k.State != "" {
		if err := in.sandboxes.StopKernel(c.ctx(), c.t.Who, c.id(), k.Name); err != nil {
			return err
		}
	}

	return c.answer(nil)
}

func (in *Interpreter) restart(c *call) error {
	k, err := in.existing(c, c.r.PathValue("id"))
	if err != nil {
		return err
	}

	if k.State == "" {
		err = in.start(c, k.Name, k.Language)
	} else {
		_, err = in.sandboxes.RestartKernel(c.ctx(), c.t.Who, c.id(), k.Name)
	}
	if err != nil {
		return asFailure(err)
	}

	return c.answer(nil)
}

// start makes a default context's kernel, unless another request has just done so.
func (in *Interpreter) start(c *call, name, language string) error {
	_, err := in.sandboxes.StartKernel(c.ctx(), c.t.Who, c.id(), sandbox.KernelSpec{Name: name, Language: language})
	if fault.Is(err, fault.Conflict) {
		return nil
	}
	return err
}

// kernelFor is the kernel that an execution is for; the default one is made by the run itself when it is missing.
func (in *Interpreter) kernelFor(c *call, req *execution) (name, language string, err error) {
	if id := text0(req.Context); id != "" {
		k, err := in.existing(c, id)
		if err == nil && k.State == "" {
			err = in.start(c, k.Name, k.Language)
		}
		return id, k.Language, err
	}
	language = languageOf(req.Language)
	name = defaultContext(language)
	if name == agentapi.DefaultKernel {
		return name, language, nil
	}
	kernels, err := in.kernels(c)
	if err != nil {
		return "", "", err
	}
	if at := find(kernels, name); at >= 0 && kernels[at].State != "" {
		return name, language, nil
	}
	if err := in.start(c, name, language); err != nil {
		return "", "", asFailure(err)
	}
	return name, language, nil
}

// newContextID is a UUID of version 7, so that ids sort by age.
func newContextID(now time.Time) string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	binary.BigEndian.PutUint64(b[:8], uint64(now.UnixMilli())<<16|0x7000|uint64(now.Nanosecond()/1000%1000)<<2)
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
