package image

import (
	"cmp"
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/covehq/cove/internal/fault"
)

// Docker Hub has one name that people write and another that its API has.
const (
	hub     = "docker.io"
	hubHost = name.DefaultRegistry
)

const maxReference = 1024

// reference is an image's name, complete.
type reference struct {
	registry   string // docker.io, ghcr.io, localhost:5000
	repository string // library/python
	tag        string // or digest
	digest     string
}

// parseReference completes a name as Docker does: the hub's library and the tag latest are what nobody writes.
func parseReference(text string) (reference, error) {
	bad := fault.New(fault.Invalid, "this is not the name of an image; one is like python:3.12-slim or ghcr.io/owner/name@sha256:…")
	if len(text) > maxReference {
		return reference{}, bad
	}
	// A name is repeated to its caller and in logs; what looks like user:password@host never is.
	if at, rest, ok := strings.Cut(text, "@"); ok && (at == "" || !strings.HasPrefix(rest, "sha256:")) {
		return reference{}, bad
	}
	parsed, err := name.ParseReference(text, name.WeakValidation)
	if err == nil {
		err = checkName(parsed.Context())
	}
	if err != nil {
		return reference{}, fault.Wrap(fault.Invalid, err, "%q is not the name of an image; one is like python:3.12-slim or ghcr.io/owner/name@sha256:…", text)
	}
	r := reference{registry: showRegistry(parsed.Context().RegistryStr()), repository: parsed.Context().RepositoryStr()}
	if d, ok := parsed.(name.Digest); ok {
		r.digest = d.DigestStr()
	} else {
		r.tag = parsed.Identifier()
	}
	return r, nil
}

// hostPattern is a host name or an address, with a port or without.
var hostPattern = regexp.MustCompile(`^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(:[0-9]{1,5})?$`)

// checkName refuses what would be another path, or none, in a request.
func checkName(r name.Repository) error {
	if !hostPattern.MatchString(r.RegistryStr()) {
		return errors.New("the registry is not a host")
	}
	for part := range strings.SplitSeq(r.RepositoryStr(), "/") {
		if strings.Trim(part, ".") == "" {
			return errors.New("a part of the name is empty")
		}
	}
	return nil
}

func (r reference) String() string {
	if r.digest != "" {
		return r.pinned(r.digest)
	}
	return r.registry + "/" + r.repository + ":" + r.tag
}

// pinned is the name of one manifest in the same place.
func (r reference) pinned(digest string) string {
	return r.registry + "/" + r.repository + "@" + digest
}

// identifier is what its registry knows the manifest by.
func (r reference) identifier() string { return cmp.Or(r.digest, r.tag) }

// familiar is the shortest that means the same, but for the tag.
func (r reference) familiar() string {
	short := r.repository
	if r.registry == hub {
		short = strings.TrimPrefix(short, "library/")
	} else {
		short = r.registry + "/" + short
	}
	if r.digest != "" {
		return short + "@" + r.digest
	}
	return short + ":" + r.tag
}

// showRegistry is a registry as people write it.
func showRegistry(host string) string {
	if host == hubHost || host == "registry-1.docker.io" {
		return hub
	}
	return host
}

// hostOf is where a registry's API answers.
func hostOf(registry string) string {
	if registry == hub {
		return hubHost
	}
	return registry
}

// parseRegistry takes a registry as people write it to log in: with a scheme or a path or without.
func parseRegistry(text string) (string, error) {
	host := strings.TrimPrefix(strings.TrimPrefix(text, "https://"), "http://")
	host, _, _ = strings.Cut(host, "/")
	if host == "" {
		host = hub
	}
	parsed, err := name.NewRegistry(host)
	if err != nil || len(text) > maxReference || !hostPattern.MatchString(host) {
		return "", fault.New(fault.Invalid, "this is not a registry; one is like ghcr.io or localhost:5000")
	}
	return showRegistry(parsed.RegistryStr()), nil
}

// templateName is how templates are named; an image's name that is longer than that is none.
var templateName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// pattern is a name of images with stars in it, and the template that stands for them.
type pattern struct {
	text     string
	template string
}

// compilePatterns puts the pattern first that says most.
func compilePatterns(from map[string]string) ([]pattern, error) {
	var all []pattern
	for _, text := range slices.Sorted(maps.Keys(from)) {
		if text == "" || len(text) > maxReference || from[text] == "" {
			return nil, fault.New(fault.Invalid, "the map of images needs a pattern and a template on each line, not %q = %q", text, from[text])
		}
		all = append(all, pattern{text, from[text]})
	}
	slices.SortStableFunc(all, func(a, b pattern) int {
		return cmp.Compare(literals(b.text), literals(a.text))
	})
	return all, nil
}

func literals(pattern string) int { return len(pattern) - strings.Count(pattern, "*") }

// mapped is the template that stands for an image, or "". A digest is never mapped: whoever writes one wants these bytes.
func (s *Service) mapped(text string, r reference) string {
	if r.digest != "" {
		return ""
	}
	names := []string{text, r.String(), r.familiar()}
	if r.tag == name.DefaultTag {
		names = append(names, strings.TrimSuffix(r.String(), ":"+r.tag), strings.TrimSuffix(r.familiar(), ":"+r.tag))
	}
	for _, p := range s.patterns {
		if slices.ContainsFunc(names, func(n string) bool { return matches(p.text, n) }) {
			return p.template
		}
	}
	return ""
}

// matches reports whether a text is one of a pattern's; a star is any text without a slash. It takes as many steps as
// the product of both lengths at most.
func matches(pattern, text string) bool {
	star, resume := -1, 0
	p, t := 0, 0
	for t < len(text) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, resume = p, t
			p++
		case p < len(pattern) && pattern[p] == text[t]:
			p++
			t++
		case star >= 0 && text[resume] != '/':
			resume++
			p, t = star+1, resume
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}
