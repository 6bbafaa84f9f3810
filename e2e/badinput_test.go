package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

func TestACreateThatCannotBeGrantedIsRefusedClearly(t *testing.T) {
	s := sharedServer(t)
	s.awaitDrained(t)
	before := len(s.inside())
	for claim, c := range map[string]struct {
		req   client.CreateRequest
		kind  client.Kind
		words string
	}{
		"an unknown template":            {client.CreateRequest{Template: "nope"}, client.NotFound, `"nope"`},
		"a template that is a path":      {client.CreateRequest{Template: "../../etc/passwd"}, client.NotFound, "template"},
		"negative CPUs":                  {client.CreateRequest{Limits: &client.Limits{CPUs: -1}}, client.Invalid, "cpus"},
		"more CPUs than the host has":    {client.CreateRequest{Limits: &client.Limits{CPUs: 100_000}}, client.Invalid, "cpus"},
		"too little memory":              {client.CreateRequest{Limits: &client.Limits{MemoryBytes: 1000}}, client.Invalid, "memory"},
		"more memory than the host has":  {client.CreateRequest{Limits: &client.Limits{MemoryBytes: 1 << 50}}, client.Invalid, "memory"},
		"no processes":                   {client.CreateRequest{Limits: &client.Limits{Pids: 1}}, client.Invalid, "pids"},
		"more disk than the host has":    {client.CreateRequest{Limits: &client.Limits{DiskBytes: 1 << 55}}, client.Invalid, "disk"},
		"a storage that there is not":    {client.CreateRequest{Storage: "floppy"}, client.Invalid, "floppy"},
		"a network mode that is not one": {client.CreateRequest{Network: &client.Network{Mode: "intranet"}}, client.Invalid, "intranet"},
		"a name in a network list":       {client.CreateRequest{Network: &client.Network{Mode: "list", Allow: []string{"example.com"}}}, client.Invalid, "example.com"},
		"an environment that is none":    {client.CreateRequest{Env: map[string]string{"A=B": "c"}}, client.Invalid, "A=B"},
		"a key that leads elsewhere":     {client.CreateRequest{Key: "../x"}, client.Invalid, "../x"}, // S4.52
		"a key that is a path":           {client.CreateRequest{Key: "/etc/passwd"}, client.Invalid, "/etc/passwd"},
		"a key with a line break":        {client.CreateRequest{Key: "a\nb"}, client.Invalid, "key"},
	} {
		t.Run(claim, func(t *testing.T) {
			sb, err := s.Create(t.Context(), c.req)
			if err == nil {
				_ = sb.Kill(t.Context())
			}
			expect(t, err, c.kind, c.words)
		})
	}
	eventually(t, "no process was made for them", 2*time.Minute, func() bool { return len(s.inside()) <= before })
}

// S0.3, S4.51
func TestS0_3_AWrongKeyIsRefusedBeforeAnythingIsMade(t *testing.T) {
	s := sharedServer(t)
	for claim, key := range map[string]string{"none": "", "another's": "e2b_" + strings.Repeat("0", 40), "not one at all": "ключ"} {
		c, err := client.New(s.url, key)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Create(t.Context(), client.CreateRequest{})
		c.Close()
		if claim == "not one at all" && err != nil && client.KindOf(err) == "" {
			continue // such a header never leaves the client
		}
		expect(t, err, client.Unauthed, "key")
	}
}

