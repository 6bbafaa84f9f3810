package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// world is an API server of our own, with nobody else in it.
type world struct {
	options
	dir    string
	core   *rest.RESTClient
	leases *rest.RESTClient
}

func newWorld(ctx context.Context, o options) (w *world, err error) {
	w = &world{options: o}
	if w.dir, err = os.MkdirTemp("", "cove-scale-"); err != nil {
		return nil, err
	}
	if err := w.tell(ctx, "up"); err != nil {
		return nil, errors.Join(err, os.RemoveAll(w.dir))
	}
	config, err := clientcmd.BuildConfigFromFlags("", w.kubeconfig())
	if err == nil {
		w.core, err = clientOf(config, "/api", corev1.SchemeGroupVersion, corev1.AddToScheme)
	}
	if err == nil {
		w.leases, err = clientOf(config, "/apis", coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	}
	if err == nil {
		err = w.rested(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

// rested waits until the API server has done what it does at its start: its time would be counted as that of claims.
func (w *world) rested(ctx context.Context) error {
	last := cpuOf(w.pid("kube-apiserver"))
	for range 60 {
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		now := cpuOf(w.pid("kube-apiserver"))
		if now-last < 0.1 {
			return nil
		}
		last = now
	}
	return errors.New("the API server does not come to rest")
}

func (w *world) kubeconfig() string { return filepath.Join(w.dir, "kubeconfig") }

func (w *world) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // also after an interrupt
	defer cancel()
	return errors.Join(w.tell(ctx, "down"), os.RemoveAll(w.dir))
}

// tell has the program of the cluster do something.
func (w *world) tell(ctx context.Context, what string) error {
	if out, err := exec.CommandContext(ctx, w.cluster, "-api-only", "-dir", w.dir, what).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", w.cluster, what, err, out)
	}
	return nil
}

func clientOf(config *rest.Config, path string, group schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	its := rest.CopyConfig(config)
	its.APIPath, its.GroupVersion, its.NegotiatedSerializer, its.QPS = path, &group, serializer.NewCodecFactory(scheme).WithoutConversion(), -1
	its.ContentType, its.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	return rest.RESTClientFor(its)
}

// settle makes a namespace as controllers would.
func (w *world) settle(ctx context.Context, namespace string) error {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := w.core.Post().Resource("namespaces").Body(space).Do(ctx).Error(); err != nil {
		return err
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: namespace}}
	return w.core.Post().Namespace(namespace).Resource("serviceaccounts").Body(account).Do(ctx).Error()
}

// clear removes every Pod, so that the next round finds the API server as this one did. Thousands take longer than the API server gives a
// request, but what it has removed stays removed.
func (w *world) clear(ctx context.Context, namespace string) (err error) {
	zero := int64(0)
	for range 10 {
		err = w.core.Delete().Namespace(namespace).Resource("pods").Body(&metav1.DeleteOptions{GracePeriodSeconds: &zero}).Do(ctx).Error()
		if err == nil {
			return nil
		}
	}
	return err
}

const (
	leaseName = "cove-leader" // as the driver names it
	leaseLife = 10 * time.Second
	// noticed is how long a leader takes at most to see that it is none any more.
	noticed = 4 * time.Second
)

// usurp takes the Lease and keeps it until it is released: no server fills the pool meanwhile.
func (w *world) usurp(ctx context.Context, namespace string) (release func(), err error) {
	tick := time.NewTicker(leaseLife / 50)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		if err = w.renew(ctx, namespace); err == nil {
			break
		}
		if tries == 50 || ctx.Err() != nil {
			return nil, fmt.Errorf("take the Lease: %w", err)
		}
		<-tick.C // its holder renewed it in the same moment
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.keep(ctx, namespace)
	}()
	release = func() { cancel(); <-done }
	select {
	case <-time.After(noticed):
		return release, nil
	case <-ctx.Done():
		release()
		return nil, context.Cause(ctx)
	}
}

// keep renews the Lease until the context ends.
func (w *world) keep(ctx context.Context, namespace string) {
	tick := time.NewTicker(leaseLife / 5)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_ = w.renew(ctx, namespace) // its life spans five of these
		case <-ctx.Done():
			return
		}
	}
}

func (w *world) renew(ctx context.Context, namespace string) error {
	found := &coordinationv1.Lease{}
	if err := w.leases.Get().Namespace(namespace).Resource("leases").Name(leaseName).Do(ctx).Into(found); err != nil {
		return err
	}
	me, now := "simulation", metav1.NowMicro()
	found.Spec.HolderIdentity, found.Spec.RenewTime = &me, &now
	return w.leases.Put().Namespace(namespace).Resource("leases").Name(leaseName).Body(found).Do(ctx).Error()
}
