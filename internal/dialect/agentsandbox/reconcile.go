package agentsandbox

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// pass is one look at a claim and its Sandbox, and what is done about them.
type pass struct {
	*API
	ctx      context.Context
	key      key
	who      auth.Principal
	realm    *realm
	claim    *object // nil: there is none, and the Sandbox stands for itself
	box      *object // nil: there is none yet
	attempts *int
}

// missingAgain is how often a claim is tried again that names what is not there.
const missingAgain = time.Minute

// retryMost is the longest pause before another attempt.
const retryMost = 30 * time.Second

// reconcile brings a name's sandbox to what its objects say, and tells when to look again.
func (a *API) reconcile(ctx context.Context, k key, attempts *int) time.Duration {
	p := a.passOf(ctx, k, attempts)
	if p.realm.unreadable(path{k.namespace, k.name}) {
		return never // nobody knows what it should be, so nothing is ended
	}
	if p.claim == nil {
		switch {
		case p.box == nil:
			return never
		case text(controller(p.box), "kind") == claimKind.name: // whose deletion a server did not live to complete
			return p.removeBox()
		}
		return p.runBox()
	}
	return p.runClaim()
}

func (a *API) passOf(ctx context.Context, k key, attempts *int) *pass {
	r := a.store.realm(k.tenant)
	return &pass{
		API: a, ctx: ctx, key: k, who: auth.Principal{Tenant: k.tenant}, realm: r, attempts: attempts,
		claim: r.get(claimKind, k.namespace, k.name), box: r.get(sandboxKind, k.namespace, k.name),
	}
}

// confess says on the objects that this server could not see to them.
func (p *pass) confess() {
	const message = "internal error: the server's log says more; it is tried again"
	p.say(false, []condition{{"Ready", whyReconciler, message, false}, {"Suspended", whyNotSuspended, "", false}})
	switch {
	case p.claim == nil:
	case p.box == nil:
		p.fail(whyReconciler, message)
	case p.box.ownedBy(p.claim.uid()):
		p.mirror()
	}
}

// runClaim sees to a claim, and through it to its Sandbox.
func (p *pass) runClaim() time.Duration {
	spec := readSpec[claimSpec](p.claim)
	left, over := p.claimLeft(spec)
	switch {
	case over:
		return p.expireClaim(spec)
	case p.box == nil && text(p.claim.status(), "sandbox", "name") != "":
		return p.fail(whyMissing, "the Sandbox %q was deleted", p.key.name)
	case p.box == nil:
		if again, ok := p.adopt(spec); !ok {
			return sooner(again, left)
		}
	case !p.box.ownedBy(p.claim.uid()):
		return p.fail(whyAdoption, "there is another Sandbox %q, which this claim does not own", p.key.name)
	}
	again := p.runBox()
	if p.box == nil { // it was deleted meanwhile
		return 0
	}
	p.mirror()
	left, over = p.claimLeft(spec)
	if over {
		left = 0
	}
	return sooner(again, left)
}

func sooner(a, b time.Duration) time.Duration {
	if a == never || b != never && b < a {
		return b
	}
	return a
}

// claimLeft is how long a claim has left; over: nothing.
func (p *pass) claimLeft(spec claimSpec) (left time.Duration, over bool) {
	left = never
	if t := spec.Lifecycle.ShutdownTime; t != nil {
		left = time.Until(*t)
		if left <= 0 {
			return 0, true
		}
	}
	if done := p.claim.condition("Finished"); spec.Lifecycle.TTL != nil && text(done, "status") == "True" {
		ttl := time.Until(parseTime(text(done, "lastTransitionTime")).Add(time.Duration(min(*spec.Lifecycle.TTL, 1<<30)) * time.Second))
		if ttl <= 0 {
			return 0, true
		}
		left = sooner(left, ttl)
	}
	return left, false
}

// expireClaim ends a claim whose time has come, as it says itself.
func (p *pass) expireClaim(spec claimSpec) time.Duration {
	if p.box != nil && p.box.ownedBy(p.claim.uid()) {
		if again := p.removeBox(); p.box != nil {
			return again
		}
	}
	if policy := spec.Lifecycle.ShutdownPolicy; policy == policyDelete || policy == policyForeground {
		again, _ := p.remove(p.claim)
		return again
	}
	return p.fail(whyClaimExpired, "the claim has expired")
}

func sameUID(of *object) func(*object) error {
	return func(o *object) error {
		if o.uid() != of.uid() {
			return notFound(o.kind, o.name())
		}
		return nil
	}
}

