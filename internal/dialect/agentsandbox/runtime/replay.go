package runtime

import (
	"context"
	"net/http"
	"sync"
	"time"
)

const (
	// rejoinFor is how long a run whose client has left waits for that client to ask again. Between two tries it lets pass up to
	// eight seconds.
	rejoinFor = 10 * time.Second
	// settleFor is how long a request waits for the one before, of the same words, to turn out to be gone: what says so may come
	// a moment later than the request does. Only one that has run for a while can have tried anybody's patience.
	settleFor = 50 * time.Millisecond
	suspect   = 250 * time.Millisecond

	// How many runs there may be: of a sandbox, of a tenant, of a server.
	maxSandboxRuns = 256
	maxTenantRuns  = 2048
	maxRuns        = 16 << 10
)

// runs are the commands of all sandboxes: those that run, and those whose end nobody has heard.
type runs struct {
	mu      sync.Mutex
	by      map[key][]*run
	of      map[string]int // by sandbox
	tenants map[string]int
	count   int
}

func newRuns() *runs {
	return &runs{by: map[key][]*run{}, of: map[string]int{}, tenants: map[string]int{}}
}

// enter finds the run that a request was sent for before, if its client has left since; two clients that want the same at the
// same time each get their own.
func (rs *runs) enter(ctx context.Context, tenant, id string, k key) (r *run, fresh bool, err error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.takeOver(k); r != nil {
		return r, false, nil
	}
	if left := rs.suspected(k); left != nil {
		rs.mu.Unlock()
		wait := time.NewTimer(settleFor)
		select {
		case <-left:
		case <-wait.C:
		case <-ctx.Done():
		}
		wait.Stop()
		rs.mu.Lock()
		if r := rs.takeOver(k); r != nil {
			return r, false, nil
		}
	}
	if rs.count >= maxRuns || rs.tenants[tenant] >= maxTenantRuns || rs.of[id] >= maxSandboxRuns {
		return nil, false, refused(http.StatusTooManyRequests, "too many commands run at once; wait for one of them to end")
	}
	r = &run{tenant: tenant, id: id, key: k, began: time.Now(), done: make(chan struct{}), left: make(chan struct{})}
	rs.by[k] = append(rs.by[k], r)
	rs.of[id]++
	rs.tenants[tenant]++
	rs.count++
	return r, true, nil
}

// takeOver finds a run that nobody waits for; mu is held.
func (rs *runs) takeOver(k key) *run {
	for _, r := range rs.by[k] {
		if r.alone {
			r.alone, r.left = false, make(chan struct{})
			r.timer.Stop()
			return r
		}
	}
	return nil
}

// suspected gives what tells that somebody has left a run that is old enough; mu is held.
func (rs *runs) suspected(k key) <-chan struct{} {
	for _, r := range rs.by[k] {
		if time.Since(r.began) >= suspect {
			return r.left
		}
	}
	return nil
}

// begin says how a run is ended, and whether its client said how long it waits.
func (rs *runs) begin(r *run, cancel context.CancelFunc, patient bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.cancel, r.patient = cancel, patient
}

// leave says that a run's client has gone. One that had said how long it waits may ask again, and finds the command still
// running; of another the command is killed at once, and it may hear that.
func (rs *runs) leave(r *run) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.alone = true
	close(r.left)
	if !r.patient {
		r.cancel()
	}
	r.timer = time.AfterFunc(rejoinFor, func() {
		rs.mu.Lock()
		defer rs.mu.Unlock()
		if r.alone {
			rs.drop(r)
		}
	})
}

// forget lets go of a run whose end was heard.
func (rs *runs) forget(r *run) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.drop(r)
}

// drop ends a run and what is kept of it; mu is held.
func (rs *runs) drop(r *run) {
	list := rs.by[r.key]
	for i := range list {
		if list[i] != r {
			continue
		}
		if list = append(list[:i:i], list[i+1:]...); len(list) == 0 {
			delete(rs.by, r.key)
		} else {
			rs.by[r.key] = list
		}
		less(rs.of, r.id)
		less(rs.tenants, r.tenant)
		rs.count--
		r.cancel()
		r.release()
		return
	}
}

// less counts one less, and forgets what has none.
func less(counts map[string]int, name string) {
	if counts[name]--; counts[name] == 0 {
		delete(counts, name)
	}
}
