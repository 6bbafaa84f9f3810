package opensandbox_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/fault"
)

func TestEveryKindOfFailureHasAStatusAndACode(t *testing.T) {
	for _, kind := range fault.Kinds {
		status, code := opensandbox.Status(kind)
		if code == "" || http.StatusText(status) == "" || status < 400 {
			t.Errorf("%s is %d %q", kind, status, code)
		}
		if status == http.StatusInternalServerError && kind != fault.Internal {
			t.Errorf("%s is said to be our defect", kind)
		}
	}
}

func TestStatus_DiskFull(t *testing.T) {
	if status, code := opensandbox.Status(fault.DiskFull); status != http.StatusInsufficientStorage || code != "SANDBOX::INSUFFICIENT_STORAGE" {
		t.Errorf("a full disk is %d %s", status, code)
	}
}

func TestASandboxIsMadeShownAndEnded(t *testing.T) {
	w := newWorld(t)
	got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python:3.12","auth":{"username":"u","password":"p"}},"timeout":300,
		"resourceLimits":{"cpu":"500m","memory":"64Mi"},"env":{"A":"1","B":null},"metadata":{"team":"x"},`+idle+`,"secureAccess":false,
		"extensions":{"opensandbox.extensions.a":"b"},"platform":{"os":"linux","arch":"`+runtime.GOARCH+`"},"networkPolicy":{}}`, "X-Request-ID", "abc")
	if got.status != http.StatusAccepted || strings.Contains(got.body, ":null") {
		t.Fatalf("%d %s", got.status, got.body)
	}
	made := got.json(t)
	id := made["id"].(string)
	shown := w.ask("GET", "/v1/sandboxes/"+id, "").json(t)
	for _, v := range []map[string]any{made, shown} {
		status := v["status"].(map[string]any)
		created, err1 := time.Parse(time.RFC3339Nano, v["createdAt"].(string))
		expires, err2 := time.Parse(time.RFC3339Nano, v["expiresAt"].(string))
		if status["state"] != "Running" || status["reason"] != "CONTAINER_RUNNING" || err1 != nil || err2 != nil || expires.Sub(created) != 5*time.Minute {
			t.Errorf("%v", v)
		}
		if v["metadata"].(map[string]any)["team"] != "x" || v["image"].(map[string]any)["uri"] != "python:3.12" || len(v["entrypoint"].([]any)) != 3 {
			t.Errorf("%v", v)
		}
	}
	if r := w.images.asked[0]; r.Username != "u" || r.Password != "p" || r.Reference != "python:3.12" {
		t.Errorf("the pull was asked for as %+v", r)
	}
	for _, step := range []struct {
		method string
		status int
	}{{"DELETE", http.StatusNoContent}, {"DELETE", http.StatusNotFound}, {"GET", http.StatusNotFound}} {
		if got := w.ask(step.method, "/v1/sandboxes/"+id, ""); got.status != step.status {
			t.Errorf("%s is %d %s", step.method, got.status, got.body)
		}
	}
}

func TestWithoutATimeoutASandboxHasNoExpiration(t *testing.T) {
	w := newWorld(t)
	for _, field := range []string{`"timeout":null`, `"env":{}`} {
		id := w.create(field)
		if v := w.ask("GET", "/v1/sandboxes/"+id, "").json(t); v["expiresAt"] != nil {
			t.Errorf("%v", v)
		}
		wantFault(t, w.ask("POST", "/v1/sandboxes/"+id+"/renew-expiration", `{"expiresAt":"2999-01-01T00:00:00Z"}`), 409, "DOCKER::INVALID_EXPIRATION")
	}
}

func TestARenewalSetsTheExpiration(t *testing.T) {
	w := newWorld(t)
	id := w.create(`"timeout":300`)
	want := time.Now().Add(20 * time.Minute)
	asked := time.Now()
	got := w.ask("POST", "/v1/sandboxes/"+id+"/renew-expiration", `{"expiresAt":"`+want.UTC().Format("2006-01-02T15:04:05.000000+00:00")+`"}`)
	at, err := time.Parse(time.RFC3339Nano, got.json(t)["expiresAt"].(string))
	// The server turns the time into a lifetime and back: as late as that takes.
	if off := at.Sub(want); got.status != 200 || err != nil || off < -time.Second || off > time.Since(asked)+time.Second {
		t.Errorf("%d %s", got.status, got.body)
	}
	for _, bad := range []string{`{"expiresAt":"2001-01-01T00:00:00Z"}`, `{"expiresAt":"soon"}`, `{}`} {
		wantFault(t, w.ask("POST", "/v1/sandboxes/"+id+"/renew-expiration", bad), 400, "DOCKER::INVALID_EXPIRATION")
	}
}

func TestBadCreates(t *testing.T) {
	const image = `"image":{"uri":"python"}`
	w := newWorld(t)
	other := "arm64"
	if runtime.GOARCH == other {
		other = "amd64"
	}
	for body, want := range map[string]string{
		`{`:  "400 SANDBOX::INVALID_PARAMETER",
		`[]`: "400 SANDBOX::INVALID_PARAMETER",
		`{}`: "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,"snapshotId":"s",` + idle + `}`:                                                                                                          "400 SANDBOX::INVALID_PARAMETER",
		`{"image":{"uri":" "},` + idle + `}`:                                                                                                                     "400 SANDBOX::INVALID_PARAMETER",
		`{"image":"python",` + idle + `}`:                                                                                                                        "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `}`:                                                                                                                                        "400 DOCKER::INVALID_ENTRYPOINT",
		`{` + image + `,"entrypoint":[]}`:                                                                                                                        "400 DOCKER::INVALID_ENTRYPOINT",
		`{` + image + `,"entrypoint":[""]}`:                                                                                                                      "400 DOCKER::INVALID_ENTRYPOINT",
		`{` + image + `,"entrypoint":["/no/such/program"]}`:                                                                                                      "400 DOCKER::INVALID_ENTRYPOINT",
		`{` + image + `,` + idle + `,"timeout":0}`:                                                                                                               "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"timeout":-5}`:                                                                                                              "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"timeout":1.5}`:                                                                                                             "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"timeout":99999999999}`:                                                                                                     "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"cpu":"many"}}`:                                                                                           "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"cpu":"-1"}}`:                                                                                             "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"memory":"1e3"}}`:                                                                                         "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"memory":"1Xi"}}`:                                                                                         "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"gpu":"all"}}`:                                                                                            "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"tpu":"1"}}`:                                                                                              "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"resourceLimits":{"cpu":1}}`:                                                                                                "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"env":{"A B":"1"}}`:                                                                                                         "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"metadata":{"a b":"1"}}`:                                                                                                    "400 SANDBOX::INVALID_METADATA_LABEL",
		`{` + image + `,` + idle + `,"metadata":{"a":"b c"}}`:                                                                                                    "400 SANDBOX::INVALID_METADATA_LABEL",
		`{` + image + `,` + idle + `,"metadata":{"opensandbox.io/a":"b"}}`:                                                                                       "400 SANDBOX::INVALID_METADATA_LABEL",
		`{` + image + `,` + idle + `,"metadata":{"` + strings.Repeat("a", 64) + `":"b"}}`:                                                                        "400 SANDBOX::INVALID_METADATA_LABEL",
		`{` + image + `,` + idle + `,"platform":{"os":"windows","arch":"amd64"}}`:                                                                                "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"platform":{"os":"linux","arch":"` + other + `"}}`:                                                                          "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"extensions":{"poolRef":"p"}}`:                                                                                              "400 SANDBOX::UNSUPPORTED_POOL_REF",
		`{` + image + `,` + idle + `,"extensions":{"access.renew.extend.seconds":"299"}}`:                                                                        "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"extensions":{"access.renew.extend.seconds":"x"}}`:                                                                          "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"credentialProxy":{"enabled":true}}`:                                                                                        "400 SANDBOX::API_NOT_SUPPORTED",
		`{` + image + `,` + idle + `,"lifecycle":{"periodic":[{"name":"a","schedule":"@hourly","command":["x"]}]}}`:                                              "400 SANDBOX::API_NOT_SUPPORTED",
		`{` + image + `,` + idle + `,"lifecycle":{"later":{"command":["x"]}}}`:                                                                                   "400 SANDBOX::API_NOT_SUPPORTED",
		`{` + image + `,` + idle + `,"lifecycle":["x"]}`:                                                                                                         "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":"x"}}`:                                                                                              "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":{"command":[" "]}}}`:                                                                                "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":{"timeoutSeconds":5}}}`:                                                                             "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":{"command":["true"],"timeoutSeconds":10801}}}`:                                                      "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":{"command":["/no/such/program"]}}}`:                                                                 "400 DOCKER::SANDBOX_START_FAILED",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":{"command":["sh","-c","exit 3"]}}}`:                                                                 "400 DOCKER::SANDBOX_START_FAILED",
		`{` + image + `,` + idle + `,"lifecycle":{"preStart":{"command":["sleep","60"],"timeoutSeconds":1}}}`:                                                    "400 DOCKER::SANDBOX_START_FAILED",
		`{"templateId":"t","timeout":60}`:                                                                                                                        "400 SANDBOX::API_NOT_SUPPORTED",
		`{` + image + `,` + idle + `,"networkPolicy":{"defaultAction":"maybe"}}`:                                                                                 "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"networkPolicy":{"egress":[{"action":"allow","target":"a.com"}]}}`:                                                          "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"networkPolicy":{"egress":[{"action":"x","target":"1.1.1.1"}]}}`:                                                            "400 SANDBOX::INVALID_PARAMETER",
		`{` + image + `,` + idle + `,"networkPolicy":{"egress":[{"action":"allow","target":"10.0.0.1"}]}}`:                                                       "400 SANDBOX::INVALID_PARAMETER",
		`{"snapshotId":"snap-none"}`:                                                                                                                             "404 SNAPSHOT::NOT_FOUND",
		`{` + image + `,` + idle + `,"volumes":[{"name":"A","mountPath":"/m","host":{"path":"/x"}}]}`:                                                            "400 VOLUME::INVALID_NAME",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m"}]}`:                                                                                 "400 VOLUME::INVALID_BACKEND",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","host":{"path":"/x"},"pvc":{"claimName":"c"}}]}`:                                    "400 VOLUME::INVALID_BACKEND",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"m","host":{"path":"/x"}}]}`:                                                             "400 VOLUME::INVALID_MOUNT_PATH",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/proc/x","host":{"path":"/x"}}]}`:                                                       "400 VOLUME::INVALID_MOUNT_PATH",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","subPath":"../b","host":{"path":"/x"}}]}`:                                           "400 VOLUME::INVALID_SUB_PATH",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","host":{"path":"x"}}]}`:                                                             "400 VOLUME::INVALID_HOST_PATH",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","host":{"path":"/x/../y"}}]}`:                                                       "400 VOLUME::INVALID_HOST_PATH",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","pvc":{"claimName":"a/b"}}]}`:                                                       "400 VOLUME::INVALID_PVC_NAME",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","ossfs":{"bucket":"b"}}]}`:                                                          "400 VOLUME::UNSUPPORTED_BACKEND",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","pvc":{"claimName":"c"}},{"name":"a","mountPath":"/n","pvc":{"claimName":"d"}}]}`:   "400 VOLUME::DUPLICATE_NAME",
		`{` + image + `,` + idle + `,"volumes":[{"name":"a","mountPath":"/m","pvc":{"claimName":"c"}},{"name":"b","mountPath":"/m/n","pvc":{"claimName":"d"}}]}`: "400 VOLUME::INVALID_MOUNT_PATH",
		`{"image":{"uri":"x/missing"},` + idle + `}`:                                                                                                             "400 DOCKER::SANDBOX_IMAGE_PULL_FAILED",
		`{"image":{"uri":"x/bad"},` + idle + `}`:                                                                                                                 "400 DOCKER::SANDBOX_IMAGE_PULL_FAILED",
		`{"image":{"uri":"x/denied"},` + idle + `}`:                                                                                                              "403 DOCKER::SANDBOX_IMAGE_PULL_FAILED",
		`{"image":{"uri":"x/unreachable"},` + idle + `}`:                                                                                                         "500 DOCKER::SANDBOX_IMAGE_PULL_FAILED",
		`{"image":{"uri":"x/full"},` + idle + `}`:                                                                                                                "500 DOCKER::SANDBOX_IMAGE_PULL_FAILED",
		`{"image":{"uri":"x/late"},` + idle + `}`:                                                                                                                "500 DOCKER::SANDBOX_IMAGE_PULL_FAILED",
		`{` + image + `,"entrypoint":["` + strings.Repeat("a", 1<<20) + `"]}`:                                                                                    "413 REQUEST_TOO_LARGE",
	} {
		status, code, _ := strings.Cut(want, " ")
		got := w.ask("POST", "/v1/sandboxes", body)
		if message := got.json(t); http.StatusText(got.status) == "" || status+" "+code != strconv.Itoa(got.status)+" "+message["code"].(string) || message["message"] == "" {
			t.Errorf("%.200s is %d %s, want %s", body, got.status, got.body, want)
		}
		if retry := got.header.Get("Retry-After"); strings.Contains(body, "unreachable") && retry == "" || status == "400" && retry != "" {
			t.Errorf("%.200s is %d with Retry-After %q", body, got.status, retry)
		}
	}
	if list := w.ask("GET", "/v1/sandboxes", "").json(t); len(list["items"].([]any)) != 0 {
		t.Errorf("something is left: %v", list)
	}
}

func TestWhoeverHasNoKeyIsTold(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	for _, path := range []string{"/v1/sandboxes", "/v1/sandboxes/" + id, "/v1/sandboxes/none", "/v1/nothing", "/v1/snapshots/x"} {
		wantFault(t, w.ask("GET", path, "", "OPEN-SANDBOX-API-KEY", ""), 401, "MISSING_API_KEY")
		wantFault(t, w.ask("GET", path, "", "OPEN-SANDBOX-API-KEY", "e2b_"+strings.Repeat("0", 40)), 401, "INVALID_API_KEY")
		wantFault(t, w.ask("GET", path, "", "OPEN-SANDBOX-API-KEY", "secret"), 401, "INVALID_API_KEY")
	}
	for _, header := range []string{"X-API-Key", "Authorization"} {
		value := w.keys["acme"]
		if header == "Authorization" {
			value = "Bearer " + value
		}
		if got := w.ask("GET", "/v1/sandboxes/"+id, "", "OPEN-SANDBOX-API-KEY", "", header, value); got.status != 200 {
			t.Errorf("a key in %s: %d %s", header, got.status, got.body)
		}
	}
}

func TestAnotherTenantsSandboxIsNotThere(t *testing.T) {
	w := newWorld(t)
	id, other := w.create(), []string{"OPEN-SANDBOX-API-KEY", w.keys["globex"]}
	for path, method := range map[string]string{
		"": "GET", "/metadata": "PATCH", "/pause": "POST", "/resume": "POST", "/endpoints/80": "GET", "/snapshots": "POST",
		"/diagnostics/logs?scope=all": "GET", "/diagnostics/events": "GET", "/networkpolicy": "GET",
	} {
		for _, unknown := range []string{id, "sbnone", "NONE", "a.b"} {
			wantFault(t, w.ask(method, "/v1/sandboxes/"+unknown+path, "{}", other...), 404, "DOCKER::SANDBOX_NOT_FOUND")
		}
	}
	wantFault(t, w.ask("DELETE", "/v1/sandboxes/"+id, "", other...), 404, "DOCKER::SANDBOX_NOT_FOUND")
	if state, _ := w.state(id); state != "Running" {
		t.Errorf("it is %q", state)
	}
}

func TestAListingIsFilteredAndCutIntoPages(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.create(`"metadata":{"k":"v","n":"1"}`), w.create(`"metadata":{"k":"v"}`), w.create()
	if got := w.ask("POST", "/v1/sandboxes/"+b+"/pause", ""); got.status != http.StatusAccepted {
		t.Fatal(got)
	}
	ids := func(query string) string {
		got := w.ask("GET", "/v1/sandboxes?"+query, "")
		if got.status != 200 || strings.Contains(got.body, ":null") {
			t.Fatalf("%s: %d %s", query, got.status, got.body)
		}
		var all []string
		for _, item := range got.json(t)["items"].([]any) {
			all = append(all, map[string]string{a: "a", b: "b", c: "c"}[item.(map[string]any)["id"].(string)])
		}
		return strings.Join(all, "")
	}
	for query, want := range map[string]string{
		"": "cba", "state=Running": "ca", "state=running&state=PAUSED": "cba", "state=Paused": "b", "state=Failed": "", "state=Nonsense": "", "state=": "cba",
		"metadata=" + url.QueryEscape("k=v") + "&metadata=" + url.QueryEscape("n=1"): "a", "metadata=": "cba",
		"metadata=" + url.QueryEscape("k=v"): "ba", "metadata=" + url.QueryEscape("k=v&n=1"): "a", "metadata=" + url.QueryEscape("k=w"): "",
		"pageSize=2": "cb", "pageSize=2&page=2": "a", "pageSize=2&page=9": "",
		"state=running&metadata=" + url.QueryEscape("k=v"): "a",
	} {
		if got := ids(query); got != want {
			t.Errorf("%q gives %q, want %q", query, got, want)
		}
	}
	p := w.ask("GET", "/v1/sandboxes?pageSize=2", "").json(t)["pagination"].(map[string]any)
	if p["page"] != 1.0 || p["pageSize"] != 2.0 || p["totalItems"] != 3.0 || p["totalPages"] != 2.0 || p["hasNextPage"] != true {
		t.Errorf("%v", p)
	}
	for _, bad := range []string{"page=0", "page=x", "pageSize=0", "pageSize=201", "%zz=1"} {
		wantFault(t, w.ask("GET", "/v1/sandboxes?"+bad, ""), 400, "SANDBOX::INVALID_PARAMETER")
	}
	for _, bad := range []string{"k", "=v", "k=v&k=w", "%zz=1"} {
		wantFault(t, w.ask("GET", "/v1/sandboxes?metadata="+url.QueryEscape(bad), ""), 400, "INVALID_METADATA_FORMAT")
	}
}

func TestMetadataIsMerged(t *testing.T) {
	w := newWorld(t)
	id := w.create(`"metadata":{"a":"1","b":"2"}`)
	got := w.ask("PATCH", "/v1/sandboxes/"+id+"/metadata", `{"a":null,"c":"3","d":null}`)
	m, _ := got.json(t)["metadata"].(map[string]any)
	if got.status != 200 || len(m) != 2 || m["b"] != "2" || m["c"] != "3" {
		t.Errorf("%d %s", got.status, got.body)
	}
	wantFault(t, w.ask("PATCH", "/v1/sandboxes/"+id+"/metadata", `{"a b":"1"}`), 400, "SANDBOX::INVALID_METADATA_LABEL")
	wrong := w.ask("PATCH", "/v1/sandboxes/"+id+"/metadata", `{"a":1}`)
	wantFault(t, wrong, 400, "SANDBOX::INVALID_PARAMETER")
	if !strings.Contains(wrong.body, `key \"a\"`) {
		t.Errorf("which key is wrong? %s", wrong.body)
	}
	if again := w.ask("GET", "/v1/sandboxes/"+id, "").json(t)["metadata"].(map[string]any); len(again) != 2 {
		t.Errorf("%v", again)
	}
}

