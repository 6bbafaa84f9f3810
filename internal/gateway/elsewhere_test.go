package gateway_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/gateway"
)

func TestAnotherServerIsAskedFirst(t *testing.T) {
	named := make(chan string, 1)
	other := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		named <- r.Header.Get("X-Request-Id")
		io.WriteString(w, "elsewhere")
	})
	s, _ := newServer(t, io.Discard, gateway.Config{
		Elsewhere: func(r *http.Request) http.Handler {
			if strings.HasPrefix(r.URL.Path, "/theirs") {
				return other
			}
			return nil
		},
		Else: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "here") }),
	})
	if _, body := get(t, s.URL+"/ours"); body != "here" {
		t.Errorf("ours went %s", body)
	}
	resp, body := get(t, s.URL+"/theirs")
	if id := <-named; body != "elsewhere" || id == "" || id != resp.Header.Get("X-Request-Id") {
		t.Errorf("theirs went %s, as %q and %q", body, id, resp.Header.Get("X-Request-Id"))
	}
}

func TestWhatLetsInIsNotLoggedByAServerThatPassesItOn(t *testing.T) {
	for path, shows := range map[string]string{
		"/agents/acme.hunter2/execute":                     "/agents/hidden/execute",
		"/agents/acme.hunter2":                             "/agents/hidden",
		"/sandboxes/sbx~99~hunter2/proxy/80/a~b":           "/sandboxes/sbx~signed/proxy/80/a~b",
		"/v1/sandboxes/sbx~99~hunter2/proxy/80":            "/v1/sandboxes/sbx~signed/proxy/80",
		"/v1/sandboxes/sbx/endpoints/80":                   "/v1/sandboxes/sbx/endpoints/80",
		"/cove/v1/sandboxes/sbx/files/agents/not~a~secret": "/cove/v1/sandboxes/sbx/files/agents/not~a~secret",
	} {
		for name, answer := range map[string]http.Handler{
			"passed on": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }),
			"a defect":  http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") }),
			"nobody":    nil,
		} {
			var log bytes.Buffer
			s, g := newServer(t, &log, gateway.Config{Elsewhere: func(*http.Request) http.Handler { return answer }})
			_, body := get(t, s.URL+path)
			g.Wait()
			if strings.Contains(log.String()+body, "hunter2") || !strings.Contains(log.String(), shows) {
				t.Errorf("%s, %s: %s %s", path, name, log.String(), body)
			}
		}
	}
}
