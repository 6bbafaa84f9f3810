package cove

import (
	"net/http"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/fault"
)

// statuses is the one table from kinds of failure to HTTP; a test keeps it total over fault.Kinds.
var statuses = map[fault.Kind]int{
	fault.Internal:    http.StatusInternalServerError,
	fault.Invalid:     http.StatusBadRequest,
	fault.Denied:      http.StatusForbidden,
	fault.Unauthed:    http.StatusUnauthorized,
	fault.NotFound:    http.StatusNotFound,
	fault.Conflict:    http.StatusConflict,
	fault.Exhausted:   http.StatusTooManyRequests,
	fault.DiskFull:    http.StatusInsufficientStorage,
	fault.Timeout:     http.StatusGatewayTimeout,
	fault.Unavailable: http.StatusServiceUnavailable,
	fault.Gone:        http.StatusGone,
	fault.Unsupported: http.StatusNotImplemented,
}

// Status is the HTTP status of a kind of failure.
func Status(kind fault.Kind) int {
	if s, ok := statuses[kind]; ok {
		return s
	}
	return http.StatusInternalServerError
}

func wireFault(err error) *client.Fault {
	return &client.Fault{Kind: client.Kind(fault.KindOf(err)), Message: fault.Message(err)}
}
