package agentsandbox_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

func jsonOf(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// watching is a watch that goes on.
type watching struct {
	t     *testing.T
	lines chan string // closed at its end
	stop  context.CancelFunc
}

func (w *world) watch(path string, headers ...string) *watching {
	w.t.Helper()
	ctx, stop := context.WithCancel(w.t.Context())
	resp := w.request(ctx, "GET", path, "", headers...)
	if resp.StatusCode != 200 {
		w.t.Fatalf("watch: %d", resp.StatusCode)
	}
	s := &watching{w.t, make(chan string, 1000), stop}
	go func() {
		defer close(s.lines)
		for scan := bufio.NewScanner(resp.Body); scan.Scan(); {
			s.lines <- scan.Text()
		}
	}()
	return s
}

// next is the next event.
func (s *watching) next() (kind string, object map[string]any) {
	s.t.Helper()
	select {
	case line, ok := <-s.lines:
		if !ok {
			s.t.Fatal("the watch has ended")
		}
		var e struct {
			Type   string         `json:"type"`
			Object map[string]any `json:"object"`
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			s.t.Fatalf("%q: %v", line, err)
		}
		return e.Type, e.Object
	case <-time.After(2 * time.Minute):
		s.t.Fatal("nothing happens")
	}
	return "", nil
}

func (s *watching) wants(kind, name string) map[string]any {
	s.t.Helper()
	k, o := s.next()
	if k != kind || dig(o, "metadata", "name") != name {
		s.t.Fatalf("%s %v, want %s %s", k, dig(o, "metadata", "name"), kind, name)
	}
	return o
}

// ends waits for its end and gives what came before.
func (s *watching) ends() (rest []string) {
	s.t.Helper()
	for {
		select {
		case line, ok := <-s.lines:
			if !ok {
				return rest
			}
			rest = append(rest, line)
		case <-time.After(2 * time.Minute):
			s.t.Fatal("it does not end")
		}
	}
}

func TestAWatchTellsOfAClaimAsTheClientWaitsForIt(t *testing.T) {
	w := newWorld(t)
	made := w.post(claims, claimBody("one"))
	s := w.watch(claims + "?fieldSelector=metadata.name%3Done&resourceVersion=" + dig(made, "metadata", "resourceVersion").(string) + "&timeoutSeconds=20&watch=True")
	o := s.wants("MODIFIED", "one") // name, address and readiness at once
	if status, _, _ := conditionOf(o, "Ready"); status != "True" || dig(o, "status", "sandbox", "name") != "one" || dig(o, "status", "sandbox", "podIPs") == nil {
		t.Errorf("%v", o["status"])
	}
	w.ask("DELETE", claims+"/one", "")
	gone := s.wants("DELETED", "one")
	if a, b := dig(o, "metadata", "resourceVersion").(string), dig(gone, "metadata", "resourceVersion").(string); b <= a {
		t.Errorf("version %s after %s", b, a)
	}
}

func TestAWatchWithoutAVersionBeginsWithWhatIsThere(t *testing.T) {
	w := newWorld(t)
	w.post(claims, claimBody("a", `"warmPoolRef":{"name":"nope"}`))
	w.becomes(claims+"/a", "WarmPoolNotFound")
	for _, version := range []string{"", "&resourceVersion=0"} {
		s := w.watch(claims + "?watch=true" + version)
		s.wants("ADDED", "a")
		s.stop()
	}
	s := w.watch("/apis/extensions.agents.x-k8s.io/v1alpha1/sandboxclaims?watch=1") // all namespaces, the older words
	if o := s.wants("ADDED", "a"); dig(o, "spec", "sandboxTemplateRef", "name") != "nope" {
		t.Errorf("%v", o["spec"])
	}
	w.post(strings.Replace(claims, "default", "other", 1), claimBody("b", `"warmPoolRef":{"name":"nope"}`))
	s.wants("ADDED", "b")
	one := w.watch(claims + "/a?watch=true") // as old clients watch one
	one.wants("ADDED", "a")
	none := w.watch(claims + "?watch=True&timeoutSeconds=1&fieldSelector=metadata.name%3DNone")
	if rest := none.ends(); len(rest) != 0 {
		t.Errorf("a watch of what is not there says %q", rest)
	}
}

func TestAWatchWithAnInitialList(t *testing.T) {
	w := newWorld(t)
	w.post(claims, claimBody("a", `"warmPoolRef":{"name":"nope"}`))
	w.becomes(claims+"/a", "WarmPoolNotFound")
	s := w.watch(claims + "?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true")
	s.wants("ADDED", "a")
	kind, o := s.next()
	if kind != "BOOKMARK" || dig(o, "metadata", "annotations", "k8s.io/initial-events-end") != "true" || dig(o, "metadata", "resourceVersion") == nil {
		t.Errorf("%s %v", kind, o)
	}
}

func TestAWatchSeesWhatItsSelectorChooses(t *testing.T) {
	w := newWorld(t)
	w.post(claims, claimBody("a", `"warmPoolRef":{"name":"nope"}`))
	w.becomes(claims+"/a", "WarmPoolNotFound")
	s := w.watch(claims + "?watch=true&labelSelector=on%3Dyes")
	merge := []string{"Content-Type", "application/merge-patch+json"}
	w.ask("PATCH", claims+"/a", `{"metadata":{"labels":{"on":"yes"}}}`, merge...)
	s.wants("ADDED", "a")
	w.ask("PATCH", claims+"/a", `{"metadata":{"labels":{"more":"yes"}}}`, merge...)
	s.wants("MODIFIED", "a")
	w.ask("PATCH", claims+"/a", `{"metadata":{"labels":{"on":"no"}}}`, merge...)
	s.wants("DELETED", "a")
}

func TestAWatchAsATable(t *testing.T) {
	w := newWorld(t)
	s := w.watch(claims+"?watch=true", "Accept", asTable)
	w.post(claims, claimBody("a", `"warmPoolRef":{"name":"nope"}`))
	for i, columns := range []int{5, 0} {
		_, o := s.next()
		if l, _ := o["columnDefinitions"].([]any); o["kind"] != "Table" || len(l) != columns || dig(o, "rows", "object", "metadata", "name") != "a" {
			t.Errorf("event %d: %v", i, o)
		}
	}
}

func TestHistoryIsBounded(t *testing.T) {
	w := newWorld(t, func(w *world) { w.cfg.History = 10 })
	first := dig(w.post(claims, claimBody("a", `"warmPoolRef":{"name":"nope"}`)), "metadata", "resourceVersion").(string)
	w.becomes(claims+"/a", "WarmPoolNotFound")
	for i := range 20 {
		w.ask("PATCH", claims+"/a", fmt.Sprintf(`{"metadata":{"labels":{"n":"%d"}}}`, i), "Content-Type", "application/merge-patch+json")
	}
	wantStatus(t, w.ask("GET", claims+"?watch=true&resourceVersion="+first, ""), 410, "Expired")
	list := w.ask("GET", claims, "").json(t)
	s := w.watch(claims + "?watch=true&resourceVersion=" + dig(list, "metadata", "resourceVersion").(string))
	w.ask("DELETE", claims+"/a", "")
	s.wants("DELETED", "a")
}

func TestATenantHasSoManyWatches(t *testing.T) {
	w := newWorld(t, func(w *world) { w.cfg.MaxWatches = 2 })
	first := w.watch(claims + "?watch=true")
	w.watch(claims + "?watch=true")
	wantStatus(t, w.ask("GET", claims+"?watch=true", ""), 429, "TooManyRequests")
	if got := w.ask("GET", claims+"?watch=true&timeoutSeconds=1", "", "Authorization", "Bearer "+w.keys["globex"]); got.status != 200 {
		t.Errorf("another tenant: %d", got.status)
	}
	first.stop()
	w.eventually("there is room again", func() bool { return w.ask("GET", claims+"?watch=true&timeoutSeconds=1", "").status == 200 })
}

func TestWatchesEndWithTheServer(t *testing.T) {
	w := newWorld(t)
	s := w.watch(claims + "?watch=true")
	w.api.Quit()
	if rest := s.ends(); len(rest) != 0 {
		t.Errorf("%q", rest)
	}
}

func TestPodsAreWatchedThroughTheirSandboxes(t *testing.T) {
	w := newWorld(t)
	pods := "/api/v1/namespaces/default/pods"
	s := w.watch(pods + "?watch=true&labelSelector=!app")
	w.claimed("one")
	s.wants("ADDED", "one")
	for {
		kind, o := s.next()
		if kind != "MODIFIED" || o["kind"] != "Pod" || o["apiVersion"] != "v1" {
			t.Fatalf("%s %v", kind, o)
		}
		if dig(o, "status", "phase") == "Running" {
			break
		}
	}
	list := w.ask("GET", pods, "").json(t)
	later := w.watch(pods + "?watch=true&resourceVersion=" + dig(list, "metadata", "resourceVersion").(string))
	w.ask("PATCH", boxes+"/one", `{"spec":{"operatingMode":"Suspended"}}`, "Content-Type", "application/merge-patch+json")
	for _, each := range []*watching{s, later} {
		kind, o := each.next()
		for kind == "MODIFIED" {
			kind, o = each.next()
		}
		if kind != "DELETED" || dig(o, "metadata", "name") != "one" {
			t.Errorf("%s %v", kind, o)
		}
	}
	wantStatus(t, w.ask("GET", "/api/v1/namespaces/default/services?watch=true", ""), 405, "MethodNotAllowed")
}
