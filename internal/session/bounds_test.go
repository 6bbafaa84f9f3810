package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
)

// scripted is a domain whose runs tell what a test says, as a kernel in the hands of its user can.
type scripted struct {
	*sandbox.Manager
	events iter.Seq[agentapi.Event]
	end    agentapi.End
}

func (s scripted) Run(context.Context, auth.Principal, string, agentapi.RunParams) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		if !yield(agentapi.Event{Type: agentapi.EventStarted, Count: 1}, nil) {
			return
		}
		if s.events != nil {
			for e := range s.events {
				if !yield(e, nil) {
					return
				}
			}
		}
		yield(agentapi.Event{Type: agentapi.EventEnd, End: &s.end}, nil)
	}
}

// tells makes the runs of a place tell what a test says.
func (p *place) tells(end agentapi.End, events iter.Seq[agentapi.Event]) {
	p.wrap = func(m *sandbox.Manager) session.Sandboxes { return scripted{m, events, end} }
}

func times(n int, event func(i int) agentapi.Event) iter.Seq[agentapi.Event] {
	return func(yield func(agentapi.Event) bool) {
		for i := range n {
			if !yield(event(i)) {
				return
			}
		}
	}
}

var ok = agentapi.End{Outcome: agentapi.OutcomeOK}

func TestWhatIsKeptForARetryIsBoundedWhateverARunTells(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	raw := json.RawMessage(`"` + long + `"`)
	for name, events := range map[string]iter.Seq[agentapi.Event]{
		"long tracebacks": times(64, func(int) agentapi.Event {
			return agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: "E", Traceback: []string{long}}}
		}),
		"long values of errors": times(64, func(int) agentapi.Event {
			return agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Value: strings.Repeat("\x00", 1<<20)}}
		}),
		"metadata of results": times(64, func(int) agentapi.Event {
			return agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Metadata: map[string]json.RawMessage{"m": raw}}}
		}),
		"long names of types": times(64, func(int) agentapi.Event {
			return agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Data: map[string]json.RawMessage{long: nil}}}
		}),
		"notices": times(64, func(int) agentapi.Event { return agentapi.Event{Type: agentapi.EventNotice, Message: long} }),
		"very many events": times(200_000, func(i int) agentapi.Event {
			return agentapi.Event{Type: []agentapi.EventType{agentapi.EventStdout, agentapi.EventStderr}[i%2], Data: []byte("x")}
		}),
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			p.tells(ok, events)
			p.wantBounded("a part of what this run told is not kept")
		})
	}
}

// wantBounded runs a cell under a key, twice, and looks at what was kept between them.
func (p *place) wantBounded(notice string) {
	p.t.Helper()
	s := p.serve()
	opened := s.open("a")
	spec := session.RunSpec{Code: "1", IdempotencyKey: "call-1"}
	if _, err := s.run(p.t.Context(), "a", spec); err != nil {
		p.t.Fatal(err)
	}
	run, err := p.store.RunByKey(p.t.Context(), opened.ID, opened.Generation, "call-1")
	if err != nil {
		p.t.Fatal(err)
	}
	if len(run.Answer) == 0 || len(run.Answer) > 8<<20 {
		p.t.Errorf("%d bytes are kept", len(run.Answer))
	}
	again, err := s.run(p.t.Context(), "a", spec)
	if err != nil {
		p.t.Fatal(err)
	}
	if !again.replayed || again.end.Outcome != agentapi.OutcomeOK || len(again.notices) == 0 || again.notices[len(again.notices)-1] != notice {
		p.t.Errorf("told again: replayed %v, %s, %d notices, the last of them %.80q", again.replayed, again.end.Outcome, len(again.notices), again.notices[max(0, len(again.notices)-1):])
	}
}

// many are artifacts of every run, more than anybody would make.
type many struct{ session.Artifacts }

func (many) Forget(string) {}

