package config

import (
	"fmt"
	"net/netip"
	"slices"
)

// Network is what the networks of sandboxes may be, whatever a request asks for.
type Network struct {
	MaxMode       string              `toml:"max_mode"`       // internet, list, none; empty: internet
	Private       []string            `toml:"private"`        // private networks that lists of every tenant may name
	TenantPrivate map[string][]string `toml:"tenant_private"` // tenant → private networks that its lists may name too
}

func (n Network) validate() error {
	if !slices.Contains([]string{"", "internet", "list", "none"}, n.MaxMode) {
		return fmt.Errorf("unknown network.max_mode %q: use internet, list or none", n.MaxMode)
	}
	if _, err := parsePrefixes("network.private", n.Private); err != nil {
		return err
	}
	for tenant, texts := range n.TenantPrivate {
		if _, err := parsePrefixes("network.tenant_private."+tenant, texts); err != nil {
			return err
		}
	}
	return nil
}

// PrivateNetworks are the private networks that lists may name, by tenant; those of the key everyTenant are for all.
func (n Network) PrivateNetworks(everyTenant string) (map[string][]netip.Prefix, error) {
	all := map[string][]netip.Prefix{}
	for tenant, texts := range n.TenantPrivate {
		list, err := parsePrefixes("network.tenant_private."+tenant, texts)
		if err != nil {
			return nil, err
		}
		all[tenant] = list
	}
	list, err := parsePrefixes("network.private", n.Private)
	if len(list) > 0 {
		all[everyTenant] = slices.Concat(all[everyTenant], list)
	}
	return all, err
}

// parsePrefixes reads networks, and addresses, which are networks of one.
func parsePrefixes(setting string, texts []string) ([]netip.Prefix, error) {
	var list []netip.Prefix
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
			list = append(list, netip.PrefixFrom(addr, addr.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %q is not a network such as 10.1.0.0/16", setting, text)
		}
		list = append(list, p)
	}
	return list, nil
}
