package kubernetes

import (
	"context"
	"math/rand/v2"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// view is what the API server tells of our Pods, a moment late. It is the only thing that this driver knows them by.
type view struct {
	informer cache.SharedIndexInformer

	mu      sync.Mutex
	waiters map[string][]chan struct{} // name of a Pod → closed when it changes
}

const (
	indexSandbox = "sandbox"
	indexIdle    = "idle" // Ready Pods that wait, by digest
)

func newView(c *client) (*view, error) {
	v := &view{waiters: map[string][]chan struct{}{}}
	source := cache.NewFilteredListWatchFromClient(c.core, "pods", c.namespace, func(o *metav1.ListOptions) {
		o.LabelSelector = labelManaged + "=" + managedBy + "," + labelState
	})
	v.informer = cache.NewSharedIndexInformer(source, &corev1.Pod{}, 0, cache.Indexers{indexSandbox: bySandbox, indexIdle: byDigest})
	if err := v.informer.SetTransform(trim); err != nil {
		return nil, err
	}
	_, err := v.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: v.changed, UpdateFunc: func(_, pod any) { v.changed(pod) }, DeleteFunc: v.changed,
	})
	return v, err
}

func bySandbox(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok && isClaimed(pod) {
		return []string{pod.Labels[labelSandbox]}, nil
	}
	return nil, nil
}

func byDigest(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok && isIdle(pod) && !isOver(pod) && isReady(pod) {
		return []string{pod.Labels[labelDigest]}, nil
	}
	return nil, nil
}

// trim forgets what nobody here reads: thousands of Pods are kept in memory.
func trim(obj any) (any, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		pod.ManagedFields = nil
		pod.Spec = corev1.PodSpec{NodeName: pod.Spec.NodeName}
	}
	return obj, nil
}

// podOf is the Pod in an event, which may be the last that was seen of one.
func podOf(obj any) *corev1.Pod {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	pod, _ := obj.(*corev1.Pod)
	return pod
}

func (v *view) changed(obj any) {
	pod := podOf(obj)
	if pod == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range v.waiters[pod.Name] {
		close(c)
	}
	delete(v.waiters, pod.Name)
}

// change is closed when a Pod changes; forget lets go of it.
func (v *view) change(name string) (changed <-chan struct{}, forget func()) {
	c := make(chan struct{})
	v.mu.Lock()
	defer v.mu.Unlock()
	v.waiters[name] = append(v.waiters[name], c)
	return c, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		list := v.waiters[name]
		for i, other := range list {
			if other == c {
				v.waiters[name] = append(list[:i:i], list[i+1:]...)
				break
			}
		}
		if len(v.waiters[name]) == 0 {
			delete(v.waiters, name)
		}
	}
}

// await returns when done says so of a Pod; it is nil while nobody has seen it.
func (v *view) await(ctx context.Context, namespace, name string, done func(*corev1.Pod) (bool, error)) error {
	for {
		changed, forget := v.change(name)
		over, err := done(v.get(namespace, name))
		if over || err != nil {
			forget()
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			forget()
			return context.Cause(ctx)
		}
	}
}

func (v *view) get(namespace, name string) *corev1.Pod {
	obj, ok, err := v.informer.GetIndexer().GetByKey(namespace + "/" + name)
	if err != nil || !ok {
		return nil
	}
	return podOf(obj)
}

// sandbox is the Pod of a sandbox: the one that lives, where there is more than one.
func (v *view) sandbox(id string) *corev1.Pod {
	var found *corev1.Pod
	for _, pod := range v.by(indexSandbox, id) {
		if found == nil || isOver(found) {
			found = pod
		}
	}
	return found
}

// idle finds a Pod that could be claimed and that its caller wants. It begins anywhere: of servers that all began with the first, all but one would
// lose.
func (v *view) idle(digest string, wanted func(*corev1.Pod) bool) *corev1.Pod {
	keys, err := v.informer.GetIndexer().IndexKeys(indexIdle, digest)
	if err != nil || len(keys) == 0 {
		return nil
	}
	start := rand.IntN(len(keys))
	for i := range keys {
		obj, ok, err := v.informer.GetIndexer().GetByKey(keys[(start+i)%len(keys)])
		if pod := podOf(obj); err == nil && ok && pod != nil && isIdle(pod) && wanted(pod) {
			return pod
		}
	}
	return nil
}

func (v *view) by(index, key string) []*corev1.Pod {
	objs, err := v.informer.GetIndexer().ByIndex(index, key)
	if err != nil {
		return nil // an index that is not there: a defect that tests see
	}
	list := make([]*corev1.Pod, 0, len(objs))
	for _, obj := range objs {
		if pod := podOf(obj); pod != nil {
			list = append(list, pod)
		}
	}
	return list
}

func (v *view) all() []*corev1.Pod {
	objs := v.informer.GetIndexer().List()
	list := make([]*corev1.Pod, 0, len(objs))
	for _, obj := range objs {
		if pod := podOf(obj); pod != nil {
			list = append(list, pod)
		}
	}
	return list
}
