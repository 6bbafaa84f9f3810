package app_test

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/covehq/cove/internal/app"
)

func TestAServerRenewsItsCertificateWhileItRuns(t *testing.T) {
	const day = 24 * time.Hour
	dir, start := filepath.Join(t.TempDir(), "tls"), time.Now()
	now := start
	get, file, err := app.OpenIdentity(dir, "cove.test", func() time.Time { return now }, quiet)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	served := func(at time.Time) *x509.Certificate {
		t.Helper()
		now = at
		pair, err := get(nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: "api.cove.test", Roots: roots, CurrentTime: at}); err != nil {
			t.Errorf("after %v: %v", at.Sub(start), err)
		}
		return pair.Leaf
	}
	kept := func(at time.Time) *x509.Certificate {
		t.Helper()
		pair, _, err := app.OwnCertificate(dir, "cove.test", at)
		if err != nil {
			t.Fatal(err)
		}
		return pair.Leaf
	}
	first := served(start)
	if !served(start.Add(300 * day)).Equal(first) {
		t.Error("it is renewed before it is old")
	}
	second := served(start.Add(350 * day))
	if second.Equal(first) || !served(start.Add(500*day)).Equal(second) {
		t.Error("it is not renewed once, when it is old")
	}
	if !kept(start.Add(500 * day)).Equal(second) {
		t.Error("the next start does not find the new one")
	}

	authority, err := os.ReadFile(filepath.Join(dir, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !served(start.Add(700 * day)).Equal(second) {
		t.Error("without an authority another certificate is served")
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), authority, 0o600); err != nil {
		t.Fatal(err)
	}
	if !served(start.Add(700 * day)).Equal(second) {
		t.Error("a renewal that failed is tried with each connection")
	}
	// Where it cannot be kept it is used all the same.
	if err := os.Remove(filepath.Join(dir, "key.pem")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "key.pem", "in-the-way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if served(start.Add(700*day + 2*time.Hour)).Equal(second) {
		t.Error("a renewal that failed is not tried again")
	}
}
