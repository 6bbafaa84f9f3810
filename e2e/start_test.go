package e2e_test

import (
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// TestStart_HostChanged starts a server whose template was built before the host changed.
func TestStart_HostChanged(t *testing.T) {
	s := makeServer(t, "COVE_TEMPLATE_PREPARE=own")
	t.Cleanup(s.close)
	host, err := os.MkdirTemp("/srv", "cove-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(host) })
	definition := filepath.Join(s.dir, "templates", "own.toml")
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(host, 0o755); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(host, "state"), "one")
	write(definition, "name = 'own'\nfrom = 'base'\n[host]\ncopy = ['"+host+"']\n")
	shows := func() string {
		t.Helper()
		sb, err := s.Create(t.Context(), client.CreateRequest{Template: "own"})
		if err != nil {
			t.Fatal(err)
		}
		out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "cat " + host + "/state"})
		if err != nil {
			t.Fatal(err)
		}
		if err := sb.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		return out.Stdout
	}
	s.start(t)
	if got := shows(); got != "one" {
		t.Fatalf("the first start shows %q", got)
	}

	s.signal(t, syscall.SIGTERM)
	write(filepath.Join(host, "state"), "two")
	lock, err := os.OpenFile(filepath.Join(s.dir, "templates", "built", "lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil { // no build can begin
		t.Fatal(err)
	}
	s.start(t)
	if code, body := readyz(t, s); code != http.StatusOK {
		t.Errorf("/readyz while the new template is not built: %d %s", code, body)
	}
	if got := shows(); got != "one" {
		t.Errorf("while the new template is not built, a sandbox shows %q", got)
	}
	lock.Close()
	for deadline := time.Now().Add(2 * time.Minute); shows() != "two"; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("sandboxes do not start from the new template")
		}
	}

	s.signal(t, syscall.SIGTERM)
	write(definition, "name = 'own'\nfrom = 'base'\n[python]\nfind = ['/nonexistent/python3']\n")
	s.start(t)
	const note = "template own could not be built again, so the earlier one serves"
	code, body := readyz(t, s)
	for deadline := time.Now().Add(2 * time.Minute); !strings.Contains(body, note) && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		code, body = readyz(t, s)
	}
	if code != http.StatusOK || !strings.Contains(body, note) {
		t.Errorf("/readyz after a build that failed: %d %s", code, body)
	}
	if got := shows(); got != "two" {
		t.Errorf("after a build that failed, a sandbox shows %q", got)
	}
	if !strings.Contains(s.said.String(), "level=WARN msg=\"a template cannot be built again") {
		t.Errorf("the log does not say that the build failed: %s", s.said)
	}
}

