package template

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/fault"
)

// Layers of container images lie in a directory that is root's alone, each by the digest of its content: whoever has the same
// layer has the same directory. A template of an image has a record in a directory of its tenant, as a snapshot has.

// MaxImageLayers is how many layers an image can have.
const MaxImageLayers = 127

// imageVersion changes when the same image would give another template.
const imageVersion = 1

// imagePath is what programs of an image are looked for in that does not say so itself.
const imagePath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// LayerTree is the directory in a layer's own that holds its files.
const LayerTree = "tree"

// ImagesDir is where layers of images lie.
func (s *Store) ImagesDir() string { return filepath.Join(s.options.Dir, "images") }

var diffIDPattern = regexp.MustCompile(`^sha256:([0-9a-f]{64})$`)

// LayerDir is the directory of a layer, whether it is there or not.
func (s *Store) LayerDir(diffID string) (string, error) {
	hex := diffIDPattern.FindStringSubmatch(diffID)
	if hex == nil {
		return "", fault.New(fault.Invalid, "%.100q is not the digest of a layer: sha256: and 64 hexadecimal digits", diffID)
	}
	return filepath.Join(s.ImagesDir(), hex[1]), nil
}

// NewImage is a template to be made of an image whose layers are there.
type NewImage struct {
	Tenant      string
	Name        string
	Description string
	Image       Image
	Env         map[string]string
	User        string
	Workdir     string
}

