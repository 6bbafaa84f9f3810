// Package artifact keeps files that are worth keeping: it takes them out of a sandbox through its agent, knows who made them
// from what, and gives them away by signed links. It asks for Blobs and an Index and knows neither disk nor database.
package artifact

import (
	"context"
	"io"
	"iter"
	"time"
)

// Artifact is a file that was kept.
type Artifact struct {
	ID      string // art_ and 24 hexadecimal digits
	Tenant  string
	Name    string // its file name
	Path    string // where it lay, below the directory that was collected
	MIME    string
	Size    int64
	SHA256  string // hexadecimal
	Created time.Time
	Expires time.Time // zero: when somebody removes it
	Origin
	Source string // what the file was when it was read, so that one that nobody touched since is known again
	Error  string // why it was not kept; then it has no ID and is still where it was
}

// Origin says who made a file, and from what it could be made.
type Origin struct {
	Session  string // id of the session; empty: none
	Key      string // the session's key
	Sandbox  string
	Run      string
	Cell     int
	ToolCall string
	// Datasets are told to a Keeper once for all files of a run, and asked of it by Keeper.Datasets: no Artifact that it
	// returns has them, since a run with many files and many datasets would repeat each for each.
	Datasets []Dataset
}

// Dataset is data that a run could see.
type Dataset struct {
	ID     string `json:"id"`
	SHA256 string `json:"sha256,omitempty"` // empty: a directory of the host's
}

// Box is a directory of a sandbox in which files are dropped to be kept.
type Box struct {
	Dir      string
	Keep     bool // files stay in it; otherwise those that are kept are removed
	MaxFiles int  // of one collection; 0: as many as an agent tells
}

// Query chooses artifacts; what is empty does not choose.
type Query struct {
	Session string // id of a session
	Key     string // key of a session
	Run     string
	SHA256  string
	Limit   int    // 0: DefaultLimit
	Cursor  string // of the page before
	At      time.Time
}

// DefaultLimit and MaxLimit are how many artifacts a page has.
const (
	DefaultLimit = 100
	MaxLimit     = 1000
)

// Page is some artifacts, newest first.
type Page struct {
	Artifacts []Artifact
	Cursor    string // of the next page; empty: this is the last
}

// Held is what is kept of a tenant and of one session.
type Held struct {
	Tenant, Session int64 // bytes
	TenantFiles     int
	Files           int // of the session
}

// Ref names a blob. Tenants share none: else one could find out what another has.
type Ref struct{ Tenant, SHA256 string }

// Draft is a blob that is being written and has no name yet.
type Draft interface {
	io.Writer
	Sum() string // SHA-256 of what was written, hexadecimal
	Size() int64
	// Place gives the blob its name, all at once; existed says that there was one before.
	Place() (existed bool, err error)
	// Drop forgets the blob unless it was placed.
	Drop()
}

// Blob is the content of one or more artifacts. Mark changes whenever its bytes may have.
type Blob interface {
	io.ReadSeekCloser
	Mark() (string, error)
}

// Blobs keeps bytes by their digest.
type Blobs interface {
	Draft(tenant string) (Draft, error)
	// Sync returns when everything that was placed outlives a loss of power. It may take long.
	Sync(ctx context.Context) error
	// Open opens a blob; one that is not there is fault.Gone.
	Open(tenant, sum string) (Blob, error)
	// Remove removes a blob; one that is not there is no error.
	Remove(tenant, sum string) error
	All() iter.Seq2[Ref, error]
}

// Index knows which artifacts there are.
type Index interface {
	// AddArtifacts adds all or none. All of them are one tenant's and could be made from the same datasets.
	AddArtifacts(ctx context.Context, list []Artifact, from []Dataset) error
	// ArtifactDatasets are what one could be made from.
	ArtifactDatasets(ctx context.Context, tenant, id string) ([]Dataset, error)
	// ArtifactByID finds one of any tenant, or fault.NotFound.
	ArtifactByID(ctx context.Context, id string) (Artifact, error)
	Artifacts(ctx context.Context, tenant string, q Query) (Page, error)
	// RemoveArtifact removes one, or fault.NotFound.
	RemoveArtifact(ctx context.Context, tenant, id string) error
	// RemoveExpired removes some of those whose time is over and tells which blobs they named.
	RemoveExpired(ctx context.Context, now time.Time, limit int) ([]Ref, error)
	ArtifactsHeld(ctx context.Context, tenant, session string) (Held, error)
	// BlobNamed says whether any artifact has this content.
	BlobNamed(ctx context.Context, r Ref) (bool, error)

	// LastArtifact is the number of the one that was added last; 0: there was none.
	LastArtifact(ctx context.Context) (int64, error)
	// SettleArtifacts notes that the blobs of all up to that number outlive a loss of power.
	SettleArtifacts(ctx context.Context, last int64) error
	// UnsettledArtifacts are those after them, the oldest first.
	UnsettledArtifacts(ctx context.Context) ([]Artifact, error)

	// LinkKeys are the keys of links, the newest first.
	LinkKeys(ctx context.Context) ([]LinkKey, error)
	// RotateLinkKey adds a key and sets until when the others count at most. With only, it does so only where none signs yet.
	RotateLinkKey(ctx context.Context, k LinkKey, others time.Time, only bool) error
	// DropLinkKeys removes keys that do not count any more.
	DropLinkKeys(ctx context.Context, now time.Time) error
}

// Observer hears what is kept and what is not. The reasons are few and name nothing of a user's.
type Observer interface {
	ArtifactKept(bytes int64, deduplicated bool)
	ArtifactRejected(reason string)
	LinkRefused(reason string)
}

type deaf struct{}

func (deaf) ArtifactKept(int64, bool) {}
func (deaf) ArtifactRejected(string)  {}
func (deaf) LinkRefused(string)       {}
