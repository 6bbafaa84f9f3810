package e2b_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/build"
)

func (w *world) snapshot(id, body string) e2b.SnapshotInfo {
	w.t.Helper()
	var s e2b.SnapshotInfo
	w.ask(http.StatusCreated, "POST", "/sandboxes/"+id+"/snapshots", body, &s)
	return s
}

func (w *world) snapshots(query string) (ids []string, next string) {
	w.t.Helper()
	var all []e2b.SnapshotInfo
	r := w.ask(http.StatusOK, "GET", "/snapshots?"+query, "", &all)
	for _, s := range all {
		ids = append(ids, s.SnapshotID)
	}
	return ids, r.header.Get("X-Next-Token")
}

func (w *world) remove(id string) reply {
	return w.send("DELETE", "/templates/"+url.PathEscape(id), "")
}

func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base"}`).SandboxID
	other := w.create(`{"templateID":"base"}`).SandboxID
	unnamed := w.snapshot(id, ``)
	named := w.snapshot(id, `{"name":"my-snap"}`)
	tagged := w.snapshot(other, `{"name":"acme/my-snap:v2","memory":false}`)
	t.Run("snapshots are called as E2B calls them", func(t *testing.T) {
		if !strings.HasSuffix(unnamed.SnapshotID, ":default") || len(unnamed.Names) != 0 || unnamed.Names == nil {
			t.Errorf("%+v", unnamed)
		}
		if named.SnapshotID != "acme/my-snap:default" || !slices.Equal(named.Names, []string{"acme/my-snap:default"}) || tagged.SnapshotID != "acme/my-snap:v2" {
			t.Errorf("%+v, %+v", named, tagged)
		}
	})
	t.Run("a sandbox starts from each, by any of its names", func(t *testing.T) {
		for _, ref := range []string{unnamed.SnapshotID, strings.TrimSuffix(unnamed.SnapshotID, ":default"), "my-snap", "my-snap:v2", "acme/my-snap", "acme/my-snap:v2"} {
			sb := w.create(fmt.Sprintf(`{"templateID":%q}`, ref))
			if !strings.HasPrefix(sb.TemplateID, "snap-") {
				t.Errorf("%s: %+v", ref, sb)
			}
			if got, _ := w.list("template=" + sb.TemplateID); !slices.Contains(got, sb.SandboxID) {
				t.Errorf("%s: its template lists %v", ref, got)
			}
		}
		w.refused(w.send("POST", "/v2/sandboxes", `{"templateID":"my-snap"}`, "X-API-Key", w.other), http.StatusNotFound)
		w.refused(w.send("POST", "/v2/sandboxes", fmt.Sprintf(`{"templateID":%q}`, unnamed.SnapshotID), "X-API-Key", w.other), http.StatusNotFound)
	})
	t.Run("they are listed, newest first, by sandbox, by name and by pages", func(t *testing.T) {
		for query, want := range map[string][]string{
			"":                                  {tagged.SnapshotID, named.SnapshotID, unnamed.SnapshotID},
			"sandboxID=" + id:                   {named.SnapshotID, unnamed.SnapshotID},
			"sandboxID=" + other + "-client":    {tagged.SnapshotID},
			"sandboxID=unknown":                 nil,
			"name=my-snap":                      {tagged.SnapshotID, named.SnapshotID},
			"name=acme/my-snap:v2":              {tagged.SnapshotID},
			"name=nope":                         nil,
			"name=" + url.QueryEscape("Né pas"): nil,
		} {
			if got, next := w.snapshots(query); !slices.Equal(got, want) || next != "" {
				t.Errorf("%s: %v and %q, want %v", query, got, next, want)
			}
		}
		var got []string
		n := 0
		for next := ""; n == 0 || next != ""; n++ {
			var page []string
			page, next = w.snapshots("limit=1&nextToken=" + next)
			got = append(got, page...)
		}
		if n != 3 || !slices.Equal(got, []string{tagged.SnapshotID, named.SnapshotID, unnamed.SnapshotID}) {
			t.Errorf("%v in %d pages", got, n)
		}
		for _, query := range []string{"limit=0", "limit=101", "nextToken=%21", "sandboxID=A"} {
			w.refused(w.send("GET", "/snapshots?"+query, ""), http.StatusBadRequest)
		}
		if r := w.send("GET", "/snapshots", "", "X-API-Key", w.other); r.body != "[]\n" {
			t.Error(r.body)
		}
	})
	t.Run("a name that is used again moves, and what it named is removed", func(t *testing.T) {
		before := w.driver.catalogue.count()
		again := w.snapshot(other, `{"name":"my-snap"}`)
		if got, _ := w.snapshots("name=my-snap:default"); again.SnapshotID != named.SnapshotID || !slices.Equal(got, []string{named.SnapshotID}) {
			t.Errorf("%+v, listed %v", again, got)
		}
		if now := w.driver.catalogue.count(); now != before {
			t.Errorf("%d templates, %d before", now, before)
		}
	})
	t.Run("one is removed once, and nobody else removes it", func(t *testing.T) {
		for _, s := range []string{unnamed.SnapshotID, named.SnapshotID, tagged.SnapshotID} {
			if r := w.send("DELETE", "/templates/"+url.PathEscape(s), "", "X-API-Key", w.other); r.status != http.StatusTeapot {
				t.Errorf("another tenant: %+v", r)
			}
			if r := w.remove(s); r.status != http.StatusNoContent {
				t.Errorf("%+v", r)
			}
			if r := w.remove(s); r.status != http.StatusTeapot || !strings.HasPrefix(r.body, "builder: acme DELETE /templates/") {
				t.Errorf("what is no snapshot goes to the builder: %+v", r)
			}
		}
		if got, _ := w.snapshots(""); len(got) != 0 || w.driver.catalogue.count() != 0 {
			t.Errorf("left are %v and %d templates", got, w.driver.catalogue.count())
		}
	})
	t.Run("one that is called as a path is not taken for it", func(t *testing.T) {
		w.snapshot(id, `{"name":"tags"}`)
		if r := w.send("DELETE", "/templates/tags", `{"name":"a","tags":["b"]}`); r.status != http.StatusTeapot {
			t.Errorf("%+v", r)
		}
		if r := w.remove("acme/tags:default"); r.status != http.StatusNoContent {
			t.Errorf("%+v", r)
		}
	})
	t.Run("a name that moves from many sides leaves one snapshot", func(t *testing.T) {
		var work sync.WaitGroup
		for range 8 {
			work.Go(func() { w.snapshot(id, `{"name":"busy"}`) })
		}
		work.Wait()
		if got, _ := w.snapshots(""); len(got) != 1 || w.driver.catalogue.count() != 1 {
			t.Errorf("left are %v and %d templates", got, w.driver.catalogue.count())
		}
		w.remove("busy")
	})
	t.Run("what cannot be made is refused", func(t *testing.T) {
		for body, status := range map[string]int{
			`{"name":"My Snap"}`: 400, `{"name":"a:b:c"}`: 400, `{"name":"../x"}`: 403, `{"name":"globex/x"}`: 403, `{"name":7}`: 400, `{"memory":true}`: 501,
		} {
			w.refused(w.send("POST", "/sandboxes/"+id+"/snapshots", body), status)
		}
	})
	t.Run("what a template starts its snapshots start, too", func(t *testing.T) {
		w.builder.start = &build.Start{Command: "echo $MARK >> $HOME/begun", Ready: "test -s $HOME/begun", Env: map[string]string{"MARK": "one"}}
		w.snapshot(w.create(`{"templateID":"server"}`).SandboxID, `{"name":"begun"}`)
		sb := w.create(`{"templateID":"begun"}`)
		if got := w.run(sb.SandboxID, "cat $HOME/begun; printf $A"); got != "one\ntemplate" {
			t.Errorf("it says %q", got)
		}
	})
}

