package opensandbox_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

func FuzzCreate(f *testing.F) {
	for _, body := range []string{
		`{"image":{"uri":"python:3.11"},"timeout":600,"resourceLimits":{"cpu":"1","memory":"2Gi"},"entrypoint":["tail","-f","/dev/null"],"secureAccess":false}`,
		`{"snapshotId":"x","env":{"A":null},"metadata":{},"networkPolicy":{"defaultAction":"deny","egress":[{"action":"allow","target":"1.0.0.0/8"},{"action":"deny","target":"1.2.3.4"}]}}`,
		`{"image":{"uri":"a"},"entrypoint":["x"],"volumes":[{"name":"a","mountPath":"/m","subPath":"b","pvc":{"claimName":"c","storage":"1Gi"}}],"lifecycle":{},"timeout":null}`,
		`{"image":{"uri":"a"},"entrypoint":["x"],"networkPolicy":null,"lifecycle":[]}`, `{`, `[]`, `null`, ``,
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var req opensandbox.CreateRequest
		err := transfer.Decode([]byte(body), &req)
		if err == nil {
			err = opensandbox.Plan(req, template.Limits{MemoryBytes: 1 << 30})
		}
		if err != nil && fault.Is(err, fault.Internal) {
			t.Errorf("%q is said to be our defect: %v", body, err)
		}
	})
}

func FuzzResources(f *testing.F) {
	for _, text := range []string{"500m", "1", "0.5", "64Mi", "2Gi", "512M", "1.5g", "", "m", ".", "1e9", "-1", "NaN", "Inf", "9999999999999999999T"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if v, ok := opensandbox.ParseCPU(text); ok && !(v > 0 && v <= 1<<20) {
			t.Errorf("%q is %g processors", text, v)
		}
		if v, ok := opensandbox.ParseBytes(text); ok && (v < 1 || v > 1<<60) {
			t.Errorf("%q is %d bytes", text, v)
		}
	})
}

func FuzzFilter(f *testing.F) {
	for _, text := range []string{"a=b", "a=b&c=d+e", "a", "=", "a=b&a=c", "%zz", "a%3Db=c"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		pairs, err := opensandbox.ParseFilter(text)
		if err == nil && text != "" && len(pairs) != strings.Count(text, "&")+1 {
			t.Errorf("%q is %v", text, pairs)
		}
	})
}

func FuzzProxy(f *testing.F) {
	for _, path := range []string{
		"/sandboxes/sba/proxy/80", "/v1/sandboxes/sba/proxy/80/x%2Fy", "/sandboxes/sba~1~ab/proxy/44772/ping", "/sandboxes/a/b/proxy/1", "/sandboxes/../proxy/80/..",
		"/sandboxes/sba/proxy/080", "/sandboxes/sba/proxy/65536", "/sandboxes/~~/proxy/1",
	} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		id, port, rest, ok := opensandbox.Proxied(path)
		if !ok {
			return
		}
		if strings.ContainsAny(id, "/~.%") || id == "" || port < 1 || port > 65535 || rest != "" && rest[0] != '/' || !strings.HasSuffix(path, rest) {
			t.Errorf("%q is %q, %d, %q", path, id, port, rest)
		}
	})
}

func TestResources(t *testing.T) {
	for text, want := range map[string]float64{"500m": 0.5, "1": 1, "0.5": 0.5, " 2 ": 2, "100m": 0.1} {
		if v, ok := opensandbox.ParseCPU(text); !ok || v != want {
			t.Errorf("%q is %g, %v", text, v, ok)
		}
	}
	for text, want := range map[string]int64{"64Mi": 64 << 20, "2Gi": 2 << 30, "512M": 512e6, "1g": 1e9, "1GiB": 1 << 30, "10": 10, "1.5Ki": 1536, "7b": 7, "1 Gi": 1 << 30} {
		if v, ok := opensandbox.ParseBytes(text); !ok || v != want {
			t.Errorf("%q is %d, %v", text, v, ok)
		}
	}
	w := newWorld(t, func(c *opensandbox.Config) { c.MaxLimits = template.Limits{MemoryBytes: 1 << 30} })
	id := w.create(`"resourceLimits":{"cpu":"1","memory":"2Gi"}`) // the clients' own default on a host that has less
	sb, err := w.manager.Get(t.Context(), w.who(), id)
	if err != nil || sb.Limits.MemoryBytes != 1<<30 {
		t.Errorf("%+v, %v", sb.Limits, err)
	}
}

func TestAnAnswerIsNeverHalfJSON(t *testing.T) {
	w := newWorld(t)
	got := w.ask("GET", "/v1/sandboxes/x", "")
	if !json.Valid([]byte(got.body)) || got.header.Get("Content-Type") != "application/json" || got.status != http.StatusNotFound {
		t.Errorf("%d %q", got.status, got.body)
	}
}
