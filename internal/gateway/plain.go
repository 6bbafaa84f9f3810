package gateway

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
)

const plainRefused = "this server takes plain HTTP from its own machine only, since API keys would pass the network unencrypted: " +
	"use https, or have the operator name a TLS proxy in server.trusted_proxies or set server.insecure_http = true"

// PlainHTTP refuses requests that come to a listener without TLS from other machines, except from
// trusted proxies. /healthz and /readyz are answered: they need no key and tell no secret.
func PlainHTTP(next http.Handler, trusted []netip.Prefix) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" || r.URL.Path == "/readyz" || sameMachine(r) || trustedPeer(r, trusted) {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("X-Request-Id", requestID(r.Header.Get("X-Request-Id")))
		seen := &watched{ResponseWriter: w, sends: r.ProtoMajor == 1 && r.Body != nil && r.Body != http.NoBody}
		defer seen.leave()
		refuseInsecure(seen)
	})
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
