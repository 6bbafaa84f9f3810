package e2b

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// doomed is the kind of document that names a template of a snapshot from before it is made until a snapshot's document
// names it, and from before none does any more until its files are gone. What is named by it alone is removed, if need be
// by a later server: a crash leaves nothing behind, and nothing is taken for a snapshot by its name.
const doomed = "e2b.snapshot.doomed"

// makeSnapshot makes a snapshot's template and writes it down in the place of the one that had its name.
func (a *API) makeSnapshot(ctx context.Context, who auth.Principal, s snapshot) error {
	defer a.begun(s.Template)()
	if err := a.doom(ctx, who, s.Template); err != nil {
		return fmt.Errorf("announce snapshot of sandbox %s: %w", s.Sandbox, err)
	}
	_, err := a.sandboxes.Snapshot(ctx, who, s.Sandbox, s.Template, "snapshot of sandbox "+s.Sandbox)
	since := time.Time{}
	if ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) { // nobody waited for what the driver says
		since = s.Created
	}
	// From here on a caller who leaves leaves nothing half done.
	ctx = context.WithoutCancel(ctx)
	if err == nil {
		if err = a.moveName(ctx, who, s); err != nil {
			err = fmt.Errorf("record snapshot of sandbox %s: %w", s.Sandbox, err)
		}
	}
	if err != nil { // of what failed there may be files all the same
		a.removeFiles(ctx, who, s.Template, since)
		return err
	}
	a.tidy(ctx, who)
	return nil
}

// begun keeps a template from being taken for one that was left, until it is done.
func (a *API) begun(template string) (done func()) {
	a.naming.Lock()
	defer a.naming.Unlock()
	a.making[template] = true
	return func() {
		a.naming.Lock()
		defer a.naming.Unlock()
		delete(a.making, template)
	}
}

// moveName writes a snapshot down; the one that had its name is doomed.
func (a *API) moveName(ctx context.Context, who auth.Principal, s snapshot) error {
	a.naming.Lock()
	defer a.naming.Unlock()
	old, err := a.document(ctx, who, s.key())
	if err != nil && !fault.Is(err, fault.NotFound) {
		return err
	}
	s.ID = cmp.Or(old.ID, s.ID)
	body, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if old.Template != "" {
		if err := a.doom(ctx, who, old.Template); err != nil {
			return err
		}
	}
	if err := a.documents.PutDocument(ctx, who.Tenant, snapshots, s.key(), body); err != nil {
		return err
	}
	delete(a.making, s.Template)
	return nil
}

func (a *API) doom(ctx context.Context, who auth.Principal, template string) error {
	return a.documents.PutDocument(ctx, who.Tenant, doomed, template, []byte("{}"))
}

// spare forgets that a template was to be removed. When that fails it is tried again with whatever else is doomed.
func (a *API) spare(ctx context.Context, who auth.Principal, template string) {
	err := a.documents.DeleteDocument(ctx, who.Tenant, doomed, template)
	if err != nil && !fault.Is(err, fault.NotFound) {
		a.log.Warn("a template is still marked for removal", "template", template, "tenant", who.Tenant, "error", err)
	}
}

// unsettled is for how long a driver may go on with a snapshot that nobody waits for.
const unsettled = 15 * time.Minute

// removeFiles removes a template that is doomed since a time, or tells that it must stay so: other templates may be made
// from it, or it may still appear.
func (a *API) removeFiles(ctx context.Context, who auth.Principal, template string, since time.Time) (gone bool) {
	err := a.sandboxes.RemoveTemplate(ctx, who, template)
	missing := fault.Is(err, fault.NotFound)
	if err == nil || missing && time.Since(since) > unsettled {
		a.spare(ctx, who, template)
		return true
	}
	if !missing && !fault.Is(err, fault.Conflict) {
		a.log.Warn("files of a snapshot are left for now", "template", template, "tenant", who.Tenant, "error", err)
	}
	return false
}

// tidyOnce looks for what an earlier server has left.
func (a *API) tidyOnce(ctx context.Context, who auth.Principal) {
	a.naming.Lock()
	done := a.tidied[who.Tenant]
	a.naming.Unlock()
	if !done {
		a.tidy(ctx, who)
	}
}

// tidy removes what is doomed, again as long as that frees something: one may be made from another.
func (a *API) tidy(ctx context.Context, who auth.Principal) {
	left, err := a.strays(ctx, who)
	if err != nil {
		a.log.Warn("templates of snapshots that nothing names are left for now", "tenant", who.Tenant, "error", err)
		return
	}
	for freed := true; freed; {
		freed = false
		for template, since := range left {
			if a.removeFiles(ctx, who, template, since) {
				delete(left, template)
				freed = true
			}
		}
	}
}

// strays are the doomed templates that no snapshot names and none that is being made will: what is among them stays so.
func (a *API) strays(ctx context.Context, who auth.Principal) (map[string]time.Time, error) {
	a.naming.Lock()
	defer a.naming.Unlock()
	docs, err := a.documents.Documents(ctx, who.Tenant, doomed)
	if err != nil {
		return nil, err
	}
	left := map[string]time.Time{}
	for _, d := range docs {
		if !a.making[d.ID] {
			left[d.ID] = d.Updated
		}
	}
	if len(docs) > 0 {
		all, err := a.allSnapshots(ctx, who)
		if err != nil {
			return nil, err
		}
		for _, s := range all {
			if _, spared := left[s.Template]; spared {
				a.spare(ctx, who, s.Template)
			}
			delete(left, s.Template)
		}
	}
	a.tidied[who.Tenant] = true
	return left, nil
}
