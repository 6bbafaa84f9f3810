package e2e_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// conversation is a session of a test; what a test does not expect to fail is fatal.
type conversation struct {
	t   testing.TB
	s   *server
	key string
	client.SessionInfo
}

// converse opens a session, which ends with the test.
func (s *server) converse(t testing.TB, key string, req client.SessionRequest) *conversation {
	t.Helper()
	c := &conversation{t: t, s: s, key: key}
	c.open(req)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = s.RemoveSession(ctx, key) // the test may have done so, or ended its server
	})
	return c
}

func (c *conversation) open(req client.SessionRequest) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	info, err := c.s.OpenSession(ctx, c.key, req)
	if err != nil {
		c.t.Fatalf("open session %s: %v", c.key, err)
	}
	c.SessionInfo = *info
}

func (c *conversation) run(req client.SessionRunRequest, key ...string) *client.SessionOutput {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	out, err := c.s.RunInSession(ctx, c.key, req, strings.Join(key, ""))
	if err != nil {
		c.t.Fatalf("run %.60q: %v", req.Code, err)
	}
	return out
}

func (c *conversation) cell(code string) *client.SessionOutput {
	c.t.Helper()
	return c.run(client.SessionRunRequest{Code: code})
}

// value runs a cell that must succeed and returns the value of its last expression.
func (c *conversation) value(code string) string {
	c.t.Helper()
	out := c.cell(code)
	if out.Outcome != client.OutcomeOK {
		c.t.Fatalf("cell %.60q ended %s: %s %+v", code, out.Outcome, out.Message, out.Error)
	}
	return out.Text()
}

// refused runs a cell that is not to be run.
func (c *conversation) refused(kind client.Kind) {
	c.t.Helper()
	if _, err := c.s.RunInSession(c.t.Context(), c.key, client.SessionRunRequest{Code: "1"}, ""); client.KindOf(err) != kind {
		c.t.Errorf("a run gave %v; want %s", err, kind)
	}
}

func (c *conversation) log() (all []client.SessionLogLine) {
	c.t.Helper()
	for line, err := range c.s.SessionLog(c.t.Context(), c.key, client.SessionLogRequest{}) {
		if err != nil {
			c.t.Fatal(err)
		}
		all = append(all, line)
	}
	return all
}

func (c *conversation) events() (all []string) {
	c.t.Helper()
	for _, line := range c.log() {
		all = append(all, line.Event)
	}
	return all
}

// until waits for the log to tell an event.
func (c *conversation) until(event string) client.SessionLogLine {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	for line, err := range c.s.SessionLog(ctx, c.key, client.SessionLogRequest{Follow: true}) {
		if err != nil {
			c.t.Fatal(err)
		}
		if line.Event == event {
			return line
		}
	}
	c.t.Fatalf("the log of %s never tells %s", c.key, event)
	return client.SessionLogLine{}
}

func TestS4_20_S4_27_S4_28_S4_42_S4_114_ASessionInMemoryIsCappedAndLeavesNothingOnTheDisk(t *testing.T) {
	s := sharedServer(t)
	c := s.converse(t, "tmpfs", client.SessionRequest{SizeBytes: 48 << 20})
	if c.Storage != "tmpfs" || c.SizeBytes != 48<<20 {
		t.Errorf("it has %s of %d bytes", c.Storage, c.SizeBytes)
	}
	if got := c.value("import os; os.getcwd(), sorted(os.listdir('.')), os.access('artifacts', os.W_OK), os.access('data', os.W_OK)"); got != "('/session', ['artifacts', 'data'], True, True)" {
		t.Errorf("it begins with %s", got)
	}
	// The name is put together inside: what is written must be found nowhere outside, and the code is in the log.
	c.value("open('data/secret', 'w').write('-'.join(['only', 'in', 'memory', 'e2e']) * 1000)")
	if out, err := exec.Command("grep", "-rl", "--binary-files=text", "--exclude-dir=templates", "only-in-memory-e2e", s.dir).CombinedOutput(); err == nil {
		t.Errorf("what a session in memory wrote is on the disk: %s", out)
	}
	out := c.cell("with open('data/big', 'wb') as f:\n    for _ in range(100): f.write(b'x' * (1 << 20))")
	if out.Error == nil || !strings.Contains(out.Error.Value, "No space left") {
		t.Errorf("100 MiB in 48: %s %+v", out.Outcome, out.Error)
	}
	if got := c.value("os.remove('data/big'); 1 + 1"); got != "2" {
		t.Errorf("after that it says %s", got)
	}
}

