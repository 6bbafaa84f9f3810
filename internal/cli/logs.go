package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) events() *cobra.Command {
	var follow bool
	var tail int
	c := &cobra.Command{
		Use:   "events [ID]",
		Short: "Show what happened to sandboxes",
		Long: "Show what happened to your sandboxes, or to one of them, oldest first: created, started, paused, resumed, forked, ended\n" +
			"and why. With -f it goes on with what happens next.",
		Example:           "  cove events --tail 20\n  cove events -f --json",
		Args:              maxArgs(1, "one sandbox at most"),
		ValidArgsFunction: a.completeIDs(1),
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			var id string
			if len(args) == 1 {
				sb, err := a.find(c.Context(), cl, args[0])
				if err != nil {
					return err
				}
				id = sb.ID
			}
			last, err := a.past(c.Context(), cl, id, tail, a.tellEvent)
			if err != nil || !follow {
				return err
			}
			for e, err := range cl.Events(c.Context(), client.EventsRequest{Sandbox: id, After: last, Follow: true}) {
				if err != nil {
					return err
				}
				if err := a.tellEvent(e); err != nil {
					return err
				}
			}
			return errStopped
		},
	}
	f := c.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "go on with what happens next")
	f.IntVar(&tail, "tail", 0, "only the last `number` of what has happened")
	return c
}

// errStopped is the end of a stream that has none.
var errStopped = errors.New("the stream has ended: the server is stopping")

// past tells what has happened so far, or the last tail of it, and returns how far that goes.
func (a *invocation) past(ctx context.Context, cl *client.Client, id string, tail int, tell func(client.LifecycleEvent) error) (last int64, err error) {
	var kept []client.LifecycleEvent
	for e, err := range cl.Events(ctx, client.EventsRequest{Sandbox: id}) {
		if err != nil {
			return last, err
		}
		last = e.Seq
		if tail <= 0 {
			if err := tell(e); err != nil {
				return last, err
			}
			continue
		}
		if kept = append(kept, e); len(kept) > tail {
			kept = kept[1:]
		}
	}
	for _, e := range kept {
		if err := tell(e); err != nil {
			return last, err
		}
	}
	return last, nil
}

func (a *invocation) tellEvent(e client.LifecycleEvent) error {
	if a.json {
		return a.line(e)
	}
	colour := inColour(a.Out)
	_, err := fmt.Fprintf(a.Out, "%s  %s  %s\n", paint(e.At.Local().Format(time.DateTime), dim, colour), e.Sandbox, eventText(&e, colour))
	return err
}

// eventStyles are the colours of the events that people look for.
var eventStyles = map[string]style{"started": green, "resumed": green, "paused": yellow, "forked": cyan, "snapshot": cyan, "ended": red}

// eventText is an event without when and where.
func eventText(e *client.LifecycleEvent, colour bool) string {
	var about []string
	if e.Cause != "" {
		about = append(about, e.Cause)
	}
	if e.Message != "" {
		about = append(about, e.Message)
	}
	if !e.Deadline.IsZero() {
		about = append(about, "until "+e.Deadline.Local().Format(time.DateTime))
	}
	text := paint(e.Type, eventStyles[e.Type], colour)
	if len(about) > 0 {
		text += ": " + clean(strings.Join(about, ", "))
	}
	return text
}

