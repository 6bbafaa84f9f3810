package interpreter_test

import (
	"context"
	"encoding/json"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/interpreter"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// said is a sandbox whose runs tell what a test wants; gone says whether it is still there.
type said struct {
	interpreter.Sandboxes
	events iter.Seq2[agentapi.Event, error]
	gone   bool
}

func (s said) Run(context.Context, auth.Principal, string, agentapi.RunParams) iter.Seq2[agentapi.Event, error] {
	return s.events
}

func (s said) Agent(context.Context, auth.Principal, string) (*agentapi.Client, error) {
	if s.gone {
		return nil, fault.New(fault.Gone, "sandbox sb1 has ended")
	}
	return nil, nil
}

func (s said) execute(t *testing.T) (rec *httptest.ResponseRecorder, aborted bool) {
	t.Helper()
	rec = httptest.NewRecorder()
	req := httptest.NewRequest(http.MethodPost, "/execute", strings.NewReader(`{"code":"1"}`))
	about := &target.Target{Sandbox: sandbox.Sandbox{ID: "sb1"}, Who: acme, Log: func(target.Line) {}}
	defer func() {
		if p := recover(); p != nil && p != http.ErrAbortHandler {
			panic(p)
		} else {
			aborted = p != nil
		}
	}()
	interpreter.New(s, slog.New(slog.DiscardHandler)).ServeHTTP(rec, req.WithContext(target.With(t.Context(), about)))
	return rec, false
}

func sequence(events ...agentapi.Event) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		for _, e := range events {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func ended(outcome agentapi.Outcome, message string) agentapi.Event {
	return agentapi.Event{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: outcome, Message: message}}
}

func TestALongRunIsKeptAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := said{events: func(yield func(agentapi.Event, error) bool) {
			time.Sleep(12 * time.Second)
			yield(ended(agentapi.OutcomeOK, ""), nil)
		}}
		rec, _ := s.execute(t)
		if got := rec.Body.String(); got != "{\"type\":\"keepalive\"}\n{\"type\":\"keepalive\"}\n{\"type\":\"end_of_execution\"}\n" {
			t.Errorf("%q", got)
		}
	})
}

func TestTheHeadDoesNotWaitForTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := said{events: func(yield func(agentapi.Event, error) bool) {
			time.Sleep(time.Second)
			yield(agentapi.Event{}, fault.New(fault.Unsupported, "there is no kernel"))
		}}
		rec, _ := s.execute(t)
		e := parse(t, rec.Body.String())
		if rec.Code != http.StatusOK || e.err["name"] != "ExecutionAborted" || e.err["value"] != "there is no kernel" {
			t.Errorf("%d %+v", rec.Code, e)
		}
	})
}

