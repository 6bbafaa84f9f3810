package kubernetes

import (
	"context"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Claim is the part of Start before anybody speaks to the Pod; empty when no Pod waits.
func (d *Driver) Claim(ctx context.Context, name, id string) (string, error) {
	pod, err := d.claim(ctx, d.kinds[name], sandbox.StartRequest{ID: id, Tenant: "t1"})
	if pod == nil {
		return "", err
	}
	return pod.Name, err
}

// Pod is what the driver would make for a template.
func (d *Driver) Pod(name string) (*corev1.Pod, error) {
	k := d.kinds[name]
	return d.pod(k, podRequest{name: podName(k.name), labels: map[string]string{labelState: stateIdle}, limits: k.limits()})
}

// PodOf is what it would make for a template of an image.
func (d *Driver) PodOf(t *template.Template) (*corev1.Pod, error) {
	k, err := d.kind(t)
	if err != nil {
		return nil, err
	}
	return d.pod(k, podRequest{name: podName(k.name), labels: map[string]string{labelState: stateClaimed}, limits: k.limits()})
}

// PullTrouble is the kind of failure that a node's message tells of.
func PullTrouble(image, message string) string { return pullTrouble(image, message) }

// EndOf says how a Pod ended.
func EndOf(pod *corev1.Pod) sandbox.Ended { return endOf(pod) }

// Egress is what a policy of a tenant becomes, one range in a word: 0.0.0.0/0-10.0.0.0/8. The
// private networks are open for the tenant acme.
func Egress(tenant string, n policy.Network, private ...netip.Prefix) (list []string) {
	rules := policy.Rules{Private: map[string][]netip.Prefix{"acme": private}}
	for _, rule := range egress(n, tenant, rules) {
		for _, to := range rule.To {
			list = append(list, strings.Join(append([]string{to.IPBlock.CIDR}, to.IPBlock.Except...), "-"))
		}
	}
	return list
}

// PolicyAll is the one for all Pods.
func (d *Driver) PolicyAll() *networkingv1.NetworkPolicy { return d.policyAll() }

// Leads reports whether this server keeps the pools.
func (d *Driver) Leads() bool { return d.lease.leads() }

// Lapse makes the last sign of this server's leadership an old one.
func (d *Driver) Lapse() {
	d.lease.mu.Lock()
	defer d.lease.mu.Unlock()
	d.lease.renewed = d.lease.renewed.Add(-leaseGiven)
}

// Asked is how many claimed Pods were asked whether they are sandboxes and did not say so.
func (d *Driver) Asked() (n int) {
	d.keeper.mu.Lock()
	defer d.keeper.mu.Unlock()
	for _, at := range d.keeper.booted {
		if !at.IsZero() {
			n++
		}
	}
	return n
}

// Digest is a template's.
func (d *Driver) Digest(name string) string { return d.kinds[name].digest }
