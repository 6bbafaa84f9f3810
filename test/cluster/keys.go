package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"time"
)

// authority signs for one cluster and is forgotten with it.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// makeKeys writes who everybody is: certificates for servers, kubeconfigs for those who speak to the API.
func (c *cluster) makeKeys(address, port string) error {
	ca, err := newAuthority()
	if err != nil {
		return err
	}
	if err := c.write("pki/ca.crt", ca.pem); err != nil {
		return err
	}
	caKey, err := keyPEM(ca.key)
	if err != nil {
		return err
	}
	if err := c.write("pki/ca.key", caKey); err != nil {
		return err
	}
	if err := c.makeTokenKey(); err != nil {
		return err
	}
	names := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", nodeName}
	for _, who := range []struct{ file, name, group string }{
		{"apiserver", "kube-apiserver", ""},
		{"kubelet-client", "kube-apiserver-kubelet-client", "system:masters"},
		{"front-proxy", "front-proxy", ""},
		{"admin", "admin", "system:masters"},
		{"controllers", "system:kube-controller-manager", ""},
		{"scheduler", "system:kube-scheduler", ""},
		{"proxy", "system:kube-proxy", ""},
		{"node", "system:node:" + nodeName, "system:nodes"},
	} {
		cert, key, err := ca.sign(who.name, who.group, []string{"127.0.0.1", address, serviceAddress}, names)
		if err != nil {
			return err
		}
		if err := c.write("pki/"+who.file+".crt", cert); err != nil {
			return err
		}
		if err := c.write("pki/"+who.file+".key", key); err != nil {
			return err
		}
		if err := c.write("pki/"+who.file+".kubeconfig", kubeconfig("https://"+net.JoinHostPort(address, port), ca.pem, cert, key)); err != nil {
			return err
		}
	}
	return nil
}

// write keeps a file that only its owner reads: most of them hold keys.
func (c *cluster) write(name string, data []byte) error {
	return os.WriteFile(c.path(name), data, 0o600)
}

// makeTokenKey writes the key that tokens of service accounts are signed with.
func (c *cluster) makeTokenKey() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	private, err := keyPEM(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	if err := c.write("pki/tokens.key", private); err != nil {
		return err
	}
	return c.write("pki/tokens.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "cove test cluster"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(7 * 24 * time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err = x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &authority{cert: cert, key: key, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, nil
}

func (a *authority) sign(name, group string, addresses, names []string) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: a.cert.NotBefore, NotAfter: a.cert.NotAfter, DNSNames: names,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if group != "" {
		template.Subject.Organization = []string{group}
	}
	for _, text := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(text))
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &private.PublicKey, a.key)
	if err != nil {
		return nil, nil, err
	}
	key, err = keyPEM(private)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key, err
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), err
}

// kubeconfig holds its keys itself, so that it can be copied anywhere.
func kubeconfig(server string, ca, cert, key []byte) []byte {
	type object = map[string]any
	data, err := json.MarshalIndent(object{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []object{{"name": "test", "cluster": object{"server": server, "certificate-authority-data": ca}}},
		"users":    []object{{"name": "test", "user": object{"client-certificate-data": cert, "client-key-data": key}}},
		"contexts": []object{{"name": "test", "context": object{"cluster": "test", "user": "test"}}},
	}, "", "  ")
	if err != nil {
		panic(err) // strings and bytes
	}
	return data
}
