package agentsandbox_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox"
	"github.com/covehq/cove/internal/fault"
)

func TestBadInputGetsAClearStatus(t *testing.T) {
	w := newWorld(t, func(w *world) { w.cfg.Namespaces = map[string][]string{"acme": {"default", "other"}} })
	w.claimed("there")
	rv := dig(w.ask("GET", claims+"/there", "").json(t), "metadata", "resourceVersion").(string)
	head := `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxClaim",`
	spec := `"spec":{"warmPoolRef":{"name":"python"}}}`
	put := func(version string) string {
		return head + `"metadata":{"name":"there","resourceVersion":"` + version + `"},` + spec
	}
	merge, list := []string{"Content-Type", "application/merge-patch+json"}, []string{"Content-Type", "application/json-patch+json"}
	for name, c := range map[string]struct {
		method, path, body string
		code               int
		reason, says       string
		headers            []string
	}{
		"not JSON":               {"POST", claims, `{"a":`, 400, "BadRequest", "JSON", nil},
		"two values":             {"POST", claims, `{} {}`, 400, "BadRequest", "more than one", nil},
		"not an object":          {"POST", claims, `[1]`, 400, "BadRequest", "not a JSON object", nil},
		"empty":                  {"POST", claims, ``, 400, "BadRequest", "JSON", nil},
		"no kind":                {"POST", claims, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1"}`, 400, "BadRequest", "Kind", nil},
		"no version":             {"POST", claims, `{"kind":"SandboxClaim"}`, 400, "BadRequest", "apiVersion", nil},
		"another kind":           {"POST", claims, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"Sandbox"}`, 400, "BadRequest", "does not match", nil},
		"another version":        {"POST", claims, `{"apiVersion":"extensions.agents.x-k8s.io/v1alpha1","kind":"SandboxClaim"}`, 400, "BadRequest", "does not match", nil},
		"metadata is a text":     {"POST", claims, head + `"metadata":"x",` + spec, 400, "BadRequest", "metadata", nil},
		"a name that is none":    {"POST", claims, head + `"metadata":{"name":7},` + spec, 400, "BadRequest", "metadata.name", nil},
		"no name":                {"POST", claims, head + `"metadata":{},` + spec, 422, "Invalid", "metadata.name", nil},
		"a wrong name":           {"POST", claims, claimBody("Not_A_Name"), 422, "Invalid", "metadata.name", nil},
		"a name with a path":     {"POST", claims, claimBody("../x"), 422, "Invalid", "metadata.name", nil},
		"a name of 64":           {"POST", claims, claimBody(strings.Repeat("a", 64)), 422, "Invalid", "63", nil},
		"a template of 254":      {"POST", tmpls, strings.Replace(strings.Replace(boxBody(strings.Repeat("a", 254), "base"), "agents.x", "extensions.agents.x", 1), `"Sandbox"`, `"SandboxTemplate"`, 1), 422, "Invalid", "253", nil},
		"another namespace":      {"POST", claims, head + `"metadata":{"name":"x","namespace":"other"},` + spec, 400, "BadRequest", "namespace", nil},
		"a wrong label":          {"POST", claims, head + `"metadata":{"name":"x","labels":{"a b":"c"}},` + spec, 422, "Invalid", "labels", nil},
		"a wrong label value":    {"POST", claims, head + `"metadata":{"name":"x","labels":{"a":"c d"}},` + spec, 422, "Invalid", "labels", nil},
		"a long label value":     {"POST", claims, head + `"metadata":{"name":"x","labels":{"a":"` + strings.Repeat("v", 64) + `"}},` + spec, 422, "Invalid", "labels", nil},
		"a label that is none":   {"POST", claims, head + `"metadata":{"name":"x","labels":{"a":1}},` + spec, 400, "BadRequest", "labels", nil},
		"a wrong annotation":     {"POST", claims, head + `"metadata":{"name":"x","annotations":{"a b":"c"}},` + spec, 422, "Invalid", "annotations", nil},
		"much annotation":        {"POST", claims, head + `"metadata":{"name":"x","annotations":{"a":"` + strings.Repeat("v", 300<<10) + `"}},` + spec, 422, "Invalid", "Too long", nil},
		"no pool":                {"POST", claims, claimBody("x", `"env":[]`), 422, "Invalid", "warmPoolRef", nil},
		"a pool that is no name": {"POST", claims, claimBody("x", `"warmPoolRef":{"name":"../../x"}`), 422, "Invalid", "warmPoolRef", nil},
		"a wrong type":           {"POST", claims, claimBody("x", `"warmPoolRef":"python"`), 422, "Invalid", "warmPoolRef", nil},
		"a wrong time":           {"POST", claims, claimBody("x", `"warmPoolRef":{"name":"python"},"lifecycle":{"shutdownTime":"tomorrow"}`), 422, "Invalid", "2006-01-02", nil},
		"a wrong policy":         {"POST", claims, claimBody("x", `"warmPoolRef":{"name":"python"},"lifecycle":{"shutdownPolicy":"Perhaps"}`), 422, "Invalid", "Retain", nil},
		"a negative ttl":         {"POST", claims, claimBody("x", `"warmPoolRef":{"name":"python"},"lifecycle":{"ttlSecondsAfterFinished":-1}`), 422, "Invalid", "ttl", nil},
		"a spec that is a list":  {"POST", claims, head + `"metadata":{"name":"x"},"spec":[]}`, 400, "BadRequest", "spec", nil},
		"no containers":          {"POST", boxes, `{"apiVersion":"agents.x-k8s.io/v1beta1","kind":"Sandbox","metadata":{"name":"x"},"spec":{"podTemplate":{"spec":{"containers":[]}}}}`, 422, "Invalid", "containers", nil},
		"a rule that is none":    {"POST", tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"x"},"spec":{"networkPolicy":{"egress":[7]},"podTemplate":{"spec":{"containers":[{"image":"base"}]}}}}`, 422, "Invalid", "egress", nil},
		"no image":               {"POST", boxes, boxBody("x", ""), 422, "Invalid", "image", nil},
		"three replicas":         {"POST", boxes, boxBody("x", "base", `"replicas":3`), 422, "Invalid", "replicas", nil},
		"a huge body":            {"POST", claims, head + strings.Repeat(" ", 600<<10) + `"metadata":{"name":"x"},` + spec, 413, "RequestEntityTooLarge", "limit", nil},
		"a version on create":    {"POST", claims, put("1"), 400, "BadRequest", "resourceVersion", nil},
		"twice":                  {"POST", claims, claimBody("there"), 409, "AlreadyExists", "already exists", nil},
		"YAML":                   {"POST", claims, "a: b", 415, "UnsupportedMediaType", "application/json", []string{"Content-Type", "application/yaml"}},
		"a wrong content type":   {"POST", claims, "{}", 415, "UnsupportedMediaType", "application/json", []string{"Content-Type", "; ;"}},
		"a strategic patch":      {"PATCH", claims + "/there", "{}", 415, "UnsupportedMediaType", "merge-patch", []string{"Content-Type", "application/strategic-merge-patch+json"}},
		"an apply patch":         {"PATCH", claims + "/there", "{}", 415, "UnsupportedMediaType", "merge-patch", []string{"Content-Type", "application/apply-patch+yaml"}},
		"a patch of the name":    {"PATCH", claims + "/there", `{"metadata":{"name":"other"}}`, 400, "BadRequest", "name", merge},
		"a patch of the kind":    {"PATCH", claims + "/there", `{"kind":"Pod"}`, 400, "BadRequest", "kind", merge},
		"a patch to no pool":     {"PATCH", claims + "/there", `{"spec":null}`, 422, "Invalid", "warmPoolRef", merge},
		"a list that is none":    {"PATCH", claims + "/there", `{}`, 400, "BadRequest", "operations", list},
		"a path that is none":    {"PATCH", claims + "/there", `[{"op":"remove","path":"/spec/nothing"}]`, 422, "Invalid", "nothing", list},
		"a test that fails":      {"PATCH", claims + "/there", `[{"op":"test","path":"/spec/warmPoolRef/name","value":"x"}]`, 422, "Invalid", "another", list},
		"a whole into itself":    {"PATCH", claims + "/there", `[` + strings.TrimSuffix(strings.Repeat(`{"op":"copy","from":"","path":"/x"},{"op":"copy","from":"","path":"/y"},`, 60), ",") + `]`, 413, "RequestEntityTooLarge", "limit", list},
		"put without a version":  {"PUT", claims + "/there", claimBody("there"), 422, "Invalid", "resourceVersion", nil},
		"put of an old version":  {"PUT", claims + "/there", put("1"), 409, "Conflict", "modified", nil},
		"put of another name":    {"PUT", claims + "/there", strings.Replace(put(rv), `"there"`, `"x"`, 1), 400, "BadRequest", "name", nil},
		"put of what is not":     {"PUT", claims + "/x", claimBody("x"), 404, "NotFound", "not found", nil},
		"patch of what is not":   {"PATCH", claims + "/x", "{}", 404, "NotFound", "not found", merge},
		"delete of what is not":  {"DELETE", claims + "/x", "", 404, "NotFound", "not found", nil},
		"delete of another":      {"DELETE", claims + "/there", `{"preconditions":{"uid":"x"}}`, 409, "Conflict", "UID", nil},
		"delete and orphan":      {"DELETE", claims + "/there?propagationPolicy=Orphan", "", 400, "BadRequest", "Orphan", nil},
		"delete of a built-in":   {"DELETE", pools + "/python", "", 403, "Forbidden", "built in", nil},
		"the status":             {"PUT", claims + "/there/status", put(rv), 403, "Forbidden", "status", nil},
		"no such part":           {"GET", claims + "/there/nothing", "", 404, "NotFound", "find", nil},
		"no such resource":       {"GET", "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/things", "", 404, "NotFound", "find", nil},
		"no such version":        {"GET", "/apis/extensions.agents.x-k8s.io/v2/namespaces/default/sandboxclaims", "", 404, "NotFound", "find", nil},
		"no such group":          {"GET", "/apis/apps/v1/namespaces/default/deployments", "", 404, "NotFound", "find", nil},
		"no such path":           {"GET", "/apis/a/b/c/d/e/f/g/h", "", 404, "NotFound", "find", nil},
		"nothing":                {"GET", "/", "", 404, "NotFound", "find", nil},
		"a method":               {"POST", claims + "/there", "{}", 405, "MethodNotAllowed", "method", nil},
		"a post to all":          {"POST", "/apis/extensions.agents.x-k8s.io/v1beta1/sandboxclaims", "{}", 405, "MethodNotAllowed", "method", nil},
		"a wrong form":           {"GET", claims, "", 406, "NotAcceptable", "application/json", []string{"Accept", "application/yaml"}},
		"a wrong selector":       {"GET", claims + "?labelSelector=a+in+b", "", 400, "BadRequest", "requirement", nil},
		"a wrong field":          {"GET", claims + "?fieldSelector=spec.x%3Dy", "", 400, "BadRequest", "not supported", nil},
		"a wrong limit":          {"GET", claims + "?limit=-1", "", 400, "BadRequest", "limit", nil},
		"a wrong continue":       {"GET", claims + "?continue=%21", "", 400, "BadRequest", "continue", nil},
		"a wrong flag":           {"GET", claims + "?watch=perhaps", "", 400, "BadRequest", "watch", nil},
		"a wrong query":          {"GET", claims + "?%zz", "", 400, "BadRequest", "query", nil},
		"a wrong version":        {"GET", claims + "?watch=1&resourceVersion=new", "", 400, "BadRequest", "version", nil},
		"an old version":         {"GET", claims + "?watch=1&resourceVersion=1", "", 410, "Expired", "too old", nil},
		"a foreign namespace":    {"GET", strings.Replace(claims, "default", "kube-system", 1), "", 403, "Forbidden", "kube-system", nil},
		"a wrong namespace":      {"GET", strings.Replace(claims, "default", "A_b", 1), "", 400, "BadRequest", "namespace", nil},
		"a foreign pod":          {"GET", "/api/v1/namespaces/kube-system/pods", "", 403, "Forbidden", "kube-system", nil},
		"a forward to nothing":   {"POST", "/api/v1/namespaces/default/pods/x/portforward", "", 404, "NotFound", "not found", nil},
		"a log":                  {"GET", "/api/v1/namespaces/default/pods/there/log", "", 501, "NotImplemented", "log", nil},
		"no key":                 {"GET", claims, "", 401, "Unauthorized", "Unauthorized", []string{"Authorization", ""}},
		"a wrong key":            {"GET", claims, "", 401, "Unauthorized", "Unauthorized", []string{"Authorization", "Bearer e2b_0000000000000000000000000000000000000000"}},
		"no key to discover":     {"GET", "/apis", "", 401, "Unauthorized", "Unauthorized", []string{"Authorization", ""}},
		"another scheme":         {"GET", claims, "", 401, "Unauthorized", "Unauthorized", []string{"Authorization", "Basic eDp5"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.ask(c.method, c.path, c.body, c.headers...)
			s := wantStatus(t, got, c.code, c.reason)
			if m, _ := s["message"].(string); !strings.Contains(m, c.says) || len(m) > 1000 {
				t.Errorf("%.1000s, want %q", got.body, c.says)
			}
			for _, key := range w.keys {
				if strings.Contains(got.body, key) {
					t.Error("the answer holds a key")
				}
			}
		})
	}
	if got := w.ask("GET", claims+"/there", ""); got.status != 200 {
		t.Errorf("after all of that: %d %s", got.status, got.body)
	}
}

