package e2e_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// The rows of the acceptance list that concern the core: their ids are in the tests' names, and docs/acceptance.md shows all of them.

func TestS0_10_ANewSandboxIsClean(t *testing.T) {
	s := sharedServer(t)
	first := s.create(t, client.CreateRequest{})
	second := s.create(t, client.CreateRequest{})
	for i, sb := range []*sandbox{first, second} {
		sb.value(fmt.Sprintf("mine = %d; open('/tmp/mine', 'w').write(str(mine)); open('mine', 'w').write(str(mine))", i))
	}
	for i, sb := range []*sandbox{first, second} {
		if got := sb.value("mine, open('/tmp/mine').read(), open('mine').read()"); got != fmt.Sprintf("(%d, '%d', '%d')", i, i, i) {
			t.Errorf("sandbox %d says %s", i, got)
		}
	}
	first.kill()
	if got := s.create(t, client.CreateRequest{}).value("import os; 'mine' in globals(), os.listdir('/tmp'), os.path.exists('mine')"); got != "(False, [], False)" {
		t.Errorf("a new sandbox begins with %s", got)
	}
}

func TestNothingOutlivesItsCaller(t *testing.T) {
	slow.Test(t)
	s := sharedServer(t)
	mark := map[string]string{"test": t.Name()}
	living := func() (n int) {
		for _, err := range s.List(t.Context(), client.ListRequest{States: []string{"starting", "running", "stopping"}, Metadata: mark}) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		return n
	}
	t.Run("S0.16 a client that is gone costs a sandbox no longer than its lifetime", func(t *testing.T) {
		c, err := client.New(s.url, s.key)
		if err != nil {
			t.Fatal(err)
		}
		sb, err := c.Create(t.Context(), client.CreateRequest{TimeoutSeconds: 20, Metadata: mark}) // a start is not slower
		c.Close()
		if err != nil {
			t.Fatal(err)
		}
		if info := s.ended(t, sb.ID); info.Cause != "expired" {
			t.Errorf("it ended by %q", info.Cause)
		}
	})
	t.Run("S0.73 a kill after a failure ends it, and once more is no error", func(t *testing.T) {
		sb := s.create(t, client.CreateRequest{Metadata: mark})
		if out := sb.cell("1 / 0"); out.Outcome != client.OutcomeError || out.Error == nil || out.Error.Name != "ZeroDivisionError" {
			t.Errorf("got %+v", out)
		}
		sb.kill()
		sb.kill()
		if info := s.after(t, sb.ID); info.State != "ended" || info.Cause != "killed" {
			t.Errorf("it is %+v", info)
		}
	})
	t.Run("S1.54 between the runs there is no sandbox", func(t *testing.T) {
		if n := living(); n != 0 {
			t.Errorf("%d sandboxes live", n)
		}
	})
}

func TestS0_32_S4_40_S4_41_StateStays(t *testing.T) {
	sb := sharedServer(t).create(t, client.CreateRequest{})
	sb.cell("a = 1\nimport json as j\ndef f(x): return x + a")
	sb.cell("a += 2\nopen('data.txt', 'w').write('by a cell')")
	if got := sb.value("a, f(1), j.dumps([1]), open('data.txt').read()"); got != "(3, 4, '[1]', 'by a cell')" {
		t.Errorf("cells say %s", got)
	}
	if got := sb.sh("cat data.txt"); got != "by a cell" {
		t.Errorf("a command reads %q", got)
	}
	if got, err := sb.Files().Read(t.Context(), "data.txt"); err != nil || string(got) != "by a cell" {
		t.Errorf("the file API reads %q, %v", got, err)
	}
}

