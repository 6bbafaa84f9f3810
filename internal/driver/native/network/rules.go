package network

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// ruleset is everything that decides the text of the table; the elements of sandboxes come on top.
type ruleset struct {
	links   string       // prefix of this instance's interfaces
	every   string       // prefix of every Cove instance's interfaces
	gateway netip.Addr   // where the resolver answers
	scope   netip.Prefix // addresses of this instance's sandboxes
	limits  Limits
	closed  []string // host interfaces that did not forward before us; empty when the host was a router already
}

// write fills a new table. Base chains only sort packets; the chains below them decide.
//
//	prerouting (raw)  from a sandbox → ingress: forged, IPv6 and metadata end here, before conntrack remembers them
//	forward           from a sandbox → leaving → judge → admit or refuse;  to a sandbox → entering
//	input             from a sandbox → host: DNS to the gateway, nothing else
//	output            to a sandbox → answering: what the resolver and the refusals above send, nothing else
//	postrouting       masquerade
//
// Nothing that leaves is trusted because it is established: each packet meets the sets again, in both directions.
// That is a few lookups more per packet, and it is why a changed policy also ends the connections that it no longer
// allows, at once and without a search through the host's conntrack table.
func (r ruleset) write(t *transaction) {
	r.sets(t)
	for _, c := range []struct {
		name string
		hook *hook
	}{
		{"prerouting", &hook{"filter", unix.NF_INET_PRE_ROUTING, -300}},
		{"untracked", &hook{"filter", unix.NF_INET_LOCAL_OUT, -300}},
		{"input", &hook{"filter", unix.NF_INET_LOCAL_IN, -10}},
		{"forward", &hook{"filter", unix.NF_INET_FORWARD, -10}},
		{"output", &hook{"filter", unix.NF_INET_LOCAL_OUT, -10}},
		{"postrouting", &hook{"nat", unix.NF_INET_POST_ROUTING, 100}},
		{"ingress", nil}, {"leaving", nil}, {"judge", nil}, {"deny_to", nil}, {"allow_to", nil}, {"except_to", nil}, {"public_to", nil},
		{"admit", nil}, {"refuse", nil},
		{"entering", nil}, {"deny_from", nil}, {"allow_from", nil}, {"except_from", nil}, {"public_from", nil}, {"host", nil}, {"answering", nil},
	} {
		t.newChain(c.name, c.hook)
	}
	r.ingress(t)
	r.forward(t)
	r.leaving(t)
	r.entering(t)
	r.host(t)
}

func (r ruleset) sets(t *transaction) {
	ip, number, name := [2]uint32{4, typeIPv4}, [2]uint32{4, typeMark}, [2]uint32{unix.IFNAMSIZ, typeIfname}
	for _, s := range []set{
		{setGuard, 0, [][2]uint32{name, ip}},
		{setInternet, 0, [][2]uint32{ip}},
		{setDNS, 0, [][2]uint32{ip}},
		{setAllows, 0, [][2]uint32{ip}},
		{setDenies, 0, [][2]uint32{ip}},
		{setAllow, 0, [][2]uint32{ip, ip, number}},
		{setDeny, 0, [][2]uint32{ip, ip, number}},
		{setNeverPublic, unix.NFT_SET_INTERVAL, [][2]uint32{ip}},
		{setMetadata, unix.NFT_SET_INTERVAL, [][2]uint32{ip}},
		{setRate, unix.NFT_SET_EVAL, [][2]uint32{ip}},
		{setOpen, unix.NFT_SET_EVAL, [][2]uint32{ip}},
		{setQueries, unix.NFT_SET_EVAL, [][2]uint32{ip}},
	} {
		t.newSet(s)
	}
	t.insert(setNeverPublic, rangeElements(neverPublic))
	t.insert(setMetadata, rangeElements(metadata))
	if len(r.closed) > 0 {
		t.newSet(set{setClosed, 0, [][2]uint32{name}})
		var names []element
		for _, n := range r.closed {
			names = append(names, element{key: nameKey(n)})
		}
		t.insert(setClosed, names)
	}
}

