package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
)

// detachedFor is how long the sandbox of a shell lives on that somebody left, or whose `cove shell` was killed.
const detachedFor = time.Hour

// onlyTerminal is --attach without a value.
const onlyTerminal = "\x00"

type shellFlags struct {
	ephemeral
	user, cwd  string
	attach     string
	detachKeys string
}

func (a *invocation) shell() *cobra.Command {
	var f shellFlags
	c := &cobra.Command{
		Use:   "shell [ID] [-- COMMAND [ARG...]]",
		Short: "Open a terminal in a sandbox",
		Long: "Open a shell in a sandbox, or another command that wants a terminal. Without ID a sandbox is made, which ends with the\n" +
			"shell unless --keep says otherwise; where no server runs, one is started for the duration.\n\n" +
			"Ctrl-P Ctrl-Q leaves the shell running; `cove shell --attach ID` comes back to it, also after a lost connection. What it\n" +
			"wrote meanwhile is not kept. A sandbox that was made for the shell then lives until nobody used it for an hour.",
		Example:           "  cove shell\n  cove shell sbabc\n  cove shell sbabc -- python3\n  cove shell --attach sbabc",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: a.completeIDs(1, "running"),
		RunE: func(c *cobra.Command, args []string) error {
			name, command, err := shellArgs(args, c.ArgsLenAtDash())
			if err != nil {
				return err
			}
			keys, err := parseKeys(f.detachKeys)
			if err != nil {
				return usageError{fmt.Errorf("--detach-keys: %w", err)}
			}
			if name != "" {
				for _, flag := range slices.Concat(sandboxFlagNames, []string{"keep"}) {
					if c.Flags().Changed(flag) {
						return usageError{fmt.Errorf("--%s is for a sandbox that is made for the shell; %s is there already", flag, name)}
					}
				}
			}
			return a.runShell(c.Context(), f, name, command, keys)
		},
	}
	f.register(a, c)
	fs := c.Flags()
	fs.StringVarP(&f.user, "user", "u", "", "`name` or uid to run as")
	fs.StringVarP(&f.cwd, "cwd", "w", "", "working `directory`")
	fs.StringVar(&f.attach, "attach", "", "join a command that runs already: the only one with a terminal, or `=PROCESS` by its id, tag or pid")
	fs.Lookup("attach").NoOptDefVal = onlyTerminal
	fs.StringVar(&f.detachKeys, "detach-keys", "ctrl-p,ctrl-q", "`keys` that leave the shell running; empty is none")
	for _, name := range []string{"user", "cwd", "attach", "detach-keys"} {
		completeFlag(c, name, cobra.NoFileCompletions)
	}
	return c
}

// shellArgs tells the sandbox from the command, which comes after --.
func shellArgs(args []string, dash int) (name string, command []string, err error) {
	if dash >= 0 {
		args, command = args[:dash], args[dash:]
	}
	if len(args) > 1 {
		return "", nil, usageError{errors.New("want one sandbox; a command comes after --: cove shell ID -- COMMAND")}
	}
	if len(args) == 1 {
		name = args[0]
	}
	return name, command, nil
}

// parseKeys reads keys as ctrl-p,ctrl-q.
func parseKeys(text string) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	var keys []byte
	for part := range strings.SplitSeq(text, ",") {
		letter, ok := strings.CutPrefix(part, "ctrl-")
		if !ok || len(letter) != 1 || letter[0] < '@' || letter[0] > '~' {
			return nil, fmt.Errorf("%q: write keys as ctrl-p,ctrl-q", part)
		}
		keys = append(keys, letter[0]&0x1f)
	}
	return keys, nil
}

func (a *invocation) runShell(ctx context.Context, f shellFlags, name string, command []string, keys []byte) error {
	if _, ok := terminal(a.In); !ok {
		return usageError{errors.New("standard input is not a terminal; `cove exec` runs a command without one")}
	}
	// A terminal that goes away ends what was made for it.
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	var sb *client.Sandbox
	end := func() {}
	var err error
	switch {
	case name != "":
		_, sb, err = a.target(ctx, name)
	case f.attach != "":
		err = usageError{errors.New("--attach wants the sandbox; see `cove ps`")}
	default:
		var req client.CreateRequest
		if req, err = f.request("shell", detachedFor); err == nil {
			sb, end, err = a.borrow(ctx, req, f.keep > 0)
		}
	}
	if err != nil {
		return err
	}
	if a.own {
		keys = nil // nothing could stay
	}
	left, err := a.converse(ctx, sb, f, command, keys)
	if left {
		fmt.Fprint(a.Out, plainTerminal)
		fmt.Fprintf(a.Err, "\nleft running; `cove shell --attach %s` comes back\n", sb.ID)
		return nil
	}
	end()
	if ctx.Err() != nil {
		return exit(exitInterrupted)
	}
	return err
}

