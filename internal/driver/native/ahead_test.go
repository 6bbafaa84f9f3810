package native_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Sandboxes wait in the pool with an agent and a kernel that have prepared for what most callers want.

func TestASandboxIsAsAskedHoweverItWasMade(t *testing.T) {
	given := change(func(r *sandbox.StartRequest) { r.Env = map[string]string{"WHO": "given"} })
	files := limits(func(l *template.Limits) { l.OpenFiles = 300 })
	own := limits(func(l *template.Limits) { l.DiskBytes = 300 << 20 }) // of which the pool has none
	for claim, c := range map[string]struct {
		want    string
		born    string
		options []change
	}{
		"as expected":                    {"none", "True", nil},
		"with an environment":            {"given", "False", []change{given}},
		"with a limit of open files":     {"none 300", "True", []change{files}},
		"with both":                      {"given 300", "False", []change{given, files}},
		"made for its caller":            {"none", "False", []change{own}},
		"made for its caller, with both": {"given 300", "False", []change{own, given, files}},
	} {
		t.Run(claim, func(t *testing.T) {
			start(t).stop() // so that there is a pool
			waitForPool(t)
			b := start(t, c.options...)
			// Whether the last part of its birth was done in C, which is so where nothing but a limit was asked for.
			const born = `import sys; f = sys._getframe()
while f.f_code.co_name != "serve" or "ready" not in f.f_locals: f = f.f_back
print(f.f_locals["ready"])`
			if got := b.value(born); got != c.born {
				t.Errorf("the kernel was born in C: %s, want %s", got, c.born)
			}
			const code = `import os, resource; print(os.environ.get("WHO", "none"), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.getcwd(), os.environ["HOME"])`
			kernel := b.value(code)
			command := strings.TrimSpace(b.exec(agentapi.ExecParams{Argv: []string{"python3", "-c", code}}).stdout)
			if kernel != command || !strings.HasPrefix(kernel, c.want) || !strings.HasSuffix(kernel, " /home/user /home/user") {
				t.Errorf("the kernel says %q and a command %q, want %q and the user's home", kernel, command, c.want)
			}
		})
	}
}

func TestAKernelThatDiedWhileItWaitedIsReplaced(t *testing.T) {
	start(t).stop()
	waitForPool(t)
	s, err := world.driver.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, z := range s.Zygotes {
		for _, pid := range waitingKernels(t, z.PID) {
			if err := unix.Kill(pid, unix.SIGKILL); err == nil {
				killed++
			}
			for deadline := time.Now().Add(2 * time.Minute); unix.Kill(pid, 0) == nil && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
		}
	}
	if killed == 0 {
		t.Fatal("no kernel waits in the pool")
	}
	for range 2 {
		b := start(t)
		if got := b.value("print(6 * 7)"); got != "42" {
			t.Errorf("its successor says %q", got)
		}
		if out := b.exec(agentapi.ExecParams{Argv: []string{"echo", "hello"}}).stdout; out != "hello\n" {
			t.Errorf("a command says %q", out)
		}
	}
}

// waitingKernels are the children of a zygote that nobody has stopped: its other children are kernels' anchors.
func waitingKernels(t *testing.T, zygote int) (pids []int) {
	t.Helper()
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", zygote, zygote))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range strings.Fields(string(children)) {
		status, _ := os.ReadFile("/proc/" + word + "/status") // it may have ended
		var pid int
		if _, err := fmt.Sscan(word, &pid); err == nil && strings.Contains(string(status), "State:\tS") {
			pids = append(pids, pid)
		}
	}
	return pids
}
