// Package build makes templates as E2B's SDKs and CLI ask for them: it runs a template's steps in a sandbox and keeps
// what became of its files. It knows no driver and no database, and starts nothing but through the domain.
package build

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Annotation is what the sandbox of a build carries, with the build's id, so that nobody takes it for a user's own.
const Annotation = "e2b-build"

// killFor bounds the end of a build's sandbox, which happens also when the build was cancelled.
const killFor = 30 * time.Second

// Sandboxes is what a build asks of the domain.
type Sandboxes interface {
	Caps() sandbox.Caps
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	SnapshotAs(ctx context.Context, p auth.Principal, id string, spec sandbox.SnapshotSpec) (*template.Template, error)
	RemoveTemplate(ctx context.Context, p auth.Principal, name string) error
	// Each yields the living sandboxes of all tenants.
	Each(yield func(sandbox.Sandbox) bool)
}

// Documents keeps what is known of templates, builds and layers.
type Documents interface {
	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Document(ctx context.Context, tenant, kind, id string) ([]byte, error)
	Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error
}

// Templates are the domain's, which a build can start from.
type Templates interface {
	List(tenant string) []template.Info
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
}

// Config is what the server decides about builds.
type Config struct {
	Dir         string                     // where uploaded files are kept
	URL         func(*http.Request) string // of this server, as the request's client reaches it
	Secret      []byte                     // signs upload links; at least 32 random bytes
	EnvdVersion string                     // as listings show it
	Limits      template.Limits            // as listings show them, of templates that say nothing
	Lifetime    time.Duration              // how long a build may take; an hour
	Parallel    int                        // builds at the same time; 2
	MaxUpload   int64                      // bytes of one archive; 1 GiB
	MaxFiles    int64                      // bytes of all archives of a tenant with 4 KiB for each, beyond which old ones go; 8 GiB, without those on their way
	MaxLayers   int                        // cached layers of a tenant; 20
	Space       diskspace.Check            // before an archive takes more of the disk
}

func (c Config) withDefaults() Config {
	c.Lifetime = cmp.Or(c.Lifetime, time.Hour)
	c.Parallel = cmp.Or(c.Parallel, 2)
	c.MaxUpload = cmp.Or(c.MaxUpload, 1<<30)
	c.MaxFiles = max(cmp.Or(c.MaxFiles, 8<<30), c.MaxUpload)
	c.MaxLayers = cmp.Or(c.MaxLayers, 20)
	c.EnvdVersion = cmp.Or(c.EnvdVersion, "0.6.13")
	c.Limits.CPUs = cmp.Or(c.Limits.CPUs, 1)
	c.Limits.MemoryBytes = cmp.Or(c.Limits.MemoryBytes, 512<<20)
	c.Limits.DiskBytes = cmp.Or(c.Limits.DiskBytes, 2<<30)
	if c.URL == nil {
		c.URL = func(r *http.Request) string { return "http://" + r.Host }
	}
	return c
}

func (c Config) validate() error {
	switch {
	case len(c.Secret) < 32:
		return fault.New(fault.Invalid, "template builds need a secret of at least 32 bytes")
	case c.Dir == "":
		return fault.New(fault.Invalid, "template builds need a directory for uploaded files")
	case c.Lifetime < 0, c.Parallel < 0, c.MaxUpload < 0, c.MaxFiles < 0, c.MaxLayers < 0:
		return fault.New(fault.Invalid, "limits of template builds cannot be negative")
	}
	return nil
}

// Builder answers for everything about templates and owns the builds that go on.
type Builder struct {
	cfg       Config
	sandboxes Sandboxes
	documents Documents
	templates Templates
	images    Images
	resolve   func(ctx context.Context, who auth.Principal, ref string) (Resolved, error)
	files     *files
	log       *slog.Logger

	life  context.Context // of every build; ends with Close
	close context.CancelFunc
	work  sync.WaitGroup
	queue *queue

	mu      sync.Mutex
	shelves map[string]*shelf
	books   map[string]*book // of builds that go on, and of the last that did
	recent  []string         // builds that have ended, oldest first, whose books are kept
}

