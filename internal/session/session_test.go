package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
	"github.com/covehq/cove/kernel"
	"github.com/covehq/cove/test/slow"
)

var acme = auth.Principal{Tenant: "acme"}

// templates has one template, with the host's Python.
type templates struct{ python string }

func (t templates) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	return &template.Template{Name: name, Python: template.Python{Executable: t.python}}, nil
}

// place is what outlives a server: a database, a driver with its sandboxes, files.
type place struct {
	t       *testing.T
	dir     string
	store   *sqlstore.Store
	driver  *inproc.Driver
	python  string
	config  session.Config
	sandbox sandbox.Config
	// What stands between sessions and the domain or the keeper, to do what a hostile sandbox or a slow disk does.
	wrap      func(*sandbox.Manager) session.Sandboxes
	artifacts session.Artifacts
	log       slog.Handler // nil: discards
}

func newPlace(t *testing.T) *place {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal("these tests run real kernels and need python3: ", err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "kernel"), kernel.Files()); err != nil {
		t.Fatal(err)
	}
	store, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	driver, err := inproc.New(inproc.Config{Dir: filepath.Join(dir, "homes"), Kernel: filepath.Join(dir, "kernel", "kernel.py")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(driver.Close(), store.Close()); err != nil {
			t.Error(err)
		}
	})
	return &place{
		t: t, dir: dir, store: store, driver: driver, python: python,
		// A relative root is below each sandbox's home: this driver has no isolation.
		config: session.Config{Dir: filepath.Join(dir, "sessions"), Root: "session", Size: 64 << 20, Template: "python"},
	}
}

// server is one life of the domain over a place.
type server struct {
	*session.Manager
	place     *place
	sandboxes *sandbox.Manager
	keeper    *artifact.Keeper
	close     func()
}