// removeBox takes the Sandbox away, and with it its sandbox. It stays if that cannot be written, and is tried again.
func (p *pass) removeBox() time.Duration {
	again, ok := p.remove(p.box)
	if ok {
		p.end(p.key.tenant, p.box.id)
		p.box = nil
	}
	return again
}

// remove takes away an object of this name; ok: it is not there any more.
func (p *pass) remove(o *object) (again time.Duration, ok bool) {
	_, err := p.realm.remove(p.ctx, o.kind, p.key.namespace, p.key.name, sameUID(o))
	switch {
	case err == nil || isGone(err):
		return never, true
	case p.ctx.Err() != nil:
		return never, false // whoever interrupted it has woken it
	}
	p.notKept(p.key.tenant, err)
	return p.pause(), false
}

// isGone tells whether an object was not there.
func isGone(err error) bool {
	var r *refusal
	return errors.As(err, &r) && r.code == http.StatusNotFound
}

// notKept tells the operator of a change that was not written. One of an object that is gone meanwhile is none.
func (a *API) notKept(tenant string, err error) {
	if err == nil || isGone(err) || a.life.Err() != nil {
		return
	}
	a.log.Warn("object is not kept as it is shown", "tenant", tenant, "error", err)
}

// fail says on the claim why it has no sandbox.
func (p *pass) fail(reason, format string, args ...any) time.Duration {
	all := []condition{{"Ready", reason, fault.Message(fault.New(fault.Invalid, format, args...)), false}}
	_, err := p.realm.show(p.ctx, claimKind, p.key.namespace, p.key.name, p.claim.uid(), func(o *object) *object {
		s := fields{"conditions": conditions(o, time.Now(), all...)}
		if same(s, o.status()) {
			return o
		}
		c := o.change()
		c.set("status", s)
		return c
	})
	p.notKept(p.key.tenant, err)
	switch reason {
	case whyNoTemplate, whyNoPool:
		return missingAgain
	}
	return never
}

// mirror shows on a claim what its Sandbox has come to: name, addresses and readiness at once.
func (p *pass) mirror() {
	var all []condition
	for _, name := range []string{"Ready", "Finished"} {
		if c := p.box.condition(name); c != nil {
			all = append(all, condition{name, text(c, "reason"), text(c, "message"), text(c, "status") == "True"})
		}
	}
	if len(all) == 0 || !p.box.born && all[0].reason == whyNotReady && all[0].message == messagePending {
		return // it will be ready in a moment, and then everything is told at once
	}
	o, err := p.realm.show(p.ctx, claimKind, p.key.namespace, p.key.name, p.claim.uid(), func(o *object) *object {
		at := fields{"name": p.box.name()}
		if ips := list(p.box.status(), "podIPs"); len(ips) > 0 {
			at["podIPs"] = ips
		}
		s := fields{"conditions": conditions(o, time.Now(), all...), "sandbox": at}
		if same(s, o.status()) {
			return o
		}
		c := o.change()
		c.set("status", s)
		return c
	})
	p.notKept(p.key.tenant, err)
	if o != nil {
		p.claim = o
	}
}

// runBox brings the sandbox of a Sandbox to what it says.
func (p *pass) runBox() time.Duration {
	spec := readSpec[sandboxSpec](p.box)
	left := never
	if spec.ShutdownTime != nil {
		if left = time.Until(*spec.ShutdownTime); left <= 0 {
			return p.expireBox(spec)
		}
	}
	sb, err := p.sandboxes.Get(p.ctx, p.who, p.box.id)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return sooner(left, p.later(err))
	}
	var again time.Duration
	switch {
	case err != nil && p.box.born:
		again = p.say(false, finished(sandbox.Sandbox{Cause: "unknown"}))
	case err != nil || !p.box.born && sb.State == sandbox.StateEnded && sb.Cause == sandbox.CauseStartFail:
		again = p.start(spec)
	default:
		again = p.follow(spec, sb)
	}
	return sooner(left, again)
}

// expireBox ends the sandbox of a Sandbox whose time has come.
func (p *pass) expireBox(spec sandboxSpec) time.Duration {
	if spec.ShutdownPolicy == policyDelete {
		return p.removeBox()
	}
	p.end(p.key.tenant, p.box.id)
	return p.say(false, expired())
}

