package execd_test

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"net/textproto"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// part is one of an upload.
type part struct{ name, content string }

// upload sends parts as the SDKs do.
func (w *world) upload(parts ...part) answer {
	w.t.Helper()
	var body bytes.Buffer
	out := multipart.NewWriter(&body)
	for _, p := range parts {
		header := textproto.MIMEHeader{}
		header.Set("Content-Disposition", fmt.Sprintf(`form-data; name=%q; filename=%q`, p.name, p.name))
		in, err := out.CreatePart(header)
		if err != nil {
			w.t.Fatal(err)
		}
		if _, err := in.Write([]byte(p.content)); err != nil {
			w.t.Fatal(err)
		}
	}
	out.Close()
	return w.ask("POST", "/files/upload", &body, "Content-Type", out.FormDataContentType())
}

type fileInfo struct {
	Path, Type, Owner, Group string
	Size                     int64
	Mode                     int
	Modified                 time.Time `json:"modified_at"`
	Created                  time.Time `json:"created_at"`
}

func (w *world) info(paths ...string) map[string]fileInfo {
	w.t.Helper()
	var found map[string]fileInfo
	w.json(w.ask("GET", "/files/info?path="+strings.Join(paths, "&path="), nil), &found)
	return found
}

func TestFiles(t *testing.T) {
	w := newWorld(t)
	at := func(name string) string { return filepath.Join(w.home, name) }
	big := strings.Repeat("0123456789", 300_000)
	a := w.upload(part{"metadata", `{"path":"` + at("d/one.txt") + `","owner":null,"group":null,"mode":640}`}, part{"file", "one\ntwo\nthree"},
		part{"metadata", `{"path":"~/two.bin"}`}, part{"file", big}, part{"metadata", `{"path":"three"}`}, part{"file", ""})
	if a.status != 200 || a.body != "" || a.header.Get("Content-Length") != "0" {
		t.Fatalf("got %+v", a)
	}
	if text, err := os.ReadFile(at("two.bin")); err != nil || string(text) != big {
		t.Fatalf("%d bytes, %v", len(text), err)
	}
	info := w.info(at("d/one.txt"), at("d"))
	if f := info[at("d/one.txt")]; f.Type != "file" || f.Size != 13 || f.Mode != 640 || f.Owner == "" || f.Group == "" || time.Since(f.Modified) > time.Minute || f.Modified.Sub(f.Created).Abs() > 2*time.Second {
		t.Fatalf("got %+v", f)
	}
	if f := info[at("d")]; f.Type != "directory" {
		t.Fatalf("got %+v", f)
	}
	for name, c := range map[string]struct {
		query, bytes string
		status       int
		want         string
	}{
		"all of it":        {"", "", 200, "one\ntwo\nthree"},
		"a part":           {"", "bytes=1-3", 206, "ne\n"},
		"the end":          {"", "bytes=-5", 206, "three"},
		"beyond the end":   {"", "bytes=100-", 416, `{"code":"INVALID_FILE","message":"the file has no such range"}`},
		"lines":            {"&offset=2&limit=1", "", 200, "two\n"},
		"lines to the end": {"&offset=2", "", 200, "two\nthree"},
		"the first lines":  {"&limit=2", "", 200, "one\ntwo\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var headers []string
			if c.bytes != "" {
				headers = []string{"Range", c.bytes}
			}
			a := w.ask("GET", "/files/download?path="+at("d/one.txt")+c.query, nil, headers...)
			if a.status != c.status || a.body != c.want {
				t.Fatalf("got %d %q", a.status, a.body)
			}
		})
	}
	if a := w.ask("GET", "/files/download?path=three", nil); a.status != 200 || a.body != "" {
		t.Fatalf("an empty file: %+v", a)
	}
}

