// Package cli is the cove command: verbs over the public client, tables for people and JSON for programs. It goes
// through the front door like everybody else; only serve, doctor, the build of a template and a run without a server
// reach for what is behind.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

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

	server  string // where the server is, once one was found
	token   string // the key that is shown there
	own     bool   // it was started for this command and ends with it
	sandbox string // which one the command is about, once it was found
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
		err = unknownCommand(said, strings.Fields(meant), "cove")
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

func unknownCommand(said string, perhaps []string, parent string) error {
	if len(perhaps) > 0 {
		said += ", perhaps " + strings.Join(perhaps, " or ") + " was meant"
	}
	return usageError{fmt.Errorf("%s; see `%s --help`", said, parent)}
}

// family is a command that only has commands below it.
func family(use, short string, children ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, SuggestionsMinimumDistance: 2}
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		return unknownCommand(fmt.Sprintf("unknown command %q for %q", args[0], c.CommandPath()), c.SuggestionsFor(args[0]), c.CommandPath())
	}
	c.AddCommand(children...)
	return c
}

func (a *invocation) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cove",
		Short: "Isolated sandboxes for AI agents, in milliseconds",
		Long: "Isolated sandboxes for AI agents, in milliseconds.\n\n" +
			"`cove serve` starts a server; the other commands find the one that runs on this machine, or the one of COVE_URL with\n" +
			"the key in COVE_API_KEY. `cove run` and `cove shell` do without: they start a server for as long as they run.\n\n" +
			"A sandbox is named by its id or by a beginning of it that no other id has. Exit codes are the command's own for run,\n" +
			"exec and shell, else 0, 1 after a failure and 2 for a command line that cannot be meant. NO_COLOR is respected.",
		Example:       "  cove run -c 'print(1 + 1)'\n  cove shell\n  cove ps\n  cove fork ID -n 3",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.DisableDefaultCmd = true // ours says where to put it
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	f := root.PersistentFlags()
	f.BoolVar(&a.json, "json", false, "print JSON instead of tables; what goes on prints an object a line")
	f.StringVar(&a.config, "config", "", "configuration `file` (COVE_CONFIG)")
	f.StringVar(&a.dataDir, "data-dir", "", "data `directory` (COVE_DATA_DIR; default /var/lib/cove for root, else ~/.local/share/cove)")
	group(root, "Use sandboxes:", a.run(), a.create(), a.shell(), a.exec(), a.cp(), a.ps(), a.kill())
	group(root, "Branch and keep:", a.fork(), a.pause(), a.resume(), a.snapshot(), a.timeout(), a.template(), a.session(), a.artifacts())
	group(root, "Images and volumes:", a.image(), a.login(), a.logout(), a.volume())
	group(root, "Watch:", a.inspect(), a.logs(), a.events(), a.stats(), a.top())
	group(root, "Run a server:", a.serve(), a.doctor(), a.initConfig(), a.configure(), a.kubeconfig(), a.key(), a.completion(), a.version())
	root.SetHelpCommandGroupID("Run a server:")
	noFiles(root)
	return root
}

// noFiles keeps shells from offering files where no command said what it takes.
func noFiles(c *cobra.Command) {
	for _, child := range c.Commands() {
		if noFiles(child); child.ValidArgsFunction == nil {
			child.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
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
	src, err := a.configSource(flags)
	if err != nil {
		return config.Config{}, err
	}
	return config.Load(src)
}

// failures are several that each need an explanation of their own.
type failures []error

func (f failures) Error() string   { return errors.Join(f...).Error() }
func (f failures) Unwrap() []error { return f }

// explain says what went wrong and what to do next.
func (a *invocation) explain(err error) {
	var each failures
	if errors.As(err, &each) {
		for _, err := range each {
			a.explain(err)
		}
		return
	}
	var away *url.Error
	next := a.remedy(err)
	switch {
	case errors.As(err, &away):
		err, next = unreached(away), "start it with `cove serve`, or set COVE_URL to where it is"
	case errors.Is(err, errNoServer):
		next = "start one with `cove serve`, or set COVE_URL and COVE_API_KEY to those of another machine"
	}
	prefix := paint("cove:", red, inColour(a.Err))
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintln(a.Err, prefix, clean(line))
		prefix = "     "
	}
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

// print writes value as JSON when asked to, else the table that fill makes.
func (a *invocation) print(value any, fill func(t *table)) error {
	if a.json {
		e := json.NewEncoder(a.Out)
		e.SetIndent("", "  ")
		return e.Encode(value)
	}
	t := &table{}
	fill(t)
	return t.show(a.Out)
}

// line writes one value of a stream as a line of JSON.
func (a *invocation) line(value any) error { return json.NewEncoder(a.Out).Encode(value) }

// exactArgs refuses a wrong number of arguments with a sentence.
func exactArgs(n int, want string) cobra.PositionalArgs { return between(n, n, want) }

func minArgs(n int, want string) cobra.PositionalArgs { return between(n, math.MaxInt, want) }

func maxArgs(n int, want string) cobra.PositionalArgs { return between(0, n, want) }

func between(least, most int, want string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usageError{fmt.Errorf("want %s; see `%s --help`", want, c.CommandPath())}
		}
		return nil
	}
}