// TestStart_DamagedLayer starts a server on a template of which a file is gone.
func TestStart_DamagedLayer(t *testing.T) {
	s := makeServer(t, "COVE_TEMPLATE_PREPARE=own")
	t.Cleanup(s.close)
	definition := filepath.Join(s.dir, "templates", "own.toml")
	if err := os.WriteFile(definition, []byte("name = 'own'\nfrom = 'base'\n[files]\n'/etc/motd' = 'hello'\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.start(t)
	s.signal(t, syscall.SIGTERM)
	found, err := filepath.Glob(filepath.Join(s.dir, "templates/built/layers/own-*/trees/@/etc/motd"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	if err := os.Remove(found[0]); err != nil {
		t.Fatal(err)
	}
	lock, err := os.OpenFile(filepath.Join(s.dir, "templates", "built", "lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil { // no build can begin
		t.Fatal(err)
	}
	s.start(t)
	if code, body := readyz(t, s); code != http.StatusServiceUnavailable || !strings.Contains(body, "template own is damaged and is being built again") {
		t.Errorf("/readyz before the template is built again: %d %s", code, body)
	}
	if _, err := s.Create(t.Context(), client.CreateRequest{Template: "own"}); err == nil || !strings.Contains(err.Error(), "is damaged and is being built again") {
		t.Errorf("a sandbox of the damaged template: %v", err)
	}
	if sb, err := s.Create(t.Context(), client.CreateRequest{Template: "base"}); err != nil {
		t.Errorf("a sandbox of another template: %v", err)
	} else if err := sb.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	lock.Close()
	code, body := readyz(t, s)
	for deadline := time.Now().Add(2 * time.Minute); code != http.StatusOK && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		code, body = readyz(t, s)
	}
	if code != http.StatusOK {
		t.Fatalf("/readyz: %d %s", code, body)
	}
	sb, err := s.Create(t.Context(), client.CreateRequest{Template: "own"})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := sb.Exec(t.Context(), client.ExecRequest{Command: "cat /etc/motd"}); err != nil || out.Stdout != "hello" {
		t.Errorf("a sandbox shows %q, %v", out.Stdout, err)
	}

	doctor := func() string {
		out, _ := exec.Command(program(t), "doctor", "--verify", "--data-dir", s.dir).CombinedOutput() // its exit code is about the host
		return string(out)
	}
	if out := doctor(); !strings.Contains(out, "the files of 4 templates are those that were built") {
		t.Errorf("doctor --verify says: %s", out)
	}
	if err := os.WriteFile(found[0], []byte("jello"), 0o644); err != nil { // the same size
		t.Fatal(err)
	}
	if out := doctor(); !strings.Contains(out, "of template own") || !strings.Contains(out, "was changed after it was built") {
		t.Errorf("doctor --verify of a changed file says: %s", out)
	}
}

func readyz(t testing.TB, s *server) (code int, body string) {
	t.Helper()
	resp, err := http.Get(s.url + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// TestStart_PythonIsGone starts a server whose template was built with a Python that an upgrade of
// the host has removed since: the server serves, and builds the template with the Python there is.
func TestStart_PythonIsGone(t *testing.T) {
	executable := copyPython(t)
	s := makeServer(t, "COVE_TEMPLATE_PREPARE=own")
	t.Cleanup(s.close)
	define := func(python string) {
		t.Helper()
		definition := "name = 'own'\nfrom = 'base'\n[python]\nfind = ['" + python + "']\n"
		if err := os.WriteFile(filepath.Join(s.dir, "templates", "own.toml"), []byte(definition), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	define(executable)
	runs := func() (string, error) {
		sb, err := s.Create(t.Context(), client.CreateRequest{Template: "own"})
		if err != nil {
			return "", err
		}
		out, err := sb.Run(t.Context(), client.RunRequest{Code: "import sys; print(sys.executable)"})
		return out.Stdout, errors.Join(err, sb.Kill(t.Context()))
	}
	s.start(t)
	if got, err := runs(); err != nil || got != executable+"\n" {
		t.Fatalf("before: %q, %v", got, err)
	}
	s.signal(t, syscall.SIGTERM)
	if err := syscall.Kill(makerPID(s.dir), syscall.SIGKILL); err != nil { // it has a kernel of that Python
		t.Fatal(err)
	}
	eventually(t, "the maker is gone", patience, func() bool { return makerPID(s.dir) == 0 })
	if err := os.Remove(executable); err != nil {
		t.Fatal(err)
	}
	define(">=3.9")
	lock, err := os.OpenFile(filepath.Join(s.dir, "templates", "built", "lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil { // no build can begin
		t.Fatal(err)
	}
	s.start(t)
	if code, body := readyz(t, s); code != http.StatusServiceUnavailable || !strings.Contains(body, "template own is damaged and is being built again") {
		t.Errorf("/readyz before the template is built again: %d %s", code, body)
	}
	if sb, err := s.Create(t.Context(), client.CreateRequest{Template: "base"}); err != nil {
		t.Errorf("a sandbox of another template: %v", err)
	} else if err := sb.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	lock.Close()
	eventually(t, "/readyz is 200", patience, func() bool { code, _ := readyz(t, s); return code == http.StatusOK })
	if got, err := runs(); err != nil || got == "" || got == executable+"\n" {
		t.Errorf("after: %q, %v", got, err)
	}
}

// TestStart_KernelCannotStart starts a server whose template has a Python that is there and cannot
// start: the server serves other templates and says what is wrong.
func TestStart_KernelCannotStart(t *testing.T) {
	executable := copyPython(t)
	s := makeServer(t, "COVE_TEMPLATE_PREPARE=own")
	t.Cleanup(s.close)
	definition := "name = 'own'\nfrom = 'base'\n[python]\nfind = ['" + executable + "']\npreload = ['json']\n"
	if err := os.WriteFile(filepath.Join(s.dir, "templates", "own.toml"), []byte(definition), 0o644); err != nil {
		t.Fatal(err)
	}
	s.start(t)
	s.signal(t, syscall.SIGTERM)
	if err := syscall.Kill(makerPID(s.dir), syscall.SIGKILL); err != nil { // it has a kernel of that Python
		t.Fatal(err)
	}
	eventually(t, "the maker is gone", patience, func() bool { return makerPID(s.dir) == 0 })
	found, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(executable)), "lib/python3*/encodings"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	if err := os.Rename(found[0], found[0]+".away"); err != nil {
		t.Fatal(err)
	}

	s.start(t)
	resp, err := http.Get(s.url + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("/healthz: %d", resp.StatusCode)
	}
	if sb, err := s.Create(t.Context(), client.CreateRequest{Template: "base"}); err != nil {
		t.Errorf("a sandbox of another template: %v", err)
	} else if err := sb.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	var code int
	var body string
	eventually(t, "the build that must fail", patience, func() bool {
		code, body = readyz(t, s)
		return strings.Contains(body, "template own is damaged and could not be built again")
	})
	if code != http.StatusServiceUnavailable || !strings.Contains(body, "disk: ") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	if _, err := s.Create(t.Context(), client.CreateRequest{Template: "own"}); err == nil || !strings.Contains(err.Error(), "is damaged") {
		t.Errorf("a sandbox of the template: %v", err)
	}

	s.signal(t, syscall.SIGTERM)
	if err := os.Rename(found[0]+".away", found[0]); err != nil {
		t.Fatal(err)
	}
	s.start(t)
	eventually(t, "/readyz is 200", patience, func() bool { code, _ := readyz(t, s); return code == http.StatusOK })
	sb, err := s.Create(t.Context(), client.CreateRequest{Template: "own"})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := sb.Run(t.Context(), client.RunRequest{Code: "print(6 * 7)"}); err != nil || out.Stdout != "42\n" {
		t.Errorf("when Python is whole: %q, %v", out.Stdout, err)
	}
}

// copyPython copies the system's Python, which needs no library of its own, to another directory.
func copyPython(t *testing.T) (executable string) {
	t.Helper()
	prefix, err := os.MkdirTemp("/srv", "cove-e2e-python-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(prefix) })
	out, err := exec.Command("sh", "-ec", `
		program=$(readlink -f /usr/bin/python3) library=lib/$(basename "$program")
		chmod 755 "$1"; mkdir -p "$1/bin" "$1/$library/site-packages"
		cp "$program" "$1/bin/"
		cd "/usr/$library" && tar -c --exclude=./test --exclude=./idlelib --exclude=__pycache__ . | tar -x -C "$1/$library"
		echo "$1/bin/$(basename "$program")"`, "sh", prefix).Output()
	if err != nil {
		t.Fatalf("copy Python: %v", err)
	}
	return strings.TrimSpace(string(out))
}
