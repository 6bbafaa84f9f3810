package edge

import (
	"net/http"

	"github.com/covehq/cove/internal/dialect/rawport"
)

// ParseHost reads a host name.
var ParseHost = parseHost

// Route is what a request is for.
func Route(e *Edge, r *http.Request) (id string, port int, ok bool) {
	at, ok, err := e.route(r)
	return at.id, at.port, ok && err == nil
}

// NarrowCookies keeps cookies that are set to their host.
func NarrowCookies(h http.Header) { rawport.NarrowCookies(h, rawport.Visit{}) }
