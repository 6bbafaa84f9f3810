package image

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// kindRef is the kind of documents that give a tenant's images their names; their ids are names in full.
const kindRef = "image-ref"

// buildPrefix begins the names of templates that builds of images make.
const buildPrefix = "bld-"

// ref is what a name stands for.
type ref struct {
	Template string          `json:"template"`
	Top      string          `json:"top,omitempty"` // digest of what the registry has under the name: a manifest or an index
	Pulled   time.Time       `json:"pulled"`
	Image    *template.Image `json:"image,omitempty"` // of a build, where it differs from the template's own
}

// entry is a name of a tenant's with all that is known of it.
type entry struct {
	name     string
	ref      ref
	template *template.Template // with image in it
	image    template.Image
}

func (e *entry) info() Info {
	i := e.image
	return Info{
		Reference: e.name, Digest: i.Digest, Template: e.ref.Template, Platform: i.Platform, Created: i.Created, Pulled: e.ref.Pulled,
		Bytes: i.Bytes, Layers: slices.Clone(i.Layers), Entrypoint: i.Entrypoint, Cmd: i.Cmd, Env: e.template.Env,
		User: e.template.User, Workdir: e.template.Workdir, Labels: i.Labels, Ports: i.Ports,
	}
}

// entry finds a name; one whose template is gone is fault.NotFound like one that nobody gave.
func (s *Service) entry(ctx context.Context, tenant, name string) (*entry, error) {
	body, err := s.documents.Document(ctx, tenant, kindRef, name)
	if fault.Is(err, fault.NotFound) {
		return nil, notHere(name)
	}
	if err != nil {
		return nil, err
	}
	return s.read(ctx, tenant, name, body)
}

func notHere(name string) error {
	return fault.New(fault.NotFound, "there is no image %s here", name)
}

func (s *Service) read(ctx context.Context, tenant, name string, body []byte) (*entry, error) {
	return readEntry(name, body, func(template string) (*template.Template, error) { return s.templates.Resolve(ctx, tenant, template) })
}

func readEntry(name string, body []byte, resolve func(name string) (*template.Template, error)) (*entry, error) {
	var r ref
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	t, err := resolve(r.Template)
	if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Unavailable) {
		return nil, notHere(name)
	}
	if err != nil {
		return nil, err
	}
	return newEntry(name, r, t), nil
}

// newEntry puts a build's own configuration in the place of the one that lies below it.
func newEntry(name string, r ref, t *template.Template) *entry {
	e := &entry{name: name, ref: r, template: t}
	switch {
	case r.Image != nil:
		e.image = *r.Image
		own := *t // callers share the template
		own.Image = &e.image
		e.template = &own
	case t.Image != nil:
		e.image = *t.Image
	}
	return e
}

// lockNames keeps the names of a tenant, and the templates that they stand for, as they are for everybody else in this process. Whoever makes
// or finds a template to give it a name does both under one lock: in between it would have no name, and be removed for that. Where several
// servers share documents one may remove what another is about to name; the next pull makes it again.
func (s *Service) lockNames(ctx context.Context, tenant string) (free func(), err error) {
	return s.lock(ctx, "names "+tenant)
}

// name gives a template a name. The caller has locked the names before it made or found the template.
func (s *Service) name(ctx context.Context, tenant, name, top string, t *template.Template, image *template.Image) (*entry, error) {
	r := ref{Template: t.Name, Top: top, Pulled: time.Now().UTC(), Image: image}
	body, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	if s.remote() && len(body) > maxNameText {
		return nil, fault.New(fault.Invalid, "what the name %s is given is too large: its commands, labels and ports may have %d KB", name, maxNameText>>10)
	}
	if err := s.canName(ctx, tenant, name); err != nil {
		return nil, err
	}
	if err := s.documents.PutDocument(ctx, tenant, kindRef, name, body); err != nil {
		return nil, err
	}
	return newEntry(name, r, t), nil
}

// addImage makes the template of an image and names it. The caller has begun.
func (s *Service) addImage(ctx context.Context, tenant, name, top string, b blueprint) (*entry, error) {
	free, err := s.lockNames(ctx, tenant)
	if err != nil {
		return nil, err
	}
	defer free()
	if err := s.admit(ctx, tenant, name, b); err != nil {
		return nil, err
	}
	if err := s.canName(ctx, tenant, name); err != nil {
		return nil, err
	}
	b.add.Tenant = tenant
	t, err := s.adder.AddImage(ctx, b.add)
	if err != nil {
		return nil, fmt.Errorf("template of image %s: %w", name, err)
	}
	// What the driver has made is of no use, and must have no name, where this process cannot read it.
	if _, err := s.templates.Resolve(ctx, tenant, t.Name); fault.Is(err, fault.NotFound) {
		if s.remote() {
			return nil, fault.Wrap(fault.Unavailable, err, "image %s was removed while it was added; try again", name)
		}
		return nil, fault.Wrap(fault.Internal, err, "image %s was unpacked, but the server cannot read its template; the operator has to let the server's user read the directory of templates", name)
	} else if err != nil {
		return nil, err
	}
	return s.name(ctx, tenant, name, top, t, nil)
}

