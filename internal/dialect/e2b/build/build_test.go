package build_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func TestABuildRunsItsStepsAndItsTagsNameIt(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		status, asked := w.ask("POST", "/v3/templates", js{"name": "Mine:v1", "tags": []string{"prod"}, "cpuCount": 2, "memoryMB": 1024})
		if status != http.StatusAccepted {
			t.Fatal(status, asked)
		}
		id, b := asked["templateID"].(string), asked["buildID"].(string)
		delete(asked, "templateID")
		delete(asked, "buildID")
		want := js{"public": false, "names": []any{"acme/mine"}, "aliases": []any{"mine"}, "tags": []any{"v1", "prod"}}
		if diff := cmp.Diff(want, asked); diff != "" {
			t.Error(diff)
		}
		if s, _, _ := w.status(id, b); s != "waiting" {
			t.Errorf("before its steps are known a build is %s", s)
		}
		start := fromBase(run("echo one"), js{"type": "ENV", "args": []string{"A", "1", "B", "$HOME/x:${PATH}"}},
			js{"type": "USER", "args": []string{"bob"}}, js{"type": "WORKDIR", "args": []string{"app"}}, run("echo two", "root"), run("echo three"))
		start["startCmd"], start["readyCmd"] = "serve", "sleep 5"
		if status, out := w.ask("POST", "/v2/templates/mine/builds/"+b, start); status != http.StatusAccepted {
			t.Fatal(status, out)
		}
		w.settle(id, b)
		if s, reason, log := w.status(id, b); s != "ready" {
			t.Fatal(s, reason, log)
		}
		if diff := cmp.Diff([]string{"user: echo one", "root: echo two", "bob: echo three", "bob: serve", "bob: sleep 5"}, w.ran()); diff != "" {
			t.Error(diff)
		}
		got, err := w.resolve("acme/mine:prod")
		if err != nil {
			t.Fatal(err)
		}
		env := map[string]string{"A": "1", "B": "/home/user/x:/usr/bin"}
		wantResolved := build.Resolved{
			Template: "e2b-build-" + strings.ReplaceAll(b, "-", ""), ID: id, Alias: "mine", Env: env, User: "bob", Workdir: "/home/user/app",
			Limits: template.Limits{CPUs: 2, MemoryBytes: 1 << 30, DiskBytes: 2 << 30},
			// The ready command only waits, which a build does once for all sandboxes.
			Start: &build.Start{Command: "serve", Env: env, User: "bob", Workdir: "/home/user/app"},
		}
		if diff := cmp.Diff(wantResolved, got); diff != "" {
			t.Error(diff)
		}
		if _, err := w.resolve("mine"); !fault.Is(err, fault.NotFound) {
			t.Errorf("without a tag the default one is meant, which this template has not: %v", err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if got := w.written["/.e2b"]; got != "ENV_ID="+id+"\nTEMPLATE_ID="+id+"\nBUILD_ID="+b+"\n" {
			t.Errorf("/.e2b is %q", got)
		}
	})
}

