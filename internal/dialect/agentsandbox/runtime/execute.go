package runtime

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// maxBody is how long the body of a command may be: programs send files in here-documents.
const maxBody = 8 << 20

// executeRequest is what POST /execute asks for.
type executeRequest struct {
	Command string   `json:"command"`
	Timeout *float64 `json:"timeout_seconds"` // from version 1.0 on

	patience time.Duration // for which the client waits; zero: it did not say
}

// executed is the answer to it.
type executed struct {
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	ExitCode int    `json:"exit_code"`
	TimedOut bool   `json:"timed_out,omitempty"`
}

// execute runs a command once, however often a client sends it: clients up to 0.5 send it again, five times, when they have not
// heard of it in the time that they give it.
func (rt *Runtime) execute(c *call) error {
	req, key, err := decodeExecute(c)
	if err != nil {
		return err
	}
	r, fresh, err := rt.runs.enter(c.ctx(), c.who.Tenant, c.id, key)
	if err != nil {
		return err
	}
	if fresh {
		rt.start(c, r, req)
	}
	select {
	case <-r.done:
	case <-c.ctx().Done():
	}
	if c.ctx().Err() != nil {
		rt.runs.leave(r)
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	if r.failed != nil {
		rt.runs.forget(r)
		return r.failed
	}
	_ = c.answer(http.StatusOK, r.result)
	if c.unsent { // not whether the client has gone by now: one that has read all of it may
		rt.runs.leave(r)
		return nil
	}
	rt.runs.forget(r)
	return nil
}

// key stands for a request: two with one key are the same, sent twice.
type key [sha256.Size]byte

func decodeExecute(c *call) (req executeRequest, k key, err error) {
	wait := c.r.Header.Values("X-Sandbox-Timeout")
	if req.patience, err = ParseTimeout(wait); err != nil {
		return req, k, refused(http.StatusBadRequest, "%s", err)
	}
	body, err := transfer.ReadJSON(c.ctx(), c.who.Tenant, http.MaxBytesReader(c.w, c.r.Body, maxBody))
	var large *http.MaxBytesError
	var told *fault.Error
	switch {
	case errors.Is(err, transfer.ErrShare): // which place.Status would make a 413
		return req, k, refused(http.StatusTooManyRequests, "%s", fault.Message(err))
	case errors.As(err, &told):
		return req, k, err
	case errors.As(err, &large):
		return req, k, refused(http.StatusRequestEntityTooLarge, "a command has at most %d MiB: upload a script and run that", maxBody>>20)
	case err != nil:
		return req, k, refused(http.StatusBadRequest, "the request body could not be read")
	}
	done, err := transfer.DecodeTurn(c.ctx(), body)
	if err != nil {
		return req, k, err
	}
	defer done()
	if err := json.Unmarshal(body, &req); err != nil {
		return req, k, refused(http.StatusBadRequest, `the request body is not the JSON of {"command": "text"}`)
	}
	if err := req.check(); err != nil {
		return req, k, err
	}
	sum := sha256.New()
	for _, part := range []string{c.id, strings.Join(wait, ","), string(body)} {
		_, _ = io.WriteString(sum, strconv.Itoa(len(part))+":"+part) // never fails
	}
	return req, key(sum.Sum(nil)), nil
}

func (r *executeRequest) check() error {
	switch {
	case strings.TrimSpace(r.Command) == "":
		return refused(http.StatusBadRequest, "there is no command to run")
	case strings.Contains(r.Command, "\x00"):
		return refused(http.StatusBadRequest, "a command cannot hold a NUL byte")
	case r.Timeout != nil && !(*r.Timeout > 0): // not a number is neither
		return refused(http.StatusBadRequest, "timeout_seconds is a number above 0")
	}
	return nil
}

// How long commands may run: maxRun at most, also where a client says nothing.
const maxRun = time.Hour

// ParseTimeout reads what a client sends as X-Sandbox-Timeout: the seconds for which it waits. Zero: it did not say.
func ParseTimeout(values []string) (time.Duration, error) {
	switch {
	case len(values) == 0:
		return 0, nil
	case len(values) > 1:
		return 0, errors.New("there is more than one X-Sandbox-Timeout")
	}
	seconds, err := strconv.ParseFloat(strings.TrimSpace(values[0]), 64)
	if err != nil || math.IsNaN(seconds) || seconds <= 0 {
		return 0, errors.New("X-Sandbox-Timeout is a number of seconds above 0")
	}
	return toDuration(seconds), nil
}

// toDuration bounds seconds to what can be counted, and is worth to be.
func toDuration(seconds float64) time.Duration {
	return max(time.Millisecond, time.Duration(min(seconds, (100*24*time.Hour).Seconds())*float64(time.Second)))
}

// limits says when a command is killed, and when its client has to hear something: a bit before it stops listening, so that it
// hears of the end instead of asking again. Zero: the client did not say how long it waits.
func (r *executeRequest) limits() (kill, answer time.Duration) {
	kill = maxRun
	if wait := r.patience; wait > 0 {
		// A busy machine needs the margin to kill the command and to send what it wrote.
		margin := max(200*time.Millisecond, min(500*time.Millisecond, wait/4), min(time.Second, wait/20))
		margin = min(margin, wait/2)
		kill, answer = min(kill, wait-margin), wait-margin/2
	}
	if r.Timeout != nil {
		kill = min(kill, toDuration(*r.Timeout))
	}
	return max(kill, time.Millisecond), answer
}
