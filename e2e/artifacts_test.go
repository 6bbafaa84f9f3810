package e2e_test

import (
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/client"
)

// fetch asks for an address as a browser would, without a key.
func fetch(t testing.TB, method, address string, headers map[string]string) (*http.Response, string) {
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
		t.Fatal(err)
	}
	return resp, string(body)
}

// blobs are the contents that a server has stored.
func (s *server) blobs(t testing.TB) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(s.dir, "server", "artifacts"), func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			paths = append(paths, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// artifacts are a session's, newest first.
func (d *dataSession) artifacts() (list []client.Artifact) {
	d.t.Helper()
	for a, err := range d.s.Artifacts(d.t.Context(), client.ArtifactsRequest{Session: d.key}) {
		if err != nil {
			d.t.Fatal(err)
		}
		list = append(list, a)
	}
	return list
}

// leaves runs a cell that must succeed and returns what it left.
func (d *dataSession) leaves(code string) []client.Artifact {
	d.t.Helper()
	out := d.run("import os\nbox = '/session/artifacts/'\n" + code)
	if out.Outcome != client.OutcomeOK {
		d.t.Fatalf("%.80q ended %s: %+v %s", code, out.Outcome, out.Error, out.Message)
	}
	return out.Artifacts
}

// held is what is in the box.
func (d *dataSession) held() string {
	d.t.Helper()
	return d.prints("import os; print(sorted(os.path.relpath(os.path.join(p, f), '/session/artifacts') for p, _, fs in os.walk('/session/artifacts') for f in fs))")
}

func (d *dataSession) content(id string) string {
	d.t.Helper()
	_, r, err := d.s.ReadArtifact(d.t.Context(), id)
	if err != nil {
		d.t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		d.t.Fatal(err)
	}
	return string(b)
}

var unsteady = cmpopts.IgnoreFields(client.Artifact{}, "ID", "SHA256", "URL", "URLExpires", "CreatedAt", "Run", "Sandbox")

func TestArtifacts(t *testing.T) {
	s := sharedServer(t)
	for _, storage := range []string{"tmpfs", "disk", "bind"} {
		t.Run("S4.89 S4.94 S4.95 what a cell leaves is kept with its origin and gone from the box: "+storage, func(t *testing.T) {
			d := s.dataSession(t, "artifacts-"+storage, client.SessionRequest{Storage: storage})
			d.prints("x = 20")
			var out client.SessionOutput
			d.call(http.MethodPost, "/run", client.SessionRunRequest{Code: "open('/session/artifacts/sum.csv', 'w').write(f'x\\n{x + 22}\\n')", ToolCall: "call_7"}, &out)
			want := []client.Artifact{{Name: "sum.csv", Path: "sum.csv", MIME: "text/csv", Size: 5, Session: d.key, Cell: 2, ToolCall: "call_7"}}
			if diff := cmp.Diff(want, out.Artifacts, unsteady); diff != "" {
				t.Fatal(diff)
			}
			a := out.Artifacts[0]
			if a.Run != out.Run || a.Sandbox != d.open(client.SessionRequest{Storage: storage}).Sandbox || d.content(a.ID) != "x\n42\n" {
				t.Errorf("%+v", a)
			}
			if got := d.held(); got != "[]" {
				t.Errorf("the box holds %s", got)
			}
			l, err := s.ArtifactLineage(t.Context(), a.ID)
			if err != nil || !strings.Contains(l.Code, "x + 22") || l.Outcome != "ok" || l.StartedAt.IsZero() {
				t.Errorf("lineage: %+v, %v", l, err)
			}
		})
	}
	d := s.dataSession(t, "artifacts", client.SessionRequest{})
	t.Run("S4.90 D10 nested, overwritten and equally named files", func(t *testing.T) {
		code := `
for p in ['out.txt', 'a/out.txt', 'a/b/out.txt']:
    os.makedirs(os.path.dirname(box + p), exist_ok=True)
    open(box + p, 'w').write(%q + p)`
		for _, word := range []string{"first ", "second "} {
			var got []string
			for _, a := range d.leaves(fmt.Sprintf(code, word)) {
				got = append(got, a.Path+": "+d.content(a.ID))
			}
			if diff := cmp.Diff([]string{"a/b/out.txt: " + word + "a/b/out.txt", "a/out.txt: " + word + "a/out.txt", "out.txt: " + word + "out.txt"}, got); diff != "" {
				t.Error(diff)
			}
		}
	})
	t.Run("S4.91 S4.92 S4.93 the same bytes are stored once, each under its own name", func(t *testing.T) {
		before := len(s.blobs(t))
		list := d.leaves("open(box + 'one.txt', 'w').write('equal bytes\\n'); open(box + 'two.csv', 'w').write('equal bytes\\n')")
		if n := len(s.blobs(t)) - before; n != 1 || len(list) != 2 || list[0].SHA256 != list[1].SHA256 {
			t.Errorf("%d blobs for %+v", n, list)
		}
		for i, want := range []string{`one.txt text/plain`, `two.csv text/csv`} {
			if got := list[i].Name + " " + list[i].MIME; got != want {
				t.Errorf("%s, not %s", got, want)
			}
			if resp, _ := fetch(t, "GET", list[i].URL, nil); !strings.Contains(resp.Header.Get("Content-Disposition"), list[i].Name) {
				t.Error(resp.Header)
			}
		}
	})
	t.Run("S4.96 a file that is too large is told and not destroyed", func(t *testing.T) {
		list := d.leaves("open(box + 'big.bin', 'wb').write(bytes(60 << 20))")
		if len(list) != 1 || list[0].ID != "" || list[0].Error == "" || list[0].Size != 60<<20 {
			t.Fatalf("%+v", list)
		}
		if got := d.held(); got != "['big.bin']" {
			t.Errorf("the box holds %s", got)
		}
		d.prints("os.remove('/session/artifacts/big.bin')")
	})
	t.Run("S4.97 D2 links and devices give nothing away, and take nothing", func(t *testing.T) {
		list := d.leaves(`
os.symlink('/etc/passwd', box + 'passwd'); os.symlink('/proc/1/environ', box + 'environ'); os.symlink('/', box + 'root'); os.mkfifo(box + 'pipe')
open('/session/victim', 'w').write('mine'); os.symlink('/session/victim', box + 'victim')`)
		for _, a := range list {
			if a.ID != "" || a.Error == "" {
				t.Errorf("kept: %+v", a)
			}
		}
		if got := d.prints("print(open('/session/victim').read(), os.path.exists('/etc/passwd'))"); len(list) != 5 || got != "mine True" {
			t.Errorf("%d told, %s", len(list), got)
		}
		d.prints("[os.remove(box + f) for f in os.listdir(box)]")
	})
	t.Run("S4.98 S4.99 S4.106 a link gives bytes, headers and parts", func(t *testing.T) {
		a := d.leaves("open(box + 'Zürich.csv', 'w').write('a,b\\n1,2\\n')")[0]
		resp, body := fetch(t, "GET", a.URL, nil)
		if resp.StatusCode != 200 || body != "a,b\n1,2\n" || resp.Header.Get("Content-Type") != "text/csv; charset=utf-8" || !strings.Contains(resp.Header.Get("Content-Disposition"), "Z%C3%BCrich.csv") {
			t.Errorf("%s %v %q", resp.Status, resp.Header, body)
		}
		if resp, body := fetch(t, "HEAD", a.URL, nil); resp.StatusCode != 200 || body != "" || resp.ContentLength != 8 {
			t.Error(resp.Status, body)
		}
		if resp, body := fetch(t, "GET", strings.Replace(a.URL, "?", "/head?", 1), nil); resp.StatusCode != 200 || !strings.Contains(body, `"filename":"Zürich.csv"`) {
			t.Error(resp.Status, body)
		}
		if resp, body := fetch(t, "GET", a.URL, map[string]string{"Range": "bytes=4-6"}); resp.StatusCode != 206 || body != "1,2" {
			t.Error(resp.Status, body)
		}
		if resp, _ := fetch(t, "GET", a.URL, map[string]string{"If-None-Match": resp.Header.Get("ETag")}); resp.StatusCode != 304 {
			t.Error(resp.Status)
		}
	})
	t.Run("S4.101 S4.102 S4.105 what a link does not open", func(t *testing.T) {
		list := d.leaves("open(box + '1', 'w').write('1'); open(box + '2', 'w').write('2')")
		one, two := list[0], list[1]
		at, tok, _ := strings.Cut(one.URL, "?token=")
		for address, want := range map[string]int{
			at: 401, at + "?token=nonsense": 401, at + "?token=" + tok[:len(tok)-3]: 401,
			strings.Replace(two.URL, two.ID, one.ID, 1): 403, strings.Replace(one.URL, one.ID, "art_000000000000000000000000", 1): 404,
		} {
			if resp, _ := fetch(t, "GET", address, nil); resp.StatusCode != want {
				t.Errorf("%s: %s, not %d", address, resp.Status, want)
			}
		}
		if err := s.RemoveArtifact(t.Context(), one.ID); err != nil {
			t.Fatal(err)
		}
		if resp, _ := fetch(t, "GET", one.URL, nil); resp.StatusCode != 404 {
			t.Error("after its removal:", resp.Status)
		}
	})
	t.Run("S4.102 S4.104 a content that is damaged or gone is told", func(t *testing.T) {
		a := d.leaves("open(box + 'f', 'w').write('precious')")[0]
		p := filepath.Join(s.dir, "server", "artifacts", "t-default", a.SHA256[:2], a.SHA256)
		if err := os.WriteFile(p, []byte("preciouz"), 0o600); err != nil {
			t.Fatal(err)
		}
		if resp, body := fetch(t, "GET", a.URL, nil); resp.StatusCode != 500 || strings.Contains(body, "preciou") {
			t.Error(resp.Status, body)
		}
		if err := os.Remove(p); err != nil {
			t.Fatal(err)
		}
		if resp, _ := fetch(t, "GET", a.URL, nil); resp.StatusCode != 410 {
			t.Error(resp.Status)
		}
	})
	t.Run("S4.108 sessions that leave the same at once", func(t *testing.T) {
		var all sync.WaitGroup
		ids := make([][]client.Artifact, 4)
		for i := range ids {
			each := s.dataSession(t, fmt.Sprint("artifacts-at-once-", i), client.SessionRequest{})
			all.Go(func() {
				_, err := s.call(http.MethodPost, "/sessions/"+each.key+"/run",
					client.SessionRunRequest{Code: "for i in range(20): open(f'/session/artifacts/{i}', 'w').write(str(i % 4) * 10000)"}, &struct{ Artifacts *[]client.Artifact }{&ids[i]})
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		for _, list := range ids {
			if len(list) != 20 {
				t.Errorf("%d artifacts", len(list))
			}
			for _, a := range list {
				if got := d.content(a.ID); len(got) != 10000 {
					t.Errorf("%s has %d bytes", a.Path, len(got))
				}
			}
		}
	})
	t.Run("S4.105 S4.109 listing a session's, with links", func(t *testing.T) {
		for _, a := range d.artifacts() {
			if a.Session != d.key || !strings.HasPrefix(a.URL, s.url+"/artifacts/"+a.ID+"?token=") {
				t.Errorf("%+v", a)
			}
		}
	})
	t.Run("the command line lists, saves, links and removes", func(t *testing.T) {
		a := d.leaves("open(box + 'plot.svg', 'w').write('<svg/>')")[0]
		dir := t.TempDir()
		cove := func(args ...string) string {
			t.Helper()
			cmd := exec.CommandContext(t.Context(), binary.path, args...)
			cmd.Env = append(os.Environ(), "COVE_URL="+s.url, "COVE_API_KEY="+s.key)
			cmd.Dir = dir
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("cove %v: %v: %s", args, err, out)
			}
			return strings.TrimSpace(string(out))
		}
		var list []client.Artifact
		if err := json.Unmarshal([]byte(cove("artifacts", "list", "--session", d.key, "--limit", "1", "--json")), &list); err != nil || len(list) != 1 || list[0].ID != a.ID {
			t.Error(list, err)
		}
		if got := cove("artifacts", "list", "--session", d.key); !strings.Contains(got, a.ID) || !strings.Contains(got, "image/svg+xml") {
			t.Error(got)
		}
		if got := cove("artifacts", "show", a.ID); !strings.Contains(got, "<svg/>") || !strings.Contains(got, d.key) {
			t.Error("its code is not shown:", got)
		}
		cove("artifacts", "get", a.ID)
		if b, err := os.ReadFile(filepath.Join(dir, "plot.svg")); err != nil || string(b) != "<svg/>" {
			t.Error(string(b), err)
		}
		if got := cove("artifacts", "get", a.ID, "-"); got != "<svg/>" {
			t.Error(got)
		}
		if resp, _ := fetch(t, "GET", cove("artifacts", "link", a.ID, "--ttl", "1m"), nil); resp.StatusCode != 200 {
			t.Error(resp.Status)
		}
		if got := cove("artifacts", "rm", a.ID); got != a.ID {
			t.Error(got)
		}
	})
	t.Run("no token is in the server's log", func(t *testing.T) {
		_, tok, _ := strings.Cut(d.leaves("open(box + 'x', 'w').write('x')")[0].URL, "?token=")
		if log := s.said.String(); strings.Contains(log, tok) || strings.Contains(log, "token=") {
			t.Error("it is")
		}
	})
}

// TestArtifactsOutliveTheServer has servers of its own, which are killed and begin again with other settings.
func TestArtifactsOutliveTheServer(t *testing.T) {
	s := newServer(t)
	d := s.dataSession(t, "chaos", client.SessionRequest{})
	first := d.leaves("open(box + 'f', 'w').write('kept')")[0]
	if !strings.HasPrefix(first.URL, s.url+"/artifacts/") {
		t.Error("S4.107 a link leads to this server:", first.URL)
	}
	t.Run("S4.103 D1 a link holds after a crash of the server", func(t *testing.T) {
		_, tail, _ := strings.Cut(first.URL, "/artifacts/")
		s.crash(t)
		s.start(t)
		if resp, body := fetch(t, "GET", s.url+"/artifacts/"+tail, nil); resp.StatusCode != 200 || body != "kept" {
			t.Error(resp.Status, body)
		}
	})
	t.Run("chaos: a server that is killed while it keeps files loses none and keeps none twice", func(t *testing.T) {
		const files = 300
		for round := range 4 {
			key := fmt.Sprint("chaos-", round)
			d := s.dataSession(t, key, client.SessionRequest{})
			code := fmt.Sprintf("for i in range(%d): open(f'/session/artifacts/{i:03}', 'w').write(f'%d {i}' * 500)", files, round)
			ran := make(chan error, 1)
			go func() {
				_, err := s.call(http.MethodPost, "/sessions/"+key+"/run", client.SessionRunRequest{Code: code, OnDisconnect: "survive"}, nil)
				ran <- err
			}()
			// Somewhere between the first blob and the last row: each round at another moment.
			before := len(s.blobs(t))
			eventually(t, "files are being kept", 3*time.Minute, func() bool { return len(s.blobs(t)) > before+round*files/4 })
			s.crash(t)
			<-ran
			s.start(t)
			d.prints("0")
			seen := map[string]bool{}
			for _, a := range d.artifacts() {
				if seen[a.Path] {
					t.Errorf("%s is kept twice", a.Path)
				}
				seen[a.Path] = true
				if got := d.content(a.ID); !strings.HasPrefix(got, fmt.Sprint(round)) {
					t.Errorf("%s: %.20q", a.Path, got)
				}
			}
			if len(seen) != files || d.held() != "[]" {
				t.Errorf("round %d: %d of %d files are kept, the box holds %.80s", round, len(seen), files, d.held())
			}
			if left, err := os.ReadDir(filepath.Join(s.dir, "server", "artifacts", "tmp")); err != nil || len(left) != 0 {
				t.Errorf("round %d: temporary files are left: %v, %v", round, left, err)
			}
		}
	})
	t.Run("S4.100 S4.107 S4.124 D17 addresses, times and quotas are the operator's", func(t *testing.T) {
		s.crash(t)
		s.env = append(s.env, "COVE_ARTIFACTS_PUBLIC_URL=https://files.example:8000", "COVE_ARTIFACTS_LINK_TTL=1s", "COVE_ARTIFACTS_MAX_SESSION_SIZE=1MiB", "COVE_ARTIFACTS_MAX_FILE_SIZE=800KiB")
		s.start(t)
		d := s.dataSession(t, "settings", client.SessionRequest{})
		list := d.leaves("for n in 'abc': open(box + n, 'w').write(n * 700000)\nopen(box + 'd', 'w').write('d' * 900000)")
		var got []string
		for _, a := range list {
			got = append(got, fmt.Sprintf("%s %v %.40s", a.Path, a.ID != "", a.Error))
		}
		want := []string{"a true ", "b false the artifacts of this session may have 1", "c false the artifacts of this session may have 1", "d false it has 878.9 KiB, and a file of more tha"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if got := d.held(); got != "['b', 'c', 'd']" {
			t.Errorf("the box holds %s", got)
		}
		tail, ok := strings.CutPrefix(list[0].URL, "https://files.example:8000")
		if !ok {
			t.Fatal(list[0].URL)
		}
		eventually(t, "the link has expired", 2*time.Minute, func() bool {
			resp, body := fetch(t, "GET", s.url+tail, nil)
			return resp.StatusCode == 401 && strings.Contains(body, "expired")
		})
	})
	t.Run("S4.125 D12 what is old enough is removed with its content", func(t *testing.T) {
		s.crash(t)
		s.env = append(s.env, "COVE_ARTIFACTS_RETENTION=1s", "COVE_ARTIFACTS_LINK_TTL=10m")
		s.start(t)
		d := s.dataSession(t, "old", client.SessionRequest{})
		a := d.leaves("open(box + 'f', 'w').write('soon gone')")[0]
		eventually(t, "it is gone", 2*time.Minute, func() bool {
			_, err := s.Artifact(t.Context(), a.ID)
			return client.KindOf(err) == client.NotFound
		})
		s.crash(t)
		s.start(t) // which sweeps
		eventually(t, "its content is gone", 3*time.Minute, func() bool {
			for _, p := range s.blobs(t) {
				if strings.HasSuffix(p, a.SHA256) {
					return false
				}
			}
			return true
		})
	})
}