func TestFailuresBlameTheirStep(t *testing.T) {
	withStart := func(start, ready string) js { return js{"fromTemplate": "base", "startCmd": start, "readyCmd": ready} }
	for _, c := range []struct {
		name, step, message string
		start               js
	}{
		{"an image that is not there", "base", "there is no image ubuntu:22.04", js{"fromImage": "ubuntu:22.04"}},
		{"an unknown template", "base", "template 'nope' not found", js{"fromTemplate": "nope"}},
		{"a step that fails", "2", "failed to run command 'fail 3': exit status 3", fromBase(run("ok"), run("fail 3"), run("never"))},
		{"an unknown user", "1", "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'",
			fromBase(run("whoami", "root123"))},
		{"an unknown step", "1", "unknown step 'SHOUT': use RUN, COPY, ENV, WORKDIR or USER", fromBase(js{"type": "shout"})},
		{"variables by halves", "1", "ENV needs names and values by turns", fromBase(js{"type": "ENV", "args": []string{"A"}})},
		{"a bad variable", "1", `"1A" is not a name for an environment variable`, fromBase(js{"type": "ENV", "args": []string{"1A", "x"}})},
		{"a bad user", "1", "'a b' is not a name for a user", fromBase(js{"type": "USER", "args": []string{"a b"}})},
		{"files that never came", "1", "failed to copy 'a' to 'b': the files of this step were not uploaded",
			fromBase(js{"type": "COPY", "args": []string{"a", "b", "", ""}, "filesHash": strings.Repeat("ab", 32)})},
		{"a copy without files", "1", "COPY needs a source, a destination and files", fromBase(js{"type": "COPY", "args": []string{"a", "b"}})},
		{"a start command that fails", "finalize", "failed to run start command 'fail 127': exit status 127", withStart("fail 127", "sleep 30")},
		{"a template that is never ready", "finalize", "the template was not ready within 10m0s: its ready command 'fail 1' did not succeed",
			withStart("hang", "fail 1")},
		{"a build without an end", "1", "the build took longer than 1h0m0s and was ended", fromBase(run("hang"))},
	} {
		t.Run(c.name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				id, b := w.begin("x", c.start)
				w.settle(id, b)
				status, reason, log := w.status(id, b)
				want := js{"message": c.message, "step": c.step, "logEntries": []any{}}
				if diff := cmp.Diff(want, reason); status != "error" || diff != "" {
					t.Error(status, diff)
				}
				if last := log[len(log)-1]; last != "Build failed: "+c.message {
					t.Errorf("the log ends with %q", last)
				}
				if _, err := w.resolve("x"); !fault.Is(err, fault.NotFound) {
					t.Errorf("a failed build can be used: %v", err)
				}
				for _, command := range w.ran() {
					if strings.HasSuffix(command, "never") {
						t.Error("a step ran after one that failed")
					}
				}
			})
		})
	}
}

func TestImagesThatTemplatesStandFor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for image, want := range map[string]string{
			"e2bdev/base": "base", "docker.io/e2bdev/base:latest": "base", "e2bdev/code-interpreter:latest": "python",
			"python": "python", "python:3": "python", "python:3.13-slim": "python", "docker.io/library/python:3.13.0": "python",
		} {
			w.build("x", js{"fromImage": image, "force": true})
			w.mu.Lock()
			if got := w.created[len(w.created)-1].Template; got != want {
				t.Errorf("%s is %s, not %s", image, got, want)
			}
			w.mu.Unlock()
		}
	})
}

func TestLayersSaveSteps(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := []js{run("sleep 2"), run("two")}
		forced := func(s js) js { return js{"type": s["type"], "args": s["args"], "force": true} }
		for _, c := range []struct {
			name  string
			start js
			ran   []string
		}{
			{"at first everything runs", fromBase(first...), []string{"user: sleep 2", "user: two"}},
			{"the same again runs nothing", fromBase(first...), nil},
			{"what is new runs", fromBase(append(first, run("three"))...), []string{"user: three"}},
			{"a change runs what follows it", fromBase(run("sleep 2"), run("other"), run("three")), []string{"user: other", "user: three"}},
			{"another base shares nothing", js{"fromTemplate": "code-interpreter-v1", "steps": first}, []string{"user: sleep 2", "user: two"}},
			{"a forced step runs with those after it", fromBase(first[0], forced(first[1])), []string{"user: two"}},
			{"a forced build runs whole", js{"fromTemplate": "base", "force": true, "steps": first}, []string{"user: sleep 2", "user: two"}},
		} {
			_, _, log := w.build("x", c.start)
			if diff := cmp.Diff(c.ran, w.ran()); diff != "" {
				t.Errorf("%s: %s\n%s", c.name, diff, strings.Join(log, "\n"))
			}
		}
	})
}

func TestBuild_LayerReplacedMeanwhile(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		steps := fromBase(run("sleep 2"), run("two"))
		w.build("x", steps)
		w.ran()
		var gone []string
		w.domain.onCreate = func(name string) {
			w.domain.mu.Lock()
			defer w.domain.mu.Unlock()
			if w.domain.made[name] != nil { // as another build with the same steps does that ends now
				gone = append(gone, name)
				delete(w.domain.made, name)
			}
		}
		_, _, log := w.build("x", steps)
		if len(gone) == 0 {
			t.Error("the build started from no layer")
		}
		if diff := cmp.Diff([]string{"user: sleep 2", "user: two"}, w.ran()); diff != "" {
			t.Errorf("%s\n%s", diff, strings.Join(log, "\n"))
		}
	})
}

