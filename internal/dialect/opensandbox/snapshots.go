package opensandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// snapshots is the kind of document that says which snapshots a tenant has. It is written before the template is made and
// goes after the template is gone, so that a crash leaves nothing that no document names.
const snapshots = "opensandbox.snapshot"

// The states of a snapshot.
const (
	shotCreating = "Creating"
	shotReady    = "Ready"
	shotFailed   = "Failed"
	shotDeleting = "Deleting"
)

// snapshot is one such document.
type snapshot struct {
	ID       string    `json:"id"`
	Template string    `json:"template"` // of the domain
	Sandbox  string    `json:"sandbox"`
	Name     string    `json:"name,omitempty"`
	State    string    `json:"state"`
	Message  string    `json:"message,omitempty"`
	Created  time.Time `json:"created"`
	Changed  time.Time `json:"changed"`
}

// Snapshot is a snapshot on the wire.
type Snapshot struct {
	ID        string    `json:"id"`
	SandboxID string    `json:"sandboxId"`
	Name      string    `json:"name,omitempty"`
	Status    Condition `json:"status"`
	CreatedAt time.Time `json:"createdAt"`
}

// shots are the snapshots that this server makes now.
type shots struct {
	mu     sync.Mutex
	making map[string]bool
}

func newShots() *shots { return &shots{making: map[string]bool{}} }

func (s *shots) begin(id string) (done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.making[id] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.making, id)
	}
}

func (s *shots) goesOn(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.making[id]
}

// SnapshotRequest is the body of a snapshot.
type SnapshotRequest struct {
	Name string `json:"name"`
}

const maxSnapshotName = 128

