package template

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Options say where definitions and built templates live.
type Options struct {
	Dir        string       // definitions of one's own as *.toml; what is built goes to Dir/built
	Readers    string       // a file whose group alone reads what tenants own; empty: everyone may
	Nameserver string       // of every sandbox; default 10.213.0.1
	Log        *slog.Logger // default: slog.Default()
}

// Store knows the defined templates and those that are built.
type Store struct {
	options Options
	pythons pythonCache

	mu          sync.RWMutex
	definitions map[string]*Definition
	records     map[string]*record
	known       map[string]knownRecord // of snapshots, by file
	seen        stamp                  // of what Current has read
}

// knownRecord is a record and the file that it was read from.
type knownRecord struct {
	file   fs.FileInfo
	record *record
}

// Info is one line of a list of templates.
type Info struct {
	Name        string    `json:"name"`
	Description string    `json:"description,omitempty"`
	From        string    `json:"from,omitempty"`
	Source      string    `json:"source"`           // which file defines it, or SourceSnapshot or SourceImage
	Digest      string    `json:"digest,omitempty"` // empty: not built
	Tenant      string    `json:"tenant,omitempty"` // whose it is; empty: everybody's
	Created     time.Time `json:"created,omitzero"` // of a snapshot, or an image
	Bytes       int64     `json:"bytes,omitempty"`  // on disk, of a snapshot: without what it shares with the templates below it
}

// The kinds of templates, by where they come from.
const (
	SourceBuiltIn  = "built-in"
	SourceFile     = "file"
	SourceSnapshot = "snapshot"
	SourceImage    = "image"
)

// Kind tells where a template comes from.
func (i Info) Kind() string {
	switch {
	case i.Source == SourceSnapshot, i.Source == SourceImage:
		return i.Source
	case strings.HasPrefix(i.Source, builtIn):
		return SourceBuiltIn
	default:
		return SourceFile
	}
}

// builtIn is what the source of an embedded definition begins with.
const builtIn = SourceBuiltIn + " "

// What a builder that died can leave.
const (
	halfBuilt   = ".building-"
	halfWritten = ".write-*"
)

// Open reads every definition and what is built already. It builds nothing.
func Open(options Options) (*Store, error) {
	dir, err := filepath.Abs(options.Dir)
	if err != nil {
		return nil, err
	}
	// Records hold paths, and others read them who know the directory by another name.
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	if strings.ContainsAny(dir, ":,\\\n") {
		return nil, fault.New(fault.Invalid, "templates cannot live in %q: an overlay cannot name such a path", dir)
	}
	options.Dir = dir
	if options.Nameserver == "" {
		options.Nameserver = "10.213.0.1"
	}
	if options.Log == nil {
		options.Log = slog.Default()
	}
	s := &Store{options: options, known: map[string]knownRecord{}}
	s.pythons.file = s.built("interpreters") // not .json: those are records
	return s, s.Refresh()
}

