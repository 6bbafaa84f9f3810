package tenants_test

import (
	"context"
	"net/http"
	"regexp"
	"strings"

	"github.com/covehq/cove/client"
)

// osSandbox makes a sandbox through OpenSandbox's API.
func (w *world) osSandbox(p *tenant, image string) string {
	w.Helper()
	var made struct{ ID string }
	w.ask(p, "opensandbox", "POST /v1/sandboxes", `{"image":{"uri":"`+image+`"},"entrypoint":["tail","-f","/dev/null"],"timeout":3600,"metadata":{"note":"$secret"},"env":{"SECRET":"$secret"}}`, nil, &made)
	w.Cleanup(func() { _ = p.api.Sandbox(made.ID).Kill(context.Background()) }) // the trial may have ended it
	p.mark(made.ID)
	w.eventually("the sandbox of OpenSandbox runs", func() error {
		var s struct{ Status struct{ State string } }
		w.ask(p, "opensandbox", "GET /v1/sandboxes/"+made.ID, "", nil, &s)
		if s.Status.State != "Running" {
			return errNotYet
		}
		return nil
	})
	if _, err := p.api.Sandbox(made.ID).Files().WriteBytes(w.Context(), "/home/user/kept", []byte(p.secret)); err != nil {
		w.Fatal(err)
	}
	return made.ID
}

// furnishOpenSandbox gives a tenant one of everything that OpenSandbox's API knows.
func (w *world) furnishOpenSandbox(p *tenant) {
	w.Helper()
	p.own["os_sandbox"] = w.osSandbox(p, "code-interpreter")
	w.listen(p, p.own["os_sandbox"])
	p.own["os_snapshot"] = freshOSSnapshot(w, p)["os_snapshot"]
	var execd, port struct {
		Endpoint string
		Headers  map[string]string
	}
	w.ask(p, "opensandbox", "GET /v1/sandboxes/$os_sandbox/endpoints/44772", "", nil, &execd)
	p.own["os_token"] = execd.Headers["OpenSandbox-Secure-Access"]
	w.ask(p, "opensandbox", "GET /v1/sandboxes/$os_sandbox/endpoints/8000", "", nil, &port)
	signed := regexp.MustCompile(`~(.*)/proxy/`).FindStringSubmatch(port.Endpoint)
	if signed == nil {
		w.Fatalf("the endpoint of port 8000 is %q", port.Endpoint)
	}
	p.own["os_signed"] = signed[1]
	p.mark(p.own["os_token"], signed[1], p.own["os_snapshot"])
	for name, value := range freshOSContext(w, p) {
		p.own[name] = value
	}
}

func freshOS(w *world, p *tenant) things { return things{"os_sandbox": w.osSandbox(p, "base")} }

func freshOSPaused(w *world, p *tenant) things {
	x := freshOS(w, p)
	if err := p.api.Sandbox(x["os_sandbox"]).Pause(w.Context(), client.PauseRequest{}); err != nil {
		w.Fatal(err)
	}
	return x
}

func freshOSSnapshot(w *world, p *tenant) things {
	var made struct{ ID string }
	w.ask(p, "opensandbox", "POST /v1/sandboxes/$os_sandbox/snapshots", `{"name":"$name"}`, things{"name": p.word("shot")}, &made)
	p.mark(made.ID)
	w.eventually("the snapshot is ready", func() error {
		var s struct{ Status struct{ State string } }
		w.ask(p, "opensandbox", "GET /v1/snapshots/"+made.ID, "", nil, &s)
		if s.Status.State != "Ready" {
			return errNotYet
		}
		return nil
	})
	return things{"os_snapshot": made.ID}
}

// heard is the name that the first event of a stream tells.
var heard = regexp.MustCompile(`"text": ?"([0-9A-Za-z_-]+)"`)

func freshOSCommand(w *world, p *tenant) things {
	r := w.request(trial{dialect: "execd", route: "POST /command", body: `{"command":"echo $secret; sleep 86400","background":true}`})
	got := w.do(r, filler(w.T, p, p.own))
	id := heard.FindStringSubmatch(got.body)
	if id == nil {
		w.Fatalf("a command in the background has no id: %v", got)
	}
	p.mark(id[1])
	return things{"os_command": id[1]}
}

