package client

import (
	"encoding/json"
	"time"
)

// CreateRequest asks for a sandbox. Everything is optional.
type CreateRequest struct {
	// Template to start from; empty is the server's default.
	Template string `json:"template,omitempty"`
	// Image to start from instead of a template: a container image, which is pulled when it is not here.
	Image string `json:"image,omitempty"`
	// Start has the sandbox begin with what the image itself would start, its entrypoint and command, as a process in the background.
	Start bool `json:"start,omitempty"`
	// Key pins the sandbox: a living sandbox of yours with the same key is returned instead of a new one.
	Key string `json:"key,omitempty"`
	// TimeoutSeconds is how long the sandbox lives; zero is the server's default, negative is for ever where allowed.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// IdleTimeoutSeconds is after how long without use IdleAction happens; zero is the server's default, negative never.
	IdleTimeoutSeconds float64 `json:"idle_timeout_seconds,omitempty"`
	// Limits that differ from the template's.
	Limits *Limits `json:"limits,omitempty"`
	// Metadata is yours to filter by.
	Metadata map[string]string `json:"metadata,omitempty"`
	// Env is the environment of every process in the sandbox.
	Env map[string]string `json:"env,omitempty"`
	// Network says what may leave; absent is the server's default.
	Network *Network `json:"network,omitempty"`
	// Storage is volatile (default), durable or tmpfs.
	Storage string `json:"storage,omitempty" enum:",volatile,durable,tmpfs"`
	// AutoResume lets any use of the sandbox resume it when it is paused; otherwise such a use is refused.
	AutoResume bool `json:"auto_resume,omitempty"`
	// IdleAction is what happens when the idle timeout has passed: kill (default) or pause.
	IdleAction string `json:"idle_action,omitempty" enum:",kill,pause"`
	// Mounts are volumes and host paths that are seen in the sandbox.
	Mounts []Mount `json:"mounts,omitempty"`
}

// Limits bound a sandbox; zero leaves the template's.
type Limits struct {
	CPUs        float64 `json:"cpus,omitempty"`
	MemoryBytes int64   `json:"memory_bytes,omitempty"`
	Pids        int     `json:"pids,omitempty"`
	DiskBytes   int64   `json:"disk_bytes,omitempty"`
	OpenFiles   int     `json:"open_files,omitempty"`
}

// Network is what may leave a sandbox.
type Network struct {
	// Mode is internet, none or list.
	Mode string `json:"mode" enum:"internet,none,list"`
	// Allow holds IPv4 prefixes; only with mode list.
	Allow []string `json:"allow,omitempty"`
	// Deny holds IPv4 prefixes that are taken away.
	Deny []string `json:"deny,omitempty"`
}

// SandboxInfo is a sandbox as the server knows it, also after its end.
type SandboxInfo struct {
	ID string `json:"id"`
	// State is starting, running, paused, stopping or ended.
	State    string `json:"state" enum:"starting,running,paused,stopping,ended"`
	Template string `json:"template"`
	// Image is the container image that was asked for; absent: a template was.
	Image    string            `json:"image,omitempty"`
	Key      string            `json:"key,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Mounts   []Mount           `json:"mounts,omitempty"`
	Limits   Limits            `json:"limits"`
	Network  Network           `json:"network"`
	Storage  string            `json:"storage,omitempty"`
	// ForkedFrom is the sandbox that this one was copied from.
	ForkedFrom string `json:"forked_from,omitempty"`
	// IdleTimeoutSeconds is after how long without use IdleAction happens; absent: never. It stands still while paused.
	IdleTimeoutSeconds float64 `json:"idle_timeout_seconds,omitempty"`
	// IdleAction is kill or pause.
	IdleAction string `json:"idle_action,omitempty" enum:"kill,pause"`
	// AutoResume is true when any use resumes the sandbox while it is paused.
	AutoResume bool      `json:"auto_resume,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	LastUsed   time.Time `json:"last_used,omitzero"`
	// PausedAt is since when it is paused; absent while it is not.
	PausedAt time.Time `json:"paused_at,omitzero"`
	// Deadline is when its lifetime, or while it is paused that of its pause, passes; absent: never.
	Deadline time.Time `json:"deadline,omitzero"`
	EndedAt  time.Time `json:"ended_at,omitzero"`
	// Cause is why it ended: killed, expired, idle, oom, agent_died, maker_died, host_reboot,
	// start_failed, shutdown, exited, failed, host_disk_full, disk_failed, record_lost.
	Cause string `json:"cause,omitempty"`
	// Message says more about the cause in one sentence.
	Message string `json:"message,omitempty"`
	// Usage of its whole life, once it has ended.
	Usage *SandboxUsage `json:"usage,omitempty"`
}