func (p *place) serve() *server {
	p.t.Helper()
	log := slog.New(slog.DiscardHandler)
	if p.log != nil {
		log = slog.New(p.log)
	}
	blobs, err := local.Open(filepath.Join(p.dir, "artifacts"), local.Options{})
	if err != nil {
		p.t.Fatal(err)
	}
	keeper, err := artifact.New(p.t.Context(), artifact.Config{PublicURL: "http://x", LinkTTL: time.Minute, MaxFileSize: 1 << 20, Log: log}, blobs, p.store)
	if err != nil {
		p.t.Fatal(err)
	}
	all := templates{p.python}
	sandboxes := sandbox.NewManager(p.sandbox, p.driver, p.store, all, sandbox.NopObserver{}, log)
	if err := sandboxes.Open(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	var domain session.Sandboxes = sandboxes
	if p.wrap != nil {
		domain = p.wrap(sandboxes)
	}
	var files session.Artifacts = keeper
	if p.artifacts != nil {
		files = p.artifacts
	}
	m := session.New(p.config, domain, all, p.store, files, nil, log)
	if err := m.Open(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	s := &server{Manager: m, place: p, sandboxes: sandboxes, keeper: keeper}
	s.close = sync.OnceFunc(func() {
		if err := errors.Join(m.Close(), sandboxes.Close(), keeper.Close(), blobs.Close()); err != nil {
			p.t.Error(err)
		}
	})
	p.t.Cleanup(s.close)
	return s
}

func serve(t *testing.T) *server { t.Helper(); return newPlace(t).serve() }

func (s *server) open(key string, req ...session.Request) session.Session {
	s.place.t.Helper()
	req = append(req, session.Request{})
	got, _, err := s.Ensure(s.place.t.Context(), acme, key, req[0])
	if err != nil {
		s.place.t.Fatalf("open %s: %v", key, err)
	}
	return got
}

// output is a run as a test sees it.
type output struct {
	stdout, result, failure string
	run                     string
	replayed                bool
	notices                 []string
	files                   []string
	end                     agentapi.End
}

func (s *server) run(ctx context.Context, key string, spec session.RunSpec) (o output, err error) {
	for e, err := range s.Run(ctx, acme, key, spec) {
		if err != nil {
			return o, err
		}
		switch e.Type {
		case agentapi.EventStarted:
			o.run, o.replayed = e.Run, e.Replayed
		case agentapi.EventStdout:
			o.stdout += string(e.Data)
		case agentapi.EventResult:
			_ = json.Unmarshal(e.Result.Data["text/plain"], &o.result)
		case agentapi.EventError:
			o.failure = e.Error.Name
		case agentapi.EventNotice:
			o.notices = append(o.notices, e.Message)
		case session.EventArtifact:
			o.files = append(o.files, e.Artifact.Path)
		case agentapi.EventEnd:
			o.end = *e.End
		}
	}
	return o, nil
}

// cell runs code that a test expects to be run.
func (s *server) cell(key, code string) output {
	s.place.t.Helper()
	o, err := s.run(s.place.t.Context(), key, session.RunSpec{Code: code})
	if err != nil {
		s.place.t.Fatalf("run %q: %v", code, err)
	}
	return o
}

// lines are the log of a session.
func (s *server) lines(key string) (all []session.LogLine) {
	s.place.t.Helper()
	for text, err := range s.Log(s.place.t.Context(), acme, key, session.LogQuery{}) {
		var line session.LogLine
		if err == nil {
			err = json.Unmarshal(text, &line)
		}
		if err != nil {
			s.place.t.Fatal(err)
		}
		all = append(all, line)
	}
	return all
}

func (s *server) events(key string) (all []session.LogEvent) {
	s.place.t.Helper()
	for _, line := range s.lines(key) {
		all = append(all, line.Event)
	}
	return all
}

// until waits for the log to tell something.
func (s *server) until(key string, event session.LogEvent) session.LogLine {
	s.place.t.Helper()
	ctx, cancel := context.WithTimeout(s.place.t.Context(), 2*time.Minute)
	defer cancel()
	for text, err := range s.Log(ctx, acme, key, session.LogQuery{Follow: true}) {
		var line session.LogLine
		if err == nil {
			err = json.Unmarshal(text, &line)
		}
		if err != nil {
			s.place.t.Fatal(err)
		}
		if line.Event == event {
			return line
		}
	}
	s.place.t.Fatalf("the log of %s never tells %s", key, event)
	return session.LogLine{}
}

func TestS4_30_S4_33_HoweverManyAskAtOnceOneSandboxIsMade(t *testing.T) {
	s := serve(t)
	var all sync.WaitGroup
	found, made := make([]string, 20), make([]bool, 20)
	for i := range found {
		all.Go(func() {
			got, created, err := s.Ensure(t.Context(), acme, "thread-1", session.Request{})
			if err != nil {
				t.Error(err)
			}
			found[i], made[i] = got.Sandbox, created
		})
	}
	all.Wait()
	creators := 0
	for i := range found {
		if found[i] != found[0] {
			t.Errorf("caller %d has sandbox %s, caller 0 has %s", i, found[i], found[0])
		}
		if made[i] {
			creators++
		}
	}
	living := 0
	for range s.sandboxes.Each {
		living++
	}
	if creators != 1 || living != 1 {
		t.Errorf("%d callers made a sandbox and %d live; want one", creators, living)
	}
}

func TestS4_31_S4_55_TwentySessionsAtOnceAreApart(t *testing.T) {
	s := serve(t)
	var all sync.WaitGroup
	ids := make([]string, 20)
	for i := range ids {
		all.Go(func() {
			key := fmt.Sprintf("thread-%d", i)
			ids[i] = s.open(key).Sandbox
			s.cell(key, fmt.Sprintf("mine = %d", i))
			if o := s.cell(key, "mine"); o.result != fmt.Sprint(i) {
				t.Errorf("session %d holds %q", i, o.result)
			}
		})
	}
	all.Wait()
	seen := map[string]bool{}
	for _, id := range ids {
		seen[id] = true
	}
	if len(seen) != len(ids) {
		t.Errorf("%d sessions have %d sandboxes", len(ids), len(seen))
	}
}

func TestS4_40_S4_41_S4_42_VariablesImportsAndDirectoryPersist(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "import math, os\nn = 1")
	s.cell("a", "n += 2")
	if o := s.cell("a", "print(n, math.floor(2.5), os.path.basename(os.getcwd()))"); o.stdout != "3 2 session\n" {
		t.Errorf("it said %q", o.stdout)
	}
	o := s.cell("a", "exit(3)")
	if o.end.Outcome != agentapi.OutcomeKernelDied || !o.end.Lost {
		t.Errorf("exit() ended as %+v", o.end)
	}
	o = s.cell("a", "import os\nprint(os.path.basename(os.getcwd()))")
	if o.stdout != "session\n" || len(o.notices) != 1 {
		t.Errorf("after the kernel was replaced it said %q and was told %q", o.stdout, o.notices)
	}
}

func TestD9_S4_62_BookkeepingTouchesNoNameOfTheUsers(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "state = name = value = f = item = gc = 1\nbefore = set(globals())")
	o := s.cell("a", "print(state, name, value, f, item, gc, sorted(n for n in set(globals()) - before if not n.startswith('_')))")
	if o.stdout != "1 1 1 1 1 1 ['before']\n" {
		t.Errorf("it said %q", o.stdout)
	}
}

