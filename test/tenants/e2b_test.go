package tenants_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/covehq/cove/client"
)

// ask sends a request as a tenant, to prepare a trial, and reads the JSON answer.
func (w *world) ask(p *tenant, dialect, route, body string, about things, into any) {
	w.Helper()
	r := w.request(trial{dialect: dialect, route: route, body: body})
	got := w.do(r, filler(w.T, p, p.own.with(about)))
	if !got.ok() {
		w.Fatalf("prepare: %s: %v", route, got)
	}
	if into != nil {
		decode(w.T, got.body, into)
	}
}

// e2bSandbox makes a sandbox through E2B's API.
func (w *world) e2bSandbox(p *tenant, template string, public bool) things {
	w.Helper()
	var made struct {
		SandboxID          string
		EnvdAccessToken    string
		TrafficAccessToken string
	}
	body := fmt.Sprintf(`{"templateID":%q,"timeout":3600,"metadata":{"note":"$secret"},"envVars":{"SECRET":"$secret"},"network":{"allowPublicTraffic":%v}}`, template, public)
	w.ask(p, "e2b", "POST /v2/sandboxes", body, nil, &made)
	w.Cleanup(func() { _ = p.api.Sandbox(made.SandboxID).Kill(context.Background()) }) // the trial may have ended it
	p.mark(made.SandboxID, made.EnvdAccessToken, made.TrafficAccessToken)
	if _, err := p.api.Sandbox(made.SandboxID).Files().WriteBytes(w.Context(), "/home/user/kept", []byte(p.secret)); err != nil {
		w.Fatal(err)
	}
	return things{"e2b_sandbox": made.SandboxID, "e2b_token": made.EnvdAccessToken, "e2b_traffic": made.TrafficAccessToken}
}

// furnishE2B gives a tenant one of everything that E2B's API knows.
func (w *world) furnishE2B(p *tenant) {
	w.Helper()
	for name, value := range w.e2bSandbox(p, "code-interpreter", false) {
		p.own[name] = value
	}
	public := w.e2bSandbox(p, "code-interpreter", true)
	p.own["e2b_public"], p.own["e2b_public_token"] = public["e2b_sandbox"], public["e2b_token"]
	p.own["e2b_signature"] = signature("kept", p.own["e2b_token"])
	w.listen(p, p.own["e2b_sandbox"])
	w.listen(p, p.own["e2b_public"])
	p.own["e2b_snapshot"] = w.e2bSnapshot(p)

	p.own["e2b_alias"] = p.word("alias")
	built := w.e2bTemplate(p, p.own["e2b_alias"])
	for name, value := range built {
		p.own[name] = value
	}
	w.ask(p, "e2b", "POST /v2/templates/$e2b_template/builds/$e2b_build", `{"fromTemplate":"base","steps":[{"type":"RUN","args":["echo $secret"]}]}`, nil, nil)
	w.built(p, built)
	p.own["e2b_hash"] = strings.Repeat("a", 40) + p.name
	var link struct{ URL string }
	w.ask(p, "e2b", "GET /templates/$e2b_template/files/$e2b_hash", "", nil, &link)
	u, err := url.Parse(link.URL)
	if err != nil {
		w.Fatal(err)
	}
	p.own["e2b_upload"] = u.RawQuery
	p.mark(p.own["e2b_snapshot"], p.own["e2b_template"], p.own["e2b_build"], p.own["e2b_upload"], p.own["e2b_signature"])
}

// listen has a web server in a sandbox answer on port 8000 with the owner's secret.
func (w *world) listen(p *tenant, id string) {
	w.Helper()
	sb := p.api.Sandbox(id)
	x, err := sb.Start(w.Context(), client.ExecRequest{
		Argv: []string{"python3", "-c", server}, OnDisconnect: "survive", Env: map[string]string{"TEXT": p.secret},
	})
	if err != nil {
		w.Fatal(err)
	}
	for e, err := range x.Events() {
		if err != nil || e.Type == client.EventEnd {
			w.Fatalf("the web server in %s ended: %+v, %v", id, e, err)
		}
		if e.Type == client.EventStdout {
			break
		}
	}
	_ = x.Close()
}

const server = `
import http.server, os, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = os.environ["TEXT"].encode()
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers(); self.wfile.write(text)
    def log_message(self, *a): pass
s = http.server.ThreadingHTTPServer(("0.0.0.0", 8000), H)
print("listens", flush=True)
sys.stdout = open("/dev/null", "w")
s.serve_forever()
`

