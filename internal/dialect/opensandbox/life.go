package opensandbox

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// find is a sandbox that is there for OpenSandbox. One that is still being made is fault.Conflict.
func (a *API) find(c *call) (sandbox.Sandbox, error) {
	if made := a.creations.find(c.who.Tenant, c.id); made != nil {
		w := a.wireCreation(made)
		return sandbox.Sandbox{}, told(http.StatusConflict, codeNotRunning, "sandbox %s is not running: %s", c.id, w.Status.Message)
	}
	sb, err := a.sandboxes.Get(c.ctx(), c.who, c.id)
	if err != nil {
		return sandbox.Sandbox{}, gone(c.id, err)
	}
	if !visible(sb) {
		return sandbox.Sandbox{}, noSandbox(c.id)
	}
	if sb.State == sandbox.StateEnded {
		removed, err := a.removed(c.ctx(), c.who, c.id)
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		if removed {
			return sandbox.Sandbox{}, noSandbox(c.id)
		}
	}
	return sb, nil
}

// lost is why something could not be done with a sandbox that was there a moment ago: it may have exited meanwhile.
func (a *API) lost(c *call, err error) error {
	if !fault.Is(err, fault.Gone) {
		return gone(c.id, err)
	}
	sb, missing := a.find(c)
	if missing != nil {
		return missing
	}
	status := wireStatus(sb)
	return told(http.StatusConflict, codeNotRunning, "sandbox %s is not running: it is %s: %s", c.id, status.State, status.Message)
}

// gone says what is not there, or no more, as if it had never been.
func gone(id string, err error) error {
	if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Gone) {
		return noSandbox(id)
	}
	return err
}

func (a *API) get(c *call) error {
	if made := a.creations.find(c.who.Tenant, c.id); made != nil {
		return c.answer(http.StatusOK, a.wireCreation(made))
	}
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	return c.answerSandbox(sb)
}

func (c *call) answerSandbox(sb sandbox.Sandbox) error {
	w, err := wireSandbox(sb)
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, w)
}

func (a *API) delete(c *call) error {
	if made := a.creations.find(c.who.Tenant, c.id); made != nil {
		a.abandon(made)
		a.tidyVolumes(c.ctx(), c.who)
		return c.nothing(http.StatusNoContent)
	}
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State == sandbox.StateEnded {
		err = a.forget(c.ctx(), c.who, c.id)
	} else {
		_, err = a.sandboxes.Kill(c.ctx(), c.who, c.id)
	}
	if err != nil {
		return gone(c.id, err)
	}
	a.mains.remove(c.id)
	if f, err := access.Decode(sb); err == nil && len(f.Volumes) > 0 {
		a.tidyVolumes(c.ctx(), c.who)
	}
	return c.nothing(http.StatusNoContent)
}

// removal is the kind of document that names a sandbox which has ended and was then deleted: its row stays for the others
// who may look at it.
const removal = "opensandbox.removed"

func (a *API) forget(ctx context.Context, who auth.Principal, id string) error {
	return a.documents.PutDocument(ctx, who.Tenant, removal, id, []byte("{}"))
}