// SandboxList is one page of sandboxes.
type SandboxList struct {
	Sandboxes []SandboxInfo `json:"sandboxes"`
	// Cursor asks for the next page; absent on the last.
	Cursor string `json:"cursor,omitempty"`
}

// TimeoutRequest gives a sandbox a new lifetime, counted from now.
type TimeoutRequest struct {
	TimeoutSeconds float64 `json:"timeout_seconds"`
}

// ForkRequest asks for copies of a running sandbox: its files, and the memory of one of its kernels.
type ForkRequest struct {
	// Count is how many copies, 1 to 100; absent is 1. All of them are made, or none.
	Count int `json:"count,omitempty"`
	// Kernel whose memory is copied; empty is the one the sandbox was born with.
	Kernel string `json:"kernel,omitempty"`
	// Busy says what to do while the kernel runs a cell: wait (default) or refuse.
	Busy string `json:"busy,omitempty" enum:",wait,refuse"`
	// WaitSeconds is how long the fork may take with busy wait, at most 3600; zero is 30.
	WaitSeconds float64 `json:"wait_seconds,omitempty"`
	// TimeoutSeconds is how long the copies live; zero is the server's default, negative is for ever where allowed.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// Env is added to the template's environment in the copies.
	Env map[string]string `json:"env,omitempty"`
	// InheritEnv gives the copies the environment too that the sandbox was created with, secrets in it included.
	InheritEnv bool `json:"inherit_env,omitempty"`
	// Metadata of the copies; they do not have the sandbox's.
	Metadata map[string]string `json:"metadata,omitempty"`
}

// ForkResult is what a fork made.
type ForkResult struct {
	Sandboxes []SandboxInfo `json:"sandboxes"`
	// NotCopied is what the sandbox has and its copies do not.
	NotCopied []NotCopied `json:"not_copied"`
	// StallMS is for how long the sandbox's kernel took no cell.
	StallMS float64 `json:"stall_ms"`
	// MemoryBytes is how much memory the kernel had of its own; branches share it until they write to it.
	MemoryBytes int64 `json:"memory_bytes"`
}

// NotCopied is one thing that a copy of a sandbox does not have.
type NotCopied struct {
	// Kind is process, kernel, file, socket, pipe, memory or environment.
	Kind string `json:"kind"`
	// What it is, in one line for a person.
	What string `json:"what"`
}

// PauseRequest stops a sandbox until it is resumed. It keeps its memory and costs no processor time.
type PauseRequest struct {
	// TimeoutSeconds is how long it may stay paused before it ends; zero is the server's default, negative is for ever
	// where allowed.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// AutoResume lets any use of the sandbox resume it; absent leaves it as it is.
	AutoResume *bool `json:"auto_resume,omitempty"`
}

// ResumeRequest lets a paused sandbox go on.
type ResumeRequest struct {
	// TimeoutSeconds is a new lifetime from now; zero goes on with what was left of the old one when it was paused,
	// negative is for ever where allowed.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
}

// SnapshotRequest makes a template of a sandbox's files as they are now.
type SnapshotRequest struct {
	// Name of the template: up to 63 lower-case letters, digits, dots, dashes and underscores.
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// Env is added to the environment of the template's sandboxes.
	Env map[string]string `json:"env,omitempty"`
	// User is who processes of its sandboxes run as, a name or a number, also with a group: app:staff; empty, like
	// Workdir, is as in this sandbox's template.
	User    string `json:"user,omitempty"`
	Workdir string `json:"workdir,omitempty"`
}

