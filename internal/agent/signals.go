package agent

import (
	"strconv"
	"strings"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// signalName is "SIGKILL" for 9.
func signalName(sig syscall.Signal) string {
	if sig > 0 && int(sig) < len(agentapi.SignalNames) {
		return "SIG" + agentapi.SignalNames[sig]
	}
	return "signal " + strconv.Itoa(int(sig))
}

// parseSignal takes "SIGKILL", "KILL" or "9".
func parseSignal(name string) (syscall.Signal, error) {
	short := strings.TrimPrefix(strings.ToUpper(name), "SIG")
	for n, known := range agentapi.SignalNames {
		if known != "" && known == short {
			return syscall.Signal(n), nil
		}
	}
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n <= 64 {
		return syscall.Signal(n), nil
	}
	return 0, fault.New(fault.Invalid, "unknown signal %q", name)
}
