package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/covehq/cove/client"
)

type execFlags struct {
	stdin, tty bool
	detach     bool
	user, cwd  string
	env        []string
	timeout    time.Duration
}

func (a *invocation) exec() *cobra.Command {
	var f execFlags
	c := &cobra.Command{
		Use: "exec [FLAGS] ID [--] COMMAND [ARG...]",

		DisableFlagsInUseLine: true, // they come first: after the id everything is the command's
		Short:                 "Run a command in a sandbox",
		Long: "Run a command in a living sandbox; its output is shown as it comes and its exit code is ours, 124 after a timeout.\n" +
			"With -i standard input is passed on, with -t the command gets a terminal. With -d it is left running and its id is\n" +
			"printed: `cove logs -f` shows what it writes, `cove shell --attach` joins it.",
		Example:           "  cove exec sbabc -- ls -l /\n  cove exec -it sbabc bash\n  cove exec -d sbabc -- python3 -m http.server",
		Args:              minArgs(2, "a sandbox and a command"),
		ValidArgsFunction: a.completeIDs(1, "running"),
		RunE: func(c *cobra.Command, args []string) error {
			env, err := pairs("--env", f.env)
			if err != nil {
				return err
			}
			command := args[1:]
			if command[0] == "--" { // after the id it still means that what follows is the command
				command = command[1:]
			}
			if len(command) == 0 {
				return usageError{errors.New("want a command after --")}
			}
			if strings.HasPrefix(args[1], "-") && args[1] != "--" {
				return usageError{fmt.Errorf("%s comes before the sandbox: cove exec %[1]s %s …", args[1], args[0])}
			}
			if f.detach && (f.stdin || f.tty) {
				return usageError{errors.New("-d leaves the command alone: it has no use for -i and -t")}
			}
			req := client.ExecRequest{Argv: command, Env: env, Cwd: f.cwd, User: f.user, TimeoutSeconds: f.timeout.Seconds()}
			_, sb, err := a.target(c.Context(), args[0])
			switch {
			case err != nil:
				return err
			case f.detach:
				return a.execDetached(c.Context(), sb, req)
			case a.json:
				return a.execCollected(c.Context(), sb, f, req)
			}
			return a.execLive(c.Context(), sb, f, req)
		},
	}
	// Flags after the command are the command's own.
	c.Flags().SetInterspersed(false)
	fs := c.Flags()
	fs.BoolVarP(&f.stdin, "stdin", "i", false, "pass standard input on")
	fs.BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
	fs.BoolVarP(&f.detach, "detach", "d", false, "leave the command running and print its id")
	fs.StringVarP(&f.user, "user", "u", "", "`name` or uid to run as")
	fs.StringVarP(&f.cwd, "cwd", "w", "", "working `directory`")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` for the command; may be repeated")
	fs.DurationVar(&f.timeout, "timeout", 0, "kill the command after this long, such as 30s")
	for _, name := range []string{"user", "cwd", "env", "timeout"} {
		completeFlag(c, name, cobra.NoFileCompletions)
	}
	return c
}

// execDetached starts a command that outlives us.
func (a *invocation) execDetached(ctx context.Context, sb *client.Sandbox, req client.ExecRequest) error {
	req.OnDisconnect = "survive"
	for e, err := range sb.ExecStream(ctx, req) {
		if err != nil {
			return err
		}
		if e.Type == client.EventStarted {
			p := client.Process{ID: e.ID, PID: e.PID, Argv: req.Argv, Cwd: req.Cwd, User: req.User}
			return a.print(p, func(t *table) { t.row(p.ID) })
		}
	}
	return nil
}

func (a *invocation) execCollected(ctx context.Context, sb *client.Sandbox, f execFlags, req client.ExecRequest) error {
	if f.tty {
		return usageError{errors.New("--json and --tty exclude each other")}
	}
	if f.stdin {
		b, err := io.ReadAll(a.In)
		if err != nil {
			return err
		}
		req.Stdin = string(b)
	}
	out, err := sb.Exec(ctx, req)
	if err != nil {
		return err
	}
	if err := a.print(out, nil); err != nil {
		return err
	}
	return status(&out.End)
}

func (a *invocation) execLive(ctx context.Context, sb *client.Sandbox, f execFlags, req client.ExecRequest) error {
	if f.tty {
		restore, size, err := a.rawTerminal("leave out -t")
		if err != nil {
			return err
		}
		defer restore()
		withTerminal(&req, size)
	}
	session, err := sb.Start(ctx, req)
	if err != nil {
		return err
	}
	defer session.Close()
	_, release := onInterrupt(ctx, func(context.Context) { _ = session.Signal("SIGINT") })
	defer release()
	if f.tty {
		defer a.followSize(session)()
	}
	if !f.stdin && !f.tty {
		if err := session.CloseStdin(); err != nil {
			return err
		}
	} else {
		// A read from a terminal cannot be called off: the process ends, and the goroutine with it.
		go func() {
			_, _ = io.Copy(struct{ io.Writer }{session}, a.In)
			_ = session.CloseStdin()
		}()
	}
	return a.show(session.Events())
}

// withTerminal gives a command a terminal like ours.
func withTerminal(req *client.ExecRequest, size client.PTYSize) {
	req.PTY = &size
	env := map[string]string{}
	if kind := os.Getenv("TERM"); kind != "" {
		env["TERM"] = kind
	}
	maps.Copy(env, req.Env)
	req.Env = env
}

// rawTerminal hands the keyboard to the command; without one, instead is what to do.
func (a *invocation) rawTerminal(instead string) (restore func(), size client.PTYSize, err error) {
	f, ok := terminal(a.In)
	if !ok {
		return nil, size, usageError{errors.New("standard input is not a terminal; " + instead)}
	}
	size = terminalSize(f)
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, size, fmt.Errorf("set up the terminal: %w", err)
	}
	return func() { _ = term.Restore(int(f.Fd()), state) }, size, nil
}

func terminalSize(f *os.File) client.PTYSize {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return client.PTYSize{Rows: 24, Cols: 80}
	}
	return client.PTYSize{Rows: uint16(rows), Cols: uint16(cols)}
}

// followSize tells the command when the terminal changes its size.
func (a *invocation) followSize(session *client.Session) (stop func()) {
	f, ok := terminal(a.In)
	if !ok {
		return func() {}
	}
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, unix.SIGWINCH)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range changes {
			_ = session.Resize(terminalSize(f))
		}
	}()
	return func() {
		signal.Stop(changes)
		close(changes)
		<-ended
	}
}
