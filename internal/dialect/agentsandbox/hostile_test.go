package agentsandbox_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// logged is a log that can be read while it is written.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// listening gives a world a log.
func listening(l *logged) func(*world) {
	return func(w *world) { w.log = slog.New(slog.NewTextHandler(l, nil)) }
}

func templateBody(name, spec string) string {
	return `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"` + name + `"},"spec":{` + spec + `}}`
}

const jsonPatch, mergePatch = "application/json-patch+json", "application/merge-patch+json"

func TestNamesAreReadLetterByLetter(t *testing.T) {
	w := newWorld(t)
	const containers = `[{"name":"m","image":"base"}]`
	for name, spec := range map[string]string{
		"spec":        `"podTemplate":{"Spec":{"containers":` + containers + `}}`,
		"podTemplate": `"PodTemplate":{"spec":{"containers":` + containers + `}}`,
		"containers":  `"podTemplate":{"spec":{"Containers":` + containers + `}}`,
		"image":       `"podTemplate":{"spec":{"containers":[{"name":"m","IMAGE":"base"}]}}`,
		"a long s":    `"podTemplate":{"ſpec":{"containers":` + containers + `}}`,
		"no object":   `"podTemplate":{"spec":{"containers":[null]}}`,
	} {
		t.Run(name, func(t *testing.T) {
			wantStatus(t, w.ask("POST", tmpls, templateBody("odd", spec)), 422, "Invalid")
			box := `{"apiVersion":"agents.x-k8s.io/v1beta1","kind":"Sandbox","metadata":{"name":"odd"},"spec":{` + spec + `}}`
			wantStatus(t, w.ask("POST", boxes, box), 422, "Invalid")
		})
	}
	wantStatus(t, w.ask("POST", claims, claimBody("odd", `"WarmPoolRef":{"name":"python"}`)), 422, "Invalid")

	// What only looks like one of ours is as unknown as any other name.
	w.post(tmpls, templateBody("beside", `"PodTemplate":7,"podTemplate":{"Spec":{"containers":[]},"spec":{"Containers":[],"containers":`+containers+`}}`))
	w.claimed("beside", `"warmPoolRef":{"name":"beside"},"Env":[{"name":"A"}]`)
}

func TestObjectsAreNotDeep(t *testing.T) {
	w := newWorld(t)
	nested := func(levels int) string { return strings.Repeat("[", levels) + strings.Repeat("]", levels) }
	body := func(levels int) string {
		return strings.Replace(templateBody("deep", `"podTemplate":{"spec":{"containers":[{"name":"m","image":"base"}]}}`), `{`, `{"x":`+nested(levels)+`,`, 1)
	}
	for _, levels := range []int{100, 101, 9_999, 20_000} {
		wantStatus(t, w.ask("POST", tmpls, body(levels)), 400, "BadRequest")
	}
	w.post(tmpls, body(99))
	at := tmpls + "/deep"
	for name, c := range map[string]struct{ media, patch string }{
		"a merge":         {mergePatch, `{"spec":{"y":` + nested(99) + `}}`},
		"an add":          {jsonPatch, `[{"op":"add","path":"/y","value":` + nested(100) + `}]`},
		"an add below":    {jsonPatch, `[{"op":"add","path":"/x/0/0/0/-","value":` + nested(97) + `}]`},
		"a copy into":     {jsonPatch, `[{"op":"copy","from":"/x","path":"/x/-"}]`},
		"a move into":     {jsonPatch, `[{"op":"add","path":"/y","value":[]},{"op":"move","from":"/x","path":"/y/-"}]`},
		"very many moves": {jsonPatch, `[` + strings.Repeat(`{"op":"copy","from":"/x","path":"/x/0/0/0/0/0/0/0/0/-"},`, 9) + `{"op":"test","path":"/kind","value":"SandboxTemplate"}]`},
	} {
		t.Run(name, func(t *testing.T) {
			wantStatus(t, w.ask("PATCH", at, c.patch, "Content-Type", c.media), 400, "BadRequest")
		})
	}
	w.again()
	if got := w.ask("GET", at, ""); got.status != http.StatusOK {
		t.Errorf("after another start: %d %.300s", got.status, got.body)
	}
}

