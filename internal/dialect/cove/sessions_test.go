package cove_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
)

// sessions is a double that remembers what it was asked and says what a test wants; the real ones are tested where they live and
// over this API in e2e.
type sessions struct {
	cove.Sessions // nil: what a test does not expect panics

	request session.Request
	spec    session.RunSpec
	created bool
	events  []session.Event
	fail    error
	lines   []string
	full    bool // of followers of logs
}

var aSession = session.Session{
	ID: "ses_1", Tenant: "acme", Key: "chat-7", State: session.StateLost, Sandbox: "sb2", Generation: 2, Runs: 3, Failed: 1, Artifacts: 2,
	Lost:    &session.Loss{Sandbox: "sb2", Cause: sandbox.CauseOOM, Message: "out of memory", At: time.Unix(3, 0).UTC()},
	Created: time.Unix(1, 0).UTC(), LastUsed: time.Unix(2, 0).UTC(), Stopped: time.Unix(3, 0).UTC(), Deadline: time.Unix(4, 0).UTC(),
	Spec: session.Spec{
		Template: "python", Storage: session.StorageBind, Size: 5, IdleTimeout: time.Minute, Datasets: session.Datasets{Access: "api"},
		Metadata: map[string]string{"user": "7"}, Env: map[string]string{"SECRET": "hunter2"},
	},
}

func (s *sessions) Ensure(_ context.Context, p auth.Principal, key string, req session.Request) (session.Session, bool, error) {
	s.request = req
	if p.Tenant != "acme" || key != "chat-7" {
		return session.Session{}, false, fmt.Errorf("asked for %s of %s", key, p.Tenant)
	}
	return aSession, s.created, s.fail
}

func (s *sessions) Get(context.Context, auth.Principal, string) (session.Session, error) {
	return aSession, s.fail
}

func (s *sessions) Run(_ context.Context, _ auth.Principal, _ string, spec session.RunSpec) iter.Seq2[session.Event, error] {
	s.spec = spec
	return func(yield func(session.Event, error) bool) {
		for _, e := range s.events {
			if !yield(e, nil) {
				return
			}
		}
		if s.fail != nil {
			yield(session.Event{}, s.fail)
		}
	}
}

func (s *sessions) Log(_ context.Context, _ auth.Principal, _ string, q session.LogQuery) iter.Seq2[json.RawMessage, error] {
	return func(yield func(json.RawMessage, error) bool) {
		if s.full {
			yield(nil, fault.New(fault.Exhausted, "too many followers"))
			return
		}
		if q.Following != nil {
			q.Following()
		}
		for _, line := range s.lines {
			if !yield(json.RawMessage(line), nil) {
				return
			}
		}
	}
}

func newSessions(t *testing.T) (*world, *sessions) {
	t.Helper()
	w, s := newWorld(t), &sessions{}
	w.api.SetSessions(s)
	return w, s
}

func TestOpenSession_WrongNetwork(t *testing.T) {
	w, s := newSessions(t)
	s.created = false // the sandbox of a session that lives keeps its network: the request is wrong all the same
	status, body := w.do(t, "PUT", "/sessions/chat-7", `{"network":{"mode":"none","allow":["198.51.100.1"]}}`)
	if status != http.StatusBadRequest || !strings.Contains(string(body), "takes no allow list") {
		t.Errorf("status %d: %s", status, body)
	}
}

func TestASessionIsAskedForAndToldInTheWordsOfTheAPI(t *testing.T) {
	w, s := newSessions(t)
	for _, created := range []bool{true, false} {
		s.created = created
		status, body := w.do(t, "PUT", "/sessions/chat-7", `{"template":"python","storage":"bind","size_bytes":5,"idle_timeout_seconds":-1,"timeout_seconds":60,
			"datasets":{"access":"local_ro","path":"/srv"},"keep_files":true,"limits":{"cpus":2},"env":{"A":"b"},"metadata":{"user":"7"},"recreate":true}`)
		if want := map[bool]int{true: 201, false: 200}[created]; status != want {
			t.Errorf("status %d, want %d", status, want)
		}
		if strings.Contains(string(body), "hunter2") {
			t.Errorf("the answer tells a secret: %s", body)
		}
		var got client.SessionInfo
		if err := json.Unmarshal(body, &got); err != nil {
			t.Fatal(err)
		}
		want := client.SessionInfo{
			Key: "chat-7", ID: "ses_1", State: "lost", Sandbox: "sb2", Generation: 2, Template: "python", Storage: "bind", SizeBytes: 5,
			Lost:     &client.SessionLoss{Sandbox: "sb2", Cause: "oom", Message: "out of memory", At: time.Unix(3, 0).UTC()},
			Datasets: client.SessionDatasets{Access: "api"}, Metadata: map[string]string{"user": "7"}, Runs: 3, Failed: 1, Artifacts: 2,
			CreatedAt: time.Unix(1, 0).UTC(), LastUsed: time.Unix(2, 0).UTC(), StoppedAt: time.Unix(3, 0).UTC(), Deadline: time.Unix(4, 0).UTC(), IdleTimeoutSeconds: 60,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("session (-want +got):\n%s", diff)
		}
	}
	want := session.Request{Recreate: true, Spec: session.Spec{
		Template: "python", Storage: "bind", Size: 5, IdleTimeout: -1, Lifetime: time.Minute, Datasets: session.Datasets{Access: "local_ro", Path: "/srv"},
		KeepFiles: true, Env: map[string]string{"A": "b"}, Metadata: map[string]string{"user": "7"},
	}}
	want.Limits.CPUs = 2
	if diff := cmp.Diff(want, s.request); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
}

