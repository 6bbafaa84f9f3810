package maker // inside: a maker of its own for each bound would make namespaces

import (
	"errors"
	"fmt"
	"log/slog"
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

// poolMaker keeps books of pools without making a zygote or a shell.
func poolMaker(pools int) *Maker {
	return &Maker{
		cfg: Config{Pools: pools}, log: slog.New(slog.DiscardHandler), slots: newSlots(),
		pools: map[poolKey]*pool{}, spoilt: map[string]bool{}, sandboxes: map[string]*live{},
	}
}

// prepare is one request for a template, which finds a pool or makes one.
func (m *Maker) prepare(tenant string, t *template.Template) error {
	_, done, err := m.poolFor(tenant, t)
	if err == nil {
		done()
	}
	return err
}

// use has a sandbox of a tenant start from a template and live on.
func (m *Maker) use(t *testing.T, tenant string, from *template.Template) {
	t.Helper()
	p, done, err := m.poolFor(tenant, from)
	if err != nil {
		t.Fatal(err)
	}
	done()
	m.sandboxes[tenant+"-"+from.Digest] = &live{pool: p}
}

func named(i int) *template.Template {
	return &template.Template{Name: fmt.Sprint("t", i), Digest: fmt.Sprint("d", i)}
}

// wantFull checks that a template is refused for the reason of one bound.
func wantFull(t *testing.T, err, why error) {
	t.Helper()
	if !fault.Is(err, fault.Exhausted) || !errors.Is(err, why) {
		t.Errorf("got %v, want %v", err, why)
	}
}

func TestBounds_PoolsInUse(t *testing.T) {
	m := poolMaker(4)
	for i := range 4 {
		m.use(t, fmt.Sprint("tenant", i/2), named(i))
	}
	wantFull(t, m.prepare("another", named(9)), errManyPools)
	if err := m.prepare("tenant0", named(0)); err != nil {
		t.Errorf("a pool that is there: %v", err)
	}
}

func TestBounds_IdlePools(t *testing.T) {
	m := poolMaker(maxPools) // as on a host with 4 GiB
	for i := range maxPools {
		if err := m.prepare(fmt.Sprint("tenant", i%4), named(i)); err != nil {
			t.Fatal(err)
		}
	}
	m.use(t, "tenant0", named(0)) // else the least used
	for i := range maxPools {
		if err := m.prepare(fmt.Sprint("fresh", i), named(0)); err != nil {
			t.Fatalf("fresh tenant %d: %v", i, err)
		}
		if i == 0 && (m.pools[poolKey{"tenant1", "d1"}] != nil || m.pools[poolKey{"tenant2", "d2"}] == nil) {
			t.Error("the pool that was closed is not the least used")
		}
	}
	if m.pools[poolKey{"tenant0", "d0"}] == nil {
		t.Error("a pool with a sandbox was closed")
	}
	if len(m.pools) != maxPools {
		t.Errorf("there are %d pools, want %d", len(m.pools), maxPools)
	}
}

func TestBounds_PoolsBeingPrepared(t *testing.T) {
	m := poolMaker(4)
	var done []func()
	for i := range 4 {
		_, d, err := m.poolFor(fmt.Sprint("tenant", i/2), named(i))
		if err != nil {
			t.Fatal(err)
		}
		done = append(done, d)
	}
	wantFull(t, m.prepare("another", named(9)), errManyPools)
	done[0]()
	if err := m.prepare("another", named(9)); err != nil {
		t.Errorf("after a preparation that was given up: %v", err)
	}
}

func TestBounds_PoolsOfOneTenant(t *testing.T) {
	m := poolMaker(maxPools)
	const share = maxPools / 2
	for i := range share - 1 {
		m.use(t, "acme", named(i))
	}
	if err := m.prepare("umbrella", named(0)); err != nil {
		t.Fatal(err)
	}
	for i := range 2 { // the second takes the place of the first, which is idle
		if err := m.prepare("acme", named(share+i)); err != nil {
			t.Fatal(err)
		}
	}
	if m.pools[poolKey{"umbrella", "d0"}] == nil {
		t.Error("a tenant at its share had another tenant's pool closed")
	}
	m.use(t, "acme", named(share))
	wantFull(t, m.prepare("acme", named(99)), errTenantPools)
	for i := range share {
		m.use(t, "umbrella", named(i))
	}
}

func TestBounds_PoolsOfSnapshots(t *testing.T) {
	m := poolMaker(maxPools)
	python := template.Python{Executable: "/usr/bin/python3", Preload: []string{"json"}}
	base := template.Template{Name: "base", Digest: "base", Python: python}
	var err error
	for i := 0; err == nil; i++ { // a tenant starts a sandbox from each of its snapshots
		from := base
		from.Digest, from.Snapshot = fmt.Sprint("snapshot", i), &template.Snapshot{Base: base.Name, Digest: base.Digest}
		var p *pool
		var done func()
		if p, done, err = m.poolFor("acme", &from); err == nil {
			done()
			m.sandboxes[from.Digest] = &live{pool: p}
		}
		if i > maxPools {
			t.Fatal("a tenant's snapshots have no bound")
		}
	}
	wantFull(t, err, errTenantPools)
	for i := range 2 * maxPools {
		if err := m.prepare(fmt.Sprint("fresh", i), &base); err != nil {
			t.Fatalf("fresh tenant %d: %v", i, err)
		}
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
