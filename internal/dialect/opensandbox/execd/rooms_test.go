package execd_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
)

func TestWhatIsKnownOfASandboxEndsWithIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var gone atomic.Bool
		rs := execd.NewRooms(func(id string) bool { return id == "sb1" && gone.Load() })
		rs.Of("sb1")
		rs.Of("sb2")
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := rs.Len(); n != 2 {
			t.Fatalf("%d are known while both live", n)
		}
		gone.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := rs.Len(); n != 1 {
			t.Fatalf("%d are known when one has ended", n)
		}
		rs.Close() // and what it had under way is over, or the bubble would say so
	})
}

func TestOfManyCommandsTheOldestIsForgotten(t *testing.T) {
	rs := execd.NewRooms(func(string) bool { return false })
	defer rs.Close()
	for range execd.MaxCommands + 10 {
		if n, err := execd.Admit(rs, "sb1", true); err != nil || n > execd.MaxCommands {
			t.Fatalf("%d, %v", n, err)
		}
	}
	for range execd.MaxCommands {
		if _, err := execd.Admit(rs, "sb2", false); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := execd.Admit(rs, "sb2", false); err == nil {
		t.Fatal("one more runs than may be known")
	}
}
