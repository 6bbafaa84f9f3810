package session_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
)

func TestARunUnderTheSameKeyIsToldAgainAndNotRunAgain(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	s.open("a")
	s.cell("a", "n = 0")
	spec := session.RunSpec{Code: "n += 1\nprint('n is', n)\nopen('artifacts/f.txt', 'w').write('x')\nn", IdempotencyKey: "call-1"}
	first, err := s.run(t.Context(), "a", spec)
	if err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"at once", "after a restart"} {
		got, err := s.run(t.Context(), "a", spec)
		if err != nil {
			t.Fatal(err)
		}
		if !got.replayed {
			t.Errorf("%s it is not told as an answer of before", when)
		}
		got.replayed = false
		first.end.Value = nil
		if diff := cmp.Diff(fmt.Sprintf("%+v", first), fmt.Sprintf("%+v", got)); diff != "" {
			t.Errorf("%s (-first +again):\n%s", when, diff)
		}
		s.close()
		s = p.serve()
	}
	other := spec
	other.Code = "n += 5"
	if _, err := s.run(t.Context(), "a", other); !fault.Is(err, fault.Conflict) {
		t.Errorf("other code under the same key: %v", err)
	}
	if o := s.cell("a", "n"); o.result != "1" {
		t.Errorf("n is %s: it ran again", o.result)
	}
}

func TestARetryWaitsForTheFirst(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "import time\nn = 0")
	spec := session.RunSpec{Code: "n += 1\ntime.sleep(0.3)\nn", IdempotencyKey: "call-1"}
	var all sync.WaitGroup
	replayed := make([]bool, 5)
	for i := range replayed {
		all.Go(func() {
			o, err := s.run(t.Context(), "a", spec)
			if err != nil || o.result != "1" {
				t.Errorf("caller %d was told %q, %v", i, o.result, err)
			}
			replayed[i] = o.replayed
		})
	}
	all.Wait()
	ran := 0
	for _, r := range replayed {
		if !r {
			ran++
		}
	}
	if ran != 1 {
		t.Errorf("it ran %d times", ran)
	}
}

func TestARunThatACrashCutOffIsToldAndNotRunAgain(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	got := s.open("a")
	spec := session.RunSpec{Code: "1", IdempotencyKey: "call-1"}
	if _, err := s.run(t.Context(), "a", spec); err != nil {
		t.Fatal(err)
	}
	r, err := p.store.RunByKey(t.Context(), got.ID, 1, "call-1")
	if err != nil {
		t.Fatal(err)
	}
	s.close()
	r.ID, r.Key, r.Cell, r.Outcome, r.Answer = "run_cut", "call-2", 2, "", nil // as it stands while it runs
	if err := p.store.BeginRun(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	s = p.serve()
	spec.IdempotencyKey = "call-2"
	if _, err := s.run(t.Context(), "a", spec); !fault.Is(err, fault.Conflict) || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("the retry: %v", err)
	}
	if r, err := s.RunOf(t.Context(), "acme", "run_cut"); err != nil || r.Outcome != session.OutcomeCut {
		t.Errorf("it is recorded as %+v, %v", r, err)
	}
	lines := s.lines("a")
	if line := lines[len(lines)-1]; line.Run != "run_cut" || line.Event != session.LogExecution || line.Outcome != session.OutcomeCut || line.Success == nil || *line.Success || line.Code != "1" {
		t.Errorf("the log tells it as %+v", line)
	}
	spec.IdempotencyKey = ""
	if _, err := s.run(t.Context(), "a", spec); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Get(t.Context(), acme, "a"); err != nil || got.Runs != 3 || got.Failed != 1 {
		t.Errorf("%d runs, %d failed, %v; want the one that was cut off among three", got.Runs, got.Failed, err)
	}
}

