package cove

import (
	"context"
	"net/http"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Volumes is what the API asks of whoever keeps volumes.
type Volumes interface {
	Volumes(ctx context.Context, p auth.Principal) ([]sandbox.Volume, error)
	CreateVolume(ctx context.Context, p auth.Principal, name string, bytes int64) (sandbox.Volume, error)
	RemoveVolume(ctx context.Context, p auth.Principal, name string) error
}

// SetVolumes lets the API answer for volumes. It is set before the API serves.
func (a *API) SetVolumes(v Volumes) { a.volumes = v }

var errNoVolumes = fault.New(fault.Unsupported, "this server keeps no volumes")

func (a *API) listVolumes(c *call) error {
	if a.volumes == nil {
		return errNoVolumes
	}

	list, err := a.volumes.Volumes(c.ctx(), c.who)
	if err != nil {
		return err
	}

	out := client.VolumeList{Volumes: make([]client.Volume, len(list))}
	for i := range list {
		out.Volumes[i] = wireVolume(&list[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) createVolume(c *call) error {
	var req client.VolumeRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	if a.volumes == nil {
		return errNoVolumes
	}

	v, err := a.volumes.CreateVolume(c.ctx(), c.who, req.Name, req.Bytes)
	if err != nil {
		return err
	}

	c.w.Header().Set("Location", Prefix+"/volumes/"+v.Name)
	return c.answer(http.StatusCreated, wireVolume(&v))
}

func (a *API) removeVolume(c *call) error {
	if a.volumes == nil {
		return errNoVolumes
	}

	if err := a.volumes.RemoveVolume(c.ctx(), c.who, c.r.PathValue("name")); err != nil {
		return err
	}

	return c.nothing()
}

func wireVolume(v *sandbox.Volume) client.Volume {
	return client.Volume{Name: v.Name, Bytes: v.Bytes, UsedBytes: v.Used, CreatedAt: v.Created, Sandboxes: v.InUse}
}

func mountsOf(list []client.Mount) ([]sandbox.Mount, error) {
	var out []sandbox.Mount
	for _, m := range list {
		kind := sandbox.MountKind(m.Kind)
		switch kind {
		case "":
			kind = sandbox.MountVolume
		case sandbox.MountVolume, sandbox.MountHost:
		default:
			return nil, fault.New(fault.Invalid, "unknown kind of mount %.40q: use volume or host", m.Kind)
		}
		out = append(out, sandbox.Mount{Kind: kind, Source: m.Source, SubPath: m.SubPath, Target: m.Target, ReadOnly: m.ReadOnly, Create: m.Create})
	}
	return out, nil
}

func wireMounts(list []sandbox.Mount) []client.Mount {
	var out []client.Mount
	for _, m := range list {
		if m.Kind == sandbox.MountData {
			continue // the server's own, and told with the session
		}
		out = append(out, client.Mount{Kind: string(m.Kind), Source: m.Source, SubPath: m.SubPath, Target: m.Target, ReadOnly: m.ReadOnly, Create: m.Create})
	}
	return out
}