func (r ruleset) ingress(t *transaction) {
	t.rule("prerouting", from(r.links), goTo("ingress"))

	t.rule("ingress", family(expr.CmpOpNeq, unix.NFPROTO_IPV4), drop())
	// IP options: nothing a sandbox needs, and a source route would name another destination than the one judged.
	t.rule("ingress", network(0, 1, reg1), mask(0x0f), compare(expr.CmpOpNeq, 5), drop())
	t.rule("ingress", meta(expr.MetaKeyIIFNAME, reg1), network(12, 4, reg2), lookup(setGuard, true), drop())
	// Here, before destination NAT: some hosts redirect the metadata address to an agent of their own.
	t.rule("ingress", daddr(), lookup(setMetadata, false), goTo("refuse"))
	// DNS is the resolver's to bound; untracked, a flood of it takes no room in the host's conntrack table.
	t.rule("ingress", daddr(), compare(expr.CmpOpEq, source(r.gateway)...), notrack())
	t.rule("untracked", to(r.links), family(expr.CmpOpEq, unix.NFPROTO_IPV4), saddr(), compare(expr.CmpOpEq, source(r.gateway)...), notrack())
}

func (r ruleset) forward(t *transaction) {
	t.rule("forward", from(r.links), goTo("leaving"))
	t.rule("forward", to(r.links), goTo("entering"))
	if len(r.closed) > 0 {
		// We turned forwarding on, and that opened every interface. Those that existed then stay closed to what arrives
		// from outside, except answers and what somebody redirects on purpose (a port published by Docker, started
		// after us).
		t.rule("forward", meta(expr.MetaKeyIIFNAME, reg1), lookup(setClosed, false), notTo(r.every),
			state(false, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), notRedirected(), drop())
	}
	t.rule("postrouting", family(expr.CmpOpEq, unix.NFPROTO_IPV4), r.fromScope(), notTo(r.links), []expr.Any{&expr.Masq{}})
}

func (r ruleset) leaving(t *transaction) {
	t.rule("leaving", to(r.every), drop()) // sandboxes do not see each other, nor those of another instance
	t.rule("leaving", state(true, expr.CtStateBitINVALID), drop())
	for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP} {
		t.rule("leaving", l4(p), goTo("judge"))
	}
	t.rule("leaving", goTo("refuse"))

	t.rule("judge", saddr(), lookup(setDenies, false), jump("deny_to"))
	t.rule("judge", saddr(), lookup(setAllows, false), goTo("allow_to"))
	t.rule("judge", goTo("public_to"))
	t.rule("deny_to", saddr(), lookup(setInternet, false), jump("except_to"))
	for _, bits := range cellBits {
		t.rule("deny_to", inCell(12, 16, bits), lookup(setDeny, false), goTo("refuse"))
		t.rule("allow_to", inCell(12, 16, bits), lookup(setAllow, false), goTo("admit"))
		t.rule("except_to", inCell(12, 16, bits), lookup(setAllow, false), goTo("public_to"))
	}
	t.rule("allow_to", goTo("refuse"))
	t.rule("public_to", daddr(), lookup(setNeverPublic, false), goTo("refuse"))
	t.rule("public_to", saddr(), lookup(setInternet, false), goTo("admit"))
	t.rule("public_to", goTo("refuse"))

	// What costs the host memory is a new connection: those are counted, per source.
	t.rule("admit", state(true, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept())
	t.rule("admit", notUnicast(), goTo("refuse"))
	t.rule("admit", saddr(), count(setRate, faster(r.limits.PerSecond, r.limits.Burst)), goTo("refuse"))
	t.rule("admit", saddr(), count(setOpen, &expr.Connlimit{Count: uint32(r.limits.Connections), Flags: connlimitOver}), goTo("refuse"))
	t.rule("admit", accept())

	// TCP is refused by a reset: ICMP errors are rate-limited by the kernel (net.ipv4.icmp_ratelimit), so a program that
	// tries a seventh address would hang, and a connection from before a policy change would ignore them.
	t.rule("refuse", l4(unix.IPPROTO_TCP), reject(unix.NFT_REJECT_TCP_RST, 0))
	t.rule("refuse", reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED))
}

