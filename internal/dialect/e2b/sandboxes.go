package e2b

import (
	"cmp"
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func (a *API) get(c *call) error {
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	w, err := a.wireDetail(sb)
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, w)
}

func (a *API) kill(c *call) error {
	if _, err := a.find(c); err != nil { // who comes second is told so
		return err
	}
	if _, err := a.sandboxes.Kill(c.ctx(), c.who, c.id); err != nil {
		return err
	}
	return c.nothing()
}

// running refuses what is asked of a paused sandbox.
func (a *API) running(c *call) error {
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State == sandbox.StatePaused {
		return fault.New(fault.Conflict, "Sandbox %s is paused; connect to it first", c.id)
	}
	return nil
}

// Timeout is the body of POST …/timeout and, where it may be left out, of a connect.
type Timeout struct {
	Timeout *int32 `json:"timeout"`
	Memory  *bool  `json:"memory"` // of a connect: false starts it from its files alone
}

// seconds reads a timeout; more than a living sandbox may be given is cut.
func (a *API) seconds(n, least int32) (time.Duration, error) {
	if n < least {
		return 0, fault.New(fault.Invalid, "a timeout of %d seconds is too short; the least is %d", n, least)
	}
	return min(time.Duration(n)*time.Second, a.longest()), nil
}

// sane is the longest timeout where the server has no limit of its own.
const sane = 30 * 24 * time.Hour

func (a *API) longest() time.Duration { return cmp.Or(a.cfg.MaxLifetime, sane) }

func (a *API) setTimeout(c *call) error {
	var req Timeout
	if err := c.decode(&req); err != nil {
		return err
	}
	if req.Timeout == nil {
		return fault.New(fault.Invalid, "timeout is missing")
	}
	lifetime, err := a.seconds(*req.Timeout, 0)
	if err != nil {
		return err
	}
	if err := a.runs(c); err != nil {
		return err
	}

	if lifetime == 0 {
		_, err = a.sandboxes.Expire(c.ctx(), c.who, c.id)
	} else {
		_, err = a.sandboxes.SetLifetime(c.ctx(), c.who, c.id, lifetime)
	}
	if err != nil {
		return err
	}

	return c.nothing()
}

// runs is running in the words of E2B's keep-alives: to them a paused sandbox is not there.
func (a *API) runs(c *call) error {
	err := a.running(c)
	if fault.Is(err, fault.Conflict) {
		return fault.New(fault.NotFound, "Sandbox %s is not running anymore", c.id)
	}
	return err
}

// Refresh is the body of POST …/refreshes.
type Refresh struct {
	Duration int32 `json:"duration"`
}

const maxRefresh = 3600

func (a *API) refresh(c *call) error {
	req := Refresh{Duration: timeoutV1}
	if err := c.decode(&req); err != nil {
		return err
	}
	if req.Duration < 0 || req.Duration > maxRefresh {
		return fault.New(fault.Invalid, "duration: use 0 to %d seconds", maxRefresh)
	}
	lifetime, err := a.seconds(req.Duration, 0)
	if err != nil {
		return err
	}
	if err := a.runs(c); err != nil {
		return err
	}

	if lifetime > 0 {
		if _, err := a.sandboxes.ExtendLifetime(c.ctx(), c.who, c.id, lifetime); err != nil {
			return err
		}
	}

	return c.nothing()
}

// Pause is the body of POST …/pause.
type Pause struct {
	Memory  *bool `json:"memory"`
	Healthy bool  `json:"requireHealthyGuest"`
}

// answersFor bounds how long a sandbox may take to show that it is healthy.
const answersFor = 30 * time.Second

func (a *API) pause(c *call) error {
	var req Pause
	if err := c.decode(&req); err != nil {
		return err
	}
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State == sandbox.StatePaused {
		return fault.New(fault.Conflict, "Sandbox %s is already paused", c.id)
	}
	if req.Healthy {
		if err := a.healthy(c); err != nil {
			return err
		}
	}

	if _, err := a.sandboxes.Pause(c.ctx(), c.who, c.id, sandbox.PauseSpec{Cold: req.Memory != nil && !*req.Memory}); err != nil {
		return err
	}

	return c.nothing()
}

func (a *API) healthy(c *call) error {
	ctx, cancel := context.WithTimeout(c.ctx(), answersFor)
	defer cancel()
	agent, err := a.sandboxes.Agent(ctx, c.who, c.id)
	if err == nil {
		_, err = agent.Hello(ctx)
	}
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "Sandbox %s does not answer and was not paused", c.id)
	}
	return nil
}

// Resume is the body of POST …/resume. It may say autoPause, which was decided at the create.
type Resume struct {
	Timeout int32 `json:"timeout"`
	Memory  *bool `json:"memory"`
}

func (a *API) resume(c *call) error {
	req := Resume{Timeout: timeoutV1}
	if err := c.decode(&req); err != nil {
		return err
	}
	lifetime, err := a.seconds(req.Timeout, 1)
	if err != nil {
		return err
	}
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	if sb.State != sandbox.StatePaused {
		return fault.New(fault.Conflict, "Sandbox %s is already running", c.id)
	}

	sb, err = a.wake(c, sb, lifetime, req.Memory)
	if err != nil {
		return err
	}

	return a.answerSandbox(c, http.StatusCreated, sb)
}

