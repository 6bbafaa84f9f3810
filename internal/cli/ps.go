package cli

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) ps() *cobra.Command {
	var all, quiet bool
	var metadata []string
	c := &cobra.Command{
		Use:   "ps",
		Short: "List sandboxes",
		Long: "List your living sandboxes, newest first: what they started from, and when they will end. With --all also those that\n" +
			"have ended, and why.",
		Example: "  cove ps\n  cove ps -q -m team=search | xargs cove kill",
		Args:    exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			req := client.ListRequest{States: living}
			if all {
				req.States = nil
			}
			var err error
			if req.Metadata, err = pairs("--metadata", metadata); err != nil {
				return err
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			list := []client.SandboxInfo{}
			for sb, err := range cl.List(c.Context(), req) {
				if err != nil {
					return err
				}
				list = append(list, sb)
			}
			if len(list) == 0 && !a.json && !quiet {
				fmt.Fprintln(a.Err, none[all])
				return nil
			}
			return a.print(list, func(t *table) { psTable(t, list, quiet, time.Now()) })
		},
	}
	f := c.Flags()
	f.BoolVarP(&all, "all", "a", false, "include those that have ended")
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	f.StringArrayVarP(&metadata, "metadata", "m", nil, "only those with this metadata, `NAME=VALUE`; may be repeated")
	return c
}

// none is what ps says when it has nothing to list, by whether it looked at all of them.
var none = map[bool]string{
	false: "no sandbox is living; `cove create` makes one, `cove ps --all` lists those that have ended",
	true:  "no sandboxes; `cove create` makes one",
}

func psTable(t *table, list []client.SandboxInfo, quiet bool, now time.Time) {
	if !quiet {
		t.head("ID", "FROM", "STATE", "CREATED", "KEY", "ENDS")
	}
	for _, sb := range list {
		if quiet {
			t.row(sb.ID)
			continue
		}
		t.row(sb.ID, cmp.Or(familiar(sb.Image), sb.Template), stateCell(sb.State), ago(sb.CreatedAt, now), cmp.Or(sb.Key, "-"), ends(&sb, now))
	}
}

// ends is when a sandbox will end, or why it has.
func ends(sb *client.SandboxInfo, now time.Time) string {
	switch {
	case sb.State == "ended" && sb.Message != "":
		return sb.Cause + ": " + sb.Message
	case sb.State == "ended":
		return sb.Cause
	case sb.Deadline.IsZero():
		return "never"
	}
	return "in " + short(sb.Deadline.Sub(now))
}

func (a *invocation) kill() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:               "kill ID... | --all",
		Short:             "End sandboxes",
		Long:              "End sandboxes with everything that runs in them, and print the ids of those that ended. Their files are gone.",
		Example:           "  cove kill sbabc sbdef\n  cove kill --all",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: a.completeIDs(0, living...),
		RunE: func(c *cobra.Command, names []string) error {
			if all == (len(names) > 0) {
				return usageError{errors.New("want the sandboxes to end, or --all; see `cove ps`")}
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			if all {
				for sb, err := range cl.List(c.Context(), client.ListRequest{States: living}) {
					if err != nil {
						return err
					}
					names = append(names, sb.ID)
				}
			}
			return a.each(c.Context(), cl, names, func(sb *client.Sandbox) error {
				defer a.working(still("ending %s", sb.ID))()
				return sb.Kill(c.Context())
			})
		},
	}
	c.Flags().BoolVar(&all, "all", false, "end all of yours")
	return c
}
