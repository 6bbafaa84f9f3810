package app_test

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/covehq/cove/internal/app"
)

func TestTheServersOwnCertificateIsTrustedForItsDomainAlone(t *testing.T) {
	dir, now := filepath.Join(t.TempDir(), "tls"), time.Now()
	pair, file, err := app.OwnCertificate(dir, "cove.test", now)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		t.Fatal("what is to be trusted is no certificate")
	}
	for name, ok := range map[string]bool{
		"cove.test": true, "api.cove.test": true, "49983-sbx.cove.test": true, "localhost": true, "127.0.0.1": true,
		"a.b.cove.test": false, "example.com": false,
	} {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"ca.key", "key.pem", "ca.pem", "cert.pem"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

func TestACertificateIsKeptUntilItIsOldOrForAnotherDomain(t *testing.T) {
	dir, now := filepath.Join(t.TempDir(), "tls"), time.Now()
	serial := func(domain string, at time.Time) string {
		pair, _, err := app.OwnCertificate(dir, domain, at)
		if err != nil {
			t.Fatal(err)
		}
		return pair.Leaf.SerialNumber.String()
	}
	first := serial("cove.test", now)
	authority, _ := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if serial("cove.test", now.Add(24*time.Hour)) != first {
		t.Error("a new one after a day")
	}
	second := serial("cove.test", now.Add(350*24*time.Hour))
	if second == first {
		t.Error("the same one shortly before its end")
	}
	if again, _ := os.ReadFile(filepath.Join(dir, "ca.pem")); string(again) != string(authority) {
		t.Error("clients have to trust another authority")
	}
	if err := os.Remove(filepath.Join(dir, "cert.pem")); err != nil { // a start that was killed halfway
		t.Fatal(err)
	}
	if serial("cove.test", now.Add(350*24*time.Hour)) == second {
		t.Error("a certificate that was not there")
	}
}
