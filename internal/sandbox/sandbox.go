package sandbox

import (
	"time"

	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/template"
)

// State is where a sandbox is in its life. A switch over states is exhaustive.
type State string

// The states, in the order a sandbox passes them.
const (
	StateStarting State = "starting" // its row exists, its driver is making it
	StateRunning  State = "running"  // it can be used
	StatePaused   State = "paused"   // its processes stand still, with their memory; it may run again
	StateStopping State = "stopping" // its cause of death is decided, its driver is ending it
	StateEnded    State = "ended"    // it is gone; Cause says why
)

// Living reports whether a sandbox in this state still holds anything of its host.
func (s State) Living() bool {
	switch s {
	case StateStarting, StateRunning, StatePaused, StateStopping:
		return true
	case StateEnded:
		return false
	}
	return false
}

// usable reports whether something can be asked of a sandbox in this state; a paused one may have to be resumed for it.
func (s State) usable() bool {
	switch s {
	case StateRunning, StatePaused:
		return true
	case StateStarting, StateStopping, StateEnded:
		return false
	}
	return false
}

// Known reports whether s is one of the states.
func (s State) Known() bool { return s == StateEnded || s.Living() }

// IdleAction is what happens to a sandbox that nobody used for its idle timeout, or whose lifetime has passed.
type IdleAction string

// The idle actions.
const (
	IdleKill  IdleAction = "kill" // the default
	IdlePause IdleAction = "pause"
)

// Spec is what somebody asks for; everything left out is the template's or the server's choice.
type Spec struct {
	ID             string            `json:"id,omitempty"` // from NewID, for a dialect that told it before; empty: a new one
	Template       string            `json:"template,omitempty"`
	Key            string            `json:"key,omitempty"`             // get-or-create: at most one living sandbox of a tenant has it
	IdempotencyKey string            `json:"idempotency_key,omitempty"` // a retry of the same request finds what the first made
	Lifetime       time.Duration     `json:"lifetime,omitempty"`        // zero: the server's default; negative: none, where allowed
	IdleTimeout    time.Duration     `json:"idle_timeout,omitempty"`    // zero: the server's default; negative: none
	IdleAction     IdleAction        `json:"idle_action,omitempty"`
	DeadlineAction IdleAction        `json:"deadline_action,omitempty"` // at the end of its lifetime; kill by default
	ColdPause      bool              `json:"cold_pause,omitempty"`      // a pause at its deadline keeps only files
	AutoResume     bool              `json:"auto_resume,omitempty"`     // a use of it resumes it when it is paused
	ResumeLifetime time.Duration     `json:"resume_lifetime,omitempty"` // for how long such a use does; zero: for what was left
	Limits         template.Limits   `json:"limits,omitzero"`
	Metadata       map[string]string `json:"metadata,omitempty"`
	Annotations    map[string]string `json:"annotations,omitempty"` // what a dialect keeps with it; no other one shows them
	Env            map[string]string `json:"env,omitempty"`
	IDEnv          string            `json:"id_env,omitempty"`         // name of an environment variable that has the sandbox's id
	Network        *policy.Network   `json:"network,omitempty"`        // nil: the server's default
	NarrowNetwork  bool              `json:"narrow_network,omitempty"` // Network opens nothing that the server's default closes
	Storage        Storage           `json:"storage,omitempty"`
	Mounts         []Mount           `json:"mounts,omitempty"`
}

