package maker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// layerStore is the layers of container images that are unpacked, below the templates' directory.
//
// A layer is written without waiting for the disk. Its description comes after that wait, and one without a description is
// removed by the next maker: so a host that loses power leaves no half layer that looks whole.
type layerStore struct {
	settling sync.Mutex // whoever waits for the disk has it alone
	sealing  sync.Mutex // whoever reads layers again has it alone

	mu      sync.Mutex
	turns   map[string]*turn         // of layers that somebody unpacks, by digest
	fresh   map[string]sandbox.Layer // without a description yet
	claims  map[claim]time.Time      // when somebody brought a layer whose image is still to come
	working chan struct{}            // bounds how many are unpacked at once
}

// turn lets one caller at a time unpack a layer: the others find it there when theirs comes.
type turn struct {
	held    chan struct{}
	waiting int
}

// claim is one image's to one layer.
type claim struct{ layer, of string }

// layerFile describes a layer that is whole on disk.
const layerFile = "layer.json"

// claimTime is how long a layer is kept for an image that is being pulled.
const claimTime = 15 * time.Minute

// openImages makes the place for layers and clears what an earlier maker left half done.
func (m *Maker) openImages() error {
	s := &m.images
	s.turns, s.fresh, s.claims, s.working = map[string]*turn{}, map[string]sandbox.Layer{}, map[claim]time.Time{}, make(chan struct{}, maxUnpacks)
	dir := m.templates.ImagesDir()
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := rootsOwn(dir); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o700); err != nil { // files of every kind lie below, with setuid too
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var doomed []string
	for _, e := range entries {
		at := filepath.Join(dir, e.Name())
		if _, err := m.templates.LayerDir("sha256:" + e.Name()); err == nil {
			if _, err := readLayer(at); err == nil {
				continue
			}
		} else if !strings.HasPrefix(e.Name(), template.HalfUnpacked) {
			continue
		}
		doomed = append(doomed, at)
	}
	if err := m.removeLayers(doomed); err != nil { // it costs room, and whoever runs sandboxes needs a maker
		m.log.Error("remove layers", "error", fmt.Sprintf("%.300s", err.Error()))
	}
	return nil
}

// removeLayers removes layers that nobody uses.
func (m *Maker) removeLayers(doomed []string) error {
	var errs []error
	for _, at := range doomed {
		m.log.Info("layer removed", "layer", filepath.Base(at))
		errs = append(errs, removeTree(at))
	}
	return errors.Join(errs...)
}

func readLayer(dir string) (sandbox.Layer, error) {
	var l sandbox.Layer
	text, err := os.ReadFile(filepath.Join(dir, layerFile))
	if err != nil {
		return l, err
	}
	return l, json.Unmarshal(text, &l)
}

// answerImages answers the requests about images, but for unpacking.
func (m *Maker) answerImages(ctx context.Context, r wire.Request) (response wire.Response, err error) {
	switch r.Op {
	case wire.OpLayers:
		response.Layers, err = m.Layers(r.IDs)
	case wire.OpAddImage:
		if r.Image == nil {
			return response, fault.New(fault.Invalid, "an image without a request")
		}
		response.Template, err = m.AddImage(ctx, *r.Image)
	case wire.OpPruneLayers:
		response.Freed, err = m.PruneLayers(ctx)
	default:
		err = fault.New(fault.Unsupported, "unknown request %q", r.Op)
	}
	return response, err
}

// Layers are those of the digests that are unpacked. To ask is no claim to them: whoever uses one that it did not unpack keeps
// others from pruning until its image is added.
func (m *Maker) Layers(ids []string) ([]sandbox.Layer, error) {
	if len(ids) > template.MaxImageLayers {
		return nil, fault.New(fault.Invalid, "%d layers at once, at most %d are possible", len(ids), template.MaxImageLayers)
	}
	var found []sandbox.Layer
	for _, id := range ids {
		l, ok, err := m.findLayer(id, nil)
		if err != nil {
			return nil, err
		}
		if ok {
			found = append(found, l)
		}
	}
	return found, nil
}

// layer finds one for an image that is about to use it, and claims it.
func (m *Maker) layer(id, of string) (sandbox.Layer, bool, error) { return m.findLayer(id, &of) }

