package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/template"
)

func TestMain(m *testing.M) {
	status := m.Run()
	common.close()
	if binary.dir != "" {
		_ = os.RemoveAll(binary.dir)
	}
	os.Exit(status)
}

// binary is the program under test: COVE_E2E_BINARY, or what the sources make now.
var binary struct {
	once sync.Once
	dir  string
	path string
	err  error
}

func program(t testing.TB) string {
	t.Helper()
	binary.once.Do(func() {
		if os.Geteuid() != 0 {
			binary.err = errors.New("these tests make real sandboxes and need root")
			return
		}
		if binary.path = os.Getenv("COVE_E2E_BINARY"); binary.path != "" {
			return
		}
		if binary.dir, binary.err = os.MkdirTemp("", "cove-e2e-bin"); binary.err != nil {
			return
		}
		binary.path = filepath.Join(binary.dir, "cove")
		build := exec.Command("go", "build", "-trimpath", "-o", binary.path, "./cmd/cove")
		build.Dir = ".."
		build.Env = append(os.Environ(), "CGO_ENABLED=0") // with cgo a server cannot give up its privilege
		if out, err := build.CombinedOutput(); err != nil {
			binary.err = fmt.Errorf("build cove: %w\n%s", err, out)
		}
	})
	if binary.err != nil {
		t.Fatal(binary.err)
	}
	return binary.path
}

// templates is the folder of built templates that all tests on this machine share: their packages take a minute.
var templates = sync.OnceValues(func() (string, error) {
	cache, err := testCache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "templates")
	// Built by its own path, not through a server's link to it: what is written here outlives that server.
	store, err := template.Open(template.Options{Dir: dir})
	if err != nil {
		return "", err
	}
	for _, name := range borrowed {
		if _, err := store.Ensure(context.Background(), name, nil); err != nil {
			return "", err
		}
	}
	return dir, nil
})

// borrowed are the templates that every server has from the start; base is below them.
var borrowed = []string{"base", "python", "code-interpreter"}

