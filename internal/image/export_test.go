package image

import (
	"context"
	"net/netip"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Hurry makes tries follow each other at once, and a silent registry be noticed after d.
func (s *Service) Hurry(d time.Duration) {
	s.pause = func(int) time.Duration { return 0 }
	s.stall = d
}

func (s *Service) PartFile(tenant string, d v1.Hash) string { return s.partFile(tenant, d) }

func (s *Service) Sweep(now time.Time) { s.sweep(now) }

func CheckAddress(a netip.Addr, loopback bool) error {
	if loopback {
		return checkAddress(a, reachLoopback)
	}
	return checkAddress(a, reachAway)
}

func Matches(pattern, text string) bool { return matches(pattern, text) }

// Complete is a name in full, and the template that a map of patterns gives it.
func Complete(text string, patterns map[string]string) (full, mapped string, err error) {
	r, err := parseReference(text)
	if err != nil {
		return "", "", err
	}
	compiled, err := compilePatterns(patterns)
	if err != nil {
		return "", "", err
	}
	return r.String(), (&Service{patterns: compiled}).mapped(text, r), nil
}

func ParseRegistry(text string) (string, error) { return parseRegistry(text) }

// DockerConfig is what a config file has for a registry.
func DockerConfig(ctx context.Context, text []byte, registry string) (username, password string, err error) {
	c, err := parseDockerConfig(ctx, text, registry)
	return c.Username, c.Password, err
}

// Describe reads a manifest and a configuration as a pull does.
func Describe(manifest, config []byte, platform string) error {
	index, m, err := document{raw: manifest}.parse("x")
	if err != nil {
		return err
	}
	if index != nil {
		_, err := choose("x", index, platform)
		return err
	}
	_, err = describe("x", platform, "sha256:x", m, config)
	return err
}

// RemoveAfter is Remove with something that happens once it has found what to remove.
func (s *Service) RemoveAfter(ctx context.Context, tenant, ref string, between func()) error {
	found, err := s.find(ctx, tenant, ref)
	if err != nil {
		return err
	}
	between()
	for _, e := range found {
		if err := s.remove(ctx, tenant, e.name, e.ref.Template); err != nil {
			return err
		}
	}
	return nil
}

// ReadOn is what a caller hears when a file of ours cannot be read.
func ReadOn(ctx context.Context, f *os.File) error {
	return explain(ctx, "x", nil, (&download{file: f}).readOn(ctx))
}

// Restart is what a caller hears when a file of ours cannot be emptied.
func Restart(ctx context.Context, f *os.File) error {
	return explain(ctx, "x", nil, (&download{file: f}).restart())
}

// Archived says what an archive in a file is and how many images are in it.
func (s *Service) Archived(ctx context.Context, f *os.File) (string, int, error) {
	info, err := f.Stat()
	if err != nil {
		return "", 0, err
	}
	a := &archive{file: f, size: info.Size(), diff: digestOf(nil)}
	if err := a.index(ctx); err != nil {
		return "", 0, err
	}
	form, _ := a.form()
	all, err := s.images(ctx, a, "")
	return string(form), len(all), err
}

// MaxNames is how many names a tenant has for images that hosts pull.
const MaxNames = maxNames
