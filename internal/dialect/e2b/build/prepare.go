package build

import (
	"context"
	"errors"
	"path"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// What builds expect of whatever they start from.
const (
	defaultUser    = "user"
	defaultWorkdir = "/home/user"
)

// furnishFor is how long an image may take to be made ready, which is a moment's work, but done by programs of the image.
const furnishFor = 5 * time.Minute

// Where sudo is looked for, and where it is.
const (
	sudoPath = "/usr/bin/sudo"
	ourSudo  = "/run/cove/bin/sudo"
)

// prepare makes what builds expect of a container image, once: the next build from it finds the layer. Layers above it have
// keys of the image's own digest, so that they hold when this one is made again.
func (b *Builder) prepare(ctx context.Context, j *job, from base) (base, error) {
	if !from.bare {
		return from, nil
	}
	select {
	case j.shelf.preparing <- struct{}{}:
		defer func() { <-j.shelf.preparing }()
	case <-ctx.Done():
		return base{}, context.Cause(ctx)
	}
	key := digest("prepared", from.digest)
	l := j.shelf.layer(key)
	if l != nil {
		if _, err := b.templates.Resolve(ctx, j.who.Tenant, l.Domain); err != nil {
			l = nil
		}
	}
	if l == nil {
		var err error
		if l, err = b.makePrepared(ctx, j, from, key); err != nil {
			return base{}, err
		}
	} else {
		b.touch(ctx, j.shelf, l)
	}
	from.domain, from.setting, from.images = l.Domain, l.Setting.clone(), from.images+1
	return from, nil
}

func (b *Builder) makePrepared(ctx context.Context, j *job, from base, key string) (*layer, error) {
	s, err := b.open(ctx, j, from.domain, template.Limits{})
	if err != nil {
		return nil, err
	}
	defer b.kill(j.who, s.id)
	s.prefix = "[base]"
	if err := s.furnish(ctx, from.name); err != nil {
		return nil, s.explain(ctx, err)
	}
	s.setting = setting{Env: from.setting.Env, User: defaultUser, Workdir: defaultWorkdir}
	return b.putLayer(ctx, j, s, key, sandbox.SnapshotSpec{
		Description: "image " + from.name, Env: s.setting.Env, User: defaultUser, Workdir: defaultWorkdir, Sudo: true,
	})
}

// furnish readies an image, which may take its time: some of it is done by programs of the image.
func (s *site) furnish(ctx context.Context, image string) error {
	late := fault.New(fault.Invalid, "it took longer than %v", furnishFor)
	ctx, cancel := context.WithTimeoutCause(ctx, furnishFor, late)
	defer cancel()
	err := s.equip(ctx)
	if err != nil && errors.Is(context.Cause(ctx), late) {
		err = late
	}
	return wrapStep(err, "image '%.200s' could not be made ready for builds", strings.TrimSpace(image))
}

// equip gives an image the user that E2B's templates have, and a way for it to become root: programs with the setuid bit do
// not work in a sandbox, so that an image's own sudo would not.
func (s *site) equip(ctx context.Context) error {
	if err := s.makeUser(ctx, defaultUser, 1000); err != nil {
		return err
	}
	if err := s.makeDir(ctx, path.Dir(defaultWorkdir), "root"); err != nil {
		return err
	}
	if err := s.makeDir(ctx, defaultWorkdir, defaultUser); err != nil { // the image's own user of that name may have another home
		return err
	}
	return s.link(ctx, ourSudo, sudoPath, "root")
}
