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

// mostPools is how many pools, in use or kept ready, this host may have at once.
func (m *Maker) mostPools() int {
	if m.cfg.Pools > 0 {
		return m.cfg.Pools
	}
	var host unix.Sysinfo_t
	if unix.Sysinfo(&host) != nil {
		return fewPools
	}
	memory := uint64(host.Totalram) * uint64(host.Unit)
	return max(fewPools, int(memory/2/poolMemory))
}

// checkPools refuses one more pool of a tenant if the tenant has half of what the host may have, or
// if the host has all of it. Called with m.mu.
func (m *Maker) checkPools(tenant string) error {
	most, own := m.mostPools(), 0
	for key := range m.pools {
		if key.tenant == tenant {
			own++
		}
	}
	if own >= most/2 {
		return fault.Wrap(fault.Exhausted, errTenantPools, "the sandboxes of one tenant may use %d templates on this host at the same time, and a snapshot may count twice, with the template below it; end all sandboxes of one of yours first", most/2)
	}
	if len(m.pools) >= most {
		return fault.Wrap(fault.Exhausted, errManyPools, "this host's sandboxes use templates in %d pairs of a tenant and a template, which is as many as its memory allows; try again later", most)
	}
	return nil
}
