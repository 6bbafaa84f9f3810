package target

import (
	"net/http"

	"github.com/covehq/cove/internal/fault"
)

// Status is what a kind of failure is over HTTP, where E2B says nothing else about it.
func Status(kind fault.Kind) int {
	switch kind {
	case fault.Invalid:
		return http.StatusBadRequest
	case fault.Denied:
		return http.StatusForbidden
	case fault.Unauthed:
		return http.StatusUnauthorized
	case fault.NotFound, fault.Gone: // the SDKs know one word for what was never there and what is no more
		return http.StatusNotFound
	case fault.Conflict:
		return http.StatusConflict
	case fault.Exhausted:
		return http.StatusTooManyRequests
	case fault.DiskFull:
		return http.StatusInsufficientStorage
	case fault.Timeout:
		return http.StatusGatewayTimeout
	case fault.Unavailable:
		return http.StatusServiceUnavailable
	case fault.Unsupported:
		return http.StatusNotImplemented
	case fault.Internal:
	}
	return http.StatusInternalServerError
}

// Advise tells an SDK whether to try again what was answered with a status.
func Advise(h http.Header, status int) {
	switch status {
	case http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	case http.StatusTooManyRequests, http.StatusGatewayTimeout:
		// Without this word the SDKs try three times more, although only somebody's doing changes the answer.
		h.Set("Should-Retry", "false")
	}
}
