package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) session() *cobra.Command {
	c := family("session", "Conversations that keep a sandbox, and what happened in them",
		a.sessionList(), a.sessionShow(), a.sessionTail(), a.sessionExport(), a.sessionStop(), a.sessionRemove())
	c.Aliases = []string{"sessions"}
	return c
}

func (a *invocation) sessionList() *cobra.Command {
	var req client.SessionsRequest
	var quiet bool
	c := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List sessions, those used last first",
		Example: "  cove session list --state running\n  cove session list -q | xargs cove session rm",
		Args:    exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			list := []client.SessionInfo{}
			for s, err := range cl.Sessions(c.Context(), req) {
				if err != nil {
					return err
				}
				list = append(list, s)
			}
			if len(list) == 0 && !a.json && !quiet {
				fmt.Fprintln(a.Err, "no sessions; a tool that runs code in a session makes one, and so does PUT /cove/v1/sessions/KEY")
				return nil
			}
			return a.print(list, func(t *table) { sessionTable(t, list, quiet, time.Now()) })
		},
	}
	f := c.Flags()
	f.StringArrayVar(&req.States, "state", nil, "only in this `state`: running, stopped, lost or reaped; may be repeated")
	f.BoolVarP(&quiet, "quiet", "q", false, "print keys only")
	completeFlag(c, "state", cobra.FixedCompletions(sessionStates, cobra.ShellCompDirectiveNoFileComp))
	return c
}

var sessionStates = []cobra.Completion{"running", "stopped", "lost", "reaped"}

// sessionStyles are the colours of a session's states.
var sessionStyles = map[string]style{"running": green, "stopped": dim, "lost": red, "reaped": yellow}

func sessionTable(t *table, list []client.SessionInfo, quiet bool, now time.Time) {
	if !quiet {
		t.head("KEY", "STATE", "STORAGE", ">RUNS", ">FAILED", ">ARTIFACTS", "USED", "SANDBOX")
	}
	for _, s := range list {
		if quiet {
			t.row(s.Key)
			continue
		}
		t.row(s.Key, cell{s.State, sessionStyles[s.State]}, s.Storage, s.Runs, s.Failed, s.Artifacts, ago(s.LastUsed, now), cell{s.Sandbox, dim})
	}
}

func (a *invocation) sessionShow() *cobra.Command {
	var limit int
	var noState, noArtifacts bool
	c := &cobra.Command{
		Use: "show KEY|DIR", Short: "Show what is known about a session: its log, its variables, its files",
		Long: "Show what is known about a session: what it is, what ran in it and what that cost, what its kernel holds, which files it left.\n" +
			"Instead of a session's key a directory does that `cove session export` wrote, or the Python package did; then no server is needed.",
		Example:           "  cove session show chat-7\n  cove session show chat-7 --limit 5 --no-state\n  cove session show ./sessions/chat-7",
		Args:              exactArgs(1, "the key of a session, or a directory with its files"),
		ValidArgsFunction: a.completeSessions,
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("limit") && limit < 1 {
				return usageError{errors.New("--limit: how many of the newest entries, at least 1")}
			}
			view, err := a.viewOf(c.Context(), args[0], limit, noState, noArtifacts)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(view, nil)
			}
			return view.show(a.Out, inColour(a.Out))
		},
	}
	f := c.Flags()
	f.IntVar(&limit, "limit", 0, "only the newest `number` of the log's entries")
	f.BoolVar(&noState, "no-state", false, "without the kernel's variables and modules")
	f.BoolVar(&noArtifacts, "no-artifacts", false, "without the files that it left")
	return c
}

// viewOf reads a session from a directory, where the argument is one, or from the server.
func (a *invocation) viewOf(ctx context.Context, arg string, limit int, noState, noArtifacts bool) (*sessionView, error) {
	var view *sessionView
	var err error
	if info, failed := os.Stat(arg); failed == nil && info.IsDir() {
		view, err = readSession(arg, noArtifacts)
	} else if strings.ContainsRune(arg, os.PathSeparator) {
		return nil, fmt.Errorf("there is no directory %s", arg)
	} else {
		view, err = a.askSession(ctx, arg, limit, noState, noArtifacts)
	}
	if err != nil {
		return nil, err
	}
	if limit > 0 && len(view.Log) > limit {
		view.Log = view.Log[len(view.Log)-limit:]
	}
	if noState {
		view.State = nil
	}
	view.noState, view.noArtifacts = noState, noArtifacts
	return view, nil
}

func (a *invocation) sessionTail() *cobra.Command {
	var follow bool
	var lines int
	c := &cobra.Command{
		Use: "tail KEY", Short: "Show the end of a session's log",
		Example:           "  cove session tail chat-7 -f\n  cove session tail chat-7 -n 100 --json",
		Args:              exactArgs(1, "the key of a session"),
		ValidArgsFunction: a.completeSessions,
		RunE: func(c *cobra.Command, args []string) error {
			if lines < 1 {
				return usageError{errors.New("--lines: how many of the newest entries, at least 1")}
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			for line, err := range cl.SessionLog(c.Context(), args[0], client.SessionLogRequest{Last: lines, Follow: follow}) {
				if err != nil {
					return err
				}
				if a.json {
					err = a.line(line)
				} else {
					_, err = fmt.Fprint(a.Out, logEntry(&line, inColour(a.Out)))
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	f := c.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "go on with what happens next, until the session is removed")
	f.IntVarP(&lines, "lines", "n", 10, "begin with the newest `number` of entries")
	return c
}

func (a *invocation) sessionStop() *cobra.Command {
	return &cobra.Command{
		Use: "stop KEY...", Short: "End the sandboxes of sessions",
		Long:              "End the sandboxes of sessions. The sessions stay, with their logs and, where they have storage bind, their files.",
		Args:              minArgs(1, "the keys of sessions"),
		ValidArgsFunction: a.completeSessions,
		RunE: func(c *cobra.Command, keys []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.removeEach(keys, func(key string) error {
				_, err := cl.StopSession(c.Context(), key)
				return err
			})
		},
	}
}

func (a *invocation) sessionRemove() *cobra.Command {
	return &cobra.Command{
		Use: "rm KEY...", Aliases: []string{"remove"}, Short: "End sessions and remove their logs and files",
		Long:              "End sessions and remove their logs, files and checkpoints. Artifacts stay until they are removed themselves.",
		Args:              minArgs(1, "the keys of sessions"),
		ValidArgsFunction: a.completeSessions,
		RunE: func(c *cobra.Command, keys []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.removeEach(keys, func(key string) error { return cl.RemoveSession(c.Context(), key) })
		},
	}
}

// completeSessions completes keys of sessions.
func (a *invocation) completeSessions(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	return a.complete(c, begun, func(ctx context.Context, cl *client.Client) (keys []string, err error) {
		for s, err := range cl.Sessions(ctx, client.SessionsRequest{}) {
			if err != nil || len(keys) >= mostCompletions {
				return keys, err
			}
			keys = append(keys, s.Key)
		}
		return keys, nil
	})
}
