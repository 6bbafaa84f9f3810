package app

import (
	"crypto/tls"
	"log/slog"
	"time"
)

// OpenIdentity is the certificate that a server makes for itself, as each connection gets it.
func OpenIdentity(dir, domain string, now func() time.Time, log *slog.Logger) (get func(*tls.ClientHelloInfo) (*tls.Certificate, error), file string, err error) {
	own, err := openIdentity(dir, domain, now, log)
	if err != nil {
		return nil, "", err
	}
	return own.get, own.file, nil
}
