package rawport_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/rawport"
)

func TestOurKeysStayBetweenTheCallerAndUs(t *testing.T) {
	key, token := "e2b_"+strings.Repeat("0a", 20), strings.Repeat("0a", 32)
	h := http.Header{
		"X-Api-Key": {key, "theirs"}, "Authorization": {"Bearer " + token}, "X-Token": {token, "short"},
		"Cookie": {"a=b; cove_session=c", "__Host-cove=d; e=f"},
	}
	rawport.StripKeys(h)
	rawport.StripTokens(h, "x-token")
	want := http.Header{"X-Api-Key": {"theirs"}, "X-Token": {"short"}, "Cookie": {"a=b; e=f"}}
	if diff := cmp.Diff(want, h); diff != "" {
		t.Error(diff)
	}
	for _, theirs := range []string{"Basic abc", "Bearer theirs"} {
		h := http.Header{"Authorization": {theirs}}
		if rawport.StripKeys(h); h.Get("Authorization") != theirs {
			t.Errorf("%q is gone", theirs)
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
