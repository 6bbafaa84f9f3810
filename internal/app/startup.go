package app

import (
	"context"
	"net"
	"net/http"
	"strings"

	"github.com/covehq/cove/internal/gateway"
)

// listenAll takes every address and answers there at once, with what the server is busy with. The listener for other
// servers is returned: they learn its address from the database, once there is something to say.
func (s *Server) listenAll() (peers net.Listener, err error) {
	if peers, err = s.listenPeers(); err != nil {
		return nil, err
	}
	plain, err := s.listen(s.cfg.PlainListen(), "--listen")
	if err != nil {
		return nil, err
	}
	s.address(plain)
	secure, err := s.listenTLS()
	if err != nil {
		return nil, err
	}
	if s.facade, err = s.listenAgentSandbox(); err != nil {
		return nil, err
	}
	s.startup = gateway.NewStartup(nil)
	// Owned by the Server: requests end when it closes, whichever context started it.
	s.base, s.cancel = context.WithCancelCause(context.Background())
	s.served = make(chan error, 4) // one for each listener
	s.undo.add("close connections", s.closeConnections)
	s.answer(plain, s.plain(s.startup), maxStreams)
	if secure != nil {
		s.tls.useGiven(s.certificate, certificateDir(s.cfg.DataDir, s.cfg.TLS.Domain))
		s.answer(s.tls.listener(secure), s.startup, maxStreams)
	}
	if f := s.facade; f != nil {
		f.tls.useGiven(f.given, certificateDir(s.cfg.DataDir, facadeName))
		f.http = s.answer(f.tls.listener(f.listener), f.startup, maxKubernetesStreams)
	}
	return peers, nil
}

// plain refuses what other machines ask of the listener without TLS, unless the operator allows it.
func (s *Server) plain(h http.Handler) http.Handler {
	if s.cfg.PlainEverywhere() {
		return h
	}
	return gateway.PlainHTTP(h, trustedProxies(s.cfg))
}

// answer serves a listener until the server closes. A connection of it may have so many streams.
func (s *Server) answer(l net.Listener, h http.Handler, streams int) *http.Server {
	server := s.newHTTP(s.base, h)
	server.HTTP2.MaxConcurrentStreams = streams
	s.http = append(s.http, server)
	go func() { s.served <- server.Serve(l) }()
	return server
}

// closeConnections ends what is left of them after a start that failed; a server that served has closed them before.
func (s *Server) closeConnections() error {
	s.cancel(nil)
	return s.eachHTTP((*http.Server).Close)
}

// tellProgress tells those who ask for readiness what next hears.
func (s *Server) tellProgress(next Progress) Progress {
	return func(line string) {
		s.startup.Say(strings.TrimSpace(line))
		next(line)
	}
}
