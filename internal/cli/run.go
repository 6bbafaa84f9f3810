package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
)

// ephemeral is a sandbox that is made for one command.
type ephemeral struct {
	sandboxFlags
	keep time.Duration
}

func (e *ephemeral) register(a *invocation, c *cobra.Command) {
	e.sandboxFlags.register(a, c)
	c.Flags().DurationVar(&e.keep, "keep", 0, "leave the sandbox alive this `long`, such as 1h, and print its id on standard error")
	completeFlag(c, "keep", cobra.NoFileCompletions)
}

// request asks for a sandbox that ends by itself when this command was killed before it could end it: unused is how
// long nobody may use it.
func (e *ephemeral) request(command string, unused time.Duration) (client.CreateRequest, error) {
	req, err := e.sandboxFlags.request()
	if err != nil {
		return req, err
	}
	if e.keep < 0 {
		return req, usageError{fmt.Errorf("--keep %v is negative", e.keep)}
	}
	if req.Metadata == nil {
		req.Metadata = map[string]string{}
	}
	req.Metadata["cove."+command] = "true"
	req.TimeoutSeconds, req.IdleTimeoutSeconds = longest.Seconds(), unused.Seconds()
	if e.keep > 0 {
		req.TimeoutSeconds, req.IdleTimeoutSeconds = e.keep.Seconds(), 0
	}
	return req, nil
}

func (a *invocation) run() *cobra.Command {
	var e ephemeral
	var code string
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "run [FILE | -]",
		Short: "Run Python code in a fresh sandbox",
		Long: "Run Python code in a sandbox that exists for this run only: from a file, from -c or from standard input.\n" +
			"Output is shown as it comes, then the value of the last expression. Without a running server one is started for\n" +
			"the duration. The exit code is 0, that of sys.exit, 1 after an exception and 124 after a timeout; Ctrl-C interrupts.",
		Example:           "  cove run script.py\n  cove run --keep 1h -c 'x = 1'\n  cove run -c 'print(1 + 1)' --net none --timeout 10s\n  echo 'print(2)' | cove run\n  cove run --image python:3.13-slim script.py",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault), // files
		RunE: func(c *cobra.Command, args []string) error {
			code, err := a.source(c, code, args)
			if err != nil {
				return err
			}
			if timeout < 0 {
				return usageError{fmt.Errorf("--timeout %v is negative", timeout)}
			}
			req, err := e.request("run", unusedFor)
			if err != nil {
				return err
			}
			switch {
			case timeout == 0:
			case e.keep > 0:
				req.TimeoutSeconds = max(e.keep, timeout).Seconds()
			default:
				req.TimeoutSeconds = (timeout + unusedFor).Seconds()
			}
			return a.runCode(c.Context(), req, client.RunRequest{Code: code, TimeoutSeconds: timeout.Seconds()}, e.keep > 0)
		},
	}
	e.register(a, c)
	fs := c.Flags()
	fs.StringVarP(&code, "code", "c", "", "the `code` itself")
	fs.DurationVar(&timeout, "timeout", 0, "interrupt the code after this long, such as 30s")
	completeFlag(c, "code", cobra.NoFileCompletions)
	completeFlag(c, "timeout", cobra.NoFileCompletions)
	return c
}

// source is the code to run. It is read before anything else: a server of our own gives up the right to read it.
func (a *invocation) source(c *cobra.Command, code string, args []string) (string, error) {
	given := c.Flags().Changed("code")
	switch {
	case len(args) > 1:
		return "", usageError{fmt.Errorf("want one file, not %d; quote names with spaces", len(args))}
	case given && len(args) == 1:
		return "", usageError{errors.New("give either a file or -c, not both")}
	case given:
		return code, nil
	case len(args) == 1 && args[0] != "-":
		b, err := os.ReadFile(args[0])
		if err != nil {
			return "", err
		}
		return string(b), nil
	}
	if _, ok := terminal(a.In); ok && len(args) == 0 {
		return "", usageError{errors.New("nothing to run: give a file, -c CODE, or code on standard input (- to type it)")}
	}
	b, err := io.ReadAll(a.In)
	return string(b), err
}

// unusedFor ends a sandbox whose `cove run` was killed before it could.
const unusedFor = time.Minute

// longest is how long a run without a timeout may take.
const longest = 24 * time.Hour

func (a *invocation) runCode(ctx context.Context, req client.CreateRequest, run client.RunRequest, keep bool) error {
	sb, end, err := a.borrow(ctx, req, keep)
	if err != nil {
		return err
	}
	defer end()
	ctx, release := onInterrupt(ctx, func(ctx context.Context) { _ = sb.InterruptKernel(ctx, defaultKernel) })
	defer release()
	if a.json {
		out, err := sb.Run(ctx, run)
		if err != nil {
			return err
		}
		if err := a.print(out, nil); err != nil {
			return err
		}
		return status(&out.End)
	}
	return a.show(sb.RunCode(ctx, run))
}

