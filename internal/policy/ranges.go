package policy

import "net/netip"

// Private is what mode Internet never reaches: the neighbourhood of whoever runs the sandbox. The documentation networks (192.0.2.0/24 and friends)
// are left out: labs and CI machines use them as if they were public.
var Private = prefixes("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
	"192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4")

// Metadata is what no policy opens: it hands out the machine's credentials. AWS and most others answer in 169.254.169.0/24, ECS and EKS in
// 169.254.170.0/24, Alibaba at 100.100.100.200, Azure's wire server at 168.63.129.16 (a public address), Oracle Classic at 192.0.0.192. IPv6
// (fd00:ec2::254) never leaves at all.
var Metadata = prefixes("169.254.169.0/24", "169.254.170.0/24", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32")

func prefixes(texts ...string) []netip.Prefix {
	list := make([]netip.Prefix, 0, len(texts))
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}

// Named reports whether a prefix of an allow list names private addresses: it lies within a private block. 0.0.0.0/0 means
// every public address and not the operator's network.
func Named(p netip.Prefix) bool { return within(p, Private) }
