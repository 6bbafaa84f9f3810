package envd_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pb "github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/target"
)

type answer struct {
	status int
	header http.Header
	body   string
}

func (w *world) ask(t testing.TB, method, pathQuery string, header map[string]string, body io.Reader) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, w.URL+pathQuery, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "identity")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := w.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, strings.TrimSuffix(string(b), "\n")}
}

var octets = map[string]string{"Content-Type": "application/octet-stream"}

func upload(t testing.TB, w *world, path, content string) {
	t.Helper()
	if got := w.ask(t, "POST", "/files?path="+url.QueryEscape(path), octets, strings.NewReader(content)); got.status != 200 {
		t.Fatalf("upload: %+v", got)
	}
}

// form is a multipart body with file parts under their full names.
func form(files ...string) (string, *bytes.Buffer) {
	var b bytes.Buffer
	m := multipart.NewWriter(&b)
	for i := 0; i < len(files); i += 2 {
		part, _ := m.CreatePart(textproto.MIMEHeader{"Content-Disposition": {`form-data; name="file"; filename="` + files[i] + `"`}})
		io.WriteString(part, files[i+1])
	}
	m.Close()
	return m.FormDataContentType(), &b
}

// parts is a multipart body of so many parts that are no files.
func parts(n int) (string, *bytes.Buffer) {
	var b bytes.Buffer
	m := multipart.NewWriter(&b)
	for range n {
		_ = m.WriteField("other", "")
	}
	m.Close()
	return m.FormDataContentType(), &b
}