// borrow makes a folder of templates that shows those which are built once per machine. What a server adds to it, snapshots
// and layers of images, is nobody else's: a maker clears what it finds half done.
func borrow(shared, dir string) error {
	layers := filepath.Join("built", "layers")
	if err := os.MkdirAll(filepath.Join(dir, layers), 0o755); err != nil {
		return err
	}
	files := []string{"interpreters"} // the answers of this host's
	for _, name := range borrowed {
		files = append(files, name+".json")
	}
	for _, name := range files {
		text, err := os.ReadFile(filepath.Join(shared, "built", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "built", name), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(filepath.Join(shared, layers))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		if err := os.Symlink(filepath.Join(shared, layers, e.Name()), filepath.Join(dir, layers, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// hostSecret is in the environment of every server here and must be in no sandbox's.
const hostSecret = "hunter2-of-the-host"

// server is one data directory and, most of the time, the process that serves it.
type server struct {
	dir string // of data
	env []string
	*client.Client
	url, key string

	cmd    *exec.Cmd
	ready  string        // the ready file, where it is not in the data directory
	exited chan struct{} // closed when cmd has been waited for
	said   *lockedBuffer // stdout and stderr
}

// newServer starts a server on a new data directory; the maker and all it made end with the test.
func newServer(t testing.TB, env ...string) *server {
	t.Helper()
	s := makeServer(t, env...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the maker's log:\n%s", s.makerLog())
		}
		s.close()
	})
	s.start(t)
	return s
}

func makeServer(t testing.TB, env ...string) *server {
	t.Helper()
	program(t)
	shared, err := templates()
	if err != nil {
		t.Fatalf("build templates: %v", err)
	}
	dir, err := os.MkdirTemp("", "cove-e2e")
	if err != nil {
		t.Fatal(err)
	}
	if err := borrow(shared, filepath.Join(dir, "templates")); err != nil {
		t.Fatal(err)
	}
	return &server{dir: dir, env: append([]string{"COVE_TEMPLATE_PREPARE=python"}, env...)}
}

func (s *server) readyFile() string {
	if s.ready != "" {
		return s.ready
	}
	return filepath.Join(s.dir, "ready.json")
}

// start runs the server and returns when it serves.
func (s *server) start(t testing.TB) {
	t.Helper()
	_ = os.Remove(s.readyFile()) // a server that was killed left its own
	s.said = &lockedBuffer{}
	s.cmd = exec.Command(binary.path, "serve", "--listen", "127.0.0.1:0", "--data-dir", s.dir, "--ready-file", s.readyFile())
	s.cmd.Env = append(os.Environ(), "ANTHROPIC_API_KEY="+hostSecret, "OPENAI_API_KEY="+hostSecret, "PYTHONPATH=/"+hostSecret, "COVE_SHUTDOWN_GRACE=2s")
	s.cmd.Env = append(s.cmd.Env, s.env...)
	s.cmd.Stdout, s.cmd.Stderr = s.said, s.said
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	s.exited = exited
	go func() {
		_ = s.cmd.Wait() // how it ended is the test's to judge
		close(exited)
	}()
	var address struct {
		URL    string `json:"url"`
		APIKey string `json:"api_key"`
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(2 * time.Millisecond) {
		select {
		case <-exited:
			t.Fatalf("the server ended at its start:\n%s\nthe maker's log:\n%s", s.said, s.makerLog())
		default:
		}
		text, err := os.ReadFile(s.readyFile())
		if err == nil {
			if err := json.Unmarshal(text, &address); err != nil {
				t.Fatalf("ready file %q: %v", text, err)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the server is not ready after two minutes")
		}
	}
	if s.Client != nil {
		s.Client.Close()
	}
	c, err := client.New(address.URL, address.APIKey)
	if err != nil {
		t.Fatal(err)
	}
	s.Client, s.url, s.key = c, address.URL, address.APIKey
}

func (s *server) makerLog() string {
	text, _ := os.ReadFile(filepath.Join(s.dir, "maker", "log"))
	return string(text)
}

// signal sends the server a signal and waits for its end.
func (s *server) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.exited:
	case <-time.After(5 * time.Minute):
		t.Fatalf("the server did not end by %v", sig)
	}
}

// crash is kill -9.
func (s *server) crash(t testing.TB) {
	t.Helper()
	s.signal(t, syscall.SIGKILL)
}

// close ends the server, its maker and everything they made.
func (s *server) close() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		<-s.exited
	}
	if s.Client != nil {
		s.Client.Close()
	}
	_ = exec.Command(binary.path, "maker", "stop", "--data-dir", s.dir).Run() // there may be none any more
	for deadline := time.Now().Add(2 * time.Minute); makerPID(s.dir) != 0 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	_ = os.RemoveAll(s.dir)
}

// makerPID finds the maker of a data directory, whoever started it; 0 is none. A process that the maker
// has just made carries its command line too, until it runs another program.
func makerPID(dataDir string) int {
	var found []int
	for _, pid := range processes() {
		argv := strings.Split(cmdline(pid), "\x00")
		i := slices.Index(argv, "--data-dir")
		if i > 1 && i+1 < len(argv) && argv[i+1] == dataDir && argv[1] == "maker" {
			found = append(found, pid)
		}
	}
	for _, pid := range found {
		if parent, _ := strconv.Atoi(status(pid, "PPid")); !slices.Contains(found, parent) {
			return pid
		}
	}
	return 0
}

func (s *server) tag() string { return native.Tag(s.dir) }

// common is the server of all tests that leave one behind that works, also after a crash.
var common shared

type shared struct {
	mu sync.Mutex
	s  *server
}

func (c *shared) close() {
	if c.s != nil {
		c.s.close()
	}
}

func sharedServer(t testing.TB) *server {
	t.Helper()
	common.mu.Lock()
	defer common.mu.Unlock()
	if common.s == nil {
		common.s = makeServer(t)
		// As a data directory usually is; those of newServer are private to root, where the server cannot become another user.
		if err := os.Chmod(common.s.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		common.s.start(t)
	}
	select {
	case <-common.s.exited: // a test that failed left it so
		common.s.start(t)
	default:
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the maker's log:\n%s", common.s.makerLog())
		}
	})
	return common.s
}

