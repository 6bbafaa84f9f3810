// Package image brings container images in: from a registry or from an archive, checked by digest, layer by layer, to the
// driver that unpacks them and makes templates of them; where its hosts pull images themselves, only what an image is. It keeps
// which tenant has which image under which name. It starts nothing, unpacks nothing itself and knows no protocol but the
// registry's.
package image

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Config is what the server decides about images.
type Config struct {
	Dir          string              // of this package alone: layers on their way and archives that are read
	KeyFile      string              // of the key that logins are kept with; made when it is first needed; default: Dir/login.key
	Operator     string              // the tenant whose pulls may use DockerConfig and registries on this host's loopback
	DockerConfig string              // Docker's config file; empty: none
	Map          map[string]string   // pattern of an image's name → template that stands for it
	Mirrors      map[string][]string // registry → where its images are asked for first: host, host/prefix or http://host
	Insecure     []string            // registries, host or host:port, that may speak plain HTTP or have any certificate
	Platform     string              // of this host, or of those that pull images themselves, os/arch
	MaxBytes     int64               // of one image, unpacked; its compressed layers have no more either; 20 GiB
	PullTimeout  time.Duration       // of one pull; half an hour
	// MaxTenantBytes is what all images and builds of a tenant may have on disk; zero: as much as there is.
	MaxTenantBytes int64
	MaxTenantFiles int // of all its images, where MaxTenantBytes is set; five million
	MaxFiles       int // of one image; a million
	Pulls          Pulls
	Space          diskspace.Check // before downloads and archives take more of the disk
}

// Pulls is what the server decides where it downloads no layer: the driver's hosts pull images themselves.
type Pulls struct {
	Allow []string // patterns of the names, in full, that tenants may use; empty: every name
	// Credentials: hosts have some of the operator's own. A tenant's then only show that it may read an image; without, they are of no use.
	Credentials bool
	Off         string // where tenants may name no image: why, for whoever does
}

const (
	defaultMaxBytes       = 20 << 30
	defaultMaxFiles       = 1_000_000
	defaultMaxTenantFiles = 5_000_000
	defaultPullTimeout    = 30 * time.Minute
)

func (c Config) withDefaults() Config {
	c.KeyFile = cmp.Or(c.KeyFile, filepath.Join(c.Dir, "login.key"))
	c.Platform = cmp.Or(c.Platform, "linux/"+runtime.GOARCH)
	c.MaxBytes = cmp.Or(c.MaxBytes, defaultMaxBytes)
	c.MaxFiles = cmp.Or(c.MaxFiles, defaultMaxFiles)
	c.MaxTenantFiles = cmp.Or(c.MaxTenantFiles, defaultMaxTenantFiles)
	c.PullTimeout = cmp.Or(c.PullTimeout, defaultPullTimeout)
	return c
}

func (c Config) validate() error {
	switch {
	case c.Dir == "":
		return fault.New(fault.Invalid, "images need a directory")
	case c.MaxBytes < 0 || c.PullTimeout < 0 || c.MaxTenantBytes < 0 || c.MaxFiles < 0 || c.MaxTenantFiles < 0:
		return fault.New(fault.Invalid, "limits of images cannot be negative")
	case strings.Count(c.Platform, "/") != 1:
		return fault.New(fault.Invalid, "the platform of images is written os/arch, not %q", c.Platform)
	}
	return nil
}

// Templates are the domain's.
type Templates interface {
	List(tenant string) []template.Info
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
	RemoveTemplate(ctx context.Context, tenant, name string) error
}

// Documents keeps what is known of images, and logins to registries.
type Documents interface {
	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Document(ctx context.Context, tenant, kind, id string) ([]byte, error)
	Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error)
	DocumentIDs(ctx context.Context, tenant, kind string) ([]string, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error
}

// Info is one image of a tenant's under one of its names.
type Info struct {
	Reference  string            `json:"reference"` // in full: docker.io/library/python:3.12-slim
	Digest     string            `json:"digest"`    // of its manifest; of an archive without one, of its configuration
	Template   string            `json:"template"`  // that sandboxes start from
	Platform   string            `json:"platform"`
	Created    time.Time         `json:"created,omitzero"`
	Pulled     time.Time         `json:"pulled,omitzero"` // or imported, or built
	Bytes      int64             `json:"bytes"`           // unpacked
	Layers     []string          `json:"layers"`          // digests without compression, lowest first
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	User       string            `json:"user,omitempty"`
	Workdir    string            `json:"workdir,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Ports      []string          `json:"ports,omitempty"` // that it says it listens on
}

// Service answers for images and owns the pulls that go on.
type Service struct {
	cfg       Config
	adder     sandbox.Puller // nil: the driver knows no images
	imager    sandbox.Imager // nil: it has no layers; its hosts, where it has an adder, pull images themselves
	templates Templates
	documents Documents
	log       *slog.Logger
	patterns  []pattern
	network   *network

	life  context.Context // of every pull; ends with Close
	close context.CancelFunc
	work  sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	pulls   map[string]*flight // by tenant, reference and credentials
	blobs   map[string]*flight // layers on their way, by tenant and digest
	pulling map[string]int     // how many, by tenant
	imports map[string]int     // how many, by tenant
	locks   map[string]*keyLock

	arrivals map[string]map[string]arrival // by tenant and layer; where tenants have a bound

	coming  sync.RWMutex // read-held by whoever has layers that no template needs yet, held while layers are removed
	unswept atomic.Bool  // somebody wanted layers removed meanwhile

	pause func(attempt int) time.Duration // before a download is tried again
	stall time.Duration                   // a download without a byte for so long is tried again
}

// Open makes a Service and removes what an earlier server has left half done. A driver that knows no images is nil: then only names
// of templates are answered. One that is an Imager gets layers.
func Open(cfg Config, driver sandbox.Puller, t Templates, d Documents, log *slog.Logger) (*Service, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	patterns, err := compilePatterns(cfg.Map)
	if err != nil {
		return nil, err
	}
	network, err := newNetwork(cfg)
	if err != nil {
		return nil, err
	}
	// Pulls are shared by those who ask for them and outlive each single one; Close ends them and waits.
	life, cancel := context.WithCancel(context.Background())
	imager, _ := driver.(sandbox.Imager)
	s := &Service{
		cfg: cfg, adder: driver, imager: imager, templates: t, documents: d, log: log, patterns: patterns, network: network, life: life, close: cancel,
		pulls: map[string]*flight{}, blobs: map[string]*flight{}, pulling: map[string]int{}, imports: map[string]int{}, locks: map[string]*keyLock{},
		arrivals: map[string]map[string]arrival{},
		pause:    backoff, stall: 30 * time.Second,
	}
	for _, dir := range []string{s.blobDir(), s.tempDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("directory of images: %w", err)
		}
	}
	s.sweep(time.Now())
	return s, nil
}

// Close ends every pull and returns when nothing of them is left running. What they have downloaded stays.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.close()
	s.work.Wait()
	s.network.close()
}

func (s *Service) blobDir() string { return filepath.Join(s.cfg.Dir, "blobs") }

func (s *Service) tempDir() string { return filepath.Join(s.cfg.Dir, "temp") }

// canImage refuses what needs a driver that knows images where there is none.
func (s *Service) canImage() error {
	switch {
	case s.adder != nil:
		return nil
	case s.cfg.Pulls.Off != "":
		return fault.New(fault.Unsupported, "%s", s.cfg.Pulls.Off)
	}
	return fault.New(fault.Unsupported, "this server's driver cannot start from container images; use one of its templates")
}
