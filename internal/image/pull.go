package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// Ensure is the template that an image's name stands for: a template of that name, an image that the tenant has, what the
// operator's map says, and else what the registry has, which is pulled. What the tenant has pulled or imported itself comes
// before the map: that is how one gets the image that a mapped name has in its registry.
func (s *Service) Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error) {
	if r.Reference == "" {
		return nil, fault.New(fault.Invalid, "an image needs a name")
	}
	if templateName.MatchString(r.Reference) {
		if t, err := s.templates.Resolve(ctx, tenant, r.Reference); !fault.Is(err, fault.NotFound) {
			return t, err
		}
	}
	ref, err := parseReference(r.Reference)
	if err != nil {
		return nil, err
	}
	if err := s.checkPlatform(r.Platform); err != nil {
		return nil, err
	}
	known, err := s.entry(ctx, tenant, ref.String())
	if err == nil && !r.Refresh {
		return known.template, nil
	}
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, err
	}
	if name := s.mapped(r.Reference, ref); name != "" && known == nil && !r.Unmapped {
		if t, err := s.templates.Resolve(ctx, tenant, name); !fault.Is(err, fault.NotFound) {
			return t, err
		}
	}
	e, err := s.pull(ctx, tenant, ref, r)
	if err != nil {
		return nil, err
	}
	return e.template, nil
}

// Pull brings an image in from its registry, also one whose name the operator maps to a template.
func (s *Service) Pull(ctx context.Context, tenant string, r template.PullRequest) (Info, error) {
	ref, err := parseReference(r.Reference)
	if err != nil {
		return Info{}, err
	}
	if err := s.checkPlatform(r.Platform); err != nil {
		return Info{}, err
	}
	e, err := s.pull(ctx, tenant, ref, r)
	if err != nil {
		return Info{}, err
	}
	return e.info(), nil
}

// checkPlatform refuses what this host cannot run.
func (s *Service) checkPlatform(asked string) error {
	if asked == "" {
		return nil
	}
	parts := strings.Split(asked, "/") // a variant asks for less or more of the same processor
	if len(parts) < 2 || len(parts) > 3 {
		return fault.New(fault.Invalid, "a platform is written os/arch, like %s", s.cfg.Platform)
	}
	if parts[0]+"/"+parts[1] != s.cfg.Platform {
		return fault.New(fault.NotFound, "there is no image for %.100s here: this server runs images for %s and no others", asked, s.cfg.Platform)
	}
	return nil
}

// pull shares the work with whoever of the tenant's asks for the same with the same credentials.
func (s *Service) pull(ctx context.Context, tenant string, ref reference, r template.PullRequest) (*entry, error) {
	if err := s.canImage(); err != nil {
		return nil, err
	}
	creds, err := requested(r)
	if err != nil {
		return nil, err
	}
	if err := s.canPull(ref, creds); err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(creds.Username + "\x00" + creds.Password))
	key := strings.Join([]string{tenant, ref.String(), hex.EncodeToString(sum[:])}, "\x00")
	got, err := s.share(ctx, s.pulls, key, r.Progress, func(ctx context.Context, f *flight) (any, error) {
		e, err := s.perform(ctx, f, tenant, ref, creds)
		if err != nil {
			return nil, err
		}
		f.tell(template.PullProgress{Step: template.PullDone, Done: e.image.Bytes, Total: e.image.Bytes})
		return e, nil
	})
	if err != nil {
		return nil, leftEarly(ref, err)
	}
	return got.(*entry), nil
}

// leftEarly gives the end of a caller's patience its kind.
func leftEarly(ref reference, err error) error {
	var f *fault.Error
	if errors.Is(err, context.DeadlineExceeded) && !errors.As(err, &f) {
		return fault.Wrap(fault.Timeout, err, "pulling %s takes longer than it may; what came stays, and the next pull goes on from there", ref)
	}
	return err
}

// perform does the work of a pull.
func (s *Service) perform(ctx context.Context, f *flight, tenant string, ref reference, creds credentials) (*entry, error) {
	leave, err := s.crowd(s.pulling, tenant, "pulled")
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.PullTimeout)
	defer cancel()
	f.tell(template.PullProgress{Step: template.PullResolve})
	sources, err := s.sources(ctx, tenant, ref, creds)
	if err != nil {
		return nil, err
	}
	what := ref.String()
	if e, err := s.unchanged(ctx, tenant, sources, ref); e != nil || err != nil {
		return e, err
	}
	b, top, sources, err := s.resolve(ctx, sources, ref)
	if err != nil {
		return nil, err
	}
	if s.remote() {
		b.add.Name = imageName(ref.pinned(b.digest), s.cfg.Platform) // two names of one image are asked for at two places
	}
	defer s.begin()()
	// A tenant that has the template has had its layers.
	if e, err := s.nameKnown(ctx, tenant, what, top, b.add.Name); !fault.Is(err, fault.NotFound) {
		return e, err
	}
	if err := s.fits(what, b.layers); err != nil {
		return nil, err
	}
	if s.remote() {
		return s.addRemote(ctx, tenant, what, top, b)
	}
	if err := s.admit(ctx, tenant, what, b); err != nil {
		return nil, err
	}
	bytes, err := s.layers(ctx, tenant, what, b, s.bringer(tenant, what, sources, f.tell))
	if err != nil {
		return nil, err
	}
	b.add.Image.Bytes = bytes
	e, err := s.addImage(ctx, tenant, what, top, b)
	if err == nil {
		s.log.Info("image pulled", "tenant", tenant, "image", what, "digest", b.digest, "template", b.add.Name, "layers", len(b.layers), "bytes", bytes)
	}
	return e, err
}

