package agentsandbox_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
)

// forward is kubectl port-forward to a port of a Pod; it gives the address here.
func (w *world) forward(pod string, port int) string {
	w.t.Helper()
	address, stop := w.forwardAs("acme", pod, port)
	w.t.Cleanup(stop)
	return address
}

func (w *world) forwardAs(tenant, pod string, port int) (address string, end func()) {
	w.t.Helper()
	to, err := url.Parse(w.URL + "/api/v1/namespaces/default/pods/" + pod + "/portforward")
	if err != nil {
		w.t.Fatal(err)
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{Host: w.URL, BearerToken: w.keys[tenant]})
	if err != nil {
		w.t.Fatal(err)
	}
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", to)
	pf, err := portforward.New(dialer, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		w.t.Fatal(err)
	}
	go func() { ended <- pf.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		w.t.Fatal(err)
	case <-time.After(2 * time.Minute):
		w.t.Fatal("the tunnel is not ready in time")
	}
	ports, err := pf.GetPorts()
	if err != nil {
		w.t.Fatal(err)
	}
	return fmt.Sprintf("http://127.0.0.1:%d/", ports[0].Local), func() { close(stop); <-ended }
}

func (w *world) fetch(address string) string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", address, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(body)
}

func TestPortsAreForwarded(t *testing.T) {
	w := newWorld(t)
	id := w.claimed("one")
	if got := w.fetch(w.forward("sandbox-router", 8080)); got != "acme" {
		t.Errorf("the router says %q", got)
	}
	if got := w.fetch(w.forward("one", 8888)); got != "runtime of acme "+id {
		t.Errorf("the runtime says %q", got)
	}
	if got := w.fetch(w.forward("one", 9090)); got != "daemon of acme "+id { // unless the sandbox has that port
		t.Errorf("the newer runtime says %q", got)
	}

	agent, err := w.manager.Agent(t.Context(), auth.Principal{Tenant: "acme"}, id)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := agent.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"python3", "-u", "-c", `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"inside")
s = http.server.HTTPServer(("127.0.0.1", 0), H)
print(s.server_port)
s.serve_forever()`}})
	if err != nil {
		t.Fatal(err)
	}
	ports := make(chan int, 1)
	go func() { // for as long as the sandbox lives: who leaves a stream ends its process
		for e, err := range stream.Events() {
			var port int
			if _, no := fmt.Sscan(strings.TrimSpace(string(e.Data)), &port); err == nil && no == nil {
				ports <- port
			}
		}
	}()
	var port int
	select {
	case port = <-ports:
	case <-time.After(2 * time.Minute):
		t.Fatal("the server in the sandbox does not start")
	}
	if got := w.fetch(w.forward("one", port)); got != "inside" {
		t.Errorf("a port of the sandbox says %q", got)
	}
}

func TestATenantHasSoManyTunnels(t *testing.T) {
	w := newWorld(t, func(w *world) { w.cfg.MaxTunnels = 2 })
	one := "/api/v1/namespaces/default/pods/sandbox-router/portforward"
	_, end := w.forwardAs("acme", "sandbox-router", 8080)
	w.forward("sandbox-router", 8080)
	for range 2 { // one that was refused does not count
		wantStatus(t, w.ask("POST", one, ""), 429, "TooManyRequests")
	}
	_, other := w.forwardAs("globex", "sandbox-router", 8080)
	other()
	end()
	w.eventually("there is room again", func() bool { return w.ask("POST", one, "").status == 400 }) // it is not upgraded
	if got := w.fetch(w.forward("sandbox-router", 8080)); got != "acme" {
		t.Errorf("the router says %q", got)
	}
}
