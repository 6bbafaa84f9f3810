package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
)

func TestWhatIsSaidToTheAPIServerIsCounted(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/taken") {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
		_, _ = io.WriteString(w, "12345")
	}))
	defer server.Close()
	c := newCounter()
	client := &http.Client{Transport: c.wrap(http.DefaultTransport)}
	for _, call := range []string{
		"PATCH /api/v1/namespaces/n/pods/a", "PATCH /api/v1/namespaces/n/pods/taken", "POST /api/v1/namespaces/n/pods",
		"PUT /apis/coordination.k8s.io/v1/namespaces/n/leases/l", "PATCH /api/v1/namespaces/n/pods/a/status", "GET /api/v1/namespaces/n/pods?watch=1",
	} {
		method, path, _ := strings.Cut(call, " ")
		request, err := http.NewRequestWithContext(t.Context(), method, server.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		response.Body.Close()
	}
	calls, watched := c.take()
	want := map[string]int{"PATCH pods": 1, "PATCH pods lost": 1, "POST pods": 1, "PUT leases": 1, "PATCH pods/status": 1}
	if !reflect.DeepEqual(calls, want) || watched != 5 {
		t.Errorf("got %v and %d bytes", calls, watched)
	}
	if calls, watched := c.take(); len(calls) != 0 || watched != 0 {
		t.Errorf("what was taken is still there: %v, %d", calls, watched)
	}
}

func TestARankIsASample(t *testing.T) {
	samples := []float64{1, 2, 3, 4}
	for p, want := range map[int]float64{0: 1, 50: 2, 51: 3, 99: 4, 100: 4} {
		if got := rank(samples, p); got != want {
			t.Errorf("the %dth is %v, want %v", p, got, want)
		}
	}
}
