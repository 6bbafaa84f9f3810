package agentsandbox

import (
	"bufio"
	"encoding/base64"
	"net/http"
	"slices"
	"strings"
)

// viewOf is an object in the words of the version that a request is in.
func (a *API) viewOf(c *call, o *object) fields {
	return o.view(c.to.version, func(pool string) string {
		if name := a.templateOf(c.who.Tenant, o.namespace(), pool); name != "" {
			return name
		}
		return strings.TrimPrefix(pool, shadowPrefix)
	})
}

func (a *API) get(c *call) error {
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	o := a.find(c.who.Tenant, c.to.kind, c.to.namespace, c.to.name)
	if o == nil || c.to.namespace == "" {
		return notFound(c.to.kind, c.to.name)
	}
	return a.tell(c, http.StatusOK, o, how)
}

// tell answers with one object.
func (a *API) tell(c *call, code int, o *object, how format) error {
	view := a.viewOf(c, o)
	switch how {
	case formatTable:
		view = table([]fields{row(o, view, c.q.Get("includeObject"))}, o.kind.columns, text(o.body, "metadata", "resourceVersion"), "")
	case formatMetadata:
		view = partial(view)
	case formatWhole:
	}
	respond(c.w, code, view)
	return nil
}

func (a *API) list(c *call) error {
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	after, err := readContinue(c.q.Get("continue"))
	if err != nil {
		return err
	}
	objects, rv := a.all(c.who.Tenant, c.to.kind, c.to.namespace)
	objects = slices.DeleteFunc(objects, func(o *object) bool {
		return !c.q.selector.matches(o) || after != "" && o.path() <= after
	})
	next := ""
	if c.q.limit > 0 && len(objects) > c.q.limit {
		objects = objects[:c.q.limit]
		next = base64.RawURLEncoding.EncodeToString([]byte(objects[c.q.limit-1].path()))
	}
	a.tellAll(c, objects, how, formatVersion(rv), next)
	return nil
}

func readContinue(token string) (string, error) {
	after, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(after) > 2*maxSubdomain {
		return "", badRequest("continue key is not valid: it was not given out by this server")
	}
	return string(after), nil
}

// tellAll answers with a list, one object after the other: a tenant's objects may be many, and its lists at a time too.
func (a *API) tellAll(c *call, objects []*object, how format, rv, next string) {
	head, items := fields{"kind": c.to.kind.name + "List", "apiVersion": c.to.kind.apiVersion(c.to.version), "metadata": listMeta(rv, next)}, "items"
	switch how {
	case formatTable:
		head, items = without(table(nil, c.to.kind.columns, rv, next), "rows"), "rows"
	case formatMetadata:
		head["kind"], head["apiVersion"] = "PartialObjectMetadataList", "meta.k8s.io/v1"
	case formatWhole:
	}
	c.w.Header().Set("Content-Type", typeJSON)
	c.w.Header().Set("Cache-Control", "no-cache, private")
	c.w.WriteHeader(http.StatusOK)
	out := bufio.NewWriterSize(c.w, 32<<10)
	_, _ = out.WriteString(strings.TrimSuffix(encode(head), "}") + `,"` + items + `":[`)
	for i, o := range objects {
		if i > 0 {
			_ = out.WriteByte(',')
		}
		_, _ = out.WriteString(encode(a.item(c, o, how)))
	}
	_, _ = out.WriteString("]}\n")
	_ = out.Flush() // a write that fails means that the client has gone: there is nobody left to tell
}

// item is an object as part of a list.
func (a *API) item(c *call, o *object, how format) fields {
	view := a.viewOf(c, o)
	switch how {
	case formatTable:
		return row(o, view, c.q.Get("includeObject"))
	case formatMetadata:
		return partial(view)
	case formatWhole:
	}
	return view
}
