package drivertest

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// run runs one cell and hears all of it.
func (s *box) run(t *testing.T, p agentapi.RunParams) told {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	stream, err := s.Run(ctx, p)
	if err != nil {
		t.Fatalf("run %q: %v", p.Code, err)
	}
	return listen(t, stream)
}

func (s *box) cell(t *testing.T, code string) told {
	t.Helper()
	return s.run(t, agentapi.RunParams{Code: code})
}

func wantInterrupted(t *testing.T, next func() (agentapi.Event, error, bool)) {
	t.Helper()
	for {
		e, err, ok := next()
		if err != nil || !ok {
			t.Fatal(err)
		}
		if e.End == nil {
			continue
		}
		if e.End.Outcome != agentapi.OutcomeInterrupted || e.End.Lost {
			t.Errorf("%+v", e.End)
		}
		return
	}
}

// replace does what the server does for a kernel that is gone, or that is to be new.
func (s *box) replace(t *testing.T, kernel string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	err := s.b.Driver.Kernel(ctx, s.id, kernel)
	if fault.Is(err, fault.Unsupported) {
		_, err = s.KernelStart(ctx, agentapi.KernelStartParams{Kernel: kernel})
	}
	if err != nil {
		t.Fatalf("kernel %s: %v", kernel, err)
	}
	k, err := s.KernelWait(ctx, agentapi.KernelParams{Kernel: kernel})
	if err != nil || k.State != agentapi.KernelIdle {
		t.Fatalf("kernel %s: %+v, %v", kernel, k, err)
	}
}

func text(r *agentapi.Result) string { return strings.Trim(string(r.Data["text/plain"]), `"`) }

