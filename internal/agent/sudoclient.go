package agent

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"path"
	"strings"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
)

// sudoOptions is a parsed sudo command line.
type sudoOptions struct {
	user     string
	keepEnv  bool
	keep     []string
	home     bool
	login    bool
	shell    bool
	list     bool
	validate bool
	version  bool
	env      map[string]string
	argv     []string
}

// ParseSudo reads the arguments of a sudo, without its name. It knows what scripts and people use and says so when
// they use something else.
func ParseSudo(args []string) (SudoCommand, error) {
	o := sudoOptions{env: map[string]string{}}
	rest, err := o.flags(args)
	if err != nil {
		return SudoCommand{}, err
	}
	for len(rest) > 0 {
		name, value, ok := strings.Cut(rest[0], "=")
		if !ok || name == "" || strings.ContainsAny(name, "/ ") {
			break
		}
		o.env[name] = value
		rest = rest[1:]
	}
	o.argv = rest
	return o.command()
}

// SudoCommand is what a sudo was asked to do.
type SudoCommand struct {
	Argv     []string
	Env      map[string]string // from VAR=value
	User     string
	KeepEnv  bool     // -E
	KeepVars []string // --preserve-env=…
	Login    bool     // -i
	Shell    bool     // a shell is to be run, with Argv as its command line
	Quiet    bool     // nothing to run: -v, -k
	Print    string   // nothing to run but this to say
}

