package build

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// maxStepTime is how long one command of a build may take.
const maxStepTime = time.Hour

// site is the sandbox in which a template is built, and what its steps have decided so far.
type site struct {
	b       *Builder
	who     auth.Principal
	id      string
	limits  template.Limits
	agent   *agentapi.Client
	book    *book
	setting setting

	step, prefix string            // for the log
	environ      map[string]string // of the sandbox itself; nil: not asked for yet
}

// explain gives the failure of a sandbox that has ended its cause.
func (s *site) explain(ctx context.Context, err error) error {
	var f *fault.Error
	if errors.As(err, &f) && f.Kind == fault.Invalid {
		return err
	}
	return s.b.sandboxes.Explain(ctx, s.who, s.id, err)
}

// command is one process of a build.
type command struct {
	argv    []string
	instead string // the program where there is no argv[0]
	as      setting
	stdin   []byte
	loud    bool // its output goes to the log
}

// outcome is how a command ended.
type outcome struct {
	end    agentapi.End
	stdout []byte // of a command that is not loud, as far as it is kept
	stderr []byte
}

// keptOutput bounds what is kept of a quiet command's output.
const keptOutput = 256 << 10

// run runs a command to its end.
func (s *site) run(ctx context.Context, c command) (outcome, error) {
	stream, err := s.b.sandboxes.Exec(ctx, s.who, s.id, agentapi.ExecParams{
		Argv: c.argv, Instead: c.instead, Env: c.as.Env, Cwd: c.as.Workdir, User: c.as.User, Stdin: c.stdin != nil,
		TimeoutMS: maxStepTime.Milliseconds(), Disconnect: agentapi.DisconnectKill,
	})
	if err != nil {
		return outcome{}, err
	}
	defer stream.Close()
	if c.stdin != nil {
		fed := make(chan struct{})
		go func() { // ends with the stream at the latest
			defer close(fed)
			if stream.Stdin(c.stdin) == nil {
				_ = stream.CloseStdin() // a process that has ended needs no end of its input
			}
		}()
		defer func() { stream.Close(); <-fed }()
	}
	return s.listen(stream, c.loud)
}

// listen follows a command to its end.
func (s *site) listen(stream *agentapi.Stream, loud bool) (out outcome, err error) {
	lines := map[agentapi.EventType]*splitter{}
	for _, name := range []agentapi.EventType{agentapi.EventStdout, agentapi.EventStderr} {
		lines[name] = &splitter{line: func(text string) { s.book.output(s.step, fmt.Sprintf("%s [%s]: %s", s.prefix, name, text)) }}
	}
	for e, err := range stream.Events() {
		if err != nil {
			return out, err
		}
		switch e.Type {
		case agentapi.EventStdout, agentapi.EventStderr:
			if loud {
				lines[e.Type].write(e.Data)
			} else {
				out.keep(e)
			}
		case agentapi.EventEnd:
			lines[agentapi.EventStdout].flush()
			lines[agentapi.EventStderr].flush()
			out.end = *e.End
			return out, nil
		}
	}
	return out, errors.New("a command's stream ended without an end")
}

func (o *outcome) keep(e agentapi.Event) {
	into := &o.stdout
	if e.Type == agentapi.EventStderr {
		into = &o.stderr
	}
	*into = append(*into, e.Data[:min(len(e.Data), max(0, keptOutput-len(*into)))]...)
}

// failure is why a command did not succeed, in the words of E2B's own builds; nil: it did.
func (o outcome) failure() error {
	switch {
	case o.end.Outcome == agentapi.OutcomeOK:
		return nil
	case o.end.Outcome == agentapi.OutcomeError && o.end.Signal == "":
		return fault.New(fault.Invalid, "exit status %d", o.end.ExitCode)
	case o.end.Outcome == agentapi.OutcomeOOM:
		return fault.New(fault.Invalid, "it was killed for lack of memory; give the template more memoryMB")
	case o.end.Outcome == agentapi.OutcomeTimeout:
		return fault.New(fault.Invalid, "it took longer than %v", maxStepTime)
	case o.end.Signal != "":
		return fault.New(fault.Invalid, "it was ended by %s", o.end.Signal)
	case o.end.Message != "":
		return fault.New(fault.Invalid, "%s", o.end.Message)
	}
	return fault.New(fault.Invalid, "exit status %d", o.end.ExitCode)
}

// The shells of a sandbox: commands are run by the first, as in E2B's own templates, or by the second where that is all there is.
const (
	bash = "/bin/bash"
	sh   = "/bin/sh"
)

// shellPath is the shell that commands are run by; empty: an image of programs alone has none.
func (s *site) shellPath(ctx context.Context) (string, error) {
	for _, shell := range []string{bash, sh} {
		e, err := s.agent.Stat(ctx, agentapi.PathParams{Path: shell, User: "root"})
		switch {
		case err == nil && (e.Type != agentapi.EntrySymlink || e.Link != nil):
			return shell, nil
		case err != nil && !fault.Is(err, fault.NotFound):
			return "", err
		}
	}
	return "", nil
}

// needShell refuses what an image without a shell cannot do.
func (s *site) needShell(ctx context.Context) error {
	shell, err := s.shellPath(ctx)
	if err != nil || shell != "" {
		return err
	}
	return fault.New(fault.Invalid, "the image has neither %s nor %s, which commands and hard links need; start from an image that has one of them, "+
		"such as Debian or Alpine, or do without those", bash, sh)
}

// root runs one of our own scripts as root, quietly; what it writes to stderr says why it failed.
func (s *site) root(ctx context.Context, stdin []byte, script string, args ...string) error {
	out, err := s.run(ctx, command{
		argv: append([]string{sh, "-c", script, "cove"}, args...), instead: bash, as: setting{User: "root", Workdir: "/"}, stdin: stdin,
	})
	if err != nil {
		return err
	}
	if err := out.failure(); err != nil {
		if why := strings.TrimSpace(string(out.stderr)); why != "" {
			return fault.New(fault.Invalid, "%s", tidy(why))
		}
		return err
	}
	return nil
}

// variables is the environment that the next command will see, as far as it can be known.
func (s *site) variables(ctx context.Context) (map[string]string, error) {
	if s.environ == nil {
		who, err := s.agent.Account(ctx, agentapi.AccountParams{User: s.setting.User})
		if err != nil {
			return nil, err
		}
		s.environ = who.Environ
	}
	all := map[string]string{}
	maps.Copy(all, s.environ)
	maps.Copy(all, s.setting.Env)
	return all, nil
}
