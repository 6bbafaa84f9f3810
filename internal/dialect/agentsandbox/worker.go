package agentsandbox

import (
	"context"
	"runtime/debug"
	"sync"
	"time"
)

// key names what one worker sees to: a tenant's claim, and the Sandbox of the same name.
type key struct{ tenant, namespace, name string }

// never is no need to look again.
const never = time.Duration(-1)

// workers bring sandboxes to what their objects say. One name has one worker at a time, which looks again when somebody woke it
// meanwhile: so nothing that happens is lost, and nothing has to be told twice.
type workers struct {
	api *API

	mu      sync.Mutex
	stopped bool
	all     map[key]*worker
}

type worker struct {
	busy     bool
	again    bool               // somebody woke it while it was busy
	cancel   context.CancelFunc // of what it is busy with
	timer    *time.Timer        // of one that sleeps
	attempts int                // that failed, one after the other
}

func newWorkers(a *API) *workers { return &workers{api: a, all: map[key]*worker{}} }

// wake lets somebody look at a name.
func (ws *workers) wake(k key) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.stopped {
		return
	}
	w := ws.all[k]
	if w == nil {
		w = &worker{}
		ws.all[k] = w
	}
	if w.busy {
		w.again = true
		return
	}
	if w.timer != nil {
		w.timer.Stop()
	}
	w.busy = true
	ws.api.work.Go(func() { ws.run(k, w) })
}

// interrupt is wake for a change that makes pointless what the worker is busy with.
func (ws *workers) interrupt(k key) {
	ws.mu.Lock()
	if w := ws.all[k]; w != nil && w.cancel != nil {
		w.cancel()
	}
	ws.mu.Unlock()
	ws.wake(k)
}

func (ws *workers) run(k key, w *worker) {
	for {
		ctx, cancel := context.WithCancel(ws.api.life)
		ws.mu.Lock()
		w.again, w.cancel = false, cancel
		ws.mu.Unlock()
		again := ws.api.attempt(ctx, k, &w.attempts)
		cancel()
		if !ws.more(k, w, again) {
			return
		}
	}
}

// attempt is reconcile, whatever is wrong with the object: one that this server cannot bear says so and is tried again, and is
// nobody else's trouble. There is nothing above a worker that would catch its panic.
func (a *API) attempt(ctx context.Context, k key, attempts *int) (again time.Duration) {
	if a.survived(k, func() { again = a.reconcile(ctx, k, attempts) }) {
		return again
	}
	p := a.passOf(ctx, k, attempts)
	a.survived(k, p.confess)
	return p.pause()
}

// survived tells whether work on a name came to its end.
func (a *API) survived(k key, work func()) (ok bool) {
	defer func() {
		if v := recover(); v != nil {
			a.log.Error("an object cannot be seen to, which is a defect of this server; please report it",
				"tenant", k.tenant, "namespace", k.namespace, "name", k.name, "panic", v, "stack", string(debug.Stack()))
			ok = false
		}
	}()
	work()
	return true
}

// more tells whether a worker goes on at once; otherwise it sleeps, or is not needed any more.
func (ws *workers) more(k key, w *worker, again time.Duration) bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w.cancel = nil
	switch {
	case ws.stopped || again == never && !w.again:
		delete(ws.all, k)
		return false
	case w.again:
		return true
	}
	w.busy = false
	w.timer = time.AfterFunc(again, func() { ws.wake(k) })
	return false
}

// stop lets nobody wake up any more.
func (ws *workers) stop() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.stopped = true
	for _, w := range ws.all {
		if w.timer != nil {
			w.timer.Stop()
		}
	}
}
