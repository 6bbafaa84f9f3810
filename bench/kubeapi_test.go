package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"
)

func TestWritesAreReadFromTheAPIServersOwnCount(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `# HELP apiserver_request_total [STABLE] Counter of requests
apiserver_request_total{code="200",component="apiserver",group="",resource="pods",scope="resource",subresource="",verb="PATCH",version="v1"} 7
apiserver_request_total{code="422",component="apiserver",group="",resource="pods",scope="resource",subresource="",verb="PATCH",version="v1"} 1
apiserver_request_total{code="200",component="apiserver",group="",resource="pods",scope="resource",subresource="status",verb="PATCH",version="v1"} 30
apiserver_request_total{code="201",component="apiserver",group="",resource="pods",scope="resource",subresource="",verb="POST",version="v1"} 8
apiserver_request_total{code="200",component="apiserver",group="",resource="pods",scope="resource",subresource="",verb="DELETE",version="v1"} 16
apiserver_request_total{code="200",component="apiserver",group="coordination.k8s.io",resource="leases",scope="resource",subresource="",verb="PUT",version="v1"} 99
apiserver_request_total{code="200",component="apiserver",group="",resource="pods",scope="namespace",subresource="",verb="LIST",version="v1"} 50
`)
	}))
	defer server.Close()
	got, err := (&apiServer{url: server.URL, http: server.Client()}).writes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := writes{"PATCH pods": 8, "PATCH pods/status": 30, "POST pods": 8, "DELETE pods": 16, "PUT leases": 99}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	since := got.minus(writes{"PATCH pods": 4, "DELETE pods": 8, "PUT leases": 99})
	if since.claims() != 4 || since.ours() != 4+8+4 || since.total() != 4+30+8+8 {
		t.Errorf("%v: %v of claims, %v of ours, %v in all", since, since.claims(), since.ours(), since.total())
	}
}
