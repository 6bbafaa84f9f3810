package opensandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Volume is something mounted into a sandbox: exactly one of the backends is there.
type Volume struct {
	Name      string          `json:"name"`
	MountPath string          `json:"mountPath"`
	ReadOnly  bool            `json:"readOnly"`
	SubPath   string          `json:"subPath"`
	Host      *HostVolume     `json:"host"`
	PVC       *ClaimVolume    `json:"pvc"`
	OSSFS     json.RawMessage `json:"ossfs"`
}

// HostVolume is a directory of the server's host.
type HostVolume struct {
	Path string `json:"path"`
}

// ClaimVolume is a named volume of the tenant's.
type ClaimVolume struct {
	ClaimName string `json:"claimName"`
	Create    *bool  `json:"createIfNotExists"` // absent: true
	Delete    bool   `json:"deleteOnSandboxTermination"`
	Storage   string `json:"storage"`
}

// wanted is a named volume that a create makes where it is not there.
type wanted struct {
	name   string
	bytes  int64 // zero: the server's default
	delete bool  // with the sandbox, if it was made for it
}

// Codes of what is wrong with a volume; the clients take all of them for invalid arguments.
const (
	volumeName        = "VOLUME::INVALID_NAME"
	volumeTwice       = "VOLUME::DUPLICATE_NAME"
	volumeBackend     = "VOLUME::INVALID_BACKEND"
	volumeUnsupported = "VOLUME::UNSUPPORTED_BACKEND"
	volumePath        = "VOLUME::INVALID_MOUNT_PATH"
	volumeSubPath     = "VOLUME::INVALID_SUB_PATH"
	volumeHostPath    = "VOLUME::INVALID_HOST_PATH"
	volumeClaim       = "VOLUME::INVALID_PVC_NAME"
	volumeDenied      = "VOLUME::HOST_PATH_NOT_ALLOWED"
	volumeNoHostPath  = "VOLUME::HOST_PATH_NOT_FOUND"
	volumeNoClaim     = "VOLUME::PVC_NOT_FOUND"
)

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

func badVolume(code, format string, args ...any) error {
	return told(http.StatusBadRequest, code, format, args...)
}

func parseVolumes(list []Volume) (mounts []sandbox.Mount, volumes []wanted, err error) {
	seen := map[string]bool{}
	for _, v := range list {
		if seen[v.Name] {
			return nil, nil, badVolume(volumeTwice, "two volumes have the name %.70q", v.Name)
		}
		seen[v.Name] = true
		m, err := v.mount()
		if err != nil {
			return nil, nil, err
		}
		mounts = append(mounts, m)
		if m.Kind == sandbox.MountVolume && m.Create {
			w := wanted{name: m.Source, delete: v.PVC.Delete}
			if v.PVC.Storage != "" {
				bytes, ok := ParseBytes(v.PVC.Storage)
				if !ok {
					return nil, nil, badVolume(volumeBackend, "volume %s: storage %.40q: write it as 512Mi or 10Gi", v.Name, v.PVC.Storage)
				}
				w.bytes = bytes
			}
			volumes = append(volumes, w)
		}
	}
	if err := sandbox.CheckMounts(mounts); err != nil { // sources were looked at above
		return nil, nil, withStatus(http.StatusBadRequest, volumePath, err)
	}
	return mounts, volumes, nil
}

// mount says a volume in the domain's words.
func (v Volume) mount() (sandbox.Mount, error) {
	if err := v.check(); err != nil {
		return sandbox.Mount{}, err
	}
	m := sandbox.Mount{SubPath: v.SubPath, Target: path.Clean(v.MountPath), ReadOnly: v.ReadOnly}
	if v.Host != nil {
		m.Kind, m.Source = sandbox.MountHost, path.Clean(v.Host.Path)
		return m, nil
	}
	m.Kind, m.Source = sandbox.MountVolume, v.PVC.ClaimName
	m.Create = v.PVC.Create == nil || *v.PVC.Create
	return m, nil
}

func (v Volume) check() error {
	backends := 0
	for _, there := range []bool{v.Host != nil, v.PVC != nil, given(v.OSSFS)} {
		if there {
			backends++
		}
	}
	switch {
	case !dnsLabel.MatchString(v.Name):
		return badVolume(volumeName, "volume name %.70q: use up to 63 lower-case letters, digits and '-'", v.Name)
	case backends != 1:
		return badVolume(volumeBackend, "volume %s: give exactly one of host, pvc and ossfs", v.Name)
	case given(v.OSSFS):
		return badVolume(volumeUnsupported, "volume %s: ossfs is not served here; use a host path or a named volume (pvc)", v.Name)
	case !path.IsAbs(v.MountPath) || strings.Contains(v.MountPath, "\x00"):
		return badVolume(volumePath, "volume %s: mountPath %.100q is not an absolute path", v.Name, v.MountPath)
	case badSubPath(v.SubPath):
		return badVolume(volumeSubPath, "volume %s: subPath %.100q is not a relative path without '..'", v.Name, v.SubPath)
	case v.Host != nil && (!path.IsAbs(v.Host.Path) || strings.Contains("/"+v.Host.Path+"/", "/../") || strings.Contains(v.Host.Path, "\x00")):
		return badVolume(volumeHostPath, "volume %s: host.path %.100q is not an absolute path without '..'", v.Name, v.Host.Path)
	case v.PVC != nil && sandbox.CheckVolumeName(v.PVC.ClaimName) != nil:
		return badVolume(volumeClaim, "volume %s: pvc.claimName %.100q: use up to 128 letters, digits, '.', '_' and '-'", v.Name, v.PVC.ClaimName)
	}
	return nil
}