// osThing makes something by a request to execd and takes its id from the answer.
func osThing(name, route, body string) func(*world, *tenant) things {
	return func(w *world, p *tenant) things {
		var made struct {
			ID      string
			Session string `json:"session_id"`
		}
		w.ask(p, "execd", route, body, nil, &made)
		id := made.ID + made.Session
		p.mark(id)
		return things{name: id}
	}
}

func freshOSFile(w *world, p *tenant) things {
	name := p.word("file")
	if _, err := p.api.Sandbox(p.own["os_sandbox"]).Files().WriteBytes(w.Context(), "/home/user/"+name, []byte(p.secret)); err != nil {
		w.Fatal(err)
	}
	return things{"old": name}
}

var (
	freshOSSession  = osThing("os_session", "POST /session", "{}")
	freshOSContext  = osThing("os_context", "POST /code/context", `{"language":"bash"}`)
	freshOSTerminal = osThing("os_terminal", "POST /pty", "{}")
)

const inOS = "/v1/sandboxes/$os_sandbox"

var opensandboxTrials = []trial{
	{route: "POST /v1/sandboxes", kind: apart, body: `{"image":{"uri":"base"},"entrypoint":["sleep","86400"],"timeout":3600}`},
	{route: "POST /v1/sandboxes", about: "from A's snapshot", body: `{"snapshotId":"$os_snapshot","timeout":3600}`},
	{route: "POST /v1/sandboxes", about: "from A's template", refusal: http.StatusInternalServerError, // the registry that is asked for the name does not answer
		body: `{"image":{"uri":"$template"},"entrypoint":["sleep","86400"],"timeout":3600}`},
	{route: "GET /v1/sandboxes", kind: listing, want: "$os_sandbox"},
	{route: "GET /v1/sandboxes", about: "without the prefix", kind: listing, path: "/sandboxes", want: "$os_sandbox"},
	{route: "GET /v1/sandboxes/{sandbox}", path: inOS, want: "$secret"},
	{route: "GET /v1/sandboxes/{sandbox}", about: "without the prefix", path: "/sandboxes/$os_sandbox", want: "$secret"},
	{route: "GET /v1/sandboxes/{sandbox}", about: "of another dialect", path: "/v1/sandboxes/$sandbox", want: "$secret"},
	{route: "DELETE /v1/sandboxes/{sandbox}", path: inOS, fresh: freshOS},
	{route: "PATCH /v1/sandboxes/{sandbox}/metadata", path: inOS + "/metadata", body: `{"other":"x"}`, header: map[string]string{"Content-Type": "application/merge-patch+json"}},
	{route: "POST /v1/sandboxes/{sandbox}/pause", path: inOS + "/pause", fresh: freshOS},
	{route: "POST /v1/sandboxes/{sandbox}/resume", path: inOS + "/resume", fresh: freshOSPaused},
	{route: "POST /v1/sandboxes/{sandbox}/renew-expiration", path: inOS + "/renew-expiration", body: `{"expiresAt":"2999-01-01T00:00:00Z"}`, fresh: freshOS},
	{route: "GET /v1/sandboxes/{sandbox}/endpoints/{port}", path: inOS + "/endpoints/8000", want: "$os_sandbox"},
	{route: "/v1/sandboxes/{sandbox}/networkpolicy", path: inOS + "/networkpolicy"},
	{route: "POST /v1/sandboxes/{sandbox}/snapshots", path: inOS + "/snapshots", body: `{"name":"again"}`, after: (*world).shot},
	{route: "GET /v1/snapshots", kind: listing, want: "$os_snapshot"},
	{route: "GET /v1/snapshots/{snapshot}", path: "/v1/snapshots/$os_snapshot"},
	{route: "DELETE /v1/snapshots/{snapshot}", path: "/v1/snapshots/$os_snapshot", fresh: freshOSSnapshot},
	{route: "GET /v1/sandboxes/{sandbox}/diagnostics/logs", path: inOS + "/diagnostics/logs"},
	{route: "GET /v1/sandboxes/{sandbox}/diagnostics/events", path: inOS + "/diagnostics/events"},
	{route: "GET /v1/sandboxes/{sandbox}/diagnostics/inspect", path: inOS + "/diagnostics/inspect"},
	{route: "GET /v1/sandboxes/{sandbox}/diagnostics/summary", path: inOS + "/diagnostics/summary"},
	{route: "POST /v1/metrics/events", kind: public, body: "{}"},
	{route: "/v1/pools", kind: unserved},
	{route: "/v1/pools/", kind: unserved, path: "/v1/pools/one"},
	{route: "/v1/templates", kind: unserved},
	{route: "/v1/templates/", kind: unserved, path: "/v1/templates/one"},
}

