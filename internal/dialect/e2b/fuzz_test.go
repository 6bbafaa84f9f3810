package e2b_test

import (
	"bytes"
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

func FuzzABodyIsDecodedOrRefusedAsInvalid(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, "\f{}", `null`, `[`, `{} {}`, `{"templateID":"base","timeout":1e400}`, `{"network":{"allowOut":["1.1.1.1","a.b"],"denyOut":["::/0"]}}`,
		`{"metadata":{"a":"b"},"autoResume":{"enabled":true},"iam":{"tokens":{}}}`, `{"count":1,"memory":null,"name":"a/b:c"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, value := range []any{
			&e2b.NewSandbox{}, &e2b.Timeout{}, &e2b.Refresh{}, &e2b.Pause{}, &e2b.Resume{}, &e2b.Fork{}, &e2b.SnapshotRequest{}, &e2b.NetworkUpdate{},
		} {
			err := transfer.Decode(body, value)
			if err != nil && !fault.Is(err, fault.Invalid) {
				t.Errorf("%T: %v", value, err)
			}
			if err == nil && len(bytes.Trim(body, " \t\r\n")) > 0 && !json.Valid(body) {
				t.Errorf("%T took %q", value, body)
			}
		}
	})
}

func FuzzANetworkIsReadOrRefused(f *testing.F) {
	for _, seed := range []string{`{}`, `{"allowOut":["1.1.1.1/0","fe80::1%eth0"],"denyOut":["0.0.0.0/0"]}`, `{"maskRequestHost":"a:${PORT}"}`, `{"denyOut":["::ffff:1.2.3.4/96"]}`} {
		f.Add([]byte(seed), true)
	}
	f.Fuzz(func(t *testing.T, body []byte, internet bool) {
		n, err := e2b.ParseNetwork(body)
		if err == nil {
			if strings.ContainsAny(n.MaskRequestHost, "\r\n\x00 /") {
				t.Errorf("the mask %q is no host", n.MaskRequestHost)
			}
			p, failed := n.Policy(&internet)
			if err = failed; err == nil && p != nil && len(p.Allow) <= 256 && len(p.Deny) <= 256 {
				if err := p.Validate(); err != nil {
					t.Errorf("%s makes the policy %+v: %v", body, p, err)
				}
			}
		}
		if err != nil && !fault.Is(err, fault.Invalid) && !fault.Is(err, fault.Unsupported) {
			t.Error(err)
		}
	})
}

func FuzzAMetadataFilterIsReadOrRefused(f *testing.F) {
	f.Add("a=b&c=d")
	f.Add("a%2520=%252B")
	f.Add("%ZZ=&&=")
	f.Fuzz(func(t *testing.T, text string) {
		pairs, err := e2b.ParseMetadata(text)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Error(err)
			}
			return
		}
		form := url.Values{}
		for k, v := range pairs {
			form.Set(url.PathEscape(k), url.PathEscape(v))
		}
		again, err := e2b.ParseMetadata(form.Encode())
		if err != nil || len(again) != len(pairs) {
			t.Fatalf("%q is %q, which is %q again, %v", text, pairs, again, err)
		}
		for k, v := range pairs {
			if again[k] != v {
				t.Errorf("%q became %q", v, again[k])
			}
		}
	})
}

func FuzzASnapshotsNameIsReadOrRefused(f *testing.F) {
	for _, seed := range []string{"a", "a:b", "acme/a:b", "//", "acme/../x:", "::"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		name, err := e2b.ParseName("acme", text)
		if err != nil {
			return
		}
		if again, err := e2b.ParseName("acme", "acme/"+name); again != name || err != nil || strings.ContainsAny(name, "/ \n") {
			t.Errorf("%q is %q and again %q, %v", text, name, again, err)
		}
	})
}