// defaultKernel is the kernel that a sandbox is born with.
const defaultKernel = "default"

// borrow makes a sandbox for one command, on a server of our own where none runs. The caller calls end, which removes
// both unless the sandbox is to be kept.
func (a *invocation) borrow(ctx context.Context, req client.CreateRequest, keep bool) (sb *client.Sandbox, end func(), err error) {
	find := a.connectOrStart
	if keep {
		// A server of our own would end with us, and the sandbox with it.
		find = func(ctx context.Context) (*client.Client, func(), error) {
			c, err := a.connect(ctx)
			return c, func() {}, err
		}
	}
	c, stop, err := find(ctx)
	if err != nil {
		return nil, nil, err
	}
	create := a.makeSandbox
	if keep { // its id is alone on standard error
		create = func(ctx context.Context, c *client.Client, req client.CreateRequest) (*client.Sandbox, error) {
			return c.Create(ctx, req)
		}
	}
	sb, err = create(ctx, c, req)
	if client.KindOf(err) == client.Invalid && req.TimeoutSeconds == longest.Seconds() {
		req.TimeoutSeconds = 0 // so long is not allowed here: the server's own will do
		sb, err = create(ctx, c, req)
	}
	if err != nil {
		stop()
		return nil, nil, err
	}
	a.sandbox = sb.ID
	if keep {
		fmt.Fprintln(a.Err, sb.ID)
		return sb, stop, nil
	}
	return sb, func() {
		a.remove(ctx, sb)
		stop()
	}, nil
}

// remove ends a sandbox even when the command was interrupted.
func (a *invocation) remove(ctx context.Context, sb *client.Sandbox) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := sb.Kill(ctx); err != nil {
		fmt.Fprintf(a.Err, "cove: sandbox %s may still run: %v\n", sb.ID, err)
	}
}

// onInterrupt calls first at the first Ctrl-C and ends the context at the second, or when first did not help in time.
func onInterrupt(ctx context.Context, first func(context.Context)) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-signals:
		case <-ctx.Done():
			return
		}
		first(ctx)
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel()
		<-ended
	}
}

// show prints a run as it happens and returns its exit code.
func (a *invocation) show(events iter.Seq2[client.Event, error]) error {
	for e, err := range events {
		if err != nil {
			return err
		}
		switch e.Type {
		case client.EventStdout:
			_, err = a.Out.Write(e.Data())
		case client.EventStderr:
			_, err = a.Err.Write(e.Data())
		case client.EventResult:
			if text := e.Result.Text(); text != "" {
				_, err = fmt.Fprintln(a.Out, text)
			}
		case client.EventError:
			_, err = fmt.Fprintln(a.Err, traceback(e.Error))
		case client.EventNotice:
			_, err = fmt.Fprintln(a.Err, "cove:", e.Message)
		case client.EventEnd:
			return a.finish(e.End)
		case client.EventStarted, client.EventFile, client.EventFault:
		}
		if err != nil {
			return err // nobody reads our output any more
		}
	}
	return nil
}

func traceback(e *client.CodeError) string {
	if len(e.Traceback) > 0 {
		return strings.TrimRight(strings.Join(e.Traceback, "\n"), "\n")
	}
	return e.Name + ": " + e.Value
}

// finish says how a run ended when its own output has not.
func (a *invocation) finish(end *client.End) error {
	if end == nil {
		return nil
	}
	switch end.Outcome {
	case client.OutcomeOK, client.OutcomeError:
	default:
		// The kernel's variables, and whether they are lost, mean nothing to a command that brought its own sandbox.
		message, _, _ := strings.Cut(end.Message, "; variables ")
		if message == "" {
			message = "the run ended: " + end.Outcome
		}
		if end.Outcome != client.OutcomeKernelDied || end.ExitCode <= 0 { // sys.exit says enough by its code
			fmt.Fprintln(a.Err, "cove:", message)
		}
	}
	return status(end)
}

// status is the exit code of a run as an error; nil is 0.
func status(end *client.End) error {
	switch {
	case end.Outcome == client.OutcomeTimeout:
		return exit(exitTimeout)
	case end.Outcome == client.OutcomeInterrupted:
		return exit(exitInterrupted)
	case end.ExitCode > 0:
		return exit(end.ExitCode)
	case end.Signal != "":
		if n := unix.SignalNum(end.Signal); n != 0 {
			return exit(128 + int(n))
		}
		return exit(exitFailure)
	case end.Outcome == client.OutcomeOK:
		return nil
	case end.Outcome == client.OutcomeKernelDied && end.ExitCode == 0 && end.Message == "":
		return nil
	}
	return exit(exitFailure)
}
