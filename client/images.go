package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// Images lists the container images of yours that are on the server.
func (c *Client) Images(ctx context.Context) ([]ImageInfo, error) {
	var list ImageList
	err := c.do(ctx, http.MethodGet, "/images", nil, nil, &list)
	return list.Images, err
}

// Image tells about one image, by its name, its digest or a beginning of that.
func (c *Client) Image(ctx context.Context, ref string) (*ImageInfo, error) {
	var info ImageInfo
	if err := c.do(ctx, http.MethodGet, "/images/inspect", url.Values{"ref": {ref}}, nil, &info); err != nil {
		return nil, err
	}
	return &info, nil
}

// RemoveImage removes a name, and the image with its last name. Sandboxes that run from it go on.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	return c.do(ctx, http.MethodDelete, "/images", url.Values{"ref": {ref}}, nil, nil)
}

// PullImage gets an image from its registry and tells how far it is; progress may be nil.
func (c *Client) PullImage(ctx context.Context, req PullRequest, progress func(PullEvent)) (*ImageInfo, error) {
	b, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	resp, err := c.send(ctx, http.MethodPost, "/images/pull", nil, bytes.NewReader(b), ndjson)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return decodePull(resp.Body, progress)
}

var errPullCut = errors.New("the stream was cut before the image was there: the server or the network went away; a second pull goes on where this one ended")

func decodePull(r io.Reader, progress func(PullEvent)) (*ImageInfo, error) {
	dec := json.NewDecoder(r)
	for {
		var e PullEvent
		err := dec.Decode(&e)
		switch {
		case err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errPullCut
		case err != nil:
			return nil, fmt.Errorf("stream of a pull: %w", err)
		case e.Fault != nil:
			return nil, &Error{Kind: e.Fault.Kind, Message: e.Fault.Message}
		case e.Image != nil:
			// The end of the body is read so that the connection can be used again.
			_, _ = io.Copy(io.Discard, io.MultiReader(dec.Buffered(), io.LimitReader(r, 1<<10)))
			return e.Image, nil
		}
		if progress != nil {
			progress(e)
		}
	}
}

// ImportImage makes an image of an archive: what `docker save` writes, an OCI layout as a tar, or a tar of a root
// directory, each also compressed. Name is needed where the archive has none.
func (c *Client) ImportImage(ctx context.Context, name string, archive io.Reader) ([]ImageInfo, error) {
	q := url.Values{}
	set(q, "name", name)
	var list ImageList
	if err := c.upload(ctx, http.MethodPost, "/images/import", q, struct{ io.Reader }{archive}, &list); err != nil {
		return nil, err
	}
	return list.Images, nil
}

// TagImage gives a template of yours the name of an image.
func (c *Client) TagImage(ctx context.Context, req TagRequest) (*ImageInfo, error) {
	var info ImageInfo
	if err := c.do(ctx, http.MethodPost, "/images/tag", nil, req, &info); err != nil {
		return nil, err
	}
	return &info, nil
}

// PruneImages removes images without a name, layers of builds and whatever else nobody needs.
func (c *Client) PruneImages(ctx context.Context) (PruneResult, error) {
	var result PruneResult
	err := c.do(ctx, http.MethodPost, "/images/prune", nil, nil, &result)
	return result, err
}

// Login keeps a password for a registry, after the registry has accepted it.
func (c *Client) Login(ctx context.Context, req LoginRequest) error {
	return c.do(ctx, http.MethodPost, "/registries", nil, req, nil)
}

// Logout forgets the password for a registry.
func (c *Client) Logout(ctx context.Context, registry string) error {
	return c.do(ctx, http.MethodDelete, "/registries/"+url.PathEscape(registry), nil, nil, nil)
}

// Registries lists where you have logged in.
func (c *Client) Registries(ctx context.Context) ([]string, error) {
	var list RegistryList
	err := c.do(ctx, http.MethodGet, "/registries", nil, nil, &list)
	return list.Registries, err
}

// Volumes lists the volumes of yours.
func (c *Client) Volumes(ctx context.Context) ([]Volume, error) {
	var list VolumeList
	err := c.do(ctx, http.MethodGet, "/volumes", nil, nil, &list)
	return list.Volumes, err
}

// CreateVolume makes a volume.
func (c *Client) CreateVolume(ctx context.Context, req VolumeRequest) (*Volume, error) {
	var v Volume
	if err := c.do(ctx, http.MethodPost, "/volumes", nil, req, &v); err != nil {
		return nil, err
	}
	return &v, nil
}

// RemoveVolume removes a volume with its files. One that a sandbox has is refused.
func (c *Client) RemoveVolume(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, "/volumes/"+url.PathEscape(name), nil, nil, nil)
}