func TestOldLayersMakeRoomForNewOnes(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for i := range 12 {
			w.build(fmt.Sprintf("t%d", i), fromBase(run(fmt.Sprint("step ", i))))
			time.Sleep(time.Second)
		}
		if _, made := w.count(); made != 8+12 { // layers, and templates
			t.Errorf("%d templates of the domain are kept", made)
		}
		w.ran()
		w.build("new", fromBase(run("step 11")))
		w.build("old", fromBase(run("step 0")))
		if diff := cmp.Diff([]string{"user: step 0"}, w.ran()); diff != "" {
			t.Error(diff)
		}
	})
}

func TestALayerBringsWhatStepsDecided(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		steps := []js{{"type": "ENV", "args": []string{"A", "1"}}, {"type": "USER", "args": []string{"bob"}}, run("x")}
		w.build("x", fromBase(steps...))
		w.build("x", fromBase(append(steps, run("y"))...))
		if diff := cmp.Diff([]string{"bob: x", "bob: y"}, w.ran()); diff != "" {
			t.Error(diff)
		}
		if got, err := w.resolve("x"); err != nil || got.Env["A"] != "1" || got.User != "bob" {
			t.Error(got, err)
		}
		w.build("z", js{"fromTemplate": "x", "steps": []js{run("z")}, "startCmd": "serve", "readyCmd": "flaky"})
		w.build("zz", js{"fromTemplate": "z"})
		if got, err := w.resolve("zz"); err != nil || got.Start == nil || got.Start.Command != "serve" {
			t.Error("a template made from another has lost its start command:", got, err)
		}
		if got, err := w.resolve("z"); err != nil || got.Env["A"] != "1" || got.User != "bob" {
			t.Error("a template made from another has lost its setting:", got, err)
		}
	})
}

func TestTheReadyCommandIsAskedUntilItSucceeds(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.failTimes = 3
		w.build("x", js{"fromTemplate": "base", "startCmd": "hang", "readyCmd": "flaky"})
		if got := len(w.ran()); got != 1+4 {
			t.Errorf("%d commands ran", got)
		}
		got, err := w.resolve("x")
		if err != nil || got.Start == nil || got.Start.Ready != "flaky" {
			t.Error(got, err)
		}
	})
}

func TestFewBuildsGoOnAtATimeAndOneOfATemplate(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		slow := fromBase(run("sleep 100"))
		slow["force"] = true
		a1, b1 := w.begin("a", slow)
		_, b2 := w.begin("a", slow)
		mine, other := w.who, auth.Principal{Tenant: "other"} // one tenant never has both places
		w.who = other
		c, d := w.begin("c", slow)
		e, f := w.begin("e", slow)
		time.Sleep(time.Second)
		synctest.Wait()
		state := func() (all string) {
			for i, p := range [][2]string{{a1, b1}, {a1, b2}, {c, d}, {e, f}} {
				w.who = []auth.Principal{mine, mine, other, other}[i]
				s, _, _ := w.status(p[0], p[1])
				all += s + " "
			}
			return all
		}
		if got := state(); got != "building waiting building waiting " {
			t.Error(got)
		}
		time.Sleep(100 * time.Second)
		synctest.Wait()
		if got := state(); got != "ready building ready building " {
			t.Error(got)
		}
		time.Sleep(110 * time.Second)
		synctest.Wait()
		if got := state(); got != "ready ready ready ready " {
			t.Error(got)
		}
	})
}

func TestCloseEndsBuildsAndTheNextServerKnows(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		a, b := w.begin("a", fromBase(run("hang")))
		_, queued := w.begin("a", fromBase(run("hang")))
		synctest.Wait()
		w.builder.Close()
		if living, made := w.count(); living != 0 || made != 0 {
			t.Errorf("%d sandboxes and %d templates are left", living, made)
		}
		w.open()
		for _, id := range []string{b, queued} {
			status, reason, _ := w.status(a, id)
			if status != "error" || reason["message"] != "the server stopped while the template was being built; build it again" {
				t.Error(status, reason)
			}
		}
		if status, out := w.ask("POST", "/v3/templates", js{"name": "a"}); status != http.StatusAccepted || out["templateID"] != a {
			t.Error("the same name is another template:", status, out)
		}
	})
}

