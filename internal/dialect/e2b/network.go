package e2b

import (
	"encoding/json"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// Network is what a request says of a sandbox's network, as it came.
type Network struct {
	AllowOut           []string                   `json:"allowOut,omitempty"`
	DenyOut            []string                   `json:"denyOut,omitempty"`
	DNSServers         []string                   `json:"dnsServers,omitempty"`
	EgressProxy        json.RawMessage            `json:"egressProxy,omitempty"`
	Rules              map[string]json.RawMessage `json:"rules,omitempty"`
	AllowPublicTraffic *bool                      `json:"allowPublicTraffic,omitempty"`
	MaskRequestHost    string                     `json:"maskRequestHost,omitempty"`
	HTTPSPorts         []int                      `json:"httpsPorts,omitempty"`
}

// ParseNetwork reads the network of a create; an absent one is the zero value.
func ParseNetwork(raw json.RawMessage) (Network, error) {
	var n Network
	if given(raw) {
		if err := transfer.Decode(raw, &n); err != nil {
			return Network{}, err
		}
	}
	return n, n.check()
}

// maskForm is a host with an optional port, once E2B's word for the sandbox's port is replaced.
var maskForm = regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?$`)

func (n Network) check() error {
	switch {
	case given(n.EgressProxy):
		return fault.New(fault.Unsupported, "an egress proxy is not served here yet; leave out egressProxy")
	case len(n.Rules) > 0:
		return fault.New(fault.Unsupported, "header rules of the network are not served here yet; leave out rules")
	case len(n.HTTPSPorts) > 0:
		return fault.New(fault.Unsupported, "ports that speak TLS inside a sandbox are not served here yet; leave out httpsPorts")
	case n.MaskRequestHost != "" && !maskForm.MatchString(strings.ReplaceAll(n.MaskRequestHost, "${PORT}", "0")):
		return fault.New(fault.Invalid, "maskRequestHost %.80q is not a host name", n.MaskRequestHost)
	}
	for _, server := range n.DNSServers { // they matter to domain names in allowOut alone, which are refused
		if addr, err := netip.ParseAddr(server); err != nil || !addr.Is4() {
			return fault.New(fault.Invalid, "dnsServers: %.80q is not an IPv4 address", server)
		}
	}
	return nil
}

func (n Network) private() bool { return n.AllowPublicTraffic != nil && !*n.AllowPublicTraffic }

// shown is what a listing of the sandbox gives back.
func (n Network) shown() json.RawMessage {
	n.EgressProxy, n.Rules = nil, nil
	b, err := json.Marshal(n)
	if err != nil || string(b) == "{}" {
		return nil
	}
	return b
}

var everywhere = netip.MustParsePrefix("0.0.0.0/0")

// Policy says it in the domain's words; nil is the server's default.
func (n Network) Policy(internet *bool) (*policy.Network, error) {
	deny, err := denied(n.DenyOut)
	if err != nil {
		return nil, err
	}
	if internet != nil && !*internet {
		deny = append(deny, everywhere)
	}
	all := slices.Contains(deny, everywhere)
	allow, err := allowed(n.AllowOut, all)
	if err != nil {
		return nil, err
	}
	switch {
	case !all && slices.ContainsFunc(allow, policy.Named): // kept, so that the domain refuses it
		return &policy.Network{Mode: policy.Internet, Allow: allow, Deny: deny}, nil
	case all && slices.ContainsFunc(allow, policy.Named):
		return &policy.Network{Mode: policy.List, Allow: allow}, nil
	case len(deny) == 0, slices.Contains(allow, everywhere): // allowOut takes nothing away and wins over every denyOut
		return nil, nil
	case all && len(allow) == 0:
		return &policy.Network{Mode: policy.None}, nil
	case all:
		return &policy.Network{Mode: policy.List, Allow: allow}, nil
	}
	return &policy.Network{Mode: policy.Internet, Allow: allow, Deny: deny}, nil
}

// narrows reports whether a policy only takes away, so that it opens nothing where the server's default is stricter. One
// that denies everything names what it wants open.
func narrows(p *policy.Network) bool { return p != nil && p.Mode == policy.Internet }

func denied(texts []string) ([]netip.Prefix, error) {
	var list []netip.Prefix
	for _, text := range texts {
		p, ok := prefix(text)
		if !ok {
			return nil, fault.New(fault.Invalid, "denyOut: %.80q is not an IP address or CIDR block; names cannot be denied", text)
		}
		if p.Addr().Is4() { // of IPv6 nothing leaves a sandbox anyway
			list = append(list, p)
		}
	}
	return list, nil
}

func allowed(texts []string, closedElse bool) ([]netip.Prefix, error) {
	var list []netip.Prefix
	for _, text := range texts {
		p, ok := prefix(text)
		switch {
		case !ok && !closedElse:
			return nil, fault.New(fault.Invalid, "allowOut: the domain name %.80q needs 0.0.0.0/0 in denyOut", text)
		case !ok:
			return nil, fault.New(fault.Unsupported, "allowOut: domain names such as %.80q are not served here yet; use IP addresses or CIDR blocks", text)
		case !p.Addr().Is4():
			return nil, fault.New(fault.Unsupported, "allowOut: %.80q is IPv6; only IPv4 leaves a sandbox", text)
		}
		list = append(list, p)
	}
	return list, nil
}

func prefix(text string) (netip.Prefix, bool) {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
		return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), true
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	return p.Masked(), true
}

// NetworkUpdate is the body of PUT …/network, which replaces everything that it leaves out.
type NetworkUpdate struct {
	Network
	Internet *bool `json:"allow_internet_access"`
}

func (a *API) setNetwork(c *call) error {
	var req NetworkUpdate
	if err := c.decode(&req); err != nil {
		return err
	}
	if err := req.check(); err != nil {
		return err
	}
	want, err := req.Policy(req.Internet)
	if err != nil {
		return err
	}

	change := sandbox.NetworkChange{Network: want, Narrow: narrows(want), Annotate: req.annotate}
	if _, err := a.sandboxes.ChangeNetwork(c.ctx(), c.who, c.id, change); err != nil {
		return err
	}

	return c.nothing()
}

// annotate says what is kept of the change, or why it cannot be made now.
func (n NetworkUpdate) annotate(sb sandbox.Sandbox) (map[string]string, error) {
	if sb.State == sandbox.StatePaused {
		return nil, fault.New(fault.Conflict, "Sandbox %s is paused; connect to it first", sb.ID)
	}
	o, err := target.Decode(sb)
	if err != nil {
		return nil, err
	}
	o.Internet, o.Network = n.Internet, n.replace(o)
	return annotations(o), nil
}

// replace is what a listing shows from now on: what guards the way in stays as it was.
func (n NetworkUpdate) replace(o target.Options) json.RawMessage {
	var before Network
	_ = json.Unmarshal(o.Network, &before) // nothing was asked for, or it was decoded at the create
	out := n.Network
	out.AllowPublicTraffic, out.MaskRequestHost = before.AllowPublicTraffic, before.MaskRequestHost
	return out.shown()
}
