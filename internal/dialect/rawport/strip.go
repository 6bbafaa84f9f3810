package rawport

import (
	"context"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/auth"
)

// What runs behind a port may be hostile: it learns nothing that would let it act for its caller.

// Keys knows which texts are keys of this server.
type Keys interface {
	// Known reports whether 40 hex digits are those of a key, or cannot be looked up before ctx
	// ends.
	Known(ctx context.Context, digits string) bool
}

const (
	// maxLookups is how many texts of one request are looked up. Values with further ones are
	// removed.
	maxLookups = 8
	// lookupTimeout is how long a request waits for all of its lookups.
	lookupTimeout = time.Second
)

// StripCredentials removes this server's keys and tokens from out before it goes to a sandbox's
// port. in is the request as it came. It removes:
//
//   - headers that carry only those, and our cookies
//   - values in their form, from headers and parameters that also carry keys of other services
//   - from all headers, cookies and the query: the caller's own key, any key with our prefix, any text
//     that keys knows, and paths that hold a secret
//
// Without keys, each text that looks like a key is removed.
func StripCredentials(in, out *http.Request, keys Keys) {
	for _, name := range auth.OwnHeaders {
		out.Header.Del(name)
	}
	for _, name := range auth.SharedHeaders {
		without(out.Header, name, func(v string) bool { return len(auth.Digits(v)) > 0 })
	}
	s := secrets{shown: presented(in)}
	s.lookUp(out, keys)
	stripCookies(out.Header, s)
	stripProtocols(out.Header, s)
	for name := range out.Header {
		without(out.Header, name, s.in)
	}
	out.URL.RawQuery = stripQuery(out.URL.RawQuery, s)
}

// secrets tells texts that hold a key or a token from others.
type secrets struct {
	shown   []string // digits of the keys and tokens that the caller shows
	cleared []string // texts that look like keys and are none
}

// maxShown is how many keys and tokens of one request are remembered: a client shows one or two.
const maxShown = 16

// presented finds the keys and tokens of a request, where carriers have them.
func presented(r *http.Request) []string {
	var found []string
	add := func(value string) {
		for _, digits := range auth.Digits(value) {
			if len(found) < maxShown && !slices.Contains(found, digits) {
				found = append(found, digits)
			}
		}
	}
	for _, names := range [][]string{auth.OwnHeaders, auth.SharedHeaders} {
		for _, name := range names {
			for _, value := range r.Header[name] {
				add(value)
			}
		}
	}
	for pair := range strings.SplitSeq(r.URL.RawQuery, "&") {
		if name, value := parameter(pair); auth.Carries(name) {
			add(value)
		}
	}
	return found
}

// lookUp asks keys about the texts of a request that look like a key, and clears those that are
// none.
func (s *secrets) lookUp(r *http.Request, keys Keys) {
	texts := s.lookalikes(r)
	if len(texts) == 0 || keys == nil {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookupTimeout)
	defer cancel()
	for _, text := range texts {
		if !keys.Known(ctx, text) {
			s.cleared = append(s.cleared, text)
		}
	}
}

// lookalikes returns the first texts of a request that look like a key and were not shown as one:
// of the query first, then of the headers by name.
func (s *secrets) lookalikes(r *http.Request) []string {
	var found []string
	add := func(value string) {
		for _, text := range auth.Readings(value) {
			for digits := range auth.Lookalikes(text) {
				if len(found) < maxLookups && !slices.Contains(found, digits) && !slices.Contains(s.shown, digits) {
					found = append(found, digits)
				}
			}
		}
	}
	add(r.URL.RawQuery)
	for _, name := range slices.Sorted(maps.Keys(r.Header)) {
		for _, value := range r.Header[name] {
			add(value)
		}
	}
	return found
}

// in reports whether a text holds a key or a token, also escaped or as scheme Basic.
func (s *secrets) in(text string) bool {
	return slices.ContainsFunc(auth.Readings(text), s.plainlyIn)
}

func (s *secrets) plainlyIn(text string) bool {
	if auth.HasKey(text) || hasSecretPath(text) {
		return true
	}
	for digits := range auth.Lookalikes(text) {
		if !slices.Contains(s.cleared, digits) {
			return true
		}
	}
	return slices.ContainsFunc(s.shown, func(secret string) bool { return strings.Contains(text, secret) })
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
func stripQuery(raw string, s secrets) string {
	ours := func(pair string) bool {
		name, value := parameter(pair)
		return s.in(pair) || auth.Carries(name) && len(auth.Digits(value)) > 0
	}
	pairs := strings.Split(raw, "&")
	if !slices.ContainsFunc(pairs, ours) {
		return raw
	}
	return strings.Join(slices.DeleteFunc(pairs, ours), "&")
}

// secretPath is the path of a page that was reached by a secret in it: a signed endpoint or a
// tenant's router URL. Browsers and proxies put it into Referer, X-Forwarded-Prefix and many other
// headers.
var secretPath = regexp.MustCompile(`/sandboxes/[^/?\s]*~|/agents/[a-z0-9-]+\.[0-9a-f]{8}`)

func hasSecretPath(text string) bool {
	return (strings.Contains(text, "/agents/") || strings.Contains(text, "/sandboxes/")) &&
		secretPath.MatchString(text)
}

// stripProtocols takes keys out of the subprotocols of a WebSocket, of which others may be needed.
func stripProtocols(h http.Header, s secrets) {
	const name = "Sec-Websocket-Protocol"
	if !slices.ContainsFunc(h[name], s.in) {
		return
	}
	var kept []string
	for _, line := range h[name] {
		for protocol := range strings.SplitSeq(line, ",") {
			if protocol = strings.TrimSpace(protocol); protocol != "" && !s.in(protocol) {
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

func stripCookies(h http.Header, s secrets) {
	var kept []string
	for _, line := range h.Values("Cookie") {
		for pair := range strings.SplitSeq(line, ";") {
			name, value, _ := strings.Cut(pair, "=")
			name = strings.TrimSpace(name)
			ours := ourCookie(name) || s.in(pair) || auth.Carries(name) && len(auth.Digits(value)) > 0
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
