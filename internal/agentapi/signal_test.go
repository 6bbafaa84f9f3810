package agentapi_test

import (
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

func TestAnEndHasOneNumber(t *testing.T) {
	for claim, test := range map[string]struct {
		end  agentapi.End
		want int
	}{
		"success":                        {agentapi.End{Outcome: agentapi.OutcomeOK}, 0},
		"a status":                       {agentapi.End{Outcome: agentapi.OutcomeError, ExitCode: 3}, 3},
		"a cell that raised":             {agentapi.End{Outcome: agentapi.OutcomeError}, 1},
		"a kernel that died":             {agentapi.End{Outcome: agentapi.OutcomeKernelDied}, 1},
		"the end of its time":            {agentapi.End{Outcome: agentapi.OutcomeTimeout, ExitCode: -1, Signal: "SIGKILL"}, -1},
		"the end of a cell's time":       {agentapi.End{Outcome: agentapi.OutcomeTimeout}, -1},
		"a signal":                       {agentapi.End{Outcome: agentapi.OutcomeKilled, ExitCode: -1, Signal: "SIGSEGV"}, -11},
		"a signal without a name":        {agentapi.End{Outcome: agentapi.OutcomeKilled, ExitCode: -1, Signal: "signal 40"}, -40},
		"a signal that an agent made up": {agentapi.End{Outcome: agentapi.OutcomeKilled, Signal: "no signal"}, -1},
		"a lack of memory":               {agentapi.End{Outcome: agentapi.OutcomeOOM, ExitCode: -1, Signal: "SIGKILL"}, -9},
	} {
		if got := test.end.Status(); got != test.want {
			t.Errorf("%s is %d, want %d", claim, got, test.want)
		}
	}
}
