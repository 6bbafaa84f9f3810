package build_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/resolver"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// TestMain is also the maker and the resolver: the driver starts its own program again with those commands.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "maker":
			if err := maker.Main(os.Args[2:], native.Tag, []string{"/proc/self/exe", "resolver"}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		case "resolver":
			os.Exit(resolver.Main(os.Args[2:], os.Stderr))
		}
	}
	os.Exit(m.Run())
}

// catalogue are the templates of the machine's test cache.
type catalogue struct{ *template.Store }

func (c catalogue) List(tenant string) []template.Info { return c.ListFor(tenant) }
func (c catalogue) Resolve(ctx context.Context, tenant, name string) (*template.Template, error) {
	return c.ResolveFor(ctx, tenant, name)
}

func templatesDir(t testing.TB) string {
	t.Helper()
	cache := os.Getenv("COVE_TEST_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(dir, "cove-test")
	}
	return filepath.Join(cache, "templates")
}

// real is a Builder over real sandboxes.
type real struct {
	*client
	manager *sandbox.Manager
	who     auth.Principal
}

func newReal(t *testing.T) *real {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes real sandboxes, which needs root")
	}
	dir := t.TempDir()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	store, err := template.Open(template.Options{Dir: templatesDir(t)})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"base", "python"} {
		if _, err := store.Ensure(t.Context(), name, func(template.Progress) {}); err != nil {
			t.Fatal(err)
		}
	}
	driver, err := native.Open(t.Context(), native.Config{DataDir: dir, Log: log, Launch: native.LaunchSelf("--templates", templatesDir(t))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = driver.Shutdown(context.Background())
		_ = driver.Close()
	})
	db, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	manager := sandbox.NewManager(sandbox.Config{}, driver, db, catalogue{store}, sandbox.NopObserver{}, log)
	if err := manager.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { manager.Close() })
	// Templates of this tenant lie in the cache, which outlives the test.
	r := &real{manager: manager, who: auth.Principal{Tenant: "build-" + strings.ToLower(rand.Text()[:12])}}
	t.Cleanup(func() {
		for range 10 { // one that others are made from goes after them
			for _, info := range store.ListFor(r.who.Tenant) {
				if info.Tenant == r.who.Tenant {
					_ = manager.RemoveTemplate(context.Background(), r.who, info.Name)
				}
			}
		}
	})
	b, err := build.New(build.Config{Dir: filepath.Join(dir, "files"), Secret: make([]byte, 32)}, manager, db, catalogue{store}, noImages{}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	r.client = newClient(t, b, r.who)
	return r
}

// noImages is a server that can pull nothing.
type noImages struct{}

func (noImages) Ensure(context.Context, string, template.PullRequest) (*template.Template, error) {
	return nil, fault.New(fault.Unsupported, "this server's driver cannot start from container images; use one of its templates")
}

// client speaks to a Builder as an SDK does.
type client struct {
	t *testing.T
	*httptest.Server
	builder *build.Builder
}

func newClient(t *testing.T, b *build.Builder, who auth.Principal) *client {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/upload") {
			b.ServeUpload(w, r)
			return
		}
		b.Serve(w, r, who)
	}))
	t.Cleanup(s.Close)
	return &client{t, s, b}
}

