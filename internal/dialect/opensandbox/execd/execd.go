// Package execd answers for a sandbox's port 44772 as OpenSandbox's daemon would from inside: commands, shell sessions,
// code, files, terminals and measurements. It translates; the agent in the sandbox does the work, and who may come in was
// decided before.
package execd

import (
	"context"
	"iter"
	"log/slog"
	"net/http"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes is what execd asks of the domain.
type Sandboxes interface {
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error]
	StartKernel(ctx context.Context, p auth.Principal, id string, spec sandbox.KernelSpec) (agentapi.Kernel, error)
	StopKernel(ctx context.Context, p auth.Principal, id, name string) error
	// Explain turns the error of a stream that broke into why its sandbox ended.
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
	Usage(ctx context.Context, p auth.Principal, id string) (sandbox.Usage, error)
	// Watch counts a stream of measurements among what the tenant does in its sandboxes.
	Watch(p auth.Principal) (leave func(), err error)
	History(ctx context.Context, p auth.Principal, id string, from, to time.Time) ([]sandbox.Sample, error)
}

// Handler answers requests that carry a target.
type Handler struct {
	sandboxes Sandboxes
	log       *slog.Logger
	mux       *http.ServeMux
	rooms     *rooms
	shelves   *shelves
	replacing chan struct{}      // holds one for each request that has contents of files in memory to change them
	life      context.Context    // of what outlives requests: commands, cells and terminals whose client has left
	end       context.CancelFunc // ends life
	work      sync.WaitGroup     // what runs in life
}

// New makes a handler. Close ends what outlives requests.
func New(s Sandboxes, log *slog.Logger) *Handler {
	// Owned by the Handler and ended by Close.
	life, end := context.WithCancel(context.Background())
	h := &Handler{sandboxes: s, log: log, mux: http.NewServeMux(), shelves: newShelves(), life: life, end: end, replacing: make(chan struct{}, maxReplacing)}
	h.rooms = newRooms(h.ended)
	routes := map[string]bool{}
	for pattern, serve := range h.routes() {
		h.mux.Handle(pattern, h.handler(serve))
		if _, route, ok := strings.Cut(pattern, " "); ok {
			routes[route] = true
		}
	}
	for route := range routes {
		h.mux.Handle(route, h.handler(wrongMethod))
	}
	h.mux.Handle("/", h.handler(noRoute))
	return h
}

func (h *Handler) routes() map[string]func(*call) error {
	return map[string]func(*call) error{
		"GET /ping":                     h.ping,
		"POST /command":                 h.runCommand,
		"DELETE /command":               h.interruptCommand,
		"GET /command/{one}/{two}":      h.aboutCommand,
		"POST /session":                 h.createSession,
		"POST /session/{id}/run":        h.runInSession,
		"DELETE /session/{id}":          h.deleteSession,
		"POST /code":                    h.runCode,
		"DELETE /code":                  h.interruptCode,
		"POST /code/context":            h.createContext,
		"GET /code/contexts":            h.listContexts,
		"DELETE /code/contexts":         h.deleteContexts,
		"GET /code/contexts/{id}":       h.getContext,
		"DELETE /code/contexts/{id}":    h.deleteContext,
		"GET /files/info":               h.fileInfo,
		"DELETE /files":                 h.removeFiles,
		"POST /files/mv":                h.moveFiles,
		"POST /files/permissions":       h.setPermissions,
		"POST /files/replace":           h.replaceContents,
		"GET /files/search":             h.searchFiles,
		"POST /files/upload":            h.upload,
		"GET /files/download":           h.download,
		"GET /directories/list":         h.listDirectory,
		"POST /directories":             h.makeDirectories,
		"DELETE /directories":           h.removeDirectories,
		"GET /metrics":                  h.metrics,
		"GET /metrics/watch":            h.watchMetrics,
		"POST /pty":                     h.createTerminal,
		"GET /pty/{id}":                 h.getTerminal,
		"DELETE /pty/{id}":              h.deleteTerminal,
		"GET /pty/{id}/ws":              h.attachTerminal,
		"GET /v1/isolated/capabilities": isolation,
		"/v1/isolated":                  noIsolation,
		"/v1/isolated/":                 noIsolation,
	}
}

// Close ends everything that outlives requests and waits for it. Processes of sandboxes live on.
func (h *Handler) Close() {
	h.end()
	h.rooms.close()
	h.work.Wait()
}

// ServeHTTP answers a request that was let in.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if path.Clean(r.URL.Path) != r.URL.Path { // a mux would send the client to where it thinks that this is
		h.handler(noRoute).ServeHTTP(w, r)
		return
	}
	h.mux.ServeHTTP(w, asUser(r))
}

// call is one request on its way.
type call struct {
	w    http.ResponseWriter
	r    *http.Request
	t    *access.Target
	user string // whose rights count for files; empty: the sandbox's user
	room *room
}

func (c *call) ctx() context.Context { return c.r.Context() }
func (c *call) id() string           { return c.t.Sandbox.ID }

func (h *Handler) handler(serve func(*call) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		patient, done := transfer.Patient(w, r)
		defer done()
		c := &call{w: w, r: patient, t: access.From(r.Context())}
		c.user, _ = r.Context().Value(userKey{}).(string)
		c.room = h.rooms.of(c.t)
		if err := serve(c); err != nil {
			h.fail(c, err)
		}
	})
}

type userKey struct{}

// asUser takes the part of a path away that says with whose rights files are touched: /v1/filesystem/UID/GID.
func asUser(r *http.Request) *http.Request {
	rest, ok := strings.CutPrefix(r.URL.Path, "/v1/filesystem/")
	if !ok {
		return r
	}
	uid, rest, _ := strings.Cut(rest, "/")
	gid, rest, _ := strings.Cut(rest, "/")
	if !isID(uid) || !isID(gid) || !strings.HasPrefix(rest, "files") && !strings.HasPrefix(rest, "directories") {
		return r
	}
	r = r.Clone(context.WithValue(r.Context(), userKey{}, uid+":"+gid))
	r.URL.Path, r.URL.RawPath = "/"+rest, ""
	return r
}

// isID tells whether a text is a number that a user or a group can have.
func isID(text string) bool {
	n, err := strconv.ParseUint(text, 10, 32)
	return err == nil && n != 1<<32-1
}

// lasting is a context for what goes on when its client leaves, until the server ends.
func (h *Handler) lasting(c *call) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.ctx()))
	stop := context.AfterFunc(h.life, cancel)
	return ctx, func() { stop(); cancel() }
}

func (h *Handler) ping(c *call) error {
	if c.t.Sandbox.State != sandbox.StateRunning {
		return &refusal{http.StatusServiceUnavailable, codeRuntime, "sandbox " + c.id() + " is " + string(c.t.Sandbox.State)}
	}
	return c.nothing()
}

// ended tells whether a sandbox is gone for good.
func (h *Handler) ended(ctx context.Context, who auth.Principal, id string) bool {
	sb, err := h.sandboxes.Get(ctx, who, id)
	if err != nil { // whoever could not be asked may be there
		return fault.Is(err, fault.NotFound) || fault.Is(err, fault.Gone)
	}
	return sb.State == sandbox.StateEnded
}
