package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

var livingStates = []string{"starting", "running", "stopping"}

func (a *invocation) ps() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:   "ps",
		Short: "List sandboxes",
		Long:  "List your living sandboxes, newest first: what they started from, and when they will end. With --all also those that\nhave ended, and why.",
		Args:  exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			req := client.ListRequest{States: livingStates}
			if all {
				req.States = nil
			}
			list := []client.SandboxInfo{}
			for sb, err := range cl.List(c.Context(), req) {
				if err != nil {
					return err
				}
				list = append(list, sb)
			}
			if len(list) == 0 && !a.json {
				fmt.Fprintln(a.Err, none[all])
				return nil
			}
			return a.print(list, func(w io.Writer) { psTable(w, list, time.Now()) })
		},
	}
	c.Flags().BoolVarP(&all, "all", "a", false, "include those that have ended")
	return c
}

// none is what ps says when it has nothing to list, by whether it looked at all of them.
var none = map[bool]string{false: "no sandbox is living; `cove ps --all` lists those that have ended", true: "no sandboxes"}

func psTable(w io.Writer, list []client.SandboxInfo, now time.Time) {
	fmt.Fprintln(w, "ID\tTEMPLATE\tSTATE\tAGE\tKEY\tENDS")
	for _, sb := range list {
		ends := "never"
		switch {
		case sb.State == "ended":
			ends = sb.Cause
			if sb.Message != "" {
				ends += ": " + sb.Message
			}
		case !sb.Deadline.IsZero():
			ends = "in " + short(sb.Deadline.Sub(now))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", sb.ID, sb.Template, sb.State, short(now.Sub(sb.CreatedAt)), cmp.Or(sb.Key, "-"), ends)
	}
}

// short is a duration as people say it.
func short(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

func (a *invocation) kill() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:     "kill ID... | --all",
		Short:   "End sandboxes",
		Long:    "End sandboxes with everything that runs in them, and print the ids of those that ended. Their files are gone.",
		Example: "  cove kill sb1 sb2\n  cove kill --all",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, ids []string) error {
			if all == (len(ids) > 0) {
				return usageError{errors.New("want the sandboxes to end, or --all; see `cove ps`")}
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			if all {
				for sb, err := range cl.List(c.Context(), client.ListRequest{States: livingStates}) {
					if err != nil {
						return err
					}
					ids = append(ids, sb.ID)
				}
			}
			killed := []client.SandboxInfo{}
			var failed error
			for _, id := range ids {
				sb := cl.Sandbox(id)
				if err := sb.Kill(c.Context()); err != nil {
					failed = errors.Join(failed, fmt.Errorf("%s: %w", id, err))
					continue
				}
				killed = append(killed, sb.SandboxInfo)
			}
			return errors.Join(failed, a.print(killed, func(w io.Writer) {
				for _, sb := range killed {
					fmt.Fprintln(w, sb.ID)
				}
			}))
		},
	}
	c.Flags().BoolVar(&all, "all", false, "end all of yours")
	return c
}
