package target

import (
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Operation is what the signed URL of a file allows.
type Operation string

// The operations.
const (
	OpRead  Operation = "read"
	OpWrite Operation = "write"
)

// Signature is what E2B's SDKs sign in the URL of a file, and with what.
type Signature struct {
	path, user string
	operation  Operation
	expires    string // as it stands in the URL
	limited    bool   // something stands there
	given      string
	present    bool
}

// The bounds of what is hashed: a signature is "v1_" and a SHA-256 in base64 without padding, and no path is longer than these.
const (
	signatureLength = 3 + 43
	maxSigned       = 4096
)

// ReadSignature takes a signature out of a URL's query.
func ReadSignature(q url.Values, op Operation) Signature {
	return Signature{
		path: q.Get("path"), user: q.Get("username"), operation: op,
		expires: q.Get("signature_expiration"), limited: q.Has("signature_expiration"),
		given: q.Get("signature"), present: q.Has("signature"),
	}
}

// Sign makes a signature; expires is in Unix seconds, empty for never.
func Sign(path string, op Operation, user, token, expires string) string {
	raw := path + ":" + string(op) + ":" + user + ":" + token
	if expires != "" {
		raw += ":" + expires
	}
	sum := sha256.Sum256([]byte(raw))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// ErrBadSignature is for what nobody has signed. The SDKs know these by their text.
var (
	ErrBadSignature = fault.New(fault.Unauthed, "invalid signature")
	errNoSignature  = fault.New(fault.Unauthed, "missing signature query parameter")
	errOldSignature = fault.New(fault.Unauthed, "signature is already expired")
)

// Plausible fails for what no token can have made, before any is tried.
func (s Signature) Plausible() error {
	switch {
	case !s.present:
		return errNoSignature
	case len(s.given) != signatureLength, len(s.path)+len(s.user)+len(s.expires) > maxSigned:
		return ErrBadSignature
	}
	return nil
}

// CheckBy fails unless a token made the signature; it may have expired.
func (s Signature) CheckBy(token string) error {
	if err := s.Plausible(); err != nil {
		return err
	}
	if !Same(s.given, Sign(s.path, s.operation, s.user, token, s.expires)) {
		return ErrBadSignature
	}
	return nil
}

// Check fails unless a token made the signature and it is still good.
func (s Signature) Check(token string, now time.Time) error {
	if err := s.CheckBy(token); err != nil || !s.limited {
		return err
	}
	at, err := strconv.ParseInt(s.expires, 10, 64)
	switch {
	case err != nil:
		return ErrBadSignature
	case at < now.Unix():
		return errOldSignature
	}
	return nil
}
