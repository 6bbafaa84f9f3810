package kubernetes

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

const (
	// claims is how many Pods that waited are tried before one is made: each that fails has ended since it was seen.
	claims = 3
	// deadlineGrace is how much later a Pod ends itself than its server does, which knows more of the reason.
	deadlineGrace = 2 * time.Second
	// undoFor bounds the removal of what a start that failed has made.
	undoFor = 10 * time.Second
)

// Start claims a Pod that waits, or makes one, and returns when it is the sandbox.
func (d *Driver) Start(ctx context.Context, req sandbox.StartRequest) error {
	if !labelValue.MatchString(req.ID) {
		return fault.New(fault.Invalid, "%q cannot name a sandbox here: use at most 63 letters, digits, '-', '_' and '.'", req.ID)
	}
	if len(req.Mounts) > 0 {
		return fault.New(fault.Unsupported, "the kubernetes driver has no mounts")
	}
	k, err := d.kind(req.Template)
	if err != nil {
		return err
	}
	l, err := d.enlist(req.ID)
	if err != nil {
		return err
	}
	if err := d.bring(ctx, l, k, req); err != nil {
		d.delist(l)
		return err
	}
	return nil
}

// spare is how much sooner than its caller a start gives up: then it can say why.
const spare = time.Second

func (d *Driver) bring(ctx context.Context, l *living, k *kind, req sandbox.StartRequest) error {
	if deadline, ok := ctx.Deadline(); ok {
		sooner, cancel := context.WithDeadlineCause(ctx, deadline.Add(-min(spare, time.Until(deadline)/10)), errLate)
		defer cancel()
		ctx = sooner
	}
	if k.warm(req) {
		for range claims {
			pod, err := d.claim(ctx, k, req)
			if err != nil {
				return err
			}
			if pod == nil {
				break
			}
			err = d.settle(ctx, l, k, req, pod)
			if err == nil || ctx.Err() != nil || !errors.Is(err, podapi.ErrRefused) {
				return err
			}
			d.log.Warn("a Pod that waited did not answer; taking another", "pod", pod.Name, "sandbox", req.ID, "error", err)
		}
	}
	if k.foreign {
		leave, err := d.pulls.enter(ctx, req.Tenant)
		if err != nil {
			return err
		}
		defer leave()
		l.pulled = leave
	}
	pod, err := d.makeClaimed(ctx, k, req)
	if err != nil {
		return err
	}
	return d.settle(ctx, l, k, req, pod)
}

// settle makes a claimed Pod the sandbox. One that does not become it is deleted.
func (d *Driver) settle(ctx context.Context, l *living, k *kind, req sandbox.StartRequest, pod *corev1.Pod) (err error) {
	d.own(l, pod)
	defer func() {
		if err != nil {
			d.undo(pod)
		}
	}()
	if networkLabel(req.Network) == networkOwn {
		if err := d.ownPolicy(ctx, pod, req.ID, req.Tenant, req.Network); err != nil {
			return err
		}
	}
	if err := d.awaitAddress(ctx, l, pod); err != nil {
		return err
	}
	if err := d.boot(ctx, l, k, req, pod.Labels[labelLaunchType] == "cold"); err != nil {
		return err
	}
	return d.begin(l, req.Deadline)
}

// undo removes a Pod of a start that came to nothing, though its caller may have left.
func (d *Driver) undo(pod *corev1.Pod) {
	d.mu.Lock()
	d.ends.settle(pod.UID) // its end is nobody's news
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(d.life, undoFor)
	defer cancel()
	if err := d.api.deletePod(ctx, pod.Name, pod.UID); err != nil {
		d.log.Warn("a Pod is not deleted yet", "pod", pod.Name, "error", err)
	}
}

// awaitAddress waits until a Pod is somewhere, or cannot be anywhere.
func (d *Driver) awaitAddress(ctx context.Context, l *living, pod *corev1.Pod) error {
	if pod.Status.PodIP == "" {
		last := pod
		err := d.view.await(ctx, d.cfg.Namespace, pod.Name, func(seen *corev1.Pod) (bool, error) {
			if seen == nil || seen.UID != pod.UID {
				return false, nil // not seen yet; one that was deleted has a DeletionTimestamp first
			}
			last = seen
			if err := d.stillborn(seen); err != nil {
				return true, err
			}
			return seen.Status.PodIP != "", nil
		})
		if err != nil {
			return d.explain(ctx, last, err)
		}
		pod = last
	}
	l.pod = addressOf(pod)
	return nil
}

// explain says why a Pod is not there yet when its caller gave up.
func (d *Driver) explain(ctx context.Context, pod *corev1.Pod, err error) error {
	if ctx.Err() == nil {
		return err
	}
	if errors.Is(err, context.Canceled) {
		return err
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return fault.Wrap(fault.Exhausted, err, "no node has room for its Pod: %s", c.Message)
		}
	}
	if waiting := waitingReason(pod); waiting != "" {
		return fault.Wrap(fault.Unavailable, err, "its Pod is waiting: %s", waiting)
	}
	if image := pod.Annotations[annotationImage]; image != "" {
		return fault.Wrap(fault.Unavailable, err, "its Pod was not started in time; if %s is large, the operator can give it longer (sandbox.start_timeout)", image)
	}
	return fault.Wrap(fault.Unavailable, err, "its Pod was not started in time")
}

