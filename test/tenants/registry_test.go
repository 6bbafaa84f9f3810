package tenants_test

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// newRegistry starts an image registry. A repository NAME/… is for the user NAME, with the password "of-NAME".
func newRegistry(t *testing.T) (host string) {
	t.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	open := true // while the test fills it
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		owner, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v2/"), "/")
		if !open && (password != "of-"+user || owner != "" && owner != user) {
			w.Header().Set("WWW-Authenticate", `Basic realm="tenants"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	host = s.Listener.Addr().String()
	for _, owner := range []string{"anna", "bert"} {
		image, err := random.Image(1024, 1)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := name.ParseReference(host + "/" + owner + "/private:1")
		if err == nil {
			err = remote.Write(ref, image)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	open = false
	return host
}
