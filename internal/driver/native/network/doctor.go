package network

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
)

var familyNames = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
}

// Blockers names what else on this host drops forwarded packets, or packets to the host, unless told otherwise: Docker
// and firewalls do. In netfilter an accept of ours cannot override another table's drop, so the operator has to allow
// our interfaces there; doctor prints these lines.
func Blockers() ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("list firewalls: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("list firewalls: %w", err)
	}
	var found []string
	for _, c := range chains {
		family, known := familyNames[c.Table.Family]
		if !known || family == "ip6" || strings.HasPrefix(c.Table.Name, tablePrefix) || c.Hooknum == nil {
			continue
		}
		hook := *c.Hooknum
		judges := hook == *nftables.ChainHookForward || hook == *nftables.ChainHookInput
		if judges && c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop {
			found = append(found, fmt.Sprintf("nftables chain %s %s %s drops by default", family, c.Table.Name, c.Name))
		}
	}
	// Rules of the older iptables kernel interface are not visible to nftables at all.
	if legacy, err := os.ReadFile("/proc/net/ip_tables_names"); err == nil && slices.Contains(strings.Fields(string(legacy)), "filter") {
		found = append(found, "legacy iptables has a filter table; see iptables-legacy -S FORWARD")
	}
	return found, nil
}
