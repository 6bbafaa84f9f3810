package cove

import (
	"net/http"

	"github.com/covehq/cove/client"
)

// route is one line of the API: the mux and the OpenAPI file are both made from this table.
type route struct {
	method, path string
	name         string // operationId
	summary      string
	about        string // more than the summary, where needed
	tag          string
	public       bool // needs no key
	admin        bool // needs an admin key
	query        []param
	header       []param
	request      any // JSON body, by an example of its type; rawBody for bytes
	required     bool
	status       int
	also         int // another success with the same body
	response     any // JSON answer, rawBody for bytes
	stream       any // lines of an NDJSON answer
	handle       func(*API, *call) error
}

// upgrades reports whether an answer is another protocol on the same connection.
func (r route) upgrades() bool { return r.status == http.StatusSwitchingProtocols }

// param is a query or header parameter.
type param struct {
	name, kind, about string
	required          bool
	repeats           bool // may be given several times
}

type rawBody struct{}

var (
	pathParam = param{"path", "string", "path in the sandbox; a relative one starts at the user's home", true, false}
	userParam = param{"user", "string", "name or uid who does it; default is the sandbox's own user", false, false}
	recursive = param{"recursive", "boolean", "include everything below", false, false}
	refParam  = param{"ref", "string", "name of an image, such as python:3.12-slim; its digest or a beginning of that also does", true, false}
	tenant    = param{"tenant", "string", "another tenant; default is your own", false, false}
)

const negotiated = "Each event is a line of NDJSON, sent as it happens; with `Accept: application/json` the whole run is collected into one answer."

