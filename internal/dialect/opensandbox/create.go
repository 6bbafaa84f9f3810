package opensandbox

import (
	"context"
	"maps"
	"net/http"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// imageAnnotation is where all dialects note the image that a sandbox was asked for.
const imageAnnotation = "image"

func (a *API) create(c *call) error {
	var req CreateRequest
	if err := c.decode(&req); err != nil {
		return err
	}
	pl, err := req.plan(a.cfg.MaxLimits)
	if err != nil {
		return err
	}
	if id := pl.facts.SnapshotID; id != "" {
		if _, err := a.restorable(c.ctx(), c.who, id); err != nil {
			return err
		}
	}

	made, err := a.begin(c.who, pl)
	if err != nil {
		return err
	}
	pending, err := a.hold(c.ctx(), made)
	if err != nil {
		return err
	}

	if pending {
		return c.answer(http.StatusAccepted, a.wireCreation(made))
	}
	sb, err := a.sandboxes.Get(c.ctx(), c.who, pl.spec.ID)
	if err != nil {
		return err
	}
	w, err := wireSandbox(sb)
	if err != nil {
		return err
	}
	return c.answer(http.StatusAccepted, w)
}

// begin makes a sandbox in the background, where it goes on although its request is answered.
func (a *API) begin(who auth.Principal, pl plan) (*creation, error) {
	ctx, cancel := context.WithCancel(a.life)
	made := &creation{plan: pl, who: who, created: time.Now().UTC().Truncate(time.Microsecond), cancel: cancel, done: make(chan struct{})}
	if err := a.creations.add(made); err != nil {
		cancel()
		return nil, err
	}
	a.work.Go(func() {
		defer cancel()
		err := a.make(ctx, made)
		made.err, made.ended = err, time.Now()
		made.plan.pull, made.plan.spec.Env, made.plan.hook = template.PullRequest{}, nil, nil // secrets, which nobody needs any more
		if err == nil {
			a.creations.remove(pl.spec.ID) // the domain answers for it from now on
		}
		close(made.done)
		if err != nil && len(pl.volumes) > 0 { // of which the domain may have heard nothing
			a.tidyVolumes(context.WithoutCancel(a.life), who)
		}
	})
	return made, nil
}

// hold waits for a creation as long as a request may be held. A caller who leaves meanwhile does not want it any more; one
// that fails meanwhile was never there.
func (a *API) hold(ctx context.Context, made *creation) (pending bool, err error) {
	timer := time.NewTimer(a.cfg.Hold)
	defer timer.Stop()
	select {
	case <-made.done:
		if made.err != nil {
			a.creations.remove(made.plan.spec.ID)
		}
		return false, made.err
	case <-timer.C:
		return true, nil
	case <-ctx.Done():
		a.abandon(made)
		return false, ctx.Err()
	}
}

// abandon ends a creation, and what has come of it.
func (a *API) abandon(made *creation) {
	made.cancel()
	<-made.done // make ends soon: all that it waits for hears of the cancel
	a.creations.remove(made.plan.spec.ID)
	if made.err != nil {
		return
	}
	// Its caller has left, and must leave nothing behind.
	if _, err := a.sandboxes.Kill(context.WithoutCancel(a.life), made.who, made.plan.spec.ID); err != nil && !fault.Is(err, fault.NotFound) {
		a.log.Warn("sandbox that nobody waits for is not ended yet", "sandbox", made.plan.spec.ID, "tenant", made.who.Tenant, "error", err)
	}
}

// make brings the image, starts the sandbox and then its entrypoint.
func (a *API) make(ctx context.Context, made *creation) error {
	who, pl := made.who, made.plan
	from, err := a.source(ctx, made)
	if err != nil {
		return err
	}
	pl.spec.Template = from.Name
	main := pl.given && !idles(pl.facts.Entrypoint, from)
	if main {
		pl.facts.Process = mainTag
	}
	if err := a.makeVolumes(ctx, who, &pl); err != nil {
		return err
	}
	pl.spec.Annotations = map[string]string{access.Annotation: pl.facts.Encode()}
	if pl.facts.Image != "" {
		pl.spec.Annotations[imageAnnotation] = pl.facts.Image
	}
	a.creations.say(made, "the sandbox is starting")
	sb, _, err := a.sandboxes.Create(ctx, who, pl.spec)
	if err != nil {
		return a.startFault(ctx, who, pl.spec, err)
	}
	if err := a.begun(ctx, made, sb, main); err != nil {
		a.discard(ctx, who, sb.ID)
		return err
	}
	if ctx.Err() != nil { // somebody ended it at the very last
		a.discard(ctx, who, sb.ID)
		return fault.Wrap(fault.Unavailable, ctx.Err(), "the create was cancelled")
	}
	return nil
}

// begun runs what a create wants to have run in a sandbox that has just started.
func (a *API) begun(ctx context.Context, made *creation, sb sandbox.Sandbox, main bool) error {
	if hook := made.plan.hook; hook != nil {
		a.creations.say(made, "the preStart hook runs")
		if err := a.prepare(ctx, made.who, sb.ID, hook); err != nil {
			return err
		}
	}
	if !main {
		return nil
	}
	return a.launch(made.who, sb, made.plan.facts.Entrypoint)
}

func (a *API) discard(ctx context.Context, who auth.Principal, id string) {
	if _, err := a.sandboxes.Kill(context.WithoutCancel(ctx), who, id); err != nil {
		a.log.Warn("sandbox whose create failed is not ended yet", "sandbox", id, "tenant", who.Tenant, "error", err)
	}
}

// source is what a sandbox starts from: an image, which may have to be pulled, or a snapshot.
func (a *API) source(ctx context.Context, made *creation) (*template.Template, error) {
	pl := made.plan
	if pl.facts.SnapshotID != "" {
		s, err := a.restorable(ctx, made.who, pl.facts.SnapshotID)
		if err != nil {
			return nil, err
		}
		return &template.Template{Name: s.Template}, nil
	}
	a.creations.say(made, "the image is being pulled")
	t, err := a.images.Ensure(ctx, made.who.Tenant, pl.pull)
	if err != nil {
		return nil, pullFault(err)
	}
	return t, nil
}

// The clients read the code of a failed create only where its status is 400, 401, 403, 409, 429 or 500.

// pullFault is why an image cannot be had.
func pullFault(err error) error {
	switch fault.KindOf(err) {
	case fault.Invalid, fault.NotFound, fault.Unsupported:
		return withStatus(http.StatusBadRequest, codePull, err)
	case fault.Denied, fault.Unauthed: // a 401 would be about our key
		return withStatus(http.StatusForbidden, codePull, err)
	case fault.Conflict, fault.Exhausted, fault.DiskFull, fault.Unavailable, fault.Timeout, fault.Gone, fault.Internal:
	}
	return withStatus(http.StatusInternalServerError, codePull, err)
}

// startFault is why a sandbox did not start.
func (a *API) startFault(ctx context.Context, who auth.Principal, spec sandbox.Spec, err error) error {
	if mount := a.mountFault(ctx, who, spec, err); mount != nil {
		return mount
	}
	switch fault.KindOf(err) {
	case fault.Internal, fault.DiskFull, fault.Unavailable, fault.Timeout, fault.NotFound: // of a template that was there a moment ago
		return withStatus(http.StatusInternalServerError, codeStart, err)
	case fault.Gone: // somebody ended it while it started
		return withStatus(http.StatusConflict, codeStart, err)
	case fault.Unsupported:
		return withStatus(http.StatusBadRequest, codeUnsupported, err)
	case fault.Invalid, fault.Denied, fault.Unauthed, fault.Conflict, fault.Exhausted:
	}
	return err
}

// wireCreation is a sandbox that is being made, or could not be, as its owner sees it.
func (a *API) wireCreation(made *creation) Sandbox {
	pl := &made.plan // parts of it change meanwhile
	w := Sandbox{
		ID: pl.spec.ID, Entrypoint: pl.facts.Entrypoint, CreatedAt: made.created, Metadata: maps.Clone(pl.spec.Metadata),
		SnapshotID: pl.facts.SnapshotID, Platform: pl.facts.Platform, Extensions: pl.facts.Extensions,
		Status: Condition{State: statePending, Reason: "SANDBOX_PENDING", Message: a.creations.said(made), LastTransitionAt: made.created},
	}
	if pl.facts.Image != "" {
		w.Image = &Image{URI: pl.facts.Image}
	}
	if pl.spec.Lifetime > 0 {
		w.ExpiresAt = made.created.Add(pl.spec.Lifetime)
	}
	if made.decided() && made.err != nil {
		_, p := problemOf(made.err)
		w.Status = Condition{State: stateFailed, Reason: p.Code, Message: p.Message, LastTransitionAt: made.ended.UTC()}
	}
	return w
}
