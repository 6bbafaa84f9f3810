package sandbox

import (
	"context"
	"errors"
	"time"
)

// ErrMoved is in the error of a write to a sandbox that belongs to another server.
var ErrMoved = errors.New("another server has taken it over")

// ErrStoreLate is in the error of a Store that did not answer in time. It says nothing about a
// sandbox, so Explain does not wait for news of the sandbox's end.
var ErrStoreLate = errors.New("the database did not answer in time")

// ErrExpelled is in the error of a server that the others have taken for dead: what was its own is theirs.
var ErrExpelled = errors.New("the other servers took this one for dead")

// Server is one of those that share a Store, each with sandboxes of its own.
type Server struct {
	ID  string // of this life of it: the next one has another
	URL string // where the others reach it
}

// Record is a sandbox with what only its Manager needs to know.
type Record struct {
	Sandbox
	IdempotencyKey string
	SpecDigest     string // of the Spec that came with IdempotencyKey
	BootID         string // of the host when a server last saw it alive
	Server         string // that it belongs to; empty: to the only one that there is
	// MostOfTenant is how many living sandboxes its tenant may have with this one, counted by the Store at Insert. Zero: it does not count.
	MostOfTenant int
	// Unspent is what was left of its lifetime when it was paused; negative: it had no deadline; zero: it is not paused.
	Unspent time.Duration
}

// Entry is a sandbox to write, with its events.
type Entry struct {
	Record Record
	Events []LifecycleEvent
}

// Document is a small text that a dialect keeps beside sandboxes, under a name of its own, and understands alone.
type Document struct {
	ID      string
	Body    []byte
	Created time.Time // by the first put of this id
	Updated time.Time // by the last
}

// Store keeps sandboxes and their events over the life of a server; storetest has its contract as tests.
// Times are exact to a microsecond.
type Store interface {
	// Insert adds a sandbox and its first events at once. A living sandbox of the same tenant with the same
	// Key or IdempotencyKey is fault.Conflict.
	Insert(ctx context.Context, r Record, events ...LifecycleEvent) error
	// Save replaces a sandbox and adds events at once, or does neither: what has ended is fault.Conflict and
	// stays as it is; what was never inserted is fault.NotFound; what belongs to another server is ErrMoved.
	Save(ctx context.Context, r Record, events ...LifecycleEvent) error
	// InsertAll and SaveAll do so for several, all or none.
	InsertAll(ctx context.Context, entries []Entry) error
	SaveAll(ctx context.Context, entries []Entry) error
	// Get finds a sandbox of any tenant, or fault.NotFound.
	Get(ctx context.Context, id string) (Record, error)
	// Living returns every sandbox that has not ended, oldest first.
	Living(ctx context.Context) ([]Record, error)
	// Belonging tells of every sandbox that has not ended which server it belongs to.
	Belonging(ctx context.Context) (map[string]string, error)
	// Holder finds the living sandbox of a tenant that has the key or the idempotency key, or fault.NotFound; an empty one is nobody's.
	Holder(ctx context.Context, tenant, key, idempotencyKey string) (Record, error)
	// Gather makes every living sandbox this server's and returns them, oldest first. It is for a server that is alone.
	Gather(ctx context.Context, server string) ([]Record, error)
	// List returns a page of a tenant's sandboxes by the time of their creation, newest first unless the query is
	// Ascending; those of one moment by their ids. A cursor stays good while rows come and go; one that it never gave out
	// is fault.Invalid.
	List(ctx context.Context, tenant string, q ListQuery) (Page, error)
	// Events returns up to limit of a tenant's events after a sequence number, oldest first; an event that
	// appears later has a higher number than all before it.
	Events(ctx context.Context, tenant string, q EventQuery, limit int) ([]LifecycleEvent, error)
	// Prune removes sandboxes that ended before a time, with their events, and says how many.
	Prune(ctx context.Context, before time.Time) (int, error)
	// PruneTenant removes the sandboxes of a tenant that ended first, with their events, and says
	// how many. It keeps the newest ended ones, as many as keep says.
	PruneTenant(ctx context.Context, tenant string, keep int) (int, error)
}
