package build_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/fault"
)

func recorder() *httptest.ResponseRecorder { return httptest.NewRecorder() }

func request(method, path string, body []byte) *http.Request {
	var r io.Reader = http.NoBody
	if body != nil {
		r = bytes.NewReader(body)
	}
	return httptest.NewRequest(method, path, r)
}

func TestNames(t *testing.T) {
	for text, want := range map[string][3]string{
		"a": {"", "a", ""}, "My-Template_1": {"", "my-template_1", ""}, " x ": {"", "x", ""}, "a:v1.0": {"", "a", "v1.0"},
		"team/a": {"team", "a", ""}, "team/a:default": {"team", "a", "default"},
	} {
		ns, name, tag, err := build.ParseRef(text)
		if got := [3]string{ns, name, tag}; err != nil || got != want {
			t.Errorf("%q is %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", " ", ":tag", "a:", "/a", "a/", "a/b/c", "a b", "ä", "a:b:c", "../a", "a.b", strings.Repeat("a", 129), "a:" + strings.Repeat("b", 129)} {
		if _, _, _, err := build.ParseRef(text); !fault.Is(err, fault.Invalid) {
			t.Errorf("%.20q is a name: %v", text, err)
		}
	}
	for tenant, want := range map[string]string{"acme": "acme", "Acme Inc.": "acme-inc", "ä": "default", "a_b-c": "a_b-c"} {
		if got := build.Namespace(tenant); got != want {
			t.Errorf("the namespace of %q is %q", tenant, got)
		}
	}
}

func TestVariablesAreExpanded(t *testing.T) {
	known := map[string]string{"A": "1", "LONG_NAME": "2"}
	for text, want := range map[string]string{
		"": "", "x": "x", "$A": "1", "${A}b": "1b", "$A$LONG_NAME": "12", "$NONE|": "|", `\$A`: "$A", "$": "$", "${": "${", "$1": "$1", "a$Ab": "a",
	} {
		if got, whole := build.Expand(text, known, 10); got != want || !whole {
			t.Errorf("%q becomes %q, not %q", text, got, want)
		}
	}
	known["A"] = strings.Repeat("a", 1<<15)
	for text, most := range map[string]int{strings.Repeat("$A", 1<<20): 1 << 15, "$A": 1<<15 - 1, "${A}b": 1 << 15, "abc": 2} {
		if got, whole := build.Expand(text, known, most); whole {
			t.Errorf("%.10q… becomes %d bytes, at most %d are to be", text, len(got), most)
		}
	}
}

func TestBadInput(t *testing.T) {
	steps := func(s any) js { return js{"fromTemplate": "base", "steps": s} }
	inWorld(t, func(t *testing.T, w *world) {
		_, asked := w.ask("POST", "/v3/templates", js{"name": "a"})
		start := "/v2/templates/" + asked["templateID"].(string) + "/builds/" + asked["buildID"].(string)
		for _, c := range []struct {
			name, method, path string
			body               any
			status             int
		}{
			{"no name", "POST", "/v3/templates", js{}, 400},
			{"a bad name", "POST", "/v3/templates", js{"name": "a b"}, 400},
			{"a bad tag", "POST", "/v3/templates", js{"name": "a", "tags": []string{"b c"}}, 400},
			{"an odd number of processors", "POST", "/v3/templates", js{"name": "a", "cpuCount": 3}, 400},
			{"little memory", "POST", "/v3/templates", js{"name": "a", "memoryMB": 64}, 400},
			{"an odd amount of memory", "POST", "/v3/templates", js{"name": "a", "memoryMB": 513}, 400},
			{"an absurd amount of memory", "POST", "/v3/templates", js{"name": "a", "memoryMB": 1 << 60}, 400},
			{"a negative disk", "POST", "/v3/templates", js{"name": "a", "minFreeDiskMB": -1}, 400},
			{"another's namespace", "POST", "/v3/templates", js{"name": "other/a"}, 403},
			{"no body", "POST", "/v3/templates", nil, 400},
			{"half a body", "POST", "/v3/templates", `{"name":`, 400},
			{"two bodies", "POST", "/v3/templates", `{"name":"a"} {}`, 400},
			{"a wrong type", "POST", "/v3/templates", js{"name": 7}, 400},
			{"a large body", "POST", "/v3/templates", `{"name":"` + strings.Repeat("a", 5<<20) + `"}`, 413},
			{"an unknown build", "POST", "/v2/templates/a/builds/nope", steps([]js{}), 404},
			{"no base", "POST", start, js{}, 400},
			{"two bases", "POST", start, js{"fromImage": "a", "fromTemplate": "b"}, 400},
			{"steps that are none", "POST", start, steps("RUN"), 400},
			{"a zero byte", "POST", start, steps([]js{run("a\x00b")}), 400},
			{"a hash that is a path", "POST", start, steps([]js{{"type": "COPY", "filesHash": "../../../../etc/passwd"}}), 400},
			{"an unknown level", "GET", start[3:] + "/status?level=loud", nil, 400},
			{"a negative offset", "GET", start[3:] + "/status?logsOffset=-1", nil, 400},
			{"a bad hash", "GET", "/templates/a/files/..%2F..%2Fx", nil, 400},
			{"an unknown template's files", "GET", "/templates/b/files/" + strings.Repeat("0", 64), nil, 404},
			{"no such alias", "GET", "/templates/aliases/none", nil, 404},
			{"a bad alias", "GET", "/templates/aliases/a%20b", nil, 400},
			{"tags of nothing", "POST", "/templates/tags", js{"target": ":x", "tags": []string{"a"}}, 400},
			{"tags of an unknown template", "POST", "/templates/tags", js{"target": "none", "tags": []string{"a"}}, 404},
			{"tags of a template that is not ready", "POST", "/templates/tags", js{"target": "a", "tags": []string{"b"}}, 404},
			{"no tags", "POST", "/templates/tags", js{"target": "a"}, 400},
			{"removing the default tag", "DELETE", "/templates/tags", js{"name": "a", "tags": []string{"default"}}, 400},
			{"removing a tag that is not there", "DELETE", "/templates/tags", js{"name": "a", "tags": []string{"b"}}, 404},
			{"deleting what is the server's", "DELETE", "/templates/base", nil, 403},
			{"deleting nothing", "DELETE", "/templates/none", nil, 404},
			{"an outdated way to build", "POST", "/templates", js{}, 400},
			{"no such path", "GET", "/templates/a/b/c/d/e", nil, 404},
			{"no such method", "PUT", "/templates/a", nil, 405},
		} {
			status, out := w.ask(c.method, c.path, c.body)
			message, _ := out["message"].(string)
			if status != c.status || out["code"] != float64(c.status) || message == "" {
				t.Errorf("%s: %d %v", c.name, status, out)
			}
		}
		if status, _ := w.ask("POST", start, steps([]js{})); status != http.StatusAccepted {
			t.Error("after all of that the build does not start:", status)
		}
		if status, _ := w.ask("POST", start, steps([]js{})); status != http.StatusBadRequest {
			t.Error("a build starts twice:", status)
		}
	})
}

func TestTags(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, b, _ := w.build("a:v1", fromBase())
		tags := func() map[string]string {
			_, raw := w.raw(w.who, "GET", "/templates/acme%2Fa/tags", nil)
			var list []struct{ Tag, BuildID, CreatedAt string }
			if err := json.Unmarshal(raw, &list); err != nil {
				t.Fatal(err)
			}
			out := map[string]string{}
			for _, l := range list {
				out[l.Tag] = l.BuildID
			}
			return out
		}
		status, out := w.ask("POST", "/templates/tags", js{"target": "a:v1", "tags": []string{"Prod", "latest"}})
		if diff := cmp.Diff(js{"tags": []any{"prod", "latest"}, "buildID": b}, out); status != http.StatusCreated || diff != "" {
			t.Error(status, diff)
		}
		if status, _ := w.ask("DELETE", "/templates/tags", js{"name": "a", "tags": []string{"v1"}}); status != http.StatusNoContent {
			t.Error(status)
		}
		if diff := cmp.Diff(map[string]string{"prod": b, "latest": b}, tags()); diff != "" {
			t.Error(diff)
		}
		before, err := w.resolve("a:prod")
		if err != nil {
			t.Fatal(err)
		}
		_, b2, _ := w.build("a:prod", fromBase())
		if diff := cmp.Diff(map[string]string{"prod": b2, "latest": b}, tags()); diff != "" {
			t.Error(diff)
		}
		if status, _ := w.ask("DELETE", "/templates/tags", js{"name": "a", "tags": []string{"latest"}}); status != http.StatusNoContent {
			t.Error(status)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.made[before.Template] != nil {
			t.Error("files that no tag names are kept")
		}
	})
}

func TestWhatEverybodyHasHasOneTag(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for ref, want := range map[string]string{
			"base": "", "base:default": "", "Python:Default": "",
			"base:v1":                    "tag 'v1' does not exist for template 'base'",
			"code-interpreter-v1:latest": "tag 'latest' does not exist for template 'code-interpreter-v1'",
			"python:3":                   "tag '3' does not exist for template 'python'",
			"nothing:v1":                 "template 'nothing:v1' not found",
		} {
			_, err := w.resolve(ref)
			if (err == nil) != (want == "") || err != nil && (!fault.Is(err, fault.NotFound) || fault.Message(err) != want) {
				t.Errorf("%s: %v, want %q", ref, err, want)
			}
		}
		if status, raw := w.raw(w.who, "GET", "/templates/base/tags", nil); status != http.StatusOK ||
			strings.TrimSpace(string(raw)) != `[{"tag":"default","buildID":"00000000-0000-0000-0000-000000000000","createdAt":"1970-01-01T00:00:00Z"}]` {
			t.Errorf("%d %s", status, raw)
		}
		for path, want := range map[string]js{
			"/templates/code-interpreter-v1/tags/count": {"total": 1.0},
			"/templates/base/tags/exists?tag=default":   {"exists": true, "normalizedTag": "default"},
			"/templates/base/tags/exists?tag=v1":        {"exists": false, "normalizedTag": "v1"},
		} {
			if status, out := w.ask("GET", path, nil); status != http.StatusOK || !cmp.Equal(out, want) {
				t.Errorf("%s: %d %v", path, status, out)
			}
		}
		for method, body := range map[string]js{
			"POST":   {"target": "base:default", "tags": []string{"mine"}},
			"DELETE": {"name": "base", "tags": []string{"v1"}},
		} {
			if status, out := w.ask(method, "/templates/tags", body); status != http.StatusForbidden {
				t.Errorf("%s: %d %v", method, status, out)
			}
		}
		if status, _ := w.ask("GET", "/templates/nothing/tags", nil); status != http.StatusNotFound {
			t.Errorf("what is not there has tags: %d", status)
		}
	})
}

