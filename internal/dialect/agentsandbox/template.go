package agentsandbox

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Templates and pools that nobody has to make: for each template of the server's there is one of its name, and for each name
// that the configuration gives it. They look like objects and are not kept. Whoever makes one of the same name has their own.

// started is when built-in objects were made, as far as anybody can see.
var started = time.Now()

// builtin finds a built-in object, or nil.
func (a *API) builtin(tenant string, k *kind, namespace, name string) *object {
	if k != templateKind && k != poolKind || !isSubdomain(name) {
		return nil
	}
	image := cmp.Or(a.cfg.Templates[name], name)
	if _, err := a.templates.Resolve(a.life, tenant, image); err != nil && !fault.Is(err, fault.Unavailable) { // which is one that is being built
		return nil
	}
	o := &object{kind: k, version: beta, body: fields{"metadata": fields{
		"name": name, "namespace": namespace, "generation": 1, "creationTimestamp": formatTime(started),
		"uid":             virtualUID(tenant, k.resource, namespace, name),
		"resourceVersion": "1", "labels": fields{"app.kubernetes.io/managed-by": "cove"},
	}}}
	if k == poolKind {
		o.set("spec", fields{"replicas": 1, "sandboxTemplateRef": fields{"name": name}})
		o.set("status", fields{"replicas": 1, "readyReplicas": 1, "observedGeneration": 1})
		return o
	}
	o.set("spec", fields{
		"podTemplate":            fields{"spec": fields{"containers": []any{fields{"name": "sandbox", "image": image}}}},
		"envVarsInjectionPolicy": injectOverride,
	})
	return o
}

// builtins are the names that built-in objects may have.
func (a *API) builtins(tenant string) []string {
	names := slices.Collect(maps.Keys(a.cfg.Templates))
	for _, t := range a.templates.List(tenant) {
		names = append(names, t.Name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// find is an object of the store, or a built-in one, or nil.
func (a *API) find(tenant string, k *kind, namespace, name string) *object {
	if o := a.store.realm(tenant).get(k, namespace, name); o != nil {
		return o
	}
	return a.builtin(tenant, k, namespace, name)
}

// all are the objects of a kind with the built-in ones, by their names.
func (a *API) all(tenant string, k *kind, namespace string) ([]*object, uint64) {
	r := a.store.realm(tenant)
	objects, rv := r.list(k, namespace)
	if k != templateKind && k != poolKind {
		return objects, rv
	}
	places := []string{namespace}
	if namespace == "" { // they are in every namespace, and told once
		places = []string{defaultNamespace}
		if names, restricted := a.cfg.Namespaces[tenant]; restricted {
			places = names
		}
	}
	names := a.builtins(tenant)
	for _, ns := range places {
		for _, name := range names {
			if r.get(k, ns, name) != nil {
				continue
			}
			if o := a.builtin(tenant, k, ns, name); o != nil {
				objects = append(objects, o)
			}
		}
	}
	slices.SortFunc(objects, byPath)
	return objects, rv
}

// templateOf is the name of the template that a pool is of; empty: there is no such pool. A template is a pool of its own name,
// from which every sandbox starts cold, as far as there is a difference here.
func (a *API) templateOf(tenant, namespace, pool string) string {
	if o := a.store.realm(tenant).get(poolKind, namespace, pool); o != nil {
		return text(o.spec(), "sandboxTemplateRef", "name")
	}
	name := strings.TrimPrefix(pool, shadowPrefix)
	if a.find(tenant, templateKind, namespace, name) != nil {
		return name
	}
	return ""
}

// poolStatus is the status of a pool that somebody has made: this server's own pools are behind it, and always there.
func (a *API) poolStatus(tenant string, o *object) fields {
	replicas, ready := o.replicas(), int64(0)
	template := text(o.spec(), "sandboxTemplateRef", "name")
	if a.find(tenant, templateKind, o.namespace(), template) != nil {
		ready = replicas
	}
	return fields{
		"replicas": replicas, "readyReplicas": ready, "observedGeneration": o.generation(),
		"selector": "agents.x-k8s.io/warm-pool-sandbox=" + hash(o.name()),
	}
}

// refresh looks again at what waits for templates and pools of a namespace.
func (a *API) refresh(tenant, namespace string) {
	r := a.store.realm(tenant)
	pools, _ := r.list(poolKind, namespace)
	for _, o := range pools {
		_, err := r.show(a.life, poolKind, namespace, o.name(), o.uid(), func(o *object) *object {
			s := a.poolStatus(tenant, o)
			if same(s, o.status()) {
				return o
			}
			c := o.change()
			c.set("status", s)
			return c
		})
		a.notKept(tenant, err)
	}
	claims, _ := r.list(claimKind, namespace)
	for _, o := range claims {
		if text(o.status(), "sandbox", "name") == "" {
			a.workers.wake(key{tenant, namespace, o.name()})
		}
	}
}

// virtualUID is the uid of an object that is not kept: always the same.
func virtualUID(names ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(names, "\x00")))
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}
