package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/covehq/cove/internal/fault"
)

// client speaks to the API server, about the few kinds that are used here: a client for every kind there is would be most of the server's memory.
type client struct {
	namespace string
	core      *rest.RESTClient
	leases    *rest.RESTClient
	policies  *rest.RESTClient
}

const protobuf = "application/vnd.kubernetes.protobuf"

// restConfig finds the API server: the cluster that this process runs in, or what a kubeconfig says.
func restConfig(kubeconfig string) (*rest.Config, string, error) {
	if kubeconfig == "" {
		if c, err := rest.InClusterConfig(); err == nil {
			return c, "", nil
		}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil)
	c, err := loader.ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("no way to a Kubernetes API server: run in a Pod with a service account, or name a kubeconfig (kubernetes.kubeconfig): %w", err)
	}
	namespace, _, err := loader.Namespace()
	return c, namespace, err
}

func newClient(cfg *rest.Config, namespace string) (*client, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, coordinationv1.AddToScheme, networkingv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	codecs := serializer.NewCodecFactory(scheme).WithoutConversion()
	c := &client{namespace: namespace}
	for _, one := range []struct {
		to    **rest.RESTClient
		group schema.GroupVersion
		path  string
	}{
		{&c.core, corev1.SchemeGroupVersion, "/api"}, {&c.leases, coordinationv1.SchemeGroupVersion, "/apis"}, {&c.policies, networkingv1.SchemeGroupVersion, "/apis"},
	} {
		its := rest.CopyConfig(cfg)
		its.GroupVersion, its.APIPath, its.NegotiatedSerializer = &one.group, one.path, codecs
		its.QPS = -1 // the API server's own fairness decides
		its.UserAgent = "cove"
		if its.ContentType == "" {
			its.ContentType, its.AcceptContentTypes = protobuf, protobuf+",application/json"
		}
		made, err := rest.RESTClientFor(its)
		if err != nil {
			return nil, err
		}
		*one.to = made
	}
	return c, nil
}

func (c *client) createPod(ctx context.Context, pod *corev1.Pod) (*corev1.Pod, error) {
	made := &corev1.Pod{}
	err := c.core.Post().Namespace(c.namespace).Resource("pods").Body(pod).Do(ctx).Into(made)
	return made, err
}

func (c *client) getPod(ctx context.Context, name string) (*corev1.Pod, error) {
	pod := &corev1.Pod{}
	err := c.core.Get().Namespace(c.namespace).Resource("pods").Name(name).Do(ctx).Into(pod)
	return pod, err
}

// patchOp is one step of a JSON patch.
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

func (c *client) patchPod(ctx context.Context, name string, steps []patchOp) (*corev1.Pod, error) {
	body, err := json.Marshal(steps)
	if err != nil {
		return nil, err
	}
	pod := &corev1.Pod{}
	err = c.core.Patch(types.JSONPatchType).Namespace(c.namespace).Resource("pods").Name(name).Body(body).Do(ctx).Into(pod)
	return pod, err
}

// deletePod deletes the one Pod of that uid; one that is gone has been deleted.
func (c *client) deletePod(ctx context.Context, name string, uid types.UID) error {
	options := &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
	err := c.core.Delete().Namespace(c.namespace).Resource("pods").Name(name).Body(options).Do(ctx).Error()
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // a conflict: another has the name now
		return nil
	}
	return err
}

// resizePod changes what the container may use while it runs.
func (c *client) resizePod(ctx context.Context, name string, resources corev1.ResourceRequirements) error {
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": containerName, "resources": resources}}}})
	if err != nil {
		return err
	}
	return c.core.Patch(types.StrategicMergePatchType).Namespace(c.namespace).Resource("pods").Name(name).SubResource("resize").Body(body).Do(ctx).Error()
}

// unavailable is an API server that does not do what is asked; its own words are for the operator.
func unavailable(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota") {
		return fault.Wrap(fault.Exhausted, err, "%s: the quota of the sandboxes' namespace is used up; end one first", what)
	}
	if apierrors.IsForbidden(err) {
		return fault.Wrap(fault.Unavailable, err, "%s: the server's service account may not do that", what)
	}
	return fault.Wrap(fault.Unavailable, err, "%s: the Kubernetes API server refused or did not answer; try again", what)
}