func TestUpload(t *testing.T) {
	w := newWorld(t)
	t.Run("one file, where the query says", func(t *testing.T) {
		kind, body := form("ignored.txt", "hello")
		got := w.ask(t, "POST", "/files?path=one/a.txt", map[string]string{"Content-Type": kind}, body)
		want := fmt.Sprintf(`[{"name":"a.txt","path":"%s/one/a.txt","type":"file"}]`, w.home)
		if got.status != 200 || got.body != want {
			t.Errorf("got %+v, want %s", got, want)
		}
		if b, _ := os.ReadFile(w.home + "/one/a.txt"); string(b) != "hello" {
			t.Errorf("wrote %q", b)
		}
	})
	t.Run("several, each where its whole name says", func(t *testing.T) {
		kind, body := form("m/x/a.txt", "A", w.home+"/m/b ü.txt", "B")
		got := w.ask(t, "POST", "/files", map[string]string{"Content-Type": kind}, body)
		want := fmt.Sprintf(`[{"name":"a.txt","path":"%[1]s/m/x/a.txt","type":"file"},{"name":"b ü.txt","path":"%[1]s/m/b ü.txt","type":"file"}]`, w.home)
		if got.status != 200 || got.body != want {
			t.Errorf("got %+v, want %s", got, want)
		}
	})
	t.Run("none", func(t *testing.T) {
		kind, body := form()
		if got := w.ask(t, "POST", "/files", map[string]string{"Content-Type": kind}, body); got.status != 200 || got.body != "[]" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("an overwrite keeps the mode", func(t *testing.T) {
		path := put(t, w.home+"/script", "a long content")
		os.Chmod(path, 0o755)
		upload(t, w, path, "short")
		st, err := os.Stat(path)
		if err != nil || st.Mode() != 0o755 || st.Size() != 5 {
			t.Errorf("%v %v", st, err)
		}
	})
	t.Run("gzip", func(t *testing.T) {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		io.WriteString(z, "squeezed")
		z.Close()
		got := w.ask(t, "POST", "/files?path=z", map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, &b)
		if c, _ := os.ReadFile(w.home + "/z"); got.status != 200 || string(c) != "squeezed" {
			t.Errorf("%+v %q", got, c)
		}
	})
}

func TestUploadRefused(t *testing.T) {
	w := newWorld(t)
	os.Mkdir(w.home+"/dir", 0o755)
	twice, twiceBody := form("same", "1", "./same", "2")
	many, manyBody := parts(10_001)
	truncated, whole := form("cut", strings.Repeat("x", 100))
	for name, c := range map[string]struct {
		query  string
		header map[string]string
		body   io.Reader
		status int
		want   string
	}{
		"octets without a path":      {"", octets, strings.NewReader("x"), 400, "path"},
		"a directory":                {"?path=dir", octets, strings.NewReader("x"), 400, "path is a directory: " + w.home + "/dir"},
		"no kind":                    {"?path=x", map[string]string{"Content-Type": "text/plain"}, strings.NewReader("x"), 400, "multipart/form-data"},
		"the same path twice":        {"", map[string]string{"Content-Type": twice}, twiceBody, 400, "you cannot upload multiple files to the same path '" + w.home + "/same' in one upload request"},
		"too many parts":             {"", map[string]string{"Content-Type": many}, manyBody, 400, "an upload has 10000 parts at most"},
		"half a form":                {"", map[string]string{"Content-Type": truncated}, bytes.NewReader(whole.Bytes()[:whole.Len()-60]), 400, "unexpected EOF"},
		"no boundary":                {"", map[string]string{"Content-Type": "multipart/form-data"}, strings.NewReader("x"), 400, "multipart/form-data"},
		"not gzip":                   {"?path=x", map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, strings.NewReader("plain"), 400, "gzip"},
		"an unknown coding":          {"?path=x", map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "br"}, strings.NewReader("x"), 400, "Content-Encoding"},
		"nobody":                     {"?path=x&username=nobody-here", octets, strings.NewReader("x"), 401, "nobody-here"},
		"metadata that is too long":  {"?path=x", map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-A": strings.Repeat("v", 5000)}, strings.NewReader("x"), 400, "4096"},
		"a key that is too long":     {"?path=x", map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-" + strings.Repeat("k", 247): "v"}, strings.NewReader("x"), 400, "246"},
		"metadata that is not ASCII": {"?path=x", map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-A": "ü"}, strings.NewReader("x"), 400, "ASCII"},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.ask(t, "POST", "/files"+c.query, c.header, c.body)
			if got.status != c.status || !strings.HasPrefix(got.body, `{"code":`+strconv.Itoa(c.status)+`,"message":"`) || !strings.Contains(got.body, c.want) {
				t.Errorf("got %+v, want %d with %q", got, c.status, c.want)
			}
		})
	}
}

func TestDownload(t *testing.T) {
	w := newWorld(t)
	put(t, w.home+"/a b.txt", "0123456789")
	os.Mkdir(w.home+"/dir", 0o755)
	proc, err := os.ReadFile("/proc/version")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		query  string
		header map[string]string
		status int
		body   string
	}{
		"a file":                  {"a%20b.txt", nil, 200, "0123456789"},
		"a part":                  {"a%20b.txt", map[string]string{"Range": "bytes=2-4"}, 206, "234"},
		"its end":                 {"a%20b.txt", map[string]string{"Range": "bytes=-3"}, 206, "789"},
		"a part that is not":      {"a%20b.txt", map[string]string{"Range": "bytes=20-"}, 416, "invalid range: failed to overlap"},
		"a file of no size":       {"/proc/version", nil, 200, strings.TrimSuffix(string(proc), "\n")},
		"a directory":             {"dir", nil, 400, `{"code":400,"message":"path '` + w.home + `/dir' is a directory"}`},
		"nothing":                 {"none", nil, 404, `{"code":404,"message":"path '` + w.home + `/none' does not exist"}`},
		"the memory of the agent": {"/proc/self/environ", nil, 403, `{"code":403,"message":"/proc/self/environ: permission denied"}`},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.ask(t, "GET", "/files?path="+c.query, c.header, nil)
			if got.status != c.status || got.body != c.body {
				t.Errorf("got %+v, want %d %q", got, c.status, c.body)
			}
		})
	}
	got := w.ask(t, "GET", "/files?path=a%20b.txt", nil, nil)
	if d := got.header.Get("Content-Disposition"); d != `inline; filename="a b.txt"` {
		t.Errorf("disposition %q", d)
	}
	if got.header.Get("Access-Control-Allow-Origin") != "*" || got.header.Get("Content-Security-Policy") != "sandbox" {
		t.Errorf("headers %v", got.header)
	}
	squeezed := w.ask(t, "GET", "/files?path=a%20b.txt", map[string]string{"Accept-Encoding": "gzip"}, nil)
	z, err := gzip.NewReader(strings.NewReader(squeezed.body))
	if err != nil || squeezed.header.Get("Content-Encoding") != "gzip" {
		t.Fatal(err, squeezed.header)
	}
	if b, err := io.ReadAll(z); string(b) != "0123456789" || err != nil {
		t.Errorf("%q %v", b, err)
	}
}

