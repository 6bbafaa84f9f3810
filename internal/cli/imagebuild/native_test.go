package imagebuild_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/cli/imagebuild"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/resolver"
	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// TestMain is also the maker and what it starts: the driver starts its own program again with those commands.
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
		case "unpack":
			os.Exit(unpack.Main(os.Args[2:], os.Stderr))
		}
	}
	os.Exit(m.Run())
}

// catalogue are templates, which images become.
type catalogue struct {
	*template.Store
	driver sandbox.Driver
}

func (c catalogue) List(tenant string) []template.Info { return c.ListFor(tenant) }
func (c catalogue) Resolve(ctx context.Context, tenant, name string) (*template.Template, error) {
	return c.ResolveFor(ctx, tenant, name)
}
func (c catalogue) RemoveTemplate(ctx context.Context, tenant, name string) error {
	return c.driver.RemoveTemplate(ctx, tenant, name)
}

// images is the service in the words of the API.
type images struct{ *image.Service }

func (s images) Pull(ctx context.Context, tenant string, r template.PullRequest) (client.ImageInfo, error) {
	i, err := s.Service.Pull(ctx, tenant, r)
	return told(i), err
}
func (s images) Import(ctx context.Context, tenant, name string, r io.Reader) ([]client.ImageInfo, error) {
	list, err := s.Service.Import(ctx, tenant, name, r, nil)
	return toldAll(list), err
}
func (s images) List(ctx context.Context, tenant string) ([]client.ImageInfo, error) {
	list, err := s.Service.List(ctx, tenant)
	return toldAll(list), err
}
func (s images) Inspect(ctx context.Context, tenant, ref string) (client.ImageInfo, error) {
	i, err := s.Service.Inspect(ctx, tenant, ref)
	return told(i), err
}
func (s images) Tag(ctx context.Context, tenant, name, ref string, config template.Image) (client.ImageInfo, error) {
	i, err := s.Service.Tag(ctx, tenant, name, ref, config)
	return told(i), err
}

func told(i image.Info) client.ImageInfo {
	return client.ImageInfo{
		Reference: i.Reference, Digest: i.Digest, Template: i.Template, Entrypoint: i.Entrypoint, Cmd: i.Cmd, Env: i.Env, User: i.User,
		Workdir: i.Workdir, Labels: i.Labels,
	}
}

func toldAll(list []image.Info) (all []client.ImageInfo) {
	for _, i := range list {
		all = append(all, told(i))
	}
	return all
}

// server is a real one: driver, images and API, with an image `busybox` that came from no registry.
func server(t *testing.T) *client.Client {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes real sandboxes, which needs root")
	}
	dir := t.TempDir()
	templates := filepath.Join(dir, "templates")
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	store, err := template.Open(template.Options{Dir: templates})
	if err != nil {
		t.Fatal(err)
	}
	driver, err := native.Open(t.Context(), native.Config{DataDir: dir, Log: log, Launch: native.LaunchSelf("--templates", templates)})
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
	known := catalogue{store, driver}
	manager := sandbox.NewManager(sandbox.Config{}, driver, db, known, sandbox.NopObserver{}, log)
	if err := manager.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { manager.Close() })
	service, err := image.Open(image.Config{Dir: filepath.Join(dir, "images")}, driver, known, db, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(service.Close)
	keys := auth.NewKeys(db)
	key, _, err := keys.Create(t.Context(), "acme", "test", false)
	if err != nil {
		t.Fatal(err)
	}
	api := cove.New(manager, keys, known, log)
	api.SetImages(images{service})
	s := httptest.NewServer(api)
	t.Cleanup(s.Close)
	c, err := client.New(s.URL, string(key))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if _, err := c.ImportImage(t.Context(), "busybox", busybox(t)); err != nil {
		t.Fatal(err)
	}
	return c
}

