package cove_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
)

func TestEveryKindOfFaultHasAStatusOfItsOwn(t *testing.T) {
	seen := map[int]fault.Kind{}
	for _, kind := range fault.Kinds {
		status := cove.Status(kind)
		if kind != fault.Internal && status == http.StatusInternalServerError {
			t.Errorf("%s has no status", kind)
		}
		if other, twice := seen[status]; twice {
			t.Errorf("%s and %s share status %d", kind, other, status)
		}
		seen[status] = kind
	}
}

// TestStatus_DiskFull: clients retry a 429, which does not empty a disk.
func TestStatus_DiskFull(t *testing.T) {
	if got := cove.Status(fault.DiskFull); got != http.StatusInsufficientStorage {
		t.Errorf("a full disk is %d", got)
	}
}

func TestASandboxIsCreatedUsedAndKilled(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	if sb.State != "running" || sb.Template != "python" || sb.Deadline.IsZero() {
		t.Fatalf("created %+v", sb.SandboxInfo)
	}
	out, err := sb.Run(t.Context(), client.RunRequest{Code: "1+1"})
	if err != nil {
		t.Fatal(err)
	}
	if out.Text() != "2" || out.Outcome != client.OutcomeOK || out.Count != 1 {
		t.Errorf("1+1 gave %+v", out)
	}
	if err := sb.SetTimeout(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	if left := time.Until(sb.Deadline); left < 59*time.Minute {
		t.Errorf("deadline is in %v", left)
	}
	if err := sb.SetNetwork(t.Context(), client.Network{Mode: "list", Allow: []string{"203.0.113.7", "198.51.100.0/24"}}); err != nil {
		t.Fatal(err)
	}
	want := client.Network{Mode: "list", Allow: []string{"203.0.113.7/32", "198.51.100.0/24"}}
	if diff := cmp.Diff(want, sb.Network); diff != "" {
		t.Error(diff)
	}
	if u, err := sb.Usage(t.Context()); err != nil || u.CPUMS != 7 {
		t.Errorf("usage %+v, %v", u, err)
	}
	if err := sb.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sb.State != "ended" || sb.Cause != "killed" {
		t.Errorf("killed %+v", sb.SandboxInfo)
	}
	if _, err := sb.Run(t.Context(), client.RunRequest{Code: "1+1"}); client.KindOf(err) != client.Gone {
		t.Errorf("a run in an ended sandbox: %v", err)
	}
}

func TestAKeyFindsTheSandboxThatLives(t *testing.T) {
	w := newWorld(t)
	var ids []string
	for _, want := range []int{http.StatusCreated, http.StatusOK} {
		status, body := w.do(t, "POST", "/sandboxes", `{"key":"alice"}`)
		var sb client.SandboxInfo
		if status != want || json.Unmarshal(body, &sb) != nil {
			t.Fatalf("status %d, want %d: %s", status, want, body)
		}
		ids = append(ids, sb.ID)
	}
	if ids[0] != ids[1] {
		t.Errorf("two sandboxes: %v", ids)
	}
}

func TestListsAreFilteredAndPaged(t *testing.T) {
	w := newWorld(t)
	for _, team := range []string{"a", "a", "b"} {
		if _, err := w.client.Create(t.Context(), client.CreateRequest{Metadata: map[string]string{"team": team}}); err != nil {
			t.Fatal(err)
		}
	}
	count := func(req client.ListRequest) (n int) {
		for _, err := range w.client.List(t.Context(), req) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		return n
	}
	if n := count(client.ListRequest{Limit: 1}); n != 3 {
		t.Errorf("%d of 3 over pages of one", n)
	}
	if n := count(client.ListRequest{Metadata: map[string]string{"team": "a"}, States: []string{"running"}}); n != 2 {
		t.Errorf("%d of team a", n)
	}
}

func TestBadInputIsAClearError(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	in := "/sandboxes/" + sb.ID
	for _, tc := range []struct {
		name, method, path, body string
		status                   int
		says                     string
	}{
		{"an unknown template", "POST", "/sandboxes", `{"template":"cobol"}`, 404, `no template "cobol"`},
		{"an unknown field", "POST", "/sandboxes", `{"tmplate":"x"}`, 400, `unknown field "tmplate"; known fields: template, image, start, key`},
		{"a field of the wrong type", "POST", "/sandboxes", `{"limits":{"memory_bytes":"1G"}}`, 400, `field "limits.memory_bytes" wants an integer`},
		{"negative memory", "POST", "/sandboxes", `{"limits":{"memory_bytes":-1}}`, 400, "negative"},
		{"too little memory", "POST", "/sandboxes", `{"limits":{"memory_bytes":1}}`, 400, "too little"},
		{"an endless lifetime", "POST", "/sandboxes", `{"timeout_seconds":1e30}`, 400, "out of range"},
		{"broken JSON", "POST", "/sandboxes", `{"template":`, 400, "cut short"},
		{"a list for an object", "POST", "/sandboxes", `[]`, 400, "send an object"},
		{"two values", "POST", "/sandboxes", `{} {}`, 400, "more than one"},
		{"an unknown network mode", "PUT", in + "/network", `{"mode":"wifi"}`, 400, "use internet, none or list"},
		{"a name for a prefix", "PUT", in + "/network", `{"mode":"list","allow":["example.com"]}`, 400, "names are not supported yet"},
		{"a private network", "PUT", in + "/network", `{"mode":"list","allow":["192.168.1.1"]}`, 403, "network.private"},
		{"an address of no network", "PUT", in + "/network", `{"mode":"list","allow":["127.0.0.1"]}`, 403, "no sandbox can reach"},
		{"a cursor of no page", "GET", "/sandboxes?cursor=page2", "", 400, "want the cursor of the page before"},
		{"a cursor of no page of artifacts", "GET", "/artifacts?cursor=1.sb", "", 400, "want the cursor"},
		{"a kernel that is not there", "POST", in + "/kernels/none/interrupt", "", 404, `has no kernel "none"`},
		{"an end of a kernel that is not there", "DELETE", in + "/kernels/none", "", 404, `has no kernel "none"`},
		{"an unknown query parameter", "GET", "/sandboxes?stat=running", "", 400, `unknown query parameter "stat"`},
		{"an unknown state", "GET", "/sandboxes?state=happy", "", 400, "unknown state"},
		{"a limit that is no number", "GET", "/sandboxes?limit=many", "", 400, "want an integer"},
		{"somebody's sandbox", "GET", "/sandboxes/sbnone", "", 404, ""},
		{"no command", "POST", in + "/exec", `{}`, 400, "nothing to run"},
		{"two commands", "POST", in + "/exec", `{"argv":["a"],"command":"b"}`, 400, "not both"},
		{"a terminal without a conversation", "POST", in + "/exec", `{"command":"a","pty":{"rows":1,"cols":1}}`, 400, "interactive"},
		{"a program that is not there", "POST", in + "/exec", `{"argv":["/no/such"]}`, 404, "no such file"},
		{"a refused run", "POST", in + "/run", `{"code":"refuse the kernel is busy"}`, 409, "the kernel is busy"},
		{"a conversation without an upgrade", "GET", in + "/exec", "", 405, "Upgrade"},
		{"a file without a name", "GET", in + "/files", "", 400, `"path" is missing`},
		{"a file that is not there", "GET", in + "/files?path=/none", "", 404, "does not exist"},
		{"a mode that is not octal", "PUT", in + "/files?path=/a&mode=rw", "", 400, "octal"},
		{"a path outside the API", "GET", "/nothing", "", 404, "openapi.json"},
		{"a process that is not there", "POST", in + "/processes/99/signal", `{"signal":"SIGTERM"}`, 404, "no such process"},
		{"a fork into none", "POST", in + "/fork", `{"count":0}`, 400, "1 to 100 sandboxes, not 0"},
		{"a fork into fewer", "POST", in + "/fork", `{"count":-3}`, 400, "1 to 100 sandboxes, not -3"},
		{"a fork into too many", "POST", in + "/fork", `{"count":10000}`, 400, "1 to 100 sandboxes, not 10000"},
		{"a fork into half a one", "POST", in + "/fork", `{"count":0.5}`, 400, `field "count" wants an integer`},
		{"a fork that dawdles", "POST", in + "/fork", `{"busy":"dawdle"}`, 400, "use wait or refuse"},
		{"a fork that waits backwards", "POST", in + "/fork", `{"wait_seconds":-1}`, 400, "wait_seconds -1 is out of range"},
		{"a fork that waits for a day", "POST", in + "/fork", `{"wait_seconds":86400}`, 400, "at most 1h0m0s"},
		{"a fork of a busy kernel", "POST", in + "/fork", `{"kernel":"busy","busy":"refuse"}`, 409, "runs a cell"},
		{"a fork of somebody's sandbox", "POST", "/sandboxes/sbnone/fork", ``, 404, "no sandbox"},
		{"a pause of somebody's sandbox", "POST", "/sandboxes/sbnone/pause", ``, 404, "no sandbox"},
		{"a resume of somebody's sandbox", "POST", "/sandboxes/sbnone/resume", ``, 404, "no sandbox"},
		{"a pause for longer than time", "POST", in + "/pause", `{"timeout_seconds":1e30}`, 400, "out of range"},
		{"a pause with an unknown field", "POST", in + "/pause", `{"timeout":1}`, 400, "known fields: timeout_seconds, auto_resume"},
		{"an unknown idle action", "POST", "/sandboxes", `{"idle_action":"nap"}`, 400, "use kill or pause"},
		{"a snapshot without a name", "POST", in + "/snapshot", `{"name":""}`, 400, "template name"},
		{"no body where one is needed", "POST", in + "/run", ``, 400, "the request has no body: send a JSON object with code, kernel"},
		{"a missing field", "POST", in + "/run", `{"kernel":"code"}`, 400, `field "code" is missing`},
		{"a field in other letters", "POST", in + "/run", `{"Code":"1"}`, 400, `field "code" is missing`},
		{"null for a body", "POST", "/sandboxes", `null`, 400, "holds null at byte 1: leave out what has no value"},
		{"a line end for a body", "POST", "/sandboxes", "\n", 400, "cannot be understood: EOF"},
		{"null for a list", "PUT", in + "/network", `{"mode":"internet","deny":null}`, 400, "holds null at byte 27"},
		{"null in a list", "POST", in + "/exec", `{"argv":["a",null]}`, 400, "holds null"},
		{"null for a path", "POST", in + "/files/chmod", `{"path":"/a\"null","mode":null}`, 400, "holds null"},
		{"a request about somebody's sandbox, wrong itself", "POST", "/sandboxes/sbnone/run", `{"cod":null}`, 404, "no sandbox"},
		{"a wrong query about somebody's sandbox", "GET", "/sandboxes/sbnone/files?p=1", "", 404, "no sandbox"},
		{"a flag without a value", "GET", "/events?follow", "", 400, "want true or false"},
		{"a number with a fraction", "POST", in + "/files/mkdir", `{"path":"/x 1.0,","mode":1.5}`, 400, `field "mode" wants an integer`},
		{"an integer with a point", "POST", in + "/fork", `{"metadata":{"a":"1.0,"},"count":0.0}`, 400, "1 to 100 sandboxes, not 0"},
		{"a method that a path does not have", "PATCH", "/sandboxes", "", 405, "has no PATCH; its methods are POST, GET"},
		{"a method beside one with an upgrade", "PUT", in + "/exec", "", 405, "has no PUT; its methods are POST"},
		{"a snapshot with a path for a name", "POST", in + "/snapshot", `{"name":"../up"}`, 400, "template name"},
		{"a snapshot with a name that is taken", "POST", in + "/snapshot", `{"name":"python"}`, 409, "choose another name"},
		{"a template that is not there", "GET", "/templates/cobol", "", 404, `no template "cobol"`},
		{"a template with a path for a name", "GET", "/templates/..%2F..%2Fkeys", "", 404, "no template"},
		{"a removal of the server's template", "DELETE", "/templates/python", "", 403, "only the server's operator"},
		{"a removal of a template that is not built", "DELETE", "/templates/site", "", 403, "only the server's operator"},
		{"a removal of no template", "DELETE", "/templates/cobol", "", 404, "no template"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, body := w.do(t, tc.method, tc.path, tc.body)
			var e client.ErrorBody
			if err := json.Unmarshal(body, &e); err != nil {
				t.Fatalf("status %d: %s", status, body)
			}
			if status != tc.status || !strings.Contains(e.Error.Message, tc.says) {
				t.Errorf("status %d %q, want %d with %q", status, e.Error.Message, tc.status, tc.says)
			}
		})
	}
	if _, err := sb.Run(t.Context(), client.RunRequest{Code: "1+1"}); err != nil {
		t.Errorf("and the server goes on: %v", err)
	}
}