func TestAWrongPolicySaysThatItIsThePolicy(t *testing.T) {
	w := newWorld(t)
	for _, policy := range []string{`[]`, `"x"`, `{"egress":"x"}`, `{"egress":[{"action":1}]}`, `{"defaultAction":"x"}`} {
		got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},`+idle+`,"networkPolicy":`+policy+`}`)
		wantFault(t, got, 400, "SANDBOX::INVALID_PARAMETER")
		if !strings.Contains(got.body, "networkPolicy") && !strings.Contains(got.body, "defaultAction") {
			t.Errorf("%s: %s", policy, got.body)
		}
	}
	if got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},`+idle+`,"networkPolicy":{"defaultAction":"Deny","egress":[{"action":"ALLOW","target":" 1.1.1.1 "}]}}`); got.status != http.StatusAccepted {
		t.Errorf("%d %s", got.status, got.body)
	}
}

func TestPathsWithoutTheirPrefixAreServedToItsOwnKey(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	for path, want := range map[string]int{
		"/sandboxes": 200, "/sandboxes?state=Running": 200, "/sandboxes/" + id: 200, "/sandboxes/" + id + "/endpoints/44772": 200,
		"/sandboxes/none": 404, "/snapshots": 200, "/snapshots/none": 404, "/pools": 501, "/sandboxes/": 404,
	} {
		if got := w.ask("GET", path, ""); got.status != want || got.json(t) == nil {
			t.Errorf("%s is %d %s, want %d", path, got.status, got.body, want)
		}
	}
	for path, header := range map[string]string{"/sandboxes": "X-Api-Key", "/v2/sandboxes": "Open-Sandbox-Api-Key", "/sandboxesque": "Open-Sandbox-Api-Key"} {
		r := httptest.NewRequest("GET", path, nil)
		r.Header.Set(header, "e2b_1")
		if w.api.Matches(r) {
			t.Errorf("%s with %s is another dialect's", path, header)
		}
	}
}

