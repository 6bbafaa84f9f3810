package kubernetes

import (
	"context"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// leaseName is the one that servers of a namespace compete for.
const leaseName = "cove-leader"

const (
	leaseLife  = 10 * time.Second // without a sign for so long, another takes it
	leaseRenew = 3 * time.Second
	leaseGiven = 7 * time.Second // a holder that could not renew for so long no longer acts as one
)

// lease elects one among the servers. Times of other machines are not compared with our own: what counts is how long we have not seen it change.
type lease struct {
	api  *client
	me   string
	log  *slog.Logger
	wake chan struct{} // something that a leader looks at has changed

	version string    // of the Lease as we last saw it
	changed time.Time // when we saw that

	mu      sync.Mutex
	leading bool
	renewed time.Time // when we last wrote it
}

func newLease(api *client, me string, log *slog.Logger) *lease {
	return &lease{api: api, me: me, log: log, wake: make(chan struct{}, 1)}
}

// poke has the leader look sooner than it would.
func (l *lease) poke() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run competes until ctx ends.
func (l *lease) run(ctx context.Context) {
	renew := time.NewTicker(leaseRenew)
	defer renew.Stop()
	for {
		l.compete(ctx)
		select {
		case <-ctx.Done():
			l.resign()
			return
		case <-renew.C:
		}
	}
}

const (
	lookEvery = time.Second
	// calm is how long changes are gathered: each look is at every Pod.
	calm = 20 * time.Millisecond
)

// work calls do for as long as this server leads, whenever something changed and once in a while.
func (l *lease) work(ctx context.Context, do func(context.Context)) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		if l.leads() {
			do(ctx)
		}
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		case <-l.wake:
			select {
			case <-time.After(calm):
			case <-ctx.Done():
			}
		}
	}
}

func (l *lease) leads() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.leading && time.Since(l.renewed) < leaseGiven
}

func (l *lease) lead(now bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.leading != now {
		l.log.Info("leadership of the cluster's pools", "leading", now, "server", l.me)
	}
	l.leading = now
	if now {
		l.poke()
	}
}

// compete renews the Lease, or takes it when its holder is silent.
func (l *lease) compete(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaseRenew)
	defer cancel()
	found := &coordinationv1.Lease{}
	err := l.api.leases.Get().Namespace(l.api.namespace).Resource("leases").Name(leaseName).Do(ctx).Into(found)
	switch {
	case apierrors.IsNotFound(err):
		err = l.write(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: leaseName, Namespace: l.api.namespace}}, true)
	case err == nil && l.mayTake(found):
		err = l.write(ctx, found, false)
	case err == nil:
		l.lead(false)
		return
	}
	if err != nil {
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && ctx.Err() == nil {
			l.log.Warn("the Lease cannot be renewed", "lease", leaseName, "error", err)
		}
		if !l.leads() || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
			l.lead(false)
		}
		return
	}
	l.lead(true)
}

// mayTake reports whether the Lease is ours, nobody's or one that its holder lets lapse.
func (l *lease) mayTake(found *coordinationv1.Lease) bool {
	if found.ResourceVersion != l.version {
		l.version, l.changed = found.ResourceVersion, time.Now()
	}
	holder := ""
	if found.Spec.HolderIdentity != nil {
		holder = *found.Spec.HolderIdentity
	}
	return holder == "" || holder == l.me || time.Since(l.changed) > leaseLife
}

// write takes or renews; the resource version in it lets only one of several succeed.
func (l *lease) write(ctx context.Context, it *coordinationv1.Lease, create bool) error {
	begun := time.Now()
	now := metav1.NewMicroTime(begun)
	if it.Spec.HolderIdentity == nil || *it.Spec.HolderIdentity != l.me {
		it.Spec.AcquireTime = &now
	}
	it.Spec.HolderIdentity, it.Spec.RenewTime, it.Spec.LeaseDurationSeconds = &l.me, &now, ptr(int32(leaseLife/time.Second))
	request := l.api.leases.Put().Name(leaseName)
	if create {
		request = l.api.leases.Post()
	}
	written := &coordinationv1.Lease{}
	if err := request.Namespace(l.api.namespace).Resource("leases").Body(it).Do(ctx).Into(written); err != nil {
		return err
	}
	l.version, l.changed = written.ResourceVersion, begun
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renewed = begun
	return nil
}

// resign lets another take over at once.
func (l *lease) resign() {
	if !l.leads() {
		return
	}
	l.lead(false)
	ctx, cancel := context.WithTimeout(context.Background(), leaseRenew) // whoever ends us has ended every other
	defer cancel()
	found := &coordinationv1.Lease{}
	if l.api.leases.Get().Namespace(l.api.namespace).Resource("leases").Name(leaseName).Do(ctx).Into(found) != nil {
		return // it lapses
	}
	if found.Spec.HolderIdentity == nil || *found.Spec.HolderIdentity != l.me {
		return
	}
	found.Spec.HolderIdentity = ptr("")
	_ = l.api.leases.Put().Namespace(l.api.namespace).Resource("leases").Name(leaseName).Body(found).Do(ctx).Error() // else it lapses
}