// follow acts on the state of a sandbox that there is.
func (p *pass) follow(spec sandboxSpec, sb sandbox.Sandbox) time.Duration {
	switch sb.State {
	case sandbox.StateStarting, sandbox.StateStopping:
		return p.pause() // whoever starts or ends it is about to be done
	case sandbox.StateRunning:
		if spec.suspended() {
			return p.suspend()
		}
		return p.keep(spec, sb)
	case sandbox.StatePaused:
		if p.box.held && !spec.suspended() {
			return p.resume(spec)
		}
		message := messageSuspended
		if !spec.suspended() {
			message = "Sandbox was paused by somebody else; it is resumed as it was paused"
		}
		return p.say(false, suspended(message))
	case sandbox.StateEnded:
		if sb.Cause == sandbox.CauseExpired {
			return p.say(false, expired())
		}
		return p.say(false, finished(sb))
	}
	return never
}

// keep sees that a sandbox that runs is ready, and lives for as long as its objects say.
func (p *pass) keep(spec sandboxSpec, sb sandbox.Sandbox) time.Duration {
	lifetime := p.lifetime(spec)
	deadline := time.Time{}
	if lifetime > 0 {
		deadline = time.Now().Add(lifetime)
	}
	if gap := deadline.Sub(sb.Deadline); lifetime > 0 && lifetime < p.cfg.MaxLifetime && gap.Abs() > time.Second || p.cfg.MaxLifetime == 0 && gap.Abs() > time.Second {
		if _, err := p.sandboxes.SetLifetime(p.ctx, p.who, sb.ID, lifetime); err != nil {
			return p.later(err)
		}
	}
	if p.box.ready() {
		return p.say(true, running())
	}
	return p.prepare()
}

// prepare makes a sandbox ready for those who use it as soon as they hear so.
func (p *pass) prepare() time.Duration {
	if p.box == nil {
		return never // it was deleted a moment ago, and whoever did that has ended the sandbox
	}
	if err := p.runtime.Prepare(p.ctx, p.who, p.box.id); err != nil {
		return p.later(err)
	}
	*p.attempts = 0
	return p.say(true, running())
}

func (p *pass) suspend() time.Duration {
	if _, err := p.sandboxes.Pause(p.ctx, p.who, p.box.id, sandbox.PauseSpec{Cold: true}); err != nil {
		if fault.Is(err, fault.Unsupported) {
			all := running()
			all[1] = condition{"Suspended", whyCannotSuspend, fault.Message(err), false}
			return p.say(true, all)
		}
		return p.later(err)
	}
	p.hold(true)
	return p.say(false, suspended(messageSuspended))
}

func (p *pass) resume(spec sandboxSpec) time.Duration {
	if _, err := p.sandboxes.Resume(p.ctx, p.who, p.box.id, p.lifetime(spec)); err != nil {
		return p.later(err)
	}
	p.hold(false)
	return p.prepare()
}

// hold notes whether we have paused the sandbox: what others pause is theirs to resume.
func (p *pass) hold(held bool) {
	p.box = p.shown(func(o *object) *object {
		c := o.change()
		c.held = held
		return c
	})
}

// say shows what a Sandbox has come to.
func (p *pass) say(up bool, all []condition) time.Duration {
	p.box = p.shown(func(o *object) *object {
		s := boxStatus(o, up, all...)
		if same(s, o.status()) && (o.born || !up) {
			return o
		}
		c := o.change()
		c.born = c.born || up
		c.set("status", s)
		return c
	})
	return never
}

// shown changes the Sandbox; nil: it is gone.
func (p *pass) shown(change func(*object) *object) *object {
	if p.box == nil {
		return nil
	}
	o, err := p.realm.show(p.ctx, sandboxKind, p.key.namespace, p.key.name, p.box.uid(), change)
	p.notKept(p.key.tenant, err)
	return o
}

// later is when something that went wrong is tried again; meanwhile the Sandbox says what it was.
func (p *pass) later(err error) time.Duration {
	if p.ctx.Err() != nil {
		return never // whoever interrupted it has woken it
	}
	if fault.KindOf(err) == fault.Internal {
		p.log.Error("sandbox is not as its object says", "tenant", p.key.tenant, "namespace", p.key.namespace, "name", p.key.name, "error", err)
	}
	p.say(false, pending(fault.Message(err)))
	return p.pause()
}

// pause grows with each attempt.
func (p *pass) pause() time.Duration {
	d := min(p.cfg.RetryAfter<<min(*p.attempts, 10), retryMost)
	*p.attempts++
	return d
}
