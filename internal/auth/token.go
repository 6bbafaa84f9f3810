package auth

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
)

// Tokens derives what guards single things, such as a sandbox, from a secret of the server's: so a token is the same after
// a pause and a restart, and nothing has to be kept.
type Tokens struct{ secret []byte }

// NewTokens takes a secret of at least 32 random bytes.
func NewTokens(secret []byte) Tokens { return Tokens{secret} }

// Derive is the token of what is named, 64 hexadecimal digits; the first name says what it is for. No name contains a zero byte.
func (t Tokens) Derive(what string, names ...string) string {
	mac := hmac.New(sha256.New, t.secret)
	mac.Write([]byte(what))
	for _, name := range names {
		mac.Write([]byte("\x00" + name))
	}
	return hex.EncodeToString(mac.Sum(nil))
}

// Same compares two tokens in constant time.
func Same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
