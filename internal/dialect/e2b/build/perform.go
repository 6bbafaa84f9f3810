package build

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// What a failure can be blamed on, besides a step's number.
const (
	stepBase     = "base"
	stepFinalize = "finalize"
)

// settleFor bounds what is written down when a build has ended, however it did.
const settleFor = 30 * time.Second

// stepError is a failure and what the SDK blames for it: it shows the user's own line.
type stepError struct {
	step string
	err  error
}

func (e *stepError) Error() string { return "step " + e.step + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

func blame(step string, err error) error {
	var known *stepError
	if err == nil || errors.As(err, &known) {
		return err
	}
	return &stepError{step, err}
}

// result is what a build has made.
type result struct {
	domain  string
	setting setting
	limits  template.Limits
	start   *Start
}

// perform runs one build from beginning to end.
func (b *Builder) perform(j *job) {
	defer b.queue.done(j)
	ctx, cancel := context.WithTimeoutCause(j.ctx, b.cfg.Lifetime,
		fault.New(fault.Timeout, "the build took longer than %v and was ended", b.cfg.Lifetime))
	defer cancel()
	m, err := j.shelf.changeBuild(ctx, j.build, func(m *made) error {
		m.Status = StatusBuilding
		return nil
	})
	var r *result
	if err == nil {
		r, err = b.make(ctx, j, m.Limits)
	}
	if err != nil && ctx.Err() != nil {
		cause := context.Cause(ctx)
		if errors.Is(cause, context.Canceled) {
			cause = errShutdown
		}
		err = &stepError{stepOf(err), cause}
	}
	b.end(j, r, err)
}

func stepOf(err error) string {
	var s *stepError
	if errors.As(err, &s) {
		return s.step
	}
	return stepFinalize
}

// end writes down how a build ended.
func (b *Builder) end(j *job, r *result, err error) {
	defer j.cancel(nil)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(j.ctx), settleFor)
	defer cancel()
	if err != nil && fault.KindOf(err) == fault.Internal {
		b.log.Error("template build failed", "template", j.template, "build", j.build, "tenant", j.who.Tenant, "error", err)
	}
	if err == nil {
		j.book.say(levelInfo, stepFinalize, "Build finished, took "+j.book.took())
	} else {
		j.book.say(levelError, stepOf(err), "Build failed: "+fault.Message(err))
	}
	if saveErr := b.record(ctx, j, r, err); saveErr != nil {
		if r != nil { // the template was deleted meanwhile, or nobody would ever find it
			b.discard(ctx, j.who, j.shelf, r.domain)
		}
		if !fault.Is(saveErr, fault.NotFound) {
			b.log.Error("record a template build", "template", j.template, "build", j.build, "tenant", j.who.Tenant, "error", saveErr)
		}
	}
	b.shelve(j.build)
	b.retryDoomed(ctx, j.who, j.shelf)
}

// record makes a build what it has become, and keeps its log.
func (b *Builder) record(ctx context.Context, j *job, r *result, err error) error {
	var saveErr error
	if err != nil {
		_, saveErr = j.shelf.changeBuild(ctx, j.build, func(m *made) error {
			m.fail(err)
			return nil
		})
	} else {
		var orphans []string
		orphans, saveErr = j.shelf.complete(ctx, j.build, func(m *made) {
			m.Finished, m.Domain, m.Setting, m.Limits, m.Start = now(), r.domain, r.setting, r.limits, r.start
		})
		b.discard(ctx, j.who, j.shelf, orphans...)
	}
	if saveErr != nil {
		return saveErr
	}
	log := j.book.tail()
	if err := put(ctx, j.shelf, kindLog, j.build, &log); err != nil { // the build is good without
		b.log.Warn("keep the log of a template build", "build", j.build, "tenant", j.who.Tenant, "error", err)
	}
	return nil
}