func TestWhatACrashedServerLeftIsRemoved(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		a, b, _ := w.build("a", fromBase())
		crashed, id := w.begin("c", fromBase(run("hang")))
		synctest.Wait()
		dead := w.builder
		defer dead.Close()
		before, _ := w.resolve("a")
		w.mu.Lock() // what it made and had no time to write down
		w.made["e2b-layer-lost"] = &template.Template{Name: "e2b-layer-lost", Tenant: "acme", Snapshot: &template.Snapshot{}}
		w.made["mine"] = &template.Template{Name: "mine", Tenant: "acme", Snapshot: &template.Snapshot{}}
		w.living["other"] = sandbox.Sandbox{ID: "other", Tenant: "acme"}
		w.mu.Unlock()
		w.documents = w.documents.copy()
		w.open()
		if status, _, _ := w.status(crashed, id); status != "error" {
			t.Errorf("a build that nobody goes on with is %s", status)
		}
		if status, _, _ := w.status(a, b); status != "ready" {
			t.Errorf("a build that was ready is %s", status)
		}
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.made["e2b-layer-lost"] != nil || w.made["mine"] == nil || w.made[before.Template] == nil {
			t.Error("templates that are left:", w.made)
		}
		if len(w.living) != 1 {
			t.Error("sandboxes that are left:", w.living)
		}
		delete(w.living, "other")
	})
}

func (m *memory) copy() *memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := newMemory()
	for k, v := range m.docs {
		c.docs[k] = v
	}
	return c
}

func TestDeletingATemplateEndsItsBuildsAndRemovesItsFiles(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		a, _, _ := w.build("a", fromBase())
		w.begin("a", fromBase(run("hang")))
		w.begin("a", fromBase(run("hang")))
		synctest.Wait()
		if status, out := w.ask("DELETE", "/templates/a", nil); status != http.StatusNoContent {
			t.Fatal(status, out)
		}
		synctest.Wait()
		if living, made := w.count(); living != 0 || made != 0 {
			t.Errorf("%d sandboxes and %d templates are left", living, made)
		}
		for _, name := range []string{"a", a} {
			if status, out := w.ask("DELETE", "/templates/"+name, nil); status != http.StatusNotFound || out["code"] != 404.0 {
				t.Error(status, out)
			}
		}
	})
}

func TestATemplateThatOthersAreMadeFromGoesWithThem(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.build("a", fromBase())
		w.build("b", js{"fromTemplate": "a"})
		if status, _ := w.ask("DELETE", "/templates/a", nil); status != http.StatusNoContent {
			t.Fatal(status)
		}
		if _, err := w.resolve("a"); !fault.Is(err, fault.NotFound) {
			t.Error("a deleted template can be used:", err)
		}
		if _, made := w.count(); made != 2 {
			t.Errorf("%d templates of the domain are there", made)
		}
		w.builder.Close()
		w.open() // it is remembered
		if status, _ := w.ask("DELETE", "/templates/b", nil); status != http.StatusNoContent {
			t.Fatal(status)
		}
		w.build("c", fromBase())
		if _, made := w.count(); made != 1 {
			t.Errorf("%d templates of the domain are left", made)
		}
	})
}

func TestCopyUnpacksWhatWasUploaded(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, asked := w.ask("POST", "/v3/templates", js{"name": "a"})
		id, hash := asked["templateID"].(string), strings.Repeat("0f", 32)
		body := archive(t, tar.Header{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "dir/a", Typeflag: tar.TypeReg},
			tar.Header{Name: "dir/sub/b", Typeflag: tar.TypeReg}, tar.Header{Name: "dir/l", Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow"})
		if status, present := w.upload(id, hash, body); status != http.StatusOK || present {
			t.Fatal(status, present)
		}
		if _, present := w.upload(id, hash, body); !present {
			t.Error("files that are there are not present")
		}
		w.build("a", fromBase(js{"type": "COPY", "args": []string{"dir/*", "to", "", ""}, "filesHash": hash}))
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.written, "/.e2b")
		want := map[string]string{"/home/user/to/a": "content of dir/a", "/home/user/to/sub/b": "content of dir/sub/b"}
		if diff := cmp.Diff(want, w.written); diff != "" {
			t.Error(diff)
		}
	})
}

