package sandbox

import (
	"sync"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// operationQuota limits what each tenant does in its sandboxes at the same time, so that one tenant
// cannot take the server's descriptors and memory.
type operationQuota struct {
	most int    // of one tenant
	what string // in the error

	mu   sync.Mutex
	held map[string]int // by tenant; none is 0
}

func newOperationQuota(most int, what string) *operationQuota {
	return &operationQuota{most: most, what: what, held: map[string]int{}}
}

// acquire reports whether the tenant had room for one more; then release gives it back.
func (q *operationQuota) acquire(tenant string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.held[tenant] >= q.most {
		return false
	}
	q.held[tenant]++
	return true
}

func (q *operationQuota) release(tenant string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.held[tenant]--; q.held[tenant] == 0 {
		delete(q.held, tenant)
	}
}

// Watch counts one operation of the caller's tenant until leave. It is for streams that need no
// connection to an agent.
func (m *Manager) Watch(p auth.Principal) (leave func(), err error) {
	if !m.operations.acquire(p.Tenant) {
		return nil, m.operations.limitError()
	}
	return sync.OnceFunc(func() { m.operations.release(p.Tenant) }), nil
}

func (q *operationQuota) limitError() error {
	return fault.New(fault.Exhausted, "this tenant has %d %s, which is the limit (sandbox.max_operations); end some first", q.most, q.what)
}
