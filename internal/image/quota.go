package image

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// arrival is a layer that was unpacked for a tenant since layers were last removed. Whatever became of its image, refused, failed or
// removed again, the layer has its place on the disk until then.
type arrival struct {
	going bool // it is being unpacked
	room  room // that it may take then
	since time.Time
}

// room is what files take: of the host's disk, and of its inodes.
type room struct {
	bytes int64
	files int
}

// claimsFor is how long a driver may keep a layer for an image that does not come.
const claimsFor = 20 * time.Minute

// admit refuses an image that would give its tenant more than the operator allows. What is not unpacked yet counts as what it is
// to download, which is mostly less: each layer is looked at once more before it is unpacked, and the image when all of it is there.
func (s *Service) admit(ctx context.Context, tenant, what string, b blueprint) error {
	coming := map[string]room{}
	for i, diff := range b.diffs {
		coming[diff] = room{bytes: b.layers[i].Size}
	}
	_, err := s.within(ctx, tenant, what, coming)
	return err
}

// reserve takes a tenant's room for a layer before it is unpacked, so that no two layers take the
// same room. It grants as many of the files as there is room for. settle says what became of the
// layer.
func (s *Service) reserve(ctx context.Context, tenant, what, diff string, bytes int64, files int) (granted int, settle func(kept bool), err error) {
	if s.cfg.MaxTenantBytes == 0 {
		return files, func(bool) {}, nil
	}
	free, err := s.lock(ctx, "room of "+tenant)
	if err != nil {
		return 0, nil, err
	}
	defer free()
	left, err := s.within(ctx, tenant, what, map[string]room{diff: {bytes: bytes}})
	if err != nil {
		return 0, nil, err
	}
	granted = min(files, left.files, int(left.bytes/diskspace.FileBytes))
	if granted <= 0 {
		return 0, nil, fault.New(fault.Exhausted, "your images and those that are being unpacked leave no room for the files of %s; remove some, and then prune (cove image remove, cove image prune)", what)
	}
	put := func(a arrival) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.arrivals[tenant] == nil {
			s.arrivals[tenant] = map[string]arrival{}
		}
		s.arrivals[tenant][diff] = a
	}
	put(arrival{room: room{diskspace.Charge(bytes, granted), granted}, going: true})
	return granted, func(kept bool) {
		if kept {
			put(arrival{since: time.Now()})
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.arrivals[tenant], diff)
	}, nil
}

// within refuses layers that a tenant has no room for beside what it has and what is being unpacked
// for it, and tells the room that is left.
func (s *Service) within(ctx context.Context, tenant, what string, coming map[string]room) (left room, err error) {
	if s.cfg.MaxTenantBytes == 0 || s.imager == nil {
		return room{}, nil
	}
	files := 0
	layers, bytes, err := s.holds(ctx, tenant)
	if err != nil {
		return room{}, err
	}
	s.mu.Lock()
	for diff, a := range s.arrivals[tenant] {
		if layers[diff] = true; a.going {
			coming[diff] = room{max(coming[diff].bytes, a.room.bytes), max(coming[diff].files, a.room.files)}
		}
	}
	s.mu.Unlock()
	for diff := range coming {
		layers[diff] = true
	}
	for few := range slices.Chunk(slices.Sorted(maps.Keys(layers)), template.MaxImageLayers) { // the driver answers for no more at once
		there, err := s.imager.Layers(ctx, few)
		if err != nil {
			return room{}, err
		}
		for _, l := range there {
			bytes += onDisk(l)
			files += l.Files
			delete(coming, l.DiffID)
		}
	}
	for _, r := range coming {
		bytes += r.bytes
		files += r.files
	}
	if files > s.cfg.MaxTenantFiles {
		s.unswept.Store(true)
		return room{}, fault.New(fault.Exhausted, "with %s your images have %d files, and this server allows %d; remove some, and then prune (cove image remove, cove image prune)",
			what, files, s.cfg.MaxTenantFiles)
	}
	if bytes > s.cfg.MaxTenantBytes {
		s.unswept.Store(true) // the next sweep removes layers that no image needs
		return room{}, fault.New(fault.Exhausted, "with %s your images have %d MiB, and this server allows %d; remove some, and then prune (cove image remove, cove image prune)",
			what, bytes>>20, s.cfg.MaxTenantBytes>>20)
	}
	return room{s.cfg.MaxTenantBytes - bytes, s.cfg.MaxTenantFiles - files}, nil
}

// onDisk is what a layer counts.
func onDisk(l sandbox.Layer) int64 { return diskspace.Charge(l.Bytes, l.Files) }

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