// sandbox is one sandbox of a test; what a test does not expect to fail is fatal.
type sandbox struct {
	t testing.TB
	*client.Sandbox
}

// patience is how long a single request of a test may take. It is longer than the server's own
// limits (a start has a minute), so that a request that takes too long fails with the server's
// message.
const patience = 5 * time.Minute

func (s *server) create(t testing.TB, req client.CreateRequest) *sandbox {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	sb, err := s.Create(ctx, req)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = s.Sandbox(sb.ID).Kill(ctx) // the test may have ended its server
	})
	return &sandbox{t, sb}
}

// run runs a cell, whatever it says.
func (s *sandbox) run(req client.RunRequest) *client.Output {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	out, err := s.Run(ctx, req)
	if err != nil {
		s.t.Fatalf("run %.60q: %v", req.Code, err)
	}
	return out
}

func (s *sandbox) cell(code string) *client.Output {
	s.t.Helper()
	return s.run(client.RunRequest{Code: code})
}

// value runs a cell that must succeed and returns the value of its last expression.
func (s *sandbox) value(code string) string {
	s.t.Helper()
	out := s.cell(code)
	if out.Outcome != client.OutcomeOK {
		s.t.Fatalf("cell %.60q ended %s: %s %+v", code, out.Outcome, out.Message, out.Error)
	}
	return out.Text()
}

// exec runs a command, whatever it says.
func (s *sandbox) exec(req client.ExecRequest) *client.Output {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*patience)
	defer cancel()
	out, err := s.Exec(ctx, req)
	if err != nil {
		s.t.Fatalf("exec %.60q %.60q: %v", req.Command, req.Argv, err)
	}
	return out
}

// sh runs a line that must succeed and returns what it printed.
func (s *sandbox) sh(line string) string {
	s.t.Helper()
	out := s.exec(client.ExecRequest{Argv: []string{"bash", "-c", line}, TimeoutSeconds: 100})
	if out.Outcome != client.OutcomeOK || out.ExitCode != 0 {
		s.t.Fatalf("%.80q: %s %d %s\n%s%s", line, out.Outcome, out.ExitCode, out.Message, out.Stdout, out.Stderr)
	}
	return strings.TrimSpace(out.Stdout)
}

// endsIn sets the deadline from now. A lifetime that is given to create counts from before the
// start and may pass during it.
func (s *sandbox) endsIn(d time.Duration) {
	s.t.Helper()
	if err := s.SetTimeout(s.t.Context(), d); err != nil {
		s.t.Fatalf("set the deadline: %v", err)
	}
}

// kill ends it now.
func (s *sandbox) kill() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := s.Kill(ctx); err != nil {
		s.t.Fatalf("kill: %v", err)
	}
}

// after reads a sandbox again from its server.
func (s *server) after(t testing.TB, id string) client.SandboxInfo {
	t.Helper()
	sb, err := s.Get(t.Context(), id)
	if err != nil {
		t.Fatalf("get %s: %v", id, err)
	}
	return sb.SandboxInfo
}

// ended waits for the record of a sandbox's end.
func (s *server) ended(t testing.TB, id string) client.SandboxInfo {
	t.Helper()
	var info client.SandboxInfo
	eventually(t, "sandbox "+id+" has ended", 3*time.Minute, func() bool {
		info = s.after(t, id)
		return info.State == "ended"
	})
	return info
}

// eventually waits for a condition; the wait is only as long as it takes.
func eventually(t testing.TB, what string, limit time.Duration, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v it is not so that %s", limit, what)
		}
	}
}

// expect checks a failure that the server explained.
func expect(t testing.TB, err error, kind client.Kind, words ...string) {
	t.Helper()
	if client.KindOf(err) != kind {
		t.Errorf("got %v of kind %q, want %q", err, client.KindOf(err), kind)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}