func (many) Collect(context.Context, *agentapi.Client, string, artifact.Origin, artifact.Box) (all []artifact.Artifact, _ error) {
	for i := range 10_000 {
		all = append(all, artifact.Artifact{Path: fmt.Sprint(i) + strings.Repeat("\x01", 1000), Error: strings.Repeat("no room", 100)})
	}
	return all, nil
}

// noted counts what is asked of a keeper.
type noted struct {
	session.Artifacts
	collected, forgotten *atomic.Int32
}

func (n noted) Collect(context.Context, *agentapi.Client, string, artifact.Origin, artifact.Box) ([]artifact.Artifact, error) {
	n.collected.Add(1)
	return nil, nil
}

func (n noted) Forget(string) { n.forgotten.Add(1) }

func TestABoxWithoutFilesIsNotCollected(t *testing.T) {
	for empty, want := range map[bool]int32{true: 0, false: 1} {
		p := newPlace(t)
		keeper := noted{collected: new(atomic.Int32), forgotten: new(atomic.Int32)}
		p.artifacts = keeper
		end := ok
		end.Empty = empty
		p.tells(end, nil)
		s := p.serve()
		s.open("a")
		if s.cell("a", "1"); keeper.collected.Load() != want {
			t.Errorf("a box that is empty, %v: collected %d times; want %d", empty, keeper.collected.Load(), want)
		}
	}
}

func TestWhatIsKnownOfFilesEndsWithTheirSandbox(t *testing.T) {
	for name, end := range map[string]func(*server, session.Session) error{
		"stopped": func(s *server, _ session.Session) error { _, err := s.Stop(s.place.t.Context(), acme, "a"); return err },
		"lost": func(s *server, of session.Session) error {
			_, err := s.sandboxes.Kill(s.place.t.Context(), acme, of.Sandbox)
			s.until("a", session.LogSandboxLost)
			return err
		},
		"replaced": func(s *server, _ session.Session) error {
			s.checkpoint("a", "one")
			_, err := s.Restore(s.place.t.Context(), acme, "a", "one", "")
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			keeper := noted{collected: new(atomic.Int32), forgotten: new(atomic.Int32)}
			p.artifacts = keeper
			s := p.sleeps(&sleepers{})
			if err := end(s, s.open("a", onDisk)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Get(t.Context(), acme, "a"); err != nil { // waits for whoever takes its end in
				t.Fatal(err)
			}
			if keeper.forgotten.Load() == 0 {
				t.Error("it is remembered")
			}
		})
	}
}

func TestArtifactsCountInWhatIsKeptForARetry(t *testing.T) {
	p := newPlace(t)
	p.tells(ok, nil)
	p.artifacts = many{}
	p.wantBounded("a part of what this run told is not kept")
}

func TestTheLogNamesSomeOfManyArtifactsAndCountsAll(t *testing.T) {
	p := newPlace(t)
	p.tells(ok, nil)
	p.artifacts = many{}
	s := p.serve()
	s.open("a")
	s.cell("a", "1")
	line := s.lines("a")[2]
	if line.Event != session.LogArtifacts || line.Count != 10_000 || len(line.Artifacts) != 100 || !line.Truncated {
		t.Errorf("%s of %d files, %d of them named, truncated %v", line.Event, line.Count, len(line.Artifacts), line.Truncated)
	}
	if text, err := json.Marshal(line); err != nil || len(text) > 1<<20 {
		t.Errorf("the line has %d bytes, %v", len(text), err)
	}
}

func TestALogThatIsFullTellsEndsAlone(t *testing.T) {
	p := newPlace(t)
	p.config.MaxLog = 64 << 10
	s := p.serve()
	opened := s.open("a")
	long := strings.Repeat("\x01", 1<<20)
	for range 500 {
		line := session.LogLine{Event: session.LogDatasetFailed, Dataset: long, Message: long, SHA256: long, ToolCall: long, Cause: long}
		if err := s.Note(t.Context(), acme, "a", line); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(filepath.Join(p.dir, "sessions", "t-acme", opened.ID, "session.log"))
	if err != nil || info.Size() > 2*p.config.MaxLog {
		t.Errorf("a log that may have %d bytes has %d, %v", p.config.MaxLog, info.Size(), err)
	}
	if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
		t.Fatal(err)
	}
	if all := s.events("a"); all[len(all)-1] != session.LogStopped {
		t.Errorf("the last line tells %s", all[len(all)-1])
	}
}

