package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/test/slow"
)

// aloneServer is a server as a person starts it, in a network of its own, where port 8080 is free whatever else this
// machine runs.
type aloneServer struct {
	*server
	said *lockedBuffer
}

// lockedBuffer is written by a process while a test reads it.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// serveAlone runs `cove` with arguments and returns when it answers, or has ended.
func serveAlone(t *testing.T, env []string, args ...string) *aloneServer {
	t.Helper()
	a := &aloneServer{server: makeServer(t, env...), said: &lockedBuffer{}}
	if err := os.Chmod(a.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.close)
	script := `ip link set lo up && exec "$@"`
	a.cmd = exec.Command("unshare", append([]string{"--net", "sh", "-c", script, "sh", binary.path}, args...)...)
	a.cmd.Env = append(os.Environ(), "COVE_DATA_DIR="+a.dir, "COVE_SHUTDOWN_GRACE=2s")
	a.cmd.Env = append(a.cmd.Env, env...)
	a.cmd.Stdout, a.cmd.Stderr = a.said, a.said
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	a.exited = exited
	go func() {
		_ = a.cmd.Wait() // how it ended is the test's to judge
		close(exited)
	}()
	eventually(t, "the server answers or has ended", 2*time.Minute, func() bool {
		select {
		case <-exited:
			return true
		default:
			out, err := a.within("curl", "--silent", "--fail", "--max-time", "2", "http://127.0.0.1:8080/health").Output()
			return err == nil && len(out) > 0
		}
	})
	return a
}

// within is a command in the server's network.
func (a *aloneServer) within(argv ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--net", "--target", strconv.Itoa(a.cmd.Process.Pid)}, argv...)...)
}

func (a *aloneServer) ended() bool {
	select {
	case <-a.exited:
		return true
	default:
		return false
	}
}

// python runs a program with the SDK's own defaults in the server's network, after lines of a shell.
func (a *aloneServer) python(t *testing.T, source string, lines ...string) string {
	t.Helper()
	script := strings.Join(append(lines, `exec "$@"`), "\n")
	cmd := a.within("sh", "-c", script, "sh", filepath.Join(openSandboxPackages(t).python, "bin", "python"), "-B", "-c", source)
	cmd.Env = []string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s\nthe server said:\n%s", err, out, a.said)
	}
	return strings.TrimSpace(string(out))
}

const firstProgram = `
from opensandbox import SandboxSync
sandbox = SandboxSync.create("python:3.11")
print(sandbox.commands.run("python3 -c 'print(6 * 7)'").text)
sandbox.kill()
sandbox.close()
`

// What a newcomer does: start the server, copy the lines that it prints, run a program.
func TestOpenSandboxS3_2_S2_58ServeWithoutArgumentsListensOn8080(t *testing.T) {
	slow.Test(t)
	a := serveAlone(t, nil, "serve")
	if a.ended() {
		t.Fatalf("the server ended:\n%s", a.said)
	}
	var export string
	eventually(t, "the server prints what OpenSandbox's clients need", 2*time.Minute, func() bool {
		export = regexp.MustCompile(`(?m)^ *(export OPEN_SANDBOX_DOMAIN=.*)$`).FindString(a.said.String())
		return export != ""
	})
	if got := a.python(t, firstProgram, export); got != "42" {
		t.Errorf("with the line that the server prints the program printed %q", got)
	}
	if got := a.python(t, firstProgram, export, "unset OPEN_SANDBOX_DOMAIN"); got != "42" { // S3.5
		t.Errorf("without an address the program printed %q", got)
	}
	_, printed, _ := strings.Cut(a.said.String(), export)
	printed = regexp.MustCompile(`(?s)# Python\n(.*?)\n\n`).FindStringSubmatch(printed + "\n\n")[1]
	if got := a.python(t, regexp.MustCompile(`(?m)^  `).ReplaceAllString(printed, ""), export); got != "2" {
		t.Errorf("the program that the server prints says %q:\n%s", got, printed)
	}
	refused := `
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException
try:
    SandboxSync.create("python:3.11")
except SandboxApiException as e:
    print(e.status_code, e.error.code)
`
	if got := lastLines(a.python(t, refused), 1); got != "401 MISSING_API_KEY" { // S3.53: open is a choice
		t.Errorf("without a key: %q", got)
	}
}