// shot waits until no snapshot is being made.
func (w *world) shot(p *tenant, _ things) {
	w.Helper()
	w.eventually("all snapshots are ready", func() error {
		var list struct {
			Items []struct{ Status struct{ State string } }
		}
		w.ask(p, "opensandbox", "GET /v1/snapshots", "", nil, &list)
		for _, s := range list.Items {
			if s.Status.State != "Ready" {
				return errNotYet
			}
		}
		return nil
	})
}

// sandboxPrefix is where the paths of a sandbox's own ports begin.
var sandboxPrefix = map[string]string{
	"execd":  "/sandboxes/$os_sandbox/proxy/44772",
	"egress": "/sandboxes/$os_sandbox/proxy/18080",
}

// byToken shows the token of the sender's own sandbox instead of a key.
var byToken = map[string]string{"Open-Sandbox-Api-Key": "", "OpenSandbox-Secure-Access": "$my_os_token"}

const keptPath = "?path=/home/user/kept"

// parts is a multipart body of one file, as execd takes it.
var parts = strings.ReplaceAll(`--XX
Content-Disposition: form-data; name="metadata"; filename="metadata"
Content-Type: application/json

{"path":"/home/user/sent"}
--XX
Content-Disposition: form-data; name="file"; filename="sent"

text
--XX--
`, "\n", "\r\n")

var multiparts = map[string]string{"Content-Type": "multipart/form-data; boundary=XX"}

