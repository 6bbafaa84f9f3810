package router

import (
	"context"
	"net/http"
	"regexp"
	"strings"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// Clients of this dialect send no key on the way to a sandbox, and up to version 1.0 cannot be told to. What they can be given is
// a URL: so the secret is in its path.

// prefix is what such paths begin with; the token follows.
const prefix = "/agents/"

// purpose keeps these tokens apart from others of the same secret.
const purpose = "agent-sandbox-router"

// tokenForm is a tenant's name and what proves it.
var tokenForm = regexp.MustCompile(`^([a-z0-9][a-z0-9-]{0,62})\.([0-9a-f]{64})$`)

// Prefix is the beginning of every path by which a tenant's clients come without a key. It is good until the server's secret
// changes.
func (rt *Router) Prefix(p auth.Principal) string {
	return prefix + p.Tenant + "." + rt.tokens.Derive(purpose, p.Tenant)
}

func underPrefix(path string) bool { return strings.HasPrefix(path, prefix) }

// presented is what a path holds beside what it is for.
type presented struct {
	token string
	path  string // behind the prefix, escaped as it came; empty: there was no prefix
}

// takePrefix reads the token of a path, and hides it from whoever logs the request: they must not learn what would let them in.
func takePrefix(r *http.Request) presented {
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), prefix)
	if !ok {
		return presented{}
	}
	token, path, _ := strings.Cut(rest, "/")
	hidden := *r.URL
	hidden.Path, hidden.RawPath = prefix+"…/", ""
	r.URL = &hidden
	if token == "" {
		token = "none" // a path that has room for one must have one
	}
	return presented{token, "/" + path}
}

type principalKey struct{}

// WithPrincipal is the context of a connection that came through a tunnel whose client has shown who it is.
func WithPrincipal(ctx context.Context, p auth.Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// identify tells who is asking.
func (rt *Router) identify(r *http.Request, token string) (auth.Principal, error) {
	if token != "" {
		return rt.byToken(token)
	}
	if p, ok := r.Context().Value(principalKey{}).(auth.Principal); ok {
		return p, nil
	}
	key := r.Header.Get("X-Api-Key")
	if scheme, rest, _ := strings.Cut(r.Header.Get("Authorization"), " "); strings.EqualFold(scheme, "Bearer") {
		key = strings.TrimSpace(rest)
	}
	if key == "" {
		return auth.Principal{}, fault.New(fault.Unauthed,
			"who is asking? send an API key as Authorization: Bearer, or use the URL that `cove kubeconfig --router-url` prints")
	}
	return rt.keys.Authenticate(r.Context(), key)
}

func (rt *Router) byToken(token string) (auth.Principal, error) {
	parts := tokenForm.FindStringSubmatch(token)
	if len(parts) != 3 || !auth.Same(parts[2], rt.tokens.Derive(purpose, parts[1])) {
		return auth.Principal{}, fault.New(fault.Unauthed, "the token in the path is not valid; `cove kubeconfig --router-url` prints the URL anew")
	}
	return auth.Principal{Tenant: parts[1]}, nil
}
