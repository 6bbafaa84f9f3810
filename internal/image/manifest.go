package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

const (
	maxLayers = 127       // as many as Docker makes
	maxNested = 3         // indexes in indexes
	maxWords  = 512 << 10 // of an image's environment, labels and commands together
)

// document is what a registry or an archive has under a name: a manifest, or an index of manifests.
type document struct {
	raw       []byte
	mediaType types.MediaType // as its bearer says; empty: it says nothing
	digest    string
}

// parse tells an index and a manifest apart. One that could be read as either is refused: two readers would see two images.
func (d document) parse(what string) (*v1.IndexManifest, *v1.Manifest, error) {
	var shape struct {
		SchemaVersion int               `json:"schemaVersion"`
		MediaType     types.MediaType   `json:"mediaType"`
		Manifests     json.RawMessage   `json:"manifests"`
		Layers        json.RawMessage   `json:"layers"`
		Config        json.RawMessage   `json:"config"`
		FSLayers      []json.RawMessage `json:"fsLayers"`
	}
	broken := fault.New(fault.Invalid, "what %s stands for is not a container image", what)
	if json.Unmarshal(d.raw, &shape) != nil {
		return nil, nil, broken
	}
	if shape.SchemaVersion == 1 || d.mediaType.IsSchema1() || shape.FSLayers != nil {
		return nil, nil, fault.New(fault.Unsupported, "%s is an image of Docker's first schema, which nobody makes any more; push it again with a current tool", what)
	}
	isIndex, isManifest := shape.Manifests != nil, shape.Layers != nil || shape.Config != nil
	switch said := shape.MediaType; {
	case isIndex == isManifest, said.IsIndex() && !isIndex, said.IsImage() && !isManifest:
		return nil, nil, broken
	case isIndex:
		var index v1.IndexManifest
		if json.Unmarshal(d.raw, &index) != nil {
			return nil, nil, broken
		}
		return &index, nil, nil
	}
	var manifest v1.Manifest
	if json.Unmarshal(d.raw, &manifest) != nil {
		return nil, nil, broken
	}
	return nil, &manifest, checkManifest(what, &manifest)
}

func checkManifest(what string, m *v1.Manifest) error {
	if t := m.Config.MediaType; t != "" && !t.IsConfig() {
		return fault.New(fault.Unsupported, "%s is not a container image: its configuration is of type %.100q", what, t)
	}
	if len(m.Layers) > maxLayers {
		return fault.New(fault.Invalid, "%s has %d layers; at most %d are possible", what, len(m.Layers), maxLayers)
	}
	for _, d := range append(slices.Clone(m.Layers), m.Config) {
		if d.Digest.Algorithm != "sha256" || d.Size < 0 {
			return fault.New(fault.Unsupported, "%s has a part without a SHA-256 digest or a size", what)
		}
	}
	for _, d := range m.Layers {
		if d.MediaType != "" && !d.MediaType.IsLayer() {
			return fault.New(fault.Unsupported, "%s is not a container image that can be unpacked: a layer is of type %.100q", what, d.MediaType)
		}
	}
	return nil
}

// choose finds the manifest for a platform in an index.
func choose(what string, index *v1.IndexManifest, platform string) (v1.Descriptor, error) {
	os, arch, _ := strings.Cut(platform, "/")
	var found []v1.Descriptor
	others := map[string]bool{}
	for _, d := range index.Manifests {
		switch {
		case !d.MediaType.IsImage() && !d.MediaType.IsIndex() && d.MediaType != "":
			continue
		case d.Platform == nil && len(index.Manifests) == 1: // its configuration says what it is for
			return d, nil
		case d.Platform == nil, d.Platform.OS == "unknown": // an attestation, which is no image
			continue
		case d.Platform.OS == os && d.Platform.Architecture == arch:
			found = append(found, d)
		default:
			others[d.Platform.OS+"/"+d.Platform.Architecture] = true
		}
	}
	// Of several, the one that asks least of the processor.
	slices.SortStableFunc(found, func(a, b v1.Descriptor) int { return strings.Compare(a.Platform.Variant, b.Platform.Variant) })
	if len(found) > 0 {
		if found[0].Digest.Algorithm != "sha256" {
			return v1.Descriptor{}, fault.New(fault.Unsupported, "%s has a manifest without a SHA-256 digest", what)
		}
		return found[0], nil
	}
	if len(others) == 0 {
		return v1.Descriptor{}, fault.New(fault.NotFound, "%s has no image for %s", what, platform)
	}
	names := slices.Sorted(maps.Keys(others))
	return v1.Descriptor{}, fault.New(fault.NotFound, "%s has no image for %s; it has images for %.500s", what, platform, strings.Join(names, ", "))
}

