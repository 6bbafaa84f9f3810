package native

import (
	"context"
	"encoding/json"
	"errors"
	"os"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

var _ sandbox.Imager = (*Driver)(nil)

// Layers are those of the given digests that are unpacked already.
func (d *Driver) Layers(ctx context.Context, diffIDs []string) ([]sandbox.Layer, error) {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpLayers, IDs: diffIDs})
	return r.Layers, err
}

// Unpack has the maker unpack a layer from the beginning of a file.
func (d *Driver) Unpack(ctx context.Context, req sandbox.LayerRequest, blob *os.File) (sandbox.Layer, error) {
	// Its own connection: by its end the maker learns that the caller has left, and it is not used again.
	c, err := d.connect(ctx)
	if err != nil {
		return sandbox.Layer{}, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	var r wire.Response
	err = wire.Send(c, wire.Request{Op: wire.OpUnpack, Layer: &req}, blob)
	if err == nil {
		var files []*os.File
		files, err = wire.Receive(c, &r)
		wire.CloseAll(files)
	}
	switch {
	case ctx.Err() != nil:
		return sandbox.Layer{}, context.Cause(ctx)
	case err != nil:
		return sandbox.Layer{}, fault.Wrap(fault.Unavailable, err, "the maker does not answer")
	case r.Err() != nil:
		return sandbox.Layer{}, r.Err()
	case len(r.Layers) != 1:
		return sandbox.Layer{}, errors.New("the maker told nothing of the layer")
	}
	return r.Layers[0], nil
}

// AddImage makes a template of layers that are unpacked.
func (d *Driver) AddImage(ctx context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	if err := fitImage(&req); err != nil {
		return nil, err
	}
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpAddImage, Image: &req})
	if err == nil && r.Template == nil {
		err = errors.New("the maker gave no template")
	}
	return r.Template, err
}

// PruneLayers removes layers that no template needs.
func (d *Driver) PruneLayers(ctx context.Context) (freed int64, err error) {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpPruneLayers})
	return r.Freed, err
}

// maxImage is how much of a message an image may take: the answer holds the template, which is larger by its layers' paths.
const maxImage = wire.MaxMessage / 2

// fitImage leaves out labels that are too long for one message: nothing depends on them, and some builders put whole
// documents there.
func fitImage(req *sandbox.ImageRequest) error {
	size := func() int {
		text, _ := json.Marshal(req) // plain data
		return len(text)
	}
	if size() > maxImage {
		req.Image.Labels = nil
	}
	if size() > maxImage {
		return fault.New(fault.Invalid, "image %s has a configuration that is too large: its environment and command may have %d KB", req.Image.Reference, maxImage>>10)
	}
	return nil
}