// Sandbox is one sandbox as its owner may see it, during its life and after.
type Sandbox struct {
	ID             string            `json:"id"`
	Tenant         string            `json:"tenant"`
	Template       string            `json:"template"`
	TemplateDigest string            `json:"template_digest,omitempty"`
	Key            string            `json:"key,omitempty"`
	State          State             `json:"state"`
	CreatedAt      time.Time         `json:"created_at"`
	StartedAt      time.Time         `json:"started_at,omitzero"`
	Deadline       time.Time         `json:"deadline,omitzero"` // zero: none
	PausedAt       time.Time         `json:"paused_at,omitzero"`
	EndedAt        time.Time         `json:"ended_at,omitzero"`
	LastUsed       time.Time         `json:"last_used,omitzero"`
	IdleTimeout    time.Duration     `json:"idle_timeout,omitempty"` // zero: none
	IdleAction     IdleAction        `json:"idle_action"`
	DeadlineAction IdleAction        `json:"deadline_action,omitempty"`
	ColdPause      bool              `json:"cold_pause,omitempty"`
	Cold           bool              `json:"cold,omitempty"` // while it is paused: its processes have ended, its files are kept
	AutoResume     bool              `json:"auto_resume,omitempty"`
	ResumeLifetime time.Duration     `json:"resume_lifetime,omitempty"`
	ForkedFrom     string            `json:"forked_from,omitempty"` // id of the sandbox it is a copy of
	Limits         template.Limits   `json:"limits"`
	Metadata       map[string]string `json:"metadata,omitempty"`
	Annotations    map[string]string `json:"annotations,omitempty"`
	Network        policy.Network    `json:"network"`
	Storage        Storage           `json:"storage"`
	Mounts         []Mount           `json:"mounts,omitempty"`
	Cause          Cause             `json:"cause,omitempty"`         // from stopping on
	CauseMessage   string            `json:"cause_message,omitempty"` // one sentence more, such as the victim of an OOM
	Usage          Usage             `json:"usage,omitzero"`          // of its whole life, once it has ended
}

// pausesAtDeadline reports whether its lifetime ends in a pause. Then its driver has no deadline while it runs: the driver
// could only end it.
func (sb *Sandbox) pausesAtDeadline() bool { return sb.DeadlineAction == IdlePause }

// wakes reports whether a use resumes it. What its callers left in a cold one is not there any more.
func (sb *Sandbox) wakes() bool { return sb.State == StatePaused && sb.AutoResume && !sb.Cold }

// ListQuery chooses among a tenant's sandboxes; an empty field chooses all.
type ListQuery struct {
	States   []State
	Metadata map[string]string // every pair must match
	Template string
	// TemplateIn names an annotation in which a dialect keeps its own word for the template: Template is compared with that,
	// and with the domain's name of it where a sandbox has no such annotation.
	TemplateIn string
	Key        string
	Without    string // name of an annotation that they do not have
	Causes     []Cause
	// StartedAfter leaves out what was created earlier; Ascending turns the order round.
	StartedAfter time.Time
	Ascending    bool

	Limit  int    // zero: DefaultPage; at most MaxPage
	Cursor string // Page.Next of the page before
}

// The sizes of a page.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// Page is a part of a listing.
type Page struct {
	Items []Sandbox `json:"items"`
	Next  string    `json:"next,omitempty"` // empty: this was the last
}

// LifecycleType is the kind of a LifecycleEvent.
type LifecycleType string

// The lifecycle events.
const (
	LifecycleCreated  LifecycleType = "created"          // its row exists
	LifecycleStarted  LifecycleType = "started"          // it can be used
	LifecycleAdopted  LifecycleType = "adopted"          // a new server took it over
	LifecycleLifetime LifecycleType = "lifetime_changed" // Deadline
	LifecycleNetwork  LifecycleType = "network_changed"
	LifecycleMetadata LifecycleType = "metadata_changed"
	LifecyclePaused   LifecycleType = "paused"   // Deadline of the pause
	LifecycleResumed  LifecycleType = "resumed"  // Deadline
	LifecycleForked   LifecycleType = "forked"   // Message: of a child its parent's id, of a parent its children's
	LifecycleSnapshot LifecycleType = "snapshot" // Message: the name of the template that was made
	LifecycleEnded    LifecycleType = "ended"    // Cause, Message
)

// LifecycleEvent is one thing that happened to a sandbox, in the order of Seq.
type LifecycleEvent struct {
	Seq      int64         `json:"seq"`
	Sandbox  string        `json:"sandbox"`
	Tenant   string        `json:"tenant"`
	Type     LifecycleType `json:"type"`
	At       time.Time     `json:"at"`
	Deadline time.Time     `json:"deadline,omitzero"`
	Cause    Cause         `json:"cause,omitempty"`
	Message  string        `json:"message,omitempty"`
}

// EventQuery chooses among a tenant's lifecycle events, oldest first.
type EventQuery struct {
	Sandbox string // empty: all
	After   int64  // only events with a higher Seq
	Follow  bool   // wait for those to come
	Last    bool   // the last of them alone: where whoever begins to follow goes on
	// Internal is a stream of the server itself, which does not count against its tenant's share.
	Internal bool
}
