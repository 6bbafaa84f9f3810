package hostcheck

import (
	"context"
	"slices"
	"strings"
)

func firewall(_ context.Context, h *host) []Finding {
	const name = "nftables"
	if !h.real() {
		return notTried(name)
	}
	if err := tryFirewall(); err != nil {
		return one(name, Refuse, "modprobe nf_tables nft_chain_nat nft_ct nft_masq", "a table with a set, connection tracking and masquerading cannot be made, so that sandboxes could not be kept from each other and from this host: %v", err)
	}
	return one(name, OK, "", "sets, connection tracking and masquerading work")
}

func veth(_ context.Context, h *host) []Finding {
	const name = "veth"
	if !h.real() {
		return notTried(name)
	}
	if err := tryVeth(); err != nil {
		return one(name, Refuse, "modprobe veth", "a pair of virtual network devices cannot be made: %v", err)
	}
	return one(name, OK, "", "pairs of virtual network devices can be made")
}

func forwarding(_ context.Context, h *host) []Finding {
	const name = "forwarding"
	var findings []Finding
	if h.read("/proc/sys/net/ipv4/ip_forward") == "1" {
		findings = one(name, OK, "", "on")
	} else {
		findings = one(name, Note, "sysctl -w net.ipv4.ip_forward=1, where Cove may not do it", "off: Cove switches it on when it starts, or sandboxes reach no network outside this host")
	}
	if strings.Contains(h.read("/proc/net/ip_tables_names"), "filter") {
		findings = append(findings, one("other firewalls", Note, "iptables -I DOCKER-USER -i cv+ -j ACCEPT, and the same with -o, where sandboxes have no network", "legacy iptables is in use beside nftables; what it drops stays dropped")...)
	}
	if !h.real() {
		return findings
	}
	dropping, err := droppingForwardChains()
	switch {
	case err != nil:
		findings = append(findings, one("other firewalls", Note, "", "existing rules cannot be listed: %v", err)...)
	case slices.Contains(dropping, "filter/FORWARD"):
		findings = append(findings, one("other firewalls", Warn, "iptables -I DOCKER-USER -i cv+ -j ACCEPT, and the same with -o", "the FORWARD chain drops by default, as Docker sets it: traffic of sandboxes is dropped unless accepted there")...)
	case len(dropping) > 0:
		findings = append(findings, one("other firewalls", Warn, "accept traffic from and to devices named cv* there", "%s drops forwarded traffic by default: also that of sandboxes", strings.Join(dropping, ", "))...)
	}
	return findings
}
