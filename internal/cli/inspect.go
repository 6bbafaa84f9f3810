package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

// inspection is all that is known of a sandbox.
type inspection struct {
	client.SandboxInfo
	// Current is what it uses now; Usage is that of its whole life, once it has ended.
	Current   *client.SandboxUsage `json:"current_usage,omitempty"`
	Kernels   []client.Kernel      `json:"kernels,omitempty"`
	Processes []client.Process     `json:"processes,omitempty"`
}

func (a *invocation) inspect() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect ID",
		Short: "Tell all about a sandbox",
		Long: "Tell all about a sandbox, living or ended: limits, network, when it ends, what it uses. Of one that runs also its kernels\n" +
			"and the commands that run in it; a paused one is left alone.",
		Example:           "  cove inspect sbabc\n  cove inspect sbabc --json | jq .limits",
		Args:              exactArgs(1, "one sandbox"),
		ValidArgsFunction: a.completeIDs(1),
		RunE: func(c *cobra.Command, args []string) error {
			_, sb, err := a.target(c.Context(), args[0])
			if err != nil {
				return err
			}
			all, err := examine(c.Context(), sb)
			if err != nil {
				return err
			}
			return a.print(all, func(t *table) { all.fill(t, time.Now()) })
		},
	}
}

func examine(ctx context.Context, sb *client.Sandbox) (*inspection, error) {
	if err := sb.Refresh(ctx); err != nil {
		return nil, err
	}
	all := &inspection{SandboxInfo: sb.SandboxInfo}
	if sb.State != "running" && sb.State != "paused" {
		return all, nil
	}
	usage, err := sb.Usage(ctx)
	if err != nil {
		return nil, err
	}
	all.Current = &usage
	if sb.State == "paused" { // to ask inside would wake it
		return all, nil
	}
	if all.Kernels, err = sb.Kernels(ctx); err != nil {
		return nil, err
	}
	all.Processes, err = sb.Processes(ctx)
	return all, err
}

func (i *inspection) fill(t *table, now time.Time) {
	field := func(name, value string) {
		if value != "" {
			t.row(cell{name, bold}, value)
		}
	}
	t.row(cell{"id", bold}, i.ID)
	t.row(cell{"state", bold}, stateCell(i.State))
	field("image", i.Image)
	field("template", i.Template)
	field("forked from", i.ForkedFrom)
	field("key", i.Key)
	for _, name := range slices.Sorted(maps.Keys(i.Metadata)) {
		field("metadata", name+"="+i.Metadata[name])
	}
	field("created", moment(i.CreatedAt, now))
	if !i.LastUsed.IsZero() {
		field("last used", moment(i.LastUsed, now))
	}
	if !i.PausedAt.IsZero() {
		field("paused", moment(i.PausedAt, now))
	}
	if i.State == "ended" {
		field("ended", moment(i.EndedAt, now))
		field("why", ends(&i.SandboxInfo, now))
	} else {
		field("ends", ends(&i.SandboxInfo, now))
	}
	if i.IdleTimeoutSeconds > 0 {
		field("when idle", fmt.Sprintf("%s after %s", i.IdleAction, short(time.Duration(i.IdleTimeoutSeconds*float64(time.Second)))))
	}
	if i.AutoResume {
		field("auto resume", "yes: any use resumes it")
	}
	field("network", networkText(i.Network))
	field("storage", i.Storage)
	for _, m := range i.Mounts {
		field("mount", mountText(m))
	}
	field("limits", limitsText(i.Limits))
	if u := i.Current; u != nil {
		field("uses", usageText(u))
	}
	if u := i.Usage; u != nil {
		field("used", usageText(u))
	}
	for _, k := range i.Kernels {
		field("kernel", strings.Join(strings.Fields(fmt.Sprintf("%s: %s, %s, pid %d", k.Name, k.Language, k.State, k.PID)), " "))
	}
	for _, p := range i.Processes {
		field("process", fmt.Sprintf("%s: %s (pid %d, user %s)", p.ID, strings.Join(p.Argv, " "), p.PID, p.User))
	}
}

// moment is a time for people and for looking up.
func moment(t, now time.Time) string {
	return ago(t, now) + " (" + t.Local().Format(time.DateTime) + ")"
}

func networkText(n client.Network) string {
	text := n.Mode
	if len(n.Allow) > 0 {
		text += ", allows " + strings.Join(n.Allow, " ")
	}
	if len(n.Deny) > 0 {
		text += ", denies " + strings.Join(n.Deny, " ")
	}
	return text
}

func limitsText(l client.Limits) string {
	var parts []string
	add := func(set bool, text string) {
		if set {
			parts = append(parts, text)
		}
	}
	add(l.CPUs == 1, "1 CPU")
	add(l.CPUs > 0 && l.CPUs != 1, fmt.Sprintf("%g CPUs", l.CPUs))
	add(l.MemoryBytes > 0, size(l.MemoryBytes)+" memory")
	add(l.DiskBytes > 0, size(l.DiskBytes)+" disk")
	add(l.Pids > 0, fmt.Sprintf("%d pids", l.Pids))
	add(l.OpenFiles > 0, fmt.Sprintf("%d open files", l.OpenFiles))
	return strings.Join(parts, ", ")
}

func usageText(u *client.SandboxUsage) string {
	text := fmt.Sprintf("%.1fs of CPU, %s memory (%s at most), %s disk, %d pids", float64(u.CPUMS)/1e3, size(u.MemoryBytes), size(u.PeakBytes),
		size(u.DiskBytes), u.Pids)
	if u.OOMKills > 0 {
		text += fmt.Sprintf(", %d killed for lack of memory", u.OOMKills)
	}
	return text
}