func TestS4_21_S4_120_ABoundSessionKeepsItsFilesAndNotItsVariables(t *testing.T) {
	s := newServer(t)
	c := s.converse(t, "bind", client.SessionRequest{Storage: "bind", SizeBytes: 64 << 20, Env: map[string]string{"TOKEN": "t0p-secret"}})
	if got := c.value("import os; x = 1; open('notes.txt', 'w').write('kept'); os.getcwd(), os.stat('/session').st_uid == os.getuid(), os.environ['TOKEN']"); got != "('/session', True, 't0p-secret')" {
		t.Errorf("it begins with %s", got)
	}
	// What is left there may be odd, and a place of the session's own be taken or lead elsewhere: the next sandbox starts all the same.
	c.value("os.rmdir('data'); open('data', 'w').close(); os.rmdir('artifacts'); os.symlink('/etc', 'artifacts')")
	if _, err := s.StopSession(t.Context(), c.key); err != nil {
		t.Fatal(err)
	}
	c.open(client.SessionRequest{})
	if got := c.value("'x' in globals(), open('notes.txt').read()"); got != "(False, 'kept')" || c.Generation != 2 {
		t.Errorf("opened again, generation %d, it says %s", c.Generation, got)
	}
	if err := s.Sandbox(c.Sandbox).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.refused(client.Gone)
	c.open(client.SessionRequest{Recreate: true})
	s.crash(t)
	s.start(t)
	if got := c.value("import os; open('notes.txt').read(), os.environ['TOKEN']"); got != "('kept', 't0p-secret')" {
		t.Errorf("after a loss and a crash it says %s", got)
	}
	log, err := os.ReadFile(filepath.Join(s.dir, "server", "sessions", "t-default", c.ID, "session.log"))
	if err != nil || strings.Contains(string(log), `"env":{`) || !strings.Contains(string(log), `"env":["TOKEN"]`) {
		t.Errorf("the log tells an environment: %v\n%s", err, log)
	}
	if err := s.RemoveSession(t.Context(), c.key); err != nil {
		t.Fatal(err)
	}
	if left, err := s.Volumes(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("volumes are left: %v, %v", left, err)
	}
	if left, err := os.ReadDir(filepath.Join(s.dir, "server", "sessions", "t-default")); err != nil || len(left) != 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
}

func TestS4_37_D15_ANewServerFindsSessionsAsTheyWere(t *testing.T) {
	s := newServer(t)
	c := s.converse(t, "thread", client.SessionRequest{})
	c.value("x = 41")
	answer := c.run(client.SessionRunRequest{Code: "x += 1; x"}, "call-1")
	began := make(chan struct{})
	go func() { // cut off by the crash
		for e := range s.StreamInSession(t.Context(), c.key, client.SessionRunRequest{Code: "import time; time.sleep(60)"}, "call-2") {
			if e.Type == client.EventStarted {
				close(began)
			}
		}
	}()
	<-began
	s.crash(t)
	s.start(t)
	before := c.Sandbox
	c.open(client.SessionRequest{})
	if c.Sandbox != before || c.Generation != 1 {
		t.Errorf("it has sandbox %s of generation %d, not %s", c.Sandbox, c.Generation, before)
	}
	if got := c.value("x"); got != "42" {
		t.Errorf("x is %s", got)
	}
	again := c.run(client.SessionRunRequest{Code: "x += 1; x"}, "call-1")
	if !again.Replayed || again.Run != answer.Run || again.Text() != "42" {
		t.Errorf("the retry was told %+v", again)
	}
	if _, err := s.RunInSession(t.Context(), c.key, client.SessionRunRequest{Code: "import time; time.sleep(60)"}, "call-2"); client.KindOf(err) != client.Conflict {
		t.Errorf("what the crash cut off: %v", err)
	}
	if got := c.value("x"); got != "42" {
		t.Errorf("something ran again: x is %s", got)
	}
}