func TestPauseAndResume(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	for _, step := range []struct {
		do, code, state string
	}{{"resume", "DOCKER::SANDBOX_NOT_PAUSED", "Running"}, {"pause", "", "Paused"}, {"pause", "DOCKER::SANDBOX_NOT_RUNNING", "Paused"}, {"resume", "", "Running"}} {
		got := w.ask("POST", "/v1/sandboxes/"+id+"/"+step.do, "")
		if step.code != "" {
			wantFault(t, got, 409, step.code)
		} else if got.status != http.StatusAccepted || got.body != "" || got.header.Get("Content-Length") != "0" {
			t.Errorf("%s: %d %q", step.do, got.status, got.body)
		}
		if state, _ := w.state(id); state != step.state {
			t.Errorf("after %s it is %s", step.do, state)
		}
	}
	if v := w.ask("GET", "/v1/sandboxes/"+id, "").json(t); v["expiresAt"] != nil {
		t.Errorf("a pause gave it an expiration: %v", v)
	}
}

func TestWhatIsNotServedSaysSo(t *testing.T) {
	w := newWorld(t)
	wantFault(t, w.ask("GET", "/v1/pools", ""), 501, "KUBERNETES::POOL_NOT_SUPPORTED")
	wantFault(t, w.ask("PUT", "/v1/pools/x", "{}"), 501, "KUBERNETES::POOL_NOT_SUPPORTED")
	wantFault(t, w.ask("POST", "/v1/templates", "{}"), 501, "SANDBOX::API_NOT_SUPPORTED")
	for _, path := range []string{"/v1/", "/v1/nothing", "/v1//sandboxes", "/v1/sandboxes/../x"} {
		wantFault(t, w.ask("GET", path, ""), 404, "NOT_FOUND")
	}
	if got := w.ask("POST", "/v1/metrics/events", `{"eventType":"sandbox.create"}`); got.status != http.StatusNoContent {
		t.Errorf("%d %s", got.status, got.body)
	}
	got := w.ask("OPTIONS", "/v1/sandboxes", "", "Origin", "http://a.test", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "open-sandbox-api-key")
	if got.status != http.StatusNoContent || got.header.Get("Access-Control-Allow-Origin") != "*" || got.header.Get("Access-Control-Allow-Headers") == "" {
		t.Errorf("%d %v", got.status, got.header)
	}
}
