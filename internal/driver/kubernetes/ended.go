package kubernetes

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/sandbox"
)

// ends are sandboxes that are no more. A Pod that ended by itself is kept until its end is forgotten, so that a server which comes later is told
// too; one that was deleted is not there any more, and whoever had it deleted has recorded why. Guarded by the driver's mu.
type ends struct {
	known   map[string]sandbox.Ended    // by id, until Forget
	over    map[types.UID]time.Time     // Pods whose end was told or is nobody's news, until they are gone, and since when
	causes  map[types.UID]sandbox.Cause // why Pods end that this server deletes, until they are gone
	changed chan struct{}               // closed and replaced when known grows
}

func newEnds() ends {
	return ends{known: map[string]sandbox.Ended{}, over: map[types.UID]time.Time{}, causes: map[types.UID]sandbox.Cause{}, changed: make(chan struct{})}
}

func (e *ends) wake() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// Entries of Pods that were gone before they were noted are found when there are many.
const (
	manyOver = 4096
	overFor  = 2 * time.Hour // longer than a Pod that has ended is kept
)

// settle notes that nobody is to be told of a Pod any more.
func (e *ends) settle(uid types.UID) {
	if len(e.over) > manyOver {
		maps.DeleteFunc(e.over, func(_ types.UID, since time.Time) bool { return time.Since(since) > overFor })
	}
	e.over[uid] = time.Now()
}

// tell notes the end of a Pod once; mu is held.
func (d *Driver) tell(uid types.UID, end sandbox.Ended) {
	if _, told := d.ends.over[uid]; told {
		return
	}
	d.ends.settle(uid)
	if cause, ours := d.ends.causes[uid]; ours {
		end.Cause, end.Message = cause, ""
	}
	d.ends.known[end.ID] = end
	d.ends.wake()
	if timer := d.timers[uid]; timer != nil {
		timer.Stop()
		delete(d.timers, uid)
	}
	if l := d.living[end.ID]; l != nil && l.uid == uid && l.ready {
		delete(d.living, end.ID)
	}
}

// seen is called for every Pod that is new or has changed.
func (d *Driver) seen(obj any) {
	pod := podOf(obj)
	if pod == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !isIdle(pod) || isOver(pod) {
		delete(d.reserved, pod.UID)
	}
	d.lease.poke()
	if !isClaimed(pod) {
		return
	}
	if d.starting(pod) { // its Start tells
		return
	}
	switch {
	case isTerminal(pod):
		d.tell(pod.UID, endOf(pod))
	case pod.DeletionTimestamp != nil:
		d.deleted(pod)
	case pod.Annotations[annotationOwner] == d.cfg.Owner && d.living[pod.Labels[labelSandbox]] == nil:
		// Left by an earlier server of this name. One that this server has used has a deadline that may be newer than the view.
		d.schedule(pod.Labels[labelSandbox], pod.UID, timeOf(pod, annotationDeadline))
	}
}

// starting reports whether a Start of this server is under way for a Pod; mu is held.
func (d *Driver) starting(pod *corev1.Pod) bool {
	l := d.living[pod.Labels[labelSandbox]]
	return l != nil && !l.ready
}

// gone is called when a Pod is no more.
func (d *Driver) gone(obj any) {
	pod := podOf(obj)
	if pod == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.reserved, pod.UID)
	if isClaimed(pod) && !d.starting(pod) {
		d.deleted(pod)
	}
	delete(d.ends.over, pod.UID)
	delete(d.ends.causes, pod.UID)
	d.lease.poke()
}

// deleted tells of a Pod that somebody deletes. Another server that deletes its own knows why, and this one does not: it stays silent.
func (d *Driver) deleted(pod *corev1.Pod) {
	_, ours := d.ends.causes[pod.UID]
	if owner := pod.Annotations[annotationOwner]; owner != d.cfg.Owner && !isTerminal(pod) && !ours {
		if l := d.living[pod.Labels[labelSandbox]]; l == nil || l.uid != pod.UID {
			return
		}
	}
	d.tell(pod.UID, endOf(pod))
}

// endOf says how a Pod ended, as far as it shows.
func endOf(pod *corev1.Pod) sandbox.Ended {
	end := sandbox.Ended{ID: pod.Labels[labelSandbox], At: time.Now().UTC(), Cause: sandbox.CauseDeleted, Message: "somebody deleted its Pod"}
	if pod.DeletionTimestamp != nil {
		end.At = deletedAt(pod)
	}
	if stopped, ok := containerEnd(pod); ok {
		end.Cause, end.Message = causeOf(stopped)
		if !stopped.FinishedAt.IsZero() {
			end.At = stopped.FinishedAt.UTC()
		}
	} else if isTerminal(pod) {
		end.Cause, end.Message = sandbox.CauseFailed, "its Pod failed: "+failure(pod)
	}
	if cause, message, ok := disruption(pod); ok {
		end.Cause, end.Message = cause, message
	}
	return end
}

