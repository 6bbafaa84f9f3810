package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/internal/config"
)

func (a *invocation) initConfig() *cobra.Command {
	kinds := config.Examples()
	kind := kinds[max(0, slices.Index(kinds, "native"))]
	var force bool
	c := &cobra.Command{
		Use:   "init-config PATH",
		Short: "Write a configuration file to start from",
		Long: "Write a configuration file in which every setting is explained. A server starts with it as it is:\n" +
			"`cove serve --config PATH`. A file that is there already is left alone without --force. - writes to standard output.",
		Example: "  cove init-config ~/.config/cove.toml\n  cove init-config /etc/cove.toml --example docker\n  cove serve --config ~/.config/cove.toml",
		Args:    exactArgs(1, "a path for the file"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"toml"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := config.Example(kind)
			if err != nil {
				return usageError{fmt.Errorf("--example: %w", err)}
			}
			if args[0] == "-" {
				_, err := fmt.Fprint(a.Out, text)
				return err
			}
			if err := writeNew(args[0], text, force); err != nil {
				return err
			}
			return a.print(map[string]string{"written": args[0]}, func(t *table) {
				t.row(args[0])
				fmt.Fprintf(a.Err, "`cove serve --config %s` starts a server with it\n", args[0])
			})
		},
	}
	c.Flags().StringVar(&kind, "example", kind, "which `kind` of server: "+strings.Join(kinds, ", "))
	c.Flags().BoolVar(&force, "force", false, "replace a file that is there already")
	completeFlag(c, "example", words(kinds...))
	return c
}

// writeNew writes a file with its directory, at once or not at all.
func writeNew(path, text string, force bool) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	flags := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if force {
		flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	f, err := os.OpenFile(path, flags, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is there already; --force replaces it", path)
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
