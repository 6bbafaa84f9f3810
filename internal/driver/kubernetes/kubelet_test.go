package kubernetes_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

// kubelet runs Pods of the fake API server: each is the real program, as PID 1 of namespaces of its own, at a loopback address of its own. It has
// the host's files below and the directories that its spec lets it write.
type kubelet struct {
	t       *testing.T
	api     *api
	install string // what the init container would have left
	stop    chan struct{}
	work    sync.WaitGroup

	mu      sync.Mutex
	running map[string]*exec.Cmd
}

// addresses counts Pods: kubelets run beside each other.
var addresses atomic.Int32

// containerUID is nobody of this host.
const containerUID = 54321

// containerVariable has the test's own binary become a container.
const containerVariable = "COVE_TEST_CONTAINER"

type container struct {
	Install  string
	Dir      string // where it has what was installed
	Command  []string
	Writable []string
	Root     bool
}

func TestMain(m *testing.M) {
	if text := os.Getenv(containerVariable); text != "" {
		fmt.Fprintln(os.Stderr, becomeContainer(text))
		os.Exit(podapi.ExitFailed)
	}
	status := m.Run()
	if built.path != "" {
		os.RemoveAll(filepath.Dir(built.path))
	}
	os.Exit(status)
}

// becomeContainer does what a runtime does.
func becomeContainer(text string) error {
	var c container
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	keep, err := os.Open(c.Install) // below a directory that is hidden in a moment
	if err != nil {
		return err
	}
	hidden := map[string]bool{}
	for _, dir := range append([]string{c.Dir}, c.Writable...) {
		top := "/" + strings.SplitN(dir, "/", 3)[1]
		if _, err := os.Stat(dir); err == nil {
			top = dir
		} else if _, err := os.Stat(top); err != nil {
			continue // the host has no such place; nobody can make one on a root that is read-only
		}
		if !hidden[top] {
			hidden[top] = true
			if err := syscall.Mount("tmpfs", top, "tmpfs", 0, "mode=0777"); err != nil {
				return err
			}
		}
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return err
		}
		if err := os.Chown(dir, containerUID, containerUID); err != nil {
			return err
		}
	}
	if err := syscall.Mount(fmt.Sprintf("/proc/self/fd/%d", keep.Fd()), c.Dir, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if !c.Root {
		if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(containerUID), syscall.Setuid(containerUID)); err != nil {
			return err
		}
	}
	return syscall.Exec(c.Command[0], c.Command, []string{podapi.Variable + "=" + os.Getenv(podapi.Variable)})
}

var built struct {
	sync.Once
	path string
	err  error
}

// program builds the real one once.
func program(t *testing.T) string {
	t.Helper()
	built.Do(func() {
		dir, err := os.MkdirTemp("", "cove-pod-build-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "cove-pod")
		cmd := exec.Command("go", "build", "-o", built.path, "github.com/covehq/cove/cmd/cove-pod")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%v: %s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.path
}

func newKubelet(t *testing.T, a *api) *kubelet {
	t.Helper()
	if os.Getuid() != 0 {
		skip(t, "namespaces need root here")
	}
	dir, err := os.MkdirTemp("", "cove-kubelet-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(program(t), "install", dir).CombinedOutput(); err != nil {
		t.Fatalf("install: %v: %s", err, out)
	}
	k := &kubelet{t: t, api: a, install: dir, stop: make(chan struct{}), running: map[string]*exec.Cmd{}}
	k.work.Go(k.sync)
	t.Cleanup(func() {
		close(k.stop)
		k.mu.Lock()
		for _, cmd := range k.running {
			_ = cmd.Process.Kill()
		}
		k.mu.Unlock()
		k.work.Wait()
		os.RemoveAll(dir)
	})
	return k
}

// sync follows the API server.
func (k *kubelet) sync() {
	from := 0
	for {
		k.api.mu.Lock()
		changed, news := k.api.changed, k.api.history[from:]
		from = len(k.api.history)
		k.api.mu.Unlock()
		for _, e := range news {
			var pod corev1.Pod
			if err := json.Unmarshal(e.object, &pod); err != nil {
				k.t.Error(err)
				return
			}
			k.look(&pod, e.kind)
		}
		select {
		case <-changed:
		case <-k.stop:
			return
		}
	}
}

func (k *kubelet) look(pod *corev1.Pod, kind string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	cmd := k.running[pod.Name]
	switch {
	case kind == "ADDED":
		n := addresses.Add(1)
		address := fmt.Sprintf("127.77.%d.%d", n/250, 1+n%250)
		if err := k.start(pod, address); err != nil {
			k.t.Errorf("start %s: %v", pod.Name, err)
		}
	case pod.DeletionTimestamp != nil && kind != "DELETED":
		if cmd == nil {
			k.api.change(pod.Name, func(object) string { return "DELETED" })
			return
		}
		_ = cmd.Process.Kill()
	}
}

// start runs a Pod; mu is held.
func (k *kubelet) start(pod *corev1.Pod, address string) error {
	main := pod.Spec.Containers[0]
	var settings podapi.Settings
	if err := json.Unmarshal([]byte(strings.ReplaceAll(main.Env[0].Value, "$$", "$")), &settings); err != nil {
		return err
	}
	settings.Address = net.JoinHostPort(address, fmt.Sprint(podapi.Port))
	text, err := podapi.EncodeSettings(settings)
	if err != nil {
		return err
	}
	c := container{Install: k.install, Command: main.Command}
	for _, m := range main.VolumeMounts {
		switch {
		case m.Name == "cove":
			c.Dir = m.MountPath
		case m.MountPath != "/dev/shm":
			c.Writable = append(c.Writable, m.MountPath)
		}
	}
	if who := main.SecurityContext.RunAsUser; who != nil && *who == 0 {
		c.Root = true
	}
	raw, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{containerVariable + "=" + string(raw), podapi.Variable + "=" + text}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	k.running[pod.Name] = cmd
	over := make(chan struct{})
	k.work.Go(func() { defer close(over); k.bury(pod.Name, cmd) })
	k.work.Go(func() { k.probe(pod.Name, address, settings.Address, over) })
	return nil
}

// probe tells that a Pod is ready once it listens.
func (k *kubelet) probe(name, ip, address string, over <-chan struct{}) {
	k.api.change(name, func(o object) string {
		o["status"] = object{"phase": "Running", "podIP": ip}
		return "MODIFIED"
	})
	for {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
			break
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-over:
			return
		case <-k.stop:
			return
		}
	}
	k.api.change(name, func(o object) string {
		if status, ok := o["status"].(object); ok && status["phase"] == "Running" {
			status["conditions"] = []any{object{"type": "Ready", "status": "True"}}
		}
		return "MODIFIED"
	})
}

// bury tells how a Pod ended, and lets one go that was deleted.
func (k *kubelet) bury(name string, cmd *exec.Cmd) {
	_ = cmd.Wait() // its status is told below
	code := cmd.ProcessState.ExitCode()
	if code < 0 {
		code = 137
	}
	k.mu.Lock()
	delete(k.running, name)
	k.mu.Unlock()
	k.api.change(name, func(o object) string {
		phase := "Failed"
		if code == 0 {
			phase = "Succeeded"
		}
		o["status"] = object{"phase": phase, "containerStatuses": []any{object{"name": "sandbox", "state": object{"terminated": object{
			"exitCode": code, "reason": "Error", "finishedAt": time.Now().UTC().Format(time.RFC3339),
		}}}}}
		if o["metadata"].(object)["deletionTimestamp"] != nil {
			return "DELETED"
		}
		return "MODIFIED"
	})
}