// wheel makes a package and an index of it in the sandbox, and serves that there: no other place is needed.
const wheel = `
import os, zipfile, subprocess, time, urllib.request
os.makedirs("/tmp/index/simple/covetest", exist_ok=True)
with zipfile.ZipFile("/tmp/index/simple/covetest/covetest-1.0-py3-none-any.whl", "w") as z:
    z.writestr("covetest.py", "answer = 42\n")
    z.writestr("covetest-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: covetest\nVersion: 1.0\n")
    z.writestr("covetest-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: cove\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr("covetest-1.0.dist-info/RECORD", "")
open("/tmp/index/simple/covetest/index.html", "w").write('<a href="covetest-1.0-py3-none-any.whl">covetest-1.0-py3-none-any.whl</a>')
server = subprocess.Popen(["python3", "-m", "http.server", "8765", "--bind", "127.0.0.1", "-d", "/tmp/index"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
for _ in range(500):
    try: urllib.request.urlopen("http://127.0.0.1:8765/simple/covetest/"); break
    except OSError: time.sleep(0.02)
`

func TestPipByAnIndex(t *testing.T) {
	s := sharedServer(t)
	for claim, install := range map[string]func(sb *sandbox) *client.Output{
		"S0.33 S0.34 in a bare cell": func(sb *sandbox) *client.Output {
			return sb.cell("pip install --index-url http://127.0.0.1:8765/simple covetest")
		},
		"S0.33 S0.34 in a %pip cell": func(sb *sandbox) *client.Output {
			return sb.cell("%pip install --index-url http://127.0.0.1:8765/simple covetest")
		},
		"S0.34 by the environment": func(sb *sandbox) *client.Output {
			return sb.exec(client.ExecRequest{Command: "pip install covetest", Env: map[string]string{"PIP_INDEX_URL": "http://127.0.0.1:8765/simple"}})
		},
	} {
		t.Run(claim, func(t *testing.T) {
			sb := s.create(t, client.CreateRequest{Network: &client.Network{Mode: "none"}})
			sb.cell(wheel)
			if out := install(sb); out.Outcome != client.OutcomeOK || !strings.Contains(out.Stdout, "Successfully installed covetest-1.0") {
				t.Fatalf("pip: %s\n%s%s", out.Outcome, out.Stdout, out.Stderr)
			}
			if got := sb.value("import covetest; covetest.answer"); got != "42" {
				t.Errorf("the package says %s", got)
			}
			if got := sb.sh("python3 -c 'import covetest; print(covetest.answer)'"); got != "42" {
				t.Errorf("to a command the package says %s", got)
			}
		})
	}
	t.Run("S0.35 what was installed is gone with its sandbox", func(t *testing.T) {
		if out := s.create(t, client.CreateRequest{}).cell("import covetest"); out.Error == nil || out.Error.Name != "ModuleNotFoundError" {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("S0.34 without a network it fails soon and says so", func(t *testing.T) {
		sb := s.create(t, client.CreateRequest{Network: &client.Network{Mode: "none"}})
		begun := time.Now()
		out := sb.exec(client.ExecRequest{Command: "pip install --retries 0 --timeout 5 covetest-from-nowhere", TimeoutSeconds: 50})
		if out.Outcome != client.OutcomeError || out.ExitCode == 0 || !strings.Contains(out.Stdout+out.Stderr, "covetest-from-nowhere") {
			t.Errorf("it ended %s after %v: %s%s", out.Outcome, time.Since(begun), out.Stdout, out.Stderr)
		}
	})
}

func TestS0_36_S0_37_S0_71_S3_17_TheInsideOfASandbox(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{})
	for _, tool := range []string{"python3 --version", "python --version", "pip --version", "git --version", "curl --version", "sudo id -u", "bash --version"} {
		if out := sb.exec(client.ExecRequest{Command: tool}); out.Outcome != client.OutcomeOK || out.Stdout == "" {
			t.Errorf("%s: %s %s%s", tool, out.Outcome, out.Stdout, out.Stderr)
		}
	}
	if a, b := sb.sh("python --version"), sb.sh("python3 --version"); a != b {
		t.Errorf("S3.17: python is %s, python3 is %s", a, b)
	}
	if got := sb.value("import numpy, pandas, matplotlib; 1"); got != "1" {
		t.Errorf("S0.36: got %s", got)
	}
	if got := sb.value("import pandas as pd\nlen(pd.DataFrame({'d': pd.date_range('2024-01', periods=12, freq='M')}))"); got != "12" {
		t.Errorf("S0.37: the cell says %s", got)
	}
	if got := sb.value("import os, sys, site\n(site.getusersitepackages() if hasattr(site, 'getusersitepackages') else '') in sys.path"); got != "True" {
		t.Errorf("the user's packages are on a kernel's path: %s", got)
	}
	out := sb.exec(client.ExecRequest{Command: "id -un; id -u; ps -e -o pid= | wc -l; sudo sh -c 'id -u; grep CapEff /proc/self/status'"})
	words := strings.Fields(out.Stdout)
	if len(words) < 6 || words[0] != "user" || words[1] != "1000" || words[3] != "0" || words[5] == "000001ffffffffff" {
		t.Errorf("S0.71: the sandbox says %q %q", out.Stdout, out.Stderr)
	}
}

func TestS0_53_S0_54_S0_60_S4_46_S4_47_TimeLimits(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{})
	sb.value("x = 1")
	for claim, c := range map[string]struct {
		code    string
		seconds float64
		lost    bool
	}{
		"a busy loop":        {"while True: pass", 0.5, false},
		"a sleep":            {"import time\ntime.sleep(4000)", 0.5, false},
		"a child":            {"import subprocess\nsubprocess.run(['sleep', '4000'])", 0.5, false},
		"one that catches":   {"while True:\n  try:\n    while True: pass\n  except BaseException: pass", 5, true}, // it is in the loop by then
		"one in native code": {"import ctypes\nctypes.CDLL(None).pause()", 0.5, false},
	} {
		t.Run(claim, func(t *testing.T) {
			sb := &sandbox{t, sb.Sandbox}
			begun := time.Now()
			out := sb.run(client.RunRequest{Code: c.code, TimeoutSeconds: c.seconds})
			if took := time.Since(begun); took > time.Minute {
				t.Errorf("it took %v", took)
			}
			if out.Outcome != client.OutcomeTimeout || out.Message == "" || c.lost && !out.Lost {
				t.Errorf("it ended %+v", out.End)
			}
			next := sb.cell("print(globals().get('x', 'lost'))")
			if want := map[bool]string{true: "lost", false: "1"}[out.Lost]; strings.TrimSpace(next.Stdout) != want {
				t.Errorf("lost is %t, and the next cell says %q", out.Lost, next.Stdout)
			}
			sb.value("x = 1")
		})
	}
}

func TestS4_45_MemoryIsLimited(t *testing.T) {
	s := sharedServer(t)
	for claim, code := range map[string]string{
		"S0.57 an array of 80 GB that is touched": "import numpy as np\na = np.ones((100000, 100000))",
		"S0.57 an array of 80 GB that is not":     "import numpy as np\na = np.zeros((100000, 100000))",
		"S0.59 a leak":                            "leak = []\nwhile True: leak.append(bytearray(1 << 20))",
	} {
		t.Run(claim, func(t *testing.T) {
			sb := s.create(t, client.CreateRequest{Limits: &client.Limits{MemoryBytes: 256 << 20}})
			memory := s.memory(t)
			out := sb.cell(code)
			if grown := s.memory(t) - memory; grown > 1<<30 {
				t.Errorf("the server and its sandboxes use %d MiB more", grown>>20)
			}
			switch {
			case out.Error != nil && strings.Contains(out.Error.Name, "MemoryError"):
			case out.Outcome == client.OutcomeOOM && out.Lost && strings.Contains(out.Message, "memory"): // S0.58
			case strings.HasSuffix(claim, "not") && out.Outcome == client.OutcomeOK: // nothing of it was ever used
			default:
				t.Errorf("it ended %+v %+v", out.End, out.Error)
			}
			if got := sb.value("1 + 1"); got != "2" {
				t.Errorf("the next cell says %s", got)
			}
		})
	}
	t.Run("S0.58 a command's end names the victim", func(t *testing.T) {
		sb := s.create(t, client.CreateRequest{Limits: &client.Limits{MemoryBytes: 256 << 20}})
		out := sb.exec(client.ExecRequest{Argv: []string{"python3", "-c", "x = [bytearray(1 << 20) for _ in range(4096)]"}})
		if out.Outcome != client.OutcomeOOM || !strings.Contains(out.Message, "memory") || !strings.Contains(out.Message, "python3") {
			t.Errorf("it ended %+v", out.End)
		}
	})
}

func TestS0_70_S2_7_S2_8_S2_10_Environment(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{Env: map[string]string{"FOO": "of the sandbox"}})
	const dump = "import os; print(sorted(f'{k}={v}' for k, v in os.environ.items()))"
	for claim, out := range map[string]*client.Output{
		"a cell":         sb.cell(dump),
		"a command":      sb.exec(client.ExecRequest{Argv: []string{"python3", "-c", dump}}),
		"root's command": sb.exec(client.ExecRequest{Argv: []string{"sudo", "python3", "-c", dump}}),
	} {
		for _, secret := range []string{hostSecret, "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "PYTHONPATH", "COVE_API_KEY"} {
			if out.Outcome != client.OutcomeOK || strings.Contains(out.Stdout, secret) {
				t.Errorf("S2.7, S2.8: %s sees %s: %s", claim, secret, out.Stdout)
			}
		}
		if claim != "root's command" && !strings.Contains(out.Stdout, "FOO=of the sandbox") {
			t.Errorf("%s does not see its own: %s", claim, out.Stdout)
		}
	}
	out := sb.exec(client.ExecRequest{Argv: []string{"/usr/bin/env"}, CleanEnv: true, Env: map[string]string{"BAR": "1", "PATH": "/usr/bin:/bin"}})
	for line := range strings.Lines(out.Stdout) {
		if name, _, _ := strings.Cut(line, "="); name != "BAR" && name != "PATH" && name != "COVE_RUN" {
			t.Errorf("S2.10: a clean environment holds %q", line)
		}
	}
	if !strings.Contains(out.Stdout, "BAR=1\n") {
		t.Errorf("S2.10: a clean environment is %q", out.Stdout)
	}
	if got := sb.run(client.RunRequest{Code: "import os; os.environ['ONCE'], os.getcwd()", Env: map[string]string{"ONCE": "yes"}, Cwd: "/tmp"}).Text(); got != "('yes', '/tmp')" {
		t.Errorf("a cell with its own environment says %s", got)
	}
	if got := sb.value("os.environ.get('ONCE'), os.getcwd()"); got != "(None, '/home/user')" {
		t.Errorf("the cell after it says %s", got)
	}
}