// plainTerminal undoes what a program that was left did to this terminal: alternate screen, colours, no cursor, marked
// pastes.
const plainTerminal = "\x1b[?1047l\x1b[0m\x1b[?25h\x1b[?2004l"

// converse connects this terminal to a command in the sandbox, until that ends or its user leaves it.
func (a *invocation) converse(ctx context.Context, sb *client.Sandbox, f shellFlags, command []string, keys []byte) (left bool, err error) {
	process, err := attachTarget(ctx, sb, f.attach)
	if err != nil {
		return false, err
	}
	if process == "" && len(command) == 0 {
		command = loginShell(ctx, sb)
	}
	env, err := pairs("--env", f.env)
	if err != nil {
		return false, err
	}
	restore, size, err := a.rawTerminal("")
	if err != nil {
		return false, err
	}
	defer restore()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var session *client.Session
	if process == "" {
		req := client.ExecRequest{Argv: command, Env: env, Cwd: f.cwd, User: f.user, OnDisconnect: "survive"}
		withTerminal(&req, size)
		session, err = sb.Start(ctx, req)
	} else {
		session, err = sb.Attach(ctx, process)
	}
	if err != nil {
		return false, err
	}
	defer session.Close()
	if process != "" {
		defer redraw(session, size)()
	}
	defer a.followSize(session)()
	leave := make(chan struct{})
	// A read from a terminal cannot be called off: the process ends, and the goroutine with it.
	go func() {
		if pump(session, a.In, keys) {
			close(leave)
			cancel()
		}
	}()
	err = a.show(session.Events())
	select {
	case <-leave:
		return true, nil
	default:
		return false, err
	}
}

// attachTarget is the process to join; empty is none.
func attachTarget(ctx context.Context, sb *client.Sandbox, asked string) (string, error) {
	if asked != onlyTerminal {
		return asked, nil
	}
	list, err := sb.Processes(ctx)
	if err != nil {
		return "", err
	}
	var found []client.Process
	for _, p := range list {
		if p.PTY {
			found = append(found, p)
		}
	}
	switch len(found) {
	case 0:
		return "", fmt.Errorf("no terminal is open in %s; `cove shell %[1]s` opens one", sb.ID)
	case 1:
		return found[0].ID, nil
	}
	lines := []string{"several terminals are open; say which one with --attach=PROCESS:"}
	for _, p := range found {
		lines = append(lines, p.ID+"  "+strings.Join(p.Argv, " "))
	}
	return "", errors.New(strings.Join(lines, "\n"))
}

// loginShell is bash where there is one.
func loginShell(ctx context.Context, sb *client.Sandbox) []string {
	const bash = "/bin/bash"
	if _, err := sb.Files().Stat(ctx, bash); err == nil {
		return []string{bash}
	}
	return []string{path.Join(path.Dir(bash), "sh")}
}

// redraw makes a program that was joined show its screen again, as it does when the size changes: for a moment it
// changes. Two changes at once are none to it.
func redraw(session *client.Session, size client.PTYSize) (stop func() bool) {
	_ = session.Resize(client.PTYSize{Rows: size.Rows, Cols: size.Cols + 1})
	return time.AfterFunc(100*time.Millisecond, func() { _ = session.Resize(size) }).Stop
}

// keyPause is how long the beginning of the detach keys is held back for the rest of them.
const keyPause = 500 * time.Millisecond

// pump passes on what is typed until the keys were typed one after the other, which it reports.
func pump(to io.Writer, from io.Reader, keys []byte) (left bool) {
	typed := make(chan []byte)
	go func() {
		defer close(typed)
		buf := make([]byte, 4<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				typed <- bytes.Clone(buf[:n])
			}
			if err != nil {
				return
			}
		}
	}()
	held := 0 // how many of the keys
	send := func(b []byte) bool {
		_, err := to.Write(b)
		return err == nil
	}
	for {
		var rest <-chan time.Time
		if held > 0 {
			rest = time.After(keyPause)
		}
		select {
		case b, more := <-typed:
			if !more {
				return false
			}
			var pass []byte
			pass, held, left = scan(b, keys, held)
			if len(pass) > 0 && !send(pass) || left {
				return left
			}
		case <-rest:
			if !send(keys[:held]) {
				return false
			}
			held = 0
		}
	}
}

// scan looks for keys in what was typed, of which held were typed before: what to pass on, how many are held now, and
// whether all of them have come.
func scan(typed, keys []byte, held int) (pass []byte, now int, all bool) {
	if len(keys) == 0 {
		return typed, 0, false
	}
	for _, b := range typed {
		if b != keys[held] && held > 0 { // not these keys after all
			pass, held = append(pass, keys[:held]...), 0
		}
		if b != keys[held] {
			pass = append(pass, b)
			continue
		}
		if held++; held == len(keys) {
			return pass, 0, true
		}
	}
	return pass, held, false
}
