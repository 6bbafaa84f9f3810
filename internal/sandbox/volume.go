package sandbox

import (
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// Volume is a tenant's disk that outlives sandboxes and can be in several of them at once.
type Volume struct {
	Name    string    `json:"name"`
	Bytes   int64     `json:"bytes"`          // how much fits; zero in a request: the server's default
	Used    int64     `json:"used,omitempty"` // bytes that it takes on the server's disk
	Created time.Time `json:"created,omitzero"`
	InUse   int       `json:"in_use,omitempty"` // sandboxes that have it
}

// Volumer is a driver that keeps volumes; Caps.Mounts says so.
type Volumer interface {
	Volumes(ctx context.Context, tenant string) ([]Volume, error)
	// MakeVolume makes an empty one; where there is one of that name, fault.Conflict.
	MakeVolume(ctx context.Context, tenant string, v Volume) (Volume, error)
	// RemoveVolume removes one with everything in it; while a sandbox has it, fault.Conflict.
	RemoveVolume(ctx context.Context, tenant, name string) error
}

// volumeName is a single name of a file, which every dialect's own rule for volumes fits into.
var volumeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// The sizes that a volume can have. The largest is no promise: space is taken as it is written.
const (
	minVolume = 16 << 20
	maxVolume = 4 << 40
)

// CheckVolumeName refuses what cannot be a volume's name.
func CheckVolumeName(name string) error {
	if !volumeName.MatchString(name) {
		return fault.New(fault.Invalid, "volume name %.70q: use up to 128 letters, digits, '.', '_' and '-', a letter or digit first", name)
	}
	return nil
}

// CheckVolumeSize refuses a size that no volume can have; zero is the server's default.
func CheckVolumeSize(bytes int64) error {
	if bytes != 0 && (bytes < minVolume || bytes > maxVolume) {
		return fault.New(fault.Invalid, "a volume has between 16 MiB and 4 TiB")
	}
	return nil
}

// Volumes are those of the caller's tenant, by name.
func (m *Manager) Volumes(ctx context.Context, p auth.Principal) ([]Volume, error) {
	v, leave, err := m.volumer()
	if err != nil {
		return nil, err
	}
	defer leave()
	all, err := v.Volumes(ctx, p.Tenant)
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	return all, nil
}

// CreateVolume makes an empty volume of the caller's tenant; zero bytes: as many as the server gives by default.
func (m *Manager) CreateVolume(ctx context.Context, p auth.Principal, name string, bytes int64) (Volume, error) {
	if err := firstError(CheckVolumeName(name), CheckVolumeSize(bytes)); err != nil {
		return Volume{}, err
	}
	v, leave, err := m.volumer()
	if err != nil {
		return Volume{}, err
	}
	defer leave()
	made, err := v.MakeVolume(ctx, p.Tenant, Volume{Name: name, Bytes: bytes})
	if err != nil {
		return Volume{}, fmt.Errorf("make volume %s: %w", name, err)
	}
	return made, nil
}

// RemoveVolume removes a volume of the caller's tenant with everything in it.
func (m *Manager) RemoveVolume(ctx context.Context, p auth.Principal, name string) error {
	if err := CheckVolumeName(name); err != nil {
		return err
	}
	v, leave, err := m.volumer()
	if err != nil {
		return err
	}
	defer leave()
	if err := v.RemoveVolume(ctx, p.Tenant, name); err != nil {
		return fmt.Errorf("remove volume %s: %w", name, err)
	}
	return nil
}

// wrapper is a driver that only looks at what passes to another.
type wrapper interface{ Unwrap() Driver }

func (m *Manager) volumer() (Volumer, func(), error) {
	d := m.driver
	for outer, ok := d.(wrapper); ok; outer, ok = d.(wrapper) {
		d = outer.Unwrap()
	}
	v, ok := d.(Volumer)
	if !ok || !m.driver.Caps().Mounts {
		return nil, nil, m.noMounts()
	}
	leave, err := m.enter()
	if err != nil {
		return nil, nil, err
	}
	return v, leave, nil
}

func (m *Manager) noMounts() error {
	return fault.New(fault.Unsupported, "the %s driver has neither volumes nor host paths", m.driver.Caps().Name)
}
