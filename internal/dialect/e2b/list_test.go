package e2b_test

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/sandbox"
)

func (w *world) list(query string) (ids []string, next string) {
	w.t.Helper()
	var items []e2b.Listed
	r := w.ask(http.StatusOK, "GET", "/v2/sandboxes?"+query, "", &items)
	for _, sb := range items {
		ids = append(ids, sb.SandboxID)
	}
	return ids, r.header.Get("X-Next-Token")
}

// pages is everything that a query finds, by pages of a size, and how many pages that took.
func (w *world) pages(query string, size int) (ids []string, pages int) {
	w.t.Helper()
	query += "&limit=" + strconv.Itoa(size)
	for next := ""; pages == 0 || next != ""; pages++ {
		var page []string
		page, next = w.list(query + "&nextToken=" + url.QueryEscape(next))
		ids = append(ids, page...)
	}
	return ids, pages
}

// metadata writes a filter as both SDKs do.
func metadata(pairs ...string) string {
	form := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		form.Set(url.PathEscape(pairs[i]), url.PathEscape(pairs[i+1]))
	}
	return "metadata=" + url.QueryEscape(form.Encode())
}

func TestList(t *testing.T) {
	w := newWorld(t)
	const odd = "a b+c/d=e&f%20ü"
	hidden, _, err := w.manager.Create(t.Context(), acme, sandbox.Spec{Template: "base", Annotations: map[string]string{build.Annotation: "b1"}})
	if err != nil {
		t.Fatal(err)
	}
	first := w.create(`{"templateID":"base","metadata":{"n":"1","` + odd + `":"` + odd + `"}}`).SandboxID
	second := w.create(`{"templateID":"server","metadata":{"n":"2"}}`).SandboxID
	third := w.create(`{"templateID":"base","metadata":{"n":"3"}}`).SandboxID
	other, _, err := w.manager.Create(t.Context(), acme, sandbox.Spec{Template: "base", Annotations: map[string]string{build.Annotation: "b2"}, Metadata: map[string]string{"n": "2"}})
	if err != nil {
		t.Fatal(err)
	}
	w.ask(http.StatusNoContent, "POST", "/sandboxes/"+second+"/pause", ``, nil)
	ended := w.create(`{"templateID":"base"}`).SandboxID
	w.ask(http.StatusNoContent, "DELETE", "/sandboxes/"+ended, "", nil)
	started := w.detail(second).StartedAt.Format(time.RFC3339Nano)

	for name, c := range map[string]struct {
		query string
		want  []string
	}{
		"everything, newest first": {"", []string{third, second, first}},
		"oldest first":             {"order=asc", []string{first, second, third}},
		"what runs":                {"state=running", []string{third, first}},
		"what is paused":           {"state=paused", []string{second}},
		"both, joined":             {"state=running,paused", []string{third, second, first}},
		"both, repeated":           {"state=running&state=paused", []string{third, second, first}},
		"by metadata":              {metadata("n", "2"), []string{second}},
		"by odd metadata":          {metadata(odd, odd), []string{first}},
		"by two pairs":             {metadata("n", "1", odd, odd), []string{first}},
		"by pairs that contradict": {metadata("n", "2", odd, odd), nil},
		"from a time on":           {"startedAfter=" + url.QueryEscape(started), []string{third, second}},
		"by a template's name":     {"template=server", []string{second}},
		"by a template's first":    {"template=base", []string{third, first}},
		"by an unknown template":   {"template=nope", nil},
	} {
		t.Run("a list of "+name, func(t *testing.T) {
			if got, next := w.list(c.query); !slices.Equal(got, c.want) || next != "" {
				t.Errorf("got %v and %q, want %v; hidden are %s, %s", got, next, c.want, hidden.ID, other.ID)
			}
			for size := 1; size <= 3; size++ {
				want := max(1, (len(c.want)+size-1)/size)
				if got, n := w.pages(c.query, size); !slices.Equal(got, c.want) || n != want {
					t.Errorf("by pages of %d: %v in %d pages, want %v in %d", size, got, n, c.want, want)
				}
			}
		})
	}
	for name, query := range map[string]string{
		"a state": "state=dead", "an order": "order=up", "no items": "limit=0", "too many": "limit=101", "a time": "startedAfter=noon",
		"a token": "nextToken=abc", "a tag": "template=base:v1", "metadata": "metadata=" + url.QueryEscape("a=%25ZZ"), "a query": "limit=%zz",
	} {
		t.Run("a list by "+name+" that is wrong is refused", func(t *testing.T) {
			w.refused(w.send("GET", "/v2/sandboxes?"+query, ""), http.StatusBadRequest)
		})
	}
	t.Run("the old list has what runs", func(t *testing.T) {
		var items []e2b.Listed
		r := w.ask(http.StatusOK, "GET", "/sandboxes?"+metadata("n", "3"), "", &items)
		if len(items) != 1 || items[0].SandboxID != third || r.header.Get("X-Total-Running") == "" {
			t.Errorf("%+v", items)
		}
		w.ask(http.StatusOK, "GET", "/sandboxes", "", &items)
		if len(items) != 2 {
			t.Errorf("%+v", items)
		}
	})
	t.Run("what runs is counted without sandboxes of builds", func(t *testing.T) {
		if r := w.send("GET", "/v2/sandboxes", ""); r.header.Get("X-Total-Running") != "2" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("a sandbox of another dialect is listed by its template", func(t *testing.T) {
		foreign, _, err := w.manager.Create(t.Context(), acme, sandbox.Spec{Template: "base"})
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := w.list("template=base"); !slices.Equal(got, []string{foreign.ID, third, first}) {
			t.Errorf("%v", got)
		}
	})
	t.Run("a list by template is one question to the store", func(t *testing.T) {
		w.lists.Store(0)
		if got, next := w.list("template=server&limit=1"); len(got) != 1 || next != "" || w.lists.Load() != 1 {
			t.Errorf("%v and %q by %d questions", got, next, w.lists.Load())
		}
	})
	t.Run("an empty list is a list", func(t *testing.T) {
		if r := w.send("GET", "/v2/sandboxes", "", "X-API-Key", w.other); r.body != "[]\n" || r.header.Get("X-Total-Running") != "0" {
			t.Errorf("%+v", r)
		}
	})
}