func TestTheTableOfFailuresIsTotal(t *testing.T) {
	for _, kind := range fault.Kinds {
		code, reason := agentsandbox.Status(kind)
		if code < 400 || reason == "" || kind != fault.Internal && code == http.StatusInternalServerError {
			t.Errorf("%s: %d %s", kind, code, reason)
		}
	}
}

func TestTenantsDoNotSeeEachOther(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("mine")
	theirs := []string{"Authorization", "Bearer " + w.keys["globex"]}
	for _, path := range []string{claims + "/mine", boxes + "/mine", "/api/v1/namespaces/default/pods/mine"} {
		wantStatus(t, w.ask("GET", path, "", theirs...), 404, "NotFound")
	}
	wantStatus(t, w.ask("DELETE", claims+"/mine", "", theirs...), 404, "NotFound")
	wantStatus(t, w.ask("POST", "/api/v1/namespaces/default/pods/mine/portforward", "", theirs...), 404, "NotFound")
	for _, path := range []string{"/apis/extensions.agents.x-k8s.io/v1beta1/sandboxclaims", "/apis/agents.x-k8s.io/v1beta1/sandboxes"} {
		if l, _ := w.ask("GET", path, "", theirs...).json(t)["items"].([]any); len(l) != 0 {
			t.Errorf("%s: %v", path, l)
		}
	}
	if got := w.ask("POST", claims, claimBody("mine"), theirs...); got.status != 201 {
		t.Errorf("the same name is another's: %d %s", got.status, got.body)
	}
	if _, err := w.api.Find(t.Context(), auth.Principal{Tenant: "nobody"}, "default", "mine"); !fault.Is(err, fault.NotFound) {
		t.Errorf("found: %v", err)
	}
	w.eventually("they have their own", func() bool {
		other, err := w.api.Find(t.Context(), auth.Principal{Tenant: "globex"}, "default", "mine")
		return err == nil && other != id
	})
}

