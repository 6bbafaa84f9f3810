package build

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// maxBody bounds a request; the steps of a template are in one.
const maxBody = 4 << 20

// call is one request and who makes it.
type call struct {
	w    http.ResponseWriter
	r    *http.Request
	who  auth.Principal
	vars map[string]string // of the path
	s    *shelf            // the caller's
}

type route struct {
	method, path string
	handle       func(*Builder, *call) error
}

// Fixed words come before variables of the same place.
var routes = []route{
	{"POST", "/v3/templates", (*Builder).requestBuild},
	{"GET", "/v2/templates", (*Builder).listTemplates},
	{"POST", "/v2/templates/{id}/builds/{build}", (*Builder).startBuild},
	{"PATCH", "/v2/templates/{id}", (*Builder).publish},
	{"GET", "/default-templates", (*Builder).listDefaults},
	{"GET", "/templates", (*Builder).listTemplates},
	{"POST", "/templates/tags", (*Builder).assignTags},
	{"DELETE", "/templates/tags", (*Builder).removeTags},
	{"GET", "/templates/aliases/{id}", (*Builder).alias},
	{"GET", "/templates/{id}/tags", (*Builder).listTags},
	{"GET", "/templates/{id}/tags/count", (*Builder).countTags},
	{"GET", "/templates/{id}/tags/exists", (*Builder).tagExists},
	{"GET", "/templates/{id}/files/{hash}", (*Builder).fileLink},
	{"GET", "/templates/{id}/builds/{build}/status", (*Builder).status},
	{"GET", "/templates/{id}/builds/{build}/logs", (*Builder).logs},
	{"GET", "/templates/{id}", (*Builder).getTemplate},
	{"PATCH", "/templates/{id}", (*Builder).publish},
	{"DELETE", "/templates/{id}", (*Builder).deleteTemplate},
	// Of SDKs that built images on the client's side.
	{"POST", "/templates", (*Builder).outdated},
	{"POST", "/v2/templates", (*Builder).outdated},
	{"POST", "/templates/{id}", (*Builder).outdated},
	{"POST", "/templates/{id}/builds/{build}", (*Builder).outdated},
}

// Serve answers a request about templates of a caller whose key was checked.
func (b *Builder) Serve(w http.ResponseWriter, r *http.Request, who auth.Principal) {
	r, done := transfer.Patient(w, r)
	defer done()
	var allowed []string
	for _, route := range routes {
		vars, ok := match(route.path, r.URL.EscapedPath())
		if !ok {
			continue
		}
		if route.method != r.Method {
			allowed = append(allowed, route.method)
			continue
		}
		c := &call{w: w, r: r, who: who, vars: vars}
		var err error
		if c.s, err = b.shelf(r.Context(), who.Tenant); err == nil {
			err = route.handle(b, c)
		}
		if err != nil {
			b.refuse(w, r, err)
		}
		return
	}
	if len(allowed) > 0 {
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		fail(w, http.StatusMethodNotAllowed, "method not allowed")
		return
	}
	fail(w, http.StatusNotFound, "there is no such path in the template API")
}

// match compares an escaped path with a pattern. A variable is one part of the path, which may hold an escaped slash.
func match(pattern, escaped string) (map[string]string, bool) {
	want, have := strings.Split(pattern, "/"), strings.Split(strings.TrimRight(escaped, "/"), "/")
	if len(want) != len(have) {
		return nil, false
	}
	vars := map[string]string{}
	for i, w := range want {
		part, err := url.PathUnescape(have[i])
		switch {
		case err != nil:
			return nil, false
		case strings.HasPrefix(w, "{") && part != "":
			vars[strings.Trim(w, "{}")] = part
		case w != part:
			return nil, false
		}
	}
	return vars, true
}

// refuse answers with a failure: the caller gets a sentence, the operator the chain.
func (b *Builder) refuse(w http.ResponseWriter, r *http.Request, err error) {
	kind := fault.KindOf(err)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		fail(w, http.StatusRequestEntityTooLarge, fault.Message(err))
		return
	}
	if kind == fault.Internal && r.Context().Err() != nil {
		kind, err = fault.Unavailable, fault.Wrap(fault.Unavailable, err, "the request was cancelled")
	}
	if kind == fault.Internal {
		b.log.Error("request about templates failed", "path", r.URL.Path, "error", err)
	}
	target.Advise(w.Header(), target.Status(kind))
	fail(w, target.Status(kind), fault.Message(err))
}

// fail answers in the shape that every E2B client reads; JavaScript decides by the code in the body.
func fail(w http.ResponseWriter, status int, message string) {
	respond(w, status, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
}

func respond(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"code":500,"message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client has gone: nobody to tell
}

func (c *call) answer(status int, value any) error {
	respond(c.w, status, value)
	return nil
}

// decode reads a JSON body. Unknown fields are of newer clients and left alone.
func (c *call) decode(into any) error {
	body, err := transfer.ReadJSON(c.r.Context(), c.who.Tenant, http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(body))
		if err = d.Decode(into); err == nil {
			if _, more := d.Token(); !errors.Is(more, io.EOF) {
				err = errors.New("something follows the JSON value")
			}
		}
	}
	var large *http.MaxBytesError
	var told *fault.Error
	switch {
	case err == nil || errors.As(err, &told):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Wrap(fault.Invalid, err, "the request's body did not come in time")
	case errors.As(err, &large):
		return fault.Wrap(fault.Invalid, err, "the request is larger than %d MiB", maxBody>>20)
	}
	return fault.Wrap(fault.Invalid, err, "the request's body is not what this call takes: %s", sentence(err))
}

// sentence is what a JSON error tells the caller; it never holds more of the body than a name.
func sentence(err error) string {
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &kind):
		return "the field " + strconv.Quote(kind.Field) + " cannot be a " + kind.Value
	case errors.Is(err, io.EOF):
		return "it is empty"
	default:
		return "it is not valid JSON"
	}
}

// number reads an optional query parameter.
func (c *call) number(name string, fallback, least, most int64) (int64, error) {
	text := c.r.URL.Query().Get(name)
	if text == "" {
		return fallback, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least {
		return 0, fault.New(fault.Invalid, "the query parameter %s must be a whole number of at least %d", name, least)
	}
	return min(n, most), nil
}

// template is the caller's template that the path names.
func (c *call) template() (*entry, error) {
	r, err := parseRef(c.vars["id"])
	if err != nil {
		return nil, err
	}
	if e := c.s.find(r); e != nil {
		return e, nil
	}
	return nil, errNoTemplate(c.vars["id"])
}

// build is the build that the path names.
func (c *call) build() (*made, error) {
	e, err := c.template()
	if err != nil {
		return nil, err
	}
	if m := c.s.build(strings.ToLower(c.vars["build"])); m != nil && m.Template == e.ID {
		return m, nil
	}
	return nil, errNoBuild(c.vars["build"])
}

func (b *Builder) outdated(*call) error {
	return fault.New(fault.Invalid, "this way to build templates is outdated; update the E2B SDK or CLI, which build with POST /v3/templates")
}
