package podapi_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"io"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

func authority(t *testing.T) *podapi.Authority {
	t.Helper()
	a, err := podapi.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// listen is a Pod that proves itself with a token and answers every order with an empty End. It records what it was sent.
func listen(t *testing.T, ca *podapi.Authority, token string, heard *bytes.Buffer) *podapi.Pod {
	t.Helper()
	config, err := podapi.PodTLS(ca.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := hex.DecodeString(token)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serve(tls.Server(conn, config), raw, heard)
			conn.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return &podapi.Pod{Name: "pod-1", Address: l.Addr().String()}
}

func serve(conn *tls.Conn, token []byte, heard *bytes.Buffer) {
	conn.SetDeadline(time.Now().Add(2 * time.Minute))
	if conn.Handshake() != nil || podapi.Prove(conn, token) != nil {
		return
	}
	purpose := make([]byte, 1)
	if _, err := io.ReadFull(conn, purpose); err != nil {
		return
	}
	heard.Write(purpose)
	f, err := agentapi.NewReader(conn).Read()
	if err != nil {
		return
	}
	heard.Write(f.Payload)
	_ = agentapi.WriteJSON(conn, agentapi.FrameEnd, agentapi.End{Outcome: agentapi.OutcomeOK, Value: []byte(`{}`)})
}

func order(t *testing.T, c *podapi.Client, p *podapi.Pod) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	return c.Do(ctx, p, podapi.Order{Op: podapi.OpBoot, Boot: &agentapi.Boot{ID: "sb-secret"}}, nil)
}

func TestAServerAndItsPodKnowEachOther(t *testing.T) {
	ours := authority(t)
	for name, c := range map[string]struct {
		client *podapi.Authority
		pod    *podapi.Authority
		token  string
		ok     bool
	}{
		"they do":                                    {ours, ours, ours.Token("pod-1"), true},
		"a server of another installation":           {authority(t), ours, ours.Token("pod-1"), false},
		"a Pod with the token of another":            {ours, ours, ours.Token("pod-2"), false},
		"a Pod with a token of another installation": {ours, ours, authority(t).Token("pod-1"), false},
	} {
		t.Run(name, func(t *testing.T) {
			var heard bytes.Buffer
			p := listen(t, c.pod, c.token, &heard)
			client := podapi.NewClient(c.client, "server-1")
			for range 2 { // the second resumes the first's session
				if err := order(t, client, p); (err == nil) != c.ok {
					t.Errorf("%v", err)
				}
			}
			if !c.ok && heard.Len() > 0 {
				t.Errorf("it was told %q", heard.String())
			}
		})
	}
}

// A certificate that somebody else's key signed under the same name is no certificate.
func TestAForgedAuthorityIsNone(t *testing.T) {
	ours := authority(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	real, err := x509.ParseCertificate(ours.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: "server-1"}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	parent := *real // the same name, another key
	parent.PublicKey = &key.PublicKey
	forged, err := x509.CreateCertificate(rand.Reader, leaf, &parent, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	var heard bytes.Buffer
	p := listen(t, ours, ours.Token("pod-1"), &heard)
	for name, certificates := range map[string][]tls.Certificate{
		"none": nil, "forged": {{Certificate: [][]byte{forged}, PrivateKey: key}},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := tls.Dial("tcp", p.Address, &tls.Config{Certificates: certificates, InsecureSkipVerify: true})
			if err == nil {
				// In TLS 1.3 a client learns with its first read that it was refused.
				conn.SetDeadline(time.Now().Add(2 * time.Minute))
				_, err = conn.Read(make([]byte, 1))
				conn.Close()
			}
			if err == nil || heard.Len() > 0 {
				t.Errorf("it was let in: %v, %q", err, heard.String())
			}
		})
	}
}

// Somebody between a server and its Pod has to end one TLS connection and begin another, and the proof of one is none for the other.
func TestAProofHoldsForOneConnection(t *testing.T) {
	ours := authority(t)
	var heard bytes.Buffer
	real := listen(t, ours, ours.Token("pod-1"), &heard)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	config, err := podapi.PodTLS(ours.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	stolen, err := ours.Server("thief") // even with a certificate of ours, which a thief has not
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		behind, err := tls.Dial("tcp", real.Address, &tls.Config{Certificates: []tls.Certificate{stolen}, InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer behind.Close()
		front := tls.Server(conn, config)
		if front.Handshake() != nil {
			return
		}
		proof := make([]byte, 32)
		if _, err := io.ReadFull(behind, proof); err != nil {
			return
		}
		_, _ = front.Write(proof)
		_, _ = io.Copy(behind, front)
	}()
	err = order(t, podapi.NewClient(ours, "server-1"), &podapi.Pod{Name: "pod-1", Address: l.Addr().String()})
	if err == nil || !strings.Contains(err.Error(), "not the Pod") {
		t.Errorf("%v", err)
	}
	if heard.Len() > 0 {
		t.Errorf("the Pod was told %q", heard.String())
	}
}

func TestAnAuthorityIsKept(t *testing.T) {
	a := authority(t)
	key, err := a.Key()
	if err != nil {
		t.Fatal(err)
	}
	b, err := podapi.LoadAuthority(a.Certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	if a.Token("x") != b.Token("x") || a.Token("x") == a.Token("y") {
		t.Error("tokens do not depend on the authority and the name alone")
	}
	if _, err := podapi.LoadAuthority(authority(t).Certificate, key); err == nil {
		t.Error("a certificate of another key was taken")
	}
	for _, bad := range [][2][]byte{{nil, key}, {a.Certificate, nil}, {[]byte("x"), key}} {
		if _, err := podapi.LoadAuthority(bad[0], bad[1]); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestNobodyThereIsTold(t *testing.T) {
	err := order(t, podapi.NewClient(authority(t), "x"), &podapi.Pod{Name: "pod-1", Address: "127.0.0.1:1"})
	if !errors.Is(err, podapi.ErrRefused) {
		t.Errorf("%v", err)
	}
}
