package cove_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
)

// files is a world that keeps artifacts, with links on a server of their own.
type files struct {
	*world
	keeper *artifact.Keeper
	index  *sqlstore.Store
	blobs  *local.Store
	links  *httptest.Server
	dir    string
	log    bytes.Buffer
}

func newFiles(t *testing.T) *files {
	t.Helper()
	f := &files{world: newUnstarted(t), dir: t.TempDir()}
	var err error
	if f.index, err = sqlstore.Open(filepath.Join(f.dir, "db")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.index.Close() })
	if f.blobs, err = local.Open(filepath.Join(f.dir, "blobs"), local.Options{}); err != nil {
		t.Fatal(err)
	}
	links := http.NewServeMux()
	f.links = httptest.NewServer(links)
	t.Cleanup(f.links.Close)
	f.keeper, err = artifact.New(t.Context(), artifact.Config{PublicURL: f.links.URL, LinkTTL: 10 * time.Minute, MaxFileSize: 1 << 20}, f.blobs, f.index)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.keeper.Close() })
	links.Handle(cove.LinkPrefix, cove.NewLinks(f.keeper, slog.New(slog.NewTextHandler(&f.log, &slog.HandlerOptions{Level: slog.LevelDebug}))))
	f.api.SetArtifacts(f.keeper)
	f.Start()
	t.Cleanup(f.Close)
	f.client = newClient(t, f.URL, f.key)
	return f
}

// keep keeps a content as if a sandbox had left it.
func (f *files) keep(t *testing.T, id, name, mime, content string, o artifact.Origin) artifact.Artifact {
	t.Helper()
	d, err := f.blobs.Draft("acme")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	a := artifact.Artifact{ID: id, Tenant: "acme", Name: name, Path: "sub/" + name, MIME: mime, Size: int64(len(content)), SHA256: d.Sum(),
		Created: time.Now().UTC().Truncate(time.Microsecond), Origin: o}
	if err := f.index.AddArtifacts(t.Context(), []artifact.Artifact{a}, a.Datasets); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Place(); err != nil { // after its row: nobody claims it against the sweeper here
		t.Fatal(err)
	}
	return a
}