func (w *world) e2bSnapshot(p *tenant) string {
	w.Helper()
	var s struct{ SnapshotID string }
	w.ask(p, "e2b", "POST /sandboxes/$e2b_sandbox/snapshots", "{}", nil, &s)
	return s.SnapshotID
}

// e2bTemplate asks for a build, which it does not start.
func (w *world) e2bTemplate(p *tenant, alias string) things {
	w.Helper()
	var made struct{ TemplateID, BuildID string }
	w.ask(p, "e2b", "POST /v3/templates", `{"name":"$alias"}`, things{"alias": alias}, &made)
	return things{"e2b_template": made.TemplateID, "e2b_build": made.BuildID, "e2b_alias": alias}
}

// built waits for the end of a build.
func (w *world) built(p *tenant, x things) {
	w.Helper()
	w.eventually("the template is built", func() error {
		var s struct{ Status string }
		w.ask(p, "e2b", "GET /templates/$e2b_template/builds/$e2b_build/status", "", x, &s)
		switch s.Status {
		case "ready":
			return nil
		case "error":
			return errors.New("the build failed")
		}
		return errNotYet
	})
}

// signature lets a URL read a file of the sandbox whose token this is.
func signature(path, token string) string {
	sum := sha256.Sum256([]byte(path + ":read:user:" + token))
	return url.QueryEscape("v1_" + base64.RawStdEncoding.EncodeToString(sum[:]))
}

func freshE2B(w *world, p *tenant) things {
	return things{"e2b_sandbox": w.e2bSandbox(p, "base", true)["e2b_sandbox"]}
}

func freshE2BPaused(w *world, p *tenant) things {
	x := freshE2B(w, p)
	if err := p.api.Sandbox(x["e2b_sandbox"]).Pause(w.Context(), client.PauseRequest{}); err != nil {
		w.Fatal(err)
	}
	return x
}

func freshE2BSnapshot(w *world, p *tenant) things {
	return things{"e2b_snapshot": w.e2bSnapshot(p)}
}

func freshE2BTemplate(w *world, p *tenant) things { return w.e2bTemplate(p, p.word("alias")) }

func freshE2BTag(w *world, p *tenant) things {
	w.ask(p, "e2b", "POST /templates/tags", `{"target":"$e2b_alias","tags":["extra"]}`, nil, nil)
	return nil
}

const inE2B = "/sandboxes/$e2b_sandbox"

