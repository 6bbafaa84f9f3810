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
	"github.com/covehq/cove/internal/config"
)

// runFlags are what `cove run` was told.
type runFlags struct {
	code     string
	template string
	timeout  time.Duration
	memory   string
	cpus     float64
	net      string
	env      []string
	keep     time.Duration
}

func (a *invocation) run() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use:   "run [FILE | -]",
		Short: "Run Python code in a fresh sandbox",
		Long: "Run Python code in a sandbox that exists for this run only: from a file, from -c or from standard input.\n" +
			"Output is shown as it comes, then the value of the last expression. Without a running server one is started for\n" +
			"the duration. The exit code is 0, that of sys.exit, 1 after an exception and 124 after a timeout; Ctrl-C interrupts.",
		Example: "  cove run script.py\n  cove run --keep 1h -c 'x = 1'\n  cove run -c 'print(1 + 1)' --net none --timeout 10s\n  echo 'print(2)' | cove run",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			code, err := a.source(c, f.code, args)
			if err != nil {
				return err
			}
			req, err := f.sandbox()
			if err != nil {
				return usageError{err}
			}
			return a.runCode(c.Context(), req, client.RunRequest{Code: code, TimeoutSeconds: f.timeout.Seconds()}, f.keep > 0)
		},
	}
	fs := c.Flags()
	fs.StringVarP(&f.code, "code", "c", "", "the `code` itself")
	fs.StringVar(&f.template, "template", "", "`name` of what the sandbox starts from")
	fs.DurationVar(&f.timeout, "timeout", 0, "interrupt the code after this long, such as 30s")
	fs.StringVar(&f.memory, "memory", "", "memory of the sandbox: a `size` such as 512M")
	fs.Float64Var(&f.cpus, "cpus", 0, "CPUs of the sandbox: a `number` such as 0.5")
	fs.StringVar(&f.net, "net", "", "internet, none, or a `list` of IPv4 prefixes: 203.0.113.0/24,198.51.100.7")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` for the sandbox's environment; may be repeated")
	fs.DurationVar(&f.keep, "keep", 0, "leave the sandbox alive this `long`, such as 1h, and print its id on standard error")
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
	if f, ok := a.In.(*os.File); ok && isTerminal(f) && len(args) == 0 {
		return "", usageError{errors.New("nothing to run: give a file, -c CODE, or code on standard input (- to type it)")}
	}
	b, err := io.ReadAll(a.In)
	return string(b), err
}

// unusedFor ends a sandbox whose `cove run` was killed before it could.
const unusedFor = 60

// longest is how long a run without a timeout may take.
const longest = 24 * time.Hour

func (f *runFlags) sandbox() (client.CreateRequest, error) {
	req := client.CreateRequest{
		Template: f.template, IdleTimeoutSeconds: unusedFor, TimeoutSeconds: longest.Seconds(),
		Metadata: map[string]string{"cove.run": "true"},
	}
	if f.timeout < 0 {
		return req, fmt.Errorf("--timeout %v is negative", f.timeout)
	}
	if f.timeout > 0 {
		req.TimeoutSeconds = (f.timeout + unusedFor*time.Second).Seconds()
	}
	if f.keep < 0 {
		return req, fmt.Errorf("--keep %v is negative", f.keep)
	}
	if f.keep > 0 {
		req.TimeoutSeconds, req.IdleTimeoutSeconds = max(f.keep, f.timeout).Seconds(), 0
	}
	memory, err := config.ParseSize(orZero(f.memory))
	if err != nil {
		return req, fmt.Errorf("--memory: %w", err)
	}
	if memory != 0 || f.cpus != 0 {
		req.Limits = &client.Limits{MemoryBytes: int64(memory), CPUs: f.cpus}
	}
	req.Network = network(f.net)
	req.Env, err = environment(f.env)
	return req, err
}

func orZero(s string) string {
	if s == "" {
		return "0"
	}
	return s
}

// network reads --net; what is neither mode is a list, and the server says what is wrong with it.
func network(text string) *client.Network {
	switch text {
	case "":
		return nil
	case "internet", "none":
		return &client.Network{Mode: text}
	}
	return &client.Network{Mode: "list", Allow: strings.Split(text, ",")}
}

func environment(pairs []string) (map[string]string, error) {
	if len(pairs) == 0 {
		return nil, nil
	}
	env := map[string]string{}
	for _, pair := range pairs {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--env %q: want NAME=VALUE", pair)
		}
		env[name] = value
	}
	return env, nil
}

func (a *invocation) runCode(ctx context.Context, req client.CreateRequest, run client.RunRequest, keep bool) error {
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
		return err
	}
	defer stop()
	sb, err := create(ctx, c, req)
	if err != nil {
		return err
	}
	if keep {
		fmt.Fprintln(a.Err, sb.ID)
	} else {
		defer a.remove(ctx, sb)
	}
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

// create asks for a long life and is content with the server's own where that is not allowed.
func create(ctx context.Context, c *client.Client, req client.CreateRequest) (*client.Sandbox, error) {
	sb, err := c.Create(ctx, req)
	if client.KindOf(err) == client.Invalid && req.TimeoutSeconds == longest.Seconds() {
		req.TimeoutSeconds = 0
		return c.Create(ctx, req)
	}
	return sb, err
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
