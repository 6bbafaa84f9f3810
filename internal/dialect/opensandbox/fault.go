package opensandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/covehq/cove/internal/fault"
)

// The codes that clients and people know from OpenSandbox.
const (
	codeUnknown         = "GENERAL::UNKNOWN_ERROR"
	codeInvalid         = "SANDBOX::INVALID_PARAMETER"
	codeLabel           = "SANDBOX::INVALID_METADATA_LABEL"
	codeFilter          = "INVALID_METADATA_FORMAT"
	codeUnsupported     = "SANDBOX::API_NOT_SUPPORTED"
	codePool            = "SANDBOX::UNSUPPORTED_POOL_REF"
	codeMissingKey      = "MISSING_API_KEY"
	codeInvalidKey      = "INVALID_API_KEY"
	codeDenied          = "FORBIDDEN"
	codeNotFound        = "DOCKER::SANDBOX_NOT_FOUND"
	codeNotRunning      = "DOCKER::SANDBOX_NOT_RUNNING"
	codeNotPaused       = "DOCKER::SANDBOX_NOT_PAUSED"
	codeConflict        = "SANDBOX::CONFLICT"
	codeExhausted       = "SANDBOX::TOO_MANY_REQUESTS"
	codeDiskFull        = "SANDBOX::INSUFFICIENT_STORAGE"
	codeTimeout         = "SANDBOX::TIMEOUT"
	codeUnavailable     = "DOCKER::INITIALIZATION_ERROR"
	codeExpiration      = "DOCKER::INVALID_EXPIRATION"
	codeEntrypoint      = "DOCKER::INVALID_ENTRYPOINT"
	codePort            = "DOCKER::INVALID_PORT"
	codePull            = "DOCKER::SANDBOX_IMAGE_PULL_FAILED"
	codeStart           = "DOCKER::SANDBOX_START_FAILED"
	codePortClosed      = "SANDBOX::PORT_NOT_OPEN"
	codeTooLarge        = "REQUEST_TOO_LARGE"
	codeSnapshotMissing = "SNAPSHOT::NOT_FOUND"
	codeSnapshotSource  = "SNAPSHOT::INVALID_SOURCE_STATE"
	codeSnapshotUnready = "SNAPSHOT::NOT_READY"
	codeSnapshotBusy    = "SNAPSHOT::DELETE_CONFLICT"
	codeSnapshotRestore = "SNAPSHOT::INVALID_RESTORE_CONFIG"
	codePools           = "KUBERNETES::POOL_NOT_SUPPORTED"
)

// Status is the HTTP status and the code of a kind of failure, where nothing else is said about it.
func Status(kind fault.Kind) (status int, code string) {
	switch kind {
	case fault.Invalid:
		return http.StatusBadRequest, codeInvalid
	case fault.Denied:
		return http.StatusForbidden, codeDenied
	case fault.Unauthed:
		return http.StatusUnauthorized, codeInvalidKey
	case fault.NotFound, fault.Gone: // the clients know one word for what was never there and what is no more
		return http.StatusNotFound, codeNotFound
	case fault.Conflict:
		return http.StatusConflict, codeConflict
	case fault.Exhausted:
		return http.StatusTooManyRequests, codeExhausted
	case fault.DiskFull:
		return http.StatusInsufficientStorage, codeDiskFull
	case fault.Timeout:
		return http.StatusGatewayTimeout, codeTimeout
	case fault.Unavailable:
		return http.StatusServiceUnavailable, codeUnavailable
	case fault.Unsupported:
		return http.StatusNotImplemented, codeUnsupported
	case fault.Internal:
	}
	return http.StatusInternalServerError, codeUnknown
}

// problem is the body of every failure: the clients fail in obscure ways without either field.
type problem struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// exact is a failure whose status and code say more than its kind.
type exact struct {
	status int
	problem
	err error
}

func (e *exact) Error() string { return e.err.Error() }
func (e *exact) Unwrap() error { return e.err }

// told is a failure with status, code and sentence.
func told(status int, code, format string, args ...any) error {
	message := fmt.Sprintf(format, args...)
	return &exact{status, problem{code, message}, fault.New(kindOf(status), "%s", message)}
}

// as gives a failure a code of its own; its status and sentence stay.
func as(code string, err error) error {
	status, _ := Status(fault.KindOf(err))
	return withStatus(status, code, err)
}

func withStatus(status int, code string, err error) error {
	return &exact{status, problem{code, fault.Message(err)}, err}
}

func kindOf(status int) fault.Kind {
	for _, kind := range fault.Kinds {
		if s, _ := Status(kind); s == status && kind != fault.Gone {
			return kind
		}
	}
	if status < http.StatusInternalServerError {
		return fault.Invalid
	}
	return fault.Unavailable
}

func missingKey() error {
	return told(http.StatusUnauthorized, codeMissingKey, "an API key is needed: send it as OPEN-SANDBOX-API-KEY")
}

// wrongKey is a key that was refused, unless something else went wrong.
func wrongKey(err error) error {
	if fault.Is(err, fault.Unauthed) {
		return as(codeInvalidKey, err)
	}
	return err
}

func noSandbox(id string) error {
	return told(http.StatusNotFound, codeNotFound, "there is no sandbox %.64q", id)
}

func invalid(format string, args ...any) error {
	return told(http.StatusBadRequest, codeInvalid, format, args...)
}

func problemOf(err error) (int, problem) {
	var e *exact
	if errors.As(err, &e) {
		return e.status, e.problem
	}
	status, code := Status(fault.KindOf(err))
	return status, problem{code, fault.Message(err)}
}

// refuse answers with a failure: the caller gets status, code and sentence, the operator the chain.
//
// Retry-After goes by the kind: a create that fails because the database is away is a 500.
func (a *API) refuse(c *call, err error) {
	err = blame(c.ctx(), err)
	a.failed(c.ctx(), err)
	status, p := problemOf(err)
	if fault.KindOf(err) == fault.Internal {
		a.log.Error("request failed", "request", c.w.Header().Get("X-Request-Id"), "tenant", c.who.Tenant, "sandbox", c.id, "error", err)
	}
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable, fault.KindOf(err) == fault.Unavailable:
		c.w.Header().Set("Retry-After", "1")
	}
	respond(c.w, status, p)
}

// blame gives a kind to what ended because somebody stopped waiting, which is nobody's defect.
func blame(ctx context.Context, err error) error {
	if fault.KindOf(err) != fault.Internal || ctx.Err() == nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "the request was cancelled")
}

func respond(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"code":"`+codeUnknown+`","message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // a write that fails means that the client has gone: there is nobody left to tell
}

func (c *call) answer(status int, value any) error {
	respond(c.w, status, value)
	return nil
}

// nothing answers without a body, and says so: a client takes one of unknown length for JSON.
func (c *call) nothing(status int) error {
	if status != http.StatusNoContent {
		c.w.Header().Set("Content-Length", "0")
	}
	c.w.WriteHeader(status)
	return nil
}