// maxPulls is how many images a tenant can have on their way at once, and how many archives.
const maxPulls = 16

// crowd keeps one tenant from taking everybody's connections.
func (s *Service) crowd(coming map[string]int, tenant, how string) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if coming[tenant] >= maxPulls {
		return nil, fault.New(fault.Exhausted, "%d images are being %s for you already; wait until one is there", maxPulls, how)
	}
	coming[tenant]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if coming[tenant]--; coming[tenant] == 0 {
			delete(coming, tenant)
		}
	}, nil
}

// unchanged is the image that the tenant has under a tag, if its registry says that the tag still stands for the same;
// nil: it has to be asked for the whole manifest.
func (s *Service) unchanged(ctx context.Context, tenant string, from []*source, ref reference) (*entry, error) {
	e, err := s.entry(ctx, tenant, ref.String())
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	if err != nil || e.ref.Top == "" {
		return nil, err
	}
	if ref.digest != "" {
		return e, nil // which is what a digest is for
	}
	for _, o := range from {
		if o.open(ctx, s.network.mayPlain(o.host)) != nil {
			continue
		}
		if digest, err := o.head(ctx, ref.identifier()); err == nil {
			if digest == e.ref.Top {
				e, err := s.nameKnown(ctx, tenant, ref.String(), e.ref.Top, e.ref.Template)
				if fault.Is(err, fault.NotFound) { // it was removed meanwhile
					return nil, nil
				}
				return e, err
			}
			return nil, nil
		}
	}
	return nil, nil
}

// fits adds up what layers have, compressed.
func (s *Service) fits(what string, layers []v1.Descriptor) error {
	var all int64
	for _, d := range layers {
		if d.Size > s.cfg.MaxBytes-all {
			return tooLarge(what, s.cfg.MaxBytes)
		}
		all += d.Size
	}
	return nil
}

// resolve asks one source after the other what a name stands for. It returns the image for this host's platform, the digest
// of what the name itself stands for, and the sources that its layers are asked for at.
func (s *Service) resolve(ctx context.Context, from []*source, ref reference) (blueprint, string, []*source, error) {
	for i, o := range from {
		b, top, err := s.ask(ctx, o, ref)
		if err == nil {
			return b, top, from[i:], nil
		}
		if i == len(from)-1 || ctx.Err() != nil {
			return blueprint{}, "", nil, explain(ctx, ref.String(), o, err)
		}
		s.log.Info("mirror does not have the image", "registry", o.host, "image", ref.String(), "error", plainCause(err))
	}
	return blueprint{}, "", nil, fmt.Errorf("no source for %s", ref) // a registry is always one
}

func (s *Service) ask(ctx context.Context, o *source, ref reference) (blueprint, string, error) {
	var b blueprint
	var top string
	err := s.again(ctx, func() error {
		ctx, cancel := context.WithTimeout(ctx, askFor)
		defer cancel()
		if err := o.open(ctx, s.network.mayPlain(o.host)); err != nil {
			return err
		}
		d, err := o.manifest(ctx, ref.identifier())
		if err != nil {
			return err
		}
		top = d.digest
		m, digest, err := s.descend(ref.String(), d, func(digest string) (document, error) { return o.manifest(ctx, digest) })
		if err != nil {
			return err
		}
		if err := s.canFetch(ref.String(), m); err != nil {
			return err
		}
		config, err := o.small(ctx, m.Config.Digest.String(), m.Config.Size)
		if err != nil {
			return err
		}
		b, err = describe(ref.String(), s.cfg.Platform, digest, m, config)
		return err
	})
	return b, top, err
}

// askFor bounds a conversation about manifests, which are small.
const askFor = 2 * time.Minute

// descend goes from what a name stands for to the manifest for this host's platform.
func (s *Service) descend(what string, d document, get func(digest string) (document, error)) (*v1.Manifest, string, error) {
	for range maxNested {
		index, m, err := d.parse(what)
		if err != nil {
			return nil, "", err
		}
		if m != nil {
			return m, d.digest, nil
		}
		chosen, err := choose(what, index, s.cfg.Platform)
		if err != nil {
			return nil, "", err
		}
		if d, err = get(chosen.Digest.String()); err != nil {
			return nil, "", err
		}
	}
	return nil, "", fault.New(fault.Invalid, "%s is an index of indexes that does not end", what)
}

// again repeats a short conversation that was cut off.
func (s *Service) again(ctx context.Context, talk func() error) error {
	const tries = 3
	for attempt := 0; ; attempt++ {
		err := talk()
		if err == nil || attempt == tries-1 || ctx.Err() != nil || !cutOff(err) {
			return err
		}
		if err := sleep(ctx, s.pause(attempt)); err != nil {
			return err
		}
	}
}

func cutOff(err error) bool {
	code := status(err)
	return code >= 500 && code != http.StatusNotImplemented || code == http.StatusRequestTimeout ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
