package tenants_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

func expand(text string, look func(string) string) string { return os.Expand(text, look) }

func fill(t *testing.T, text string, p *tenant, about things) string {
	t.Helper()
	return os.Expand(text, filler(t, p, about))
}

// base is where a dialect's paths begin.
func (w *world) base(dialect string) string {
	switch dialect {
	case "cove":
		return w.server.URL
	case "kubernetes":
		return w.kubernetes
	}
	return w.server.URL
}

// credentials are the headers by which a dialect's client shows who it is.
func credentials(dialect string) map[string]string {
	switch dialect {
	case "cove", "kubernetes":
		return map[string]string{"Authorization": "Bearer $my_api_key"}
	case "router":
		return map[string]string{"Authorization": "Bearer $my_api_key", "X-Sandbox-ID": "$k8s_sandbox"}
	case "e2b", "e2bbuild":
		return map[string]string{"X-API-Key": "$my_api_key"}
	case "envd":
		return map[string]string{
			"X-API-Key": "$my_api_key", "X-Access-Token": "$my_e2b_token", "E2b-Sandbox-Id": "$e2b_sandbox", "E2b-Sandbox-Port": "49983",
		}
	case "interpreter":
		return map[string]string{
			"X-API-Key": "$my_api_key", "X-Access-Token": "$my_e2b_token", "E2b-Traffic-Access-Token": "$my_e2b_traffic",
			"E2b-Sandbox-Id": "$e2b_sandbox", "E2b-Sandbox-Port": "49999",
		}
	case "opensandbox", "execd", "egress":
		return map[string]string{"Open-Sandbox-Api-Key": "$my_api_key"}
	}
	return map[string]string{}
}

// must is the value of a call that cannot fail here.
func must[T any](w *world) func(T, error) T {
	w.Helper()
	return func(v T, err error) T {
		w.Helper()
		if err != nil {
			w.Fatal(err)
		}
		return v
	}
}

// sandbox makes a sandbox of a tenant, with its secret in metadata, environment and a file, and ends it with the trial.
func (w *world) sandbox(p *tenant, req client.CreateRequest) *client.Sandbox {
	w.Helper()
	if req.TimeoutSeconds == 0 {
		req.TimeoutSeconds = 3600
	}
	req.Metadata = map[string]string{"owner": p.name, "note": p.secret}
	req.Env = map[string]string{"SECRET": p.secret}
	sb := must[*client.Sandbox](w)(p.api.Create(w.Context(), req))
	p.mark(sb.ID)
	if _, err := sb.Files().WriteBytes(w.Context(), "kept", []byte(p.secret)); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = sb.Kill(context.Background()) }) // the trial may have ended it
	return sb
}

// process starts a command that outlives its client and returns its id.
func (w *world) process(p *tenant, sb *client.Sandbox) string {
	w.Helper()
	tag := p.word("tag")
	x, err := sb.Start(w.Context(), client.ExecRequest{Argv: []string{"sleep", "86400"}, OnDisconnect: "survive", Tag: tag})
	if err != nil {
		w.Fatal(err)
	}
	id := ""
	w.eventually("the command is listed", func() error {
		list, err := sb.Processes(w.Context())
		for _, c := range list {
			if c.Tag == tag {
				id = c.ID
			}
		}
		if id == "" && err == nil {
			err = errNotYet
		}
		return err
	})
	_ = x.Close()
	return id
}