// deletedAt is when somebody asked for a Pod's deletion: its timestamp is when its grace is over.
func deletedAt(pod *corev1.Pod) time.Time {
	at := pod.DeletionTimestamp.UTC()
	if grace := pod.DeletionGracePeriodSeconds; grace != nil {
		at = at.Add(-time.Duration(*grace) * time.Second)
	}
	return at
}

// failure is what the node says of a Pod that failed before its container ran.
func failure(pod *corev1.Pod) string {
	for _, s := range pod.Status.InitContainerStatuses {
		if t := s.State.Terminated; t != nil && t.ExitCode != 0 {
			if foreignImage(pod, s.Name) != "" && slices.Contains(nodeFailures, t.Reason) {
				return "its image cannot be started: " + startFailed
			}
			return strings.TrimSpace(fmt.Sprintf("container %s: %s %s", s.Name, t.Reason, t.Message))
		}
	}
	return strings.TrimSpace(pod.Status.Reason + " " + pod.Status.Message)
}

func containerEnd(pod *corev1.Pod) (*corev1.ContainerStateTerminated, bool) {
	for _, s := range pod.Status.ContainerStatuses {
		if s.Name == containerName && s.State.Terminated != nil {
			return s.State.Terminated, true
		}
	}
	return nil, false
}

// causeOf reads the exit status of PID 1, which code in the sandbox cannot choose.
func causeOf(t *corev1.ContainerStateTerminated) (sandbox.Cause, string) {
	switch {
	case t.Reason == "OOMKilled":
		return sandbox.CauseOOM, "out of memory: the node's kernel ended it at its limit"
	case t.ExitCode == podapi.ExitExpired:
		return sandbox.CauseExpired, ""
	case t.ExitCode == podapi.ExitEnded:
		return sandbox.CauseKilled, ""
	case t.ExitCode == podapi.ExitFailed:
		return sandbox.CauseStartFail, "its program could not start; the log of its Pod says why"
	}
	return sandbox.CauseAgentDied, fmt.Sprintf("its PID 1 ended with exit status %d (%s)", t.ExitCode, t.Reason)
}

// disruption tells an end that came from the cluster.
func disruption(pod *corev1.Pod) (cause sandbox.Cause, message string, ok bool) {
	switch pod.Status.Reason {
	case "Evicted", "Preempting":
		return sandbox.CauseEvicted, strings.TrimSpace("its node evicted it: " + pod.Status.Message), true
	case "NodeLost", "NodeShutdown", "Shutdown", "Terminated":
		return sandbox.CauseNodeLost, strings.TrimSpace("its node is gone: " + pod.Status.Message), true
	}
	for _, c := range pod.Status.Conditions {
		if c.Type != corev1.DisruptionTarget || c.Status != corev1.ConditionTrue {
			continue
		}
		switch c.Reason {
		case "DeletionByTaintManager", "DeletionByPodGC":
			return sandbox.CauseNodeLost, "its node is gone: " + c.Message, true
		default: // EvictionByEvictionAPI, PreemptionByScheduler, TerminationByKubelet and whatever comes
			return sandbox.CauseEvicted, "the cluster evicted it: " + c.Message, true
		}
	}
	return "", "", false
}

// Ended yields ends until ctx is done: first those that nobody has asked to forget.
func (d *Driver) Ended(ctx context.Context) iter.Seq2[sandbox.Ended, error] {
	return func(yield func(sandbox.Ended, error) bool) {
		told := map[string]time.Time{}
		for {
			d.mu.Lock()
			var news []sandbox.Ended
			for id, e := range d.ends.known {
				if at, ok := told[id]; !ok || !at.Equal(e.At) {
					news = append(news, e)
				}
			}
			maps.DeleteFunc(told, func(id string, _ time.Time) bool { _, known := d.ends.known[id]; return !known })
			changed, closed := d.ends.changed, d.closed
			d.mu.Unlock()
			slices.SortFunc(news, func(x, y sandbox.Ended) int { return x.At.Compare(y.At) })
			for _, e := range news {
				told[e.ID] = e.At
				if !yield(e, nil) {
					return
				}
			}
			if closed {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}

// Forget drops ends that somebody has recorded, with the Pods that were kept for them.
func (d *Driver) Forget(ctx context.Context, ids ...string) error {
	for _, id := range ids {
		for _, pod := range d.view.by(indexSandbox, id) {
			if !isTerminal(pod) || pod.DeletionTimestamp != nil {
				continue
			}
			if err := d.api.deletePod(ctx, pod.Name, pod.UID); err != nil {
				return unavailable(err, "delete the Pod of a sandbox that has ended")
			}
		}
		d.mu.Lock()
		delete(d.ends.known, id)
		d.mu.Unlock()
	}
	return nil
}