func TestFilesAreChanged(t *testing.T) {
	w := newWorld(t)
	at := func(name string) string { return filepath.Join(w.home, name) }
	nothing := func(a answer) {
		t.Helper()
		if a.status != 200 || a.body != "" || a.header.Get("Content-Length") != "0" {
			t.Fatalf("got %+v", a)
		}
	}
	nothing(w.ask("POST", "/directories", map[string]any{at("a/b"): map[string]any{"mode": 750, "owner": nil, "group": nil}}))
	nothing(w.upload(part{"metadata", `{"path":"a/b/x.py"}`}, part{"file", "old old"}, part{"metadata", `{"path":"a/y.txt"}`}, part{"file", "y"}))
	nothing(w.ask("POST", "/files/permissions", map[string]any{at("a/y.txt"): map[string]any{"mode": 600, "owner": "no-such-user", "group": nil}}))
	if f := w.info(at("a/b"), at("a/y.txt")); f[at("a/b")].Mode != 750 || f[at("a/y.txt")].Mode != 600 {
		t.Fatalf("got %+v", f)
	}
	var list []fileInfo
	names := func(a answer) (out []string) {
		t.Helper()
		w.json(a, &list)
		for _, f := range list {
			out = append(out, strings.TrimPrefix(f.Path, w.home+"/")+" "+f.Type)
		}
		return out
	}
	if got := names(w.ask("GET", "/files/search?path=a&pattern=*", nil)); !slices.Equal(got, []string{"a/b/x.py file", "a/y.txt file"}) {
		t.Fatalf("got %q", got)
	}
	if got := names(w.ask("GET", "/files/search?path=a&pattern=*.%7Bpy,md%7D", nil)); !slices.Equal(got, []string{"a/b/x.py file"}) {
		t.Fatalf("got %q", got)
	}
	if a := w.ask("GET", "/files/search?path=a&pattern=none", nil); a.body != "[]" {
		t.Fatalf("got %+v", a)
	}
	if got := names(w.ask("GET", "/directories/list?path=a", nil)); !slices.Equal(got, []string{"a/b directory", "a/y.txt file"}) {
		t.Fatalf("got %q", got)
	}
	if got := names(w.ask("GET", "/directories/list?path=a&depth=2", nil)); len(got) != 3 {
		t.Fatalf("got %q", got)
	}
	change := map[string]any{"a/b/x.py": map[string]any{"old": "old", "new": "newer"}, "a/y.txt": map[string]any{"old": "z", "new": ""}}
	if a := w.ask("POST", "/files/replace?verbose=true", change); a.body != `{"a/b/x.py":{"replacedCount":2},"a/y.txt":{"replacedCount":0}}` {
		t.Fatalf("got %+v", a)
	}
	nothing(w.ask("POST", "/files/replace?verbose=false", change))
	nothing(w.ask("POST", "/files/mv", []any{map[string]any{"src": "a/b/x.py", "dest": at("n/m/x.py")}}))
	if text, err := os.ReadFile(at("n/m/x.py")); err != nil || string(text) != "newerer newerer" && string(text) != "newer newer" {
		t.Fatalf("%q, %v", text, err)
	}
	nothing(w.ask("DELETE", "/files?path=n/m/x.py&path=missing", nil))
	nothing(w.ask("DELETE", "/directories?path=n&path=missing", nil))
	if a := w.ask("GET", "/files/info?path=n", nil); a.status != 404 {
		t.Fatalf("got %+v", a)
	}
}

func TestAnUploadMayNameAllItsFilesFirst(t *testing.T) {
	w := newWorld(t)
	a := w.upload(part{"metadata", `{"path":"a"}`}, part{"metadata", `{"path":"b"}`}, part{"file", "1"}, part{"file", "2"})
	if a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	for name, want := range map[string]string{"a": "1", "b": "2"} {
		if got := w.ask("GET", "/files/download?path="+name, nil); got.body != want {
			t.Errorf("%s: got %+v, want %s", name, got, want)
		}
	}
}
