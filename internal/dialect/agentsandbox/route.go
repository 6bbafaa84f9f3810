package agentsandbox

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// target is what a path is about.
type target struct {
	group, version string // the group of Kubernetes' own kinds is empty
	namespace      string // empty: all
	resource, name string
	sub            string
	kind           *kind // nil: it is not one of those that are kept
}

// parsePath reads /api/v1/…, /apis/GROUP/VERSION/… with or without a namespace.
func parsePath(path string) (t target, ok bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case len(parts) >= 3 && parts[0] == "api" && parts[1] == "v1":
		t.version, parts = "v1", parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		t.group, t.version, parts = parts[1], parts[2], parts[3:]
	default:
		return t, false
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		t.namespace, parts = parts[1], parts[2:]
	}
	if len(parts) > 3 {
		return t, false
	}
	for i, field := range []*string{&t.resource, &t.name, &t.sub} {
		if i < len(parts) {
			*field = parts[i]
		}
	}
	t.kind = kindOf(t.group, t.version, t.resource)
	return t, t.resource != ""
}

// query is what a request asks for beside its path.
type query struct {
	url.Values
	watch, bookmarks, initial bool
	timeout                   time.Duration
	limit                     int
	selector                  Selector
}

func readQuery(r *http.Request) (q query, err error) {
	if q.Values, err = url.ParseQuery(r.URL.RawQuery); err != nil {
		return q, badRequest("the query cannot be understood")
	}
	for name, to := range map[string]*bool{"watch": &q.watch, "allowWatchBookmarks": &q.bookmarks, "sendInitialEvents": &q.initial} {
		if given := q.Get(name); given != "" {
			if *to, err = strconv.ParseBool(strings.ToLower(given)); err != nil { // Python's clients write True
				return q, badRequest("query parameter %s=%.40q: want true or false", name, given)
			}
		}
	}
	seconds, err := whole(q.Values, "timeoutSeconds")
	if err != nil {
		return q, err
	}
	q.timeout = time.Duration(min(seconds, maxWatch)) * time.Second
	if q.limit, err = whole(q.Values, "limit"); err != nil {
		return q, err
	}
	q.selector, err = ParseSelector(q.Get("labelSelector"), q.Get("fieldSelector"))
	return q, err
}

func whole(v url.Values, name string) (int, error) {
	given := v.Get(name)
	if given == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(given)
	if err != nil || n < 0 {
		return 0, badRequest("query parameter %s=%.40q: want a whole number", name, given)
	}
	return n, nil
}

// ServeHTTP answers a request.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{w: w, r: r}
	transfer.Await(w, r)
	if err := a.answer(c); err != nil {
		a.refuse(c, err)
	}
}

// open are the paths that say nothing about anybody.
func open(path string) bool { return path == "/version" || path == "/livez" }

func (a *API) answer(c *call) (err error) {
	if !open(c.r.URL.Path) {
		if c.who, err = a.authenticate(c.r); err != nil {
			return err
		}
		a.hear(c.who.Tenant)
	}
	if c.q, err = readQuery(c.r); err != nil {
		return err
	}
	if served, err := a.discover(c); served {
		return err
	}
	var ok bool
	if c.to, ok = parsePath(c.r.URL.Path); !ok {
		return noSuchPath()
	}
	if err := a.mayUse(c); err != nil {
		return err
	}
	if c.to.kind != nil {
		c.label()
		return a.serveKind(c)
	}
	return a.serveCore(c)
}

// label says in metrics which kind of request it is, without what a client thinks up.
func (c *call) label() {
	switch c.r.Method {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
		c.r.Pattern = c.r.Method + " /apis/" + c.to.kind.group + "/" + c.to.version + "/" + c.to.kind.resource
		if c.to.name != "" {
			c.r.Pattern += "/{name}"
		}
	}
}

// authenticate finds out who calls.
func (a *API) authenticate(r *http.Request) (auth.Principal, error) {
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		key = r.Header.Get("X-Api-Key") // which also is how a guest comes in
	}
	p, err := a.keys.Authenticate(r.Context(), strings.TrimSpace(key))
	if fault.Is(err, fault.Unauthed) {
		return p, refuse(http.StatusUnauthorized, reasonUnauthorized, "Unauthorized")
	}
	return p, err
}

// mayUse keeps tenants to their namespaces.
func (a *API) mayUse(c *call) error {
	ns := c.to.namespace
	if c.to.group == "" && c.to.resource == "namespaces" {
		ns = c.to.name
	}
	switch {
	case ns == "":
		return nil
	case !isLabel(ns):
		return badRequest("%.80q is not a name of a namespace: want up to 63 characters of a-z, 0-9 and '-'", ns)
	case ns == systemNamespace && c.to.group == "" || a.allowed(c.who.Tenant, ns):
		return nil
	}
	r := refuse(http.StatusForbidden, reasonForbidden, "%s is forbidden: this key cannot use namespace %q", c.to.resource, ns)
	r.details = &details{Name: c.to.name, Group: c.to.group, Kind: c.to.resource}
	return r
}

// allowed tells whether a tenant may use a namespace.
func (a *API) allowed(tenant, namespace string) bool {
	names, restricted := a.cfg.Namespaces[tenant]
	if !restricted {
		return true
	}
	for _, name := range names {
		if name == namespace {
			return true
		}
	}
	return false
}

// serveKind answers for the kinds that are kept.
func (a *API) serveKind(c *call) error {
	t := c.to
	switch {
	case t.sub == "scale" && t.kind.scalesIn(t.version):
		return a.serveScale(c)
	case t.sub == "status" && t.kind.hasStatus && c.r.Method == http.MethodGet:
		return a.get(c)
	case t.sub == "status" && t.kind.hasStatus:
		return forbidden(t.kind, t.name, "its status is written by the server alone")
	case t.sub != "":
		return noSuchPath()
	case t.name == "" && c.r.Method == http.MethodGet && c.q.watch:
		return a.watch(c)
	case t.name == "" && c.r.Method == http.MethodGet:
		return a.list(c)
	case t.namespace == "":
		return wrongMethod()
	}
	return a.serveObject(c)
}

func (a *API) serveObject(c *call) error {
	named := c.to.name != ""
	switch m := c.r.Method; {
	case m == http.MethodPost && !named:
		return a.create(c)
	case m == http.MethodDelete && !named:
		return a.deleteAll(c)
	case m == http.MethodGet && named && c.q.watch: // as old clients watch one object
		return a.watch(c)
	case m == http.MethodGet && named:
		return a.get(c)
	case m == http.MethodPut && named:
		return a.replace(c)
	case m == http.MethodPatch && named:
		return a.patch(c)
	case m == http.MethodDelete && named:
		return a.delete(c)
	}
	return wrongMethod()
}
