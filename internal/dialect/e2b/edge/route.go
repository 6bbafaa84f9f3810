package edge

import (
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// way is how a request names its sandbox.
type way int

const (
	byHost      way = iota // {port}-{id}.{domain}: an origin of its own
	byHeader               // E2b-Sandbox-Id and E2b-Sandbox-Port
	byPath                 // /kruise/{id}/{port}/…
	bySignature            // a signed file URL that says nothing else
)

// route is where a request goes.
type route struct {
	id   string
	port int
	way  way
}

const (
	headerID   = "E2b-Sandbox-Id"
	headerPort = "E2b-Sandbox-Port"

	pathPrefix  = "/kruise/"
	controlPath = "/kruise/api"
)

// route finds out what a request is for. A host that names a sandbox counts more than headers, which the SDKs send anyway.
func (e *Edge) route(r *http.Request) (at route, ok bool, err error) {
	if port, id, ok := parseHost(r.Host, e.cfg.Domain); ok {
		return route{id, port, byHost}, true, nil
	}
	if id := r.Header.Get(headerID); id != "" && !isConnect(r) {
		return headerRoute(id, r.Header.Get(headerPort))
	}
	if rest, ok := strings.CutPrefix(r.URL.Path, pathPrefix); ok && !isControl(r.URL.Path) {
		return pathRoute(rest)
	}
	if r.URL.Path == "/files" {
		return route{port: target.PortEnvd, way: bySignature}, true, nil
	}
	return route{}, false, nil
}

func isControl(path string) bool {
	return path == controlPath || strings.HasPrefix(path, controlPath+"/")
}

// isConnect recognizes the control plane's POST /sandboxes/{id}/connect. SDKs about 2.20 send the headers of envd with it, which
// has no such path; a program on another port may have one.
func isConnect(r *http.Request) bool {
	path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, controlPath), "/v2")
	return r.Method == http.MethodPost && path == "/sandboxes/"+r.Header.Get(headerID)+"/connect" &&
		r.Header.Get(headerPort) == strconv.Itoa(target.PortEnvd)
}

func headerRoute(id, port string) (route, bool, error) {
	name, ok := parseID(id)
	if !ok {
		return route{}, false, fault.New(fault.Invalid, "header %s is not the id of a sandbox", headerID)
	}
	n, ok := parsePort(port)
	if !ok {
		return route{id: name}, false, fault.New(fault.Invalid, "header %s is missing or not a port", headerPort)
	}
	return route{name, n, byHeader}, true, nil
}

func pathRoute(rest string) (route, bool, error) {
	id, rest, _ := strings.Cut(rest, "/")
	port, _, _ := strings.Cut(rest, "/")
	name, okID := parseID(id)
	n, okPort := parsePort(port)
	if !okID || !okPort {
		return route{}, false, fault.New(fault.Invalid, "want %s{sandbox}/{port}/…", pathPrefix)
	}
	return route{name, n, byPath}, true, nil
}

// parseHost reads {port}-{id}[-{client}].{domain}[:port], where localhost is always a domain.
func parseHost(host, domain string) (port int, id string, ok bool) {
	if h, at, err := net.SplitHostPort(host); err == nil {
		if _, ok := parsePort(at); !ok && at != "" {
			return 0, "", false
		}
		host = h
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	for _, d := range []string{domain, "localhost"} {
		if label, ok := strings.CutSuffix(host, "."+d); ok && d != "" {
			if port, id, ok := parseLabel(label); ok {
				return port, id, true
			}
		}
	}
	return 0, "", false
}

func parseLabel(label string) (port int, id string, ok bool) {
	number, name, _ := strings.Cut(label, "-")
	port, okPort := parsePort(number)
	id, okID := parseID(name)
	return port, id, okPort && okID
}

// maxID is longer than any id that we make, and fits into a label with a port.
const maxID = 57

// parseID cuts the client's id that older SDKs append.
func parseID(text string) (id string, ok bool) {
	id, client, both := strings.Cut(text, "-")
	return id, alphanumeric(id) && (!both || alphanumeric(client)) && len(text) <= maxID
}

func alphanumeric(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') })
}

func parsePort(text string) (port int, ok bool) {
	if len(text) > 5 || text == "" || text[0] < '1' || text[0] > '9' { // Atoi would take a sign
		return 0, false
	}
	port, err := strconv.Atoi(text)
	return port, err == nil && port <= 65535
}

// pattern names the route where many are counted together.
func (at route) pattern() string {
	switch at.port {
	case target.PortEnvd:
		return "envd"
	case target.PortInterpreter:
		return "interpreter"
	}
	return "port"
}

// answered tells whether the server itself answers for the port.
func (at route) answered() bool {
	return at.port == target.PortEnvd || at.port == target.PortInterpreter
}

// inside is the request as the port sees it.
func (at route) inside(r *http.Request) *http.Request {
	if at.way != byPath {
		return r
	}
	u := *r.URL
	u.Path, u.RawPath = afterPort(u.Path), afterPort(u.RawPath)
	r.URL = &u
	return r
}

// insidePath is the path as the port sees it.
func (at route) insidePath(u *url.URL) string {
	if at.way != byPath {
		return u.Path
	}
	return afterPort(u.Path)
}

// afterPort cuts /kruise/{id}/{port}.
func afterPort(path string) string {
	if path == "" {
		return ""
	}
	parts := strings.SplitN(path, "/", 5)
	if len(parts) < 5 {
		return "/"
	}
	return "/" + parts[4]
}
