package runtime_test

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
	"github.com/covehq/cove/test/slow"
)

func TestExecute(t *testing.T) {
	w := newWorld(t)
	long := "printf %s " + strings.Repeat("ab", 100_000) + " | wc -c"
	for _, tc := range []struct {
		name, command string
		want          result
	}{
		{"a command's output comes as it is", `echo 'Hello from SDK'`, result{Stdout: "Hello from SDK\n"}},
		{"a real shell reads it", `for i in 1 2; do echo $i; done | tac`, result{Stdout: "2\n1\n"}},
		{"quotes in quotes survive", `python3 -c 'print("it''s", "$HOME", "` + "`" + `")'`, result{Stdout: "its $HOME `\n"}},
		{"a here-document is its input", "cat <<'EOF'\nä\nEOF\n", result{Stdout: "ä\n"}},
		{"input that nobody sends has ended", `cat; echo done`, result{Stdout: "done\n"}},
		{"it starts in the home", `pwd`, result{Stdout: w.home + "\n"}},
		{"its errors are apart, its exit code is told", `echo out; echo err >&2; exit 7`, result{Stdout: "out\n", Stderr: "err\n", ExitCode: 7}},
		{"a command that there is not is a result", `no-such-command-here 2>/dev/null`, result{ExitCode: 127}},
		{"a NUL stays one", `printf 'a\0b'`, result{Stdout: "a\x00b"}},
		{"bytes that are no text are replaced", `printf 'a\377b'`, result{Stdout: "a\ufffdb"}},
		{"a command may be longer than an argument", long, result{Stdout: "200000\n"}},
		{"the input of a long command is free", "cat <<EOF | wc -c\n" + strings.Repeat("x", 150_000) + "\nEOF\n", result{Stdout: "150001\n"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := w.in(t)
			if got := w.run(tc.command); got != tc.want {
				t.Errorf("got %+v, want %+v", short(got), short(tc.want))
			}
		})
	}
	t.Run("a signal is told as a shell does", func(t *testing.T) {
		w := w.in(t)
		got := w.run(`kill -9 $$`)
		if got.ExitCode != 137 {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a home that was removed is made again", func(t *testing.T) {
		w := w.in(t)
		w.run(`rm -rf "$PWD"`)
		if got := w.run(`pwd`); got.Stdout != w.home+"\n" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("too much output is cut, and said to be", func(t *testing.T) {
		w := w.in(t)
		got := w.run(`head -c 9000000 /dev/zero | tr '\0' x; echo err >&2; exit 3`)
		if len(got.Stdout) != 8<<20 || got.ExitCode != 3 || !strings.HasPrefix(got.Stderr, "err\n") ||
			!strings.Contains(got.Stderr, fmt.Sprintf("%d bytes of the command's output are left out", 9000000-8<<20)) {
			t.Errorf("%d bytes, exit %d, %q", len(got.Stdout), got.ExitCode, got.Stderr)
		}
	})
	t.Run("nothing is kept of commands whose ends were heard", func(t *testing.T) {
		w := w.in(t)
		w.until("no run is known", func() bool { return w.runtime.Runs() == 0 })
		if kept := w.runtime.Kept(); kept != 0 {
			t.Errorf("%d bytes are kept", kept)
		}
	})
}

func short(r result) result {
	r.Stdout, r.Stderr = r.Stdout[:min(len(r.Stdout), 300)], r.Stderr[:min(len(r.Stderr), 300)]
	return r
}

func TestExecuteLimits(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct{ wait, kill, answer time.Duration }{
		{100 * ms, 50 * ms, 75 * ms},
		{400 * ms, 200 * ms, 300 * ms},
		{1000 * ms, 750 * ms, 875 * ms},
		{2000 * ms, 1500 * ms, 1750 * ms},
		{4000 * ms, 3500 * ms, 3750 * ms},
		{20 * time.Second, 19 * time.Second, 19500 * ms},
		{time.Minute, 59 * time.Second, 59500 * ms},
		{0, time.Hour, 0},
	} {
		if kill, answer := runtime.Limits(c.wait); kill != c.kill || answer != c.answer {
			t.Errorf("a client that waits %v: killed at %v, answered by %v; want %v, %v", c.wait, kill, answer, c.kill, c.answer)
		}
	}
}

func TestExecuteTimeout(t *testing.T) {
	w := newWorld(t)
	counter := filepath.Join(w.away, "counter")
	begun := time.Now()
	got := w.run(`echo run >> `+counter+`; echo before; sleep 300 & sleep 300`, "X-Sandbox-Timeout", "10")
	took := time.Since(begun)
	if got.ExitCode != 124 || got.Stdout != "before\n" || !got.TimedOut || !strings.Contains(got.Stderr, "time limit of 9.5s") {
		t.Errorf("got %+v", got)
	}
	if w.read(counter) != "run\n" {
		t.Errorf("it ran %q", w.read(counter))
	}
	if took >= 2*time.Minute { // TestExecuteLimits tells that the limit itself is below the client's
		t.Errorf("answered after %v", took)
	}
	t.Run("a limit of the request's own holds too", func(t *testing.T) {
		w := w.in(t)
		got := w.decode(w.ask("POST", "/execute", `{"command": "sleep 30", "timeout_seconds": 0.2}`, "X-Sandbox-Timeout", "30"))
		if got.ExitCode != 124 || !got.TimedOut {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a child that left its parent is killed with it", func(t *testing.T) {
		w := w.in(t)
		alive := filepath.Join(w.away, "alive")
		w.run(`(sleep 1.5; touch `+alive+`) >/dev/null 2>&1 & sleep 30`, "X-Sandbox-Timeout", "0.5")
		w.until("no process is left", func() bool {
			return w.run(`pgrep -f 'touch `+alive[:len(alive)-1]+`[e]'; true`).Stdout == ""
		})
		if w.read(alive) != "" {
			t.Error("it lived on")
		}
	})
	t.Run("a client's patience of next to nothing is answered", func(t *testing.T) {
		w := w.in(t)
		if got := w.run(`sleep 30`, "X-Sandbox-Timeout", "0.1"); got.ExitCode != 124 {
			t.Errorf("got %+v", got)
		}
	})
}

// TestReplay is about clients that send a request again because they have not heard of it.
func TestReplay(t *testing.T) {
	slow.Test(t)
	leave := func(w *world, body string, after func() bool, headers ...string) {
		w.t.Helper()
		ctx, cancel := context.WithCancel(w.t.Context())
		defer cancel()
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			if resp, err := w.send(ctx, "POST", "/execute", strings.NewReader(body), headers...); err == nil {
				resp.Body.Close()
			}
		}()
		w.until("the command runs", after)
		cancel()
		<-gone
		w.until("the server has noticed", func() bool { return w.runtime.Left() == 1 }) // a client asks again after seconds, not at once
	}
	t.Run("a client that said nothing of its patience: the command is killed and not run again", func(t *testing.T) {
		w := newWorld(t)
		counter := filepath.Join(w.away, "counter")
		body := command(`echo run >> ` + counter + `; echo before; sleep 30`)
		leave(w, body, func() bool { return w.read(counter) != "" })
		got := w.decode(w.ask("POST", "/execute", body))
		if got.ExitCode != 124 || got.Stdout != "before\n" || !strings.Contains(got.Stderr, "its client left") {
			t.Errorf("got %+v", got)
		}
		if w.read(counter) != "run\n" {
			t.Errorf("it ran %q", w.read(counter))
		}
		w.until("the run is forgotten", func() bool { return w.runtime.Runs() == 0 })
		leave(w, body, func() bool { return w.read(counter) == "run\nrun\n" }) // once more, and this is meant
	})
	t.Run("a client that said how long it waits finds its command still running", func(t *testing.T) {
		w := newWorld(t)
		counter, release := filepath.Join(w.away, "counter"), filepath.Join(w.away, "release")
		body := command(`echo run >> ` + counter + `; until [ -e ` + release + ` ]; do sleep 0.01; done; echo after`)
		for range 5 {
			leave(w, body, func() bool { return w.read(counter) != "" }, "X-Sandbox-Timeout", "30")
		}
		w.write(release, "")
		got := w.decode(w.ask("POST", "/execute", body, "X-Sandbox-Timeout", "30"))
		if got != (result{Stdout: "after\n"}) || w.read(counter) != "run\n" {
			t.Errorf("got %+v, it ran %q", got, w.read(counter))
		}
	})
	t.Run("a server that ends says so, and nothing is run again", func(t *testing.T) {
		w := newWorld(t)
		counter := filepath.Join(w.away, "counter")
		told := make(chan result, 1)
		go func() { told <- w.run(`echo run >> ` + counter + `; sleep 30`) }()
		w.until("the command runs", func() bool { return w.read(counter) != "" })
		w.runtime.Close()
		if got := <-told; got.ExitCode != 124 || !strings.Contains(got.Stderr, "the server is shutting down") {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a connection to the sandbox that breaks is no reason to ask again", func(t *testing.T) {
		w := newWorld(t)
		counter := filepath.Join(w.away, "counter")
		told := make(chan result, 1)
		go func() { told <- w.run(`echo before; echo run >> ` + counter + `; sleep 30`) }()
		w.until("the server has the output", func() bool { return w.read(counter) != "" && w.driver.hasHeard("before") })
		w.driver.cut()
		if got := <-told; got.ExitCode != 255 || got.Stdout != "before\n" || !strings.Contains(got.Stderr, "it may have run, and is not run again") {
			t.Errorf("got %+v", got)
		}
		w.until("the run is forgotten", func() bool { return w.runtime.Runs() == 0 })
		if got := w.run("echo next"); got.Stdout != "next\n" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("neither is one that breaks before the first answer", func(t *testing.T) {
		w := newWorld(t)
		counter := filepath.Join(w.away, "counter")
		w.driver.deaf.Store(true)
		got := w.run(`echo run >> ` + counter)
		if got.ExitCode != 255 || !strings.Contains(got.Stderr, "it may have run, and is not run again") {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("what was never begun may be asked for again", func(t *testing.T) {
		w := newWorld(t)
		w.driver.gone.Store(true)
		if got := w.ask("POST", "/execute", command("ls")); got.status != http.StatusServiceUnavailable {
			t.Errorf("%d %s", got.status, got.body)
		}
	})
	t.Run("two clients that want the same at once each get it", func(t *testing.T) {
		w := newWorld(t)
		counter, release := filepath.Join(w.away, "counter"), filepath.Join(w.away, "release")
		body := command(`echo run >> ` + counter + `; until [ -e ` + release + ` ]; do sleep 0.01; done; echo mine`)
		var clients sync.WaitGroup
		for range 3 {
			clients.Go(func() {
				if got := w.decode(w.ask("POST", "/execute", body, "X-Sandbox-Timeout", "30")); got.Stdout != "mine\n" {
					t.Errorf("got %+v", got)
				}
			})
		}
		w.until("all three run", func() bool { return w.read(counter) == "run\nrun\nrun\n" })
		w.write(release, "")
		clients.Wait()
	})
	t.Run("the same command of a later time is run", func(t *testing.T) {
		w := newWorld(t)
		counter := filepath.Join(w.away, "counter")
		for range 3 {
			w.run(`echo run >> ` + counter)
		}
		if w.read(counter) != "run\nrun\nrun\n" {
			t.Errorf("it ran %q", w.read(counter))
		}
	})
}

func TestExecuteRefusals(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		name, body string
		headers    []string
		want       int
	}{
		{"no JSON", `command=ls`, nil, http.StatusBadRequest},
		{"no command", `{}`, nil, http.StatusBadRequest},
		{"a blank command", `{"command": "  "}`, nil, http.StatusBadRequest},
		{"a command that is no text", `{"command": ["ls"]}`, nil, http.StatusBadRequest},
		{"a NUL", `{"command": "ls \u0000"}`, nil, http.StatusBadRequest},
		{"a timeout that is no number", command("ls"), []string{"X-Sandbox-Timeout", "soon"}, http.StatusBadRequest},
		{"a timeout that is not a number", command("ls"), []string{"X-Sandbox-Timeout", "NaN"}, http.StatusBadRequest},
		{"a negative timeout", command("ls"), []string{"X-Sandbox-Timeout", "-1"}, http.StatusBadRequest},
		{"a negative limit", `{"command": "ls", "timeout_seconds": -1}`, nil, http.StatusBadRequest},
		{"a body without end", `{"command": "` + strings.Repeat("x", 9<<20) + `"}`, nil, http.StatusRequestEntityTooLarge},
	} {
		t.Run(tc.name+" is refused", func(t *testing.T) {
			w := w.in(t)
			got := w.ask("POST", "/execute", tc.body, tc.headers...)
			if got.status != tc.want || !strings.Contains(got.body, `"detail"`) {
				t.Errorf("%d %s", got.status, got.body)
			}
		})
	}
	t.Run("a wait without end is one of an hour", func(t *testing.T) {
		w := w.in(t)
		if got := w.run("echo ok", "X-Sandbox-Timeout", "1e300"); got.Stdout != "ok\n" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a sandbox that has ended is not found", func(t *testing.T) {
		w := w.in(t)
		if _, err := w.manager.Kill(t.Context(), acme, w.box.ID); err != nil {
			t.Fatal(err)
		}
		if got := w.ask("POST", "/execute", command("ls")); got.status != http.StatusNotFound {
			t.Errorf("%d %s", got.status, got.body)
		}
	})
}
