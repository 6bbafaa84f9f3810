package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

// bash runs a line as SDKs of E2B have it run: bash becomes the last command of a line.
func bash(line string) agentapi.ExecParams {
	return agentapi.ExecParams{Argv: []string{"/bin/bash", "-c", line}}
}

func TestCommandIsNoGroupLeader(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	t.Run("setsid is waited for", func(t *testing.T) {
		out, end := output(t, h.Client, bash("setsid sh -c 'sleep 1; echo late; exit 7'"))
		if out != "late\n" || end.ExitCode != 7 {
			t.Errorf("%q %+v", out, end)
		}
	})
	t.Run("a terminal is one of a session leader", func(t *testing.T) {
		p := bash("ps -o pid=,pgid=,sid=,tty= -p $$")
		p.PTY = &agentapi.PTYSize{}
		out, _ := output(t, h.Client, p)
		f := strings.Fields(out)
		if len(f) != 4 || f[0] != f[1] || f[0] != f[2] || f[3] == "?" {
			t.Errorf("%q", out)
		}
	})
	t.Run("a signal to its group reaches no other command", func(t *testing.T) {
		p := bash("echo up; exec cat")
		p.Stdin = true
		other, err := h.Exec(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		for e, err := range other.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if string(e.Data) == "up\n" {
				break
			}
		}
		out, end := output(t, h.Client, bash("sleep 100 & trap 'echo got; wait; exit 3' TERM; kill 0; wait"))
		if out != "got\n" || end.ExitCode != 3 {
			t.Errorf("%q %+v", out, end)
		}
		if list, err := h.Processes(t.Context()); err != nil || len(list) != 1 {
			t.Errorf("%+v, %v", list, err)
		}
	})
	t.Run("no process is left of its group's leader", func(t *testing.T) {
		for range 10 {
			output(t, h.Client, sh("true"))
		}
		if left := zombies(t); len(left) > 0 {
			t.Errorf("zombies: %v", left)
		}
	})
}

// zombies are the children of this process that were not collected.
func zombies(t *testing.T) (list []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		text := string(raw)
		f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
		if f[0] == "Z" && f[1] == strconv.Itoa(os.Getpid()) {
			list = append(list, text)
		}
	}
	return list
}

func TestCommandEndsWithAllItStarted(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	const deaf = "trap '' TERM INT HUP QUIT; "
	nap := fmt.Sprint("4343.", os.Getpid()) // so that other tests on this machine are not found
	for name, line := range map[string]string{
		"a session of its own":                     "setsid sh -c '" + deaf + "echo up; while :; do sleep 4343; done'",
		"a session of a child":                     deaf + "setsid -f sh -c '" + deaf + "echo up; while :; do sleep 4343; done'; while :; do sleep 4343; done",
		"an orphan":                                "(sh -c '" + deaf + "echo up; sleep 4343; :' &); sleep 4343; :",
		"an orphan of the group without the tag":   "(env -i sh -c '" + deaf + "echo up; sleep 4343; :' &); sleep 4343; :",
		"an orphan of the session without the tag": "setsid bash -c 'set -m; (env -i sh -c \"echo up; sleep 4343; :\" &); sleep 4343; :'",
	} {
		t.Run(name, func(t *testing.T) {
			line := strings.ReplaceAll(line, "4343", nap)
			for _, by := range []string{"timeout", "kill", "leaving"} {
				ends(t, h, line, nap, by)
			}
		})
	}
}

// ends starts a line that says when it is up, ends it in one of three ways and looks for what is left.
func ends(t *testing.T, h *home, line, nap, by string) {
	t.Helper()
	p := bash(line)
	if by == "timeout" {
		p.TimeoutMS = 2000
	}
	s, err := h.Exec(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var id string
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if e.ID != "" {
			id = e.ID
		}
		if e.End != nil {
			if want := map[string]agentapi.Outcome{"timeout": agentapi.OutcomeTimeout, "kill": agentapi.OutcomeInterrupted}[by]; e.End.Outcome != want {
				t.Errorf("by %s: %+v", by, e.End)
			}
			break
		}
		if e.Type != agentapi.EventStdout {
			continue
		}
		if by == "leaving" {
			break
		}
		if by == "kill" {
			err := h.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{ID: id}, Signal: "SIGKILL", Tree: true})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	s.Close()
	if by != "leaving" {
		if left := sleepers(nap); len(left) > 0 {
			t.Errorf("by %s: %v is left", by, left)
		}
	}
	await(t, func() bool { return len(sleepers(nap)) == 0 })
}

// sleepers are the processes that sleep so many seconds.
func sleepers(nap string) (list []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		if raw, err := os.ReadFile(file); err == nil && string(raw) == "sleep\x00"+nap+"\x00" {
			list = append(list, file)
		}
	}
	return list
}
