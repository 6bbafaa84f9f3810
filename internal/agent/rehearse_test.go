package agent

import (
	"os"
	"testing"
)

func TestARehearsalLeavesNothing(t *testing.T) {
	before := openDescriptors(t)
	for range 20 {
		acts := 0
		rehearse(func() bool { acts++; return false })
		if acts != 3 {
			t.Fatalf("%d of 3 acts were begun", acts)
		}
	}
	if after := openDescriptors(t); after > before+2 { // the runtime's own: epoll and its event
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestARehearsalIsGivenUpWhenSomebodyWaits(t *testing.T) {
	for most := range 3 {
		acts := 0
		rehearse(func() bool { acts++; return acts > most })
		if acts != most+1 {
			t.Errorf("asked %d times, want %d", acts, most+1)
		}
	}
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
