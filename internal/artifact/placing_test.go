package artifact_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/diskspace"
)

var errClogged = errors.New("no space left")

// clogged places so many blobs, and then no more.
type clogged struct {
	artifact.Blobs
	left *atomic.Int64
}

func (c clogged) Draft(tenant string) (artifact.Draft, error) {
	d, err := c.Blobs.Draft(tenant)
	return cloggedDraft{d, c.left}, err
}

type cloggedDraft struct {
	artifact.Draft
	left *atomic.Int64
}

func (d cloggedDraft) Place() (bool, error) {
	if d.left.Add(-1) < 0 {
		return false, errClogged
	}
	return d.Draft.Place()
}

// TestWhatCannotBePlacedEndsACollection: blobs are placed while the next are read, and all of them or none have rows.
func TestWhatCannotBePlacedEndsACollection(t *testing.T) {
	const files, size = 50, 100
	cfg := defaults
	cfg.MaxTenantSize = diskspace.Charge(files*size, files) // all of them fit, once
	w := newWorld(t, cfg)
	left := new(atomic.Int64)
	k, err := artifact.New(t.Context(), cfg, clogged{w.blobs, left}, w.index)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	for i := range files {
		w.put(fmt.Sprint(i), fmt.Sprintf("%0*d", size, i))
	}
	origin := artifact.Origin{Session: "s1", Run: "run1"}
	for _, room := range []int64{0, 7, files - 1} {
		left.Store(room)
		if list, err := k.Collect(t.Context(), w.agent, tenant, origin, w.box); !errors.Is(err, errClogged) {
			t.Fatalf("with room for %d: %d are kept, %v", room, len(list), err)
		}
		if left.Load() < -8 {
			t.Errorf("with room for %d: %d more were tried", room, -left.Load())
		}
		if page, err := k.List(t.Context(), tenant, artifact.Query{}); err != nil || len(page.Artifacts) != 0 {
			t.Errorf("with room for %d: %d have rows, %v", room, len(page.Artifacts), err)
		}
		if left := w.stored(); len(left) != 0 {
			t.Errorf("with room for %d: %d blobs are left that nothing names", room, len(left))
		}
	}
	left.Store(files)
	list, err := k.Collect(t.Context(), w.agent, tenant, origin, w.box)
	if err != nil || len(list) != files {
		t.Fatal(len(list), err)
	}
	for _, a := range list {
		if a.ID == "" || a.Error != "" {
			t.Errorf("%s: %s", a.Path, a.Error)
		}
	}
	if at := w.left(); len(at) != 0 {
		t.Errorf("left in the box: %v", at)
	}
}