func (r ruleset) entering(t *transaction) {
	t.rule("entering", family(expr.CmpOpNeq, unix.NFPROTO_IPV4), drop())
	t.rule("entering", state(true, expr.CtStateBitRELATED), l4(unix.IPPROTO_ICMP), accept())
	t.rule("entering", state(false, expr.CtStateBitESTABLISHED), drop())
	t.rule("entering", notAnswer(), drop())
	t.rule("entering", daddr(), lookup(setDenies, false), jump("deny_from"))
	t.rule("entering", daddr(), lookup(setAllows, false), goTo("allow_from"))
	t.rule("entering", goTo("public_from"))
	t.rule("deny_from", daddr(), lookup(setInternet, false), jump("except_from"))
	for _, bits := range cellBits {
		t.rule("deny_from", inCell(16, 12, bits), lookup(setDeny, false), drop())
		t.rule("allow_from", inCell(16, 12, bits), lookup(setAllow, false), accept())
		t.rule("except_from", inCell(16, 12, bits), lookup(setAllow, false), goTo("public_from"))
	}
	t.rule("allow_from", drop())
	t.rule("public_from", saddr(), lookup(setNeverPublic, false), drop())
	t.rule("public_from", daddr(), lookup(setInternet, false), accept())
	t.rule("public_from", drop())
}

func (r ruleset) host(t *transaction) {
	gateway := compare(expr.CmpOpEq, source(r.gateway)...)
	t.rule("input", from(r.links), goTo("host"))
	// The gateway address is local to the host, so a neighbour on the LAN that adds a route would find an open resolver.
	t.rule("input", family(expr.CmpOpEq, unix.NFPROTO_IPV4), daddr(), gateway, notFrom("lo\x00"), drop())
	t.rule("host", saddr(), lookup(setDNS, false), count(setQueries, faster(r.limits.Queries, r.limits.Queries)), drop())
	for _, p := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		t.rule("host", daddr(), gateway, l4(p), port(2), compare(expr.CmpOpEq, 0, dnsPort), saddr(), lookup(setDNS, false), accept())
	}
	t.rule("host", goTo("refuse"))

	t.rule("output", to(r.links), goTo("answering"))
	t.rule("answering", family(expr.CmpOpNeq, unix.NFPROTO_IPV4), drop())
	t.rule("answering", l4(unix.IPPROTO_ICMP), accept())
	t.rule("answering", l4(unix.IPPROTO_TCP), transport(13, 1), mask(tcpReset), compare(expr.CmpOpNeq, 0), accept())
	for _, p := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		t.rule("answering", saddr(), gateway, l4(p), port(0), compare(expr.CmpOpEq, 0, dnsPort), accept())
	}
	// Ports that a sandbox serves are reached through the agent, by who may; never by address from this host.
	t.rule("answering", goTo("refuse"))
}

const (
	reg1          = unix.NFT_REG_1
	reg1Second    = unix.NFT_REG32_01 // reg1 is four of these, of four bytes
	reg1Third     = unix.NFT_REG32_02
	reg2          = unix.NFT_REG_2
	redirected    = 1 << 5 // IPS_DST_NAT
	tcpReset      = 0x04
	dnsPort       = 53
	connlimitOver = 1 // NFT_CONNLIMIT_F_INV
	unicast       = unix.RTN_UNICAST
)

// The pieces of rules: each loads a register or tests it.

func meta(key expr.MetaKey, reg uint32) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: reg}}
}

func compare(op expr.CmpOp, data ...byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: op, Register: reg1, Data: data}}
}

func mask(bits ...byte) []expr.Any {
	return []expr.Any{&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: uint32(len(bits)), Mask: bits, Xor: make([]byte, len(bits))}}
}

// A comparison shorter than the register is a comparison of prefixes: "cva-*".
func from(prefix string) []expr.Any {
	return append(meta(expr.MetaKeyIIFNAME, reg1), compare(expr.CmpOpEq, []byte(prefix)...)...)
}

