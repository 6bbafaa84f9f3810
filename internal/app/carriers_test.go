package app_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
)

// carrier is one place of a request that may hold a key.
type carrier struct {
	name string
	put  func(r *http.Request, key string)
}

func header(name, scheme string) carrier {
	return carrier{strings.TrimSpace(name + " " + scheme), func(r *http.Request, key string) { r.Header.Add(name, scheme+key) }}
}

// carriers lists the places of a key, and those of the URL of a tenant's router.
func carriers(routerPath string) []carrier {
	all := []carrier{
		header("X-Api-Key", ""), header("Authorization", "Bearer "), header("Authorization", "bearer  "), header("Authorization", ""),
		header("X-Access-Token", ""), header("Cookie", "api_key="), header("Cookie", "x-api-key="),
		{"Authorization Basic", func(r *http.Request, key string) {
			r.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("x:"+key)))
		}},
	}
	for _, name := range auth.OwnHeaders {
		all = append(all, header(name, ""))
	}
	for _, name := range []string{"X-Auth-Token", "Api-Key", "Token", "Sec-Websocket-Protocol"} {
		all = append(all, header(name, ""))
	}
	all = append(all,
		header("Cookie", "token="), header("Cookie", "E2B_API_KEY="), header("Referer", "http://a.test/x?api_key="),
		header("Referer", "http://a.test/x?next=%2Fy%3Fapi_key%3D"), header("Sec-Websocket-Protocol", "chat, "),
		carrier{"X-Auth Basic", func(r *http.Request, key string) {
			r.Header.Set("X-Auth", "Basic "+base64.StdEncoding.EncodeToString([]byte("x:"+key)))
		}},
		carrier{"X-Copy of a header for the proxy alone", func(r *http.Request, key string) {
			r.Header.Add("Connection", "X-Api-Key")
			r.Header.Set("X-Api-Key", key)
			r.Header.Set("X-Copy", key)
		}},
	)
	for _, name := range []string{"X-Forwarded-Prefix", "X-Replaced-Path", "Referer"} {
		all = append(all, carrier{name + " with the router's URL", func(r *http.Request, _ string) { r.Header.Set(name, routerPath+"/x") }})
	}
	for _, name := range []string{
		"api_key", "access_token", "x-api-key", "X-API-Key", "open-sandbox-api-key", "token", "key", "access-token", "E2B_API_KEY",
	} {
		all = append(all, carrier{"query " + name, func(r *http.Request, key string) { r.URL.RawQuery += "&" + name + "=" + key }})
	}
	return all
}

// way is how a request reaches a port of a sandbox, with what lets it in.
type way struct {
	host, path string
	headers    []string
}

// heardBy starts a server on a port of every inproc sandbox. The channel tells each request that it gets, as it came.
func heardBy(t *testing.T) (port string, heard <-chan string) {
	t.Helper()
	told := make(chan string, 1)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		told <- fmt.Sprintf("%s %s %s %v", r.Method, r.RequestURI, r.Host, r.Header)
		if r.Header.Get("Upgrade") == "" {
			return
		}
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "websocket")
		w.WriteHeader(http.StatusSwitchingProtocols)
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			conn.Close()
		}
	}))
	t.Cleanup(s.Close)
	_, port, _ = net.SplitHostPort(s.Listener.Addr().String())
	return port, told
}

