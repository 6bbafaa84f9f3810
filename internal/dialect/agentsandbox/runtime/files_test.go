package runtime_test

import (
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
)

// quote is how Python's clients write a path into a URL.
func quote(path string) string { return strings.ReplaceAll(url.QueryEscape(path), "+", "%20") }

func TestUpload(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct{ name, filename, at string }{
		{"a name is in the home", "x", w.home + "/x"},
		{"a path is below the home", "a/b/x", w.home + "/a/b/x"},
		{"an absolute path is where it says", w.away + "/x", w.away + "/x"},
		{"an absolute path without its slash is found again", w.away[1:] + "/y", w.away + "/y"},
		{"a path out of the home leaves it", "../sibling/x", filepath.Dir(w.home) + "/sibling/x"},
		{"a path that begins with a dot is of the home", "./tmp/x", w.home + "/tmp/x"},
		{"unicode, spaces and quotes", `dir ü/a "b" ☃.txt`, w.home + `/dir ü/a "b" ☃.txt`},
		{"an escape in a name is a part of it", "100%20%2e", w.home + "/100%20%2e"},
		{"dots that are escaped are a name", "%2e%2e/x", w.home + "/%2e%2e/x"},
		{"a backslash", `a\b`, w.home + `/a\b`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := w.in(t)
			content := "content of " + tc.name + "\x00\xff"
			if got := w.upload(tc.filename, content); got.status != http.StatusOK {
				t.Fatalf("%d %s", got.status, got.body)
			}
			if got := w.read(tc.at); got != content {
				t.Errorf("%s holds %q", tc.at, got)
			}
			if got := w.ask("GET", "/download/"+quote(tc.filename), ""); got.status != http.StatusOK || got.body != content {
				t.Errorf("downloaded %d %q", got.status, got.body)
			}
			if got := w.ask("GET", "/exists/"+quote(tc.filename), ""); !strings.Contains(got.body, `"exists":true`) {
				t.Errorf("exists: %d %s", got.status, got.body)
			}
		})
	}
	t.Run("what the home has comes before the root", func(t *testing.T) {
		w := w.in(t)
		w.run("mkdir tmp")
		w.upload("tmp/mine", "1")
		if w.read(w.home+"/tmp/mine") != "1" {
			t.Error("it went elsewhere")
		}
	})
	t.Run("ten MiB are one file", func(t *testing.T) {
		w := w.in(t)
		content := strings.Repeat("0123456789abcdef", 10<<16)
		w.upload("large", content)
		if got := w.ask("GET", "/download/large", ""); got.body != content || got.header.Get("Content-Length") != "10485760" {
			t.Errorf("%d bytes came back, %s were promised", len(got.body), got.header.Get("Content-Length"))
		}
	})
	w.write(w.home+"/file", "")
	for _, tc := range []struct {
		name, filename string
		want           int
	}{
		{"no filename", "", http.StatusBadRequest},
		{"a directory's name", "dir/", http.StatusBadRequest},
		{"a directory that there is", ".", http.StatusBadRequest},
		{"a path below a file", "file/x", http.StatusBadRequest},
		{"a path that is too long", strings.Repeat("a/", 3000) + "x", http.StatusBadRequest},
		{"a name that is too long", strings.Repeat("n", 300), http.StatusBadRequest},
	} {
		t.Run("an upload to "+tc.name+" is refused", func(t *testing.T) {
			w := w.in(t)
			if got := w.upload(tc.filename, "x"); got.status != tc.want || !strings.Contains(got.body, `"message"`) {
				t.Errorf("%d %s", got.status, got.body)
			}
		})
	}
	for name, body := range map[string]string{
		"no form":            "x",
		"a form without end": "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"torn\"\r\n\r\nabc",
		"no file":            "--B\r\nContent-Disposition: form-data; name=\"other\"\r\n\r\nabc\r\n--B--\r\n",
	} {
		t.Run("an upload of "+name+" is refused, and nothing is written", func(t *testing.T) {
			w := w.in(t)
			if got := w.ask("POST", "/upload", body, "Content-Type", "multipart/form-data; boundary=B"); got.status != http.StatusBadRequest {
				t.Errorf("%d %s", got.status, got.body)
			}
			if _, err := os.Stat(w.home + "/torn"); err == nil {
				t.Error("a part of it was written")
			}
		})
	}
}