// furnishCove gives a tenant one of everything that the native API knows.
func (w *world) furnishCove(p *tenant) {
	w.Helper()
	ctx := w.Context()
	sb := w.sandbox(p, client.CreateRequest{})
	p.own["sandbox"] = sb.ID
	p.own["process"] = w.process(p, sb)
	kernel := must[client.Kernel](w)(sb.StartKernel(ctx, client.KernelRequest{Name: p.word("kernel"), Language: "bash"}))
	p.own["kernel"] = kernel.Name
	snapshot := p.word("snapshot")
	must[*client.TemplateInfo](w)(sb.Snapshot(ctx, client.SnapshotRequest{Name: snapshot, Description: p.secret}))
	p.own["template"] = snapshot

	p.own["session"], p.own["checkpoint"], p.own["artifact"] = w.session(p)
	link := must[*client.Link](w)(p.api.LinkArtifact(ctx, p.own["artifact"], time.Hour))
	_, query, _ := strings.Cut(link.URL, "?")
	p.own["link"] = query
	data := must[*client.Dataset](w)(p.api.StageDataset(ctx, p.own["session"], p.word("data"), "", strings.NewReader("data of "+p.secret)))
	p.own["dataset"], p.own["sha256"] = data.ID, data.SHA256

	p.own["volume"] = must[client.Volume](w)(asValue(p.api.CreateVolume(ctx, client.VolumeRequest{Name: p.word("volume"), Bytes: 64 << 20}))).Name
	p.own["image"] = w.image(p)
	p.own["registry"] = w.registry
	if err := p.api.Login(ctx, client.LoginRequest{Registry: w.registry, Username: p.name, Password: "of-" + p.name}); err != nil {
		w.Fatal(err)
	}
	p.own["private"] = p.name + "/private:1"
	for _, name := range []string{"process", "kernel", "template", "session", "checkpoint", "artifact", "link", "dataset", "sha256", "volume", "image", "private"} {
		p.mark(p.own[name])
	}
}

func asValue[T any](v *T, err error) (T, error) {
	if err != nil {
		var none T
		return none, err
	}
	return *v, nil
}

var serial int

// session opens a session with an artifact and a checkpoint.
func (w *world) session(p *tenant) (key, checkpoint, artifact string) {
	w.Helper()
	ctx := w.Context()
	key = p.word("session")
	must[*client.SessionInfo](w)(p.api.OpenSession(ctx, key, client.SessionRequest{
		Storage: "disk", SizeBytes: 64 << 20, Datasets: &client.SessionDatasets{Access: "api"}, Metadata: map[string]string{"owner": p.secret},
	}))
	w.Cleanup(func() { _ = p.api.RemoveSession(context.Background(), key) }) // the trial may have removed it
	code := fmt.Sprintf("secret = %q\nopen('/session/artifacts/report.txt', 'w').write(secret + %q)", p.secret, key)
	out := must[*client.SessionOutput](w)(p.api.RunInSession(ctx, key, client.SessionRunRequest{Code: code}, ""))
	if len(out.Artifacts) != 1 || out.Artifacts[0].ID == "" {
		w.Fatalf("a cell kept %+v", out)
	}
	kept := must[*client.Checkpoint](w)(p.api.Checkpoint(ctx, key, client.CheckpointRequest{}))
	return key, kept.ID, out.Artifacts[0].ID
}

// image imports an image of a tenant.
func (w *world) image(p *tenant) string {
	w.Helper()
	list := must[[]client.ImageInfo](w)(p.api.ImportImage(w.Context(), "registry.example/"+p.word("image")+":1", bytes.NewReader(archive(w.T, p.secret))))
	return list[0].Reference
}

