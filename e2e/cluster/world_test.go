package cluster_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"text/template"
	"time"

	"github.com/covehq/cove/client"
)

// world is a namespace of the cluster that COVE_TEST_CLUSTER names.
type world struct {
	t         *testing.T
	namespace string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	for _, name := range []string{"COVE_TEST_KUBECONFIG", "COVE_TEST_CLUSTER", "COVE_TEST_BIN", "COVE_TEST_IMAGE", "COVE_TEST_POD_IMAGE", "COVE_TEST_SERVER_RANGE", "COVE_TEST_OUTSIDE"} {
		if os.Getenv(name) == "" {
			t.Skipf("no cluster: %s is not set; `make test-cluster` starts one", name)
		}
	}
	var b [4]byte
	_, _ = rand.Read(b[:])
	w := &world{t: t, namespace: "e2e-" + hex.EncodeToString(b[:])}
	w.kubectl("create", "namespace", w.namespace)
	w.kubectl("label", "namespace", w.namespace, "pod-security.kubernetes.io/enforce=restricted")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(w.kubectl("get", "pods", "-n", w.namespace, "--show-labels"))
		}
		w.kubectl("delete", "namespace", w.namespace, "--wait=false")
	})
	return w
}

// kubectl runs it to its end, also when the test's own context is over.
func (w *world) kubectl(args ...string) string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "kubectl", append([]string{"--kubeconfig", os.Getenv("COVE_TEST_KUBECONFIG")}, args...)...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		w.t.Fatalf("kubectl %s: %v", strings.Join(args, " "), err)
	}
	return string(out)
}

