package rawport_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/rawport"
)

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
	rawport.StripCredentials(r)
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
		if rawport.StripCredentials(r); r.Header.Get("Authorization") != theirs {
			t.Errorf("%q is gone", theirs)
		}
	}
	r.Header = http.Header{"Authorization": {"Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+digits))}}
	if rawport.StripCredentials(r); len(r.Header) != 0 {
		t.Errorf("a key as a password passes: %v", r.Header)
	}
}

func TestStripCredentials_Referer(t *testing.T) {
	for referer, kept := range map[string]bool{
		"http://a.test/sandboxes/sb1~abc~sign/proxy/80/": false, "http://a.test/agents/acme.0a/x": false,
		"http://a.test/~user/": true, "http://a.test/": true,
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set("Referer", referer)
		if rawport.StripCredentials(r); (r.Header.Get("Referer") != "") != kept {
			t.Errorf("%s: %v", referer, r.Header)
		}
	}
}

func TestStripCredentials_PathHeaders(t *testing.T) {
	for _, name := range []string{"X-Original-Url", "X-Original-Uri", "X-Forwarded-Uri", "X-Envoy-Original-Path"} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set(name, "/agents/acme.0a/x")
		if rawport.StripCredentials(r); r.Header.Get(name) != "" {
			t.Errorf("%s: %s", name, r.Header.Get(name))
		}
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
	f.Fuzz(func(t *testing.T, cookie, authorization, set, query string) {
		r := &http.Request{URL: &url.URL{RawQuery: query}, Header: http.Header{"Cookie": {cookie}, "Authorization": {authorization}, "Set-Cookie": {set}}}
		rawport.StripCredentials(r)
		for _, c := range r.Cookies() {
			if strings.HasPrefix(c.Name, "cove_") {
				t.Errorf("%q keeps %q", cookie, c.Name)
			}
		}
		if left := fmt.Sprint(r.Header, r.URL.RawQuery); auth.HasKey(left) {
			t.Errorf("a key is left in %s", left)
		}
		rawport.NarrowCookies(r.Header, rawport.Visit{})
		for _, c := range (&http.Response{Header: r.Header}).Cookies() {
			if c.Domain != "" || strings.HasPrefix(c.Name, "cove_") {
				t.Errorf("%q keeps %+v", set, c)
			}
		}
	})
}
