package build

import (
	"fmt"
	"testing"

	"github.com/covehq/cove/internal/fault"
)

func TestBuildsThatMustStayLeaveNoRoom(t *testing.T) {
	for name, m := range map[string]made{
		"going on": {Status: StatusBuilding, Started: true},
		"waiting":  {Status: StatusWaiting, Started: true},
		"tagged":   {Status: StatusReady, Started: true, Domain: "made"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShelf("acme", nil) // nothing is to be deleted
			for i := range 3 {
				one := m
				s.builds[fmt.Sprint(i)] = &one
			}
			if err := s.makeRoom(t.Context(), 3); err != nil {
				t.Errorf("there is room: %v", err)
			}
			if err := s.makeRoom(t.Context(), 2); !fault.Is(err, fault.Exhausted) || len(s.builds) != 3 {
				t.Errorf("%v, and %d builds are left", err, len(s.builds))
			}
		})
	}
}