func (a *API) removed(ctx context.Context, who auth.Principal, id string) (bool, error) {
	_, err := a.documents.Document(ctx, who.Tenant, removal, id)
	if fault.Is(err, fault.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// removals are the sandboxes that were deleted after their end. A note that is older than any row is dropped.
func (a *API) removals(ctx context.Context, who auth.Principal) (map[string]bool, error) {
	docs, err := a.documents.Documents(ctx, who.Tenant, removal)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, d := range docs {
		all[d.ID] = true
		if time.Since(d.Updated) < time.Hour {
			continue
		}
		if _, err := a.sandboxes.Get(ctx, who, d.ID); fault.Is(err, fault.NotFound) {
			_ = a.documents.DeleteDocument(ctx, who.Tenant, removal, d.ID) // the next listing tries again
		}
	}
	return all, nil
}

func (a *API) pause(c *call) error {
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State != sandbox.StateRunning {
		return told(http.StatusConflict, codeNotRunning, "sandbox %s is not running: it is %s", c.id, wireStatus(sb).State)
	}
	var spec sandbox.PauseSpec
	if sb.Deadline.IsZero() { // nobody wants it to end by itself
		spec.Lifetime = -1
	}

	_, err = a.sandboxes.Pause(c.ctx(), c.who, c.id, spec)
	if fault.Is(err, fault.Invalid) && spec.Lifetime < 0 { // the operator wants it
		_, err = a.sandboxes.Pause(c.ctx(), c.who, c.id, sandbox.PauseSpec{})
	}
	if err != nil {
		return a.lost(c, err)
	}

	return c.nothing(http.StatusAccepted)
}

func (a *API) resume(c *call) error {
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State != sandbox.StatePaused {
		return told(http.StatusConflict, codeNotPaused, "sandbox %s is not paused: it is %s", c.id, wireStatus(sb).State)
	}

	sb, err = a.sandboxes.Resume(c.ctx(), c.who, c.id, 0)
	if err != nil {
		return a.lost(c, err)
	}
	a.adopt(sb)

	return c.nothing(http.StatusAccepted)
}

// Renewal is the body of a renew-expiration, and of its answer.
type Renewal struct {
	ExpiresAt string `json:"expiresAt"`
}

func (a *API) renew(c *call) error {
	var req Renewal
	if err := c.decode(&req); err != nil {
		return err
	}
	at, err := time.Parse(time.RFC3339Nano, req.ExpiresAt)
	if err != nil {
		return told(http.StatusBadRequest, codeExpiration, "expiresAt %.60q: want a time as in RFC 3339", req.ExpiresAt)
	}
	lifetime := time.Until(at)
	if lifetime <= 0 {
		return told(http.StatusBadRequest, codeExpiration, "expiresAt %s is not in the future", req.ExpiresAt)
	}
	sb, err := a.find(c)
	switch {
	case err != nil:
		return err
	case sb.State == sandbox.StateEnded:
		return told(http.StatusConflict, codeNotRunning, "sandbox %s has ended", c.id)
	case sb.Deadline.IsZero():
		return told(http.StatusConflict, codeExpiration, "sandbox %s was made to live until it is ended; it has no expiration to renew", c.id)
	}

	sb, err = a.sandboxes.SetLifetime(c.ctx(), c.who, c.id, lifetime)
	if err != nil {
		return a.lost(c, err)
	}

	return c.answer(http.StatusOK, Renewal{sb.Deadline.Format(time.RFC3339Nano)})
}

// patchMetadata merges: a null takes a key away.
func (a *API) patchMetadata(c *call) error {
	patch, err := c.patch()
	if err != nil {
		return err
	}
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State == sandbox.StateEnded {
		return told(http.StatusConflict, codeNotRunning, "sandbox %s has ended", c.id)
	}

	sb, err = a.sandboxes.SetMetadata(c.ctx(), c.who, c.id, func(old map[string]string) (map[string]string, error) {
		return merge(old, patch), nil
	})
	if err != nil {
		return a.lost(c, err)
	}

	return c.answerSandbox(sb)
}

// patch reads what is to change of the metadata.
func (c *call) patch() (map[string]*string, error) {
	var raw map[string]json.RawMessage
	if err := c.decode(&raw); err != nil {
		return nil, err
	}
	patch := map[string]*string{}
	for k, v := range raw {
		var value *string
		if json.Unmarshal(v, &value) != nil {
			return nil, invalid("the value of metadata key %.80q is neither a string nor null", k)
		}
		text := ""
		if value != nil {
			text = *value
		}
		if err := checkLabel(k, text); err != nil {
			return nil, err
		}
		patch[k] = value
	}
	return patch, nil
}

func merge(old map[string]string, patch map[string]*string) map[string]string {
	merged := map[string]string{}
	maps.Copy(merged, old)
	for k, v := range patch {
		if v == nil {
			delete(merged, k)
		} else {
			merged[k] = *v
		}
	}
	return merged
}

// metrics takes what newer clients tell of themselves, which nobody here wants to know.
func (a *API) metrics(c *call) error {
	var event map[string]json.RawMessage
	_ = c.decode(&event) // whatever it is
	return c.nothing(http.StatusNoContent)
}
