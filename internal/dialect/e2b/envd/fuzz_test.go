package envd_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/envd"
	"github.com/covehq/cove/internal/fault"
)

func FuzzDisposition(f *testing.F) {
	for _, seed := range []string{
		`form-data; name="file"; filename="/a/b c.txt"`, `form-data; name=file; filename*=UTF-8''%e2%82%ac`, `form-data`, `;;;`, `form-data; filename="\"`, "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		name, file, err := envd.Disposition(header)
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", header, err)
		}
		if err != nil && name+file != "" || strings.ContainsRune(file, 0) {
			t.Errorf("%q gives %q %q %v", header, name, file, err)
		}
	})
}

func FuzzMetadata(f *testing.F) {
	f.Add("X-Metadata-Key", "value")
	f.Add("x-metadata-", "")
	f.Add("X-Metadata-ü", "\x00")
	f.Fuzz(func(t *testing.T, name, value string) {
		got, err := envd.Metadata(http.Header{name: {value}})
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", name, err)
		}
		for key, value := range got {
			if !strings.HasPrefix(key, "user.e2b.") || len(key) > 255 || key != strings.ToLower(key) || strings.ContainsFunc(key+value, func(c rune) bool { return c < ' ' || c > '~' }) {
				t.Errorf("%q gives %q=%q", name, key, value)
			}
		}
	})
}

func FuzzUpload(f *testing.F) {
	kind, body := form("x", "1", "y", "2")
	f.Add(kind, body.Bytes())
	f.Add("multipart/form-data; boundary=b", []byte("--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\nabc"))
	f.Add("application/octet-stream", []byte("x"))
	w := newWorld(f)
	dir := w.home + "/only"
	if err := os.Mkdir(dir, 0o755); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, kind string, body []byte) {
		req := httptest.NewRequest("POST", "/files?path="+url.QueryEscape(dir+"/f"), io.NopCloser(bytes.NewReader(body)))
		req.Header["Content-Type"] = []string{kind}
		got := httptest.NewRecorder()
		w.Config.Handler.ServeHTTP(got, req)
		if got.Code != 200 && got.Code != 400 {
			t.Errorf("%q: %d %s", kind, got.Code, got.Body)
		}
		if found, _ := filepath.Glob(w.home + "/*"); len(found) != 1 {
			t.Errorf("%q left %v", kind, found)
		}
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add("60000", "50")
	f.Add("-1", "-1")
	f.Add("99999999999999999999", "9999999999999")
	f.Fuzz(func(t *testing.T, timeout, ping string) {
		r := httptest.NewRequest("POST", "/process.Process/Start", nil)
		r.Header["Connect-Timeout-Ms"] = []string{timeout}
		envd.TakeLifetime(r)
		if d := envd.KeepaliveInterval(http.Header{"Keepalive-Ping-Interval": {ping}}); d < time.Second || d > time.Hour {
			t.Errorf("%q: %v", ping, d)
		}
	})
}

func TestTablesAreTotal(t *testing.T) {
	for _, kind := range fault.Kinds {
		internal := kind == fault.Internal
		if (envd.Code(kind).String() == "internal") != (internal || kind == fault.DiskFull) || (envd.Status(kind) == 500) != internal {
			t.Errorf("%s is %v and %d", kind, envd.Code(kind), envd.Status(kind))
		}
	}
	for name, want := range map[string]string{"SIGKILL": "killed", "SIGTERM": "terminated", "SIGSEGV": "segmentation fault", "signal 40": "signal 40", "SIGODD": "SIGODD"} {
		if got := envd.SignalText(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}
