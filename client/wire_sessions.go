package client

import (
	"encoding/json"
	"time"
)

// SessionRequest asks for the sandbox of a session: the one that lives, or a new one. Everything is optional, and what an
// existing session was made with stays: only a session that is not there, or whose sandbox is replaced, reads it.
type SessionRequest struct {
	// Template or Image to start from, as for a sandbox.
	Template string `json:"template,omitempty"`
	Image    string `json:"image,omitempty"`
	// Storage of /session: tmpfs (default) is memory and ends with the sandbox, disk ends with it too but can be forked,
	// bind outlives it.
	Storage string `json:"storage,omitempty" enum:",tmpfs,disk,bind"`
	// SizeBytes is how much /session holds; zero is the server's default.
	SizeBytes int64 `json:"size_bytes,omitempty"`
	// IdleTimeoutSeconds is after how long without use the sandbox is ended; zero is the server's default, negative never.
	IdleTimeoutSeconds float64 `json:"idle_timeout_seconds,omitempty"`
	// TimeoutSeconds is how long the sandbox lives; zero is the server's default for sessions, negative for ever where allowed.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// Datasets says where data comes from.
	Datasets *SessionDatasets `json:"datasets,omitempty"`
	// KeepFiles leaves collected files in /session/artifacts; otherwise they are moved out of it.
	KeepFiles bool              `json:"keep_files,omitempty"`
	Limits    *Limits           `json:"limits,omitempty"`
	Network   *Network          `json:"network,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	// Recreate replaces a sandbox that was lost. Without it a loss is told (410) and nothing is replaced: whoever asks
	// decides. One that was stopped by its owner is not lost.
	Recreate bool `json:"recreate,omitempty"`
}

// SessionDatasets says where a session's data comes from.
type SessionDatasets struct {
	// Access is none (default), local_ro (a directory of the server's host, read-only at /data) or api (staged by the client,
	// at /session/data).
	Access string `json:"access" enum:",none,local_ro,api"`
	// Path is the host's directory for local_ro; the operator allows which.
	Path string `json:"path,omitempty"`
}

// SessionInfo is a key pinned to a sandbox, with what it did so far. It stays readable when the sandbox has ended.
type SessionInfo struct {
	Key string `json:"key"`
	// ID of the session: a new one begins when the key is used again after the session was removed.
	ID string `json:"id"`
	// State is running, stopped (by its owner), lost, or reaped (idle or at its lifetime).
	State string `json:"state" enum:"running,stopped,lost,reaped"`
	// Sandbox is the id of its sandbox, or of the last it had.
	Sandbox string `json:"sandbox"`
	// Generation counts its sandboxes: files of /session outlive one only with storage bind, variables never.
	Generation int `json:"generation"`
	// Lost tells why the sandbox before this one, or the present one if it is gone, ended without its owner's wish.
	Lost      *SessionLoss      `json:"lost,omitempty"`
	Template  string            `json:"template"`
	Storage   string            `json:"storage" enum:"tmpfs,disk,bind"`
	SizeBytes int64             `json:"size_bytes"`
	Datasets  SessionDatasets   `json:"datasets"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	// Runs is how many have ended, Failed how many of those did not end well.
	Runs               int       `json:"runs"`
	Failed             int       `json:"failed"`
	Artifacts          int       `json:"artifacts"`
	CreatedAt          time.Time `json:"created_at"`
	LastUsed           time.Time `json:"last_used,omitzero"`
	StoppedAt          time.Time `json:"stopped_at,omitzero"`
	IdleTimeoutSeconds float64   `json:"idle_timeout_seconds,omitempty"`
	Deadline           time.Time `json:"deadline,omitzero"`
}

// SessionLoss is how a session's sandbox ended.
type SessionLoss struct {
	Sandbox string    `json:"sandbox"`
	Cause   string    `json:"cause"`
	Message string    `json:"message,omitempty"`
	At      time.Time `json:"at"`
}

// SessionList is one page of sessions, those used last first.
type SessionList struct {
	Sessions []SessionInfo `json:"sessions"`
	Cursor   string        `json:"cursor,omitempty"`
}