func TestLargeFile(t *testing.T) {
	w := newWorld(t)
	const size = 64 << 20
	sum := sha256.New()
	got := w.ask(t, "POST", "/files?path=large", octets, io.TeeReader(io.LimitReader(pattern{}, size), sum))
	if got.status != 200 {
		t.Fatal(got)
	}
	resp, err := w.Client().Get(w.URL + "/files?path=large")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	back := sha256.New()
	n, err := io.Copy(back, resp.Body)
	if n != size || err != nil || !bytes.Equal(sum.Sum(nil), back.Sum(nil)) {
		t.Errorf("%d bytes came back, %v", n, err)
	}
}

type pattern struct{}

func (pattern) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(i * 7)
	}
	return len(p), nil
}

func TestMetadata(t *testing.T) {
	w := newWorld(t)
	header := map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-Author-Name": "me", "X-Metadata-Kind": "test"}
	got := w.ask(t, "POST", "/files?path=m", header, strings.NewReader("x"))
	if strings.Contains(got.body, "not supported") {
		t.Skip("no attributes on this file system")
	}
	want := fmt.Sprintf(`[{"name":"m","path":"%s/m","type":"file","metadata":{"author-name":"me","kind":"test"}}]`, w.home)
	if got.status != 200 || got.body != want {
		t.Fatalf("got %+v, want %s", got, want)
	}
	stat := func() map[string]string {
		e, err := w.files().Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: "m"}))
		if err != nil {
			t.Fatal(err)
		}
		return e.Msg.GetEntry().GetMetadata()
	}
	if m := stat(); fmt.Sprint(m) != "map[author-name:me kind:test]" {
		t.Errorf("stat tells %v", m)
	}
	delete(header, "X-Metadata-Kind")
	w.ask(t, "POST", "/files?path=m", header, strings.NewReader("y"))
	if m := stat(); fmt.Sprint(m) != "map[author-name:me]" {
		t.Errorf("a second upload leaves %v", m)
	}
	upload(t, w, "m", "z")
	if m := stat(); len(m) != 0 {
		t.Errorf("an upload without metadata leaves %v", m)
	}
}

func TestCompose(t *testing.T) {
	w := newWorld(t)
	put(t, w.home+"/a", "one ")
	put(t, w.home+"/b", "two")
	got := w.ask(t, "POST", "/files/compose", nil, strings.NewReader(`{"source_paths":["a","b"],"destination":"a"}`))
	if b, _ := os.ReadFile(w.home + "/a"); got.status != 200 || string(b) != "one two" {
		t.Errorf("%+v %q", got, b)
	}
	for body, want := range map[string]int{
		`{"source_paths":["none"],"destination":"c"}`: 404, `{"source_paths":[],"destination":"c"}`: 400, `{`: 400,
		`{"source_paths":["a"],"destination":"c","username":"nobody-here"}`: 401,
	} {
		if got := w.ask(t, "POST", "/files/compose", nil, strings.NewReader(body)); got.status != want {
			t.Errorf("%s: %+v, want %d", body, got, want)
		}
	}
}

