package dataset

import (
	"context"
	"io"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/covehq/cove/internal/artifact"
)

// Blobs keeps content, each once for a tenant, and shows it under other names in directories that sandboxes see.
type Blobs interface {
	// Draft begins content of a tenant's.
	Draft(tenant string) (Draft, error)
	// Size is that of content that is there, else fault.NotFound.
	Size(tenant, sha256 string) (int64, error)
	// MakeDir makes a directory, if it is not there.
	MakeDir(dir string) error
	// Dirs are all directories.
	Dirs() ([]string, error)
	// RemoveDir removes a directory with what it shows.
	RemoveDir(dir string) error
	// Show puts content into a directory, in the place of what has that name. Content that is not there is fault.NotFound, a
	// directory fault.Conflict.
	Show(dir, file, tenant, sha256 string) error
	// Hide takes a name out of a directory; one that is not there is no error.
	Hide(dir, file string) error
	// Shown are the names in a directory.
	Shown(dir string) ([]string, error)
	// Release removes content, unless a directory shows it or somebody who saw it still reads it.
	Release(tenant, sha256 string) error
	// Lingering is the size and the number of contents of a tenant that Release could not remove.
	Lingering(tenant string) (bytes int64, files int)
	// All are all contents.
	All() iter.Seq2[artifact.Ref, error]
}

// Draft is content that arrives.
type Draft interface {
	io.Writer
	// Settle ends it: what was written will not be lost.
	Settle() (sha256 string, size int64, err error)
	// Keep puts it among the content of its tenant, where it may be already.
	Keep() error
	// Drop lets go of it; what was kept stays.
	Drop()
}

// Index remembers datasets.
type Index interface {
	// Datasets are those of a session, by id; with no tenant, whoever's it is.
	Datasets(ctx context.Context, tenant, session string) ([]Dataset, error)
	// Dataset is one, or fault.NotFound.
	Dataset(ctx context.Context, tenant, session, id string) (Dataset, error)
	// PutDataset makes or changes one; a file that another of the session has is fault.Conflict.
	PutDataset(ctx context.Context, d Dataset) error
	// PlaceDataset changes the path of one, if it still has the same content.
	PlaceDataset(ctx context.Context, d Dataset) error
	// FailDatasets marks what is being staged as failed: one, or all there are for an empty session.
	FailDatasets(ctx context.Context, session, id, why string, now time.Time) error
	DeleteDataset(ctx context.Context, tenant, session, id string) error
	// ForgetDatasets deletes all of a session's.
	ForgetDatasets(ctx context.Context, session string) error
	// DatasetsHeld is the size and the number of a tenant's contents, each once.
	DatasetsHeld(ctx context.Context, tenant string) (bytes int64, files int, err error)
}

// Observer hears what is staged.
type Observer interface {
	DatasetStaged(bytes int64, deduplicated bool)
	DatasetRejected(reason string)
}

// Config bounds what is kept.
type Config struct {
	MaxSize       int64         // of one; zero: no bound
	MaxTenantSize int64         // zero: no bound
	SweepEvery    time.Duration // zero: ten minutes

	// Alive tells whether there is a session of that id; nil: each is until it is forgotten.
	Alive func(ctx context.Context, session string) (bool, error)
}

// Store keeps datasets. Open and Close it.
type Store struct {
	cfg   Config
	index Index
	blobs Blobs
	log   *slog.Logger
	hears Observer

	turns turns

	mu      sync.Mutex
	uploads map[string]*arrivals // by tenant

	place sync.Mutex // held while content comes into place or is swept

	quit context.CancelFunc
	work sync.WaitGroup
}

// New makes a Store.
func New(cfg Config, index Index, blobs Blobs, hears Observer, log *slog.Logger) *Store {
	if cfg.SweepEvery <= 0 {
		cfg.SweepEvery = 10 * time.Minute
	}
	if hears == nil {
		hears = deaf{}
	}
	return &Store{cfg: cfg, index: index, blobs: blobs, hears: hears, log: log, uploads: map[string]*arrivals{}, quit: func() {}}
}

type deaf struct{}

func (deaf) DatasetStaged(int64, bool) {}
func (deaf) DatasetRejected(string)    {}

// turns lets those who want the same thing have it one after the other.
type turns struct {
	mu   sync.Mutex
	busy map[string]*turn
}

type turn struct {
	here  chan struct{} // full: somebody has it
	users int
}

// take waits for the turn of a name. Call what it returns.
func (t *turns) take(ctx context.Context, name string) (func(), error) {
	t.mu.Lock()
	if t.busy == nil {
		t.busy = map[string]*turn{}
	}
	mine := t.busy[name]
	if mine == nil {
		mine = &turn{here: make(chan struct{}, 1)}
		t.busy[name] = mine
	}
	mine.users++
	t.mu.Unlock()
	select {
	case mine.here <- struct{}{}:
		return func() { <-mine.here; t.leave(name, mine) }, nil
	case <-ctx.Done():
		t.leave(name, mine)
		return nil, context.Cause(ctx)
	}
}

func (t *turns) leave(name string, mine *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if mine.users--; mine.users == 0 {
		delete(t.busy, name)
	}
}
