package edge_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/edge"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/sandbox"
)

// one is a domain with one sandbox, found in no time.
type one struct {
	*domain
	sb      sandbox.Sandbox
	stopped chan struct{}
}

func (o one) Lookup(context.Context, string) (auth.Principal, sandbox.Sandbox, error) {
	return auth.Principal{Tenant: "acme"}, o.sb, nil
}
func (o one) Stopped(string) <-chan struct{} { return o.stopped }

// BenchmarkEdge is what the edge adds to a request for envd.
func BenchmarkEdge(b *testing.B) {
	options := target.Options{Secure: true, Timeout: 300, TemplateID: "base"}
	o := one{stopped: make(chan struct{}), sb: sandbox.Sandbox{
		ID: "sba", State: sandbox.StateRunning, Annotations: map[string]string{target.Annotation: options.Encode()},
	}}
	nothing := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	e := edge.New(edge.Config{Tokens: tokens}, o, nothing, nothing, quiet)
	for b.Loop() {
		r := httptest.NewRequest("POST", "/process.Process/List", nil)
		r.Header.Set("E2b-Sandbox-Id", "sba")
		r.Header.Set("E2b-Sandbox-Port", "49983")
		r.Header.Set("X-Access-Token", tokens.Envd("sba"))
		e.ServeHTTP(httptest.NewRecorder(), r)
	}
}
