package opensandbox_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// behind is a server on this host, which the inproc driver's sandboxes reach as a port of their own.
func behind(t *testing.T, h http.HandlerFunc) (port string) {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	_, port, _ = net.SplitHostPort(s.Listener.Addr().String())
	return port
}

func (w *world) endpoint(id, port string) (path string, headers []string) {
	w.t.Helper()
	got := w.ask("GET", "/v1/sandboxes/"+id+"/endpoints/"+port+"?use_server_proxy=true", "")
	if got.status != 200 {
		w.t.Fatalf("%d %s", got.status, got.body)
	}
	v := got.json(w.t)
	host := strings.TrimPrefix(w.URL, "http://")
	path, ok := strings.CutPrefix(v["endpoint"].(string), host)
	if !ok || !strings.HasSuffix(path, "/sandboxes/"+id+"/proxy/"+port) {
		w.t.Fatalf("the endpoint is %v", v)
	}
	headers = []string{"OPEN-SANDBOX-API-KEY", ""}
	for k, value := range v["headers"].(map[string]any) {
		headers = append(headers, k, value.(string))
	}
	return path, headers
}

func TestAnEndpointLeadsToItsPort(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	for port, want := range map[string]string{"44772": "execd|", "18080": "egress|"} {
		path, headers := w.endpoint(id, port)
		got := w.ask("PATCH", path+"/a%2Fb?c=d%20e", "body", headers...)
		if got.status != 200 || got.body != want+"PATCH|/a%2Fb|c=d%20e|"+id+"|acme|body" {
			t.Errorf("%s: %d %s", port, got.status, got.body)
		}
		if got := w.ask("GET", "/v1"+path, "", headers...); got.body != want+"GET|/||"+id+"|acme|" {
			t.Errorf("%s below /v1, without a path: %d %s", port, got.status, got.body)
		}
	}
	port := behind(t, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Service-Worker-Allowed", "/")
		rw.Header().Add("Set-Cookie", "a=b; Path=/; Domain=localhost")
		rw.Header().Add("Set-Cookie", "cove_session=x")
		fmt.Fprint(rw, r.URL.RequestURI(), " ", r.Header.Get("X-Forwarded-Host") != "", " ")
		for _, name := range []string{"Open-Sandbox-Api-Key", "Opensandbox-Secure-Access", "X-Api-Key", "X-Mine", "X-Execd-Access-Token"} {
			fmt.Fprint(rw, r.Header.Get(name), ";")
		}
	})
	path, headers := w.endpoint(id, port)
	headers = append(headers, "X-API-Key", w.keys["acme"], "X-Mine", "yes")
	got := w.ask("GET", path+"/a%2Fb?c=d", "", headers...)
	if got.status != 200 || got.body != "/a%2Fb?c=d true ;;;yes;;" {
		t.Errorf("%d %s", got.status, got.body)
	}
	if c := got.header["Set-Cookie"]; len(c) != 1 || !strings.Contains(c[0], "Path="+path+"/") || strings.Contains(c[0], "Domain") {
		t.Errorf("cookies are %q", c)
	}
	if got.header.Get("Service-Worker-Allowed") != "" || got.header.Get("Referrer-Policy") != "no-referrer" || !strings.Contains(got.header.Get("Content-Security-Policy"), "sandbox ") {
		t.Errorf("it speaks for our origin: %v", got.header)
	}
	execd, headers := w.endpoint(id, "44772")
	if got := w.ask("GET", execd+"/proxy/"+port+"/x", "", headers...); got.status != 200 || !strings.HasPrefix(got.body, "/x true") {
		t.Errorf("through execd: %d %s", got.status, got.body)
	}
	wantFault(t, w.ask("GET", path+"/sw.js", "", append(headers, "Service-Worker", "script")...), 403, "FORBIDDEN")
}