// SandboxUsage is what a sandbox uses, by the host's own accounting.
type SandboxUsage struct {
	CPUMS       int64 `json:"cpu_ms"`
	MemoryBytes int64 `json:"memory_bytes"`
	PeakBytes   int64 `json:"peak_bytes"`
	Pids        int   `json:"pids"`
	DiskBytes   int64 `json:"disk_bytes"`
	OOMKills    int   `json:"oom_kills"`
}

// RunRequest runs one cell in a kernel, which keeps its variables between cells.
type RunRequest struct {
	Code string `json:"code"`
	// Kernel to run in; empty is the one the sandbox was born with.
	Kernel string `json:"kernel,omitempty"`
	// Env and Cwd hold for this cell only.
	Env map[string]string `json:"env,omitempty"`
	Cwd string            `json:"cwd,omitempty"`
	// TimeoutSeconds interrupts the cell; zero is none.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// OnDisconnect is kill (default) or survive.
	OnDisconnect string `json:"on_disconnect,omitempty" enum:",kill,survive"`
	// Silent leaves no history and no count.
	Silent bool `json:"silent,omitempty"`
}

// ExecRequest runs one command: either Argv or Command, a line for /bin/sh.
type ExecRequest struct {
	Argv    []string `json:"argv,omitempty"`
	Command string   `json:"command,omitempty"`
	// Env is added to the sandbox's environment.
	Env map[string]string `json:"env,omitempty"`
	// CleanEnv makes Env all there is.
	CleanEnv bool   `json:"clean_env,omitempty"`
	Cwd      string `json:"cwd,omitempty"`
	// User is a name or uid; empty is the sandbox's own user.
	User string `json:"user,omitempty"`
	// Stdin is fed to the command, which then sees its end. Not for interactive commands, which send frames.
	Stdin string `json:"stdin,omitempty"`
	// PTY gives the command a terminal of this size; only for interactive commands.
	PTY *PTYSize `json:"pty,omitempty"`
	// TimeoutSeconds kills the command and all it started; zero is none.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// OnDisconnect is kill (default) or survive.
	OnDisconnect string `json:"on_disconnect,omitempty" enum:",kill,survive"`
	// Tag is a name of yours for the process.
	Tag    string     `json:"tag,omitempty"`
	Limits *RunLimits `json:"limits,omitempty"`
}

// RunLimits bound one command on top of the sandbox's limits; zero is none.
type RunLimits struct {
	CPUSeconds int `json:"cpu_seconds,omitempty"`
	// MemoryBytes bounds the address space.
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
	OpenFiles   int   `json:"open_files,omitempty"`
}

// PTYSize is a terminal's size in cells.
type PTYSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// EventType is the kind of an Event.
type EventType string

// The events of a run in the order they may come: started, any of the middle ones, then end or fault.
const (
	EventStarted EventType = "started"
	EventStdout  EventType = "stdout"
	EventStderr  EventType = "stderr"
	EventResult  EventType = "result"
	EventError   EventType = "error"
	EventFile    EventType = "file"
	EventNotice  EventType = "notice"
	EventEnd     EventType = "end"
	EventFault   EventType = "fault"
)

// Event is one thing a run tells: a line of the NDJSON stream. A stream that ends with neither end nor fault was cut.
type Event struct {
	Type EventType `json:"type" enum:"started,stdout,stderr,result,error,file,notice,artifact,end,fault"`
	Time time.Time `json:"time,omitzero"`
	// Text is output that is valid UTF-8; a character is never split between two events.
	Text string `json:"text,omitempty"`
	// Base64 is output that is not valid UTF-8.
	Base64 []byte `json:"base64,omitempty"`
	// PID and ID name the process that started, Count is the cell's execution count.
	PID   int    `json:"pid,omitempty"`
	ID    string `json:"id,omitempty"`
	Count int    `json:"count,omitempty"`
	// Result is a displayed value or the value of the last expression.
	Result *Result `json:"result,omitempty"`
	// Error is what the code raised.
	Error *CodeError  `json:"error,omitempty"`
	File  *FileChange `json:"file,omitempty"`
	// Message of a notice.
	Message string `json:"message,omitempty"`
	End     *End   `json:"end,omitempty"`
	// Artifact is a file that was kept; only in runs of sessions.
	Artifact *Artifact `json:"artifact,omitempty"`
	// Run is the id of a session's run, with started; Replayed says that an earlier run with the same key is told again.
	Run      string `json:"run,omitempty"`
	Replayed bool   `json:"replayed,omitempty"`
	// Fault says why the stream could not go on.
	Fault *Fault `json:"fault,omitempty"`
}

