package gateway

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
)

const plainRefused = "this server takes plain HTTP from its own machine only, since API keys would pass the network unencrypted: " +
	"use https, or have the operator name a TLS proxy in server.trusted_proxies or set server.insecure_http = true"

// PlainHTTP refuses requests that come to a listener without TLS from other machines, except from
// trusted proxies and for the server's own health and readiness, which need no key and tell no
// secret. next must be a Gateway, or a Startup that hands over to one: the Gateway alone knows
// whether a request for /readyz goes to a sandbox instead, by its host or a header.
func PlainHTTP(next http.Handler, trusted []netip.Prefix) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if sameMachine(r) || trustedPeer(r, trusted) {
			next.ServeHTTP(w, r)
			return
		}
		if isProbe(r) {
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), probeOnly{}, true)))
			return
		}
		w.Header().Set("X-Request-Id", requestID(r.Header.Get("X-Request-Id")))
		seen := &watched{ResponseWriter: w, sends: r.ProtoMajor == 1 && r.Body != nil && r.Body != http.NoBody}
		defer seen.leave()
		refuseInsecure(seen)
	})
}

// probeOnly is the context key of requests that the gateway answers itself or refuses.
type probeOnly struct{}

// isProbe reports whether a request has the method and the path of a health check.
func isProbe(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) &&
		(r.URL.Path == pathHealth || r.URL.Path == pathReady)
}

// insecure reports whether a request that PlainHTTP let through as a health check would be answered
// by something other than the gateway.
func (g *Gateway) insecure(r *http.Request) bool {
	if r.Context().Value(probeOnly{}) == nil {
		return false
	}
	if g.cfg.Elsewhere != nil && g.cfg.Elsewhere(r) != nil {
		return true
	}
	first := slices.IndexFunc(g.table, func(e entry) bool { return e.matches(r) })
	return first < 0 || g.table[first].name != r.URL.Path
}

// sameMachine tells whether both ends of the connection have one address, or the peer has a loopback
// address.
func sameMachine(r *http.Request) bool {
	peer, ok := peerOf(r)
	if !ok || peer.IsLoopback() {
		return ok
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	tcp, ok := local.(*net.TCPAddr)
	return ok && tcp.AddrPort().Addr().Unmap().WithZone("") == peer
}

func trustedPeer(r *http.Request, trusted []netip.Prefix) bool {
	peer, ok := peerOf(r)
	return ok && slices.ContainsFunc(trusted, func(p netip.Prefix) bool { return p.Contains(peer) })
}

func peerOf(r *http.Request) (netip.Addr, bool) {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	return at.Addr().Unmap().WithZone(""), err == nil
}

// refuseInsecure says it in the words of every dialect.
func refuseInsecure(w http.ResponseWriter) {
	tell(w, http.StatusForbidden, map[string]any{
		"code": "PLAIN_HTTP_REFUSED", "message": plainRefused, "error": map[string]string{"kind": "denied", "message": plainRefused},
	})
}
