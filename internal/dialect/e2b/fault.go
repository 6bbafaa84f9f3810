package e2b

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// Status is the HTTP status of a kind of failure.
func Status(kind fault.Kind) int { return target.Status(kind) }

// problem is the body of every failure. The SDKs decide by Code as often as by the status.
type problem struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	ErrorCode string `json:"error_code,omitempty"`
}

// exact is a failure whose status or code says more than its kind.
type exact struct {
	problem
	err error
}

func (e *exact) Error() string { return e.err.Error() }
func (e *exact) Unwrap() error { return e.err }

func problemOf(err error) problem {
	var e *exact
	if errors.As(err, &e) {
		return e.problem
	}
	return problem{Code: Status(fault.KindOf(err)), Message: fault.Message(err)}
}

// refuse answers with a failure: the caller gets status and sentence, the operator the chain.
func (a *API) refuse(c *call, err error) {
	err = blame(c.ctx(), err)
	a.failed(c.ctx(), err)
	p := problemOf(err)
	if p.Code == http.StatusInternalServerError {
		a.log.Error("request failed", "request", c.w.Header().Get("X-Request-Id"), "tenant", c.who.Tenant, "sandbox", c.id, "error", err)
	}
	target.Advise(c.w.Header(), p.Code)
	fail(c.w, p)
}

func fail(w http.ResponseWriter, p problem) { respond(w, p.Code, p) }

func respond(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"code":500,"message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // a write that fails means that the client has gone: there is nobody left to tell
}

func (c *call) answer(status int, value any) error {
	respond(c.w, status, value)
	return nil
}

func (c *call) nothing() error {
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}
