package image

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// arrival is a layer that was unpacked for a tenant since layers were last removed. Whatever became of its image, refused, failed or
// removed again, the layer has its place on the disk until then.
type arrival struct {
	going bool  // it is being unpacked
	bytes int64 // that it may have then
	since time.Time
}

// claimsFor is how long a driver may keep a layer for an image that does not come.
const claimsFor = 20 * time.Minute

// admit refuses an image that would give its tenant more than the operator allows. What is not unpacked yet counts as what it is
// to download, which is mostly less: each layer is looked at once more before it is unpacked, and the image when all of it is there.
func (s *Service) admit(ctx context.Context, tenant, what string, b blueprint) error {
	coming := map[string]int64{}
	for i, diff := range b.diffs {
		coming[diff] = b.layers[i].Size
	}
	return s.within(ctx, tenant, what, coming)
}

// reserve takes a tenant's room for a layer before it is unpacked, so that no two take the same; settle says what it has become.
func (s *Service) reserve(ctx context.Context, tenant, what, diff string, bytes int64) (settle func(kept bool), err error) {
	if s.cfg.MaxTenantBytes == 0 {
		return func(bool) {}, nil
	}
	free, err := s.lock(ctx, "room of "+tenant)
	if err != nil {
		return nil, err
	}
	defer free()
	if err := s.within(ctx, tenant, what, map[string]int64{diff: bytes}); err != nil {
		return nil, err
	}
	put := func(a arrival) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.arrivals[tenant] == nil {
			s.arrivals[tenant] = map[string]arrival{}
		}
		s.arrivals[tenant][diff] = a
	}
	put(arrival{bytes: bytes, going: true})
	return func(kept bool) {
		if kept {
			put(arrival{since: time.Now()})
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.arrivals[tenant], diff)
	}, nil
}

// within refuses layers that a tenant has no room for beside what it has.
func (s *Service) within(ctx context.Context, tenant, what string, coming map[string]int64) error {
	if s.cfg.MaxTenantBytes == 0 || s.imager == nil {
		return nil
	}
	files := 0
	layers, bytes, err := s.holds(ctx, tenant)
	if err != nil {
		return err
	}
	s.mu.Lock()
	for diff, a := range s.arrivals[tenant] {
		if layers[diff] = true; a.going {
			coming[diff] = max(coming[diff], a.bytes)
		}
	}
	s.mu.Unlock()
	for diff := range coming {
		layers[diff] = true
	}
	for few := range slices.Chunk(slices.Sorted(maps.Keys(layers)), template.MaxImageLayers) { // the driver answers for no more at once
		there, err := s.imager.Layers(ctx, few)
		if err != nil {
			return err
		}
		for _, l := range there {
			bytes += onDisk(l)
			files += l.Files
			delete(coming, l.DiffID)
		}
	}
	for _, size := range coming {
		bytes += size
	}
	if files > s.cfg.MaxTenantFiles {
		s.unswept.Store(true)
		return fault.New(fault.Exhausted, "with %s your images have %d files, and this server allows %d; remove some, and then prune (cove image remove, cove image prune)",
			what, files, s.cfg.MaxTenantFiles)
	}
	if bytes > s.cfg.MaxTenantBytes {
		s.unswept.Store(true) // what came of it, and of others, goes when nobody can want it any more
		return fault.New(fault.Exhausted, "with %s your images have %d MiB, and this server allows %d; remove some, and then prune (cove image remove, cove image prune)",
			what, bytes>>20, s.cfg.MaxTenantBytes>>20)
	}
	return nil
}

// fileBytes is what a file takes of the host's disk besides its content: an empty one is not free.
const fileBytes = 4 << 10

// onDisk is what a layer counts.
func onDisk(l sandbox.Layer) int64 { return l.Bytes + int64(l.Files)*fileBytes }

// forgetArrivals is called when layers were removed: what is there now is needed by a template, which counts for its tenant, or was
// unpacked so lately that the driver keeps it for an image.
func (s *Service) forgetArrivals(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for tenant, all := range s.arrivals {
		maps.DeleteFunc(all, func(_ string, a arrival) bool { return !a.going && now.Sub(a.since) > claimsFor })
		if len(all) == 0 {
			delete(s.arrivals, tenant)
		}
	}
}

// holds are the layers of a tenant's images, and the bytes of its builds above them. Layers are shared, and count for each
// tenant that has them.
func (s *Service) holds(ctx context.Context, tenant string) (layers map[string]bool, bytes int64, err error) {
	layers = map[string]bool{}
	for _, i := range s.templates.List(tenant) {
		if i.Tenant != tenant || !strings.HasPrefix(i.Name, imagePrefix) && !strings.HasPrefix(i.Name, buildPrefix) {
			continue
		}
		bytes += i.Bytes
		t, err := s.templates.Resolve(ctx, tenant, i.Name)
		if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Unavailable) { // removed meanwhile, or of no use
			continue
		}
		if err != nil {
			return nil, 0, err
		}
		if t.Image != nil {
			for _, diff := range t.Image.Layers {
				layers[diff] = true
			}
		}
	}
	return layers, bytes, nil
}