func TestARunThatWasCutOffAfterItsSessionHadStoppedIsToldToo(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	got := s.open("a")
	if _, err := s.run(t.Context(), "a", session.RunSpec{Code: "1", IdempotencyKey: "call-1"}); err != nil {
		t.Fatal(err)
	}
	r, err := p.store.RunByKey(t.Context(), got.ID, 1, "call-1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
		t.Fatal(err)
	}
	s.close()
	r.ID, r.Key, r.Cell, r.Outcome, r.Answer = "run_cut", "", 2, "", nil
	if err := p.store.BeginRun(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	s = p.serve()
	lines := s.lines("a")
	if line := lines[len(lines)-1]; line.Run != "run_cut" || line.Outcome != session.OutcomeCut {
		t.Errorf("the log ends with %+v", line)
	}
	if got, err := s.Get(t.Context(), acme, "a"); err != nil || got.Runs != 2 || got.Failed != 1 {
		t.Errorf("%d runs, %d failed, %v", got.Runs, got.Failed, err)
	}
}

func TestAKeyHoldsInOneSandbox(t *testing.T) {
	s := serve(t)
	s.open("a")
	spec := session.RunSpec{Code: "1", IdempotencyKey: "call-1"}
	for range 2 {
		if o, err := s.run(t.Context(), "a", spec); err != nil || o.replayed {
			t.Fatalf("%+v, %v", o, err)
		}
		if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
			t.Fatal(err)
		}
		s.open("a")
	}
}

func TestARunThatNeverBeganCanBeTriedAgain(t *testing.T) {
	s := serve(t)
	s.open("a")
	if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
		t.Fatal(err)
	}
	spec := session.RunSpec{Code: "1", IdempotencyKey: "call-1"}
	if _, err := s.run(t.Context(), "a", spec); !fault.Is(err, fault.Conflict) {
		t.Fatal(err)
	}
	s.open("a")
	if o, err := s.run(t.Context(), "a", spec); err != nil || o.replayed {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestD7_S4_46_S4_47_ATimeoutInterruptsAndKeepsVariables(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "x = 41")
	o, err := s.run(t.Context(), "a", session.RunSpec{Code: "while True: pass", TimeoutMS: 200})
	if err != nil || o.end.Outcome != agentapi.OutcomeTimeout {
		t.Fatalf("%+v, %v", o.end, err)
	}
	if o := s.cell("a", "x + 1"); o.result != "42" {
		t.Errorf("x + 1 is %q", o.result)
	}
	line := s.lines("a")[2]
	if line.Outcome != "timeout" || line.Timeout != 0.2 || *line.Success || line.DurationMS < 200 || line.Message == "" {
		t.Errorf("the log says %+v", line)
	}
}

// leave runs code and leaves when it has said something.
func leave(t *testing.T, s *server, key string, spec session.RunSpec) {
	t.Helper()
	for e, err := range s.Run(t.Context(), acme, key, spec) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == agentapi.EventStdout {
			return
		}
	}
	t.Fatal("it ended before it said anything")
}

func TestARunWhoseCallerLeavesIsInterruptedLoggedAndItsFilesAreKept(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "import time")
	leave(t, s, "a", session.RunSpec{Code: "x = 5\nopen('artifacts/half.txt', 'w').write('half')\nprint('hello', flush=True)\ntime.sleep(60)"})
	line := s.until("a", session.LogArtifacts)
	if diff := cmp.Diff([]session.LogArtifact{{ID: line.Artifacts[0].ID, Name: "half.txt", MIME: "text/plain", Size: 4}}, line.Artifacts); diff != "" {
		t.Errorf("artifacts (-want +got):\n%s", diff)
	}
	line = s.lines("a")[2]
	if line.Outcome != "interrupted" || line.Stdout != "hello\n" || *line.Success {
		t.Errorf("the log says %+v", line)
	}
	if o := s.cell("a", "x"); o.result != "5" {
		t.Errorf("x is %q", o.result)
	}
}

func TestARunThatSurvivesItsCallerGoesOn(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "import time")
	leave(t, s, "a", session.RunSpec{Code: "print('hello', flush=True)\ntime.sleep(0.3)\nx = 5", Disconnect: agentapi.DisconnectSurvive})
	if o := s.cell("a", "x"); o.result != "5" {
		t.Errorf("x is %q", o.result)
	}
	if line := s.lines("a")[2]; line.Outcome != "ok" {
		t.Errorf("the log says %+v", line)
	}
}

