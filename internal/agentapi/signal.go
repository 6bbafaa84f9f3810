package agentapi

import (
	"slices"
	"strconv"
	"strings"
)

// SignalNames are Linux's, the same on amd64 and arm64.
var SignalNames = [...]string{
	1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 5: "TRAP", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1",
	11: "SEGV", 12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM", 16: "STKFLT", 17: "CHLD", 18: "CONT", 19: "STOP",
	20: "TSTP", 21: "TTIN", 22: "TTOU", 23: "URG", 24: "XCPU", 25: "XFSZ", 26: "VTALRM", 27: "PROF", 28: "WINCH",
	29: "IO", 30: "PWR", 31: "SYS",
}

// Status is how a shell's user or Python's subprocess would write the end: -1 when the time was over, minus the signal's
// number when one ended it, the exit status otherwise. A cell that raised has 1.
func (e *End) Status() int {
	switch {
	case e.Outcome == OutcomeTimeout:
		return -1
	case e.Signal != "":
		return -signalNumber(e.Signal)
	case e.Outcome != OutcomeOK && e.ExitCode == 0:
		return 1
	}
	return e.ExitCode
}

// signalNumber is 9 for "SIGKILL" and 40 for "signal 40"; 1 for what no agent says, so that an end by it is no success.
func signalNumber(name string) int {
	if n := slices.Index(SignalNames[:], strings.TrimPrefix(name, "SIG")); n > 0 {
		return n
	}
	if n, err := strconv.Atoi(strings.TrimPrefix(name, "signal ")); err == nil && n > 0 {
		return n
	}
	return 1
}
