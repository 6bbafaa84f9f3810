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
	CauseShutdown   Cause = "shutdown" // the operator ended all of them
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
}

// Caps is what a driver can do beyond the contract.
type Caps struct {
	Name        string `json:"name"`
	Isolation   string `json:"isolation"`    // "namespaces", "none"
	WarmKernels bool   `json:"warm_kernels"` // Kernel forks one from a zygote
	Limits      bool   `json:"limits"`
	Network     bool   `json:"network"`
	Disk        string `json:"disk"` // which disk limit is in force: "image", "tmpfs", "none"
}

// Instance is one living sandbox as its driver sees it.
type Instance struct {
	ID       string    `json:"id"`
	Tenant   string    `json:"tenant"`
	Template string    `json:"template"`
	Deadline time.Time `json:"deadline,omitzero"`
	Started  time.Time `json:"started"`
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

// Driver gives the domain a place to run. Every method is safe for concurrent use; Stop is idempotent.
type Driver interface {
	Caps() Caps
	// Prepare makes the driver ready for a tenant's template (zygotes, pools) and returns when Start will be fast.
	Prepare(ctx context.Context, tenant string, t *template.Template) error
	// Start returns when the agent answers and, if the template has Python, the default kernel takes cells.
	Start(ctx context.Context, req StartRequest) error
	// Dial opens a connection to the agent that carries one operation of agentapi.
	Dial(ctx context.Context, id string) (net.Conn, error)
	// Kernel puts a fresh kernel of that name into the sandbox; only with Caps.WarmKernels, and only where the
	// template has a zygote: otherwise fault.Unsupported, and the caller asks the agent to start one by exec.
	Kernel(ctx context.Context, id, kernel string) error
	Change(ctx context.Context, id string, change Change) error
	Usage(ctx context.Context, id string) (Usage, error)
	Stop(ctx context.Context, id string, cause Cause) error
	List(ctx context.Context) ([]Instance, error)
	// Ended yields every end, including those that happened while nobody listened, until Forget.
	Ended(ctx context.Context) iter.Seq2[Ended, error]
	Forget(ctx context.Context, ids ...string) error
	// Close lets go of the driver; sandboxes live on where the driver's maker does.
	Close() error
}