func TestWhoeverWaitsForATurnMayLeave(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "import time")
	done := make(chan struct{})
	begun := make(chan struct{})
	go func() {
		defer close(done)
		for e, err := range s.Run(t.Context(), acme, "a", session.RunSpec{Code: "import os\nwhile not os.path.exists('go'): time.sleep(0.01)"}) {
			if err != nil {
				t.Error(err)
			}
			if e.Type == agentapi.EventStarted {
				close(begun)
			}
		}
	}()
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for s.Waiting(acme, "a") == 0 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	if _, err := s.run(ctx, "a", session.RunSpec{Code: "never = 1"}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("it was told %v", err)
	}
	agent, err := s.Agent(t.Context(), acme, "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Mkdir(t.Context(), agentapi.MkdirParams{Path: "session/go"}); err != nil {
		t.Fatal(err)
	}
	<-done
	if o := s.cell("a", "'never' in globals()"); o.result != "False" {
		t.Errorf("a cell ran whose caller had left: %q", o.result)
	}
}

func TestAStopEndsWhatRunsAndTellsItFirst(t *testing.T) {
	s := serve(t)
	s.open("a")
	begun := make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		var told error
		for e, err := range s.Run(t.Context(), acme, "a", session.RunSpec{Code: "import time\ntime.sleep(60)"}) {
			if told = err; e.Type == agentapi.EventStarted {
				close(begun)
			}
		}
		failed <- told
	}()
	<-begun
	if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; !fault.Is(err, fault.Gone) {
		t.Errorf("the run was told %v", err)
	}
	if diff := cmp.Diff([]session.LogEvent{session.LogStarted, session.LogExecution, session.LogStopped}, s.events("a")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

func TestS4_111_S4_118_TheLogTellsEverythingAboutACell(t *testing.T) {
	s := serve(t)
	got := s.open("a")
	spec := session.RunSpec{Code: "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7", ToolCall: "call_9", TimeoutMS: 5000}
	o, err := s.run(t.Context(), "a", spec)
	if err != nil {
		t.Fatal(err)
	}
	line := s.lines("a")[1]
	if line.DurationMS <= 0 || line.PeakBytes <= 0 || line.CPUMS < 0 || line.Time.Location() != time.UTC {
		t.Errorf("the line is %+v", line)
	}
	yes, zero := true, 0
	want := session.LogLine{
		Seq: 2, Time: line.Time, Event: session.LogExecution, Sandbox: got.Sandbox, Run: o.run, Cell: 1, ToolCall: "call_9", Code: spec.Code, Success: &yes,
		Stdout: "out\n", Stderr: "err\n", Result: "42", Timeout: 5, Outcome: "ok", ExitCode: &zero,
		DurationMS: line.DurationMS, CPUMS: line.CPUMS, PeakBytes: line.PeakBytes,
	}
	if diff := cmp.Diff(want, line); diff != "" {
		t.Errorf("the line (-want +got):\n%s", diff)
	}
}

func TestTheLogIsBounded(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "print('ä' * 100_000)\n#"+strings.Repeat("x", 300<<10))
	line := s.lines("a")[1]
	if !line.Truncated || len(line.Stdout) > 64<<10+3 || len(line.Code) > 256<<10 || !strings.HasPrefix(line.Stdout, "ää") {
		t.Errorf("a line with %d bytes of output and %d of code, truncated %v", len(line.Stdout), len(line.Code), line.Truncated)
	}
}

func TestALineThatACrashHasTornIsCutOff(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	got := s.open("a")
	s.cell("a", "1")
	s.close()
	path := filepath.Join(p.dir, "sessions", "t-acme", got.ID, "session.log")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"seq":3,"timestamp":"2026-`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	s = p.serve()
	s.cell("a", "2")
	var seqs []int64
	for _, line := range s.lines("a") {
		seqs = append(seqs, line.Seq)
	}
	if diff := cmp.Diff([]int64{1, 2, 3}, seqs); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}

func TestTheNewestLinesOfALogAndThoseAfterOne(t *testing.T) {
	s := serve(t)
	s.open("a")
	for i := range 3 {
		s.cell("a", fmt.Sprint(i))
	}
	for want, q := range map[string]session.LogQuery{"3 4": {Last: 2}, "1 2 3 4": {Last: 9}, "4": {After: 3}, "": {After: 4}} {
		var got []string
		for text, err := range s.Log(t.Context(), acme, "a", q) {
			if err != nil {
				t.Fatal(err)
			}
			var line session.LogLine
			if err := json.Unmarshal(text, &line); err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprint(line.Seq))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%+v gives lines %v, not %s", q, got, want)
		}
	}
}

