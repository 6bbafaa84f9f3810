package execd

import (
	"context"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// session is a shell that remembers. Each run is a shell of its own, which begins with what the one before has left: so
// an exit, a time limit or a broken script ends a run and never the session.
type session struct {
	id   string
	file string        // where its shell leaves what it knows, in the sandbox
	cwd  string        // where the first run begins
	turn chan struct{} // holds one while a run goes on

	mu      sync.Mutex
	current string // the command that runs; empty: none
	deleted bool
}

// begin makes a command the current one, unless the session was deleted.
func (s *session) begin(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current = id
	return !s.deleted
}

// end tells whether the session was deleted while the command ran.
func (s *session) end() (deleted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current = ""
	return s.deleted
}

// delete gives the command that runs, if any.
func (s *session) delete() (current string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleted = true
	return s.current
}

func (h *Handler) createSession(c *call) error {
	var req struct {
		Cwd *string `json:"cwd"`
	}
	if err := c.decode(maxBody, false, &req); err != nil {
		return err
	}
	home, err := h.home(c)
	if err != nil {
		return err
	}
	s := &session{id: newID(), turn: make(chan struct{}, 1)}
	s.file = tempDir(home) + "/.opensandbox-session-" + s.id
	if req.Cwd != nil && *req.Cwd != "" {
		s.cwd = expand(*req.Cwd, home, nil)
		if err := h.checkDirectory(c, s.cwd); err != nil {
			return err
		}
	}
	if err := c.room.open(s); err != nil {
		return err
	}
	return c.answer(map[string]string{"session_id": s.id})
}

func (r *room) open(s *session) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.sessions) >= maxSessions {
		return &refusal{http.StatusTooManyRequests, codeRuntime, "too many sessions in this sandbox: delete one first"}
	}
	r.sessions[s.id] = s
	return nil
}

// checkDirectory refuses what no run could begin in.
func (h *Handler) checkDirectory(c *call, name string) error {
	agent, err := h.agent(c)
	if err != nil {
		return err
	}
	e, err := agent.Stat(c.ctx(), agentapi.PathParams{Path: name})
	switch {
	case fault.Is(err, fault.NotFound):
		return invalid("working directory " + short(name) + " does not exist")
	case err != nil:
		return err
	case e.Type == agentapi.EntryDir, e.Link != nil && e.Link.Type == agentapi.EntryDir:
		return nil
	}
	return invalid("working directory " + short(name) + " is not a directory")
}

func (r *room) session(id string) (*session, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sessions[id]; s != nil {
		return s, nil
	}
	return nil, &refusal{http.StatusNotFound, codeNoSession, "there is no session " + short(id)}
}

func (h *Handler) deleteSession(c *call) error {
	s, err := c.room.session(c.r.PathValue("id"))
	if err != nil {
		return err
	}
	c.room.mu.Lock()
	delete(c.room.sessions, s.id)
	c.room.mu.Unlock()
	agent, err := h.agent(c)
	if err != nil {
		return err
	}
	if running := s.delete(); running != "" {
		err := agent.Signal(c.ctx(), agentapi.SignalParams{Target: agentapi.Target{Tag: running}, Signal: "SIGKILL", Tree: true})
		if ignore(err, fault.NotFound) != nil {
			return err
		}
	}
	if err := s.forget(c.ctx(), agent); err != nil {
		return err
	}
	return c.nothing()
}

// forget removes what the session remembers.
func (s *session) forget(ctx context.Context, agent *agentapi.Client) error {
	for _, name := range []string{s.file, s.file + ".new"} {
		if err := agent.Remove(ctx, agentapi.RemoveParams{Path: name}); ignore(err, fault.NotFound) != nil {
			return err
		}
	}
	return nil
}

func (h *Handler) runInSession(c *call) error {
	s, err := c.room.session(c.r.PathValue("id"))
	if err != nil {
		return err
	}
	var req commandRequest
	if err := c.decode(maxBody, true, &req); err != nil {
		return err
	}
	req.Argv, req.Background, req.UID, req.GID = nil, false, nil, nil
	if err := req.check(); err != nil {
		return err
	}
	select {
	case s.turn <- struct{}{}:
	case <-c.ctx().Done():
		return c.ctx().Err()
	}
	cmd, told, err := h.beginInSession(c, s, req)
	if err != nil {
		<-s.turn
		return err
	}
	return h.tell(c, cmd, told)
}

// beginInSession starts a run, which gives the turn back when it has ended.
func (h *Handler) beginInSession(c *call, s *session, req commandRequest) (*command, *telling, error) {
	home, err := h.home(c)
	if err != nil {
		return nil, nil, err
	}
	params, err := h.params(c, req)
	if err != nil {
		return nil, nil, err
	}
	visit := params.Cwd
	if params.Cwd = s.cwd; visit != "" {
		if err := h.checkDirectory(c, visit); err != nil {
			return nil, nil, err
		}
	}
	agent, err := h.agent(c)
	if err != nil {
		return nil, nil, err
	}
	// All on one line: what goes wrong in a command is told with the number of its own line.
	params.Argv = []string{"bash", "-c", `eval "$3"; eval "set --; $1"`, "bash", req.Command, visit, s.script(home)}
	cmd := newCommand(req.Command)
	cmd.atEnd = func(ctx context.Context, end *agentapi.End) {
		defer func() { <-s.turn }()
		if end != nil && end.Signal == "" { // one that was killed may have written half of it
			// A run that became another program by exec has left nothing.
			_, _ = agent.Move(ctx, agentapi.MoveParams{From: s.file + ".new", To: s.file})
		}
		if s.end() {
			_ = s.forget(ctx, agent) // in a sandbox that is gone there is nothing to remove
		}
	}
	if !s.begin(cmd.id) {
		return nil, nil, &refusal{http.StatusNotFound, codeNoSession, "session " + s.id + " was deleted"}
	}
	told, err := h.begin(c, cmd, params, true)
	return cmd, told, err
}

// script is what a run does before its command; $2, if it is not empty, is where this run alone is. Variables, functions,
// options and the directory are read now and written down at the end, however that comes. A plain shell knows how to
// write down less.
func (s *session) script(home *agentapi.Account) string {
	return strings.NewReplacer("@FILE@", s.file, "@NAMES@", inherited(home)).Replace(`{
[ -f @FILE@ ] && . @FILE@
if [ -n "$2" ]; then __cove_back=$PWD; cd -- "$2" || exit 1; fi
__cove_save() {
umask 077
if [ -n "${BASH_VERSION-}" ]; then
{
unset -f __cove_save; unset COVE_RUN
__cove_at=${__cove_back-$PWD}
builtin declare -p
builtin declare -f; builtin shopt -p; builtin alias -p
for __cove_at in @NAMES@; do [ "${!__cove_at+x}" ] || builtin printf 'unset %s\n' "$__cove_at"; done
builtin printf 'builtin cd -- %q\nOLDPWD=%q\nunset __cove_at __cove_back\n' "${__cove_back-$PWD}" "${OLDPWD-}"
builtin set +o
} >| @FILE@.new
else
{
unset COVE_RUN
export -p
printf "cd -- '%s'\nunset __cove_back\n" "${__cove_back-$PWD}"
} >| @FILE@.new
fi
}
trap '{ __cove_save || :; } 2>/dev/null' EXIT
} 2>/dev/null`)
}

// inherited are the variables that every process has from the start: a session that unset one remembers that.
func inherited(home *agentapi.Account) string {
	names := []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG"}
	for name := range home.Env {
		if variable.MatchString(name) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// variable is a name that shells know.
var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