// wake resumes a sandbox; without memory it loses what still runs in it. A pause that keeps only files ends that, so one
// follows the resume and is undone.
func (a *API) wake(c *call, sb sandbox.Sandbox, lifetime time.Duration, memory *bool) (sandbox.Sandbox, error) {
	cold := sb.Cold
	sb, err := a.sandboxes.Resume(c.ctx(), c.who, c.id, lifetime)
	if err != nil || cold || memory == nil || *memory {
		return sb, err
	}
	if _, err := a.sandboxes.Pause(c.ctx(), c.who, c.id, sandbox.PauseSpec{Cold: true}); err != nil {
		return sb, err
	}
	return a.sandboxes.Resume(c.ctx(), c.who, c.id, lifetime)
}

func (a *API) connectV1(c *call) error { return a.connect(c, nil) }

func (a *API) connectV2(c *call) error {
	timeout := int32(timeoutV2)
	return a.connect(c, &timeout)
}

func (a *API) connect(c *call, timeout *int32) error {
	req := Timeout{Timeout: timeout}
	if err := c.decode(&req); err != nil {
		return err
	}
	if req.Timeout == nil {
		return fault.New(fault.Invalid, "timeout is missing")
	}
	lifetime, err := a.seconds(*req.Timeout, 0)
	if err != nil {
		return err
	}
	lifetime = max(lifetime, time.Second) // nobody connects to end a sandbox
	sb, err := a.find(c)
	if err != nil {
		return err
	}

	sb, status, err := a.revive(c, sb, lifetime, req.Memory)
	if err != nil {
		return err
	}

	return a.answerSandbox(c, status, sb)
}

// revive gives a sandbox that runs more time and lets one that is paused run. Both wait for a change that goes on, after
// which it may be the other's turn.
func (a *API) revive(c *call, sb sandbox.Sandbox, lifetime time.Duration, memory *bool) (_ sandbox.Sandbox, status int, err error) {
	status = http.StatusOK
	if sb.State == sandbox.StateRunning {
		sb, err = a.sandboxes.ExtendLifetime(c.ctx(), c.who, c.id, lifetime)
		if fault.Is(err, fault.Conflict) || err == nil && sb.State == sandbox.StatePaused { // it was being paused
			sb, err = a.find(c)
		}
	}
	if err == nil && sb.State == sandbox.StatePaused {
		status = http.StatusCreated
		sb, err = a.wake(c, sb, lifetime, memory)
		if err == nil && !sb.Deadline.IsZero() && time.Until(sb.Deadline) < lifetime-time.Second { // somebody else resumed it, for less
			sb, err = a.sandboxes.ExtendLifetime(c.ctx(), c.who, c.id, lifetime)
		}
	}
	return sb, status, err
}

// Fork is the body of POST …/fork.
type Fork struct {
	Timeout int32 `json:"timeout"`
	Count   int   `json:"count"`
}

// Forked is one copy, or why there is none.
type Forked struct {
	Sandbox *Sandbox `json:"sandbox,omitempty"`
	Error   *problem `json:"error,omitempty"`
}

func (a *API) fork(c *call) error {
	req := Fork{Timeout: timeoutV1, Count: 1}
	if err := c.decode(&req); err != nil {
		return err
	}
	lifetime, err := a.seconds(req.Timeout, 1)
	if err != nil {
		return err
	}
	if err := a.running(c); err != nil {
		return err
	}
	parent, err := a.find(c)
	if err != nil {
		return err
	}
	o, err := target.Decode(parent)
	if err != nil {
		return err
	}
	o.Timeout = int(req.Timeout)
	from, err := a.origin(c, o)
	if err != nil {
		return err
	}

	result, err := a.sandboxes.Fork(c.ctx(), c.who, c.id, sandbox.ForkSpec{
		Count: req.Count, Lifetime: lifetime, Metadata: parent.Metadata, InheritEnv: true, IDEnv: idVariable,
		Annotations: annotations(o),
	})
	if err != nil {
		return err
	}

	return c.answer(http.StatusCreated, a.forked(c, result.Sandboxes, o.TemplateID, from.Start))
}

// forked answers for each copy. A copy has the memory of a kernel and no other process, so that what its template starts
// is started again, in all copies at once.
func (a *API) forked(c *call, copies []sandbox.Sandbox, template string, start *build.Start) []Forked {
	out := make([]Forked, len(copies))
	var work sync.WaitGroup
	for i, sb := range copies {
		work.Go(func() {
			w, err := a.wireSandbox(sb)
			if err == nil {
				err = a.furnish(c, sb.ID, template, start)
			}
			if err != nil {
				p := problemOf(err)
				out[i].Error = &p
				return
			}
			out[i].Sandbox = &w
		})
	}
	work.Wait()
	return out
}