func TestRead(t *testing.T) {
	w := newWorld(t)
	w.write(w.home+"/dir/x", "1234")
	w.write(w.away+"/y", "")
	w.run(`ln -s dir link; ln -s nowhere dangling; mkdir 'a b'; mkfifo pipe`)
	for _, tc := range []struct {
		path string
		want int
		body string
	}{
		{"/download/dir%2Fx", 200, "1234"},
		{"/download/dir/x", 200, "1234"},
		{"/download/" + quote(w.home+"/dir/x"), 200, "1234"},
		{"/download/%2Fdir%2Fx", 200, "1234"}, // of those who know of nothing but the home
		{"/download/dir/../dir//x", 200, "1234"},
		{"/download/link%2Fx", 200, "1234"},
		{"/download/dir", 404, ""},
		{"/download/missing", 404, ""},
		{"/download/dir%2Fx%2Fdeeper", 404, ""},
		{"/download/a%00b", 400, ""},
		{"/list/dir%2Fx", 404, ""},
		{"/list/missing", 404, ""},
		{"/exists/dir", 200, `"exists":true`},
		{"/exists/link", 200, `"exists":true`},
		{"/exists/dangling", 200, `"exists":false`},
		{"/exists/missing", 200, `"exists":false`},
		{"/exists/dir%2Fx%2Fdeeper", 200, `"exists":false`},
		{"/exists/" + quote(w.away+"/y"), 200, `"exists":true`},
		{"/exists/" + quote(w.away[1:]+"/y"), 200, `"exists":true`},
		{"/exists/%2e%2e%2fapp%2fdir", 200, `"exists":true`},
		{"/exists//etc/passwd", 200, `"exists":true`}, // as another router sends it, which decodes
		{"/agent", 404, "POST /execute"},
		{"/nothing", 404, "/execute"},
		{"/", 200, `"status":"ok"`},
	} {
		t.Run("GET "+tc.path, func(t *testing.T) {
			w := w.in(t)
			got := w.ask("GET", tc.path, "")
			if got.status != tc.want || !strings.Contains(got.body, tc.body) {
				t.Errorf("%d %s", got.status, got.body)
			}
		})
	}
	t.Run("a list has two types, and links are what they lead to", func(t *testing.T) {
		w := w.in(t)
		for _, path := range []string{"/list/", "/list", "/list/.", "/list/" + quote(w.home)} {
			got := w.ask("GET", path, "")
			var list []struct {
				Name    string   `json:"name"`
				Size    *int64   `json:"size"`
				Type    string   `json:"type"`
				ModTime *float64 `json:"mod_time"`
			}
			if err := json.Unmarshal([]byte(got.body), &list); err != nil {
				t.Fatalf("%s: %d %s", path, got.status, got.body)
			}
			types := map[string]string{}
			for _, e := range list {
				types[e.Name] = e.Type
				if e.Size == nil || e.ModTime == nil || *e.ModTime < 1e9 {
					t.Errorf("%+v", e)
				}
			}
			want := map[string]string{"dir": "directory", "link": "directory", "dangling": "file", "a b": "directory", "pipe": "file"}
			if diff := cmp.Diff(want, types); diff != "" {
				t.Errorf("%s: %s", path, diff)
			}
		}
	})
	t.Run("a directory that is empty is a list", func(t *testing.T) {
		w := w.in(t)
		if got := w.ask("GET", "/list/a%20b", ""); got.body != "[]\n" {
			t.Errorf("%q", got.body)
		}
	})
	t.Run("another method is refused", func(t *testing.T) {
		w := w.in(t)
		for path, method := range map[string]string{"/execute": "GET", "/upload": "PUT", "/download/x": "POST", "/list/": "DELETE"} {
			if got := w.ask(method, path, ""); got.status != http.StatusMethodNotAllowed || got.header.Get("Allow") == "" {
				t.Errorf("%s %s: %d %s", method, path, got.status, got.body)
			}
		}
	})
}

func TestDisposition(t *testing.T) {
	for _, tc := range []struct{ header, name, filename string }{
		{`form-data; name="file"; filename="a/b.txt"`, "file", "a/b.txt"},
		{`form-data; name=file; filename=plain`, "file", "plain"},
		{`form-data; filename="x;y=z"; name="file"`, "file", "x;y=z"},
		{`form-data; name="file"; filename="a%22b"`, "file", `a"b`},
		{`form-data; name="file"; filename="a\"b\\c\d"`, "file", `a"b\c\d`},
		{`form-data; name="file"; filename="ü ☃"`, "file", "ü ☃"},
		{`form-data; name="file"; filename="x"; filename*=UTF-8''%C3%BC%2Fy`, "file", "ü/y"},
		{`form-data; name="file"; filename*=UTF-8''%C3%BC; filename="x"`, "file", "ü"},
		{`form-data; name="file"; filename*=latin1''%FC; filename="x"`, "file", "x"},
		{`form-data; NAME="file"; FileName = "x"`, "file", "x"},
		{`form-data; name="file`, "file", ""},
		{`form-data`, "", ""},
		{``, "", ""},
		{`;;;=;="`, "", ""},
	} {
		if name, filename := runtime.Disposition(tc.header); name != tc.name || filename != tc.filename {
			t.Errorf("%s: %q %q", tc.header, name, filename)
		}
	}
}
