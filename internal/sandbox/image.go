package sandbox

import (
	"context"
	"os"

	"github.com/covehq/cove/internal/template"
)

// Puller is a driver that makes templates of container images. One that is no Imager has hosts that pull images themselves, by their digest, when a
// sandbox starts; Caps.Pulls says so.
type Puller interface {
	// AddImage makes the template of an image. A driver that is no Imager keeps nothing of it: the same request gives the same template, and whoever
	// wants to find it again keeps the request.
	AddImage(ctx context.Context, req ImageRequest) (*template.Template, error)
}

// Imager is a driver that keeps the layers of container images and makes templates of them; Caps.Images says so.
type Imager interface {
	// Layers are those of the given digests that are unpacked already.
	Layers(ctx context.Context, diffIDs []string) ([]Layer, error)
	// Unpack reads a layer from the beginning of a file: a tar, plain or compressed with gzip or zstd. What comes out must have the
	// digest that is asked for, or nothing is kept. Several callers of one layer share the work.
	Unpack(ctx context.Context, req LayerRequest, blob *os.File) (Layer, error)
	// AddImage makes a template of layers that are there; a second time with the same name and image it only returns it.
	// RemoveTemplate removes it.
	AddImage(ctx context.Context, req ImageRequest) (*template.Template, error)
	// PruneLayers removes layers that no template needs and no unpack waits for.
	PruneLayers(ctx context.Context) (freed int64, err error)
}

// LayerRequest is a layer to unpack.
type LayerRequest struct {
	DiffID   string // sha256:… of the tar without compression
	MaxBytes int64  // of all its files together; zero: the driver's own bound
	MaxFiles int
	For      string // template of the image that will need it, see ImageRequest.Claim; the layer is kept until that is there
}

// Layer is one that is unpacked.
type Layer struct {
	DiffID string `json:"diff_id"`
	Bytes  int64  `json:"bytes"`
	Files  int    `json:"files"`
}

// ImageRequest asks for a template of an image.
type ImageRequest struct {
	Tenant      string // who may use it
	Name        string // of the template
	Description string
	Image       template.Image
	Env         map[string]string
	User        string // name or id, with ":group" or not, as the image says; empty: root
	Workdir     string // empty: /
}

// Claim is what layers are unpacked for.
func (r ImageRequest) Claim() string { return r.Tenant + "/" + r.Name }

// Mount is a place outside of a sandbox that is seen inside it.
type Mount struct {
	Kind     MountKind `json:"kind"`
	Source   string    `json:"source"`             // a host path that the operator allows, the name of a volume of the tenant's, or of a directory of datasets
	SubPath  string    `json:"sub_path,omitempty"` // below the source
	Target   string    `json:"target"`             // absolute, inside
	ReadOnly bool      `json:"read_only,omitempty"`
	Create   bool      `json:"create,omitempty"` // a volume that is not there is made
}

// MountKind is what a Mount's source is.
type MountKind string

// The kinds of mounts.
const (
	MountHost   MountKind = "host"
	MountVolume MountKind = "volume"
	MountData   MountKind = "data" // a directory of datasets that the server keeps; no dialect takes it from a caller
)