func (a *API) snapshot(c *call) error {
	var req SnapshotRequest
	if err := c.decode(&req); err != nil {
		return err
	}
	if len(req.Name) > maxSnapshotName {
		return invalid("the name of a snapshot has at most %d bytes", maxSnapshotName)
	}
	sb, err := a.snapshotSource(c)
	if err != nil {
		return err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	id := "snap-" + strings.ToLower(rand.Text()[:20])
	s := snapshot{ID: id, Template: id, Sandbox: sb.ID, Name: req.Name, State: shotCreating, Created: now, Changed: now}
	if err := a.putSnapshot(c.ctx(), c.who, s); err != nil {
		return err
	}

	s, err = a.shoot(c, s)
	if err != nil {
		return err
	}

	c.w.Header().Set("Location", prefix+"/snapshots/"+s.ID)
	return c.answer(http.StatusAccepted, wireSnapshot(s))
}

// snapshotSource is the sandbox of a snapshot, which runs or is paused.
func (a *API) snapshotSource(c *call) (sandbox.Sandbox, error) {
	sb, err := a.find(c)
	if fault.Is(err, fault.Conflict) {
		return sb, as(codeSnapshotSource, err)
	}
	if err == nil && sb.State != sandbox.StateRunning && sb.State != sandbox.StatePaused {
		err = told(http.StatusConflict, codeSnapshotSource, "sandbox %s is %s; only one that runs or is paused has a snapshot made", sb.ID, wireStatus(sb).State)
	}
	return sb, err
}

// shoot makes the template of a snapshot, in the background if that takes longer than a request may be held.
func (a *API) shoot(c *call, s snapshot) (snapshot, error) {
	done, over := make(chan snapshot, 1), a.shots.begin(s.ID)
	who := c.who
	a.work.Go(func() {
		defer over()
		_, err := a.sandboxes.Snapshot(a.life, who, s.Sandbox, s.Template, "snapshot of sandbox "+s.Sandbox)
		s := s
		s.State, s.Changed = shotReady, time.Now().UTC().Truncate(time.Microsecond)
		ctx := context.WithoutCancel(a.life) // what has happened is written down
		if err != nil {
			s.State, s.Message = shotFailed, fault.Message(err)
			a.log.Warn("snapshot failed", "sandbox", s.Sandbox, "tenant", who.Tenant, "error", err)
			if err := a.dropTemplate(ctx, who, s); err != nil {
				a.log.Warn("files of a snapshot that failed are left until it is deleted", "snapshot", s.ID, "tenant", who.Tenant, "error", err)
			}
		}
		if err := a.putSnapshot(ctx, who, s); err != nil {
			a.log.Error("snapshot is not recorded", "sandbox", s.Sandbox, "tenant", who.Tenant, "error", err)
			s.State, s.Message = shotFailed, "it could not be recorded"
		}
		done <- s
	})
	timer := time.NewTimer(a.cfg.Hold)
	defer timer.Stop()
	select {
	case s = <-done:
		return s, nil
	case <-timer.C:
		return s, nil
	case <-c.ctx().Done():
		return s, c.ctx().Err()
	}
}

// dropTemplate removes what a snapshot's template has left.
func (a *API) dropTemplate(ctx context.Context, who auth.Principal, s snapshot) error {
	err := a.sandboxes.RemoveTemplate(ctx, who, s.Template)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

func (a *API) putSnapshot(ctx context.Context, who auth.Principal, s snapshot) error {
	body, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return a.documents.PutDocument(ctx, who.Tenant, snapshots, s.ID, body)
}

func noSnapshot(id string) error {
	return told(http.StatusNotFound, codeSnapshotMissing, "there is no snapshot %.64q", id)
}

// snapshotOf reads a snapshot. One that an earlier server did not finish has failed; one that is being removed is not there.
func (a *API) snapshotOf(ctx context.Context, who auth.Principal, id string) (snapshot, error) {
	body, err := a.documents.Document(ctx, who.Tenant, snapshots, id)
	if fault.Is(err, fault.NotFound) || id == "" {
		return snapshot{}, noSnapshot(id)
	}
	if err != nil {
		return snapshot{}, err
	}
	s, err := a.readSnapshot(body)
	if err == nil && s.State == shotDeleting {
		return snapshot{}, noSnapshot(id)
	}
	return s, err
}

func (a *API) readSnapshot(body []byte) (snapshot, error) {
	var s snapshot
	if err := json.Unmarshal(body, &s); err != nil {
		return snapshot{}, err
	}
	if s.State == shotCreating && !a.shots.goesOn(s.ID) {
		s.State, s.Message = shotFailed, "the server stopped while it was made"
	}
	return s, nil
}

// restorable is a snapshot that a sandbox can start from.
func (a *API) restorable(ctx context.Context, who auth.Principal, id string) (snapshot, error) {
	s, err := a.snapshotOf(ctx, who, id)
	if err == nil && s.State != shotReady {
		err = told(http.StatusConflict, codeSnapshotUnready, "snapshot %s is not ready: it is %s", id, s.State)
	}
	return s, err
}

func wireSnapshot(s snapshot) Snapshot {
	return Snapshot{
		ID: s.ID, SandboxID: s.Sandbox, Name: s.Name, CreatedAt: s.Created,
		Status: Condition{State: s.State, Reason: "SNAPSHOT_" + strings.ToUpper(s.State), Message: s.Message, LastTransitionAt: s.Changed},
	}
}

func (a *API) getSnapshot(c *call) error {
	s, err := a.snapshotOf(c.ctx(), c.who, c.r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireSnapshot(s))
}

func (a *API) listSnapshots(c *call) error {
	q := c.query()
	at := q.page()
	if q.err != nil {
		return q.err
	}
	states, of, name := wantedStates(q.given("state")), q.Get("sandboxId"), q.Get("name")

	all, err := a.allSnapshots(c.ctx(), c.who)
	if err != nil {
		return err
	}

	shown := []Snapshot{}
	for _, s := range all {
		if s.State != shotDeleting && (states == nil || states[strings.ToLower(s.State)]) && cmp.Or(of, s.Sandbox) == s.Sandbox && (name == "" || name == s.Name) {
			shown = append(shown, wireSnapshot(s))
		}
	}
	slices.SortStableFunc(shown, func(x, y Snapshot) int { return y.CreatedAt.Compare(x.CreatedAt) })
	return c.answer(http.StatusOK, paged(shown, at))
}

func (a *API) allSnapshots(ctx context.Context, who auth.Principal) ([]snapshot, error) {
	docs, err := a.documents.Documents(ctx, who.Tenant, snapshots)
	if err != nil {
		return nil, err
	}
	var all []snapshot
	for _, d := range docs {
		s, err := a.readSnapshot(d.Body)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func (a *API) deleteSnapshot(c *call) error {
	s, err := a.snapshotOf(c.ctx(), c.who, c.r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	if s.State == shotCreating {
		return told(http.StatusConflict, codeSnapshotBusy, "snapshot %s is being made; delete it when it is ready", s.ID)
	}
	s.State = shotDeleting
	if err := a.putSnapshot(c.ctx(), c.who, s); err != nil {
		return err
	}
	if err := a.tidySnapshots(c.ctx(), c.who); err != nil {
		return err
	}
	return c.nothing(http.StatusNoContent)
}

// tidySnapshots removes the files of snapshots that were deleted, again as long as that frees something: where a snapshot
// was made of a sandbox that started from another, the lower one stays until the upper is gone.
func (a *API) tidySnapshots(ctx context.Context, who auth.Principal) error {
	all, err := a.allSnapshots(ctx, who)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(all, func(s snapshot) bool { return s.State != shotDeleting })
	for freed := true; freed; {
		freed = false
		for i, s := range left {
			err := a.dropTemplate(ctx, who, s)
			if fault.Is(err, fault.Conflict) {
				continue
			}
			if err == nil {
				err = a.documents.DeleteDocument(ctx, who.Tenant, snapshots, s.ID)
			}
			if err != nil && !fault.Is(err, fault.NotFound) {
				return err
			}
			left, freed = slices.Delete(left, i, i+1), true
			break
		}
	}
	return nil
}
