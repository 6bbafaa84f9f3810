package agent_test

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

func (h *home) startShell(t *testing.T, cwd string) {
	t.Helper()
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("this host has no bash")
	}
	if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "b", Language: "bash", Cwd: cwd}); err != nil {
		t.Fatal(err)
	}
	k, err := h.KernelWait(t.Context(), agentapi.KernelParams{Kernel: "b"})
	if err != nil || k.State != agentapi.KernelIdle || k.Language != "bash" {
		t.Fatalf("%+v, %v", k, err)
	}
}

// told is everything that a cell of bash tells.
func (h *home) told(t *testing.T, p agentapi.RunParams) (stdout, stderr string, failed *agentapi.CodeError, end agentapi.End) {
	t.Helper()
	p.Kernel = "b"
	s, err := h.Run(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case agentapi.EventStdout:
			stdout += string(e.Data)
		case agentapi.EventStderr:
			stderr += string(e.Data)
		case agentapi.EventError:
			failed = e.Error
		case agentapi.EventEnd:
			end = *e.End
		}
	}
	return stdout, stderr, failed, end
}

func TestShellKernel(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	h.startShell(t, "/usr")
	for _, c := range []struct {
		name, code     string
		env            map[string]string
		stdout, stderr string
		status         string
	}{
		{name: "output", code: "echo out; echo err >&2", stdout: "out\n", stderr: "err\n"},
		{name: "its directory", code: "pwd", stdout: "/usr\n"},
		{name: "state is made", code: "x='a  b'; f() { echo \"f $1\"; }; alias hi='echo hello'; cd /tmp; export E=1"},
		{name: "state is kept", code: "f \"$x\"; hi; pwd; bash -c 'echo $E'", stdout: "f a  b\nhello\n/tmp\n1\n"},
		{name: "quotes, lines and marks", code: "echo 'it'\"'\"'s' \"!$((1+1))!\"\ncat <<'X'\n$no `no` \\n\nX\n", stdout: "it's !2!\n$no `no` \\n\n"},
		{name: "a failure", code: "false", status: "1"},
		{name: "a status", code: "(exit 7)", status: "7"},
		{name: "what is not there", code: "no_such_command", stderr: "bash: no_such_command: command not found\n", status: "127"},
		{name: "variables of a cell", code: "echo $E $ME; bash -c 'echo $ME'", env: map[string]string{"E": "other", "ME": "it's", "no-name": "x"}, stdout: "other it's\nit's\n"},
		{name: "are gone after it", code: "echo \"$E [${ME-none}]\"", stdout: "1 [none]\n"},
		{name: "there is no input", code: "read -r line; echo \"[$line]\"", stdout: "[]\n"},
		{name: "its own descriptors are not seen", code: "ls -l /proc/self/fd | grep -c -E ' (198|9|4) ->'", stdout: "0\n", status: "1"},
		{name: "an unset variable", code: "set -u; echo $never", stderr: "bash: never: unbound variable\n", status: "1"},
		{name: "after that", code: "set +u; echo on", stdout: "on\n"},
		{name: "nothing", code: ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			stdout, stderr, failed, end := h.told(t, agentapi.RunParams{Code: c.code, Env: c.env})
			status := ""
			if failed != nil {
				status = failed.Value
			}
			if stdout != c.stdout || stderr != c.stderr || status != c.status || (end.Outcome == agentapi.OutcomeOK) != (status == "") {
				t.Errorf("%q %q %+v %+v", stdout, stderr, failed, end)
			}
		})
	}
	t.Run("a syntax error is told and harms nothing", func(t *testing.T) {
		if _, stderr, failed, _ := h.told(t, agentapi.RunParams{Code: "echo 'open"}); failed == nil || !strings.Contains(stderr, "unexpected EOF") {
			t.Errorf("%q %+v", stderr, failed)
		}
		if stdout, _, _, _ := h.told(t, agentapi.RunParams{Code: "f 1"}); stdout != "f 1\n" {
			t.Errorf("%q", stdout)
		}
	})
	t.Run("the directory of a cell", func(t *testing.T) {
		if stdout, _, _, _ := h.told(t, agentapi.RunParams{Code: "pwd", Cwd: "/usr/bin"}); stdout != "/usr/bin\n" {
			t.Errorf("%q", stdout)
		}
		if stdout, _, _, _ := h.told(t, agentapi.RunParams{Code: "pwd"}); stdout != "/tmp\n" {
			t.Errorf("%q", stdout)
		}
	})
}

