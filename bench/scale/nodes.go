package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

// podAddress is where every Pod of the simulation is: which one is meant, the server's first words say.
const podAddress = "127.201.0.1"

// workers is how many Pods the nodes look after at a time.
const workers = 16

// nodes play the scheduler and the kubelets of one namespace: each Pod is bound, runs and is gone as soon as it is deleted. A real node writes
// a Pod's status some three times where this writes it once.
type nodes struct {
	core      *rest.RESTClient
	namespace string
	listener  net.Listener
	jobs      chan func(context.Context) error
	writes    atomic.Int64
	ready     atomic.Int64 // Pods that were said to run, less those that are gone

	stop context.CancelFunc
	work sync.WaitGroup

	mu     sync.Mutex
	tls    *tls.Config
	pods   map[string]*fakePod
	failed error
}

// fakePod is what a Pod knows of itself.
type fakePod struct {
	token   []byte
	sandbox string
	ready   bool
}

func newNodes(ctx context.Context, core *rest.RESTClient, namespace string) (*nodes, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(podAddress, strconv.Itoa(podapi.Port)))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	n := &nodes{core: core, namespace: namespace, listener: l, stop: cancel, jobs: make(chan func(context.Context) error, 1<<17), pods: map[string]*fakePod{}}
	source := cache.NewListWatchFromClient(core, "pods", namespace, fields.Everything())
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{ListerWatcher: source, ObjectType: &corev1.Pod{}, Handler: cache.ResourceEventHandlerFuncs{
		AddFunc: n.added, UpdateFunc: n.updated, DeleteFunc: n.deleted,
	}})
	n.work.Go(func() { informer.RunWithContext(ctx) })
	n.work.Go(n.accept)
	for range workers {
		n.work.Go(func() { n.labour(ctx) })
	}
	return n, nil
}

// close returns when nothing of it is left, with what went wrong meanwhile.
func (n *nodes) close() error {
	n.stop()
	n.listener.Close()
	n.work.Wait()
	return n.err()
}

func (n *nodes) err() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.failed
}

func (n *nodes) labour(ctx context.Context) {
	for {
		select {
		case job := <-n.jobs:
			if err := job(ctx); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				n.mu.Lock()
				n.failed = errors.Join(n.failed, err)
				n.mu.Unlock()
			}
		case <-ctx.Done():
			return
		}
	}
}

// added takes a Pod that nobody runs yet.
func (n *nodes) added(obj any) {
	pod, ok := obj.(*corev1.Pod)
	if !ok || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		return
	}
	name, text := pod.Name, pod.Spec.Containers[0].Env[0].Value
	n.jobs <- func(ctx context.Context) error {
		if err := n.admit(name, text); err != nil {
			return err
		}
		return n.run(ctx, name)
	}
}

// admit reads what the Pod was born with.
func (n *nodes) admit(name, text string) error {
	settings, err := podapi.DecodeSettings(text)
	if err != nil {
		return err
	}
	token, err := hex.DecodeString(settings.Token)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tls == nil {
		if n.tls, err = podapi.PodTLS(settings.Authority); err != nil {
			return err
		}
	}
	n.pods[name] = &fakePod{token: token}
	return nil
}

// run binds a Pod to a node and says that it is ready.
func (n *nodes) run(ctx context.Context, name string) error {
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: n.namespace}, Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}
	if err := n.core.Post().Namespace(n.namespace).Resource("pods").Name(name).SubResource("binding").Body(binding).Do(ctx).Error(); err != nil {
		return err
	}
	now := metav1.Now()
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}
	done := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: now, FinishedAt: now}}
	status, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: podAddress, PodIPs: []corev1.PodIP{{IP: podAddress}}, StartTime: &now,
		Conditions: []corev1.PodCondition{
			{Type: corev1.PodInitialized, Status: corev1.ConditionTrue, LastTransitionTime: now}, {Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: now},
			{Type: corev1.ContainersReady, Status: corev1.ConditionTrue, LastTransitionTime: now}, {Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: now},
		},
		InitContainerStatuses: []corev1.ContainerStatus{{Name: "install", Image: "none", ImageID: "none", ContainerID: "none://" + name, State: done}},
		ContainerStatuses:     []corev1.ContainerStatus{{Name: "sandbox", Image: "none", ImageID: "none", ContainerID: "none://" + name, Ready: true, State: running}},
	}})
	if err != nil {
		return err
	}
	err = n.core.Patch(types.MergePatchType).Namespace(n.namespace).Resource("pods").Name(name).SubResource("status").Body(status).Do(ctx).Error()
	n.writes.Add(2)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if pod := n.pods[name]; pod != nil { // it may be gone again
		pod.ready = true
		n.ready.Add(1)
	}
	return nil
}

