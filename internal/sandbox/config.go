package sandbox

import (
	"cmp"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/template"
)

// Config is what an operator decides about sandboxes. The zero value is a working one.
type Config struct {
	DefaultTemplate    string        // "python"
	DefaultLifetime    time.Duration // 300 s
	MaxLifetime        time.Duration // zero: none, and a sandbox may live without a deadline
	DefaultIdleTimeout time.Duration // zero: none
	PausedLifetime     time.Duration // how long a sandbox may stay paused before it ends; 24 h; negative: for ever
	DefaultLimits      template.Limits
	MaxLimits          template.Limits // zero fields: no maximum, but of 4096 pids and 65536 open files, which are the host's
	DefaultNetwork     policy.Network  // mode internet, or none where Networks allows less
	Networks           policy.Rules    // what a sandbox's network may be

	MaxPerTenant int     // living sandboxes; zero: no limit
	CreateRate   float64 // sandboxes per second and tenant, with a second's worth at once; zero: no limit
	MaxStarting  int     // sandboxes that start, and forks that go on, at the same time; the others queue; 64
	MaxQueued    int     // creates, and forks, that wait for their turn; the others are turned away; 1024

	MaxEventStreams int // streams of events that one tenant follows at the same time; 64
	MaxOperations   int // of one tenant in its sandboxes at the same time, each a connection to an agent; 2048

	// StartTimeout is how long a driver may take to start one sandbox, which has waited for its turn before, or to fork one
	// that is not waited for; 60 s.
	StartTimeout time.Duration

	Retention time.Duration // how long an ended sandbox stays readable; 24 h

	// MaxEnded is how many ended sandboxes of one tenant stay readable, and up to a twentieth more.
	// The oldest are removed. Zero: no limit.
	MaxEnded int
	// Space is asked before creates, forks and changes of metadata add to the rows. Nil refuses
	// nothing.
	Space diskspace.Check

	// Server is this server among those that share its Store and its driver. Empty: it has both for itself.
	Server string
	// BootID names this boot of the host, so that a sandbox lost to a reboot is told from one lost to a crash.
	// Default: the kernel's.
	BootID string
	// Lost is what became of a sandbox that its driver knows nothing of, where that does not depend on this host; without a cause it does.
	Lost Ended
	// EndedGrace is how long Open waits for a driver to tell how a missing sandbox ended; half a second.
	EndedGrace time.Duration
}

// Validate refuses what cannot be meant.
func (c Config) Validate() error {
	asked := c.DefaultLimits // our own are lowered to the maximum instead
	c = c.withDefaults()
	switch {
	case c.DefaultLifetime < 0 && c.MaxLifetime > 0:
		return fault.New(fault.Invalid, "no default lifetime, but a maximum of %v: give a default", c.MaxLifetime)
	case c.MaxLifetime < 0, c.DefaultIdleTimeout < 0, c.Retention < 0, c.EndedGrace < 0, c.StartTimeout < 0:
		return fault.New(fault.Invalid, "maximum lifetime, default idle timeout, start timeout and retention cannot be negative")
	case c.MaxLifetime > 0 && c.DefaultLifetime > c.MaxLifetime:
		return fault.New(fault.Invalid, "the default lifetime %v is over the maximum %v", c.DefaultLifetime, c.MaxLifetime)
	case c.MaxPerTenant < 0, c.MaxEnded < 0, c.CreateRate < 0, c.MaxStarting < 0, c.MaxQueued < 0, c.MaxEventStreams < 0, c.MaxOperations < 0:
		return fault.New(fault.Invalid, "limits on the number of sandboxes cannot be negative")
	}
	if err := checkLimits(asked, c.MaxLimits); err != nil {
		return fault.Wrap(fault.Invalid, err, "default limits: %s", fault.Message(err))
	}
	if err := c.Networks.Validate(); err != nil {
		return err
	}
	if err := firstError(c.DefaultNetwork.Validate(), c.Networks.Check(c.DefaultNetwork, policy.EveryTenant)); err != nil {
		return fault.Wrap(fault.Invalid, err, "default network: %s", fault.Message(err))
	}
	return nil
}

// Limits are those of a sandbox to which neither its creator nor its template gives any.
func (c Config) Limits() template.Limits { return c.withDefaults().DefaultLimits }

func (c Config) withDefaults() Config {
	c.DefaultTemplate = cmp.Or(c.DefaultTemplate, "python")
	c.DefaultLifetime = cmp.Or(c.DefaultLifetime, 300*time.Second)
	c.PausedLifetime = cmp.Or(c.PausedLifetime, 24*time.Hour)
	c.DefaultLimits = orLimits(c.DefaultLimits, template.Limits{
		CPUs: 1, MemoryBytes: 512 << 20, Pids: 256, DiskBytes: 2 << 30, OpenFiles: 1024,
	})
	// Process and file tables are shared by all of the host, so nobody gets an endless part of them by saying nothing.
	c.MaxLimits = orLimits(c.MaxLimits, template.Limits{Pids: 4096, OpenFiles: 65536})
	c.DefaultNetwork.Mode = c.Networks.DefaultMode(c.DefaultNetwork.Mode)
	c.MaxStarting = cmp.Or(c.MaxStarting, 64)
	c.MaxQueued = cmp.Or(c.MaxQueued, 1024)
	c.MaxEventStreams = cmp.Or(c.MaxEventStreams, 64)
	c.MaxOperations = cmp.Or(c.MaxOperations, 2048)
	c.StartTimeout = cmp.Or(c.StartTimeout, 60*time.Second)
	c.Retention = cmp.Or(c.Retention, 24*time.Hour)
	c.EndedGrace = cmp.Or(c.EndedGrace, 500*time.Millisecond)
	if c.BootID == "" {
		c.BootID = hostBootID()
	}
	return c
}

// network is the policy of a sandbox for which one was asked. One that is only to narrow the default opens nothing that the
// default closes.
func (c Config) network(asked *policy.Network, narrow bool) policy.Network {
	n := c.DefaultNetwork
	switch {
	case asked == nil:
		return n
	case !narrow || n.Mode == policy.Internet:
		return *asked
	case n.Mode == policy.List:
		n.Deny = slices.Concat(n.Deny, asked.Deny)
	}
	return n
}

// hostBootID is empty where the kernel has none: then no end is ever blamed on a reboot.
func hostBootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
