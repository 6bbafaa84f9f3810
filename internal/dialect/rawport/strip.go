package rawport

import (
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// What runs behind a port may be hostile: it learns nothing that would let it act for its caller.

var (
	ourKey   = regexp.MustCompile(`e2b_[0-9a-f]{16,}`)
	ourToken = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// StripKeys takes our keys and tokens out of the headers that carry other people's too: what is behind the port may need
// those. Our cookies go as well.
func StripKeys(h http.Header) {
	without(h, "X-Api-Key", ourKey.MatchString)
	without(h, "Authorization", func(v string) bool {
		scheme, rest, _ := strings.Cut(v, " ")
		return ourKey.MatchString(v) || strings.EqualFold(scheme, "Bearer") && ourToken.MatchString(strings.TrimSpace(rest))
	})
	stripCookies(h)
}

// StripTokens removes the values of a header that have the form of our tokens.
func StripTokens(h http.Header, name string) { without(h, name, ourToken.MatchString) }

// without removes the values of a header that are ours.
func without(h http.Header, name string, ours func(string) bool) {
	kept := slices.DeleteFunc(slices.Clone(h.Values(name)), func(v string) bool { return ours(strings.TrimSpace(v)) })
	if len(kept) == 0 {
		h.Del(name)
		return
	}
	h[http.CanonicalHeaderKey(name)] = kept
}

func stripCookies(h http.Header) {
	var kept []string
	for _, line := range h.Values("Cookie") {
		for pair := range strings.SplitSeq(line, ";") {
			name, _, _ := strings.Cut(pair, "=")
			if pair = strings.TrimSpace(pair); pair != "" && !ourCookie(strings.TrimSpace(name)) {
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