var e2bTrials = []trial{
	{route: "GET /health", kind: public},
	{route: "GET /teams", kind: listing, want: "$tenant"},
	{route: "POST /sandboxes", about: "from A's snapshot", body: `{"templateID":"$e2b_snapshot","timeout":3600}`},
	{route: "POST /sandboxes", about: "from A's template", body: `{"templateID":"$e2b_template","timeout":3600}`},
	{route: "POST /v2/sandboxes", about: "from A's template by its name", body: `{"templateID":"$e2b_alias","timeout":3600}`},
	{route: "POST /v2/sandboxes", about: "from A's template by its name with A's namespace", body: `{"templateID":"$tenant/$e2b_alias","timeout":3600}`},
	{route: "POST /v2/sandboxes", about: "with A's idempotency key", kind: apart, body: `{"templateID":"base","timeout":3600}`, header: map[string]string{"Idempotency-Key": "same"}},
	{route: "GET /sandboxes", kind: listing, want: "$e2b_sandbox"},
	{route: "GET /v2/sandboxes", kind: listing, want: "$e2b_sandbox"},
	{route: "GET /sandboxes/metrics", kind: empty, path: "/sandboxes/metrics?sandbox_ids=$e2b_sandbox"},
	{route: "GET /sandboxes/{sandbox}", path: inE2B, want: "$secret"},
	{route: "GET /sandboxes/{sandbox}", about: "of another dialect", path: "/sandboxes/$sandbox", want: "$secret"},
	{route: "DELETE /sandboxes/{sandbox}", path: inE2B, fresh: freshE2B},
	{route: "POST /sandboxes/{sandbox}/timeout", path: inE2B + "/timeout", body: `{"timeout":3600}`},
	{route: "POST /sandboxes/{sandbox}/refreshes", path: inE2B + "/refreshes", body: `{"duration":3600}`},
	{route: "POST /sandboxes/{sandbox}/pause", path: inE2B + "/pause", fresh: freshE2B},
	{route: "POST /sandboxes/{sandbox}/resume", path: inE2B + "/resume", body: `{"timeout":3600}`, fresh: freshE2BPaused},
	{route: "POST /sandboxes/{sandbox}/connect", path: inE2B + "/connect", body: `{"timeout":3600}`},
	{route: "POST /v2/sandboxes/{sandbox}/connect", path: "/v2" + inE2B + "/connect", body: `{"timeout":3600}`},
	{route: "POST /v2/sandboxes/{sandbox}/connect", about: "of another dialect", path: "/v2/sandboxes/$sandbox/connect", body: `{"timeout":3600}`},
	{route: "POST /sandboxes/{sandbox}/fork", path: inE2B + "/fork", body: `{"timeout":3600}`, fresh: freshE2B},
	{route: "PUT /sandboxes/{sandbox}/network", path: inE2B + "/network", body: `{"allow_internet_access":false}`, fresh: freshE2B},
	{route: "GET /sandboxes/{sandbox}/metrics", path: inE2B + "/metrics"},
	{route: "GET /sandboxes/{sandbox}/logs", path: inE2B + "/logs"},
	{route: "GET /v2/sandboxes/{sandbox}/logs", path: "/v2" + inE2B + "/logs"},
	{route: "POST /sandboxes/{sandbox}/snapshots", path: inE2B + "/snapshots", body: `{}`},
	{route: "GET /snapshots", kind: listing, want: "$e2b_snapshot"},
	{route: "DELETE /templates/{template}", path: "/templates/$e2b_snapshot", fresh: freshE2BSnapshot},
	{route: "PUT /templates/{id}/files/{hash}/upload", path: "/templates/$e2b_template/files/$e2b_hash/upload?$my_e2b_upload", body: "\x1f\x8b"},

	{route: "/volumes", kind: unserved},
	{route: "/volumes/", kind: unserved, path: "/volumes/one"},
	{route: "/volumecontent/", kind: unserved, path: "/volumecontent/one"},
	{route: "/secrets", kind: unserved},
	{route: "/secrets/", kind: unserved, path: "/secrets/one"},
	{route: "/api-keys", kind: unserved},
	{route: "/api-keys/", kind: unserved, path: "/api-keys/one"},
	{route: "/teams/", kind: unserved, path: "/teams/$tenant/metrics"},
}

const inTemplate = "/templates/$e2b_template"

var e2bBuildTrials = []trial{
	{route: "POST /v3/templates", kind: apart, about: "with A's name", body: `{"name":"same"}`},
	{route: "POST /v3/templates", about: "in A's namespace", body: `{"name":"$tenant/same"}`},
	{route: "GET /v2/templates", kind: listing, want: "$e2b_template"},
	{route: "GET /templates", kind: listing, want: "$e2b_template"},
	{route: "GET /default-templates", kind: public},
	{route: "POST /v2/templates/{id}/builds/{build}", path: "/v2" + inTemplate + "/builds/$e2b_build", body: `{"fromTemplate":"base"}`, fresh: freshE2BTemplate, after: (*world).built, parent: "e2b_template"},
	{route: "PATCH /v2/templates/{id}", path: "/v2" + inTemplate, body: `{"public":false}`},
	{route: "PATCH /templates/{id}", path: inTemplate, body: `{"public":false}`},
	{route: "POST /templates/tags", body: `{"target":"$e2b_alias","tags":["more"]}`},
	{route: "DELETE /templates/tags", body: `{"name":"$e2b_alias","tags":["extra"]}`, fresh: freshE2BTag},
	{route: "GET /templates/aliases/{id}", path: "/templates/aliases/$e2b_alias", want: "$e2b_template"},
	{route: "GET /templates/{id}/tags", path: inTemplate + "/tags"},
	{route: "GET /templates/{id}/tags/count", path: inTemplate + "/tags/count"},
	{route: "GET /templates/{id}/tags/exists", path: inTemplate + "/tags/exists?tag=default"},
	{route: "GET /templates/{id}/files/{hash}", path: inTemplate + "/files/$e2b_hash"},
	{route: "GET /templates/{id}/builds/{build}/status", path: inTemplate + "/builds/$e2b_build/status", parent: "e2b_template"},
	{route: "GET /templates/{id}/builds/{build}/logs", path: inTemplate + "/builds/$e2b_build/logs", parent: "e2b_template", want: "$secret"},
	{route: "GET /templates/{id}", path: inTemplate, want: "$e2b_build"},
	{route: "DELETE /templates/{id}", path: inTemplate, fresh: freshE2BTemplate},

	{route: "POST /templates", kind: public, body: "{}", wantStatus: http.StatusBadRequest},
	{route: "POST /v2/templates", kind: public, body: "{}", wantStatus: http.StatusBadRequest},
	{route: "POST /templates/{id}", kind: public, path: inTemplate, body: "{}", wantStatus: http.StatusBadRequest},
	{route: "POST /templates/{id}/builds/{build}", kind: public, path: inTemplate + "/builds/$e2b_build", body: "{}", wantStatus: http.StatusBadRequest},
}

