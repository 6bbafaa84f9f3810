package tenants_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// kubernetesKind is a kind of objects that the Kubernetes dialect keeps.
type kubernetesKind struct{ group, resource, name, spec, alphaSpec string }

const podTemplate = `{"podTemplate":{"spec":{"containers":[{"name":"main","image":"python"}]}}}`

var kubernetesKinds = []kubernetesKind{
	{"agents.x-k8s.io", "sandboxes", "Sandbox", podTemplate, podTemplate},
	{"extensions.agents.x-k8s.io", "sandboxclaims", "SandboxClaim", `{"warmPoolRef":{"name":"base"}}`, `{"sandboxTemplateRef":{"name":"base"}}`},
	{"extensions.agents.x-k8s.io", "sandboxtemplates", "SandboxTemplate", podTemplate, podTemplate},
	{"extensions.agents.x-k8s.io", "sandboxwarmpools", "SandboxWarmPool", `{"replicas":1,"sandboxTemplateRef":{"name":"base"}}`, `{"replicas":1,"sandboxTemplateRef":{"name":"base"}}`},
}

func (k kubernetesKind) path(version string) string {
	return "/apis/" + k.group + "/" + version + "/namespaces/default/" + k.resource
}

// body is an object whose name, labels and version are names of things.
func (k kubernetesKind) body(version, meta string) string {
	spec := k.spec
	if version == "v1alpha1" {
		spec = k.alphaSpec
	}
	return fmt.Sprintf(`{"apiVersion":"%s/%s","kind":%q,"metadata":{%s},"spec":%s}`, k.group, version, k.name, meta, spec)
}