func TestS4_38_D8_ALostSandboxIsToldAndReplacedOnlyWhenAsked(t *testing.T) {
	s := sharedServer(t)
	c := s.converse(t, "lost", client.SessionRequest{})
	c.value("x = 1")
	if err := s.Sandbox(c.Sandbox).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if line := c.until("sandbox_lost"); line.Cause != "killed" || line.Sandbox != c.Sandbox || line.Runs != 1 || line.CPUMS <= 0 {
		t.Errorf("the log says %+v", line)
	}
	c.refused(client.Gone)
	if _, err := s.OpenSession(t.Context(), c.key, client.SessionRequest{}); client.KindOf(err) != client.Gone {
		t.Errorf("an open gave %v", err)
	}
	if info, err := s.GetSession(t.Context(), c.key); err != nil || info.State != "lost" || info.Lost == nil {
		t.Errorf("it is %+v, %v", info, err)
	}
	c.open(client.SessionRequest{Recreate: true})
	if c.Lost == nil || c.Generation != 2 || c.value("'x' in globals()") != "False" {
		t.Errorf("replaced, it is %+v", c.SessionInfo)
	}
}

func TestS4_39_AnIdleSessionIsReaped(t *testing.T) {
	slow.Test(t)
	s := sharedServer(t)
	c := s.converse(t, "idle", client.SessionRequest{IdleTimeoutSeconds: 15}) // the cell begins within that
	c.value("x = 1")
	if line := c.until("session_stopped"); line.Cause != "idle" {
		t.Errorf("the log says %+v", line)
	}
	if info, err := s.GetSession(t.Context(), c.key); err != nil || info.State != "reaped" || info.StoppedAt.IsZero() {
		t.Errorf("it is %+v, %v", info, err)
	}
	c.refused(client.Gone)
}

func TestS4_46_S4_47_S4_48_S4_49_D7_D13_WhatACellDoesIsTold(t *testing.T) {
	s := sharedServer(t)
	c := s.converse(t, "told", client.SessionRequest{})
	out := c.cell("x = 5\nimport os, sys, subprocess\nprint('err', file=sys.stderr)\nsubprocess.run(['echo', 'sub'])\nos.system('echo sys')\n6 * 7")
	if out.Stdout != "sub\nsys\n" || out.Stderr != "err\n" || out.Text() != "42" {
		t.Errorf("it said %q, %q, %q", out.Stdout, out.Stderr, out.Text())
	}
	if out = c.run(client.SessionRunRequest{Code: "while True: pass", TimeoutSeconds: 0.3}); out.Outcome != client.OutcomeTimeout {
		t.Errorf("an endless loop ended %s", out.Outcome)
	}
	if got := c.value("x"); got != "5" {
		t.Errorf("after the timeout x is %s", got)
	}
	for code, outcome := range map[string]string{"exit()": client.OutcomeKernelDied, "import ctypes; ctypes.string_at(0)": client.OutcomeKernelDied} {
		if out = c.cell(code); out.Outcome != outcome || !out.Lost {
			t.Errorf("%s ended %s, lost %v", code, out.Outcome, out.Lost)
		}
		if out = c.cell("import os; os.getcwd()"); out.Text() != "'/session'" || len(out.Notices) != 1 {
			t.Errorf("after %s it says %s and %q", code, out.Text(), out.Notices)
		}
	}
	if info, err := s.GetSession(t.Context(), c.key); err != nil || info.State != "running" || info.Runs != 7 || info.Failed != 3 {
		t.Errorf("it is %+v, %v", info, err)
	}
}

