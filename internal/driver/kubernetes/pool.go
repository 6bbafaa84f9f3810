package kubernetes

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/sandbox"
)

const (
	// batch is how many Pods are made at a time for one template.
	batch = 20
	// writers is how many requests of the leader's are under way at once.
	writers = 8
	// neverReady is how long a Pod may take until it is replaced.
	neverReady = 5 * time.Minute
	// unseenFor is how long a Pod that was made may stay out of sight before it is no longer counted.
	unseenFor = 30 * time.Second
	// overdue is how long after its deadline a sandbox is ended by the leader, whose own server and Pod have not done it.
	overdue = 10 * time.Second
	// askAgain is how long after a claimed Pod did not say whether it is a sandbox it is asked again.
	askAgain = 15 * time.Second
	// roundFor bounds what the leader does at a time: it must not go on when another leads. What is left is found at the next look.
	roundFor = leaseGiven / 2
	// kept is how long a Pod that has ended waits for somebody who records that.
	kept = time.Hour

	backoffFirst = time.Second
	backoffMost  = time.Minute
)

// keeper is what the leader remembers of its work. Clocks of servers differ, so that what is measured is how long this one has seen a thing.
type keeper struct {
	pause  map[string]*pause       // templates whose Pods fail
	warned map[string]time.Time    // what was said of late
	first  map[types.UID]time.Time // claimed Pods, and when they were first seen

	mu     sync.Mutex              // of what jobs write
	unseen map[string]made         // Pods that were made and that the view does not have yet
	booted map[types.UID]time.Time // claimed Pods that were asked whether they are sandboxes: zero for those that are, else when
}

type made struct {
	digest string
	at     time.Time
}

type pause struct {
	until time.Time
	next  time.Duration
}

func newKeeper() *keeper {
	return &keeper{
		unseen: map[string]made{}, pause: map[string]*pause{}, warned: map[string]time.Time{}, first: map[types.UID]time.Time{}, booted: map[types.UID]time.Time{},
	}
}

// lead does whatever is to be done now: makes Pods that are missing, deletes those that nobody can use, and ends what should have ended.
func (d *Driver) lead(ctx context.Context) {
	now := time.Now()
	pods := d.view.all()
	byKind := map[string][]*corev1.Pod{}
	var jobs, last []func(context.Context)
	d.keeper.forget(pods, now)
	for _, pod := range pods {
		switch {
		case isClaimed(pod):
			last = append(last, d.watchOver(pod, now)...) // which may wait for nodes that do not answer
		case pod.DeletionTimestamp != nil:
		case pod.Labels[labelState] == stateRetired: // whoever retired it did not come to delete it
			jobs = append(jobs, d.discard(pod, "it was retired"))
		default:
			byKind[pod.Labels[labelDigest]] = append(byKind[pod.Labels[labelDigest]], pod)
		}
	}
	for _, k := range d.kinds {
		jobs = append(jobs, d.tend(k, byKind[k.digest], now)...)
		delete(byKind, k.digest)
	}
	for _, stale := range byKind { // of another configuration, or of a template that is no more
		jobs = append(jobs, d.retire(stale, now)...)
	}
	d.carryOut(ctx, append(jobs, last...))
}

// carryOut does jobs, a few at a time, for as long as this server leads and the round lasts.
func (d *Driver) carryOut(ctx context.Context, jobs []func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, roundFor)
	defer cancel()
	slots := make(chan struct{}, writers)
	var all sync.WaitGroup
	defer all.Wait()
	for _, job := range jobs {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		if !d.lease.leads() {
			return
		}
		all.Go(func() {
			defer func() { <-slots }()
			job(ctx)
		})
	}
}

// forget drops what the keeper remembers of Pods that are no more.
func (k *keeper) forget(pods []*corev1.Pod, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, m := range k.unseen {
		if now.Sub(m.at) > unseenFor {
			delete(k.unseen, name)
		}
	}
	living := make(map[types.UID]bool, len(pods))
	for _, pod := range pods {
		living[pod.UID] = true
		delete(k.unseen, pod.Name)
		if _, seen := k.first[pod.UID]; !seen && isClaimed(pod) {
			k.first[pod.UID] = now
		}
	}
	maps.DeleteFunc(k.booted, func(uid types.UID, _ time.Time) bool { return !living[uid] })
	maps.DeleteFunc(k.first, func(uid types.UID, _ time.Time) bool { return !living[uid] })
	for what, at := range k.warned {
		if now.Sub(at) > neverReady {
			delete(k.warned, what)
		}
	}
}

