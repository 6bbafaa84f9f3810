package target_test

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"

var today = time.Unix(1_700_000_000, 0)

func TestSignature(t *testing.T) {
	// The vector of E2B's own tests.
	const vector = "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := target.Sign("hello.txt", target.OpRead, "user", token, ""); got != vector {
		t.Fatal(got)
	}
	sign := func(expires string) string { return target.Sign("a", target.OpRead, "", token, expires) }
	for name, c := range map[string]struct {
		q        url.Values
		by, want string
	}{
		"the vector":               {url.Values{"path": {"hello.txt"}, "username": {"user"}, "signature": {vector}}, "", ""},
		"still good":               {url.Values{"path": {"a"}, "signature": {sign("1700000000")}, "signature_expiration": {"1700000000"}}, "", ""},
		"expired":                  {url.Values{"path": {"a"}, "signature": {sign("1699999999")}, "signature_expiration": {"1699999999"}}, "", "signature is already expired"},
		"an expiry that is empty":  {url.Values{"path": {"a"}, "signature": {sign("")}, "signature_expiration": {""}}, "", "invalid signature"},
		"an expiry that is a word": {url.Values{"path": {"a"}, "signature": {sign("soon")}, "signature_expiration": {"soon"}}, "", "invalid signature"},
		"an expiry that was added": {url.Values{"path": {"a"}, "signature": {sign("")}, "signature_expiration": {"1800000000"}}, "invalid signature", "invalid signature"},
		"none":                     {url.Values{"path": {"a"}}, "missing signature query parameter", "missing signature query parameter"},
		"an empty one":             {url.Values{"path": {"a"}, "signature": {""}}, "invalid signature", "invalid signature"},
		"another path":             {url.Values{"path": {"b"}, "signature": {sign("")}}, "invalid signature", "invalid signature"},
		"a path that none has": {url.Values{"path": {strings.Repeat("a", 5000)}, "signature": {target.Sign(strings.Repeat("a", 5000), target.OpRead, "", token, "")}},
			"invalid signature", "invalid signature"},
	} {
		s := target.ReadSignature(c.q, target.OpRead)
		if got := said(s.CheckBy(token)); got != c.by {
			t.Errorf("%s: made by the token: %q, want %q", name, got, c.by)
		}
		if got := said(s.Check(token, today)); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func said(err error) string {
	if err == nil {
		return ""
	}
	return fault.Message(err)
}

func FuzzSignature(f *testing.F) {
	good := url.Values{"path": {"a"}, "signature": {target.Sign("a", target.OpRead, "", token, "9999999999")}, "signature_expiration": {"9999999999"}}
	f.Add(good.Encode())
	f.Add("path=a&signature=v1_x")
	f.Add("signature=%zz&path=a;b")
	f.Fuzz(func(t *testing.T, query string) {
		q, _ := url.ParseQuery(query)
		err := target.ReadSignature(q, target.OpRead).Check(token, today)
		if err != nil && !fault.Is(err, fault.Unauthed) {
			t.Errorf("%q: %v", query, err)
		}
		if err == nil && q.Get("signature") != target.Sign(q.Get("path"), target.OpRead, q.Get("username"), token, q.Get("signature_expiration")) {
			t.Errorf("%q was let in", query)
		}
		if err != nil && strings.Contains(err.Error(), token) {
			t.Errorf("the token is in %v", err)
		}
	})
}

func TestEveryFailureHasAStatus(t *testing.T) {
	for _, kind := range fault.Kinds {
		if got := target.Status(kind); got < 400 || (got == 500) != (kind == fault.Internal) {
			t.Errorf("%s is %d", kind, got)
		}
	}
	if got := target.Status(fault.DiskFull); got != 507 {
		t.Errorf("a full disk is %d", got)
	}
	if got := target.Status(fault.Unsupported); got != 501 {
		t.Errorf("what this server cannot do is %d", got)
	}
}