func TestAnObjectIsKeptAsItCame(t *testing.T) {
	w := newWorld(t)
	w.post(claims, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxClaim","extra":{"big":12345678901234567890},
		"metadata":{"name":"x","labels":{"a":"b"},"annotations":{"c":"d"},"unknown":[1]},
		"spec":{"warmPoolRef":{"name":"python","more":true},"future":{"n":1.50}},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
	got := w.ask("GET", claims+"/x", "")
	for _, part := range []string{`12345678901234567890`, `"unknown":[1]`, `"more":true`, `"future":{"n":1.50}`, `"a":"b"`, `"c":"d"`} {
		if !strings.Contains(got.body, part) {
			t.Errorf("%s is lost: %s", part, got.body)
		}
	}
	w.becomes(claims+"/x", "DependenciesReady")

	o := w.ask("GET", claims+"/x", "").json(t)
	if dig(o, "metadata", "generation") != 1.0 {
		t.Errorf("generation %v", dig(o, "metadata", "generation"))
	}
	merge := []string{"Content-Type", "application/merge-patch+json"}
	o = w.ask("PATCH", claims+"/x", `{"metadata":{"labels":{"a":null,"e":"f"}}}`, merge...).json(t)
	if dig(o, "metadata", "labels", "a") != nil || dig(o, "metadata", "labels", "e") != "f" || dig(o, "metadata", "generation") != 1.0 {
		t.Errorf("%v", o["metadata"])
	}
	rv := dig(o, "metadata", "resourceVersion")
	o = w.ask("PATCH", claims+"/x", `{"metadata":{"labels":{"e":"f"}}}`, merge...).json(t)
	if dig(o, "metadata", "resourceVersion") != rv {
		t.Error("a change that changes nothing is one")
	}
	o = w.ask("PATCH", claims+"/x", `[{"op":"add","path":"/spec/future/list","value":[1]},{"op":"add","path":"/spec/future/list/0","value":0},{"op":"move","from":"/spec/future/n","path":"/spec/future/m"},{"op":"replace","path":"/spec/future/list/1","value":"b"},{"op":"remove","path":"/metadata/labels/e"}]`, "Content-Type", "application/json-patch+json").json(t)
	if l, _ := dig(o, "spec", "future", "list").([]any); len(l) != 2 || l[1] != "b" || dig(o, "spec", "future", "m") != 1.5 || dig(o, "metadata", "generation") != 2.0 {
		t.Errorf("%v", o)
	}
	dry := w.ask("PATCH", claims+"/x?dryRun=All", `{"metadata":{"labels":{"dry":"run"}}}`, merge...).json(t)
	if dig(dry, "metadata", "labels", "dry") != "run" || dig(w.ask("GET", claims+"/x", "").json(t), "metadata", "labels", "dry") != nil {
		t.Error("a dry run changed something, or shows nothing")
	}
}

func TestWritingBackAnotherVersionChangesNothing(t *testing.T) {
	w := newWorld(t)
	w.post(oldClaims, `{"apiVersion":"extensions.agents.x-k8s.io/v1alpha1","kind":"SandboxClaim","metadata":{"name":"old"},"spec":{"sandboxTemplateRef":{"name":"python"},"warmpool":"none"}}`)
	w.becomes(claims+"/old", "DependenciesReady")
	body := w.ask("GET", claims+"/old", "").body
	body = strings.Replace(body, `"metadata":{`, `"metadata":{"labels":{"new":"label"},`, 1)
	if got := w.ask("PUT", claims+"/old", body); got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	old := w.ask("GET", oldClaims+"/old", "").json(t)
	if dig(old, "spec", "warmpool") != "none" || dig(old, "spec", "sandboxTemplateRef", "name") != "python" || dig(old, "metadata", "labels", "new") != "label" {
		t.Errorf("%v", old)
	}

	w.post(tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"t"},"spec":{"volumeClaimTemplatesPolicy":"Allowed","podTemplate":{"spec":{"containers":[{"name":"main","image":"base"}]}}}}`)
	older := strings.Replace(tmpls, "v1beta1", "v1alpha1", 1) + "/t"
	got := w.ask("GET", older, "").json(t)
	if dig(got, "spec", "volumeClaimTemplatesPolicy") != nil || dig(got, "metadata", "annotations", "api.agents.x-k8s.io/v1beta1-volume-claim-templates-policy") != "Allowed" {
		t.Errorf("%v", got)
	}
}

func TestListsAreChosenFromAndCut(t *testing.T) {
	w := newWorld(t)
	for name, labels := range map[string]string{"a": `"app":"x","tier":"1"`, "b": `"app":"y"`, "c": `"app":"x"`, "d": ``} {
		w.post(claims, strings.Replace(claimBody(name, `"warmPoolRef":{"name":"nope"}`), `"name":"`+name+`"`, `"name":"`+name+`","labels":{`+labels+`}`, 1))
	}
	names := func(query string) string {
		t.Helper()
		var all []string
		l, _ := w.ask("GET", claims+query, "").json(t)["items"].([]any)
		for _, o := range l {
			all = append(all, dig(o, "metadata", "name").(string))
		}
		return strings.Join(all, "")
	}
	for query, want := range map[string]string{
		"": "abcd", "?labelSelector=app%3Dx": "ac", "?labelSelector=app%3D%3Dx,tier": "a", "?labelSelector=app!%3Dx": "bd", "?labelSelector=app+in+(x,y)": "abc",
		"?labelSelector=app+notin+(x)": "bd", "?labelSelector=!app": "d", "?labelSelector=app,!tier": "bc", "?fieldSelector=metadata.name%3Db": "b",
		"?fieldSelector=metadata.name!%3Db,metadata.namespace%3Ddefault": "acd", "?fieldSelector=metadata.namespace%3Dother": "",
	} {
		if got := names(query); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	seen, next := "", ""
	for range 5 {
		page := w.ask("GET", claims+"?limit=3&continue="+next, "").json(t)
		for _, o := range page["items"].([]any) {
			seen += dig(o, "metadata", "name").(string)
		}
		if next, _ = dig(page, "metadata", "continue").(string); next == "" {
			break
		}
	}
	if seen != "abcd" {
		t.Errorf("by pages: %q", seen)
	}
	w.ask("DELETE", claims+"?labelSelector=app", "")
	if got := names(""); got != "d" {
		t.Errorf("after a delete of some: %q", got)
	}
}

const asTable = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"

func TestKubectlGetsTables(t *testing.T) {
	w := newWorld(t)
	w.claimed("one")
	for path, want := range map[string]string{
		claims: "Name Ready Sandbox Reason Age | one True one DependenciesReady", boxes: "Name Ready Reason Age | one True DependenciesReady",
		pools + "?fieldSelector=metadata.name%3Dpython": "Name Ready Desired Age | python 1 1", tmpls + "?fieldSelector=metadata.name%3Dpython": "Name Age | python",
		"/api/v1/namespaces/default/pods?labelSelector=!app":       "Name Ready Status Restarts Age | one 1/1 Running 0",
		"/api/v1/namespaces?fieldSelector=metadata.name%3Ddefault": "Name Status Age | default Active",
		"/api/v1/namespaces/default/services":                      "Name Type Cluster-IP External-IP Port(s) Age | sandbox-router-svc ClusterIP None \\u003cnone\\u003e 8080/TCP",
	} {
		table := w.ask("GET", path, "", "Accept", asTable).json(t)
		var words []string
		for _, c := range table["columnDefinitions"].([]any) {
			words = append(words, dig(c, "name").(string))
		}
		words = append(words, "|")
		for _, r := range table["rows"].([]any) {
			cells := r.(map[string]any)["cells"].([]any)
			for _, c := range cells[:len(cells)-1] {
				words = append(words, strings.TrimSpace(strings.ReplaceAll(jsonOf(t, c), `"`, "")))
			}
			if dig(r, "object", "kind") != "PartialObjectMetadata" {
				t.Errorf("row %v", r)
			}
		}
		if got := strings.Join(words, " "); table["kind"] != "Table" || got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

