package agentsandbox

import (
	"net/http"
	"slices"

	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
)

// The few kinds of Kubernetes' own that clients need on their way to a sandbox. None of them is kept: a namespace is there as
// soon as somebody uses it, and a Pod is another view of a Sandbox.

const (
	systemNamespace  = "agent-sandbox-system"
	defaultNamespace = "default"
	routerService    = "sandbox-router-svc"
	routerPod        = "sandbox-router"
	routerPort       = 8080

	authorizationGroup  = "authorization.k8s.io"
	authenticationGroup = "authentication.k8s.io"
)

var coreResources = []resource{
	{Name: "namespaces", Singular: "namespace", Kind: "Namespace", Verbs: []string{"get", "list"}, ShortNames: []string{"ns"}},
	{Name: "pods", Singular: "pod", Namespaced: true, Kind: "Pod", Verbs: []string{"get", "list", "watch"}, ShortNames: []string{"po"}},
	{Name: "pods/portforward", Namespaced: true, Kind: "PodPortForwardOptions", Verbs: []string{"create", "get"}},
	{Name: "services", Singular: "service", Namespaced: true, Kind: "Service", Verbs: []string{"get", "list"}, ShortNames: []string{"svc"}},
	{Name: "events", Singular: "event", Namespaced: true, Kind: "Event", Verbs: []string{"list"}, ShortNames: []string{"ev"}},
}

// podKind, serviceKind, namespaceKind and eventKind are kinds as far as answers need them.
var (
	podKind = &kind{resource: "pods", name: "Pod", columns: []column{
		{"Ready", "string", func(o *object) any {
			if o.ready() {
				return "1/1"
			}
			return "0/1"
		}},
		{"Status", "string", func(o *object) any { return text(o.status(), "phase") }},
		{"Restarts", "string", func(*object) any { return "0" }},
		ageColumn,
	}}
	serviceKind = &kind{resource: "services", name: "Service", columns: []column{
		{"Type", "string", func(*object) any { return "ClusterIP" }},
		{"Cluster-IP", "string", func(*object) any { return "None" }},
		{"External-IP", "string", func(*object) any { return "<none>" }},
		{"Port(s)", "string", func(*object) any { return "8080/TCP" }},
		ageColumn,
	}}
	namespaceKind = &kind{resource: "namespaces", name: "Namespace", columns: []column{
		{"Status", "string", func(*object) any { return "Active" }}, ageColumn,
	}}
	eventKind = &kind{resource: "events", name: "Event", columns: []column{ageColumn}}
)

func (a *API) serveCore(c *call) error {
	switch {
	case c.to.group == authorizationGroup && c.to.resource == "selfsubjectaccessreviews":
		return a.reviewAccess(c)
	case c.to.group == authenticationGroup && c.to.resource == "selfsubjectreviews":
		return a.reviewSelf(c)
	case c.to.group != "" || c.to.version != "v1":
		return noSuchPath()
	case c.to.resource == "pods" && c.to.sub == "portforward":
		return a.forward(c)
	case c.to.resource == "pods" && c.to.sub == "log":
		return refuse(http.StatusNotImplemented, reasonNotServed, "a sandbox has no log of its own; run a command in it, or see its runs with cove logs")
	case c.to.sub != "":
		return noSuchPath()
	}
	rv := a.store.realm(c.who.Tenant).version() // before they are looked at: who watches from here on misses nothing
	k, all := a.coreObjects(c)
	switch {
	case k == nil:
		return noSuchPath()
	case c.r.Method != http.MethodGet || c.q.watch && k != podKind:
		return wrongMethod()
	}
	if c.to.kind = k; c.q.watch {
		return a.watch(c)
	}
	return a.serveVirtual(c, all, rv)
}

// coreObjects are all objects of a kind that a request may see.
func (a *API) coreObjects(c *call) (*kind, []*object) {
	switch c.to.resource {
	case "namespaces":
		var all []*object
		names := a.namespaces(c.who.Tenant)
		if name := c.to.name; name != "" && !slices.Contains(names, name) { // any that a tenant may use is there
			names = append(names, name)
		}
		for _, name := range names {
			all = append(all, virtual(namespaceKind, "", name, fields{"spec": fields{"finalizers": []any{"kubernetes"}}, "status": fields{"phase": "Active"}}))
		}
		return namespaceKind, all
	case "services":
		return serviceKind, a.services(c)
	case "pods":
		return podKind, a.pods(c)
	case "events":
		return eventKind, nil
	}
	return nil, nil
}

// namespaces are those that a tenant may use, as far as anybody knows their names.
func (a *API) namespaces(tenant string) []string {
	if names, restricted := a.cfg.Namespaces[tenant]; restricted {
		return slices.Sorted(slices.Values(names))
	}
	names := append(a.store.realm(tenant).namespaces(), defaultNamespace, systemNamespace)
	slices.Sort(names)
	return slices.Compact(names)
}

