package app

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/covehq/cove/internal/driver/native/wire"
)

// TestDiskNote_Promises has /readyz say how full the disk is and what is promised of it, while that
// is known.
func TestDiskNote_Promises(t *testing.T) {
	var ready, known error
	asked := 0
	stats := wire.Stats{Disk: &wire.DiskStats{Total: 80 << 30, Free: 12 << 30, Reserve: 4 << 30, Promised: 30 << 30}}
	p := parts{disk: &diskNote{}}
	check := p.disk.after(func(context.Context) error { return ready }, func(context.Context) (wire.Stats, error) {
		asked++
		return stats, known
	})
	if got := p.notes(); len(got) != 0 {
		t.Errorf("before the first check: %q", got)
	}
	const want = "disk: 12.0 GiB of 80.0 GiB are free, of which 4.0 are kept; 30.0 GiB are promised to sandboxes, volumes and snapshots"
	if err := check(t.Context()); err != nil || !slices.Equal(p.notes(), []string{want}) {
		t.Errorf("after a check: %q, %v; want %q", p.notes(), err, want)
	}
	known = errors.New("unknown")
	if err := check(t.Context()); err != nil || len(p.notes()) != 0 {
		t.Errorf("without numbers: %q, %v", p.notes(), err)
	}
	before := asked
	ready = errors.New("not ready")
	if err := check(t.Context()); !errors.Is(err, ready) || asked != before {
		t.Errorf("a maker that is not ready is asked for numbers, and the check says %v", err)
	}
}