func (a *invocation) logs() *cobra.Command {
	var follow bool
	c := &cobra.Command{
		Use:   "logs ID",
		Short: "Show what happened to a sandbox, and what its commands write",
		Long: "Show what happened to a sandbox. With -f it goes on, and shows what the commands that run in it write from now on: those\n" +
			"of `cove exec -d`, of shells, and whatever else was started as a command, until the sandbox ends.\n\n" +
			"Output is not kept: what was written before nobody can show any more. Cells of a kernel tell their output to whoever\n" +
			"runs them only. Listening to a command counts as use of the sandbox.",
		Example:           "  cove exec -d sbabc -- python3 -m http.server\n  cove logs -f sbabc",
		Args:              exactArgs(1, "one sandbox"),
		ValidArgsFunction: a.completeIDs(1),
		RunE: func(c *cobra.Command, args []string) error {
			cl, sb, err := a.target(c.Context(), args[0])
			if err != nil {
				return err
			}
			l := &logger{a: a, sb: sb, joined: map[string]bool{}}
			last, err := a.past(c.Context(), cl, sb.ID, 0, l.event)
			if err != nil || !follow || l.over {
				return err
			}
			return l.follow(c.Context(), cl, last)
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "go on, with what commands write from now on")
	return c
}

// logLine is one thing that a log tells: something that happened to the sandbox, or something that a command did.
type logLine struct {
	At time.Time `json:"at"`
	// Type is that of a lifecycle event, or stdout, stderr and exited of a command.
	Type     string    `json:"type"`
	Process  string    `json:"process,omitempty"`
	Command  []string  `json:"command,omitempty"`
	Text     string    `json:"text,omitempty"`
	Deadline time.Time `json:"deadline,omitzero"`
	Cause    string    `json:"cause,omitempty"`
	Message  string    `json:"message,omitempty"`
}

// logger shows one sandbox.
type logger struct {
	a      *invocation
	sb     *client.Sandbox
	over   bool // it has ended
	joined map[string]bool

	mu sync.Mutex // held for one line
}

func (l *logger) tell(line logLine, text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.a.json {
		return l.a.line(line)
	}
	_, err := fmt.Fprintln(l.a.Out, text)
	return err
}

func (l *logger) event(e client.LifecycleEvent) error {
	l.over = l.over || e.Type == "ended"
	colour := inColour(l.a.Out)
	return l.tell(logLine{At: e.At, Type: e.Type, Deadline: e.Deadline, Cause: e.Cause, Message: e.Message},
		paint(e.At.Local().Format(time.DateTime), dim, colour)+"  "+eventText(&e, colour))
}

// follow goes on until the sandbox ends. What its commands wrote last may be on its way then, and is waited for.
func (l *logger) follow(ctx context.Context, cl *client.Client, last int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	looking, stop := context.WithCancel(ctx)
	var listening sync.WaitGroup
	defer listening.Wait()
	defer stop()
	listening.Go(func() { l.look(ctx, looking, &listening) })
	for e, err := range cl.Events(ctx, client.EventsRequest{Sandbox: l.sb.ID, After: last, Follow: true}) {
		if err == nil {
			err = l.event(e)
		}
		if err != nil {
			cancel()
			return err
		}
		if l.over {
			return nil
		}
	}
	cancel()
	return errStopped
}

const lookEvery = time.Second

// look joins commands as they start. To ask for them counts as use, so it asks only when somebody else used the sandbox.
func (l *logger) look(ctx, looking context.Context, listening *sync.WaitGroup) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var seen time.Time
	for {
		now := *l.sb
		if err := now.Refresh(looking); err == nil && now.State == "running" && now.LastUsed.After(seen) {
			if list, err := l.sb.Processes(looking); err == nil {
				for _, p := range list {
					if !l.joined[p.ID] {
						l.joined[p.ID] = true
						listening.Go(func() { l.listen(ctx, p) })
					}
				}
			}
			if now.Refresh(looking) == nil {
				seen = now.LastUsed
			}
		}
		select {
		case <-tick.C:
		case <-looking.Done():
			return
		}
	}
}

// longestLine is what is shown as a line though its end has not come.
const longestLine = 64 << 10

// listen shows what one command writes, in whole lines.
func (l *logger) listen(ctx context.Context, p client.Process) {
	session, err := l.sb.Attach(ctx, p.ID)
	if err != nil {
		return // it has ended meanwhile
	}
	defer session.Close()
	rest := map[client.EventType][]byte{}
	write := func(kind client.EventType, text string) {
		text = strings.TrimRight(text, "\r")
		_ = l.tell(logLine{At: time.Now(), Type: string(kind), Process: p.ID, Command: p.Argv, Text: text}, l.label(p)+text)
	}
	for e, err := range session.Events() {
		switch {
		case err != nil || e.Type == client.EventEnd:
			for kind, text := range rest {
				if len(text) > 0 {
					write(kind, string(text))
				}
			}
			if err == nil {
				message := cmp.Or(e.End.Message, "exited with status 0")
				_ = l.tell(logLine{At: time.Now(), Type: "exited", Process: p.ID, Command: p.Argv, Message: message}, l.label(p)+message)
			}
			return
		case e.Type == client.EventStdout || e.Type == client.EventStderr:
			text := slices.Concat(rest[e.Type], e.Data())
			for {
				line, more, ok := bytes.Cut(text, []byte("\n"))
				if !ok && len(text) < longestLine {
					break
				}
				write(e.Type, string(line))
				text = more
			}
			rest[e.Type] = text
		}
	}
}

// label says which command a line is of.
func (l *logger) label(p client.Process) string {
	name := cmp.Or(p.Tag, path.Base(p.Argv[0]))
	return paint(fmt.Sprintf("%s[%d]", clean(name), p.PID), cyan, inColour(l.a.Out)) + " │ "
}
