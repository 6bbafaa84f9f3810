package egress

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// status is what every call about the policy answers.
type status struct {
	Status      string        `json:"status"`
	Mode        string        `json:"mode"`
	Enforcement string        `json:"enforcementMode"`
	Policy      access.Policy `json:"policy"`
	Reason      string        `json:"reason,omitempty"`
}

func (c *call) answer(p access.Policy, reason string) error {
	mode := "enforcing"
	switch {
	case len(p.Egress) > 0:
	case p.Default() == access.Allow:
		mode = "allow_all"
	default:
		mode = "deny_all"
	}
	// Addresses are enforced by the packet filter, which is what clients know under this name.
	c.answerWith(http.StatusOK, status{"ok", mode, "dns+nft", p, reason})
	return nil
}

func (h *Handler) get(c *call) error {
	sb, err := h.sandboxes.Get(c.r.Context(), c.t.Who, c.t.Sandbox.ID)
	if err != nil {
		return err
	}
	p, err := current(sb)
	if err != nil {
		return err
	}
	return c.answer(p, "")
}

// current is a sandbox's policy: as it was asked for, or what the domain says when nobody has.
func current(sb sandbox.Sandbox) (access.Policy, error) {
	facts, err := access.Decode(sb)
	if err != nil {
		return access.Policy{}, err
	}
	if facts.Policy != nil {
		return *facts.Policy, nil
	}
	return said(sb.Network), nil
}

// said puts a policy of the domain's into the words of this API, in which the first rule wins.
func said(n policy.Network) access.Policy {
	rules := func(action access.Action, list []netip.Prefix) (out []access.Rule) {
		for _, p := range list {
			out = append(out, access.Rule{Action: action, Target: target(p)})
		}
		return out
	}
	allow, deny := rules(access.Allow, n.Allow), rules(access.Deny, n.Deny)
	switch n.Mode {
	case policy.Internet:
		return access.Policy{DefaultAction: access.Allow, Egress: slices.Concat(allow, deny)}
	case policy.List:
		return access.Policy{DefaultAction: access.Deny, Egress: slices.Concat(deny, allow)}
	case policy.None:
	}
	return access.Policy{DefaultAction: access.Deny}
}

