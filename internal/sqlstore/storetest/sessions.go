package storetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/template"
)

// RunSessions checks what a store keeps of sessions. Each call of open gives an empty one and sees to its end.
func RunSessions(t *testing.T, open func(t *testing.T) session.Store) {
	for name, claim := range map[string]func(*testing.T, session.Store){
		"a session comes back as it was stored":                          sessionRoundTrip,
		"a put replaces the session of the same id":                      sessionReplaced,
		"a key belongs to one session of a tenant":                       sessionKeys,
		"an unknown session is not found":                                sessionUnknown,
		"sessions are listed by state, those used last first, each once": sessionPages,
		"what has a sandbox or an untold end is unsettled, the rest old": sessionUnsettled,
		"a removed session takes its runs and checkpoints with it":       sessionRemoved,
		"a run comes back as it was stored, and as it ended":             runRoundTrip,
		"an idempotency key belongs to one run of a generation":          runKeys,
		"a run without an end is cut, once":                              allRunsCut,
		"a run of another living server is not cut":                      runsCut,
		"old answers are dropped":                                        runAnswers,
		"old runs have no code, and older ones no row":                   runsTrimmed,
		"an answer that is long leaves no room for older ones":           runBytes,
		"sessions of a tenant are counted":                               sessionCount,
		"checkpoints come back as they were stored, oldest first":        checkpoints,
	} {
		t.Run(name, func(t *testing.T) { claim(t, open(t)) })
	}
}

func fullSession(id string) session.Session {
	return session.Session{
		ID: id, Tenant: "acme", Key: "key-" + id, State: session.StateRunning, Sandbox: "sb-" + id, Next: "sb-next", Generation: 3,
		Lost:   &session.Loss{Sandbox: "sb0", Cause: sandbox.CauseOOM, Message: "out of memory", At: epoch},
		Volume: "session-" + id, Runs: 7, Failed: 2, Fresh: true, Artifacts: 4, Created: epoch, LastUsed: epoch.Add(time.Minute),
		Stopped: epoch.Add(time.Hour), Told: true,
		Spec: session.Spec{
			Template: "python", Image: "python:3.12", Storage: session.StorageBind, Size: 1 << 30, IdleTimeout: -1, Lifetime: time.Hour,
			Datasets: session.Datasets{Access: "local_ro", Path: "/srv/it's"}, KeepFiles: true, Limits: template.Limits{CPUs: 1.5, MemoryBytes: 1 << 30},
			Network: &policy.Network{Mode: policy.None}, Env: map[string]string{"A": "ä\n"}, Metadata: map[string]string{"user": "42"},
		},
	}
}

func putSession(t *testing.T, s session.Store, all ...session.Session) {
	t.Helper()
	for _, v := range all {
		if err := s.PutSession(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
}

func wantSession(t *testing.T, s session.Store, want session.Session) {
	t.Helper()
	got, err := s.Session(t.Context(), want.Tenant, want.Key)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("session (-want +got):\n%s", diff)
	}
}

func sessionRoundTrip(t *testing.T, s session.Store) {
	bare := session.Session{ID: "bare", Tenant: "acme", Key: "k", State: session.StateStopped, Created: epoch}
	putSession(t, s, fullSession("s1"), bare)
	wantSession(t, s, fullSession("s1"))
	wantSession(t, s, bare)
	if got, err := s.SessionOfSandbox(t.Context(), "acme", "sb-s1"); err != nil || got.ID != "s1" {
		t.Errorf("by its sandbox: %+v, %v", got, err)
	}
}

func sessionReplaced(t *testing.T, s session.Store) {
	v := fullSession("s1")
	putSession(t, s, v)
	v.State, v.Sandbox, v.Lost, v.Runs = session.StateLost, "sb-other", nil, 8
	putSession(t, s, v)
	wantSession(t, s, v)
	if _, err := s.SessionOfSandbox(t.Context(), "acme", "sb-s1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("by the sandbox that it had: %v", err)
	}
	if census, err := s.SessionCensus(t.Context()); err != nil || !cmp.Equal(census, map[string]int{"lost": 1}) {
		t.Errorf("census %v, %v", census, err)
	}
}

func sessionKeys(t *testing.T, s session.Store) {
	one, two, foreign := fullSession("s1"), fullSession("s2"), fullSession("s3")
	two.Key, foreign.Key, foreign.Tenant = one.Key, one.Key, "globex"
	putSession(t, s, one, foreign)
	if err := s.PutSession(t.Context(), two); !fault.Is(err, fault.Conflict) {
		t.Errorf("a second session with the same key: %v", err)
	}
	wantSession(t, s, foreign)
}

func sessionUnknown(t *testing.T, s session.Store) {
	putSession(t, s, fullSession("s1"))
	if _, err := s.Session(t.Context(), "globex", "key-s1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	if _, err := s.RunOf(t.Context(), "acme", "run"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a run: %v", err)
	}
	if err := s.RemoveSession(t.Context(), "nobody"); err != nil {
		t.Errorf("removing nothing: %v", err)
	}
}