func (o *sudoOptions) flags(args []string) ([]string, error) {
	for len(args) > 0 {
		arg := args[0]
		if arg == "--" {
			return args[1:], nil
		}
		if len(arg) < 2 || arg[0] != '-' {
			return args, nil
		}
		args = args[1:]
		var err error
		if strings.HasPrefix(arg, "--") {
			args, err = o.long(arg[2:], args)
		} else {
			args, err = o.short(arg[1:], args)
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func (o *sudoOptions) short(letters string, args []string) ([]string, error) {
	for i, c := range letters {
		switch c {
		case 'n', 'S', 'k', 'K', 'b', 'A', 'B', 'P':
			if c == 'k' || c == 'K' {
				o.validate = o.validate || len(args) == 0
			}
		case 'E':
			o.keepEnv = true
		case 'H':
			o.home = true
		case 'i':
			o.login = true
		case 's':
			o.shell = true
		case 'l':
			o.list = true
		case 'v':
			o.validate = true
		case 'V', 'h':
			o.version = true
		case 'u', 'g', 'p', 'C', 'r', 't', 'T', 'D', 'R', 'U':
			value := letters[i+1:]
			if value == "" {
				if len(args) == 0 {
					return nil, fmt.Errorf("option requires an argument -- '%c'", c)
				}
				value, args = args[0], args[1:]
			}
			if c == 'u' {
				o.user = strings.TrimPrefix(value, "#")
			}
			return args, nil
		default:
			return nil, fmt.Errorf("invalid option -- '%c'", c)
		}
	}
	return args, nil
}

func (o *sudoOptions) long(name string, args []string) ([]string, error) {
	name, value, given := strings.Cut(name, "=")
	switch name {
	case "non-interactive", "stdin", "background", "reset-timestamp", "remove-timestamp":
	case "preserve-env":
		if given {
			o.keep = append(o.keep, strings.Split(value, ",")...)
		} else {
			o.keepEnv = true
		}
	case "set-home":
		o.home = true
	case "login":
		o.login = true
	case "shell":
		o.shell = true
	case "list":
		o.list = true
	case "validate":
		o.validate = true
	case "version", "help":
		o.version = true
	case "user", "group", "prompt", "chdir":
		if !given {
			if len(args) == 0 {
				return nil, fmt.Errorf("option '--%s' requires an argument", name)
			}
			value, args = args[0], args[1:]
		}
		if name == "user" {
			o.user = strings.TrimPrefix(value, "#")
		}
	default:
		return nil, fmt.Errorf("unrecognized option '--%s'", name)
	}
	return args, nil
}

func (o *sudoOptions) command() (SudoCommand, error) {
	c := SudoCommand{Argv: o.argv, Env: o.env, User: o.user, KeepEnv: o.keepEnv, KeepVars: o.keep, Login: o.login, Shell: o.shell || o.login}
	switch {
	case o.version:
		c.Print = "sudo of a Cove sandbox: root here is root of this sandbox only"
	case o.list && len(o.argv) == 0:
		c.Print = "You may run the following commands in this sandbox:\n    (ALL) NOPASSWD: ALL"
	case o.list:
		c.Print = strings.Join(o.argv, " ")
	case len(o.argv) > 0 || c.Shell:
	case o.validate:
		c.Quiet = true
	default:
		return c, fmt.Errorf("usage: sudo [-EHinSs] [-u user] [VAR=value] command")
	}
	return c, nil
}

// safeVariables are what sudo keeps without -E; the rest comes from the sandbox and the target user.
var safeVariables = []string{"TERM", "COLORTERM", "DISPLAY", "LANG", "LANGUAGE", "LC_ALL", "TZ", "PS1", "PATH", "DEBIAN_FRONTEND", "PIP_CACHE_DIR", "http_proxy", "https_proxy", "no_proxy", runVariable}

func (c SudoCommand) request() sudoRequest {
	req := sudoRequest{Argv: c.Argv, Env: map[string]string{}, User: c.User, Home: c.Login}
	req.Cwd, _ = os.Getwd()
	for _, v := range os.Environ() {
		name, value, _ := strings.Cut(v, "=")
		if c.KeepEnv || contains(safeVariables, name) || contains(c.KeepVars, name) || strings.HasPrefix(name, "LC_") {
			req.Env[name] = value
		}
	}
	if c.KeepEnv {
		// Even so, the target's own identity counts: programs ask for it.
		for _, name := range []string{"HOME", "USER", "LOGNAME", "SHELL"} {
			delete(req.Env, name)
		}
	}
	if os.Getenv("USER") != "" {
		req.Env["SUDO_USER"] = os.Getenv("USER")
	}
	req.Env["SUDO_UID"], req.Env["SUDO_GID"] = itoa(os.Getuid()), itoa(os.Getgid())
	for k, v := range c.Env {
		req.Env[k] = v
	}
	if c.Shell {
		name := c.User
		if name == "" {
			name = "root"
		}
		shell := "/bin/sh"
		if u, ok := lookupUser(name); ok && u.shell != "" {
			shell = u.shell
		}
		req.Argv = []string{shell}
		if c.Login {
			req.Argv = append(req.Argv, "-l")
		}
		if len(c.Argv) > 0 {
			req.Argv = append(req.Argv, "-c", shellJoin(c.Argv))
		}
	}
	return req
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

// shellJoin quotes as sudo does: every character that is not plain gets a backslash.
func shellJoin(argv []string) string {
	var b strings.Builder
	for i, arg := range argv {
		if i > 0 {
			b.WriteByte(' ')
		}
		for _, r := range arg {
			plain := r > 127 || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || strings.ContainsRune("_-$", r)
			if !plain {
				b.WriteByte('\\')
			}
			b.WriteRune(r)
		}
	}
	return b.String()
}

// sudo is the main function of the agent's binary under the name "sudo".
func sudo(args []string) int {
	c, err := ParseSudo(args)
	if err != nil {
		return sudoFails(err)
	}
	if c.Print != "" {
		fmt.Println(c.Print)
		return 0
	}
	if c.Quiet {
		return 0
	}
	name := SudoSocket
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + name, Net: "unix"})
	if err != nil {
		return sudoFails(fmt.Errorf("this sandbox does not allow it"))
	}
	defer conn.Close()
	code, sig, err := askBroker(conn, c.request())
	if err != nil {
		return sudoFails(err)
	}
	if sig != 0 {
		// End as the command did, so that a shell sees the same.
		signal.Reset(sig)
		_ = syscall.Kill(os.Getpid(), sig) // should it fail, the next line says it by number
		return 128 + int(sig)
	}
	return code
}

func sudoFails(err error) int {
	fmt.Fprintln(os.Stderr, "sudo: "+err.Error())
	return 1
}

// askBroker hands over the standard descriptors and waits for the command's end, passing signals on.
func askBroker(conn *net.UnixConn, req sudoRequest) (code int, sig syscall.Signal, err error) {
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH)
	// A broker that refuses hangs up at once; its reason is read below.
	if _, _, err := conn.WriteMsgUnix([]byte{0}, syscall.UnixRights(0, 1, 2), nil); err == nil {
		_ = agentapi.WriteJSON(conn, agentapi.FrameRequest, req)
	}
	go func() { // ends with the process
		for s := range sigs {
			_ = agentapi.WriteJSON(conn, agentapi.FrameControl, agentapi.Control{Signal: signalName(s.(syscall.Signal))})
		}
	}()
	f, err := agentapi.NewReader(conn).Read()
	if err != nil || f.Kind != agentapi.FrameEnd {
		return 0, 0, fmt.Errorf("the sandbox's agent did not answer")
	}
	end, err := agentapi.DecodeParams[agentapi.End](agentapi.Request{Params: f.Payload})
	if err != nil {
		return 0, 0, err
	}
	if end.Fault != nil {
		return 0, 0, fmt.Errorf("%s", end.Fault.Message)
	}
	if end.Signal != "" {
		sig, _ = parseSignal(end.Signal)
	}
	return end.ExitCode, sig, nil
}

// isSudo reports whether the binary was called as sudo.
func isSudo(argv []string) bool { return len(argv) > 0 && path.Base(argv[0]) == "sudo" }
