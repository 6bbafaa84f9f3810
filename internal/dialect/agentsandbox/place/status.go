package place

import (
	"net/http"

	"github.com/covehq/cove/internal/fault"
)

// Status is what a kind of failure is over HTTP. Clients up to 0.5 send a request again, five times, when they see a 5xx: that
// is said only where nothing was begun and it may go better a moment later.
func Status(kind fault.Kind) int {
	switch kind {
	case fault.Invalid:
		return http.StatusBadRequest
	case fault.Denied:
		return http.StatusForbidden
	case fault.Unauthed:
		return http.StatusUnauthorized
	case fault.NotFound, fault.Gone:
		return http.StatusNotFound
	case fault.Conflict:
		return http.StatusConflict
	case fault.Exhausted:
		return http.StatusRequestEntityTooLarge
	case fault.DiskFull:
		return http.StatusInsufficientStorage
	case fault.Timeout:
		return http.StatusRequestTimeout
	case fault.Unsupported:
		return http.StatusMethodNotAllowed
	case fault.Unavailable:
		return http.StatusServiceUnavailable
	case fault.Internal:
	}
	return http.StatusInternalServerError
}
