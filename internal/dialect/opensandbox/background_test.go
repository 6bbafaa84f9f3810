package opensandbox_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/sandbox"
)

func quickly(c *opensandbox.Config) { c.Hold = time.Millisecond }

const slow = `{"image":{"uri":"slow"},"metadata":{"k":"v"},"timeout":300,` + idle + `}`

func TestACreateThatTakesLongGoesOnInTheBackground(t *testing.T) {
	w := newWorld(t, quickly)
	let := w.images.hold()
	got := w.ask("POST", "/v1/sandboxes", slow)
	id := got.json(t)["id"].(string)
	if state, _ := w.state(id); got.status != http.StatusAccepted || state != "Pending" || strings.Contains(got.body, ":null") {
		t.Fatalf("%d %s, then %s", got.status, got.body, state)
	}
	list := w.ask("GET", "/v1/sandboxes?state=pending&metadata=k%3Dv", "").json(t)["items"].([]any)
	if len(list) != 1 || list[0].(map[string]any)["expiresAt"] == nil {
		t.Errorf("the listing has %v", list)
	}
	ep := w.ask("GET", "/v1/sandboxes/"+id+"/endpoints/44772", "").json(t)
	token := ep["headers"].(map[string]any)["OpenSandbox-Secure-Access"].(string)
	ping := func() reply {
		return w.ask("GET", "/sandboxes/"+id+"/proxy/44772/ping", "", "OPEN-SANDBOX-API-KEY", "", "OpenSandbox-Secure-Access", token)
	}
	wantFault(t, ping(), 503, "DOCKER::SANDBOX_NOT_RUNNING")
	for path, method := range map[string]string{"/pause": "POST", "/resume": "POST", "/snapshots": "POST"} {
		if got := w.ask(method, "/v1/sandboxes/"+id+path, ""); got.status != http.StatusConflict {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	let()
	w.eventually("it runs", func() bool { state, _ := w.state(id); return state == "Running" })
	if got := ping(); got.status != 200 || !strings.HasPrefix(got.body, "execd|GET|/ping||"+id+"|acme|") {
		t.Errorf("%d %s", got.status, got.body)
	}
}

func TestACreateThatFailsInTheBackgroundIsSeenForAWhile(t *testing.T) {
	w := newWorld(t, quickly)
	let := w.images.hold()
	id := w.ask("POST", "/v1/sandboxes", strings.Replace(slow, "slow", "slow/missing", 1)).json(t)["id"].(string)
	let()
	w.eventually("it has failed", func() bool { state, _ := w.state(id); return state == "Failed" })
	v := w.ask("GET", "/v1/sandboxes/"+id, "").json(t)["status"].(map[string]any)
	if v["reason"] != "DOCKER::SANDBOX_IMAGE_PULL_FAILED" || !strings.Contains(v["message"].(string), "slow/missing is missing") {
		t.Errorf("%v", v)
	}
	if got := w.ask("DELETE", "/v1/sandboxes/"+id, ""); got.status != http.StatusNoContent {
		t.Errorf("%d %s", got.status, got.body)
	}
	if state, _ := w.state(id); state != "" {
		t.Errorf("it is %s", state)
	}
}

func TestADeleteOfWhatIsBeingMadeLeavesNothing(t *testing.T) {
	w := newWorld(t, quickly)
	defer w.images.hold()()
	id := w.ask("POST", "/v1/sandboxes", slow).json(t)["id"].(string)
	if got := w.ask("DELETE", "/v1/sandboxes/"+id, ""); got.status != http.StatusNoContent {
		t.Errorf("%d %s", got.status, got.body)
	}
	w.nothing()
}

func TestACallerWhoLeavesLeavesNothing(t *testing.T) {
	w := newWorld(t)
	defer w.images.hold()()
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "POST", w.URL+"/v1/sandboxes", strings.NewReader(slow))
	req.Header.Set("OPEN-SANDBOX-API-KEY", w.keys["acme"])
	done := make(chan error, 1)
	go func() {
		_, err := http.DefaultTransport.RoundTrip(req)
		done <- err
	}()
	w.eventually("it is being made", func() bool {
		return len(w.ask("GET", "/v1/sandboxes", "").json(t)["items"].([]any)) == 1
	})
	cancel()
	if err := <-done; err == nil {
		t.Error("the request was answered")
	}
	w.nothing()
}

// nothing waits until there is no sandbox.
func (w *world) nothing() {
	w.t.Helper()
	w.eventually("nothing is left", func() bool {
		return len(w.ask("GET", "/v1/sandboxes", "").json(w.t)["items"].([]any)) == 0 && w.manager.Running(w.who(), "") == 0
	})
}

func TestAServerThatStopsEndsWhatItMakes(t *testing.T) {
	w := newWorld(t, quickly)
	defer w.images.hold()()
	w.ask("POST", "/v1/sandboxes", slow)
	w.Server.Close()
	done := make(chan struct{})
	go func() { w.api.Close(); close(done) }()
	select {
	case <-done:
	case <-time.After(2 * time.Minute):
		t.Fatal("Close waits for a pull")
	}
}

func TestASandboxEndsWithItsEntrypoint(t *testing.T) {
	w := newWorld(t)
	for script, want := range map[string]string{"echo out; exit 0": "Terminated", "echo out; exit 3": "Failed"} {
		t.Run(want, func(t *testing.T) {
			got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["sh","-c","`+script+`"]}`)
			if got.status != http.StatusAccepted {
				t.Fatalf("%d %s", got.status, got.body)
			}
			id := got.json(t)["id"].(string)
			w.eventually("its entrypoint is over", func() bool { state, _ := w.state(id); return state == want })
			w.eventually("the listing, which is read from the database, has it", func() bool {
				return len(w.ask("GET", "/v1/sandboxes?state="+want, "").json(t)["items"].([]any)) == 1
			})
			logs := w.ask("GET", "/v1/sandboxes/"+id+"/diagnostics/logs", "")
			if logs.body != "out\n" || logs.header.Get("Deprecation") != "true" {
				t.Errorf("its log is %q", logs.body)
			}
			wantFault(t, w.ask("GET", "/sandboxes/"+id+"/proxy/44772/ping", ""), 409, "DOCKER::SANDBOX_NOT_RUNNING")
			wantFault(t, w.ask("POST", "/v1/sandboxes/"+id+"/pause", ""), 409, "DOCKER::SANDBOX_NOT_RUNNING")
			wantFault(t, w.ask("POST", "/v1/sandboxes/"+id+"/snapshots", ""), 409, "SNAPSHOT::INVALID_SOURCE_STATE")
			if got := w.ask("DELETE", "/v1/sandboxes/"+id, ""); got.status != http.StatusNoContent {
				t.Errorf("%d %s", got.status, got.body)
			}
			if state, _ := w.state(id); state != "" {
				t.Errorf("it is still %s", state)
			}
			w.nothing()
		})
	}
}

func TestAHookRunsBeforeTheEntrypoint(t *testing.T) {
	w := newWorld(t)
	file := filepath.Join(t.TempDir(), "made")
	got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["sh","-c","cat `+file+`"],
		"lifecycle":{"preStart":{"command":["sh","-c","sleep 0.2; echo $WORD > `+file+`"],"timeoutSeconds":null},"periodic":[]},"env":{"WORD":"hello"}}`)
	if got.status != http.StatusAccepted {
		t.Fatalf("%d %s", got.status, got.body)
	}
	id := got.json(t)["id"].(string)
	w.eventually("its entrypoint is over", func() bool { state, _ := w.state(id); return state == "Terminated" })
	if logs := w.ask("GET", "/v1/sandboxes/"+id+"/diagnostics/logs", ""); logs.body != "hello\n" {
		t.Errorf("the entrypoint found %q", logs.body)
	}
}

func TestAHookThatTakesLongKeepsItsSandboxPending(t *testing.T) {
	w := newWorld(t, func(c *opensandbox.Config) { c.Hold = 50 * time.Millisecond })
	file := filepath.Join(t.TempDir(), "go")
	id := w.create(`"lifecycle":{"preStart":{"command":["sh","-c","until [ -e ` + file + ` ]; do sleep 0.02; done"]}}`)
	w.eventually("it is pending for its hook", func() bool {
		state, message := w.state(id)
		return state == "Pending" && strings.Contains(message, "hook")
	})
	wantFault(t, w.ask("GET", "/sandboxes/"+id+"/proxy/44772/ping", ""), 503, "DOCKER::SANDBOX_NOT_RUNNING")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.eventually("the hook is over", func() bool { state, _ := w.state(id); return state == "Running" })
	other := w.create(`"lifecycle":{"preStart":{"command":["sleep","60"]}}`)
	if got := w.ask("DELETE", "/v1/sandboxes/"+other, ""); got.status != http.StatusNoContent {
		t.Errorf("%d %s", got.status, got.body)
	}
	if state, _ := w.state(other); state != "" {
		t.Errorf("it is %s", state)
	}
}

func TestAnEntrypointThatOnlyWaitsIsNotStarted(t *testing.T) {
	w := newWorld(t)
	for _, argv := range []string{
		`["tail","-f","/dev/null"]`, `["/usr/bin/tail","-f","/dev/null"]`, `["sleep","infinity"]`, `["sh","-c","sleep infinity"]`,
		`["/bin/bash","-c","exec tail -f /dev/null"]`, `["/opt/code-interpreter/code-interpreter.sh"]`, `["/opt/opensandbox/code-interpreter.sh"]`,
	} {
		got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":`+argv+`}`)
		if got.status != http.StatusAccepted {
			t.Fatalf("%s: %d %s", argv, got.status, got.body)
		}
		id := got.json(t)["id"].(string)
		client, err := w.manager.Agent(t.Context(), w.who(), id)
		if err != nil {
			t.Fatal(err)
		}
		if list, err := client.Processes(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("%s started %v, %v", argv, list, err)
		}
	}
}

func TestANewServerWatchesTheEntrypointsOfTheOldOne(t *testing.T) {
	w := newWorld(t)
	got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["sh","-c","while [ ! -e go ]; do sleep 0.01; done; echo bye; exit 3"]}`)
	id := got.json(t)["id"].(string)
	w.again()
	client, err := w.manager.Agent(t.Context(), w.who(), id)
	if err != nil {
		t.Fatal(err)
	}
	w.exec(client, "touch go")
	w.eventually("its end is seen", func() bool { state, _ := w.state(id); return state == "Failed" })
}

func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	got := w.ask("POST", "/v1/sandboxes/"+id+"/snapshots", `{"name":"one"}`)
	shot := got.json(t)
	sid := shot["id"].(string)
	if got.status != http.StatusAccepted || got.header.Get("Location") != "/v1/snapshots/"+sid || shot["status"].(map[string]any)["state"] != "Ready" || shot["sandboxId"] != id {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if got := w.ask("POST", "/v1/sandboxes/"+id+"/snapshots", ""); got.status != http.StatusAccepted {
		t.Fatalf("without a body: %d %s", got.status, got.body)
	}
	for query, n := range map[string]int{"": 2, "sandboxId=" + id: 2, "sandboxId=x": 0, "name=one": 1, "state=ready": 2, "state=Failed": 0, "pageSize=1": 1} {
		if items := w.ask("GET", "/v1/snapshots?"+query, "").json(t)["items"].([]any); len(items) != n {
			t.Errorf("%q has %d", query, len(items))
		}
	}
	got = w.ask("POST", "/v1/sandboxes", `{"snapshotId":"`+sid+`"}`)
	if v := got.json(t); got.status != http.StatusAccepted || v["snapshotId"] != sid || v["image"] != nil || len(v["entrypoint"].([]any)) != 3 {
		t.Errorf("%d %s", got.status, got.body)
	}
	wantFault(t, w.ask("GET", "/v1/snapshots/"+sid, "", "OPEN-SANDBOX-API-KEY", w.keys["globex"]), 404, "SNAPSHOT::NOT_FOUND")
	wantFault(t, w.ask("DELETE", "/v1/snapshots/"+sid, "", "OPEN-SANDBOX-API-KEY", w.keys["globex"]), 404, "SNAPSHOT::NOT_FOUND")
	if got := w.ask("DELETE", "/v1/snapshots/"+sid, ""); got.status != http.StatusNoContent {
		t.Errorf("%d %s", got.status, got.body)
	}
	wantFault(t, w.ask("GET", "/v1/snapshots/"+sid, ""), 404, "SNAPSHOT::NOT_FOUND")
	w.driver.mu.Lock()
	defer w.driver.mu.Unlock()
	if w.driver.snapshots[sid] {
		t.Error("its files are left")
	}
}

func TestASnapshotThatTakesLong(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	gate := make(chan struct{})
	w.driver.gate = gate
	w.again(quickly)
	shot := w.ask("POST", "/v1/sandboxes/"+id+"/snapshots", "").json(t)
	sid := shot["id"].(string)
	if shot["status"].(map[string]any)["state"] != "Creating" {
		t.Fatalf("%v", shot)
	}
	wantFault(t, w.ask("DELETE", "/v1/snapshots/"+sid, ""), 409, "SNAPSHOT::DELETE_CONFLICT")
	wantFault(t, w.ask("POST", "/v1/sandboxes", `{"snapshotId":"`+sid+`"}`), 409, "SNAPSHOT::NOT_READY")
	state := func() string {
		return w.ask("GET", "/v1/snapshots/"+sid, "").json(t)["status"].(map[string]any)["state"].(string)
	}
	close(gate)
	w.eventually("it is ready", func() bool { return state() == "Ready" })
}

func TestDiagnostics(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	for path, kind := range map[string]string{"logs?scope=container": "logs", "events?scope=all": "events"} {
		v := w.ask("GET", "/v1/sandboxes/"+id+"/diagnostics/"+path, "").json(t)
		if v["kind"] != kind || v["delivery"] != "inline" || v["sandboxId"] != id || v["truncated"] != false {
			t.Errorf("%s: %v", path, v)
		}
	}
	for path, want := range map[string]string{"events": " started", "inspect": "state: Running", "summary": "== events =="} {
		got := w.ask("GET", "/v1/sandboxes/"+id+"/diagnostics/"+path, "")
		if !strings.Contains(got.body, want) || !strings.HasPrefix(got.header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: %s", path, got.body)
		}
	}
	for _, bad := range []string{"logs?scope=nothing", "logs?tail=0", "events?limit=501", "summary?tail=x"} {
		wantFault(t, w.ask("GET", "/v1/sandboxes/"+id+"/diagnostics/"+bad, ""), 400, "SANDBOX::INVALID_PARAMETER")
	}
}

func TestAnEntrypointThatEndedUnseenHasEnded(t *testing.T) {
	w := newWorld(t)
	facts := access.Facts{Image: "python", Entrypoint: []string{"gone"}, Process: "opensandbox-entrypoint"}
	sb, _, err := w.manager.Create(t.Context(), w.who(), sandbox.Spec{Template: "base", Annotations: map[string]string{access.Annotation: facts.Encode()}})
	if err != nil {
		t.Fatal(err)
	}
	w.again()
	w.eventually("it has failed", func() bool {
		state, message := w.state(sb.ID)
		return state == "Failed" && strings.Contains(message, "while no server watched")
	})
}