// nameKnown names a template that the tenant has; without one it is fault.NotFound.
func (s *Service) nameKnown(ctx context.Context, tenant, name, top, templateName string) (*entry, error) {
	free, err := s.lockNames(ctx, tenant)
	if err != nil {
		return nil, err
	}
	defer free()
	t, err := s.templates.Resolve(ctx, tenant, templateName)
	if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Unavailable) {
		return nil, notHere(name)
	}
	if err != nil {
		return nil, err
	}
	return s.name(ctx, tenant, name, top, t, nil)
}

// Tag gives one of the tenant's templates the name of an image. Of config, the parts that a template does not have itself are
// kept: entrypoint, command, labels, ports and time.
func (s *Service) Tag(ctx context.Context, tenant, templateName, name string, config template.Image) (Info, error) {
	r, err := parseReference(name)
	if err != nil {
		return Info{}, err
	}
	if r.digest != "" {
		return Info{}, fault.New(fault.Invalid, "a digest is not a name that can be given")
	}
	free, err := s.lockNames(ctx, tenant)
	if err != nil {
		return Info{}, err
	}
	defer free()
	t, err := s.templates.Resolve(ctx, tenant, templateName)
	if err != nil {
		return Info{}, err
	}
	image := template.Image{Platform: s.cfg.Platform}
	if t.Image != nil {
		image = *t.Image
	}
	image.Reference = r.String()
	if t.Image == nil || t.Snapshot != nil {
		image.Digest = "sha256:" + strings.TrimPrefix(t.Digest, "sha256:")
	}
	image.Entrypoint, image.Cmd, image.Labels, image.Ports, image.Created = config.Entrypoint, config.Cmd, config.Labels, config.Ports, config.Created
	e, err := s.name(ctx, tenant, r.String(), "", t, &image)
	if err != nil {
		return Info{}, err
	}
	return e.info(), nil
}

