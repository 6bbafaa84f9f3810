// Package sandbox is the domain: what a sandbox is, which states it has, who may touch it and when it ends.
// It asks for a Driver, a Store and an Observer and knows none of their technologies.
package sandbox

import (
	"context"
	"iter"
	"net"
	"time"

	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/template"
)

// Cause is why a sandbox ended; readable after its death.
type Cause string

// The causes.
const (
	CauseKilled     Cause = "killed"      // somebody asked
	CauseExpired    Cause = "expired"     // its lifetime passed
	CauseIdle       Cause = "idle"        // nobody used it for its idle timeout
	CauseOOM        Cause = "oom"         // the kernel killed its PID 1 for lack of memory
	CauseAgentDied  Cause = "agent_died"  // its PID 1 ended by itself
	CauseMakerDied  Cause = "maker_died"  // the process that kept it is gone
	CauseHostReboot Cause = "host_reboot" // the host restarted
	CauseStartFail  Cause = "start_failed"
	CauseShutdown   Cause = "shutdown"  // the operator ended all of them
	CauseExited     Cause = "exited"    // its main process, where its dialect knows one, ended well
	CauseFailed     Cause = "failed"    // its main process ended in failure
	CauseEvicted    Cause = "evicted"   // its host took the room back that it had
	CauseNodeLost   Cause = "node_lost" // the machine that it ran on is gone
	CauseDeleted    Cause = "deleted"   // somebody removed it behind the server's back

	CauseHostDiskFull Cause = "host_disk_full" // the host's disk had no room left for what it wrote
	CauseDiskFailed   Cause = "disk_failed"    // the host could not write its disk: its files may be damaged
	CauseRecordLost   Cause = "record_lost"    // the server's database had no row of it

	causeMoved Cause = "moved" // it lives on at another server; no row ever says so
)

// Storage says where the sandbox's own layer lives.
type Storage string

// The storages.
const (
	StorageVolatile Storage = "volatile" // on disk, fsync is free, gone with the sandbox: the default
	StorageDurable  Storage = "durable"  // on disk, fsync means it
	StorageTmpfs    Storage = "tmpfs"    // in memory, counted as the sandbox's memory
)

// StartRequest is everything a driver needs to make a sandbox; all of it is decided.
type StartRequest struct {
	ID       string
	Tenant   string
	Template *template.Template
	Limits   template.Limits
	Network  policy.Network
	Storage  Storage
	Env      map[string]string
	Deadline time.Time // zero: none. The driver ends the sandbox then even if the server is gone.
	Labels   map[string]string
	Mounts   []Mount
}

// Caps is what a driver can do beyond the contract.
type Caps struct {
	Name        string `json:"name"`
	Isolation   string `json:"isolation"`    // "namespaces", "pod", "none"
	WarmKernels bool   `json:"warm_kernels"` // Kernel forks one from a zygote
	Limits      bool   `json:"limits"`
	Network     bool   `json:"network"`
	Disk        string `json:"disk"`     // which disk limit is in force: "image", "tmpfs", "ephemeral", "none"
	Fork        bool   `json:"fork"`     // Fork copies a running kernel's memory
	Pause       bool   `json:"pause"`    // Pause stops every process and keeps its memory
	Snapshot    bool   `json:"snapshot"` // Snapshot makes a template of a sandbox's files
	Images      bool   `json:"images"`   // it is an Imager
	Pulls       bool   `json:"pulls"`    // it is a Puller and no Imager: its hosts pull images themselves
	Mounts      bool   `json:"mounts"`   // StartRequest.Mounts is honoured
}

// Instance is one living sandbox as its driver sees it.
type Instance struct {
	ID       string    `json:"id"`
	Tenant   string    `json:"tenant"`
	Template string    `json:"template"`
	Deadline time.Time `json:"deadline,omitzero"`
	Started  time.Time `json:"started"`
	Paused   bool      `json:"paused,omitempty"`
	Owner    string    `json:"owner,omitempty"` // the server that started it, where several share a driver
}

// Ended is one sandbox that is gone, as its driver saw it.
type Ended struct {
	ID      string    `json:"id"`
	Cause   Cause     `json:"cause"`
	Message string    `json:"message,omitempty"` // one sentence: "out of memory: python3 (pid 17) was using 511 MiB"
	At      time.Time `json:"at"`
	Usage   Usage     `json:"usage,omitzero"`
}

