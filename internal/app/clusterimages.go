package app

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// documents is the part of the store that outlives this server and that others have too.
type documents interface {
	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Document(ctx context.Context, tenant, kind, id string) ([]byte, error)
	DocumentIDs(ctx context.Context, tenant, kind string) ([]string, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error
}

// kindImage is the kind of documents that hold a sandbox.ImageRequest, by the name of its template.
const kindImage = "cluster-image"

// imagePrefix begins the names of the templates that are images.
const imagePrefix = "img-"

// maxClusterImages is how many images a tenant can have: nothing else bounds them where no layer is kept.
const maxClusterImages = 200

// clusterImages keeps which images tenants have on a cluster. What is kept is what was asked for: what Pods are made of it follows from how the
// server is configured today.
type clusterImages struct {
	puller    sandbox.Puller
	allows    func(reference string) error // what the operator says of names today
	documents documents
	log       *slog.Logger
}

// AddImage makes the template of an image and keeps it for every server.
func (c clusterImages) AddImage(ctx context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	t, err := c.compose(ctx, req)
	if err != nil {
		return nil, err
	}
	kept, err := c.documents.DocumentIDs(ctx, req.Tenant, kindImage)
	if err != nil {
		return nil, err
	}
	if len(kept) >= maxClusterImages && !slices.Contains(kept, req.Name) {
		return nil, fault.New(fault.Exhausted, "you have %d images, and this server keeps no more; remove some (cove image remove, or prune)", len(kept))
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", req.Name, err)
	}
	return t, c.documents.PutDocument(ctx, req.Tenant, kindImage, req.Name, body)
}

// compose is the template of an image that its tenant may use.
func (c clusterImages) compose(ctx context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	if err := c.allows(req.Image.Reference); err != nil {
		return nil, err
	}
	return c.puller.AddImage(ctx, req)
}

// find is the template of an image of a tenant's.
func (c clusterImages) find(ctx context.Context, tenant, name string) (*template.Template, error) {
	body, err := c.documents.Document(ctx, tenant, kindImage, name)
	if fault.Is(err, fault.NotFound) {
		return nil, fault.New(fault.NotFound, "there is no template %q", name)
	}
	if err != nil {
		return nil, err
	}
	return c.read(ctx, tenant, name, body)
}

// read makes the template anew. One that the server would not make any more cannot be used, and can be removed.
func (c clusterImages) read(ctx context.Context, tenant, name string, body []byte) (*template.Template, error) {
	var req sandbox.ImageRequest
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	req.Tenant, req.Name = tenant, name
	t, err := c.compose(ctx, req)
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "the template %q cannot be used any more: %s", name, fault.Message(err))
	}
	return t, nil
}

// listFor bounds how long a list may take.
const listFor = 10 * time.Second

// list is what a tenant has. A store that does not answer is the next request's to report.
func (c clusterImages) list(tenant string) (all []template.Info) {
	ctx, cancel := context.WithTimeout(context.Background(), listFor) // whoever asks for templates gives none
	defer cancel()
	kept, err := c.documents.DocumentIDs(ctx, tenant, kindImage)
	if err != nil {
		c.log.Warn("images of a tenant are not listed", "tenant", tenant, "error", err)
		return nil
	}
	for _, name := range kept { // one at a time: together they may be large
		info := template.Info{Name: name, Tenant: tenant, Source: template.SourceImage}
		t, err := c.find(ctx, tenant, name)
		switch {
		case fault.Is(err, fault.NotFound): // somebody has removed it meanwhile
			continue
		case err == nil:
			info.Description, info.Digest, info.From, info.Created = t.Description, t.Digest, t.Image.Reference, t.Image.Created
		}
		all = append(all, info) // what cannot be used is listed too: it counts, and can be removed
	}
	return all
}

// remove forgets an image.
func (c clusterImages) remove(ctx context.Context, tenant, name string) error {
	err := c.documents.DeleteDocument(ctx, tenant, kindImage, name)
	if fault.Is(err, fault.NotFound) {
		return fault.New(fault.NotFound, "there is no template %q", name)
	}
	return err
}

// clusterDriver is the driver with a memory for images.
type clusterDriver struct {
	*kubernetes.Driver
	images clusterImages
}

func (d clusterDriver) AddImage(ctx context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	return d.images.AddImage(ctx, req)
}

func (d clusterDriver) RemoveTemplate(ctx context.Context, tenant, name string) error {
	if strings.HasPrefix(name, imagePrefix) {
		return d.images.remove(ctx, tenant, name)
	}
	return d.Driver.RemoveTemplate(ctx, tenant, name)
}