// byStatus is why the ports of an E2B sandbox tell one that is there from one that is not: SDKs read 502 as "it has ended".
// Ids of sandboxes cannot be guessed.
const byStatus = "SDKs tell an ended sandbox by 502"

// known reasons, which docs/threat-model.md gives.
const (
	lives    = "whether a sandbox lives is no secret from who knows its id, as at E2B"
	contexts = "contexts of a sandbox with public traffic are open to who knows its id, as at E2B"
	ports    = "ports of a sandbox with public traffic are open to who knows its id, as at E2B"
)

// connected are the headers of a stream of Connect.
var connected = map[string]string{"Content-Type": framed}

// streamed is the same of one that does not end.
var streamed = map[string]string{"Content-Type": framed, endless: "yes"}

// freshE2BProcess starts a command with a tag and a terminal through envd.
func freshE2BProcess(w *world, p *tenant) things {
	return w.e2bProcess(p, `,"pty":{"size":{"cols":80,"rows":24}}`)
}

func freshE2BPipe(w *world, p *tenant) things { return w.e2bProcess(p, "") }

func (w *world) e2bProcess(p *tenant, terminal string) things {
	tag := p.word("tag")
	x := p.own.with(things{"tag": tag})
	start := trial{
		dialect: "envd", route: "POST /process.Process/Start", header: streamed,
		body: `{"process":{"cmd":"/bin/cat"},"tag":"$tag","stdin":true` + terminal + "}",
	}
	if got := w.do(w.request(start), filler(w.T, p, x)); !got.ok() {
		w.Fatalf("start a command: %v", got)
	}
	return things{"tag": tag}
}

func freshWatcher(w *world, p *tenant) things {
	var made struct{ WatcherID string }
	w.ask(p, "envd", "POST /filesystem.Filesystem/CreateWatcher", `{"path":"/home/user"}`, nil, &made)
	p.mark(made.WatcherID)
	return things{"watcher": made.WatcherID}
}

const selected = `{"process":{"tag":"$tag"}`

