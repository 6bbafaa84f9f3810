package agentsandbox

import (
	"net/http"
)

// serveScale answers for how many a pool or a Sandbox should have, as kubectl scale and autoscalers ask.
func (a *API) serveScale(c *call) error {
	o := a.find(c.who.Tenant, c.to.kind, c.to.namespace, c.to.name)
	if o == nil || c.to.namespace == "" {
		return notFound(c.to.kind, c.to.name)
	}
	var body []byte
	var media string
	var err error
	switch c.r.Method {
	case http.MethodGet:
		respond(c.w, http.StatusOK, scaleOf(o))
		return nil
	case http.MethodPut:
		body, media, err = c.content(typeJSON)
	case http.MethodPatch:
		body, media, err = c.content(typeMergePatch, typeJSONPatch)
	default:
		return wrongMethod()
	}
	if err != nil {
		return err
	}
	dry, err := c.dryRun()
	if err != nil {
		return err
	}
	o, moved, err := a.update(c, dry, func(old *object) (*object, error) { return a.scaled(c, old, body, media) })
	if err != nil {
		return err
	}
	if moved && !dry {
		a.changed(c.who.Tenant, o)
	}
	respond(c.w, http.StatusOK, scaleOf(o))
	return nil
}

// scaled is an object with the number of a Scale that was put, or patched.
func (a *API) scaled(c *call, old *object, body []byte, media string) (*object, error) {
	var f fields
	var err error
	if media == typeJSON {
		f, err = decodeFields(body)
	} else {
		f, err = applyPatch(scaleOf(old), body, media)
	}
	if err != nil {
		return nil, err
	}
	if given := text(f, "metadata", "resourceVersion"); given != "" && given != formatVersion(old.rv) {
		return nil, conflict(old.kind, old.name(), "the object has been modified; please apply your changes to the latest version and try again")
	}
	view := deepFields(a.viewOf(c, old))
	spec := with(inner(view, "spec"), "replicas", number(at(f, "spec", "replicas")))
	view["spec"] = spec
	return objectOf(view, c.to.kind, c.to.version, c.to.namespace, c.to.name)
}

func scaleOf(o *object) fields {
	meta := fields{}
	for _, name := range []string{"name", "namespace", "uid", "resourceVersion", "creationTimestamp"} {
		if v, ok := o.meta()[name]; ok {
			meta[name] = v
		}
	}
	now := number(o.status()["replicas"])
	if o.kind == sandboxKind && len(list(o.status(), "podIPs")) > 0 {
		now = 1
	}
	return fields{
		"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta,
		"spec": fields{"replicas": o.replicas()}, "status": fields{"replicas": now, "selector": text(o.status(), "selector")},
	}
}
