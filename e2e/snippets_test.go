package e2e_test

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// snippet runs code, whatever it says.
func (s *server) snippet(t *testing.T, req client.SnippetRequest) client.SnippetResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := s.Snippet(ctx, req)
	if err != nil {
		t.Fatalf("snippet %.60q: %v", req.Code, err)
	}
	return *out
}

// varies is what no test can know beforehand.
var varies = cmpopts.IgnoreFields(client.SnippetResult{}, "Sandbox", "Usage", "Message")

func TestSnippetsEnd(t *testing.T) {
	s := sharedServer(t)
	for claim, test := range map[string]struct {
		req  client.SnippetRequest
		want client.SnippetResult
	}{
		"S2.3 S2.5 it prints":               {client.SnippetRequest{Code: "print(2 ** 10)"}, client.SnippetResult{Stdout: "1024\n"}},
		"S2.6 it may be indented":           {client.SnippetRequest{Code: "\n    x = 1\n    if x:\n        print('in')\n"}, client.SnippetResult{Stdout: "in\n"}},
		"S2.22 bytes that are no text":      {client.SnippetRequest{Code: "import os; os.write(1, b'a\\xffb')"}, client.SnippetResult{Stdout: "a\uFFFDb"}},
		"S2.23 a status":                    {client.SnippetRequest{Code: "import sys; sys.exit(3)"}, client.SnippetResult{ExitCode: 3}},
		"S2.23 a signal":                    {client.SnippetRequest{Code: "import os; os.kill(os.getpid(), 11)"}, client.SnippetResult{ExitCode: -11, Signal: "SIGSEGV"}},
		"S2.12 S2.13 what came before":      {client.SnippetRequest{Code: "print('before', end='')\nwhile True: pass", TimeoutSeconds: 10, CPUSeconds: 60}, client.SnippetResult{ExitCode: -1, TimedOut: true, Signal: "SIGKILL", Stdout: "before"}},
		"S2.16 processor time":              {client.SnippetRequest{Code: "while True: pass", CPUSeconds: 1, TimeoutSeconds: 30}, client.SnippetResult{ExitCode: -24, Signal: "SIGXCPU"}},
		"its stdin is empty":                {client.SnippetRequest{Code: "import sys; print(repr(sys.stdin.read()))"}, client.SnippetResult{Stdout: "''\n"}},
		"it is the main module":             {client.SnippetRequest{Code: "class A: pass\nimport pickle\nprint(__name__, type(pickle.loads(pickle.dumps(A()))) is A)"}, client.SnippetResult{Stdout: "__main__ True\n"}},
		"S1.47 much code":                   {client.SnippetRequest{Code: "x = '" + strings.Repeat("y", 1<<20) + "'\nprint(len(x))"}, client.SnippetResult{Stdout: "1048576\n"}},
		"no code at all":                    {client.SnippetRequest{}, client.SnippetResult{}},
		"more output than an answer can be": {client.SnippetRequest{Code: "print('\u00e9' * (1 << 20))"}, client.SnippetResult{Stdout: strings.Repeat("\u00e9", 1<<19), Truncated: true}},
	} {
		t.Run(claim, func(t *testing.T) {
			if diff := cmp.Diff(test.want, s.snippet(t, test.req), varies); diff != "" {
				t.Errorf("-want +got:\n%.2000s", diff)
			}
		})
	}
}