func TestWhoMayComeToAPort(t *testing.T) {
	w := newWorld(t)
	id, other := w.create(), w.create()
	port := behind(t, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "hello") })
	execd, execdHeaders := w.endpoint(id, "44772")
	raw, rawHeaders := w.endpoint(id, port)
	_, egressHeaders := w.endpoint(id, "18080")
	_, otherHeaders := w.endpoint(other, "44772")
	none := []string{"OPEN-SANDBOX-API-KEY", ""}
	for name, c := range map[string]struct {
		path    string
		headers []string
		status  int
		code    string
	}{
		"execd's token for execd":       {execd + "/ping", execdHeaders, 200, ""},
		"execd's token for any port":    {raw, execdHeaders, 200, ""},
		"a port's token for it":         {raw, rawHeaders, 200, ""},
		"a port's token for execd":      {execd + "/ping", rawHeaders, 401, "INVALID_API_KEY"},
		"egress's token for execd":      {execd + "/ping", egressHeaders, 401, "INVALID_API_KEY"},
		"another sandbox's token":       {execd + "/ping", otherHeaders, 401, "INVALID_API_KEY"},
		"a token for what is not there": {"/sandboxes/sbnone/proxy/44772/ping", execdHeaders, 401, "INVALID_API_KEY"},
		"nothing":                       {execd + "/ping", none, 401, "MISSING_API_KEY"},
		"nothing for what is not there": {"/sandboxes/sbnone/proxy/44772/ping", none, 401, "MISSING_API_KEY"},
		"a key":                         {execd + "/ping", nil, 200, ""},
		"a key as execd's":              {execd + "/ping", []string{"OPEN-SANDBOX-API-KEY", "", "X-EXECD-ACCESS-TOKEN", w.keys["acme"]}, 200, ""},
		"a key for what is not there":   {"/sandboxes/sbnone/proxy/44772/ping", nil, 404, "DOCKER::SANDBOX_NOT_FOUND"},
		"another tenant's key":          {execd + "/ping", []string{"OPEN-SANDBOX-API-KEY", w.keys["globex"]}, 404, "DOCKER::SANDBOX_NOT_FOUND"},
		"a wrong key":                   {execd + "/ping", []string{"OPEN-SANDBOX-API-KEY", "x"}, 401, "INVALID_API_KEY"},
		"a port that is none":           {"/sandboxes/" + id + "/proxy/99999/", nil, 404, "DOCKER::SANDBOX_NOT_FOUND"},
		"a port that nobody listens on": {"/sandboxes/" + id + "/proxy/1/", nil, 502, "SANDBOX::PORT_NOT_OPEN"},
		"a signature that is none":      {"/sandboxes/" + id + "~zzzzzz~abc/proxy/44772/ping", nil, 401, "INVALID_API_KEY"},
		"half a signature":              {"/sandboxes/" + id + "~zzzzzz/proxy/44772/ping", nil, 404, "DOCKER::SANDBOX_NOT_FOUND"},
		"an id that is none":            {"/sandboxes/%2e%2e/proxy/44772/ping", nil, 404, "DOCKER::SANDBOX_NOT_FOUND"},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.ask("GET", c.path, "", c.headers...)
			if c.code == "" && got.status != c.status {
				t.Errorf("%d %s", got.status, got.body)
			}
			if c.code != "" {
				wantFault(t, got, c.status, c.code)
			}
		})
	}
}

func TestASignedEndpoint(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	ask := func(query string) reply { return w.ask("GET", "/v1/sandboxes/"+id+"/endpoints/44772?"+query, "") }
	later := strconv.FormatInt(time.Now().Add(time.Hour).Unix(), 10)
	v := ask("expires=" + later).json(t)
	path := strings.TrimPrefix(v["endpoint"].(string), strings.TrimPrefix(w.URL, "http://"))
	if v["headers"] != nil || !strings.HasSuffix(path, "/44772") {
		t.Errorf("%v", v)
	}
	if got := w.ask("GET", path+"/ping", "", "OPEN-SANDBOX-API-KEY", ""); got.status != 200 || !strings.HasPrefix(got.body, "execd|GET|/ping|") {
		t.Errorf("%d %s", got.status, got.body)
	}
	for name, changed := range map[string]string{
		"another port": strings.Replace(path, "/44772", "/18080", 1), "another end": strings.Replace(path, "~", "~1", 1),
		"another sandbox": strings.Replace(path, id, w.create(), 1),
	} {
		t.Run(name, func(t *testing.T) {
			wantFault(t, w.ask("GET", changed+"/ping", "", "OPEN-SANDBOX-API-KEY", ""), 401, "INVALID_API_KEY")
		})
	}
	for _, bad := range []string{"expires=1", "expires=x", "expires=", "expires=" + later + "&use_server_proxy=true"} {
		wantFault(t, ask(bad), 400, "SANDBOX::INVALID_PARAMETER")
	}
	for _, bad := range []string{"0", "65536", "x", "-1", "+1"} {
		wantFault(t, w.ask("GET", "/v1/sandboxes/"+id+"/endpoints/"+bad, ""), 400, "DOCKER::INVALID_PORT")
	}
}