// Data is the output of a stdout or stderr event, whichever way it travelled.
func (e *Event) Data() []byte {
	if e.Base64 != nil {
		return e.Base64
	}
	return []byte(e.Text)
}

// Result is one value in several MIME types: text types are JSON strings, binary types base64 strings,
// application/json is the value itself.
type Result struct {
	Data     map[string]json.RawMessage `json:"data"`
	Metadata map[string]json.RawMessage `json:"metadata,omitempty"`
	// Main marks the value of the cell's last expression.
	Main bool `json:"main,omitempty"`
	// ID is set when later results may update this one; Update marks such a result.
	ID     string `json:"id,omitempty"`
	Update bool   `json:"update,omitempty"`
}

// Text is the value as plain text.
func (r *Result) Text() string {
	var s string
	// A value that is no JSON string has no plain text.
	_ = json.Unmarshal(r.Data["text/plain"], &s)
	return s
}

// CodeError is an exception that the code raised.
type CodeError struct {
	Name      string   `json:"name"`
	Value     string   `json:"value"`
	Traceback []string `json:"traceback"`
}

// The outcomes of a run.
const (
	OutcomeOK          = "ok"
	OutcomeError       = "error"
	OutcomeTimeout     = "timeout"
	OutcomeInterrupted = "interrupted"
	OutcomeKilled      = "killed"
	OutcomeOOM         = "oom"
	OutcomeKernelDied  = "kernel_died"
)

// End is the last word of a run.
type End struct {
	Outcome string `json:"outcome" enum:"ok,error,timeout,interrupted,killed,oom,kernel_died,refused"`
	// ExitCode of a command; -1 when a signal ended it.
	ExitCode int    `json:"exit_code"`
	Signal   string `json:"signal,omitempty"`
	// Message says in one sentence what happened and what is left.
	Message string `json:"message,omitempty"`
	// Lost is true when the kernel's variables are gone.
	Lost  bool     `json:"lost,omitempty"`
	Usage RunUsage `json:"usage,omitzero"`
}

// RunUsage is what a run cost.
type RunUsage struct {
	WallMS    float64 `json:"wall_ms,omitempty"`
	CPUMS     float64 `json:"cpu_ms,omitempty"`
	PeakBytes int64   `json:"peak_bytes,omitempty"`
}

// Output is a whole run, collected.
type Output struct {
	// Stdout and Stderr as text; bytes that are not UTF-8 are replaced, and the exact bytes are in the base64 field.
	Stdout       string `json:"stdout"`
	Stderr       string `json:"stderr"`
	StdoutBase64 []byte `json:"stdout_base64,omitempty"`
	StderrBase64 []byte `json:"stderr_base64,omitempty"`
	// Truncated is true when there was more output than a collected answer holds; stream to get all of it.
	Truncated bool `json:"truncated,omitempty"`
	// Results are the displayed values and the value of the last expression.
	Results []Result `json:"results"`
	// Error is what the code raised.
	Error   *CodeError `json:"error,omitempty"`
	Notices []string   `json:"notices,omitempty"`
	Count   int        `json:"count,omitempty"`
	End
}

// Text is the value of the last expression as plain text.
func (o *Output) Text() string {
	for i := range o.Results {
		if o.Results[i].Main {
			return o.Results[i].Text()
		}
	}
	return ""
}

// Process is one process that somebody started in the sandbox.
type Process struct {
	ID   string   `json:"id"`
	PID  int      `json:"pid"`
	Argv []string `json:"argv"`
	Cwd  string   `json:"cwd,omitempty"`
	User string   `json:"user,omitempty"`
	Tag  string   `json:"tag,omitempty"`
	PTY  bool     `json:"pty,omitempty"`
}

