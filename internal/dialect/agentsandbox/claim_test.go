package agentsandbox_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestAClaimBecomesASandbox(t *testing.T) {
	w := newWorld(t)
	made := w.post(claims, claimBody("one"))
	for _, field := range []string{"uid", "resourceVersion", "creationTimestamp"} {
		if s, _ := dig(made, "metadata", field).(string); s == "" {
			t.Errorf("no %s: %v", field, made)
		}
	}
	claim := w.becomes(claims+"/one", "DependenciesReady")
	if dig(claim, "status", "sandbox", "name") != "one" || dig(claim, "status", "sandbox", "podIPs") == nil {
		t.Errorf("status %v", claim["status"])
	}
	box := w.ask("GET", boxes+"/one", "").json(t)
	if status, _, message := conditionOf(box, "Ready"); status != "True" || message != "Pod is Ready" {
		t.Errorf("the Sandbox is %v", box["status"])
	}
	if dig(box, "metadata", "annotations", "agents.x-k8s.io/pod-name") != "one" || !strings.HasPrefix(dig(box, "status", "selector").(string), "agents.x-k8s.io/sandbox-name-hash=") {
		t.Errorf("what the client reads: %v", box)
	}
	if dig(box, "metadata", "ownerReferences", "uid") != dig(claim, "metadata", "uid") {
		t.Errorf("owners: %v", dig(box, "metadata", "ownerReferences"))
	}
	id := w.id("one")
	if !w.runtime.has(id) {
		t.Error("it is ready, and the runtime was not prepared")
	}
	sb, err := w.manager.Get(t.Context(), auth.Principal{Tenant: "acme"}, id)
	if err != nil || sb.Template != "python" || !sb.Deadline.IsZero() {
		t.Errorf("%+v, %v", sb, err)
	}
	if got := w.ask("DELETE", claims+"/one", ""); got.status != 200 || got.json(t)["status"] != "Success" {
		t.Errorf("delete: %d %s", got.status, got.body)
	}
	for _, path := range []string{claims + "/one", boxes + "/one"} {
		wantStatus(t, w.ask("GET", path, ""), 404, "NotFound")
	}
	w.eventually("the sandbox ends", func() bool { return w.state(id) == sandbox.StateEnded })
}

func TestAnOldClaimBecomesASandboxToo(t *testing.T) {
	w := newWorld(t)
	w.post(oldClaims, `{"apiVersion":"extensions.agents.x-k8s.io/v1alpha1","kind":"SandboxClaim","metadata":{"name":"old","annotations":{}},"spec":{"sandboxTemplateRef":{"name":"python"}}}`)
	w.becomes(oldClaims+"/old", "DependenciesReady")
	box := w.ask("GET", oldBoxes+"/old", "").json(t)
	if dig(box, "spec", "replicas") != 1.0 || dig(box, "status", "replicas") != 1.0 || dig(box, "status", "nodeName") != nil {
		t.Errorf("%v", box)
	}
	if _, reason, _ := conditionOf(box, "PodScheduled"); reason != "" {
		t.Error("the older version has no PodScheduled")
	}
	if got := w.ask("GET", claims+"/old", "").json(t); dig(got, "spec", "warmPoolRef", "name") != "shadow-pool-python" || dig(got, "spec", "sandboxTemplateRef") != nil {
		t.Errorf("in the newer version: %v", got["spec"])
	}
}

