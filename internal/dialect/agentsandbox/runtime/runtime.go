// Package runtime answers for port 8888 of every sandbox as the runtime of agent-sandbox's images would from inside: commands,
// uploads, downloads, lists. Nothing runs in the sandbox for it: the agent does the work, as the sandbox's user. Who may come was
// decided before.
package runtime

import (
	"context"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/transfer"
)

// home is where commands start and relative paths begin, as in upstream's images.
const home = "/app"

// Domain is what the runtime asks of sandboxes.
type Domain interface {
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	// Explain turns the error of a stream that broke into why its sandbox ended.
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
}

// Runtime answers requests for the inside of sandboxes.
type Runtime struct {
	sandboxes Domain
	home      string
	runs      *runs
	shelves   *shelves
	log       *slog.Logger

	life context.Context    // of commands, which may outlive their requests
	end  context.CancelFunc // ends life
	work sync.WaitGroup     // what runs in life
}

// New makes a runtime. Close ends what outlives requests.
func New(m Domain, log *slog.Logger) *Runtime {
	// Owned by the Runtime and ended by Close.
	life, end := context.WithCancel(context.Background())
	return &Runtime{sandboxes: m, home: home, runs: newRuns(), shelves: newShelves(), log: log, life: life, end: end}
}

// Close ends every command and waits for their ends.
func (rt *Runtime) Close() {
	rt.end()
	rt.work.Wait()
}

// Prepare makes the directory that commands start in, the sandbox's user being its owner. It is called before a client hears of
// the sandbox, and does no harm again.
func (rt *Runtime) Prepare(ctx context.Context, p auth.Principal, id string) error {
	agent, err := rt.sandboxes.Agent(ctx, p, id)
	if err != nil {
		return err
	}
	e, err := place.MakeHome(ctx, agent, rt.home)
	if err != nil {
		return err
	}
	who, err := agent.Account(ctx, agentapi.AccountParams{})
	if err != nil || e.UID == who.UID || e.Type != agentapi.EntryDir {
		return err
	}
	// An image may bring it as root's. Where that stays so, uploads into it say why they are refused.
	if _, err := agent.Chmod(ctx, agentapi.ChmodParams{Path: rt.home, User: "root", Owner: who.Name}); err != nil {
		rt.log.DebugContext(ctx, "home of commands is not the user's", "sandbox", id, "error", err)
	}
	return nil
}

// call is one request on its way.
type call struct {
	w    http.ResponseWriter
	r    *http.Request
	who  auth.Principal
	id   string
	rest string // of the path, behind the name of what is asked for; decoded once

	unsent bool // the answer could not be written
}

func (c *call) ctx() context.Context { return c.r.Context() }

// Serve answers a request for a sandbox; its URL is as the port is to see it.
func (rt *Runtime) Serve(w http.ResponseWriter, r *http.Request, p auth.Principal, id string) {
	patient, done := transfer.Patient(w, r)
	defer done()
	c := &call{w: w, r: patient, who: p, id: id}
	if err := rt.route(c); err != nil {
		rt.fail(c, err)
	}
}

// route knows the paths by their beginnings. No mux would do: it cleans paths and sends clients elsewhere, and here what follows
// is a path of the sandbox's, in which "//" and ".." mean something.
func (rt *Runtime) route(c *call) error {
	name, rest, _ := strings.Cut(strings.TrimPrefix(c.r.URL.EscapedPath(), "/"), "/")
	var err error
	if c.rest, err = url.PathUnescape(rest); err != nil {
		return refused(http.StatusBadRequest, "the path is not percent-encoded as it should be")
	}
	switch name {
	case "":
		return rt.only(c, http.MethodGet, alive)
	case "execute":
		return rt.only(c, http.MethodPost, rt.execute)
	case "upload":
		return rt.only(c, http.MethodPost, rt.upload)
	case "download":
		return rt.only(c, http.MethodGet, rt.download)
	case "list":
		return rt.only(c, http.MethodGet, rt.list)
	case "exists":
		return rt.only(c, http.MethodGet, rt.exists)
	case "agent":
		return refused(http.StatusNotFound, "this sandbox has no agent for computer use: run commands by POST /execute")
	}
	return refused(http.StatusNotFound, "there is no %s %.200s here; this port answers /execute, /upload, /download, /list and /exists", c.r.Method, c.r.URL.Path)
}

func (rt *Runtime) only(c *call, method string, serve func(*call) error) error {
	if c.r.Method != method {
		c.w.Header().Set("Allow", method)
		return refused(http.StatusMethodNotAllowed, "use %s", method)
	}
	return serve(c)
}

func alive(c *call) error {
	return c.answer(http.StatusOK, map[string]string{"status": "ok", "message": "the sandbox runs"})
}
