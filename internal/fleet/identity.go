package fleet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"sync/atomic"
	"time"
)

// How long what servers sign for themselves is good for. A server's own certificate is made at its start and lasts as long as
// the authority does: who may join is decided by who has the database.
const authorityFor = 10 * 365 * 24 * time.Hour

// Identity is how servers know each other: each has a certificate of its name, signed by an authority that all of them share and
// nobody else has.
type Identity struct {
	ca   *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
	own  atomic.Pointer[tls.Certificate]
}

// NewAuthority makes what servers share, as text.
func NewAuthority() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	raw, err := signed(&x509.Certificate{
		Subject: pkix.Name{CommonName: "Cove servers"}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, PermittedDNSDomainsCritical: true, PermittedDNSDomains: []string{domainOfPeers[1:]},
	}, nil, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make an authority for servers: %w", err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
	return append(text, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})...), nil
}

// OpenIdentity reads what servers share.
func OpenIdentity(authority []byte) (*Identity, error) {
	pair, err := tls.X509KeyPair(authority, authority)
	if err != nil {
		return nil, errors.New("the authority of the servers cannot be read; remove the row \"peers\" of the table secrets and start all servers again")
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return nil, errors.New("the authority of the servers has a key of another kind")
	}
	i := &Identity{ca: pair.Leaf, key: key, pool: x509.NewCertPool()}
	i.pool.AddCert(i.ca)
	return i, nil
}

// rename makes a certificate for a name.
func (i *Identity) rename(name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	raw, err := signed(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, BasicConstraintsValid: true, DNSNames: []string{name + domainOfPeers},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, i.ca, &key.PublicKey, i.key)
	if err != nil {
		return fmt.Errorf("make a certificate for this server: %w", err)
	}
	i.own.Store(&tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key})
	return nil
}

func signed(t, parent *x509.Certificate, public *ecdsa.PublicKey, key *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	t.SerialNumber, t.NotBefore, t.NotAfter = serial, now.Add(-time.Hour), now.Add(authorityFor)
	if parent == nil {
		parent = t
	} else {
		t.NotAfter = parent.NotAfter
	}
	return x509.CreateCertificate(rand.Reader, t, parent, public, key)
}

// client is TLS towards another server.
func (i *Identity) client() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: i.pool,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return i.own.Load(), nil },
	}
}

// Server is TLS for the listener of servers: nobody else gets past it.
func (i *Identity) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: i.pool, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.own.Load(), nil },
	}
}
