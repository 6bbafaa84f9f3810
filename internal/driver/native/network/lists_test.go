package network_test

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/covehq/cove/internal/driver/native/network"
	"github.com/covehq/cove/internal/policy"
)

// FuzzAllowList checks the cells against what the policy says: an address is open when some prefix contains it and, if
// it is private, when that prefix lies within the same private block.
func FuzzAllowList(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0}, uint32(0x0a090909))
	f.Add([]byte{224, 0, 0, 0, 3}, uint32(0xf0000001)) // two private blocks side by side
	f.Add([]byte{10, 0, 0, 0, 8, 9, 0, 0, 0, 7}, uint32(0x0a090909))
	f.Add([]byte{255, 255, 255, 255, 32, 128, 0, 0, 0, 1}, uint32(0xffffffff))
	f.Fuzz(func(t *testing.T, raw []byte, probe uint32) {
		var list []netip.Prefix
		for ; len(raw) >= 5 && len(list) < 256; raw = raw[5:] {
			list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte(raw)), int(raw[4]%33)))
		}
		addr := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, probe)))
		private := network.Private(addr)
		want := false
		for _, p := range list {
			if !p.Contains(addr) {
				continue
			}
			within := slices.ContainsFunc(policy.Private, func(b netip.Prefix) bool {
				return b.Bits() <= p.Bits() && b.Contains(p.Masked().Addr())
			})
			want = want || !private || within
		}
		got, cells := network.Opens(list, addr)
		if got != want {
			t.Errorf("%v opens %v: %v, want %v", list, addr, got, want)
		}
		if cells > 8*(len(list)+32) {
			t.Errorf("%d prefixes became %d cells", len(list), cells)
		}
	})
}
