package build

import (
	"cmp"
	"context"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// What ENV steps may set; the domain gives a sandbox no more.
const (
	maxEnv      = 256
	maxEnvBytes = 32 << 10
)

var (
	userForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`)
	nameForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// do runs one step.
func (b *Builder) do(ctx context.Context, s *site, st step) error {
	switch st.Type {
	case stepRun:
		return s.doRun(ctx, st.Args)
	case stepCopy, stepAdd:
		return s.doCopy(ctx, st)
	case stepEnv, stepArg:
		return s.doEnv(ctx, st.Args)
	case stepWorkdir:
		return s.doWorkdir(ctx, st.Args)
	case stepUser:
		return s.doUser(ctx, st.Args)
	}
	return fault.New(fault.Invalid, "unknown step '%.40s': use RUN, COPY, ENV, WORKDIR or USER", st.Type)
}

// doRun runs a command in a login shell: args are the command and, perhaps, who runs it.
func (s *site) doRun(ctx context.Context, args []string) error {
	if len(args) == 0 || args[0] == "" {
		return fault.New(fault.Invalid, "RUN needs a command")
	}
	as := s.setting
	if len(args) > 1 && args[1] != "" {
		as.User = args[1]
	}
	err := s.needShell(ctx)
	if err == nil {
		err = s.shell(ctx, args[0], as)
	}
	return failed(args[0], err)
}

// shell runs a command as somebody whose existence is checked first: of that E2B's clients know the words.
func (s *site) shell(ctx context.Context, text string, as setting) error {
	known, err := s.hasUser(ctx, as.User)
	if err != nil {
		return err
	}
	if !known {
		return fault.New(fault.Invalid, "command failed: unauthenticated: invalid username: '%.80s'", as.User)
	}
	out, err := s.run(ctx, command{argv: []string{bash, "-l", "-c", text}, instead: sh, as: as, loud: true})
	if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Invalid) { // such as a working directory that is gone
		return fault.Wrap(fault.Invalid, err, "command failed: %s", fault.Message(err))
	}
	if err != nil {
		return err
	}
	return out.failure()
}

// failed says which command it was.
func failed(text string, err error) error {
	if !fault.Is(err, fault.Invalid) {
		return err
	}
	if len(text) > 1000 {
		text = text[:1000] + "…"
	}
	return fault.Wrap(fault.Invalid, err, "failed to run command '%s': %s", text, fault.Message(err))
}

// doEnv sets variables: args are names and values by turns.
func (s *site) doEnv(ctx context.Context, args []string) error {
	if len(args) == 0 || len(args)%2 != 0 {
		return fault.New(fault.Invalid, "ENV needs names and values by turns")
	}
	known, err := s.variables(ctx)
	if err != nil {
		return err
	}
	next := maps.Clone(s.setting.Env)
	if next == nil {
		next = map[string]string{}
	}
	size := 0
	for k, v := range next {
		size += len(k) + len(v)
	}
	for i := 0; i < len(args); i += 2 {
		if !nameForm.MatchString(args[i]) {
			return fault.New(fault.Invalid, "%.60q is not a name for an environment variable", args[i])
		}
		value, whole := expand(args[i+1], known, maxEnvBytes)
		if old, again := next[args[i]]; again {
			size -= len(args[i]) + len(old)
		}
		next[args[i]] = value
		size += len(args[i]) + len(value)
		if !whole || len(next) > maxEnv || size > maxEnvBytes {
			return fault.New(fault.Invalid, "the template sets more than %d variables or %d bytes of them", maxEnv, maxEnvBytes)
		}
	}
	s.setting.Env = next
	return nil
}

var variable = regexp.MustCompile(`\\\$|\$\{[A-Za-z_][A-Za-z0-9_]*\}|\$[A-Za-z_][A-Za-z0-9_]*`)

// expand puts variables into a text, as a Dockerfile does: $NAME and ${NAME}, and \$ for a dollar sign. It stops where there are
// more bytes than most: two of a text may stand for very many.
func expand(text string, known map[string]string, most int) (out string, whole bool) {
	var b strings.Builder
	for b.Len() <= most {
		found := variable.FindStringIndex(text)
		if found == nil {
			b.WriteString(text)
			return b.String(), b.Len() <= most
		}
		b.WriteString(text[:found[0]])
		if name := text[found[0]:found[1]]; name == `\$` {
			b.WriteByte('$')
		} else {
			b.WriteString(known[strings.Trim(name, "${}")])
		}
		text = text[found[1]:]
	}
	return "", false
}

// makeDir makes a directory and gives the levels that were not there to somebody.
func (s *site) makeDir(ctx context.Context, dir, owner string) error {
	_, err := s.agent.Mkdir(ctx, agentapi.MkdirParams{Path: dir, User: owner, Root: true, Parents: true})
	return err
}

// link makes a symbolic link in the place of whatever file or link there is.
func (s *site) link(ctx context.Context, target, at, owner string) error {
	err := s.agent.Remove(ctx, agentapi.RemoveParams{Path: at, User: "root"})
	if err != nil && !fault.Is(err, fault.NotFound) {
		return err
	}
	return s.agent.Symlink(ctx, agentapi.SymlinkParams{Path: at, Target: target, User: owner, Root: true})
}

func (s *site) doWorkdir(ctx context.Context, args []string) error {
	if len(args) != 1 || args[0] == "" {
		return fault.New(fault.Invalid, "WORKDIR needs one path")
	}
	dir, _, err := s.absolute(ctx, args[0])
	if err != nil {
		return err
	}
	if err := s.makeDir(ctx, dir, s.owner()); err != nil {
		return wrapStep(err, "failed to make the working directory '%.200s'", dir)
	}
	s.setting.Workdir = dir
	return nil
}

// wrapStep says what did not work, where it was the caller's doing: what a step asks for is not there, or cannot be.
func wrapStep(err error, format string, args ...any) error {
	if err == nil || !slices.Contains([]fault.Kind{fault.Invalid, fault.NotFound, fault.Denied, fault.Conflict, fault.Exhausted, fault.DiskFull}, fault.KindOf(err)) {
		return err
	}
	what := fault.Message(fault.New(fault.Invalid, format, args...))
	return fault.Wrap(fault.Invalid, err, "%s: %s", what, fault.Message(err))
}

// owner is to whom new files belong.
func (s *site) owner() string { return cmp.Or(s.setting.User, defaultUser) }

// absolute is a path of a step from the root on; dir tells that it can only be a directory.
func (s *site) absolute(ctx context.Context, text string) (clean string, dir bool, err error) {
	expanded, whole := text, len(text) <= maxPath
	if strings.Contains(text, "$") {
		known, err := s.variables(ctx)
		if err != nil {
			return "", false, err
		}
		expanded, whole = expand(text, known, maxPath)
	}
	if !whole {
		return "", false, fault.New(fault.Invalid, "the path '%.100s…' is too long", text)
	}
	text = expanded
	dir = text == "." || strings.HasSuffix(text, "/") || strings.HasSuffix(text, "/.")
	if !path.IsAbs(text) {
		text = path.Join(cmp.Or(s.setting.Workdir, "/"), text)
	}
	return path.Clean(text), dir, nil
}

func (s *site) doUser(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return fault.New(fault.Invalid, "USER needs one name")
	}
	name, _, _ := strings.Cut(args[0], ":") // a group may follow, which the user has anyway
	if !userForm.MatchString(name) {
		return fault.New(fault.Invalid, "'%.80s' is not a name for a user", args[0])
	}
	if err := s.makeUser(ctx, name, 1001); err != nil {
		return wrapStep(err, "failed to make the user '%s'", name)
	}
	s.setting.User = name
	s.environ = nil // another user has another home
	return nil
}
