package build

import (
	"crypto/rand"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/fault"
)

// The grammar of names, as E2B's own API has it. Letters are folded to lower case before.
var (
	aliasForm = regexp.MustCompile(`^[a-z0-9_-]+$`)
	tagForm   = regexp.MustCompile(`^[a-z0-9_.-]+$`)
)

const (
	defaultTag = "default"
	maxName    = 128
	maxTags    = 64
)

// ref is a template as a caller names it.
type ref struct {
	namespace string // empty: the caller's own
	name      string // alias or id
	tag       string // empty: none was given
}

// parseRef reads [namespace/]name[:tag].
func parseRef(text string) (ref, error) {
	clean := strings.ToLower(strings.TrimSpace(text))
	bad := fault.New(fault.Invalid, "Invalid template name %.140q: use [namespace/]name[:tag] with letters, digits, '-' and '_' (and '.' in tags)", text)
	if clean == "" || len(clean) > 3*maxName {
		return ref{}, bad
	}
	var r ref
	rest, tag, tagged := strings.Cut(clean, ":")
	r.name, r.tag = rest, tag
	if ns, name, ok := strings.Cut(rest, "/"); ok {
		r.namespace, r.name = ns, name
		if !aliasForm.MatchString(ns) {
			return ref{}, bad
		}
	}
	if !aliasForm.MatchString(r.name) || len(r.name) > maxName || tagged && !tagForm.MatchString(tag) || len(tag) > maxName {
		return ref{}, bad
	}
	return r, nil
}

// parseTags folds tags to lower case, refuses bad ones and drops those that come twice.
func parseTags(tags []string) ([]string, error) {
	if len(tags) > maxTags {
		return nil, fault.New(fault.Invalid, "%d tags are too many; at most %d are allowed", len(tags), maxTags)
	}
	var out []string
	for _, t := range tags {
		clean := strings.ToLower(strings.TrimSpace(t))
		if !tagForm.MatchString(clean) || len(clean) > maxName {
			return nil, fault.New(fault.Invalid, "Invalid tag %.140q: use letters, digits, '-', '_' and '.'", t)
		}
		if !slices.Contains(out, clean) {
			out = append(out, clean)
		}
	}
	return out, nil
}

var notInNamespace = regexp.MustCompile(`[^a-z0-9_-]+`)

// Namespace is what stands before the slash in the public names of a tenant's templates and snapshots.
func Namespace(tenant string) string {
	ns := strings.Trim(notInNamespace.ReplaceAllString(strings.ToLower(tenant), "-"), "-")
	if ns == "" {
		return "default"
	}
	return ns
}

// newTemplateID is a name that no alias is likely to be.
func newTemplateID() string { return strings.ToLower(rand.Text()[:20]) }

// newUUID is what E2B's clients parse a build's id as.
func newUUID() string {
	var u [16]byte
	_, _ = rand.Read(u[:]) // never fails since Go 1.24
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// Templates of the domain that builds make. Nobody names them but this package.
const (
	hiddenBuild = "e2b-build-"
	hiddenLayer = "e2b-layer-"
)

func hidden(name string) bool {
	return strings.HasPrefix(name, hiddenBuild) || strings.HasPrefix(name, hiddenLayer)
}