// furnishKubernetes gives a tenant an object of each kind, and a sandbox that its router reaches.
func (w *world) furnishKubernetes(p *tenant) {
	w.Helper()
	access, err := p.api.Kubernetes(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	p.own["router"] = access.RouterPath
	p.mark(access.RouterPath)
	for _, k := range kubernetesKinds {
		p.own["k8s_"+k.resource] = w.object(p, k, "v1beta1")["object"]
	}
	p.own["k8s_sandbox"] = p.own["k8s_sandboxes"]
	w.eventually("the runtime of the sandbox answers", func() error {
		r := w.request(trial{dialect: "router", route: "POST /execute", body: `{"command":"sh -c 'echo $secret > kept; nohup python3 -m http.server 8000 >/dev/null 2>&1 &'"}`})
		if got := w.do(r, filler(w.T, p, p.own)); !got.ok() {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	w.eventually("the web server in the sandbox answers", func() error {
		if got := w.do(w.request(trial{dialect: "router", route: "GET /kept", header: ofPort}), filler(w.T, p, p.own)); !got.ok() {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

var ofPort = map[string]string{"X-Sandbox-Port": "8000"}

// object makes an object of a kind.
func (w *world) object(p *tenant, k kubernetesKind, version string) things {
	w.Helper()
	name := p.word(p.name)
	var made struct {
		Metadata struct{ UID, ResourceVersion string }
	}
	meta := fmt.Sprintf(`"name":%q,"labels":{"note":%q}`, name, p.secret)
	if k.name == "SandboxClaim" {
		meta = fmt.Sprintf(`"name":%q,"annotations":{"note":%q}`, name, p.secret)
	}
	w.ask(p, "kubernetes", "POST "+k.path(version), k.body(version, meta), nil, &made)
	p.mark(made.Metadata.UID)
	return things{"object": name, "raw_version": made.Metadata.ResourceVersion}
}

// freshObject makes an object and waits until the server has done with it what there is to do.
func freshObject(k kubernetesKind) func(*world, *tenant) things {
	return func(w *world, p *tenant) things {
		x := w.object(p, k, "v1beta1")
		w.settles()
		var now struct {
			Metadata struct{ ResourceVersion string }
		}
		w.ask(p, "kubernetes", "GET "+k.path("v1beta1")+"/"+x["object"], "", nil, &now)
		x["raw_version"] = now.Metadata.ResourceVersion
		return x
	}
}

// gone removes the object of a trial, of both tenants, and waits for the end of what it caused.
func gone(k kubernetesKind, name string) func(*world, *tenant, things) {
	return func(w *world, _ *tenant, x things) {
		for _, p := range []*tenant{w.a, w.b} {
			r := w.request(trial{dialect: "kubernetes", route: "DELETE " + k.path("v1beta1") + "/" + name})
			w.eventually("the object is gone", func() error {
				if got := w.do(r, filler(w.T, p, x)); got.status != http.StatusNotFound {
					return fmt.Errorf("%w: %v", errNotYet, got)
				}
				return nil
			})
		}
	}
}

var mergePatch = map[string]string{"Content-Type": "application/merge-patch+json"}

// kubernetesTrials are every verb of every kind that discovery tells.
func kubernetesTrials() (trials []trial) {
	for _, k := range kubernetesKinds {
		for _, version := range []string{"v1beta1", "v1alpha1"} {
			trials = append(trials, k.trials(version)...)
		}
	}
	trials = append(trials, coreTrials...)
	for _, path := range []string{"/version", "/livez", "/api", "/api/v1", "/apis", "/apis/agents.x-k8s.io", "/apis/agents.x-k8s.io/v1beta1", "/openapi/v2", "/openapi/v3"} {
		trials = append(trials, trial{route: "GET " + path, kind: public})
	}
	return trials
}

func (k kubernetesKind) trials(version string) []trial {
	at, what := k.path(version), version+" "+k.resource
	one := at + "/$object"
	fresh, done := freshObject(k), gone(k, "$object")
	named := func(verb, method, path, body string, header map[string]string) trial {
		return trial{route: verb + " " + what, method: method, path: path, body: body, header: header, fresh: fresh, after: done}
	}
	list := []trial{
		{route: "create " + what, kind: apart, about: "with A's name", method: "POST", path: at, body: k.body(version, `"name":"same"`), after: gone(k, "same")},
		{route: "list " + what, kind: listing, method: "GET", path: at, want: "$k8s_" + k.resource},
		{route: "list " + what, about: "of all namespaces", kind: listing, method: "GET", path: strings.Replace(at, "/namespaces/default", "", 1), want: "$k8s_" + k.resource},
		{route: "watch " + what, kind: listing, method: "GET", path: at + "?watch=true&timeoutSeconds=1", want: "$k8s_" + k.resource},
		{route: "deletecollection " + what, kind: apart, method: "DELETE", path: at + "?labelSelector=trial%3Dcollection", fresh: freshCollection(k, version), after: gone(k, "$object")},
		named("get", "GET", one, "", nil),
		named("update", "PUT", one, k.body(version, `"name":"$object","resourceVersion":"$raw_version","annotations":{"more":"x"}`), nil),
		named("patch", "PATCH", one, `{"metadata":{"annotations":{"more":"x"}}}`, mergePatch),
		named("delete", "DELETE", one, "", nil),
	}
	if k.name != "SandboxTemplate" {
		list = append(list, named("get", "GET", one+"/status", "", nil))
		list[len(list)-1].route += "/status"
	}
	if k.name == "SandboxWarmPool" || k.name == "Sandbox" && version == "v1alpha1" {
		for _, tr := range []trial{
			named("get", "GET", one+"/scale", "", nil),
			named("patch", "PATCH", one+"/scale", `{"spec":{"replicas":1}}`, mergePatch),
			named("update", "PUT", one+"/scale", `{"apiVersion":"autoscaling/v1","kind":"Scale","metadata":{"name":"$object","namespace":"default"},"spec":{"replicas":1}}`, nil),
		} {
			tr.route += "/scale"
			list = append(list, tr)
		}
	}
	return list
}

// freshCollection makes an object with the label by which both tenants delete.
func freshCollection(k kubernetesKind, version string) func(*world, *tenant) things {
	return func(w *world, p *tenant) things {
		name := p.word(p.name)
		w.ask(p, "kubernetes", "POST "+k.path(version), k.body(version, fmt.Sprintf(`"name":%q,"labels":{"trial":"collection"}`, name)), nil, nil)
		w.settles()
		return things{"object": name}
	}
}

const inDefault = "/api/v1/namespaces/default"

var spdy = map[string]string{"Connection": "Upgrade", "Upgrade": "SPDY/3.1", "X-Stream-Protocol-Version": "portforward.k8s.io"}

// forwarded asks for the same over a WebSocket.
var forwarded = map[string]string{
	"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
	"Sec-WebSocket-Protocol": "SPDY/3.1+portforward.k8s.io",
}

const review = `{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview","spec":{"resourceAttributes":{"namespace":"default","verb":"get","group":"agents.x-k8s.io","resource":"sandboxes"}}}`

// coreTrials are of the few kinds of Kubernetes' own.
var coreTrials = []trial{
	{route: "get v1 namespaces", kind: public, method: "GET", path: inDefault},
	{route: "list v1 namespaces", kind: listing, method: "GET", path: "/api/v1/namespaces"},
	{route: "get v1 pods", method: "GET", path: inDefault + "/pods/$k8s_sandbox"},
	{route: "list v1 pods", kind: listing, method: "GET", path: inDefault + "/pods", want: "$k8s_sandbox"},
	{route: "watch v1 pods", kind: listing, method: "GET", path: inDefault + "/pods?watch=true&timeoutSeconds=1", want: "$k8s_sandbox"},
	{route: "create v1 pods/portforward", method: "POST", path: inDefault + "/pods/$k8s_sandbox/portforward", header: spdy},
	{route: "get v1 pods/portforward", method: "GET", path: inDefault + "/pods/$k8s_sandbox/portforward", header: forwarded},
	{route: "get v1 services", kind: public, method: "GET", path: inDefault + "/services/sandbox-router-svc"},
	{route: "list v1 services", kind: listing, method: "GET", path: inDefault + "/services"},
	{route: "list v1 events", kind: listing, method: "GET", path: inDefault + "/events"},
	{route: "create v1 selfsubjectaccessreviews", kind: public, method: "POST", path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body: review},
	{route: "create v1 selfsubjectreviews", kind: listing, method: "POST", path: "/apis/authentication.k8s.io/v1/selfsubjectreviews", body: "{}", want: "$tenant"},
}

// discovered compares the trials with what the server says that it serves.
func (w *world) discovered(t *testing.T) {
	tried := map[string]bool{}
	for _, tr := range kubernetesTrials() {
		tried[tr.route] = true
	}
	var groups struct {
		Groups []struct {
			Versions []struct{ GroupVersion, Version string }
		}
	}
	w.ask(w.a, "kubernetes", "GET /apis", "", nil, &groups)
	places := map[string]string{"/api/v1": "v1"}
	for _, g := range groups.Groups {
		for _, v := range g.Versions {
			places["/apis/"+v.GroupVersion] = v.Version
		}
	}
	for _, at := range slices.Sorted(maps.Keys(places)) {
		var list struct {
			Resources []struct {
				Name  string
				Verbs []string
			}
		}
		w.ask(w.a, "kubernetes", "GET "+at, "", nil, &list)
		for _, r := range list.Resources {
			for _, verb := range r.Verbs {
				if route := verb + " " + places[at] + " " + r.Name; !tried[route] {
					t.Errorf("the server serves %s, and no trial says what another tenant may have of it: add one to test/tenants", route)
				}
			}
		}
	}
}

const uploaded = "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"sent\"\r\n\r\ntext\r\n--XX--\r\n"

// runtimeTrials are the paths of port 8888, through the router.
var runtimeTrials = []trial{
	{route: "/", method: "GET"},
	{route: "/execute", method: "POST", body: `{"command":"cat kept"}`, want: "$secret"},
	{route: "/execute", about: "by the router's URL", method: "POST", path: "$my_router/execute", header: map[string]string{"Authorization": ""}, body: `{"command":"cat kept"}`, want: "$secret"},
	{route: "/upload", method: "POST", body: uploaded, header: multiparts},
	{route: "/download", method: "GET", path: "/download/kept", want: "$secret"},
	{route: "/list", method: "GET", path: "/list/.", want: "kept"},
	{route: "/exists", method: "GET", path: "/exists/kept"},
	{route: "/agent", method: "POST", wantStatus: http.StatusNotFound},
}

var routerPortTrials = []trial{
	{route: "GET by X-Sandbox-Port", path: "/kept", header: ofPort, want: "$secret"},
}
