package image

import (
	"context"
	"slices"

	"github.com/covehq/cove/internal/fault"
)

// Where the driver's hosts pull images themselves, the registry is asked for an image's manifest and configuration, with the
// tenant's own rights and no others. What the hosts then pull is the manifest with that digest: whatever credentials they have,
// a tenant gets no image from them that it could not read itself.

// remote reports whether the driver's hosts pull images themselves.
func (s *Service) remote() bool { return s.adder != nil && s.imager == nil }

// canUnpack refuses what brings layers to a driver that has none.
func (s *Service) canUnpack() error {
	if s.remote() {
		return fault.New(fault.Unsupported, "this server keeps no images: its hosts pull them from registries; push the image to one and use its name")
	}
	return s.canImage()
}

// canPull refuses a name that tenants may not use, and credentials that nobody can use.
func (s *Service) canPull(r reference, creds credentials) error {
	if !s.remote() {
		return nil
	}
	allowed := func(pattern string) bool {
		return slices.ContainsFunc([]string{r.String(), r.registry + "/" + r.repository}, func(name string) bool { return matches(pattern, name) })
	}
	if allow := s.cfg.Pulls.Allow; len(allow) > 0 && !slices.ContainsFunc(allow, allowed) {
		return fault.New(fault.Denied, "the server's operator allows images by name, and %s is not among them", r)
	}
	return s.canUse(creds)
}

// canUse refuses a tenant's credentials where hosts could not pull what they open.
func (s *Service) canUse(creds credentials) error {
	if s.remote() && !s.cfg.Pulls.Credentials && creds != (credentials{}) {
		return fault.New(fault.Unsupported, "the hosts of this server pull images themselves and cannot be given credentials; "+
			"use a public image, or have the operator name Secrets with theirs (pull_secrets)")
	}
	return nil
}

// addRemote makes the template of an image that nobody downloads here. The caller has begun.
func (s *Service) addRemote(ctx context.Context, tenant, what, top string, b blueprint) (*entry, error) {
	for _, d := range b.layers {
		b.add.Image.Bytes += d.Size // compressed: nobody here knows more
	}
	e, err := s.addImage(ctx, tenant, what, top, b)
	if err == nil {
		s.log.Info("image found", "tenant", tenant, "image", what, "digest", b.digest, "template", b.add.Name, "layers", len(b.layers))
	}
	return e, err
}