func TestListings(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		id, b, _ := w.build("a", fromBase())
		if _, err := w.resolve("a"); err != nil {
			t.Fatal(err)
		}
		status, out := w.ask("GET", "/templates/a", nil)
		for _, name := range []string{"createdAt", "updatedAt", "lastSpawnedAt"} {
			if at, _ := out[name].(string); at == "" {
				t.Errorf("%s is %v", name, out[name])
			}
			delete(out, name)
		}
		builds := out["builds"].([]any)
		delete(out, "builds")
		want := js{
			"templateID": id, "buildID": b, "cpuCount": 1.0, "memoryMB": 512.0, "diskSizeMB": 2048.0, "public": false, "aliases": []any{"a"},
			"names": []any{"acme/a"}, "createdBy": nil, "spawnCount": 1.0, "buildCount": 1.0, "envdVersion": "0.6.13", "buildStatus": "ready",
		}
		if diff := cmp.Diff(want, out); status != http.StatusOK || diff != "" {
			t.Error(status, diff)
		}
		if one := builds[0].(map[string]any); len(builds) != 1 || one["buildID"] != b || one["status"] != "ready" || one["finishedAt"] == nil {
			t.Error(builds)
		}
		for path, want := range map[string][]string{
			"/templates": {id, "base", "code-interpreter-v1"}, "/templates?teamID=x": {id, "base", "code-interpreter-v1"},
			"/v2/templates?limit=2": {id, "base"}, "/v2/templates?limit=2&nextToken=2": {"code-interpreter-v1"}, "/default-templates": {"base", "code-interpreter-v1"},
		} {
			_, raw := w.raw(w.who, "GET", path, nil)
			var list []struct{ TemplateID string }
			if err := json.Unmarshal(raw, &list); err != nil {
				t.Fatal(err)
			}
			var ids []string
			for _, l := range list {
				ids = append(ids, l.TemplateID)
			}
			if diff := cmp.Diff(want, ids); diff != "" {
				t.Errorf("%s: %s", path, diff)
			}
		}
		for path, want := range map[string]js{
			"/templates/aliases/a":                   {"templateID": id, "public": false},
			"/templates/aliases/acme%2Fa":            {"templateID": id, "public": false},
			"/templates/aliases/base":                {"templateID": "base", "public": true},
			"/templates/aliases/code-interpreter-v1": {"templateID": "code-interpreter-v1", "public": true},
			"/templates/a/tags/count":                {"total": 1.0},
			"/templates/a/tags/exists?tag=Default":   {"exists": true, "normalizedTag": "default"},
		} {
			if status, out := w.ask("GET", path, nil); status != http.StatusOK || !cmp.Equal(out, want) {
				t.Errorf("%s: %d %v", path, status, out)
			}
		}
		w.domain.fixed = true
		if status, out := w.ask("POST", "/v3/templates", js{"name": "b"}); status != http.StatusNotImplemented || !strings.Contains(fmt.Sprint(out), "cannot make templates") {
			t.Errorf("%d %v", status, out)
		}
		w.domain.fixed = false
		if status, out := w.ask("PATCH", "/v2/templates/a", js{"public": true}); status != http.StatusNotImplemented {
			t.Errorf("%d %v", status, out)
		}
		if status, out := w.ask("PATCH", "/v2/templates/a", js{"public": false}); status != http.StatusOK || !cmp.Equal(out, js{"names": []any{"acme/a"}}) {
			t.Error(status, out)
		}
	})
}

func TestLogsCanBeReadBothWays(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		id, b, log := w.build("a", fromBase(run("one"), run("fail 0")))
		read := func(query string) (out []string) {
			_, answer := w.ask("GET", "/templates/"+id+"/builds/"+b+"/logs"+query, nil)
			for _, l := range answer["logs"].([]any) {
				out = append(out, l.(map[string]any)["message"].(string))
			}
			return out
		}
		if diff := cmp.Diff(log, read("")); diff != "" {
			t.Error(diff)
		}
		if got := read("?direction=backward&limit=1"); !cmp.Equal(got, log[len(log)-1:]) {
			t.Error(got)
		}
		if got := read("?level=error"); got != nil {
			t.Error(got)
		}
		if got := read("?cursor=99999999999999"); got != nil {
			t.Error(got)
		}
	})
}