// entries are all images of a tenant, by name.
func (s *Service) entries(ctx context.Context, tenant string) ([]*entry, error) {
	docs, err := s.documents.Documents(ctx, tenant, kindRef)
	if err != nil {
		return nil, err
	}
	known := map[string]*template.Template{} // many names may be one template's
	resolve := func(name string) (t *template.Template, err error) {
		if t = known[name]; t == nil {
			t, err = s.templates.Resolve(ctx, tenant, name)
			known[name] = t
		}
		return t, err
	}
	var all []*entry
	for _, d := range docs {
		e, err := readEntry(d.ID, d.Body, resolve)
		if fault.Is(err, fault.NotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b *entry) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// List is every image of a tenant under each of its names.
func (s *Service) List(ctx context.Context, tenant string) ([]Info, error) {
	all, err := s.entries(ctx, tenant)
	if err != nil {
		return nil, err
	}
	infos := make([]Info, 0, len(all))
	for _, e := range all {
		info := e.info()
		// An image may have many names, and say a lot: Inspect tells that of one.
		info.Env, info.Labels, info.Ports, info.Entrypoint, info.Cmd = nil, nil, nil, nil, nil
		infos = append(infos, info)
	}
	return infos, nil
}

// Inspect is one image: by a name, by a digest or the beginning of one, or by its template.
func (s *Service) Inspect(ctx context.Context, tenant, ref string) (Info, error) {
	found, err := s.find(ctx, tenant, ref)
	if err != nil {
		return Info{}, err
	}
	return found[0].info(), nil
}

// shortest is how much of a digest has to be given.
const shortest = 6

// find is the names that somebody means: one, or all of one image.
func (s *Service) find(ctx context.Context, tenant, text string) ([]*entry, error) {
	r, bad := parseReference(text)
	if bad == nil {
		if e, err := s.entry(ctx, tenant, r.String()); err == nil || !fault.Is(err, fault.NotFound) {
			return []*entry{e}, err
		}
	}
	all, err := s.entries(ctx, tenant)
	if err != nil {
		return nil, err
	}
	var found []*entry
	for _, e := range all {
		if e.is(text) {
			found = append(found, e)
		}
	}
	switch {
	case len(found) == 0 && bad != nil && !isHex(strings.TrimPrefix(text, "sha256:")):
		return nil, bad
	case len(found) == 0 && bad != nil:
		return nil, notHere(text)
	case len(found) == 0:
		return nil, notHere(r.String())
	}
	for _, e := range found {
		if e.ref.Template != found[0].ref.Template {
			return nil, fault.New(fault.Conflict, "several images begin with %s; give more of the digest", text)
		}
	}
	return found, nil
}

// is reports whether a text stands for an image without being its name.
func (e *entry) is(text string) bool {
	if text == e.ref.Template {
		return true
	}
	part := strings.TrimPrefix(text, "sha256:")
	if len(part) < shortest || !isHex(part) {
		return false
	}
	for _, id := range []string{strings.TrimPrefix(e.image.Digest, "sha256:"), strings.TrimPrefix(e.image.Config, "sha256:"), strings.TrimPrefix(e.ref.Template, imagePrefix)} {
		if strings.HasPrefix(id, part) {
			return true
		}
	}
	return false
}

func isHex(s string) bool { return s != "" && strings.Trim(s, "0123456789abcdef") == "" }

// Remove takes a name away from an image, or all names by a digest. The template goes with the last of them; what runs from
// it goes on.
func (s *Service) Remove(ctx context.Context, tenant, ref string) error {
	found, err := s.find(ctx, tenant, ref)
	if fault.Is(err, fault.NotFound) {
		return s.removeUnusable(ctx, tenant, ref, err)
	}
	if err != nil {
		return err
	}
	for _, e := range found {
		if err := s.remove(ctx, tenant, e.name, e.ref.Template); err != nil {
			return err
		}
	}
	_, err = s.pruneLayers(ctx)
	return err
}

// removeUnusable takes away a name whose template is there and cannot be used any more; without one, it has the error that there is none.
func (s *Service) removeUnusable(ctx context.Context, tenant, text string, none error) error {
	name, err := parseReference(text)
	if err != nil {
		return none
	}
	r, err := s.ref(ctx, tenant, name.String())
	switch {
	case fault.Is(err, fault.NotFound):
		return none
	case err != nil:
		return err
	}
	return s.remove(ctx, tenant, name.String(), r.Template)
}

// ref is what a name stands for.
func (s *Service) ref(ctx context.Context, tenant, name string) (r ref, err error) {
	body, err := s.documents.Document(ctx, tenant, kindRef, name)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, fmt.Errorf("image %s: %w", name, err)
	}
	return r, nil
}

// remove takes one name away, unless it stands for something else by now.
func (s *Service) remove(ctx context.Context, tenant, name, of string) error {
	free, err := s.lockNames(ctx, tenant)
	if err != nil {
		return err
	}
	defer free()
	now, err := s.ref(ctx, tenant, name)
	switch {
	case fault.Is(err, fault.NotFound): // somebody else was faster
		return nil
	case err != nil:
		return err
	case now.Template != of:
		return nil
	}
	named, err := s.named(ctx, tenant)
	if err != nil {
		return err
	}
	// The template first: a name that stands for nothing is as good as none.
	if named[of] == 1 {
		if err := s.removeTemplate(ctx, tenant, of); err != nil {
			return err
		}
	}
	if err := s.documents.DeleteDocument(ctx, tenant, kindRef, name); err != nil && !fault.Is(err, fault.NotFound) {
		return err
	}
	return nil
}

// removeTemplate removes a template if it is the tenant's own. What others are made from stays until they are gone; Prune finds it then.
func (s *Service) removeTemplate(ctx context.Context, tenant, name string) error {
	t, err := s.templates.Resolve(ctx, tenant, name)
	if err == nil && t.Tenant != tenant {
		return nil
	}
	err = s.templates.RemoveTemplate(ctx, tenant, name)
	if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Conflict) || fault.Is(err, fault.Denied) {
		return nil
	}
	return err
}

// named counts the names that each template has.
func (s *Service) named(ctx context.Context, tenant string) (map[string]int, error) {
	docs, err := s.documents.Documents(ctx, tenant, kindRef)
	if err != nil {
		return nil, err
	}
	n := map[string]int{}
	for _, d := range docs {
		var r ref
		if err := json.Unmarshal(d.Body, &r); err != nil {
			return nil, fmt.Errorf("image %s: %w", d.ID, err)
		}
		n[r.Template]++
	}
	return n, nil
}