func TestARequestThatIsNotOneIsRefused(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{})
	for claim, c := range map[string]struct {
		method, path, body string
		status             int
	}{
		"half a JSON":          {"POST", "/sandboxes", `{"template": "py`, 400},
		"another JSON":         {"POST", "/sandboxes", `[1, 2]`, 400},
		"an unknown field":     {"POST", "/sandboxes", `{"templates": "python"}`, 400},
		"a body without end":   {"POST", "/sandboxes", `{"key": "` + strings.Repeat("x", 4<<20) + `"}`, 413},
		"no such path":         {"GET", "/nothing", "", 404},
		"no such sandbox":      {"GET", "/sandboxes/sbnone", "", 404},
		"an id that is a path": {"GET", "/sandboxes/..%2f..%2fetc", "", 404},
		"a bad kernel":         {"POST", "/sandboxes/" + sb.ID + "/run", `{"code": "1", "kernel": "../x"}`, 400},
		"no such kernel":       {"DELETE", "/sandboxes/" + sb.ID + "/kernels/nobody", "", 404},
		"nothing to run":       {"POST", "/sandboxes/" + sb.ID + "/exec", `{}`, 400},
	} {
		t.Run(claim, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), c.method, s.url+client.Prefix+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-API-Key", s.key)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var body bytes.Buffer
			_, _ = body.ReadFrom(resp.Body)
			if resp.StatusCode != c.status && !(c.status == 413 && resp.StatusCode == 400) || !strings.Contains(body.String(), `"message"`) {
				t.Errorf("got %d %.200s, want %d", resp.StatusCode, body.String(), c.status)
			}
		})
	}
	if got := sb.value("1 + 1"); got != "2" {
		t.Errorf("afterwards a cell says %s", got)
	}
}

func TestS0_66_S4_48_CodeThatHarmsItsOwnSandboxIsToldSo(t *testing.T) {
	s := sharedServer(t)
	for claim, c := range map[string]struct {
		code    string
		outcome string
		after   string // what x is in the next cell; it was 1
	}{
		"closes its own stdio":     {"import os\nfor fd in 0, 1, 2: os.close(fd)", client.OutcomeOK, "1"},
		"closes what is not its":   {"import os\nos.closerange(3, 1024)", "", ""},
		"kills PID 1":              {"import os\nos.kill(1, 9)", client.OutcomeError, "1"},
		"kills everything":         {"import os, subprocess\nsubprocess.Popen(['sleep', '99'])\nos.kill(-1, 9)", client.OutcomeOK, "1"},
		"exits":                    {"exit()", client.OutcomeKernelDied, "lost"}, // S4.48
		"exits without a word":     {"import os\nos._exit(3)", client.OutcomeKernelDied, "lost"},
		"crashes":                  {"import ctypes\nctypes.string_at(0)", client.OutcomeKernelDied, "lost"},
		"takes a signal":           {"import os\nos.kill(os.getpid(), 9)", client.OutcomeKernelDied, "lost"},
		"recurses without end":     {"def f(): f()\nf()", client.OutcomeError, "1"},
		"is no Python":             {"def (", client.OutcomeError, "1"},
		"holds a zero":             {"print('\x00')", "", "1"},
		"replaces its own streams": {"import sys\nsys.stdout = sys.stderr = None", client.OutcomeOK, "1"},
	} {
		t.Run(claim, func(t *testing.T) {
			sb := s.create(t, client.CreateRequest{})
			sb.value("x = 1")
			out := sb.cell(c.code)
			if c.outcome != "" && out.Outcome != c.outcome {
				t.Errorf("it ended %s: %s %+v", out.Outcome, out.Message, out.Error)
			}
			if out.Outcome == client.OutcomeKernelDied && (!out.Lost || out.Message == "") {
				t.Errorf("nobody is told that variables are lost: %+v", out.End)
			}
			next := sb.cell("print(globals().get('x', 'lost'))")
			got := strings.TrimSpace(next.Stdout)
			if next.Outcome != client.OutcomeOK || c.after != "" && got != c.after {
				t.Errorf("the next cell ended %s and said %q: %s %+v", next.Outcome, got, next.Message, next.Error)
			}
			if c.after == "lost" && len(next.Notices) == 0 {
				t.Error("the next cell has no notice of its new kernel")
			}
			if got := sb.sh("echo here"); got != "here" {
				t.Errorf("a command says %q", got)
			}
		})
	}
	t.Run("root inside kills PID 1", func(t *testing.T) {
		sb := s.create(t, client.CreateRequest{})
		sb.exec(client.ExecRequest{Command: "sudo kill -9 1; sudo kill -TERM 1; sudo kill -SEGV 1"})
		if got := sb.value("1 + 1"); got != "2" {
			t.Errorf("afterwards a cell says %s", got)
		}
	})
}

