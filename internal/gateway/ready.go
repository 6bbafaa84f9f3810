package gateway

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Checks are the parts without which the server cannot serve; each is nil when it can.
type Checks map[string]func(context.Context) error

// Public is the error of a check with a sentence for callers without a key: of other errors /readyz tells the part alone.
type Public string

func (p Public) Error() string { return string(p) }

// readiness is what /readyz answers. Whoever asks has no key: it says which part fails, and the log why.
type readiness struct {
	Status string            `json:"status"`
	Checks map[string]string `json:"checks"`
	Notes  []string          `json:"notes,omitempty"`
}

// The words of readiness.
const (
	statusReady    = "ready"
	statusStarting = "starting"
	statusNot      = "unavailable"
	statusDraining = "draining"
	checkOK        = "ok"
	checkFailed    = "failed"
)

const (
	// defaultReadyFor is how long the answers of the checks hold.
	defaultReadyFor = time.Second
	// checkWait is how long one request for /readyz waits for a check. If the check was good before, the
	// request gets that answer: a busy machine is late now and then.
	checkWait = 2 * time.Second
	// lateFor is how long a check that was good before may be late before it has failed.
	lateFor = 6 * time.Second
	// checkLimit ends a check, so that the next request can start another.
	checkLimit = 20 * time.Second
)

// health is what the parts said last. Whoever asks needs no key, so the parts are asked no more often by being asked for often.
type health struct {
	mu    sync.Mutex // held while they are asked
	at    time.Time
	last  map[string]string
	why   []string            // sentences of Public errors
	stuck map[string]*pending // checks that did not come back in time
}

// pending is a check that was begun.
type pending struct {
	begun  time.Time
	answer chan error
}

// look asks the parts, unless that was done just now.
func (g *Gateway) look() (states map[string]string, why []string) {
	h := &g.health
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last != nil && time.Since(h.at) < g.cfg.ReadyFor {
		return h.last, h.why
	}
	now := map[string]string{}
	h.why = nil
	for name := range g.cfg.Checks {
		now[name] = checkOK
		err := g.ask(name)
		if err != nil {
			now[name] = checkFailed
		}
		var public Public
		if errors.As(err, &public) {
			h.why = append(h.why, string(public))
		}
		switch failed := h.last[name] == checkFailed; {
		case err != nil && !failed:
			g.cfg.Log.Warn("not ready", "check", name, "error", err)
		case err == nil && failed:
			g.cfg.Log.Info("ready again", "check", name)
		}
	}
	h.last, h.at = now, time.Now()
	return h.last, h.why
}

// ask asks one part. One that hangs, as a disk may, is not asked again before it has come back:
// then it is, since what it says at last is as old as the question. One that was good before has
// failed when it has hung for lateFor. The caller holds mu.
func (g *Gateway) ask(name string) error {
	late := time.NewTimer(checkWait)
	defer late.Stop()
	var last error // of the question before
	for {
		check := g.health.stuck[name]
		old := check != nil
		if !old {
			check = g.begin(name)
		}
		select {
		case err := <-check.answer:
			delete(g.health.stuck, name)
			if !old {
				return err
			}
			last = err
		case <-late.C:
			if g.health.stuck == nil {
				g.health.stuck = map[string]*pending{}
			}
			g.health.stuck[name] = check
			if last == nil && g.health.last[name] == checkOK && time.Since(check.begun) < lateFor {
				return nil
			}
			return cmp.Or(last, errors.New("it does not answer"))
		}
	}
}

// begin starts one check.
func (g *Gateway) begin(name string) *pending {
	answer := make(chan error, 1)
	g.inflight.Go(func() {
		// The answer is for every caller, so it does not end with one of them.
		ctx, cancel := context.WithTimeout(context.Background(), checkLimit)
		defer cancel()
		answer <- g.cfg.Checks[name](ctx)
	})
	return &pending{time.Now(), answer}
}

func (g *Gateway) ready(w http.ResponseWriter, _ *http.Request) {
	states, why := g.look()
	now := readiness{Status: statusReady, Checks: states}
	if g.cfg.Notes != nil {
		now.Notes = g.cfg.Notes()
	}
	if slices.Contains(slices.Collect(maps.Values(now.Checks)), checkFailed) {
		now.Status = statusNot
	}
	if g.draining.Load() {
		now.Status = statusDraining
	}
	if now.Status == statusReady {
		tell(w, http.StatusOK, now)
		return
	}
	w.Header().Set("Retry-After", strconv.Itoa(startRetry))
	tell(w, http.StatusServiceUnavailable, notReady{now, unavailable(now.reason(why))})
}

// notReady is readiness with the reason as a sentence.
type notReady struct {
	readiness
	Error map[string]string `json:"error"`
}

func (n readiness) reason(why []string) string {
	if n.Status == statusDraining {
		return "the server is shutting down"
	}
	var failed []string
	for _, name := range slices.Sorted(maps.Keys(n.Checks)) {
		if n.Checks[name] != checkOK {
			failed = append(failed, name)
		}
	}
	text := "not ready: " + strings.Join(failed, ", ")
	for _, sentence := range why {
		text += "; " + sentence
	}
	if len(why) < len(failed) {
		text += "; the server's log says why"
	}
	return text
}
