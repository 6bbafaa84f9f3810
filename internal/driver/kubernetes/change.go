package kubernetes

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Change adjusts a sandbox: its deadline and its network by one write to its Pod, its limits by another.
func (d *Driver) Change(ctx context.Context, id string, change sandbox.Change) error {
	l, err := d.find(id)
	if err != nil {
		return err
	}
	if change.Limits != nil {
		if err := d.resize(ctx, l, *change.Limits); err != nil {
			return err
		}
	}
	steps := []patchOp{{Op: "test", Path: "/metadata/uid", Value: string(l.uid)}}
	if change.Deadline != nil {
		steps = append(steps, patchOp{Op: "add", Path: "/metadata/annotations/" + pointer(annotationDeadline), Value: deadlineText(*change.Deadline)})
	}
	if n := change.Network; n != nil {
		if err := d.changeNetwork(ctx, l, *n); err != nil {
			return err
		}
		steps = append(steps, patchOp{Op: "add", Path: "/metadata/labels/" + pointer(labelNetwork), Value: networkLabel(*n)})
	}
	if len(steps) > 1 {
		if _, err := d.api.patchPod(ctx, l.name, steps); apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
			return missing(id)
		} else if err != nil {
			return unavailable(err, "change the Pod of sandbox %s", id)
		}
	}
	if change.Deadline == nil {
		return nil
	}
	return d.moveDeadline(ctx, l, *change.Deadline)
}

// moveDeadline tells those who keep it: this server, and the Pod itself.
func (d *Driver) moveDeadline(ctx context.Context, l *living, deadline time.Time) error {
	d.mu.Lock()
	d.schedule(l.id, l.uid, deadline)
	d.mu.Unlock()
	return d.order(ctx, l.id, podapi.Order{Op: podapi.OpDeadline, Left: left(deadline)}, nil)
}

func (d *Driver) changeNetwork(ctx context.Context, l *living, n policy.Network) error {
	if networkLabel(n) != networkOwn {
		return nil
	}
	pod := d.view.get(d.cfg.Namespace, l.name)
	if pod == nil {
		return missing(l.id)
	}
	return d.ownPolicy(ctx, pod, l.id, pod.Annotations[annotationTenant], n)
}

// resize gives a Pod other limits while it runs, where the cluster can do that.
func (d *Driver) resize(ctx context.Context, l *living, limits template.Limits) error {
	pod := d.view.get(d.cfg.Namespace, l.name)
	if pod == nil {
		return missing(l.id)
	}
	k := d.kinds[pod.Labels[labelTemplate]]
	if pod.Annotations[annotationImage] != "" {
		k = d.images
	}
	if k == nil {
		return fault.New(fault.Unsupported, "the template of sandbox %s is not this server's any more", l.id)
	}
	err := d.api.resizePod(ctx, l.name, resources(k, k.limitsFor(limits)))
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		return fault.Wrap(fault.Unsupported, err, "this cluster does not change the limits of a Pod that runs; make a new sandbox")
	}
	return unavailable(err, "resize the Pod of sandbox %s", l.id)
}