// archive is a tar of a root directory.
func archive(t *testing.T, text string) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for _, err := range []error{
		tw.WriteHeader(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}),
		tw.WriteHeader(&tar.Header{Name: "etc/motd", Mode: 0o644, Size: int64(len(text))}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tw.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// What trials use up.

func freshSandbox(w *world, p *tenant) things {
	sb := w.sandbox(p, client.CreateRequest{})
	return things{"sandbox": sb.ID}
}

func freshPaused(w *world, p *tenant) things {
	sb := w.sandbox(p, client.CreateRequest{})
	if err := sb.Pause(w.Context(), client.PauseRequest{}); err != nil {
		w.Fatal(err)
	}
	return things{"sandbox": sb.ID}
}

func freshKernel(w *world, p *tenant) things {
	k := must[client.Kernel](w)(p.api.Sandbox(p.own["sandbox"]).StartKernel(w.Context(), client.KernelRequest{Name: p.word("kernel"), Language: "bash"}))
	return things{"kernel": k.Name}
}

func freshSession(w *world, p *tenant) things {
	key, checkpoint, artifact := w.session(p)
	p.mark(key, checkpoint, artifact)
	return things{"session": key, "checkpoint": checkpoint, "artifact": artifact}
}

func freshSnapshot(w *world, p *tenant) things {
	name := p.word("snapshot")
	must[*client.TemplateInfo](w)(p.api.Sandbox(p.own["sandbox"]).Snapshot(w.Context(), client.SnapshotRequest{Name: name, Description: p.secret}))
	return things{"template": name}
}

// sameSession is a key that both tenants use.
func sameSession(w *world, p *tenant) things {
	serial++
	key := fmt.Sprintf("same%d", serial)
	must[*client.SessionInfo](w)(p.api.OpenSession(w.Context(), key, client.SessionRequest{Metadata: map[string]string{"owner": p.secret}}))
	w.Cleanup(func() { _ = p.api.RemoveSession(context.Background(), key) })
	return things{"same": key}
}

func freshVolume(w *world, p *tenant) things {
	name := p.word("volume")
	must[client.Volume](w)(asValue(p.api.CreateVolume(w.Context(), client.VolumeRequest{Name: name, Bytes: 16 << 20})))
	return things{"volume": name}
}

func freshImage(w *world, p *tenant) things { return things{"image": w.image(p)} }

var upgrade = map[string]string{"Connection": "Upgrade", "Upgrade": client.Protocol}

var streams = map[string]string{endless: "yes"}

const inSandbox = "/cove/v1/sandboxes/$sandbox"

const inSession = "/cove/v1/sessions/$session"

// coveTrials are the routes of docs/openapi.json.
var coveTrials = []trial{
	{route: "GET /cove/v1/openapi.json", kind: public},

	{route: "POST /cove/v1/sandboxes", kind: apart, about: "with A's key of a sandbox", body: `{"key":"key$secret","timeout_seconds":3600}`},
	{route: "POST /cove/v1/sandboxes", about: "from A's snapshot", body: `{"template":"$template","timeout_seconds":3600}`},
	{route: "POST /cove/v1/sandboxes", about: "with A's volume", body: `{"mounts":[{"source":"$volume","target":"/mnt"}],"timeout_seconds":3600}`},
	{route: "GET /cove/v1/sandboxes", kind: listing, want: "$sandbox"},
	{route: "GET /cove/v1/sandboxes", kind: listing, about: "by A's metadata", path: "/cove/v1/sandboxes?metadata.owner=$tenant", want: "$sandbox"},
	{route: "GET /cove/v1/sandboxes/{id}", path: inSandbox, want: "$secret"},
	{route: "DELETE /cove/v1/sandboxes/{id}", path: inSandbox, fresh: freshSandbox},
	{route: "POST /cove/v1/sandboxes/{id}/timeout", path: inSandbox + "/timeout", body: `{"timeout_seconds":3600}`},
	{route: "PUT /cove/v1/sandboxes/{id}/network", path: inSandbox + "/network", body: `{"mode":"none"}`, fresh: freshSandbox},
	{route: "GET /cove/v1/sandboxes/{id}/usage", path: inSandbox + "/usage"},
	{route: "POST /cove/v1/sandboxes/{id}/fork", path: inSandbox + "/fork", body: `{"timeout_seconds":3600}`},
	{route: "POST /cove/v1/sandboxes/{id}/pause", path: inSandbox + "/pause", fresh: freshSandbox},
	{route: "POST /cove/v1/sandboxes/{id}/resume", path: inSandbox + "/resume", fresh: freshPaused},
	{route: "POST /cove/v1/sandboxes/{id}/snapshot", path: inSandbox + "/snapshot", body: `{"name":"new"}`},
	{route: "POST /cove/v1/sandboxes/{id}/run", path: inSandbox + "/run", body: `{"code":"6*7"}`},
	{route: "POST /cove/v1/sandboxes/{id}/run", about: "in A's kernel", path: inSandbox + "/run", body: `{"code":"echo 42","kernel":"$kernel"}`},
	{route: "POST /cove/v1/sandboxes/{id}/exec", path: inSandbox + "/exec", body: `{"command":"cat kept"}`, want: "$secret"},
	{route: "GET /cove/v1/sandboxes/{id}/exec", path: inSandbox + "/exec", header: upgrade},
	{route: "GET /cove/v1/sandboxes/{id}/processes", path: inSandbox + "/processes", want: "$process"},
	{route: "POST /cove/v1/sandboxes/{id}/processes/{process}/signal", path: inSandbox + "/processes/$process/signal", body: `{"signal":"SIGCONT"}`, parent: "sandbox"},
	{route: "GET /cove/v1/sandboxes/{id}/processes/{process}/attach", path: inSandbox + "/processes/$process/attach", header: upgrade, parent: "sandbox"},
	{route: "GET /cove/v1/sandboxes/{id}/kernels", path: inSandbox + "/kernels", want: "$kernel"},
	{route: "POST /cove/v1/sandboxes/{id}/kernels", path: inSandbox + "/kernels", body: `{"language":"bash"}`},
	{route: "DELETE /cove/v1/sandboxes/{id}/kernels/{kernel}", path: inSandbox + "/kernels/$kernel", fresh: freshKernel},
	{route: "POST /cove/v1/sandboxes/{id}/kernels/{kernel}/restart", path: inSandbox + "/kernels/$kernel/restart"},
	{route: "POST /cove/v1/sandboxes/{id}/kernels/{kernel}/interrupt", path: inSandbox + "/kernels/$kernel/interrupt"},
	{route: "GET /cove/v1/sandboxes/{id}/files", path: inSandbox + "/files?path=kept", want: "$secret"},
	{route: "PUT /cove/v1/sandboxes/{id}/files", path: inSandbox + "/files?path=new", body: "text", header: map[string]string{"Content-Type": "application/octet-stream"}},
	{route: "DELETE /cove/v1/sandboxes/{id}/files", path: inSandbox + "/files?path=kept", fresh: freshSandbox},
	{route: "GET /cove/v1/sandboxes/{id}/files/stat", path: inSandbox + "/files/stat?path=kept"},
	{route: "GET /cove/v1/sandboxes/{id}/files/list", path: inSandbox + "/files/list?path=.", want: "kept"},
	{route: "POST /cove/v1/sandboxes/{id}/files/mkdir", path: inSandbox + "/files/mkdir", body: `{"path":"newdir"}`},
	{route: "POST /cove/v1/sandboxes/{id}/files/move", path: inSandbox + "/files/move", body: `{"from":"kept","to":"moved"}`, fresh: freshSandbox},
	{route: "POST /cove/v1/sandboxes/{id}/files/chmod", path: inSandbox + "/files/chmod", body: `{"path":"kept","mode":384}`, fresh: freshSandbox},
	{route: "GET /cove/v1/sandboxes/{id}/files/watch", path: inSandbox + "/files/watch?path=.", header: streams},

	{route: "GET /cove/v1/events", kind: listing, want: "$sandbox"},
	{route: "GET /cove/v1/events", kind: empty, about: "of A's sandbox", path: "/cove/v1/events?sandbox=$sandbox", want: "$sandbox"},
	{route: "GET /cove/v1/events", kind: listing, about: "followed", path: "/cove/v1/events?follow=true", header: streams},
	{route: "GET /cove/v1/templates", kind: listing, want: "$template"},
	{route: "GET /cove/v1/templates/{name}", path: "/cove/v1/templates/$template", want: "$secret"},
	{route: "DELETE /cove/v1/templates/{name}", path: "/cove/v1/templates/$template", fresh: freshSnapshot},

	{route: "GET /cove/v1/images", kind: listing, want: "$image"},
	{route: "GET /cove/v1/images/inspect", path: "/cove/v1/images/inspect?ref=$image"},
	{route: "DELETE /cove/v1/images", path: "/cove/v1/images?ref=$image", fresh: freshImage},
	{route: "POST /cove/v1/images/pull", body: `{"reference":"$my_registry/$private"}`, header: map[string]string{"Accept": "application/json"}},
	{route: "POST /cove/v1/images/import", kind: apart, path: "/cove/v1/images/import?name=$same", body: "$archive", header: map[string]string{"Content-Type": "application/x-tar"},
		fresh: func(w *world, p *tenant) things {
			return things{"archive": string(archive(w.T, "new")), "same": "registry.example/same:1"}
		}},
	{route: "POST /cove/v1/images/tag", body: `{"template":"$template","reference":"localhost/tagged:1"}`},
	{route: "POST /cove/v1/registries", kind: apart, body: `{"registry":"$registry","username":"$my_tenant","password":"of-$my_tenant"}`},
	{route: "GET /cove/v1/registries", kind: listing, want: "$registry"},
	{route: "DELETE /cove/v1/registries/{registry}", kind: apart, path: "/cove/v1/registries/$registry"},
	{route: "GET /cove/v1/kubernetes", kind: listing},

	{route: "GET /cove/v1/volumes", kind: listing, want: "$volume"},
	{route: "POST /cove/v1/volumes", kind: apart, about: "with a name that both use", body: `{"name":"same","bytes":16777216}`},
	{route: "DELETE /cove/v1/volumes/{name}", path: "/cove/v1/volumes/$volume", fresh: freshVolume},

	{route: "GET /cove/v1/sessions", kind: listing, want: "$session"},
	{route: "PUT /cove/v1/sessions/{key}", kind: apart, about: "with A's key", path: "/cove/v1/sessions/$same", body: `{"storage":"tmpfs"}`, fresh: sameSession},
	{route: "GET /cove/v1/sessions/{key}", path: inSession, want: "$secret"},
	{route: "DELETE /cove/v1/sessions/{key}", path: inSession, fresh: freshSession},
	{route: "POST /cove/v1/sessions/{key}/stop", path: inSession + "/stop", fresh: freshSession},
	{route: "POST /cove/v1/sessions/{key}/run", path: inSession + "/run", body: `{"code":"secret"}`, want: "$secret"},
	{route: "POST /cove/v1/sessions/{key}/keep", path: inSession + "/keep", body: `{"path":"/etc/hostname"}`},
	{route: "GET /cove/v1/sessions/{key}/log", path: inSession + "/log", want: "$secret"},
	{route: "GET /cove/v1/sessions/{key}/log", about: "followed", path: inSession + "/log?follow=true", header: streams},
	{route: "GET /cove/v1/sessions/{key}/state", path: inSession + "/state", want: "$secret"},
	{route: "GET /cove/v1/sessions/{key}/checkpoints", path: inSession + "/checkpoints", want: "$checkpoint"},
	{route: "POST /cove/v1/sessions/{key}/checkpoints", path: inSession + "/checkpoints", body: `{}`},
	{route: "DELETE /cove/v1/sessions/{key}/checkpoints/{checkpoint}", path: inSession + "/checkpoints/$checkpoint", fresh: freshSession, parent: "session"},
	{route: "POST /cove/v1/sessions/{key}/restore", path: inSession + "/restore", body: `{"checkpoint":"$checkpoint"}`, fresh: freshSession, parent: "session"},

	{route: "GET /cove/v1/sessions/{key}/datasets", path: inSession + "/datasets", want: "$dataset"},
	{route: "POST /cove/v1/sessions/{key}/datasets/{dataset}", path: inSession + "/datasets/other", body: `{"status":"pending"}`},
	{route: "POST /cove/v1/sessions/{key}/datasets/{dataset}", about: "with A's content", path: inSession + "/datasets/same", body: `{"status":"loaded","sha256":"$sha256"}`, parent: "session"},
	{route: "PUT /cove/v1/sessions/{key}/datasets/{dataset}", path: inSession + "/datasets/$dataset", body: "other data"},
	{route: "DELETE /cove/v1/sessions/{key}/datasets/{dataset}", path: inSession + "/datasets/$dataset", parent: "session",
		fresh: func(w *world, p *tenant) things {
			d := must[*client.Dataset](w)(p.api.StageDataset(w.Context(), p.own["session"], p.word("data"), "", strings.NewReader("more")))
			return things{"dataset": d.ID}
		}},

	{route: "GET /cove/v1/artifacts", kind: listing, want: "$artifact"},
	{route: "GET /cove/v1/artifacts", kind: empty, about: "of A's session", path: "/cove/v1/artifacts?session=$session", want: "$artifact"},
	{route: "GET /cove/v1/artifacts/{artifact}", path: "/cove/v1/artifacts/$artifact", want: "$session"},
	{route: "GET /cove/v1/artifacts/{artifact}/content", path: "/cove/v1/artifacts/$artifact/content", want: "$secret"},
	{route: "GET /cove/v1/artifacts/{artifact}/lineage", path: "/cove/v1/artifacts/$artifact/lineage", want: "$secret"},
	{route: "POST /cove/v1/artifacts/{artifact}/link", path: "/cove/v1/artifacts/$artifact/link"},
	{route: "DELETE /cove/v1/artifacts/{artifact}", path: "/cove/v1/artifacts/$artifact", fresh: freshSession},
	{route: "POST /cove/v1/artifact-keys", kind: admin},

	{route: "POST /cove/v1/snippets", kind: apart, body: `{"code":"print(6*7)"}`},
	{route: "POST /cove/v1/snippets", about: "in A's sandbox", body: `{"code":"print(6*7)","sandbox":"$sandbox"}`},

	{route: "POST /cove/v1/keys", kind: admin, body: `{"name":"more"}`},
	{route: "GET /cove/v1/keys", kind: admin, path: "/cove/v1/keys?tenant=$tenant"},
	{route: "DELETE /cove/v1/keys/{key}", kind: admin, path: "/cove/v1/keys/$key_id?tenant=$tenant",
		fresh: func(w *world, p *tenant) things {
			key := must[client.NewKey](w)(w.server.CreateKey(w.Context(), client.KeyRequest{Tenant: p.name}))
			return things{"key_id": key.ID}
		}},
}

// byLink is why links tell an artifact that is there (403) from one that is not (404): who holds a link of an artifact
// that was removed is told so. Ids of artifacts cannot be guessed.
const byLink = "a link of a removed artifact says so"

// linkTrials are the paths of signed links, which need no key.
var linkTrials = []trial{
	{route: "GET /artifacts/{artifact}", differs: byLink, path: "/artifacts/$artifact?$my_link", want: "$secret"},
	{route: "GET /artifacts/{artifact}/{$}", differs: byLink, path: "/artifacts/$artifact/?$my_link", want: "$secret"},
	{route: "GET /artifacts/{artifact}/head", differs: byLink, path: "/artifacts/$artifact/head?$my_link"},
	{route: "GET /artifacts/{artifact}", about: "with A's link", kind: known, path: "/artifacts/$artifact?$link", reason: "the link is signed for this artifact"},
}

// lastTrials come after all others, because they change what A has.
var lastTrials = []trial{
	{route: "POST /cove/v1/images/prune", kind: listing},
}