var envdTrials = []trial{
	{route: "GET /health", kind: known, reason: lives},
	{route: "GET /metrics"},
	{route: "GET /envs", want: "$secret"},
	{route: "POST /init", wantStatus: http.StatusNotFound, body: "{}"},
	{route: "GET /files", path: "/files?path=kept&username=user", want: "$secret"},
	{route: "GET /files", about: "signed", path: "/files?path=kept&username=user&signature=$my_e2b_signature", header: map[string]string{"X-Access-Token": ""}, want: "$secret"},
	{route: "POST /files", path: "/files?path=sent&username=user", body: "text", header: map[string]string{"Content-Type": "application/octet-stream"}},
	{route: "POST /files/compose", body: `{"source_paths":["kept"],"destination":"joined","username":"user"}`, fresh: freshE2BEnvd},
	{route: "POST /process.Process/List", body: "{}"},
	{route: "POST /process.Process/Start", body: `{"process":{"cmd":"/bin/cat","args":["/home/user/kept"]},"stdin":false}`, header: connected, want: `"end"`},
	{route: "POST /process.Process/Connect", body: selected + "}", header: streamed, fresh: freshE2BProcess},
	{route: "POST /process.Process/Update", body: selected + `,"pty":{"size":{"cols":40,"rows":20}}}`, fresh: freshE2BProcess},
	{route: "POST /process.Process/SendInput", body: selected + `,"input":{"pty":"YQ=="}}`, fresh: freshE2BProcess},
	{route: "POST /process.Process/StreamInput", body: `{"start":` + selected + "}}\n" + `{"data":{"input":{"pty":"YQ=="}}}`, header: connected, fresh: freshE2BProcess},
	{route: "POST /process.Process/CloseStdin", body: selected + "}", fresh: freshE2BPipe},
	{route: "POST /process.Process/SendSignal", body: selected + `,"signal":"SIGNAL_SIGKILL"}`, fresh: freshE2BProcess},
	{route: "POST /filesystem.Filesystem/Stat", body: `{"path":"/home/user/kept"}`},
	{route: "POST /filesystem.Filesystem/MakeDir", body: `{"path":"made"}`},
	{route: "POST /filesystem.Filesystem/Move", body: `{"source":"/home/user/kept","destination":"/home/user/moved"}`, fresh: freshE2BEnvd},
	{route: "POST /filesystem.Filesystem/ListDir", body: `{"path":"/home/user","depth":1}`, want: "sent"},
	{route: "POST /filesystem.Filesystem/Remove", body: `{"path":"/home/user/kept"}`, fresh: freshE2BEnvd},
	{route: "POST /filesystem.Filesystem/WatchDir", body: `{"path":"/home/user"}`, header: streamed},
	{route: "POST /filesystem.Filesystem/CreateWatcher", body: `{"path":"/home/user"}`},
	{route: "POST /filesystem.Filesystem/GetWatcherEvents", body: `{"watcherId":"$watcher"}`, fresh: freshWatcher, parent: "e2b_sandbox"},
	{route: "POST /filesystem.Filesystem/RemoveWatcher", body: `{"watcherId":"$watcher"}`, fresh: freshWatcher, parent: "e2b_sandbox"},
}

// freshE2BEnvd is a file to lose in the standing sandbox, whose token the credentials show.
func freshE2BEnvd(w *world, p *tenant) things {
	if _, err := p.api.Sandbox(p.own["e2b_sandbox"]).Files().WriteBytes(w.Context(), "/home/user/kept", []byte(p.secret)); err != nil {
		w.Fatal(err)
	}
	return nil
}

func freshContext(w *world, p *tenant) things {
	var made struct{ ID string }
	w.ask(p, "interpreter", "POST /contexts", `{"language":"bash"}`, nil, &made)
	p.mark(made.ID)
	return things{"context": made.ID}
}

// ofPublic sends a request to the sandbox with public traffic.
var ofPublic = map[string]string{"E2b-Sandbox-Id": "$e2b_public", "X-Access-Token": "$my_e2b_public_token", "E2b-Traffic-Access-Token": ""}

var interpreterTrials = []trial{
	{route: "GET /health"},
	{route: "POST /execute", body: `{"code":"6*7"}`, want: "42"},
	{route: "POST /execute", about: "public traffic", body: `{"code":"6*7"}`, header: ofPublic, want: "42"},
	{route: "POST /execute", about: "in A's context", body: `{"code":"echo 42","context_id":"$context"}`, fresh: freshContext, want: "42"},
	{route: "GET /contexts"},
	{route: "POST /contexts", body: `{"language":"bash"}`},
	{route: "POST /contexts/{id}/restart", path: "/contexts/$context/restart", fresh: freshContext},
	{route: "DELETE /contexts/{id}", path: "/contexts/$context", fresh: freshContext},
	{route: "GET /health", about: "public traffic", kind: known, header: ofPublic, reason: lives},
	{route: "GET /contexts", about: "public traffic", kind: known, header: ofPublic, reason: contexts},
}

// portTrials are the ways to the ports that programs of a sandbox listen on.
var portTrials = []trial{
	{route: "GET by header", path: "/", header: map[string]string{"E2b-Sandbox-Id": "$e2b_sandbox", "E2b-Sandbox-Port": "8000", "E2b-Traffic-Access-Token": "$my_e2b_traffic"}, want: "$secret"},
	{route: "GET by path", path: "/kruise/$e2b_sandbox/8000/", header: map[string]string{"E2b-Traffic-Access-Token": "$my_e2b_traffic"}, want: "$secret"},
	{route: "GET by host", path: "/", header: map[string]string{"Host": "8000-$e2b_sandbox.localhost", "E2b-Traffic-Access-Token": "$my_e2b_traffic"}, want: "$secret"},
	{route: "GET by host", about: "public traffic", kind: known, path: "/", header: map[string]string{"Host": "8000-$e2b_public.localhost"}, reason: ports, want: "$secret"},
}