var websocket = map[string]string{
	"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}

var execdTrials = []trial{
	{route: "GET /ping"},
	{route: "GET /ping", about: "by token", header: byToken},
	{route: "POST /command", body: `{"command":"cat /home/user/kept"}`, want: "$secret"},
	{route: "POST /command", about: "by token", header: byToken, body: `{"command":"cat /home/user/kept"}`, want: "$secret"},
	{route: "DELETE /command", path: "/command?id=$os_command", fresh: freshOSCommand, parent: "os_sandbox", refusal: http.StatusBadRequest},
	{route: "GET /command/{one}/{two}", path: "/command/status/$os_command", fresh: freshOSCommand, parent: "os_sandbox"},
	{route: "GET /command/{one}/{two}", about: "logs", path: "/command/$os_command/logs", fresh: freshOSCommand, parent: "os_sandbox"},
	{route: "POST /session", body: "{}"},
	{route: "POST /session/{id}/run", path: "/session/$os_session/run", body: `{"command":"true"}`, fresh: freshOSSession, parent: "os_sandbox"},
	{route: "DELETE /session/{id}", path: "/session/$os_session", fresh: freshOSSession, parent: "os_sandbox"},
	{route: "POST /code", body: `{"code":"6*7","context":{"language":"python"}}`, want: "42"},
	{route: "POST /code", about: "in A's context", body: `{"code":"echo 42","context":{"id":"$os_context","language":"bash"}}`, parent: "os_sandbox", want: "42"},
	{route: "DELETE /code", path: "/code?id=$os_context", parent: "os_sandbox", refusal: http.StatusBadRequest},
	{route: "POST /code/context", body: `{"language":"bash"}`},
	{route: "GET /code/contexts", path: "/code/contexts?language=bash", want: "$os_context"},
	{route: "GET /code/contexts/{id}", path: "/code/contexts/$os_context", parent: "os_sandbox"},
	{route: "DELETE /code/contexts/{id}", path: "/code/contexts/$os_context", fresh: freshOSContext, parent: "os_sandbox"},
	{route: "GET /files/info", path: "/files/info" + keptPath},
	{route: "POST /files/mv", body: `[{"src":"/home/user/$old","dest":"/home/user/$old.moved"}]`, fresh: freshOSFile},
	{route: "POST /files/permissions", body: `{"/home/user/kept":{"mode":600}}`},
	{route: "POST /files/replace", body: `{"/home/user/kept":{"old":"none","new":"other"}}`},
	{route: "GET /files/search", path: "/files/search?path=/home/user&pattern=kept", want: "kept"},
	{route: "POST /files/upload", body: parts, header: multiparts},
	{route: "GET /files/download", path: "/files/download" + keptPath, want: "$secret"},
	{route: "GET /files/download", about: "as another user", path: "/v1/filesystem/0/0/files/download" + keptPath, want: "$secret"},
	{route: "DELETE /files", path: "/files?path=/home/user/sent"},
	{route: "GET /directories/list", path: "/directories/list?path=/home/user", want: "kept"},
	{route: "POST /directories", body: `{"/home/user/made":{"mode":755}}`},
	{route: "DELETE /directories", path: "/directories?path=/home/user/made"},
	{route: "GET /metrics"},
	{route: "GET /metrics/watch", header: streams},
	{route: "POST /pty", body: "{}"},
	{route: "GET /pty/{id}", path: "/pty/$os_terminal", fresh: freshOSTerminal, parent: "os_sandbox"},
	{route: "GET /pty/{id}/ws", path: "/pty/$os_terminal/ws", header: websocket, fresh: freshOSTerminal, parent: "os_sandbox"},
	{route: "DELETE /pty/{id}", path: "/pty/$os_terminal", fresh: freshOSTerminal, parent: "os_sandbox"},
	{route: "GET /v1/isolated/capabilities"},
	{route: "/v1/isolated", wantStatus: http.StatusNotImplemented},
	{route: "/v1/isolated/", path: "/v1/isolated/one", wantStatus: http.StatusNotImplemented},
	{route: "DELETE /code/contexts", path: "/code/contexts?language=bash"},
}

var egressTrials = []trial{
	{route: "GET /healthz"},
	{route: "GET /policy"},
	{route: "GET /policy", about: "by token", header: byToken},
	{route: "PUT /policy", body: `{"defaultAction":"deny","egress":[{"action":"allow","target":"1.1.1.1"}]}`},
	{route: "POST /policy", body: `{"defaultAction":"deny","egress":[{"action":"allow","target":"1.1.1.1"}]}`},
	{route: "PATCH /policy", body: `[{"action":"allow","target":"1.0.0.1"}]`},
	{route: "DELETE /policy", body: `["1.0.0.1"]`},
	{route: "/credential-vault", wantStatus: http.StatusNotImplemented},
	{route: "/credential-vault/", path: "/credential-vault/one", wantStatus: http.StatusNotImplemented},
}

var osPortTrials = []trial{
	{route: "GET by path", path: "/sandboxes/$os_sandbox/proxy/8000/", want: "$secret"},
	{route: "GET by path", about: "with the prefix", path: "/v1/sandboxes/$os_sandbox/proxy/8000/", want: "$secret"},
	{route: "GET by path", about: "through execd", path: "/sandboxes/$os_sandbox/proxy/44772/proxy/8000/", want: "$secret"},
	{route: "GET by path", about: "by token", header: byToken, path: "/sandboxes/$os_sandbox/proxy/8000/", want: "$secret"},
	{route: "GET by path", about: "signed", header: map[string]string{"Open-Sandbox-Api-Key": ""}, path: "/sandboxes/$os_sandbox~$my_os_signed/proxy/8000/", want: "$secret"},
	{route: "GET by path", about: "of another dialect", path: "/sandboxes/$e2b_sandbox/proxy/8000/", want: "$secret"},
}
