package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) fork() *cobra.Command {
	var req client.ForkRequest
	var wait time.Duration
	var timeout lifetime
	var env, metadata []string
	var quiet bool
	c := &cobra.Command{
		Use:   "fork ID",
		Short: "Copy a running sandbox, with its kernel's memory and its files",
		Long: "Copy a running sandbox and print the ids of its copies. Each has the files, and the variables of the kernel, as they\n" +
			"are now, and goes its own way. What cannot be copied, such as other processes and open connections, is told on\n" +
			"standard error. A kernel that runs a cell is waited for, or the fork is refused, as --busy says.\n\n" +
			"Environment variables of the sandbox, where secrets are, are not inherited unless --inherit-env says so; what its\n" +
			"code has read from them already is in its memory, and so in that of the copies.",
		Example:           "  cove fork sbabc\n  cove fork sbabc -n 3 --busy refuse",
		Args:              exactArgs(1, "one sandbox"),
		ValidArgsFunction: a.completeIDs(1, "running"),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if c.Flags().Changed("count") && req.Count < 1 {
				return usageError{fmt.Errorf("-n %d: want at least one copy", req.Count)}
			}
			req.WaitSeconds, req.TimeoutSeconds = wait.Seconds(), float64(timeout)
			if req.Env, err = pairs("--env", env); err != nil {
				return err
			}
			if req.Metadata, err = pairs("--metadata", metadata); err != nil {
				return err
			}
			_, sb, err := a.target(c.Context(), args[0])
			if err != nil {
				return err
			}
			begun := time.Now()
			forks, err := a.forkSandbox(c.Context(), sb, req, quiet)
			if err != nil {
				return err
			}
			return a.printForks(sb, forks, quiet, time.Since(begun))
		},
	}
	f := c.Flags()
	f.IntVarP(&req.Count, "count", "n", 1, "`number` of copies, at most 100; all are made, or none")
	f.StringVar(&req.Kernel, "kernel", "", "`name` of the kernel whose memory is copied")
	f.StringVar(&req.Busy, "busy", "", "`what` to do while the kernel runs a cell: wait or refuse; default wait")
	f.DurationVar(&wait, "wait", 0, "how long to wait for a busy kernel; default 30s")
	timeout.register(c, "timeout", "how long the copies live")
	f.StringArrayVarP(&env, "env", "e", nil, "`NAME=VALUE` for the copies' environment; may be repeated")
	f.BoolVar(&req.InheritEnv, "inherit-env", false, "give the copies the environment that the sandbox was made with")
	f.StringArrayVarP(&metadata, "metadata", "m", nil, "`NAME=VALUE` to find the copies by; may be repeated")
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	completeFlag(c, "busy", words("wait", "refuse"))
	return c
}

func (a *invocation) forkSandbox(ctx context.Context, sb *client.Sandbox, req client.ForkRequest, quiet bool) (*client.Forks, error) {
	if !quiet {
		defer a.working(still("copying %s", sb.ID))()
	}
	return sb.Fork(ctx, req)
}

func (a *invocation) printForks(sb *client.Sandbox, forks *client.Forks, quiet bool, took time.Duration) error {
	result := client.ForkResult{
		Sandboxes: []client.SandboxInfo{}, NotCopied: forks.NotCopied, StallMS: forks.StallMS, MemoryBytes: forks.MemoryBytes,
	}
	for _, copied := range forks.Sandboxes {
		result.Sandboxes = append(result.Sandboxes, copied.SandboxInfo)
	}
	err := a.print(result, func(t *table) {
		for _, copied := range forks.Sandboxes {
			t.row(copied.ID)
		}
	})
	if err != nil || a.json || quiet {
		return err
	}
	fmt.Fprintf(a.Err, "%s of %s in %.0f ms: %s of memory; its kernel stood still for %.1f ms\n", count(len(forks.Sandboxes), "copy", "copies"), sb.ID,
		took.Seconds()*1e3, size(forks.MemoryBytes), forks.StallMS)
	for _, n := range forks.NotCopied {
		fmt.Fprintf(a.Err, "  not copied: %s %s\n", clean(n.Kind), clean(n.What))
	}
	return nil
}

