// Package testserver runs real Cove servers for tests that live outside of e2e: it builds the program, starts and ends
// servers, and counts what a server holds on the host.
package testserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/template"
)

// Root is the top of the repository: the nearest directory above a test's own with a go.mod. The source's path would
// not do, because -trimpath takes it away.
func Root() string {
	dir, err := os.Getwd()
	if err != nil {
		return "."
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			return at
		}
		if at == filepath.Dir(at) {
			return dir
		}
	}
}

var binary struct {
	once sync.Once
	path string
	err  error
}

// Binary is the program under test: COVE_E2E_BINARY, or what the sources make now.
func Binary(t testing.TB) string {
	t.Helper()
	binary.once.Do(func() {
		if os.Geteuid() != 0 {
			binary.err = errors.New("these tests make real sandboxes and need root")
			return
		}
		if binary.path = os.Getenv("COVE_E2E_BINARY"); binary.path != "" {
			return
		}
		binary.path = filepath.Join(Root(), "bin", "cove-under-test")
		build := exec.Command("go", "build", "-trimpath", "-o", binary.path, "./cmd/cove")
		build.Dir = Root()
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

// builtIn are the templates that every server has from the start.
var builtIn = []string{"base", "python", "code-interpreter"}

// Templates is the folder of built templates that all tests on this machine share: their packages take a minute.
var Templates = sync.OnceValues(func() (string, error) {
	cache := os.Getenv("COVE_TEST_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(dir, "cove-test")
	}
	dir := filepath.Join(cache, "templates")
	store, err := template.Open(template.Options{Dir: dir})
	if err != nil {
		return "", err
	}
	for _, name := range builtIn {
		if _, err := store.Ensure(context.Background(), name, nil); err != nil {
			return "", err
		}
	}
	return dir, nil
})

// borrow shows the shared templates in a folder of the server's own, so that nothing the server adds reaches the others.
func borrow(dir string) error {
	shared, err := Templates()
	if err != nil {
		return fmt.Errorf("build templates: %w", err)
	}
	layers := filepath.Join("built", "layers")
	if err := os.MkdirAll(filepath.Join(dir, layers), 0o755); err != nil {
		return err
	}
	files := []string{"interpreters"} // the answers of this host's
	for _, name := range builtIn {
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

// Server is one data directory and, most of the time, the process that serves it.
type Server struct {
	Dir     string   // of data
	Env     []string // added to the server's environment
	Args    []string // added to its command line
	Wrapper []string // a command that starts the server's command, such as prlimit or unshare
	*client.Client
	URL, Key string
	Said     *Buffer // stdout and stderr of the last start

	home   string // holds the data directory and what belongs to it
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has been waited for
	guard  *guard
}

// Make prepares a data directory with the built templates. The server, its maker and all they made end with the test.
func Make(t testing.TB, env ...string) *Server {
	t.Helper()
	s := MakeBare(t, env...)
	if err := borrow(filepath.Join(s.Dir, "templates")); err != nil {
		t.Fatal(err)
	}
	return s
}

// MakeBare prepares an empty data directory.
func MakeBare(t testing.TB, env ...string) *Server {
	t.Helper()
	Binary(t)
	home, err := os.MkdirTemp("", "cove-trial")
	if err == nil {
		// As a data directory usually is: the server becomes another user and must come through.
		err = os.Chmod(home, 0o755)
	}
	s := &Server{home: home, Dir: filepath.Join(home, "data"), Env: append([]string{"COVE_TEMPLATE_PREPARE=python"}, env...)}
	if err == nil {
		err = os.Mkdir(s.Dir, 0o755)
	}
	if err == nil {
		s.guard, err = startGuard(s)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the server said:\n%s\nthe maker's log:\n%s", tail(s.Said.String()), tail(s.MakerLog()))
		}
		s.Close(t)
	})
	return s
}

func tail(text string) string { return text[max(0, len(text)-6000):] }

// New is Make and Start.
func New(t testing.TB, env ...string) *Server {
	t.Helper()
	s := Make(t, env...)
	s.Start(t)
	return s
}

func (s *Server) readyFile() string { return filepath.Join(s.home, "ready.json") }

// Home is the directory above the data directory; it is removed at the end.
func (s *Server) Home() string { return s.home }

// Start runs the server and returns when it serves.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	s.Launch(t)
	if err := s.AwaitReady(t.Context(), 2*time.Minute); err != nil {
		t.Fatal(err)
	}
}

// Launch begins a server process and does not wait for it to serve.
func (s *Server) Launch(t testing.TB) {
	t.Helper()
	_ = os.Remove(s.readyFile()) // a server that was killed left its own
	s.Said = &Buffer{}
	argv := append(append([]string{}, s.Wrapper...), binary.path, "serve", "--listen", "127.0.0.1:0", "--data-dir", s.Dir, "--ready-file", s.readyFile())
	argv = append(argv, s.Args...)
	s.cmd = exec.Command(argv[0], argv[1:]...)
	s.cmd.Env = append(os.Environ(), "COVE_SHUTDOWN_GRACE=2s", "COVE_LOG_LEVEL=warn")
	s.cmd.Env = append(s.cmd.Env, s.Env...)
	s.cmd.Stdout, s.cmd.Stderr = s.Said, s.Said
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.guard.serves(s.cmd.Process.Pid)
	exited := make(chan struct{})
	s.exited = exited
	cmd := s.cmd
	go func() {
		_ = cmd.Wait() // how it ended is the test's to judge
		close(exited)
	}()
}

// AwaitReady waits for the ready file and makes the client.
func (s *Server) AwaitReady(ctx context.Context, limit time.Duration) error {
	var address struct {
		URL    string `json:"url"`
		APIKey string `json:"api_key"`
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(2 * time.Millisecond) {
		select {
		case <-s.exited:
			return fmt.Errorf("the server ended at its start:\n%s", s.Said)
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
		text, err := os.ReadFile(s.readyFile())
		if err == nil && json.Unmarshal(text, &address) == nil {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the server is not ready after %v:\n%s", limit, s.Said)
		}
	}
	if s.Client != nil {
		s.Client.Close()
	}
	c, err := client.New(address.URL, address.APIKey)
	if err != nil {
		return err
	}
	s.Client, s.URL, s.Key = c, address.URL, address.APIKey
	return nil
}

// Exited is closed when the server's process has ended.
func (s *Server) Exited() <-chan struct{} { return s.exited }

// PID is the server's process, below any Wrapper that does not replace itself.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// MakerLog is what the maker wrote.
func (s *Server) MakerLog() string {
	text, _ := os.ReadFile(filepath.Join(s.Dir, "maker", "log"))
	return string(text)
}

// Signal sends the server a signal and waits for its end.
func (s *Server) Signal(t testing.TB, sig syscall.Signal) {
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

// Crash is kill -9.
func (s *Server) Crash(t testing.TB) {
	t.Helper()
	s.Signal(t, syscall.SIGKILL)
}

// Close ends the server, its maker and everything they made. What is left over fails the test.
func (s *Server) Close(t testing.TB) {
	t.Helper()
	if s.guard == nil {
		return
	}
	s.EndProcesses()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		left := s.Leftovers()
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("left over after the end of server and maker: %s", strings.Join(left, "; "))
			break
		}
	}
	s.guard.end()
	s.guard = nil
	if err := os.RemoveAll(s.home); err != nil {
		t.Errorf("remove the data directory: %v", err)
	}
}

// EndProcesses kills the server and stops its maker.
func (s *Server) EndProcesses() {
	if s.cmd != nil {
		_ = s.cmd.Process.Signal(syscall.SIGCONT)
		_ = s.cmd.Process.Kill()
		<-s.exited
	}
	if s.Client != nil {
		s.Client.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute) // also after the test's own has ended
	defer cancel()
	_ = exec.CommandContext(ctx, binary.path, "maker", "stop", "--data-dir", s.Dir).Run() // there may be none any more
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		pid := s.MakerPID() // once: 0 would be the test's own process group
		if pid <= 1 {
			return
		}
		if time.Now().After(deadline) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// Tag is the mark that the host's objects of this data directory carry.
func (s *Server) Tag() string { return native.Tag(s.Dir) }

// guard ends what a server left behind when the test binary itself is killed: it waits for its input to close.
type guard struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	pids *os.File
}

// guardScript reads nothing; the test ends it by killing it. Only when the test's process is gone does it go on.
const guardScript = `cat >/dev/null
for p in $(cat "$1/pids"); do
  if tr '\0' ' ' < /proc/$p/cmdline 2>/dev/null | grep -qF "$1/"; then kill -CONT $p; kill -9 $p; fi
done
"$2" maker stop --data-dir "$3" >/dev/null 2>&1
sleep 2
for m in $(grep -F " $1/" /proc/self/mountinfo | cut -d' ' -f5 | tac); do umount "$m"; done
rm -rf "$1"`

func startGuard(s *Server) (*guard, error) {
	pids, err := os.OpenFile(filepath.Join(s.home, "pids"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	g := &guard{pids: pids, cmd: exec.Command("sh", "-c", guardScript, "guard", s.home, binary.path, s.Dir)}
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // an interrupt at the terminal is not for it
	if g.in, err = g.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	return g, g.cmd.Start()
}

func (g *guard) serves(pid int) { fmt.Fprintln(g.pids, pid) }

func (g *guard) end() {
	_ = syscall.Kill(-g.cmd.Process.Pid, syscall.SIGKILL) // the script and its cat
	_ = g.cmd.Wait()
	_ = g.in.Close()
	_ = g.pids.Close()
}

// Buffer is a bytes.Buffer for several writers.
type Buffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *Buffer) String() string {
	if b == nil {
		return ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
