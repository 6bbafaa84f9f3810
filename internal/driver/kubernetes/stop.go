package kubernetes

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/sandbox"
)

// goodbyeFor is how long a Pod may take to end itself before its node does it.
const goodbyeFor = time.Second

// Stop ends a sandbox. Its processes are ended at once, by their PID 1, and its Pod is deleted; the node removes what is left of it a moment later.
func (d *Driver) Stop(ctx context.Context, id string, cause sandbox.Cause) error {
	l, starting := d.stopping(id)
	if starting { // its Start removes what it has made
		select {
		case <-l.gone:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	pod := d.view.sandbox(id)
	if l == nil && (pod == nil || pod.DeletionTimestamp != nil) {
		return nil // one that is not there has been stopped
	}
	name, uid, address := nameOf(l, pod)
	d.mu.Lock()
	if _, first := d.ends.causes[uid]; !first {
		d.ends.causes[uid] = cause
	}
	d.mu.Unlock()
	if address != nil && (pod == nil || !isTerminal(pod)) {
		goodbye, cancel := context.WithTimeout(ctx, goodbyeFor)
		_ = d.agents.Do(goodbye, address, podapi.Order{Op: podapi.OpEnd}, nil) // it never answers: it has ended
		cancel()
	}
	if err := d.api.deletePod(ctx, name, uid); err != nil {
		return unavailable(err, "delete the Pod of sandbox %s", id)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, there := d.ends.causes[uid]; there { // else it was seen to go, and was told then
		d.tell(uid, sandbox.Ended{ID: id, Cause: cause, At: time.Now().UTC()})
	}
	return nil
}

// stopping marks a sandbox that this server has, so that nobody begins anything more with it.
func (d *Driver) stopping(id string) (l *living, starting bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l = d.living[id]
	if l != nil {
		l.stopped, starting = true, !l.ready
	}
	return l, starting
}

// nameOf is the Pod of a sandbox, by what this server has of it or by the view.
func nameOf(l *living, pod *corev1.Pod) (string, podUID, *podapi.Pod) {
	if l != nil {
		return l.name, l.uid, l.pod
	}
	if pod.Status.PodIP == "" {
		return pod.Name, pod.UID, nil
	}
	return pod.Name, pod.UID, addressOf(pod)
}