var (
	imageNamePattern = regexp.MustCompile(`^img-[0-9a-f]{32}$`)
	imageUserPattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?)?$`)
)

func (n NewImage) validate() error {
	switch {
	case n.Tenant == "" || !imageNamePattern.MatchString(n.Name):
		return fault.New(fault.Invalid, "the template of an image needs a tenant and a name of img- and 32 hexadecimal digits, not %q", n.Name)
	case len(n.Image.Layers) > MaxImageLayers:
		return fault.New(fault.Invalid, "image %s has %d layers, at most %d are possible", n.Image.Reference, len(n.Image.Layers), MaxImageLayers)
	case n.User != "" && !imageUserPattern.MatchString(n.User):
		return fault.New(fault.Invalid, "image %s names the user %.100q, which nobody can be", n.Image.Reference, n.User)
	case strings.ContainsRune(n.Workdir, 0) || len(n.Workdir) > 4000:
		return fault.New(fault.Invalid, "image %s names a working directory that cannot be", n.Image.Reference)
	}
	if err := CheckVolumes(&n.Image); err != nil {
		return err
	}
	for key, value := range n.Env {
		if key == "" || strings.ContainsAny(key, "=\x00") || strings.Contains(value, "\x00") {
			return fault.New(fault.Invalid, "image %s has a variable %.100q that no process can have", n.Image.Reference, key)
		}
	}
	return nil
}

// Bounds of the directories that an image may want as volumes: drivers write them down more than once.
const (
	MaxVolumePath  = 512
	maxVolumePaths = 8 << 10 // all of them together
)

// CheckVolumes refuses volumes at names that are too long.
func CheckVolumes(i *Image) error {
	all := 0
	for _, dir := range i.Volumes {
		if all += len(dir); len(dir) > MaxVolumePath || all > maxVolumePaths {
			return fault.New(fault.Unsupported, "image %s wants volumes at names that are too long: one may have %d bytes, and all together %d",
				i.Reference, MaxVolumePath, maxVolumePaths)
		}
	}
	return nil
}

// Template is what an image gives its sandboxes beyond its files.
func (n NewImage) Template() (*Template, error) {
	if err := n.validate(); err != nil {
		return nil, err
	}
	t := &Template{
		Name: n.Name, Description: n.Description, Tenant: n.Tenant, Env: map[string]string{"PATH": imagePath},
		User: cmp.Or(n.User, "root"), Workdir: path.Clean("/" + n.Workdir), Image: &n.Image,
	}
	maps.Copy(t.Env, n.Env)
	if t.Env["PATH"] == "" {
		t.Env["PATH"] = imagePath
	}
	return t, nil
}

// AddImage makes the template of an image. One that is there and the same is only returned.
func (s *Store) AddImage(ctx context.Context, n NewImage) (*Template, error) {
	if err := n.validate(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.layers(), 0o755); err != nil {
		return nil, err
	}
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if err != nil {
		return nil, err
	}
	defer unlock()
	t, err := s.imageTemplate(n)
	if err != nil {
		return nil, err
	}
	old, err := s.readSnapshot(n.Tenant, n.Name) // one of which a part is missing is made again
	switch {
	case err == nil && old != nil && old.Template.Snapshot != nil:
		return nil, fault.New(fault.Conflict, "there is a snapshot %s already; remove it first", n.Name)
	case err == nil && old != nil && old.Template.Digest == t.Digest:
		return old.Template, nil
	}
	if err := s.writeSnapshot(&record{Template: t}); err != nil {
		return nil, err
	}
	s.options.Log.Info("image added", "template", n.Name, "tenant", n.Tenant, "image", n.Image.Reference, "digest", t.Digest)
	return t, nil
}

// imageTemplate composes the template; the caller holds the lock.
func (s *Store) imageTemplate(n NewImage) (*Template, error) {
	t, err := n.Template()
	if err != nil {
		return nil, err
	}
	above, below, err := s.frame()
	if err != nil {
		return nil, err
	}
	lower := []string{above}
	for _, id := range slices.Backward(n.Image.Layers) {
		dir, err := s.LayerDir(id)
		if err != nil {
			return nil, err
		}
		at := filepath.Join(dir, LayerTree)
		if _, err := os.Stat(at); err != nil {
			return nil, fault.Wrap(fault.Conflict, err, "layer %s of image %s is not unpacked", id, n.Image.Reference)
		}
		// An overlay has each directory once, and the uppermost of two equal layers hides the other.
		if !slices.Contains(lower, at) {
			lower = append(lower, at)
		}
	}
	t.Trees = []Tree{{Target: "/", Lower: append(lower, below)}}
	t.Image.UID, t.Image.GID = s.imageUser(t)
	t.Digest = digestOf(struct {
		Version                 int
		Name, Image, Config     string
		Layers, Entrypoint, Cmd []string
		Env                     map[string]string
		User, Workdir           string
	}{imageVersion, n.Name, n.Image.Digest, n.Image.Config, n.Image.Layers, n.Image.Entrypoint, n.Image.Cmd, t.Env, t.User, t.Workdir})
	return t, nil
}

// What every container has whatever its image is: places to mount on below all layers, and above them the names of the sandbox
// itself, which images have of whoever built them.
var (
	frameDirs  = map[string]fs.FileMode{"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "etc": 0o755, "root": 0o700, "tmp": fs.ModeSticky | 0o777}
	frameFiles = map[string]string{
		"etc/hosts":       "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
		"etc/hostname":    "sandbox\n",
		"etc/resolv.conf": "", // the resolver's is mounted there
	}
)

// frame gives the uppermost and the lowest layer of every image, made at the first.
func (s *Store) frame() (above, below string, err error) {
	name := "frame-" + digestOf([]any{imageVersion, frameDirs, frameFiles})[:16]
	dir := filepath.Join(s.ImagesDir(), name)
	above, below = filepath.Join(dir, "above"), filepath.Join(dir, "below")
	if _, err := os.Stat(dir); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return above, below, err
	}
	if err := os.MkdirAll(s.ImagesDir(), 0o700); err != nil {
		return "", "", err
	}
	tmp, err := os.MkdirTemp(s.ImagesDir(), HalfUnpacked)
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(tmp)
	if err := fillFrame(filepath.Join(tmp, "above"), filepath.Join(tmp, "below")); err != nil {
		return "", "", err
	}
	if err := syncDir(tmp); err != nil {
		return "", "", err
	}
	return above, below, os.Rename(tmp, dir)
}

// HalfUnpacked is what the name of a layer begins with that is not whole.
const HalfUnpacked = ".unpacking-"

func fillFrame(above, below string) error {
	for _, dir := range []string{above, filepath.Join(above, "etc"), below} {
		if err := makeDir(dir, 0o755); err != nil {
			return err
		}
	}
	for name, mode := range frameDirs {
		if err := makeDir(filepath.Join(below, name), mode); err != nil {
			return err
		}
	}
	for name, text := range frameFiles {
		at := filepath.Join(above, name)
		if err := errors.Join(os.WriteFile(at, []byte(text), 0o644), os.Chmod(at, 0o644)); err != nil {
			return err
		}
	}
	return nil
}

// makeDir gives a directory its mode whatever the umask is.
func makeDir(at string, mode fs.FileMode) error {
	return errors.Join(os.Mkdir(at, 0o700), os.Chmod(at, mode))
}

// imageLayers are the names, in the directory of images, of what a template needs there.
func (s *Store) imageLayers(t *Template) []string {
	var names []string
	for _, tree := range t.Trees {
		for _, at := range tree.Lower {
			if rel, err := filepath.Rel(s.ImagesDir(), at); err == nil && filepath.IsLocal(rel) {
				first, _, _ := strings.Cut(rel, string(filepath.Separator))
				names = append(names, first)
			}
		}
	}
	return names
}

// PruneLayers takes layers of images out of the way that no record needs, none of the templates in use, and that keep does not
// want. It returns where they are now, for the caller to remove: that may take long and needs no lock. What is in use is asked
// for once nothing can be added any more, and stays so until it is released.
func (s *Store) PruneLayers(ctx context.Context, inUse func() (_ []*Template, release func()), keep func(name string) bool) (doomed []string, err error) {
	unlock, err := lockFile(ctx, s.built("lock"), func() {})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // nothing was ever added
	}
	if err != nil {
		return nil, err
	}
	defer unlock()
	recorded := s.recordedTemplates()
	used, release := inUse()
	defer release()
	needed := map[string]bool{}
	for _, t := range slices.Concat(used, recorded) {
		for _, name := range s.imageLayers(t) {
			needed[name] = true
		}
	}
	entries, err := os.ReadDir(s.ImagesDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		name := e.Name()
		if needed[name] || !diffIDPattern.MatchString("sha256:"+name) || keep(name) {
			continue
		}
		away := filepath.Join(s.ImagesDir(), HalfUnpacked+strings.ToLower(rand.Text()))
		if err := os.Rename(filepath.Join(s.ImagesDir(), name), away); err != nil {
			return doomed, err
		}
		doomed = append(doomed, away)
	}
	return doomed, nil
}

// recordedTemplates are those of every tenant.
func (s *Store) recordedTemplates() []*Template {
	var all []*Template
	tenants, _ := filepath.Glob(s.built("tenants", "*"))
	for _, dir := range tenants {
		for _, r := range s.snapshotRecords(dir) {
			all = append(all, r.Template)
		}
	}
	return all
}
