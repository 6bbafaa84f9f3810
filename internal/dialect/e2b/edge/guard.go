package edge

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
)

const (
	headerAccess  = "X-Access-Token"
	headerTraffic = "E2b-Traffic-Access-Token"
)

// internalPaths are between E2B's own machinery and its envd: nobody has them from outside.
var internalPaths = []string{"/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"}

// guard checks what a request must show for a port. One for a paused sandbox would wake it, so that less is let through
// without a token: only what the SDKs send without one, and ports that the owner has left public.
func (e *Edge) guard(r *http.Request, at route, o target.Options, paused bool) *refusal {
	path := at.insidePath(r.URL)
	if at.port == target.PortEnvd && slices.Contains(internalPaths, path) {
		return &refusal{status: http.StatusNotFound, message: "not found"}
	}
	if at.answered() && preflight(r) { // a browser shows no token before it knows that it may
		return nil
	}
	if at.port != target.PortEnvd && o.PrivateTraffic {
		if no := e.guardTraffic(r, at); no != nil {
			return no
		}
	}
	if !o.Secure || e.showsToken(r, at.id) {
		return nil
	}
	switch {
	case at.port == target.PortEnvd && !paused && open(r, path):
		return nil
	case at.port == target.PortEnvd && path == "/files" && e.verifies(r, at.id):
		return nil
	case at.port == target.PortInterpreter && contexts(path): // the SDKs send none there
		return nil
	case at.port == target.PortInterpreter && path != "/execute":
		if paused && !o.PrivateTraffic { // nothing was shown, and whether it is healthy is no reason to wake it
			return notFound
		}
		return nil
	case !at.answered():
		return nil
	case paused:
		return &refusal{status: http.StatusForbidden, message: "The sandbox is paused and a valid access token is needed to resume it"}
	}
	return unauthorized
}

// known tells whether a request has shown what only the owner can give. Of a sandbox that asks for nothing, the SDKs show
// nothing on the ports that we answer for.
func (e *Edge) known(r *http.Request, at route, o target.Options) bool {
	switch {
	case at.answered() && preflight(r):
		return false
	case !o.Secure && at.answered(), e.showsToken(r, at.id):
		return true
	case at.port == target.PortEnvd:
		return at.insidePath(r.URL) == "/files" && e.verifies(r, at.id)
	}
	given := r.Header.Get(headerTraffic)
	return given != "" && target.Same(given, e.cfg.Tokens.Traffic(at.id))
}

// contexts tells whether a path of the interpreter is about its contexts.
func contexts(path string) bool { return path == "/contexts" || strings.HasPrefix(path, "/contexts/") }

// open are the requests that envd answers without a token, or checks itself.
func open(r *http.Request, path string) bool {
	return path == "/files" || path == "/health" && r.Method == http.MethodGet
}

func (e *Edge) guardTraffic(r *http.Request, at route) *refusal {
	given := r.Header.Get(headerTraffic)
	switch {
	case given == "":
		return &refusal{status: http.StatusForbidden, message: "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"}
	case !target.Same(given, e.cfg.Tokens.Traffic(at.id)):
		return &refusal{status: http.StatusForbidden, message: "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"}
	}
	return nil
}

func (e *Edge) showsToken(r *http.Request, id string) bool {
	given := r.Header.Get(headerAccess)
	return given != "" && target.Same(given, e.cfg.Tokens.Envd(id))
}

// preflight is a browser that asks whether it may ask.
func preflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

// verifies tells whether a file URL is signed for a sandbox and still valid.
func (e *Edge) verifies(r *http.Request, id string) bool {
	return signature(r).Check(e.cfg.Tokens.Envd(id), time.Now()) == nil
}

// signature is that of a file URL.
func signature(r *http.Request) target.Signature {
	return target.ReadSignature(r.URL.Query(), operation(r))
}

// operation is what a request does with a file, or asks whether it may.
func operation(r *http.Request) target.Operation {
	method := r.Method
	if preflight(r) {
		method = r.Header.Get("Access-Control-Request-Method")
	}
	if method == http.MethodPost {
		return target.OpWrite
	}
	return target.OpRead
}
