package build_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/auth"
)

func TestLargeRequestsForBuildsAreRefused(t *testing.T) {
	with := func(key string, size int) js {
		start := js{"fromTemplate": "base", "steps": []js{}}
		start[key] = strings.Repeat("x", size)
		return start
	}
	empty := run(slices.Repeat([]string{""}, 2000)...)
	inWorld(t, func(t *testing.T, w *world) {
		_, asked := w.ask("POST", "/v3/templates", js{"name": "a"})
		start := "/v2/templates/" + asked["templateID"].(string) + "/builds/" + asked["buildID"].(string)
		for _, c := range []struct {
			name string
			body js
			want string
		}{
			{"a start command", with("startCmd", 32<<10+1), "startCmd and readyCmd may have 32768 bytes each; put more into a file"},
			{"a ready command", with("readyCmd", 32<<10+1), "startCmd and readyCmd may have 32768 bytes each; put more into a file"},
			{"a template", with("fromTemplate", 2000), "the name of what a build starts from is longer than 1024 bytes"},
			{"steps of little text", fromBase(slices.Repeat([]js{empty}, 500)...), "the lists and objects of the request body have more than 32768 members; put large content into a file"},
		} {
			status, out := w.ask("POST", start, c.body)
			if status != http.StatusBadRequest || out["message"] != c.want {
				t.Errorf("%s: %d %v", c.name, status, out)
			}
		}
		if status, out := w.ask("POST", start, with("startCmd", 32<<10)); status != http.StatusAccepted {
			t.Errorf("a start command that is as long as may be: %d %v", status, out)
		}
	})
}

func TestBuildsThatWaitOfOneTenantAreBounded(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		endless := fromBase(run("hang"))
		for i := range 17 { // one goes on
			w.begin(fmt.Sprint("t", i), endless)
		}
		_, asked := w.ask("POST", "/v3/templates", js{"name": "more"})
		id, b := asked["templateID"].(string), asked["buildID"].(string)
		status, out := w.ask("POST", "/v2/templates/"+id+"/builds/"+b, endless)
		if status != http.StatusTooManyRequests || out["message"] != "16 of your template builds are waiting already; try again later" {
			t.Errorf("one too many: %d %v", status, out)
		}
		if status, _, _ := w.status(id, b); status != "error" {
			t.Errorf("the build that was turned away is %s", status)
		}

		w.who = auth.Principal{Tenant: "other"}
		w.build("theirs", fromBase(run("hello")))
	})
}

func TestOldBuildsOfATenantAreForgotten(t *testing.T) {
	const most = 2000
	inWorld(t, func(t *testing.T, w *world) {
		w.build("tagged", fromBase(run("hello")))
		going, endless := w.begin("going", fromBase(run("hang")))
		synctest.Wait()
		var asked [][2]string
		for i := range most + 100 {
			time.Sleep(time.Millisecond) // of the false time: one is older than the next
			status, out := w.ask("POST", "/v3/templates", js{"name": fmt.Sprint("t", i%50)})
			if status != http.StatusAccepted {
				t.Fatal(status, out)
			}
			asked = append(asked, [2]string{out["templateID"].(string), out["buildID"].(string)})
		}

		docs, err := w.documents.Documents(context.Background(), w.who.Tenant, "e2b.build")
		if err != nil || len(docs) != most {
			t.Errorf("%d builds are kept, want %d (%v)", len(docs), most, err)
		}
		if _, err := w.resolve("tagged"); err != nil {
			t.Error("one that a tag names is gone:", err)
		}
		if status, _, _ := w.status(going, endless); status != "building" {
			t.Error("one that goes on is", status)
		}
		gone := len(asked) + 2 - most
		for i, a := range asked {
			want := http.StatusOK
			if i < gone {
				want = http.StatusNotFound
			}
			if status, _ := w.ask("GET", "/templates/"+a[0]+"/builds/"+a[1]+"/status", nil); status != want {
				t.Fatalf("build %d of %d: %d, want %d", i, len(asked), status, want)
			}
		}
	})
}

func TestListingsShowEachTemplatesOwnBuilds(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		want := map[string]string{}
		for _, name := range []string{"a", "b", "c"} {
			w.build(name, fromBase(run("old "+name)))
			time.Sleep(time.Second) // of the false time
			id, b, _ := w.build(name, fromBase(run("new "+name)))
			want[id] = b
		}
		status, raw := w.raw(w.who, "GET", "/templates", nil)
		if status != http.StatusOK {
			t.Fatal(status, string(raw))
		}
		for id, b := range want {
			if !strings.Contains(string(raw), `"templateID":"`+id+`","buildID":"`+b+`"`) {
				t.Errorf("template %s is not shown with its newest build %s: %s", id, b, raw)
			}
		}
	})
}
