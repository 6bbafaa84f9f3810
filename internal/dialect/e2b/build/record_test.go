package build

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/covehq/cove/internal/fault"
)

func TestAReasonIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		message string
		cut     bool
	}{
		"short":                    {"exit status 1", false},
		"as long as may be":        {strings.Repeat("x", maxReason), false},
		"long":                     {strings.Repeat("x", 1<<20), true},
		"cut within a character":   {"x" + strings.Repeat("é", maxReason), true},
		"cut at a character's end": {strings.Repeat("é", maxReason), true},
	} {
		t.Run(name, func(t *testing.T) {
			m := made{Status: StatusBuilding}
			m.fail(blame("3", fault.New(fault.Invalid, "%s", c.message)))
			got := m.Reason.Message
			kept, cut := strings.CutSuffix(got, "…")
			if len(kept) > maxReason || !strings.HasPrefix(c.message, kept) || !utf8.ValidString(got) || cut != c.cut {
				t.Errorf("%d bytes, cut %v", len(got), cut)
			}
			if m.Status != StatusError || m.Finished.IsZero() || m.Reason.Step != "3" {
				t.Errorf("%+v", m)
			}
		})
	}
}
