package envd

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// code is what a fault is called in Connect.
func code(kind fault.Kind) connect.Code {
	switch kind {
	case fault.Invalid:
		return connect.CodeInvalidArgument
	case fault.Denied:
		return connect.CodePermissionDenied
	case fault.Unauthed:
		return connect.CodeUnauthenticated
	case fault.NotFound, fault.Gone:
		return connect.CodeNotFound
	case fault.Conflict:
		return connect.CodeFailedPrecondition
	case fault.Exhausted:
		return connect.CodeResourceExhausted
	case fault.Timeout:
		return connect.CodeDeadlineExceeded
	case fault.Unavailable:
		return connect.CodeUnavailable
	case fault.Unsupported:
		return connect.CodeUnimplemented
	case fault.DiskFull: // as envd; the SDKs take resource_exhausted for a limit of requests
	case fault.Internal:
	}
	return connect.CodeInternal
}

// failed is the Connect error of something that went wrong. A request whose sandbox is gone is cut without a last word: that
// is how the SDKs tell the end of a sandbox from a failure in it.
func (h *Handler) failed(ctx context.Context, err error) error {
	err = h.explain(ctx, err)
	var ours *connect.Error
	switch {
	case errors.As(err, &ours):
		return ours
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the time given has passed"))
	case ctx.Err() != nil: // whoever cancelled it knows why
		return connect.NewError(connect.CodeCanceled, errors.New("the request was cancelled"))
	}
	kind := fault.KindOf(err)
	if kind == fault.Internal {
		h.log.ErrorContext(ctx, "request failed", "sandbox", target.From(ctx).Sandbox.ID, "error", err)
	}
	return connect.NewError(code(kind), errors.New(fault.Message(err)))
}

// explain cuts the request if its sandbox runs no more; other errors stay, with the kind that they have.
func (h *Handler) explain(ctx context.Context, err error) error {
	t := target.From(ctx)
	switch kind := fault.KindOf(err); kind {
	case fault.Unavailable, fault.Gone, fault.Conflict, fault.NotFound: // of the sandbox, or of something in it
		err = h.sandboxes.Explain(ctx, t.Who, t.Sandbox.ID, err)
		sb, lookup := h.sandboxes.Get(ctx, t.Who, t.Sandbox.ID)
		if ctx.Err() == nil && (lookup != nil || sb.State != sandbox.StateRunning) {
			panic(http.ErrAbortHandler)
		}
	case fault.Internal, fault.Invalid, fault.Denied, fault.Unauthed, fault.Exhausted, fault.DiskFull, fault.Timeout, fault.Unsupported:
	}
	return err
}

// refuse answers a plain HTTP request with an error.
func refuse(w http.ResponseWriter, status int, message string) {
	respond(w, status, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
}

func respond(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		panic(err) // plain data
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // a client that has gone hears nothing
}

// status is what a fault is over plain HTTP: of a file, where it differs from other things.
func status(kind fault.Kind) int {
	switch kind {
	case fault.Conflict, fault.Unsupported:
		return http.StatusBadRequest
	default:
		return target.Status(kind)
	}
}

// refuseFault answers a plain HTTP request with a fault.
func (h *Handler) refuseFault(ctx context.Context, w http.ResponseWriter, err error) {
	err = h.explain(ctx, err)
	kind := fault.KindOf(err)
	if kind == fault.Internal && ctx.Err() == nil {
		h.log.ErrorContext(ctx, "request failed", "sandbox", target.From(ctx).Sandbox.ID, "error", err)
	}
	refuse(w, status(kind), fault.Message(err))
}
