package cove

import (
	"context"
	"io"
	"net/http"
	"slices"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Images is what the API asks of whoever keeps container images. Each tenant has images of its own.
type Images interface {
	// Ensure is the template of an image, which is pulled only when it is not here.
	Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error)
	Pull(ctx context.Context, tenant string, r template.PullRequest) (client.ImageInfo, error)
	Import(ctx context.Context, tenant, name string, archive io.Reader) ([]client.ImageInfo, error)
	List(ctx context.Context, tenant string) ([]client.ImageInfo, error)
	Inspect(ctx context.Context, tenant, ref string) (client.ImageInfo, error)
	Remove(ctx context.Context, tenant, ref string) error
	// Tag gives a template of the tenant's the name of an image; of config what a container runs, its labels and ports count.
	Tag(ctx context.Context, tenant, name, ref string, config template.Image) (client.ImageInfo, error)
	Prune(ctx context.Context, tenant string) (freed int64, removed []string, err error)
	Login(ctx context.Context, tenant, registry, username, password string) error
	Logout(ctx context.Context, tenant, registry string) error
	Logins(ctx context.Context, tenant string) ([]string, error)
}

// SetImages lets the API answer for container images. It is set before the API serves.
func (a *API) SetImages(i Images) { a.images = i }

// imageAnnotation is where a sandbox keeps the name of the image that it was asked for by.
const imageAnnotation = "image"

var (
	errNoImages    = fault.New(fault.Unsupported, "this server's driver keeps no container images; use a template")
	errNoReference = fault.New(fault.Invalid, "the name of the image is missing: give it as reference, such as python:3.12-slim")
)

// shelf is who keeps images, if anybody does.
func (a *API) shelf() (Images, error) {
	if a.images == nil {
		return nil, errNoImages
	}
	return a.images, nil
}

// fromImage makes a sandbox start from the image that was asked for. It gives what the sandbox begins with; nil: nothing.
func (a *API) fromImage(c *call, req client.CreateRequest, spec *sandbox.Spec) (main []string, err error) {
	switch {
	case req.Image == "" && req.Start:
		return nil, fault.New(fault.Invalid, "start is about what an image would start: give an image")
	case req.Image == "":
		return nil, nil
	case req.Template != "":
		return nil, fault.New(fault.Invalid, "give either template or image, not both")
	}
	images, err := a.shelf()
	if err != nil {
		return nil, err
	}
	t, err := images.Ensure(c.ctx(), c.who.Tenant, template.PullRequest{Reference: req.Image})
	if err != nil {
		return nil, err
	}
	spec.Template = t.Name
	spec.Annotations = map[string]string{imageAnnotation: req.Image}
	if !req.Start {
		return nil, nil
	}
	if t.Image != nil {
		main = slices.Concat(t.Image.Entrypoint, t.Image.Cmd)
	}
	if len(main) == 0 {
		return nil, fault.New(fault.Invalid, "the image %s names neither an entrypoint nor a command: leave out start, and run what you need", req.Image)
	}
	return main, nil
}

func (a *API) listImages(c *call) error {
	images, err := a.shelf()
	if err != nil {
		return err
	}

	list, err := images.List(c.ctx(), c.who.Tenant)
	if err != nil {
		return err
	}

	if list == nil {
		list = []client.ImageInfo{}
	}
	return c.answer(http.StatusOK, client.ImageList{Images: list})
}

func (a *API) getImage(c *call) error {
	q := c.query()
	ref := q.required("ref")
	if q.err != nil {
		return q.err
	}
	images, err := a.shelf()
	if err != nil {
		return err
	}

	info, err := images.Inspect(c.ctx(), c.who.Tenant, ref)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, info)
}

func (a *API) removeImage(c *call) error {
	q := c.query()
	ref := q.required("ref")
	if q.err != nil {
		return q.err
	}
	images, err := a.shelf()
	if err != nil {
		return err
	}

	if err := images.Remove(c.ctx(), c.who.Tenant, ref); err != nil {
		return err
	}

	return c.nothing()
}

func (a *API) importImage(c *call) error {
	q := c.query()
	if q.err != nil {
		return q.err
	}
	images, err := a.shelf()
	if err != nil {
		return err
	}

	list, err := images.Import(c.ctx(), c.who.Tenant, q.text("name"), &upload{c.w, c.r.Body})
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, client.ImageList{Images: list})
}

func (a *API) tagImage(c *call) error {
	var req client.TagRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	if req.Reference == "" {
		return errNoReference
	}
	images, err := a.shelf()
	if err != nil {
		return err
	}

	info, err := images.Tag(c.ctx(), c.who.Tenant, req.Template, req.Reference,
		template.Image{Entrypoint: req.Entrypoint, Cmd: req.Cmd, Labels: req.Labels, Ports: req.Ports})
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, info)
}

func (a *API) pruneImages(c *call) error {
	images, err := a.shelf()
	if err != nil {
		return err
	}

	freed, removed, err := images.Prune(c.ctx(), c.who.Tenant)
	if err != nil {
		return err
	}

	if removed == nil {
		removed = []string{}
	}
	return c.answer(http.StatusOK, client.PruneResult{Removed: removed, FreedBytes: freed})
}

func (a *API) login(c *call) error {
	var req client.LoginRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	if req.Username == "" || req.Password == "" {
		return fault.New(fault.Invalid, "a login needs username and password")
	}
	images, err := a.shelf()
	if err != nil {
		return err
	}

	if err := images.Login(c.ctx(), c.who.Tenant, req.Registry, req.Username, req.Password); err != nil {
		return err
	}

	return c.nothing()
}

func (a *API) registries(c *call) error {
	images, err := a.shelf()
	if err != nil {
		return err
	}

	list, err := images.Logins(c.ctx(), c.who.Tenant)
	if err != nil {
		return err
	}

	if list == nil {
		list = []string{}
	}
	return c.answer(http.StatusOK, client.RegistryList{Registries: list})
}

func (a *API) logout(c *call) error {
	images, err := a.shelf()
	if err != nil {
		return err
	}

	if err := images.Logout(c.ctx(), c.who.Tenant, c.r.PathValue("registry")); err != nil {
		return err
	}

	return c.nothing()
}
