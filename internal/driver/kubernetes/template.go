package kubernetes

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"

	"github.com/covehq/cove/internal/template"
)

// Template is one kind of Pod that sandboxes are made of.
type Template struct {
	Image        string
	PullPolicy   string // empty: the cluster's own choice
	PullSecrets  []string
	Description  string
	Pool         int // Pods that wait for a sandbox
	Env          map[string]string
	User         string // who commands run as in a looser Pod; empty: uid 1000
	UID          int    // of a hardened Pod's one user; zero: 1000
	GID          *int   // of its group; nil: as its uid
	Home         string // empty: /home/user
	Workdir      string // empty: the home
	Python       string // interpreter of kernels; empty: none
	Preload      []string
	Warmup       string
	UserSite     string
	CPUs         float64 // limit; requests are a part of it
	CPURequest   float64 // zero: a tenth of the limit
	Memory       int64
	MemRequest   int64 // zero: as much as the limit
	Disk         int64 // of everything that it writes
	WritableRoot bool  // the image's own files may be changed
	Writable     []string
	Looser       bool // root inside, with the capabilities that a container usually has, and sudo
	RuntimeClass string
	HostUsers    *bool // false: a user namespace of its own
	NodeSelector map[string]string
}

// The defaults of a template.
const (
	defaultUID    = 1000
	defaultHome   = "/home/user"
	defaultCPUs   = 1
	defaultMemory = 512 << 20
	defaultDisk   = 2 << 30
	maxPool       = 10_000
)

// writableDirs are those that every dialect writes to.
var writableDirs = []string{"/tmp", "/var/tmp", "/app", "/workspace", "/session", "/datasets", "/mnt"}

var templateName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,46}[a-z0-9])?$`)

// complete fills in what was left open and refuses what cannot be meant.
func (t Template) complete(name string) (Template, error) {
	if !templateName.MatchString(name) {
		return t, fmt.Errorf("template %q: a name has at most 48 characters, of a-z, 0-9, dots and dashes", name)
	}
	if t.Image == "" {
		return t, fmt.Errorf("template %s: image is missing", name)
	}
	if t.Pool < 0 || t.Pool > maxPool || t.CPUs < 0 || t.CPURequest < 0 || t.Memory < 0 || t.MemRequest < 0 || t.Disk < 0 || t.UID < 0 {
		return t, fmt.Errorf("template %s: no number can be negative, and a pool has at most %d Pods", name, maxPool)
	}
	t.UID = cmp.Or(t.UID, defaultUID)
	if t.GID == nil {
		t.GID = ptr(t.UID)
	}
	t.Home = cmp.Or(t.Home, defaultHome)
	t.Workdir = cmp.Or(t.Workdir, t.Home)
	t.User = cmp.Or(t.User, fmt.Sprint(t.UID))
	t.CPUs = cmp.Or(t.CPUs, defaultCPUs)
	t.CPURequest = min(cmp.Or(t.CPURequest, t.CPUs/10), t.CPUs)
	t.Memory = cmp.Or(t.Memory, defaultMemory)
	t.MemRequest = min(cmp.Or(t.MemRequest, t.Memory), t.Memory)
	t.Disk = cmp.Or(t.Disk, defaultDisk)
	t.Writable = slices.Compact(slices.Sorted(slices.Values(slices.Concat(writableDirs, []string{homeVolume(t.Home)}, t.Writable))))
	for _, dir := range t.Writable {
		if !path.IsAbs(dir) || path.Clean(dir) != dir || dir == "/" {
			return t, fmt.Errorf("template %s: %q is not the absolute path of a directory", name, dir)
		}
	}
	return t, nil
}

// homeVolume is where the volume is in which the program makes the home, so that it belongs to the sandbox's user.
func homeVolume(home string) string {
	if above := path.Dir(home); above != "/" {
		return above
	}
	return home
}

// limits are what a Pod of this template may use.
func (t Template) limits() template.Limits {
	return template.Limits{CPUs: t.CPUs, MemoryBytes: t.Memory, DiskBytes: t.Disk}
}

// kind is a template with its name, its digest and how the domain sees it.
type kind struct {
	Template
	name   string
	digest string
	domain *template.Template

	foreign bool     // the image is a tenant's
	seeds   []string // directories of the image's that are copied into the volumes in their place
}

// newKind needs everything that goes into a Pod: where any of it changes, so does the digest, and waiting Pods are replaced.
func newKind(name string, t Template, rest ...string) (*kind, error) {
	t, err := t.complete(name)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(struct {
		Name     string // pools of two templates that are otherwise alike are two
		Template Template
		Rest     []string
	}{name, withoutPool(t), rest})
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	k := &kind{Template: t, name: name, digest: hex.EncodeToString(sum[:8])}
	k.domain = &template.Template{
		Name: name, Digest: "sha256:" + hex.EncodeToString(sum[:]), Description: t.Description, Env: maps.Clone(t.Env), User: "user", Workdir: t.Workdir,
		Sudo: t.Looser, Limits: t.limits(),
		Python: template.Python{Executable: t.Python, Preload: slices.Clone(t.Preload), Warmup: t.Warmup, UserSite: t.UserSite},
	}
	return k, nil
}

// withoutPool is what a Pod is made from: how many there are does not change one.
func withoutPool(t Template) Template {
	t.Pool, t.Description = 0, ""
	return t
}