// blueprint is an image as its manifest and configuration describe it.
type blueprint struct {
	digest string // of the manifest
	layers []v1.Descriptor
	diffs  []string // of the layers without compression
	add    sandbox.ImageRequest
}

// describe reads an image's configuration.
func describe(what, platform, digest string, m *v1.Manifest, config []byte) (blueprint, error) {
	var c v1.ConfigFile
	if json.Unmarshal(config, &c) != nil {
		return blueprint{}, fault.New(fault.Invalid, "the configuration of %s is not one of a container image", what)
	}
	is := c.OS + "/" + c.Architecture
	if c.OS == "" && c.Architecture == "" { // of images that hold data and no programs
		is = platform
	}
	if is != platform {
		return blueprint{}, fault.New(fault.NotFound, "%s has no image for %s; it has one for %.100s", what, platform, is)
	}
	if len(c.RootFS.DiffIDs) != len(m.Layers) {
		return blueprint{}, fault.New(fault.Invalid, "the configuration of %s is about %d layers, its manifest about %d", what, len(c.RootFS.DiffIDs), len(m.Layers))
	}
	b := blueprint{digest: digest, layers: m.Layers}
	for _, h := range c.RootFS.DiffIDs {
		if h.Algorithm != "sha256" {
			return blueprint{}, fault.New(fault.Unsupported, "%s has a layer without a SHA-256 digest", what)
		}
		b.diffs = append(b.diffs, h.String())
	}
	env, err := environment(what, c.Config)
	if err != nil {
		return blueprint{}, err
	}
	b.add = sandbox.ImageRequest{
		Name: imageName(digest, platform), Description: "image " + what, Env: env, User: c.Config.User, Workdir: c.Config.WorkingDir,
		Image: template.Image{
			Reference: what, Digest: digest, Config: m.Config.Digest.String(), Platform: platform, Layers: b.diffs,
			Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Labels: c.Config.Labels,
			Ports: slices.Sorted(maps.Keys(c.Config.ExposedPorts)), Volumes: slices.Sorted(maps.Keys(c.Config.Volumes)), Created: created(c.Created.Time),
		},
	}
	return b, nil
}

// created leaves out what reproducible builds write in the place of a time.
func created(t time.Time) time.Time {
	if t.Unix() <= 0 {
		return time.Time{}
	}
	return t.UTC()
}

// environment is an image's environment, and a check of everything in its configuration that ends up in a command line.
func environment(what string, c v1.Config) (map[string]string, error) {
	n := 0
	labels := slices.AppendSeq(slices.Collect(maps.Keys(c.Labels)), maps.Values(c.Labels))
	ports, volumes := slices.Collect(maps.Keys(c.ExposedPorts)), slices.Collect(maps.Keys(c.Volumes))
	for _, words := range [][]string{c.Env, c.Entrypoint, c.Cmd, {c.User, c.WorkingDir}, labels, ports, volumes} {
		for _, w := range words {
			if n += len(w) + 1; n > maxWords {
				return nil, fault.New(fault.Invalid, "the configuration of %s has more than %d bytes of environment, commands and labels", what, maxWords)
			}
			if strings.ContainsRune(w, 0) {
				return nil, fault.New(fault.Invalid, "the configuration of %s has a zero byte in it", what)
			}
		}
	}
	env := map[string]string{}
	for _, line := range c.Env {
		if key, value, _ := strings.Cut(line, "="); key != "" {
			env[key] = value
		}
	}
	return env, nil
}

// imagePrefix begins the names of the templates that are images.
const imagePrefix = "img-"

func imageName(digest, platform string) string {
	sum := sha256.Sum256([]byte(digest + "\n" + platform))
	return imagePrefix + hex.EncodeToString(sum[:16])
}
