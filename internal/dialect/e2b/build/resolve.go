package build

import (
	"context"
	"maps"
	"strings"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// Resolved is what a template of a caller is in the domain's words.
type Resolved struct {
	Template string // of the domain
	ID       string // as the caller knows it
	Alias    string
	Env      map[string]string // for every process of its sandboxes
	User     string            // default user; empty: the domain template's
	Workdir  string            // default working directory; empty: the domain template's
	Limits   template.Limits   // zero fields: the domain template's
	Start    *Start            // nil: nothing is started
}

// builtIn are the names that E2B's users expect everywhere.
var builtIn = map[string]string{
	"base":                "base",
	"code-interpreter-v1": "python",
}

// publicName is what a template of the operator is called towards E2B's users.
func publicName(domain string) string {
	for public, name := range builtIn {
		if name == domain {
			return public
		}
	}
	return domain
}

// Resolve finds the template that a reference means: of the caller's own first, then everybody's, then any that the
// domain knows by that name.
func (b *Builder) Resolve(ctx context.Context, who auth.Principal, text string) (Resolved, error) {
	r, err := parseRef(text)
	if err != nil {
		return b.resolveDomain(ctx, who, strings.TrimSpace(text), err)
	}
	s, err := b.shelf(ctx, who.Tenant)
	if err != nil {
		return Resolved{}, err
	}
	if e := s.find(r); e != nil {
		return s.resolve(e, r)
	}
	if r.namespace != "" && r.namespace != Namespace(who.Tenant) {
		return Resolved{}, errNoTemplate(text)
	}
	from, err := b.resolveShared(ctx, who, r.name, errNoTemplate(text))
	if err == nil && r.tag != "" && r.tag != defaultTag { // what no client has built has one build
		return Resolved{}, errNoTag(r.tag, r.name)
	}
	return from, err
}

// resolveShared takes a name as one that E2B's users expect everywhere, or as the domain's own.
func (b *Builder) resolveShared(ctx context.Context, who auth.Principal, name string, none error) (Resolved, error) {
	if domain, ok := builtIn[name]; ok {
		return Resolved{Template: domain, ID: name, Alias: name}, nil
	}
	return b.resolveDomain(ctx, who, name, none)
}

func errNoTag(tag, template string) error {
	return fault.New(fault.NotFound, "tag '%s' does not exist for template '%s'", tag, template)
}

// resolveDomain takes a name as the domain's own; snapshots have such.
func (b *Builder) resolveDomain(ctx context.Context, who auth.Principal, name string, none error) (Resolved, error) {
	if hidden(name) {
		return Resolved{}, none
	}
	_, err := b.templates.Resolve(ctx, who.Tenant, name)
	switch {
	case fault.Is(err, fault.NotFound):
		return Resolved{}, none
	case err != nil:
		return Resolved{}, err
	}
	return Resolved{Template: name, ID: name, Alias: name}, nil
}

// resolve gives what a tag of one of the tenant's templates names.
func (s *shelf) resolve(e *entry, r ref) (Resolved, error) {
	name := r.tag
	if name == "" {
		name = defaultTag
	}
	t, ok := e.Tags[name]
	m := s.build(t.Build)
	switch {
	case ok && m != nil && m.Domain != "":
	case r.tag != "":
		return Resolved{}, errNoTag(r.tag, e.Alias)
	default:
		return Resolved{}, fault.New(fault.NotFound, "template '%s' has no build that is ready", e.Alias)
	}
	s.used(e.ID)
	return Resolved{
		Template: m.Domain, ID: e.ID, Alias: e.Alias, Env: maps.Clone(m.Setting.Env), User: m.Setting.User,
		Workdir: m.Setting.Workdir, Limits: m.Limits, Start: m.Start,
	}, nil
}
