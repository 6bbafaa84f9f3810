package execd

import (
	"net/http"
	"sync"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// terminal is a shell that clients join and leave. It begins when the first one joins.
type terminal struct {
	id      string
	cwd     string
	command string // empty: a shell that asks
	log     *journal

	mu       sync.Mutex
	begun    bool
	pty      bool
	stream   *agentapi.Stream
	over     bool
	exit     int
	attached *attachment
}

func (h *Handler) createTerminal(c *call) error {
	var req struct {
		Cwd     string `json:"cwd"`
		Command string `json:"command"`
	}
	if err := c.decode(maxBody, false, &req); err != nil {
		return err
	}
	t := &terminal{id: newID(), command: req.Command, log: h.journal(c, maxReplay)}
	if req.Cwd != "" {
		home, err := h.home(c)
		if err != nil {
			return err
		}
		t.cwd = expand(req.Cwd, home, nil)
		if err := h.checkDirectory(c, t.cwd); err != nil {
			return err
		}
	}
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	if len(c.room.terminals) >= maxTerminals {
		return &refusal{http.StatusTooManyRequests, codeRuntime, "too many terminals in this sandbox: delete one first"}
	}
	c.room.terminals[t.id] = t
	c.answerWith(http.StatusCreated, map[string]string{"session_id": t.id})
	return nil
}

func (r *room) terminal(id string) (*terminal, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t := r.terminals[id]; t != nil {
		return t, nil
	}
	return nil, &refusal{http.StatusNotFound, codeNoSession, "there is no terminal " + short(id)}
}

func (h *Handler) getTerminal(c *call) error {
	t, err := c.room.terminal(c.r.PathValue("id"))
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return c.answer(map[string]any{
		"session_id": t.id, "running": t.begun && !t.over, "output_offset": t.log.end(),
	})
}

// deleteTerminal ends the shell with all it started.
func (h *Handler) deleteTerminal(c *call) error {
	t, err := c.room.terminal(c.r.PathValue("id"))
	if err != nil {
		return err
	}
	c.room.mu.Lock()
	delete(c.room.terminals, t.id)
	c.room.mu.Unlock()
	t.log.drop()
	t.mu.Lock()
	runs := t.begun && !t.over
	t.mu.Unlock()
	if runs {
		agent, err := h.agent(c)
		if err != nil {
			return err
		}
		err = agent.Signal(c.ctx(), agentapi.SignalParams{Target: agentapi.Target{Tag: t.id}, Signal: "SIGKILL", Tree: true})
		if ignore(err, fault.NotFound) != nil {
			return err
		}
	}
	return c.nothing()
}

// start begins the shell; mu is held.
func (h *Handler) start(c *call, t *terminal, pty bool) error {
	home, err := h.home(c)
	if err != nil {
		return err
	}
	params := agentapi.ExecParams{
		Argv: []string{"bash"}, Cwd: t.cwd, Stdin: true, Tag: t.id, EnvFile: envFile(home),
		Env: map[string]string{"EXECD_ENVS": envFile(home)}, Disconnect: agentapi.DisconnectKill, // nobody finds it again
	}
	if t.command != "" {
		params.Argv = []string{"bash", "-c", t.command}
	}
	if pty {
		params.PTY = &agentapi.PTYSize{Rows: 24, Cols: 80}
	}
	ctx, cancel := h.lasting(c)
	stream, err := h.exec(ctx, c, params, true)
	if err != nil {
		cancel()
		return err
	}
	t.begun, t.pty, t.stream = true, pty, stream
	h.work.Go(func() {
		defer cancel()
		t.hear(stream)
	})
	return nil
}

// hear takes everything that the shell tells, to its end.
func (t *terminal) hear(stream *agentapi.Stream) {
	exit := -1
	for e, err := range stream.Events() {
		switch {
		case err != nil:
		case e.Type == agentapi.EventStdout:
			t.tell(frameStdout, e.Data)
		case e.Type == agentapi.EventStderr:
			t.tell(frameStderr, e.Data)
		case e.Type == agentapi.EventEnd:
			exit, _ = verdict(e.End)
		}
	}
	t.mu.Lock()
	t.over, t.exit = true, exit
	who := t.attached
	t.mu.Unlock()
	if who != nil {
		close(who.out) // nobody else sends
	}
}

func (t *terminal) tell(kind byte, data []byte) {
	t.mu.Lock()
	t.log.write(data)
	who := t.attached
	t.mu.Unlock()
	if who == nil {
		return
	}
	select {
	case who.out <- append([]byte{kind}, data...):
	case <-who.gone:
	}
}
