// Package tunnel is the server's side of `kubectl port-forward`: many connections to ports, in one that a client has upgraded,
// by SPDY/3.1 itself or within a WebSocket. Who may come, and what a port is, was decided by whoever calls it.
package tunnel

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coder/websocket"
)

// Dial connects to a port. It is called once for each connection that the client forwards.
type Dial func(ctx context.Context, port int) (net.Conn, error)

// The words of the two handshakes.
const (
	protocol        = "portforward.k8s.io"
	spdyUpgrade     = "SPDY/3.1"
	withinWebSocket = spdyUpgrade + "+" + protocol
	headerProtocol  = "X-Stream-Protocol-Version"
)

// handshakeGrace is how long the answer to an upgrade may take to be written.
const handshakeGrace = 10 * time.Second

// Serve upgrades a request for pods/portforward and connects each of its streams by dial. It returns when the tunnel has ended
// and everything that it had opened is closed.
func Serve(w http.ResponseWriter, r *http.Request, dial Dial) { serve(w, r, dial, stallFor) }

func serve(w http.ResponseWriter, r *http.Request, dial Dial, stall time.Duration) {
	switch {
	case wants(r, "websocket") && r.Method == http.MethodGet:
		serveWebSocket(w, r, dial, stall)
	case wants(r, spdyUpgrade) && r.Method == http.MethodPost:
		serveSPDY(w, r, dial, stall)
	default:
		refuse(w, "port-forward needs a connection that is upgraded: POST with Upgrade: "+spdyUpgrade+", or a WebSocket with the protocol "+withinWebSocket)
	}
}

// wants tells whether a request is to be upgraded to a protocol.
func wants(r *http.Request, protocol string) bool {
	return listed(r.Header, "Connection", "upgrade") && listed(r.Header, "Upgrade", protocol)
}

// listed tells whether one of a header's words, which commas part, is the one that is meant.
func listed(h http.Header, name, word string) bool {
	return slices.ContainsFunc(h.Values(name), func(line string) bool {
		for one := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(one), word) {
				return true
			}
		}
		return false
	})
}

func serveSPDY(w http.ResponseWriter, r *http.Request, dial Dial, stall time.Duration) {
	if !listed(r.Header, headerProtocol, protocol) {
		w.Header().Set("X-Accepted-Stream-Protocol-Versions", protocol)
		refuse(w, "port-forward speaks "+protocol+" and no other version")
		return
	}
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		refuse(w, "this connection cannot be upgraded: speak HTTP/1.1")
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Time{}) // the server's own bounds are for requests
	_ = conn.SetWriteDeadline(time.Now().Add(handshakeGrace))
	_, err = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + spdyUpgrade +
		"\r\n" + headerProtocol + ": " + protocol + "\r\n\r\n"))
	if err != nil {
		return
	}
	_ = conn.SetWriteDeadline(time.Time{})
	// The request's context ends when its handler returns or its client leaves: hijacked connections are ours to watch.
	carry(r.Context(), &begun{Conn: conn, first: buffered.Reader}, dial, stall)
}

func serveWebSocket(w http.ResponseWriter, r *http.Request, dial Dial, stall time.Duration) {
	if !listed(r.Header, "Sec-WebSocket-Protocol", withinWebSocket) {
		refuse(w, "port-forward by WebSocket needs the protocol "+withinWebSocket)
		return
	}
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		Subprotocols: []string{withinWebSocket}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return // it has been answered
	}
	defer func() { _ = ws.CloseNow() }() // it may be closed
	carry(r.Context(), websocket.NetConn(r.Context(), ws, websocket.MessageBinary), dial, stall)
}

// refuse answers a request that is not upgraded, as an API server does.
func refuse(w http.ResponseWriter, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	_ = json.NewEncoder(w).Encode(map[string]any{ // the client has gone: nobody to tell
		"kind": "Status", "apiVersion": "v1", "metadata": map[string]any{}, "status": "Failure",
		"message": message, "reason": "BadRequest", "code": http.StatusBadRequest,
	})
}