func TestS0_56_S0_76_LimitsAreTheCallers(t *testing.T) {
	sb := sharedServer(t).create(t, client.CreateRequest{Limits: &client.Limits{CPUs: 0.5, MemoryBytes: 256 << 20, Pids: 64, OpenFiles: 128}})
	if sb.Limits.CPUs != .5 || sb.Limits.MemoryBytes != 256<<20 || sb.Limits.Pids != 64 || sb.Limits.OpenFiles != 128 {
		t.Errorf("it was given %+v", sb.Limits)
	}
	if got := sb.value("import resource; resource.getrlimit(resource.RLIMIT_NOFILE)[0]"); got != "128" {
		t.Errorf("a cell may open %s files", got)
	}
	before, err := sb.SandboxUsage(t)
	begun := time.Now()
	sb.exec(client.ExecRequest{Command: "timeout 1 sh -c 'while :; do :; done'"})
	after, err2 := sb.SandboxUsage(t)
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	used, wall := time.Duration(after.CPUMS-before.CPUMS)*time.Millisecond, time.Since(begun)
	if used > wall*3/4+100*time.Millisecond {
		t.Errorf("half a CPU was %v in %v", used, wall)
	}
}

// SandboxUsage is what it uses now.
func (s *sandbox) SandboxUsage(t *testing.T) (client.SandboxUsage, error) {
	return s.Usage(t.Context())
}