// ways lists every way to a port of a sandbox of one tenant.
func (s e2bServer) ways(t *testing.T, k kube, digits, port string) map[string]way {
	t.Helper()
	id := s.create(t, s.URL).ID
	claims := k.access.Server + "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"
	if code, body := k.ask(t, "POST", claims, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxClaim","metadata":{"name":"one"},"spec":{"warmPoolRef":{"name":"python-3.12"}}}`, k.key); code != 201 {
		t.Fatalf("%d %s", code, body)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if _, body := k.ask(t, "GET", claims+"/one", "", k.key); strings.Contains(body, "DependenciesReady") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the claim is never ready")
		}
	}
	key := []string{"Open-Sandbox-Api-Key", digits}
	_, body := s.ask(t, "GET", s.URL+"/v1/sandboxes/"+id+"/endpoints/"+port, "", map[string]string{"X-Api-Key": digits})
	var signed struct{ Endpoint string }
	if err := json.Unmarshal([]byte(body), &signed); err != nil || signed.Endpoint == "" {
		t.Fatal(body)
	}
	_, signedPath, _ := strings.Cut(signed.Endpoint, "/")
	return map[string]way{
		"E2B by host":                   {host: port + "-" + id + ".localhost", path: "/"},
		"E2B by headers":                {path: "/", headers: []string{"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", port}},
		"E2B by path":                   {path: "/kruise/" + id + "/" + port + "/"},
		"OpenSandbox":                   {path: "/sandboxes/" + id + "/proxy/" + port + "/", headers: key},
		"OpenSandbox, versioned":        {path: "/v1/sandboxes/" + id + "/proxy/" + port + "/", headers: key},
		"OpenSandbox through execd":     {path: "/sandboxes/" + id + "/proxy/44772/proxy/" + port + "/", headers: key},
		"OpenSandbox, signed":           {path: "/" + signedPath + "/"},
		"agent-sandbox's router":        {path: "/", headers: []string{"X-Sandbox-Id", "one", "X-Sandbox-Port", port, "X-Api-Key", digits}},
		"agent-sandbox's router by URL": {path: k.access.RouterPath + "/", headers: []string{"X-Sandbox-Id", "one", "X-Sandbox-Port", port}},
	}
}

// TestCarriers_NoKeyReachesAPort sends a key by every way to a port, in every place where a request may hold it.
func TestCarriers_NoKeyReachesAPort(t *testing.T) {
	s, k := startFacade(t, testConfig(t))
	digits := strings.TrimPrefix(string(s.Key), "e2b_")
	port, heard := heardBy(t)
	server := e2bServer{s, http.DefaultClient}
	for name, way := range server.ways(t, k, digits, port) {
		t.Run(name, func(t *testing.T) {
			for _, c := range carriers(k.access.RouterPath) {
				for _, key := range []string{"e2b_" + digits, digits} {
					for _, upgrade := range []bool{false, true} {
						got := visit(t, s.URL, way, c, key, upgrade, heard)
						if !strings.Contains(got, "X-Mine:["+noKey+"]") || !strings.Contains(got, "mine="+noKey) {
							t.Errorf("%s, upgrade %v: the port heard %s", c.name, upgrade, got)
						}
						if leaks(got, digits, k.access.RouterPath) {
							t.Errorf("%s, upgrade %v: the key %.8s… reached the sandbox: %s", c.name, upgrade, key, got)
						}
					}
				}
			}
		})
	}
}

// noKey looks like a key, as the hash of a commit does.
const noKey = "0123456789abcdef0123456789abcdef01234567"

// leaks reports whether a text holds a key or the secret of a router's URL, also as scheme Basic.
func leaks(text, digits, routerPath string) bool {
	return slices.ContainsFunc(auth.Readings(text), func(reading string) bool {
		return strings.Contains(reading, digits) || strings.Contains(reading, routerPath)
	})
}

// visit sends one request and returns what the port heard of it.
func visit(t *testing.T, url string, way way, c carrier, key string, upgrade bool, heard <-chan string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "GET", url+way.path+"?mine="+noKey, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = way.host
	r.Header.Set("X-Mine", noKey)
	for i := 0; i < len(way.headers); i += 2 {
		r.Header.Set(way.headers[i], way.headers[i+1])
	}
	if upgrade {
		r.Header.Set("Connection", "Upgrade")
		r.Header.Set("Upgrade", "websocket")
		r.Header.Set("Sec-Websocket-Protocol", "chat, e2b_"+strings.TrimPrefix(key, "e2b_"))
	}
	c.put(r, key)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	select {
	case got := <-heard:
		return got
	default:
		t.Fatalf("%s: %d, and the port heard nothing", c.name, resp.StatusCode)
		return ""
	}
}
