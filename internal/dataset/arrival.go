package dataset

import (
	"context"

	"github.com/covehq/cove/internal/fault"
)

// arrivals are the uploads of a tenant's that are under way. What they bring counts from its first byte, so that the disk holds
// no more of what is not wanted yet than a tenant can have on the way.
type arrivals struct {
	count int
	bytes int64
}

// arrival is one of them.
type arrival struct {
	s      *Store
	tenant string
	most   int64 // of all arrivals of the tenant; negative: any
	got    int64 // under the Store's mu
}

// begin counts an upload of so many bytes; negative: that is not known.
func (s *Store) begin(ctx context.Context, tenant string, size int64) (*arrival, error) {
	most, err := s.mayArrive(ctx, tenant)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.uploads[tenant]
	if all == nil {
		all = &arrivals{}
	}
	if all.count >= maxUploads {
		return nil, fault.New(fault.Exhausted, "%d of your datasets are arriving already: wait until one is there", maxUploads)
	}
	if most >= 0 && all.bytes+max(0, size) > most {
		return nil, s.noRoom()
	}
	all.count++
	s.uploads[tenant] = all
	return &arrival{s: s, tenant: tenant, most: most}, nil
}

// mayArrive is how much a tenant may have on the way at once: what it has room for, and one dataset in any case, since content
// that is here already needs none and is known when all of it has come. Negative: any.
func (s *Store) mayArrive(ctx context.Context, tenant string) (int64, error) {
	if s.cfg.MaxTenantSize <= 0 {
		return -1, nil
	}
	used, err := s.used(ctx, tenant)
	one := s.cfg.MaxTenantSize
	if s.cfg.MaxSize > 0 {
		one = min(one, s.cfg.MaxSize+1) // the one more byte that shows that it is too large
	}
	return max(one, s.cfg.MaxTenantSize-used), err
}

func (s *Store) noRoom() error {
	return rejection{"tenant_quota", fault.New(fault.Exhausted,
		"your datasets on the way would have more bytes than there is room for (datasets.max_tenant_size is %d): wait until those are there, or remove some", s.cfg.MaxTenantSize)}
}

// Write counts what has come before it is written anywhere.
func (a *arrival) Write(p []byte) (int, error) {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	all := a.s.uploads[a.tenant]
	if a.most >= 0 && all.bytes+int64(len(p)) > a.most {
		return 0, a.s.noRoom()
	}
	all.bytes += int64(len(p))
	a.got += int64(len(p))
	return len(p), nil
}

func (a *arrival) end() {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	all := a.s.uploads[a.tenant]
	all.bytes -= a.got
	if all.count--; all.count == 0 {
		delete(a.s.uploads, a.tenant)
	}
}
