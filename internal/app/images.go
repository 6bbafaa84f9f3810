package app

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// openImages builds who brings container images in.
func (s *Server) openImages(store *sqlstore.Store, p parts) (*image.Service, error) {
	c := s.cfg.Images
	mapped := map[string]string{}
	for pattern, name := range c.Map {
		if name != "" { // the operator wants the image itself
			mapped[pattern] = name
		}
	}
	var driver sandbox.Puller
	if caps := p.driver.Caps(); caps.Images || caps.Pulls {
		driver, _ = p.driver.(sandbox.Puller)
	}
	service, err := image.Open(image.Config{
		Dir: filepath.Join(stateDir(s.cfg.DataDir), "images"), KeyFile: filepath.Join(stateDir(s.cfg.DataDir), "registry_key"),
		Platform: s.imagePlatform(), Operator: Tenant, DockerConfig: dockerConfig(c.DockerConfig), Map: mapped, Mirrors: c.Mirrors, Insecure: c.Insecure,
		MaxBytes: int64(c.MaxBytes), PullTimeout: c.PullTimeout, MaxTenantBytes: int64(c.MaxTenant),
		MaxFiles: c.MaxFiles, MaxTenantFiles: c.MaxTenantFiles,
		Pulls: s.imagePulls(), Space: s.spaceCheck(),
	}, driver, imageTemplates{p.templates, p.driver}, store, s.log)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	s.undo.add("end pulls", func() error { service.Close(); return nil })
	return service, nil
}

// imagePlatform is that of the machines which sandboxes run on.
func (s *Server) imagePlatform() string {
	own := "linux/" + runtime.GOARCH
	if s.cfg.Driver == config.DriverKubernetes {
		return cmp.Or(s.cfg.Kubernetes.Images.Platform, own)
	}
	return own
}

// imagePulls is what is decided where nodes pull images.
func (s *Server) imagePulls() image.Pulls {
	if s.cfg.Driver != config.DriverKubernetes {
		return image.Pulls{}
	}
	return kubernetesPulls(s.cfg.Kubernetes.Images)
}

// dockerConfig is the file that `docker login` writes, where nobody names one and this process, which has given up root by
// now, may read it.
func dockerConfig(named string) string {
	if named != "" {
		return named
	}
	dir := os.Getenv("DOCKER_CONFIG")
	if home, err := os.UserHomeDir(); dir == "" && err == nil {
		dir = filepath.Join(home, ".docker")
	}
	file := filepath.Join(dir, "config.json")
	f, err := os.Open(file)
	if err != nil || !filepath.IsAbs(file) {
		return ""
	}
	_ = f.Close() // it was only opened
	return file
}

// imageTemplates are what images become.
type imageTemplates struct {
	templates
	driver sandbox.Driver
}

func (t imageTemplates) RemoveTemplate(ctx context.Context, tenant, name string) error {
	return t.driver.RemoveTemplate(ctx, tenant, name)
}

// coveImages is the image service in the words of our own API.
type coveImages struct{ *image.Service }

func (c coveImages) Pull(ctx context.Context, tenant string, r template.PullRequest) (client.ImageInfo, error) {
	i, err := c.Service.Pull(ctx, tenant, r)
	return imageInfo(i), err
}

func (c coveImages) Import(ctx context.Context, tenant, name string, archive io.Reader) ([]client.ImageInfo, error) {
	list, err := c.Service.Import(ctx, tenant, name, archive, nil)
	return imageInfos(list), err
}

func (c coveImages) List(ctx context.Context, tenant string) ([]client.ImageInfo, error) {
	list, err := c.Service.List(ctx, tenant)
	return imageInfos(list), err
}

func (c coveImages) Inspect(ctx context.Context, tenant, ref string) (client.ImageInfo, error) {
	i, err := c.Service.Inspect(ctx, tenant, ref)
	return imageInfo(i), err
}

func (c coveImages) Tag(ctx context.Context, tenant, name, ref string, config template.Image) (client.ImageInfo, error) {
	i, err := c.Service.Tag(ctx, tenant, name, ref, config)
	return imageInfo(i), err
}

func imageInfos(list []image.Info) []client.ImageInfo {
	out := make([]client.ImageInfo, len(list))
	for i, one := range list {
		out[i] = imageInfo(one)
	}
	return out
}

func imageInfo(i image.Info) client.ImageInfo {
	return client.ImageInfo{
		Reference: i.Reference, Digest: i.Digest, Template: i.Template, Platform: i.Platform, Created: i.Created, Pulled: i.Pulled,
		Bytes: i.Bytes, Layers: i.Layers, Entrypoint: i.Entrypoint, Cmd: i.Cmd, Env: i.Env, User: i.User, Workdir: i.Workdir,
		Labels: i.Labels, Ports: i.Ports,
	}
}
