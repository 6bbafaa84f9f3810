package agent_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// heard is what a stream tells, up to its end.
func heard(t testing.TB, s *agentapi.Stream) (started agentapi.Event, out string, end *agentapi.End) {
	t.Helper()
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case agentapi.EventStarted:
			started = e
		case agentapi.EventStdout:
			out += string(e.Data)
		case agentapi.EventEnd:
			end = e.End
		}
	}
	return started, out, end
}

func TestTheEndOfAProcessCanBeAskedForLater(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	p := sh("exit 7")
	p.Tag = "short"
	s, err := h.Exec(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := heard(t, s)
	for _, target := range []agentapi.Target{{PID: first.PID}, {ID: first.ID}, {Tag: "short"}} {
		late, err := h.Attach(t.Context(), agentapi.AttachParams{Target: target, Ended: true})
		if err != nil {
			t.Fatal(err)
		}
		if again, _, end := heard(t, late); again.PID != first.PID || end == nil || end.ExitCode != 7 {
			t.Errorf("%+v: %+v, %+v", target, again, end)
		}
		if _, err := h.Attach(t.Context(), agentapi.AttachParams{Target: target}); !fault.Is(err, fault.NotFound) {
			t.Errorf("whoever wants a living one is told %v", err)
		}
	}
	if _, err := h.Attach(t.Context(), agentapi.AttachParams{Target: agentapi.Target{PID: 1 << 30}, Ended: true}); !fault.Is(err, fault.NotFound) {
		t.Errorf("one that never was: %v", err)
	}
}

func TestInputThatWasTakenIsNoFailureAfterTheEnd(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	for range 50 {
		p := sh("read line")
		p.Stdin = true
		s, err := h.Exec(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		for e, err := range s.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == agentapi.EventStarted {
				if err := h.Stdin(t.Context(), agentapi.StdinParams{Target: agentapi.Target{ID: e.ID}}, strings.NewReader("x\n")); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestWatchIsSynced(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	w, err := h.Watch(t.Context(), agentapi.WatchParams{Path: h.dir, Recursive: true, Entries: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := os.MkdirAll(h.dir+"/a/b", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Write(t.Context(), agentapi.WriteParams{Path: "a/b/f", InPlace: true}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if err := w.Control(agentapi.Control{Sync: 41}); err != nil {
		t.Fatal(err)
	}
	told := map[string]int{}
	for e, err := range w.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == agentapi.EventSynced {
			if e.Count != 41 {
				t.Errorf("synced %d", e.Count)
			}
			break
		}
		if e.File == nil {
			continue
		}
		told[e.File.Op+" "+strings.TrimPrefix(e.File.Path, h.dir+"/")]++
		if e.File.Op == "create" && (e.File.Entry == nil || e.File.Entry.Path != e.File.Path) {
			t.Errorf("%+v", e.File)
		}
	}
	for _, want := range []string{"create a", "create a/b", "create a/b/f"} {
		if told[want] != 1 {
			t.Errorf("%q was told %d times: %v", want, told[want], told)
		}
	}
	if told["write a/b/f"] == 0 {
		t.Error(fmt.Sprint("no write was told: ", told))
	}
}

func TestALinkTellsWhereItLeads(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	if _, err := h.Write(t.Context(), agentapi.WriteParams{Path: "d/f"}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"one": "two", "two": "d/f", "nowhere": "none", "round": "round", "magic": "/proc/self/exe"} {
		if err := os.Symlink(to, h.dir+"/"+name); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]*agentapi.Linked{
		"one": {Path: h.dir + "/d/f", Type: agentapi.EntryFile, Mode: 0o644}, "nowhere": nil, "round": nil, "magic": nil,
	} {
		e, err := h.Stat(t.Context(), agentapi.PathParams{Path: name})
		if err != nil || (e.Link == nil) != (want == nil) || want != nil && *e.Link != *want {
			t.Errorf("%s: %+v %+v, %v", name, e, e.Link, err)
		}
	}
	if who, err := h.Account(t.Context(), agentapi.AccountParams{}); err != nil || who.Home != h.dir {
		t.Errorf("%+v, %v", who, err)
	}
}