func TestOpenSandboxS3_53WithoutKeysOnlyWhenAskedTo(t *testing.T) {
	slow.Test(t)
	for claim, start := range map[string]struct {
		env  []string
		args []string
	}{
		"by a flag":             {nil, []string{"serve", "--anonymous"}},
		"by upstream's setting": {[]string{"OPENSANDBOX_INSECURE_SERVER=YES"}, []string{"serve"}},
	} {
		t.Run(claim, func(t *testing.T) {
			a := serveAlone(t, start.env, start.args...)
			if a.ended() {
				t.Fatalf("the server ended:\n%s", a.said)
			}
			if got := a.python(t, firstProgram); got != "42" { // S3.6: no key at all
				t.Errorf("the program printed %q", got)
			}
			for what, headers := range map[string][]string{
				"a wrong key":              {"OPEN-SANDBOX-API-KEY: wrong"},
				"a page of another origin": {"Origin: https://example.com"},
				"a name that was rebound":  {"Host: example.com"},
			} {
				argv := []string{"curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "http://127.0.0.1:8080/v1/sandboxes"}
				for _, h := range headers {
					argv = append(argv, "--header", h)
				}
				if out, err := a.within(argv...).Output(); err != nil || (string(out) != "401" && string(out) != "403") {
					t.Errorf("%s: %s %v", what, out, err)
				}
			}
		})
	}
	t.Run("never by accident on every address", func(t *testing.T) {
		a := serveAlone(t, nil, "serve", "--anonymous", "--listen", "0.0.0.0:8080")
		if !a.ended() || !strings.Contains(a.said.String(), "127.0.0.1") {
			t.Errorf("it serves, or does not say what to do:\n%s", a.said)
		}
	})
}

func TestOpenSandboxS3_1AnExampleConfigStartsAServer(t *testing.T) {
	program(t)
	path := filepath.Join(t.TempDir(), "cove.toml")
	if out, err := exec.Command(binary.path, "init-config", path, "--example", "docker").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(text), "#") {
		t.Fatalf("%v\n%s", err, text)
	}
	if out, err := exec.Command(binary.path, "init-config", path, "--example", "docker").CombinedOutput(); err == nil {
		t.Errorf("it wrote over a file: %s", out)
	}
	a := serveAlone(t, nil, "serve", "--config", path)
	if a.ended() {
		t.Fatalf("the server ended:\n%s", a.said)
	}
}

// created is what a create answers.
type created struct {
	ID     string
	Status struct{ State, Reason, Message string }
}

const createBody = `{"image":{"uri":"IMAGE"},"resourceLimits":{"cpu":"1","memory":"512Mi"},"entrypoint":["tail","-f","/dev/null"],"timeout":600}`

func createFrom(image string) string { return strings.ReplaceAll(createBody, "IMAGE", image) }

func TestOpenSandboxS3_3APulledImageNeedsNoRegistryAnyMore(t *testing.T) {
	r := startRegistry(t)
	s := newServer(t)
	t.Cleanup(func() { removeImages(t, s) })
	pull := exec.Command(binary.path, "image", "pull", r.host+"/busybox:1")
	pull.Env = append(os.Environ(), "COVE_URL="+s.url, "COVE_API_KEY="+s.key)
	if out, err := pull.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	asked := r.asked.Load()
	var made created
	s.e2bCall(t, http.StatusAccepted, &made, "POST", "/v1/sandboxes", createFrom(r.host+"/busybox:1"))
	if made.Status.State != "Running" || r.asked.Load() != asked {
		t.Errorf("%+v after %d more requests", made, r.asked.Load()-asked)
	}
	s.e2bCall(t, http.StatusNoContent, nil, "DELETE", "/v1/sandboxes/"+made.ID, "")
}

