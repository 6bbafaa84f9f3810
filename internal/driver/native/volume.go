package native

import (
	"context"

	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

var _ sandbox.Volumer = (*Driver)(nil)

// Storage is the operator's word on paths of the host and on volumes.
type Storage = maker.StorageRules

// Reserve is how many bytes of a file system of that size stay free; asked is the operator's word, zero where there is none.
func Reserve(asked, total int64) int64 { return maker.Reserve(asked, total) }

// AllowStorage keeps the operator's word where root alone can write and the maker reads it. A server calls it while it is root.
func AllowStorage(dataDir string, s Storage) error { return maker.WriteStorage(dataDir, s) }

// AllowNetworks does the same with the operator's word on private networks.
func AllowNetworks(dataDir string, r policy.Rules) error { return maker.WriteNetworks(dataDir, r) }

// Volumes are those of a tenant.
func (d *Driver) Volumes(ctx context.Context, tenant string) ([]sandbox.Volume, error) {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpVolumes, Tenant: tenant})
	return r.Volumes, err
}

// MakeVolume makes an empty one.
func (d *Driver) MakeVolume(ctx context.Context, tenant string, v sandbox.Volume) (sandbox.Volume, error) {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpVolumeMake, Tenant: tenant, Volume: &v})
	if err != nil {
		return sandbox.Volume{}, err
	}
	if len(r.Volumes) != 1 {
		return sandbox.Volume{}, fault.New(fault.Internal, "the maker made a volume and does not say which")
	}
	return r.Volumes[0], nil
}

// RemoveVolume removes one that nobody uses.
func (d *Driver) RemoveVolume(ctx context.Context, tenant, name string) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpVolumeRemove, Tenant: tenant, Volume: &sandbox.Volume{Name: name}})
	return err
}
