package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/template"
)

func (a *invocation) template() *cobra.Command {
	return family("template", "List, build, show and remove what sandboxes start from", a.templateList(), a.templateShow(), a.templateBuild(), a.templateRemove())
}

func (a *invocation) templateList() *cobra.Command {
	var quiet, all bool
	c := &cobra.Command{
		Use: "list", Short: "List what a sandbox can start from", Args: exactArgs(0, "no arguments"),
		Long: "List what a sandbox can start from. Container images are in `cove image list`; with --all the templates behind them are\n" +
			"here too, and the layers that builds of images keep.",
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			list, err := cl.Templates(c.Context())
			if err != nil {
				return err
			}
			if !all {
				list = slices.DeleteFunc(list, func(t client.TemplateInfo) bool {
					return strings.HasPrefix(t.Name, "img-") || strings.HasPrefix(t.Name, "bld-")
				})
			}
			return a.print(list, func(t *table) { templateTable(t, list, quiet, time.Now()) })
		},
	}
	c.Flags().BoolVarP(&all, "all", "a", false, "include those of images and their builds")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	return c
}

func templateTable(t *table, list []client.TemplateInfo, quiet bool, now time.Time) {
	if !quiet {
		t.head("NAME", "SOURCE", "FROM", "PYTHON", "BUILT", "CREATED", "DESCRIPTION")
	}
	for i := range list {
		one := &list[i]
		if quiet {
			t.row(one.Name)
			continue
		}
		built, created, python := cell{"yes", green}, "-", "-"
		if !one.Built {
			built = cell{"no", yellow}
		}
		if !one.CreatedAt.IsZero() {
			created = ago(one.CreatedAt, now)
		}
		if one.Python != nil {
			python = cmp.Or(one.Python.Version, "yes")
		}
		t.row(one.Name, one.Source, cmp.Or(one.From, "-"), python, built, created, one.Description)
	}
}

func (a *invocation) templateShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Tell all about a template", Args: exactArgs(1, "the name of a template"), ValidArgsFunction: a.completeTemplate,
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			one, err := cl.Template(c.Context(), args[0])
			if err != nil {
				return err
			}
			return a.print(one, func(t *table) { describeTemplate(t, one, time.Now()) })
		},
	}
}

func describeTemplate(t *table, one *client.TemplateInfo, now time.Time) {
	field := func(name, value string) {
		if value != "" {
			t.row(cell{name, bold}, value)
		}
	}
	field("name", one.Name)
	field("description", one.Description)
	field("source", one.Source)
	field("from", one.From)
	field("digest", cmp.Or(one.Digest, "not built: `cove template build "+one.Name+"` as root, or at the next start of the server"))
	if !one.CreatedAt.IsZero() {
		field("created", moment(one.CreatedAt, now))
	}
	if one.TenantOwned {
		field("owner", "your tenant; `cove template rm "+one.Name+"` removes it")
	}
	field("user", one.User)
	field("workdir", one.Workdir)
	if one.Sudo {
		field("sudo", "yes")
	}
	if p := one.Python; p != nil {
		field("python", strings.TrimSpace(p.Executable+" "+p.Version))
		field("preload", strings.Join(p.Preload, " "))
	}
	field("limits", limitsText(one.Limits))
	for _, w := range one.Warnings {
		field("warning", w)
	}
}

func (a *invocation) templateRemove() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove templates that snapshots made",
		Long:              "Remove templates that were made by `cove snapshot`. Sandboxes that run from one go on.",
		Args:              minArgs(1, "the names of templates"),
		ValidArgsFunction: a.completeTemplates,
		RunE: func(c *cobra.Command, names []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			removed := []string{}
			var failed failures
			for _, name := range names {
				if err := cl.RemoveTemplate(c.Context(), name); err != nil {
					failed = append(failed, fmt.Errorf("%s: %w", name, err))
					continue
				}
				removed = append(removed, name)
			}
			err = a.print(removed, func(t *table) {
				for _, name := range removed {
					t.row(name)
				}
			})
			if len(failed) > 0 {
				return failed
			}
			return err
		},
	}
}