func (a *invocation) pause() *cobra.Command {
	var timeout lifetime
	var autoResume bool
	c := &cobra.Command{
		Use:   "pause ID...",
		Short: "Stop sandboxes with their memory, until they are resumed",
		Long: "Stop every process of these sandboxes. They keep their memory and files, cost no processor time and survive a restart\n" +
			"of the server. What is left of their lifetime goes on when they are resumed.",
		Example:           "  cove pause sbabc\n  cove pause sbabc --auto-resume --timeout 12h",
		Args:              minArgs(1, "the sandboxes to pause"),
		ValidArgsFunction: a.completeIDs(0, "running"),
		RunE: func(c *cobra.Command, names []string) error {
			req := client.PauseRequest{TimeoutSeconds: float64(timeout)}
			if c.Flags().Changed("auto-resume") {
				req.AutoResume = &autoResume
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.each(c.Context(), cl, names, func(sb *client.Sandbox) error {
				defer a.working(still("pausing %s", sb.ID))()
				return sb.Pause(c.Context(), req)
			})
		},
	}
	timeout.register(c, "timeout", "how long they may stay paused before they end")
	c.Flags().BoolVar(&autoResume, "auto-resume", false, "any use resumes them")
	return c
}

func (a *invocation) resume() *cobra.Command {
	var timeout lifetime
	c := &cobra.Command{
		Use:               "resume ID...",
		Short:             "Let paused sandboxes go on",
		Long:              "Let paused sandboxes go on where they stopped, for what was left of their lifetime or for a new one.",
		Example:           "  cove resume sbabc\n  cove resume sbabc --timeout 1h",
		Args:              minArgs(1, "the sandboxes to resume"),
		ValidArgsFunction: a.completeIDs(0, "paused"),
		RunE: func(c *cobra.Command, names []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.each(c.Context(), cl, names, func(sb *client.Sandbox) error {
				defer a.working(still("resuming %s", sb.ID))()
				return sb.Resume(c.Context(), client.ResumeRequest{TimeoutSeconds: float64(timeout)})
			})
		},
	}
	c.Flags().Var(&timeout, "timeout", "a new lifetime from now, such as 1h, or never; default is what was left")
	completeFlag(c, "timeout", cobra.NoFileCompletions)
	return c
}

func (a *invocation) snapshot() *cobra.Command {
	var description string
	c := &cobra.Command{
		Use:   "snapshot ID NAME",
		Short: "Make a template of a sandbox's files",
		Long: "Make a template of a sandbox's template and its files as they are now; the sandbox goes on. Only your tenant can use it:\n" +
			"`cove create --template NAME` starts from it, `cove template rm NAME` removes it. Memory is not part of it: see `cove fork`.",
		Example:           "  cove exec sbabc -- pip install polars\n  cove snapshot sbabc with-polars\n  cove create --template with-polars",
		Args:              exactArgs(2, "a sandbox and a name for the template"),
		ValidArgsFunction: a.completeIDs(1, "running", "paused"),
		RunE: func(c *cobra.Command, args []string) error {
			_, sb, err := a.target(c.Context(), args[0])
			if err != nil {
				return err
			}
			done := a.working(still("taking a snapshot of %s", sb.ID))
			t, err := sb.Snapshot(c.Context(), client.SnapshotRequest{Name: args[1], Description: description})
			done()
			if err != nil {
				return err
			}
			return a.print(t, func(tab *table) { tab.row(t.Name) })
		},
	}
	c.Flags().StringVar(&description, "description", "", "a `sentence` that lists show")
	completeFlag(c, "description", cobra.NoFileCompletions)
	return c
}

func (a *invocation) timeout() *cobra.Command {
	return &cobra.Command{
		Use:               "timeout ID DURATION",
		Short:             "Give a sandbox a new lifetime, from now",
		Long:              "Let a sandbox end after this long from now, sooner or later than before; `never` is for ever, where the server allows it.",
		Example:           "  cove timeout sbabc 2h",
		Args:              exactArgs(2, "a sandbox and a duration such as 30m"),
		ValidArgsFunction: a.completeIDs(1, living...),
		RunE: func(c *cobra.Command, args []string) error {
			d, err := parseLifetime(args[1])
			if err != nil {
				return usageError{err}
			}
			_, sb, err := a.target(c.Context(), args[0])
			if err != nil {
				return err
			}
			if err := sb.SetTimeout(c.Context(), time.Duration(float64(d)*float64(time.Second))); err != nil {
				return err
			}
			return a.print(sb.SandboxInfo, func(t *table) { t.row(sb.ID, "ends "+ends(&sb.SandboxInfo, time.Now())) })
		},
	}
}
