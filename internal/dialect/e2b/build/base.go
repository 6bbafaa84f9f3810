package build

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// Images brings in the images that builds start from.
type Images interface {
	Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error)
}

// base is what a build starts from.
type base struct {
	domain  string
	digest  string
	images  int // disk images below
	setting setting
	start   *Start // what its sandboxes start; a template made from it does too, unless it says otherwise
	name    string // for the log
	bare    bool   // a container image as it came, or as somebody built it: nothing in it is as builds expect it
}

// ResolveBy lets templates that a build starts from be found by more names than the Builder knows. It is set before the
// Builder serves.
func (b *Builder) ResolveBy(f func(ctx context.Context, who auth.Principal, ref string) (Resolved, error)) {
	b.resolve = f
}

// baseOf finds the template that a build wants to start from; an image is brought in.
func (b *Builder) baseOf(ctx context.Context, j *job) (base, error) {
	from, name := j.want.FromTemplate, "template "+j.want.FromTemplate
	if j.want.FromImage != "" {
		name = j.want.FromImage
		var err error
		if from, err = b.standIn(ctx, j); err != nil {
			return base{}, err
		}
		if from == "" {
			return b.pulled(ctx, j)
		}
	}
	r, err := b.resolve(ctx, j.who, from)
	if err != nil {
		return base{}, err
	}
	t, err := b.templates.Resolve(ctx, j.who.Tenant, r.Template)
	if err != nil {
		return base{}, fmt.Errorf("resolve template: %w", err)
	}
	set := setting{Env: r.Env, User: cmp.Or(r.User, t.User), Workdir: cmp.Or(r.Workdir, t.Workdir)}
	return base{domain: r.Template, digest: t.Digest, images: len(t.Images()), setting: set, start: r.Start, name: name}, nil
}

// standIn is the template that has what an image is asked for, or empty: then it is the image itself that is wanted.
func (b *Builder) standIn(ctx context.Context, j *job) (string, error) {
	repository, tag := shortName(j.want.FromImage)
	switch {
	case repository == "e2bdev/base":
		return "base", nil
	case repository == "e2bdev/code-interpreter":
		return "code-interpreter-v1", nil
	case repository != "python" || j.want.Login != nil:
		return "", nil
	}
	t, err := b.templates.Resolve(ctx, j.who.Tenant, builtIn["code-interpreter-v1"])
	if err != nil {
		return "", fmt.Errorf("resolve template: %w", err)
	}
	if fits(tag, t.Python.Version) {
		return "code-interpreter-v1", nil
	}
	return "", nil
}

// shortName is an image as people call it, without its digest.
func shortName(image string) (repository, tag string) {
	name := strings.TrimPrefix(strings.TrimPrefix(strings.TrimSpace(image), "docker.io/"), "library/")
	name, _, _ = strings.Cut(name, "@")
	repository, tag, _ = strings.Cut(name, ":")
	return repository, tag
}

var pythonTag = regexp.MustCompile(`^(3(?:\.\d+){0,2})(?:-[a-z0-9.-]+)?$`)

// fits tells whether a tag of the python image means an interpreter like the one that is there. Alpine has another userland.
func fits(tag, version string) bool {
	if tag == "" || tag == "latest" || tag == "slim" {
		return version != ""
	}
	m := pythonTag.FindStringSubmatch(tag)
	return len(m) > 1 && strings.HasPrefix(version+".", m[1]+".") && !strings.Contains(tag, "alpine")
}

// pulled is an image of a registry. Another Python than the one asked for would not do, whatever the operator maps.
func (b *Builder) pulled(ctx context.Context, j *job) (base, error) {
	image := strings.TrimSpace(j.want.FromImage)
	repository, _ := shortName(image)
	user, password := j.want.Login.credentials()
	j.want.Login = nil // nobody needs it any more
	t, err := b.images.Ensure(ctx, j.who.Tenant, template.PullRequest{
		Reference: image, Username: user, Password: password, Refresh: j.want.Force, Unmapped: repository == "python", Progress: j.pulling(),
	})
	if err != nil {
		return base{}, err
	}
	return base{
		domain: t.Name, digest: t.Digest, images: len(t.Images()), name: image, bare: t.Image != nil && !t.Sudo,
		setting: setting{Env: t.Env, User: t.User, Workdir: t.Workdir},
	}, nil
}

// pulling tells of each part of an image that has come.
func (j *job) pulling() func(template.PullProgress) {
	return func(p template.PullProgress) {
		switch {
		case p.Step == template.PullResolve:
			j.book.say(levelInfo, stepBase, "[base] Pulling image "+j.want.FromImage)
		case p.Step == template.PullDone && p.Layer != "":
			j.book.say(levelInfo, stepBase, fmt.Sprintf("[base] Layer %.19s: %d KB", p.Layer, (p.Total+999)/1000))
		}
	}
}

// login is how a registry knows who pulls.
type login struct {
	Type           string      `json:"type"`
	Username       string      `json:"username"`
	Password       auth.Secret `json:"password"`
	ServiceAccount auth.Secret `json:"serviceAccountJson"`
}

func (l *login) validate() error {
	switch {
	case l == nil:
		return nil
	case l.Type == "registry" && l.Username != "" && l.Password != "", l.Type == "gcp" && l.ServiceAccount != "":
		return nil
	case l.Type == "registry" || l.Type == "gcp":
		return fault.New(fault.Invalid, "fromImageRegistry is not complete: type registry needs username and password, type gcp needs serviceAccountJson")
	case l.Type == "aws":
		return fault.New(fault.Unsupported, "keys of AWS are not served here: give what `aws ecr get-login-password` prints as the password of type registry, with the username AWS")
	}
	return fault.New(fault.Invalid, "unknown type %.40q of fromImageRegistry: use registry or gcp", l.Type)
}

// credentials are a name and a password; Google's registries take the key of a service account for one.
func (l *login) credentials() (user, password string) {
	switch {
	case l == nil:
		return "", ""
	case l.Type == "gcp":
		return "_json_key", string(l.ServiceAccount)
	}
	return l.Username, string(l.Password)
}
