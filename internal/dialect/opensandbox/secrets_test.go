package opensandbox_test

import (
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestAPortSaysNothingBeforeItsAnswer(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	port := behind(t, func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Link", "</x>; rel=preload")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Set("X-Request-Id", "theirs")
		rw.WriteHeader(http.StatusTeapot)
	})
	early := false
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
		early = true
		return nil
	}})
	req, err := http.NewRequestWithContext(ctx, "GET", w.URL+"/sandboxes/"+id+"/proxy/"+port+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("OPEN-SANDBOX-API-KEY", w.keys["acme"])
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusTeapot || early || resp.Header.Get("X-Request-Id") != "" {
		t.Errorf("%d, early %v, %v", resp.StatusCode, early, resp.Header)
	}
}

func TestAPortLearnsNoSignatureAndNoToken(t *testing.T) {
	w := newWorld(t)
	id := w.create()
	var heard http.Header
	port := behind(t, func(_ http.ResponseWriter, r *http.Request) { heard = r.Header })
	for referer, kept := range map[string]bool{"http://a.test/sandboxes/" + id + "~abc~sign/proxy/80/": false, "http://a.test/": true} {
		w.ask("GET", "/sandboxes/"+id+"/proxy/"+port+"/", "", "Referer", referer, "X-Access-Token", strings.Repeat("0a", 32))
		if got := heard.Get("Referer"); (got != "") != kept || heard.Get("X-Access-Token") != "" {
			t.Errorf("%s: %v", referer, heard)
		}
	}
}

func TestASignatureEndsSoonEnough(t *testing.T) {
	w := newWorld(t)
	endpoint := w.ask("GET", "/v1/sandboxes/"+w.create()+"/endpoints/44772?expires=99999999999", "").json(t)["endpoint"].(string)
	end, err := strconv.ParseInt(strings.Split(endpoint, "~")[1], 36, 64)
	if err != nil || time.Until(time.Unix(end, 0)) > 7*24*time.Hour {
		t.Errorf("%s: %v, %v", endpoint, time.Unix(end, 0), err)
	}
}
