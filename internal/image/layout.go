package image

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/covehq/cove/internal/fault"
)

// Where tools write the name of an image in an OCI image layout: containerd's in full, the specification's often as a tag only.
const (
	fullName = "io.containerd.image.name"
	refName  = "org.opencontainers.image.ref.name"
)

// fromOCI reads an OCI image layout. Its index lists images, each of which may be an index for several platforms itself; some
// tools list the platforms of one image side by side.
func (s *Service) fromOCI(a *archive) ([]found, error) {
	const what = "the archive"
	raw, ok := a.read("index.json", maxManifest)
	if !ok {
		return nil, fault.New(fault.Invalid, "the archive's index.json cannot be read")
	}
	index, _, err := document{raw: raw}.parse(what)
	if err != nil {
		return nil, err
	}
	if index == nil {
		return nil, fault.New(fault.Invalid, "the archive's index.json is not an index of images")
	}
	names, groups := byName(index)
	if len(names) > maxImages {
		return nil, fault.New(fault.Invalid, "the archive holds %d images; at most %d are taken at once", len(names), maxImages)
	}
	var all []found
	for _, name := range names {
		f, err := s.fromIndex(a, groups[name])
		if err != nil {
			return nil, err
		}
		if name != "" {
			f.names = []string{name}
		}
		all = append(all, f)
	}
	return all, nil
}

// byName puts what an index lists under one name together, in its order.
func byName(index *v1.IndexManifest) (names []string, groups map[string]*v1.IndexManifest) {
	groups = map[string]*v1.IndexManifest{}
	for _, d := range index.Manifests {
		if d.Platform != nil && d.Platform.OS == "unknown" {
			continue
		}
		name := layoutName(d)
		if groups[name] == nil {
			groups[name] = &v1.IndexManifest{}
			names = append(names, name)
		}
		groups[name].Manifests = append(groups[name].Manifests, d)
	}
	return names, groups
}

// layoutName is the name of an image in a layout, in full, or "".
func layoutName(d v1.Descriptor) string {
	for _, text := range []string{d.Annotations[fullName], d.Annotations[refName]} {
		if !strings.ContainsAny(text, ":/") { // a tag without a name
			continue
		}
		if r, err := parseReference(text); err == nil && r.digest == "" {
			return r.String()
		}
	}
	return ""
}

func (s *Service) fromIndex(a *archive, group *v1.IndexManifest) (found, error) {
	const what = "an image in the archive"
	get := func(digest string) (document, error) {
		raw, ok := a.read(blobName(digest), maxManifest)
		if !ok {
			return document{}, fault.New(fault.Invalid, "the archive lacks a manifest, or it is too large")
		}
		if digestOf(raw) != digest {
			return document{}, fault.New(fault.Invalid, "the archive is damaged: a manifest does not have its digest")
		}
		return document{raw: raw, digest: digest}, nil
	}
	chosen := group.Manifests[0]
	if len(group.Manifests) > 1 {
		var err error
		if chosen, err = choose(what, group, s.cfg.Platform); err != nil {
			return found{}, err
		}
	}
	top, err := get(chosen.Digest.String())
	if err != nil {
		return found{}, err
	}
	m, digest, err := s.descend(what, top, get)
	if err != nil {
		return found{}, err
	}
	config, ok := a.read(blobName(m.Config.Digest.String()), maxConfig)
	if !ok || digestOf(config) != m.Config.Digest.String() {
		return found{}, fault.New(fault.Invalid, "the archive lacks the configuration of an image, or it is damaged")
	}
	var members []string
	for _, d := range m.Layers {
		members = append(members, blobName(d.Digest.String()))
	}
	return s.describeMember(a, m, digest, config, members)
}

func blobName(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

func copySum(to io.Writer, from io.Reader) (string, error) {
	sum := sha256.New()
	_, err := io.Copy(io.MultiWriter(to, sum), from)
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), err
}
