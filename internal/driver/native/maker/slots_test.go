package maker

import (
	"testing"

	"github.com/covehq/cove/internal/fault"
)

func TestSlotsRestBeforeTheyAreUsedAgain(t *testing.T) {
	s := newSlots()
	for want := range restingSlots + 1 {
		if got, err := s.take(); err != nil || got != want {
			t.Fatalf("%d, %v, want %d", got, err, want)
		}
		s.give(want)
	}
	for want := range 3 { // as many rest as may: the first that ended is next
		if got, err := s.take(); err != nil || got != want {
			t.Fatalf("%d, %v, want %d", got, err, want)
		}
		s.give(want)
	}
	if s.count() != 0 {
		t.Error(s.count())
	}
}

func TestEverySlotCanBeUsedAtOnce(t *testing.T) {
	s := newSlots()
	for range 2 {
		for range maxSlots {
			if _, err := s.take(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.take(); !fault.Is(err, fault.Exhausted) {
			t.Fatal(err)
		}
		for slot := range maxSlots {
			s.give(slot)
		}
	}
}
