package cove

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/snippet"
)

// What requests may hold, in the words of JSON Schema. The domain checks the same when a request comes; schemathesis
// (`make test-openapi`) finds where the two differ.
const (
	printable    = `^[^\x00-\x1f\x7f-\x9f]*$`
	withoutNUL   = `^[^\x00]*$`
	pathText     = `^[^\x00]+$`
	identifier   = `^[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}$`
	templateText = `^[a-z0-9][a-z0-9._-]{0,62}$`
	volumeText   = `^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`
	kernelText   = `^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$`
	tenantText   = `^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$`
	userText     = `^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?)?$`
	envText      = `^[A-Za-z_][A-Za-z0-9_]*$`
	octet        = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
	prefixText   = `^` + octet + `(\.` + octet + `){3}(/(3[0-2]|[12]?[0-9]))?$`

	// Cursors are a moment in microseconds and an id, or a number; numbers have the base 36. The store
	// takes each that has this form, also one that no page gave out: it only says where to go on.
	momentText = `^([1-9a-z][0-9a-z]{0,11}\.[A-Za-z0-9_-]{1,128})?$`
	numberText = `^([1-9a-z][0-9a-z]{0,11})?$`

	// plain paths have no other way to be written.
	plainPart    = `(?!\.{1,2}(/|$))[^/\x00-\x1f\x7f]+`
	plainText    = `^(/` + plainPart + `)+$`
	workdirText  = `^(/(?!\.{1,2}(/|$))[^/\x00-\x1f\x7f-\x9f]+)+$`
	relativeText = `^(` + plainPart + `(/` + plainPart + `)*)?$`
	targetText   = `^(?!/(proc|dev|sys|run/cove)(/|$))(?!/run$)(/` + plainPart + `)+$`
	// keys of sandboxes lead out of no folder.
	keyText = `^(?!/)(?!(.*/)?\.\.(/.*)?$)[^\x00-\x1f\x7f-\x9f]*$`

	repository    = `[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*`
	referenceText = `^` + repository + `(/` + repository + `)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$`
)

var (
	momentCursor = regexp.MustCompile(momentText)
	numberCursor = regexp.MustCompile(numberText)
)

const seconds = 10 * 365 * 24 * 3600 // maxDuration

func text(pattern string, most int) object {
	o := object{}
	if pattern != "" {
		o["pattern"] = pattern
	}
	if most > 0 {
		o["maxLength"] = most
	}
	return o
}

func between(low, high any) object { return object{"minimum": low, "maximum": high} }

// unset lets zero stand for the default beside a range.
func unset(low, high any) object {
	return object{"anyOf": []any{object{"const": 0}, between(low, high)}}
}

func environment(name, value string) object {
	return object{"propertyNames": object{"pattern": name}, "additionalProperties": object{"type": "string", "pattern": value}, "maxProperties": 256}
}

var (
	spanRule     = between(0, seconds)        // of time, in seconds
	lifetimeRule = object{"maximum": seconds} // any negative number is for ever
	envRule      = environment(envText, withoutNUL)
	// runs take every name that a process can have.
	runEnvRule   = environment(`^[^=\x00]+$`, withoutNUL)
	metadataRule = object{
		"propertyNames":        object{"minLength": 1, "maxLength": 128},
		"additionalProperties": object{"type": "string", "maxLength": 1024}, "maxProperties": 64,
	}
	prefixesRule = object{"items": text(prefixText, 0), "maxItems": 256}
	naturalRule  = between(0, int64(math.MaxInt64))
)

