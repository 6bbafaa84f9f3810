package execd

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// commandRequest is what POST /command asks for.
type commandRequest struct {
	Command    string             `json:"command"`
	Argv       []string           `json:"argv"` // instead: no shell reads it
	Cwd        string             `json:"cwd"`
	Background bool               `json:"background"`
	Timeout    *int64             `json:"timeout"` // milliseconds
	UID        *int64             `json:"uid"`
	GID        *int64             `json:"gid"`
	Envs       map[string]*string `json:"envs"`
}

func (r *commandRequest) check() error {
	switch {
	case strings.TrimSpace(r.Command) == "" && len(r.Argv) == 0:
		return invalid("there is no command to run")
	case r.Command != "" && len(r.Argv) > 0:
		return invalid("give either command or argv")
	case len(r.Argv) > 0 && r.Argv[0] == "":
		return invalid("argv needs a program to run")
	case longest(r.Argv, r.Command) > maxArgument:
		return &refusal{http.StatusRequestEntityTooLarge, codeBody, "a command has at most 131071 bytes: upload a script and run that"}
	case strings.Contains(r.text(), "\x00"):
		return invalid("a command cannot hold a NUL byte")
	case r.Timeout != nil && (*r.Timeout < 0 || *r.Timeout > int64(365*24*time.Hour/time.Millisecond)):
		return invalid("timeout is in milliseconds, and not negative")
	case r.GID != nil && r.UID == nil:
		return invalid("uid is required when gid is provided")
	}
	for _, id := range []*int64{r.UID, r.GID} {
		if id != nil && !isID(strconv.FormatInt(*id, 10)) {
			return invalid("uid and gid are between 0 and 4294967294")
		}
	}
	return checkEnv(r.Envs)
}

// maxArgument is what the kernel takes as one argument of a program.
const maxArgument = 128<<10 - 1

func longest(list []string, more string) int {
	n := len(more)
	for _, text := range list {
		n = max(n, len(text))
	}
	return n
}

func checkEnv(env map[string]*string) error {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || value != nil && strings.Contains(*value, "\x00") {
			return invalid("an environment variable has a name or value that no process can have")
		}
	}
	return nil
}

func (r *commandRequest) text() string {
	if len(r.Argv) > 0 {
		return strings.Join(r.Argv, " ")
	}
	return r.Command
}

// user is whom a command runs as: name or number, and a group if one is given; empty: the sandbox's user.
func (r *commandRequest) user() string {
	switch {
	case r.UID == nil:
		return ""
	case r.GID == nil:
		return strconv.FormatInt(*r.UID, 10)
	}
	return strconv.FormatInt(*r.UID, 10) + ":" + strconv.FormatInt(*r.GID, 10)
}

// params says it in the agent's words.
func (h *Handler) params(c *call, r commandRequest) (agentapi.ExecParams, error) {
	home, err := h.home(c)
	if err != nil {
		return agentapi.ExecParams{}, err
	}
	p := agentapi.ExecParams{Argv: r.Argv, User: r.user(), Env: map[string]string{}, EnvFile: envFile(home)}
	if len(p.Argv) == 0 {
		p.Argv = []string{"bash", "-c", r.Command}
	}
	if r.Timeout != nil {
		p.TimeoutMS = *r.Timeout
	}
	p.Env["EXECD_ENVS"] = p.EnvFile
	for name, value := range r.Envs {
		if value != nil {
			p.Env[name] = *value
		}
	}
	p.Cwd = expand(r.Cwd, home, p.Env)
	return p, nil
}

// envFile is where clients put variables that every later command is to have.
func envFile(home *agentapi.Account) string {
	switch {
	case home.Env["EXECD_ENVS"] != "":
		return expand(home.Env["EXECD_ENVS"], home, nil)
	case home.UID == 0:
		return "/opt/opensandbox/.env"
	}
	return path.Join("/", home.Home, ".opensandbox/.env")
}

// plainPath is one that a shell reads as it stands.
var plainPath = regexp.MustCompile(`^(/[A-Za-z0-9._-]+)+$`)

// tempDir is where the sandbox keeps what is not to last.
func tempDir(home *agentapi.Account) string {
	if dir := home.Env["TMPDIR"]; plainPath.MatchString(dir) {
		return dir
	}
	return "/tmp"
}

