package agent

import (
	"os"
	"testing"
)

func TestARehearsalLeavesNothing(t *testing.T) {
	before := openDescriptors(t)
	for range 20 {
		asked := 0
		rehearse(func() bool { asked++; return false })
		if asked != 4 {
			t.Fatalf("asked %d times, want 4: before it begins and before each of 3 acts", asked)
		}
	}
	if after := openDescriptors(t); after > before+2 { // the runtime's own: epoll and its event
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestARehearsalIsGivenUpWhenSomebodyWaits(t *testing.T) {
	for most := range 4 {
		asked := 0
		rehearse(func() bool { asked++; return asked > most })
		if asked != most+1 {
			t.Errorf("asked %d times, want %d", asked, most+1)
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
