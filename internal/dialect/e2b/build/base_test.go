package build_test

import (
	"context"
	"fmt"
	"maps"
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
	"github.com/covehq/cove/internal/template"
)

func TestABuildFromAnImageHasWhatE2BsTemplatesHave(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, _, log := w.build("x", js{
			"fromImage": "debian:13", "fromImageRegistry": js{"type": "registry", "username": "me", "password": "hunter2"}, "steps": []js{run("hello")},
		})
		for _, want := range []string{"[base] Pulling image debian:13", "[base] Layer sha256:0123456789ab: 3 KB", "[base] FROM debian:13"} {
			if !slices.Contains(log, want) {
				t.Errorf("the log does not say %q:\n%s", want, strings.Join(log, "\n"))
			}
		}
		if strings.Contains(strings.Join(log, "\n"), "hunter2") {
			t.Error("the log has the password")
		}
		if diff := cmp.Diff([]string{"user: hello"}, w.ran()); diff != "" {
			t.Error(diff)
		}
		got, err := w.resolve("x")
		if err != nil {
			t.Fatal(err)
		}
		want := build.Resolved{
			Template: got.Template, ID: got.ID, Alias: "x", Env: map[string]string{"LANG": "C.UTF-8"}, User: "user", Workdir: "/home/user",
			Limits: template.Limits{DiskBytes: 2 << 30},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		pull := []template.PullRequest{{Reference: "debian:13", Username: "me", Password: "hunter2"}}
		if diff := cmp.Diff(pull, w.pulls); diff != "" {
			t.Error(diff)
		}
		if made := w.made[w.created[1].Template]; made == nil || !made.Sudo || made.Snapshot.From != "img-debian" {
			t.Errorf("the build's sandbox starts from %+v", made)
		}
	})
}

func TestAnImageIsMadeReadyOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.build("x", js{"fromImage": "debian:13", "steps": []js{run("hello")}})
		w.build("y", js{"fromImage": "debian:13", "steps": []js{run("hello"), run("more")}})
		w.mu.Lock()
		defer w.mu.Unlock()
		var from []string
		for _, spec := range w.created {
			from = append(from, spec.Template)
		}
		if len(from) != 3 || from[0] != "img-debian" || slices.Contains(from[1:], "img-debian") {
			t.Errorf("sandboxes started from %v", from)
		}
	})
}

func TestAnotherPythonIsPulledWhateverIsMapped(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.build("x", js{"fromImage": "python:3.9-slim", "force": true})
		w.mu.Lock()
		defer w.mu.Unlock()
		if diff := cmp.Diff([]template.PullRequest{{Reference: "python:3.9-slim", Refresh: true, Unmapped: true}}, w.pulls); diff != "" {
			t.Error(diff)
		}
	})
}

func TestAnImageWithoutAShellIsToldSoWhenACommandComes(t *testing.T) {
	const none = "the image has neither /bin/bash nor /bin/sh, which commands and hard links need; " +
		"start from an image that has one of them, such as Debian or Alpine, or do without those"
	quiet := []js{{"type": "ENV", "args": []string{"A", "1"}}, {"type": "USER", "args": []string{"bob"}}, {"type": "WORKDIR", "args": []string{"/app"}}}
	for name, c := range map[string]struct {
		start         js
		step, message string
	}{
		"nothing is run":  {js{"steps": quiet}, "", ""},
		"a step":          {js{"steps": append(slices.Clone(quiet), run("hello"))}, "4", "failed to run command 'hello': " + none},
		"a start command": {js{"startCmd": "serve"}, "finalize", none},
		"a ready command": {js{"readyCmd": "true"}, "finalize", none},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.shells = nil
				c.start["fromImage"] = "debian:13"
				id, b := w.begin("x", c.start)
				w.settle(id, b)
				status, reason, log := w.status(id, b)
				if c.message == "" {
					if got, err := w.resolve("x"); status != "ready" || err != nil || got.User != "bob" || got.Workdir != "/app" || got.Env["A"] != "1" {
						t.Errorf("%s %v %+v %v", status, log, got, err)
					}
					return
				}
				if diff := cmp.Diff(js{"step": c.step, "logEntries": []any{}, "message": c.message}, reason); status != "error" || diff != "" {
					t.Error(status, diff)
				}
			})
		})
	}
}