func TestS0_82_TwoSandboxesOfATemplateAreTheSame(t *testing.T) {
	s := sharedServer(t)
	var said []string
	for range 2 {
		said = append(said, s.create(t, client.CreateRequest{}).sh("pip freeze --all; python3 -VV"))
	}
	if said[0] != said[1] || !strings.Contains(said[0], "pandas==") {
		t.Errorf("one says\n%s\nthe other\n%s", said[0], said[1])
	}
}

func TestACommandThatTakesTooLong(t *testing.T) {
	s := sharedServer(t)
	for claim, line := range map[string]string{
		"S2.11 S2.12 S2.13 is ended in time, with what it said":  "echo before; sleep 4001",
		"S2.14 is ended though it ignores being asked":           "echo before; trap '' TERM INT HUP; while :; do sleep 4001; done",
		"S1.31 S2.15 is ended with its children":                 "echo before; sleep 4001 & (sleep 4001 & sleep 4001) & wait",
		"S1.31 S2.15 is ended with children that ran away":       "echo before; setsid -f sh -c 'sleep 4001; true'; nohup setsid sleep 4001 & wait; sleep 4001",
		"S1.31 S2.15 is ended though it leads its own session":   "echo before; exec setsid bash -c 'sleep 4001 & sleep 4001; true'",
		"S1.31 S2.15 is ended with children of a changed parent": "echo before; python3 -c 'import os,time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.execvp(\"sleep\", [\"sleep\", \"4001\"])\n  os._exit(0)\ntime.sleep(4001)'",
	} {
		t.Run(claim, func(t *testing.T) {
			t.Parallel()
			sb := s.create(t, client.CreateRequest{})
			begun := time.Now()
			out := sb.exec(client.ExecRequest{Argv: []string{"bash", "-c", line}, TimeoutSeconds: 30}) // the shell starts within that
			if took := time.Since(begun); took > 90*time.Second {
				t.Errorf("it took %v", took)
			}
			if out.Outcome != client.OutcomeTimeout || out.ExitCode != -1 || out.Stdout != "before\n" {
				t.Errorf("it ended %+v and said %q", out.End, out.Stdout)
			}
			if got := sb.sh("pgrep -x sleep -a || echo none"); got != "none" {
				t.Errorf("what is left: %s", got)
			}
		})
	}
}

