package resolver

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

const headerSize = 12

// check takes a packet apart. It returns the query, or what to answer instead, or neither for a packet that deserves
// no answer.
func check(packet []byte) (query *dns.Msg, refusal []byte) {
	if len(packet) < headerSize || len(packet) > maxQuery || packet[2]&0x80 != 0 {
		return nil, nil // answering an answer is how two servers talk for ever
	}
	m := &dns.Msg{}
	if opcode := int(packet[2]>>3) & 0xf; opcode != dns.OpcodeQuery {
		return nil, refuseHeader(packet, dns.RcodeNotImplemented)
	}
	count := func(at int) uint16 { return binary.BigEndian.Uint16(packet[at:]) }
	if count(4) != 1 || count(6) != 0 || count(8) != 0 || count(10) > 2 || m.Unpack(packet) != nil || len(m.Question) != 1 {
		return nil, refuseHeader(packet, dns.RcodeFormatError)
	}
	if q := m.Question[0]; q.Qclass != dns.ClassINET || !answerable(q.Qtype) {
		return nil, refuse(m, dns.RcodeRefused)
	}
	return m, nil
}

// answerable refuses zone transfers, ANY and the other types that are questions about the protocol, not about a name.
func answerable(t uint16) bool {
	return t != dns.TypeNone && t != dns.TypeOPT && (t < 128 || t > 255)
}

// forward makes the query that goes upstream. Nothing of the client's packet but the question and two flags is in it: a
// sandbox cannot choose ids or options that another server sees.
func forward(query *dns.Msg) *dns.Msg {
	m := &dns.Msg{}
	m.Id = dns.Id()
	m.RecursionDesired = true
	m.CheckingDisabled = query.CheckingDisabled
	m.Question = []dns.Question{query.Question[0]}
	opt := query.IsEdns0()
	m.SetEdns0(maxDatagram, opt != nil && opt.Do())
	return m
}

// relay turns an upstream's answer into one to the client's query, cut to what the client takes.
func relay(query, got *dns.Msg, stream bool) []byte {
	m := &dns.Msg{}
	m.SetReply(query)
	m.Rcode, m.RecursionAvailable, m.AuthenticatedData = got.Rcode, true, got.AuthenticatedData
	m.Compress = true
	m.Answer, m.Ns = got.Answer, got.Ns
	for _, rr := range got.Extra {
		if rr.Header().Rrtype != dns.TypeOPT && rr.Header().Rrtype != dns.TypeTSIG {
			m.Extra = append(m.Extra, rr)
		}
	}
	size := plainAnswer
	if opt := query.IsEdns0(); opt != nil {
		m.SetEdns0(maxDatagram, opt.Do())
		size = min(max(plainAnswer, int(opt.UDPSize())), maxDatagram)
	} else if m.Rcode > 0xf {
		m.Rcode = dns.RcodeServerFailure // extended codes need EDNS to be said
	}
	if stream {
		size = dns.MaxMsgSize
	}
	m.Truncate(size)
	out, err := m.Pack()
	if err != nil || len(out) > size {
		return refuse(query, dns.RcodeServerFailure)
	}
	return out
}

func refuse(query *dns.Msg, rcode int) []byte {
	m := &dns.Msg{}
	m.SetRcode(query, rcode)
	m.RecursionAvailable = true
	if opt := query.IsEdns0(); opt != nil {
		m.SetEdns0(maxDatagram, opt.Do())
	}
	out, err := m.Pack()
	if err != nil {
		return nil
	}
	return out
}

// refuseHeader answers a packet of which only the header is trusted.
func refuseHeader(packet []byte, rcode byte) []byte {
	out := make([]byte, headerSize)
	copy(out, packet[:2])
	out[2] = 0x80 | packet[2]&0x79 // an answer, with the query's opcode and its wish for recursion
	out[3] = 0x80 | rcode
	return out
}
