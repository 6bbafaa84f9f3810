package envd

import (
	"context"
	"net"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// flooding is a watch of an agent that tells so many changes at once, then answers questions.
func flooding(t *testing.T, changes int, change func(n int) *agentapi.FileEvent) func(context.Context) (*watching, error) {
	return func(life context.Context) (*watching, error) {
		c := agentapi.NewClient(func(context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go flood(theirs, changes, change)
			return ours, nil
		})
		stream, err := c.Watch(life, agentapi.WatchParams{Path: "/w"})
		if err != nil {
			t.Error(err)
			return nil, err
		}
		return &watching{stream: stream, base: "/w"}, nil
	}
}

func flood(conn net.Conn, changes int, change func(n int) *agentapi.FileEvent) {
	defer conn.Close()
	r := agentapi.NewReader(conn)
	if _, err := r.Read(); err != nil {
		return
	}
	agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted})
	for n := range changes {
		if agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventFile, File: change(n)}) != nil {
			return
		}
	}
	for n := 1; ; n++ {
		if _, err := r.Read(); err != nil {
			return
		}
		agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventSynced, Count: n})
	}
}

// heavy is a change of a file with a long path and an attribute.
func heavy(n int) *agentapi.FileEvent {
	p := "/w/" + strings.Repeat("d/", 1000) + strconv.Itoa(n)
	return &agentapi.FileEvent{Op: "create", Path: p, Entry: &agentapi.Entry{
		Name: strconv.Itoa(n), Path: p, Xattrs: map[string]string{"user.e2b.note": strings.Repeat("x", 4000)},
	}}
}

func light(n int) *agentapi.FileEvent {
	return &agentapi.FileEvent{Op: "create", Path: "/w/" + strconv.Itoa(n)}
}

// asking is the context of a request, and what it told the sandbox's log.
func asking(t *testing.T) (context.Context, *[]string) {
	var lines []string
	return target.With(t.Context(), &target.Target{Log: func(l target.Line) { lines = append(lines, l.Message) }}), &lines
}

func TestAWatcherHoldsSoManyBytes(t *testing.T) {
	for name, c := range map[string]struct {
		changes int
		change  func(int) *agentapi.FileEvent
		others  int64 // bytes that other watchers hold
		most    int
		lost    bool
	}{
		"heavy changes":                      {1000, heavy, 0, 1 << 20, true},
		"light changes":                      {12_000, light, 0, 1 << 20, true},
		"few changes":                        {9000, light, 0, 1 << 20, false},
		"while the others hold all there is": {1000, heavy, maxAll + 1, 64 << 10, true},
		"one change over the limit": {1, func(int) *agentapi.FileEvent {
			return &agentapi.FileEvent{Op: "create", Path: "/w/" + strings.Repeat("x", 2<<20)}
		}, 0, 1 << 20, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := newPollers()
			defer l.close()
			p, err := l.add("sb1", flooding(t, c.changes, c.change))
			if err != nil {
				t.Fatal(err)
			}
			l.held.Add(c.others)
			ctx, lines := asking(t)
			events, err := p.take(ctx)
			if err != nil {
				t.Fatal(err)
			}
			held := 0
			for _, e := range events {
				held += weight(e)
			}
			if held > c.most || (len(events) < c.changes) != c.lost || (len(*lines) == 1) != c.lost {
				t.Errorf("%d events of %d bytes, told %q", len(events), held, *lines)
			}
			if n := len(events); n > 0 && events[n-1].GetName() != strings.TrimPrefix(c.change(c.changes-1).Path, "/w/") {
				t.Errorf("the last is %.100s", events[n-1].GetName())
			}
			if l.held.Load() != c.others {
				t.Errorf("%d bytes are counted after all was taken", l.held.Load()-c.others)
			}
		})
	}
}

func TestNoWatcherIsAddedWhenAllHoldTooMuch(t *testing.T) {
	l := newPollers()
	defer l.close()
	l.held.Store(maxAll)
	if _, err := l.add("sb1", flooding(t, 0, nil)); !fault.Is(err, fault.Exhausted) {
		t.Errorf("got %v", err)
	}
	l.held.Store(maxAll - 1)
	if _, err := l.add("sb1", flooding(t, 0, nil)); err != nil {
		t.Error(err)
	}
}

func TestAWatcherThatNobodyAsksEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newPollers()
		defer l.close()
		p, err := l.add("sb1", flooding(t, 100, heavy))
		if err != nil {
			t.Fatal(err)
		}
		ctx, _ := asking(t)
		for range 3 {
			time.Sleep(9 * time.Minute) // the bubble's clock
			if events, err := p.take(ctx); err != nil {
				t.Fatalf("%d, %v", len(events), err)
			}
		}
		idle, err := l.add("sb1", flooding(t, 100, heavy))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if l.held.Load() == 0 {
			t.Error("nothing is held")
		}
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		for _, p := range []*poller{p, idle} {
			if _, err := l.find("sb1", p.id); !fault.Is(err, fault.NotFound) {
				t.Errorf("found: %v", err)
			}
			if _, err := p.take(ctx); !fault.Is(err, fault.NotFound) {
				t.Errorf("taken: %v", err)
			}
		}
		if held := l.held.Load(); held != 0 {
			t.Errorf("%d bytes are still counted", held)
		}
	})
}
