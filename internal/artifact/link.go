package artifact

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// MaxLinkTTL bounds how long a link holds: so long does a key that was rotated out stay.
const MaxLinkTTL = 7 * 24 * time.Hour

// maxToken bounds what is looked at.
const maxToken = 1024

// LinkKey signs links. It is a secret.
type LinkKey struct {
	ID      string
	Secret  auth.Secret // hexadecimal
	Created time.Time
	Until   time.Time // after which its links are nobody's; zero: it signs
}

// ring remembers the key that signs. What counts is the index, which is asked whenever a link comes back: other servers may
// share it.
type ring struct {
	mu  sync.Mutex
	now LinkKey
}

func (r *ring) set(k LinkKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = k
}

func (r *ring) get() LinkKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

func newLinkKey() LinkKey {
	var id [4]byte
	var secret [32]byte
	_, _ = rand.Read(id[:]) // never fails
	_, _ = rand.Read(secret[:])
	return LinkKey{ID: hex.EncodeToString(id[:]), Secret: auth.Secret(hex.EncodeToString(secret[:])), Created: time.Now().UTC().Truncate(time.Microsecond)}
}

// firstKey finds the key that signs, or makes it where there never was one.
func (k *Keeper) firstKey(ctx context.Context) error {
	keys, err := k.index.LinkKeys(ctx)
	if err != nil {
		return err
	}
	if len(keys) == 0 || !keys[0].Until.IsZero() {
		if err := k.index.RotateLinkKey(ctx, newLinkKey(), time.Time{}, true); err != nil {
			return err
		}
		if keys, err = k.index.LinkKeys(ctx); err != nil {
			return err
		}
	}
	k.ring.set(keys[0])
	return nil
}

// RotateKey signs links with a new key from now on. Links of the one before hold until they end, or end at once with revoke.
func (k *Keeper) RotateKey(ctx context.Context, revoke bool) error {
	others := time.Now().Add(MaxLinkTTL)
	if revoke {
		others = time.Now()
	}
	key := newLinkKey()
	if err := k.index.RotateLinkKey(ctx, key, others, false); err != nil {
		return err
	}
	k.ring.set(key)
	return k.index.DropLinkKeys(ctx, time.Now())
}

// ticket is what a token says.
type ticket struct {
	Key      string `json:"k"`
	Artifact string `json:"a"`
	Expires  int64  `json:"e"` // Unix seconds
}

// Link makes a link that needs no key, for so long; zero is the usual time.
func (k *Keeper) Link(a Artifact, ttl time.Duration) (string, time.Time, error) {
	if ttl == 0 {
		ttl = k.cfg.LinkTTL
	}
	switch {
	case ttl < time.Second || ttl > MaxLinkTTL:
		return "", time.Time{}, fault.New(fault.Invalid, "a link holds for one second to %d hours, not %v", int(MaxLinkTTL.Hours()), ttl)
	case a.ID == "":
		return "", time.Time{}, fault.New(fault.Invalid, "a file that was not kept has no link")
	}
	expires := time.Now().Add(ttl).UTC().Truncate(time.Second)
	key := k.ring.get()
	token := seal(key, ticket{Key: key.ID, Artifact: a.ID, Expires: expires.Unix()})
	return strings.TrimSuffix(k.cfg.PublicURL, "/") + "/artifacts/" + a.ID + "?token=" + url.QueryEscape(token), expires, nil
}

func seal(key LinkKey, t ticket) string {
	payload, _ := json.Marshal(t) // strings and a number
	return encode(payload) + "." + encode(signature(key, payload))
}

func encode(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func signature(key LinkKey, payload []byte) []byte {
	mac := hmac.New(sha256.New, []byte(key.Secret))
	mac.Write([]byte("artifact link\x00"))
	mac.Write(payload)
	return mac.Sum(nil)
}

// Redeem finds what a link leads to. Unauthed: the token is missing, wrong or over; NotFound: there is no such artifact;
// Denied: the token is another's.
func (k *Keeper) Redeem(ctx context.Context, id, token string) (Artifact, error) {
	t, err := k.unseal(ctx, token)
	if err != nil {
		return Artifact{}, err
	}
	a, err := k.find(ctx, id)
	if fault.Is(err, fault.NotFound) {
		k.cfg.Observer.LinkRefused("unknown")
	}
	if err != nil {
		return Artifact{}, err
	}
	if !auth.Same(t.Artifact, id) {
		k.cfg.Observer.LinkRefused("unknown")
		return Artifact{}, fault.New(fault.Denied, "the token is that of another artifact")
	}
	return a, nil
}

// OpenLinked opens what Redeem has found.
func (k *Keeper) OpenLinked(ctx context.Context, a Artifact) (Content, error) { return k.open(ctx, a) }

func (k *Keeper) unseal(ctx context.Context, token string) (ticket, error) {
	refused := func(reason, sentence string) (ticket, error) {
		k.cfg.Observer.LinkRefused(reason)
		return ticket{}, fault.New(fault.Unauthed, "%s", sentence)
	}
	if token == "" {
		return refused("missing", "the token is missing: ask for a new link")
	}
	t, payload, mac, ok := parse(token)
	if !ok {
		return refused("malformed", "the token is malformed: use the link as it was given")
	}
	keys, err := k.index.LinkKeys(ctx)
	if err != nil {
		return ticket{}, err
	}
	if !signed(keys, t, payload, mac) {
		return refused("signature", "the token's signature is not valid: it was changed, or revoked")
	}
	if time.Now().Unix() >= t.Expires {
		return refused("expired", "the token has expired: ask for a new link")
	}
	return t, nil
}

func parse(token string) (t ticket, payload, mac []byte, ok bool) {
	head, tail, found := strings.Cut(token, ".")
	if !found || len(token) > maxToken {
		return t, nil, nil, false
	}
	payload, err := base64.RawURLEncoding.Strict().DecodeString(head)
	if err != nil {
		return t, nil, nil, false
	}
	mac, err = base64.RawURLEncoding.Strict().DecodeString(tail)
	if err != nil || len(mac) != sha256.Size {
		return t, nil, nil, false
	}
	err = json.Unmarshal(payload, &t)
	return t, payload, mac, err == nil && t.Artifact != "" && t.Key != ""
}

func signed(keys []LinkKey, t ticket, payload, mac []byte) bool {
	for _, key := range keys {
		if key.ID == t.Key && (key.Until.IsZero() || time.Now().Before(key.Until)) {
			return hmac.Equal(mac, signature(key, payload))
		}
	}
	return false
}