func TestS4_113_TheStateTellsVariablesWithoutRunningCodeOfTheirs(t *testing.T) {
	s := serve(t)
	s.open("a")
	before, err := s.State(t.Context(), acme, "a")
	if err != nil || len(before.Variables) != 0 {
		t.Fatalf("before any cell: %+v, %v", before, err)
	}
	s.cell("a", `
import math
ran = []
class Meta(type):
    def __getattribute__(cls, name):
        ran.append(name)
        return super().__getattribute__(name)
class Odd(metaclass=Meta):
    def __repr__(self): ran.append("repr"); return "odd"
    __str__ = __repr__
    def __getattr__(self, name): ran.append(name); raise AttributeError(name)
    def __class_getitem__(cls, item): ran.append("item")
class Int(int):
    def __repr__(self): ran.append("int"); return "0"
class Sly(type):
    def __hash__(cls): ran.append("hash of a class"); return 1
    def __eq__(cls, other): ran.append("comparison of classes"); return True
    def __bool__(cls): ran.append("truth of a class"); return True
class Mean(metaclass=Sly):
    def __bool__(self): ran.append("truth"); raise KeyboardInterrupt
    __hash__ = __eq__ = __len__ = __bool__
class Name(str):
    def __getitem__(self, at): ran.append("part of a name"); return object()
class Odder: pass
Odder.__name__ = Name("Odder")
import sys, types
false = types.ModuleType("pandas.core.frame")
class DataFrame:
    @property
    def _mgr(self): ran.append("property"); raise KeyboardInterrupt
    @property
    def __dict__(self): ran.append("dictionary"); raise SystemExit
false.DataFrame = DataFrame
sys.modules["pandas.core.frame"] = false
mean, odder, frame, part = Mean(), Odder(), DataFrame(), slice(Mean(), 2)
odd, sub, n, text, _hidden = Odd(), Int(4), 7, "hä", 1
nested = {"a": [1, (2.5, None)], "o": odd}
long = "x" * 5000
del ran[:]
`)
	got, err := s.State(t.Context(), acme, "a")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]agentapi.Variable{
		"math": {Type: "module", Value: "<module>"}, "ran": {Type: "list", Value: "[]"},
		"Meta": {Type: "type", Value: "<non-serializable>"}, "Odd": {Type: "Meta", Value: "<non-serializable>"}, "Int": {Type: "type", Value: "<non-serializable>"},
		"odd": {Type: "Odd", Value: "<non-serializable>"}, "sub": {Type: "Int", Value: "<non-serializable>"},
		"Sly": {Type: "type", Value: "<non-serializable>"}, "Mean": {Type: "Sly", Value: "<non-serializable>"}, "Name": {Type: "type", Value: "<non-serializable>"},
		"Odder": {Type: "type", Value: "<non-serializable>"}, "DataFrame": {Type: "type", Value: "<non-serializable>"},
		"sys": {Type: "module", Value: "<module>"}, "types": {Type: "module", Value: "<module>"}, "false": {Type: "module", Value: "<module>"},
		"mean": {Type: "Mean", Value: "<non-serializable>"}, "odder": {Type: "class", Value: "<non-serializable>"},
		"frame": {Type: "DataFrame", Value: "<non-serializable>"}, "part": {Type: "slice", Value: "<non-serializable>"},
		"n": {Type: "int", Value: "7"}, "text": {Type: "str", Value: "hä"},
		"nested": {Type: "dict", Value: "{'a': [1, (2.5, None)], 'o': <Odd>}"},
		"long":   {Type: "str", Value: strings.Repeat("x", 997) + "..."},
	}
	if diff := cmp.Diff(want, got.Variables); diff != "" {
		t.Errorf("variables (-want +got):\n%s", diff)
	}
	if o := s.cell("a", "ran"); o.result != "[]" {
		t.Errorf("code of theirs ran: %s", o.result)
	}
	if !strings.Contains(strings.Join(got.Modules, " "), "math") {
		t.Errorf("modules are %v", got.Modules)
	}
	s.cell("a", "exit()")
	if got, err := s.State(t.Context(), acme, "a"); err != nil || len(got.Variables) != 0 {
		t.Errorf("after the kernel is gone: %+v, %v", got, err)
	}
}

