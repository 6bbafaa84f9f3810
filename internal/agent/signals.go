package agent

import (
	"strconv"
	"strings"
	"syscall"

	"github.com/covehq/cove/internal/fault"
)

// signalNames are Linux's, the same on amd64 and arm64.
var signalNames = [...]string{
	1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 5: "TRAP", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1",
	11: "SEGV", 12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM", 16: "STKFLT", 17: "CHLD", 18: "CONT", 19: "STOP",
	20: "TSTP", 21: "TTIN", 22: "TTOU", 23: "URG", 24: "XCPU", 25: "XFSZ", 26: "VTALRM", 27: "PROF", 28: "WINCH",
	29: "IO", 30: "PWR", 31: "SYS",
}

// signalName is "SIGKILL" for 9.
func signalName(sig syscall.Signal) string {
	if sig > 0 && int(sig) < len(signalNames) {
		return "SIG" + signalNames[sig]
	}
	return "signal " + strconv.Itoa(int(sig))
}

// parseSignal takes "SIGKILL", "KILL" or "9".
func parseSignal(name string) (syscall.Signal, error) {
	short := strings.TrimPrefix(strings.ToUpper(name), "SIG")
	for n, known := range signalNames {
		if known != "" && known == short {
			return syscall.Signal(n), nil
		}
	}
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n <= 64 {
		return syscall.Signal(n), nil
	}
	return 0, fault.New(fault.Invalid, "unknown signal %q", name)
}