// New makes a Builder and ends what builds of an earlier server have left running.
func New(cfg Config, s Sandboxes, d Documents, t Templates, i Images, log *slog.Logger) (*Builder, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("directory of uploaded files: %w", err)
	}
	// Builds outlive the requests that start them; Close ends them and waits.
	life, cancel := context.WithCancel(context.Background())
	b := &Builder{
		cfg: cfg, sandboxes: s, documents: d, templates: t, images: i, log: log, life: life, close: cancel,
		files:   &files{dir: cfg.Dir, maxOne: cfg.MaxUpload, maxAll: cfg.MaxFiles, space: cfg.Space, log: log, uploads: map[string]*lane{}},
		shelves: map[string]*shelf{}, books: map[string]*book{},
	}
	b.resolve = b.Resolve
	b.queue = newQueue(cfg.Parallel, func(j *job) { b.work.Go(func() { b.perform(j) }) })
	b.files.clean()
	b.work.Go(b.endStrays)
	return b, nil
}

// Close cancels every build and returns when nothing of them is left.
func (b *Builder) Close() {
	b.close()
	for _, j := range b.queue.shut() {
		b.work.Go(func() { b.end(j, nil, errShutdown) })
	}
	b.work.Wait()
}

var errShutdown = fault.New(fault.Unavailable, "the server stopped while the template was being built; build it again")

// endStrays ends sandboxes in which an earlier server was building: nobody goes on with them. Those of this server cannot be
// among them, since their builds are in the queue's books before their sandboxes exist.
func (b *Builder) endStrays() {
	var strays []sandbox.Sandbox
	b.sandboxes.Each(func(sb sandbox.Sandbox) bool {
		if id := sb.Annotations[Annotation]; id != "" && b.book(id) == nil {
			strays = append(strays, sb)
		}
		return true
	})
	for _, sb := range strays {
		b.kill(auth.Principal{Tenant: sb.Tenant}, sb.ID)
	}
}

func (b *Builder) kill(who auth.Principal, id string) {
	// The sandbox must go also when its build was cancelled.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.life), killFor)
	defer cancel()
	_, err := b.sandboxes.Kill(ctx, who, id)
	if err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Gone) {
		b.log.Error("end the sandbox of a template build", "sandbox", id, "tenant", who.Tenant, "error", err)
	}
}

// keptBooks is of how many ended builds the whole log stays in memory.
const keptBooks = 32

// book is the log of a build that goes on or ended not long ago; nil: of another one.
func (b *Builder) book(build string) *book {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.books[build]
}

func (b *Builder) openBook(build string) *book {
	b.mu.Lock()
	defer b.mu.Unlock()
	k := &book{}
	b.books[build] = k
	return k
}

// shelve keeps an ended build's log among the recent ones.
func (b *Builder) shelve(build string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recent = append(b.recent, build)
	for len(b.recent) > keptBooks {
		delete(b.books, b.recent[0])
		b.recent = b.recent[1:]
	}
}

// shelf is what is known of a tenant's templates; it is read once and then kept.
func (b *Builder) shelf(ctx context.Context, tenant string) (*shelf, error) {
	if tenant == "" {
		return nil, errors.New("a template needs an owner")
	}
	b.mu.Lock()
	s := b.shelves[tenant]
	if s == nil {
		s = newShelf(tenant, b.documents)
		b.shelves[tenant] = s
	}
	b.mu.Unlock()
	first, err := s.load(ctx)
	if err == nil && first {
		b.sweep(s)
	}
	return s, err
}

// sweep removes what a server that died has made and nobody names. It looks before anything new can be made.
func (b *Builder) sweep(s *shelf) {
	named := s.named()
	var left []string
	for _, info := range b.templates.List(s.tenant) {
		if info.Tenant == s.tenant && hidden(info.Name) && !named[info.Name] {
			left = append(left, info.Name)
		}
	}
	if len(left) == 0 {
		return
	}
	b.work.Go(func() { b.discard(b.life, auth.Principal{Tenant: s.tenant}, s, left...) })
}