// cluster has the harness do something to a part of the cluster.
func (w *world) cluster(args ...string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	program := filepath.Join(os.Getenv("COVE_TEST_BIN"), "cluster")
	if out, err := exec.CommandContext(ctx, program, append([]string{"-dir", os.Getenv("COVE_TEST_CLUSTER")}, args...)...).CombinedOutput(); err != nil {
		w.t.Fatalf("cluster %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// pod is as much of one as tests look at.
type pod struct {
	Name, State, Sandbox string
	Ready, Going         bool
}

// pods are those of the namespace that are Cove's.
func (w *world) pods() (list []pod) {
	w.t.Helper()
	var found struct {
		Items []struct {
			Metadata struct {
				Name, DeletionTimestamp string
				Labels                  map[string]string
			}
			Status struct {
				Conditions []struct{ Type, Status string }
			}
		}
	}
	text := w.kubectl("get", "pods", "-n", w.namespace, "-o", "json")
	if err := json.Unmarshal([]byte(text), &found); err != nil {
		w.t.Fatal(err)
	}
	for _, item := range found.Items {
		p := pod{Name: item.Metadata.Name, State: item.Metadata.Labels["cove.dev/state"], Sandbox: item.Metadata.Labels["cove.dev/sandbox"], Going: item.Metadata.DeletionTimestamp != ""}
		for _, c := range item.Status.Conditions {
			p.Ready = p.Ready || c.Type == "Ready" && c.Status == "True"
		}
		list = append(list, p)
	}
	return list
}

// podOf is the name of a sandbox's Pod.
func (w *world) podOf(id string) string {
	w.t.Helper()
	for _, p := range w.pods() {
		if p.Sandbox == id {
			return p.Name
		}
	}
	w.t.Fatalf("the sandbox %s has no Pod", id)
	return ""
}

// warm waits until so many Pods wait.
func (w *world) warm(n int) {
	w.t.Helper()
	w.until(4*time.Minute, fmt.Sprintf("%d Pods that wait", n), func() bool {
		ready := 0
		for _, p := range w.pods() {
			if p.State == "idle" && p.Ready && !p.Going {
				ready++
			}
		}
		return ready >= n
	})
}

// until waits for a condition that tells nobody when it holds.
func (w *world) until(limit time.Duration, what string, holds func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(limit); !holds(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("after %v: no %s", limit, what)
		}
	}
}

// noOrphans: of the Pods that are sandboxes, each is one that a server tells of, two minutes after whatever happened at the latest.
func (w *world) noOrphans(s *server) {
	w.t.Helper()
	var strays []string
	w.until(2*time.Minute, "end of Pods that are nobody's", func() bool {
		living := map[string]bool{}
		for info, err := range s.List(w.t.Context(), client.ListRequest{}) {
			if err != nil {
				w.t.Fatal(err)
			}
			living[info.ID] = info.State == "running"
		}
		strays = strays[:0]
		for _, p := range w.pods() {
			if p.State != "idle" && !living[p.Sandbox] {
				strays = append(strays, p.Name+" of "+p.Sandbox)
			}
		}
		return len(strays) == 0
	})
}

var config = template.Must(template.New("").Parse(`driver = "kubernetes"
shutdown_grace = "2s"
[sandbox]
default_template = "python"
[agent_sandbox]
listen = "off"
{{if .Database}}[database]
url = {{printf "%q" .Database}}
[server]
replicas = {{.Replicas}}
peer_listen = "127.0.0.1:0"
{{end}}[kubernetes]
kubeconfig = {{printf "%q" .Kubeconfig}}
namespace = "{{.Namespace}}"
image = "{{.Cove}}"
pull_policy = "Never"
name = "{{.Name}}"
server_ranges = ["{{.Range}}"]
[kubernetes.templates.python]
image = "{{.Image}}"
pull_policy = "Never"
pool = {{.Pool}}
python = "/usr/bin/python3"
preload = ["numpy", "pandas"]
cpus = 2
cpu_request = 0.01
memory = "256MiB"
memory_request = "64MiB"
`))

// settings are what servers of these tests differ in.
type settings struct {
	Name     string // this server's among others
	Pool     int
	Database string // with more than one server
	Replicas int
}

// server is one process, beside the cluster.
type server struct {
	*client.Client
	world    *world
	dir      string
	url, key string
	cmd      *exec.Cmd
	exited   chan struct{}
}

// serve starts a server. It ends with the test, and its Pods with the namespace.
func (w *world) serve(s settings) *server {
	w.t.Helper()
	made := &server{world: w, dir: w.t.TempDir()}
	s.Name = cmp.Or(s.Name, "server")
	var text bytes.Buffer
	err := config.Execute(&text, struct {
		settings
		Kubeconfig, Namespace, Cove, Image, Range string
	}{s, os.Getenv("COVE_TEST_KUBECONFIG"), w.namespace, os.Getenv("COVE_TEST_IMAGE"), os.Getenv("COVE_TEST_POD_IMAGE"), os.Getenv("COVE_TEST_SERVER_RANGE")})
	if err == nil {
		err = os.WriteFile(made.file("cove.toml"), text.Bytes(), 0o600)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	made.start()
	w.t.Cleanup(func() {
		if w.t.Failed() {
			said, _ := os.ReadFile(made.file("log"))
			lines := strings.Split(string(said), "\n")
			w.t.Logf("%s said:\n%s", s.Name, strings.Join(lines[max(0, len(lines)-80):], "\n"))
		}
		made.end(syscall.SIGTERM)
	})
	return made
}

func (s *server) file(name string) string { return filepath.Join(s.dir, name) }

// start runs the process and returns when it serves.
func (s *server) start() {
	t := s.world.t
	t.Helper()
	log, err := os.OpenFile(s.file("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	_ = os.Remove(s.file("ready.json")) // one that was killed left its own
	s.cmd = exec.Command(filepath.Join(os.Getenv("COVE_TEST_BIN"), "cove"), "serve", "--listen", "127.0.0.1:0", "--data-dir", s.file("data"),
		"--ready-file", s.file("ready.json"), "--config", s.file("cove.toml"))
	s.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.dir}
	s.cmd.Stdout, s.cmd.Stderr = log, log
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
	s.world.until(2*time.Minute, "server", func() bool {
		select {
		case <-exited:
			said, _ := os.ReadFile(s.file("log"))
			t.Fatalf("the server ended at its start:\n%s", said)
		default:
		}
		text, err := os.ReadFile(s.file("ready.json"))
		return err == nil && json.Unmarshal(text, &address) == nil
	})
	if s.Client, err = client.New(address.URL, address.APIKey); err != nil {
		t.Fatal(err)
	}
	s.url, s.key = address.URL, address.APIKey
}

// end signals the process and waits for it; SIGKILL is a crash.
func (s *server) end(sig syscall.Signal) {
	_ = s.cmd.Process.Signal(sig) // it may have ended
	late := time.AfterFunc(30*time.Second, func() { _ = s.cmd.Process.Kill() })
	defer late.Stop()
	<-s.exited
	s.Close()
}

func (s *server) create(req client.CreateRequest) *client.Sandbox {
	t := s.world.t
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	made, err := s.Create(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// ended waits until a sandbox has ended and returns how.
func (s *server) ended(id string, limit time.Duration) client.SandboxInfo {
	t := s.world.t
	t.Helper()
	var info client.SandboxInfo
	s.world.until(limit, "end of "+id, func() bool {
		found, err := s.Get(t.Context(), id)
		if err != nil {
			return false
		}
		info = found.SandboxInfo
		return info.State == "ended"
	})
	return info
}

// says runs a command and compares what it printed.
func says(t *testing.T, sb *client.Sandbox, command, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := sb.Exec(ctx, client.ExecRequest{Command: command})
	if err != nil || strings.TrimSpace(out.Stdout) != want {
		t.Fatalf("%s says %+v, %v", command, out, err)
	}
}

// listen takes connections where the internet is, as far as sandboxes can tell.
func listen(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("COVE_TEST_OUTSIDE"), "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.Addr().String()
}

// reaches asks until the answer has settled: a policy takes a moment to hold for a Pod that has just been claimed.
func reaches(t *testing.T, from *client.Sandbox, address string) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	host, port, _ := net.SplitHostPort(address)
	code := fmt.Sprintf("import socket\ntry:\n    socket.create_connection((%q, %s), 2).close(); print('yes')\nexcept OSError:\n    print('no')", host, port)
	said := ""
	for same := 0; same < 3; same++ {
		out, err := from.Run(ctx, client.RunRequest{Code: code})
		if err != nil || out.Stdout != "yes\n" && out.Stdout != "no\n" {
			t.Fatalf("whether %s is reached is not told: %+v, %v", address, out, err)
		}
		if out.Stdout != said {
			said, same = out.Stdout, 0
		}
	}
	return said == "yes\n"
}

// stream runs a command that prints a line again and again, and tells when each has come.
type stream struct {
	lines chan string
	err   chan error // how it ended
}

func follow(ctx context.Context, sb *client.Sandbox, req client.ExecRequest) *stream {
	s := &stream{lines: make(chan string, 1000), err: make(chan error, 1)}
	go func() {
		for e, err := range sb.ExecStream(ctx, req) {
			if err != nil {
				s.err <- err
				return
			}
			switch {
			case e.Type == "stdout":
				s.lines <- e.Text
			case e.Type == "end" && e.End != nil && e.End.Outcome != client.OutcomeOK:
				s.err <- fmt.Errorf("it ended with %s: %s", e.End.Outcome, e.End.Message)
				return
			}
		}
		s.err <- nil
	}()
	return s
}

// line waits for the next one.
func (s *stream) line(t *testing.T, limit time.Duration) string {
	t.Helper()
	select {
	case line := <-s.lines:
		return line
	case err := <-s.err:
		t.Fatalf("the stream has ended: %v", err)
	case <-time.After(limit):
		t.Fatal("no more lines come")
	}
	return ""
}

// end waits until it has ended, and says how.
func (s *stream) end(t *testing.T, limit time.Duration) error {
	t.Helper()
	select {
	case err := <-s.err:
		return err
	case <-time.After(limit):
		t.Fatal("the stream does not end")
	}
	return nil
}
