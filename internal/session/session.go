// Package session pins a key, such as the thread of a conversation, to a sandbox and keeps its log: what ran, what it cost, what
// it left. It asks for sandboxes, artifacts and datasets and knows no protocol.
package session

import (
	"encoding/json"
	"regexp"
	"time"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// State is where a session is. A switch over states is exhaustive.
type State string

// The states.
const (
	StateStarting State = "starting" // its row names a sandbox that is being made; seen by others only after a crash
	StateRunning  State = "running"
	StateStopped  State = "stopped" // its owner ended its sandbox
	StateLost     State = "lost"    // its sandbox ended without anybody's wish
	StateReaped   State = "reaped"  // its sandbox was idle for too long, or its lifetime has passed
)

// Known reports whether s is one of the states that a caller can ask for.
func (s State) Known() bool {
	switch s {
	case StateRunning, StateStopped, StateLost, StateReaped:
		return true
	case StateStarting:
		return false
	}
	return false
}

// Storage is where /session lies.
type Storage string

// The storages.
const (
	StorageTmpfs Storage = "tmpfs" // in memory, and ends with the sandbox: the default
	StorageDisk  Storage = "disk"  // ends with the sandbox too, and can be forked
	StorageBind  Storage = "bind"  // a volume, which outlives the sandbox and ends with the session
)

// The annotations that a session's sandbox has.
const (
	AnnotationKey        = "cove.session"
	AnnotationID         = "cove.session.id"
	AnnotationCheckpoint = "cove.checkpoint" // of a sandbox that sleeps as a checkpoint
)

// Spec is what a session is made with. What it leaves open is the server's choice.
type Spec struct {
	Template    string            `json:"template,omitempty"`
	Image       string            `json:"image,omitempty"` // the name by which Template was asked for
	Storage     Storage           `json:"storage,omitempty"`
	Size        int64             `json:"size,omitempty"`
	IdleTimeout time.Duration     `json:"idle_timeout,omitempty"` // negative: none
	Lifetime    time.Duration     `json:"lifetime,omitempty"`     // negative: none, where allowed
	Datasets    Datasets          `json:"datasets,omitzero"`
	KeepFiles   bool              `json:"keep_files,omitempty"`
	Limits      template.Limits   `json:"limits,omitzero"`
	Network     *policy.Network   `json:"network,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Metadata    map[string]string `json:"metadata,omitempty"`
}

// Datasets says where a session's data comes from.
type Datasets struct {
	Access string `json:"access,omitempty"` // none, local_ro, api
	Path   string `json:"path,omitempty"`
}

// Session is a key with its present sandbox and what it did so far.
type Session struct {
	ID     string `json:"id"`
	Tenant string `json:"tenant"`
	Key    string `json:"key"`
	State  State  `json:"state"`
	Spec

	Sandbox    string    `json:"sandbox"`        // the present one, or the last
	Next       string    `json:"next,omitempty"` // one that is being made
	Generation int       `json:"generation"`
	Lost       *Loss     `json:"lost,omitempty"`
	Volume     string    `json:"volume,omitempty"` // of storage bind, once it was made
	Runs       int       `json:"runs"`
	Failed     int       `json:"failed"`
	Fresh      bool      `json:"fresh,omitempty"` // nothing has run in its present sandbox
	Artifacts  int       `json:"artifacts"`
	Created    time.Time `json:"created"`
	LastUsed   time.Time `json:"last_used,omitzero"`
	Stopped    time.Time `json:"stopped,omitzero"`
	Told       bool      `json:"told,omitempty"` // the end of its sandbox is in its log

	Deadline time.Time `json:"-"` // of its sandbox, while that lives
}

// Loss is how a session's sandbox ended without its owner's wish.
type Loss struct {
	Sandbox string        `json:"sandbox"`
	Cause   sandbox.Cause `json:"cause"`
	Message string        `json:"message,omitempty"`
	At      time.Time     `json:"at"`
}

// Run is one cell of a session, as it is kept.
type Run struct {
	ID         string    `json:"id"`
	Session    string    `json:"session"`
	Tenant     string    `json:"tenant"`
	Sandbox    string    `json:"sandbox"`
	Server     string    `json:"server,omitempty"` // whose Manager runs it; see Config.Server
	Cell       int       `json:"cell"`             // counts the session's runs
	Generation int       `json:"generation"`       // of the session, in which Key holds
	ToolCall   string    `json:"tool_call,omitempty"`
	Code       string    `json:"code"`              // as much of it as is kept
	Key        string    `json:"key,omitempty"`     // the idempotency key
	Digest     string    `json:"digest,omitempty"`  // of what was asked for under it
	Outcome    string    `json:"outcome,omitempty"` // empty while it runs; OutcomeCut, OutcomeFailed, or an outcome of agentapi
	Started    time.Time `json:"started"`           //
	Ended      time.Time `json:"ended,omitzero"`    //
	Answer     []byte    `json:"answer,omitempty"`  // what was told, for a retry under the same key
}

// How a run can end beside the outcomes of agentapi.
const (
	OutcomeCut    = "cut"    // the server ended before the run did
	OutcomeFailed = "failed" // the run could not go on, such as when its sandbox was lost
)

// Checkpoint is a session as it was, in a sandbox that sleeps.
type Checkpoint struct {
	ID        string              `json:"id"`
	Session   string              `json:"session"` // the session's id
	Tenant    string              `json:"tenant"`
	Sandbox   string              `json:"sandbox"`
	Created   time.Time           `json:"created"`
	Metadata  map[string]string   `json:"metadata,omitempty"`
	NotCopied []sandbox.NotCopied `json:"not_copied,omitempty"`
}

// LogEvent is what a line of a session's log tells.
type LogEvent string

// The events of a log.
const (
	LogStarted       LogEvent = "session_started"
	LogExecution     LogEvent = "code_execution"
	LogArtifacts     LogEvent = "artifacts_created"
	LogDatasetLoaded LogEvent = "dataset_loaded"
	LogDatasetFailed LogEvent = "dataset_failed"
	LogCheckpoint    LogEvent = "checkpoint_created"
	LogRestored      LogEvent = "checkpoint_restored"
	LogSandboxLost   LogEvent = "sandbox_lost"
	LogStopped       LogEvent = "session_stopped"
)

// LogLine is one line of a session's log, in the form in which it is written and told.
type LogLine struct {
	Seq     int64     `json:"seq"`
	Time    time.Time `json:"timestamp"`
	Event   LogEvent  `json:"event"`
	Sandbox string    `json:"container_id,omitempty"`

	Run        string  `json:"run,omitempty"`
	Cell       int     `json:"cell,omitempty"`
	ToolCall   string  `json:"tool_call,omitempty"`
	Code       string  `json:"code,omitempty"`
	Success    *bool   `json:"success,omitempty"`
	Stdout     string  `json:"stdout,omitempty"`
	Stderr     string  `json:"stderr,omitempty"`
	Error      string  `json:"error,omitempty"`
	Result     string  `json:"result,omitempty"`
	Truncated  bool    `json:"truncated,omitempty"`
	Timeout    float64 `json:"timeout,omitempty"`
	Outcome    string  `json:"outcome,omitempty"`
	ExitCode   *int    `json:"exit_code,omitempty"`
	DurationMS float64 `json:"duration_ms,omitempty"`
	CPUMS      float64 `json:"cpu_ms,omitempty"`
	PeakBytes  int64   `json:"peak_bytes,omitempty"`

	Count     int           `json:"artifact_count,omitempty"`
	Artifacts []LogArtifact `json:"artifacts,omitempty"`

	Dataset string `json:"dataset,omitempty"`
	SHA256  string `json:"sha256,omitempty"`

	Checkpoint string `json:"checkpoint,omitempty"`

	Cause   string          `json:"cause,omitempty"`
	Message string          `json:"message,omitempty"`
	Runs    int             `json:"execution_count,omitempty"`
	Failed  int             `json:"failed_count,omitempty"`
	Config  json.RawMessage `json:"config,omitempty"`
}

// LogArtifact is an artifact as the log names it.
type LogArtifact struct {
	ID    string `json:"id,omitempty"`
	Name  string `json:"filename"`
	MIME  string `json:"content_type,omitempty"`
	Size  int64  `json:"size_bytes"`
	Error string `json:"error,omitempty"`
}

// logArtifacts are as many as a line names.
func logArtifacts(all []artifact.Artifact) []LogArtifact {
	out := make([]LogArtifact, min(len(all), maxLogFiles))
	for i := range out {
		a := &all[i]
		name, _ := clip(a.Path, maxLogName)
		why, _ := clip(a.Error, maxLogName/2)
		out[i] = LogArtifact{ID: a.ID, Name: name, MIME: a.MIME, Size: a.Size, Error: why}
	}
	return out
}

// Query chooses among a tenant's sessions, those used last first.
type Query struct {
	States []State
	Limit  int // zero: sandbox.DefaultPage
	Cursor string
}

// Page is a part of a listing.
type Page struct {
	Items []Session
	Next  string
}

// keySyntax leaves out what could lead out of a folder or break a line.
var keySyntax = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}$`)

// CheckKey refuses what cannot be a session's key, or a checkpoint's id.
func CheckKey(what, key string) error {
	if !keySyntax.MatchString(key) {
		return fault.New(fault.Invalid, "%s %.140q: use 1 to 128 letters, digits and . _ : @ = + -, a letter or digit first", what, key)
	}
	return nil
}