func sessionPages(t *testing.T, s session.Store) {
	var want []string
	for i := range 7 {
		v := fullSession(fmt.Sprintf("s%d", i))
		v.LastUsed = epoch.Add(time.Duration(i/2) * time.Second) // two of one moment
		if i == 3 {
			v.State = session.StateStopped
		} else {
			want = append([]string{v.ID}, want...)
		}
		putSession(t, s, v)
	}
	var got []string
	q := session.Query{States: []session.State{session.StateRunning, session.StateLost}, Limit: 2}
	for {
		page, err := s.Sessions(t.Context(), "acme", q)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range page.Items {
			got = append(got, v.ID)
		}
		if q.Cursor = page.Next; q.Cursor == "" {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("sessions (-want +got):\n%s", diff)
	}
	if _, err := s.Sessions(t.Context(), "acme", session.Query{Limit: 1, Cursor: "never"}); !fault.Is(err, fault.Invalid) {
		t.Errorf("a cursor that was never given out: %v", err)
	}
}

func sessionUnsettled(t *testing.T, s session.Store) {
	settled := func(id string, state session.State, told bool) session.Session {
		v := fullSession(id)
		v.State, v.Told, v.Next = state, told, ""
		return v
	}
	next := settled("e", session.StateStopped, true)
	next.Next = "sb1"
	putSession(t, s, settled("a", session.StateRunning, false), settled("b", session.StateStopped, false), settled("c", session.StateLost, true),
		settled("d", session.StateStarting, false), next)
	list := func(all []session.Session, err error) (ids []string) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range all {
			ids = append(ids, v.ID)
		}
		return ids
	}
	if diff := cmp.Diff([]string{"a", "b", "d", "e"}, list(s.UnsettledSessions(t.Context()))); diff != "" {
		t.Errorf("unsettled (-want +got):\n%s", diff)
	}
	if got := list(s.UnusedSessions(t.Context(), epoch)); len(got) != 0 {
		t.Errorf("unused at their first moment: %v", got)
	}
	if diff := cmp.Diff([]string{"c"}, list(s.UnusedSessions(t.Context(), epoch.Add(time.Hour)))); diff != "" {
		t.Errorf("unused (-want +got):\n%s", diff)
	}
}

func fullRun(id string) session.Run {
	return session.Run{
		ID: id, Session: "s1", Tenant: "acme", Sandbox: "sb1", Cell: 3, Generation: 2, ToolCall: "call_1", Code: "print('ä')\n", Key: "key-" + id,
		Digest: "ab", Started: epoch,
	}
}

