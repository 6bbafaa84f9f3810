package gateway_test

import (
	"io"
	"net/http"
	"testing"

	"github.com/covehq/cove/internal/gateway"
)

// TestSignedPathsNeedNoKey: a link says itself who may read it, wherever it is opened, and no guest's key is shown for it.
func TestSignedPathsNeedNoKey(t *testing.T) {
	tell := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "key "+r.Header.Get("X-Api-Key")) })
	s, _ := newServer(t, io.Discard, gateway.Config{
		Guests: &gateway.Guests{Key: "guest"}, Signed: "/artifacts/", Prefixes: map[string]http.Handler{"/cove/v1/": tell, "/artifacts/": tell},
	})
	for path, want := range map[string]string{"/artifacts/art_1": "200 OK key ", "/cove/v1/artifacts/art_1": "403 Forbidden"} {
		req, err := http.NewRequestWithContext(t.Context(), "GET", s.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "files.example"
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if got := resp.Status + " " + string(body); err != nil || len(got) < len(want) || got[:len(want)] != want || resp.StatusCode == 200 && got != want {
			t.Errorf("%s: %s, %v", path, got, err)
		}
	}
}