// stillborn is a Pod that will never run.
func (d *Driver) stillborn(pod *corev1.Pod) error {
	if isTerminal(pod) || pod.DeletionTimestamp != nil {
		for _, s := range allStatuses(pod) {
			if t := s.State.Terminated; t != nil && slices.Contains(nodeFailures, t.Reason) {
				return unstarted(pod, s.Name, t.Reason, t.Message)
			}
		}
		e := endOf(pod)
		return fault.New(fault.Unavailable, "its Pod ended before it was ready: %s", e.Message)
	}
	for _, s := range allStatuses(pod) {
		w := s.State.Waiting
		if w == nil {
			continue
		}
		if slices.Contains(pullFailures, w.Reason) {
			return d.unpulled(pod, s)
		}
		switch w.Reason {
		case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
			return unstarted(pod, s.Name, w.Reason, w.Message)
		}
	}
	return nil
}

func allStatuses(pod *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses)
}

func waitingReason(pod *corev1.Pod) string {
	for _, s := range allStatuses(pod) {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "PodInitializing" && w.Reason != "ContainerCreating" {
			if foreignImage(pod, s.Name) != "" {
				return w.Reason // the rest is the node's words
			}
			return w.Reason + " " + w.Message
		}
	}
	return ""
}

// boot tells the Pod whose it is. A cold one does not listen at once, so it is asked until it does.
func (d *Driver) boot(ctx context.Context, l *living, k *kind, req sandbox.StartRequest, cold bool) error {
	env := maps.Clone(k.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, req.Env)
	order := podapi.Order{Op: podapi.OpBoot, Left: left(req.Deadline), Boot: &agentapi.Boot{
		ID: req.ID, Hostname: req.ID, Env: env, User: "user", Workdir: k.Workdir, Sudo: k.domain.Sudo, OpenFiles: req.Limits.OpenFiles,
	}}
	if k.Looser {
		order.Boot.User = k.User
	}
	if !cold {
		return d.bootError(ctx, l, d.agents.Do(ctx, l.pod, order, nil))
	}
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := d.tryBoot(ctx, l, order)
		changed, forget := d.view.change(l.pod.Name)
		if pod := d.view.get(d.cfg.Namespace, l.pod.Name); pod != nil && err != nil {
			if err := d.stillborn(pod); err != nil {
				forget()
				return err
			}
		}
		if err == nil || !errors.Is(err, podapi.ErrRefused) || ctx.Err() != nil {
			forget()
			return d.bootError(ctx, l, err)
		}
		select {
		case <-changed:
		case <-time.After(wait): // nothing tells that a port is open, but the kubelet once a second
		case <-ctx.Done():
		}
		forget()
	}
}

// tryBoot gives an order to a Pod that starts, and gives up when the Pod will never run: nobody answers at its address then, not even to refuse.
func (d *Driver) tryBoot(ctx context.Context, l *living, o podapi.Order) error {
	ctx, cancel := context.WithCancel(ctx)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer cancel()
	watch.Go(func() {
		defer cancel()
		_ = d.view.await(ctx, d.cfg.Namespace, l.pod.Name, func(pod *corev1.Pod) (bool, error) { // the caller looks itself
			if pod != nil && l.pulled != nil && isPulled(pod) {
				l.pulled()
			}
			return pod != nil && d.stillborn(pod) != nil, nil
		})
	})
	return d.agents.Do(ctx, l.pod, o, nil)
}

func (d *Driver) bootError(ctx context.Context, l *living, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		if pod := d.view.get(d.cfg.Namespace, l.pod.Name); pod != nil {
			return d.explain(ctx, pod, context.Cause(ctx))
		}
		return context.Cause(ctx)
	case fault.KindOf(err) != fault.Internal:
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "its Pod does not become a sandbox")
}

// left is how long a Pod may still live; zero: for ever.
func left(deadline time.Time) time.Duration {
	if deadline.IsZero() {
		return 0
	}
	return max(time.Until(deadline), 0) + deadlineGrace
}

var errLate = errors.New("it took too long")

var errStopped = errors.New("it was stopped while it started")

func (d *Driver) begin(l *living, deadline time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.stopped {
		return fault.Wrap(fault.Gone, errStopped, "the sandbox %s was stopped while it started", l.id)
	}
	if _, over := d.ends.over[l.uid]; over {
		return fault.New(fault.Gone, "the sandbox %s ended while it started", l.id)
	}
	l.ready = true
	d.schedule(l.id, l.uid, deadline)
	return nil
}

// schedule sets the timer of a deadline; mu is held.
func (d *Driver) schedule(id string, uid podUID, deadline time.Time) {
	if timer := d.timers[uid]; timer != nil {
		timer.Stop()
		delete(d.timers, uid)
	}
	if deadline.IsZero() || d.closed {
		return
	}
	d.timers[uid] = time.AfterFunc(time.Until(deadline), func() {
		d.beside(func() {
			ctx, cancel := context.WithTimeout(d.life, undoFor)
			defer cancel()
			if err := d.Stop(ctx, id, sandbox.CauseExpired); err != nil && d.life.Err() == nil {
				d.log.Warn("a sandbox past its deadline is not stopped yet", "sandbox", id, "error", err)
			}
		})
	})
}

// beside runs something that Close waits for, unless it has begun to.
func (d *Driver) beside(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.work.Go(f)
	}
}