func TestAUserIsMadeWithWhatTheImageHas(t *testing.T) {
	for name, c := range map[string]struct {
		before, after map[string]string
		shells        []string
	}{
		"an image without users": {
			nil, map[string]string{
				"/etc/passwd": "user:x:1000:1000::/home/user:/bin/sh\n", "/etc/group": "user:x:1000:\n", "/etc/shadow": "user:*:19000:0:99999:7:::\n",
			}, []string{"/bin/sh"},
		},
		"ids that are taken, a group of that name, and no end of the line": {
			map[string]string{"/etc/passwd": "app:x:1000:1::/:/bin/sh", "/etc/group": "app:x:1001:\nuser:x:7:\n"},
			map[string]string{
				"/etc/passwd": "app:x:1000:1::/:/bin/sh\nuser:x:1002:7::/home/user:/bin/bash\n", "/etc/group": "app:x:1001:\nuser:x:7:\n",
				"/etc/shadow": "user:*:19000:0:99999:7:::\n",
			}, []string{"/bin/bash"},
		},
		"one of that name": {
			map[string]string{"/etc/passwd": "user:x:5:5::/:/bin/sh\n"}, map[string]string{"/etc/passwd": "user:x:5:5::/:/bin/sh\n"}, []string{"/bin/sh"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.shells = c.shells
				maps.Copy(w.written, c.before)
				w.build("x", js{"fromImage": "debian:13"})
				w.mu.Lock()
				defer w.mu.Unlock()
				delete(w.written, "/.e2b")
				if diff := cmp.Diff(c.after, w.written); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// TestAnImageFullOfUsers has files that name everybody there can be, in as many lines as are read.
func TestAnImageFullOfUsers(t *testing.T) {
	var all strings.Builder
	for i := 0; all.Len() < 4<<20-100; i++ {
		fmt.Fprintf(&all, "::%d\n", 1000+i)
	}
	for name, text := range map[string]string{
		"all numbers of users are taken": all.String(), "has more than 4194304 bytes": all.String() + strings.Repeat(":", 200),
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.written["/etc/passwd"] = text
				begun := time.Now()
				id, b := w.begin("x", js{"fromImage": "debian:13"})
				w.settle(id, b)
				if status, reason, _ := w.status(id, b); status != "error" || !strings.Contains(fmt.Sprint(reason), name) {
					t.Error(status, reason)
				}
				if took := time.Since(begun); took > 20*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

func TestCredentialsOfRegistries(t *testing.T) {
	for name, c := range map[string]struct {
		login js
		want  int
		pull  template.PullRequest
	}{
		"of Google":            {js{"type": "gcp", "serviceAccountJson": "{}"}, 202, template.PullRequest{Reference: "debian:13", Username: "_json_key", Password: "{}"}},
		"of Amazon":            {js{"type": "aws", "awsAccessKeyId": "a", "awsSecretAccessKey": "b", "awsRegion": "c"}, 501, template.PullRequest{}},
		"without a password":   {js{"type": "registry", "username": "me"}, 400, template.PullRequest{}},
		"of a kind of its own": {js{"type": "magic"}, 400, template.PullRequest{}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				_, asked := w.ask("POST", "/v3/templates", js{"name": "x"})
				id, b := asked["templateID"].(string), asked["buildID"].(string)
				status, out := w.ask("POST", "/v2/templates/"+id+"/builds/"+b, js{"fromImage": "debian:13", "fromImageRegistry": c.login})
				if status != c.want {
					t.Fatal(status, out)
				}
				if c.want != http.StatusAccepted {
					return
				}
				w.settle(id, b)
				w.mu.Lock()
				defer w.mu.Unlock()
				if diff := cmp.Diff([]template.PullRequest{c.pull}, w.pulls); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestABuildStartsFromWhateverItsCallerCanName(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.builder.ResolveBy(func(_ context.Context, _ auth.Principal, ref string) (build.Resolved, error) {
			if ref != "team/kept:v1" {
				return build.Resolved{}, fault.New(fault.NotFound, "no %s", ref)
			}
			return build.Resolved{Template: "python", User: "root"}, nil
		})
		w.build("x", js{"fromTemplate": "team/kept:v1", "steps": []js{run("hello")}})
		if diff := cmp.Diff([]string{"root: hello"}, w.ran()); diff != "" {
			t.Error(diff)
		}
	})
}

// What a home begins with is copied by the image's own programs, which can do what it likes.
func TestAnImageThatIsNeverReadyHoldsNobodyUp(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.builder.Close()
		w.stuck, w.parallel = true, 3
		w.open()
		first, a := w.begin("x", js{"fromImage": "debian:13"})
		synctest.Wait()
		second, _ := w.begin("y", js{"fromImage": "debian:13"}) // waits for the first
		third, c := w.begin("z", fromBase())                    // waits for a place
		synctest.Wait()
		began := time.Now()
		if status, out := w.ask("DELETE", "/templates/"+second, nil); status != http.StatusNoContent {
			t.Fatal(status, out)
		}
		synctest.Wait()
		if status, _, _ := w.status(third, c); status != "ready" {
			t.Errorf("a build that was given up keeps its place: the next is %s", status)
		}
		w.settle(first, a)
		status, reason, _ := w.status(first, a)
		want := "image 'debian:13' could not be made ready for builds: it took longer than 5m0s"
		if took := time.Since(began); status != "error" || reason["message"] != want || took > 6*time.Minute {
			t.Errorf("after %v: %s %v", took, status, reason)
		}
	})
}
