package opensandbox

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/fault"
)

// The headers of the clients.
const (
	headerKey    = "Open-Sandbox-Api-Key"
	headerAccess = "Opensandbox-Secure-Access"
	headerEgress = "Opensandbox-Egress-Auth"
	headerExecd  = "X-Execd-Access-Token"
)

// Endpoint is where a port of a sandbox is reached, without a scheme, and what must be sent there.
type Endpoint struct {
	Endpoint string            `json:"endpoint"`
	Headers  map[string]string `json:"headers,omitempty"`
}

func (a *API) endpoint(c *call) error {
	port, ok := parsePort(c.r.PathValue("port"))
	if !ok {
		return told(http.StatusBadRequest, codePort, "port %.20q: want a number from 1 to 65535", c.r.PathValue("port"))
	}
	q := c.query()
	proxied := q.flag("use_server_proxy")
	if q.err != nil {
		return q.err
	}
	facts, err := a.reachable(c)
	if err != nil {
		return err
	}

	if q.Has("expires") {
		return a.signedEndpoint(c, port, q.Get("expires"), proxied)
	}
	headers := map[string]string{"OpenSandbox-Secure-Access": a.token(c.id, port)}
	if port == access.PortEgress {
		headers["OPENSANDBOX-EGRESS-AUTH"] = a.token(c.id, port)
	}
	path := proxyPath(c.id, port)
	if !answered(port) && !proxied && !facts.Secure {
		path = a.signedPath(c.id, port, forever)
	}
	return c.answer(http.StatusOK, Endpoint{c.r.Host + path, headers})
}

// reachable tells how a sandbox was asked for, if it has endpoints: the clients ask for them while it is being made.
func (a *API) reachable(c *call) (access.Facts, error) {
	if made := a.creations.find(c.who.Tenant, c.id); made != nil {
		return made.plan.facts, nil
	}
	sb, err := a.find(c) // one that has exited has endpoints too, which say so
	if err != nil {
		return access.Facts{}, err
	}
	return access.Decode(sb)
}

// maxSigned is how long an endpoint is good for at most that was asked for with an end: nobody can take it back.
const maxSigned = 7 * 24 * time.Hour

func (a *API) signedEndpoint(c *call, port int, text string, proxied bool) error {
	expires, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil:
		return invalid("expires=%.40q: want a time in seconds since 1970", text)
	case proxied:
		return invalid("expires cannot be combined with use_server_proxy=true")
	case expires <= time.Now().Unix():
		return invalid("expires=%d is not in the future", expires)
	}
	expires = min(expires, time.Now().Add(maxSigned).Unix())
	end := strconv.FormatInt(expires, 36)
	return c.answer(http.StatusOK, Endpoint{Endpoint: c.r.Host + a.signedPath(c.id, port, end)})
}

// forever is the end of a path that is good for as long as its sandbox. Programs print the endpoint of a web server for a browser, or look
// there whether it is up, and send no header: such a path lets them in, and nobody who knows the sandbox's id alone.
const forever = "0"

// mark stands between an id and what signs it. No id contains it.
const mark = "~"

func (a *API) signedPath(id string, port int, end string) string {
	return proxyPath(id+mark+end+mark+a.signature(id, port, end), port)
}

func proxyPath(id string, port int) string {
	return "/sandboxes/" + id + "/proxy/" + strconv.Itoa(port)
}

// token guards a port. That of execd is good for all ports, since whoever has it can do whatever the sandbox can; no other
// is good for execd, so that the endpoint of a web server can be given away.
func (a *API) token(id string, port int) string {
	return a.tokens.Derive("opensandbox.port", id, strconv.Itoa(port))
}

// signature is a token with an end, short enough for a link.
func (a *API) signature(id string, port int, end string) string {
	return a.tokens.Derive("opensandbox.signed", id, strconv.Itoa(port), end)[:40]
}

// visitor is a request for a port of a sandbox.
type visitor struct {
	id     string
	port   int
	prefix string // of the path, up to the port
	path   string // behind the port, as it is escaped; empty: nothing, not even a slash
	end    string // of a signed one, in base 36
	sign   string
}

var proxyForm = regexp.MustCompile(`^(?:/v1)?/sandboxes/([^/]+)/proxy/([0-9]{1,10})(/.*)?$`)

// isProxy tells whether a path, as it is escaped, is that of a port.
func isProxy(path string) bool { return proxyForm.MatchString(path) }

// parseProxy reads the path of a port.
func parseProxy(path string) (v visitor, ok bool) {
	m := proxyForm.FindStringSubmatch(path)
	if m == nil {
		return visitor{}, false
	}
	id, signed, has := strings.Cut(m[1], mark)
	if has {
		v.end, v.sign, ok = strings.Cut(signed, mark)
		if !ok || v.end == "" || v.sign == "" {
			return visitor{}, false
		}
	}
	if v.port, ok = parsePort(m[2]); !ok || !idForm.MatchString(id) {
		return visitor{}, false
	}
	v.id, v.path, v.prefix = id, m[3], strings.TrimSuffix(path, m[3])
	return v, true
}

func parsePort(text string) (port int, ok bool) {
	if len(text) > 5 || text == "" || text[0] < '1' || text[0] > '9' { // Atoi would take a sign
		return 0, false
	}
	port, err := strconv.Atoi(text)
	return port, err == nil && port <= 65535
}

// identify finds out whether a visitor may come, by what it shows: a token, a signature or a key. That comes before any look
// at the sandbox, so that a stranger learns nothing of it. The tenant is empty when it showed no key.
func (a *API) identify(r *http.Request, v visitor) (who auth.Principal, err error) {
	shown := false
	for _, name := range []string{headerAccess, headerEgress, headerExecd} {
		given := r.Header.Get(name)
		if given == "" {
			continue
		}
		shown = true
		if auth.Same(given, a.token(v.id, v.port)) || auth.Same(given, a.token(v.id, access.PortExecd)) {
			return auth.Principal{}, nil
		}
	}
	if v.sign != "" {
		return auth.Principal{}, a.checkSigned(v)
	}
	for _, given := range []string{presented(r.Header), r.Header.Get(headerExecd)} {
		if given == "" {
			continue
		}
		shown = true
		if who, err = a.keys.Authenticate(r.Context(), given); err == nil || !fault.Is(err, fault.Unauthed) {
			return who, err
		}
	}
	if shown {
		return auth.Principal{}, told(http.StatusUnauthorized, codeInvalidKey, "neither a token of this endpoint nor a valid API key came with the request")
	}
	return auth.Principal{}, told(http.StatusUnauthorized, codeMissingKey, "send the headers that came with the endpoint, or an API key as OPEN-SANDBOX-API-KEY")
}

func (a *API) checkSigned(v visitor) error {
	expires, err := strconv.ParseInt(v.end, 36, 64)
	if err != nil || !auth.Same(v.sign, a.signature(v.id, v.port, v.end)) {
		return told(http.StatusUnauthorized, codeInvalidKey, "the endpoint is not signed by this server")
	}
	if v.end != forever && time.Now().Unix() >= expires {
		return told(http.StatusUnauthorized, codeInvalidKey, "the signed endpoint has expired; ask for another")
	}
	return nil
}
