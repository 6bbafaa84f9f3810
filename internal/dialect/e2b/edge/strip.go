package edge

import (
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// What runs behind a port may be hostile: it learns nothing that would let it act for its caller.

var (
	ourKey   = regexp.MustCompile(`e2b_[0-9a-f]{16,}`)
	ourToken = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// strip takes out of a request whatever is between the caller and us. Other people's tokens of the same header stay: what
// is behind the port may need them.
func strip(h http.Header) {
	for _, name := range []string{headerID, headerPort, headerTraffic} {
		h.Del(name)
	}
	without(h, "X-Api-Key", ourKey.MatchString)
	without(h, "Authorization", func(v string) bool {
		scheme, rest, _ := strings.Cut(v, " ")
		return ourKey.MatchString(v) || strings.EqualFold(scheme, "Bearer") && ourToken.MatchString(strings.TrimSpace(rest))
	})
	without(h, headerAccess, ourToken.MatchString)
	stripCookies(h)
}

// without removes the values of a header that are ours.
func without(h http.Header, name string, ours func(string) bool) {
	kept := slices.DeleteFunc(slices.Clone(h.Values(name)), func(v string) bool { return ours(strings.TrimSpace(v)) })
	if len(kept) == 0 {
		h.Del(name)
		return
	}
	h[name] = kept
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
func (e *Edge) modify(resp *http.Response) error {
	at := resp.Request.Context().Value(visit{}).(route)
	if at.way != byHost {
		for _, name := range forOrigin {
			resp.Header.Del(name)
		}
		// An origin of its own, which is nobody's: scripts run, and reach neither our cookies nor our API.
		resp.Header.Add("Content-Security-Policy", "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
	}
	narrowCookies(resp.Header, at)
	return nil
}

// narrowCookies keeps a port's cookies to itself: not for the domain above it, not for our paths, not under our names.
func narrowCookies(h http.Header, at route) {
	lines := h.Values("Set-Cookie")
	if len(lines) == 0 {
		return
	}
	if at.way == byHeader { // no path would keep them from our pages
		h.Del("Set-Cookie")
		return
	}
	var kept []string
	for _, line := range lines {
		c, err := http.ParseSetCookie(line)
		if err != nil || ourCookie(c.Name) {
			continue
		}
		if c.Domain != "" || at.way == byPath {
			c.Domain = ""
			if at.way == byPath {
				c.Path = pathPrefix + at.id + "/" + strconv.Itoa(at.port) + "/"
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
