package image

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Prune removes the tenant's images that no name stands for, and then the layers that nobody needs. While a pull goes on,
// layers of images wait for its end, and freed is what builds had.
func (s *Service) Prune(ctx context.Context, tenant string) (freed int64, removed []string, err error) {
	if err := s.canImage(); err != nil {
		return 0, nil, err
	}
	freed, removed, err = s.pruneNames(ctx, tenant)
	if err != nil {
		return freed, removed, err
	}
	layers, err := s.pruneLayers(ctx)
	freed += layers
	if err != nil || s.imager == nil {
		return freed, removed, err
	}
	return freed, removed, s.forgetLayers(ctx, tenant)
}

// pruneNames removes names without a template, or with one that cannot be used any more, and then templates without a name.
func (s *Service) pruneNames(ctx context.Context, tenant string) (freed int64, removed []string, err error) {
	free, err := s.lockNames(ctx, tenant)
	if err != nil {
		return 0, nil, err
	}
	defer free()
	if err := s.forgetNames(ctx, tenant); err != nil {
		return 0, nil, err
	}
	return s.pruneTemplates(ctx, tenant)
}

// pruneTemplates goes round until nothing changes: a template that others are made from can be removed once they are gone. The
// caller has locked the names.
func (s *Service) pruneTemplates(ctx context.Context, tenant string) (freed int64, removed []string, err error) {
	named, err := s.named(ctx, tenant)
	if err != nil {
		return 0, nil, err
	}
	for again := true; again; {
		again = false
		for _, t := range s.templates.List(tenant) {
			if t.Tenant != tenant || named[t.Name] > 0 || !strings.HasPrefix(t.Name, imagePrefix) && !strings.HasPrefix(t.Name, buildPrefix) {
				continue
			}
			err := s.templates.RemoveTemplate(ctx, tenant, t.Name)
			switch {
			case err == nil:
				freed, removed, again = freed+t.Bytes, append(removed, t.Name), true
			case !fault.Is(err, fault.Conflict) && !fault.Is(err, fault.NotFound):
				return freed, removed, err
			}
		}
	}
	return freed, removed, nil
}

// forgetNames drops names whose templates are gone. The caller has locked the names.
func (s *Service) forgetNames(ctx context.Context, tenant string) error {
	docs, err := s.documents.Documents(ctx, tenant, kindRef)
	if err != nil {
		return err
	}
	for _, d := range docs {
		if _, err := s.read(ctx, tenant, d.ID, d.Body); fault.Is(err, fault.NotFound) {
			if err := s.documents.DeleteDocument(ctx, tenant, kindRef, d.ID); err != nil && !fault.Is(err, fault.NotFound) {
				return err
			}
		}
	}
	return nil
}

// begin says that layers are about to come which no template needs yet; the returned function, that all have one or never
// will. It waits while layers are being removed.
func (s *Service) begin() (end func()) {
	s.coming.RLock()
	return func() {
		s.coming.RUnlock()
		if !s.unswept.Swap(false) {
			return
		}
		if _, err := s.pruneLayers(s.life); err != nil && !errors.Is(err, context.Canceled) {
			s.log.Warn("layers of images cannot be removed", "error", err)
		}
	}
}

// pruneLayers asks the driver to remove layers that nobody needs, now or when no pull goes on any more: a layer that was just
// unpacked belongs to no template yet.
func (s *Service) pruneLayers(ctx context.Context) (int64, error) {
	if s.imager == nil {
		return 0, nil
	}
	if !s.coming.TryLock() {
		s.unswept.Store(true)
		return 0, nil
	}
	defer s.coming.Unlock()
	freed, err := s.imager.PruneLayers(ctx)
	if err == nil {
		s.forgetArrivals(time.Now())
	}
	return freed, err
}

// forgetLayers drops notes about layers that are not there any more: whoever wants one again downloads it again anyway.
func (s *Service) forgetLayers(ctx context.Context, tenant string) error {
	defer s.begin()()
	docs, err := s.documents.Documents(ctx, tenant, kindLayer)
	if err != nil || len(docs) == 0 {
		return err
	}
	for few := range slices.Chunk(docs, template.MaxImageLayers) { // the driver answers for no more at once
		var ids []string
		for _, d := range few {
			ids = append(ids, d.ID)
		}
		there, err := s.imager.Layers(ctx, ids)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if slices.ContainsFunc(there, func(l sandbox.Layer) bool { return l.DiffID == id }) {
				continue
			}
			if err := s.documents.DeleteDocument(ctx, tenant, kindLayer, id); err != nil && !fault.Is(err, fault.NotFound) {
				return err
			}
		}
	}
	return nil
}
