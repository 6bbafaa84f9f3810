package cli

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/config"
)

func (a *invocation) volume() *cobra.Command {
	return family("volume", "Keep files that outlive sandboxes", a.volumeList(), a.volumeCreate(), a.volumeRemove())
}

func (a *invocation) volumeList() *cobra.Command {
	var quiet bool
	c := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List volumes", Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			list, err := cl.Volumes(c.Context())
			if err != nil {
				return err
			}
			if len(list) == 0 && !a.json && !quiet {
				fmt.Fprintln(a.Err, "no volumes; `cove volume create NAME` makes one, and so does `cove create -v NAME:/data`")
				return nil
			}
			return a.print(list, func(t *table) { volumeTable(t, list, quiet, time.Now()) })
		},
	}
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	return c
}

func volumeTable(t *table, list []client.Volume, quiet bool, now time.Time) {
	if !quiet {
		t.head("NAME", ">SIZE", ">USED", ">SANDBOXES", "CREATED")
	}
	for _, v := range list {
		if quiet {
			t.row(v.Name)
			continue
		}
		t.row(v.Name, size(v.Bytes), size(v.UsedBytes), v.Sandboxes, ago(v.CreatedAt, now))
	}
}

func (a *invocation) volumeCreate() *cobra.Command {
	var capacity string
	c := &cobra.Command{
		Use: "create NAME", Short: "Make a volume",
		Long: "Make a volume: a disk of its own that sandboxes can have with `--mount NAME:/path`, several at once, and that stays when they\n" +
			"end. Space is taken as it is written.",
		Example: "  cove volume create models --size 5G\n  cove create -v models:/models",
		Args:    exactArgs(1, "a name for the volume"),
		RunE: func(c *cobra.Command, args []string) error {
			req := client.VolumeRequest{Name: args[0]}
			if capacity != "" {
				n, err := config.ParseSize(capacity)
				if err != nil {
					return usageError{fmt.Errorf("--size: %w", err)}
				}
				req.Bytes = int64(n)
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			v, err := cl.CreateVolume(c.Context(), req)
			if err != nil {
				return err
			}
			return a.print(v, func(t *table) { t.row(v.Name) })
		},
	}
	c.Flags().StringVar(&capacity, "size", "", "how much fits: a `size` such as 10G; default is the server's")
	completeFlag(c, "size", cobra.NoFileCompletions)
	return c
}

func (a *invocation) volumeRemove() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"remove"}, Short: "Remove volumes with their files",
		Long:              "Remove volumes with everything in them. One that a sandbox has is refused.",
		Args:              minArgs(1, "the names of volumes"),
		ValidArgsFunction: a.completeVolumes,
		RunE: func(c *cobra.Command, names []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.removeEach(names, func(name string) error { return cl.RemoveVolume(c.Context(), name) })
		},
	}
}

// removeEach removes several things and prints those that are gone.
func (a *invocation) removeEach(names []string, remove func(name string) error) error {
	removed := []string{}
	var failed failures
	var at atomic.Int64
	done := a.working(func() string { return fmt.Sprintf("%s, %d of %d", names[at.Load()], at.Load()+1, len(names)) })
	for i, name := range names {
		at.Store(int64(i))
		if err := remove(name); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			continue
		}
		removed = append(removed, name)
	}
	done()
	err := a.print(removed, func(t *table) {
		for _, name := range removed {
			t.row(name)
		}
	})
	if len(failed) > 0 {
		return failed
	}
	return err
}

// completeVolumes completes names of volumes.
func (a *invocation) completeVolumes(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	return a.complete(c, begun, func(ctx context.Context, cl *client.Client) (names []string, err error) {
		list, err := cl.Volumes(ctx)
		for _, v := range list {
			names = append(names, v.Name)
		}
		return names, err
	})
}

// complete offers those of the server's names that begin so; without a server it is silent.
func (a *invocation) complete(c *cobra.Command, begun string, ask func(context.Context, *client.Client) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(c.Context(), completionPatience)
	defer cancel()
	cl, err := a.connect(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, err := ask(ctx, cl)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var all []string
	for _, name := range names {
		if strings.HasPrefix(name, begun) && len(all) < mostCompletions {
			all = append(all, name)
		}
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}
