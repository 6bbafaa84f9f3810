package execd_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestCommands(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		body map[string]any
		want []string
	}{
		"one line is one event":                 {map[string]any{"command": "echo hello"}, []string{"init", "stdout hello", "execution_complete"}},
		"lines, blank ones and one without end": {map[string]any{"command": `printf 'a\n\nb'`}, []string{"init", "stdout a", "stdout \n", "stdout b", "execution_complete"}},
		"carriage returns end lines":            {map[string]any{"command": `printf 'a\rb\r\nc'`}, []string{"init", "stdout a", "stdout b", "stdout c", "execution_complete"}},
		"a status that is not zero":             {map[string]any{"command": "exit 7"}, []string{"init", "error CommandExecError 7"}},
		"a signal":                              {map[string]any{"command": "kill -9 $$"}, []string{"init", "error CommandExecError -1"}},
		"the sandbox's environment":             {map[string]any{"command": "echo $GREETING $MORE", "envs": map[string]any{"MORE": "you", "NONE": nil}}, []string{"init", "stdout hello you", "execution_complete"}},
		"a directory":                           {map[string]any{"command": "pwd", "cwd": "/tmp"}, []string{"init", "stdout /tmp", "execution_complete"}},
		"a directory by variable":               {map[string]any{"command": "pwd", "cwd": "$WHERE/", "envs": map[string]any{"WHERE": "/tmp"}}, []string{"init", "stdout /tmp", "execution_complete"}},
		"the home":                              {map[string]any{"command": "pwd", "cwd": "~"}, []string{"init", "stdout " + w.home, "execution_complete"}},
		"too long":                              {map[string]any{"command": "sleep 30", "timeout": 50}, []string{"init", "error CommandExecError -1"}},
		"arguments without a shell":             {map[string]any{"argv": []string{"printf", "%s|", "a b", "$HOME"}}, []string{"init", "stdout a b|$HOME|", "execution_complete"}},
		"a program that there is not":           {map[string]any{"argv": []string{"no-such-program"}}, []string{"init", "stderr no-such-program: no such command", "error CommandExecError 127"}},
		"no text, and a line that some cut at":  {map[string]any{"command": `printf 'a\377b\302\205c\n'`}, []string{"init", "stdout a\uFFFDb\u0085c", "execution_complete"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := told(w.stream("/command", c.body))
			if !slices.Equal(got, c.want) {
				t.Fatalf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestACommandThatIsNotThereFails(t *testing.T) {
	w := newWorld(t)
	got := told(w.stream("/command", map[string]any{"command": "no-such-command"}))
	if len(got) != 3 || !strings.Contains(got[1], "stderr ") || !strings.Contains(got[1], "no-such-command") || got[2] != "error CommandExecError 127" {
		t.Fatalf("got %q", got)
	}
}

func TestLongOutputIsWhole(t *testing.T) {
	w := newWorld(t)
	var all strings.Builder
	for _, e := range w.stream("/command", map[string]any{"command": `head -c 3000000 /dev/zero | tr '\0' x; echo; for i in $(seq 20000); do echo $i; done`}) {
		if e.Type == "stdout" {
			all.WriteString(e.Text)
		}
	}
	var want strings.Builder
	want.WriteString(strings.Repeat("x", 3000000))
	for i := 1; i <= 20000; i++ {
		fmt.Fprint(&want, i)
	}
	if all.String() != want.String() {
		t.Fatalf("%d bytes came, not %d", all.Len(), want.Len())
	}
}

func TestBackgroundCommands(t *testing.T) {
	w := newWorld(t)
	list := w.stream("/command", map[string]any{"command": "echo one; echo two >&2; read x < go; echo é; exit 3", "background": true, "cwd": w.mkfifo("go")})
	if got := told(list); !slices.Equal(got, []string{"init", "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
	id := list[0].Text
	var state struct {
		ID, Content, Error string
		Running            bool
		ExitCode           *int    `json:"exit_code"`
		Started            string  `json:"started_at"`
		Finished           *string `json:"finished_at"`
	}
	w.json(w.ask("GET", "/command/status/"+id, nil), &state)
	if state.ID != id || !state.Running || state.ExitCode != nil || state.Finished != nil || !strings.HasPrefix(state.Content, "echo one") {
		t.Fatalf("got %+v", state)
	}
	logs := w.until(func() (string, bool) {
		a := w.ask("GET", "/command/"+id+"/logs", nil)
		return a.header.Get("EXECD-COMMANDS-TAIL-CURSOR"), strings.Contains(a.body, "one\n") && strings.Contains(a.body, "two\n")
	})
	if err := os.WriteFile(filepath.Join(w.home, "go"), []byte("\n"), 0); err != nil {
		t.Fatal(err)
	}
	w.until(func() (string, bool) {
		w.json(w.ask("GET", "/command/status/"+id, nil), &state)
		return "", !state.Running
	})
	if a := w.ask("GET", "/command/"+id+"/logs?cursor="+logs, nil); a.body != "é\n" || a.header.Get("Content-Length") != "3" {
		t.Fatalf("got %+v", a)
	}
	if state.ExitCode == nil || *state.ExitCode != 3 || state.Finished == nil {
		t.Fatalf("got %+v", state)
	}
}

func TestAnInterruptEndsACommandWithAllItStarted(t *testing.T) {
	w := newWorld(t)
	resp := w.send(t.Context(), "POST", "/command", map[string]any{"command": "sleep 60; echo never"})
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	first, _ := nextEvent(t, in)
	if a := w.ask("DELETE", "/command?id="+first.Text, nil); a.status != 200 || a.body != "" || a.header.Get("Content-Length") != "0" {
		t.Fatalf("got %+v", a)
	}
	var list []event
	for {
		e, more := nextEvent(t, in)
		if !more {
			break
		}
		list = append(list, e)
	}
	if got := told(list); !slices.Equal(got, []string{"error CommandExecError -1"}) {
		t.Fatalf("got %q", got)
	}
	if a := w.ask("DELETE", "/command?id="+first.Text, nil); a.status != 400 || !strings.Contains(a.body, "COMMAND_NOT_FOUND") {
		t.Fatalf("what has ended is interrupted: %+v", a)
	}
}

func TestACommandGoesOnWhenItsClientLeaves(t *testing.T) {
	w := newWorld(t)
	ctx, leave := context.WithCancel(t.Context())
	dir := w.mkfifo("go")
	resp := w.send(ctx, "POST", "/command", map[string]any{"command": "read x < go; head -c 1000000 /dev/zero; echo done > done", "cwd": dir})
	first, _ := nextEvent(t, bufio.NewReader(resp.Body))
	leave()
	resp.Body.Close()
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte("\n"), 0); err != nil {
		t.Fatal(err)
	}
	w.until(func() (string, bool) {
		var state struct{ Running bool }
		w.json(w.ask("GET", "/command/status/"+first.Text, nil), &state)
		return "", !state.Running
	})
	if text, err := os.ReadFile(filepath.Join(dir, "done")); err != nil || string(text) != "done\n" {
		t.Fatalf("%q, %v", text, err)
	}
}

func TestVariablesOfAFileAreThereForEveryCommand(t *testing.T) {
	w := newWorld(t)
	set := `mkdir -p "$(dirname "$EXECD_ENVS")"; printf '%s\n' "LATER='a b'" >> "$EXECD_ENVS"`
	if got := told(w.stream("/command", map[string]any{"command": set})); !slices.Equal(got, []string{"init", "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
	if got := told(w.stream("/command", map[string]any{"command": `echo "$LATER"`})); !slices.Equal(got, []string{"init", "stdout a b", "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
}

// mkfifo makes something in the sandbox's home that a command can wait for, and gives the home.
func (w *world) mkfifo(name string) string {
	w.t.Helper()
	if got := told(w.stream("/command", map[string]any{"command": "mkfifo " + name, "cwd": w.home})); len(got) != 2 {
		w.t.Fatalf("got %q", got)
	}
	return w.home
}

// until asks again until the answer is the right one.
func (w *world) until(ask func() (string, bool)) string {
	w.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if text, ok := ask(); ok {
			return text
		}
	}
	w.t.Fatal("it did not come to that in time")
	return ""
}

func BenchmarkCommand(b *testing.B) {
	w := newWorld(b)
	for b.Loop() {
		w.stream("/command", map[string]any{"command": "true"})
	}
}