func TestTheEndpointOfAWebServerNeedsNoHeader(t *testing.T) {
	w := newWorld(t)
	id, secure := w.create(), w.create(`"secureAccess":true`)
	port := behind(t, func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "page "+r.URL.Path) })
	endpoint := func(id, port string) string {
		v := w.ask("GET", "/v1/sandboxes/"+id+"/endpoints/"+port+"?use_server_proxy=false", "").json(t)
		return strings.TrimPrefix(v["endpoint"].(string), strings.TrimPrefix(w.URL, "http://"))
	}
	stranger := []string{"OPEN-SANDBOX-API-KEY", ""}
	open := endpoint(id, port)
	if got := w.ask("GET", open+"/a", "", stranger...); got.status != 200 || got.body != "page /a" || !strings.HasSuffix(open, "/proxy/"+port) {
		t.Errorf("%s: %d %s", open, got.status, got.body)
	}
	for name, path := range map[string]string{
		"the sandbox's id alone": "/sandboxes/" + id + "/proxy/" + port, "execd": endpoint(id, "44772"), "egress": endpoint(id, "18080"),
		"one that was asked to be closed": endpoint(secure, port),
	} {
		t.Run(name, func(t *testing.T) { wantFault(t, w.ask("GET", path+"/ping", "", stranger...), 401, "MISSING_API_KEY") })
	}
	for name, path := range map[string]string{
		"another sandbox": strings.Replace(open, id, secure, 1), "execd by it": strings.TrimSuffix(open, port) + "44772", "another end": strings.Replace(open, "~0~", "~1~", 1),
		"an end that is none": strings.Replace(open, "~0~", "~00~", 1),
	} {
		t.Run(name, func(t *testing.T) { wantFault(t, w.ask("GET", path+"/ping", "", stranger...), 401, "INVALID_API_KEY") })
	}
	w.ask("DELETE", "/v1/sandboxes/"+id, "")
	wantFault(t, w.ask("GET", open+"/a", "", stranger...), 404, "DOCKER::SANDBOX_NOT_FOUND")
}

func TestAPausedSandboxSaysSoAtOnce(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	path, headers := w.endpoint(id, "44772")
	w.ask("POST", "/v1/sandboxes/"+id+"/pause", "")
	wantFault(t, w.ask("GET", path+"/ping", "", headers...), 409, "DOCKER::SANDBOX_NOT_RUNNING")
	w.ask("POST", "/v1/sandboxes/"+id+"/resume", "")
	if got := w.ask("GET", path+"/ping", "", headers...); got.status != 200 {
		t.Errorf("%d %s", got.status, got.body)
	}
	w.ask("DELETE", "/v1/sandboxes/"+id, "")
	wantFault(t, w.ask("GET", path+"/ping", "", headers...), 404, "DOCKER::SANDBOX_NOT_FOUND")
}

func TestAUseRenewsASandboxThatWasMadeSo(t *testing.T) {
	w := newWorld(t)
	for field, longer := range map[string]bool{`"extensions":{"access.renew.extend.seconds":"3600"}`: true, `"extensions":{}`: false} {
		id := w.create(`"timeout":300`, field)
		expires := func() string { return w.ask("GET", "/v1/sandboxes/"+id, "").json(t)["expiresAt"].(string) }
		before := expires()
		w.ask("GET", "/sandboxes/"+id+"/proxy/44772/ping", "")
		if after := expires(); before != after {
			t.Errorf("%s: %s, then %s, by a look at whether it is there", field, before, after)
		}
		w.ask("GET", "/sandboxes/"+id+"/proxy/44772/metrics", "")
		if after := expires(); (before < after) != longer {
			t.Errorf("%s: %s, then %s", field, before, after)
		}
	}
}

func TestAConnectionIsUpgraded(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	port := behind(t, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Connection", "Upgrade")
		rw.Header().Set("Upgrade", r.Header.Get("Upgrade"))
		rw.WriteHeader(http.StatusSwitchingProtocols)
		conn, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		line, _ := buf.ReadString('\n')
		fmt.Fprint(conn, "got "+line)
	})
	path, headers := w.endpoint(id, port)
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%s: %s\r\n\r\n", path, headers[2], headers[3])
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", resp, err)
	}
	fmt.Fprint(conn, "hello\n")
	if line, err := r.ReadString('\n'); line != "got hello\n" {
		t.Errorf("%q, %v", line, err)
	}
}

func TestTheNetworkPolicyOfTheLifecycleAPIIsEgresss(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	if got := w.ask("PUT", "/v1/sandboxes/"+id+"/networkpolicy", `{"defaultAction":"deny"}`); got.body != "egress|PUT|/policy||"+id+`|acme|{"defaultAction":"deny"}` {
		t.Errorf("%d %s", got.status, got.body)
	}
}

func TestAPreflightIsAnsweredForOurOwnPorts(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	ask := []string{"OPEN-SANDBOX-API-KEY", "", "Origin", "http://a.test", "Access-Control-Request-Method", "POST"}
	if got := w.ask("OPTIONS", "/sandboxes/"+id+"/proxy/44772/command", "", ask...); got.status != http.StatusNoContent {
		t.Errorf("%d %s", got.status, got.body)
	}
	wantFault(t, w.ask("OPTIONS", "/sandboxes/"+id+"/proxy/8000/", "", ask...), 401, "MISSING_API_KEY")
}
