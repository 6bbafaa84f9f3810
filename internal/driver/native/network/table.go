package network

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Constants of linux/netfilter/nf_tables.h that x/sys does not carry.
const (
	tableOwned      = 0x2 // NFT_TABLE_F_OWNER, kernel 5.12
	tablePersists   = 0x4 // NFT_TABLE_F_PERSIST, kernel 6.9
	setConcat       = 0x80
	setDescConcat   = 2
	nfnlBatchBegin  = 0x10
	nfnlBatchEnd    = 0x11
	elementsPerMsg  = 512 // an attribute holds 64 KiB
	typeIPv4        = 7   // datatype numbers of the nft program: they make `nft list table` readable
	typeIfname      = 41
	typeMark        = 19 // any four bytes
	typeConcatShift = 6
)

// The sets. Those of names are keyed by interface, those of sources by the sandbox's address.
const (
	setGuard       = "guard"        // interface . source: who may use which address
	setInternet    = "internet"     // source: may reach public addresses
	setDNS         = "dns"          // source: may ask the resolver
	setAllows      = "allows"       // source: reaches what allow says and nothing else
	setDenies      = "denies"       // source: has elements in deny
	setAllow       = "allow"        // source . network . length; of a source in internet: what deny does not take away
	setDeny        = "deny"         // source . network . length
	setNeverPublic = "never_public" // destination range
	setMetadata    = "metadata"     // destination range
	setRate        = "rate"         // source: new connections per second, filled by packets
	setOpen        = "open"         // source: connections at once, filled by packets
	setQueries     = "queries"      // source: DNS packets per second, filled by packets
	setClosed      = "closed"       // interfaces between which this host did not forward before us
)

// policySets are the sets that sandboxes have elements in.
var policySets = []string{setGuard, setInternet, setDNS, setAllows, setDenies, setAllow, setDeny}

// element is a key of a set.
type element struct {
	key      []byte
	rangeEnd bool // in a set of ranges: closes the one that the element before it opened
}

// transaction collects changes to the table that the kernel takes all at once or not at all.
type transaction struct {
	table string
	msgs  []message
}

func (t *transaction) add(what string, typ, flags uint16, fill func(*attrs)) {
	body := attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	fill(&body)
	t.msgs = append(t.msgs, message{what, unix.NFNL_SUBSYS_NFTABLES<<8 | typ, flags, body})
}

func (t *transaction) newTable(flags uint32) {
	t.add("create table", unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(a *attrs) {
		a.text(unix.NFTA_TABLE_NAME, t.table)
		a.bigNumber(unix.NFTA_TABLE_FLAGS, flags)
	})
}

func (t *transaction) deleteTable() {
	t.add("delete table", unix.NFT_MSG_DELTABLE, 0, func(a *attrs) { a.text(unix.NFTA_TABLE_NAME, t.table) })
}

// set describes a set: field sizes with their nft types, and kernel flags.
type set struct {
	name   string
	flags  uint32
	fields [][2]uint32 // size, type
}

func (t *transaction) newSet(s set) {
	t.add("create set "+s.name, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func(a *attrs) {
		var size, kind uint32
		for _, f := range s.fields {
			size += f[0]
			kind = kind<<typeConcatShift | f[1]
		}
		flags := s.flags
		if len(s.fields) > 1 {
			flags |= setConcat
		}
		a.text(unix.NFTA_SET_TABLE, t.table)
		a.text(unix.NFTA_SET_NAME, s.name)
		a.bigNumber(unix.NFTA_SET_FLAGS, flags)
		a.bigNumber(unix.NFTA_SET_KEY_TYPE, kind)
		a.bigNumber(unix.NFTA_SET_KEY_LEN, size)
		a.bigNumber(unix.NFTA_SET_ID, uint32(len(t.msgs)))
		if len(s.fields) > 1 {
			a.nest(unix.NFTA_SET_DESC, func(a *attrs) {
				a.nest(setDescConcat, func(a *attrs) {
					for _, f := range s.fields {
						a.nest(unix.NFTA_LIST_ELEM, func(a *attrs) { a.bigNumber(unix.NFTA_SET_DESC_SIZE, f[0]) })
					}
				})
			})
		}
	})
}

