package image

import (
	"context"
	"encoding/json"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
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
	if err := s.cfg.Pulls.allows(r); err != nil {
		return err
	}
	return s.canUse(creds)
}

// Allows refuses the name of an image that tenants may not use, or not any more.
func (p Pulls) Allows(name string) error {
	if len(p.Allow) == 0 {
		return nil
	}
	r, err := parseReference(name)
	if err != nil {
		return err
	}
	return p.allows(r)
}

func (p Pulls) allows(r reference) error {
	allowed := func(pattern string) bool {
		return slices.ContainsFunc([]string{r.String(), r.registry + "/" + r.repository}, func(name string) bool { return matches(pattern, name) })
	}
	if len(p.Allow) > 0 && !slices.ContainsFunc(p.Allow, allowed) {
		return fault.New(fault.Denied, "the server's operator allows images by name, and %s is not among them", r)
	}
	return nil
}

// canFetch refuses a manifest that sends hosts elsewhere for a part of the image: they would ask any address that its author has written there.
func (s *Service) canFetch(what string, m *v1.Manifest) error {
	if !s.remote() {
		return nil
	}
	for _, d := range append(slices.Clone(m.Layers), m.Config) {
		if len(d.URLs) > 0 || !d.MediaType.IsDistributable() {
			return fault.New(fault.Unsupported, "%s has parts that are kept at other addresses than its registry (urls, or layers that are not to be distributed); "+
				"the hosts of this server pull none of these", what)
		}
	}
	return nil
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
	if err := fit(&b.add); err != nil {
		return nil, err
	}
	e, err := s.addImage(ctx, tenant, what, top, b)
	if err == nil {
		s.log.Info("image found", "tenant", tenant, "image", what, "digest", b.digest, "template", b.add.Name, "layers", len(b.layers))
	}
	return e, err
}

// maxRemote is how much of an image's configuration is kept where no layer is: nothing else bounds what a tenant has there.
const maxRemote = 64 << 10

// fit leaves out labels that are too long: nothing depends on them, and some builders put whole documents there.
func fit(add *sandbox.ImageRequest) error {
	size := func() int {
		text, _ := json.Marshal(add) // plain data
		return len(text)
	}
	if size() > maxRemote {
		add.Image.Labels = nil
	}
	if size() > maxRemote {
		return fault.New(fault.Invalid, "image %s has a configuration that is too large: its environment, commands, ports and volumes may have %d KB", add.Image.Reference, maxRemote>>10)
	}
	return nil
}

// Bounds of the names that a tenant gives to images where no layer is kept.
const (
	maxNames    = 1000
	maxNameText = 8 << 10 // of what is kept with one
)

// canName refuses another name where a tenant has as many as it may. The caller has locked the names.
func (s *Service) canName(ctx context.Context, tenant, name string) error {
	if !s.remote() {
		return nil
	}
	names, err := s.documents.DocumentIDs(ctx, tenant, kindRef)
	if err != nil {
		return err
	}
	if len(names) >= maxNames && !slices.Contains(names, name) {
		return fault.New(fault.Exhausted, "you have %d names of images, and this server keeps no more; remove some (cove image remove, or prune)", len(names))
	}
	return nil
}
