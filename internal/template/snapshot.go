package template

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Templates made of sandboxes' files have a record in a directory of their tenant. They are read from there each time
// somebody asks, since another process, the maker, writes and removes them.

const snapshotPrefix = "snap-"

// snapshots is the directory of a tenant's records. A tenant may be called anything, so a hash of its name is used.
func (s *Store) snapshots(tenant string) string {
	sum := sha256.Sum256([]byte(tenant))
	return s.built("tenants", hex.EncodeToString(sum[:16]))
}

// LayersDir is where images of snapshots come to lie.
func (s *Store) LayersDir() string { return s.layers() }

func (s *Store) snapshotFile(tenant, name string) string {
	return filepath.Join(s.snapshots(tenant), name+".json")
}

// readSnapshot gives nil where the tenant has no such template. A record is kept in memory as long as its file is the same.
func (s *Store) readSnapshot(tenant, name string) (*record, error) {
	if tenant == "" || !namePattern.MatchString(name) {
		return nil, nil
	}
	file := s.snapshotFile(tenant, name)
	info, err := os.Stat(file)
	// A server that has given up root cannot look into a directory that is root's alone. Then there are none for it.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s.mu.RLock()
	known := s.known[file]
	s.mu.RUnlock()
	if known.record != nil && os.SameFile(known.file, info) && known.file.ModTime().Equal(info.ModTime()) {
		return known.record, nil
	}
	r, err := s.readRecord(file)
	if err == nil && (r.Template.Tenant != tenant || r.Template.Name != name || !r.Template.recorded()) {
		err = errors.New("it is another template's")
	}
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "template %s cannot be used: a part of it is missing on the server", name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[file] = knownRecord{info, r}
	return r, nil
}

// ResolveFor is the template that a name stands for when a tenant says it: its own first, then everybody's.
func (s *Store) ResolveFor(ctx context.Context, tenant, name string) (*Template, error) {
	r, err := s.readSnapshot(tenant, name)
	if err != nil {
		return nil, err
	}
	if r != nil {
		return r.Template, nil
	}
	t, err := s.Resolve(ctx, name)
	if fault.Is(err, fault.NotFound) {
		var names []string
		for _, info := range s.ListFor(tenant) {
			names = append(names, info.Name)
		}
		return nil, fault.New(fault.NotFound, "there is no template %q; there are %s", name, strings.Join(names, ", "))
	}
	return t, err
}

