package build

import (
	"maps"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// Status is where a build is.
type Status string

// The statuses.
const (
	StatusWaiting  Status = "waiting" // asked for, or in the queue
	StatusBuilding Status = "building"
	StatusReady    Status = "ready"
	StatusError    Status = "error"
)

func (s Status) ended() bool { return s == StatusReady || s == StatusError }

// Records are never changed once they are on a shelf: a change puts a copy there.

// entry is one template.
type entry struct {
	ID      string         `json:"id"`
	Alias   string         `json:"alias"`
	Created time.Time      `json:"created"`
	Updated time.Time      `json:"updated"`
	Tags    map[string]tag `json:"tags,omitempty"`
	Builds  int            `json:"builds"` // how many there have been
}

// tag is a name of a build of a template.
type tag struct {
	Build string    `json:"build"`
	At    time.Time `json:"at"`
}

// setting is what steps decide besides files: who runs the next step, where, and with which variables.
type setting struct {
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
}

func (s setting) clone() setting {
	s.Env = maps.Clone(s.Env)
	return s
}

// Start is what a template's sandboxes run from their beginning.
type Start struct {
	Command string            `json:"command"`
	Ready   string            `json:"ready,omitempty"` // until it succeeds the sandbox is not ready; empty: it is at once
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
}

// made is one build of a template.
type made struct {
	ID       string          `json:"id"`
	Template string          `json:"template"`
	Status   Status          `json:"status"`
	Started  bool            `json:"started,omitempty"` // its steps were given
	Tags     []string        `json:"tags"`
	Created  time.Time       `json:"created"`
	Updated  time.Time       `json:"updated"`
	Finished time.Time       `json:"finished,omitzero"`
	Limits   template.Limits `json:"limits,omitzero"` // asked for; of a ready one: what its sandbox had
	Domain   string          `json:"domain,omitempty"`
	Setting  setting         `json:"setting,omitzero"`
	Start    *Start          `json:"start,omitempty"`
	Reason   *reason         `json:"reason,omitempty"`
}

// reason is why a build failed.
type reason struct {
	Message string `json:"message"`
	Step    string `json:"step,omitempty"` // "base", "finalize", or the number of the step
	Entries []line `json:"logEntries"`
}

// maxReason bounds the message of a reason: it stays for as long as its build.
const maxReason = 4 << 10

// fail ends a build that has not become a template.
func (m *made) fail(err error) {
	message := fault.Message(err)
	if len(message) > maxReason {
		message = strings.ToValidUTF8(message[:maxReason], "") + "…"
	}
	m.Status, m.Finished = StatusError, now()
	m.Reason = &reason{Message: message, Step: stepOf(err), Entries: []line{}}
}

// layer is a cached state between two steps.
type layer struct {
	Key     string    `json:"key"`
	Domain  string    `json:"domain"`
	Setting setting   `json:"setting"`
	Used    time.Time `json:"used"`
}

// use counts how often a template was started from; it is not kept.
type use struct {
	count int
	last  time.Time
}
