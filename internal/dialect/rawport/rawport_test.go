package rawport_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/rawport"
)

// known is a server's keys, by their digits.
type known []string

func (k known) Known(_ context.Context, digits string) bool { return slices.Contains(k, digits) }

// strip removes credentials from a request as the proxy does.
func strip(r *http.Request, k known) { rawport.StripCredentials(r.Clone(r.Context()), r, k) }

func TestStripCredentials(t *testing.T) {
	digits, token, hash := strings.Repeat("0a", 20), strings.Repeat("0b", 32), strings.Repeat("0c", 20)
	key := "e2b_" + digits
	r := httptest.NewRequest("GET", "/p?a=1;2&api_key="+digits+"&sha="+hash+"&sha="+digits+"&x=%65"+key[1:]+"&b=%zz", nil)
	r.Header = http.Header{
		"X-Api-Key": {key, "theirs"}, "Authorization": {"Bearer " + token}, "X-Access-Token": {token, "short"},
		"Cookie":               {"a=b; cove_session=c; api_key=" + digits, "__Host-cove=d; e=f; g=" + hash},
		"Open-Sandbox-Api-Key": {"anything"}, "E2b-Traffic-Access-Token": {"anything"}, "X-Execd-Access-Token": {"anything"},
		"Sec-Websocket-Protocol": {"chat, " + key}, "X-Commit": {hash}, "X-Copy": {digits}, "X-Other": {"e2b_" + hash},
	}
	strip(r, nil)
	want := http.Header{
		"X-Api-Key": {"theirs"}, "X-Access-Token": {"short"}, "Cookie": {"a=b; e=f; g=" + hash}, "Sec-Websocket-Protocol": {"chat"},
		"X-Commit": {hash},
	}
	if diff := cmp.Diff(want, r.Header); diff != "" {
		t.Error(diff)
	}
	if want := "a=1;2&sha=" + hash + "&b=%zz"; r.URL.RawQuery != want {
		t.Errorf("query %q, want %q", r.URL.RawQuery, want)
	}
	for _, theirs := range []string{"Basic abc", "Bearer theirs", "Basic dXNlcjpwYXNz"} {
		r.Header = http.Header{"Authorization": {theirs}}
		if strip(r, nil); r.Header.Get("Authorization") != theirs {
			t.Errorf("%q is gone", theirs)
		}
	}
	r.Header = http.Header{"Authorization": {"Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+digits))}}
	if strip(r, nil); len(r.Header) != 0 {
		t.Errorf("a key as a password passes: %v", r.Header)
	}
}

func TestStripCredentials_Referer(t *testing.T) {
	for referer, kept := range map[string]bool{
		"http://a.test/sandboxes/sb1~abc~sign/proxy/80/": false, "http://a.test/agents/acme.0a0a0a0a/x": false,
		"http://a.test/?next=%2Fagents%2Facme.0a0a0a0a%2Fx": false, "http://a.test/agents/list?x=1.5": true,
		"http://a.test/~user/": true, "http://a.test/": true,
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set("Referer", referer)
		if strip(r, nil); (r.Header.Get("Referer") != "") != kept {
			t.Errorf("%s: %v", referer, r.Header)
		}
	}
}

func TestStripCredentials_PathHeaders(t *testing.T) {
	for _, name := range []string{
		"X-Original-Url", "X-Forwarded-Uri", "X-Envoy-Original-Path", "X-Forwarded-Prefix", "X-Replaced-Path", "X-Any",
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set(name, "/agents/acme."+strings.Repeat("0a", 32))
		if strip(r, nil); r.Header.Get(name) != "" {
			t.Errorf("%s: %s", name, r.Header.Get(name))
		}
	}
}

func TestStripCredentials_KnownKeys(t *testing.T) {
	key, hash := strings.Repeat("0a", 20), strings.Repeat("0c", 20)
	in := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
	for name, c := range map[string]struct{ header, value, kept string }{
		"a token":              {"X-Auth-Token", "KEY", ""},
		"a name of any kind":   {"X-Any", "id_KEY", ""},
		"an address":           {"Referer", "http://a.test/x?api_key=KEY", ""},
		"an escaped address":   {"Referer", "http://a.test/x?next=%2fy%3fapi_key%3dKEY", ""},
		"escaped twice":        {"Referer", "http://a.test/x?next=%252fy%253fapi_key%253dKEY", ""},
		"a subprotocol":        {"Sec-Websocket-Protocol", "chat, KEY", "chat"},
		"a cookie":             {"Cookie", "a=b; token=KEY; Key=KEY", "a=b"},
		"a password":           {"X-Auth", "Basic " + in("user:"+key), ""},
		"a password, prefixed": {"X-Auth", "basic  " + in("e2b_"+key), ""},
		"a password, escaped":  {"Cookie", "auth=Basic%20" + strings.TrimRight(in("user:"+key), "=") + "%3D%3D; a=b", "a=b"},
		"a hash":               {"If-None-Match", `"HASH"`, `"HASH"`},
		"a hash as a cookie":   {"Cookie", "session=HASH", "session=HASH"},
		"a longer text":        {"X-Sum", "0KEY", "0KEY"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.NewReplacer("KEY", key, "HASH", hash)
			c.value, c.kept = text.Replace(c.value), text.Replace(c.kept)
			r := httptest.NewRequest("GET", "/", nil)
			r.Header.Set(c.header, c.value)
			if strip(r, known{key}); r.Header.Get(c.header) != c.kept {
				t.Errorf("%q is left of %q", r.Header.Get(c.header), c.value)
			}
		})
	}
	for _, query := range []string{"token=", "key=", "access-token=", "E2B_API_KEY=", "", "next=%2Fx%3Fkey%3d", "auth=Basic+" + in("x:"+key)} {
		r := httptest.NewRequest("GET", "/?sha="+hash+"&"+query+key, nil)
		if strip(r, known{key}); r.URL.RawQuery != "sha="+hash {
			t.Errorf("%q is left", r.URL.RawQuery)
		}
	}
}

func TestStripCredentials_HopByHop(t *testing.T) {
	key := strings.Repeat("0a", 20)
	in := httptest.NewRequest("GET", "/", nil)
	in.Header = http.Header{"X-Api-Key": {key}, "X-Copy": {"v1." + key + "a"}, "Connection": {"X-Api-Key"}}
	out := in.Clone(t.Context())
	out.Header.Del("X-Api-Key") // as the reverse proxy does, since Connection names it
	if rawport.StripCredentials(in, out, known{}); out.Header.Get("X-Copy") != "" {
		t.Errorf("the copy of a key passes: %v", out.Header)
	}
}

// counted counts what it is asked for, and knows no key.
type counted map[string]int

func (c counted) Known(_ context.Context, digits string) bool {
	c[digits]++
	return false
}

func TestStripCredentials_Lookups(t *testing.T) {
	query := func(n int) string {
		var pairs []string
		for i := range n {
			pairs = append(pairs, fmt.Sprintf("sha=%040x", i))
		}
		return strings.Join(pairs, "&")
	}
	for n, want := range map[int]int{0: 0, 1: 1, 8: 8, 9: 8, 500: 8} {
		asked := counted{}
		r := httptest.NewRequest("GET", "/?a=b&"+query(n)+"&"+query(n), nil)
		rawport.StripCredentials(r, r, asked)
		if got := strings.Count(r.URL.RawQuery, "sha="); len(asked) != want || got != 2*want {
			t.Errorf("of %d texts %d are asked for and %d left, want %d", n, len(asked), got, want)
		}
		for text, times := range asked {
			if times != 1 {
				t.Errorf("%s is asked for %d times", text, times)
			}
		}
	}
	r := httptest.NewRequest("GET", "/?"+query(1)+"&a=b", nil)
	if rawport.StripCredentials(r, r, nil); r.URL.RawQuery != "a=b" {
		t.Errorf("without keys %q is left", r.URL.RawQuery)
	}
}

func TestCookiesStayWithTheirPort(t *testing.T) {
	set := []string{"a=b; Domain=cove.test; Path=/", "cove_session=x", "c=d"}
	for name, c := range map[string]struct {
		visit rawport.Visit
		want  []string
	}{
		"a host of its own":     {rawport.Visit{Origin: rawport.OriginOwn}, []string{"a=b; Path=/", "c=d"}},
		"a path of ours":        {rawport.Visit{Origin: rawport.OriginPath, Path: "/p/1/"}, []string{"a=b; Path=/p/1/", "c=d; Path=/p/1/"}},
		"no place of their own": {rawport.Visit{Origin: rawport.OriginShared}, nil},
	} {
		h := http.Header{"Set-Cookie": append([]string{}, set...)}
		rawport.NarrowCookies(h, c.visit)
		if diff := cmp.Diff(c.want, h["Set-Cookie"]); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func FuzzStripCredentials(f *testing.F) {
	f.Add("a=1; cove_session=x", "Bearer e2b_0123456789abcdef", "Set-Cookie: a=b; Domain=x", "a=e2b_0123456789abcdef&b")
	f.Add("token="+strings.Repeat("0a", 20), "", "Basic MGEwYTBhMGEwYTBhMGEwYTBhMGEwYTBhMGEwYTBhMGEwYTBhMGEwYQ==", "next=%253dx")
	f.Fuzz(func(t *testing.T, cookie, authorization, set, query string) {
		r := &http.Request{URL: &url.URL{RawQuery: query}, Header: http.Header{"Cookie": {cookie}, "Authorization": {authorization}, "Set-Cookie": {set}}}
		key := strings.Repeat("0a", 20)
		strip(r, known{key})
		for _, c := range r.Cookies() {
			if strings.HasPrefix(c.Name, "cove_") {
				t.Errorf("%q keeps %q", cookie, c.Name)
			}
		}
		if left := fmt.Sprint(r.Header, r.URL.RawQuery); auth.HasKey(left) {
			t.Errorf("a key is left in %s", left)
		}
		for _, left := range append(slices.Concat(slices.Collect(maps.Values(r.Header))...), r.URL.RawQuery) {
			for _, text := range auth.Readings(left) {
				if slices.Contains(slices.Collect(auth.Lookalikes(text)), key) {
					t.Errorf("a known key is left in %q", left)
				}
			}
		}
		rawport.NarrowCookies(r.Header, rawport.Visit{})
		for _, c := range (&http.Response{Header: r.Header}).Cookies() {
			if c.Domain != "" || strings.HasPrefix(c.Name, "cove_") {
				t.Errorf("%q keeps %+v", set, c)
			}
		}
	})
}
