package execd_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// openSession makes a session, and a function that runs in it.
func (w *world) openSession(body any) (id string, run func(command string, more ...any) []string) {
	w.t.Helper()
	var made struct {
		ID string `json:"session_id"`
	}
	w.json(w.ask("POST", "/session", body), &made)
	return made.ID, func(command string, more ...any) []string {
		w.t.Helper()
		req := map[string]any{"command": command}
		for i := 0; i < len(more); i += 2 {
			req[more[i].(string)] = more[i+1]
		}
		return told(w.stream("/session/"+made.ID+"/run", req))
	}
}

func TestASessionRemembers(t *testing.T) {
	w := newWorld(t)
	_, run := w.openSession(map[string]any{"cwd": "/tmp"})
	for i, step := range []struct {
		command string
		more    []any
		want    []string
	}{
		{"pwd; export A=1; x=2; list=(a 'b c'); f() { echo f$1; }", nil, []string{"init", "stdout /tmp", "execution_complete"}},
		{`echo $A $x "${list[1]}" $GREETING; f 3; cd /usr`, nil, []string{"init", "stdout 1 2 b c hello", "stdout f3", "execution_complete"}},
		{"pwd", []any{"cwd", "/etc"}, []string{"init", "stdout /etc", "execution_complete"}},
		{"pwd; cd /; cd - > /dev/null; pwd", nil, []string{"init", "stdout /usr", "stdout /usr", "execution_complete"}},
		{"echo still; x=3; exit 7", nil, []string{"init", "stdout still", "error CommandExecError 7"}},
		{"echo $x; unset A GREETING", nil, []string{"init", "stdout 3", "execution_complete"}},
		{"echo [$A] [$GREETING]", nil, []string{"init", "stdout [] []", "execution_complete"}},
		{"sh -c 'exit 7'", nil, []string{"init", "error CommandExecError 7"}},
		{"x=4; sleep 30", []any{"timeout", 100}, []string{"init", "error CommandExecError -1"}},
		{"echo $x >&2", nil, []string{"init", "stderr 3", "execution_complete"}},
		{"set -e; false; echo never", nil, []string{"init", "error CommandExecError 1"}},
		{"set +e; false; echo $#", nil, []string{"init", "stdout 0", "execution_complete"}},
		{"exec echo gone", nil, []string{"init", "stdout gone", "execution_complete"}},
		{"echo $x; pwd", nil, []string{"init", "stdout 3", "stdout /usr", "execution_complete"}},
		{"set -o noclobber; alias q='echo aliased'; shopt -s expand_aliases", nil, []string{"init", "execution_complete"}},
		{"q 1", nil, []string{"init", "stdout aliased 1", "execution_complete"}},
	} {
		if got := run(step.command, step.more...); !slices.Equal(got, step.want) {
			t.Fatalf("step %d, %q: got %q, want %q", i, step.command, got, step.want)
		}
	}
}

func TestASessionEnds(t *testing.T) {
	w := newWorld(t)
	id, run := w.openSession("")
	run("true")
	left := filepath.Join(w.temp, ".opensandbox-session-"+id)
	if _, err := os.Stat(left); err != nil {
		t.Fatal(err)
	}
	if a := w.ask("DELETE", "/session/"+id, nil); a.status != 200 || a.header.Get("Content-Length") != "0" {
		t.Fatalf("got %+v", a)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Fatalf("what it remembered is left: %v", err)
	}
	if a := w.ask("POST", "/session/"+id+"/run", map[string]any{"command": "true"}); a.status != 404 {
		t.Fatalf("got %+v", a)
	}
	if a := w.ask("DELETE", "/session/"+id, nil); a.status != 404 {
		t.Fatalf("got %+v", a)
	}
}

func TestADeletedSessionEndsItsRun(t *testing.T) {
	w := newWorld(t)
	id, _ := w.openSession("")
	resp := w.send(t.Context(), "POST", "/session/"+id+"/run", map[string]any{"command": "echo on; sleep 60"})
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	for e, _ := nextEvent(t, in); e.Type != "stdout"; e, _ = nextEvent(t, in) {
	}
	if a := w.ask("DELETE", "/session/"+id, nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	var last event
	for e, more := nextEvent(t, in); more; e, more = nextEvent(t, in) {
		last = e
	}
	if last.Error == nil || last.Error.Value != "-1" {
		t.Fatalf("got %+v", last)
	}
}

func TestThePlainShellDoesWithoutBash(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(sh, filepath.Join(dir, "sh")); err != nil {
		t.Fatal(err)
	}
	w := newWorldWith(t, map[string]string{"PATH": dir})
	for range 2 {
		if got := told(w.stream("/command", map[string]any{"command": "echo $0; exit 3"})); !slices.Equal(got, []string{"init", "stdout sh", "error CommandExecError 3"}) {
			t.Fatalf("got %q", got)
		}
	}
	_, run := w.openSession("")
	run("export A='x y'; cd /usr")
	if got := run(`echo "$A"; pwd; exit 4`); !slices.Equal(got, []string{"init", "stdout x y", "stdout /usr", "error CommandExecError 4"}) {
		t.Fatalf("got %q", got)
	}
	if err := os.Remove(filepath.Join(dir, "sh")); err != nil {
		t.Fatal(err)
	}
	if a := w.ask("POST", "/command", map[string]any{"command": "true"}); a.status != 400 || !strings.Contains(a.body, "no shell") || !strings.Contains(a.body, "NOT_SUPPORTED") {
		t.Fatalf("without any shell: %+v", a)
	}
}
