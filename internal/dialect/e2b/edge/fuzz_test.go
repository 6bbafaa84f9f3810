package edge_test

import (
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/e2b/edge"
)

func FuzzHost(f *testing.F) {
	for _, host := range []string{
		"49983-sba.cove.test", "1-a.localhost:80", "49983-sba-c1.cove.test.", "99999-a.cove.test", "0-a.cove.test", "-1-a.cove.test",
		"+1-a.cove.test", "1-.cove.test", "1-a-.cove.test", "[::1]:80", "cove.test", "", "1-a.b.cove.test", "1-ä.cove.test",
		"1-a.localhost:|7\n", "1-a.localhost:",
	} {
		f.Add(host)
	}
	form := regexp.MustCompile(`^(?i)([1-9][0-9]{0,4})-([a-z0-9]+)(-[a-z0-9]+)?\.(cove\.test|localhost)\.?(:[0-9]*)?$`)
	f.Fuzz(func(t *testing.T, host string) {
		port, id, ok := edge.ParseHost(host, "cove.test")
		if !ok {
			return
		}
		m := form.FindStringSubmatch(host)
		if len(m) < 3 || m[1] != strconv.Itoa(port) || strings.ToLower(m[2]) != id || port > 65535 {
			t.Errorf("%q is %d, %q", host, port, id)
		}
	})
}

func FuzzRoute(f *testing.F) {
	f.Add("/kruise/sba/80/x", "", "", "")
	f.Add("/kruise/api/x", "1-a.cove.test", "sba", "80")
	f.Add("/files", "", "sba-c", "65536")
	e := edge.New(edge.Config{Domain: "cove.test", Tokens: tokens}, nil, nil, nil, quiet)
	f.Fuzz(func(t *testing.T, path, host, id, port string) {
		r := &http.Request{URL: &url.URL{Path: path}, Host: host, Header: http.Header{"E2b-Sandbox-Id": {id}, "E2b-Sandbox-Port": {port}}}
		if name, number, ok := edge.Route(e, r); ok && name != "" {
			if !regexp.MustCompile(`^[a-z0-9]{1,57}$`).MatchString(name) || number < 1 || number > 65535 {
				t.Errorf("%q, %q, %q, %q is %q, %d", path, host, id, port, name, number)
			}
		}
	})
}
