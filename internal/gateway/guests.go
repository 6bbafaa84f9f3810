package gateway

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/auth"
)

// Guests lets people in without a key who are at this machine. What their browser runs for somebody else is not them: a
// page of another origin, or of a name that was made to lead here, is refused.
type Guests struct {
	Key        string   // shown for them
	Hosts      []string // names, beside localhost and addresses, under which they may ask for the server
	Everywhere bool     // they may come from other machines, and under any name
}

// known tells whether a request says who is asking; then that must be true.
func known(r *http.Request) bool {
	if scheme, _, _ := strings.Cut(r.Header.Get("Authorization"), " "); strings.EqualFold(scheme, "Bearer") {
		return true
	}
	shows := func(name string) bool { return name != "Authorization" && r.Header.Get(name) != "" }
	return slices.ContainsFunc(auth.OwnHeaders, shows) || slices.ContainsFunc(auth.SharedHeaders, shows)
}

// welcome shows the guests' key for a request that has none, or says why it must not.
func (g *Guests) welcome(r *http.Request) (refusal string) {
	switch {
	case !g.Everywhere && !nearby(r):
		return "this server takes requests without an API key from this machine only; send a key"
	case !g.Everywhere && !g.named(r.Host):
		return "this server takes requests without an API key only under localhost or an address, not under the name " + hostname(r.Host) + "; use 127.0.0.1, or send a key"
	case foreign(r):
		return "this server takes no requests without an API key from pages of other origins; send a key"
	}
	r.Header.Set("X-Api-Key", g.Key)
	return ""
}

// nearby tells whether a request comes from this machine, and not through somebody who passes on what others ask.
func nearby(r *http.Request) bool {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && at.Addr().Unmap().IsLoopback() && r.Header.Get("X-Forwarded-For") == "" && r.Header.Get("Forwarded") == ""
}

func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
}

// named tells whether a host is one that nobody else can make lead here: no name of DNS but those the operator named.
func (g *Guests) named(host string) bool {
	name := hostname(host)
	return net.ParseIP(name) != nil || name == "localhost" || strings.HasSuffix(name, ".localhost") || slices.Contains(g.Hosts, name)
}

// foreign tells whether a browser sent a request for a page that is not ours.
func foreign(r *http.Request) bool {
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" {
		return true
	}
	origin := r.Header.Get("Origin")
	if origin == "" {
		return false
	}
	u, err := url.Parse(origin)
	return err != nil || !strings.EqualFold(u.Host, r.Host)
}
