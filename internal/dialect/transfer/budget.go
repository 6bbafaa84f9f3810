package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"runtime"
	"slices"
	"sync"

	"github.com/covehq/cove/internal/fault"
)

// FreeBody is how many bytes of each request no Budget counts.
const FreeBody = 64 << 10

// MaxValues bounds the members of all lists and objects in one body. A body of FreeBody cannot have
// more. In Go an empty string takes 16 bytes and in JSON 3, so a long list of them would take a
// multiple of its body.
const MaxValues = 32 << 10

// largeJSON is the size from which on a body waits for its turn to be decoded.
const largeJSON = 1 << 20

// The errors of a Budget. Both pass: the client may send the request again.
var (
	ErrShare = fault.New(fault.Exhausted, "large requests of this tenant take all the memory that it may use for them; try again when some have ended")
	ErrTotal = fault.New(fault.Unavailable, "the server is busy with other large requests; try again")
)

// OverBudget reports whether err is one of a Budget.
func OverBudget(err error) bool { return errors.Is(err, ErrShare) || errors.Is(err, ErrTotal) }

// Budget bounds the memory that the bodies of all requests take, in total and for each tenant.
type Budget struct {
	total, share int64
	turns        chan struct{} // one for each large body that is decoded

	mu      sync.Mutex
	used    int64
	tenants map[string]int64 // only those that use some
}

// NewBudget makes a budget of total bytes, of which one tenant may have share.
func NewBudget(total, share int64) *Budget {
	return &Budget{total: total, share: share, turns: make(chan struct{}, min(4, runtime.GOMAXPROCS(0))), tenants: map[string]int64{}}
}

// Handler counts what the requests of next take. A request gives it back when next returns, or when
// the last work that Keep names has ended.
func (b *Budget) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := &account{budget: b, users: 1}
		defer a.leave()
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), accountKey{}, a)))
	})
}

// Used is how many bytes the requests under way have taken.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

func (b *Budget) take(tenant string, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case n > b.share-b.tenants[tenant]:
		return ErrShare
	case n > b.total-b.used:
		return ErrTotal
	}
	b.used += n
	b.tenants[tenant] += n
	return nil
}

func (b *Budget) give(tenant string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.tenants[tenant] -= n; b.tenants[tenant] == 0 {
		delete(b.tenants, tenant)
	}
}

type accountKey struct{}

// account is what one request has taken.
type account struct {
	budget *Budget

	mu    sync.Mutex
	users int // the handler, and the work that Keep names
	taken []*Memory
}

func (a *account) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.users--; a.users > 0 {
		return
	}
	for _, m := range a.taken {
		m.budget.give(m.tenant, m.n)
	}
	a.taken = nil
}

// Keep has the request of ctx hold what it has taken until done is called, even if it is answered
// before.
func Keep(ctx context.Context) (done func()) {
	a, ok := ctx.Value(accountKey{}).(*account)
	if !ok {
		return func() {}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.users++
	return sync.OnceFunc(a.leave)
}

// Memory is what a part of one request takes of the budget. Without a budget it counts nothing.
type Memory struct {
	*account
	tenant string
	n      int64
}

// MemoryOf begins a count for the request of ctx, which a tenant pays.
func MemoryOf(ctx context.Context, tenant string) *Memory {
	a, _ := ctx.Value(accountKey{}).(*account)
	return &Memory{account: a, tenant: tenant}
}

// Resize takes or gives back the difference to n bytes.
func (m *Memory) Resize(n int64) error {
	if m.account == nil || n == m.n {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users == 0 { // the request is over
		return nil
	}
	if n < m.n {
		m.budget.give(m.tenant, m.n-n)
	} else if err := m.budget.take(m.tenant, n-m.n); err != nil {
		return err
	}
	m.n = n
	if !slices.Contains(m.taken, m) {
		m.taken = append(m.taken, m)
	}
	return nil
}

// ReadJSON reads a body of JSON to its end. Until the request of ctx ends, a tenant pays for the
// bytes beyond FreeBody.
//
// An error of the budget is ErrShare or ErrTotal, and that of a body with too many values is
// fault.Invalid. Others are those of from.
func ReadJSON(ctx context.Context, tenant string, from io.Reader) ([]byte, error) {
	whole, err := io.ReadAll(io.LimitReader(from, FreeBody))
	if err != nil || len(whole) < FreeBody {
		return whole, err
	}
	memory := MemoryOf(ctx, tenant)
	for size := FreeBody; ; {
		if len(whole) == cap(whole) {
			for size <= cap(whole) {
				size *= 2
			}
			if err := memory.Resize(int64(size) - FreeBody); err != nil {
				return nil, err
			}
			whole = slices.Grow(whole, size-len(whole))
		}
		n, err := from.Read(whole[len(whole):cap(whole)])
		whole = whole[:len(whole)+n]
		switch {
		case err == io.EOF:
			return whole, checkValues(whole)
		case err != nil:
			return nil, err
		}
	}
}

// DecodeTurn waits until a body may be decoded: decoding takes several times its size for a moment,
// so only a few large bodies are decoded at the same time.
func DecodeTurn(ctx context.Context, body []byte) (done func(), err error) {
	a, ok := ctx.Value(accountKey{}).(*account)
	if !ok || len(body) < largeJSON {
		return func() {}, nil
	}
	select {
	case a.budget.turns <- struct{}{}:
		return func() { <-a.budget.turns }, nil
	case <-ctx.Done():
		return nil, fault.Wrap(fault.Unavailable, ctx.Err(), "the request was cancelled")
	}
}

// checkValues refuses JSON with more than MaxValues members of lists and objects. Each list and
// object counts once more, for itself.
func checkValues(body []byte) error {
	n := 0
	for i := 0; i < len(body) && n <= MaxValues; i++ {
		switch body[i] {
		case ',', '[', '{':
			n++
		case '"':
			i += stringLength(body[i+1:])
		}
	}
	if n > MaxValues {
		return fault.New(fault.Invalid, "the lists and objects of the request body have more than %d members; put large content into a file", MaxValues)
	}
	return nil
}

// stringLength is how many bytes a JSON string has behind its first quote, with its last one.
func stringLength(rest []byte) int {
	for i := 0; ; i++ {
		next := bytes.IndexByte(rest[i:], '"')
		if next < 0 {
			return len(rest)
		}
		escapes := 0
		for at := i + next - 1; at >= 0 && rest[at] == '\\'; at-- {
			escapes++
		}
		if i += next; escapes%2 == 0 {
			return i + 1
		}
	}
}