func TestSignature(t *testing.T) {
	// The vector of E2B's own SDKs.
	if got := target.Sign("hello.txt", target.OpRead, "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", ""); got != "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E" {
		t.Errorf("signature %s", got)
	}
	w := newWorld(t)
	put(t, w.home+"/f", "secret")
	token := w.tokens.Envd(w.box.ID)
	if got := w.ask(t, "GET", "/files?path=f", nil, nil); got.status != 200 {
		t.Errorf("a sandbox that is not secure: %+v", got)
	}
	w.secure()
	signed := func(op target.Operation, expires string) string {
		q := url.Values{"path": {"f"}, "signature": {target.Sign("f", op, "", token, expires)}}
		if expires != "" {
			q.Set("signature_expiration", expires)
		}
		return "/files?" + q.Encode()
	}
	in := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	for name, c := range map[string]struct {
		method, url string
		header      map[string]string
		want        string
	}{
		"the token":                      {"GET", "/files?path=f", map[string]string{"X-Access-Token": token}, "secret"},
		"a wrong token":                  {"GET", "/files?path=f", map[string]string{"X-Access-Token": "x"}, `{"code":401,"message":"access token present in header but does not match"}`},
		"a wrong token with a signature": {"GET", signed(target.OpRead, ""), map[string]string{"X-Access-Token": "x"}, `{"code":401,"message":"access token present in header but does not match"}`},
		"nothing":                        {"GET", "/files?path=f", nil, `{"code":401,"message":"missing signature query parameter"}`},
		"a signature":                    {"GET", signed(target.OpRead, ""), nil, "secret"},
		"one for a while":                {"GET", signed(target.OpRead, in(time.Minute)), nil, "secret"},
		"one that is over":               {"GET", signed(target.OpRead, in(-time.Minute)), nil, `{"code":401,"message":"signature is already expired"}`},
		"one that was prolonged":         {"GET", signed(target.OpRead, in(-time.Minute)) + "9", nil, `{"code":401,"message":"invalid signature"}`},
		"one for writing":                {"GET", signed(target.OpWrite, ""), nil, `{"code":401,"message":"invalid signature"}`},
		"one for reading, written":       {"POST", signed(target.OpRead, ""), octets, `{"code":401,"message":"invalid signature"}`},
		"one for another user":           {"GET", signed(target.OpRead, "") + "&username=root", nil, `{"code":401,"message":"invalid signature"}`},
		"one with no word for a time":    {"GET", signed(target.OpRead, "") + "&signature_expiration=", nil, `{"code":401,"message":"invalid signature"}`},
		"one with a word for a time":     {"GET", signed(target.OpRead, "soon"), nil, `{"code":401,"message":"invalid signature"}`},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.ask(t, c.method, c.url, c.header, nil)
			if got.body != c.want || strings.HasPrefix(c.want, "{") != (got.status == 401) {
				t.Errorf("got %+v, want %s", got, c.want)
			}
		})
	}
	composed := strings.Replace(signed(target.OpWrite, ""), "/files", "/files/compose", 1)
	if got := w.ask(t, "POST", composed, nil, strings.NewReader(`{"source_paths":["f"],"destination":"g"}`)); got.status != 401 {
		t.Errorf("a signature of one file composes others: %+v", got)
	}
	if got := w.ask(t, "POST", signed(target.OpWrite, ""), octets, strings.NewReader("new")); got.status != 200 {
		t.Errorf("a signed upload: %+v", got)
	}
}

func TestStatus(t *testing.T) {
	w := newWorld(t)
	if got := w.ask(t, "GET", "/health", nil, nil); got.status != 204 {
		t.Errorf("health: %+v", got)
	}
	if got := w.ask(t, "GET", "/envs", nil, nil); got.status != 200 || !strings.Contains(got.body, `"GREETING":"hello"`) {
		t.Errorf("envs: %+v", got)
	}
	got := w.ask(t, "GET", "/metrics", nil, nil)
	for _, key := range []string{"ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "mem_total_mib", "mem_used_mib", "disk_used", "disk_total"} {
		if !strings.Contains(got.body, `"`+key+`":`) {
			t.Errorf("metrics without %s: %+v", key, got)
		}
	}
	asked := map[string]string{"Origin": "https://x.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-access-token,connect-protocol-version"}
	if got := w.ask(t, "OPTIONS", "/process.Process/Start", asked, nil); got.status != 204 || got.header.Get("Access-Control-Allow-Origin") != "*" ||
		got.header.Get("Access-Control-Allow-Headers") != asked["Access-Control-Request-Headers"] {
		t.Errorf("preflight: %+v", got)
	}
	if got := w.ask(t, "GET", "/nothing", nil, nil); got.status != 404 || !strings.HasPrefix(got.body, `{"code":404`) {
		t.Errorf("an unknown path: %+v", got)
	}
}