func (c *client) ask(method, url string, body, into any) {
	c.t.Helper()
	raw, ok := body.([]byte)
	if !ok {
		raw, _ = json.Marshal(body)
	}
	if !strings.HasPrefix(url, "http") {
		url = c.URL + url
	}
	r, err := http.NewRequestWithContext(c.t.Context(), method, url, bytes.NewReader(raw))
	if err != nil {
		c.t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		c.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	if answer.StatusCode >= 300 {
		c.t.Fatalf("%s %s: %d %s", method, url, answer.StatusCode, text)
	}
	if into != nil {
		if err := json.Unmarshal(text, into); err != nil {
			c.t.Fatalf("%s %s: %s", method, url, text)
		}
	}
}

// build runs a build to its end and gives its log.
func (c *client) build(name string, files []byte, start js) string {
	c.t.Helper()
	var asked struct{ TemplateID, BuildID string }
	c.ask("POST", "/v3/templates", js{"name": name, "cpuCount": 1, "memoryMB": 256}, &asked)
	if files != nil {
		var link struct{ URL string }
		c.ask("GET", "/templates/"+asked.TemplateID+"/files/"+realHash, nil, &link)
		c.ask("PUT", link.URL, files, nil)
	}
	path := "/templates/" + asked.TemplateID + "/builds/" + asked.BuildID
	c.ask("POST", "/v2"+path, start, nil)
	for offset := 0; ; {
		var now struct {
			Status     string
			Reason     any
			LogEntries []struct{ Message string }
		}
		c.ask("GET", fmt.Sprintf("%s/status?logsOffset=%d", path, offset), nil, &now)
		switch now.Status {
		case "ready":
			var all []string
			for _, l := range now.LogEntries {
				all = append(all, l.Message)
			}
			return strings.Join(all, "\n")
		case "error":
			c.t.Fatalf("build of %s: %v\n%v", name, now.Reason, now.LogEntries)
		}
		time.Sleep(20 * time.Millisecond) // as the SDKs do: there is nothing to wait on
	}
}

var realHash = strings.Repeat("5a", 32)

// output runs a command in a new sandbox of a template, with what the template says of user, directory and variables.
func (r *real) output(ref, text string) string {
	r.t.Helper()
	ctx := r.t.Context()
	from, err := r.builder.Resolve(ctx, r.who, ref)
	if err != nil {
		r.t.Fatal(err)
	}
	sb, _, err := r.manager.Create(ctx, r.who, sandbox.Spec{Template: from.Template, Limits: from.Limits})
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _, _ = r.manager.Kill(ctx, r.who, sb.ID) }()
	stream, err := r.manager.Exec(ctx, r.who, sb.ID, agentapi.ExecParams{Argv: []string{"bash", "-l", "-c", text}})
	if err != nil {
		r.t.Fatal(err)
	}
	var out strings.Builder
	for e, err := range stream.Events() {
		if err != nil {
			r.t.Fatal(err)
		}
		out.Write(e.Data)
	}
	return out.String()
}

func TestRealSandboxesBuildTemplates(t *testing.T) {
	r := newReal(t)
	files := archive(t, tar.Header{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "dir/a", Typeflag: tar.TypeReg, Mode: 0o600},
		tar.Header{Name: "dir/sub/b", Typeflag: tar.TypeReg}, tar.Header{Name: "dir/l", Typeflag: tar.TypeSymlink, Linkname: "a"},
		tar.Header{Name: "dir/h", Typeflag: tar.TypeLink, Linkname: "dir/a"})
	steps := []js{
		{"type": "COPY", "args": []string{"dir", "/srv/data/", "", ""}, "filesHash": realHash},
		{"type": "COPY", "args": []string{"dir/a", "/opt/renamed", "root", "0755"}, "filesHash": realHash},
		{"type": "ENV", "args": []string{"GREETING", "hello $HOME"}},
		{"type": "USER", "args": []string{"bob"}},
		{"type": "WORKDIR", "args": []string{"/srv/here"}},
		run("echo $GREETING > said; id -un > who"),
	}
	start := fromBase(steps...)
	start["startCmd"], start["readyCmd"] = "echo started > /tmp/started; exec sleep 1000", "[ -f /tmp/started ]"
	r.build("first", files, start)
	const look = `exec 2>&1; cat said who; stat -c '%n %U:%G %a' /srv/data /srv/data/* /srv/data/sub/b /opt/renamed . ; cat /srv/data/l; wc -l < /.e2b; echo $GREETING; ` +
		`touch /usr/local/bin/mine && ls -d /code; pgrep -c sleep`
	want := `hello /home/user
bob
/srv/data user:user 755
/srv/data/a user:user 600
/srv/data/h user:user 600
/srv/data/l user:user 777
/srv/data/sub user:user 755
/srv/data/sub/b user:user 644
/opt/renamed root:root 755
. bob:bob 755
cat: /srv/data/l: Permission denied
3
hello /home/user
/code
0
`
	if diff := cmp.Diff(want, r.output("first", look)); diff != "" {
		t.Error(diff)
	}
	if from, err := r.builder.Resolve(t.Context(), r.who, "first"); err != nil || from.Start == nil || from.Start.User != "bob" || from.Limits.MemoryBytes != 256<<20 {
		t.Error(from, err)
	}
	if log := r.build("first", nil, fromBase(steps...)); !strings.Contains(log, "CACHED [builder 6/6]") {
		t.Errorf("the same steps run again:\n%s", log)
	}
	r.build("second", nil, js{"fromTemplate": "first", "steps": []js{run("whoami >> said; rm who")}})
	if diff := cmp.Diff("hello /home/user\nbob\n", r.output("second", "cat said; test ! -e who")); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{"first", "second"} {
		r.ask("DELETE", "/templates/"+name, nil, nil)
	}
	page, err := r.manager.List(t.Context(), r.who, sandbox.ListQuery{States: []sandbox.State{sandbox.StateRunning}})
	if err != nil || len(page.Items) != 0 {
		t.Error("sandboxes are left:", page, err)
	}
}