// expand makes a path absolute as a shell would: "~" is the home, $NAME a variable; relative ones start at the working
// directory. Nothing stays nothing.
func expand(name string, home *agentapi.Account, env map[string]string) string {
	if name == "" {
		return ""
	}
	if name == "~" || strings.HasPrefix(name, "~/") {
		name = path.Join("/", home.Home, name[1:])
	}
	if strings.Contains(name, "$") {
		all := map[string]string{"HOME": home.Home, "USER": home.Name, "PWD": home.Workdir}
		maps.Copy(all, home.Env)
		maps.Copy(all, env)
		name = os.Expand(name, func(variable string) string { return all[variable] })
	}
	return absolute(name, home)
}

// absolute is a path from the working directory. It is not cleaned: ".." after a link means the link's own parent.
func absolute(name string, home *agentapi.Account) string {
	if strings.HasPrefix(name, "/") {
		return name
	}
	return strings.TrimSuffix(home.Workdir, "/") + "/" + name
}

// noProgram is a program that there is not, or that cannot be run.
type noProgram struct {
	exit    int // as a shell would say it
	message string
}

func (e *noProgram) Error() string { return e.message }

func asNoProgram(err error, to **noProgram) bool { return errors.As(err, to) }

// plainFor is for how long bash is not looked for again: somebody may install it.
const plainFor = 10 * time.Second

// exec starts a process. Where there is no bash, the plain shell does what it can.
func (h *Handler) exec(ctx context.Context, c *call, params agentapi.ExecParams, shell bool) (*agentapi.Stream, error) {
	c.room.mu.Lock()
	plain := time.Now().Before(c.room.plain)
	c.room.mu.Unlock()
	if shell && plain {
		params.Argv[0] = "sh"
	}
	stream, err := h.sandboxes.Exec(ctx, c.t.Who, c.id(), params)
	if shell && !plain && fault.Is(err, fault.NotFound) && fault.Message(err) == "bash: no such command" {
		params.Argv[0] = "sh"
		if stream, err = h.sandboxes.Exec(ctx, c.t.Who, c.id(), params); err == nil {
			c.room.mu.Lock()
			c.room.plain = time.Now().Add(plainFor)
			c.room.mu.Unlock()
		}
	}
	if err == nil {
		return stream, nil
	}
	return nil, notStarted(params, shell, err)
}

// notStarted says why there is no process: what the request named is not there, or cannot be run.
func notStarted(params agentapi.ExecParams, shell bool, err error) error {
	message, kind := fault.Message(err), fault.KindOf(err)
	directory := strings.HasPrefix(message, "working directory ")
	switch {
	case kind != fault.NotFound && kind != fault.Denied && kind != fault.Invalid:
		return err
	case directory, kind == fault.Invalid, strings.Contains(message, " user ") || strings.Contains(message, " group "):
		return invalid(message)
	case shell && kind == fault.NotFound && params.Argv[0] == "sh":
		return &refusal{http.StatusBadRequest, codeUnsupported, "this sandbox's image has no shell, neither bash nor sh; give argv instead of command"}
	case kind == fault.NotFound:
		return &noProgram{127, message}
	}
	return &noProgram{126, message}
}

// tellMissing tells of a program that could not be run what a shell would have told.
func tellMissing(c *call, cmd *command, missing *noProgram) error {
	cmd.finish(missing.exit, missing.message)
	if err := c.room.admit(cmd); err != nil {
		return err
	}
	out := newStream(c.w)
	out.add(event{Type: "init", Text: cmd.id})
	text := missing.message
	if keepsEnds(c.r.UserAgent()) {
		text += "\n"
	}
	out.add(event{Type: "stderr", Text: text})
	out.add(failure(strconv.Itoa(missing.exit), "exit status "+strconv.Itoa(missing.exit)))
	_ = out.flush() // a client that has gone hears nothing
	return nil
}

// interpreterPort is where other servers' interpreters listen inside a sandbox. Clients look there by a command, to learn
// whether code can be run: the code is run by the agent, so the agent listens once somebody asks.
const interpreterPort = "44771"

func (h *Handler) openInterpreterPort(c *call) {
	home, err := h.home(c)
	if err != nil {
		return
	}
	port, err := strconv.Atoi(interpreterPort)
	if text := home.Env["JUPYTER_PORT"]; text != "" {
		port, err = strconv.Atoi(text)
	}
	if err != nil {
		return
	}
	agent, err := h.agent(c)
	if err == nil {
		err = agent.Listen(c.ctx(), agentapi.ListenParams{Port: port})
	}
	if err != nil {
		h.log.Debug("interpreter's port is not open", "sandbox", c.id(), "error", err)
	}
}
