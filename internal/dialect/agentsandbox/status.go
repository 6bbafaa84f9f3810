package agentsandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// status is how Kubernetes tells that something went wrong, and sometimes that it went well.
type status struct {
	Kind       string   `json:"kind"`
	APIVersion string   `json:"apiVersion"`
	Metadata   struct{} `json:"metadata"`
	Status     string   `json:"status"`
	Message    string   `json:"message,omitempty"`
	Reason     string   `json:"reason,omitempty"`
	Details    *details `json:"details,omitempty"`
	Code       int      `json:"code"`
}

type details struct {
	Name       string  `json:"name,omitempty"`
	Group      string  `json:"group,omitempty"`
	Kind       string  `json:"kind,omitempty"` // the resource, in fact
	UID        string  `json:"uid,omitempty"`
	Causes     []cause `json:"causes,omitempty"`
	RetryAfter int     `json:"retryAfterSeconds,omitempty"`
}

type cause struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Field   string `json:"field"`
}

// The reasons that clients look at.
const (
	reasonUnauthorized = "Unauthorized"
	reasonForbidden    = "Forbidden"
	reasonNotFound     = "NotFound"
	reasonExists       = "AlreadyExists"
	reasonConflict     = "Conflict"
	reasonExpired      = "Expired"
	reasonInvalid      = "Invalid"
	reasonBadRequest   = "BadRequest"
	reasonMethod       = "MethodNotAllowed"
	reasonAccept       = "NotAcceptable"
	reasonMedia        = "UnsupportedMediaType"
	reasonTooLarge     = "RequestEntityTooLarge"
	reasonTooMany      = "TooManyRequests"
	reasonNoStorage    = "InsufficientStorage" // Kubernetes has no reason for this status
	reasonTimeout      = "Timeout"
	reasonUnavailable  = "ServiceUnavailable"
	reasonInternal     = "InternalError"
	reasonNotServed    = "NotImplemented"
)

// Status is the HTTP status and the reason of a kind of failure, where nothing else is said about it.
func Status(kind fault.Kind) (code int, reason string) {
	switch kind {
	case fault.Invalid:
		return http.StatusBadRequest, reasonBadRequest
	case fault.Denied:
		return http.StatusForbidden, reasonForbidden
	case fault.Unauthed:
		return http.StatusUnauthorized, reasonUnauthorized
	case fault.NotFound, fault.Gone:
		return http.StatusNotFound, reasonNotFound
	case fault.Conflict:
		return http.StatusConflict, reasonConflict
	case fault.Exhausted:
		return http.StatusTooManyRequests, reasonTooMany
	case fault.DiskFull:
		return http.StatusInsufficientStorage, reasonNoStorage
	case fault.Timeout:
		return http.StatusGatewayTimeout, reasonTimeout
	case fault.Unavailable:
		return http.StatusServiceUnavailable, reasonUnavailable
	case fault.Unsupported:
		return http.StatusNotImplemented, reasonNotServed
	case fault.Internal:
	}
	return http.StatusInternalServerError, reasonInternal
}

// refusal is a failure that says more than its kind.
type refusal struct {
	code    int
	reason  string
	message string
	details *details
}

func (r *refusal) Error() string { return r.message }

// Unwrap gives those who only count failures a kind.
func (r *refusal) Unwrap() error {
	kind := fault.Invalid
	for _, k := range fault.Kinds {
		if code, _ := Status(k); code == r.code && k != fault.Gone {
			kind = k
		}
	}
	return fault.New(kind, "%s", r.message)
}

func refuse(code int, reason, format string, args ...any) *refusal {
	return &refusal{code: code, reason: reason, message: fmt.Sprintf(format, args...)}
}

func badRequest(format string, args ...any) error {
	return refuse(http.StatusBadRequest, reasonBadRequest, format, args...)
}

func about(k *kind, name string) *details {
	return &details{Name: name, Group: k.group, Kind: k.resource}
}

func (k *kind) qualified() string { return k.resource + "." + k.group }

func notFound(k *kind, name string) error {
	r := refuse(http.StatusNotFound, reasonNotFound, "%s %.253q not found", k.qualified(), name)
	r.details = about(k, name)
	return r
}

func exists(k *kind, name string) error {
	r := refuse(http.StatusConflict, reasonExists, "%s %q already exists", k.qualified(), name)
	r.details = about(k, name)
	return r
}

func conflict(k *kind, name, why string) error {
	r := refuse(http.StatusConflict, reasonConflict, "Operation cannot be fulfilled on %s %q: %s", k.qualified(), name, why)
	r.details = about(k, name)
	return r
}

func forbidden(k *kind, name, format string, args ...any) error {
	r := refuse(http.StatusForbidden, reasonForbidden, "%s %q is forbidden: %s", k.qualified(), name, fmt.Sprintf(format, args...))
	r.details = about(k, name)
	return r
}

// invalid is an object that is well formed and cannot be meant.
func invalid(k *kind, name, field, format string, args ...any) error {
	message := fmt.Sprintf(format, args...)
	r := refuse(http.StatusUnprocessableEntity, reasonInvalid, "%s.%s %.253q is invalid: %s: %s", k.name, k.group, name, field, message)
	r.details = &details{Name: name, Group: k.group, Kind: k.name, Causes: []cause{{"FieldValueInvalid", message, field}}}
	return r
}

func noSuchPath() error {
	return refuse(http.StatusNotFound, reasonNotFound, "the server could not find the requested resource")
}

func wrongMethod() error {
	return refuse(http.StatusMethodNotAllowed, reasonMethod, "the server does not allow this method on the requested resource")
}

func statusOf(err error) status {
	s := status{Kind: "Status", APIVersion: "v1", Status: "Failure"}
	var r *refusal
	if errors.As(err, &r) {
		s.Code, s.Reason, s.Message, s.Details = r.code, r.reason, r.message, r.details
		return s
	}
	s.Code, s.Reason = Status(fault.KindOf(err))
	s.Message = fault.Message(err)
	return s
}

// refuse answers with a failure: the caller gets a Status, the operator the chain.
func (a *API) refuse(c *call, err error) {
	if fault.KindOf(err) == fault.Internal && c.ctx().Err() != nil {
		err = fault.Wrap(fault.Unavailable, err, "the request was cancelled")
	}
	a.failed(c.ctx(), err)
	s := statusOf(err)
	if s.Code == http.StatusInternalServerError {
		a.log.Error("request failed", "request", c.w.Header().Get("X-Request-Id"), "tenant", c.who.Tenant, "error", err)
	}
	if s.Code == http.StatusServiceUnavailable || s.Code == http.StatusTooManyRequests {
		c.w.Header().Set("Retry-After", "1")
	}
	if s.Code == http.StatusUnauthorized {
		c.w.Header().Set("WWW-Authenticate", "Bearer")
	}
	respond(c.w, s.Code, s)
}

func respond(w http.ResponseWriter, code int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		code, body = http.StatusInternalServerError, []byte(`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"internal error","reason":"InternalError","code":500}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-cache, private")
	w.WriteHeader(code)
	_, _ = w.Write(append(body, '\n')) // a write that fails means that the client has gone: there is nobody left to tell
}

// call is one request and who makes it.
type call struct {
	w   http.ResponseWriter
	r   *http.Request
	who auth.Principal
	to  target
	q   query
}

func (c *call) ctx() context.Context { return c.r.Context() }