func TestWhatThereIsCanBeDiscovered(t *testing.T) {
	w := newWorld(t)
	if got := w.ask("GET", "/version", "", "Authorization", "").json(t); !strings.HasPrefix(got["gitVersion"].(string), "v1.") {
		t.Errorf("%v", got)
	}
	for path, want := range map[string]string{
		"/api": `"versions":["v1"]`, "/apis": `"groupVersion":"extensions.agents.x-k8s.io/v1beta1"`, "/api/v1": `"name":"pods/portforward"`,
		"/apis/agents.x-k8s.io": `"preferredVersion":{"groupVersion":"agents.x-k8s.io/v1beta1"`, "/apis/agents.x-k8s.io/v1alpha1": `"name":"sandboxes/scale"`,
		"/apis/extensions.agents.x-k8s.io/v1beta1": `"shortNames":["swp"]`, "/openapi/v3": `"serverRelativeURL":"/openapi/v3/apis/agents.x-k8s.io/v1beta1"`,
		"/openapi/v3/apis/agents.x-k8s.io/v1beta1": `"fieldValidation"`, "/openapi/v2": `"swagger":"2.0"`, "/livez": "ok",
	} {
		if got := w.ask("GET", path, ""); got.status != 200 || !strings.Contains(got.body, want) {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	if got := w.ask("GET", "/openapi/v2", "", "Accept", "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"); got.status != 200 || got.body != "" {
		t.Errorf("as protobuf: %d %q", got.status, got.body)
	}
	if strings.Contains(w.ask("GET", "/apis/agents.x-k8s.io/v1beta1", "").body, "scale") {
		t.Error("the newer version scales Sandboxes")
	}
}

func TestScale(t *testing.T) {
	w := newWorld(t)
	w.claimed("one")
	if got := w.ask("GET", oldBoxes+"/one/scale", "").json(t); got["kind"] != "Scale" || dig(got, "spec", "replicas") != 1.0 || dig(got, "status", "replicas") != 1.0 {
		t.Errorf("%v", got)
	}
	scale := w.ask("GET", oldBoxes+"/one/scale", "").body
	if got := w.ask("PUT", oldBoxes+"/one/scale", strings.Replace(scale, `"spec":{"replicas":1}`, `"spec":{"replicas":0}`, 1)); got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	w.becomes(boxes+"/one", "SandboxSuspended")
	wantStatus(t, w.ask("PUT", oldBoxes+"/one/scale", scale), 409, "Conflict")
	wantStatus(t, w.ask("GET", boxes+"/one/scale", ""), 404, "NotFound")
	w.post(pools, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxWarmPool","metadata":{"name":"p"},"spec":{"sandboxTemplateRef":{"name":"python"}}}`)
	if got := w.ask("PATCH", pools+"/p/scale", `{"spec":{"replicas":7}}`, "Content-Type", "application/merge-patch+json"); got.status != 200 {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := w.ask("GET", pools+"/p", "").json(t); dig(got, "spec", "replicas") != 7.0 || dig(got, "status", "readyReplicas") != 7.0 {
		t.Errorf("%v", got)
	}
	wantStatus(t, w.ask("PATCH", pools+"/p/scale", `{"spec":{"replicas":-7}}`, "Content-Type", "application/merge-patch+json"), 422, "Invalid")
}

func TestABuiltInTemplateCanBeMadeOnesOwn(t *testing.T) {
	w := newWorld(t)
	got := w.ask("PATCH", tmpls+"/python-3.12", `{"spec":{"podTemplate":{"spec":{"containers":[{"name":"mine","image":"base"}]}}}}`, "Content-Type", "application/merge-patch+json")
	if got.status != 200 || dig(got.json(t), "spec", "podTemplate", "spec", "containers", "image") != "base" {
		t.Fatalf("%d %s", got.status, got.body)
	}
	id := w.claimed("x", `"warmPoolRef":{"name":"python-3.12"}`)
	if sb, err := w.manager.Get(t.Context(), auth.Principal{Tenant: "acme"}, id); err != nil || sb.Template != "base" {
		t.Errorf("%v, %v", sb.Template, err)
	}
	w.ask("DELETE", tmpls+"/python-3.12", "")
	if got := w.ask("GET", tmpls+"/python-3.12", "").json(t); dig(got, "spec", "podTemplate", "spec", "containers", "image") != "python" {
		t.Errorf("the built-in one is not back: %v", got)
	}
}

func TestQuantities(t *testing.T) {
	for given, want := range map[string]float64{"500m": 0.5, "2": 2, "512Mi": 512 << 20, "1.5Gi": 1.5 * (1 << 30), "1e3": 1000, "2G": 2e9} {
		if got, ok := agentsandbox.ParseQuantity(given); !ok || got != want {
			t.Errorf("%s: %v %v", given, got, ok)
		}
	}
	for _, given := range []string{"", "x", "-1", "0", "1 Gi", "Mi", "NaN", "Inf", "1e999", "0x10", strings.Repeat("9", 100)} {
		if got, ok := agentsandbox.ParseQuantity(given); ok {
			t.Errorf("%q is %v", given, got)
		}
	}
}
