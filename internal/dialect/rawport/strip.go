package rawport

import (
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/auth"
)

// What runs behind a port may be hostile: it learns nothing that would let it act for its caller.

// StripCredentials removes this server's keys and tokens from a request before it goes to a sandbox's
// port:
//
//   - headers that carry only those, and our cookies
//   - values in their form, from headers and parameters that also carry keys of other services
//   - the caller's own key, and any key with our prefix, in every header and in the query
func StripCredentials(r *http.Request) {
	shown := presented(r)
	for _, name := range auth.OwnHeaders {
		r.Header.Del(name)
	}
	for _, name := range auth.SharedHeaders {
		without(r.Header, name, func(v string) bool { return len(auth.Digits(v)) > 0 })
	}
	stripPaths(r.Header)
	stripCookies(r.Header, shown)
	stripProtocols(r.Header, shown)
	for name := range r.Header {
		without(r.Header, name, shown.in)
	}
	r.URL.RawQuery = stripQuery(r.URL.RawQuery, shown)
}

// secrets are the digits of keys and tokens that a caller shows.
type secrets []string

// presented finds the keys and tokens of a request, where carriers have them.
func presented(r *http.Request) secrets {
	var found secrets
	for _, names := range [][]string{auth.OwnHeaders, auth.SharedHeaders} {
		for _, name := range names {
			for _, value := range r.Header[name] {
				found = append(found, auth.Digits(value)...)
			}
		}
	}
	for pair := range strings.SplitSeq(r.URL.RawQuery, "&") {
		if name, value := parameter(pair); auth.Carries(name) {
			found = append(found, auth.Digits(value)...)
		}
	}
	return found
}

// in reports whether a text holds one of the secrets, or any key with its prefix.
func (s secrets) in(text string) bool {
	return auth.HasKey(text) || slices.ContainsFunc(s, func(secret string) bool { return strings.Contains(text, secret) })
}

// parameter reads one pair of a query; what cannot be read stays as it is.
func parameter(pair string) (name, value string) {
	name, value, _ = strings.Cut(pair, "=")
	if plain, err := url.QueryUnescape(name); err == nil {
		name = plain
	}
	if plain, err := url.QueryUnescape(value); err == nil {
		value = plain
	}
	return name, value
}

// stripQuery leaves a query that carries nothing of ours exactly as it came.
func stripQuery(raw string, shown secrets) string {
	ours := func(pair string) bool {
		name, value := parameter(pair)
		return shown.in(pair) || shown.in(name) || shown.in(value) || auth.Carries(name) && len(auth.Digits(value)) > 0
	}
	pairs := strings.Split(raw, "&")
	if !slices.ContainsFunc(pairs, ours) {
		return raw
	}
	return strings.Join(slices.DeleteFunc(pairs, ours), "&")
}

// secretPath is the path of a page that was reached by a secret in it: a signed endpoint or a tenant's router URL.
var secretPath = regexp.MustCompile(`/sandboxes/[^/]*~|/agents/`)

// pathHeaders hold the path by which a request came: browsers and proxies in front of the server add
// them.
var pathHeaders = []string{
	"Referer", "X-Original-Url", "X-Original-Uri", "X-Original-Path", "X-Forwarded-Uri", "X-Forwarded-Path", "X-Forwarded-Url",
	"X-Rewrite-Url", "X-Request-Uri", "X-Envoy-Original-Path",
}

func stripPaths(h http.Header) {
	for _, name := range pathHeaders {
		without(h, name, secretPath.MatchString)
	}
}

// stripProtocols takes keys out of the subprotocols of a WebSocket, of which others may be needed.
func stripProtocols(h http.Header, shown secrets) {
	const name = "Sec-Websocket-Protocol"
	if !slices.ContainsFunc(h[name], shown.in) {
		return
	}
	var kept []string
	for _, line := range h[name] {
		for protocol := range strings.SplitSeq(line, ",") {
			if protocol = strings.TrimSpace(protocol); protocol != "" && !shown.in(protocol) {
				kept = append(kept, protocol)
			}
		}
	}
	h.Del(name)
	if len(kept) > 0 {
		h.Set(name, strings.Join(kept, ", "))
	}
}

// without removes the values for which ours returns true.
func without(h http.Header, name string, ours func(string) bool) {
	if !slices.ContainsFunc(h[name], ours) {
		return
	}
	kept := slices.DeleteFunc(slices.Clone(h[name]), ours)
	if len(kept) == 0 {
		h.Del(name)
		return
	}
	h[name] = kept
}

func stripCookies(h http.Header, shown secrets) {
	var kept []string
	for _, line := range h.Values("Cookie") {
		for pair := range strings.SplitSeq(line, ";") {
			name, value, _ := strings.Cut(pair, "=")
			name = strings.TrimSpace(name)
			ours := ourCookie(name) || shown.in(value) || auth.Carries(name) && len(auth.Digits(value)) > 0
			if pair = strings.TrimSpace(pair); pair != "" && !ours {
				kept = append(kept, pair)
			}
		}
	}
	h.Del("Cookie")
	if len(kept) > 0 {
		h.Set("Cookie", strings.Join(kept, "; "))
	}
}

// ourCookie knows a cookie of the server's own pages by its name.
func ourCookie(name string) bool {
	name = strings.ToLower(name)
	for _, prefix := range []string{"__host-", "__secure-"} {
		name = strings.TrimPrefix(name, prefix)
	}
	return name == "cove" || strings.HasPrefix(name, "cove_") || strings.HasPrefix(name, "cove-")
}

// forOrigin are headers with which a page speaks for all of its origin, which is ours but for a host name of its own.
var forOrigin = []string{
	"Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security", "Alt-Svc", "Nel", "Report-To", "Reporting-Endpoints",
	"Origin-Agent-Cluster", "Public-Key-Pins",
}

// modify keeps an answer from speaking for anybody but its port.
func modify(resp *http.Response) error {
	v := visitOf(resp.Request)
	resp.Header.Del("X-Request-Id") // the server says which request it is
	if v.Origin != OriginOwn {
		for _, name := range forOrigin {
			resp.Header.Del(name)
		}
		// An origin of its own, which is nobody's: scripts run, and reach neither our cookies nor our API.
		resp.Header.Add("Content-Security-Policy", "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
		resp.Header.Set("Referrer-Policy", "no-referrer") // its address may be what lets one in
	}
	NarrowCookies(resp.Header, v)
	return nil
}

// NarrowCookies keeps a port's cookies to itself: not for the domain above it, not for our paths, not under our names.
func NarrowCookies(h http.Header, v Visit) {
	lines := h.Values("Set-Cookie")
	if len(lines) == 0 {
		return
	}
	if v.Origin == OriginShared { // no path would keep them from our pages
		h.Del("Set-Cookie")
		return
	}
	var kept []string
	for _, line := range lines {
		c, err := http.ParseSetCookie(line)
		if err != nil || ourCookie(c.Name) {
			continue
		}
		if c.Domain != "" || v.Origin == OriginPath {
			c.Domain = ""
			if v.Origin == OriginPath {
				c.Path = v.Path
			}
			line = c.String()
		}
		if line != "" {
			kept = append(kept, line)
		}
	}
	h["Set-Cookie"] = kept
	if len(kept) == 0 {
		h.Del("Set-Cookie")
	}
}