func TestWhatCannotBeHadIsSaidAtOnce(t *testing.T) {
	w := newWorld(t)
	w.post(tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"strict"},"spec":{"podTemplate":{"metadata":{"labels":{"sandbox.users.io/set":"here"}},"spec":{"containers":[{"name":"main","image":"base","env":[{"name":"A","value":"1"}]}]}}}}`)
	w.post(tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"some"},"spec":{"envVarsInjectionPolicy":"Allowed","podTemplate":{"spec":{"containers":[{"name":"main","image":"base","env":[{"name":"A","value":"1"}]}]}}}}`)
	w.post(tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"elsewhere"},"spec":{"envVarsInjectionPolicy":"Allowed","podTemplate":{"spec":{"containers":[{"name":"main","image":"base","envFrom":[{}]}]}}}}`)
	w.post(pools, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxWarmPool","metadata":{"name":"empty"},"spec":{"sandboxTemplateRef":{"name":"nowhere"}}}`)
	for name, c := range map[string]struct{ spec, reason, says string }{
		"no-pool":       {`"warmPoolRef":{"name":"nope"}`, "WarmPoolNotFound", "python-3.12"},
		"no-template":   {`"warmPoolRef":{"name":"empty"}`, "TemplateNotFound", "nowhere"},
		"not-built":     {`"warmPoolRef":{"name":"lost"}`, "WarmPoolNotFound", "lost"},
		"label":         {`"warmPoolRef":{"name":"python"},"additionalPodMetadata":{"labels":{"team":"a"}}`, "InvalidMetadata", "sandbox.users.io"},
		"router":        {`"warmPoolRef":{"name":"python"},"additionalPodMetadata":{"labels":{"app":"sandbox-router"}}`, "InvalidMetadata", "app"},
		"taken":         {`"warmPoolRef":{"name":"strict"},"additionalPodMetadata":{"labels":{"sandbox.users.io/set":"there"}}`, "InvalidMetadata", "template"},
		"annotation":    {`"warmPoolRef":{"name":"python"},"additionalPodMetadata":{"annotations":{"x.kubernetes.io/a":"b"}}`, "InvalidMetadata", "kubernetes.io"},
		"env":           {`"warmPoolRef":{"name":"strict"},"env":[{"name":"B","value":"2"}]`, "EnvVarsInjectionRejected", "no environment"},
		"env-again":     {`"warmPoolRef":{"name":"some"},"env":[{"name":"A","value":"2"}]`, "EnvVarsInjectionRejected", `"A"`},
		"env-from":      {`"warmPoolRef":{"name":"elsewhere"},"env":[{"name":"A","value":"2"}]`, "EnvVarsInjectionRejected", "envFrom"},
		"env-container": {`"warmPoolRef":{"name":"python"},"env":[{"name":"A","value":"2","containerName":"other"}]`, "EnvVarsInjectionRejected", "other"},
		"volumes":       {`"warmPoolRef":{"name":"python"},"volumeClaimTemplates":[{"metadata":{"name":"v"}}]`, "VolumeClaimTemplatesError", "volume"},
		"expired":       {`"warmPoolRef":{"name":"python"},"lifecycle":{"shutdownTime":"2001-01-01T00:00:00Z"}`, "ClaimExpired", "expired"},
	} {
		t.Run(name, func(t *testing.T) {
			w.post(claims, claimBody(name, c.spec))
			o := w.becomes(claims+"/"+name, c.reason)
			if status, _, message := conditionOf(o, "Ready"); status != "False" || !strings.Contains(message, c.says) {
				t.Errorf("%v, want %q", o["status"], c.says)
			}
			if got := w.ask("GET", boxes+"/"+name, ""); got.status != 404 {
				t.Errorf("there is a Sandbox: %s", got.body)
			}
		})
	}
	n := 0
	w.manager.Each(func(sandbox.Sandbox) bool { n++; return true })
	if n != 0 {
		t.Errorf("%d sandboxes were made", n)
	}
}

func TestTheOldVersionKnowsPoolsByTheirTemplate(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct{ spec, reason string }{
		"no-template": {`"sandboxTemplateRef":{"name":"nope"}`, "TemplateNotFound"},
		"no-pool":     {`"sandboxTemplateRef":{"name":"python"},"warmpool":"nope"`, "WarmPoolNotFound"},
		"default":     {`"sandboxTemplateRef":{"name":"python"},"warmpool":"default"`, "DependenciesReady"},
		"none":        {`"sandboxTemplateRef":{"name":"python"},"warmpool":"none"`, "DependenciesReady"},
	} {
		w.post(oldClaims, `{"apiVersion":"extensions.agents.x-k8s.io/v1alpha1","kind":"SandboxClaim","metadata":{"name":"`+name+`"},"spec":{`+c.spec+`}}`)
		w.becomes(oldClaims+"/"+name, c.reason)
	}
}