func TestABodyOverTheLimitIsRefused(t *testing.T) {
	w := newWorld(t)
	status, body := w.do(t, "POST", "/sandboxes", `{"key":"`+strings.Repeat("x", 2<<20)+`"}`)
	if status != 400 || !bytes.Contains(body, []byte("over the limit")) {
		t.Errorf("status %d: %s", status, body)
	}
}

func TestOnlyAKnownKeyGetsIn(t *testing.T) {
	w := newWorld(t)
	get := func(header, value string) int {
		req, _ := http.NewRequest("GET", w.URL+client.Prefix+"/sandboxes", nil)
		req.Header.Set(header, value)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	for _, tc := range []struct {
		header, value string
		want          int
	}{
		{"X-API-Key", w.key, 200},
		{"Authorization", "Bearer " + w.key, 200},
		{"Authorization", "bearer " + w.key, 200},
		{"Authorization", "Basic " + w.key, 401},
		{"X-API-Key", "e2b_" + strings.Repeat("0", 40), 401},
		{"X-API-Key", "nonsense", 401},
		{"X-Nothing", "", 401},
	} {
		if got := get(tc.header, tc.value); got != tc.want {
			t.Errorf("%s: %.12s… gives %d, want %d", tc.header, tc.value, got, tc.want)
		}
	}
	resp, err := http.Get(w.URL + client.Prefix + "/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("the OpenAPI file needs no key: %d", resp.StatusCode)
	}
}

func TestAnotherTenantsSandboxIsNotFound(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	key, _, err := w.keys.Create(t.Context(), "other", "", false)
	if err != nil {
		t.Fatal(err)
	}
	other := newClient(t, w.URL, string(key))
	if _, err := other.Get(t.Context(), sb.ID); client.KindOf(err) != client.NotFound {
		t.Errorf("get: %v", err)
	}
	if _, err := other.Sandbox(sb.ID).Start(t.Context(), client.ExecRequest{Command: "id"}); client.KindOf(err) != client.NotFound {
		t.Errorf("interactive: %v", err)
	}
	if _, err := other.CreateKey(t.Context(), client.KeyRequest{}); client.KindOf(err) != client.Denied {
		t.Errorf("a key that is no admin makes keys: %v", err)
	}
}

func TestKeysAreMadeListedAndRevoked(t *testing.T) {
	w := newWorld(t)
	k, err := w.client.CreateKey(t.Context(), client.KeyRequest{Name: "ci", Tenant: "team"})
	if err != nil {
		t.Fatal(err)
	}
	theirs := newClient(t, w.URL, k.Secret)
	if _, err := theirs.Templates(t.Context()); err != nil {
		t.Fatal(err)
	}
	keys, err := w.client.Keys(t.Context(), "team")
	if err != nil || len(keys) != 1 || keys[0].Name != "ci" {
		t.Fatalf("%+v, %v", keys, err)
	}
	if err := w.client.RevokeKey(t.Context(), "team", k.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := theirs.Templates(t.Context()); client.KindOf(err) != client.Unauthed {
		t.Errorf("a revoked key: %v", err)
	}
}

func TestOutputIsTextWhereItCanBeAndNeverSplitsACharacter(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	// "é" in two chunks, a byte that is no UTF-8, a lone beginning of a character at the end.
	var got []client.Event
	for e, err := range sb.RunCode(t.Context(), client.RunRequest{Code: "chunks 61c3 a962 ff63 e282"}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == client.EventStdout {
			got = append(got, e)
		}
	}
	want := []client.Event{
		{Type: "stdout", Text: "a"},
		{Type: "stdout", Text: "éb"},
		{Type: "stdout", Base64: []byte{0xff, 'c'}},
		{Type: "stdout", Base64: []byte{0xe2, 0x82}},
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
	out, err := sb.Run(t.Context(), client.RunRequest{Code: "chunks 61 ff"})
	if err != nil {
		t.Fatal(err)
	}
	if out.Stdout != "a\uFFFD" || !bytes.Equal(out.StdoutBase64, []byte{'a', 0xff}) {
		t.Errorf("collected %q %x", out.Stdout, out.StdoutBase64)
	}
}

func TestAnExceptionIsAnAnswerAndNotAnError(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	out, err := sb.Run(t.Context(), client.RunRequest{Code: "raise no"})
	if err != nil {
		t.Fatal(err)
	}
	want := &client.CodeError{Name: "ValueError", Value: "no", Traceback: []string{"ValueError: no"}}
	if diff := cmp.Diff(want, out.Error); diff != "" || out.Outcome != client.OutcomeError {
		t.Error(out.Outcome, diff)
	}
}

func TestACollectedAnswerIsBounded(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	out, err := sb.Run(t.Context(), client.RunRequest{Code: "flood 16"})
	if err != nil {
		t.Fatal(err)
	}
	if !out.Truncated || len(out.Stdout) != 4<<20 || out.Outcome != client.OutcomeOK {
		t.Errorf("truncated %v, %d bytes, %s", out.Truncated, len(out.Stdout), out.Outcome)
	}
}

func TestACollectedAnswerCountsNoticesAndMetadata(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	for _, code := range []string{"notices 20000", "metadata 50"} {
		out, err := sb.Run(t.Context(), client.RunRequest{Code: code})
		if err != nil {
			t.Fatal(err)
		}
		size := 0
		for _, n := range out.Notices {
			size += len(n)
		}
		for _, r := range out.Results {
			size += len(r.Metadata["m"])
		}
		if !out.Truncated || size == 0 || size > 32<<20 || out.Outcome != client.OutcomeOK {
			t.Errorf("%s: truncated %v, %d bytes, %s", code, out.Truncated, size, out.Outcome)
		}
	}
}

func TestAFloodStreamsAndAClientMayLeaveIt(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	total := 0
	for e, err := range sb.RunCode(t.Context(), client.RunRequest{Code: "flood 16"}) {
		if err != nil {
			t.Fatal(err)
		}
		total += len(e.Text)
	}
	if total != 16<<20 {
		t.Errorf("%d bytes came", total)
	}
	for range sb.RunCode(t.Context(), client.RunRequest{Code: "flood 100000"}) {
		break
	}
	if _, err := sb.Run(t.Context(), client.RunRequest{Code: "1+1"}); err != nil {
		t.Errorf("and the server goes on: %v", err)
	}
}

func TestAKilledSandboxEndsItsStreamsWithAReason(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	var last error
	for e, err := range sb.RunCode(t.Context(), client.RunRequest{Code: "hang"}) {
		if e.Type == client.EventStarted {
			if err := sb.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		last = err
	}
	if client.KindOf(last) != client.Gone {
		t.Errorf("the stream ended with %v", last)
	}
}

func TestACommandIsRunAsArgvOrByTheShell(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	for _, req := range []client.ExecRequest{
		{Argv: []string{"sh", "-c", "cat; echo err >&2; exit 3"}, Stdin: "hello"},
		{Command: "cat; echo err >&2; exit 3", Stdin: "hello"},
	} {
		out, err := sb.Exec(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		want := &client.Output{Stdout: "hello", Stderr: "err\n", Results: []client.Result{}, End: client.End{Outcome: "error", ExitCode: 3}}
		if diff := cmp.Diff(want, out); diff != "" {
			t.Error(diff)
		}
	}
}

func TestAnInteractiveCommandHearsStdinAndSignals(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	s, err := sb.Start(t.Context(), client.ExecRequest{Argv: []string{"cat"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var out bytes.Buffer
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case client.EventStarted:
			if _, err := s.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
		case client.EventStdout:
			out.Write(e.Data())
			if err := s.Signal("SIGTERM"); err != nil {
				t.Fatal(err)
			}
		case client.EventEnd:
			if out.String() != "hello" || e.End.Signal != "SIGTERM" {
				t.Errorf("%q, %+v", out.String(), e.End)
			}
		}
	}
}

func TestAnInteractiveCommandThatCannotStartSaysWhy(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	s, err := sb.Start(t.Context(), client.ExecRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, err := range s.Events() {
		if client.KindOf(err) != client.Invalid {
			t.Errorf("an empty command: %v", err)
		}
	}
}

func TestFilesStreamBothWays(t *testing.T) {
	sb := newWorld(t).sandbox(t)
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	e, err := sb.Files().Write(t.Context(), "/tmp/a", bytes.NewReader(content), client.WriteOptions{})
	if err != nil || e.Size != int64(len(content)) {
		t.Fatalf("%+v, %v", e, err)
	}
	got, err := sb.Files().Read(t.Context(), "/tmp/a")
	if err != nil || !bytes.Equal(got, content) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	r, err := sb.Files().OpenRange(t.Context(), "/tmp/a", 3, 5)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if part, err := io.ReadAll(r); string(part) != "34567" || err != nil {
		t.Errorf("%q, %v", part, err)
	}
}

func TestEventsTellALife(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	if err := sb.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var types []string
	for e, err := range w.client.Events(ctx, client.EventsRequest{Sandbox: sb.ID, Follow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		types = append(types, e.Type)
		if e.Type == "ended" {
			break
		}
	}
	if diff := cmp.Diff([]string{"created", "started", "ended"}, types); diff != "" {
		t.Error(diff)
	}
}

func TestAStreamWithoutALastWordIsAnError(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	var last error
	for e, err := range sb.RunCode(t.Context(), client.RunRequest{Code: "hang"}) {
		if e.Type == client.EventStarted {
			w.CloseClientConnections()
		}
		last = err
	}
	if last == nil || errors.Is(last, io.EOF) {
		t.Errorf("a cut stream ended with %v", last)
	}
}

// do sends a raw request.
func (w *world) do(t *testing.T, method, path, body string) (int, []byte) {
	t.Helper()
	req, err := http.NewRequest(method, w.URL+client.Prefix+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", w.key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, b
}
