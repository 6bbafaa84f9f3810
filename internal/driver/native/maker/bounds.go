package maker

import (
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// What a server may ask of the maker at most. The server checks all of this itself; these bounds hold
// for one that an attacker has taken over.
const (
	maxConnections = 4096
	// A pool with its zygotes takes 100 to 200 MB. Pools may take about half of the host's memory.
	poolMemory = 128 << 20 // so one for each 256 MiB
	fewPools   = 16
)

var tenantForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

func checkTenantName(tenant string) error {
	if !tenantForm.MatchString(tenant) {
		return fault.New(fault.Invalid, "tenant %.70q: use up to 63 of a-z, 0-9 and -, not at either end", tenant)
	}
	return nil
}

// checkLimits refuses a sandbox without limits. Zero for disk and open files is the template's limit.
func checkLimits(l template.Limits) error {
	if !(l.CPUs > 0) || l.MemoryBytes <= 0 || l.Pids <= 0 || l.DiskBytes < 0 || l.OpenFiles < 0 {
		return fault.New(fault.Invalid, "a sandbox has limits of processors, memory and processes; got %+v", l)
	}
	return nil
}

// mostPools is how many templates of tenants a host keeps ready at once, also in use.
func mostPools() int {
	var host unix.Sysinfo_t
	if unix.Sysinfo(&host) != nil {
		return fewPools
	}
	memory := uint64(host.Totalram) * uint64(host.Unit)
	return max(fewPools, int(memory/2/poolMemory))
}