func TestS4_53_D14_ParallelCellsOfASessionRunOneAfterTheOther(t *testing.T) {
	s := serve(t)
	s.open("a")
	s.cell("a", "import time\nseen = []\ndepth = 0")
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			s.cell("a", "depth += 1\nseen.append(depth)\ntime.sleep(0.01)\ndepth -= 1")
		})
	}
	all.Wait()
	if o := s.cell("a", "print(seen)"); o.stdout != "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" {
		t.Errorf("cells saw each other: %s", o.stdout)
	}
	cells := map[int]bool{}
	for _, line := range s.lines("a") {
		if line.Event == session.LogExecution {
			cells[line.Cell] = true
		}
	}
	if len(cells) != 12 || !cells[1] || !cells[12] {
		t.Errorf("the log counts cells %v; want 1 to 12", cells)
	}
}

func TestD3_S4_52_AKeyThatCouldLeadOutOfAFolderIsRefused(t *testing.T) {
	s := serve(t)
	for _, key := range []string{"", "../x", "a/b", ".", "..", ".x", "-x", "a b", "a\nb", "ä", strings.Repeat("x", 129)} {
		if _, _, err := s.Ensure(t.Context(), acme, key, session.Request{}); !fault.Is(err, fault.Invalid) {
			t.Errorf("key %q: %v", key, err)
		}
	}
	for _, key := range []string{"a", "9", "user:42@host=x+y.z-_", strings.Repeat("x", 128)} {
		if err := session.CheckKey("key", key); err != nil {
			t.Error(err)
		}
	}
}

func TestS4_36_ASessionThatIsNotThereIsNotFound(t *testing.T) {
	s := serve(t)
	s.open("mine")
	if _, err := s.run(t.Context(), "nobody", session.RunSpec{Code: "1"}); !fault.Is(err, fault.NotFound) {
		t.Errorf("run: %v", err)
	}
	other := auth.Principal{Tenant: "other"}
	if _, err := s.Get(t.Context(), other, "mine"); !fault.Is(err, fault.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	if _, err := s.Stop(t.Context(), acme, "nobody"); !fault.Is(err, fault.NotFound) {
		t.Errorf("stop: %v", err)
	}
	if err := s.Remove(t.Context(), acme, "nobody"); !fault.Is(err, fault.NotFound) {
		t.Errorf("remove: %v", err)
	}
}

func TestS4_35_D6_AStopIsLoggedAndMayBeRepeated(t *testing.T) {
	s := serve(t)
	first := s.open("a", session.Request{Spec: session.Spec{Metadata: map[string]string{"user": "7"}}})
	s.cell("a", "x = 1")
	s.cell("a", "1/0")
	for range 2 {
		if got, err := s.Stop(t.Context(), acme, "a"); err != nil || got.State != session.StateStopped || got.Stopped.IsZero() {
			t.Fatalf("stopped: %+v, %v", got, err)
		}
	}
	if sb, err := s.sandboxes.Get(t.Context(), acme, first.Sandbox); err != nil || sb.State != sandbox.StateEnded {
		t.Errorf("its sandbox is %s, %v", sb.State, err)
	}
	want := []session.LogEvent{session.LogStarted, session.LogExecution, session.LogExecution, session.LogStopped}
	if diff := cmp.Diff(want, s.events("a")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	last := s.lines("a")[3]
	if last.Cause != "stopped" || last.Runs != 2 || last.Failed != 1 || last.Sandbox != first.Sandbox || last.DurationMS <= 0 {
		t.Errorf("the last line is %+v", last)
	}
	if _, err := s.run(t.Context(), "a", session.RunSpec{Code: "1"}); !fault.Is(err, fault.Conflict) {
		t.Errorf("a run in a stopped session: %v", err)
	}
	second := s.open("a")
	if second.Sandbox == first.Sandbox || second.ID != first.ID || second.Generation != 2 || second.Metadata["user"] != "7" || second.Lost != nil {
		t.Errorf("opened again it is %+v", second)
	}
}

func TestS4_112_TheMetadataFileCountsAndTellsTheEnd(t *testing.T) {
	s := serve(t)
	got := s.open("a")
	s.cell("a", "1")
	if _, err := s.Stop(t.Context(), acme, "a"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(s.place.dir, "sessions", "t-acme", got.ID, "session_metadata.json"))
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]any{
		"session_id": "a", "container_id": got.Sandbox, "session_storage": "tmpfs", "dataset_access": "none", "image": "python",
		"execution_count": 1.0, "final_execution_count": 1.0, "failed_count": 0.0, "state": "stopped",
	} {
		if m[name] != want {
			t.Errorf("%s is %v, not %v", name, m[name], want)
		}
	}
	for _, name := range []string{"created_at", "last_used", "stopped_at"} {
		if at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(m[name])); err != nil || at.Location() != time.UTC {
			t.Errorf("%s is %v", name, m[name])
		}
	}
}