func TestSnippets(t *testing.T) {
	sb := sharedServer(t).create(t, client.CreateRequest{})
	snippet := func(t *testing.T, code string, limits client.RunLimits) *client.Output {
		sb := &sandbox{t, sb.Sandbox}
		return sb.exec(client.ExecRequest{Argv: []string{"python3", "-"}, Stdin: code, TimeoutSeconds: 20, Limits: &limits})
	}
	t.Run("S2.5 it prints", func(t *testing.T) {
		if out := snippet(t, "print(2 ** 10)", client.RunLimits{}); out.ExitCode != 0 || out.Stdout != "1024\n" {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("S2.6 a cell may be indented as a whole", func(t *testing.T) {
		out := (&sandbox{t, sb.Sandbox}).cell("    y = 1\n    print(y + 1)\n")
		if out.Outcome != client.OutcomeOK || out.Stdout != "2\n" {
			t.Errorf("got %+v %+v", out.End, out.Error)
		}
	})
	t.Run("S2.16 CPU time is limited apart from wall time", func(t *testing.T) {
		out := snippet(t, "while True: pass", client.RunLimits{CPUSeconds: 1})
		if out.Outcome == client.OutcomeTimeout || out.Outcome == client.OutcomeOK || out.ExitCode == 0 {
			t.Errorf("it ended %+v", out.End)
		}
	})
	t.Run("S2.17 S2.19 memory is limited for each run", func(t *testing.T) {
		const code = "x = bytearray(200 << 20); print(len(x))"
		if out := snippet(t, code, client.RunLimits{MemoryBytes: 128 << 20}); out.ExitCode == 0 || !strings.Contains(out.Stderr, "MemoryError") {
			t.Errorf("with a limit: %+v", out)
		}
		if out := snippet(t, code, client.RunLimits{}); out.ExitCode != 0 {
			t.Errorf("without: %+v", out)
		}
	})
	t.Run("S2.18 open files are limited", func(t *testing.T) {
		out := snippet(t, "f = [open('/dev/null') for _ in range(40)]", client.RunLimits{OpenFiles: 32})
		if out.ExitCode == 0 || !strings.Contains(out.Stderr, "Too many open files") {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("S2.20 nothing is carried over", func(t *testing.T) {
		snippet(t, "z = 1", client.RunLimits{})
		if out := snippet(t, "print(z)", client.RunLimits{}); out.ExitCode != 1 || !strings.Contains(out.Stderr, "NameError") {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("S2.21 the code is in no command line and in no file", func(t *testing.T) {
		out := snippet(t, "import glob, os\nsecret = 'sesame' * 2\nprint([p for p in glob.glob('/proc/[0-9]*/cmdline') if b'sesamesesame' in open(p, 'rb').read() or b'secret =' in open(p, 'rb').read()], os.listdir('/tmp'))", client.RunLimits{})
		if out.Stdout != "[] []\n" {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("S2.23 exit codes and signals are told", func(t *testing.T) {
		if out := snippet(t, "import sys; sys.exit(3)", client.RunLimits{}); out.ExitCode != 3 || out.Signal != "" {
			t.Errorf("got %+v", out.End)
		}
		if out := snippet(t, "import os; os.kill(os.getpid(), 11)", client.RunLimits{}); out.ExitCode != -1 || out.Signal != "SIGSEGV" {
			t.Errorf("got %+v", out.End)
		}
	})
}

func TestS4_30_S4_31_AKeyPinsASandbox(t *testing.T) {
	s := sharedServer(t)
	key := func(k string) client.CreateRequest { return client.CreateRequest{Key: "pin-" + k} }
	a := s.create(t, key("a"))
	a.value("x = 'of a'")
	again, b := s.create(t, key("a")), s.create(t, key("b"))
	if again.ID != a.ID || b.ID == a.ID {
		t.Errorf("a is %s, again %s, b %s", a.ID, again.ID, b.ID)
	}
	if got := again.value("x"); got != "'of a'" {
		t.Errorf("x is %s", got)
	}
	if got := b.value("'x' in globals()"); got != "False" {
		t.Errorf("b sees a's variables: %s", got)
	}
	t.Run("S4.38 a dead one is replaced", func(t *testing.T) {
		kill(t, s.initOf(t, a))
		var fresh *sandbox
		eventually(t, "another has its key", 2*time.Minute, func() bool {
			fresh = s.create(t, key("a"))
			return fresh.ID != a.ID
		})
		if got := fresh.value("'x' in globals()"); got != "False" {
			t.Errorf("the new one has old variables: %s", got)
		}
		if info := s.ended(t, a.ID); info.Cause != "agent_died" {
			t.Errorf("the old one ended by %q", info.Cause)
		}
	})
}

func TestS0_22_S4_49_WhatARunSaysIsCaptured(t *testing.T) {
	sb := sharedServer(t).create(t, client.CreateRequest{})
	out := sb.cell("import os, sys, subprocess\nprint('out')\nprint('err', file=sys.stderr)\nsubprocess.run(['echo', 'child'])\nos.write(1, b'raw\\n')\n6 * 7")
	if out.Outcome != client.OutcomeOK || out.Text() != "42" || out.Stderr != "err\n" {
		t.Errorf("got %+v", out)
	}
	for _, line := range []string{"out\n", "child\n", "raw\n"} {
		if !strings.Contains(out.Stdout, line) {
			t.Errorf("%q is not in %q", line, out.Stdout)
		}
	}
}
