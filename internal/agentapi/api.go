// Package agentapi is the one vocabulary of server, agent and kernel: requests, events and their framing.
// It knows no HTTP, no SDK and no driver.
//
// A connection carries one operation: the client sends a Request frame, the two sides exchange frames, and the
// agent closes with an End frame. Back-pressure is the socket's own: an agent never buffers more than a chunk for a
// slow reader. Connections are made by the driver (Dial) and are cheap, so there is no multiplexing to get wrong.
package agentapi

import (
	"encoding/json"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Version of the protocol; an agent tells its own in Hello and the server says when it cannot speak it.
const Version = 1

// ArgumentLimit says what Linux allows a command: MAX_ARG_STRLEN for one argument, with the zero byte at its end.
const ArgumentLimit = "one argument may have at most 131071 bytes"

// Op names an operation of the agent.
type Op string

// The operations; the comment names their parameters and what End.Value holds.
const (
	OpHello       Op = "hello"        // none → Hello
	OpExec        Op = "exec"         // ExecParams; streams; End is the process's end
	OpAttach      Op = "attach"       // AttachParams; streams a process started earlier, from now on
	OpProcesses   Op = "processes"    // none → []Process
	OpSignal      Op = "signal"       // SignalParams
	OpStdin       Op = "stdin"        // StdinParams; then Stdin frames and EOF; Close ends the process's stdin
	OpResize      Op = "resize"       // ResizeParams
	OpRun         Op = "run"          // RunParams; streams; End is the cell's end
	OpKernels     Op = "kernels"      // none → []Kernel
	OpKernelStart Op = "kernel_start" // KernelStartParams: start by exec of a program of the sandbox's → Kernel
	OpKernelWait  Op = "kernel_wait"  // KernelParams: until that kernel is ready or has died → Kernel
	OpKernelStop  Op = "kernel_stop"  // KernelParams: kill it with its children
	OpInterrupt   Op = "interrupt"    // KernelParams: SIGINT to the running cell
	OpStat        Op = "stat"         // PathParams → Entry
	OpList        Op = "list"         // ListParams → []Entry
	OpRead        Op = "read"         // ReadParams; Event started with Entry, then Data frames
	OpWrite       Op = "write"        // WriteParams; client sends Data frames and EOF → Entry
	OpMkdir       Op = "mkdir"        // MkdirParams → Entry
	OpMove        Op = "move"         // MoveParams → Entry
	OpRemove      Op = "remove"       // RemoveParams
	OpChmod       Op = "chmod"        // ChmodParams → Entry
	OpSymlink     Op = "symlink"      // SymlinkParams → none: a link is there, or is not
	OpWatch       Op = "watch"        // WatchParams; Event started, then file events until the client leaves
	OpDial        Op = "dial"         // DialParams; Event started, then Data frames both ways; EOF is a half close
	OpMetrics     Op = "metrics"      // none → Metrics
	OpAccount     Op = "account"      // AccountParams → Account
	OpListen      Op = "listen"       // ListenParams → none: a port of loopback that takes connections and says no more than that it is there
	OpHalt        Op = "halt"         // none → none when every process but the agent is gone; files stay
	OpCollect     Op = "collect"      // CollectParams; Event started, then for each file Event found, Data frames, EOF (or Event notice: it broke off) → Collected
	OpDiscard     Op = "discard"      // DiscardParams → Discarded
	OpBranch      Op = "branch"       // BranchParams: Event branched when a copy stands; the kernel takes no cell until the client leaves
)

// Request is the first frame of a connection.
type Request struct {
	Op     Op              `json:"op"`
	Params json.RawMessage `json:"params,omitempty"`
}

// Hello is what an agent says of itself.
type Hello struct {
	Version int      `json:"version"`
	PID     int      `json:"pid"`
	Ops     []string `json:"ops,omitempty"`
}

// EventType is the kind of an Event.
type EventType string

// The events of a run, in the order they may come: started, any of the middle ones, end.
const (
	EventStarted EventType = "started"  // the process or cell has begun
	EventStdout  EventType = "stdout"   // Data
	EventStderr  EventType = "stderr"   // Data
	EventResult  EventType = "result"   // Result: a displayed value or the value of the last expression
	EventError   EventType = "error"    // Error: the code raised
	EventFile    EventType = "file"     // File: something changed under a watched path
	EventSynced  EventType = "synced"   // of a watch: everything that changed before Control.Sync, which is Count, was told
	EventFound   EventType = "found"    // of a collection: Found, which follows unless it is refused
	EventNotice  EventType = "notice"   // Message: the agent tells something worth showing, such as a restarted kernel
	EventReady   EventType = "ready"    // kernel to agent only: it can take cells
	EventBranch  EventType = "branched" // a copy of the kernel was made, after Count µs; from a kernel with Message: why not
	EventEnd     EventType = "end"      // End: always the last
)

// Event is one thing a run tells. It is made once, by kernel or agent, and every dialect encodes this same value.
type Event struct {
	Type    EventType  `json:"type"`
	Time    time.Time  `json:"time,omitzero"`
	Data    []byte     `json:"data,omitempty"`    // stdout, stderr: raw bytes; travels as a raw frame, not as JSON
	PID     int        `json:"pid,omitempty"`     // started
	ID      string     `json:"id,omitempty"`      // started: the process's id
	Count   int        `json:"count,omitempty"`   // started: the cell's execution count
	Result  *Result    `json:"result,omitempty"`  // result
	Error   *CodeError `json:"error,omitempty"`   // error
	File    *FileEvent `json:"file,omitempty"`    // file
	Entry   *Entry     `json:"entry,omitempty"`   // started, for read
	Found   *Found     `json:"found,omitempty"`   // found
	Message string     `json:"message,omitempty"` // notice
	End     *End       `json:"end,omitempty"`     // end
	Lost    []Lost     `json:"lost,omitempty"`    // ready, of a branch
	Waits   bool       `json:"waits,omitempty"`   // result, of a kernel: it prints on when it hears that this was passed on
}

// Lost is something that a kernel had and its branch has not.
type Lost struct {
	Kind string `json:"kind"` // "socket", "pipe", "file"
	What string `json:"what"`
}

// Result is one rich value: the same thing in several MIME types. Text types are JSON strings, binary types are
// base64 in a JSON string, application/json is the value itself.
type Result struct {
	Data     map[string]json.RawMessage `json:"data"`
	Metadata map[string]json.RawMessage `json:"metadata,omitempty"`
	Main     bool                       `json:"main,omitempty"` // the value of the cell's last expression
	ID       string                     `json:"id,omitempty"`   // display id, when later events may update it
	Update   bool                       `json:"update,omitempty"`
}

// CodeError is an exception that the user's code raised.
type CodeError struct {
	Name      string   `json:"name"`
	Value     string   `json:"value"`
	Traceback []string `json:"traceback"`
}

// Outcome says how a run ended.
type Outcome string

// The outcomes.
const (
	OutcomeOK          Outcome = "ok"          // exit status 0, or a cell without an exception
	OutcomeError       Outcome = "error"       // non-zero exit, or a cell that raised
	OutcomeTimeout     Outcome = "timeout"     // the time given has passed; what ran was killed or interrupted
	OutcomeInterrupted Outcome = "interrupted" // the caller asked
	OutcomeKilled      Outcome = "killed"      // a signal that nobody here sent
	OutcomeOOM         Outcome = "oom"         // killed for lack of memory
	OutcomeKernelDied  Outcome = "kernel_died" // the kernel is gone (exit(), crash); the next run gets a new one
	OutcomeRefused     Outcome = "refused"     // the operation never began; Fault says why
)

// End is the last word of an operation.
type End struct {
	Outcome  Outcome         `json:"outcome"`
	ExitCode int             `json:"exit_code"`         // processes; −1 when a signal ended it
	Signal   string          `json:"signal,omitempty"`  // "SIGKILL"
	Message  string          `json:"message,omitempty"` // one sentence for a person or a model: what happened, what is left
	Lost     bool            `json:"lost,omitempty"`    // the kernel's variables are gone
	Usage    Usage           `json:"usage,omitzero"`
	Fault    *Fault          `json:"fault,omitempty"`
	Value    json.RawMessage `json:"value,omitempty"` // the answer of an operation that has one
	Empty    bool            `json:"empty,omitempty"` // of a run with a Box: the directory is there and holds nothing
}

// Fault carries a fault over the wire.
type Fault struct {
	Kind    fault.Kind `json:"kind"`
	Message string     `json:"message"`
}

// Usage is what a run cost.
type Usage struct {
	WallMS    float64 `json:"wall_ms,omitempty"`
	CPUMS     float64 `json:"cpu_ms,omitempty"`
	PeakBytes int64   `json:"peak_bytes,omitempty"`
}

// Control acts on the operation of its own connection.
type Control struct {
	Signal    string   `json:"signal,omitempty"` // "SIGTERM", "SIGKILL", …
	Resize    *PTYSize `json:"resize,omitempty"`
	Interrupt bool     `json:"interrupt,omitempty"` // SIGINT to the running cell
	Sync      int      `json:"sync,omitempty"`      // of a watch: answer with EventSynced once all changes until now were told
}

// Disconnect says what happens to a run when its client leaves.
type Disconnect string

// What leaving does.
const (
	DisconnectKill    Disconnect = "kill"    // default: the run ends
	DisconnectSurvive Disconnect = "survive" // it goes on; its output is dropped unless somebody attaches
)

// PTYSize is a terminal's size in cells.
type PTYSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// RunLimits bound one run on top of the sandbox's own limits; zero is none.
type RunLimits struct {
	CPUSeconds  int   `json:"cpu_seconds,omitempty"`
	MemoryBytes int64 `json:"memory_bytes,omitempty"` // address space
	OpenFiles   int   `json:"open_files,omitempty"`
}

// ExecParams start a process.
type ExecParams struct {
	Argv       []string          `json:"argv"`
	Instead    string            `json:"instead,omitempty"`   // the program's path where there is no Argv[0], which is a path then
	Env        map[string]string `json:"env,omitempty"`       // added to the sandbox's environment
	CleanEnv   bool              `json:"clean_env,omitempty"` // Env is all there is
	EnvFile    string            `json:"env_file,omitempty"`  // lines NAME=value, which go before Env; one that is not there has none
	Cwd        string            `json:"cwd,omitempty"`       // default: the sandbox's working directory
	User       string            `json:"user,omitempty"`      // name or uid; default: the sandbox's user
	PTY        *PTYSize          `json:"pty,omitempty"`
	Stdin      bool              `json:"stdin,omitempty"` // the client sends Stdin frames; else stdin is empty
	TimeoutMS  int64             `json:"timeout_ms,omitempty"`
	Disconnect Disconnect        `json:"disconnect,omitempty"`
	Tag        string            `json:"tag,omitempty"`
	Limits     RunLimits         `json:"limits,omitzero"`
	OwnPath    bool              `json:"own_path,omitempty"` // the program is the one of the sandbox's own PATH, whatever Env says
	Snippet    *Snippet          `json:"-"`                  // for whoever watches in the server
}

// Snippet tells that a command runs code that goes in by its stdin.
type Snippet struct {
	CodeLength int // in characters
}

// Process is one process the agent started.
type Process struct {
	ID   string            `json:"id"`
	PID  int               `json:"pid"`
	Argv []string          `json:"argv"`
	Cwd  string            `json:"cwd,omitempty"`
	Here bool              `json:"here,omitempty"` // Cwd is the sandbox's own: none was asked for
	User string            `json:"user,omitempty"`
	Tag  string            `json:"tag,omitempty"`
	Env  map[string]string `json:"env,omitempty"`
	PTY  bool              `json:"pty,omitempty"`
}

// Target names a process by id, tag or pid; the first that is set wins.
type Target struct {
	// Name is any of the three, for whoever has a word and does not know which: an id is tried first, a pid last.
	Name string `json:"name,omitempty"`
	ID   string `json:"id,omitempty"`
	Tag  string `json:"tag,omitempty"`
	PID  int    `json:"pid,omitempty"`
}

// AttachParams join the output of a living process. Ended also finds one that has ended a moment ago, and tells its end.
type AttachParams struct {
	Target Target `json:"target"`
	Ended  bool   `json:"ended,omitempty"`
}

// SignalParams send a signal. Tree includes everything it started.
type SignalParams struct {
	Target Target `json:"target"`
	Signal string `json:"signal"`
	Tree   bool   `json:"tree,omitempty"`
}

// StdinParams feed a process's stdin from a connection of its own.
type StdinParams struct {
	Target Target `json:"target"`
	Close  bool   `json:"close,omitempty"` // after the bytes, close the process's stdin
	PTY    *bool  `json:"pty,omitempty"`   // the process must have a terminal, or none; nil: either
}

// ResizeParams change a terminal's size.
type ResizeParams struct {
	Target Target  `json:"target"`
	Size   PTYSize `json:"size"`
}

// DefaultKernel is the kernel that a sandbox is born with.
const DefaultKernel = "default"

// RunParams run one cell.
type RunParams struct {
	Kernel     string            `json:"kernel,omitempty"` // default: DefaultKernel
	Code       string            `json:"code"`
	Env        map[string]string `json:"env,omitempty"` // for this cell only
	Cwd        string            `json:"cwd,omitempty"` // for this cell only
	TimeoutMS  int64             `json:"timeout_ms,omitempty"`
	Disconnect Disconnect        `json:"disconnect,omitempty"`
	Silent     bool              `json:"silent,omitempty"`   // no history, no count
	Rich       bool              `json:"rich,omitempty"`     // results also as data: see MIMEData and MIMEChart; implies Notebook
	Notebook   bool              `json:"notebook,omitempty"` // sys.exit is an error, after which variables are there, and not the kernel's end
	State      bool              `json:"state,omitempty"`    // End.Value tells what the kernel holds then, as Holding, where it can
	Box        string            `json:"box,omitempty"`      // a directory of which End.Empty tells whether anything was left in it
}

// Holding is what a kernel holds after a cell.
type Holding struct {
	Variables map[string]Variable `json:"variables"`
	Modules   []string            `json:"modules"`             // that were imported, by their top names
	Truncated bool                `json:"truncated,omitempty"` // there is more than is told
}

// Variable is one name of the user's namespace.
type Variable struct {
	Type  string `json:"type"`
	Value string `json:"value"` // "<non-serializable>" where asking for it would run code of the user's
}

// MaxHolding bounds a Holding as JSON.
const MaxHolding = 1 << 20

// What a run with Rich tells beyond the usual types, where a value has it.
const (
	MIMEData  = "application/vnd.cove.data+json"  // a table: {column: [values]}
	MIMEChart = "application/vnd.cove.chart+json" // what a figure shows, as numbers
)

// KernelParams name a kernel.
type KernelParams struct {
	Kernel string `json:"kernel"`
	Token  string `json:"token,omitempty"` // for kernel_wait: the adoption of that token, which may be on its way still
	Cwd    string `json:"cwd,omitempty"`   // for kernel_wait: where whoever made it has moved it
}

// KernelStartParams start a kernel by exec.
type KernelStartParams struct {
	Kernel   string `json:"kernel"`
	Language string `json:"language,omitempty"` // one of Languages; default: python
	Cwd      string `json:"cwd,omitempty"`
	User     string `json:"user,omitempty"`
}

// The languages of kernels.
const (
	LanguagePython     = "python"
	LanguageJavaScript = "javascript"
	LanguageTypeScript = "typescript"
	LanguageBash       = "bash"
	LanguageR          = "r"
	LanguageJava       = "java"
)

// Languages lists them. A sandbox has those whose programs its template has.
var Languages = []string{LanguagePython, LanguageJavaScript, LanguageTypeScript, LanguageBash, LanguageR, LanguageJava}

// KernelState is where a kernel is.
type KernelState string

// The states of a kernel.
const (
	KernelStarting KernelState = "starting"
	KernelIdle     KernelState = "idle"
	KernelBusy     KernelState = "busy"
	KernelDead     KernelState = "dead"
)

// Kernel is one stateful interpreter.
type Kernel struct {
	Name     string      `json:"name"`
	Language string      `json:"language"`
	State    KernelState `json:"state"`
	PID      int         `json:"pid,omitempty"`
	Cwd      string      `json:"cwd,omitempty"`
	Message  string      `json:"message,omitempty"` // why it died
	IPython  bool        `json:"ipython,omitempty"`
	Warm     bool        `json:"warm,omitempty"` // forked from a zygote rather than started
	Lost     []Lost      `json:"lost,omitempty"` // of a branch
}

// BranchParams say which kernel is to be copied.
type BranchParams struct {
	Kernel string `json:"kernel,omitempty"` // empty: DefaultKernel
	Refuse bool   `json:"refuse,omitempty"` // when it is busy; otherwise its turn is waited for
}

// EntryType is what a path is.
type EntryType string

// The types of an entry.
const (
	EntryFile    EntryType = "file"
	EntryDir     EntryType = "dir"
	EntrySymlink EntryType = "symlink"
	EntryOther   EntryType = "other"
)

// Special is what an entry of the type other is.
type Special string

// The kinds of special files.
const (
	SpecialPipe   Special = "pipe"
	SpecialSocket Special = "socket"
	SpecialChar   Special = "char_device"
	SpecialBlock  Special = "block_device"
)

// Entry is one file, as its owner sees it.
type Entry struct {
	Name    string            `json:"name"`
	Path    string            `json:"path"`
	Type    EntryType         `json:"type"`
	Special Special           `json:"special,omitempty"` // of the type other
	Size    int64             `json:"size"`
	Mode    uint32            `json:"mode"` // permission bits with setuid, setgid, sticky
	UID     int               `json:"uid"`
	GID     int               `json:"gid"`
	User    string            `json:"user,omitempty"`
	Group   string            `json:"group,omitempty"`
	ModTime time.Time         `json:"mod_time"`
	Born    time.Time         `json:"born,omitzero"`    // when it was made, where the file system knows
	Target  string            `json:"target,omitempty"` // of a symlink
	Link    *Linked           `json:"link,omitempty"`   // of a symlink that leads somewhere
	Xattrs  map[string]string `json:"xattrs,omitempty"` // user.* as text
}

// Linked is where a symlink leads, through however many others.
type Linked struct {
	Path string    `json:"path"`
	Type EntryType `json:"type"`
	Mode uint32    `json:"mode"`
}

// FileEvent is a change under a watched path.
type FileEvent struct {
	Op    string `json:"op"` // create, write, remove, rename, chmod
	Path  string `json:"path"`
	IsDir bool   `json:"is_dir,omitempty"`
	Entry *Entry `json:"entry,omitempty"` // with WatchParams.Entries, of what is still there
}

// AccountParams name a user of the sandbox; empty: its default user.
type AccountParams struct {
	User string `json:"user,omitempty"`
}

// Account is a user of the sandbox and what every process of theirs begins with.
type Account struct {
	Name    string            `json:"name"`
	UID     int               `json:"uid"`
	GID     int               `json:"gid"`
	Home    string            `json:"home"`
	Workdir string            `json:"workdir"`
	Env     map[string]string `json:"env,omitempty"`     // the sandbox's own, as it was made with
	Environ map[string]string `json:"environ,omitempty"` // what a process of theirs is given, Env among it
}

// TooManyLinks ends the sentence about a path whose links lead round and round: to some callers that is a kind of its own.
const TooManyLinks = "too many symbolic links, or one that may not be followed"

// PathParams name a path. A relative path starts at the user's home. Root, here and below, does it with root's rights on
// behalf of the user: what is made becomes the user's.
type PathParams struct {
	Path string `json:"path"`
	User string `json:"user,omitempty"`
	Root bool   `json:"root,omitempty"`
}

// ListParams list a directory; Depth 1 is its own entries.
type ListParams struct {
	Path  string `json:"path"`
	User  string `json:"user,omitempty"`
	Root  bool   `json:"root,omitempty"`
	Depth int    `json:"depth,omitempty"`
	// Names, if any, chooses regular files whose base name matches one of these patterns of path.Match, at any depth.
	Names []string `json:"names,omitempty"`
}

// ReadParams read a file; Length 0 is all of it.
type ReadParams struct {
	Path   string `json:"path"`
	User   string `json:"user,omitempty"`
	Root   bool   `json:"root,omitempty"`
	Offset int64  `json:"offset,omitempty"`
	Length int64  `json:"length,omitempty"`
}

// WriteParams write a file: parents are made, the content appears at once by rename, or not at all. InPlace writes into
// the file itself, as most programs do: whoever watches sees it made, given to the user and written, in this order.
type WriteParams struct {
	Path    string            `json:"path"`
	User    string            `json:"user,omitempty"`
	Root    bool              `json:"root,omitempty"`
	Mode    uint32            `json:"mode,omitempty"` // default: keep an existing file's, else 0644
	Append  bool              `json:"append,omitempty"`
	InPlace bool              `json:"in_place,omitempty"`
	Xattrs  map[string]string `json:"xattrs,omitempty"` // user.* attributes to set
	Family  string            `json:"family,omitempty"` // attributes that begin so and are not in Xattrs are removed; empty: none
}

// MkdirParams make a directory.
type MkdirParams struct {
	Path    string `json:"path"`
	User    string `json:"user,omitempty"`
	Root    bool   `json:"root,omitempty"`
	Mode    uint32 `json:"mode,omitempty"`
	Parents bool   `json:"parents,omitempty"` // make parents, and an existing directory is no error
}

// MoveParams rename a path.
type MoveParams struct {
	From string `json:"from"`
	To   string `json:"to"`
	User string `json:"user,omitempty"`
	Root bool   `json:"root,omitempty"`
}

// RemoveParams remove a path; a directory that is not empty needs Recursive.
type RemoveParams struct {
	Path      string `json:"path"`
	User      string `json:"user,omitempty"`
	Root      bool   `json:"root,omitempty"`
	Recursive bool   `json:"recursive,omitempty"`
}

// ChmodParams change permissions or owner; nil leaves one as it is.
type ChmodParams struct {
	Path  string  `json:"path"`
	User  string  `json:"user,omitempty"` // who does it
	Mode  *uint32 `json:"mode,omitempty"`
	Owner string  `json:"owner,omitempty"`
	Group string  `json:"group,omitempty"`
	// NoFollow changes a symbolic link itself, which has no mode.
	NoFollow bool `json:"no_follow,omitempty"`
}

// WatchParams watch a directory.
type WatchParams struct {
	Path      string `json:"path"`
	User      string `json:"user,omitempty"`
	Root      bool   `json:"root,omitempty"`
	Recursive bool   `json:"recursive,omitempty"`
	Entries   bool   `json:"entries,omitempty"` // describe what was made, written or changed
}

// DialParams connect to a port inside the sandbox.
type DialParams struct {
	Port    int    `json:"port"`
	Network string `json:"network,omitempty"` // tcp (default)
	Host    string `json:"host,omitempty"`    // default 127.0.0.1; only loopback is allowed
}

// ListenParams name a port of loopback.
type ListenParams struct {
	Port   int    `json:"port"`
	Health string `json:"health,omitempty"` // a path of HTTP that says OK there; without it connections are taken and closed
}

// Metrics is what the agent sees from inside; the driver's own accounting is the authority.
type Metrics struct {
	Processes int   `json:"processes"`
	DiskUsed  int64 `json:"disk_used"`
	DiskTotal int64 `json:"disk_total"`
	UptimeMS  int64 `json:"uptime_ms"`
}

// Boot is what a driver tells the agent once, before the first connection: who lives here.
type Boot struct {
	ID        string            `json:"id"`
	Hostname  string            `json:"hostname,omitempty"`
	Env       map[string]string `json:"env,omitempty"`     // environment of every process
	User      string            `json:"user,omitempty"`    // default user; "user"
	Workdir   string            `json:"workdir,omitempty"` // default: the user's home
	Python    string            `json:"python,omitempty"`  // interpreter for kernels started by exec; empty: search PATH
	Kernel    string            `json:"kernel,omitempty"`  // path of kernel.py for kernels started by exec
	Sudo      bool              `json:"sudo,omitempty"`    // the default user may become root by the sudo broker
	OpenFiles int               `json:"open_files,omitempty"`
	// Expected: nobody has asked for the sandbox yet, and this is what is known of it. Another follows, before anything else.
	Expected bool `json:"expected,omitempty"`
}