// ProcessList is all of them.
type ProcessList struct {
	Processes []Process `json:"processes"`
}

// SignalRequest sends a signal such as SIGTERM.
type SignalRequest struct {
	Signal string `json:"signal"`
	// Tree includes everything the process started.
	Tree bool `json:"tree,omitempty"`
}

// Kernel is one stateful interpreter.
type Kernel struct {
	Name     string `json:"name"`
	Language string `json:"language"`
	// State is starting, idle, busy or dead.
	State   string `json:"state" enum:"starting,idle,busy,dead"`
	PID     int    `json:"pid,omitempty"`
	Cwd     string `json:"cwd,omitempty"`
	Message string `json:"message,omitempty"`
	IPython bool   `json:"ipython,omitempty"`
	// Warm is true when it was forked from a prepared interpreter.
	Warm bool `json:"warm,omitempty"`
}

// KernelList is all kernels of a sandbox.
type KernelList struct {
	Kernels []Kernel `json:"kernels"`
}

// KernelRequest starts a kernel.
type KernelRequest struct {
	// Name of the kernel; empty picks one.
	Name string `json:"name,omitempty"`
	// Language is python (default), javascript, typescript or bash, or r or java where the template has them.
	Language string `json:"language,omitempty"`
	Cwd      string `json:"cwd,omitempty"`
}

// Entry is one file of a sandbox.
type Entry struct {
	Name string `json:"name"`
	Path string `json:"path"`
	// Type is file, dir, symlink or other.
	Type string `json:"type" enum:"file,dir,symlink,other"`
	Size int64  `json:"size"`
	// Mode holds the permission bits with setuid, setgid and sticky.
	Mode    uint32    `json:"mode"`
	UID     int       `json:"uid"`
	GID     int       `json:"gid"`
	User    string    `json:"user,omitempty"`
	Group   string    `json:"group,omitempty"`
	ModTime time.Time `json:"mod_time"`
	// Target of a symlink.
	Target string `json:"target,omitempty"`
	// Xattrs are the user.* attributes as text.
	Xattrs map[string]string `json:"xattrs,omitempty"`
}

// EntryList is a directory's entries.
type EntryList struct {
	Entries []Entry `json:"entries"`
}

// MkdirRequest makes a directory.
type MkdirRequest struct {
	Path string `json:"path"`
	User string `json:"user,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
	// Parents makes missing parents, and an existing directory is no error.
	Parents bool `json:"parents,omitempty"`
}

// MoveRequest renames a path.
type MoveRequest struct {
	From string `json:"from"`
	To   string `json:"to"`
	User string `json:"user,omitempty"`
}

// ChmodRequest changes permissions or owner; what is absent stays.
type ChmodRequest struct {
	Path string `json:"path"`
	// User is who does it.
	User  string  `json:"user,omitempty"`
	Mode  *uint32 `json:"mode,omitempty"`
	Owner string  `json:"owner,omitempty"`
	Group string  `json:"group,omitempty"`
}

// FileChange is a change under a watched path.
type FileChange struct {
	// Op is create, write, remove, rename or chmod.
	Op    string `json:"op" enum:"create,write,remove,rename,chmod"`
	Path  string `json:"path"`
	IsDir bool   `json:"is_dir,omitempty"`
}

// TemplateInfo is something a sandbox can start from.
type TemplateInfo struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// From is the template that this one adds to.
	From string `json:"from,omitempty"`
	// Source is built-in, file (the operator's definition), snapshot (of a sandbox's files) or image (a container image).
	Source string `json:"source" enum:"built-in,file,snapshot,image"`
	// Digest of its content; absent while it is not built.
	Digest string `json:"digest,omitempty"`
	// Built is true when a sandbox can start from it now. What follows of it is known only then.
	Built bool `json:"built"`
	// TenantOwned is true when it is your tenant's own: nobody else can use it, and you can remove it.
	TenantOwned bool `json:"tenant_owned"`
	// User is who processes run as.
	User    string `json:"user,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	// Env is what it gives every process.
	Env map[string]string `json:"env,omitempty"`
	// Sudo is true when that user may become root of the sandbox.
	Sudo bool `json:"sudo,omitempty"`
	// Python is absent when it has none.
	Python *TemplatePython `json:"python,omitempty"`
	Limits Limits          `json:"limits"`
	// Warnings say what the host lacks or what was left out.
	Warnings  []string  `json:"warnings,omitempty"`
	CreatedAt time.Time `json:"created_at,omitzero"`
}