// SessionRunRequest runs one cell in a session: one after the other, in the order they came.
type SessionRunRequest struct {
	Code string `json:"code"`
	// Env and Cwd hold for this cell only.
	Env map[string]string `json:"env,omitempty"`
	Cwd string            `json:"cwd,omitempty"`
	// TimeoutSeconds interrupts the cell; zero is none.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// ToolCall is the caller's own name for this run; it is kept with the run and its artifacts.
	ToolCall string `json:"tool_call,omitempty"`
	// OnDisconnect is kill (default) or survive.
	OnDisconnect string `json:"on_disconnect,omitempty" enum:",kill,survive"`
}

// EventArtifact tells a file that a run left in /session/artifacts and that is kept now. It comes before the end.
const EventArtifact EventType = "artifact"

// SessionOutput is a whole run of a session, collected.
type SessionOutput struct {
	Output
	// Run is its id.
	Run string `json:"run"`
	// Replayed is true when an earlier run with the same Idempotency-Key answered; nothing ran again.
	Replayed bool `json:"replayed,omitempty"`
	// Artifacts are the files it left, those that could not be kept included.
	Artifacts []Artifact `json:"artifacts"`
}

// SessionLogLine is one line of a session's log. Type says which of the other fields there are.
type SessionLogLine struct {
	Seq  int64     `json:"seq"`
	Time time.Time `json:"timestamp"`
	// Event is session_started, code_execution, artifacts_created, dataset_loaded, dataset_failed, checkpoint_created,
	// checkpoint_restored, sandbox_lost or session_stopped.
	Event   string `json:"event" enum:"session_started,code_execution,artifacts_created,dataset_loaded,dataset_failed,checkpoint_created,checkpoint_restored,sandbox_lost,session_stopped"`
	Sandbox string `json:"container_id,omitempty"`

	// code_execution
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

	// artifacts_created
	Count     int                  `json:"artifact_count,omitempty"`
	Artifacts []SessionLogArtifact `json:"artifacts,omitempty"`

	// dataset_loaded, dataset_failed
	Dataset string `json:"dataset,omitempty"`
	SHA256  string `json:"sha256,omitempty"`

	// checkpoint_created, checkpoint_restored
	Checkpoint string `json:"checkpoint,omitempty"`

	// sandbox_lost, session_stopped, and what started
	Cause   string          `json:"cause,omitempty"`
	Message string          `json:"message,omitempty"`
	Runs    int             `json:"execution_count,omitempty"`
	Failed  int             `json:"failed_count,omitempty"`
	Config  json.RawMessage `json:"config,omitempty"`
}

// SessionLogArtifact is an artifact as the log names it.
type SessionLogArtifact struct {
	ID    string `json:"id,omitempty"`
	Name  string `json:"filename"`
	MIME  string `json:"content_type,omitempty"`
	Size  int64  `json:"size_bytes"`
	Error string `json:"error,omitempty"`
}

// SessionState is what the kernel of a session held after its last cell.
type SessionState struct {
	Time      time.Time                  `json:"timestamp"`
	Variables map[string]SessionVariable `json:"variables"`
	Modules   []string                   `json:"imported_modules"`
	// Truncated says that there is more than is told.
	Truncated bool `json:"truncated,omitempty"`
}

// SessionVariable is one variable.
type SessionVariable struct {
	Type string `json:"type"`
	// Value is its text, cut after 1000 characters; "<non-serializable>" where asking for it would run code of the user's.
	Value string `json:"value"`
}

// Checkpoint is a session as it was: files and the kernel's memory. Its sandbox sleeps until it is wanted.
type Checkpoint struct {
	ID        string            `json:"id"`
	Session   string            `json:"session"`
	CreatedAt time.Time         `json:"created_at"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	NotCopied []NotCopied       `json:"not_copied,omitempty"`
}

// CheckpointRequest keeps a session as it is.
type CheckpointRequest struct {
	// ID that the caller wants it to have, such as that of its own checkpoint; absent: a new one. One that is there already is
	// returned.
	ID       string            `json:"id,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// CheckpointList is all of a session's, oldest first.
type CheckpointList struct {
	Checkpoints []Checkpoint `json:"checkpoints"`
}

// RestoreRequest puts a session back to a checkpoint. The checkpoint stays.
type RestoreRequest struct {
	Checkpoint string `json:"checkpoint"`
	// Session is the key whose sandbox becomes that; empty is the checkpoint's own session.
	Session string `json:"session,omitempty"`
}
