package kubernetes

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// warm reports whether a Pod that waits will do for a request. One with other limits is made for it.
func (k *kind) warm(req sandbox.StartRequest) bool {
	l := k.limitsFor(req.Limits)
	return req.Storage != sandbox.StorageTmpfs && l == k.limits()
}

// limitsFor are the limits of a Pod; what a request leaves open is the template's. How many processes there may be is the node's to say.
func (k *kind) limitsFor(l template.Limits) template.Limits {
	own := k.limits()
	if l.CPUs > 0 {
		own.CPUs = l.CPUs
	}
	if l.MemoryBytes > 0 {
		own.MemoryBytes = l.MemoryBytes
	}
	if l.DiskBytes > 0 {
		own.DiskBytes = l.DiskBytes
	}
	return own
}

// claimLabels are what makes a Pod a sandbox.
func claimLabels(req sandbox.StartRequest, launch string) map[string]string {
	return map[string]string{
		labelState: stateClaimed, labelSandbox: req.ID, labelTenant: tenantHash(req.Tenant), labelNetwork: networkLabel(req.Network),
		labelNameHash: nameHash(req.ID), labelLaunchType: launch,
	}
}

func (d *Driver) claimNotes(req sandbox.StartRequest) map[string]string {
	return map[string]string{
		annotationTenant: req.Tenant, annotationDeadline: deadlineText(req.Deadline), annotationOwner: d.cfg.Owner,
		annotationClaimed: time.Now().UTC().Format(time.RFC3339Nano), annotationEvict: "false",
	}
}

func networkLabel(n policy.Network) string {
	switch {
	case n.Mode == policy.Internet && len(n.Deny) == 0:
		return networkInternet
	case n.Mode == policy.Internet, n.Mode == policy.List:
		return networkOwn
	default:
		return networkNone
	}
}

// claim makes one of the Pods that wait the sandbox's own, with one write; nil when there is none. Everybody who wants the same Pod tests its
// state in that write, so that one wins; the others take the next.
func (d *Driver) claim(ctx context.Context, k *kind, req sandbox.StartRequest) (*corev1.Pod, error) {
	for ctx.Err() == nil {
		pod := d.reserve(k)
		if pod == nil {
			return nil, nil
		}
		won, err := d.write(ctx, func(ctx context.Context) (*corev1.Pod, error) {
			return d.api.patchPod(ctx, pod.Name, d.claimPatch(pod, req))
		})
		switch {
		case err == nil:
			return won, nil
		case apierrors.IsInvalid(err), apierrors.IsNotFound(err), apierrors.IsConflict(err):
			// Another server was first, or it is gone. It stays reserved until the view knows that too.
		default:
			d.release(pod)
			d.abandon(pod.Name, req.ID)
			return nil, unavailable(err, "claim a Pod")
		}
	}
	return nil, context.Cause(ctx)
}

// reservedFor is how long a Pod that was lost is left alone. The view knows sooner whose it is, unless nobody has it after all.
const reservedFor = 10 * time.Second

// reserve picks a Pod that nobody else of this server wants.
func (d *Driver) reserve(k *kind) *corev1.Pod {
	return d.view.idle(k.digest, func(pod *corev1.Pod) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		if since, taken := d.reserved[pod.UID]; taken && time.Since(since) < reservedFor {
			return false
		}
		d.reserved[pod.UID] = time.Now()
		return true
	})
}

func (d *Driver) release(pod *corev1.Pod) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.reserved, pod.UID)
}

// pointer writes a key as a part of a JSON pointer.
func pointer(key string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

func (d *Driver) claimPatch(pod *corev1.Pod, req sandbox.StartRequest) []patchOp {
	steps := []patchOp{
		{Op: "test", Path: "/metadata/uid", Value: string(pod.UID)},
		{Op: "test", Path: "/metadata/labels/" + pointer(labelState), Value: stateIdle},
	}
	for key, value := range claimLabels(req, "warm") {
		steps = append(steps, patchOp{Op: "add", Path: "/metadata/labels/" + pointer(key), Value: value})
	}
	for key, value := range d.claimNotes(req) {
		steps = append(steps, patchOp{Op: "add", Path: "/metadata/annotations/" + pointer(key), Value: value})
	}
	return steps
}

// makeClaimed makes a Pod that is the sandbox's from its first moment.
func (d *Driver) makeClaimed(ctx context.Context, k *kind, req sandbox.StartRequest) (*corev1.Pod, error) {
	pod, err := d.pod(k, podRequest{
		name: podName(k.name), labels: claimLabels(req, "cold"), notes: d.claimNotes(req), limits: k.limitsFor(req.Limits),
		memory: req.Storage == sandbox.StorageTmpfs,
	})
	if err != nil {
		return nil, err
	}
	made, err := d.write(ctx, func(ctx context.Context) (*corev1.Pod, error) { return d.api.createPod(ctx, pod) })
	if err != nil {
		d.abandon(pod.Name, req.ID)
		return nil, unavailable(err, "make a Pod")
	}
	return made, nil
}

// writeFor bounds one write.
const writeFor = 15 * time.Second

// write does one write to its end although its caller may leave: otherwise nobody would know whether there is a Pod now.
func (d *Driver) write(ctx context.Context, do func(context.Context) (*corev1.Pod, error)) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeFor)
	defer cancel()
	return do(ctx)
}

// abandon removes what a write may have made whose answer never came.
func (d *Driver) abandon(name, id string) {
	d.beside(func() {
		ctx, cancel := context.WithTimeout(d.life, writeFor)
		defer cancel()
		pod, err := d.api.getPod(ctx, name)
		if err != nil || pod.Labels[labelSandbox] != id {
			return // it never was, or is another's; where that cannot be known the leader finds it unused
		}
		d.undo(pod)
	})
}