func TestWhatCannotBeReadStaysAsItIs(t *testing.T) {
	var log logged
	w := newWorld(t, listening(&log))
	fine, noBox, noClaim := w.claimed("fine"), w.claimed("no-box"), w.claimed("no-claim")
	w.api.Close()
	for kind, name := range map[string]string{"sandboxes": "no-box", "sandboxclaims": "no-claim", "sandboxtemplates": "nothing", "sandboxwarmpools": "elsewhere"} {
		body := `{"version":"v1beta1","body":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`
		if kind == "sandboxwarmpools" {
			body = `{"version":"v1beta1","body":{"metadata":{"name":"other","namespace":"default"}}}`
		}
		if err := w.store.PutDocument(t.Context(), "acme", "agentsandbox."+kind, "default/"+name, []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	w.again()
	for _, name := range []string{"no-box", "no-claim", "nothing", "elsewhere"} {
		if !log.has("object=default/" + name) {
			t.Errorf("nobody is told of %s", name)
		}
	}
	w.becomes(claims+"/fine", "DependenciesReady")
	w.claimed("another") // by then the others were looked at
	if w.id("fine") != fine || w.state(fine) != sandbox.StateRunning || w.state(noBox) != sandbox.StateRunning || w.state(noClaim) != sandbox.StateRunning {
		t.Errorf("sandboxes of what is there are %s, %s and %s", w.state(fine), w.state(noBox), w.state(noClaim))
	}
	wantStatus(t, w.ask("GET", claims+"/no-claim", ""), 404, "NotFound")
	w.post(tmpls, templateBody("nothing", `"podTemplate":{"spec":{"containers":[{"name":"m","image":"base"}]}}`))
	w.claimed("of-new", `"warmPoolRef":{"name":"nothing"}`)
}

func TestADefectIsOneObjects(t *testing.T) {
	var log logged
	w := newWorld(t, listening(&log))
	w.runtime.mu.Lock()
	w.runtime.panics = 6
	w.runtime.mu.Unlock()
	w.post(claims, claimBody("one"))
	w.becomes(boxes+"/one", "ReconcilerError")
	w.becomes(claims+"/one", "ReconcilerError")
	if !log.has("a defect") || !log.has("name=one") {
		t.Error("the operator is told nothing")
	}
	w.becomes(claims+"/one", "DependenciesReady")
	w.claimed("two")
}

func TestADeleteDuringAResume(t *testing.T) {
	var log logged
	w := newWorld(t, listening(&log))
	w.post(boxes, boxBody("one", "base"))
	w.becomes(boxes+"/one", "DependenciesReady")
	id := w.id("one")
	mode := func(m string) {
		t.Helper()
		if got := w.ask("PATCH", boxes+"/one", `{"spec":{"operatingMode":"`+m+`"}}`, "Content-Type", mergePatch); got.status != 200 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	mode("Suspended")
	w.becomes(boxes+"/one", "SandboxSuspended")
	deleted := make(chan int, 1)
	w.domain.mu.Lock()
	w.domain.resumed = func() { deleted <- w.ask("DELETE", boxes+"/one", "").status }
	w.domain.mu.Unlock()
	mode("Running")
	if status := <-deleted; status != 200 {
		t.Fatalf("deleted: %d", status)
	}
	w.eventually("its sandbox ends", func() bool { return w.state(id) == sandbox.StateEnded })
	w.post(boxes, boxBody("one", "base"))
	w.becomes(boxes+"/one", "DependenciesReady")
	if log.has("defect") {
		t.Errorf("a worker has panicked:\n%s", &log.text)
	}
}

func TestADeleteThatIsNotWrittenIsTriedAgain(t *testing.T) {
	past := `"shutdownTime":"` + time.Now().Add(-time.Hour).UTC().Format(time.RFC3339) + `"`
	for name, c := range map[string]struct{ at, patch, gone string }{
		"a claim":              {claims, `{"spec":{"lifecycle":{` + past + `,"shutdownPolicy":"Delete"}}}`, claims},
		"a claim that is kept": {claims, `{"spec":{"lifecycle":{` + past + `,"shutdownPolicy":"Retain"}}}`, boxes},
		"a Sandbox of a claim": {boxes, `{"spec":{` + past + `,"shutdownPolicy":"Delete"}}`, boxes},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			id := w.claimed("one")
			w.kept.setRefuse(true)
			if got := w.ask("PATCH", c.at+"/one", c.patch, "Content-Type", mergePatch); got.status != 200 {
				t.Fatalf("%d %s", got.status, got.body)
			}
			w.eventually("it is tried four times", func() bool { return len(w.kept.failures()) >= 4 })
			if f := w.kept.failures(); f[3].Sub(f[0]) < 60*time.Millisecond { // 10, 20 and 40 between them
				t.Errorf("tried four times in %v", f[3].Sub(f[0]))
			}
			if got := w.ask("GET", c.gone+"/one", ""); got.status != 200 || w.state(id) != sandbox.StateRunning {
				t.Errorf("while it cannot be deleted: %d, and the sandbox is %s", got.status, w.state(id))
			}
			w.kept.setRefuse(false)
			w.eventually("it is gone", func() bool { return w.ask("GET", c.gone+"/one", "").status == 404 })
			w.eventually("so is its sandbox", func() bool { return w.state(id) == sandbox.StateEnded })
		})
	}
}

func TestADeleteOfManyTellsOfThoseThatStay(t *testing.T) {
	w := newWorld(t)
	w.claimed("one")
	w.kept.setRefuse(true)
	wantStatus(t, w.ask("DELETE", claims, ""), 503, "ServiceUnavailable")
	w.kept.setRefuse(false)
	if got := w.ask("DELETE", claims, ""); got.status != 200 {
		t.Errorf("%d %s", got.status, got.body)
	}
	wantStatus(t, w.ask("GET", claims+"/one", ""), 404, "NotFound")
}

func TestVersionsGoOnWhenAClockGoesBack(t *testing.T) {
	w := newWorld(t)
	w.claimed("one")
	ahead := uint64(time.Now().Add(time.Hour).UnixMicro())
	doc := fmt.Sprintf(`{"version":"v1beta1","body":{"metadata":{"name":"late","namespace":"default","uid":"u","resourceVersion":"%d"},"spec":{"sandboxTemplateRef":{"name":"python"}}}}`, ahead)
	if err := w.store.PutDocument(t.Context(), "acme", "agentsandbox.sandboxwarmpools", "default/late", []byte(doc)); err != nil {
		t.Fatal(err)
	}
	w.again()
	version := func(o map[string]any) uint64 {
		t.Helper()
		rv, err := strconv.ParseUint(dig(o, "metadata", "resourceVersion").(string), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return rv
	}
	listed := version(w.ask("GET", claims, "").json(t))
	if made := version(w.post(claims, claimBody("two"))); listed <= ahead || made <= listed {
		t.Errorf("versions %d and %d after %d", listed, made, ahead)
	}
	for _, unknown := range []uint64{ahead, uint64(time.Now().Add(2 * time.Hour).UnixMicro())} {
		wantStatus(t, w.ask("GET", fmt.Sprintf("%s?watch=true&resourceVersion=%d", claims, unknown), ""), 410, "Expired")
	}
}

func TestOldEventsAreNotReadAgain(t *testing.T) {
	w := newWorld(t)
	w.claimed("one")
	w.again()
	w.eventually("events are followed", func() bool { return len(w.domain.queries()) == 2 })
	q := w.domain.queries()
	if !q[0].Last || q[0].Follow || !q[1].Follow || q[1].Last || q[1].After == 0 {
		t.Errorf("asked for %+v", q)
	}
}