func beginRun(t *testing.T, s session.Store, all ...session.Run) {
	t.Helper()
	for _, r := range all {
		if err := s.BeginRun(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
}

func wantRun(t *testing.T, s session.Store, want session.Run) {
	t.Helper()
	got, err := s.RunOf(t.Context(), want.Tenant, want.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("run (-want +got):\n%s", diff)
	}
}

func sessionRemoved(t *testing.T, s session.Store) {
	putSession(t, s, fullSession("s1"), fullSession("s2"))
	other := fullRun("r2")
	other.Session = "s2"
	beginRun(t, s, fullRun("r1"), other)
	if err := s.PutCheckpoint(t.Context(), session.Checkpoint{ID: "c1", Session: "s1"}); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveSession(t.Context(), "s1"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RunOf(t.Context(), "acme", "r1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("its run: %v", err)
	}
	if all, err := s.AllCheckpoints(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("checkpoints: %v, %v", all, err)
	}
	wantRun(t, s, other)
	wantSession(t, s, fullSession("s2"))
}

func runRoundTrip(t *testing.T, s session.Store) {
	v, r := fullSession("s1"), fullRun("r1")
	putSession(t, s, v)
	beginRun(t, s, r)
	wantRun(t, s, r)
	r.Outcome, r.Ended, r.Answer = "ok", epoch.Add(time.Second), []byte("\x00answer")
	v.Runs++
	if err := s.EndRun(t.Context(), r, v, keepAll); err != nil {
		t.Fatal(err)
	}
	wantRun(t, s, r)
	wantSession(t, s, v)
	if err := s.DropRun(t.Context(), "r1"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RunOf(t.Context(), "acme", "r1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a run that was dropped: %v", err)
	}
}

func runKeys(t *testing.T, s session.Store) {
	first, second, later, none := fullRun("r1"), fullRun("r2"), fullRun("r3"), fullRun("r4")
	second.Key, later.Key, later.Generation, none.Key = first.Key, first.Key, 3, ""
	another := none
	another.ID = "r5"
	beginRun(t, s, first, later, none, another)
	if err := s.BeginRun(t.Context(), second); !fault.Is(err, fault.Conflict) {
		t.Errorf("a second run with the same key: %v", err)
	}
	if got, err := s.RunByKey(t.Context(), "s1", 3, first.Key); err != nil || got.ID != "r3" {
		t.Errorf("by its key: %+v, %v", got, err)
	}
	if _, err := s.RunByKey(t.Context(), "s1", 2, ""); !fault.Is(err, fault.NotFound) {
		t.Errorf("by no key: %v", err)
	}
}

func runsCut(t *testing.T, s session.Store) {
	servers := s.(Store)
	for _, id := range []string{"first", "second"} {
		if err := servers.JoinServers(t.Context(), sandbox.Server{ID: id, URL: "https://" + id}); err != nil {
			t.Fatal(err)
		}
	}
	mine, others, gone := fullRun("mine"), fullRun("others"), fullRun("gone")
	mine.Server, others.Server, gone.Server = "second", "first", "third"
	mine.Cell, gone.Cell = 1, 2
	beginRun(t, s, mine, others, gone)
	got, err := s.CutRuns(t.Context(), "second", epoch.Add(time.Hour))
	slices.SortFunc(got, func(a, b session.Run) int { return a.Cell - b.Cell })
	for _, r := range []*session.Run{&mine, &gone} {
		r.Outcome, r.Ended = session.OutcomeCut, epoch.Add(time.Hour)
	}
	if diff := cmp.Diff([]session.Run{mine, gone}, got); diff != "" || err != nil {
		t.Errorf("were cut, %v: %s", err, diff)
	}
	wantRun(t, s, others)
}

func allRunsCut(t *testing.T, s session.Store) {
	ended := fullRun("r2")
	ended.Outcome = "ok"
	beginRun(t, s, fullRun("r1"), ended)
	cut := fullRun("r1")
	cut.Outcome, cut.Ended = session.OutcomeCut, epoch.Add(time.Hour)
	for _, want := range [][]session.Run{{cut}, nil} {
		got, err := s.CutRuns(t.Context(), "", epoch.Add(time.Hour))
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("were cut, %v: %s", err, diff)
		}
	}
	wantRun(t, s, cut)
	wantRun(t, s, ended)
}

var keepAll = session.Kept{Answers: 1000, Bytes: 1 << 30, Runs: 1000}

// cell begins and ends a run of so many bytes.
func cell(t *testing.T, s session.Store, number, code, answer int, keep session.Kept) {
	t.Helper()
	r := fullRun(fmt.Sprintf("r%d", number))
	r.Cell, r.Code = number, strings.Repeat("c", code)
	beginRun(t, s, r)
	r.Outcome, r.Answer = "ok", []byte(strings.Repeat("a", answer))
	if err := s.EndRun(t.Context(), r, fullSession("s1"), keep); err != nil {
		t.Fatal(err)
	}
}

// held is what is left of a cell: the lengths of its code and of its answer, or that it is gone.
func held(t *testing.T, s session.Store, number int) [2]int {
	t.Helper()
	r, err := s.RunOf(t.Context(), "acme", fmt.Sprintf("r%d", number))
	if fault.Is(err, fault.NotFound) {
		return [2]int{-1, -1}
	}
	if err != nil {
		t.Fatal(err)
	}
	return [2]int{len(r.Code), len(r.Answer)}
}

func runAnswers(t *testing.T, s session.Store) {
	putSession(t, s, fullSession("s1"))
	keep := keepAll
	keep.Answers = 2
	for i := range 20 {
		cell(t, s, i+1, 1, 1, keepAll)
	}
	cell(t, s, 21, 1, 1, keep)
	for i := range 21 {
		want := [2]int{1, 0}
		if i >= 19 {
			want[1] = 1
		}
		if got := held(t, s, i+1); got != want {
			t.Errorf("of cell %d there are %v bytes of code and answer; want %v", i+1, got, want)
		}
	}
}

func runsTrimmed(t *testing.T, s session.Store) {
	putSession(t, s, fullSession("s1"))
	for i := 1; i <= 64; i++ {
		cell(t, s, i, 10, 0, session.Kept{Answers: 1, Bytes: 95, Runs: 20})
	}
	for number, want := range map[int][2]int{44: {-1, -1}, 45: {0, 0}, 55: {0, 0}, 56: {10, 0}, 64: {10, 0}} {
		if got := held(t, s, number); got != want {
			t.Errorf("of cell %d there are %v bytes of code and answer; want %v", number, got, want)
		}
	}
}

func runBytes(t *testing.T, s session.Store) {
	putSession(t, s, fullSession("s1"))
	keep := session.Kept{Answers: 10, Bytes: 2<<20 + 100, Runs: 10}
	for i := 1; i <= 3; i++ {
		cell(t, s, i, 10, 1<<20, keep)
	}
	for number, want := range map[int][2]int{1: {0, 0}, 2: {10, 1 << 20}, 3: {10, 1 << 20}} {
		if got := held(t, s, number); got != want {
			t.Errorf("of cell %d there are %v bytes of code and answer; want %v", number, got, want)
		}
	}
}

func sessionCount(t *testing.T, s session.Store) {
	foreign := fullSession("s3")
	foreign.Tenant = "globex"
	putSession(t, s, fullSession("s1"), fullSession("s2"), foreign)
	ids, err := s.SessionIDs(t.Context())
	must(t, err)
	wantSame(t, slices.Sorted(slices.Values(ids)), []string{"s1", "s2", "s3"})
	if n, err := s.CountSessions(t.Context(), "acme"); err != nil || n != 2 {
		t.Errorf("%d sessions, %v; want 2", n, err)
	}
}

func checkpoints(t *testing.T, s session.Store) {
	one := session.Checkpoint{
		ID: "c1", Session: "s1", Tenant: "acme", Sandbox: "sb1", Created: epoch, Metadata: map[string]string{"a": "b"},
		NotCopied: []sandbox.NotCopied{{Kind: "process", What: "sleep"}},
	}
	two, other := one, one
	two.ID, two.Created = "c0", epoch.Add(time.Second)
	other.Session = "s2"
	for _, c := range []session.Checkpoint{two, one, other} {
		if err := s.PutCheckpoint(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.PutCheckpoint(t.Context(), one); !fault.Is(err, fault.Conflict) {
		t.Errorf("a second one with the same id: %v", err)
	}
	got, err := s.Checkpoints(t.Context(), "s1")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]session.Checkpoint{one, two}, got); diff != "" {
		t.Errorf("checkpoints (-want +got):\n%s", diff)
	}
	if err := s.RemoveCheckpoint(t.Context(), "s1", "c1"); err != nil {
		t.Fatal(err)
	}
	if all, err := s.AllCheckpoints(t.Context()); err != nil || len(all) != 2 {
		t.Errorf("%v, %v", all, err)
	}
}
