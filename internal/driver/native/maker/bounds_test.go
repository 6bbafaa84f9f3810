package maker // inside: a maker of its own for each bound would make namespaces

import (
	"math"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

func TestBounds_Limits(t *testing.T) {
	good := template.Limits{CPUs: 0.5, MemoryBytes: 1 << 20, Pids: 1}
	if err := checkLimits(good); err != nil {
		t.Errorf("%+v: %v", good, err)
	}
	for name, change := range map[string]func(*template.Limits){
		"none":                          func(l *template.Limits) { *l = template.Limits{} },
		"no processors":                 func(l *template.Limits) { l.CPUs = 0 },
		"processors that are no number": func(l *template.Limits) { l.CPUs = math.NaN() },
		"no memory":                     func(l *template.Limits) { l.MemoryBytes = 0 },
		"negative processes":            func(l *template.Limits) { l.Pids = -1 },
		"negative disk":                 func(l *template.Limits) { l.DiskBytes = -1 },
		"negative open files":           func(l *template.Limits) { l.OpenFiles = -1 },
	} {
		l := good
		change(&l)
		if err := checkLimits(l); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBounds_Pools(t *testing.T) {
	m := &Maker{pools: map[poolKey]*pool{}, spoilt: map[string]bool{}, sandboxes: map[string]*live{}}
	for i := range mostPools() {
		p := &pool{key: poolKey{digest: string(rune('a' + i))}}
		m.pools[p.key] = p
		m.sandboxes[p.key.digest] = &live{pool: p}
	}
	if _, err := m.poolFor("acme", &template.Template{Name: "base", Digest: "another"}); !fault.Is(err, fault.Exhausted) {
		t.Errorf("one more pool than the host has memory for: %v", err)
	}
	if _, err := m.poolFor("", &template.Template{Digest: "a"}); err != nil {
		t.Errorf("a pool that is there: %v", err)
	}
}

func TestBounds_TenantNames(t *testing.T) {
	m := &Maker{}
	for _, tenant := range []string{"", "a b", "../acme", "-a", "A", string(make([]byte, 100))} {
		if err := m.Prepare(t.Context(), tenant, "base", "x"); !fault.Is(err, fault.Invalid) {
			t.Errorf("tenant %q: %v", tenant, err)
		}
	}
}
