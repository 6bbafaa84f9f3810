package artifact

import (
	"context"
	"math"
	"sync"

	"github.com/covehq/cove/internal/diskspace"
)

// ledger counts what is kept and what is on its way, so that two collections at once cannot both have the last bytes of a
// quota. An account is read from the index by the first who needs it and forgotten with the last.
type ledger struct {
	mu       sync.Mutex
	accounts map[string]*account
}

// account is what a tenant or a session holds.
type account struct {
	users int
	bytes int64 // of the files' content
	files int

	read sync.Mutex // held while it is read
	told bool       // it was; what follows is counted here
}

// charge is what the account counts against its quota: each file takes an inode besides its bytes.
func (a *account) charge() int64 { return diskspace.Charge(a.bytes, a.files) }

// book is what one collection may add to.
type book struct {
	ledger          *ledger
	tenant, session string // names of accounts; session may be empty
	cfg             *Config
}

// open opens the accounts of a tenant and a session.
func (l *ledger) open(ctx context.Context, i Index, cfg *Config, tenant, session string) (*book, error) {
	b := &book{ledger: l, tenant: "t/" + tenant, cfg: cfg}
	mine, its := l.use(b.tenant), (*account)(nil)
	if session != "" {
		b.session = "s/" + tenant + "/" + session
		its = l.use(b.session)
	}
	err := l.tell(mine, func() (int64, int, error) {
		held, err := i.ArtifactsHeld(ctx, tenant, "")
		return held.Tenant, held.TenantFiles, err
	})
	if err == nil && its != nil {
		err = l.tell(its, func() (int64, int, error) {
			held, err := i.ArtifactsHeld(ctx, tenant, session)
			return held.Session, held.Files, err
		})
	}
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

func (l *ledger) use(name string) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.accounts == nil {
		l.accounts = map[string]*account{}
	}
	a := l.accounts[name]
	if a == nil {
		a = &account{}
		l.accounts[name] = a
	}
	a.users++
	return a
}

// tell reads an account, once. Whoever reads is one of its users already: so nobody before is still adding to the index what
// this would miss, and whoever comes later finds it told.
func (l *ledger) tell(a *account, held func() (bytes int64, files int, err error)) error {
	a.read.Lock()
	defer a.read.Unlock()
	if a.told {
		return nil
	}
	bytes, files, err := held()
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a.bytes, a.files, a.told = bytes, files, true
	return nil
}

func (b *book) close() {
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	for _, name := range []string{b.tenant, b.session} {
		if a := b.ledger.accounts[name]; a != nil {
			if a.users--; a.users == 0 {
				delete(b.ledger.accounts, name)
			}
		}
	}
}

// room is how many bytes there is room for now, at least one; zero: any.
func (b *book) room() int64 {
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	tenant, session := b.ledger.accounts[b.tenant], b.ledger.accounts[b.session]
	room := int64(math.MaxInt64)
	if b.cfg.MaxTenantSize > 0 {
		room = min(room, b.cfg.MaxTenantSize-tenant.charge()-diskspace.FileBytes)
	}
	if session != nil && b.cfg.MaxSessionSize > 0 {
		room = min(room, b.cfg.MaxSessionSize-session.charge()-diskspace.FileBytes)
	}
	if session != nil && session.files >= MaxSessionFiles {
		room = 0
	}
	if room == math.MaxInt64 {
		return 0
	}
	return max(1, room)
}

// take reserves room for one file; nil: it is reserved, else why there is none.
func (b *book) take(size int64) *refusal {
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	tenant, session := b.ledger.accounts[b.tenant], b.ledger.accounts[b.session]
	more := diskspace.Charge(size, 1)
	switch {
	case session != nil && session.files >= MaxSessionFiles:
		return refuse("too_many", "the session has %d artifacts, and more are not kept: remove some", session.files)
	case session != nil && b.cfg.MaxSessionSize > 0 && session.charge()+more > b.cfg.MaxSessionSize:
		return refuse("session_quota", "the artifacts of this session may have %s together, and %s are kept already, with 4 KiB for each file: remove some", human(b.cfg.MaxSessionSize), human(session.charge()))
	case b.cfg.MaxTenantSize > 0 && tenant.charge()+more > b.cfg.MaxTenantSize:
		return refuse("tenant_quota", "your artifacts may have %s together, and %s are kept already, with 4 KiB for each file: remove some", human(b.cfg.MaxTenantSize), human(tenant.charge()))
	}
	b.add(size, 1)
	return nil
}

// give returns what take reserved.
func (b *book) give(size int64) {
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	b.add(-size, -1)
}

func (b *book) add(size int64, files int) {
	for _, name := range []string{b.tenant, b.session} {
		if a := b.ledger.accounts[name]; a != nil {
			a.bytes += size
			a.files += files
		}
	}
}