func TestAClaimThatWaitsForATemplateGetsIt(t *testing.T) {
	w := newWorld(t)
	w.post(claims, claimBody("early", `"warmPoolRef":{"name":"mine"}`))
	w.becomes(claims+"/early", "WarmPoolNotFound")
	w.post(pools, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxWarmPool","metadata":{"name":"mine"},"spec":{"replicas":3,"sandboxTemplateRef":{"name":"own"}}}`)
	w.becomes(claims+"/early", "TemplateNotFound")
	if got := w.ask("GET", pools+"/mine", "").json(t); dig(got, "status", "readyReplicas") != 0.0 || dig(got, "status", "replicas") != 3.0 {
		t.Errorf("a pool without a template: %v", got["status"])
	}
	w.post(tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"own"},"spec":{"podTemplate":{"spec":{"containers":[{"name":"main","image":"base"}]}}}}`)
	w.becomes(claims+"/early", "DependenciesReady")
	if got := w.ask("GET", pools+"/mine", "").json(t); dig(got, "status", "readyReplicas") != 3.0 {
		t.Errorf("a pool with its template: %v", got["status"])
	}
}

func TestTheEnvironmentOfAClaimReachesTheSandbox(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("env", `"warmPoolRef":{"name":"python"}`, `"env":[{"name":"TOKEN","value":"s3cret"}]`)
	agent, err := w.manager.Agent(t.Context(), auth.Principal{Tenant: "acme"}, id)
	if err != nil {
		t.Fatal(err)
	}
	if got := run(t, agent, `printf %s "$TOKEN"`); got != "s3cret" {
		t.Errorf("%q", got)
	}
}

func TestDeletingAClaimThatIsBeingMadeLeavesNothing(t *testing.T) {
	w := newWorld(t)
	let := w.images.hold()
	defer let()
	w.post(boxes, boxBody("slow", "slow-image"))
	w.eventually("the image is asked for", func() bool { w.images.mu.Lock(); defer w.images.mu.Unlock(); return len(w.images.asked) == 1 })
	if got := w.ask("DELETE", boxes+"/slow", ""); got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	let()
	w.post(boxes, boxBody("slow", "base"))
	w.becomes(boxes+"/slow", "DependenciesReady")
	n := 0
	w.manager.Each(func(sandbox.Sandbox) bool { n++; return true })
	if n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

func TestWhatMayWorkLaterIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	w.runtime.refuse = 2
	w.driver.setRefuse(fault.New(fault.Exhausted, "no room"))
	w.post(claims, claimBody("patient"))
	w.eventually("it says why", func() bool {
		_, _, message := w.ready(boxes + "/patient")
		return message == "no room"
	})
	w.driver.setRefuse(nil)
	w.becomes(claims+"/patient", "DependenciesReady")
}

func TestAClaimEndsWhenItSays(t *testing.T) {
	w := newWorld(t)
	late := time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano)
	del := w.claimed("del", `"warmPoolRef":{"name":"python"}`, `"lifecycle":{"shutdownTime":"`+late+`","shutdownPolicy":"Delete"}`)
	keep := w.claimed("keep", `"warmPoolRef":{"name":"python"}`, `"lifecycle":{"shutdownTime":"`+late+`"}`)
	soon := `{"spec":{"lifecycle":{"shutdownTime":"` + time.Now().Add(time.Second).UTC().Format(time.RFC3339Nano) + `"}}}`
	for _, name := range []string{"del", "keep"} {
		if got := w.ask("PATCH", claims+"/"+name, soon, "Content-Type", "application/merge-patch+json"); got.status != 200 {
			t.Fatalf("%s: %d %s", name, got.status, got.body)
		}
	}
	w.eventually("the first is deleted", func() bool { return w.ask("GET", claims+"/del", "").status == http.StatusNotFound })
	w.becomes(claims+"/keep", "ClaimExpired")
	for _, name := range []string{"del", "keep"} {
		if got := w.ask("GET", boxes+"/"+name, ""); got.status != 404 {
			t.Errorf("the Sandbox %s is there: %s", name, got.body)
		}
	}
	for _, id := range []string{del, keep} {
		w.eventually("the sandbox ends", func() bool { return w.state(id) == sandbox.StateEnded })
	}
}

func TestASandboxThatEndsIsFinished(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("ends", `"warmPoolRef":{"name":"python"}`, `"lifecycle":{"ttlSecondsAfterFinished":1,"shutdownPolicy":"Delete"}`)
	if _, err := w.manager.Kill(t.Context(), auth.Principal{Tenant: "acme"}, id); err != nil {
		t.Fatal(err)
	}
	claim := w.becomes(claims+"/ends", "PodFailed")
	if status, _, message := conditionOf(claim, "Finished"); status != "True" || !strings.Contains(message, "killed") {
		t.Errorf("%v", claim["status"])
	}
	w.eventually("its time passes", func() bool { return w.ask("GET", claims+"/ends", "").status == http.StatusNotFound })
}

func TestASandboxCanBeSuspended(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("rest")
	patch := func(path, body string) {
		t.Helper()
		if got := w.ask("PATCH", path, body, "Content-Type", "application/merge-patch+json"); got.status != 200 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	patch(boxes+"/rest", `{"spec":{"operatingMode":"Suspended"}}`)
	box := w.becomes(boxes+"/rest", "SandboxSuspended")
	if status, reason, _ := conditionOf(box, "Suspended"); status != "True" || reason != "PodTerminated" || dig(box, "status", "podIPs") != nil {
		t.Errorf("%v", box["status"])
	}
	w.becomes(claims+"/rest", "SandboxSuspended")
	if w.state(id) != sandbox.StatePaused {
		t.Errorf("it is %s", w.state(id))
	}
	if got := w.ask("GET", "/api/v1/namespaces/default/pods/rest", ""); got.status != 404 {
		t.Errorf("there is a Pod: %s", got.body)
	}
	patch(oldBoxes+"/rest", `{"spec":{"replicas":1}}`)
	w.becomes(boxes+"/rest", "DependenciesReady")
	w.becomes(claims+"/rest", "DependenciesReady")
	if w.state(id) != sandbox.StateRunning {
		t.Errorf("it is %s", w.state(id))
	}

	if _, err := w.manager.Pause(t.Context(), auth.Principal{Tenant: "acme"}, id, sandbox.PauseSpec{}); err != nil {
		t.Fatal(err)
	}
	w.becomes(boxes+"/rest", "SandboxSuspended")
	if _, err := w.manager.Resume(t.Context(), auth.Principal{Tenant: "acme"}, id, 0); err != nil {
		t.Fatal(err)
	}
	w.becomes(boxes+"/rest", "DependenciesReady")
}

func TestWhatCannotPauseSaysSo(t *testing.T) {
	w := newWorld(t, func(w *world) { w.driver.pause = false })
	w.claimed("rest")
	w.ask("PATCH", boxes+"/rest", `{"spec":{"operatingMode":"Suspended"}}`, "Content-Type", "application/merge-patch+json")
	w.eventually("it says so", func() bool {
		_, _, message := conditionOf(w.ask("GET", boxes+"/rest", "").json(t), "Suspended")
		return strings.Contains(message, "cannot pause")
	})
	if status, _, _ := w.ready(boxes + "/rest"); status != "True" {
		t.Error("it is not ready any more")
	}
}

func TestASandboxWithoutAClaim(t *testing.T) {
	w := newWorld(t)
	w.post(boxes, boxBody("alone", "base"))
	w.becomes(boxes+"/alone", "DependenciesReady")
	if sb, err := w.manager.Get(t.Context(), auth.Principal{Tenant: "acme"}, w.id("alone")); err != nil || sb.Template != "base" {
		t.Errorf("%+v, %v", sb, err)
	}
	w.post(boxes, boxBody("asleep", "base", `"operatingMode":"Suspended"`))
	w.becomes(boxes+"/asleep", "SandboxSuspended")
	if w.state(w.id("asleep")) != "" {
		t.Error("it was started")
	}
	w.post(boxes, boxBody("wrong", "no/such:image"))
	w.becomes(boxes+"/wrong", "ReconcilerError")
	soon := time.Now().Add(time.Second).UTC().Format(time.RFC3339Nano)
	w.post(boxes, boxBody("brief", "base", `"shutdownTime":"`+soon+`"`))
	w.becomes(boxes+"/brief", "SandboxExpired")
	w.post(claims, claimBody("alone"))
	w.becomes(claims+"/alone", "AdoptionConflict")
	w.ask("DELETE", claims+"/alone", "")
	if got := w.ask("GET", boxes+"/alone", ""); got.status != 200 {
		t.Errorf("a claim took a Sandbox along that is not its own: %d", got.status)
	}
}

func TestASandboxThatIsDeletedIsMissed(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("gone")
	w.ask("DELETE", boxes+"/gone", "")
	w.becomes(claims+"/gone", "SandboxMissing")
	w.eventually("the sandbox ends", func() bool { return w.state(id) == sandbox.StateEnded })
}

func TestClaimsSurviveARestart(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("stays")
	before := w.ask("GET", claims+"/stays", "").json(t)
	lost := w.claimed("ends-meanwhile")
	orphan := w.claimed("orphan")
	w.post(claims, claimBody("refused", `"warmPoolRef":{"name":"nope"}`))
	w.becomes(claims+"/refused", "WarmPoolNotFound")
	w.api.Close()
	if _, err := w.manager.Kill(t.Context(), auth.Principal{Tenant: "acme"}, lost); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"agentsandbox.sandboxclaims", "agentsandbox.sandboxes"} { // as a server that was killed in a delete leaves it
		if err := w.store.DeleteDocument(t.Context(), "acme", kind, "default/orphan"); err != nil {
			t.Fatal(err)
		}
	}
	w.again()
	after := w.ask("GET", claims+"/stays", "").json(t)
	if dig(after, "metadata", "uid") != dig(before, "metadata", "uid") || dig(after, "status", "sandbox", "name") != "stays" || w.id("stays") != id {
		t.Errorf("%v, then %v", before, after)
	}
	w.becomes(claims+"/stays", "DependenciesReady")
	w.becomes(claims+"/ends-meanwhile", "PodFailed")
	w.becomes(claims+"/refused", "WarmPoolNotFound")
	w.eventually("the orphan ends", func() bool { return w.state(orphan) == sandbox.StateEnded })
	rv := dig(w.post(claims, claimBody("new")), "metadata", "resourceVersion").(string)
	if old := dig(after, "metadata", "resourceVersion").(string); len(rv) == len(old) && rv <= old {
		t.Errorf("version %s after %s", rv, old)
	}
	wantStatus(t, w.ask("GET", claims+"?watch=true&resourceVersion="+dig(before, "metadata", "resourceVersion").(string), ""), 410, "Expired")
}

func TestTheLifetimeOfASandboxIsItsClaims(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("one")
	deadline := func() time.Time {
		t.Helper()
		sb, err := w.manager.Get(t.Context(), auth.Principal{Tenant: "acme"}, id)
		if err != nil {
			t.Fatal(err)
		}
		return sb.Deadline
	}
	for _, left := range []time.Duration{time.Hour, 2 * time.Hour, 30 * time.Minute, 0} {
		value, want := "null", time.Time{}
		asked := time.Now()
		if left > 0 {
			want = time.Now().Add(left).Truncate(time.Second)
			value = `"` + want.UTC().Format(time.RFC3339) + `"`
		}
		got := w.ask("PATCH", claims+"/one", `{"spec":{"lifecycle":{"shutdownTime":`+value+`}}}`, "Content-Type", "application/merge-patch+json")
		if got.status != 200 {
			t.Fatalf("%d %s", got.status, got.body)
		}
		w.eventually("it ends in "+left.String(), func() bool {
			if left == 0 {
				return deadline().IsZero()
			}
			// The server turns the time into a lifetime and back: as late as that takes.
			off := deadline().Sub(want)
			return off > -2*time.Second && off < time.Since(asked)+2*time.Second
		})
	}
}

func TestCreate_DiskFull(t *testing.T) {
	var full atomic.Bool
	w := newWorld(t, func(w *world) {
		w.cfg.Space = func(int64) error {
			if full.Load() {
				return fault.New(fault.DiskFull, "the server's disk is full")
			}
			return nil
		}
	})
	w.claimed("there")
	full.Store(true)
	got := w.ask("POST", claims, claimBody("new"))
	if got.status != http.StatusInsufficientStorage || !strings.Contains(string(got.body), "disk is full") {
		t.Errorf("a new object: %d %s", got.status, got.body)
	}
	if got := w.ask("POST", claims, claimBody("there")); got.status != http.StatusConflict {
		t.Errorf("an object that is there: %d %s", got.status, got.body)
	}
	if got := w.ask("DELETE", claims+"/there", ""); got.status != http.StatusOK {
		t.Errorf("a removal: %d %s", got.status, got.body)
	}
	full.Store(false)
	w.claimed("new")
}
