// Package interpreter answers for port 49999 of a sandbox: E2B's code interpreter, whose contexts are kernels of the
// domain. It knows the wire and how a kernel's events look there; what runs, where and for whom is not its business.
package interpreter

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"log/slog"
	"net/http"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes is what the interpreter asks of the domain.
type Sandboxes interface {
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error]
	StartKernel(ctx context.Context, p auth.Principal, id string, spec sandbox.KernelSpec) (agentapi.Kernel, error)
	RestartKernel(ctx context.Context, p auth.Principal, id, name string) (agentapi.Kernel, error)
	StopKernel(ctx context.Context, p auth.Principal, id, name string) error
}

// The pace of a stream; SDKs count on it.
const (
	keepalive   = 5 * time.Second
	headerDelay = 20 * time.Millisecond // how long an answer's head may wait to travel with its first event
	// lineDelay is how long the beginning of a line waits for the rest. Jupyter gathers output for twice as long.
	lineDelay = 100 * time.Millisecond
)

// Interpreter serves requests that came through the edge.
type Interpreter struct {
	http.Handler
	sandboxes Sandboxes
	log       *slog.Logger
	making    underway // the contexts: many requests at once must not pass the bound that each alone keeps
}

// New makes the handler; every request's context carries its target.
func New(s Sandboxes, log *slog.Logger) *Interpreter {
	in := &Interpreter{sandboxes: s, log: log, making: underway{by: map[string]int{}}}
	mux := http.NewServeMux()
	for pattern, serve := range map[string]func(*call) error{
		"GET /health":                 in.health,
		"POST /execute":               in.execute,
		"POST /contexts":              in.create,
		"GET /contexts":               in.list,
		"DELETE /contexts/{id}":       in.remove,
		"POST /contexts/{id}/restart": in.restart,
	} {
		mux.Handle(pattern, in.handler(serve))
	}
	for _, path := range []string{"/health", "/execute", "/contexts", "/contexts/{id}", "/contexts/{id}/restart"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			detail(w, http.StatusMethodNotAllowed, "Method Not Allowed")
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { detail(w, http.StatusNotFound, "Not Found") })
	in.Handler = cors(mux)
	return in
}

// cors lets pages of any origin use the port, as E2B does.
func cors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Access-Control-Allow-Origin", "*")
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			h.Set("Access-Control-Allow-Methods", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT")
			if wanted := r.Header.Get("Access-Control-Request-Headers"); wanted != "" {
				h.Set("Access-Control-Allow-Headers", wanted)
			}
			h.Set("Access-Control-Max-Age", "600")
			w.WriteHeader(http.StatusOK)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// call is one request on its way.
type call struct {
	in *Interpreter
	w  http.ResponseWriter
	r  *http.Request
	t  *target.Target
}

func (c *call) ctx() context.Context { return c.r.Context() }
func (c *call) id() string           { return c.t.Sandbox.ID }

func (in *Interpreter) handler(serve func(*call) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &call{in: in, w: w, r: r, t: target.From(r.Context())}
		if err := serve(c); err != nil {
			in.fail(c, err)
		}
	})
}

func (in *Interpreter) health(c *call) error { return c.answer("OK") }

func (c *call) answer(value any) error {
	c.w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(c.w).Encode(value)
}

// refusal is an error that has its status already.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string { return r.text }

// fail tells why there is no answer. Programs that use this port tell a sandbox that is gone by 502 alone.
func (in *Interpreter) fail(c *call, err error) {
	var no *refusal
	switch {
	case c.ctx().Err() != nil:
		panic(http.ErrAbortHandler) // nobody is there to be told, or the sandbox has just ended
	case errors.As(err, &no):
		c.refuse(no.status, no.text)
	case in.gone(c, err):
		c.w.Header().Set("Content-Type", "application/json")
		c.w.WriteHeader(http.StatusBadGateway)
		_ = json.NewEncoder(c.w).Encode(map[string]any{"sandboxId": c.id(), "message": "The sandbox was not found", "code": http.StatusBadGateway})
	default:
		if fault.Is(err, fault.Internal) {
			in.log.Error("interpreter request failed", "sandbox", c.id(), "error", err)
		}
		c.refuse(statusOf(fault.KindOf(err)), fault.Message(err))
	}
}

func (c *call) refuse(status int, why string) {
	target.Advise(c.w.Header(), status)
	text(c.w, status, why)
}

// gone says whether it is the sandbox that is missing, and not something in it.
func (in *Interpreter) gone(c *call, err error) bool {
	switch fault.KindOf(err) {
	case fault.Gone, fault.NotFound, fault.Unavailable:
	default:
		return false
	}
	_, err = in.sandboxes.Agent(c.ctx(), c.t.Who, c.id())
	return err != nil
}

// statusOf is what E2B's interpreter answers: hardly more than whether it is the caller's fault.
func statusOf(kind fault.Kind) int {
	switch kind {
	case fault.NotFound, fault.Gone:
		return http.StatusNotFound
	case fault.Exhausted:
		return http.StatusTooManyRequests
	case fault.DiskFull:
		return http.StatusInsufficientStorage
	case fault.Unauthed:
		return http.StatusUnauthorized
	case fault.Denied:
		return http.StatusForbidden
	case fault.Unsupported:
		return http.StatusNotImplemented
	case fault.Invalid, fault.Conflict, fault.Timeout, fault.Unavailable, fault.Internal:
		return http.StatusInternalServerError
	}
	return http.StatusInternalServerError
}

func text(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(message))
}

func detail(w http.ResponseWriter, status int, what any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"detail": what})
}
