package opensandbox

import (
	"fmt"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/sandbox"
)

// The states of a sandbox as OpenSandbox names them.
const (
	statePending    = "Pending"
	stateRunning    = "Running"
	statePaused     = "Paused"
	stateStopping   = "Stopping"
	stateTerminated = "Terminated"
	stateFailed     = "Failed"
)

// Sandbox is a sandbox on the wire. Nothing is ever null: a client fails on it.
type Sandbox struct {
	ID         string            `json:"id"`
	Status     Condition         `json:"status"`
	Image      *Image            `json:"image,omitempty"`
	SnapshotID string            `json:"snapshotId,omitempty"`
	Platform   *access.Platform  `json:"platform,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Extensions map[string]string `json:"extensions,omitempty"`
	Entrypoint []string          `json:"entrypoint"`
	ExpiresAt  time.Time         `json:"expiresAt,omitzero"`
	CreatedAt  time.Time         `json:"createdAt"`
}

// Condition is where a sandbox or a snapshot is in its life.
type Condition struct {
	State            string    `json:"state"`
	Reason           string    `json:"reason,omitempty"`
	Message          string    `json:"message,omitempty"`
	LastTransitionAt time.Time `json:"lastTransitionAt,omitzero"`
}

// Image is what a sandbox was made from.
type Image struct {
	URI string `json:"uri"`
}

func wireSandbox(sb sandbox.Sandbox) (Sandbox, error) {
	f, err := access.Decode(sb)
	if err != nil {
		return Sandbox{}, err
	}
	w := Sandbox{
		ID: sb.ID, Status: wireStatus(sb), SnapshotID: f.SnapshotID, Platform: f.Platform, Metadata: sb.Metadata,
		Extensions: f.Extensions, Entrypoint: f.Entrypoint, ExpiresAt: sb.Deadline, CreatedAt: sb.CreatedAt,
	}
	if w.Entrypoint == nil {
		w.Entrypoint = []string{}
	}
	if f.Image != "" {
		w.Image = &Image{URI: f.Image}
	}
	return w, nil
}

func wireStatus(sb sandbox.Sandbox) Condition {
	switch sb.State {
	case sandbox.StateStarting:
		return Condition{statePending, "CONTAINER_STARTING", "the sandbox is starting", sb.CreatedAt}
	case sandbox.StateRunning:
		return Condition{stateRunning, "CONTAINER_RUNNING", "the sandbox is running", sb.StartedAt}
	case sandbox.StatePaused:
		return Condition{statePaused, "CONTAINER_PAUSED", "the sandbox is paused", sb.PausedAt}
	case sandbox.StateStopping:
		return Condition{stateStopping, strings.ToUpper(string(sb.Cause)), sb.CauseMessage, time.Time{}}
	case sandbox.StateEnded:
		message := sb.CauseMessage
		if message == "" {
			message = fmt.Sprintf("the sandbox has ended: %s", sb.Cause)
		}
		if sb.Cause == sandbox.CauseExited {
			return Condition{stateTerminated, "CONTAINER_EXITED", message, sb.EndedAt}
		}
		return Condition{stateFailed, "CONTAINER_EXITED_ERROR", message, sb.EndedAt}
	}
	return Condition{State: "Unknown"}
}

// lasting are the ends after which a sandbox stays visible, as a container does that has exited. One that somebody ended,
// or whose time was over, is gone.
var lasting = []sandbox.Cause{
	sandbox.CauseExited, sandbox.CauseFailed, sandbox.CauseOOM, sandbox.CauseAgentDied, sandbox.CauseMakerDied, sandbox.CauseHostReboot,
	sandbox.CauseEvicted, sandbox.CauseNodeLost, sandbox.CauseDeleted, sandbox.CauseHostDiskFull,
	sandbox.CauseDiskFailed, sandbox.CauseRecordLost,
}

// pagination is which part of a listing an answer has.
type pagination struct {
	Page        int  `json:"page"`
	PageSize    int  `json:"pageSize"`
	TotalItems  int  `json:"totalItems"`
	TotalPages  int  `json:"totalPages"`
	HasNextPage bool `json:"hasNextPage"`
}

// listing is a page of things.
type listing[T any] struct {
	Items      []T        `json:"items"`
	Pagination pagination `json:"pagination"`
}

// paged cuts a page out of everything.
func paged[T any](all []T, p page) listing[T] {
	pages := (len(all) + p.size - 1) / p.size
	from := min((p.number-1)*p.size, len(all))
	to := min(from+p.size, len(all))
	return listing[T]{
		Items:      append([]T{}, all[from:to]...),
		Pagination: pagination{Page: p.number, PageSize: p.size, TotalItems: len(all), TotalPages: pages, HasNextPage: p.number < pages},
	}
}