// tend keeps one pool at its size.
func (d *Driver) tend(k *kind, pods []*corev1.Pod, now time.Time) (jobs []func(context.Context)) {
	var useful, waiting []*corev1.Pod
	for _, pod := range pods {
		switch {
		case isTerminal(pod):
			d.failed(k, pod, now)
			jobs = append(jobs, d.remove(pod, "it ended before anybody used it"))
		case isReady(pod):
			useful = append(useful, pod)
			delete(d.keeper.pause, k.name)
		case now.Sub(pod.CreationTimestamp.Time) > neverReady && !d.unschedulable(k, pod, now):
			d.failed(k, pod, now)
			jobs = append(jobs, d.remove(pod, "it was not ready in time"))
		default:
			waiting = append(waiting, pod)
		}
	}
	have := len(useful) + len(waiting) + d.keeper.underWay(k.digest)
	if surplus := have - k.Pool; surplus > 0 {
		return append(jobs, d.shrink(useful, waiting, surplus)...)
	}
	if p := d.keeper.pause[k.name]; p != nil && now.Before(p.until) {
		return jobs
	}
	for range min(k.Pool-have, batch) {
		jobs = append(jobs, d.fill(k, now))
	}
	return jobs
}

// underWay is how many Pods were made that the view does not have yet.
func (k *keeper) underWay(digest string) (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, m := range k.unseen {
		if m.digest == digest {
			n++
		}
	}
	return n
}

// shrink removes Pods that are too many: those that are not ready first, then the newest.
func (d *Driver) shrink(useful, waiting []*corev1.Pod, surplus int) (jobs []func(context.Context)) {
	slices.SortFunc(useful, func(x, y *corev1.Pod) int { return y.CreationTimestamp.Compare(x.CreationTimestamp.Time) })
	all := slices.Concat(waiting, useful)
	for _, pod := range all[:min(surplus, len(all))] {
		jobs = append(jobs, d.remove(pod, "the pool has enough"))
	}
	return jobs
}

// retire removes Pods that wait and that no template of this server makes any more. A server with another configuration may be claiming them while
// both run, so they are given a moment.
func (d *Driver) retire(pods []*corev1.Pod, now time.Time) (jobs []func(context.Context)) {
	for _, pod := range pods {
		if isTerminal(pod) || now.Sub(pod.CreationTimestamp.Time) > unseenFor {
			jobs = append(jobs, d.remove(pod, "its template has changed"))
		}
	}
	return jobs
}

// failed makes the next Pods of a template come later.
func (d *Driver) failed(k *kind, pod *corev1.Pod, now time.Time) {
	p := d.keeper.pause[k.name]
	if p == nil {
		p = &pause{next: backoffFirst}
		d.keeper.pause[k.name] = p
	}
	p.until = now.Add(p.next)
	p.next = min(2*p.next, backoffMost)
	d.warn(k.name+" fails", now, "a Pod of the pool failed; the next are made later", "template", k.name, "pod", pod.Name, "reason", endOf(pod).Message, "waiting", waitingReason(pod))
}

// unschedulable Pods are held: others would not find a node either.
func (d *Driver) unschedulable(k *kind, pod *corev1.Pod, now time.Time) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			d.warn(k.name+" has no room", now, "no node has room for Pods of the pool", "template", k.name, "pod", pod.Name, "reason", c.Message)
			return true
		}
	}
	return false
}

// warn says a thing once in a while.
func (d *Driver) warn(what string, now time.Time, message string, keys ...any) {
	if _, said := d.keeper.warned[what]; said {
		return
	}
	d.keeper.warned[what] = now
	d.log.Warn(message, keys...)
}

func (d *Driver) fill(k *kind, now time.Time) func(context.Context) {
	return func(ctx context.Context) {
		name := podName(k.name)
		d.keeper.mu.Lock()
		d.keeper.unseen[name] = made{k.digest, now}
		d.keeper.mu.Unlock()
		pod, err := d.pod(k, podRequest{
			name: name, labels: map[string]string{labelState: stateIdle}, notes: map[string]string{annotationEvict: "true"}, limits: k.limits(),
		})
		if err == nil {
			_, err = d.api.createPod(ctx, pod)
		}
		if err != nil && ctx.Err() == nil {
			d.log.Warn("a Pod of the pool cannot be made", "template", k.name, "error", err)
		}
	}
}

