package cove_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/snippet"
)

// snippets is a runner that does as it is told.
type snippets struct {
	asked  snippet.Spec
	result snippet.Result
	err    error
}

func (s *snippets) Run(_ context.Context, p auth.Principal, spec snippet.Spec) (snippet.Result, error) {
	if p.Tenant != "acme" {
		return snippet.Result{}, fault.New(fault.Denied, "not yours")
	}
	s.asked = spec
	return s.result, s.err
}

func TestASnippetIsAskedForAndToldInTheAPIsWords(t *testing.T) {
	w := newUnstarted(t)
	double := &snippets{result: snippet.Result{
		Sandbox: "sb1", Stdout: []byte("out\xff\xfe"), Stderr: []byte("err"), Truncated: true,
		End: agentapi.End{Outcome: agentapi.OutcomeOOM, ExitCode: -1, Signal: "SIGKILL", Message: "out of memory", Usage: agentapi.Usage{WallMS: 2, CPUMS: 1, PeakBytes: 3}},
	}}
	w.api.SetSnippets(double)
	w.Start()
	defer w.Close()
	c := newClient(t, w.URL, w.key)
	got, err := c.Snippet(t.Context(), client.SnippetRequest{
		Code: "1", TimeoutSeconds: 1.5, CPUSeconds: 2, MemoryMB: 64, OpenFiles: 8, Env: map[string]string{"A": "b"}, Network: true, Template: "x",
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(snippet.Spec{
		Code: "1", Timeout: 1500 * time.Millisecond, Limits: agentapi.RunLimits{CPUSeconds: 2, MemoryBytes: 64 << 20, OpenFiles: 8},
		Env: map[string]string{"A": "b"}, Network: true, Template: "x",
	}, double.asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(client.SnippetResult{
		ExitCode: -9, Stdout: "out\uFFFD\uFFFD", Stderr: "err", Truncated: true, Signal: "SIGKILL", OOM: true, Message: "out of memory", Sandbox: "sb1",
		Usage: client.RunUsage{WallMS: 2, CPUMS: 1, PeakBytes: 3},
	}, *got); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
	double.err = fault.New(fault.Exhausted, "too many")
	if _, err := c.Snippet(t.Context(), client.SnippetRequest{Code: "1"}); client.KindOf(err) != client.Exhausted {
		t.Errorf("a failure: %v", err)
	}
	if _, err := newClient(t, w.URL, "nobody").Snippet(t.Context(), client.SnippetRequest{Code: "1"}); client.KindOf(err) != client.Unauthed {
		t.Errorf("without a key: %v", err)
	}
}

func TestAServerWithoutSnippetsSaysSo(t *testing.T) {
	if _, err := newWorld(t).client.Snippet(t.Context(), client.SnippetRequest{Code: "1"}); client.KindOf(err) != client.Unsupported {
		t.Errorf("it says %v", err)
	}
}

func FuzzASnippetIsUnderstoodOrRefusedAsInvalid(f *testing.F) {
	for _, seed := range []string{`{}`, `{"code":"1","timeout_seconds":0.5}`, `{"memory_mb":-1}`, `{"memory_mb":9223372036854775807}`, `{"timeout_seconds":1e300}`, `{"env":{"":""}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var req client.SnippetRequest
		if cove.Decode(body, &req) != nil {
			return // the fuzz test of all requests looks at these
		}
		spec, err := cove.SnippetSpec(req)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", body, err)
			}
			return
		}
		if spec.Timeout < 0 || spec.Limits.MemoryBytes < 0 || spec.Limits.MemoryBytes>>20 != int64(req.MemoryMB) {
			text, _ := json.Marshal(req)
			t.Errorf("%s became %+v", text, spec)
		}
	})
}
