// Package egress answers for a sandbox's port 18080 as OpenSandbox's egress sidecar would: what may leave the sandbox, and
// changes of it. It translates; the domain decides, and the sandbox's driver enforces.
package egress

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"path"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes is what egress asks of the domain.
type Sandboxes interface {
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	ChangeNetwork(ctx context.Context, p auth.Principal, id string, c sandbox.NetworkChange) (sandbox.Sandbox, error)
}

const (
	maxBody   = 1 << 20
	bodyGrace = 30 * time.Second // in which a body comes whole
)

func setReadDeadline(w http.ResponseWriter, t time.Time) {
	_ = http.NewResponseController(w).SetReadDeadline(t) // a writer without deadlines has no connection that could stall
}

// Handler answers requests that carry a target.
type Handler struct {
	sandboxes Sandboxes
	log       *slog.Logger
	mux       *http.ServeMux
}

// New makes a handler.
func New(s Sandboxes, log *slog.Logger) *Handler {
	h := &Handler{sandboxes: s, log: log, mux: http.NewServeMux()}
	for pattern, serve := range map[string]func(*call) error{
		"GET /policy":        h.get,
		"PUT /policy":        h.replace,
		"POST /policy":       h.replace,
		"PATCH /policy":      h.patch,
		"DELETE /policy":     h.remove,
		"/policy":            wrongMethod,
		"GET /healthz":       healthy,
		"/credential-vault":  noVault,
		"/credential-vault/": noVault,
		"/":                  noRoute,
	} {
		h.mux.Handle(pattern, h.handler(serve))
	}
	return h
}

// ServeHTTP answers a request that was let in.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if path.Clean(r.URL.Path) != r.URL.Path {
		h.handler(noRoute).ServeHTTP(w, r) // a mux would send the client to where it thinks that this is
		return
	}
	h.mux.ServeHTTP(w, r)
}

// call is one request on its way.
type call struct {
	w http.ResponseWriter
	r *http.Request
	t *access.Target
}

func (h *Handler) handler(serve func(*call) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 { // net/http reads on after whoever refuses, which must not wait for ever either
			setReadDeadline(w, time.Now().Add(bodyGrace))
		}
		c := &call{w, r, access.From(r.Context())}
		if err := serve(c); err != nil {
			h.fail(c, err)
		}
	})
}

// refusal is an error that has its status and its code already.
type refusal struct {
	status  int
	code    string
	message string
}

func (r *refusal) Error() string { return r.message }

// fail tells why there is no answer.
func (h *Handler) fail(c *call, err error) {
	if c.r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	var no *refusal
	if !errors.As(err, &no) {
		kind := fault.KindOf(err)
		if kind == fault.Internal {
			h.log.ErrorContext(c.r.Context(), "request failed", "sandbox", c.t.Sandbox.ID, "error", err)
		}
		status, code := statusOf(kind)
		no = &refusal{status, code, fault.Message(err)}
	}
	if no.status == http.StatusTooManyRequests || no.status == http.StatusServiceUnavailable {
		c.w.Header().Set("Retry-After", "1")
	}
	c.answerWith(no.status, map[string]string{"code": no.code, "message": no.message})
}

// statusOf is what a kind of failure is over HTTP.
func statusOf(kind fault.Kind) (status int, code string) {
	switch kind {
	case fault.Invalid:
		return http.StatusBadRequest, "EGRESS::INVALID_POLICY"
	case fault.Denied:
		return http.StatusForbidden, "EGRESS::DENIED"
	case fault.Unauthed:
		return http.StatusUnauthorized, "EGRESS::DENIED"
	case fault.NotFound, fault.Gone:
		return http.StatusNotFound, "DOCKER::SANDBOX_NOT_FOUND"
	case fault.Conflict:
		return http.StatusConflict, "DOCKER::SANDBOX_NOT_RUNNING"
	case fault.Exhausted:
		return http.StatusTooManyRequests, "EGRESS::BUSY"
	case fault.DiskFull:
		return http.StatusInsufficientStorage, "SANDBOX::INSUFFICIENT_STORAGE"
	case fault.Timeout:
		return http.StatusGatewayTimeout, "EGRESS::TIMEOUT"
	case fault.Unavailable:
		return http.StatusServiceUnavailable, "EGRESS::UNAVAILABLE"
	case fault.Unsupported:
		return http.StatusNotImplemented, "SANDBOX::API_NOT_SUPPORTED"
	case fault.Internal:
	}
	return http.StatusInternalServerError, "GENERAL::UNKNOWN_ERROR"
}

func (c *call) answerWith(status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		panic(err) // plain data
	}
	out := c.w.Header()
	out.Set("Content-Type", "application/json")
	out.Set("X-Content-Type-Options", "nosniff")
	out.Set("Content-Length", strconv.Itoa(len(body)))
	c.w.WriteHeader(status)
	_, _ = c.w.Write(body) // a client that has gone hears nothing
}

// body reads a request's whole body.
func (c *call) body() ([]byte, error) {
	raw, err := transfer.ReadJSON(c.r.Context(), c.t.Who.Tenant, http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err == nil {
		setReadDeadline(c.w, time.Time{})
	}
	var large *http.MaxBytesError
	var told *fault.Error
	switch {
	case errors.As(err, &told):
		return nil, err
	case errors.As(err, &large):
		return nil, &refusal{http.StatusRequestEntityTooLarge, "EGRESS::TOO_LARGE", "a policy has at most 1 MiB"}
	case err != nil:
		return nil, fault.New(fault.Invalid, "the request ended before its time")
	}
	return raw, nil
}

func healthy(c *call) error {
	c.w.Header().Set("Content-Length", "0")
	c.w.WriteHeader(http.StatusOK)
	return nil
}

func wrongMethod(c *call) error {
	return &refusal{http.StatusMethodNotAllowed, "SANDBOX::API_NOT_SUPPORTED", c.r.Method + " is not served on " + c.r.URL.Path}
}

func noRoute(c *call) error {
	return &refusal{http.StatusNotFound, "SANDBOX::API_NOT_SUPPORTED", "there is no " + c.r.Method + " " + c.r.URL.Path + " here"}
}

func noVault(*call) error {
	return fault.New(fault.Unsupported, "the credential vault is not served here yet; give a sandbox its credentials by its environment")
}
