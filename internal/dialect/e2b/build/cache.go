package build

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// maxDepth is how many layers of the cache may lie on each other: a template can only have so many.
const maxDepth = 8

// chain gives each step a key of what there is after it: of where the build starts, and of all steps up to it.
func chain(from base, steps []step) []string {
	first, err := json.Marshal(from.setting)
	if err != nil {
		panic(fmt.Sprintf("a setting is plain data: %v", err))
	}
	key := digest(from.digest, string(first))
	keys := make([]string, len(steps))
	for i, s := range steps {
		key = digest(append([]string{key, s.Type, s.FilesHash}, s.Args...)...)
		keys[i] = key
	}
	return keys
}

func digest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d\x00%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// cached finds the layer that saves the most steps.
func (b *Builder) cached(ctx context.Context, j *job, from base, keys []string) (done int, at *layer) {
	usable := len(keys)
	if i := slices.IndexFunc(j.want.Steps, func(s step) bool { return s.Force }); i >= 0 {
		usable = i
	}
	if j.want.Force {
		usable = 0
	}
	for n := usable; n > 0; n-- {
		l := j.shelf.layer(keys[n-1])
		if l == nil {
			continue
		}
		t, err := b.templates.Resolve(ctx, j.who.Tenant, l.Domain)
		if err == nil && len(t.Images()) <= from.images+maxDepth {
			b.touch(ctx, j.shelf, l)
			return n, l
		}
	}
	return 0, nil
}

// touch marks a layer as used. That it fails to only shortens the layer's life.
func (b *Builder) touch(ctx context.Context, s *shelf, l *layer) {
	next := *l
	next.Used = now()
	if err := s.putLayer(ctx, &next); err != nil {
		b.log.Warn("mark a layer as used", "tenant", s.tenant, "error", err)
	}
}

// keepLayer keeps what a sandbox has become. A build goes on without.
func (b *Builder) keepLayer(ctx context.Context, j *job, s *site, key string) {
	if _, err := b.putLayer(ctx, j, s, key, sandbox.SnapshotSpec{Description: "step of template " + j.alias}); err != nil {
		b.log.Warn("keep a layer of a template build", "template", j.template, "build", j.build, "tenant", j.who.Tenant, "error", err)
	}
}

// putLayer makes a layer of what a sandbox has become, in the place of one with the same key.
func (b *Builder) putLayer(ctx context.Context, j *job, s *site, key string, spec sandbox.SnapshotSpec) (*layer, error) {
	spec.Name = hiddenLayer + strings.ToLower(rand.Text())
	if _, err := b.sandboxes.SnapshotAs(ctx, j.who, s.id, spec); err != nil {
		return nil, err
	}
	old := j.shelf.layer(key)
	l := &layer{Key: key, Domain: spec.Name, Setting: s.setting.clone(), Used: now()}
	if err := j.shelf.putLayer(ctx, l); err != nil {
		b.discard(ctx, j.who, j.shelf, spec.Name)
		return nil, fmt.Errorf("record a layer: %w", err)
	}
	if old != nil {
		b.discard(ctx, j.who, j.shelf, old.Domain)
	}
	b.discard(ctx, j.who, j.shelf, j.shelf.dropLayers(ctx, b.cfg.MaxLayers)...)
	return l, nil
}

func (s *shelf) layer(key string) *layer {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.layers[key]
}

func (s *shelf) putLayer(ctx context.Context, l *layer) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	if err := put(ctx, s, kindLayer, l.Key, l); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layers[l.Key] = l
	return nil
}

// dropLayers forgets the layers that were not used for longest and gives their names in the domain.
func (s *shelf) dropLayers(ctx context.Context, most int) (names []string) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.RLock()
	all := slices.SortedFunc(maps.Values(s.layers), func(a, b *layer) int { return a.Used.Compare(b.Used) })
	s.mu.RUnlock()
	for _, l := range all[:max(0, len(all)-most)] {
		if err := s.documents.DeleteDocument(ctx, s.tenant, kindLayer, l.Key); err != nil && !fault.Is(err, fault.NotFound) {
			continue // the next build tries again
		}
		s.mu.Lock()
		delete(s.layers, l.Key)
		s.mu.Unlock()
		names = append(names, l.Domain)
	}
	return names
}

// discard removes templates of the domain that nobody names any more. One that others are made from stays until they are gone.
func (b *Builder) discard(ctx context.Context, who auth.Principal, s *shelf, names ...string) {
	for _, name := range names {
		err := b.sandboxes.RemoveTemplate(ctx, who, name)
		if err == nil || fault.Is(err, fault.NotFound) {
			s.spare(ctx, name)
			continue
		}
		if !fault.Is(err, fault.Conflict) {
			b.log.Warn("remove a template that nobody names any more", "template", name, "tenant", who.Tenant, "error", err)
		}
		if err := s.doom(ctx, name); err != nil {
			b.log.Error("a template is left that nobody names any more", "template", name, "tenant", who.Tenant, "error", err)
		}
	}
}

// retryDoomed removes what could not be removed before. Those made from others come first by going on until nothing changes.
func (b *Builder) retryDoomed(ctx context.Context, who auth.Principal, s *shelf) {
	for {
		before := s.doomedNames()
		if len(before) == 0 {
			return
		}
		b.discard(ctx, who, s, before...)
		if len(s.doomedNames()) == len(before) {
			return
		}
	}
}

func (s *shelf) doomedNames() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Sorted(maps.Keys(s.doomed))
}

func (s *shelf) doom(ctx context.Context, name string) error {
	s.mu.RLock()
	known := s.doomed[name]
	s.mu.RUnlock()
	if known {
		return nil
	}
	if err := s.documents.PutDocument(ctx, s.tenant, kindDoomed, name, []byte("{}")); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doomed[name] = true
	return nil
}

// spare forgets that a template was to be removed: it is gone.
func (s *shelf) spare(ctx context.Context, name string) {
	s.mu.Lock()
	known := s.doomed[name]
	delete(s.doomed, name)
	s.mu.Unlock()
	if known {
		_ = s.documents.DeleteDocument(ctx, s.tenant, kindDoomed, name) // a later start removes nothing and tries this again
	}
}