func (f *files) link(t *testing.T, a artifact.Artifact) string {
	t.Helper()
	link, _, err := f.keeper.Link(a, 0)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// fetch asks for an address with some headers.
func fetch(t *testing.T, method, address string, headers map[string]string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range headers {
		req.Header.Set(name, value)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		body = append(body, []byte(" broken: "+err.Error())...)
	}
	return resp, string(body)
}

func TestLinks(t *testing.T) {
	f := newFiles(t)
	a := f.keep(t, "art_1", "Zahlen – 図 \"1\".csv", "text/csv", "a,b\n1,2\n", artifact.Origin{})
	b := f.keep(t, "art_2", "page.html", "text/html", "<script>alert(1)</script>", artifact.Origin{})
	at := f.link(t, a)
	t.Run("S4.98 D16 a link gives the bytes, their type and their name", func(t *testing.T) {
		resp, body := fetch(t, "GET", at, nil)
		_, params, err := mime.ParseMediaType(resp.Header.Get("Content-Disposition"))
		if err != nil {
			t.Fatal(err)
		}
		got := []string{resp.Status, body, resp.Header.Get("Content-Type"), resp.Header.Get("Content-Length"), params["filename"]}
		if diff := cmp.Diff([]string{"200 OK", "a,b\n1,2\n", "text/csv; charset=utf-8", "8", a.Name}, got); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("S4.99 HEAD gives the same headers and no body", func(t *testing.T) {
		get, _ := fetch(t, "GET", at, nil)
		head, body := fetch(t, "HEAD", at, nil)
		get.Header.Del("Date")
		head.Header.Del("Date")
		if diff := cmp.Diff(get.Header, head.Header); diff != "" || body != "" || head.StatusCode != 200 {
			t.Error(head.Status, body, diff)
		}
	})
	t.Run("S4.99 /head gives JSON", func(t *testing.T) {
		resp, body := fetch(t, "GET", strings.Replace(at, "?", "/head?", 1), nil)
		var got cove.ArtifactHead
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatal(resp.Status, body)
		}
		if diff := cmp.Diff(cove.ArtifactHead{ID: a.ID, SHA256: a.SHA256, MIME: "text/csv", Filename: a.Name, Size: 8, CreatedAt: a.Created}, got); diff != "" {
			t.Error(diff)
		}
		var names map[string]any
		if err := json.Unmarshal([]byte(body), &names); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"created_at", "filename", "id", "mime", "sha256", "size"}, slices.Sorted(maps.Keys(names))); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("S4.106 parts, and nothing for who has it already", func(t *testing.T) {
		etag := `"` + a.SHA256 + `"`
		for what, c := range map[string]struct {
			headers map[string]string
			status  int
			body    string
		}{
			"a part":                        {map[string]string{"Range": "bytes=2-4"}, 206, "b\n1"},
			"the end":                       {map[string]string{"Range": "bytes=-2"}, 206, "2\n"},
			"beyond it":                     {map[string]string{"Range": "bytes=100-"}, 416, ""},
			"a part of what is still so":    {map[string]string{"Range": "bytes=0-0", "If-Range": etag}, 206, "a"},
			"a part of what was before":     {map[string]string{"Range": "bytes=0-0", "If-Range": `"other"`}, 200, "a,b\n1,2\n"},
			"what is known":                 {map[string]string{"If-None-Match": etag}, 304, ""},
			"what is known, among others":   {map[string]string{"If-None-Match": `"x", ` + etag}, 304, ""},
			"something that is not known":   {map[string]string{"If-None-Match": `"x"`}, 200, "a,b\n1,2\n"},
			"what must be something it not": {map[string]string{"If-Match": `"x"`}, 412, ""},
		} {
			resp, body := fetch(t, "GET", at, c.headers)
			if resp.StatusCode != c.status || c.status < 400 && body != c.body || resp.StatusCode < 400 && resp.Header.Get("ETag") != etag {
				t.Errorf("%s: %s, %q", what, resp.Status, body)
			}
		}
	})
	t.Run("what an artifact holds runs in no browser", func(t *testing.T) {
		resp, _ := fetch(t, "GET", f.link(t, b), nil)
		for name, want := range map[string]string{
			"Content-Disposition": "attachment", "Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "private",
		} {
			if got := resp.Header.Get(name); !strings.HasPrefix(got, want) {
				t.Errorf("%s: %q", name, got)
			}
		}
	})
	other := f.link(t, b)
	token := func(link string) string {
		u, err := url.Parse(link)
		if err != nil {
			t.Fatal(err)
		}
		return u.Query().Get("token")
	}
	for what, c := range map[string]struct {
		path   string
		status int
		says   string
	}{
		"S4.102 no token":                        {"/artifacts/art_1", 401, "missing"},
		"S4.101 a token that is none":            {"/artifacts/art_1?token=x", 401, "malformed"},
		"S4.101 a token that was changed":        {"/artifacts/art_1?token=" + token(at)[:len(token(at))-4] + "AAAA", 401, "signature"},
		"S4.101 another artifact's token":        {"/artifacts/art_1?token=" + token(other), 403, "another"},
		"S4.102 an artifact that was never here": {"/artifacts/art_9?token=" + token(at), 404, "no artifact"},
		"S4.102 /head without a token":           {"/artifacts/art_1/head", 401, "missing"},
		"something else below":                   {"/artifacts/art_1/tail?token=" + token(at), 404, "token="},
		"nothing below":                          {"/artifacts/", 404, "token="},
	} {
		t.Run(what, func(t *testing.T) {
			resp, body := fetch(t, "GET", f.links.URL+c.path, nil)
			if resp.StatusCode != c.status || !strings.Contains(body, c.says) || strings.Contains(body, token(at)) {
				t.Errorf("%s: %s", resp.Status, body)
			}
		})
	}
	t.Run("a slash at the end does no harm", func(t *testing.T) {
		if resp, _ := fetch(t, "GET", strings.Replace(at, "?", "/?", 1), nil); resp.StatusCode != 200 {
			t.Error(resp.Status)
		}
	})
	t.Run("a link only reads", func(t *testing.T) {
		for _, method := range []string{"POST", "PUT", "DELETE", "PATCH"} {
			if resp, _ := fetch(t, method, at, nil); resp.StatusCode < 400 {
				t.Error(method, resp.Status)
			}
		}
	})
	blob := func(a artifact.Artifact) string {
		return filepath.Join(f.dir, "blobs", "t-acme", a.SHA256[:2], a.SHA256)
	}
	t.Run("S4.104 a content that is damaged is never sent as if it were whole", func(t *testing.T) {
		if err := os.WriteFile(blob(a), []byte("a,b\n1,3\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if resp, body := fetch(t, "GET", at, nil); resp.StatusCode != 500 || !strings.Contains(body, "damaged") {
			t.Errorf("%s: %s", resp.Status, body)
		}
	})
	t.Run("S4.102 a content that is gone is gone", func(t *testing.T) {
		if err := os.Remove(blob(a)); err != nil {
			t.Fatal(err)
		}
		for _, method := range []string{"GET", "HEAD"} {
			if resp, _ := fetch(t, method, at, nil); resp.StatusCode != 410 {
				t.Error(method, resp.Status)
			}
		}
	})
	t.Run("no token is in the log", func(t *testing.T) {
		if log := f.log.String(); strings.Contains(log, token(at)[:20]) || !strings.Contains(log, "damaged") {
			t.Error(log)
		}
	})
}

// spoiled is a content that turns out to be wrong when it was almost sent.
type spoiled struct{ *artifact.Keeper }

type torn struct{ *strings.Reader }

func (torn) Close() error { return nil }

func (r torn) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p[:min(len(p), 1000)])
	if r.Len() == 0 {
		return 0, errors.New("damaged")
	}
	return n, err
}

func (s spoiled) OpenLinked(context.Context, artifact.Artifact) (artifact.Content, error) {
	return torn{strings.NewReader(strings.Repeat("x", 100_000))}, nil
}

func TestS4_104_ALateFailureBreaksTheConnection(t *testing.T) {
	f := newFiles(t)
	a := f.keep(t, "art_1", "f", "text/plain", "x", artifact.Origin{})
	server := httptest.NewServer(cove.NewLinks(spoiled{f.keeper}, slog.New(slog.DiscardHandler)))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	defer server.Close()
	_, body := fetch(t, "GET", strings.Replace(f.link(t, a), f.links.URL, server.URL, 1), nil)
	if !strings.Contains(body, "broken:") {
		t.Error("the client takes what came for all of it")
	}
}

func TestLineageSaysWhenItDoesNotNameAllThatAreTheSame(t *testing.T) {
	f := newFiles(t)
	for i := range artifact.DefaultLimit {
		f.keep(t, fmt.Sprintf("art_%d", i), "x", "text/plain", "the same", artifact.Origin{Session: "s1", Key: "chat-1"})
	}
	got, err := f.client.ArtifactLineage(t.Context(), "art_0")
	if err != nil || len(got.Same) != artifact.DefaultLimit-1 || got.SameTruncated {
		t.Errorf("%d others are the same, more %v, %v", len(got.Same), got.SameTruncated, err)
	}
	f.keep(t, "art_more", "x", "text/plain", "the same", artifact.Origin{Session: "s1", Key: "chat-1"})
	if got, err = f.client.ArtifactLineage(t.Context(), "art_0"); err != nil || !got.SameTruncated {
		t.Errorf("%d others are the same, more %v, %v", len(got.Same), got.SameTruncated, err)
	}
}

func TestArtifactAPI(t *testing.T) {
	f := newFiles(t)
	one := f.keep(t, "art_1", "one.csv", "text/csv", "1\n", artifact.Origin{Session: "s1", Key: "chat-1", Sandbox: "sb1", Run: "run1", Cell: 2, ToolCall: "call_1",
		Datasets: []artifact.Dataset{{ID: "sales", SHA256: "abc"}}})
	two := f.keep(t, "art_2", "two.csv", "text/csv", "1\n", artifact.Origin{Session: "s2", Key: "chat-2", Run: "run2"})
	want := client.Artifact{ID: "art_1", Name: "one.csv", Path: "sub/one.csv", MIME: "text/csv", Size: 2, SHA256: one.SHA256, CreatedAt: one.Created,
		Session: "chat-1", Sandbox: "sb1", Run: "run1", Cell: 2, ToolCall: "call_1", Datasets: []client.ArtifactDataset{{ID: "sales", SHA256: "abc"}}}
	links := cmpopts.IgnoreFields(client.Artifact{}, "URL", "URLExpires")
	t.Run("S4.105 get tells everything, with a link that works", func(t *testing.T) {
		got, err := f.client.Artifact(t.Context(), "art_1")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(&want, got, links); diff != "" {
			t.Error(diff)
		}
		if resp, body := fetch(t, "GET", got.URL, nil); resp.StatusCode != 200 || body != "1\n" || time.Until(got.URLExpires) < 9*time.Minute {
			t.Error(resp.Status, body, got.URLExpires)
		}
	})
	list := func(req client.ArtifactsRequest) (ids []string) {
		t.Helper()
		for a, err := range f.client.Artifacts(t.Context(), req) {
			if err != nil {
				t.Fatal(err)
			}
			if a.URL == "" || a.Datasets != nil {
				t.Errorf("no link, or what is only told of one: %+v", a)
			}
			ids = append(ids, a.ID)
		}
		return ids
	}
	t.Run("S4.105 S4.109 list by session, run and content, page for page", func(t *testing.T) {
		for _, c := range []struct {
			req  client.ArtifactsRequest
			want []string
		}{
			{client.ArtifactsRequest{}, []string{"art_2", "art_1"}},
			{client.ArtifactsRequest{Limit: 1}, []string{"art_2", "art_1"}},
			{client.ArtifactsRequest{Session: "chat-1"}, []string{"art_1"}},
			{client.ArtifactsRequest{Run: "run2"}, []string{"art_2"}},
			{client.ArtifactsRequest{SHA256: one.SHA256}, []string{"art_2", "art_1"}},
			{client.ArtifactsRequest{Session: "nobody"}, nil},
		} {
			if diff := cmp.Diff(c.want, list(c.req)); diff != "" {
				t.Errorf("%+v: %s", c.req, diff)
			}
		}
	})
	t.Run("content, verified", func(t *testing.T) {
		a, r, err := f.client.ReadArtifact(t.Context(), "art_1")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if b, err := io.ReadAll(r); err != nil || string(b) != "1\n" || a.Name != "one.csv" {
			t.Error(string(b), err)
		}
		resp, body := fetch(t, "GET", f.URL+cove.Prefix+"/artifacts/art_1/content", map[string]string{"X-API-Key": f.key, "Range": "bytes=0-0"})
		if resp.StatusCode != 206 || body != "1" {
			t.Error(resp.Status, body)
		}
		if resp, _ := fetch(t, "HEAD", f.URL+cove.Prefix+"/artifacts/art_1/content", map[string]string{"X-API-Key": f.key}); resp.StatusCode != 200 || resp.ContentLength != 2 {
			t.Error(resp.Status, resp.ContentLength)
		}
	})
	t.Run("lineage is one question", func(t *testing.T) {
		runs := &oneRun{session.Run{ID: "run1", Code: "plot()", Outcome: "ok", Started: one.Created.Add(-time.Second)}}
		f.api.SetRuns(runs)
		got, err := f.client.ArtifactLineage(t.Context(), "art_1")
		if err != nil {
			t.Fatal(err)
		}
		expected := &client.ArtifactLineage{Artifact: want, Code: "plot()", Outcome: "ok", StartedAt: runs.Started, Same: []client.Artifact{{
			ID: "art_2", Name: "two.csv", Path: "sub/two.csv", MIME: "text/csv", Size: 2, SHA256: two.SHA256, CreatedAt: two.Created, Session: "chat-2", Run: "run2"}}}
		if diff := cmp.Diff(expected, got, links); diff != "" {
			t.Error(diff)
		}
		got, err = f.client.ArtifactLineage(t.Context(), "art_2") // its session is gone
		if err != nil || got.Code != "" || len(got.Same) != 1 {
			t.Errorf("%+v, %v", got, err)
		}
	})
	t.Run("links for as long as asked", func(t *testing.T) {
		l, err := f.client.LinkArtifact(t.Context(), "art_1", time.Hour)
		if err != nil || time.Until(l.ExpiresAt) < 59*time.Minute {
			t.Fatal(l, err)
		}
		if resp, _ := fetch(t, "GET", l.URL, nil); resp.StatusCode != 200 {
			t.Error(resp.Status)
		}
		if _, err := f.client.LinkArtifact(t.Context(), "art_1", 1000*time.Hour); kindOf(err) != client.Invalid {
			t.Error(err)
		}
		if err := f.client.RotateLinkKey(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		if resp, _ := fetch(t, "GET", l.URL, nil); resp.StatusCode != 401 {
			t.Error("it was revoked:", resp.Status)
		}
	})
	t.Run("another tenant finds nothing", func(t *testing.T) {
		key, _, err := f.keys.Create(t.Context(), "umbrella", "x", false)
		if err != nil {
			t.Fatal(err)
		}
		them := newClient(t, f.URL, string(key))
		for what, ask := range map[string]func() error{
			"get":     func() error { _, err := them.Artifact(t.Context(), "art_1"); return err },
			"content": func() error { _, _, err := them.ReadArtifact(t.Context(), "art_1"); return err },
			"lineage": func() error { _, err := them.ArtifactLineage(t.Context(), "art_1"); return err },
			"link":    func() error { _, err := them.LinkArtifact(t.Context(), "art_1", 0); return err },
			"remove":  func() error { return them.RemoveArtifact(t.Context(), "art_1") },
		} {
			if err := ask(); kindOf(err) != client.NotFound {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := them.RotateLinkKey(t.Context(), true); kindOf(err) != client.Denied {
			t.Error(err)
		}
	})
	t.Run("S4.105 delete", func(t *testing.T) {
		if err := f.client.RemoveArtifact(t.Context(), "art_1"); err != nil {
			t.Fatal(err)
		}
		if err := f.client.RemoveArtifact(t.Context(), "art_1"); kindOf(err) != client.NotFound {
			t.Error(err)
		}
		if diff := cmp.Diff([]string{"art_2"}, list(client.ArtifactsRequest{})); diff != "" {
			t.Error(diff)
		}
	})
}

type oneRun struct{ session.Run }

func (r *oneRun) RunOf(_ context.Context, tenant, run string) (session.Run, error) {
	if tenant != "acme" || run != r.ID {
		return session.Run{}, fault.New(fault.NotFound, "there is no run %s", run)
	}
	return r.Run, nil
}

func kindOf(err error) client.Kind {
	var e *client.Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return ""
}
