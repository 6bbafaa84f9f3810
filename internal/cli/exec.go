package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
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
			"With -i standard input is passed on, with -t the command gets a terminal.",
		Example: "  cove exec sb1 -- ls -l /\n  cove exec -it sb1 bash",
		Args:    minArgs(2, "a sandbox and a command"),
		RunE: func(c *cobra.Command, args []string) error {
			env, err := environment(f.env)
			if err != nil {
				return usageError{err}
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
			req := client.ExecRequest{Argv: command, Env: env, Cwd: f.cwd, User: f.user, TimeoutSeconds: f.timeout.Seconds()}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.execCollected(c.Context(), cl.Sandbox(args[0]), f, req)
			}
			return a.execLive(c.Context(), cl.Sandbox(args[0]), f, req)
		},
	}
	// Flags after the command are the command's own.
	c.Flags().SetInterspersed(false)
	fs := c.Flags()
	fs.BoolVarP(&f.stdin, "stdin", "i", false, "pass standard input on")
	fs.BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
	fs.StringVarP(&f.user, "user", "u", "", "`name` or uid to run as")
	fs.StringVarP(&f.cwd, "cwd", "w", "", "working `directory`")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` for the command; may be repeated")
	fs.DurationVar(&f.timeout, "timeout", 0, "kill the command after this long, such as 30s")
	return c
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
		restore, size, err := a.rawTerminal()
		if err != nil {
			return err
		}
		defer restore()
		req.PTY = &size
		if req.Env == nil {
			req.Env = map[string]string{}
		}
		if kind := os.Getenv("TERM"); kind != "" && req.Env["TERM"] == "" {
			req.Env["TERM"] = kind
		}
	}
	session, err := sb.Start(ctx, req)
	if err != nil {
		return err
	}
	defer session.Close()
	_, release := onInterrupt(ctx, func(context.Context) { _ = session.Signal("SIGINT") })
	defer release()
	if f.tty {
		defer followSize(session)()
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

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// rawTerminal hands the keyboard to the command.
func (a *invocation) rawTerminal() (restore func(), size client.PTYSize, err error) {
	f, ok := a.In.(*os.File)
	if !ok || !isTerminal(f) {
		return nil, size, usageError{errors.New("standard input is not a terminal; leave out -t")}
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
func followSize(session *client.Session) (stop func()) {
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, unix.SIGWINCH)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range changes {
			_ = session.Resize(terminalSize(os.Stdin))
		}
	}()
	return func() {
		signal.Stop(changes)
		close(changes)
		<-ended
	}
}