// A token holds after a crash, for a sandbox that lived through it, and so do its image and metadata.
func TestOpenSandboxAfterARestart(t *testing.T) {
	s := newServer(t)
	var made created
	body := strings.Replace(createFrom("python:3.11"), "{", `{"metadata":{"k":"v"},`, 1)
	s.e2bCall(t, http.StatusAccepted, &made, "POST", "/v1/sandboxes", body)
	endpoint := func() (path string, headers []string) {
		var e struct {
			Endpoint string
			Headers  map[string]string
		}
		s.e2bCall(t, http.StatusOK, &e, "GET", "/v1/sandboxes/"+made.ID+"/endpoints/44772", "")
		_, path, _ = strings.Cut(e.Endpoint, "/")
		for k, v := range e.Headers {
			headers = append(headers, k, v)
		}
		return "/" + path, headers
	}
	path, headers := endpoint()
	s.e2bCall(t, http.StatusOK, nil, "GET", path+"/ping", "", headers...)
	s.crash(t)
	s.start(t)
	key := s.key
	s.key = ""
	s.e2bCall(t, http.StatusOK, nil, "GET", path+"/ping", "", headers...)
	s.key = key
	var again struct {
		Status   struct{ State string }
		Image    struct{ URI string }
		Metadata map[string]string
	}
	s.e2bCall(t, http.StatusOK, &again, "GET", "/v1/sandboxes/"+made.ID, "")
	if again.Status.State != "Running" || again.Image.URI != "python:3.11" || again.Metadata["k"] != "v" {
		t.Errorf("%+v", again)
	}
	s.e2bCall(t, http.StatusNoContent, nil, "DELETE", "/v1/sandboxes/"+made.ID, "")
	s.e2bCall(t, http.StatusNotFound, nil, "GET", path+"/ping", "", headers...)
}

// A client that leaves while its image is pulled leaves nothing behind, and neither does one that deletes what it waits for.
func TestOpenSandboxACreateThatNobodyWaitsFor(t *testing.T) {
	r := startRegistry(t)
	hold := make(chan struct{})
	var held sync.Once
	reached := make(chan struct{})
	slow := func(w http.ResponseWriter, q *http.Request) {
		if strings.Contains(q.URL.Path, "/blobs/") {
			held.Do(func() { close(reached) })
			select {
			case <-hold:
			case <-q.Context().Done():
				return
			}
		}
		r.ServeHTTP(w, q)
	}
	front := startFront(t, slow)
	defer close(hold)
	s := newServer(t)
	t.Cleanup(func() { removeImages(t, s) })
	ctx, leave := context.WithCancel(t.Context())
	answered := make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/sandboxes", strings.NewReader(createFrom(front+"/busybox:1")))
		if err == nil {
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("OPEN-SANDBOX-API-KEY", s.key)
			var resp *http.Response
			if resp, err = http.DefaultClient.Do(req); err == nil {
				resp.Body.Close()
			}
		}
		answered <- err
	}()
	select {
	case <-reached:
	case err := <-answered:
		t.Fatalf("the create ended before its image was asked for: %v", err)
	case <-time.After(patience):
		t.Fatal("the registry was not asked")
	}
	leave()
	if err := <-answered; !errors.Is(err, context.Canceled) {
		t.Errorf("the client heard %v", err)
	}
	eventually(t, "nothing is left", 2*time.Minute, func() bool {
		var list struct{ Items []json.RawMessage }
		s.e2bCall(t, http.StatusOK, &list, "GET", "/v1/sandboxes", "")
		return len(list.Items) == 0
	})
}

const patientProgram = `
import sys
from datetime import timedelta
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
sandbox = SandboxSync.create(sys.argv[1], connection_config=ConnectionConfigSync(request_timeout=timedelta(seconds=120)), ready_timeout=timedelta(seconds=60))
print(sandbox.get_info().status.state, sandbox.commands.run("echo here").text)
sandbox.kill()
sandbox.close()
`

