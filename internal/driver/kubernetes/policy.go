package kubernetes

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/policy"
)

var portNumber = intstr.FromInt32(podapi.Port)

// The policies that hold for all sandboxes. A Pod's label chooses, so that a claim chooses with the write that it makes anyway.
const (
	policyAll      = "cove-sandboxes"
	policyInternet = "cove-sandboxes-internet"
)

var everywhere = netip.MustParsePrefix("0.0.0.0/0")

// ensurePolicies makes the policies, or what they should be of those that are there.
func (d *Driver) ensurePolicies(ctx context.Context) error {
	if !d.cfg.Policies {
		d.log.Warn("network policies are off: sandboxes reach whatever the cluster lets them reach")
		return nil
	}
	for _, p := range []*networkingv1.NetworkPolicy{d.policyAll(), d.policyInternet()} {
		if err := d.putPolicy(ctx, p); err != nil {
			return fmt.Errorf("make the NetworkPolicy %s (kubernetes.network_policies = false does without, and lets sandboxes reach everything): %w", p.Name, err)
		}
	}
	return nil
}

func (d *Driver) putPolicy(ctx context.Context, p *networkingv1.NetworkPolicy) error {
	p.Namespace = d.cfg.Namespace
	p.Labels = map[string]string{labelManaged: managedBy}
	err := d.api.policies.Post().Namespace(d.cfg.Namespace).Resource("networkpolicies").Body(p).Do(ctx).Error()
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	// Without a resource version it replaces whatever is there.
	return d.api.policies.Put().Namespace(d.cfg.Namespace).Resource("networkpolicies").Name(p.Name).Body(p).Do(ctx).Error()
}

// policyAll lets nothing out of any Pod of ours, and nobody in but the servers, to one port.
func (d *Driver) policyAll() *networkingv1.NetworkPolicy {
	namespaces := &metav1.LabelSelector{}
	if d.cfg.ServerNamespace != "" {
		namespaces.MatchLabels = map[string]string{corev1.LabelMetadataName: d.cfg.ServerNamespace}
	}
	var from []networkingv1.NetworkPolicyPeer
	if len(d.cfg.Servers) > 0 { // without labels it would be every Pod
		from = append(from, networkingv1.NetworkPolicyPeer{NamespaceSelector: namespaces, PodSelector: &metav1.LabelSelector{MatchLabels: d.cfg.Servers}})
	}
	for _, r := range d.cfg.ServerRanges {
		from = append(from, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: r.String()}})
	}
	var ingress []networkingv1.NetworkPolicyIngressRule
	if len(from) > 0 { // a rule without peers would let everybody in
		ingress = append(ingress, networkingv1.NetworkPolicyIngressRule{
			From: from, Ports: []networkingv1.NetworkPolicyPort{{Protocol: ptr(corev1.ProtocolTCP), Port: &portNumber}},
		})
	}
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: policyAll},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: labelState, Operator: metav1.LabelSelectorOpExists}}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
			Ingress:     ingress,
		},
	}
}

func (d *Driver) policyInternet() *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: policyInternet},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{labelNetwork: networkInternet}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress:      egress(policy.Network{Mode: policy.Internet}, "", policy.Rules{}),
		},
	}
}

// ownPolicy is for a sandbox whose rules are its own. It goes with the Pod.
func (d *Driver) ownPolicy(ctx context.Context, pod *corev1.Pod, id, tenant string, n policy.Network) error {
	err := d.putPolicy(ctx, &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
		}},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{labelSandbox: id, labelNetwork: networkOwn}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress:      egress(n, tenant, d.cfg.Rules),
		},
	})
	if err != nil {
		return unavailable(err, "make the network policy of sandbox %s", id)
	}
	return nil
}

// egress is what may leave, as ranges with exceptions. No range has IPv6 or a metadata service, and private addresses only
// where a list names them and the operator has opened them for the tenant.
func egress(n policy.Network, tenant string, rules policy.Rules) []networkingv1.NetworkPolicyEgressRule {
	var to []networkingv1.NetworkPolicyPeer
	add := func(p netip.Prefix, without ...[]netip.Prefix) {
		block := &networkingv1.IPBlock{CIDR: p.Masked().String()}
		for _, list := range without {
			for _, not := range list {
				switch {
				case not.Bits() <= p.Bits() && not.Overlaps(p): // all of it
					return
				case not.Overlaps(p) && !slices.Contains(block.Except, not.Masked().String()):
					block.Except = append(block.Except, not.Masked().String())
				}
			}
		}
		to = append(to, networkingv1.NetworkPolicyPeer{IPBlock: block})
	}
	switch n.Mode {
	case policy.Internet:
		add(everywhere, policy.Private, policy.Metadata, n.Deny)
		for _, p := range n.Allow { // exceptions from what is denied, which open nothing else
			add(p, policy.Private, policy.Metadata)
		}
	case policy.List:
		for _, p := range n.Allow {
			if rules.Opens(p, tenant) {
				add(p, policy.Metadata, n.Deny)
				continue
			}
			add(p, policy.Private, policy.Metadata, n.Deny)
		}
	case policy.None:
	}
	if len(to) == 0 {
		return nil // a rule without peers would allow all
	}
	return []networkingv1.NetworkPolicyEgressRule{{To: to}}
}
