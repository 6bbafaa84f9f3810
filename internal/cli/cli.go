// Package cli is the cove command: verbs over the public client, tables for people and JSON for programs. It goes
// through the front door like everybody else; only serve, doctor and a run without a server reach for the wiring.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
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
	if said, meant, _ := strings.Cut(err.Error(), "\n\nDid you mean this?\n"); strings.HasPrefix(said, "unknown command") { // by cobra
		if names := strings.Fields(meant); len(names) > 0 {
			said += ", perhaps " + strings.Join(names, " or ") + " was meant"
		}
		err = usageError{errors.New(said + "; see `cove --help`")}
	}
	a.explain(err)
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailure
}

// usageError is a command line that cannot be meant.
type usageError struct{ error }

func (a *invocation) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cove",
		Short: "Isolated sandboxes for AI agents, in milliseconds",
		Long: "Isolated sandboxes for AI agents, in milliseconds.\n\n" +
			"`cove serve` starts a server; the other commands find the one that runs on this machine, or the one of COVE_URL with\n" +
			"the key in COVE_API_KEY. `cove run` does without: it starts a server for as long as the code runs.",
		Example:       "  cove run -c 'print(1 + 1)'\n  cove ps\n  cove exec -it ID bash",
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
	group(root, "Use sandboxes:", a.run(), a.exec(), a.cp(), a.ps(), a.kill())
	group(root, "Run a server:", a.serve(), a.doctor(), a.key(), a.version())
	root.SetHelpCommandGroupID("Run a server:")
	return root
}

// group adds commands under a title of their own, in this order: first what is needed first.
func group(root *cobra.Command, title string, commands ...*cobra.Command) {
	cobra.EnableCommandSorting = false
	root.AddGroup(&cobra.Group{ID: title, Title: title})
	for _, c := range commands {
		c.GroupID = title
		root.AddCommand(c)
	}
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
	var away *url.Error
	next := remedies[client.KindOf(err)]
	switch {
	case errors.As(err, &away):
		err, next = unreached(away), "start it with `cove serve`, or set COVE_URL to where it is"
	case client.KindOf(err) == client.NotFound && strings.Contains(err.Error(), "no sandbox"): // files and commands are not found too
		next = "`cove ps` lists yours"
	}
	fmt.Fprintln(a.Err, "cove:", err)
	if next != "" {
		fmt.Fprintln(a.Err, "  →", next)
	}
}

// unreached says where no server answered, without the request that nobody heard.
func unreached(err *url.Error) error {
	where := err.URL
	if u, parse := url.Parse(err.URL); parse == nil {
		where = u.Scheme + "://" + u.Host
	}
	return fmt.Errorf("no answer from the server at %s: %w", where, err.Err)
}

// remedies say what to do next about what the server said.
var remedies = map[client.Kind]string{
	client.Unauthed:    "set COVE_API_KEY; the server's own key is in server/api_key of its data directory",
	client.Denied:      "use a key that may do this; `cove key create --admin` makes one",
	client.Gone:        "`cove ps --all` lists what has ended, and why",
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