// ListFor is every template that a tenant may use, by name.
func (s *Store) ListFor(tenant string) []Info {
	own := s.listSnapshots(s.snapshots(tenant))
	all := slices.DeleteFunc(s.List(), func(i Info) bool {
		return slices.ContainsFunc(own, func(o Info) bool { return o.Name == i.Name })
	})
	all = append(all, own...)
	slices.SortFunc(all, func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// All is every template of every tenant.
func (s *Store) All() []Info {
	all := s.List()
	tenants, _ := filepath.Glob(s.built("tenants", "*"))
	for _, dir := range tenants {
		all = append(all, s.listSnapshots(dir)...)
	}
	return all
}

func (s *Store) listSnapshots(dir string) []Info {
	var all []Info
	for _, r := range s.snapshotRecords(dir) {
		t := r.Template
		info := Info{Name: t.Name, Description: t.Description, Digest: t.Digest, Tenant: t.Tenant}
		if t.Snapshot != nil {
			info.From, info.Source, info.Created = t.Snapshot.From, SourceSnapshot, t.Snapshot.Created
			for _, image := range r.Images {
				info.Bytes += bytesOnDisk(filepath.Join(s.layers(), image))
			}
		} else {
			info.From, info.Source, info.Created = t.Image.Reference, SourceImage, t.Image.Created
		}
		all = append(all, info)
	}
	return all
}

// recorded tells whether a template has a record of its tenant's: it was not built from a definition.
func (t *Template) recorded() bool { return t.Snapshot != nil || t.Image != nil }

// snapshotRecords reads the records of one tenant, also those of which a part is missing.
func (s *Store) snapshotRecords(dir string) []*record {
	files, _ := filepath.Glob(filepath.Join(dir, "*.json"))
	var all []*record
	for _, file := range files {
		r, err := s.loadRecord(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil || !r.Template.recorded() {
			s.options.Log.Warn("a snapshot's record cannot be read", "file", file, "error", err)
			continue
		}
		all = append(all, r)
	}
	return all
}

// NewSnapshot is a template to be made of a sandbox's files.
type NewSnapshot struct {
	From        *Template // of the sandbox
	Tenant      string
	Name        string
	Description string
	Env         map[string]string // above From's
	User        string            // empty, like Workdir: From's
	Workdir     string
	Sudo        bool // its user may become root, also where From's may not
	Above       int  // how many disk images lie above From's layers
	// Put makes the file of one image: of those above, uppermost first, and then of From's own.
	Put func(i int, path string) error
}

// AddSnapshot makes a template of disk images above those of the template that the sandbox came from. A maker that dies
// meanwhile leaves at most images that no record names: CleanSnapshots removes them.
func (s *Store) AddSnapshot(ctx context.Context, n NewSnapshot) (*Template, error) {
	if err := os.MkdirAll(s.layers(), 0o755); err != nil {
		return nil, err
	}
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := s.NameIsFree(n.Tenant, n.Name); err != nil {
		return nil, err
	}
	r := s.derive(n)
	for i, image := range r.Images {
		if err := n.Put(i, filepath.Join(s.layers(), image)); err != nil {
			return nil, errors.Join(err, s.removeImages(r))
		}
	}
	if err := s.writeSnapshot(r); err != nil {
		return nil, errors.Join(err, s.removeImages(r))
	}
	s.options.Log.Info("snapshot made", "template", n.Name, "tenant", n.Tenant, "digest", r.Template.Digest)
	return r.Template, nil
}

func (s *Store) removeImages(r *record) error {
	var errs []error
	for _, image := range r.Images {
		if err := os.Remove(filepath.Join(s.layers(), image)); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// derive is the record of a snapshot. Images of the template below whose files are gone, because that was removed while
// the sandbox ran, come with this one.
func (s *Store) derive(n NewSnapshot) *record {
	t, id := *n.From, strings.ToLower(rand.Text())
	gone := 0
	for i, image := range t.Images() {
		if _, err := os.Stat(image); err != nil {
			gone = i + 1
		}
	}
	r := &record{Template: &t}
	var own []string
	for i := range n.Above + gone {
		r.Images = append(r.Images, fmt.Sprintf("%s%s-%d%s", snapshotPrefix, id, i, imageSuffix))
		own = append(own, filepath.Join(s.layers(), r.Images[i]))
	}
	made := Snapshot{From: t.Name, Base: t.Name, Digest: t.Digest, Created: time.Now().UTC().Truncate(time.Second)}
	if t.Snapshot != nil {
		made.Base, made.Digest, made.Defaults = t.Snapshot.Base, t.Snapshot.Digest, t.Snapshot.Defaults
	}
	if len(n.Env) > 0 || n.User != "" || n.Workdir != "" {
		if made.Defaults == nil {
			made.Defaults = &Defaults{t.Env, t.User, t.Workdir}
		}
		env := map[string]string{}
		maps.Copy(env, t.Env)
		maps.Copy(env, n.Env)
		t.Env, t.User, t.Workdir = env, cmp.Or(n.User, t.User), cmp.Or(n.Workdir, t.Workdir)
	}
	t.Sudo = t.Sudo || n.Sudo
	t.Name, t.Description, t.Tenant, t.Trees = n.Name, n.Description, n.Tenant, slices.Clone(t.Trees)
	for i, tree := range t.Trees {
		t.Trees[i].Lower = slices.Concat(own, tree.Lower[gone:])
	}
	// Not of its content, which nobody can make again: of where it came from, and of chance.
	t.Digest = digestOf([]string{"snapshot", n.From.Digest, id})
	t.Snapshot = &made
	r.Layers = s.layersOf(&t)
	if below, err := s.readSnapshot(n.Tenant, n.From.Name); err == nil && below != nil {
		r.Seals = maps.Clone(below.Seals) // of images by name: those of another template of that name do no harm
	}
	return r
}

// NameIsFree tells whether a tenant may call a new template so.
func (s *Store) NameIsFree(tenant, name string) error {
	if !namePattern.MatchString(name) || tenant == "" {
		return fault.New(fault.Invalid, "a template needs a tenant and a name of lower-case letters, digits, dots, dashes or underscores, not %q", name)
	}
	if err := s.Refresh(); err != nil { // somebody may have defined it since
		return err
	}
	s.mu.RLock()
	defined := s.definitions[name] != nil
	s.mu.RUnlock()
	_, err := os.Stat(s.snapshotFile(tenant, name))
	if defined || err == nil {
		return fault.New(fault.Conflict, "there is a template %s already; choose another name", name)
	}
	return nil
}

// layersOf names the parts of a template that lie in the directory of layers.
func (s *Store) layersOf(t *Template) []string {
	names := map[string]bool{}
	for _, tree := range t.Trees {
		for _, path := range tree.Lower {
			if rel, err := filepath.Rel(s.layers(), path); err == nil && filepath.IsLocal(rel) {
				first, _, _ := strings.Cut(rel, string(filepath.Separator))
				names[first] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

func (s *Store) writeSnapshot(r *record) error {
	if err := os.MkdirAll(s.snapshots(r.Template.Tenant), openDir); err != nil {
		return err
	}
	if err := s.permitDir(s.snapshots(r.Template.Tenant)); err != nil {
		return err
	}
	// What is there is on disk before a record names it.
	if err := syncEntries(s.layers()); err != nil {
		return err
	}
	if err := s.writeRecord(s.snapshotFile(r.Template.Tenant, r.Template.Name), r); err != nil {
		return err
	}
	return syncEntries(s.snapshots(r.Template.Tenant))
}

// syncEntries puts the names in a directory on disk.
func syncEntries(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// RemoveSnapshot removes a tenant's template, of an image too, and the disk images that came with it. What runs from it goes on: it holds them.
func (s *Store) RemoveSnapshot(ctx context.Context, tenant, name string) (*Template, error) {
	none := fault.New(fault.NotFound, "there is no template %q that was made by a snapshot or of an image", name)
	// One of which a part is missing can be removed as well.
	if r, err := s.readSnapshot(tenant, name); r == nil && err == nil {
		if _, err := s.Resolve(ctx, name); !fault.Is(err, fault.NotFound) {
			return nil, fault.New(fault.Denied, "template %s was not made by a snapshot; only the server's operator can remove it", name)
		}
		return nil, none
	}
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if err != nil {
		return nil, err
	}
	defer unlock()
	var doomed *record
	for _, r := range s.snapshotRecords(s.snapshots(tenant)) {
		if r.Template.Name == name {
			doomed = r
		}
	}
	if doomed == nil {
		return nil, none
	}
	// Only its own tenant's can be made from it.
	for _, r := range s.snapshotRecords(s.snapshots(tenant)) {
		if r.Template.Name != name && slices.ContainsFunc(doomed.Images, func(i string) bool { return slices.Contains(r.Layers, i) }) {
			return nil, fault.New(fault.Conflict, "template %s is made from %s; remove that first", r.Template.Name, name)
		}
	}
	if err := os.Remove(s.snapshotFile(tenant, name)); err != nil {
		return nil, err
	}
	if err := s.removeImages(doomed); err != nil {
		return nil, err
	}
	_ = os.Remove(s.snapshots(tenant)) // when it was the last
	s.options.Log.Info("snapshot removed", "template", name, "tenant", tenant)
	return doomed.Template, nil
}

// CleanSnapshots removes images that no record names, which a process that died leaves, and lets
// only the readers read the records of tenants.
func (s *Store) CleanSnapshots(ctx context.Context) error {
	if err := s.permitTenants(); err != nil {
		return err
	}
	images, err := filepath.Glob(filepath.Join(s.layers(), snapshotPrefix+"*"+imageSuffix))
	if err != nil || len(images) == 0 {
		return err
	}
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if err != nil {
		return err
	}
	defer unlock()
	needed := s.snapshotLayers()
	for _, image := range images {
		if needed[filepath.Base(image)] {
			continue
		}
		s.options.Log.Info("removed an image of a snapshot that was never finished", "image", filepath.Base(image))
		if err := os.Remove(image); err != nil {
			return err
		}
	}
	return nil
}

// snapshotLayers are the layers that some snapshot needs.
func (s *Store) snapshotLayers() map[string]bool {
	needed := map[string]bool{}
	tenants, _ := filepath.Glob(s.built("tenants", "*"))
	for _, dir := range tenants {
		for _, r := range s.snapshotRecords(dir) {
			for _, layer := range r.Layers {
				needed[layer] = true
			}
		}
	}
	return needed
}

// Seal hashes the images of a snapshot that have no seal yet, so that Verify can tell when they were changed. It reads all of them:
// for a large one that is better done after the caller has its answer. The hash is of the file. What sandboxes have in
// memory of it they share within one tenant only.
func (s *Store) Seal(ctx context.Context, tenant, name string) error {
	r, err := s.readSnapshot(tenant, name)
	if err != nil || r == nil {
		return err
	}
	seals := map[string]string{}
	maps.Copy(seals, r.Seals)
	for _, layer := range r.Layers {
		if seals[layer] != "" || !strings.HasSuffix(layer, imageSuffix) {
			continue
		}
		if seals[layer], err = imageSeal(ctx, filepath.Join(s.layers(), layer)); err != nil {
			return err
		}
	}
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if err != nil {
		return err
	}
	defer unlock()
	now, err := s.readSnapshot(tenant, name)
	if err != nil || now == nil || now.Template.Digest != r.Template.Digest {
		return err // removed meanwhile, and perhaps made again
	}
	sealed := *now
	sealed.Seals = seals
	return s.writeSnapshot(&sealed)
}
