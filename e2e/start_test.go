package e2e_test

import (
	"io"
	"net/http"
	"os"
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
