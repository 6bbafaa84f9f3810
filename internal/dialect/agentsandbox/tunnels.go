package agentsandbox

import (
	"net/http"
	"sync"
)

// tunnels counts the port-forwards of tenants: each may hold some megabytes that wait for a port.
type tunnels struct {
	mu    sync.Mutex
	count map[string]int // by tenant; those that have one
}

// begin counts one more, unless there are too many. The tunnel is over when done is called.
func (t *tunnels) begin(tenant string, most int) (done func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count[tenant] >= most {
		return nil, refuse(http.StatusTooManyRequests, reasonTooMany, "there are %d port-forwards of this tenant, which is the limit; end one first", most)
	}
	if t.count == nil {
		t.count = map[string]int{}
	}
	t.count[tenant]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.count[tenant]--; t.count[tenant] == 0 {
			delete(t.count, tenant)
		}
	}, nil
}