// A registry that takes its time holds nobody's request for longer than a client waits: the sandbox is pending, and then it runs.
func TestOpenSandboxS3_11ASlowImageIsPendingAndThenRuns(t *testing.T) {
	slow.Test(t)
	tools := openSandboxPackages(t)
	r := startRegistry(t)
	hold := make(chan struct{})
	front := startFront(t, func(w http.ResponseWriter, q *http.Request) {
		if strings.Contains(q.URL.Path, "/blobs/") {
			select {
			case <-hold:
			case <-q.Context().Done():
				return
			}
		}
		r.ServeHTTP(w, q)
	})
	release := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(release)
	s := newServer(t)
	t.Cleanup(func() { removeImages(t, s) })
	sdk := exec.Command(filepath.Join(tools.python, "bin", "python"), "-B", "-c", patientProgram, front+"/busybox:1")
	sdk.Env = append(os.Environ(), s.openSandbox(t)...)
	var said lockedBuffer
	sdk.Stdout, sdk.Stderr = &said, &said
	if err := sdk.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- sdk.Wait() }()

	var made created
	s.e2bCall(t, http.StatusAccepted, &made, "POST", "/v1/sandboxes", createFrom(front+"/busybox:1"))
	if made.Status.State != "Pending" {
		t.Errorf("while its image is on its way it is %+v", made.Status)
	}
	s.e2bCall(t, http.StatusServiceUnavailable, nil, "GET", "/v1/sandboxes/"+made.ID+"/proxy/44772/ping", "", "OPEN-SANDBOX-API-KEY", s.key)
	release()
	eventually(t, "the sandbox runs", patience, func() bool {
		s.e2bCall(t, http.StatusOK, &made, "GET", "/v1/sandboxes/"+made.ID, "")
		return made.Status.State == "Running"
	})
	s.e2bCall(t, http.StatusOK, nil, "GET", "/v1/sandboxes/"+made.ID+"/proxy/44772/ping", "", "OPEN-SANDBOX-API-KEY", s.key)
	s.e2bCall(t, http.StatusNoContent, nil, "DELETE", "/v1/sandboxes/"+made.ID, "")
	if err := <-ended; err != nil || lastLines(said.String(), 1) != "Running here" {
		t.Errorf("the SDK's program: %v\n%s", err, said.String())
	}
}

func startFront(t *testing.T, handler http.HandlerFunc) (host string) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// A full disk is told as what it is, leaves nothing half-made, and the same create works when there is room.
func TestOpenSandboxOnAFullDisk(t *testing.T) {
	slow.Test(t)
	r := startRegistry(t)
	s := smallServer(t, 4<<30)
	t.Cleanup(func() { removeImages(t, s) })
	free := s.fill(t, 1<<20)
	defer free()
	resp, err := s.post(t, "/v1/sandboxes", createFrom(r.host+"/python:1"))
	if err != nil {
		t.Fatal(err)
	}
	var refused struct{ Code, Message string }
	if err := json.Unmarshal(resp.body, &refused); err != nil || resp.status < 500 || refused.Code == "" || !strings.Contains(refused.Message, "disk") {
		t.Errorf("%d %s", resp.status, resp.body)
	}
	if strings.Contains(refused.Message, s.dir) {
		t.Errorf("it tells where the server keeps its files: %s", refused.Message)
	}
	free()
	again, err := s.post(t, "/v1/sandboxes", createFrom(r.host+"/python:1"))
	var made created
	if err != nil || again.status != http.StatusAccepted || json.Unmarshal(again.body, &made) != nil {
		t.Fatalf("the same create when there is room: %v, %d %s", err, again.status, again.body)
	}
	s.e2bCall(t, http.StatusNoContent, nil, "DELETE", "/v1/sandboxes/"+made.ID, "")
}

type answer struct {
	status int
	body   []byte
}

// post is a request whose answer the test judges.
func (s *server) post(t *testing.T, path, body string) (answer, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("OPEN-SANDBOX-API-KEY", s.key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, text}, err
}