// Refresh reads definitions and built templates again, after somebody else wrote them.
func (s *Store) Refresh() error {
	definitions, err := loadDefinitions(s.options.Dir)
	if err != nil {
		return err
	}
	records := map[string]*record{}
	for name := range definitions {
		if r, err := s.readRecord(s.built(name + ".json")); err == nil {
			records[name] = r
		} else if !errors.Is(err, fs.ErrNotExist) {
			s.options.Log.Warn("built template cannot be used", "template", name, "error", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.definitions, s.records = definitions, records
	return nil
}

// Dir is where definitions and built templates live.
func (s *Store) Dir() string { return s.options.Dir }

func (s *Store) built(elements ...string) string {
	return filepath.Join(append([]string{s.options.Dir, "built"}, elements...)...)
}

func (s *Store) layers() string { return s.built("layers") }

// readRecord refuses a record whose layers are gone. A server that has given up root may not see those that came from
// root's own places, such as a Python below /root; the maker, which starts sandboxes, sees them.
func (s *Store) readRecord(file string) (*record, error) {
	r, err := s.loadRecord(file)
	if err != nil {
		return nil, err
	}
	for _, tree := range r.Template.Trees {
		for _, dir := range tree.Lower {
			if _, err := os.Stat(dir); err != nil && !errors.Is(err, fs.ErrPermission) {
				return nil, err
			}
		}
	}
	return r, nil
}

// Resolve is the built template of that name, from memory. Callers share it and do not change it.
func (s *Store) Resolve(ctx context.Context, name string) (*Template, error) {
	s.mu.RLock()
	r, definition := s.records[name], s.definitions[name]
	names := sortedKeys(s.definitions)
	s.mu.RUnlock()
	switch {
	case r != nil:
		return r.Template, nil
	case definition == nil:
		return nil, fault.New(fault.NotFound, "there is no template %q; there are %s", name, strings.Join(names, ", "))
	}
	r, err := s.readRecord(s.built(name + ".json")) // another process may have built it since
	if err != nil {
		return nil, fault.New(fault.Unavailable, "template %s is not built yet", name)
	}
	s.remember(name, r)
	return r.Template, nil
}

func (s *Store) remember(name string, r *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records[name] = r
}

// List is every defined template by name.
func (s *Store) List() []Info {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var all []Info
	for _, name := range sortedKeys(s.definitions) {
		d := s.definitions[name]
		info := Info{Name: name, Description: d.Description, From: d.From, Source: d.source}
		if r := s.records[name]; r != nil {
			info.Digest = r.Template.Digest
		}
		all = append(all, info)
	}
	return all
}

// Ensure builds what is missing or was made from other inputs than today's, and returns the template. It needs root
// for that; progress may be nil.
func (s *Store) Ensure(ctx context.Context, name string, progress func(Progress)) (*Template, error) {
	return s.ensure(ctx, name, progress, (*build).run)
}

// Repair is Ensure, and builds layers again whose content is not what was built. It reads all of
// them.
func (s *Store) Repair(ctx context.Context, name string, progress func(Progress)) (*Template, error) {
	return s.ensure(ctx, name, progress, (*build).repair)
}

// Rebuild is Repair for a template that does not work: it asks the host's Python again, and builds
// the last layer also if nothing has changed. The template has another digest afterwards. If the
// build fails, the earlier template stays.
func (s *Store) Rebuild(ctx context.Context, name string, progress func(Progress)) (*Template, error) {
	return s.ensure(ctx, name, progress, (*build).rebuild)
}

func (s *Store) ensure(ctx context.Context, name string, progress func(Progress), run func(*build, context.Context) (*record, error)) (*Template, error) {
	if progress == nil {
		progress = func(Progress) {}
	}
	s.mu.RLock()
	definitions := s.definitions
	s.mu.RUnlock()
	if definitions[name] == nil || os.Geteuid() != 0 {
		t, err := s.Resolve(ctx, name)
		if fault.Is(err, fault.Unavailable) {
			return nil, fault.New(fault.Denied, "building template %s needs root: its files belong to root and to the sandbox's user", name)
		}
		return t, err
	}
	links, err := chain(definitions, name)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.layers(), 0o755); err != nil {
		return nil, err
	}
	unlock, err := lockFile(ctx, s.built("lock"), func() { progress(Progress{Step: StepWait, Message: "another builder is at work"}) })
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := s.clean(); err != nil {
		return nil, err
	}
	r, err := run(&build{store: s, links: links, all: merged(links), progress: progress}, ctx)
	if err != nil {
		return nil, err
	}
	return r.Template, s.keep(name, r)
}

// clean removes what a builder that died left half done; the caller holds the lock.
func (s *Store) clean() error {
	for _, pattern := range []string{filepath.Join(s.layers(), halfBuilt+"*"), s.built(halfWritten), s.built("tenants", "*", halfWritten)} {
		left, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, name := range left {
			if err := os.RemoveAll(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// keep makes the record current. The one it replaces stays readable by its digest until Sweep.
func (s *Store) keep(name string, r *record) error {
	old, err := s.readRecord(s.built(name + ".json"))
	if err == nil && old.Template.Digest == r.Template.Digest && slices.Equal(old.Layers, r.Layers) {
		s.remember(name, r)
		return nil
	}
	for _, file := range []string{name + "@" + r.Template.Digest + ".json", name + ".json"} {
		if err := s.writeRecord(s.built(file), r); err != nil {
			return err
		}
	}
	s.remember(name, r)
	s.options.Log.Info("template built", "template", name, "digest", r.Template.Digest)
	return nil
}

// Earlier is a template that was built under this name before the current one.
func (s *Store) Earlier(name, digest string) (*Template, error) {
	if !namePattern.MatchString(name) || !digestPattern.MatchString(digest) {
		return nil, fault.New(fault.Invalid, "%.64q is not the digest of a template", digest)
	}
	r, err := s.readRecord(s.built(name + "@" + digest + ".json"))
	if err != nil {
		return nil, err
	}
	return r.Template, nil
}

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Superseded are the digests of built templates that were replaced longer ago than age.
func (s *Store) Superseded(age time.Duration) []string {
	files, _ := filepath.Glob(s.built("*@*.json"))
	var digests []string
	for _, file := range files {
		name, digest, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".json"), "@")
		current := s.built(name + ".json")
		r, err := s.loadRecord(current)
		if err == nil && r.Template.Digest != digest && time.Since(modified(current)) > age {
			digests = append(digests, digest)
		}
	}
	return digests
}

// Sweep removes the built templates that Superseded tells, except those in use, and layers that no template needs.
func (s *Store) Sweep(ctx context.Context, inUse []*Template, age time.Duration) error {
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing was ever built
	}
	if err != nil {
		return err
	}
	defer unlock()
	needed, used := s.snapshotLayers(), map[string]bool{}
	for _, t := range inUse {
		used[t.Digest] = true
		for _, layer := range s.layersOf(t) {
			needed[layer] = true
		}
	}
	superseded := s.Superseded(age)
	files, err := filepath.Glob(s.built("*.json"))
	if err != nil {
		return err
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		r, err := s.readRecord(file)
		_, digest, _ := strings.Cut(name, "@")
		if err != nil || slices.Contains(superseded, digest) && !used[digest] {
			if err := os.Remove(file); err != nil {
				return err
			}
			continue
		}
		for _, layer := range r.Layers {
			needed[layer] = true
		}
	}
	entries, err := os.ReadDir(s.layers())
	if err != nil {
		return err
	}
	inPlace := !slices.ContainsFunc(superseded, func(digest string) bool { return used[digest] })
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), damaged) && !inPlace {
			continue // a sandbox of an earlier template may show it
		}
		if !needed[e.Name()] {
			if err := os.RemoveAll(filepath.Join(s.layers(), e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// Verify reads a built template again and compares it with what was built: all sandboxes share these files. An image that
// has no seal yet gets one.
func (s *Store) Verify(ctx context.Context, tenant, name string) error {
	if _, err := s.ResolveFor(ctx, tenant, name); err != nil {
		return err
	}
	r, err := s.readSnapshot(tenant, name)
	if r == nil && err == nil {
		r, err = s.readRecord(s.built(name + ".json"))
	}
	if err != nil {
		return err
	}
	check := func(layers []string, verify func(layer string) (bool, error)) error {
		for _, layer := range layers {
			if err := ctx.Err(); err != nil {
				return err
			}
			same, err := verify(layer)
			if err != nil {
				return err
			}
			if !same {
				return fault.New(fault.Internal, "layer %s of template %s (%s) was changed after it was built", layer, name, r.Template.Digest)
			}
		}
		return nil
	}
	if err := check(r.Layers, func(layer string) (bool, error) { return s.verifyLayer(ctx, r, layer) }); err != nil {
		return err
	}
	err = check(s.imageLayers(r.Template), func(layer string) (bool, error) { return s.verifyImageLayer(ctx, layer) })
	if errors.Is(err, fs.ErrNotExist) {
		if _, gone := s.ResolveFor(ctx, tenant, name); gone != nil {
			return gone // removed meanwhile, and its layers with it
		}
	}
	return err
}

func (s *Store) verifyLayer(ctx context.Context, r *record, layer string) (same bool, err error) {
	at := filepath.Join(s.layers(), layer)
	if strings.HasSuffix(layer, imageSuffix) {
		if r.Seals[layer] == "" {
			return true, s.Seal(ctx, r.Template.Tenant, r.Template.Name)
		}
		seal, err := imageSeal(ctx, at)
		return seal == r.Seals[layer], err
	}
	made, err := readLayer(at)
	if err != nil {
		return false, err
	}
	_, seal, err := digestTree(filepath.Join(made.dir, "trees"))
	return seal == made.Seal, err
}

// writeJSON replaces a file at once or not at all.
func writeJSON(name string, value any) error {
	return writeJSONFor(name, value, func(tmp *os.File) error { return tmp.Chmod(0o644) })
}

// writeJSONFor does the same. permit sets owner and mode before the file has its name.
func writeJSONFor(name string, value any, permit func(*os.File) error) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(name), halfWritten)
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(append(text, '\n'))
	if err := errors.Join(err, permit(tmp), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), name)
}