// remove deletes a Pod that waits, unless somebody claims it in the same moment: the write tests for that first, as a claim does.
func (d *Driver) remove(pod *corev1.Pod, why string) func(context.Context) {
	return func(ctx context.Context) {
		if !isTerminal(pod) {
			retired, err := d.api.patchPod(ctx, pod.Name, []patchOp{
				{Op: "test", Path: "/metadata/uid", Value: string(pod.UID)},
				{Op: "test", Path: "/metadata/labels/" + pointer(labelState), Value: stateIdle},
				{Op: "add", Path: "/metadata/labels/" + pointer(labelState), Value: stateRetired},
			})
			if err != nil {
				return // somebody has it, or the next look finds it again
			}
			pod = retired
		}
		d.discard(pod, why)(ctx)
	}
}

// discard deletes a Pod that nobody can claim.
func (d *Driver) discard(pod *corev1.Pod, why string) func(context.Context) {
	return func(ctx context.Context) {
		if err := d.api.deletePod(ctx, pod.Name, pod.UID); err != nil && ctx.Err() == nil {
			d.log.Warn("a Pod of the pool is not deleted yet", "pod", pod.Name, "error", err)
			return
		}
		d.log.Info("a Pod of the pool was removed", "pod", pod.Name, "reason", why)
	}
}

// watchOver ends what its own server did not: sandboxes past their deadline, Pods whose server left between claim and boot, and ends that nobody
// records.
func (d *Driver) watchOver(pod *corev1.Pod, now time.Time) []func(context.Context) {
	id, seen := pod.Labels[labelSandbox], now.Sub(d.keeper.first[pod.UID])
	switch {
	case pod.DeletionTimestamp != nil:
	case isTerminal(pod):
		if seen > kept {
			return []func(context.Context){func(ctx context.Context) { _ = d.Forget(ctx, id) }} // the next look tries again
		}
	case d.isOverdue(pod, seen):
		return []func(context.Context){func(context.Context) { d.endUnasked(pod, sandbox.CauseExpired) }}
	case seen > d.unbooted() && d.keeper.doubts(pod.UID, now):
		return []func(context.Context){func(ctx context.Context) { d.checkBooted(ctx, pod, seen) }}
	}
	return nil
}

// isOverdue reports whether a sandbox has been seen for longer than its whole life was to be. Both ends of that were written by one clock, its server's.
func (d *Driver) isOverdue(pod *corev1.Pod, seen time.Duration) bool {
	deadline, claimed := timeOf(pod, annotationDeadline), timeOf(pod, annotationClaimed)
	return !deadline.IsZero() && !claimed.IsZero() && seen > max(deadline.Sub(claimed), 0)+overdue
}

// unbooted is how long a claimed Pod may wait for its server: longer than a start may take.
func (d *Driver) unbooted() time.Duration { return d.cfg.StartTimeout + d.cfg.StartTimeout/4 }

// doubts reports whether nobody knows that a claimed Pod is a sandbox, and it was not asked a moment ago.
func (k *keeper) doubts(uid types.UID, now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	asked, known := k.booted[uid]
	return !known || !asked.IsZero() && now.Sub(asked) > askAgain
}

func (k *keeper) answered(uid types.UID, asked time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.booted[uid] = asked
}

// endUnasked ends a sandbox that its own server did not, with time of its own: the round may be over.
func (d *Driver) endUnasked(pod *corev1.Pod, cause sandbox.Cause) {
	ctx, cancel := context.WithTimeout(d.life, undoFor)
	defer cancel()
	if err := d.Stop(ctx, pod.Labels[labelSandbox], cause); err != nil && d.life.Err() == nil {
		d.log.Warn("a sandbox is not stopped yet", "sandbox", pod.Labels[labelSandbox], "error", err)
	}
}

// checkBooted asks a claimed Pod whether it has become a sandbox. One that says no was left by its server in the middle of a start. One that does not
// answer may be a sandbox all the same; one that has no address long after it should have is none.
func (d *Driver) checkBooted(ctx context.Context, pod *corev1.Pod, seen time.Duration) {
	d.keeper.answered(pod.UID, time.Now())
	d.mu.Lock()
	ours := d.starting(pod)
	d.mu.Unlock()
	if ours {
		return
	}
	var status podapi.Status
	if pod.Status.PodIP == "" {
		if seen < 2*d.unbooted() {
			return
		}
	} else if err := d.agents.Do(ctx, addressOf(pod), podapi.Order{Op: podapi.OpStatus}, &status); err != nil {
		d.log.Debug("a claimed Pod does not say whether it is a sandbox", "pod", pod.Name, "error", err)
		return
	}
	if status.Sandbox != "" {
		d.keeper.answered(pod.UID, time.Time{})
		return
	}
	d.log.Warn("removing a Pod whose server left while it started", "pod", pod.Name, "sandbox", pod.Labels[labelSandbox])
	d.endUnasked(pod, sandbox.CauseStartFail)
}
