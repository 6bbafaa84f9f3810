package agentsandbox

import (
	"context"
	"net/http"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

func (c *call) dryRun() (bool, error) {
	switch values := c.q.Values["dryRun"]; {
	case len(values) == 0:
		return false, nil
	case len(values) == 1 && values[0] == "All":
		return true, nil
	}
	return false, badRequest("query parameter dryRun: want All")
}

func (a *API) create(c *call) error {
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	dry, err := c.dryRun()
	if err != nil {
		return err
	}
	body, _, err := c.content(typeJSON)
	if err != nil {
		return err
	}
	o, err := decodeObject(body, c.to.kind, c.to.version, c.to.namespace, "")
	if err != nil {
		return err
	}
	if text(o.body, "metadata", "resourceVersion") != "" {
		return badRequest("resourceVersion should not be set on objects to be created")
	}
	if err := check(o); err != nil {
		return err
	}
	a.newborn(c.who.Tenant, o)
	if dry {
		if a.store.realm(c.who.Tenant).get(o.kind, o.namespace(), o.name()) != nil {
			return exists(o.kind, o.name())
		}
		return a.tell(c, http.StatusCreated, o, how)
	}
	if o, err = a.store.realm(c.who.Tenant).create(c.ctx(), o); err != nil {
		return err
	}
	a.warn(c.w, c.who.Tenant, o)
	a.changed(c.who.Tenant, o)
	return a.tell(c, http.StatusCreated, o, how)
}

// newborn gives an object what the server decides.
func (a *API) newborn(tenant string, o *object) {
	for _, name := range []string{"resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds"} {
		o.setMeta(name, nil)
	}
	o.setMeta("uid", newUID())
	o.setMeta("creationTimestamp", formatTime(time.Now()))
	o.setMeta("generation", 1)
	switch o.kind {
	case sandboxKind:
		o.id = sandbox.NewID()
		o.setMeta("annotations", with(o.annotations(), annotationPodName, o.name()))
		o.setMeta("annotations", with(o.annotations(), annotationID, o.id))
		o.set("status", boxStatus(o, false, pending(messagePending)...))
	case poolKind:
		o.set("status", a.poolStatus(tenant, o))
	}
}

// changed sees to what follows from a new or changed object.
func (a *API) changed(tenant string, o *object) {
	switch o.kind {
	case claimKind, sandboxKind:
		a.workers.wake(key{tenant, o.namespace(), o.name()})
	case templateKind, poolKind:
		a.refresh(tenant, o.namespace())
	}
}

// replace is PUT: the whole object, as somebody has read and changed it.
func (a *API) replace(c *call) error {
	body, _, err := c.content(typeJSON)
	if err != nil {
		return err
	}
	return a.modify(c, func(old *object) (*object, error) {
		o, err := decodeObject(body, c.to.kind, c.to.version, c.to.namespace, c.to.name)
		if err == nil && text(o.body, "metadata", "resourceVersion") == "" {
			return nil, invalid(o.kind, o.name(), "metadata.resourceVersion", "Invalid value: 0x0: must be specified for an update")
		}
		return o, err
	})
}

// patch changes parts of an object as it is now.
func (a *API) patch(c *call) error {
	body, media, err := c.content(typeMergePatch, typeJSONPatch)
	if err != nil {
		return err
	}
	return a.modify(c, func(old *object) (*object, error) {
		f, err := applyPatch(a.viewOf(c, old), body, media)
		if err != nil {
			return nil, err
		}
		return objectOf(f, c.to.kind, c.to.version, c.to.namespace, c.to.name)
	})
}

// modify puts what change makes of an object in its place.
func (a *API) modify(c *call, change func(old *object) (*object, error)) error {
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	dry, err := c.dryRun()
	if err != nil {
		return err
	}
	o, moved, err := a.update(c, dry, change)
	if err != nil {
		return err
	}
	if moved && !dry {
		a.warn(c.w, c.who.Tenant, o)
		a.changed(c.who.Tenant, o)
	}
	return a.tell(c, http.StatusOK, o, how)
}

func (a *API) update(c *call, dry bool, change func(old *object) (*object, error)) (o *object, moved bool, err error) {
	r := a.store.realm(c.who.Tenant)
	if r.get(c.to.kind, c.to.namespace, c.to.name) == nil {
		return a.makeOwn(c, dry, change)
	}
	var would *object
	o, err = r.update(c.ctx(), c.to.kind, c.to.namespace, c.to.name, func(old *object) (*object, error) {
		next, err := a.merged(c, old, change)
		if err != nil || next == old {
			return old, err
		}
		if moved = true; dry {
			would = next
			return old, nil
		}
		return next, nil
	})
	if dry && would != nil {
		o = would
	}
	return o, moved, err
}

// makeOwn turns a built-in object that somebody changes into one of their own.
func (a *API) makeOwn(c *call, dry bool, change func(old *object) (*object, error)) (*object, bool, error) {
	old := a.builtin(c.who.Tenant, c.to.kind, c.to.namespace, c.to.name)
	if old == nil {
		return nil, false, notFound(c.to.kind, c.to.name)
	}
	next, err := a.merged(c, old, change)
	if err != nil || next == old {
		return next, false, err
	}
	a.newborn(c.who.Tenant, next)
	next.setMeta("labels", without(next.labels(), "app.kubernetes.io/managed-by"))
	if dry {
		return next, true, nil
	}
	o, err := a.store.realm(c.who.Tenant).create(c.ctx(), next)
	return o, err == nil, err
}

// merged is the object that a change makes of another, with what no client may change; the same one if nothing did.
func (a *API) merged(c *call, old *object, change func(old *object) (*object, error)) (*object, error) {
	next, err := change(old)
	if err != nil {
		return nil, err
	}
	if given := text(next.body, "metadata", "resourceVersion"); given != "" && given != text(old.body, "metadata", "resourceVersion") {
		return nil, conflict(old.kind, old.name(), "the object has been modified; please apply your changes to the latest version and try again")
	}
	if given := next.uid(); given != "" && given != old.uid() {
		return nil, conflict(old.kind, old.name(), "Precondition failed: UID in precondition: "+encode(given)+", UID in object meta: "+encode(old.uid()))
	}
	if err := check(next); err != nil {
		return nil, err
	}
	for _, name := range []string{"uid", "creationTimestamp", "generation", "deletionTimestamp", "resourceVersion"} {
		next.setMeta(name, old.meta()[name])
	}
	next.id, next.held, next.born, next.network, next.rv = old.id, old.held, old.born, old.network, old.rv
	if old.status() != nil {
		next.set("status", old.body["status"])
	}
	// Who writes back what the other version showed has changed nothing there.
	if next.version != old.version && same(next.spec(), inner(a.viewOf(c, old), "spec")) {
		next.version = old.version
		next.set("spec", old.body["spec"])
	}
	moved := !same(next.body["spec"], old.body["spec"])
	if !moved && same(next.body, old.body) {
		return old, nil
	}
	if moved {
		next.setMeta("generation", old.generation()+1)
	}
	if next.kind == poolKind {
		next.set("status", a.poolStatus(c.who.Tenant, next))
	}
	return next, nil
}

// deletion is what a client says about a delete.
type deletion struct {
	Preconditions struct {
		UID             *string `json:"uid"`
		ResourceVersion *string `json:"resourceVersion"`
	} `json:"preconditions"`
	PropagationPolicy string   `json:"propagationPolicy"`
	DryRun            []string `json:"dryRun"`
}

func (c *call) deletion() (d deletion, err error) {
	body, _, err := c.content(typeJSON)
	if err != nil {
		return d, err
	}
	if len(body) > 0 {
		if err := decodeInto(body, &d); err != nil {
			return d, err
		}
	}
	if policy := c.q.Get("propagationPolicy"); policy != "" {
		d.PropagationPolicy = policy
	}
	d.DryRun = append(d.DryRun, c.q.Values["dryRun"]...)
	if d.PropagationPolicy == "Orphan" {
		return d, badRequest("propagationPolicy Orphan is not served here: what belongs to an object ends with it")
	}
	return d, nil
}

func (d deletion) check(o *object) error {
	if uid := d.Preconditions.UID; uid != nil && *uid != o.uid() {
		return conflict(o.kind, o.name(), "Precondition failed: UID in precondition: "+encode(*uid)+", UID in object meta: "+encode(o.uid()))
	}
	if rv := d.Preconditions.ResourceVersion; rv != nil && *rv != formatVersion(o.rv) {
		return conflict(o.kind, o.name(), "Precondition failed: ResourceVersion in precondition: "+encode(*rv)+", ResourceVersion in object meta: "+formatVersion(o.rv))
	}
	return nil
}

func (a *API) delete(c *call) error {
	d, err := c.deletion()
	if err != nil {
		return err
	}
	r := a.store.realm(c.who.Tenant)
	if r.get(c.to.kind, c.to.namespace, c.to.name) == nil && a.builtin(c.who.Tenant, c.to.kind, c.to.namespace, c.to.name) != nil {
		return forbidden(c.to.kind, c.to.name, "it is built in")
	}
	o := r.get(c.to.kind, c.to.namespace, c.to.name)
	if len(d.DryRun) > 0 {
		if o == nil {
			return notFound(c.to.kind, c.to.name)
		}
		err = d.check(o)
	} else {
		o, err = a.remove(c.ctx(), c.who.Tenant, c.to.kind, c.to.namespace, c.to.name, d.check)
	}
	if err != nil {
		return err
	}
	respond(c.w, http.StatusOK, status{
		Kind: "Status", APIVersion: "v1", Status: "Success", Code: http.StatusOK,
		Details: &details{Name: o.name(), Group: o.kind.group, Kind: o.kind.resource, UID: o.uid()},
	})
	return nil
}

// remove deletes an object and what belongs to it. Its sandbox begins to end before the answer.
func (a *API) remove(ctx context.Context, tenant string, k *kind, namespace, name string, check func(*object) error) (*object, error) {
	r := a.store.realm(tenant)
	o, err := r.remove(ctx, k, namespace, name, check)
	if err != nil {
		return nil, err
	}
	switch k {
	case claimKind:
		// Without its claim nothing keeps it, so that a server which ends here leaves a Sandbox that the next one removes.
		box, err := r.remove(context.WithoutCancel(ctx), sandboxKind, namespace, name, func(box *object) error {
			if !box.ownedBy(o.uid()) {
				return notFound(sandboxKind, name)
			}
			return nil
		})
		a.notKept(tenant, err)
		a.workers.interrupt(key{tenant, namespace, name})
		if box != nil {
			a.end(tenant, box.id)
		}
	case sandboxKind:
		a.workers.interrupt(key{tenant, namespace, name})
		a.end(tenant, o.id)
	case templateKind, poolKind:
		a.refresh(tenant, namespace)
	}
	return o, nil
}

// deleteAll deletes what a selector chooses in a namespace.
func (a *API) deleteAll(c *call) error {
	d, err := c.deletion()
	if err != nil {
		return err
	}
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	objects, rv := a.store.realm(c.who.Tenant).list(c.to.kind, c.to.namespace)
	var gone []*object
	var failed error // of the last one that is still there
	for _, o := range objects {
		if !c.q.selector.matches(o) {
			continue
		}
		if len(d.DryRun) == 0 {
			if _, err := a.remove(c.ctx(), c.who.Tenant, o.kind, o.namespace(), o.name(), sameUID(o)); err != nil {
				if !isGone(err) {
					failed = err
				}
				continue
			}
		}
		gone = append(gone, o)
	}
	if failed != nil {
		return failed
	}
	a.tellAll(c, gone, how, formatVersion(rv), "")
	return nil
}