// target is a block as clients write it: an address alone has no length.
func target(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

func (h *Handler) replace(c *call) error {
	raw, err := c.body()
	if err != nil {
		return err
	}
	want, err := decodePolicy(raw)
	if err != nil {
		return err
	}
	p, err := h.change(c, func(access.Policy) access.Policy { return want })
	if err != nil {
		return err
	}
	return c.answer(p, "")
}

// decodePolicy reads a whole policy; nothing is one that denies everything.
func decodePolicy(raw []byte) (access.Policy, error) {
	p := access.Policy{}
	if len(bytes.TrimSpace(raw)) > 0 {
		if err := json.Unmarshal(raw, &p); err != nil {
			return p, fault.New(fault.Invalid, "the body is not the JSON of a policy: {\"defaultAction\", \"egress\": [{\"action\", \"target\"}]}")
		}
	}
	p.Normalise()
	return p, checkRules(p.Egress)
}

// decodeRules reads the rules of a patch.
func decodeRules(raw []byte) ([]access.Rule, error) {
	var rules []access.Rule
	if err := json.Unmarshal(raw, &rules); err != nil || rules == nil {
		return nil, fault.New(fault.Invalid, "the body is not a JSON array of rules: [{\"action\", \"target\"}]")
	}
	return rules, checkRules(rules)
}

func checkRules(rules []access.Rule) error {
	if len(rules) > access.MaxRules {
		return &refusal{http.StatusRequestEntityTooLarge, "EGRESS::TOO_LARGE", "a policy has at most 4096 rules"}
	}
	for i := range rules {
		rules[i].Normalise()
	}
	return nil
}

// decodeTargets reads the targets whose rules are to go.
func decodeTargets(raw []byte) ([]string, error) {
	var targets []string
	if err := json.Unmarshal(raw, &targets); err != nil || targets == nil {
		return nil, fault.New(fault.Invalid, "the body is not a JSON array of targets")
	}
	return targets, nil
}

func (h *Handler) patch(c *call) error {
	raw, err := c.body()
	if err != nil {
		return err
	}
	rules, err := decodeRules(raw)
	if err != nil {
		return err
	}
	p, err := h.change(c, func(p access.Policy) access.Policy { return merged(p, rules) })
	if err != nil {
		return err
	}
	return c.answer(p, "")
}

// merged puts new rules before those that there are; of several for one target the first counts.
func merged(p access.Policy, rules []access.Rule) access.Policy {
	seen := map[string]bool{}
	out := access.Policy{DefaultAction: p.Default()}
	for _, r := range slices.Concat(rules, p.Egress) {
		if key := strings.ToLower(r.Target); !seen[key] {
			seen[key] = true
			out.Egress = append(out.Egress, r)
		}
	}
	return out
}

func (h *Handler) remove(c *call) error {
	raw, err := c.body()
	if err != nil {
		return err
	}
	targets, err := decodeTargets(raw)
	if err != nil {
		return err
	}
	var found bool
	p, err := h.change(c, func(p access.Policy) access.Policy {
		p.DefaultAction = p.Default()
		left := slices.DeleteFunc(slices.Clone(p.Egress), func(r access.Rule) bool {
			return slices.ContainsFunc(targets, func(t string) bool { return strings.EqualFold(strings.TrimSpace(t), r.Target) })
		})
		found = len(left) < len(p.Egress)
		p.Egress = left
		return p
	})
	if err != nil {
		return err
	}
	reason := ""
	if !found {
		reason = "no matching targets found"
	}
	return c.answer(p, reason)
}

// errChanged is a policy that another request has changed since it was looked at.
var errChanged = errors.New("the policy has changed meanwhile")

// maxTries is how often a change is tried while others come between.
const maxTries = 16

// change gives a sandbox a policy that follows from the one that it has, and tells which.
func (h *Handler) change(c *call, next func(access.Policy) access.Policy) (access.Policy, error) {
	for range maxTries {
		sb, err := h.sandboxes.Get(c.r.Context(), c.t.Who, c.t.Sandbox.ID)
		if err != nil {
			return access.Policy{}, err
		}
		before, err := current(sb)
		if err != nil {
			return access.Policy{}, err
		}
		want := next(before)
		if len(want.Egress) > access.MaxRules {
			return access.Policy{}, &refusal{http.StatusRequestEntityTooLarge, "EGRESS::TOO_LARGE", "a policy has at most 4096 rules"}
		}
		network, narrows, err := want.Network()
		if err != nil {
			return access.Policy{}, err
		}
		_, err = h.sandboxes.ChangeNetwork(c.r.Context(), c.t.Who, c.t.Sandbox.ID, sandbox.NetworkChange{
			Network: &network, Narrow: narrows, Annotate: annotate(before, want),
		})
		if !errors.Is(err, errChanged) {
			return want, err
		}
	}
	return access.Policy{}, fault.New(fault.Unavailable, "others change this policy at the same time; try again")
}

// annotate keeps what was asked for with the sandbox, unless it is not what it was based on.
func annotate(before, want access.Policy) func(sandbox.Sandbox) (map[string]string, error) {
	return func(sb sandbox.Sandbox) (map[string]string, error) {
		if sb.State == sandbox.StatePaused {
			return nil, fault.New(fault.Conflict, "sandbox %s is paused; resume it first", sb.ID)
		}
		now, err := current(sb)
		if err != nil {
			return nil, err
		}
		if !reflect.DeepEqual(now, before) {
			return nil, errChanged
		}
		facts, err := access.Decode(sb)
		if err != nil {
			return nil, err
		}
		facts.Policy = &want
		return map[string]string{access.Annotation: facts.Encode()}, nil
	}
}