func TestShellInterrupt(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	h.startShell(t, "")
	h.told(t, agentapi.RunParams{Code: "kept=1"})
	for _, code := range []string{"echo go; sleep 100; echo not", "echo go; while :; do :; done", "echo go; while :; do sleep 0.1; done; echo not"} {
		ctx, cancel := context.WithCancel(t.Context())
		s, err := h.Run(ctx, agentapi.RunParams{Kernel: "b", Code: code})
		if err != nil {
			t.Fatal(err)
		}
		for e, err := range s.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == agentapi.EventStdout {
				break
			}
		}
		s.Close()
		cancel()
		begun := time.Now()
		if stdout, _, _, end := h.told(t, agentapi.RunParams{Code: "echo $kept"}); strings.TrimSpace(stdout) != "1" || end.Outcome != agentapi.OutcomeOK || time.Since(begun) > time.Minute {
			t.Errorf("after %q: %q %+v after %v", code, stdout, end, time.Since(begun))
		}
	}
	t.Run("a cell that takes no interrupt is not the kernel's end", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s, err := h.Run(ctx, agentapi.RunParams{Kernel: "b", Code: "trap '' INT; echo go; sleep 4; trap - INT; echo done"})
		if err != nil {
			t.Fatal(err)
		}
		var told strings.Builder
		var end *agentapi.End
		for e, err := range s.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == agentapi.EventStdout {
				told.Write(e.Data)
				if told.String() == "go\n" {
					for range 3 { // more often than it is insisted, which takes a second and a half
						if err := h.Interrupt(t.Context(), agentapi.KernelParams{Kernel: "b"}); err != nil {
							t.Error(err)
						}
						time.Sleep(900 * time.Millisecond)
					}
				}
			}
			if e.End != nil {
				end = e.End
			}
		}
		if told.String() != "go\ndone\n" || end == nil || end.Lost {
			t.Errorf("%q %+v", told.String(), end)
		}
	})
	t.Run("exit ends it and is told", func(t *testing.T) {
		if stdout, _, _, end := h.told(t, agentapi.RunParams{Code: "echo last; exit 3"}); stdout != "last\n" || end.Outcome != agentapi.OutcomeKernelDied || !strings.Contains(end.Message, "status 3") {
			t.Errorf("%q %+v", stdout, end)
		}
		h.startShell(t, "")
		if stdout, _, _, _ := h.told(t, agentapi.RunParams{Code: "echo [$kept]"}); stdout != "[]\n" {
			t.Errorf("%q", stdout)
		}
	})
	t.Run("it can be stopped while something of it lives on", func(t *testing.T) {
		h.told(t, agentapi.RunParams{Code: "(sleep 100; :) >/dev/null 2>&1 &"})
		if err := h.KernelStop(t.Context(), agentapi.KernelParams{Kernel: "b"}); err != nil {
			t.Error(err)
		}
	})
}

func TestLanguagesThatAreNotThere(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a", Kernel: absolute(t, "testdata/kernel.py"), Env: map[string]string{"PATH": "/nowhere"}})
	for language, says := range map[string]string{
		"r": "has no Rscript", "java": "has no java", "cobol": "no kernel for the language", "javascript": "has no node", "bash": "has no bash", "python": "has no python3",
	} {
		_, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "x", Language: language})
		if !fault.Is(err, fault.Unsupported) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", language, err)
		}
	}
}
