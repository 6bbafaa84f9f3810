package app

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
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// How long what we sign is good for. Apple's clients refuse leaves beyond 825 days, others beyond 398.
const (
	authorityFor   = 10 * 365 * 24 * time.Hour
	certificateFor = 397 * 24 * time.Hour
	renewBefore    = 60 * 24 * time.Hour
)

// authority signs the certificates of one domain. Clients that trust it trust it for that domain and this machine only.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// ownCertificate is the certificate of a domain, made by the server: both it and who signed it are kept in dir, and made
// anew when they are old. file is what clients have to trust. also are further hosts and addresses that it is for.
func ownCertificate(dir, domain string, now time.Time, also ...string) (_ tls.Certificate, file string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return tls.Certificate{}, "", fmt.Errorf("make a place for certificates: %w", err)
	}
	ca, err := loadAuthority(dir, domain, now, also...)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	pair, err := loadPair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return tls.Certificate{}, "", err
	}
	if err != nil || !ca.signed(pair.Leaf, domain, now, also...) {
		if pair, err = ca.issue(domain, now, also...); err != nil {
			return tls.Certificate{}, "", err
		}
		if err := keepIssued(dir, pair); err != nil {
			return tls.Certificate{}, "", err
		}
	}
	return pair, filepath.Join(dir, "ca.pem"), nil
}

// loadAuthority finds the authority of a domain or makes it.
func loadAuthority(dir, domain string, now time.Time, also ...string) (authority, error) {
	file, keyFile := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key")
	pair, err := loadPair(file, keyFile)
	if errors.Is(err, fs.ErrNotExist) || err == nil && (now.Add(certificateFor).After(pair.Leaf.NotAfter) || !permits(pair.Leaf, also)) {
		return newAuthority(file, keyFile, domain, now, also...)
	}
	if err != nil {
		return authority{}, fmt.Errorf("the server's own certificate authority: %w", err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return authority{}, fmt.Errorf("the server's own certificate authority: %s is not its key", keyFile)
	}
	return authority{pair.Leaf, key, encodeCert(pair.Leaf.Raw)}, nil
}

func newAuthority(file, keyFile, domain string, now time.Time, also ...string) (authority, error) {
	loopback4 := &net.IPNet{IP: net.IPv4(127, 0, 0, 0).To4(), Mask: net.CIDRMask(8, 32)}
	loopback6 := &net.IPNet{IP: net.IPv6loopback, Mask: net.CIDRMask(128, 128)}
	hosts, addresses := split(also)
	ranges := []*net.IPNet{loopback4, loopback6}
	for _, ip := range addresses {
		ranges = append(ranges, &net.IPNet{IP: ip, Mask: net.CIDRMask(8*len(ip), 8*len(ip))})
	}
	t := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "Cove local authority for " + domain, Organization: []string{"Cove"}},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(authorityFor),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		// Whoever steals the key can pretend to be this server and nobody else.
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         slices.Compact(append([]string{domain, "localhost"}, hosts...)),
		PermittedIPRanges:           ranges,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, err
	}
	cert, err := sign(t, t, key, key)
	if err != nil {
		return authority{}, fmt.Errorf("make a certificate authority: %w", err)
	}
	ca := authority{cert, key, encodeCert(cert.Raw)}
	return ca, writePair(file, keyFile, ca.pem, key)
}

// permits tells whether an authority may sign for further hosts and addresses.
func permits(ca *x509.Certificate, also []string) bool {
	hosts, addresses := split(also)
	for _, host := range hosts {
		if !slices.Contains(ca.PermittedDNSDomains, host) {
			return false
		}
	}
	for _, ip := range addresses {
		if !slices.ContainsFunc(ca.PermittedIPRanges, func(n *net.IPNet) bool { return n.Contains(ip) }) {
			return false
		}
	}
	return true
}

// split tells names from addresses.
func split(also []string) (hosts []string, addresses []net.IP) {
	for _, name := range also {
		ip := net.ParseIP(name)
		if v4 := ip.To4(); v4 != nil {
			ip = v4
		}
		if ip == nil {
			hosts = append(hosts, name)
		} else {
			addresses = append(addresses, ip)
		}
	}
	return hosts, addresses
}

// names are the hosts that a certificate of a domain is for; the wildcard covers api. too.
func names(domain string, also []string) []string {
	hosts, _ := split(also)
	return slices.Compact(append([]string{domain, "*." + domain, "localhost"}, hosts...))
}

// addresses are those that a certificate is for: this machine, whatever else.
func addresses(also []string) []net.IP {
	_, more := split(also)
	return append([]net.IP{net.IPv4(127, 0, 0, 1).To4(), net.IPv6loopback}, more...)
}

// signed tells whether a certificate is this authority's, for the domain, and not old.
func (ca authority) signed(leaf *x509.Certificate, domain string, now time.Time, also ...string) bool {
	return leaf.CheckSignatureFrom(ca.cert) == nil && slices.Equal(leaf.DNSNames, names(domain, also)) &&
		slices.EqualFunc(leaf.IPAddresses, addresses(also), net.IP.Equal) &&
		now.After(leaf.NotBefore) && now.Add(renewBefore).Before(leaf.NotAfter)
}

// issue makes a certificate, which is kept nowhere.
func (ca authority) issue(domain string, now time.Time, also ...string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := sign(&x509.Certificate{
		Subject:   pkix.Name{CommonName: domain, Organization: []string{"Cove"}},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(certificateFor), BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: names(domain, also), IPAddresses: addresses(also),
	}, ca.cert, key, ca.key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make a certificate for %s: %w", domain, err)
	}
	return tls.Certificate{Certificate: [][]byte{leaf.Raw, ca.cert.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

// keepIssued writes a certificate with who signed it, for the next start.
func keepIssued(dir string, pair tls.Certificate) error {
	var chain []byte
	for _, raw := range pair.Certificate {
		chain = append(chain, encodeCert(raw)...)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return errors.New("keep a certificate: its key is not one of ours")
	}
	return writePair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), chain, key)
}

// sign makes a certificate for key out of a template, in the name of parent.
func sign(t, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	t.SerialNumber = serial
	raw, err := x509.CreateCertificate(rand.Reader, t, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(raw)
}

func encodeCert(raw []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
}

// writePair writes the key first: a certificate without one is made anew, a key without one replaced.
func writePair(certFile, keyFile string, cert []byte, key *ecdsa.PrivateKey) error {
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	// A start that was killed between the two would otherwise leave a pair that does not belong together.
	if err := os.Remove(certFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := writeFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600); err != nil {
		return err
	}
	return writeFile(certFile, cert, 0o600)
}

// loadPair reads a certificate and its key.
func loadPair(certFile, keyFile string) (tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("certificate %s: %w", certFile, err)
	}
	if pair.Leaf == nil {
		if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
			return tls.Certificate{}, fmt.Errorf("certificate %s: %w", certFile, err)
		}
	}
	return pair, nil
}