func TestD8_S4_38_ALostSandboxIsToldAndNotReplaced(t *testing.T) {
	s := serve(t)
	first := s.open("a")
	s.cell("a", "x = 1")
	if _, err := s.sandboxes.Kill(t.Context(), acme, first.Sandbox); err != nil {
		t.Fatal(err)
	}
	line := s.until("a", session.LogSandboxLost) // without anybody using the session
	if line.Cause != "killed" || line.Runs != 1 || line.Sandbox != first.Sandbox {
		t.Errorf("the log says %+v", line)
	}
	if _, err := s.run(t.Context(), "a", session.RunSpec{Code: "x"}); !fault.Is(err, fault.Gone) || !strings.Contains(err.Error(), "recreate") {
		t.Errorf("a run: %v", err)
	}
	if _, _, err := s.Ensure(t.Context(), acme, "a", session.Request{}); !fault.Is(err, fault.Gone) {
		t.Errorf("an open: %v", err)
	}
	got, created, err := s.Ensure(t.Context(), acme, "a", session.Request{Recreate: true})
	if err != nil || !created || got.Generation != 2 || got.Lost == nil || got.Lost.Sandbox != first.Sandbox || got.Lost.Cause != sandbox.CauseKilled {
		t.Fatalf("recreated it is %+v, %v, %v", got, created, err)
	}
	if o := s.cell("a", "x"); o.failure != "NameError" {
		t.Errorf("x is still there: %+v", o)
	}
}

func TestS4_39_AnIdleSessionIsReapedByItself(t *testing.T) {
	slow.Test(t)
	s := serve(t)
	idle := session.Request{Spec: session.Spec{IdleTimeout: 15 * time.Second}} // a machine under load comes from open to run within that
	s.open("used", idle)
	s.cell("used", "1")
	s.open("fresh", idle)
	for _, key := range []string{"used", "fresh"} {
		if line := s.until(key, session.LogStopped); line.Cause != "idle" {
			t.Errorf("%s: %+v", key, line)
		}
		if got, err := s.Get(t.Context(), acme, key); err != nil || got.State != session.StateReaped {
			t.Errorf("%s is %s, %v", key, got.State, err)
		}
	}
	if _, _, err := s.Ensure(t.Context(), acme, "used", session.Request{}); !fault.Is(err, fault.Gone) {
		t.Errorf("one that held something: %v", err)
	}
	if got := s.open("fresh", idle); got.Generation != 2 || got.Lost == nil || got.Lost.Cause != sandbox.CauseIdle {
		t.Errorf("one that held nothing: %+v", got)
	}
}

func TestS4_37_ANewServerFindsTheSessionWithItsVariables(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	first := s.open("a")
	s.cell("a", "x = 41")
	s.close()
	s = p.serve()
	if got := s.open("a"); got.Sandbox != first.Sandbox || got.Runs != 1 {
		t.Errorf("it is %+v", got)
	}
	if o := s.cell("a", "x + 1"); o.result != "42" {
		t.Errorf("x + 1 is %q", o.result)
	}
	lines := s.lines("a")
	if n := len(lines); lines[n-1].Seq != int64(n) || lines[n-1].Cell != 2 {
		t.Errorf("the last line is %+v of %d", lines[n-1], n)
	}
}

