package podapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
)

// proofSize is the length of what a Pod says first.
const proofSize = sha256.Size

// proof binds a token to one TLS connection: whoever stands in between has two connections, and their secrets differ. It cannot be
// replayed either.
func proof(state tls.ConnectionState, token []byte) ([]byte, error) {
	secret, err := state.ExportKeyingMaterial("EXPORTER-cove-pod", nil, 32)
	if err != nil {
		return nil, fmt.Errorf("bind the token to the connection: %w", err)
	}
	mac := hmac.New(sha256.New, token)
	mac.Write([]byte("cove pod v1\x00"))
	mac.Write(secret)
	return mac.Sum(nil), nil
}

// Prove is the Pod's side, once the handshake is done.
func Prove(conn *tls.Conn, token []byte) error {
	p, err := proof(conn.ConnectionState(), token)
	if err != nil {
		return err
	}
	_, err = conn.Write(p)
	return err
}

// errStranger is somebody else at the address of a Pod.
var errStranger = errors.New("whoever answers there is not the Pod that was made")

// check is the server's side.
func check(conn *tls.Conn, token []byte) error {
	want, err := proof(conn.ConnectionState(), token)
	if err != nil {
		return err
	}
	got := make([]byte, proofSize)
	if _, err := io.ReadFull(conn, got); err != nil {
		return fmt.Errorf("the Pod's proof: %w", err)
	}
	if subtle.ConstantTimeCompare(got, want) != 1 {
		return errStranger
	}
	return nil
}
