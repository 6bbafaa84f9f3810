package resolver

import "github.com/miekg/dns"

// Respond is what a packet would be answered if the upstream answered with got.
func Respond(packet []byte, got *dns.Msg, stream bool) []byte {
	query, refusal := check(packet)
	if query == nil {
		return refusal
	}
	if out, err := forward(query).Pack(); err != nil || len(out) > maxQuery {
		panic("a query that was accepted cannot be forwarded")
	}
	return relay(query, got, stream)
}

// MaxDatagram is the longest answer by UDP.
const MaxDatagram = maxDatagram