func TestNoFilesOfASnapshotAreLeft(t *testing.T) {
	const doomed = "e2b.snapshot.doomed"
	clean := func(t *testing.T, w *world, templates int) {
		t.Helper()
		if n, left := w.driver.catalogue.count(), w.store.ids(t, doomed); n != templates || len(left) != 0 {
			t.Errorf("%d templates, want %d; %v are doomed", n, templates, left)
		}
	}
	for name, claim := range map[string]func(t *testing.T, w *world, id string){
		"what others are made from is removed once they are gone": func(t *testing.T, w *world, id string) {
			w.snapshot(id, `{"name":"a"}`)
			letGo := w.driver.catalogue.keep()
			w.snapshot(id, `{"name":"a"}`)
			if n := w.driver.catalogue.count(); n != 2 {
				t.Fatalf("%d templates", n)
			}
			letGo()
			w.remove("made-by-the-builder")
			clean(t, w, 1)
		},
		"what others are made from loses its name at once and its files once they are gone": func(t *testing.T, w *world, id string) {
			w.snapshot(id, `{"name":"a"}`)
			letGo := w.driver.catalogue.keep()
			w.remove("a")
			if named, _ := w.snapshots(""); w.driver.catalogue.count() != 1 || len(named) != 0 {
				t.Fatalf("%d templates, named %v", w.driver.catalogue.count(), named)
			}
			letGo()
			w.remove("made-by-the-builder")
			clean(t, w, 0)
		},
		"what could not be removed is by the next server": func(t *testing.T, w *world, id string) {
			w.snapshot(id, `{"name":"a"}`)
			letGo := w.driver.catalogue.keep()
			w.snapshot(id, `{"name":"a"}`)
			letGo()
			w.serve()
			w.snapshots("")
			clean(t, w, 1)
		},
		"what could not be recorded is removed": func(t *testing.T, w *world, id string) {
			w.store.refused.Store("e2b.snapshot")
			w.refused(w.send("POST", "/sandboxes/"+id+"/snapshots", `{"name":"a"}`), http.StatusInternalServerError)
			clean(t, w, 0)
		},
		"what could not be announced is not made": func(t *testing.T, w *world, id string) {
			w.store.refused.Store(doomed)
			w.refused(w.send("POST", "/sandboxes/"+id+"/snapshots", `{"name":"a"}`), http.StatusInternalServerError)
			clean(t, w, 0)
		},
		"what a server made before it died is removed, and what it wrote down stays": func(t *testing.T, w *world, id string) {
			w.snapshot(id, `{"name":"a"}`)
			kept := w.driver.catalogue.names()[0]
			if _, err := w.manager.Snapshot(t.Context(), acme, id, "snap-half", ""); err != nil {
				t.Fatal(err)
			}
			if _, err := w.manager.Snapshot(t.Context(), acme, id, "snap-by-another-dialect", ""); err != nil {
				t.Fatal(err)
			}
			for _, template := range []string{kept, "snap-half"} {
				if err := w.store.PutDocument(t.Context(), "acme", doomed, template, []byte("{}")); err != nil {
					t.Fatal(err)
				}
			}
			w.serve()
			w.snapshots("")
			clean(t, w, 2)
			if got := w.driver.catalogue.names(); !slices.Contains(got, kept) || !slices.Contains(got, "snap-by-another-dialect") {
				t.Errorf("left are %v", got)
			}
		},
		"what a driver makes after nobody waits for it any more is removed": func(t *testing.T, w *world, id string) {
			if err := w.store.PutDocument(t.Context(), "acme", doomed, "snap-late", []byte("{}")); err != nil {
				t.Fatal(err)
			}
			w.snapshots("")
			if _, err := w.manager.Snapshot(t.Context(), acme, id, "snap-late", ""); err != nil {
				t.Fatal(err)
			}
			w.remove("whatever")
			clean(t, w, 0)
		},
		"one that is being made is not taken for what was left": func(t *testing.T, w *world, id string) {
			w.driver.made = func() { w.remove("whatever") } // which looks for what was left
			w.snapshot(id, `{"name":"a"}`)
			w.driver.made = nil
			w.create(`{"templateID":"a"}`)
			clean(t, w, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			claim(t, w, w.create(`{"templateID":"base"}`).SandboxID)
		})
	}
}