func TestARunOfASessionIsToldAsItHappensOrAtOnce(t *testing.T) {
	w, s := newSessions(t)
	kept := artifact.Artifact{ID: "art_1", Name: "a.txt", Path: "sub/a.txt", MIME: "text/plain", Size: 3}
	s.events = []session.Event{
		{Event: agentapi.Event{Type: agentapi.EventStarted, Count: 4}, Run: "run_1", Replayed: true},
		{Event: agentapi.Event{Type: agentapi.EventStdout, Data: []byte("h\xc3")}}, {Event: agentapi.Event{Type: agentapi.EventStdout, Data: []byte("\xa4")}},
		{Event: agentapi.Event{Type: session.EventArtifact}, Artifact: &kept},
		{Event: agentapi.Event{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: agentapi.OutcomeOK, Value: json.RawMessage(`{"variables":{}}`)}}},
	}
	ask := client.SessionRunRequest{Code: "x", Cwd: "/tmp", TimeoutSeconds: 0.5, ToolCall: "call_1", OnDisconnect: "survive"}
	out, err := w.client.RunInSession(t.Context(), "chat-7", ask, "key-1")
	if err != nil {
		t.Fatal(err)
	}
	if out.Stdout != "hä" || out.Run != "run_1" || !out.Replayed || out.Count != 4 || out.Outcome != "ok" || len(out.Artifacts) != 1 || out.Artifacts[0].Path != "sub/a.txt" {
		t.Errorf("collected it is %+v", out)
	}
	want := session.RunSpec{Code: "x", Cwd: "/tmp", TimeoutMS: 500, ToolCall: "call_1", Disconnect: agentapi.DisconnectSurvive, IdempotencyKey: "key-1"}
	if diff := cmp.Diff(want, s.spec); diff != "" {
		t.Errorf("asked for (-want +got):\n%s", diff)
	}
	var told []string
	for e, err := range w.client.StreamInSession(t.Context(), "chat-7", ask, "") {
		if err != nil {
			t.Fatal(err)
		}
		told = append(told, string(e.Type)+e.Text+e.Run)
		if e.Artifact != nil {
			told = append(told, e.Artifact.ID)
		}
	}
	if diff := cmp.Diff([]string{"startedrun_1", "stdouth", "stdoutä", "artifact", "art_1", "end"}, told); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
}

func TestARunThatCannotGoOnSaysWhyBeforeAndInTheMiddle(t *testing.T) {
	w, s := newSessions(t)
	s.fail = fault.New(fault.Gone, "the sandbox of session chat-7 has ended: oom")
	if status, body := w.do(t, "POST", "/sessions/chat-7/run", `{"code":"1"}`); status != http.StatusGone || !strings.Contains(string(body), "oom") {
		t.Errorf("before: %d %s", status, body)
	}
	s.events = []session.Event{{Event: agentapi.Event{Type: agentapi.EventStarted}, Run: "run_1"}}
	var last error
	for _, err := range w.client.StreamInSession(t.Context(), "chat-7", client.SessionRunRequest{Code: "1"}, "") {
		last = err
	}
	if client.KindOf(last) != client.Gone {
		t.Errorf("in the middle: %v", last)
	}
}

// A line of a log is written by the domain and read by clients: both know the same fields.
func TestALogLineIsTheSameForWhoWritesAndWhoReads(t *testing.T) {
	var line session.LogLine
	fill(reflect.ValueOf(&line).Elem())
	text, err := json.Marshal(line)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var read client.SessionLogLine
	if err := d.Decode(&read); err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(read)
	if err != nil || string(again) != string(text) {
		t.Errorf("written %s\nread    %s, %v", text, again, err)
	}
	w, s := newSessions(t)
	s.lines = []string{string(text), string(text)}
	n := 0
	for got, err := range w.client.SessionLog(t.Context(), "chat-7", client.SessionLogRequest{}) {
		if err != nil || !reflect.DeepEqual(got, read) {
			t.Errorf("over the API it is %+v, %v", got, err)
		}
		n++
	}
	if n != 2 {
		t.Errorf("%d lines came", n)
	}
}

func TestSessionLog_ShareOfFollowers(t *testing.T) {
	w, s := newSessions(t)
	if status, body := w.do(t, "GET", "/sessions/chat-7/log?follow=true", ""); status != http.StatusOK {
		t.Errorf("a follower: %d %s", status, body)
	}
	s.full = true
	if status, body := w.do(t, "GET", "/sessions/chat-7/log?follow=true", ""); status != http.StatusTooManyRequests {
		t.Errorf("a follower over the tenant's share: %d %s, want 429", status, body)
	}
}

// fill gives every field a value that is not its zero.
func fill(v reflect.Value) {
	switch {
	case v.Type() == reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.Unix(9, 0).UTC()))
	case v.Type() == reflect.TypeFor[json.RawMessage]():
		v.SetBytes([]byte(`{"a":1}`))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case v.Kind() == reflect.String:
		v.SetString("x")
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(7)
	case v.CanFloat():
		v.SetFloat(1.5)
	}
}

func TestAServerWithoutSessionsSaysSo(t *testing.T) {
	w := newWorld(t)
	for _, route := range []string{"GET /sessions", "PUT /sessions/a", "POST /sessions/a/run", "GET /sessions/a/log", "POST /sessions/a/checkpoints"} {
		method, path, _ := strings.Cut(route, " ")
		if status, body := w.do(t, method, path, ""); status != http.StatusNotImplemented {
			t.Errorf("%s: %d %s", route, status, body)
		}
	}
}
