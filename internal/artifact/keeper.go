package artifact

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"log/slog"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Config says how much is kept for how long.
type Config struct {
	PublicURL      string // in front of /artifacts/…
	LinkTTL        time.Duration
	MaxFileSize    int64
	MaxSessionSize int64         // zero: no bound
	MaxTenantSize  int64         // zero: no bound
	Retention      time.Duration // zero: until somebody removes it
	SweepEvery     time.Duration // zero: ten minutes
	Log            *slog.Logger
	Observer       Observer // nil: nobody listens
	// Step is told each step of keeping a file before the next begins, of several files at once; for tests that stop there.
	// nil: nobody is.
	Step func(step string)
}

// MaxSessionFiles bounds how many artifacts a session has: a name costs something too, however small the file.
const MaxSessionFiles = 100_000

// Keeper keeps artifacts. Close it.
type Keeper struct {
	cfg   Config
	blobs Blobs
	index Index

	claims   claims
	ledger   ledger
	verified verified
	ring     ring
	settler  settler
	seen     memory
	sweeping sync.Mutex // held for one sweep

	quit context.CancelFunc
	work sync.WaitGroup
}

// New opens a keeper: it finds the key of its links, or makes the first, looks at what the last server left, and begins to
// sweep.
func New(ctx context.Context, cfg Config, b Blobs, i Index) (*Keeper, error) {
	if cfg.Observer == nil {
		cfg.Observer = deaf{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Step == nil {
		cfg.Step = func(string) {}
	}
	if cfg.SweepEvery <= 0 {
		cfg.SweepEvery = 10 * time.Minute
	}
	k := &Keeper{cfg: cfg, blobs: b, index: i, settler: make(settler, 1)}
	if err := k.firstKey(ctx); err != nil {
		return nil, err
	}
	if err := k.recover(ctx); err != nil {
		return nil, err
	}
	// Owned by the Keeper and ended by Close.
	working, quit := context.WithCancel(context.Background())
	k.quit = quit
	k.work.Go(func() { k.sweeps(working) })
	k.work.Go(func() { k.settles(working) })
	return k, nil
}

// Close ends the keeper's work.
func (k *Keeper) Close() error {
	k.quit()
	k.work.Wait()
	return nil
}

// Get finds an artifact; one of another tenant is not found.
func (k *Keeper) Get(ctx context.Context, tenant, id string) (Artifact, error) {
	a, err := k.find(ctx, id)
	if err == nil && a.Tenant != tenant {
		return Artifact{}, notFound(id)
	}
	return a, err
}

// Datasets are what the run that made an artifact could see.
func (k *Keeper) Datasets(ctx context.Context, tenant, id string) ([]Dataset, error) {
	if _, err := k.Get(ctx, tenant, id); err != nil {
		return nil, err
	}
	return k.index.ArtifactDatasets(ctx, tenant, id)
}

func notFound(id string) error { return fault.New(fault.NotFound, "there is no artifact %.64q", id) }

// find finds an artifact of any tenant whose time is not over.
func (k *Keeper) find(ctx context.Context, id string) (Artifact, error) {
	a, err := k.index.ArtifactByID(ctx, id)
	if err != nil {
		return Artifact{}, err
	}
	if !a.Expires.IsZero() && !time.Now().Before(a.Expires) {
		return Artifact{}, notFound(id)
	}
	return a, nil
}

// List lists a tenant's artifacts, newest first.
func (k *Keeper) List(ctx context.Context, tenant string, q Query) (Page, error) {
	switch {
	case q.Limit < 0 || q.Limit > MaxLimit:
		return Page{}, fault.New(fault.Invalid, "a page has 1 to %d artifacts, not %d", MaxLimit, q.Limit)
	case q.Limit == 0:
		q.Limit = DefaultLimit
	}
	q.At = time.Now()
	return k.index.Artifacts(ctx, tenant, q)
}

// Remove removes an artifact, and its content if it was the last to have it.
func (k *Keeper) Remove(ctx context.Context, tenant, id string) error {
	a, err := k.Get(ctx, tenant, id)
	if err != nil {
		return err
	}
	if err := k.index.RemoveArtifact(ctx, tenant, id); err != nil {
		return err
	}
	_, err = k.reap(ctx, Ref{tenant, a.SHA256})
	return err
}

// Forget drops what is remembered of a session, which costs a second look at most. It belongs after the end of a sandbox.
func (k *Keeper) Forget(session string) { k.seen.forget(session) }

// newID begins with the time: names that come together lie together in the index, which costs half of writing them all over it.
func newID() string {
	b := binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixMilli())<<16)[:6]
	b = append(b, make([]byte, 10)...)
	_, _ = rand.Read(b[6:]) // never fails
	return "art_" + hex.EncodeToString(b)
}