// updated confirms that a Pod which is to end has ended.
func (n *nodes) updated(before, obj any) {
	was, _ := before.(*corev1.Pod)
	pod, ok := obj.(*corev1.Pod)
	if !ok || pod.DeletionTimestamp == nil || was != nil && was.DeletionTimestamp != nil {
		return
	}
	name, uid, zero := pod.Name, pod.UID, int64(0)
	n.jobs <- func(ctx context.Context) error {
		n.writes.Add(1)
		options := &metav1.DeleteOptions{GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &uid}}
		return n.core.Delete().Namespace(n.namespace).Resource("pods").Name(name).Body(options).Do(ctx).Error()
	}
}

func (n *nodes) deleted(obj any) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if known := n.pods[pod.Name]; known != nil && known.ready {
		n.ready.Add(-1)
	}
	delete(n.pods, pod.Name)
}

// accept answers for every Pod.
func (n *nodes) accept() {
	for {
		conn, err := n.listener.Accept()
		if err != nil {
			return // closed
		}
		go n.answer(conn)
	}
}

const answerFor = 30 * time.Second

// answer does what the program in a Pod does with one order, without a sandbox.
func (n *nodes) answer(raw net.Conn) {
	defer raw.Close()
	_ = raw.SetDeadline(time.Now().Add(answerFor))
	n.mu.Lock()
	config := n.tls
	n.mu.Unlock()
	if config == nil {
		return
	}
	conn := tls.Server(raw, config)
	if conn.Handshake() != nil {
		return
	}
	pod := n.pod(conn.ConnectionState().ServerName)
	if pod == nil || podapi.Prove(conn, pod.token) != nil {
		return
	}
	var purpose [1]byte
	if _, err := io.ReadFull(conn, purpose[:]); err != nil || purpose[0] != podapi.ForControl {
		return
	}
	f, err := agentapi.NewReader(bufio.NewReader(conn)).Read()
	var o podapi.Order
	if err != nil || json.Unmarshal(f.Payload, &o) != nil || o.Op == podapi.OpEnd {
		return
	}
	value, err := json.Marshal(n.obey(pod, o))
	if err != nil {
		return
	}
	_ = agentapi.WriteJSON(conn, agentapi.FrameEnd, agentapi.End{Outcome: agentapi.OutcomeOK, Value: value}) // whoever has left asks again
}

func (n *nodes) pod(name string) *fakePod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pods[name]
}

func (n *nodes) obey(pod *fakePod, o podapi.Order) any {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch o.Op {
	case podapi.OpBoot:
		pod.sandbox = o.Boot.ID
		return podapi.Booted{Kernel: true, Warm: true}
	case podapi.OpStatus:
		return podapi.Status{Sandbox: pod.sandbox, Warm: true}
	case podapi.OpKernel, podapi.OpDeadline, podapi.OpUsage, podapi.OpEnd:
	}
	return struct{}{}
}

// await waits until so many Pods run.
func (n *nodes) await(ctx context.Context, pods int) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for n.ready.Load() < int64(pods) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d Pods run: %w", n.ready.Load(), pods, context.Cause(ctx))
		}
		if err := n.err(); err != nil {
			return err
		}
	}
	return nil
}
