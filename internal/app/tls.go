package app

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"sync/atomic"
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

// secure makes the certificate of the TLS listener, unless one was given. The server's own certificate is made once the
// process is the user who keeps it.
func (s *Server) secure() error {
	if s.cfg.TLSListen() == "" || s.certificate != nil {
		return nil
	}
	dir := certificateDir(s.cfg.DataDir, s.cfg.TLS.Domain)
	if err := s.shareAuthority(dir, s.cfg.TLS.Domain); err != nil {
		return fmt.Errorf("certificate for %s: %w", s.cfg.TLS.Domain, err)
	}
	own, err := openIdentity(dir, s.cfg.TLS.Domain, time.Now, s.log)
	if err != nil {
		return fmt.Errorf("certificate for %s: %w", s.cfg.TLS.Domain, err)
	}
	s.CAFile = own.file
	s.tls.use(own.get)
	return nil
}

func certificateDir(dataDir, name string) string {
	return filepath.Join(stateDir(dataDir), "tls", name)
}

// lateTLS is the TLS configuration of a listener that accepts connections before there is a certificate. Until then a
// handshake fails at once; it does not hang.
type lateTLS struct{ now atomic.Pointer[tls.Config] }

var errNoCertificate = errors.New("the server is starting and has no certificate yet")

func (t *lateTLS) listener(l net.Listener) net.Listener {
	return tls.NewListener(l, &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if now := t.now.Load(); now != nil {
			return now, nil
		}
		return nil, errNoCertificate
	}})
}

func (t *lateTLS) use(get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) {
	t.now.Store(&tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"}, // the SDKs put many streams on one connection when they can
		GetCertificate: get,
	})
}

// useGiven uses the certificate that was given, or until there is another the one that an earlier start left in dir.
func (t *lateTLS) useGiven(given *tls.Certificate, dir string) {
	if given == nil {
		pair, err := loadPair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
		if err != nil {
			return // this start makes one, or says what is wrong
		}
		given = &pair
	}
	t.use(func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return given, nil })
}