func TestS4_53_S4_55_D14_CellsOfOneSessionWaitAndThoseOfOthersDoNot(t *testing.T) {
	s := sharedServer(t)
	one := s.converse(t, "busy", client.SessionRequest{})
	one.value("import time; seen = []; depth = 0")
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() { one.cell("depth += 1; seen.append(depth); time.sleep(0.02); depth -= 1") })
	}
	for i := range 20 {
		all.Go(func() {
			c := s.converse(t, fmt.Sprintf("many-%d", i), client.SessionRequest{})
			c.cell(fmt.Sprintf("mine = %d", i))
			if got := c.value("mine"); got != fmt.Sprint(i) {
				t.Errorf("session %d holds %s", i, got)
			}
		})
	}
	all.Wait()
	if got := one.value("seen"); got != "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]" {
		t.Errorf("cells saw each other: %s", got)
	}
}

func TestS4_111_S4_112_S4_113_S4_118_S4_119_TheFilesOfASessionAreComplete(t *testing.T) {
	s := sharedServer(t)
	c := s.converse(t, "files", client.SessionRequest{Limits: &client.Limits{CPUs: 1, MemoryBytes: 512 << 20}})
	c.value("import numpy as np, pandas as pd\nx = np.zeros((3, 4)); df = pd.DataFrame({'a': [1, 2]}); state = name = 1; state")
	if _, err := s.StopSession(t.Context(), c.key); err != nil {
		t.Fatal(err)
	}
	if diff := strings.Join(c.events(), " "); diff != "session_started code_execution session_stopped" {
		t.Errorf("the log tells %s", diff)
	}
	log := c.log()
	if begun := string(log[0].Config); !strings.Contains(begun, `"memory_bytes":536870912`) || !strings.Contains(begun, `"session_storage":"tmpfs"`) {
		t.Errorf("the beginning tells %s", begun)
	}
	if ran := log[1]; ran.DurationMS <= 0 || ran.CPUMS <= 0 || ran.PeakBytes <= 0 || ran.ExitCode == nil || ran.Success == nil || !*ran.Success {
		t.Errorf("the cell tells %+v", ran)
	}
	state, err := s.SessionState(t.Context(), c.key)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]client.SessionVariable{
		"np": {Type: "module", Value: "<module>"}, "pd": {Type: "module", Value: "<module>"}, "state": {Type: "int", Value: "1"}, "name": {Type: "int", Value: "1"},
		"x": {Type: "ndarray", Value: "array of shape (3, 4), float64"}, "df": {Type: "DataFrame", Value: "2 rows x 1 columns: a"},
	}
	if fmt.Sprint(state.Variables) != fmt.Sprint(want) || !slices.Contains(state.Modules, "numpy") {
		t.Errorf("it held %v and %v", state.Variables, state.Modules)
	}
	for _, name := range []string{"session.log", "session_metadata.json", "python_state.json"} {
		if _, err := os.Stat(filepath.Join(s.dir, "server", "sessions", "t-default", c.ID, name)); err != nil {
			t.Error(err)
		}
	}
}

func TestARunWhoseClientGoesAwayIsLoggedAndItsFilesAreKept(t *testing.T) {
	s := sharedServer(t)
	c := s.converse(t, "left", client.SessionRequest{})
	ctx, cancel := context.WithCancel(t.Context())
	code := "x = 5\nopen('/session/artifacts/half.txt', 'w').write('half')\nprint('hello', flush=True)\nimport time; time.sleep(60)"
	for e := range s.StreamInSession(ctx, c.key, client.SessionRunRequest{Code: code}, "") {
		if e.Type == client.EventStdout {
			cancel()
		}
	}
	cancel()
	if line := c.until("artifacts_created"); len(line.Artifacts) != 1 || line.Artifacts[0].Name != "half.txt" {
		t.Errorf("the log says %+v", line)
	}
	if got := c.value("x"); got != "5" {
		t.Errorf("x is %s", got)
	}
	if line := c.log()[1]; line.Outcome != client.OutcomeInterrupted || line.Stdout != "hello\n" {
		t.Errorf("the log says %+v", line)
	}
}