// virtual is an object that is not kept.
func virtual(k *kind, namespace, name string, body fields) *object {
	meta := fields{
		"name": name, "uid": virtualUID(k.resource, namespace, name), "resourceVersion": "1", "creationTimestamp": formatTime(started),
	}
	if namespace != "" {
		meta["namespace"] = namespace
	}
	body["metadata"] = meta
	return &object{kind: k, version: "v1", body: body}
}

func (a *API) serveVirtual(c *call, all []*object, rv uint64) error {
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	for _, o := range all {
		if c.to.name != "" && o.name() == c.to.name && o.namespace() == c.to.namespace {
			return a.tell(c, http.StatusOK, o, how)
		}
	}
	if c.to.name != "" {
		r := refuse(http.StatusNotFound, reasonNotFound, "%s %.253q not found", c.to.resource, c.to.name)
		r.details = &details{Name: c.to.name, Kind: c.to.resource}
		return r
	}
	all = slices.DeleteFunc(all, func(o *object) bool { return !c.q.selector.matches(o) })
	slices.SortFunc(all, byPath)
	a.tellAll(c, all, how, formatVersion(rv), "")
	return nil
}

// services are one in each namespace: the router, which every client looks for in another.
func (a *API) services(c *call) []*object {
	places := []string{c.to.namespace}
	if c.to.namespace == "" {
		places = a.namespaces(c.who.Tenant)
	}
	var all []*object
	for _, ns := range places {
		all = append(all, virtual(serviceKind, ns, routerService, fields{
			"spec": fields{
				"type": "ClusterIP", "clusterIP": "None", "selector": fields{"app": routerPod},
				"ports": []any{fields{"name": "http", "port": routerPort, "targetPort": routerPort, "protocol": "TCP"}},
			},
			"status": fields{"loadBalancer": fields{}},
		}))
	}
	return all
}

// pods are the router's and those of sandboxes.
func (a *API) pods(c *call) []*object {
	places := []string{c.to.namespace}
	if c.to.namespace == "" {
		places = a.namespaces(c.who.Tenant)
	}
	var all []*object
	for _, ns := range places {
		o := virtual(podKind, ns, routerPod, podBody("router", routerPort, address(ns), "Running"))
		o.setMeta("labels", fields{"app": routerPod})
		all = append(all, o)
		if ns == systemNamespace && !a.allowed(c.who.Tenant, ns) {
			continue
		}
		boxes, _ := a.store.realm(c.who.Tenant).list(sandboxKind, ns)
		for _, box := range boxes {
			if pod := podOf(box); pod != nil {
				all = append(all, pod)
			}
		}
	}
	return all
}

// podOf is the Pod of a Sandbox; nil while it is suspended, because then there is none.
func podOf(box *object) *object {
	if box == nil || text(box.condition("Suspended"), "status") == "True" || text(box.condition("Ready"), "reason") == whyExpired {
		return nil
	}
	phase, ip := "Pending", ""
	switch {
	case text(box.condition("Finished"), "reason") == whySucceeded:
		phase = "Succeeded"
	case box.condition("Finished") != nil:
		phase = "Failed"
	case box.ready():
		phase, ip = "Running", address(box.id)
	}
	o := virtual(podKind, box.namespace(), box.name(), podBody("sandbox", place.PortRuntime, ip, phase))
	labels := fields{labelNameHash: hash(box.name())}
	for _, name := range []string{labelClaimUID, labelTemplateHash, labelCreatedBy} {
		if v, ok := box.labels()[name]; ok {
			labels[name] = v
		}
	}
	for k, v := range inner(box.spec(), "podTemplate", "metadata", "labels") {
		labels[k] = v
	}
	o.setMeta("labels", labels)
	if notes := inner(box.spec(), "podTemplate", "metadata", "annotations"); notes != nil {
		o.setMeta("annotations", notes)
	}
	o.setMeta("creationTimestamp", box.meta()["creationTimestamp"])
	o.setMeta("resourceVersion", formatVersion(box.rv))
	o.setMeta("ownerReferences", []any{ownerReference(box)})
	if containers := list(box.spec(), "podTemplate", "spec", "containers"); len(containers) > 0 {
		o.set("spec", with(inner(o.body, "spec"), "containers", containers[:1]))
	}
	return o
}

func podBody(name string, port int, ip, phase string) fields {
	ready := "False"
	if phase == "Running" {
		ready = "True"
	}
	status := fields{
		"phase":      phase,
		"conditions": []any{fields{"type": "Ready", "status": ready}, fields{"type": "PodScheduled", "status": "True"}},
	}
	if ip != "" {
		status["podIP"], status["podIPs"] = ip, []any{fields{"ip": ip}}
	}
	return fields{
		"spec": fields{
			"nodeName":   node,
			"containers": []any{fields{"name": name, "image": "cove", "ports": []any{fields{"containerPort": port, "protocol": "TCP"}}}},
		},
		"status": status,
	}
}
