package build

import (
	"cmp"
	"context"
	"errors"
	"regexp"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// How a template's ready command is asked: E2B asks every two seconds, and nobody needs to wait for that when it is quick.
const (
	readyFirst   = 100 * time.Millisecond
	readyEvery   = 2 * time.Second
	readyFor     = 10 * time.Minute
	readyDefault = "sleep 20" // of a template that has a start command only
	stopFor      = 5 * time.Second
)

// startTag names the start command among the processes of a build.
const startTag = "e2b-start"

// shared are the directories in which everybody may install programs, as in E2B's own templates.
var shared = []string{"/usr/local", "/code"}

// lastTouch opens what is below them. Only directories change: files would be copied.
const lastTouch = `command -v find > /dev/null || exit 0
find "$@" -xdev -type d ! -perm -777 -exec chmod 777 {} +`

// finish starts what the template starts, and makes it a template of the domain.
func (b *Builder) finish(ctx context.Context, j *job, s *site, inherited *Start) (*result, error) {
	s.step, s.prefix = stepFinalize, "[finalize]"
	j.book.say(levelInfo, stepFinalize, "Finalizing template build")
	if err := s.mark(ctx, j); err != nil {
		return nil, s.explain(ctx, err)
	}
	start := s.start(j.want, inherited)
	if err := s.rehearse(ctx, start); err != nil {
		return nil, s.explain(ctx, err)
	}
	name := hiddenBuild + strings.ReplaceAll(j.build, "-", "")
	_, err := b.sandboxes.SnapshotAs(ctx, j.who, s.id, sandbox.SnapshotSpec{
		Name: name, Description: "template " + j.alias, Env: s.setting.Env, User: s.setting.User, Workdir: s.setting.Workdir,
	})
	if err != nil {
		return nil, err
	}
	if _, err := b.templates.Resolve(ctx, j.who.Tenant, name); err != nil {
		b.discard(context.WithoutCancel(ctx), j.who, j.shelf, name)
		return nil, fault.Wrap(fault.Unavailable, err, "the template was made, and this server may not look where it is; its operator can tell why")
	}
	if start != nil && justWaits(start.Ready) {
		start.Ready = ""
	}
	if start != nil && start.Command == "" {
		start = nil
	}
	return &result{domain: name, setting: s.setting.clone(), limits: s.limits, start: start}, nil
}

// mark leaves in the template what E2B's own leave there.
func (s *site) mark(ctx context.Context, j *job) error {
	text := "ENV_ID=" + j.template + "\nTEMPLATE_ID=" + j.template + "\nBUILD_ID=" + j.build + "\n"
	if _, err := s.agent.Write(ctx, agentapi.WriteParams{Path: "/.e2b", User: "root", Mode: 0o644}, strings.NewReader(text)); err != nil {
		return err
	}
	open := uint32(0o777)
	for _, dir := range shared {
		if err := s.makeDir(ctx, dir, "root"); err != nil {
			return err
		}
		if _, err := s.agent.Chmod(ctx, agentapi.ChmodParams{Path: dir, User: "root", Mode: &open}); err != nil {
			return err
		}
	}
	if shell, err := s.shellPath(ctx); shell == "" || err != nil {
		return err
	}
	return s.root(ctx, nil, lastTouch, shared...)
}

// start is what the request wants to be running, or what its base starts; nil: nothing.
func (s *site) start(want startRequest, inherited *Start) *Start {
	if want.StartCmd == "" && want.ReadyCmd == "" {
		if inherited == nil {
			return nil
		}
		start := *inherited
		return &start
	}
	ready := want.ReadyCmd
	if ready == "" {
		ready = readyDefault
	}
	set := s.setting.clone()
	return &Start{Command: want.StartCmd, Ready: ready, Env: set.Env, User: set.User, Workdir: set.Workdir}
}

var sleeps = regexp.MustCompile(`^\s*sleep\s+[0-9.]+\s*$`)

// justWaits tells a ready command that only lets time pass. A build waits for it; every sandbox would for nothing.
func justWaits(text string) bool { return sleeps.MatchString(text) }

// rehearse starts the template's process and waits until it is ready, so that a template that cannot start is not made. The
// process is ended again: what a sandbox starts from are files.
func (s *site) rehearse(ctx context.Context, start *Start) error {
	if start == nil {
		return nil
	}
	if err := s.needShell(ctx); err != nil {
		return err
	}
	as := setting{Env: start.Env, User: start.User, Workdir: start.Workdir}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	defer func() { cancel(nil); <-ended }()
	if start.Command == "" {
		close(ended)
		return s.awaitReady(ctx, start.Ready, as)
	}
	s.book.say(levelInfo, s.step, "Running start command")
	p, err := s.begin(ctx, start.Command, as)
	if err != nil {
		close(ended)
		return wrapStep(err, "failed to run start command '%.200s'", start.Command)
	}
	go func() {
		defer close(ended)
		if err := p.wait(s); err != nil {
			cancel(fault.Wrap(fault.Invalid, err, "failed to run start command '%.200s': %s", start.Command, fault.Message(err)))
		}
	}()
	err = s.awaitReady(ctx, start.Ready, as)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	p.stop(ctx, s, ended)
	return err
}

// process is a start command that runs.
type process struct{ stream *agentapi.Stream }

func (s *site) begin(ctx context.Context, text string, as setting) (*process, error) {
	stream, err := s.b.sandboxes.Exec(ctx, s.who, s.id, agentapi.ExecParams{
		Argv: []string{bash, "-l", "-c", text}, Instead: sh, Env: as.Env, Cwd: as.Workdir, User: as.User,
		Disconnect: agentapi.DisconnectKill, Tag: startTag,
	})
	if err != nil {
		return nil, err
	}
	return &process{stream}, nil
}

// wait follows the process to its end and tells why it failed, if it did.
func (p *process) wait(s *site) error {
	defer p.stream.Close()
	out, err := s.listen(p.stream, true)
	if err != nil {
		return nil // it was left, or the sandbox has ended, which the next call tells
	}
	return out.failure()
}

// stop asks the process to end, and ends it by leaving when it does not.
func (p *process) stop(ctx context.Context, s *site, ended <-chan struct{}) {
	err := s.agent.Signal(ctx, agentapi.SignalParams{Target: agentapi.Target{Tag: startTag}, Signal: "SIGTERM", Tree: true})
	if err == nil {
		timer := time.NewTimer(stopFor)
		defer timer.Stop()
		select {
		case <-ended:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	p.stream.Close()
}

// awaitReady asks the ready command until it succeeds.
func (s *site) awaitReady(ctx context.Context, text string, as setting) error {
	if text == "" {
		return nil
	}
	s.book.say(levelInfo, s.step, "Waiting for template to be ready: "+tidy(text))
	late := fault.New(fault.Invalid, "the template was not ready within %v: its ready command '%.200s' did not succeed", readyFor, text)
	ctx, cancel := context.WithTimeoutCause(ctx, readyFor, late)
	defer cancel()
	for pause := readyFirst; ; pause = min(2*pause, readyEvery) {
		err := s.shell(ctx, text, as)
		switch {
		case ctx.Err() != nil:
			return cmp.Or(context.Cause(ctx), ctx.Err())
		case err == nil:
			s.book.say(levelInfo, s.step, "Template is ready")
			return nil
		case !fault.Is(err, fault.Invalid):
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}
