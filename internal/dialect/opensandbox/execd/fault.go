package execd

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// The codes of errors, as clients know them.
const (
	codeBody        = "INVALID_REQUEST_BODY"
	codeQuery       = "MISSING_QUERY"
	codeFile        = "INVALID_FILE"
	codeContent     = "INVALID_FILE_CONTENT"
	codeMetadata    = "INVALID_FILE_METADATA"
	codeNoFile      = "FILE_NOT_FOUND"
	codeNoContext   = "CONTEXT_NOT_FOUND"
	codeNoCommand   = "COMMAND_NOT_FOUND"
	codeNoSession   = "SESSION_NOT_FOUND"
	codeRuntime     = "RUNTIME_ERROR"
	codeUnsupported = "NOT_SUPPORTED"
	codeUnknown     = "UNKNOWN"
)

// refusal is an error that has its status and its code already.
type refusal struct {
	status  int
	code    string
	message string
}

func (r *refusal) Error() string { return r.message }

// aboutSandbox tells whether it is the sandbox that is missing, and not something in it.
func (r *refusal) aboutSandbox() bool { return strings.HasPrefix(r.code, "DOCKER::") }

func invalid(message string) error { return &refusal{http.StatusBadRequest, codeBody, message} }

// statusOf is what a kind of failure is over HTTP.
func statusOf(kind fault.Kind) (status int, code string) {
	switch kind {
	case fault.Invalid:
		return http.StatusBadRequest, codeBody
	case fault.Denied:
		return http.StatusForbidden, codeRuntime
	case fault.Unauthed:
		return http.StatusUnauthorized, codeRuntime
	case fault.NotFound, fault.Gone:
		return http.StatusNotFound, codeNoFile
	case fault.Conflict:
		return http.StatusConflict, codeRuntime
	case fault.Exhausted:
		return http.StatusTooManyRequests, codeRuntime
	case fault.DiskFull:
		return http.StatusInsufficientStorage, codeRuntime
	case fault.Timeout:
		return http.StatusGatewayTimeout, codeRuntime
	case fault.Unavailable:
		return http.StatusServiceUnavailable, codeRuntime
	case fault.Unsupported:
		return http.StatusNotImplemented, codeUnsupported
	case fault.Internal:
	}
	return http.StatusInternalServerError, codeUnknown
}

// fail tells why there is no answer.
func (h *Handler) fail(c *call, err error) {
	if c.ctx().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to be told, or the sandbox has just stopped
	}
	no := h.refusal(c, err)
	status := no.status
	if bare[c.r.Pattern] && (status == http.StatusForbidden || status == http.StatusNotFound || status == http.StatusConflict) && !no.aboutSandbox() {
		status = http.StatusBadRequest
	}
	c.w.Header().Del("Content-Length")
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		c.w.Header().Set("Retry-After", "1")
	}
	c.answerWith(status, map[string]string{"code": no.code, "message": no.message})
}

// bare are the routes whose clients read the code of an error with status 400 or 500 only.
var bare = map[string]bool{
	"DELETE /command": true, "DELETE /code": true, "POST /files/permissions": true, "POST /files/replace": true, "POST /directories": true,
}

// refusal puts an error into the words of this API. Where the sandbox is what is missing, that is what is told.
func (h *Handler) refusal(c *call, err error) *refusal {
	var no *refusal
	if errors.As(err, &no) {
		return no
	}
	kind := fault.KindOf(err)
	switch kind {
	case fault.Gone, fault.NotFound, fault.Unavailable, fault.Conflict:
		err = h.sandboxes.Explain(c.ctx(), c.t.Who, c.id(), err)
		if no := h.stopped(c); no != nil {
			return no
		}
	case fault.Internal:
		h.log.ErrorContext(c.ctx(), "request failed", "sandbox", c.id(), "error", err)
	default: // the caller's doing, or nobody's
	}
	status, code := statusOf(fault.KindOf(err))
	return &refusal{status, code, fault.Message(err)}
}

// stopped says so when the sandbox does not run.
func (h *Handler) stopped(c *call) *refusal {
	sb, err := h.sandboxes.Get(c.ctx(), c.t.Who, c.id())
	switch {
	case err != nil || sb.State == sandbox.StateEnded || sb.State == sandbox.StateStopping:
		return &refusal{http.StatusNotFound, "DOCKER::SANDBOX_NOT_FOUND", "sandbox " + c.id() + " has ended"}
	case sb.State != sandbox.StateRunning:
		return &refusal{http.StatusConflict, "DOCKER::SANDBOX_NOT_RUNNING", "sandbox " + c.id() + " is " + string(sb.State)}
	}
	return nil
}

func wrongMethod(c *call) error {
	return &refusal{http.StatusMethodNotAllowed, codeUnsupported, c.r.Method + " is not served on " + c.r.URL.Path}
}

func noRoute(c *call) error {
	return &refusal{http.StatusNotFound, codeUnsupported, "there is no " + c.r.Method + " " + c.r.URL.Path + " here"}
}

// nothing answers with an empty body. Its length is told: some clients read what has none as JSON.
func (c *call) nothing() error {
	c.w.Header().Set("Content-Length", "0")
	c.w.WriteHeader(http.StatusOK)
	return nil
}

func (c *call) answer(value any) error {
	c.answerWith(http.StatusOK, value)
	return nil
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