func TestSnippetsTellWhatWentWrong(t *testing.T) {
	s := sharedServer(t)
	out := s.snippet(t, client.SnippetRequest{Code: "  def f():\n      return 1 / 0\n  f()"})
	// Which part of a line failed is marked by some versions of Python only.
	said := regexp.MustCompile(`(?m)^[ ~^]+\n`).ReplaceAllString(out.Stderr, "")
	const want = `Traceback (most recent call last):
  File "<snippet>", line 3, in <module>
    f()
  File "<snippet>", line 2, in f
    return 1 / 0
ZeroDivisionError: division by zero
`
	if out.ExitCode != 1 || said != want {
		t.Errorf("it says %d:\n%s", out.ExitCode, out.Stderr)
	}
	out = s.snippet(t, client.SnippetRequest{Code: "x = ("})
	if out.ExitCode != 1 || !strings.HasPrefix(out.Stderr, "  File \"<snippet>\", line 1\n    x = (\n") {
		t.Errorf("it says %d:\n%s", out.ExitCode, out.Stderr)
	}
	t.Run("S2.66 a module that is missing", func(t *testing.T) {
		if out := s.snippet(t, client.SnippetRequest{Code: "import no_such_module"}); out.ExitCode != 1 || !strings.Contains(out.Stderr, "ModuleNotFoundError: No module named 'no_such_module'") {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("S2.66 too little memory for Python itself", func(t *testing.T) {
		out := s.snippet(t, client.SnippetRequest{Code: "print(1)", MemoryMB: 4})
		if out.ExitCode == 0 || !strings.Contains(out.Message, "4 MB of memory may be too little for Python itself") {
			t.Errorf("got %+v", out)
		}
	})
}

func TestSnippetsEnvironment(t *testing.T) {
	s := sharedServer(t)
	const dump = "import os; print(sorted(os.environ.items()))"
	for claim, test := range map[string]struct {
		env  map[string]string
		want string
	}{
		"S2.7 S2.8 S2.9 nothing is invented": {nil, "[]\n"},
		"S2.10 what is given is all there is": {
			map[string]string{"FOO": "1", "PATH": "/nowhere", "HOME": "/root", "LANG": "C.UTF-8"},
			"[('FOO', '1'), ('HOME', '/root'), ('LANG', 'C.UTF-8'), ('PATH', '/nowhere')]\n",
		},
	} {
		t.Run(claim, func(t *testing.T) {
			if out := s.snippet(t, client.SnippetRequest{Code: dump, Env: test.env}); out.Stdout != test.want || out.ExitCode != 0 {
				t.Errorf("got %+v", out)
			}
		})
	}
}

func TestSnippetsAreStopped(t *testing.T) {
	s := sharedServer(t)
	t.Run("S2.11 S2.14 promptly, whatever they do about it", func(t *testing.T) {
		const code = "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\ntime.sleep(60)"
		begun := time.Now()
		out := s.snippet(t, client.SnippetRequest{Code: code, TimeoutSeconds: 2})
		if took := time.Since(begun); !out.TimedOut || out.ExitCode != -1 || took < 2*time.Second || took > 50*time.Second {
			t.Errorf("after %v: %+v", took, out)
		}
	})
	t.Run("S2.15 with all that they started, also in a sandbox that goes on", func(t *testing.T) {
		sb := s.create(t, client.CreateRequest{})
		const code = "import subprocess, time\nsubprocess.Popen(['sleep', '12321'], start_new_session=True, env={})\nsubprocess.Popen(['sleep', '12321'])\ntime.sleep(60)"
		if out := s.snippet(t, client.SnippetRequest{Code: code, TimeoutSeconds: 1, Sandbox: sb.ID}); !out.TimedOut || out.Sandbox != sb.ID {
			t.Errorf("got %+v", out)
		}
		if left := sb.sh("pgrep -f 'sleep 1232[1]' || true"); left != "" {
			t.Errorf("processes are left: %s", left)
		}
	})
	t.Run("a caller who leaves takes the sandbox with it", func(t *testing.T) {
		ctx, leave := context.WithTimeout(t.Context(), 2*time.Second)
		defer leave()
		if out, err := s.Snippet(ctx, client.SnippetRequest{Code: "import time; time.sleep(60)", TimeoutSeconds: 60}); err == nil {
			t.Errorf("got %+v", out)
		}
		s.noSnippets(t)
	})
}

// noSnippets waits until no sandbox of a snippet lives.
func (s *server) noSnippets(t *testing.T) {
	t.Helper()
	eventually(t, "the sandboxes of snippets have ended", 2*time.Minute, func() bool {
		ask := client.ListRequest{States: []string{"starting", "running", "paused", "stopping"}, Metadata: map[string]string{"cove": "snippet"}}
		for _, err := range s.List(t.Context(), ask) {
			if err != nil {
				t.Fatal(err)
			}
			return false
		}
		return true
	})
}

func TestSnippetsAreLimited(t *testing.T) {
	slow.Test(t)
	s := sharedServer(t)
	t.Run("S2.17 S2.19 memory, for each", func(t *testing.T) {
		const code = "x = bytearray(200 << 20); print(len(x))"
		if out := s.snippet(t, client.SnippetRequest{Code: code}); out.ExitCode != 1 || !strings.Contains(out.Stderr, "MemoryError") {
			t.Errorf("by default: %+v", out)
		}
		if out := s.snippet(t, client.SnippetRequest{Code: code, MemoryMB: 400}); out.ExitCode != 0 || out.Stdout != "209715200\n" {
			t.Errorf("with 400 MB: %+v", out)
		}
	})
	t.Run("S2.18 S2.19 open files, for each", func(t *testing.T) {
		const code = "f = [open('/dev/null') for _ in range(40)]; print(len(f))"
		if out := s.snippet(t, client.SnippetRequest{Code: code}); out.ExitCode != 1 || !strings.Contains(out.Stderr, "Too many open files") {
			t.Errorf("by default: %+v", out)
		}
		if out := s.snippet(t, client.SnippetRequest{Code: code, OpenFiles: 64}); out.Stdout != "40\n" {
			t.Errorf("with 64: %+v", out)
		}
	})
	t.Run("S2.56 many processes together are held by the sandbox", func(t *testing.T) {
		const code = `
import os, signal, time
for _ in range(30):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        for i in range(0, len(x), 4096):
            x[i] = 1
        time.sleep(60)
ends = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(10)]
print(ends == [-signal.SIGKILL] * 10)
`
		out := s.snippet(t, client.SnippetRequest{Code: code, TimeoutSeconds: 40})
		if out.Stdout != "True\n" && !out.OOM {
			t.Errorf("3 GB were had: %+v", out)
		}
	})
	t.Run("S2.55 S2.60 the network, unless it is asked for", func(t *testing.T) {
		const code = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
		closed := s.snippet(t, client.SnippetRequest{Code: code})
		if mode := s.after(t, closed.Sandbox).Network.Mode; closed.ExitCode != 1 || mode != "none" {
			t.Errorf("without, and with mode %s: %+v", mode, closed)
		}
		open := s.snippet(t, client.SnippetRequest{Code: "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('1.1.1.1', 53))", Network: true})
		if mode := s.after(t, open.Sandbox).Network.Mode; open.ExitCode != 0 || mode != "internet" {
			t.Errorf("with it, and with mode %s: %+v", mode, open)
		}
	})
}

func TestSnippetsLeaveNothing(t *testing.T) {
	s := sharedServer(t)
	t.Run("S2.20 S2.21 no state, no code in a command line, no file", func(t *testing.T) {
		const code = "import glob, os\nsecret = 'sesame' * 2\nopen('left', 'w').write('x')\n" +
			"def of(p):\n  try: return open(p, 'rb').read()\n  except OSError: return b''\n" +
			"print([p for p in glob.glob('/proc/[0-9]*/cmdline') if b'sesamesesame' in of(p) or b'secret =' in of(p)], os.listdir('/tmp'), 'other' in globals(), os.path.exists('left2'))\nother = 1\nopen('left2', 'w').write('x')"
		for range 2 {
			if out := s.snippet(t, client.SnippetRequest{Code: code}); out.Stdout != "[] [] False False\n" {
				t.Errorf("got %+v", out)
			}
		}
	})
	t.Run("their sandboxes end", func(t *testing.T) {
		out := s.snippet(t, client.SnippetRequest{Code: "print(1)"})
		if info := s.ended(t, out.Sandbox); info.Cause != "killed" {
			t.Errorf("it ended by %s", info.Cause)
		}
		s.noSnippets(t)
	})
	t.Run("a bad request makes none", func(t *testing.T) {
		for claim, req := range map[string]client.SnippetRequest{
			"a negative time":        {TimeoutSeconds: -1},
			"a negative limit":       {OpenFiles: -1},
			"a template of a living": {Sandbox: "sb", Template: "python"},
			"too much memory":        {MemoryMB: 1 << 40},
		} {
			if out, err := s.Snippet(t.Context(), req); client.KindOf(err) != client.Invalid {
				t.Errorf("%s: %+v, %v", claim, out, err)
			}
		}
		if _, err := s.Snippet(t.Context(), client.SnippetRequest{Code: "1", Template: "nobody-has-this"}); client.KindOf(err) != client.NotFound {
			t.Errorf("a template that is not there: %v", err)
		}
	})
}

func TestS2_61_SnippetsRunAtOnce(t *testing.T) {
	s := sharedServer(t)
	const n = 6
	begun := time.Now()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			out, err := s.Snippet(t.Context(), client.SnippetRequest{Code: fmt.Sprintf("import time; time.sleep(10); print(%d)", i), TimeoutSeconds: 60})
			if err != nil || out.Stdout != fmt.Sprintln(i) {
				t.Errorf("snippet %d: %+v, %v", i, out, err)
			}
		})
	}
	all.Wait()
	if took := time.Since(begun); took > n*10*time.Second {
		t.Errorf("%d of ten seconds took %v", n, took)
	}
}

// TestSnippetsAreQuick says what one costs, so that a change that makes it slow is seen.
func TestSnippetsAreQuick(t *testing.T) {
	s := sharedServer(t)
	var took, process []time.Duration
	for range 25 {
		begun := time.Now()
		out := s.snippet(t, client.SnippetRequest{Code: "print(1)"})
		took = append(took, time.Since(begun))
		process = append(process, time.Duration(out.Usage.WallMS*float64(time.Millisecond)))
	}
	slices.Sort(took)
	slices.Sort(process)
	t.Logf("median %v, fastest %v, slowest %v; of the process alone %v", took[len(took)/2], took[0], took[len(took)-1], process[len(process)/2])
	if took[len(took)/2] > 10*time.Second { // as if each started a server: a measure of speed is the benchmark's
		t.Errorf("the median is %v", took[len(took)/2])
	}
}