// fills gives a place a disk that is full while the result is true.
func (p *place) fills() *atomic.Bool {
	full := &atomic.Bool{}
	p.config.Space = func(int64) error {
		if full.Load() {
			return fault.New(fault.DiskFull, "the server's disk is full")
		}
		return nil
	}
	return full
}

func TestEnsure_DiskFull(t *testing.T) {
	p := newPlace(t)
	full := p.fills()
	s := p.serve()
	s.open("a")
	full.Store(true)
	if _, _, err := s.Ensure(t.Context(), acme, "new", session.Request{}); !fault.Is(err, fault.DiskFull) {
		t.Errorf("a new session: %v, want %s", err, fault.DiskFull)
	}
	s.open("a") // is there already
	full.Store(false)
	s.open("new")
}

func TestRun_DiskFull(t *testing.T) {
	p := newPlace(t)
	full := p.fills()
	p.tells(ok, nil)
	s := p.serve()
	opened := s.open("a")
	for _, is := range []bool{false, true} {
		full.Store(is)
		key := fmt.Sprint("full-", is)
		if _, err := s.run(t.Context(), "a", session.RunSpec{Code: "1", IdempotencyKey: key}); err != nil {
			t.Fatal(err)
		}
		r, err := p.store.RunByKey(t.Context(), opened.ID, opened.Generation, key)
		if err != nil || r.Outcome != string(agentapi.OutcomeOK) {
			t.Errorf("full %v: the run is %q, %v", is, r.Outcome, err)
		}
		if (r.Code == "") != is || (len(r.Answer) == 0) != is {
			t.Errorf("full %v: the row has code %q and %d bytes of answer", is, r.Code, len(r.Answer))
		}
	}
}

func TestLog_DiskFull(t *testing.T) {
	p := newPlace(t)
	full := p.fills()
	s := p.serve()
	s.open("a")
	note := func() session.LogLine {
		t.Helper()
		line := session.LogLine{Event: session.LogDatasetFailed, Dataset: "d", Message: "the reason"}
		if err := s.Note(t.Context(), acme, "a", line); err != nil {
			t.Fatal(err)
		}
		return last(t, s, acme, "a")
	}
	if line := note(); line.Message != "the reason" || line.Truncated {
		t.Errorf("with space: %+v", line)
	}
	full.Store(true)
	if line := note(); line.Event != session.LogDatasetFailed || line.Message != "" || !line.Truncated {
		t.Errorf("on a full disk: %+v", line)
	}
	full.Store(false)
	if line := note(); line.Message != "the reason" {
		t.Errorf("with space again: %+v", line)
	}
}

