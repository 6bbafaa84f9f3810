package app

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// lookupLimit is how long the server's start waits for DNS before it says that there was no answer.
const lookupLimit = time.Second

// lookup asks as Python and Node do: through the C library, which knows more sources of names than
// Go's own resolver. Without getent it asks Go's.
func lookup(ctx context.Context, name string) []string {
	if getent, err := exec.LookPath("getent"); err == nil {
		out, err := exec.CommandContext(ctx, getent, "ahosts", name).Output()
		if err != nil {
			return nil
		}
		var found []string
		for line := range strings.Lines(string(out)) {
			if fields := strings.Fields(line); len(fields) > 0 && !slices.Contains(found, fields[0]) {
				found = append(found, fields[0])
			}
		}
		return found
	}
	found, _ := net.DefaultResolver.LookupHost(ctx, name)
	return found
}

// namesLead says whether the names of sandboxes' ports lead to this machine: SDKs that build them
// and programs that do so themselves need that.
func namesLead(domain string, lookup func(context.Context, string) []string) string {
	ctx, cancel := context.WithTimeout(context.Background(), lookupLimit) // the start prints this once and waits for it
	defer cancel()
	found := lookup(ctx, "49983-name-check."+domain)
	switch {
	case len(found) == 0 && ctx.Err() != nil:
		return fmt.Sprintf("the lookup of a name below %s had no answer within %v: see whether this machine reaches its DNS server, and whether there is a record for *.%s",
			domain, lookupLimit, domain)
	case len(found) == 0 && (domain == "localhost" || strings.HasSuffix(domain, ".localhost")):
		return "the C library knows no name below " + domain + ": apt-get install libnss-myhostname"
	case len(found) == 0:
		return "no name below " + domain + " is known: add a DNS record for *." + domain
	case !slices.ContainsFunc(found, isHere):
		return "names below " + domain + " lead to " + strings.Join(found, ", ") + ", which is not an address of this machine: a proxy there must pass the host on"
	}
	return ""
}

// isHere tells whether an address is one of this machine's.
func isHere(address string) bool {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return false
	}
	if ip.Unmap().IsLoopback() {
		return true
	}
	addresses, _ := net.InterfaceAddrs()
	return slices.ContainsFunc(addresses, func(a net.Addr) bool {
		own, err := netip.ParsePrefix(a.String())
		return err == nil && own.Addr().Unmap() == ip.Unmap()
	})
}