func TestWhatAKernelHoldsFitsHoweverItIsWritten(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "for i in range(490): globals()['v%d' % i] = '\U0001F600' * 1000")
	got, err := s.State(t.Context(), acme, "a")
	if err != nil || len(got.Variables) < 20 || !got.Truncated {
		t.Errorf("%d variables, truncated %v, %v", len(got.Variables), got.Truncated, err)
	}
}

func TestUnusedSessionsAreRemovedAfterTheirRetention(t *testing.T) {
	p := newPlace(t)
	p.config.Retention, p.config.SweepInterval = 2*time.Second, 20*time.Millisecond
	s := p.serve()
	s.open("old")
	s.open("lives")
	if _, err := s.Stop(t.Context(), acme, "old"); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := s.Get(t.Context(), acme, "old"); fault.Is(err, fault.NotFound) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it is never removed")
		}
	}
	if got, err := s.Get(t.Context(), acme, "lives"); err != nil || got.State != session.StateRunning {
		t.Errorf("one with a sandbox is %+v, %v", got, err)
	}
}

func TestNothingIsLeftOfAServerThatEnded(t *testing.T) {
	p := newPlace(t)
	p.serve().close() // what the runtime and the database keep for ever is there now
	before := runtime.NumGoroutine()
	s := p.serve()
	for i := range 3 {
		key := fmt.Sprintf("s%d", i)
		s.open(key)
		s.cell(key, "1")
		if err := s.Remove(t.Context(), acme, key); err != nil {
			t.Fatal(err)
		}
	}
	s.close()
	for end := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond) // agents of sandboxes that ended close without waiting
	}
	if n := runtime.NumGoroutine(); n > before {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines before, %d after:\n%s", before, n, buf[:runtime.Stack(buf, true)])
	}
}

func TestTheQueueOfASessionHasAnEnd(t *testing.T) {
	s := serve(t)
	s.open("a")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	full := make(chan struct{}, 70)
	for range 70 { // one runs, 64 wait
		all.Go(func() {
			if _, err := s.run(ctx, "a", session.RunSpec{Code: "import time; time.sleep(60)"}); fault.Is(err, fault.Exhausted) {
				full <- struct{}{}
			}
		})
	}
	for range 5 {
		select {
		case <-full:
		case <-time.After(2 * time.Minute):
			t.Fatal("nobody was turned away")
		}
	}
	cancel()
	all.Wait()
	if len(full) != 0 {
		t.Errorf("%d more than 5 were turned away", len(full))
	}
	if o := s.cell("a", "1 + 1"); o.result != "2" {
		t.Errorf("after that it says %q", o.result)
	}
}

func TestARunWhoseSandboxIsLostIsToldWhatToDoAndNotRunAgainByItself(t *testing.T) {
	s := serve(t)
	got := s.open("a")
	spec := session.RunSpec{Code: "import time\nprint('here', flush=True)\ntime.sleep(60)", IdempotencyKey: "call-1"}
	var told error
	for e, err := range s.Run(t.Context(), acme, "a", spec) {
		if told = err; e.Type == agentapi.EventStdout {
			if _, err := s.sandboxes.Kill(t.Context(), acme, got.Sandbox); err != nil {
				t.Fatal(err)
			}
		}
	}
	if text := fault.Message(told); !fault.Is(told, fault.Gone) || !strings.Contains(text, "recreate") || !strings.Contains(text, "did not come to its end") {
		t.Errorf("the run was told %v", told)
	}
	if diff := cmp.Diff([]session.LogEvent{session.LogStarted, session.LogExecution, session.LogSandboxLost}, s.events("a")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	if line := s.lines("a")[1]; line.Outcome != session.OutcomeFailed || line.Stdout != "here\n" || *line.Success {
		t.Errorf("the log says %+v", line)
	}
	if _, err := s.run(t.Context(), "a", spec); !fault.Is(err, fault.Gone) {
		t.Errorf("a retry in the same sandbox: %v", err)
	}
	s.open("a", session.Request{Recreate: true})
	spec.Code = "'again'"
	if o, err := s.run(t.Context(), "a", spec); err != nil || o.replayed || o.result != "'again'" {
		t.Errorf("in a new sandbox: %+v, %v", o, err)
	}
}