func TestEvents(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	out := func(text string) agentapi.Event {
		return agentapi.Event{Type: agentapi.EventStdout, Data: []byte(text), Time: at}
	}
	for name, c := range map[string]struct {
		events []agentapi.Event
		lines  []string
	}{
		"the count comes with the start": {[]agentapi.Event{{Type: agentapi.EventStarted, Count: 3}}, []string{`{"type":"number_of_executions","execution_count":3}`}},
		"a character in two pieces": {[]agentapi.Event{out("a\xc3"), out("\xa9\xf0\x9f\x8c\x8a")}, []string{
			`{"type":"stdout","text":"a\u00e9\ud83c\udf0a","timestamp":"2026-01-02T03:04:05.000006Z"}`}},
		"a character that never becomes whole": {[]agentapi.Event{out("a\xc3")}, []string{`{"type":"stdout","text":"a\ufffd","timestamp":"2026-01-02T03:04:05.000006Z"}`}},
		"what is no text":                      {[]agentapi.Event{out("\xff<b>\n")}, []string{`{"type":"stdout","text":"\ufffd\u003cb\u003e\n","timestamp":"2026-01-02T03:04:05.000006Z"}`}},
		"an error": {[]agentapi.Event{{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: "E", Value: "v", Traceback: []string{"a", "b"}}}},
			[]string{`{"type":"error","name":"E","value":"v","traceback":"a\nb"}`}},
		"a result that changes an earlier one": {[]agentapi.Event{{Type: agentapi.EventResult, Result: &agentapi.Result{Update: true}}}, nil},
		"data and a chart": {[]agentapi.Event{{Type: agentapi.EventResult, Result: &agentapi.Result{Main: true, Data: map[string]json.RawMessage{
			agentapi.MIMEData: []byte(`{"a":[1]}`), agentapi.MIMEChart: []byte(`{"type":"line"}`), "text/html": []byte(`null`)}}}},
			[]string{`{"chart":{"type":"line"},"data":{"a":[1]},"is_main_result":true,"type":"result"}`}},
	} {
		t.Run(name, func(t *testing.T) {
			rec, _ := said{events: sequence(append(c.events, ended(agentapi.OutcomeOK, ""))...)}.execute(t)
			want := strings.Join(append(c.lines, `{"type":"end_of_execution"}`, ""), "\n")
			if got := rec.Body.String(); got != want {
				t.Errorf("%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestWhatWasSaidIsToldThoughTheRunBreaksOff(t *testing.T) {
	for _, text := range []string{"a", "a\n"} {
		synctest.Test(t, func(t *testing.T) {
			s := said{events: func(yield func(agentapi.Event, error) bool) {
				_ = yield(agentapi.Event{Type: agentapi.EventStarted, Count: 1}, nil) &&
					yield(agentapi.Event{Type: agentapi.EventStdout, Data: []byte(text)}, nil) &&
					yield(agentapi.Event{}, fault.New(fault.Unavailable, "the connection to the sandbox broke"))
			}}
			rec, _ := s.execute(t)
			if got := rec.Body.String(); rec.Code != http.StatusOK || !strings.Contains(got, `"type":"stdout"`) || !strings.Contains(got, "ExecutionAborted") {
				t.Errorf("%q: %d %s", text, rec.Code, got)
			}
		})
	}
}

func TestEveryEndIsTold(t *testing.T) {
	for outcome, name := range map[agentapi.Outcome]any{
		agentapi.OutcomeOK: nil, agentapi.OutcomeError: nil, agentapi.OutcomeInterrupted: nil, agentapi.OutcomeTimeout: "ExecutionAborted",
		agentapi.OutcomeKernelDied: "ContextRestarting", agentapi.OutcomeOOM: "ContextRestarting", agentapi.OutcomeKilled: "ContextRestarting",
	} {
		rec, _ := said{events: sequence(ended(outcome, "why"))}.execute(t)
		if e := parse(t, rec.Body.String()); e.err["name"] != name || name != nil && e.err["value"] != "why" {
			t.Errorf("%s: %+v", outcome, e)
		}
	}
}

func TestEveryFault(t *testing.T) {
	for _, kind := range fault.Kinds {
		for _, gone := range []bool{false, true} {
			s := said{gone: gone, events: func(yield func(agentapi.Event, error) bool) { yield(agentapi.Event{}, fault.New(kind, "the reason")) }}
			rec, _ := s.execute(t)
			missing := gone && (kind == fault.Gone || kind == fault.NotFound || kind == fault.Unavailable)
			if missing != (rec.Code == http.StatusBadGateway) || rec.Code < 400 || !missing && rec.Body.String() != "the reason" {
				t.Errorf("%s, gone %v: %d %s", kind, gone, rec.Code, rec.Body)
			}
			s.events = func(yield func(agentapi.Event, error) bool) {
				if yield(agentapi.Event{Type: agentapi.EventStarted, Count: 1}, nil) {
					time.Sleep(time.Second) // the line is on its way
					yield(agentapi.Event{}, fault.New(kind, "the reason"))
				}
			}
			synctest.Test(t, func(t *testing.T) {
				if _, aborted := s.execute(t); aborted != missing {
					t.Errorf("%s, gone %v: cut %v", kind, gone, aborted)
				}
			})
		}
	}
}

// TestLinesComeWhole: R and many programs write a line in several steps.
func TestLinesComeWhole(t *testing.T) {
	type piece struct {
		after time.Duration
		agentapi.Event
	}
	out := func(after time.Duration, text string) piece {
		return piece{after, agentapi.Event{Type: agentapi.EventStdout, Data: []byte(text)}}
	}
	oops := piece{0, agentapi.Event{Type: agentapi.EventStderr, Data: []byte("oops\n")}}
	shown := piece{0, agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Data: map[string]json.RawMessage{"text/plain": []byte(`"1"`)}}}}
	begun := piece{0, agentapi.Event{Type: agentapi.EventStarted, Count: 1}}
	dots := append([]piece{begun}, slices.Repeat([]piece{out(8*time.Millisecond, ".")}, 30)...)
	long := strings.Repeat("x", 5000)
	for name, c := range map[string]struct {
		pieces []piece
		want   []string
	}{
		"a line in pieces is one":                      {[]piece{out(0, "[1]"), out(time.Millisecond, " \"a\""), out(time.Millisecond, "\n[1] 2\n")}, []string{"[1] \"a\"\n[1] 2\n"}},
		"its rest is not waited for too long":          {[]piece{out(0, "a"), out(150*time.Millisecond, "b\n")}, []string{"a", "b\n"}},
		"nor again and again":                          {dots, []string{strings.Repeat(".", 13), strings.Repeat(".", 13), "...."}},
		"lines do not wait for the one that has begun": {[]piece{out(0, "a\nb"), out(time.Second, "c\n")}, []string{"a\n", "b", "c\n"}},
		"what is written elsewhere comes after":        {[]piece{out(0, "a"), oops, out(0, "b")}, []string{"a", "oops\n", "b"}},
		"and so does a result":                         {[]piece{out(0, "a"), shown, out(0, "b")}, []string{"a", "1", "b"}},
		"a very long one is passed on":                 {[]piece{out(0, long), out(0, "\n")}, []string{long, "\n"}},
		"half a character waits for its other half":    {[]piece{out(0, "a\xc3"), out(time.Second, "\xa9\n")}, []string{"a", "é\n"}},
		"and its line for the line's":                  {[]piece{out(0, "a\xc3"), out(time.Second, "\xa9b"), out(5*time.Millisecond, "c\n")}, []string{"a", "ébc\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rec, _ := said{events: func(yield func(agentapi.Event, error) bool) {
					for _, p := range c.pieces {
						time.Sleep(p.after)
						if !yield(p.Event, nil) {
							return
						}
					}
					yield(ended(agentapi.OutcomeOK, ""), nil)
				}}.execute(t)
				var got []string
				for line := range strings.Lines(rec.Body.String()) {
					var o struct{ Text string }
					if err := json.Unmarshal([]byte(line), &o); err != nil {
						t.Fatal(err)
					}
					if o.Text != "" {
						got = append(got, o.Text)
					}
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("%q, want %q", got, c.want)
				}
			})
		})
	}
}
