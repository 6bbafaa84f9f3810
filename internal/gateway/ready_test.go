package gateway

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// TestReadiness_LateCheck has a check that is late: how it was before counts for a while.
func TestReadiness_LateCheck(t *testing.T) {
	type round struct {
		takes  time.Duration // the check that this request begins, if the one before is over
		fails  bool
		state  string
		answer time.Duration // after the request
	}
	const never = time.Hour
	for name, rounds := range map[string][]round{
		"a check that is slow and good": {
			{takes: 0, state: checkOK},
			{takes: 3 * time.Second, state: checkOK, answer: checkWait},
			{takes: 3 * time.Second, state: checkOK, answer: checkWait},
		},
		"a first check that does not answer": {{takes: never, state: checkFailed, answer: checkWait}},
		"a check that hangs": {
			{takes: 0, state: checkOK},
			{takes: never, state: checkOK, answer: checkWait},
			{state: checkFailed, answer: checkWait}, // it has hung for six seconds
			{state: checkFailed, answer: checkWait},
		},
		"a check that fails slowly": {
			{takes: 0, state: checkOK},
			{takes: 3 * time.Second, fails: true, state: checkOK, answer: checkWait},
			{takes: 3 * time.Second, fails: true, state: checkFailed, answer: checkWait},
		},
		"a check that fails": {
			{takes: 0, state: checkOK},
			{takes: 1500 * time.Millisecond, fails: true, state: checkFailed, answer: 1500 * time.Millisecond},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var now round
				g := &Gateway{cfg: Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil)), ReadyFor: time.Second, Checks: Checks{
					"part": func(context.Context) error {
						r := now
						time.Sleep(r.takes)
						if r.fails {
							return errors.New("no")
						}
						return nil
					},
				}}}
				for i, r := range rounds {
					now = r
					begun := time.Now()
					states, _ := g.look()
					if took := time.Since(begun); states["part"] != r.state || took != r.answer {
						t.Errorf("request %d: %s after %v; want %s after %v", i, states["part"], took, r.state, r.answer)
					}
					time.Sleep(2 * time.Second)
				}
				g.inflight.Wait()
			})
		})
	}
}