// S2.22
func TestOutputThatIsNotTextArrivesAsItWas(t *testing.T) {
	sb := sharedServer(t).create(t, client.CreateRequest{})
	raw := []byte("\xff\xfe caf\xc3\xa9 \x00\x80")
	for claim, out := range map[string]*client.Output{
		"command": sb.exec(client.ExecRequest{Argv: []string{"printf", `\377\376 caf\303\251 \0\200`}}),
		"cell":    sb.cell(`import sys; _ = sys.stdout.buffer.write(b"\xff\xfe caf\xc3\xa9 \x00\x80")`),
	} {
		if out.Outcome != client.OutcomeOK || !bytes.Equal(out.StdoutBase64, raw) || !strings.Contains(out.Stdout, "café") {
			t.Errorf("%s: %s %q, exactly %q", claim, out.Outcome, out.Stdout, out.StdoutBase64)
		}
	}
}

// TestAGigabyteOfOutput streams more than anybody keeps; COVE_E2E_FULL makes it a gigabyte.
func TestAGigabyteOfOutput(t *testing.T) {
	size := int64(200 << 20)
	if os.Getenv("COVE_E2E_FULL") != "" {
		size = 1 << 30
	}
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{Limits: &client.Limits{MemoryBytes: 256 << 20}})
	agent := s.initOf(t, sb)
	server := s.cmd.Process.Pid
	for claim, stream := range map[string]func(ctx context.Context) (n int64, outcome string, err error){
		"of a command": func(ctx context.Context) (int64, string, error) {
			return count(sb.ExecStream(ctx, client.ExecRequest{Command: fmt.Sprintf("yes 0123456789abcde | head -c %d", size)}))
		},
		"of a cell": func(ctx context.Context) (int64, string, error) {
			return count(sb.RunCode(ctx, client.RunRequest{Code: fmt.Sprintf("import sys\nfor _ in range(%d >> 20): _ = sys.stdout.write('x' * (1 << 20))", size)}))
		},
		"that nobody collects": func(ctx context.Context) (int64, string, error) {
			out, err := sb.Exec(ctx, client.ExecRequest{Command: fmt.Sprintf("yes 0123456789abcde | head -c %d", size)})
			if err != nil {
				return 0, "", err
			}
			if !out.Truncated {
				t.Error("a cut answer does not say so")
			}
			return size, out.Outcome, nil
		},
	} {
		t.Run(claim, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			var most [2]atomic.Int64
			stop := make(chan struct{})
			watched := make(chan struct{})
			go func() {
				defer close(watched)
				for {
					for i, pid := range []int{server, agent} {
						most[i].Store(max(most[i].Load(), rss(pid)))
					}
					select {
					case <-stop:
						return
					case <-time.After(10 * time.Millisecond):
					}
				}
			}()
			begun := time.Now()
			n, outcome, err := stream(ctx)
			took := time.Since(begun)
			close(stop)
			<-watched
			t.Logf("%d MiB in %v; server at most %d MiB, agent %d MiB", n>>20, took.Round(time.Millisecond), most[0].Load()>>20, most[1].Load()>>20)
			if err != nil || outcome != client.OutcomeOK || n != size {
				t.Errorf("%d bytes of %d, outcome %q, %v", n, size, outcome, err)
			}
			if most[0].Load() > 200<<20 || most[1].Load() > 40<<20 {
				t.Errorf("memory: server %d MiB, agent %d MiB", most[0].Load()>>20, most[1].Load()>>20)
			}
			if got := sb.value("1 + 1"); got != "2" {
				t.Errorf("afterwards a cell says %s", got)
			}
		})
	}
}

func count(events func(func(client.Event, error) bool)) (n int64, outcome string, err error) {
	for e, failed := range events {
		if failed != nil {
			return n, outcome, failed
		}
		n += int64(len(e.Text) + len(e.Base64))
		if e.End != nil {
			outcome = e.End.Outcome
		}
	}
	return n, outcome, nil
}