func (a *invocation) templateBuild() *cobra.Command {
	var rebuild bool
	c := &cobra.Command{
		Use:   "build NAME | FILE.toml",
		Short: "Build a template on this host",
		Long: "Build a template in the data directory of this host, as root: one that is defined already, by its name, or from a file,\n" +
			"which then becomes the definition of that name. A running server uses what was built from the next sandbox on.\n" +
			"A template that is as it was built stays as it is. With --rebuild it is built again: a server that found that it does\n" +
			"not work refuses it until then.",
		Example: "  sudo cove template build python\n  sudo cove template build ./analysis.toml",
		Args:    exactArgs(1, "the name of a template, or a file that defines one"),
		ValidArgsFunction: func(c *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
			names, _ := a.completeTemplate(c, args, begun)
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return names, cobra.ShellCompDirectiveDefault
		},
		RunE: func(c *cobra.Command, args []string) error {
			cfg, err := a.load(nil)
			if err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return fmt.Errorf("building a template needs root: its files belong to root and to the sandbox's user; try sudo cove template build %s", args[0])
			}
			ctx, stop := signal.NotifyContext(c.Context(), unix.SIGINT, unix.SIGTERM)
			defer stop()
			built, err := a.buildTemplate(ctx, filepath.Join(cfg.DataDir, "templates"), args[0], rebuild)
			if err != nil {
				return err
			}
			return a.print(built, func(t *table) {
				t.row(built.Name, built.Digest)
				for _, w := range built.Warnings {
					t.row("", "warning: "+w)
				}
			})
		},
	}
	c.Flags().BoolVar(&rebuild, "rebuild", false, "build a template again that does not work although nothing has changed")
	return c
}

// buildTemplate builds by name, or by a file whose definition it takes over; one that cannot be built is given back.
func (a *invocation) buildTemplate(ctx context.Context, dir, what string, rebuild bool) (*template.Template, error) {
	name, undo := what, func() error { return nil }
	if strings.HasSuffix(what, ".toml") || strings.ContainsRune(what, filepath.Separator) {
		var err error
		if name, undo, err = define(dir, what); err != nil {
			return nil, err
		}
	}
	store, err := template.Open(template.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		var built *template.Template
		if built, err = a.ensure(ctx, store, name, rebuild); err == nil {
			return built, nil
		}
	}
	return nil, errors.Join(err, undo())
}

// ensure builds with progress: on a terminal in one line, elsewhere a line for each step.
func (a *invocation) ensure(ctx context.Context, store *template.Store, name string, rebuild bool) (*template.Template, error) {
	var now atomic.Value
	now.Store("building template " + name)
	_, live := terminal(a.Err)
	if live {
		defer a.working(func() string { return now.Load().(string) })()
	}
	var last string
	build := store.Repair
	if rebuild {
		build = store.Rebuild
	}
	return build(ctx, name, func(p template.Progress) {
		line := "template " + name + ": " + p.Step
		if p.Total > 0 {
			line += fmt.Sprintf(" %s %d/%d", bar(p.Done, p.Total), p.Done, p.Total)
		}
		if p.Message != "" {
			line += ": " + p.Message
		}
		now.Store(line)
		if !live && line != last { // a line per thing, not per byte
			fmt.Fprintln(a.Err, line)
		}
		last = line
	})
}

// define copies a definition, and the lock file beside it, to where the server looks for them.
func define(dir, file string) (name string, undo func() error, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", nil, err
	}
	copies := map[string][]byte{}
	d, err := template.Parse(file, text, func(beside string) ([]byte, error) {
		lock, err := os.ReadFile(filepath.Join(filepath.Dir(file), beside))
		if err == nil {
			copies[beside] = lock
		}
		return lock, err
	})
	if err != nil {
		return "", nil, err
	}
	copies[d.Name+".toml"] = text
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	var undos []func() error
	undo = func() error {
		var all []error
		for _, u := range undos {
			all = append(all, u())
		}
		return errors.Join(all...)
	}
	for base, content := range copies {
		target := filepath.Join(dir, base)
		before, err := os.ReadFile(target)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			undos = append(undos, func() error { return os.Remove(target) })
		case err != nil:
			return "", nil, errors.Join(err, undo())
		default:
			undos = append(undos, func() error { return os.WriteFile(target, before, 0o644) })
		}
		if err := os.WriteFile(target, content, 0o644); err != nil {
			return "", nil, errors.Join(err, undo())
		}
	}
	return d.Name, undo, nil
}
