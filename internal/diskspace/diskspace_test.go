package diskspace_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

func TestMeter(t *testing.T) {
	for name, c := range map[string]struct {
		room   int64 // of the disk
		pieces []int
		want   int64 // bytes written before it refuses; all of them otherwise
	}{
		"all fits":               {4 << 20, []int{1 << 20, 2 << 20, 1 << 20}, 4 << 20},
		"small pieces":           {2 << 20, []int{1000, 1000, 1000}, 3000},
		"one large piece":        {2 << 20, []int{3 << 20}, 0},
		"refused in the middle":  {2 << 20, []int{1 << 20, 1 << 20, 1}, 2 << 20},
		"less is free than Step": {100, []int{1}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			m := diskspace.NewMeter(func(more int64) error {
				if int64(out.Len())+more > c.room {
					return fault.New(fault.DiskFull, "full")
				}
				return nil
			})
			total, w := int64(0), m.Writer(&out)
			for _, n := range c.pieces {
				total += int64(n)
				if _, err := w.Write(make([]byte, n)); err != nil && !fault.Is(err, fault.DiskFull) {
					t.Errorf("it fails with %v, want %s", err, fault.DiskFull)
				} else if err != nil {
					break
				}
			}
			if got := int64(out.Len()); got != c.want {
				t.Errorf("%d bytes of %d were written, want %d", got, total, c.want)
			}
		})
	}
}

func TestCheckFiles(t *testing.T) {
	for name, c := range map[string]struct {
		total, free uint64
		full        bool
	}{
		"no limit":              {0, 0, false},
		"just enough":           {10_000, 200, false},
		"one less":              {10_000, 199, true},
		"none":                  {10_000, 0, true},
		"a very large capacity": {1 << 62, 1 << 61, false},
	} {
		err := diskspace.CheckFiles(c.total, c.free)
		if fault.Is(err, fault.DiskFull) != c.full || (err != nil) != c.full {
			t.Errorf("%s: %v", name, err)
		}
		if c.full && !strings.Contains(fault.Message(err), "full of files") {
			t.Errorf("%s: it says %q", name, fault.Message(err))
		}
	}
}

func TestMeter_Begin(t *testing.T) {
	if err := diskspace.NewMeter(func(int64) error { return fault.New(fault.DiskFull, "full") }).Begin(); !fault.Is(err, fault.DiskFull) {
		t.Errorf("a file begins on a full disk: %v", err)
	}
	if err := diskspace.NewMeter(nil).Begin(); err != nil {
		t.Errorf("without a check: %v", err)
	}
}