// busybox is a root directory whose every program is one static file.
func busybox(t *testing.T) io.Reader {
	t.Helper()
	program, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatalf("these tests make an image of /bin/busybox: install busybox-static: %v", err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(h tar.Header, data []byte) {
		h.Size = int64(len(data))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	add(tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755}, program)
	for _, name := range []string{"sh", "cat", "echo", "id", "ln", "ls", "stat", "sleep", "tr", "wc", "pwd", "touch", "test", "tar", "find"} {
		add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox"}, nil)
	}
	add(tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd", Mode: 0o644}, []byte("root:x:0:0::/root:/bin/sh\napp:x:1234:1235::/:/bin/sh\n"))
	add(tar.Header{Typeflag: tar.TypeReg, Name: "etc/group", Mode: 0o644}, []byte("root:x:0:\napp:x:1235:\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// report is what a build told.
type report struct {
	ran    []string
	cached int
	output strings.Builder
	notes  []string
}

func (r *report) Step(s imagebuild.Step) {
	if s.Cached {
		r.cached++
		return
	}
	r.ran = append(r.ran, s.Text)
}
func (r *report) Output(data []byte, _ bool)      { r.output.Write(data) }
func (r *report) Pulled(string, client.PullEvent) {}
func (r *report) Note(text string)                { r.notes = append(r.notes, text) }

// all is everything that a person would have read.
func (r *report) all() string {
	return strings.Join(r.ran, "\n") + r.output.String() + strings.Join(r.notes, "\n")
}

func build(t *testing.T, c *client.Client, dir, file string, change func(*imagebuild.Options)) (*client.ImageInfo, *report, error) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(file), 0o644); err != nil {
		t.Fatal(err)
	}
	r := &report{}
	o := imagebuild.Options{Client: c, Dir: dir, Tag: "made", Report: r}
	if change != nil {
		change(&o)
	}
	info, err := imagebuild.Build(t.Context(), o)
	return info, r, err
}

// say runs a command in a sandbox of an image.
func say(t *testing.T, c *client.Client, image, line string) string {
	t.Helper()
	sb, err := c.Create(t.Context(), client.CreateRequest{Image: image})
	if err != nil {
		t.Fatal(err)
	}
	defer sb.Kill(context.Background())
	out, err := sb.Exec(t.Context(), client.ExecRequest{Command: line})
	if err != nil {
		t.Fatal(err)
	}
	return out.Stdout + out.Stderr
}

const application = `# syntax=docker/dockerfile:1
ARG BASE=busybox
FROM $BASE AS compile
WORKDIR /made
COPY src .
RUN cat a.txt sub/b.txt > all.txt && sleep 0.2

FROM ${BASE}
ARG TOKEN
ENV WHO=world OLD="a b"
ENV GREETING="hello $WHO" LITERAL='$WHO'
WORKDIR /srv
WORKDIR app
COPY --from=compile /made/all.txt ./
COPY --chown=app src/*.txt src/link /data/
COPY --chmod=0750 src/a.txt renamed
COPY <<EOF <<'RAW' texts/
$GREETING
EOF
$GREETING
RAW
RUN echo -n $TOKEN | wc -c > /token && echo ran as $(id -u) in $(pwd)
RUN ["touch", "/exec form"]
RUN <<EOF
test -f "/exec form"
echo $GREETING > /greeting
EOF
USER app:app
LABEL about="a test" version=1
EXPOSE 80 53/udp
SHELL ["/bin/busybox", "sh", "-c"]
ENTRYPOINT ["/bin/echo"]
CMD exec me
`

func TestAnImageIsBuilt(t *testing.T) {
	c := server(t)
	dir := t.TempDir()
	write(t, dir, map[string]string{"src/a.txt": "a\n", "src/sub/b.txt": "b\n", "src/link": "-> a.txt", "src/c.pem": "secret", ".dockerignore": "**/*.pem"})
	token := func(o *imagebuild.Options) { o.Args = map[string]string{"TOKEN": "s3cr3t", "UNUSED": "x"} }
	info, r, err := build(t, c, dir, application, token)
	if err != nil {
		t.Fatalf("%v\n%s", err, r.all())
	}
	want := &client.ImageInfo{
		Reference: "docker.io/library/made:latest", Entrypoint: []string{"/bin/echo"}, Cmd: []string{"/bin/busybox", "sh", "-c", "exec me"},
		User: "app:app", Workdir: "/srv/app", Labels: map[string]string{"about": "a test", "version": "1"},
		Env:    map[string]string{"WHO": "world", "OLD": "a b", "GREETING": "hello world", "LITERAL": "$WHO", "PATH": info.Env["PATH"]},
		Digest: info.Digest, Template: info.Template,
	}
	if diff := cmp.Diff(want, info); diff != "" {
		t.Error(diff)
	}
	for line, want := range map[string]string{
		"id -u; id -g; pwd; echo $GREETING":             "1234\n1235\n/srv/app\nhello world\n",
		"cat all.txt /token /greeting":                  "a\nb\n6\nhello world\n",
		"stat -c '%n %u %g %a' /data /data/a.txt":       "/data 1234 1234 755\n/data/a.txt 1234 1234 644\n",
		"cat /data/link; ls /data":                      "a\na.txt\nlink\n",
		"stat -c '%a %u' renamed; cat texts/EOF":        "750 0\nhello world\n",
		"cat texts/RAW; test -e /srv/app/c.pem || echo": "$GREETING\n\n",
	} {
		if got := say(t, c, "made", line); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
	if !strings.Contains(r.output.String(), "ran as 0 in /srv/app") {
		t.Errorf("output %q", r.output.String())
	}
	if strings.Contains(r.all(), "s3cr3t") {
		t.Error("the value of an argument was told")
	}
	if len(r.notes) != 1 || !strings.Contains(r.notes[0], "UNUSED") {
		t.Errorf("notes %q", r.notes)
	}
	again(t, c, dir, token)
}

// again builds the same and then something a little different.
func again(t *testing.T, c *client.Client, dir string, token func(*imagebuild.Options)) {
	t.Helper()
	if _, r, err := build(t, c, dir, application, token); err != nil || len(r.ran) != 0 || r.cached != 14 {
		t.Errorf("built again: %v, ran %q, %d cached", err, r.ran, r.cached)
	}
	// What only containers read changes no files.
	if info, r, err := build(t, c, dir, application+"CMD [\"other\"]\n", token); err != nil || len(r.ran) != 0 || !cmp.Equal(info.Cmd, []string{"other"}) {
		t.Errorf("another CMD: %v, ran %q, %v", err, r.ran, info)
	}
	write(t, dir, map[string]string{"src/d.txt": "d\n"})
	_, r, err := build(t, c, dir, application, token)
	if err != nil || len(r.ran) == 0 || r.ran[0] != "FROM busybox" {
		t.Errorf("a file more: %v, ran %q", err, r.ran)
	}
	if got := say(t, c, "made", "ls /data"); got != "a.txt\nd.txt\nlink\n" {
		t.Errorf("%q", got)
	}
	other := func(o *imagebuild.Options) { o.Args = map[string]string{"TOKEN": "longer than before"} }
	if _, r, err = build(t, c, dir, application, other); err != nil || len(r.ran) == 0 {
		t.Errorf("another argument: %v, ran %q", err, r.ran)
	}
	if got := say(t, c, "made", "cat /token"); got != "18\n" {
		t.Errorf("%q", got)
	}
	fresh := func(o *imagebuild.Options) { token(o); o.Fresh = true }
	if _, r, err = build(t, c, dir, application, fresh); err != nil || r.cached != 0 || len(r.ran) != 14 {
		t.Errorf("without a cache: %v, %d cached, ran %q", err, r.cached, r.ran)
	}
	if got := say(t, c, "made", "cat /token"); got != "6\n" {
		t.Errorf("%q", got)
	}
}

func TestABuildWithoutCacheLeavesOlderImagesAlone(t *testing.T) {
	c := server(t)
	const file = "FROM busybox\nRUN cat /proc/sys/kernel/random/uuid > /id\n"
	dir := t.TempDir()
	if _, _, err := build(t, c, dir, file, func(o *imagebuild.Options) { o.Tag = "older" }); err != nil {
		t.Fatal(err)
	}
	before := say(t, c, "older", "cat /id")
	if _, _, err := build(t, c, dir, file, func(o *imagebuild.Options) { o.Tag, o.Fresh = "newer", true }); err != nil {
		t.Fatal(err)
	}
	if older, newer := say(t, c, "older", "cat /id"), say(t, c, "newer", "cat /id"); older != before || newer == before {
		t.Errorf("%q is %q now, and the new one %q", before, older, newer)
	}
}

func TestBuildsThatFail(t *testing.T) {
	c := server(t)
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.txt": "a", "x.tar.gz": "x"})
	for name, tc := range map[string]struct{ file, want string }{
		"a command that fails":        {"FROM busybox\n\nRUN echo said; exit 3\n", "Dockerfile:3: RUN echo said; exit 3: exit status 3"},
		"a program that is not there": {"FROM busybox\nRUN [\"/nothing\"]\n", "/nothing: no such file"},
		"no such file":                {"FROM busybox\nCOPY none /\n", "Dockerfile:2: COPY none /: there is no none in"},
		"no such user":                {"FROM busybox\nUSER ghost\nRUN id\n", `there is no user "ghost"`},
		"no such owner":               {"FROM busybox\nCOPY --chown=ghost a.txt /\n", `--chown=ghost: there is no user "ghost"`},
		"a base without a value":      {"ARG B\nFROM $B\n", "Dockerfile:2: $B is the name of no image"},
		"a name that is none":         {"FROM Not/A/Name!\n", "Dockerfile:1: FROM Not/A/Name!"},
		"no such stage":               {"FROM busybox\nCOPY --from=7 /a /\n", "there is no stage 7"},
		"a stage further down":        {"FROM busybox\nCOPY --from=later /a /\nFROM busybox AS later\n", "further down"},
		"not there in a stage":        {"FROM busybox AS a\nFROM busybox\nCOPY --from=a /none /\n", "there is no /none in a"},
		"an archive to unpack":        {"FROM busybox\nADD x.tar.gz /\n", "ADD would unpack x.tar.gz"},
		"no shell":                    {"FROM scratch\nRUN x\n", "/bin/sh: no such file"},
		"an argument that is needed":  {"FROM busybox\nARG A\nENV B=\"${A:?must be given}\"\n", "A is not set: must be given"},
	} {
		t.Run(name, func(t *testing.T) {
			_, r, err := build(t, c, dir, tc.file, func(o *imagebuild.Options) { o.Target = targetOf(tc.file) })
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want %q\n%s", err, tc.want, r.all())
			}
		})
	}
	for sb, err := range c.List(t.Context(), client.ListRequest{States: []string{"starting", "running", "paused"}}) {
		t.Errorf("%s is left, %v", sb.ID, err)
	}
	if list, err := c.Images(t.Context()); err != nil || len(list) != 2 { // busybox and scratch
		t.Errorf("images %+v, %v", list, err)
	}
}

// targetOf builds the first stage where the second is only there to be named.
func targetOf(file string) string {
	if strings.HasSuffix(file, "AS later\n") {
		return "0"
	}
	return ""
}

func TestAnImageWithoutABase(t *testing.T) {
	c := server(t)
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.txt": "a"})
	info, r, err := build(t, c, dir, "FROM busybox AS b\nFROM scratch\nCOPY --from=b /bin/busybox /bin/sh /tools/\nCOPY a.txt /\nCMD [\"/tools/busybox\", \"cat\", \"/a.txt\"]\n", nil)
	if err != nil || len(info.Cmd) != 3 {
		t.Fatalf("%+v, %v\n%s", info, err, r.all())
	}
	sb, err := c.Create(t.Context(), client.CreateRequest{Image: "made"})
	if err != nil {
		t.Fatal(err)
	}
	defer sb.Kill(context.Background())
	out, err := sb.Exec(t.Context(), client.ExecRequest{Argv: info.Cmd})
	if err != nil || out.Stdout != "a" {
		t.Errorf("%+v, %v", out, err)
	}
	if err := c.RemoveImage(t.Context(), "made"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.PruneImages(t.Context()); err != nil {
		t.Fatal(err)
	}
	templates, err := c.Templates(t.Context())
	for _, one := range templates {
		if strings.HasPrefix(one.Name, "bld-") {
			t.Errorf("%s is left, %v", one.Name, err)
		}
	}
}

func TestASandboxBeginsWithWhatItsImageStarts(t *testing.T) {
	c := server(t)
	if _, r, err := build(t, c, t.TempDir(), "FROM busybox\nUSER app\nWORKDIR /tmp\nENV WHO=you\nENTRYPOINT [\"/bin/sh\", \"-c\", \"echo $WHO $0 $(id -un) $PWD > begun; exec sleep 1000\"]\nCMD [\"arg\"]\n", nil); err != nil {
		t.Fatalf("%v\n%s", err, r.all())
	}
	sb, err := c.Create(t.Context(), client.CreateRequest{Image: "made", Start: true})
	if err != nil {
		t.Fatal(err)
	}
	defer sb.Kill(context.Background())
	out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "until [ -s /tmp/begun ]; do sleep 0.01; done; cat /tmp/begun; pidof sleep | wc -w"})
	if err != nil || out.Stdout != "you arg app /tmp\n1\n" { // it goes on although nobody listens
		t.Errorf("%+v, %v", out, err)
	}
	processes, err := sb.Processes(t.Context())
	if err != nil || len(processes) != 1 || processes[0].Tag != "entrypoint" {
		t.Errorf("%+v %v", processes, err)
	}
}

func TestManyFilesAreCopied(t *testing.T) {
	c := server(t)
	dir := t.TempDir()
	files := map[string]string{"ctx/to": "-> d1/f1", "ctx/d0/run": "#!"}
	for i := range 300 {
		files[fmt.Sprintf("ctx/d%d/f%d", i%7, i)] = strings.Repeat("x", i)
	}
	long := "ctx/" + strings.Repeat("long/", 40) + strings.Repeat("n", 120)
	files[long] = "deep"
	write(t, dir, files)
	if err := os.Chmod(filepath.Join(dir, "ctx/d0/run"), 0o750); err != nil {
		t.Fatal(err)
	}
	_, r, err := build(t, c, dir, "FROM busybox\nCOPY --chown=app:app ctx /there\nCOPY ctx/d1/* /flat/\n", nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, r.all())
	}
	for line, want := range map[string]string{
		"find /there -type f | wc -l; cat /there/to":           "302\nx",
		"stat -c '%u %g %a %s' /there/d0/run /there/d6/f300":   "1234 1235 750 2\n",
		"stat -c '%u %g %a %s' /there/d5/f299 /flat/f1 /there": "1234 1235 644 299\n0 0 644 1\n1234 1235 755 4096\n",
		"cat /there" + strings.TrimPrefix(long, "ctx"):         "deep",
		"ls /flat | wc -l": "43\n",
	} {
		if got := say(t, c, "made", line+" 2>/dev/null"); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
	// A disk that is too small says so.
	_, r, err = build(t, c, dir, "FROM busybox\nRUN touch /x\nCOPY ctx /other\nCOPY ctx /dev/full/\n", nil)
	if err == nil || !strings.Contains(err.Error(), "Dockerfile:4: COPY ctx /dev/full/") {
		t.Errorf("%v\n%s", err, r.all())
	}
}