func (t *transaction) elements(typ, flags uint16, set string, list []element) {
	for len(list) > 0 {
		part := list[:min(elementsPerMsg, len(list))]
		list = list[len(part):]
		t.add("elements of set "+set, typ, flags, func(a *attrs) {
			a.text(unix.NFTA_SET_ELEM_LIST_TABLE, t.table)
			a.text(unix.NFTA_SET_ELEM_LIST_SET, set)
			a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(a *attrs) {
				for _, e := range part {
					a.nest(unix.NFTA_LIST_ELEM, e.encode)
				}
			})
		})
	}
}

func (e element) encode(a *attrs) {
	if e.rangeEnd {
		a.bigNumber(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	a.nest(unix.NFTA_SET_ELEM_KEY, func(a *attrs) { a.put(unix.NFTA_DATA_VALUE, e.key...) })
}

// insert fails if an element is already there: two sandboxes never share one, so that would be our defect.
func (t *transaction) insert(set string, list []element) {
	t.elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|unix.NLM_F_EXCL, set, list)
}

func (t *transaction) remove(set string, list []element) {
	t.elements(unix.NFT_MSG_DELSETELEM, 0, set, list)
}

// hook places a base chain; its policy is accept, since most packets are not ours to judge.
type hook struct {
	kind     string
	num      uint32
	priority int32
}

func (t *transaction) newChain(name string, h *hook) {
	t.add("create chain "+name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(a *attrs) {
		a.text(unix.NFTA_CHAIN_TABLE, t.table)
		a.text(unix.NFTA_CHAIN_NAME, name)
		if h == nil {
			return
		}
		a.nest(unix.NFTA_CHAIN_HOOK, func(a *attrs) {
			a.bigNumber(unix.NFTA_HOOK_HOOKNUM, h.num)
			a.bigNumber(unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
		})
		a.text(unix.NFTA_CHAIN_TYPE, h.kind)
	})
}

func (t *transaction) rule(chain string, parts ...[]expr.Any) {
	t.add("add rule to "+chain, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(a *attrs) {
		a.text(unix.NFTA_RULE_TABLE, t.table)
		a.text(unix.NFTA_RULE_CHAIN, chain)
		a.nest(unix.NFTA_RULE_EXPRESSIONS, func(a *attrs) {
			for _, part := range parts {
				for _, e := range part {
					data, err := expr.Marshal(unix.NFPROTO_INET, e)
					if err != nil {
						panic(fmt.Sprintf("network: expression %T: %v", e, err)) // only constants reach here
					}
					a.put(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data...)
				}
			}
		})
	})
}

// commit sends the transaction. One acknowledgement, asked of its last message, comes after the kernel took the whole;
// failures are reported for every message that is at fault.
func (t *transaction) commit(s *socket) error {
	if len(t.msgs) == 0 {
		return nil
	}
	border := attrs{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	t.msgs[len(t.msgs)-1].flags |= unix.NLM_F_ACK
	all := make([]message, 0, len(t.msgs)+2)
	all = append(all, message{"begin transaction", nfnlBatchBegin, 0, border})
	all = append(all, t.msgs...)
	all = append(all, message{"commit transaction", nfnlBatchEnd, 0, border})
	_, err := s.exchange(all...)
	return err
}

func source(a netip.Addr) []byte { b := a.As4(); return b[:] }

func guardElement(name string, a netip.Addr) element {
	return element{key: append(nameKey(name), source(a)...)}
}

func nameKey(name string) []byte {
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

func sourceElement(a netip.Addr) element { return element{key: source(a)} }

func cellElements(a netip.Addr, cells []cell) []element {
	var list []element
	for _, c := range cells {
		key := append(make([]byte, 0, 12), source(a)...)
		key = binary.BigEndian.AppendUint32(key, c.network)
		list = append(list, element{key: binary.BigEndian.AppendUint32(key, c.bits)})
	}
	return list
}

// rangeElements are the elements of a plain interval set: an opening key and a closing one, which is left out where
// the range runs to the last address.
func rangeElements(spans []span) []element {
	var list []element
	for _, s := range spans {
		list = append(list, element{key: binary.BigEndian.AppendUint32(nil, s.first)})
		if s.last != 1<<32-1 {
			list = append(list, element{key: binary.BigEndian.AppendUint32(nil, s.last+1), rangeEnd: true})
		}
	}
	return list
}
