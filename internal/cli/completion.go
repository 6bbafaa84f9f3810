package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

// shells are those that completions are made for, and where each wants them.
var shells = []struct {
	name, install string
	write         func(root *cobra.Command, w io.Writer) error
}{
	{"bash", "cove completion bash > /etc/bash_completion.d/cove   # and have the package bash-completion", func(r *cobra.Command, w io.Writer) error { return r.GenBashCompletionV2(w, true) }},
	{"zsh", `cove completion zsh > "${fpath[1]}/_cove"`, func(r *cobra.Command, w io.Writer) error { return r.GenZshCompletion(w) }},
	{"fish", "cove completion fish > ~/.config/fish/completions/cove.fish", func(r *cobra.Command, w io.Writer) error { return r.GenFishCompletion(w, true) }},
}

func (a *invocation) completion() *cobra.Command {
	c := family("completion", "Print the completions of a shell")
	c.Long = "Print a script that lets a shell complete commands, flags, the ids of sandboxes and the names of templates."
	for _, s := range shells {
		c.AddCommand(&cobra.Command{
			Use:   s.name,
			Short: "Completions of " + s.name,
			Long:  "Print the completions of " + s.name + ". They are loaded by shells that start after this, once:\n\n  " + s.install,
			Args:  exactArgs(0, "no arguments"),
			RunE:  func(c *cobra.Command, _ []string) error { return s.write(c.Root(), a.Out) },
		})
	}
	return c
}

// completionPatience is how long a shell waits for the server; whoever presses Tab does not wait longer.
const completionPatience = 2 * time.Second

// mostCompletions is more than anybody looks through.
const mostCompletions = 100

// completeIDs completes up to most ids (zero: any number) of sandboxes in these states. Without a server it is silent.
func (a *invocation) completeIDs(most int, states ...string) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.ids(c.Context(), begun, "", states), cobra.ShellCompDirectiveNoFileComp
	}
}

// ids are the sandboxes whose id begins so, each with a word about it.
func (a *invocation) ids(ctx context.Context, begun, suffix string, states []string) []string {
	ctx, cancel := context.WithTimeout(ctx, completionPatience)
	defer cancel()
	cl, err := a.connect(ctx)
	if err != nil {
		return nil
	}
	var all []string
	for sb, err := range cl.List(ctx, client.ListRequest{States: states}) {
		if err != nil {
			return nil
		}
		if len(all) == mostCompletions {
			break
		}
		if strings.HasPrefix(sb.ID, begun) {
			about := strings.Join(strings.Fields(sb.State+" "+sb.Template+" "+sb.Key), " ")
			all = append(all, cobra.CompletionWithDesc(sb.ID+suffix, clean(about)))
		}
	}
	return all
}

// completeTemplates completes the name of a template.
func (a *invocation) completeTemplates(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(c.Context(), completionPatience)
	defer cancel()
	cl, err := a.connect(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	list, err := cl.Templates(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var all []string
	for _, t := range list {
		if strings.HasPrefix(t.Name, begun) {
			all = append(all, cobra.CompletionWithDesc(t.Name, clean(t.Description)))
		}
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}

// completeTemplate completes the name of one template.
func (a *invocation) completeTemplate(c *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeTemplates(c, args, begun)
}

// completePlace completes ID: for a copy; what is not the beginning of an id is a file of this machine.
func (a *invocation) completePlace(c *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
	if len(args) >= 2 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	found := a.ids(c.Context(), begun, ":", []string{"running"})
	if len(found) == 0 || begun == "" {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return found, cobra.ShellCompDirectiveNoSpace
}

// words completes one of a few.
func words(all ...string) cobra.CompletionFunc {
	return cobra.FixedCompletions(all, cobra.ShellCompDirectiveNoFileComp)
}

// completeFlag says how the value of a flag is completed.
func completeFlag(c *cobra.Command, name string, f cobra.CompletionFunc) {
	if err := c.RegisterFlagCompletionFunc(name, f); err != nil {
		panic(fmt.Sprintf("flag --%s of %s: %v", name, c.Name(), err)) // it is not there, or was said twice
	}
}