var routes = []route{
	{method: "GET", path: "/openapi.json", name: "openapi", tag: "server", summary: "This file", public: true,
		status: 200, response: map[string]any{}, handle: serveDocument},

	{method: "POST", path: "/sandboxes", name: "createSandbox", tag: "sandboxes", summary: "Create a sandbox",
		about:   "Answers when the sandbox takes code: 201 for a new one, 200 for a living one with the same key.",
		header:  []param{{"Idempotency-Key", "string", "a retry with the same value finds what the first request made", false, false}},
		request: client.CreateRequest{}, status: 201, also: 200, response: client.SandboxInfo{}, handle: (*API).create},
	{method: "GET", path: "/sandboxes", name: "listSandboxes", tag: "sandboxes", summary: "List your sandboxes, newest first",
		query: []param{
			{"state", "string", "starting, running, paused, stopping or ended; may be repeated", false, true},
			{"metadata.*", "string", "metadata.NAME=VALUE; all must match", false, false},
			{"template", "string", "only of this template", false, false},
			{"key", "string", "only with this key", false, false},
			{"limit", "integer", "how many on a page", false, false},
			{"cursor", "string", "the cursor of the page before", false, false},
		}, status: 200, response: client.SandboxList{}, handle: (*API).list},
	{method: "GET", path: "/sandboxes/{id}", name: "getSandbox", tag: "sandboxes", summary: "Tell about a sandbox, also after its end",
		status: 200, response: client.SandboxInfo{}, handle: (*API).get},
	{method: "DELETE", path: "/sandboxes/{id}", name: "killSandbox", tag: "sandboxes", summary: "End a sandbox",
		status: 200, response: client.SandboxInfo{}, handle: (*API).kill},
	{method: "POST", path: "/sandboxes/{id}/timeout", name: "setTimeout", tag: "sandboxes", summary: "Give a sandbox a new lifetime, from now",
		request: client.TimeoutRequest{}, required: true, status: 200, response: client.SandboxInfo{}, handle: (*API).setTimeout},
	{method: "PUT", path: "/sandboxes/{id}/network", name: "setNetwork", tag: "sandboxes", summary: "Change what may leave a sandbox",
		request: client.Network{}, required: true, status: 200, response: client.SandboxInfo{}, handle: (*API).setNetwork},
	{method: "GET", path: "/sandboxes/{id}/usage", name: "getUsage", tag: "sandboxes", summary: "What a sandbox uses now",
		status: 200, response: client.SandboxUsage{}, handle: (*API).usage},
	{method: "POST", path: "/sandboxes/{id}/fork", name: "forkSandbox", tag: "sandboxes", summary: "Copy a running sandbox, files and memory",
		about: "Answers when every copy takes code; all of them are made, or none. The copies have the sandbox's template, limits, network, " +
			"storage and idle timeout, and the memory of one kernel. What they do not have is told.",
		request: client.ForkRequest{}, status: 201, response: client.ForkResult{}, handle: (*API).fork},
	{method: "POST", path: "/sandboxes/{id}/pause", name: "pauseSandbox", tag: "sandboxes", summary: "Stop a sandbox with its memory until it is resumed",
		about:   "A run that goes on stands still. Pausing a paused sandbox answers with it as it is.",
		request: client.PauseRequest{}, status: 200, response: client.SandboxInfo{}, handle: (*API).pause},
	{method: "POST", path: "/sandboxes/{id}/resume", name: "resumeSandbox", tag: "sandboxes", summary: "Let a paused sandbox go on",
		about:   "Resuming a running sandbox answers with it as it is.",
		request: client.ResumeRequest{}, status: 200, response: client.SandboxInfo{}, handle: (*API).resume},
	{method: "POST", path: "/sandboxes/{id}/snapshot", name: "snapshotSandbox", tag: "sandboxes", summary: "Make a template of a sandbox's files",
		about:   "The sandbox goes on meanwhile. The template is your tenant's own.",
		request: client.SnapshotRequest{}, required: true, status: 201, response: client.TemplateInfo{}, handle: (*API).snapshot},

	{method: "POST", path: "/sandboxes/{id}/run", name: "runCode", tag: "runs", summary: "Run a cell in a kernel", about: negotiated,
		request: client.RunRequest{}, required: true, status: 200, response: client.Output{}, stream: client.Event{}, handle: (*API).run},
	{method: "POST", path: "/sandboxes/{id}/exec", name: "exec", tag: "runs", summary: "Run a command", about: negotiated,
		request: client.ExecRequest{}, required: true, status: 200, response: client.Output{}, stream: client.Event{}, handle: (*API).exec},
	{method: "GET", path: "/sandboxes/{id}/exec", name: "execInteractive", tag: "runs", summary: "Run a command with live stdin, signals and a terminal",
		about: "HTTP/1.1 only: ask with `Connection: Upgrade` and `Upgrade: cove-exec/1`. After the 101 both sides exchange frames: " +
			"one byte of kind, three zero bytes, payload length as four bytes in network order, payload. " +
			"From the client: 1 start (JSON ExecRequest, first), 2 stdin, 3 end of stdin, 4 control (JSON Control). " +
			"From the server: 16 event (JSON Event; the last is end or fault), 17 stdout, 18 stderr. A payload holds at most 1 MiB.",
		status: 101, handle: (*API).interactive},
	{method: "GET", path: "/sandboxes/{id}/processes", name: "listProcesses", tag: "runs", summary: "List the commands that run",
		status: 200, response: client.ProcessList{}, handle: (*API).processes},
	{method: "POST", path: "/sandboxes/{id}/processes/{process}/signal", name: "signalProcess", tag: "runs", summary: "Send a signal to a command",
		about: "The process is named by its id, its tag or its pid.", request: client.SignalRequest{}, required: true, status: 204, handle: (*API).signal},
	{method: "GET", path: "/sandboxes/{id}/processes/{process}/attach", name: "attachProcess", tag: "runs", summary: "Join a command that was started earlier",
		about: "The process is named by its id, its tag or its pid. Output comes from now on, nothing before. " +
			"Ask and speak as for an interactive command, but without the start frame; leaving never ends the command.",
		status: 101, handle: (*API).attach},

	{method: "GET", path: "/sandboxes/{id}/kernels", name: "listKernels", tag: "kernels", summary: "List the kernels",
		status: 200, response: client.KernelList{}, handle: (*API).kernels},
	{method: "POST", path: "/sandboxes/{id}/kernels", name: "startKernel", tag: "kernels", summary: "Start a kernel",
		request: client.KernelRequest{}, status: 201, response: client.Kernel{}, handle: (*API).startKernel},
	{method: "DELETE", path: "/sandboxes/{id}/kernels/{kernel}", name: "stopKernel", tag: "kernels", summary: "End a kernel",
		status: 204, handle: (*API).stopKernel},
	{method: "POST", path: "/sandboxes/{id}/kernels/{kernel}/restart", name: "restartKernel", tag: "kernels", summary: "Start a kernel afresh; its variables are gone",
		status: 200, response: client.Kernel{}, handle: (*API).restartKernel},
	{method: "POST", path: "/sandboxes/{id}/kernels/{kernel}/interrupt", name: "interruptKernel", tag: "kernels", summary: "Interrupt the running cell",
		status: 204, handle: (*API).interruptKernel},

	{method: "GET", path: "/sandboxes/{id}/files", name: "readFile", tag: "files", summary: "Read a file",
		query: []param{pathParam, userParam,
			{"offset", "integer", "first byte", false, false}, {"length", "integer", "how many bytes; default is all", false, false}},
		status: 200, response: rawBody{}, handle: (*API).readFile},
	{method: "PUT", path: "/sandboxes/{id}/files", name: "writeFile", tag: "files", summary: "Write a file of any size",
		about: "Parents are made. The content appears at once when all of it has arrived, or not at all. Without a body the file is empty.",
		query: []param{pathParam, userParam,
			{"mode", "string", "octal permission bits; default keeps an existing file's, else 0644", false, false}, {"append", "boolean", "add to the end instead", false, false}},
		request: rawBody{}, status: 200, response: client.Entry{}, handle: (*API).writeFile},
	{method: "DELETE", path: "/sandboxes/{id}/files", name: "removeFile", tag: "files", summary: "Remove a file or directory",
		query: []param{pathParam, userParam, recursive}, status: 204, handle: (*API).removeFile},
	{method: "GET", path: "/sandboxes/{id}/files/stat", name: "statFile", tag: "files", summary: "Tell about a path",
		query: []param{pathParam, userParam}, status: 200, response: client.Entry{}, handle: (*API).statFile},
	{method: "GET", path: "/sandboxes/{id}/files/list", name: "listFiles", tag: "files", summary: "List a directory",
		query:  []param{pathParam, userParam, {"depth", "integer", "how deep; default 1, its own entries", false, false}},
		status: 200, response: client.EntryList{}, handle: (*API).listFiles},
	{method: "POST", path: "/sandboxes/{id}/files/mkdir", name: "makeDirectory", tag: "files", summary: "Make a directory",
		request: client.MkdirRequest{}, required: true, status: 200, response: client.Entry{}, handle: (*API).mkdir},
	{method: "POST", path: "/sandboxes/{id}/files/move", name: "moveFile", tag: "files", summary: "Rename a path",
		request: client.MoveRequest{}, required: true, status: 200, response: client.Entry{}, handle: (*API).move},
	{method: "POST", path: "/sandboxes/{id}/files/chmod", name: "chmodFile", tag: "files", summary: "Change permissions or owner",
		request: client.ChmodRequest{}, required: true, status: 200, response: client.Entry{}, handle: (*API).chmod},
	{method: "GET", path: "/sandboxes/{id}/files/watch", name: "watchFiles", tag: "files", summary: "Watch a directory",
		about: "The first event is started; from then on no change is missed. Ends when the client leaves.",
		query: []param{pathParam, userParam, recursive}, status: 200, stream: client.Event{}, handle: (*API).watch},

	{method: "GET", path: "/events", name: "listEvents", tag: "server", summary: "What happened to your sandboxes",
		query: []param{
			{"sandbox", "string", "only of this sandbox", false, false},
			{"after", "integer", "only what came after this seq", false, false},
			{"follow", "boolean", "go on with what happens next", false, false},
		}, status: 200, stream: client.LifecycleEvent{}, handle: (*API).events},
	{method: "GET", path: "/templates", name: "listTemplates", tag: "server", summary: "What a sandbox can start from",
		status: 200, response: client.TemplateList{}, handle: (*API).listTemplates},
	{method: "GET", path: "/templates/{name}", name: "getTemplate", tag: "server", summary: "Tell about a template",
		status: 200, response: client.TemplateInfo{}, handle: (*API).getTemplate},
	{method: "DELETE", path: "/templates/{name}", name: "removeTemplate", tag: "server", summary: "Remove a template that a snapshot of yours made",
		about: "Sandboxes that run from it go on.", status: 204, handle: (*API).removeTemplate},

	{method: "GET", path: "/images", name: "listImages", tag: "images", summary: "List the container images of yours that are here",
		status: 200, response: client.ImageList{}, handle: (*API).listImages},
	{method: "GET", path: "/images/inspect", name: "getImage", tag: "images", summary: "Tell about an image",
		query: []param{refParam}, status: 200, response: client.ImageInfo{}, handle: (*API).getImage},
	{method: "DELETE", path: "/images", name: "removeImage", tag: "images", summary: "Remove a name, and the image with its last name",
		about: "Sandboxes that run from it go on.", query: []param{refParam}, status: 204, handle: (*API).removeImage},
	{method: "POST", path: "/images/pull", name: "pullImage", tag: "images", summary: "Get an image from its registry",
		about:   "Progress comes as lines of NDJSON, then the image or why there is none; with `Accept: application/json` only the image.",
		request: client.PullRequest{}, required: true, status: 200, response: client.ImageInfo{}, stream: client.PullEvent{}, handle: (*API).pullImage},
	{method: "POST", path: "/images/import", name: "importImage", tag: "images", summary: "Make an image of an archive",
		about:   "The archive is what `docker save` writes, an OCI layout as a tar, or a tar of a root directory; each also compressed.",
		query:   []param{{"name", "string", "what the image is called; needed where the archive does not say", false, false}},
		request: rawBody{}, required: true, status: 200, response: client.ImageList{}, handle: (*API).importImage},
	{method: "POST", path: "/images/tag", name: "tagImage", tag: "images", summary: "Give a template of yours the name of an image",
		request: client.TagRequest{}, required: true, status: 200, response: client.ImageInfo{}, handle: (*API).tagImage},
	{method: "POST", path: "/images/prune", name: "pruneImages", tag: "images", summary: "Remove images without a name, layers of builds, and what else nobody needs",
		status: 200, response: client.PruneResult{}, handle: (*API).pruneImages},
	{method: "POST", path: "/registries", name: "login", tag: "images", summary: "Keep a password for a registry, once the registry has accepted it",
		request: client.LoginRequest{}, required: true, status: 204, handle: (*API).login},
	{method: "GET", path: "/registries", name: "listRegistries", tag: "images", summary: "List where you have logged in",
		status: 200, response: client.RegistryList{}, handle: (*API).registries},
	{method: "DELETE", path: "/registries/{registry}", name: "logout", tag: "images", summary: "Forget the password for a registry",
		status: 204, handle: (*API).logout},

	{method: "GET", path: "/kubernetes", name: "kubernetesAccess", tag: "keys", summary: "How kubectl and agent-sandbox's clients reach this server",
		about: "`cove kubeconfig` makes a file of it.", status: 200, response: client.KubernetesAccess{}, handle: (*API).kubernetesAccess},

	{method: "GET", path: "/volumes", name: "listVolumes", tag: "volumes", summary: "List your volumes",
		status: 200, response: client.VolumeList{}, handle: (*API).listVolumes},
	{method: "POST", path: "/volumes", name: "createVolume", tag: "volumes", summary: "Make a volume: files that outlive sandboxes",
		request: client.VolumeRequest{}, required: true, status: 201, response: client.Volume{}, handle: (*API).createVolume},
	{method: "DELETE", path: "/volumes/{name}", name: "removeVolume", tag: "volumes", summary: "Remove a volume with its files",
		about: "One that a sandbox has is refused.", status: 204, handle: (*API).removeVolume},

	{method: "GET", path: "/sessions", name: "listSessions", tag: "sessions", summary: "List your sessions, those used last first",
		query: []param{
			{"state", "string", "running, stopped, lost or reaped; may be repeated", false, true},
			{"limit", "integer", "how many on a page", false, false},
			{"cursor", "string", "the cursor of the page before", false, false},
		}, status: 200, response: client.SessionList{}, handle: ofSessions((*API).listSessions)},
	{method: "PUT", path: "/sessions/{key}", name: "openSession", tag: "sessions", summary: "The sandbox of a key: the one that lives, or a new one",
		about: "Atomic: however many ask at once, one sandbox is made. 201 when a sandbox was made, 200 when it was there. " +
			"A sandbox that was lost is told (410) and replaced only with recreate.",
		request: client.SessionRequest{}, status: 200, also: 201, response: client.SessionInfo{}, handle: ofSessions((*API).openSession)},
	{method: "GET", path: "/sessions/{key}", name: "getSession", tag: "sessions", summary: "Tell about a session, also when its sandbox is gone",
		status: 200, response: client.SessionInfo{}, handle: ofSessions((*API).getSession)},
	{method: "DELETE", path: "/sessions/{key}", name: "removeSession", tag: "sessions", summary: "End a session and remove its log and its files",
		about: "Artifacts stay until they are removed themselves.", status: 204, handle: ofSessions((*API).removeSession)},
	{method: "POST", path: "/sessions/{key}/stop", name: "stopSession", tag: "sessions", summary: "End a session's sandbox",
		about:  "The session stays, with its log and, with storage bind, its files. Stopping a stopped one answers with it as it is.",
		status: 200, response: client.SessionInfo{}, handle: ofSessions((*API).stopSession)},
	{method: "POST", path: "/sessions/{key}/run", name: "runInSession", tag: "sessions", summary: "Run a cell, keep what it leaves",
		about:   negotiated + " Cells of a session run one after the other. What is new or changed in /session/artifacts is kept before the end is told.",
		header:  []param{{"Idempotency-Key", "string", "a second run with the same value and code is not run: the first one's answer is told again", false, false}},
		request: client.SessionRunRequest{}, required: true, status: 200, response: client.SessionOutput{}, stream: client.Event{}, handle: ofSessions((*API).runSession)},
	{method: "POST", path: "/sessions/{key}/keep", name: "keepFile", tag: "sessions", summary: "Keep one file of the session's sandbox as an artifact",
		request: client.KeepRequest{}, required: true, status: 201, response: client.Artifact{}, handle: ofSessions((*API).keepFile)},
	{method: "GET", path: "/sessions/{key}/log", name: "sessionLog", tag: "sessions", summary: "What happened in a session, oldest first",
		query: []param{
			{"after", "integer", "only lines after this seq", false, false},
			{"last", "integer", "only so many of the newest", false, false},
			{"follow", "boolean", "go on with what happens next", false, false},
		}, status: 200, stream: client.SessionLogLine{}, handle: ofSessions((*API).sessionLog)},
	{method: "GET", path: "/sessions/{key}/state", name: "sessionState", tag: "sessions", summary: "The kernel's variables and modules after the last cell",
		status: 200, response: client.SessionState{}, handle: ofSessions((*API).sessionState)},
	{method: "GET", path: "/sessions/{key}/checkpoints", name: "listCheckpoints", tag: "sessions", summary: "List a session's checkpoints",
		status: 200, response: client.CheckpointList{}, handle: ofSessions((*API).listCheckpoints)},
	{method: "POST", path: "/sessions/{key}/checkpoints", name: "checkpointSession", tag: "sessions", summary: "Keep a session as it is: files and memory",
		about: "Needs storage disk and a driver that can fork.", request: client.CheckpointRequest{}, status: 201, also: 200, response: client.Checkpoint{}, handle: ofSessions((*API).checkpointSession)},
	{method: "DELETE", path: "/sessions/{key}/checkpoints/{checkpoint}", name: "removeCheckpoint", tag: "sessions", summary: "Remove a checkpoint",
		status: 204, handle: ofSessions((*API).removeCheckpoint)},
	{method: "POST", path: "/sessions/{key}/restore", name: "restoreSession", tag: "sessions", summary: "Put a session back to a checkpoint",
		about: "The sandbox that it has ends; the checkpoint stays.", request: client.RestoreRequest{}, required: true, status: 200, response: client.SessionInfo{}, handle: ofSessions((*API).restoreSession)},

	{method: "GET", path: "/sessions/{key}/datasets", name: "listDatasets", tag: "datasets", summary: "List the datasets of a session",
		status: 200, response: client.DatasetList{}, handle: (*API).listDatasets},
	{method: "PUT", path: "/sessions/{key}/datasets/{dataset}", name: "stageDataset", tag: "datasets", summary: "Send a dataset of any size and stage it",
		about:   "Content that is there already is stored once. It appears in /session/data when all of it has arrived.",
		query:   []param{{"file", "string", "its name in /session/data; default is the id, with .parquet where the id has no extension", false, false}},
		request: rawBody{}, required: true, status: 200, response: client.Dataset{}, handle: (*API).stageDataset},
	{method: "POST", path: "/sessions/{key}/datasets/{dataset}", name: "markDataset", tag: "datasets", summary: "Say that a dataset is pending or failed, or stage content that is here",
		request: client.DatasetRequest{}, required: true, status: 200, response: client.Dataset{}, handle: (*API).markDataset},
	{method: "DELETE", path: "/sessions/{key}/datasets/{dataset}", name: "removeDataset", tag: "datasets", summary: "Take a dataset out of a session",
		status: 204, handle: (*API).removeDataset},

	{method: "GET", path: "/artifacts", name: "listArtifacts", tag: "artifacts", summary: "List your artifacts, newest first",
		query: []param{
			{"session", "string", "only of this session's key", false, false},
			{"run", "string", "only of this run", false, false},
			{"sha256", "string", "only with this content", false, false},
			{"limit", "integer", "how many on a page", false, false},
			{"cursor", "string", "the cursor of the page before", false, false},
		}, status: 200, response: client.ArtifactList{}, handle: (*API).listArtifacts},
	{method: "GET", path: "/artifacts/{artifact}", name: "getArtifact", tag: "artifacts", summary: "Tell about an artifact",
		status: 200, response: client.Artifact{}, handle: (*API).getArtifact},
	{method: "GET", path: "/artifacts/{artifact}/content", name: "readArtifact", tag: "artifacts", summary: "Read an artifact",
		about: "Understands Range and If-None-Match, and HEAD. Links need no key: /artifacts/{id}?token=…", status: 200, response: rawBody{}, handle: (*API).readArtifact},
	{method: "GET", path: "/artifacts/{artifact}/lineage", name: "artifactLineage", tag: "artifacts", summary: "Which cell made a file, and from what",
		status: 200, response: client.ArtifactLineage{}, handle: (*API).artifactLineage},
	{method: "POST", path: "/artifacts/{artifact}/link", name: "linkArtifact", tag: "artifacts", summary: "Make a signed link that needs no key",
		request: client.LinkRequest{}, status: 200, response: client.Link{}, handle: (*API).linkArtifact},
	{method: "DELETE", path: "/artifacts/{artifact}", name: "removeArtifact", tag: "artifacts", summary: "Remove an artifact",
		status: 204, handle: (*API).removeArtifact},
	{method: "POST", path: "/artifact-keys", name: "rotateLinkKey", tag: "artifacts", summary: "Sign links with a new key; those signed before hold until they end", admin: true,
		query:  []param{{"revoke", "boolean", "links signed before end at once", false, false}},
		status: 204, handle: (*API).rotateLinkKey},

	{method: "POST", path: "/snippets", name: "runSnippet", tag: "runs", summary: "Run Python code in a fresh process of a fresh sandbox",
		request: client.SnippetRequest{}, required: true, status: 200, response: client.SnippetResult{}, handle: (*API).runSnippet},

	{method: "POST", path: "/keys", name: "createKey", tag: "keys", summary: "Make an API key; its secret is shown this once", admin: true,
		request: client.KeyRequest{}, status: http.StatusCreated, response: client.NewKey{}, handle: (*API).createKey},
	{method: "GET", path: "/keys", name: "listKeys", tag: "keys", summary: "List API keys", admin: true,
		query: []param{tenant}, status: 200, response: client.KeyList{}, handle: (*API).listKeys},
	{method: "DELETE", path: "/keys/{key}", name: "revokeKey", tag: "keys", summary: "Revoke an API key", admin: true,
		query: []param{tenant}, status: 204, handle: (*API).revokeKey},
}

// What the OpenAPI file names without a route of its own.
var (
	interactiveControl client.Control
	failure            client.ErrorBody
)