// TemplatePython is the interpreter of a template's kernels.
type TemplatePython struct {
	Executable string `json:"executable"`
	Version    string `json:"version,omitempty"`
	// Preload lists the modules that every kernel has imported already.
	Preload []string `json:"preload,omitempty"`
}

// TemplateList is every template that you can use.
type TemplateList struct {
	Templates []TemplateInfo `json:"templates"`
}

// LifecycleEvent is one thing that happened to a sandbox: a line of the NDJSON stream of events.
type LifecycleEvent struct {
	// Seq grows; ask for what came after it.
	Seq     int64     `json:"seq,omitempty"`
	At      time.Time `json:"at,omitzero"`
	Sandbox string    `json:"sandbox,omitempty"`
	// Type is created, started, adopted, lifetime_changed, network_changed, metadata_changed, paused, resumed, forked, snapshot or ended;
	// fault when the stream breaks. A fork is told on both sides: the message of a copy is the id of its parent, that of
	// the parent the ids of its copies.
	Type     string    `json:"type" enum:"created,started,adopted,lifetime_changed,network_changed,metadata_changed,paused,resumed,forked,snapshot,ended,fault"`
	Deadline time.Time `json:"deadline,omitzero"`
	Cause    string    `json:"cause,omitempty"`
	Message  string    `json:"message,omitempty"`
	// Fault says why the stream could not go on; it is then the last line.
	Fault *Fault `json:"fault,omitempty"`
}

// KeyRequest makes an API key.
type KeyRequest struct {
	Name string `json:"name,omitempty"`
	// Tenant that the key acts for; empty is your own.
	Tenant string `json:"tenant,omitempty"`
	// Admin keys may manage keys.
	Admin bool `json:"admin,omitempty"`
}

// Key is an API key without its secret.
type Key struct {
	ID     string `json:"id"`
	Tenant string `json:"tenant"`
	Name   string `json:"name,omitempty"`
	// Prefix is how the key begins, to tell keys apart.
	Prefix    string    `json:"prefix"`
	Admin     bool      `json:"admin,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	RevokedAt time.Time `json:"revoked_at,omitzero"`
	// LastUsed is exact to a minute.
	LastUsed time.Time `json:"last_used,omitzero"`
}

// NewKey is a fresh key; the secret is shown this once.
type NewKey struct {
	Key
	Secret string `json:"secret"`
}

// KeyList is every key of a tenant.
type KeyList struct {
	Keys []Key `json:"keys"`
}

// Control acts on an interactive command while it runs.
type Control struct {
	// Signal such as SIGINT.
	Signal string   `json:"signal,omitempty"`
	Resize *PTYSize `json:"resize,omitempty"`
}

// Fault is a failure: what kind, and a sentence to act on.
type Fault struct {
	Kind    Kind   `json:"kind" enum:"internal,invalid,denied,unauthed,not_found,conflict,exhausted,disk_full,timeout,unavailable,gone,unsupported"`
	Message string `json:"message"`
}

// ErrorBody is the body of every answer that is not a success.
type ErrorBody struct {
	Error Fault `json:"error"`
}

// KubernetesAccess is how kubectl and the clients of agent-sandbox reach the server. A key is their token.
type KubernetesAccess struct {
	// Server is the URL of the part of Kubernetes' API that the server speaks.
	Server string `json:"server"`
	// CertificateAuthority is what must be trusted for it, as PEM; empty: what is trusted anyhow.
	CertificateAuthority string `json:"certificate_authority,omitempty"`
	// RouterPath follows the URL of this API's server, for clients that reach sandboxes without a key. It is a secret of the tenant's.
	RouterPath string `json:"router_path"`
}
