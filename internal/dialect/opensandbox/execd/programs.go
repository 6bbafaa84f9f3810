package execd

import (
	"context"
	"errors"
	"iter"
	"net/http"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// program is a language that has no kernel in the sandbox and is run by what an image may bring.
type program struct {
	needs  string // in the image
	script string // reads code from standard input; each run is a program of its own: nothing is remembered between two of them
}

// programs are those languages.
var programs = map[string]program{
	"go": {"go", `cat > "$d/main.go"; grep -q '^ *package ' "$d/main.go" || sed -i '1i package main' "$d/main.go"; go run "$d/main.go"`},
}

// asProgram is the shell's part of every one.
const asProgram = `d=$(mktemp -d) || exit 1; trap 'rm -rf "$d"' EXIT; `

// hasProgram refuses a language whose program the image does not have.
func (h *Handler) hasProgram(c *call, language string) error {
	p := programs[language]
	stream, err := h.sandboxes.Exec(c.ctx(), c.t.Who, c.id(), agentapi.ExecParams{Argv: []string{"sh", "-c", "command -v " + p.needs}})
	missing := &refusal{http.StatusBadRequest, codeUnsupported, "code in " + language + " needs " + p.needs + ", which this sandbox's image does not have"}
	if fault.Is(err, fault.NotFound) {
		return missing
	}
	if err != nil {
		return err
	}
	for e, err := range stream.Events() {
		switch {
		case err != nil:
			return err
		case e.Type == agentapi.EventEnd && e.End.Outcome != agentapi.OutcomeOK:
			return missing
		}
	}
	return nil
}

// runProgram runs code and yields what it tells. It goes on when the caller leaves.
func (h *Handler) runProgram(ctx context.Context, c *call, name, language, code string) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		home, err := h.home(c)
		if err != nil {
			yield(agentapi.Event{}, err)
			return
		}
		stream, err := h.sandboxes.Exec(ctx, c.t.Who, c.id(), agentapi.ExecParams{
			Argv: []string{"sh", "-c", asProgram + programs[language].script}, Stdin: true, Tag: name,
			EnvFile: envFile(home), Disconnect: agentapi.DisconnectSurvive,
		})
		if err != nil {
			yield(agentapi.Event{}, err)
			return
		}
		if err := errors.Join(stream.Stdin([]byte(code)), stream.CloseStdin()); err != nil {
			stream.Close()
			yield(agentapi.Event{}, err)
			return
		}
		stream.Events()(yield)
	}
}

// stopProgram sends a signal to all that such a context has started.
func (h *Handler) stopProgram(c *call, name, signal string) error {
	agent, err := h.agent(c)
	if err != nil {
		return err
	}
	err = agent.Signal(c.ctx(), agentapi.SignalParams{Target: agentapi.Target{Tag: name}, Signal: signal, Tree: true})
	return ignore(err, fault.NotFound)
}
