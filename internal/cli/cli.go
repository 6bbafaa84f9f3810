// Package cli is the cove command: verbs over the public client, tables for people and JSON for programs. It goes
// through the front door like everybody else; only serve, doctor and a run without a server reach for the wiring.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/config"
)

// Streams are what a command reads and writes.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// exit is an error that is only an exit code: what there was to say has been said.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// The exit codes that are not a command's own.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitTimeout     = 124 // as timeout(1)
	exitInterrupted = 130
)

// invocation is one command line as it runs.
type invocation struct {
	Streams
	json    bool
	config  string
	dataDir string
}

// Main runs the command line and returns its exit code. extra are commands that other parts of the server need in the
// same binary; they are hidden.
func Main(ctx context.Context, args []string, s Streams, extra ...*cobra.Command) int {
	a := &invocation{Streams: s}
	root := a.root()
	for _, c := range extra {
		c.Hidden = true
		root.AddCommand(c)
	}
	root.SetArgs(args)
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	err := root.ExecuteContext(ctx)
	var code exit
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return exitInterrupted
	}
	a.explain(err)
	var usage usageError
	if errors.As(err, &usage) || strings.HasPrefix(err.Error(), "unknown command") {
		return exitUsage
	}
	return exitFailure
}

// usageError is a command line that cannot be meant.
type usageError struct{ error }

func (a *invocation) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "cove",
		Short:         "Isolated sandboxes for AI agents, in milliseconds",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	f := root.PersistentFlags()
	f.BoolVar(&a.json, "json", false, "print JSON instead of tables")
	f.StringVar(&a.config, "config", "", "configuration `file` (COVE_CONFIG)")
	f.StringVar(&a.dataDir, "data-dir", "", "data `directory` (COVE_DATA_DIR; default "+config.DefaultDataDir()+")")
	root.AddCommand(a.serve(), a.run(), a.exec(), a.ps(), a.kill(), a.cp(), a.key(), a.doctor(), a.version())
	return root
}

// load reads the configuration; flags are settings by their dotted name.
func (a *invocation) load(flags map[string]string) (config.Config, error) {
	all := map[string]string{}
	for k, v := range flags {
		all[k] = v
	}
	if a.dataDir != "" {
		dir, err := filepath.Abs(a.dataDir)
		if err != nil {
			return config.Config{}, err
		}
		all["data_dir"] = dir
	}
	return config.Load(config.Source{File: a.config, Env: os.LookupEnv, Flags: all})
}

// explain says what went wrong and what to do next.
func (a *invocation) explain(err error) {
	fmt.Fprintln(a.Err, "cove:", err)
	if next := remedies[client.KindOf(err)]; next != "" {
		fmt.Fprintln(a.Err, "  →", next)
	}
}

// remedies say what to do next about what the server said.
var remedies = map[client.Kind]string{
	client.Unauthed:    "set COVE_API_KEY; the server's own key is in server/api_key of its data directory",
	client.Denied:      "use a key that may do this; `cove key create --admin` makes one",
	client.Gone:        "it has ended; `cove ps --all` tells why",
	client.Exhausted:   "end a sandbox with `cove kill`, or raise the limit in the server's configuration",
	client.Unavailable: "try again in a moment",
	client.Internal:    "the server's log has the details",
}

// print writes value as JSON when asked to, else calls table.
func (a *invocation) print(value any, table func(w io.Writer)) error {
	if a.json {
		e := json.NewEncoder(a.Out)
		e.SetIndent("", "  ")
		return e.Encode(value)
	}
	w := tabwriter.NewWriter(a.Out, 0, 4, 2, ' ', 0)
	table(w)
	return w.Flush()
}

// exactArgs refuses a wrong number of arguments with a sentence.
func exactArgs(n int, want string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != n {
			return usageError{fmt.Errorf("want %s; see `%s --help`", want, c.CommandPath())}
		}
		return nil
	}
}

func minArgs(n int, want string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < n {
			return usageError{fmt.Errorf("want %s; see `%s --help`", want, c.CommandPath())}
		}
		return nil
	}
}