func TestUploadLinksAreForOneFileOfOneTenant(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, asked := w.ask("POST", "/v3/templates", js{"name": "a"})
		id, hash := asked["templateID"].(string), strings.Repeat("0f", 32)
		_, out := w.ask("GET", "/templates/"+id+"/files/"+hash, nil)
		link := strings.TrimPrefix(out["url"].(string), "http://example.com")
		send := func(method, path string, body []byte) int {
			rec := recorder()
			w.builder.ServeUpload(rec, request(method, path, body))
			return rec.Code
		}
		if got := send("PUT", link, bytes.Repeat([]byte{1}, 1<<20+1)); got != http.StatusRequestEntityTooLarge {
			t.Errorf("too much is answered with %d", got)
		}
		for _, c := range []struct {
			name, method, path string
			want               int
		}{
			{"another file", "PUT", strings.Replace(link, hash, strings.Repeat("1f", 32), 1), http.StatusForbidden},
			{"another template", "PUT", strings.Replace(link, id, "other", 1), http.StatusForbidden},
			{"a changed token", "PUT", link + "x", http.StatusForbidden},
			{"no token", "PUT", strings.Split(link, "?")[0], http.StatusForbidden},
			{"another method", "POST", link, http.StatusMethodNotAllowed},
			{"a path as a hash", "PUT", strings.Replace(link, hash, "..%2F..%2Fetc%2Fpasswd", 1), http.StatusNotFound},
			{"the link itself", "PUT", link, http.StatusOK},
		} {
			if got := send(c.method, c.path, []byte("x")); got != c.want {
				t.Errorf("%s: %d, not %d", c.name, got, c.want)
			}
		}
		time.Sleep(3 * time.Hour)
		if got := send("PUT", link, []byte("x")); got != http.StatusForbidden {
			t.Errorf("an old link is answered with %d", got)
		}
	})
}

func TestOthersTemplatesAreNotFound(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		id, b, _ := w.build("a", fromBase())
		stranger := auth.Principal{Tenant: "other"}
		for _, path := range []string{
			"GET /templates/" + id, "GET /templates/aliases/a", "GET /templates/a/tags", "DELETE /templates/" + id, "GET /templates/acme%2Fa",
			"GET /templates/" + id + "/builds/" + b + "/status", "GET /templates/" + id + "/builds/" + b + "/logs",
			"GET /templates/" + id + "/files/" + strings.Repeat("0", 64),
		} {
			method, path, _ := strings.Cut(path, " ")
			if status, body := w.raw(stranger, method, path, nil); status != http.StatusNotFound {
				t.Errorf("%s %s: %d %s", method, path, status, body)
			}
		}
		got, _ := w.resolve("a")
		for _, ref := range []string{"a", id, "acme/a", got.Template} {
			if r, err := w.builder.Resolve(context.Background(), stranger, ref); !fault.Is(err, fault.NotFound) {
				t.Errorf("%s: %v %v", ref, r, err)
			}
		}
		if _, err := w.resolve(got.Template); !fault.Is(err, fault.NotFound) {
			t.Error("a template's hidden name can be used")
		}
	})
}

func TestNothingKeepsTheLogsOfManyBuilds(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		var first [2]string
		for i := range build.KeptBooks + 2 {
			id, b, _ := w.build(fmt.Sprintf("t%d", i), fromBase(run("hello")))
			if i == 0 {
				first = [2]string{id, b}
			}
		}
		_, _, log := w.status(first[0], first[1])
		if !slices.Contains(log, "[builder 1/1] [stdout]: hello") {
			t.Error("the log of an old build is gone:", log)
		}
	})
}
