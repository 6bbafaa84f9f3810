package app

import (
	"crypto/tls"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"
)

// listenTLS takes the address of host names, and reads the certificate that was given while this process may; nil: there
// is no domain.
func (s *Server) listenTLS() (net.Listener, error) {
	address := s.cfg.TLSListen()
	if address == "" {
		s.Domain = s.cfg.TLS.Domain // a proxy in front of us answers for it, if there is one
		return nil, nil
	}
	l, err := s.listen(address, "--tls-listen")
	if err != nil {
		return nil, err
	}
	s.Domain = s.cfg.TLS.Domain
	if port := l.Addr().(*net.TCPAddr).Port; port != 443 {
		s.Domain = net.JoinHostPort(s.Domain, strconv.Itoa(port))
	}
	if s.cfg.TLS.Cert == "" {
		return l, nil
	}
	given, err := loadPair(s.cfg.TLS.Cert, s.cfg.TLS.Key)
	if err != nil {
		return nil, err
	}
	for _, host := range []string{"api." + s.cfg.TLS.Domain, "49983-sandbox." + s.cfg.TLS.Domain} {
		if err := given.Leaf.VerifyHostname(host); err != nil {
			s.log.Warn("the certificate that was given does not cover a name that is served", "host", host, "error", err)
		}
	}
	s.certificate = &given
	return l, nil
}

// secure puts TLS over a listener. The server's own certificate is made once it is the user who keeps it.
func (s *Server) secure(l net.Listener) (net.Listener, error) {
	if l == nil {
		return nil, nil
	}
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2", "http/1.1"}, // the SDKs put many streams on one connection when they can
	}
	if s.certificate != nil {
		cfg.Certificates = []tls.Certificate{*s.certificate}
		return tls.NewListener(l, cfg), nil
	}
	dir := filepath.Join(stateDir(s.cfg.DataDir), "tls", s.cfg.TLS.Domain)
	if err := s.shareAuthority(dir, s.cfg.TLS.Domain); err != nil {
		return nil, fmt.Errorf("certificate for %s: %w", s.cfg.TLS.Domain, err)
	}
	own, err := openIdentity(dir, s.cfg.TLS.Domain, time.Now, s.log)
	if err != nil {
		return nil, fmt.Errorf("certificate for %s: %w", s.cfg.TLS.Domain, err)
	}
	s.CAFile, cfg.GetCertificate = own.file, own.get
	return tls.NewListener(l, cfg), nil
}
