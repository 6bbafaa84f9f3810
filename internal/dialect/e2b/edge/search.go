package edge

import (
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// A search by signature looks at every living sandbox, for anybody: few go on at once, and not many wait.
const (
	maxSearches = 2
	maxWaiting  = 32
)

// The SDKs know the first by its text.
var (
	errExpired  = fault.New(fault.Unauthed, "signature is already expired")
	errSearches = fault.New(fault.Unavailable, "too many signed URLs are being looked up, try again")
)

// signed finds the sandbox of a file URL that carries nothing but a signature: the one whose token made it.
func (e *Edge) signed(r *http.Request) (id string, err error) {
	q := r.URL.Query()
	if err := target.ReadSignature(q, operation(r)).Plausible(); err != nil {
		return "", err
	}
	if err := unexpired(q, time.Now()); err != nil {
		return "", err
	}
	leave, err := e.search(r)
	if err != nil {
		return "", err
	}
	defer leave()
	made := madeBy(q, operation(r))
	e.sandboxes.Each(func(sb sandbox.Sandbox) bool {
		if made(e.cfg.Tokens.Envd(sb.ID)) {
			id = sb.ID
		}
		return id == "" && r.Context().Err() == nil
	})
	if id == "" {
		return "", target.ErrBadSignature
	}
	return id, nil
}

// search takes a place among those who search, and waits for it where few do.
func (e *Edge) search(r *http.Request) (leave func(), err error) {
	select {
	case e.queue <- struct{}{}:
	default:
		return nil, errSearches
	}
	select {
	case e.searches <- struct{}{}:
		return func() { <-e.searches; <-e.queue }, nil
	case <-r.Context().Done():
		<-e.queue
		return nil, fault.New(fault.Unavailable, "the request was cancelled")
	}
}

// unexpired fails for a URL that is good for nothing any more, whoever signed it.
func unexpired(q url.Values, now time.Time) error {
	if !q.Has("signature_expiration") {
		return nil
	}
	at, err := strconv.ParseInt(q.Get("signature_expiration"), 10, 64)
	switch {
	case err != nil:
		return target.ErrBadSignature
	case at < now.Unix():
		return errExpired
	}
	return nil
}

// madeBy tells whether a token made a URL's signature, as target.Sign does: what stands before the token, which may be long,
// is hashed only once.
func madeBy(q url.Values, op target.Operation) func(token string) bool {
	given, end := q.Get("signature"), ""
	if expires := q.Get("signature_expiration"); expires != "" {
		end = ":" + expires
	}
	before := sha256.New()
	before.Write([]byte(q.Get("path") + ":" + string(op) + ":" + q.Get("username") + ":"))
	return func(token string) bool {
		h, err := before.(hash.Cloner).Clone()
		if err != nil {
			return false // a SHA-256 can be cloned
		}
		h.Write([]byte(token + end))
		return target.Same(given, "v1_"+base64.RawStdEncoding.EncodeToString(h.Sum(nil)))
	}
}