// fieldRules are of fields by "Type.field", with the field's name in JSON. They are added to what its Go type says.
var fieldRules = map[string]object{
	"CreateRequest.template":             text(printable, 128),
	"CreateRequest.image":                {"anyOf": []any{object{"const": ""}, text(referenceText, 255)}},
	"CreateRequest.key":                  text(keyText, 128),
	"CreateRequest.timeout_seconds":      lifetimeRule,
	"CreateRequest.idle_timeout_seconds": lifetimeRule,
	"CreateRequest.metadata":             metadataRule,
	"CreateRequest.env":                  envRule,
	"CreateRequest.mounts":               {"maxItems": 16},

	"Limits.cpus":         unset(0.01, math.MaxInt32),
	"Limits.memory_bytes": unset(16<<20, int64(math.MaxInt64)),
	"Limits.pids":         unset(4, math.MaxInt32),
	"Limits.disk_bytes":   unset(1<<20, int64(math.MaxInt64)),
	"Limits.open_files":   unset(16, math.MaxInt32),
	"Network.allow":       prefixesRule,
	"Network.deny":        prefixesRule,
	"Mount.target":        text(targetText, 247),
	"Mount.source":        text("", 1024),
	"Mount.sub_path":      text(relativeText, 1024),

	"TimeoutRequest.timeout_seconds": {"maximum": seconds, "not": object{"const": 0}},
	"ForkRequest.count":              between(1, sandbox.MaxForks),
	"ForkRequest.kernel":             text(kernelText, 0),
	"ForkRequest.wait_seconds":       between(0, 3600),
	"ForkRequest.timeout_seconds":    lifetimeRule,
	"ForkRequest.env":                envRule,
	"ForkRequest.metadata":           metadataRule,
	"PauseRequest.timeout_seconds":   lifetimeRule,
	"ResumeRequest.timeout_seconds":  lifetimeRule,
	"SnapshotRequest.name":           text(templateText, 0),
	"SnapshotRequest.description":    text(printable, 1024),
	"SnapshotRequest.env":            envRule,
	"SnapshotRequest.user":           text(userText, 0),
	"SnapshotRequest.workdir":        {"anyOf": []any{object{"const": ""}, object{"const": "/"}, text(workdirText, 1024)}},

	"RunRequest.code":             text("", sandbox.MaxCode),
	"RunRequest.kernel":           text(kernelText, 0),
	"RunRequest.env":              runEnvRule,
	"RunRequest.cwd":              text(withoutNUL, 0),
	"RunRequest.timeout_seconds":  spanRule,
	"ExecRequest.argv":            {"items": text(withoutNUL, 0)},
	"ExecRequest.command":         text(withoutNUL, 0),
	"ExecRequest.env":             runEnvRule,
	"ExecRequest.cwd":             text(withoutNUL, 0),
	"ExecRequest.user":            text(withoutNUL, 0),
	"ExecRequest.timeout_seconds": spanRule,
	"RunLimits.cpu_seconds":       naturalRule,
	"RunLimits.memory_bytes":      naturalRule,
	"RunLimits.open_files":        naturalRule,
	"PTYSize.rows":                between(0, math.MaxUint16),
	"PTYSize.cols":                between(0, math.MaxUint16),
	"KernelRequest.name":          text(kernelText, 0),
	"KernelRequest.cwd":           text(withoutNUL, 0),

	"SignalRequest.signal": text(signals(), 0),

	"MkdirRequest.path":  text(pathText, 0),
	"MkdirRequest.user":  text(withoutNUL, 0),
	"MkdirRequest.mode":  between(0, math.MaxUint32),
	"MoveRequest.from":   text(pathText, 0),
	"MoveRequest.to":     text(pathText, 0),
	"MoveRequest.user":   text(withoutNUL, 0),
	"ChmodRequest.path":  text(pathText, 0),
	"ChmodRequest.user":  text(withoutNUL, 0),
	"ChmodRequest.mode":  between(0, math.MaxUint32),
	"ChmodRequest.owner": text(withoutNUL, 0),
	"ChmodRequest.group": text(withoutNUL, 0),

	"PullRequest.reference":   text(referenceText, 255),
	"PullRequest.platform":    text(`^([a-z0-9]+/[a-z0-9]+)?$`, 0),
	"TagRequest.reference":    text(referenceText, 255),
	"TagRequest.template":     text(templateText, 0),
	"LoginRequest.registry":   text(`^([A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\.[A-Za-z0-9]{1,20}){0,4})?$`, 0),
	"LoginRequest.username":   {"minLength": 1},
	"LoginRequest.password":   {"minLength": 1},
	"VolumeRequest.name":      text(volumeText, 0),
	"VolumeRequest.bytes":     unset(16<<20, int64(4)<<40),
	"KeyRequest.name":         text("", 128),
	"KeyRequest.tenant":       text(tenantText, 0),
	"LinkRequest.ttl_seconds": unset(1, 7*24*3600),

	"SessionRequest.template":             text(printable, 128),
	"SessionRequest.image":                {"anyOf": []any{object{"const": ""}, text(referenceText, 255)}},
	"SessionRequest.size_bytes":           unset(1<<20, int64(math.MaxInt64)),
	"SessionRequest.idle_timeout_seconds": lifetimeRule,
	"SessionRequest.timeout_seconds":      lifetimeRule,
	"SessionRequest.env":                  envRule,
	"SessionRequest.metadata":             metadataRule,
	"SessionRunRequest.code":              text("", sandbox.MaxCode),
	"SessionRunRequest.env":               runEnvRule,
	"SessionRunRequest.cwd":               text(withoutNUL, 0),
	"SessionRunRequest.timeout_seconds":   spanRule,
	"SessionRunRequest.tool_call":         text("", 255),
	"KeepRequest.path":                    text(pathText, 4096),
	"KeepRequest.tool_call":               text("", 255),
	"CheckpointRequest.metadata":          {"maxProperties": 64},
	"CheckpointRequest.id":                {"anyOf": []any{object{"const": ""}, text(identifier, 0)}},
	"RestoreRequest.session":              {"anyOf": []any{object{"const": ""}, text(identifier, 0)}},
	"DatasetRequest.file":                 {"anyOf": []any{object{"const": ""}, text(identifier, 0)}},

	"SnippetRequest.code":            text("", snippet.MaxCode),
	"SnippetRequest.timeout_seconds": between(0, int(snippet.MaxTimeout.Seconds())),
	"SnippetRequest.cpu_seconds":     naturalRule,
	"SnippetRequest.memory_mb":       between(0, maxMemoryMB),
	"SnippetRequest.open_files":      naturalRule,
	"SnippetRequest.env":             runEnvRule,
	"SnippetRequest.template":        text(printable, 128),
}