func TestAResumedServerTellsWhatWasLostMeanwhile(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	first := s.open("a")
	s.close()
	if err := p.driver.Stop(t.Context(), first.Sandbox, sandbox.CauseOOM); err != nil {
		t.Fatal(err)
	}
	s = p.serve()
	if got, err := s.Get(t.Context(), acme, "a"); err != nil || got.State != session.StateLost || got.Lost.Sandbox != first.Sandbox {
		t.Errorf("it is %+v, %v", got, err)
	}
	if diff := cmp.Diff([]session.LogEvent{session.LogStarted, session.LogSandboxLost}, s.events("a")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

// crashed is a store as a server left it that died in the middle of something.
func TestACrashLeavesNeitherSandboxesNorHalfSessions(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	kept := s.open("kept")
	again := s.open("again")
	if _, err := s.Stop(t.Context(), acme, "again"); err != nil {
		t.Fatal(err)
	}
	make := func(id, of string) {
		t.Helper()
		spec := sandbox.Spec{ID: id, Lifetime: -1, Annotations: map[string]string{session.AnnotationKey: of, session.AnnotationID: of}}
		if _, _, err := s.sandboxes.Create(t.Context(), acme, spec); err != nil {
			t.Fatal(err)
		}
	}
	put := func(v session.Session) {
		t.Helper()
		if err := p.store.PutSession(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	// It died when the sandbox of a new session ran already, …
	put(session.Session{ID: "ses_new", Tenant: "acme", Key: "new", State: session.StateStarting, Next: "sbnew", Created: time.Now()})
	make("sbnew", "ses_new")
	// … when a stopped session was given another one, …
	again, err := s.Get(t.Context(), acme, "again")
	if err != nil {
		t.Fatal(err)
	}
	again.Next = "sbagain"
	put(again)
	make("sbagain", again.ID)
	// … and between the row of a stop and the end of the sandbox.
	half := s.open("half")
	s.close()
	half.State, half.Stopped = session.StateStopped, time.Now().UTC()
	put(half)

	s = p.serve()
	living := map[string]bool{}
	for sb := range s.sandboxes.Each {
		living[sb.ID] = true
	}
	if diff := cmp.Diff(map[string]bool{kept.Sandbox: true}, living); diff != "" {
		t.Errorf("sandboxes that live (-want +got):\n%s", diff)
	}
	if _, err := s.Get(t.Context(), acme, "new"); !fault.Is(err, fault.NotFound) {
		t.Errorf("the session that was being made: %v", err)
	}
	if got, err := s.Get(t.Context(), acme, "again"); err != nil || got.State != session.StateStopped || got.Next != "" {
		t.Errorf("the session that was being opened again: %+v, %v", got, err)
	}
	if diff := cmp.Diff([]session.LogEvent{session.LogStarted, session.LogStopped}, s.events("half")); diff != "" {
		t.Errorf("log of the one that was being stopped (-want +got):\n%s", diff)
	}
}

func TestRemoveLeavesNothingButArtifacts(t *testing.T) {
	s := serve(t)
	first := s.open("a")
	if o := s.cell("a", "open('artifacts/kept.txt', 'w').write('x')"); len(o.files) != 1 {
		t.Fatalf("the cell left %v", o.files)
	}
	if err := s.Remove(t.Context(), acme, "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), acme, "a"); !fault.Is(err, fault.NotFound) {
		t.Errorf("it is still there: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Join(s.place.dir, "sessions", "t-acme")); len(left) != 0 {
		t.Errorf("files are left: %v", left)
	}
	for sb := range s.sandboxes.Each {
		t.Errorf("sandbox %s is left", sb.ID)
	}
	if page, err := s.keeper.List(t.Context(), "acme", artifact.Query{}); err != nil || len(page.Artifacts) != 1 {
		t.Errorf("artifacts: %+v, %v", page, err)
	}
	if second := s.open("a"); second.ID == first.ID || second.Generation != 1 || second.Runs != 0 {
		t.Errorf("the key begins anew as %+v", second)
	}
}
