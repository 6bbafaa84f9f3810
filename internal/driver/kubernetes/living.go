package kubernetes

import (
	"context"
	"errors"
	"net"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

type podUID = types.UID

// living is a sandbox that this server started or was asked for. What changes is guarded by the driver's mu, but pod, which is set before ready, and
// pulled, which its Start alone has.
type living struct {
	id      string
	uid     podUID
	name    string
	pod     *podapi.Pod
	ready   bool          // its Start has returned, or was another server's
	stopped bool          // somebody wants its end
	gone    chan struct{} // closed when its Start has given up
	pulled  func()        // called once a node has its image; nil: nobody waits for that
}

// enlist takes an id, so that two starts of one sandbox cannot both succeed on this server. Ids are random: on two servers they do not meet.
func (d *Driver) enlist(id string) (*living, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fault.New(fault.Unavailable, "the driver is closed")
	}
	if pod := d.view.sandbox(id); d.living[id] != nil || pod != nil && !isOver(pod) {
		return nil, fault.New(fault.Conflict, "the sandbox %s exists", id)
	}
	l := &living{id: id, gone: make(chan struct{})}
	d.living[id] = l
	return l, nil
}

func (d *Driver) delist(l *living) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.living[l.id] == l {
		delete(d.living, l.id)
	}
	close(l.gone)
}

// own notes which Pod a sandbox has.
func (d *Driver) own(l *living, pod *corev1.Pod) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l.uid, l.name = pod.UID, pod.Name
}

// find is a sandbox that lives, whoever started it.
func (d *Driver) find(id string) (*living, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.living[id]; l != nil {
		if l.ready && !l.stopped {
			return l, nil
		}
		return nil, missing(id)
	}
	pod := d.view.sandbox(id)
	if pod == nil || isOver(pod) || pod.Status.PodIP == "" {
		return nil, missing(id)
	}
	if _, over := d.ends.over[pod.UID]; over {
		return nil, missing(id)
	}
	l := &living{
		id: id, uid: pod.UID, name: pod.Name, ready: true, gone: make(chan struct{}),
		pod: addressOf(pod),
	}
	d.living[id] = l
	return l, nil
}

// addressOf is where a Pod's program listens.
func addressOf(pod *corev1.Pod) *podapi.Pod {
	return &podapi.Pod{Name: pod.Name, Address: net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(podapi.Port))}
}

func missing(id string) error { return fault.New(fault.NotFound, "there is no sandbox %s", id) }

// dialFor bounds how long a Pod may take to answer.
const dialFor = 10 * time.Second

// Dial opens a connection to a sandbox's agent.
func (d *Driver) Dial(ctx context.Context, id string) (net.Conn, error) {
	l, err := d.find(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialFor)
	defer cancel()
	conn, err := d.agents.Agent(ctx, l.pod)
	if err != nil {
		return nil, d.unreachable(ctx, id, err)
	}
	return conn, nil
}

// unreachable tells a sandbox that has ended from one that does not answer.
func (d *Driver) unreachable(ctx context.Context, id string, err error) error {
	if fault.KindOf(err) != fault.Internal {
		return err
	}
	if _, missing := d.find(id); missing != nil {
		return missing
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "the Pod of sandbox %s does not answer; its node may be in trouble", id)
}

// order has a sandbox's Pod do something.
func (d *Driver) order(ctx context.Context, id string, o podapi.Order, value any) error {
	l, err := d.find(id)
	if err != nil {
		return err
	}
	if err := d.agents.Do(ctx, l.pod, o, value); err != nil {
		return d.unreachable(ctx, id, err)
	}
	return nil
}

// Kernel forks a kernel from the Pod's zygote.
func (d *Driver) Kernel(ctx context.Context, id, kernel string) error {
	return d.order(ctx, id, podapi.Order{Op: podapi.OpKernel, Kernel: kernel}, nil)
}

// Usage is what the Pod's own cgroup has counted. What it wrote to disk is known to its node alone.
func (d *Driver) Usage(ctx context.Context, id string) (sandbox.Usage, error) {
	var u podapi.Usage
	if err := d.order(ctx, id, podapi.Order{Op: podapi.OpUsage}, &u); err != nil {
		return sandbox.Usage{}, err
	}
	return sandbox.Usage{CPUMS: u.CPUMS, MemoryBytes: u.MemoryBytes, PeakBytes: u.PeakBytes, Pids: u.Pids, OOMKills: u.OOMKills}, nil
}

// List lists the sandboxes of every server: Pods are the truth.
func (d *Driver) List(context.Context) ([]sandbox.Instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := []sandbox.Instance{}
	for _, pod := range d.view.all() {
		if !isClaimed(pod) || isOver(pod) {
			continue
		}
		if _, over := d.ends.over[pod.UID]; over {
			continue
		}
		list = append(list, instance(pod))
	}
	return list, nil
}

func instance(pod *corev1.Pod) sandbox.Instance {
	started := timeOf(pod, annotationClaimed)
	if started.IsZero() {
		started = pod.CreationTimestamp.Time
	}
	return sandbox.Instance{
		ID: pod.Labels[labelSandbox], Tenant: pod.Annotations[annotationTenant], Template: pod.Labels[labelTemplate],
		Deadline: timeOf(pod, annotationDeadline), Started: started, Owner: pod.Annotations[annotationOwner],
	}
}