// signals matches SIGTERM, TERM and 15.
func signals() string {
	names := slices.DeleteFunc(slices.Clone(agentapi.SignalNames[:]), func(name string) bool { return name == "" })
	return `^((SIG)?(` + strings.Join(names, "|") + `)|[1-9]|[1-5][0-9]|6[0-4])$`
}

// mayMiss are fields that servers and clients always write and that a request may leave out.
var mayMiss = map[string]bool{"SessionDatasets.access": true, "PTYSize.rows": true, "PTYSize.cols": true}

func properties(pairs ...any) object {
	p := object{}
	for i := 0; i < len(pairs); i += 2 {
		p[pairs[i].(string)] = pairs[i+1]
	}
	return object{"properties": p}
}

func with(o object, required ...string) object {
	o = maps.Clone(o)
	o["required"] = required
	return o
}

var (
	notEmpty = object{"minLength": 1}
	empty    = object{"maxLength": 0}
	filled   = object{"minItems": 1}
	// eitherSource is of what starts from a template or from an image.
	eitherSource = object{"not": with(properties("template", notEmpty, "image", notEmpty), "template", "image")}
)

// typeRules are of several fields of a type together.
var typeRules = map[string]object{
	"CreateRequest": {"allOf": []any{
		eitherSource,
		object{"anyOf": []any{properties("start", object{"const": false}), with(properties("image", notEmpty), "image")}},
	}},
	"SessionRequest": eitherSource,
	"Network": {"anyOf": []any{
		properties("mode", object{"const": "internet"}),
		properties("mode", object{"const": "none"}, "allow", object{"maxItems": 0}),
		with(properties("mode", object{"const": "list"}, "allow", filled), "allow"),
	}},
	"Mount": {"anyOf": []any{
		with(properties("kind", object{"const": "host"}, "source", text(plainText, 0), "create", object{"const": false}), "kind"),
		properties("kind", object{"enum": []string{"", "volume"}}, "source", text(volumeText, 0)),
	}},
	"ExecRequest": {
		"not": object{"required": []string{"pty"}},
		"anyOf": []any{
			with(properties("command", notEmpty, "argv", object{"maxItems": 0}), "command"),
			with(properties("argv", object{"minItems": 1, "prefixItems": []any{notEmpty}}, "command", empty), "argv"),
		},
	},
	"SessionDatasets": {"anyOf": []any{
		with(properties("access", object{"const": "local_ro"}, "path", text(plainText, 0)), "path"),
		properties("access", object{"const": "api"}, "path", object{"anyOf": []any{empty, text(plainText, 0)}}),
		properties("access", object{"enum": []string{"", "none"}}, "path", empty),
	}},
	"PullRequest": {"anyOf": []any{
		properties("username", empty, "password", empty),
		with(properties("username", notEmpty, "password", notEmpty), "username", "password"),
	}},
	"DatasetRequest": {"anyOf": []any{
		with(properties("status", object{"const": "loaded"}, "sha256", text(`^[0-9a-f]{64}$`, 0)), "sha256"),
		properties("status", object{"enum": []string{"pending", "failed"}}),
	}},
	"SnippetRequest": {"anyOf": []any{
		properties("sandbox", empty),
		properties("template", empty, "network", object{"const": false}),
	}},
}

// paramRules are of path, query and header parameters, by "operation.name" or by name alone.
var paramRules = map[string]object{
	"limit":                between(1, sandbox.MaxPage),
	"after":                between(0, int64(1)<<62),
	"last":                 between(1, math.MaxInt32),
	"depth":                between(1, 64),
	"offset":               between(0, int64(math.MaxInt64)),
	"length":               between(0, int64(math.MaxInt64)),
	"path":                 text(pathText, 0),
	"user":                 text(withoutNUL, 0),
	"mode":                 text(`^[0-7]{0,4}$`, 0),
	"ref":                  text(referenceText, 255),
	"kernel":               text(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`, 0),
	"registry":             text(`^[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\.[A-Za-z0-9]{1,20}){0,4}$`, 0),
	"cursor":               text(momentText, 0),
	"listArtifacts.cursor": text(numberText, 0),
	"listSandboxes.state":  {"enum": []string{"starting", "running", "paused", "stopping", "ended"}},
	"listSessions.state":   {"enum": []string{"running", "stopped", "lost", "reaped"}},
	"removeVolume.name":    text(volumeText, 0),
	// Bytes of a header beyond ASCII are text only by chance.
	"createSandbox.Idempotency-Key": text(`^[\x20-\x7e]*$`, 255),
	"importImage.name":              {"anyOf": []any{object{"const": ""}, text(referenceText, 255)}},
	"stageDataset.file":             {"anyOf": []any{object{"const": ""}, text(identifier, 0)}},
	"Idempotency-Key":               text("", 255),
}

func paramRule(r route, name string) object {
	if rule := paramRules[r.name+"."+name]; rule != nil {
		return rule
	}
	return paramRules[name]
}
