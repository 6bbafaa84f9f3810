package opensandbox

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/sandbox"
)

func (a *API) list(c *call) error {
	q := c.query()
	at := q.page()
	if q.err != nil {
		return q.err
	}
	filter, err := ParseFilter(strings.Join(q.given("metadata"), "&")) // of several all count
	if err != nil {
		return err
	}
	states := wantedStates(q.given("state"))

	all, err := a.everything(c.ctx(), c.who, states, filter)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, paged(all, at))
}

// wantedStates are the states of a filter in lower case; nil: all.
func wantedStates(given []string) map[string]bool {
	if len(given) == 0 {
		return nil
	}
	states := map[string]bool{}
	for _, text := range given {
		for part := range strings.SplitSeq(text, ",") {
			states[strings.ToLower(strings.TrimSpace(part))] = true
		}
	}
	return states
}

// everything is all that a tenant sees, the newest first.
func (a *API) everything(ctx context.Context, who auth.Principal, states map[string]bool, filter map[string]string) ([]Sandbox, error) {
	seen, all := map[string]bool{}, []Sandbox{}
	keep := func(w Sandbox) {
		if !seen[w.ID] && (states == nil || states[strings.ToLower(w.Status.State)]) {
			all = append(all, w)
		}
		seen[w.ID] = true
	}
	for _, made := range a.creations.of(who.Tenant) {
		if w := a.wireCreation(made); matches(w.Metadata, filter) {
			keep(w)
		}
	}
	removed, err := a.removals(ctx, who)
	if err != nil {
		return nil, err
	}
	for _, q := range queries(states, filter) {
		err := a.eachSandbox(ctx, who, q, func(sb sandbox.Sandbox) error {
			if !visible(sb) || removed[sb.ID] {
				return nil
			}
			w, err := wireSandbox(sb)
			if err == nil {
				keep(w)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(all, func(x, y Sandbox) int { return y.CreatedAt.Compare(x.CreatedAt) })
	return all, nil
}

// queries are what must be asked of the domain to see what is in these states.
func queries(states map[string]bool, filter map[string]string) []sandbox.ListQuery {
	living := map[string]sandbox.State{
		statePending: sandbox.StateStarting, stateRunning: sandbox.StateRunning, statePaused: sandbox.StatePaused, stateStopping: sandbox.StateStopping,
	}
	var asked []sandbox.State
	for name, s := range living {
		if states == nil || states[strings.ToLower(name)] {
			asked = append(asked, s)
		}
	}
	var all []sandbox.ListQuery
	if len(asked) > 0 {
		all = append(all, sandbox.ListQuery{States: asked, Metadata: filter, Limit: sandbox.MaxPage})
	}
	if states == nil || states[strings.ToLower(stateTerminated)] || states[strings.ToLower(stateFailed)] {
		all = append(all, sandbox.ListQuery{States: []sandbox.State{sandbox.StateEnded}, Causes: lasting, Metadata: filter, Limit: sandbox.MaxPage})
	}
	return all
}

func (a *API) eachSandbox(ctx context.Context, who auth.Principal, q sandbox.ListQuery, each func(sandbox.Sandbox) error) error {
	for {
		page, err := a.sandboxes.List(ctx, who, q)
		if err != nil {
			return err
		}
		for _, sb := range page.Items {
			if err := each(sb); err != nil {
				return err
			}
		}
		if q.Cursor = page.Next; q.Cursor == "" {
			return nil
		}
	}
}

// visible tells whether OpenSandbox still has a sandbox: one that has exited stays until its time is over.
func visible(sb sandbox.Sandbox) bool {
	if sb.State != sandbox.StateEnded {
		return true
	}
	return slices.Contains(lasting, sb.Cause) && (sb.Deadline.IsZero() || time.Now().Before(sb.Deadline))
}

func matches(metadata, filter map[string]string) bool {
	for k, v := range filter {
		if got, ok := metadata[k]; !ok || got != v {
			return false
		}
	}
	return true
}
