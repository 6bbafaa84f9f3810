package edge

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

func TestFewWaitForASearch(t *testing.T) {
	e := New(Config{}, nil, nil, nil, slog.New(slog.DiscardHandler)) // a search would fail without sandboxes
	r := httptest.NewRequest("GET", "/files?path=x&signature="+url.QueryEscape(target.Sign("x", target.OpRead, "", "t", "")), nil)
	for range maxSearches {
		if _, err := e.search(r); err != nil {
			t.Fatal(err)
		}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.signed(r.WithContext(gone)); !fault.Is(err, fault.Unavailable) || len(e.queue) != maxSearches {
		t.Errorf("one that leaves: %v, and %d are in the queue", err, len(e.queue))
	}
	for range maxWaiting {
		e.queue <- struct{}{}
	}
	if _, err := e.signed(r); err != errSearches || asRefusal(err).status != 503 {
		t.Errorf("one more than may wait: %v", err)
	}
}

func TestASearchReadsSignaturesAsTheyAreMade(t *testing.T) {
	for _, expires := range []string{"", "9999999999"} {
		path := strings.Repeat("long/", 100)
		q := url.Values{"path": {path}, "username": {"user"}, "signature": {target.Sign(path, target.OpWrite, "user", "token", expires)}}
		if expires != "" {
			q.Set("signature_expiration", expires)
		}
		made := madeBy(q, target.OpWrite)
		for token, want := range map[string]bool{"other": false, "token": true, "": false} {
			if made(token) != want {
				t.Errorf("%q until %q: %v", token, expires, !want)
			}
		}
		if madeBy(q, target.OpRead)("token") {
			t.Error("a signature is good for another operation")
		}
	}
}
