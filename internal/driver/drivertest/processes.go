package drivertest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// alive counts processes by their exact command line, from inside.
func (s *box) alive(t *testing.T, command string) int {
	t.Helper()
	script := `n=0; for f in /proc/[0-9]*/cmdline; do c=$(tr '\0' ' ' <$f 2>/dev/null); [ "$c" = "$1 " ] && n=$((n+1)); done; echo $n`
	got := s.exec(t, agentapi.ExecParams{Argv: []string{"sh", "-c", script, "sh", command}})
	var n int
	fmt.Sscan(got.stdout, &n)
	return n
}

func (s *box) running(t *testing.T, match func(agentapi.Process) bool) bool {
	t.Helper()
	list, err := s.Processes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list, match)
}

// unique makes a sleep that no other claim starts.
var sleeps = 70000

func unique() string { sleeps++; return fmt.Sprintf("sleep %d", sleeps) }

var processes = []claim{
	{"a command's output and status are told", needsNothing, func(t *testing.T, b *bench) {
		got := b.shared(t).exec(t, sh("echo out; echo err >&2; exit 3"))
		if got.stdout != "out\n" || got.stderr != "err\n" || got.end.ExitCode != 3 || got.end.Outcome != agentapi.OutcomeError {
			t.Errorf("%+v", got)
		}
		if got.started.PID <= 0 || got.started.ID == "" || got.end.Usage.WallMS <= 0 {
			t.Errorf("%+v", got)
		}
	}},
	{"a command that succeeds is ok", needsNothing, func(t *testing.T, b *bench) {
		if got := b.shared(t).exec(t, sh("true")); got.end.Outcome != agentapi.OutcomeOK || got.end.ExitCode != 0 {
			t.Errorf("%+v", got.end)
		}
	}},
	{"a command that does not exist is not found", needsNothing, func(t *testing.T, b *bench) {
		_, err := b.shared(t).Exec(t.Context(), agentapi.ExecParams{Argv: []string{"no-such-command"}})
		expectKind(t, err, fault.NotFound)
	}},
	{"another program runs where the first is not there", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		for _, c := range []struct{ first, instead, want string }{
			{"/bin/no-such-shell", "/bin/sh", "/bin/sh\n"}, {"/bin/sh", "/bin/no-such-shell", "/bin/sh\n"},
		} {
			got := s.exec(t, agentapi.ExecParams{Argv: []string{c.first, "-c", "echo $0"}, Instead: c.instead})
			if got.stdout != c.want {
				t.Errorf("%+v: %+v", c, got)
			}
		}
		_, err := s.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"/bin/no-such-shell"}, Instead: "/bin/nor-this"})
		expectKind(t, err, fault.NotFound)
		if !strings.HasPrefix(fault.Message(err), "/bin/no-such-shell:") {
			t.Errorf("it is the first that is missed: %v", err)
		}
		_, err = s.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"/bin/no-such-shell"}, Instead: "/bin/sh", Cwd: "/no/such/place"})
		expectKind(t, err, fault.NotFound)
	}},
	{"an account tells what its processes are given", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		who, err := s.Account(t.Context(), agentapi.AccountParams{})
		if err != nil {
			t.Fatal(err)
		}
		given := map[string]string{}
		for pair := range strings.SplitSeq(s.exec(t, agentapi.ExecParams{Argv: []string{"env", "-0"}}).stdout, "\x00") {
			if k, v, ok := strings.Cut(pair, "="); ok && k != "COVE_RUN" {
				given[k] = v
			}
		}
		if len(given) == 0 || !maps.Equal(who.Environ, given) {
			t.Errorf("%v is told, %v is given", who.Environ, given)
		}
	}},
	{"what cannot be a command is invalid", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		for _, p := range []agentapi.ExecParams{{}, {Argv: []string{""}}, {Argv: []string{"a\x00b"}}, {Argv: []string{"true"}, Env: map[string]string{"a=b": "c"}}, {Argv: []string{"true"}, TimeoutMS: -1}} {
			_, err := s.Exec(t.Context(), p)
			expectKind(t, err, fault.Invalid)
		}
		_, err := s.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"true"}, Cwd: "/no/such/place"})
		expectKind(t, err, fault.NotFound)
		_, err = s.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"true"}, User: "no-such-user"})
		expectKind(t, err, fault.NotFound)
	}},
	{"environment and working directory are the caller's", needsNothing, func(t *testing.T, b *bench) {
		p := sh("echo $A; pwd")
		p.Env, p.Cwd = map[string]string{"A": "b c"}, "/usr"
		if got := b.shared(t).exec(t, p); got.stdout != "b c\n/usr\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a clean environment holds what was given", needsNothing, func(t *testing.T, b *bench) {
		p := agentapi.ExecParams{Argv: []string{"env"}, Env: map[string]string{"A": "1"}, CleanEnv: true}
		got := b.shared(t).exec(t, p)
		for line := range strings.Lines(got.stdout) {
			if name, _, _ := strings.Cut(line, "="); name != "A" && name != "COVE_RUN" {
				t.Errorf("%q", line)
			}
		}
	}},
	{"a signal that ended a command is named", needsNothing, func(t *testing.T, b *bench) {
		got := b.shared(t).exec(t, sh("kill -SEGV $$"))
		if got.end.Signal != "SIGSEGV" || got.end.ExitCode != -1 || got.end.Outcome != agentapi.OutcomeKilled {
			t.Errorf("%+v", got.end)
		}
	}},
	{"stdin reaches the command and ends", needsNothing, func(t *testing.T, b *bench) {
		p := sh("cat; echo done")
		p.Stdin = true
		s, err := b.shared(t).Exec(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		go func() {
			s.Stdin(big)
			s.CloseStdin()
		}()
		if got := listen(t, s); got.stdout != string(big)+"done\n" {
			t.Errorf("%d bytes came back of %d", len(got.stdout), len(big))
		}
	}},
	{"without stdin a command reads an end at once", needsNothing, func(t *testing.T, b *bench) {
		if got := b.shared(t).exec(t, sh("cat; echo done")); got.stdout != "done\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"stdin can come from another connection", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		p := sh("cat; echo done")
		p.Stdin, p.Tag = true, "other-stdin"
		stream, err := s.Exec(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		target := agentapi.Target{Tag: "other-stdin"}
		for _, part := range []string{"one ", "two "} {
			if err := s.Stdin(t.Context(), agentapi.StdinParams{Target: target}, strings.NewReader(part)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Stdin(t.Context(), agentapi.StdinParams{Target: target, Close: true}, strings.NewReader("three\n")); err != nil {
			t.Fatal(err)
		}
		if got := listen(t, stream); got.stdout != "one two three\ndone\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a client that leaves is noticed while its stdin is stuck", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		command := unique()
		p := sh("exec " + command)
		p.Stdin = true
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, _, _ := s.begin(t, ctx, p)
		stuck := make(chan struct{})
		go func() { defer close(stuck); stream.Stdin(make([]byte, 8<<20)) }()
		time.Sleep(200 * time.Millisecond) // until every buffer on the way is full
		cancel()
		<-stuck
		eventually(t, "the command ended", func() bool { return s.alive(t, command) == 0 })
	}},
	{"output of 64 MiB streams to a slow reader in bounded memory", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		const size = 64 << 20
		p := sh(fmt.Sprintf("head -c %d /dev/zero", size))
		p.Tag = "flood"
		_, next, _ := s.begin(t, t.Context(), p)
		time.Sleep(300 * time.Millisecond)
		if !s.running(t, func(p agentapi.Process) bool { return p.Tag == "flood" }) {
			t.Error("the command ended although nobody read: somebody holds its output")
		}
		var before, now runtime.MemStats
		runtime.ReadMemStats(&before)
		total, high := 0, uint64(0)
		for i := 0; ; i++ {
			e, err, ok := next()
			if err != nil || !ok {
				t.Fatal(err)
			}
			if e.Type == agentapi.EventEnd {
				break
			}
			total += len(e.Data)
			if i%64 == 0 {
				runtime.ReadMemStats(&now)
				high = max(high, now.HeapInuse)
				time.Sleep(time.Millisecond)
			}
		}
		if total != size {
			t.Errorf("%d bytes of %d", total, size)
		}
		if high > before.HeapInuse+32<<20 {
			t.Errorf("the heap grew from %d to %d", before.HeapInuse, high)
		}
	}},
	{"a timeout kills grandchildren and keeps the output", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		child, daemon := unique(), unique()
		p := sh(fmt.Sprintf("echo before; %s & setsid sh -c '%s >/dev/null 2>&1 &' ; wait; sleep 100", child, daemon))
		var got told
		withTimeout(func(limit int64) bool {
			p.TimeoutMS = limit
			got = s.exec(t, p)
			return got.stdout != ""
		})
		if got.stdout != "before\n" || got.end.Outcome != agentapi.OutcomeTimeout || got.end.Message == "" {
			t.Errorf("%+v", got)
		}
		if got.end.Usage.WallMS < 0.9*float64(p.TimeoutMS) || got.end.Usage.WallMS > 90_000 {
			t.Errorf("took %v ms", got.end.Usage.WallMS)
		}
		for _, c := range []string{child, daemon} {
			if n := s.alive(t, c); n != 0 {
				t.Errorf("%q outlived its run", c)
			}
		}
	}},
	{"a timeout is not held up by a reader that does not read", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		command := unique()
		p := sh(command + " & yes")
		p.TimeoutMS = 300
		s.begin(t, t.Context(), p)
		eventually(t, "the command ended", func() bool { return s.alive(t, command) == 0 && s.alive(t, "yes") == 0 })
	}},
	{"a background child does not hold up the end, and lives on", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		command := unique()
		begin := time.Now()
		got := s.exec(t, sh("echo hi; "+command+" &"))
		if got.stdout != "hi\n" || got.end.Outcome != agentapi.OutcomeOK || time.Since(begin) > time.Minute {
			t.Errorf("%+v after %s", got, time.Since(begin))
		}
		if n := s.alive(t, command); n != 1 {
			t.Errorf("%d of %q live", n, command)
		}
		s.exec(t, sh("pkill -xf '"+command+"' || kill $(pgrep -xf '"+command+"'); true"))
	}},
	{"output of a background child after the end does not kill it", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.exec(t, sh("rm -f survived; (sleep 1; echo late; echo late; echo yes >survived) &"))
		eventually(t, "the child wrote its file", func() bool {
			_, err := s.Stat(t.Context(), agentapi.PathParams{Path: "survived"})
			return err == nil
		})
	}},
	{"leaving ends a command and what it started", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		command := unique()
		ctx, cancel := context.WithCancel(t.Context())
		s.begin(t, ctx, sh("setsid "+command+" & wait; sleep 100"))
		eventually(t, "the command began", func() bool { return s.alive(t, command) == 1 })
		cancel()
		eventually(t, "the command ended", func() bool { return s.alive(t, command) == 0 })
	}},
	{"a command told to survive goes on and can be attached to", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		p := sh("i=0; while [ ! -e stop-survivor ]; do i=$((i+1)); echo $i; sleep 0.02; done; echo end; exit 4")
		p.Disconnect, p.Tag = agentapi.DisconnectSurvive, "survivor"
		stream, _, started := s.begin(t, t.Context(), p)
		stream.Close()
		time.Sleep(100 * time.Millisecond)
		joined, err := s.Attach(t.Context(), agentapi.AttachParams{Target: agentapi.Target{ID: started.ID}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write(t.Context(), agentapi.WriteParams{Path: "stop-survivor"}, strings.NewReader("")); err != nil {
			t.Fatal(err)
		}
		got := listen(t, joined)
		if !strings.HasSuffix(got.stdout, "end\n") || strings.HasPrefix(got.stdout, "1\n") || got.end.ExitCode != 4 || got.started.PID != started.PID {
			t.Errorf("%+v", got)
		}
		_, err = s.Attach(t.Context(), agentapi.AttachParams{Target: agentapi.Target{ID: started.ID}})
		expectKind(t, err, fault.NotFound, fault.Gone)
	}},
	{"a survivor that floods nobody is not held up", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		p := sh("head -c 20000000 /dev/zero; echo x >flooded")
		p.Disconnect = agentapi.DisconnectSurvive
		stream, _, _ := s.begin(t, t.Context(), p)
		stream.Close()
		eventually(t, "it came to its end", func() bool {
			_, err := s.Stat(t.Context(), agentapi.PathParams{Path: "flooded"})
			return err == nil
		})
	}},
	{"a process is listed, signaled and gone", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		p := sh("trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.02; done")
		p.Tag, p.Env = "tagged", map[string]string{"A": "b"}
		_, next, started := s.begin(t, t.Context(), p)
		next() // ready: the trap is set
		list, err := s.Processes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(p agentapi.Process) bool { return p.ID == started.ID })
		if at < 0 || list[at].PID != started.PID || list[at].Tag != "tagged" || list[at].Env["A"] != "b" || !slices.Equal(list[at].Argv, p.Argv) {
			t.Fatalf("%+v", list)
		}
		if err := s.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{PID: started.PID}, Signal: "SIGTERM"}); err != nil {
			t.Fatal(err)
		}
		var out string
		for {
			e, err, ok := next()
			if err != nil || !ok {
				t.Fatal(err)
			}
			out += string(e.Data)
			if e.End != nil {
				if e.End.ExitCode != 5 || out != "got\n" {
					t.Errorf("%q %+v", out, e.End)
				}
				break
			}
		}
		err = s.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{ID: started.ID}, Signal: "SIGTERM"})
		expectKind(t, err, fault.NotFound)
		err = s.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{ID: started.ID}, Signal: "SIGNONE"})
		expectKind(t, err, fault.Invalid)
	}},
	{"an end that the caller asked for is an interruption", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		command := unique()
		stream, err := s.Exec(t.Context(), sh("setsid "+command+" & echo; sleep 100"))
		if err != nil {
			t.Fatal(err)
		}
		next, started := pull(t, stream)
		next()
		if err := s.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{ID: started.ID}, Signal: "SIGKILL", Tree: true}); err != nil {
			t.Fatal(err)
		}
		e, err, _ := next()
		if err != nil || e.End == nil || e.End.Outcome != agentapi.OutcomeInterrupted {
			t.Errorf("%+v, %v", e, err)
		}
		if n := s.alive(t, command); n != 0 {
			t.Errorf("%q outlived its tree", command)
		}
	}},
	{"control acts on its own run", needsNothing, func(t *testing.T, b *bench) {
		stream, next, _ := b.shared(t).begin(t, t.Context(), sh("echo; exec sleep 100"))
		next()
		if err := stream.Control(agentapi.Control{Signal: "SIGTERM"}); err != nil {
			t.Fatal(err)
		}
		e, err, _ := next()
		if err != nil || e.End == nil || e.End.Signal != "SIGTERM" || e.End.Outcome != agentapi.OutcomeInterrupted {
			t.Errorf("%+v, %v", e, err)
		}
	}},
	{"a terminal has a size, echoes and can be resized", needsNothing, func(t *testing.T, b *bench) {
		p := sh("stty size; test -t 0 && test -t 1 && test -t 2 && echo tty; read line; echo got $line; stty size; tty >/dev/null && echo </dev/tty >/dev/null ctl=$?; exit 2")
		p.PTY = &agentapi.PTYSize{Rows: 11, Cols: 22}
		stream, next, _ := b.shared(t).begin(t, t.Context(), p)
		var out strings.Builder
		for !strings.Contains(out.String(), "tty") {
			e, err, ok := next()
			if err != nil || !ok {
				t.Fatalf("%q, %v", out.String(), err)
			}
			out.Write(e.Data)
		}
		if err := stream.Control(agentapi.Control{Resize: &agentapi.PTYSize{Rows: 33, Cols: 44}}); err != nil {
			t.Fatal(err)
		}
		if err := stream.Stdin([]byte("hello\n")); err != nil {
			t.Fatal(err)
		}
		for {
			e, err, ok := next()
			if err != nil || !ok {
				t.Fatal(err)
			}
			out.Write(e.Data)
			if e.End != nil {
				if e.End.ExitCode != 2 {
					t.Errorf("%+v", e.End)
				}
				break
			}
		}
		if want := "11 22\r\ntty\r\nhello\r\ngot hello\r\n33 44\r\n"; out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	}},
	{"Ctrl-C in a terminal interrupts", needsNothing, func(t *testing.T, b *bench) {
		p := agentapi.ExecParams{Argv: []string{"sh", "-c", "echo ready; exec sleep 100"}, PTY: &agentapi.PTYSize{}}
		stream, next, _ := b.shared(t).begin(t, t.Context(), p)
		next()
		stream.Stdin([]byte{3})
		for {
			e, err, ok := next()
			if err != nil || !ok {
				t.Fatal(err)
			}
			if e.End != nil {
				if e.End.Signal != "SIGINT" {
					t.Errorf("%+v", e.End)
				}
				break
			}
		}
	}},
	{"limits of a run hold", needsNothing, func(t *testing.T, b *bench) {
		p := sh("ulimit -n; ulimit -v; ulimit -t")
		p.Limits = agentapi.RunLimits{OpenFiles: 55, MemoryBytes: 512 << 20, CPUSeconds: 9}
		if got := b.shared(t).exec(t, p); got.stdout != "55\n524288\n9\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"many short commands at once all end", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		errs := make(chan string, 32)
		for i := range 32 {
			go func() {
				stream, err := s.Exec(t.Context(), sh(fmt.Sprintf("echo %d; exit %d", i, i)))
				if err != nil {
					errs <- err.Error()
					return
				}
				out, code := "", -2
				for e, err := range stream.Events() {
					if err != nil {
						errs <- err.Error()
						return
					}
					out += string(e.Data)
					if e.End != nil {
						code = e.End.ExitCode
					}
				}
				if out != fmt.Sprintf("%d\n", i) || code != i {
					errs <- fmt.Sprintf("%d: %q %d", i, out, code)
					return
				}
				errs <- ""
			}()
		}
		for range 32 {
			if e := <-errs; e != "" {
				t.Error(e)
			}
		}
	}},
	{"metrics are told", needsNothing, func(t *testing.T, b *bench) {
		m, err := b.shared(t).Metrics(t.Context())
		if err != nil || m.UptimeMS < 0 || m.DiskTotal <= 0 {
			t.Errorf("%+v, %v", m, err)
		}
	}},
}