var kernels = []claim{
	{"a started sandbox has a kernel that takes cells", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		list, err := s.Kernels(t.Context())
		if err != nil || len(list) != 1 || list[0].Name != agentapi.DefaultKernel || list[0].State != agentapi.KernelIdle || list[0].PID <= 0 {
			t.Errorf("%+v, %v", list, err)
		}
	}},
	{"a driver without warm kernels says so", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		err := b.Driver.Kernel(t.Context(), s.id, "warm?")
		if b.Driver.Caps().WarmKernels {
			if err != nil {
				t.Error(err)
			}
			return
		}
		expectKind(t, err, fault.Unsupported)
	}},
	{"the value of the last expression is the result", needsPython, func(t *testing.T, b *bench) {
		got := b.shared(t).cell(t, "1+1")
		if len(got.results) != 1 || text(got.results[0]) != "2" || !got.results[0].Main || got.end.Outcome != agentapi.OutcomeOK {
			t.Errorf("%+v", got)
		}
	}},
	{"state is kept from cell to cell and told apart by kernel", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.replace(t, "other")
		s.cell(t, "x = 41")
		s.run(t, agentapi.RunParams{Code: "x = 1", Kernel: "other"})
		if got := s.cell(t, "x + 1"); len(got.results) != 1 || text(got.results[0]) != "42" {
			t.Errorf("%+v", got)
		}
		if err := s.KernelStop(t.Context(), agentapi.KernelParams{Kernel: "other"}); err != nil {
			t.Error(err)
		}
		_, err := s.Run(t.Context(), agentapi.RunParams{Code: "1", Kernel: "other"})
		expectKind(t, err, fault.Gone)
	}},
	{"an exception is an error with its traceback, and the kernel lives", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		got := s.cell(t, "def f():\n    raise ValueError('no')\nf()")
		if len(got.errors) != 1 || got.errors[0].Name != "ValueError" || got.errors[0].Value != "no" || len(got.errors[0].Traceback) == 0 || got.end.Outcome != agentapi.OutcomeError {
			t.Errorf("%+v", got)
		}
		if got := s.cell(t, "2+2"); len(got.results) != 1 {
			t.Errorf("%+v", got)
		}
	}},
	{"what is shown and what is printed come in the order of the code", needsPython, func(t *testing.T, b *bench) {
		stream, err := b.shared(t).Run(t.Context(), agentapi.RunParams{Code: `
import sys
for i in range(20):
    print("out", i); display("x" * 50000); print("err", i, file=sys.stderr); display(i)`})
		if err != nil {
			t.Fatal(err)
		}
		var order []string
		for e, err := range stream.Events() {
			if err != nil {
				t.Fatal(err)
			}
			switch e.Type {
			case agentapi.EventStdout, agentapi.EventStderr:
				order = append(order, strings.Fields(string(e.Data))...)
			case agentapi.EventResult:
				order = append(order, "shown:"+text(e.Result)[:1])
				if e.Waits {
					t.Error("what only the agent is to know was passed on")
				}
			}
		}
		var want []string
		for i := range 20 {
			n := strconv.Itoa(i)
			want = append(want, "out", n, "shown:'", "err", n, "shown:"+n[:1])
		}
		if !slices.Equal(order, want) {
			t.Errorf("%v\nwant %v", order, want)
		}
	}},
	{"output of Python, of subprocesses and on descriptors is heard, in order with results", needsPython, func(t *testing.T, b *bench) {
		stream, err := b.shared(t).Run(t.Context(), agentapi.RunParams{Code: `
import os, sys, subprocess
print("one"); subprocess.run(["echo", "two"]); os.write(1, b"three\n"); print("err", file=sys.stderr)
"four"`})
		if err != nil {
			t.Fatal(err)
		}
		var order []string
		for e, err := range stream.Events() {
			if err != nil {
				t.Fatal(err)
			}
			switch e.Type {
			case agentapi.EventStdout:
				order = append(order, string(e.Data))
			case agentapi.EventResult:
				order = append(order, "result")
			case agentapi.EventStderr:
			default:
				order = append(order, string(e.Type))
			}
		}
		if got := strings.Join(order, ""); got != "startedone\ntwo\nthree\nresultend" {
			t.Errorf("%q", got)
		}
	}},
	{"a megabyte of output in small prints keeps every byte before the end", needsPython, func(t *testing.T, b *bench) {
		got := b.shared(t).cell(t, "for i in range(100000): print('%09d' % i)")
		if len(got.stdout) != 1000000 || !strings.HasSuffix(got.stdout, "000099999\n") || got.end.Outcome != agentapi.OutcomeOK {
			t.Errorf("%d bytes, %+v", len(got.stdout), got.end)
		}
	}},
	{"output between cells belongs to the next", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		ended, written := s.mark(t), s.mark(t)
		s.cell(t, "import os, threading, time\ndef later():\n    while not os.path.exists('"+ended+"'): time.sleep(0.01)\n"+
			"    os.write(1, b'late\\n')\n    open('"+written+"', 'w').close()\nthreading.Thread(target=later).start()")
		s.set(t, ended)
		eventually(t, "it was written", func() bool { return s.exec(t, sh("test -e "+written)).end.ExitCode == 0 })
		if got := s.cell(t, "print('now')"); got.stdout != "late\nnow\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"environment and directory of a cell are its own", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		got := s.run(t, agentapi.RunParams{Code: "import os; print(os.environ['COVE_CELL'], os.getcwd())", Env: map[string]string{"COVE_CELL": "a"}, Cwd: "/usr"})
		if got.stdout != "a /usr\n" {
			t.Errorf("%+v", got)
		}
		if got := s.cell(t, "print(os.environ.get('COVE_CELL'), os.getcwd() == '/usr')"); got.stdout != "None False\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"an interrupt ends the cell and keeps the variables", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.cell(t, "kept = 7")
		for _, way := range []string{"control", "operation"} {
			stream, err := s.Run(t.Context(), agentapi.RunParams{Code: "print('go', flush=True)\nimport time\nwhile True: time.sleep(0.01)"})
			if err != nil {
				t.Fatal(err)
			}
			next, _ := pull(t, stream)
			next() // go
			if way == "control" {
				err = stream.Control(agentapi.Control{Interrupt: true})
			} else {
				err = s.Interrupt(t.Context(), agentapi.KernelParams{Kernel: agentapi.DefaultKernel})
			}
			if err != nil {
				t.Fatal(err)
			}
			wantInterrupted(t, next)
		}
		if got := s.cell(t, "kept"); len(got.results) != 1 || text(got.results[0]) != "7" {
			t.Errorf("%+v", got)
		}
	}},
	{"an interrupt that another thread takes ends the cell", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.replace(t, "masked")
		stream, err := s.Run(t.Context(), agentapi.RunParams{Kernel: "masked", Code: `
import signal, threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("go", flush=True)
time.sleep(3600)`})
		if err != nil {
			t.Fatal(err)
		}
		next, _ := pull(t, stream)
		next() // go
		if err := s.Interrupt(t.Context(), agentapi.KernelParams{Kernel: "masked"}); err != nil {
			t.Fatal(err)
		}
		wantInterrupted(t, next)
		if err := s.KernelStop(t.Context(), agentapi.KernelParams{Kernel: "masked"}); err != nil {
			t.Error(err)
		}
	}},
	{"an interrupt of an idle kernel does no harm", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		if err := s.Interrupt(t.Context(), agentapi.KernelParams{Kernel: agentapi.DefaultKernel}); err != nil {
			t.Fatal(err)
		}
		if got := s.cell(t, "1"); got.end.Outcome != agentapi.OutcomeOK {
			t.Errorf("%+v", got)
		}
	}},
	{"a timeout ends an infinite loop, keeps its output and the variables", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.cell(t, "kept = 8")
		var got told
		withTimeout(func(limit int64) bool {
			got = s.run(t, agentapi.RunParams{Code: "print('before')\nwhile True: pass", TimeoutMS: limit})
			return got.stdout != ""
		})
		if got.stdout != "before\n" || got.end.Outcome != agentapi.OutcomeTimeout || got.end.Lost || got.end.Message == "" {
			t.Errorf("%+v", got)
		}
		if got := s.cell(t, "kept"); len(got.results) != 1 || text(got.results[0]) != "8" {
			t.Errorf("%+v", got)
		}
	}},
	{"a timeout interrupts a command that the cell waits for", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		command := unique()
		got := s.run(t, agentapi.RunParams{Code: "import subprocess\nsubprocess.run('" + command + "', shell=True)", TimeoutMS: 300})
		if got.end.Outcome != agentapi.OutcomeTimeout || got.end.Lost {
			t.Errorf("%+v", got)
		}
		eventually(t, "the command ended", func() bool { return s.alive(t, command) == 0 })
	}},
	{"a cell that will not stop loses its kernel, and the next one works", needsPython, func(t *testing.T, b *bench) {
		s := b.start(t)
		got := s.run(t, agentapi.RunParams{Code: "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", TimeoutMS: 3000})
		if got.end.Outcome != agentapi.OutcomeTimeout || !got.end.Lost || !strings.Contains(got.end.Message, "variables are lost") {
			t.Errorf("%+v", got)
		}
		_, err := s.Run(t.Context(), agentapi.RunParams{Code: "1"})
		expectKind(t, err, fault.Gone)
		s.replace(t, agentapi.DefaultKernel)
		if got := s.cell(t, "1+1"); len(got.results) != 1 || text(got.results[0]) != "2" {
			t.Errorf("%+v", got)
		}
	}},
	{"the end of a kernel says why, and the next kernel works", needsPython, func(t *testing.T, b *bench) {
		s := b.start(t)
		for code, want := range map[string]string{
			"import os; print('last words', flush=True); os._exit(3)": "status 3",
			"import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
			"import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
		} {
			got := s.cell(t, code)
			if got.end.Outcome != agentapi.OutcomeKernelDied || !got.end.Lost || !strings.Contains(got.end.Message, want) {
				t.Errorf("%s: %+v", code, got.end)
			}
			if strings.Contains(code, "last words") && got.stdout != "last words\n" {
				t.Errorf("%q", got.stdout)
			}
			list, err := s.Kernels(t.Context())
			if err != nil || len(list) != 1 || list[0].State != agentapi.KernelDead || list[0].Message == "" {
				t.Errorf("%+v, %v", list, err)
			}
			s.replace(t, agentapi.DefaultKernel)
			if got := s.cell(t, "1+1"); len(got.results) != 1 || text(got.results[0]) != "2" {
				t.Errorf("%+v", got)
			}
		}
	}},
	{"the end of a kernel is noticed although its child holds its descriptors", needsPython, func(t *testing.T, b *bench) {
		s := b.start(t)
		begin := time.Now()
		got := s.cell(t, "import os, time\nif os.fork() == 0:\n    time.sleep(200); os._exit(0)\nos._exit(4)")
		if got.end.Outcome != agentapi.OutcomeKernelDied || time.Since(begin) > 100*time.Second {
			t.Errorf("%+v after %s", got.end, time.Since(begin))
		}
	}},
	{"a cell that scribbles on its kernel's socket harms only its kernel", needsPython, func(t *testing.T, b *bench) {
		s := b.start(t)
		got := s.cell(t, `
import os, stat
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b"\xff" * 64)
    except OSError: pass
import time; time.sleep(5)`)
		if got.end.Outcome != agentapi.OutcomeKernelDied || !got.end.Lost {
			t.Errorf("%+v", got.end)
		}
		if _, err := s.Hello(t.Context()); err != nil {
			t.Errorf("the agent suffered: %v", err)
		}
	}},
	{"runs of one kernel wait for each other in order", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.cell(t, "order = []")
		sent := s.mark(t)
		first, err := s.Run(t.Context(), agentapi.RunParams{Code: until(sent) + "order.append('first')"})
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { s.cell(t, "order.append('second')") })
		time.Sleep(5 * time.Second) // until it has arrived: the agent does not tell of a run that waits
		wg.Go(func() { s.cell(t, "order.append('third')") })
		s.set(t, sent)
		listen(t, first)
		wg.Wait()
		if got := s.cell(t, "print(order)"); got.stdout != "['first', 'second', 'third']\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a waiting run whose client leaves never begins", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.cell(t, "ran = False")
		left := s.mark(t)
		first, err := s.Run(t.Context(), agentapi.RunParams{Code: until(left)})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Run(ctx, agentapi.RunParams{Code: "ran = True"}); err == nil {
			t.Error("it began")
		}
		s.set(t, left)
		listen(t, first)
		if got := s.cell(t, "print(ran)"); got.stdout != "False\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"leaving interrupts a cell, unless it is to survive", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		for _, d := range []agentapi.Disconnect{agentapi.DisconnectKill, agentapi.DisconnectSurvive} {
			s.cell(t, "done = False")
			left, rest := s.mark(t), "time.sleep(600)"
			if d == agentapi.DisconnectSurvive {
				rest = "time.sleep(0.7)" // in which it would be interrupted
			}
			code := "print('go', flush=True)\n" + until(left) + rest + "\ndone = True"
			stream, err := s.Run(t.Context(), agentapi.RunParams{Code: code, Disconnect: d})
			if err != nil {
				t.Fatal(err)
			}
			next, _ := pull(t, stream)
			next() // go
			stream.Close()
			s.set(t, left)
			want := "False\n"
			if d == agentapi.DisconnectSurvive {
				want = "True\n"
			}
			if got := s.cell(t, "print(done)"); got.stdout != want {
				t.Errorf("%s: %+v", d, got)
			}
		}
	}},
	{"a large result passes", needsPython, func(t *testing.T, b *bench) {
		got := b.shared(t).cell(t, "class Big:\n    def _repr_mimebundle_(self, include=None, exclude=None): return {'text/plain': 'x' * (4 << 20)}\nBig()")
		if len(got.results) != 1 || len(text(got.results[0])) != 4<<20 {
			t.Errorf("%d results, %+v", len(got.results), got.end)
		}
	}},
	{"a cell crosses agent and kernel quickly", needsPython, func(t *testing.T, b *bench) {
		s := b.shared(t)
		best := time.Hour
		for range 50 {
			begin := time.Now()
			s.cell(t, "1+1")
			best = min(best, time.Since(begin))
		}
		t.Logf("best of 50: %s", best)
		if best > 200*time.Millisecond { // generous: the detector of races and a busy host are slow
			t.Errorf("%s", best)
		}
	}},
}