// make runs the steps in a sandbox and makes a template of what became of it.
func (b *Builder) make(ctx context.Context, j *job, limits template.Limits) (*result, error) {
	from, site, keys, done, err := b.begin(ctx, j, limits)
	if err != nil {
		return nil, blame(stepBase, err)
	}
	defer b.kill(j.who, site.id)
	total := len(j.want.Steps)
	if done > 0 {
		j.book.say(levelInfo, stepBase, "CACHED [base] FROM "+from.name)
	} else {
		j.book.say(levelInfo, stepBase, "[base] FROM "+from.name)
	}
	for i, s := range j.want.Steps[:done] {
		j.book.say(levelInfo, strconv.Itoa(i+1), fmt.Sprintf("CACHED [builder %d/%d] %s", i+1, total, s))
	}

	if err := b.walk(ctx, j, site, keys, done); err != nil {
		return nil, err
	}
	r, err := b.finish(ctx, j, site, from.start)
	return r, blame(stepFinalize, err)
}

// begin opens a sandbox of what saves the most steps, and tells how many. Another build may replace that meanwhile, with the
// same steps or as the base: then it looks again.
func (b *Builder) begin(ctx context.Context, j *job, limits template.Limits) (from base, s *site, keys []string, done int, err error) {
	for last := ""; ; {
		from, err = b.baseOf(ctx, j)
		if err == nil {
			from, err = b.prepare(ctx, j, from)
		}
		if err != nil {
			return from, nil, nil, 0, err
		}
		keys = chain(from, j.want.Steps)
		start, setting := from.domain, from.setting
		var at *layer
		if done, at = b.cached(ctx, j, from, keys); at != nil {
			start, setting = at.Domain, at.Setting
		}
		s, err = b.open(ctx, j, start, limits)
		if fault.Is(err, fault.NotFound) && start != last {
			last = start
			continue
		}
		if err != nil {
			return from, nil, nil, 0, err
		}
		s.setting = setting.clone()
		return from, s, keys, done, nil
	}
}

// String is a step as the log shows it.
func (s step) String() string {
	args := s.Args
	if s.Type == stepRun && len(args) > 1 {
		args = args[:1]
	}
	text := strings.TrimSpace(s.Type + " " + strings.Join(args, " "))
	if len(text) > 500 {
		text = text[:500] + "…"
	}
	return text
}

// slowEnough is how long steps must have taken together for what they did to be worth keeping before the last step: keeping
// it takes half of that, and as much disk as the sandbox has used.
const slowEnough = 100 * time.Millisecond

// walk runs the steps that are not cached and keeps layers where that is worth it.
func (b *Builder) walk(ctx context.Context, j *job, s *site, keys []string, done int) error {
	var since time.Duration
	for i, step := range j.want.Steps {
		if i < done {
			continue
		}
		name := strconv.Itoa(i + 1)
		s.step, s.prefix = name, fmt.Sprintf("[builder %d/%d]", i+1, len(j.want.Steps))
		j.book.say(levelInfo, name, s.prefix+" "+step.String())
		begun := time.Now()
		if err := b.do(ctx, s, step); err != nil {
			return blame(name, s.explain(ctx, err))
		}
		since += time.Since(begun)
		last := i == len(j.want.Steps)-1
		if last || step.Type == stepRun && since > slowEnough {
			b.keepLayer(ctx, j, s, keys[i])
			since = 0
		}
	}
	return nil
}

// open makes the sandbox of a build.
func (b *Builder) open(ctx context.Context, j *job, from string, limits template.Limits) (*site, error) {
	spec := sandbox.Spec{
		Template: from, Lifetime: b.cfg.Lifetime, IdleTimeout: -1, Limits: limits, Annotations: map[string]string{Annotation: j.build},
	}
	sb, _, err := b.sandboxes.Create(ctx, j.who, spec)
	if fault.Is(err, fault.Invalid) && limits.DiskBytes != 0 { // more disk is given where it can be
		spec.Limits.DiskBytes = 0
		sb, _, err = b.sandboxes.Create(ctx, j.who, spec)
	}
	if err != nil {
		return nil, err
	}
	s := &site{b: b, who: j.who, id: sb.ID, limits: sb.Limits, book: j.book, step: stepBase, prefix: "[base]"}
	if s.agent, err = b.sandboxes.Agent(ctx, j.who, sb.ID); err != nil {
		b.kill(j.who, sb.ID)
		return nil, err
	}
	return s, nil
}