func notFrom(prefix string) []expr.Any {
	return append(meta(expr.MetaKeyIIFNAME, reg1), compare(expr.CmpOpNeq, []byte(prefix)...)...)
}

func to(prefix string) []expr.Any {
	return append(meta(expr.MetaKeyOIFNAME, reg1), compare(expr.CmpOpEq, []byte(prefix)...)...)
}

func notTo(prefix string) []expr.Any {
	return append(meta(expr.MetaKeyOIFNAME, reg1), compare(expr.CmpOpNeq, []byte(prefix)...)...)
}

func family(op expr.CmpOp, f byte) []expr.Any {
	return append(meta(expr.MetaKeyNFPROTO, reg1), compare(op, f)...)
}

func l4(protocol byte) []expr.Any {
	return append(meta(expr.MetaKeyL4PROTO, reg1), compare(expr.CmpOpEq, protocol)...)
}

func network(offset, size, reg uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size}}
}

func transport(offset, size uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: size}}
}

func port(offset uint32) []expr.Any { return transport(offset, 2) }
func saddr() []expr.Any             { return network(12, 4, reg1) }
func daddr() []expr.Any             { return network(16, 4, reg1) }

// inCell loads the key of a list: the sandbox's address, the other's network of that length, and the length.
func inCell(sandbox, other, bits uint32) []expr.Any {
	return slices.Concat(network(other, 4, reg1), mask(binary.BigEndian.AppendUint32(nil, cellMask(bits))...), []expr.Any{
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1Second, Len: 4, Mask: []byte{255, 255, 255, 255}, Xor: make([]byte, 4)},
		&expr.Immediate{Register: reg1Third, Data: binary.BigEndian.AppendUint32(nil, bits)},
	}, network(sandbox, 4, reg1))
}

func (r ruleset) fromScope() []expr.Any {
	bits := binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-r.scope.Bits()))
	return append(append(saddr(), mask(bits...)...), compare(expr.CmpOpEq, source(r.scope.Masked().Addr())...)...)
}

func lookup(set string, absent bool) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: reg1, SetName: set, Invert: absent}}
}

// count keeps a counter of its own for each source and matches when that one is over its limit.
func count(set string, counter expr.Any) []expr.Any {
	return []expr.Any{&expr.Dynset{SrcRegKey: reg1, SetName: set, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{counter}}}
}

func faster(perSecond, burst int) expr.Any {
	return &expr.Limit{Type: expr.LimitTypePkts, Unit: expr.LimitTimeSecond, Over: true, Rate: uint64(perSecond), Burst: uint32(burst)}
}

func bits(key expr.CtKey, some bool, wanted uint32) []expr.Any {
	op := expr.CmpOpNeq
	if !some {
		op = expr.CmpOpEq
	}
	load := []expr.Any{&expr.Ct{Register: reg1, Key: key}}
	return append(append(load, mask(binary.NativeEndian.AppendUint32(nil, wanted)...)...), compare(op, 0, 0, 0, 0)...)
}

func state(some bool, states uint32) []expr.Any { return bits(expr.CtKeySTATE, some, states) }
func notRedirected() []expr.Any                 { return bits(expr.CtKeySTATUS, false, redirected) }

// notAnswer matches the direction in which a connection was opened; answers are direction 1.
func notAnswer() []expr.Any {
	return append([]expr.Any{&expr.Ct{Register: reg1, Key: expr.CtKeyDIRECTION}}, compare(expr.CmpOpNeq, 1)...)
}

// notUnicast matches destinations that the host's routes call broadcast, local or unreachable.
func notUnicast() []expr.Any {
	fib := []expr.Any{&expr.Fib{Register: reg1, ResultADDRTYPE: true, FlagDADDR: true}}
	return append(fib, compare(expr.CmpOpNeq, binary.NativeEndian.AppendUint32(nil, unicast)...)...)
}

func reject(kind uint32, code uint8) []expr.Any {
	return []expr.Any{&expr.Reject{Type: kind, Code: code}}
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func accept() []expr.Any  { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() []expr.Any    { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }
func notrack() []expr.Any { return []expr.Any{&expr.Notrack{}} }