func TestTheLogsOfATenantAreBoundedTogether(t *testing.T) {
	p := newPlace(t)
	p.config.MaxLogs = 64 << 10
	s := p.serve()
	long := strings.Repeat("x", 4<<10)
	fill := func(key string) {
		t.Helper()
		s.open(key)
		for range 12 {
			if err := s.Note(t.Context(), acme, key, session.LogLine{Event: session.LogDatasetFailed, Message: long}); err != nil {
				t.Fatal(err)
			}
		}
	}
	total := func() (n int64) {
		t.Helper()
		logs, err := filepath.Glob(filepath.Join(p.dir, "sessions", "t-acme", "*", "session.log"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range logs {
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			n += info.Size()
		}
		return n
	}
	for _, key := range []string{"a", "b"} {
		fill(key)
	}
	if n := total(); n > p.config.MaxLogs*5/4 { // a line that has no room is still there, without its words
		t.Errorf("logs that may have %d bytes have %d", p.config.MaxLogs, n)
	}

	other := auth.Principal{Tenant: "globex"}
	if _, _, err := s.Ensure(t.Context(), other, "a", session.Request{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Note(t.Context(), other, "a", session.LogLine{Event: session.LogDatasetFailed, Message: long}); err != nil {
		t.Fatal(err)
	}
	if line := last(t, s, other, "a"); line.Message != long {
		t.Errorf("another tenant's line is %+v", line)
	}

	s.close() // the next server counts what is there
	s = p.serve()
	fill("d")
	if line := last(t, s, acme, "d"); line.Message != "" {
		t.Errorf("a line after a restart tells %.40q", line.Message)
	}
	if n := total(); n > p.config.MaxLogs*5/4 { // a line that has no room is still there, without its words
		t.Errorf("after a restart logs that may have %d bytes have %d", p.config.MaxLogs, n)
	}
	for _, key := range []string{"a", "b", "d"} {
		if err := s.Remove(t.Context(), acme, key); err != nil {
			t.Fatal(err)
		}
	}
	fill("e")
	if line := last(t, s, acme, "e"); line.Message != long {
		t.Errorf("a line after the others were removed is %+v", line)
	}
}

// last is the last line of a log.
func last(t *testing.T, s *server, who auth.Principal, key string) (line session.LogLine) {
	t.Helper()
	for text, err := range s.Log(t.Context(), who, key, session.LogQuery{Last: 1}) {
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &line); err != nil {
			t.Fatal(err)
		}
	}
	return line
}

// counted is a domain that counts the events it tells.
type counted struct {
	*sandbox.Manager
	told *atomic.Int32
}

func (c counted) Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error] {
	return func(yield func(sandbox.LifecycleEvent, error) bool) {
		for event, err := range c.Manager.Events(ctx, p, q) {
			c.told.Add(1)
			if !yield(event, err) {
				return
			}
		}
	}
}

func TestWhoeverBeginsToListenReadsNothingOfThePast(t *testing.T) {
	p := newPlace(t)
	told := new(atomic.Int32)
	p.wrap = func(m *sandbox.Manager) session.Sandboxes { return counted{m, told} }
	s := p.serve()
	for range 5 {
		sb, _, err := s.sandboxes.Create(t.Context(), acme, sandbox.Spec{Template: "python"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.sandboxes.Kill(t.Context(), acme, sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	opened := s.open("a")
	if _, err := s.sandboxes.Kill(t.Context(), acme, opened.Sandbox); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) { // nobody asks: it is heard
		kept, err := p.store.Session(t.Context(), acme.Tenant, "a")
		if err != nil {
			t.Fatal(err)
		}
		if kept.State == session.StateLost {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a session whose sandbox ended is %s", kept.State)
		}
	}
	if n := told.Load(); n > 6 {
		t.Errorf("%d events were read to hear of one", n)
	}
}

func TestWhatAKernelSaysItHoldsIsBounded(t *testing.T) {
	long := strings.Repeat("v", 5000)
	held := agentapi.Holding{Variables: map[string]agentapi.Variable{}}
	for i := range 20_000 {
		held.Variables[fmt.Sprint("n", i)] = agentapi.Variable{}
		held.Modules = append(held.Modules, fmt.Sprint("m", i))
	}
	held.Variables["!"+long] = agentapi.Variable{Type: long, Value: long} // the first
	end := ok
	end.Value, _ = json.Marshal(held)
	p := newPlace(t)
	p.tells(end, nil)
	s := p.serve()
	s.open("a")
	s.cell("a", "1")
	got, err := s.State(t.Context(), acme, "a")
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Variables) != 500 || len(got.Modules) != 2000 || !got.Truncated {
		t.Errorf("%d variables and %d modules, truncated %v", len(got.Variables), len(got.Modules), got.Truncated)
	}
	for name, v := range got.Variables {
		if len(name) > 256 || len(v.Type) > 128 || len(v.Value) > 4000 {
			t.Errorf("a name of %d bytes, a type of %d, a value of %d", len(name), len(v.Type), len(v.Value))
		}
	}
}

func TestAKernelThatDoesNotSayWhatItHoldsIsNotToldAsItWasBefore(t *testing.T) {
	p := newPlace(t)
	end := ok
	end.Value = json.RawMessage(`{"variables": {"x": {"type": "int", "value": "1"}}}`)
	p.tells(end, nil)
	s := p.serve()
	s.open("a")
	s.cell("a", "x = 1")
	s.close()
	p.tells(ok, nil)
	s = p.serve()
	s.cell("a", "x = 'too long to be told'")
	if got, err := s.State(t.Context(), acme, "a"); err != nil || len(got.Variables) != 0 || !got.Truncated {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestState_DiskFull(t *testing.T) {
	p := newPlace(t)
	full := p.fills()
	end := ok
	end.Value = json.RawMessage(`{"variables": {"x": {"type": "int", "value": "1"}}}`)
	p.tells(end, nil)
	s := p.serve()
	s.open("a")
	full.Store(true)
	s.cell("a", "x = 1")
	s.close()
	s = p.serve() // which knows what the file tells
	if got, err := s.State(t.Context(), acme, "a"); err != nil || len(got.Variables) != 0 || !got.Truncated || got.Time.IsZero() {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestWhatNamesAFileToKeepIsBounded(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "open('f', 'w').write('x')")
	for what, args := range map[string][2]string{"tool call": {"session/f", strings.Repeat("x", 256)}, "path": {strings.Repeat("x", 5000), ""}} {
		if _, err := s.KeepFile(t.Context(), acme, "a", args[0], args[1]); !fault.Is(err, fault.Invalid) {
			t.Errorf("a long %s: %v", what, err)
		}
	}
}

func TestATenantHasSoManySessionsAndNoMore(t *testing.T) {
	p := newPlace(t)
	p.config.MaxPerTenant = 3
	s := p.serve()
	var all sync.WaitGroup
	refused := make([]error, 6)
	for i := range refused {
		all.Go(func() { _, _, refused[i] = s.Ensure(t.Context(), acme, fmt.Sprint("k", i), session.Request{}) })
	}
	all.Wait()
	opened := 0
	for i, err := range refused {
		switch {
		case err == nil:
			opened++
			s.open(fmt.Sprint("k", i)) // what is there can be opened again
		case !fault.Is(err, fault.Exhausted):
			t.Errorf("key %d: %v", i, err)
		}
	}
	if opened != 3 {
		t.Errorf("%d sessions were opened; want 3", opened)
	}
	if _, _, err := s.Ensure(t.Context(), auth.Principal{Tenant: "globex"}, "k", session.Request{}); err != nil {
		t.Errorf("another tenant: %v", err)
	}
}

// stuck is a domain whose agents do not answer while files are collected, as one that its user has frozen.
type stuck struct {
	*sandbox.Manager
	frozen chan struct{} // closed when the first call hangs
	once   *sync.Once
	now    func() bool
}

func (s stuck) Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error) {
	if s.now() {
		s.once.Do(func() { close(s.frozen) })
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	return s.Manager.Agent(ctx, p, id)
}

func TestASandboxThatDoesNotAnswerDoesNotHoldUpTheEnd(t *testing.T) {
	p := newPlace(t)
	p.config.Grace = 100 * time.Millisecond
	frozen, ready := make(chan struct{}), make(chan struct{})
	now := func() bool {
		select {
		case <-ready:
			return true
		default:
			return false
		}
	}
	p.wrap = func(m *sandbox.Manager) session.Sandboxes { return stuck{m, frozen, new(sync.Once), now} }
	s := p.serve()
	s.open("a")
	close(ready)
	var told error
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, told = s.run(t.Context(), "a", session.RunSpec{Code: "open('artifacts/f', 'w').close()"})
	}()
	<-frozen
	closed := make(chan struct{})
	go func() { defer close(closed); s.close() }()
	select {
	case <-closed:
	case <-time.After(2 * time.Minute):
		t.Fatal("the end waits for a sandbox that does not answer")
	}
	<-over
	if told != nil {
		t.Errorf("the run, which had ended, was told as %v", told)
	}
}

func TestASurvivingRunEndsWithTheServer(t *testing.T) {
	s := serve(t)
	s.open("a")
	ctx, leave := context.WithCancel(t.Context())
	over := make(chan struct{})
	begun := make(chan struct{})
	go func() {
		defer close(over)
		spec := session.RunSpec{Code: "import time\nwhile True: time.sleep(1)", Disconnect: agentapi.DisconnectSurvive}
		for e := range s.Run(ctx, acme, "a", spec) {
			if e.Type == agentapi.EventStarted {
				close(begun)
			}
		}
	}()
	<-begun
	leave()
	s.Quit()
	select {
	case <-over:
	case <-time.After(2 * time.Minute):
		t.Fatal("a run that nobody hears holds up the server")
	}
}

// deaf is a domain whose first Kill fails.
type deaf struct {
	*sandbox.Manager
	failed *bool
}

func (d deaf) Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error) {
	if !*d.failed {
		*d.failed = true
		return sandbox.Sandbox{}, errors.New("the maker does not answer")
	}
	return d.Manager.Kill(ctx, p, id)
}

func TestAStopThatFailedIsTriedAgain(t *testing.T) {
	for name, again := range map[string]func(*server) error{
		"by a stop":    func(s *server) error { _, err := s.Stop(s.place.t.Context(), acme, "a"); return err },
		"by a removal": func(s *server) error { return s.Remove(s.place.t.Context(), acme, "a") },
		"by an opening": func(s *server) error {
			_, _, err := s.Ensure(s.place.t.Context(), acme, "a", session.Request{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			p.wrap = func(m *sandbox.Manager) session.Sandboxes { return deaf{m, new(bool)} }
			s := p.serve()
			opened := s.open("a")
			if _, err := s.Stop(t.Context(), acme, "a"); err == nil {
				t.Fatal("a stop that failed was told as done")
			}
			if err := again(s); err != nil {
				t.Fatal(err)
			}
			if sb, err := s.sandboxes.Get(t.Context(), acme, opened.Sandbox); err != nil || sb.State != sandbox.StateEnded {
				t.Errorf("the sandbox is %s, %v", sb.State, err)
			}
		})
	}
}

// sleepers is a domain that can copy sandboxes by name alone: this driver cannot.
type sleepers struct {
	*sandbox.Manager
	names  []string // of copies
	resume func(id string)
	kill   func(id string)

	mu     sync.Mutex
	copies int
	notes  []map[string]string // annotations of copies
}

func (s *sleepers) Fork(_ context.Context, _ auth.Principal, _ string, spec sandbox.ForkSpec) (sandbox.ForkResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := fmt.Sprint("copy-", s.copies)
	if s.copies < len(s.names) {
		id = s.names[s.copies]
	}
	s.copies++
	s.notes = append(s.notes, spec.Annotations)
	return sandbox.ForkResult{Sandboxes: []sandbox.Sandbox{{ID: id, State: sandbox.StateRunning}}}, nil
}

func (s *sleepers) Pause(context.Context, auth.Principal, string, sandbox.PauseSpec) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, nil
}

func (s *sleepers) Resume(_ context.Context, _ auth.Principal, id string, _ time.Duration) (sandbox.Sandbox, error) {
	if s.resume != nil {
		s.resume(id)
	}
	return sandbox.Sandbox{}, nil
}

func (s *sleepers) Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error) {
	if sb, err := s.Manager.Get(ctx, p, id); err == nil {
		return sb, nil
	}
	return sandbox.Sandbox{ID: id, State: sandbox.StateRunning}, nil
}

func (s *sleepers) Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error) {
	if s.kill != nil {
		s.kill(id)
	}
	return s.Manager.Kill(ctx, p, id)
}

func (p *place) sleeps(with *sleepers) *server {
	p.wrap = func(m *sandbox.Manager) session.Sandboxes { with.Manager = m; return with }
	return p.serve()
}

func (s *server) checkpoint(key, id string) {
	s.place.t.Helper()
	if _, _, err := s.Checkpoint(s.place.t.Context(), acme, key, id, nil); err != nil {
		s.place.t.Fatal(err)
	}
}

var onDisk = session.Request{Spec: session.Spec{Storage: session.StorageDisk}}

func TestACheckpointThatDoesNotWakeHoldsUpNoOther(t *testing.T) {
	woken, release := make(chan struct{}), make(chan struct{})
	p := newPlace(t)
	s := p.sleeps(&sleepers{names: []string{"Aa", "BB"}, resume: func(id string) {
		if id == "Aa" {
			close(woken)
			<-release
		}
	}})
	s.open("a", onDisk)
	s.checkpoint("a", "one")
	s.checkpoint("a", "two")
	var first sync.WaitGroup
	first.Go(func() {
		if _, err := s.Restore(t.Context(), acme, "a", "one", "b"); err != nil {
			t.Error(err)
		}
	})
	<-woken
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := s.Restore(ctx, acme, "a", "two", "c"); err != nil {
		t.Errorf("another checkpoint: %v", err)
	}
	close(release)
	first.Wait()
}

func TestFewWaitForOneCheckpoint(t *testing.T) {
	release := make(chan struct{})
	s := newPlace(t).sleeps(&sleepers{resume: func(string) { <-release }})
	s.open("a", onDisk)
	s.checkpoint("a", "one")
	const all, waiting = 40, 1 + 16
	told := make(chan error, all)
	for i := range all {
		go func() {
			_, err := s.Restore(t.Context(), acme, "a", "one", fmt.Sprint("k", i))
			told <- err
		}()
	}
	for range all - waiting {
		if err := <-told; !fault.Is(err, fault.Exhausted) {
			t.Errorf("one of too many was told %v", err)
		}
	}
	close(release)
	for range waiting {
		if err := <-told; err != nil {
			t.Error(err)
		}
	}
}

func TestARestoredCopyCarriesTheNameOfItsOwnSession(t *testing.T) {
	with := &sleepers{}
	s := newPlace(t).sleeps(with)
	s.open("a", onDisk)
	s.checkpoint("a", "one")
	b, err := s.Restore(t.Context(), acme, "a", "one", "b")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{session.AnnotationKey: "b", session.AnnotationID: b.ID}
	if diff := cmp.Diff(want, with.notes[1]); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}

func TestARestoreWaitsForAStopThatGoesOn(t *testing.T) {
	killing := make(chan struct{})
	restored := make(chan struct{})
	with := &sleepers{}
	s := newPlace(t).sleeps(with)
	first := s.open("a", onDisk)
	s.checkpoint("a", "one")
	with.kill = func(id string) {
		if id == first.Sandbox {
			close(killing)
			select {
			case <-restored:
			case <-time.After(300 * time.Millisecond): // it waits, as it should
			}
		}
	}
	var stopped sync.WaitGroup
	stopped.Go(func() {
		if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
			t.Error(err)
		}
	})
	<-killing
	if _, err := s.Restore(t.Context(), acme, "a", "one", ""); err != nil {
		t.Fatal(err)
	}
	close(restored)
	stopped.Wait()
	want := []session.LogEvent{session.LogStarted, session.LogCheckpoint, session.LogStopped, session.LogRestored}
	if diff := cmp.Diff(want, s.events("a")); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	if got, err := s.Get(t.Context(), acme, "a"); err != nil || got.State != session.StateRunning || got.Told {
		t.Errorf("the session is %s, told %v, %v", got.State, got.Told, err)
	}
}