func badSubPath(p string) bool {
	return p != "" && (path.IsAbs(p) || path.Clean(p) != p || p == ".." || strings.HasPrefix(p, "../") || strings.Contains(p, "\x00"))
}

// mountFault gives what a driver says of mounts the codes of volumes; nil: it says something else.
func (a *API) mountFault(ctx context.Context, who auth.Principal, spec sandbox.Spec, err error) error {
	code := ""
	switch kind := fault.KindOf(err); {
	case len(spec.Mounts) == 0:
	case kind == fault.Denied:
		code = volumeDenied
	case kind == fault.Unsupported:
		code = volumeUnsupported
	case kind == fault.NotFound:
		code = a.missingMount(ctx, who, spec.Mounts)
	}
	if code == "" {
		return nil
	}
	return withStatus(http.StatusBadRequest, code, err)
}

// missingMount is the code of what is not there: a volume that nobody may make, or else a host path; empty: neither.
func (a *API) missingMount(ctx context.Context, who auth.Principal, mounts []sandbox.Mount) string {
	volumes, err := a.sandboxes.Volumes(ctx, who)
	known := err == nil
	host := false
	for _, m := range mounts {
		named := func(v sandbox.Volume) bool { return v.Name == m.Source }
		if known && m.Kind == sandbox.MountVolume && !m.Create && !slices.ContainsFunc(volumes, named) {
			return volumeNoClaim
		}
		host = host || m.Kind == sandbox.MountHost
	}
	if host {
		return volumeNoHostPath
	}
	return ""
}

// mortal is the kind of document that names a volume which ends with its sandbox.
const mortal = "opensandbox.volume"

// makeVolumes makes the named volumes of a create that are not there, and notes which of them end with the sandbox: those
// that were there before are somebody's.
func (a *API) makeVolumes(ctx context.Context, who auth.Principal, pl *plan) error {
	for _, w := range pl.volumes {
		if w.bytes == 0 && !w.delete {
			continue // the driver makes it
		}
		if err := a.makeVolume(ctx, who, pl, w); err != nil {
			return err
		}
	}
	return nil
}

func (a *API) makeVolume(ctx context.Context, who auth.Principal, pl *plan, w wanted) error {
	if w.delete {
		a.tidyVolumes(ctx, who) // one of that name may be left of a sandbox that has ended
	}
	t := a.attend(who.Tenant)
	t.volumes.Lock()
	defer t.volumes.Unlock()
	_, err := a.sandboxes.CreateVolume(ctx, who, w.name, w.bytes)
	if fault.Is(err, fault.Conflict) {
		return nil
	}
	if err != nil {
		return cmp.Or(a.mountFault(ctx, who, pl.spec, err), err)
	}
	if !w.delete {
		return nil
	}
	pl.facts.Volumes = append(pl.facts.Volumes, w.name)
	return a.documents.PutDocument(ctx, who.Tenant, mortal, w.name, []byte(pl.spec.ID))
}

// tidyVolumes removes the volumes whose sandboxes have ended. One that another sandbox uses stays until that has ended too.
func (a *API) tidyVolumes(ctx context.Context, who auth.Principal) {
	t := a.attend(who.Tenant)
	t.volumes.Lock() // a volume of the same name may be made for another sandbox meanwhile
	defer t.volumes.Unlock()
	docs, err := a.documents.Documents(ctx, who.Tenant, mortal)
	if err != nil {
		if ctx.Err() == nil {
			a.log.Warn("volumes that end with their sandboxes are left for now", "tenant", who.Tenant, "error", err)
		}
		return
	}
	for _, d := range docs {
		if !a.departed(ctx, who, string(d.Body)) {
			continue
		}
		err := a.sandboxes.RemoveVolume(ctx, who, d.ID)
		if err == nil || fault.Is(err, fault.NotFound) {
			err = a.documents.DeleteDocument(ctx, who.Tenant, mortal, d.ID)
		}
		if err != nil && ctx.Err() == nil && !fault.Is(err, fault.Conflict) && !fault.Is(err, fault.NotFound) {
			a.log.Warn("a volume that ends with its sandbox is left for now", "volume", d.ID, "tenant", who.Tenant, "error", err)
		}
	}
}

// sweepVolumes removes what is left of everybody's sandboxes, also of tenants who have none any more, now and then again:
// what could not be removed at their end may go later.
func (a *API) sweepVolumes() {
	for {
		tenants, err := a.documents.DocumentOwners(a.life, mortal)
		if err != nil && a.life.Err() == nil {
			a.log.Warn("volumes that end with their sandboxes are left for now", "error", err)
		}
		for _, tenant := range tenants {
			a.tidyVolumes(a.life, auth.Principal{Tenant: tenant})
		}
		if !a.sleep(a.cfg.Sweep) {
			return
		}
	}
}

// departed tells whether a sandbox is there no more, and not about to be.
func (a *API) departed(ctx context.Context, who auth.Principal, id string) bool {
	if made := a.creations.find(who.Tenant, id); made != nil && !made.decided() {
		return false
	}
	sb, err := a.sandboxes.Get(ctx, who, id)
	if err != nil {
		return fault.Is(err, fault.NotFound)
	}
	return !sb.State.Living()
}