func TestACheckpointRestoresFilesAndMemory(t *testing.T) {
	s := newServer(t)
	c := s.converse(t, "travel", client.SessionRequest{Storage: "disk"})
	c.value("x = 1; open('f', 'w').write('one')")
	first, err := s.Checkpoint(t.Context(), c.key, client.CheckpointRequest{ID: "cp-1", Metadata: map[string]string{"step": "1"}})
	if err != nil {
		t.Fatal(err)
	}
	c.value("x = 2; open('f', 'w').write('two')")
	if again, err := s.Checkpoint(t.Context(), c.key, client.CheckpointRequest{ID: "cp-1"}); err != nil || !again.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("the same id again gave %+v, %v", again, err)
	}
	s.crash(t)
	s.start(t)
	for range 2 { // the checkpoint stays
		if _, err := s.RestoreSession(t.Context(), c.key, client.RestoreRequest{Checkpoint: "cp-1"}); err != nil {
			t.Fatal(err)
		}
		if got := c.value("x, open('f').read()"); got != "(1, 'one')" {
			t.Errorf("restored, it says %s", got)
		}
		c.value("x = 3; open('f', 'w').write('three')")
	}
	if _, err := s.RestoreSession(t.Context(), c.key, client.RestoreRequest{Checkpoint: "cp-1", Session: "branch"}); err != nil {
		t.Fatal(err)
	}
	branch := s.converse(t, "branch", client.SessionRequest{})
	if got := branch.value("x") + c.value("x"); got != "13" {
		t.Errorf("branch and trunk say %s", got)
	}
	if _, err := s.RestoreSession(t.Context(), c.key, client.RestoreRequest{Checkpoint: "nothing"}); client.KindOf(err) != client.NotFound {
		t.Errorf("an unknown checkpoint gave %v", err)
	}
	memory := s.converse(t, "memory", client.SessionRequest{})
	if _, err := s.Checkpoint(t.Context(), memory.key, client.CheckpointRequest{}); client.KindOf(err) != client.Unsupported {
		t.Errorf("a checkpoint of a session in memory gave %v", err)
	}
	for _, key := range []string{"travel", "branch", "memory"} {
		if err := s.RemoveSession(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	for sb, err := range s.List(t.Context(), client.ListRequest{States: []string{"starting", "running", "paused", "stopping"}}) {
		t.Errorf("sandbox %s is left, %v", sb.ID, err)
	}
}

func TestAServerThatIsKilledWhileItOpensSessionsLeavesNoSandboxBehind(t *testing.T) {
	s := newServer(t)
	for round := range 4 {
		var asking sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		old := s.Client
		for i := range 6 {
			asking.Go(func() {
				key := fmt.Sprintf("r%d-%d", round, i)
				storage := []string{"tmpfs", "disk", "bind"}[i%3]
				if _, err := old.OpenSession(ctx, key, client.SessionRequest{Storage: storage}); err == nil && i%2 == 0 {
					_, _ = old.StopSession(ctx, key) // it may be cut off
				}
			})
		}
		time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond) // somewhere in the middle of it
		s.crash(t)
		cancel()
		asking.Wait()
		s.start(t)
		wanted := map[string]bool{}
		for session, err := range s.Sessions(t.Context(), client.SessionsRequest{}) {
			if err != nil {
				t.Fatal(err)
			}
			if session.State == "running" {
				wanted[session.Sandbox] = true
			}
		}
		for sb, err := range s.List(t.Context(), client.ListRequest{States: []string{"starting", "running", "paused", "stopping"}}) {
			if err != nil {
				t.Fatal(err)
			}
			if !wanted[sb.ID] {
				t.Errorf("round %d: sandbox %s is no session's", round, sb.ID)
			}
			delete(wanted, sb.ID)
		}
		if len(wanted) > 0 {
			t.Errorf("round %d: sessions say that they have %v", round, wanted)
		}
	}
	for session, err := range s.Sessions(t.Context(), client.SessionsRequest{}) {
		if err != nil {
			t.Fatal(err)
		}
		if err := s.RemoveSession(t.Context(), session.Key); err != nil {
			t.Error(err)
		}
	}
	if left, err := s.Volumes(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("volumes are left: %v, %v", left, err)
	}
}