func (m *Maker) findLayer(id string, of *string) (l sandbox.Layer, ok bool, err error) {
	dir, err := m.templates.LayerDir(id)
	if err != nil {
		return l, false, err
	}
	s := &m.images
	s.mu.Lock()
	defer s.mu.Unlock()
	l, ok = s.fresh[id]
	if !ok {
		read, err := readLayer(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return l, false, nil
		}
		if err != nil {
			return l, false, err
		}
		l = read
	}
	if of != nil {
		s.claims[claim{filepath.Base(dir), *of}] = time.Now()
	}
	return l, true, nil
}

// AddImage makes a template of layers that are unpacked.
func (m *Maker) AddImage(ctx context.Context, r sandbox.ImageRequest) (*template.Template, error) {
	if err := m.settleLayers(); err != nil {
		return nil, err
	}
	for _, id := range r.Image.Layers {
		if _, ok, err := m.layer(id, r.Claim()); err != nil {
			return nil, err
		} else if !ok {
			return nil, fault.New(fault.Conflict, "layer %s of image %s is not unpacked", id, r.Image.Reference)
		}
	}
	t, err := m.templates.AddImage(ctx, template.NewImage{
		Tenant: r.Tenant, Name: r.Name, Description: r.Description, Image: r.Image, Env: r.Env, User: r.User, Workdir: r.Workdir,
	})
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	if p := m.pools[poolKey{t.Tenant, t.Digest}]; p != nil {
		p.removed = false // it was, and somebody still lives in it
	}
	m.mu.Unlock()
	s := &m.images
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range r.Image.Layers {
		name := strings.TrimPrefix(id, "sha256:")
		delete(s.claims, claim{name, r.Claim()}) // the record keeps it from now on
		delete(s.claims, claim{name, ""})        // of somebody who did not say for what
	}
	m.wg.Go(m.sealLayers)
	return t, nil
}

// sealLayers hashes new layers, so that it is seen when one is changed later.
func (m *Maker) sealLayers() {
	m.images.sealing.Lock()
	defer m.images.sealing.Unlock()
	if err := m.templates.SealLayers(m.life); err != nil && !m.isClosing() {
		m.log.Error("seal layers", "error", err)
	}
}

// settleLayers puts the layers that were unpacked lately on disk, all with one wait, and describes them.
func (m *Maker) settleLayers() error {
	s := &m.images
	s.settling.Lock()
	defer s.settling.Unlock()
	s.mu.Lock()
	fresh := make([]sandbox.Layer, 0, len(s.fresh))
	for _, l := range s.fresh {
		fresh = append(fresh, l)
	}
	s.mu.Unlock()
	if len(fresh) == 0 {
		return nil
	}
	if err := syncFileSystem(m.templates.ImagesDir()); err != nil {
		return err
	}
	for _, l := range fresh {
		dir, err := m.templates.LayerDir(l.DiffID)
		if err == nil {
			err = describeLayer(dir, l)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return fmt.Errorf("describe layer: %w", err)
		}
		s.mu.Lock()
		delete(s.fresh, l.DiffID)
		s.mu.Unlock()
	}
	return nil
}

// syncFileSystem waits until everything on the file system of a directory is on disk.
func syncFileSystem(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return spaceless(fmt.Errorf("sync layers: %w", err))
	}
	return nil
}

// describeLayer writes a layer's description at once or not at all.
func describeLayer(dir string, l sandbox.Layer) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, ".write")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, layerFile))
}

// PruneLayers removes layers that no template needs, recorded or in use, and nobody waits for.
func (m *Maker) PruneLayers(ctx context.Context) (freed int64, err error) {
	inUse := func() (used []*template.Template, release func()) {
		m.mu.Lock()
		for _, p := range m.pools { // whoever lives has one
			used = append(used, p.template)
		}
		return used, m.mu.Unlock
	}
	doomed, err := m.templates.PruneLayers(ctx, inUse, m.images.wanted)
	for _, at := range doomed {
		if l, err := readLayer(at); err == nil {
			freed += l.Bytes
		}
	}
	return freed, errors.Join(err, m.removeLayers(doomed))
}

// wanted tells whether somebody is about to use a layer.
func (s *layerStore) wanted(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := "sha256:" + name
	_, fresh := s.fresh[id]
	if fresh || s.turns[id] != nil {
		return true
	}
	wanted := false
	for c, since := range s.claims {
		switch {
		case time.Since(since) >= claimTime:
			delete(s.claims, c)
		case c.layer == name:
			wanted = true
		}
	}
	return wanted
}
