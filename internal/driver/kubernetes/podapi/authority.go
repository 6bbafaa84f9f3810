package podapi

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// Authority is who may command Pods: all servers of one installation share it. From its key come the certificates of servers and the
// token of each Pod, so that nothing needs to be kept for a Pod.
type Authority struct {
	Certificate []byte // DER
	key         *ecdsa.PrivateKey
	secret      []byte // from which tokens are derived
}

// authorityLife is how long an authority holds; a new one is made by removing the Secret, and takes effect with new Pods.
const authorityLife = 10 * 365 * 24 * time.Hour

// NewAuthority makes one.
func NewAuthority() (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	certificate, err := sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "cove agents"}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign,
	}, nil, &key.PublicKey, key, authorityLife)
	if err != nil {
		return nil, err
	}
	return newAuthority(certificate, key)
}

func newAuthority(certificate []byte, key *ecdsa.PrivateKey) (*Authority, error) {
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	secret := hmac.New(sha256.New, raw)
	secret.Write([]byte("cove pod tokens v1"))
	return &Authority{Certificate: certificate, key: key, secret: secret.Sum(nil)}, nil
}

// Key is the private key, to be kept.
func (a *Authority) Key() ([]byte, error) { return x509.MarshalPKCS8PrivateKey(a.key) }

// LoadAuthority takes one that was kept.
func LoadAuthority(certificate, key []byte) (*Authority, error) {
	parsed, err := x509.ParsePKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("key of the agents' authority: %w", err)
	}
	private, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, errors.New("key of the agents' authority: not an ECDSA key")
	}
	c, err := x509.ParseCertificate(certificate)
	if err != nil {
		return nil, fmt.Errorf("certificate of the agents' authority: %w", err)
	}
	if public, ok := c.PublicKey.(*ecdsa.PublicKey); !ok || !public.Equal(&private.PublicKey) {
		return nil, errors.New("certificate and key of the agents' authority do not belong together")
	}
	return newAuthority(certificate, private)
}

// Token is the secret of one Pod, in hex.
func (a *Authority) Token(pod string) string {
	mac := hmac.New(sha256.New, a.secret)
	mac.Write([]byte(pod))
	return hex.EncodeToString(mac.Sum(nil))
}

// serverLife is how long a server's own certificate holds; it makes another in time.
const serverLife = 7 * 24 * time.Hour

// Server makes a certificate with which a server shows who it is.
func (a *Authority) Server(name string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	parent, err := x509.ParseCertificate(a.Certificate)
	if err != nil {
		return tls.Certificate{}, err
	}
	certificate, err := sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, parent, &key.PublicKey, a.key, serverLife)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{certificate}, PrivateKey: key}, nil
}

// sign makes a certificate; without a parent one of its own.
func sign(t, parent *x509.Certificate, public, key any, life time.Duration) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	// An hour back: clocks of nodes differ.
	t.SerialNumber, t.NotBefore, t.NotAfter = serial, time.Now().Add(-time.Hour), time.Now().Add(life)
	if parent == nil {
		parent = t
	}
	return x509.CreateCertificate(rand.Reader, t, parent, public, key)
}

// PodTLS is the Pod's side of a connection: a key that it makes for itself, and only those let in whom the authority sent.
func PodTLS(authority []byte) (*tls.Config, error) {
	ca, err := x509.ParseCertificate(authority)
	if err != nil {
		return nil, fmt.Errorf("certificate of the agents' authority: %w", err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	own, err := sign(&x509.Certificate{Subject: pkix.Name{CommonName: "cove pod"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}},
		nil, public, key, authorityLife)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{own}, PrivateKey: key}},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}, nil
}
