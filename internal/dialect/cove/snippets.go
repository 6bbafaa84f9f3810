package cove

import (
	"context"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/snippet"
)

// Snippets is what the API asks of whoever runs code in fresh processes.
type Snippets interface {
	Run(ctx context.Context, p auth.Principal, spec snippet.Spec) (snippet.Result, error)
}

// SetSnippets has the API run them. It is set before the API serves.
func (a *API) SetSnippets(s Snippets) { a.snippets = s }

var errNoSnippets = fault.New(fault.Unsupported, "this server runs no snippets")

func (a *API) runSnippet(c *call) error {
	var req client.SnippetRequest
	if err := c.decode(maxCode, &req); err != nil {
		return err
	}
	spec, err := SnippetSpec(req)
	if err != nil {
		return err
	}
	if a.snippets == nil {
		return errNoSnippets
	}

	result, err := a.snippets.Run(c.ctx(), c.who, spec)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireSnippet(&result))
}

// maxMemoryMB is more than any host has and far from overflow.
const maxMemoryMB = 1 << 30

// SnippetSpec is what a request asks for.
func SnippetSpec(req client.SnippetRequest) (snippet.Spec, error) {
	ms, err := milliseconds("timeout_seconds", req.TimeoutSeconds)
	if err != nil {
		return snippet.Spec{}, err
	}
	if req.MemoryMB < 0 || req.MemoryMB > maxMemoryMB {
		return snippet.Spec{}, fault.New(fault.Invalid, "memory_mb %d is out of range: use 1 to %d", req.MemoryMB, maxMemoryMB)
	}
	return snippet.Spec{
		Code: req.Code, Timeout: time.Duration(ms) * time.Millisecond, Env: req.Env, Network: req.Network, Template: req.Template, Sandbox: req.Sandbox,
		Limits: agentapi.RunLimits{CPUSeconds: req.CPUSeconds, MemoryBytes: int64(req.MemoryMB) << 20, OpenFiles: req.OpenFiles},
	}, nil
}

func wireSnippet(r *snippet.Result) client.SnippetResult {
	return client.SnippetResult{
		ExitCode: r.End.Status(), Stdout: readable(r.Stdout), Stderr: readable(r.Stderr), Truncated: r.Truncated,
		TimedOut: r.End.Outcome == agentapi.OutcomeTimeout, OOM: r.End.Outcome == agentapi.OutcomeOOM,
		Signal: r.End.Signal, Message: r.End.Message, Sandbox: r.Sandbox, Usage: client.RunUsage(r.End.Usage),
	}
}

// readable is output as text, with a mark for each byte that is none; a character that the size limit cut in two is left out.
func readable(data []byte) string {
	if len(data) == snippet.MaxOutput {
		data = data[:len(data)-unfinished(data)]
	}
	if utf8.Valid(data) {
		return string(data)
	}
	return string([]rune(string(data)))
}
