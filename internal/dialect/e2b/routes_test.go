package e2b_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

func TestPaths(t *testing.T) {
	w := newWorld(t)
	t.Run("health needs no key", func(t *testing.T) {
		if r := w.send("GET", "/health", "", "X-API-Key", ""); r.status != http.StatusNoContent || r.body != "" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("a tenant is one team", func(t *testing.T) {
		var teams []map[string]any
		w.ask(http.StatusOK, "GET", "/teams", "", &teams)
		if len(teams) != 1 || teams[0]["isDefault"] != true || teams[0]["apiKey"] != w.key || teams[0]["name"] != "acme" || teams[0]["teamID"] == "" {
			t.Errorf("%v", teams)
		}
	})
	t.Run("OpenKruise's paths are the same API", func(t *testing.T) {
		id := w.create(`{"templateID":"base"}`).SandboxID
		w.ask(http.StatusOK, "GET", "/kruise/api/sandboxes/"+id, "", nil)
		w.ask(http.StatusNoContent, "DELETE", "/kruise/api/sandboxes/"+id, "", nil)
	})
	t.Run("templates are the builder's, once the caller is known", func(t *testing.T) {
		for _, c := range [][2]string{
			{"GET", "/templates"}, {"POST", "/v3/templates"}, {"POST", "/v2/templates/a/builds/b"}, {"GET", "/templates/a/files/b"}, {"PATCH", "/v2/templates/a"},
			{"DELETE", "/templates/tags"}, {"GET", "/v2/templates"}, {"DELETE", "/templates/acme%2Fname"}, {"GET", "/default-templates"},
		} {
			if r := w.send(c[0], c[1], ""); r.body != "builder: acme "+c[0]+" "+c[1] {
				t.Errorf("%s %s: %+v", c[0], c[1], r)
			}
		}
		w.refused(w.send("GET", "/templates", "", "X-API-Key", ""), http.StatusUnauthorized)
	})
	t.Run("an upload brings its own right", func(t *testing.T) {
		if r := w.send("PUT", "/templates/a/files/b/upload?token=c", "tar", "X-API-Key", ""); r.body != "upload" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("what is not served yet says so", func(t *testing.T) {
		for _, c := range [][2]string{{"POST", "/volumes"}, {"GET", "/volumes/a"}, {"GET", "/volumecontent/a/file"}, {"GET", "/secrets"}, {"DELETE", "/secrets/a"}, {"GET", "/api-keys"}} {
			w.refused(w.send(c[0], c[1], ""), http.StatusNotImplemented)
		}
	})
	t.Run("what is not there is an error, and never a redirect", func(t *testing.T) {
		for _, c := range [][2]string{
			{"GET", "/"}, {"GET", "/nope"}, {"PATCH", "/sandboxes"}, {"GET", "/sandboxes/"}, {"GET", "//sandboxes"}, {"GET", "/sandboxes/../teams"}, {"GET", "/kruise/api/"},
		} {
			if text := w.refused(w.send(c[0], c[1], ""), http.StatusNotFound); !strings.Contains(text, "/cove/v1/openapi.json") {
				t.Errorf("%s %s: %s", c[0], c[1], text)
			}
		}
	})
}

func TestNetwork(t *testing.T) {
	w := newWorld(t)
	p := func(texts ...string) (list []netip.Prefix) {
		for _, text := range texts {
			list = append(list, netip.MustParsePrefix(text))
		}
		return list
	}
	internet := policy.Network{Mode: policy.Internet}
	for name, c := range map[string]struct {
		create string
		want   policy.Network
	}{
		"nothing":                       {``, internet},
		"the internet":                  {`"allow_internet_access":true`, internet},
		"no internet":                   {`"allow_internet_access":false`, policy.Network{Mode: policy.None}},
		"everything denied":             {`"network":{"denyOut":["0.0.0.0/0"]}`, policy.Network{Mode: policy.None}},
		"exceptions":                    {`"network":{"denyOut":["0.0.0.0/0"],"allowOut":["8.8.8.8","1.1.1.7/24"]}`, policy.Network{Mode: policy.List, Allow: p("8.8.8.8/32", "1.1.1.0/24")}},
		"exceptions from no internet":   {`"allow_internet_access":false,"network":{"allowOut":["8.8.8.8"]}`, policy.Network{Mode: policy.List, Allow: p("8.8.8.8/32")}},
		"some denied":                   {`"network":{"denyOut":["8.8.8.8","::/0"]}`, policy.Network{Mode: policy.Internet, Deny: p("8.8.8.8/32")}},
		"some denied and some of those": {`"network":{"denyOut":["8.8.0.0/16"],"allowOut":["8.8.8.8"]}`, policy.Network{Mode: policy.Internet, Deny: p("8.8.0.0/16"), Allow: p("8.8.8.8/32")}},
		"only what is open anyway":      {`"network":{"allowOut":["8.8.8.8"]}`, internet},
		"everything, twice":             {`"network":{"denyOut":["0.0.0.0/0"],"allowOut":["0.0.0.0/0"]}`, internet},
	} {
		t.Run("a create that asks for "+name, func(t *testing.T) {
			id := w.create(strings.TrimSuffix(`{"templateID":"base",`+c.create, ",") + "}").SandboxID
			if diff := cmp.Diff(c.want, w.driver.network(id), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("a change replaces everything but the way in, and is shown", func(t *testing.T) {
		id := w.create(`{"templateID":"base","network":{"denyOut":["8.8.8.8"],"allowPublicTraffic":false,"maskRequestHost":"x.example"}}`).SandboxID
		w.ask(http.StatusNoContent, "PUT", "/sandboxes/"+id+"/network", `{"allowOut":["1.1.1.1"],"allow_internet_access":false}`, nil)
		if got := w.driver.network(id); got.Mode != policy.List || got.Allow[0] != p("1.1.1.1/32")[0] {
			t.Errorf("%+v", got)
		}
		d := w.detail(id)
		if string(d.Network) != `{"allowOut":["1.1.1.1"],"allowPublicTraffic":false,"maskRequestHost":"x.example"}` || d.Internet == nil || *d.Internet {
			t.Errorf("%s, %v", d.Network, d.Internet)
		}
		w.ask(http.StatusNoContent, "PUT", "/sandboxes/"+id+"/network", `{}`, nil)
		d = w.detail(id)
		if got := w.driver.network(id); got.Mode != policy.Internet || string(d.Network) != `{"allowPublicTraffic":false,"maskRequestHost":"x.example"}` || d.Internet != nil {
			t.Errorf("%+v, %s, %v", got, d.Network, d.Internet)
		}
		w.refused(w.send("PUT", "/sandboxes/"+id+"/network", `{"allowOut":["a.example"],"denyOut":["0.0.0.0/0"]}`), http.StatusNotImplemented)
		w.refused(w.send("PUT", "/sandboxes/"+id+"/network", `{"denyOut":["a.example"]}`), http.StatusBadRequest)
	})
}

func TestNetworkWhereTheDefaultIsNone(t *testing.T) {
	w := newWorld(t, func(_ *e2b.Config, c *sandbox.Config) { c.DefaultNetwork.Mode = policy.None })
	for name, c := range map[string]struct {
		body string
		want policy.Mode
	}{
		"nothing":                    {`{}`, policy.None},
		"everything, twice":          {`{"denyOut":["0.0.0.0/0"],"allowOut":["0.0.0.0/0"]}`, policy.None},
		"everything but one":         {`{"denyOut":["8.8.8.8"]}`, policy.None},
		"an exception":               {`{"denyOut":["8.8.0.0/16"],"allowOut":["8.8.8.8"]}`, policy.None},
		"one address and no other":   {`{"denyOut":["0.0.0.0/0"],"allowOut":["8.8.8.8"]}`, policy.List},
		"what is not open otherwise": {`{"allowOut":["8.8.8.8"]}`, policy.None},
	} {
		t.Run(name+" opens no more than it names", func(t *testing.T) {
			id := w.create(`{"templateID":"base","network":` + c.body + `}`).SandboxID
			if got := w.driver.network(id); got.Mode != c.want {
				t.Errorf("a create: %+v", got)
			}
			w.ask(http.StatusNoContent, "PUT", "/sandboxes/"+id+"/network", c.body, nil)
			if got := w.driver.network(id); got.Mode != c.want {
				t.Errorf("a change: %+v", got)
			}
		})
	}
}

func TestOfManyChangesOfANetworkTheOneInForceIsShown(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base"}`).SandboxID
	for range 5 {
		var work sync.WaitGroup
		for i := range 8 {
			work.Go(func() {
				w.ask(http.StatusNoContent, "PUT", "/sandboxes/"+id+"/network", fmt.Sprintf(`{"denyOut":["8.8.8.%d"]}`, i), nil)
			})
		}
		work.Wait()
		if got, shown := w.driver.network(id).Deny[0].Addr(), string(w.detail(id).Network); shown != fmt.Sprintf(`{"denyOut":["%s"]}`, got) {
			t.Errorf("%s is shown, and %s is denied", shown, got)
		}
	}
}
