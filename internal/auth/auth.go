// Package auth turns a presented key into who is asking. It knows no protocol and no database: who carries the key
// and where its hash is kept is for others.
package auth

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"time"
)

// Principal is who is asking. It is passed as an argument, never in a context.
type Principal struct {
	Tenant string `json:"tenant"` // who owns what it makes
	KeyID  string `json:"key_id,omitempty"`
	Admin  bool   `json:"admin,omitempty"` // may manage keys; sees no other tenant's sandboxes
}

// Secret is a text that prints as dots; string(s) reveals it.
type Secret string

const dots = "••••••"

func (Secret) String() string { return dots }

// Format prints dots whatever the verb.
func (Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, dots) }

// MarshalText makes JSON and other encodings print dots.
func (Secret) MarshalText() ([]byte, error) { return []byte(dots), nil }

// LogValue makes slog print dots.
func (Secret) LogValue() slog.Value { return slog.StringValue(dots) }

// keyPrefix and the 40 hex digits after it are the form that the E2B SDKs check before they send a key.
const (
	keyPrefix = "e2b_"
	keyDigits = 40
)

// keyForm takes a key without its prefix too: clients that do not look at keys may be given the digits alone.
var keyForm = regexp.MustCompile(`^(?:e2b_)?([0-9a-f]{40})$`)

// NewKey makes a key that nobody can guess.
func NewKey() (Secret, error) {
	var b [20]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("make a key: %w", err)
	}
	return Secret(keyPrefix + hex.EncodeToString(b[:])), nil
}

// HashKey is what is stored of a key. A key has 160 random bits, so a plain hash is as good as a slow one.
func HashKey(key Secret) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// KeyRecord is what is known of a key once its text is forgotten.
type KeyRecord struct {
	ID        string    `json:"id"`
	Tenant    string    `json:"tenant"`
	Name      string    `json:"name,omitempty"`
	Hash      string    `json:"-"`
	Prefix    string    `json:"prefix"` // the first characters, for people to tell keys apart
	Admin     bool      `json:"admin,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	RevokedAt time.Time `json:"revoked_at,omitzero"`
	LastUsed  time.Time `json:"last_used,omitzero"` // exact to a minute
}