// Usage is what a sandbox uses or used, by the host's own accounting.
type Usage struct {
	CPUMS       int64 `json:"cpu_ms"`
	MemoryBytes int64 `json:"memory_bytes"`
	PeakBytes   int64 `json:"peak_bytes"`
	Pids        int   `json:"pids"`
	DiskBytes   int64 `json:"disk_bytes"`
	OOMKills    int   `json:"oom_kills"`
}

// Change adjusts a living sandbox; nil leaves one as it is.
type Change struct {
	Deadline *time.Time // zero time: none
	Network  *policy.Network
	Limits   *template.Limits
}

// ForkRequest asks for copies of a running sandbox: its files, and the memory of one of its kernels.
type ForkRequest struct {
	Parent   string
	Kernel   string      // whose memory is copied; empty: the default kernel
	Refuse   bool        // a kernel that runs a cell is fault.Conflict at once; otherwise its turn is waited for until ctx ends
	Children []ForkChild // all of them are made, or none
}

// ForkChild is one copy; all of it is decided. Template, tenant and storage are the parent's.
type ForkChild struct {
	ID         string
	Limits     template.Limits
	Network    policy.Network
	Env        map[string]string // beside the template's
	InheritEnv bool              // what the parent was given at its create too, below Env; its secrets are there
	Deadline   time.Time         // zero: none
}

// Forked is what a fork did.
type Forked struct {
	Stall     time.Duration `json:"stall"`                // how long the parent's kernel took no cell
	Memory    int64         `json:"memory"`               // bytes that the kernel had beyond what every kernel of its template begins with
	NotCopied []NotCopied   `json:"not_copied,omitempty"` // what the parent has and its copies do not
}

// NotCopied is one thing that a copy of a sandbox does not have.
type NotCopied struct {
	Kind string `json:"kind"` // "process", "kernel", "file", "socket", "pipe", "memory", "environment"
	What string `json:"what"` // one line for a person: "sleep 100 (pid 17)"
}

// SnapshotRequest asks for a template made of a sandbox's template and its files as they are now.
type SnapshotRequest struct {
	ID          string
	Tenant      string // who may use the template
	Name        string
	Description string
	Env         map[string]string // above the template's own
	User        string            // empty, like Workdir: the template's
	Workdir     string
	Sudo        bool // its user may become root, whatever the template says
}

// Driver gives the domain a place to run. Every method is safe for concurrent use; Stop is idempotent.
type Driver interface {
	Caps() Caps
	// Prepare makes the driver ready for a tenant's template (zygotes, pools) and returns when Start will be fast.
	Prepare(ctx context.Context, tenant string, t *template.Template) error
	// Start returns when the agent answers and, if the template has Python, the default kernel takes cells or is about to: one that
	// has waited for its sandbox, and has no more to do than to say so, need not be waited for.
	Start(ctx context.Context, req StartRequest) error
	// Dial opens a connection to the agent that carries one operation of agentapi.
	Dial(ctx context.Context, id string) (net.Conn, error)
	// Kernel puts a fresh kernel of that name into the sandbox; only with Caps.WarmKernels, and only where the
	// template has a zygote: otherwise fault.Unsupported, and the caller asks the agent to start one by exec.
	Kernel(ctx context.Context, id, kernel string) error
	Change(ctx context.Context, id string, change Change) error
	Usage(ctx context.Context, id string) (Usage, error)
	Stop(ctx context.Context, id string, cause Cause) error
	// Fork makes copies of a running sandbox and returns when each takes cells. A parent that is not there is
	// fault.NotFound; one that is paused, or whose kernel is not there, is fault.Conflict. Only with Caps.Fork.
	Fork(ctx context.Context, req ForkRequest) (Forked, error)
	// Pause stops every process of a sandbox, with its memory; Resume lets them go on. Both are idempotent. A paused
	// sandbox still ends at its deadline and by Stop. Only with Caps.Pause.
	Pause(ctx context.Context, id string) error
	Resume(ctx context.Context, id string) error
	// Snapshot makes a template of a sandbox's files, which goes on meanwhile; RemoveTemplate removes one that was made
	// so. Only with Caps.Snapshot.
	Snapshot(ctx context.Context, req SnapshotRequest) (*template.Template, error)
	RemoveTemplate(ctx context.Context, tenant, name string) error
	List(ctx context.Context) ([]Instance, error)
	// Ended yields every end, including those that happened while nobody listened, until Forget.
	Ended(ctx context.Context) iter.Seq2[Ended, error]
	Forget(ctx context.Context, ids ...string) error
	// Close lets go of the driver; sandboxes live on where the driver's maker does.
	Close() error
}
