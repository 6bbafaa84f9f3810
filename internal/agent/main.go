package agent

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/covehq/cove/internal/agentapi"
)

// channelFD is where whoever executes the agent leaves its first channel.
const channelFD = 3

// Main is the agent's program: PID 1 of a sandbox, or one of the helpers that are the same binary under another name.
func Main(argv []string) int {
	if isSudo(argv) {
		return sudo(argv[1:])
	}
	if len(argv) > 0 && argv[0] == limiterName {
		return limiter(argv)
	}
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, "cove-agent: "+err.Error())
		return 1
	}
	return 0
}

func serve() error {
	runtime.GOMAXPROCS(2)  // it mostly waits; more threads would only cost memory
	debug.SetGCPercent(25) // a heap of a megabyte, not four
	if err := harden(); err != nil {
		return err
	}
	ch, err := agentapi.Channel(channelFD)
	if err != nil {
		return fmt.Errorf("descriptor %d is not a channel: %w", channelFD, err)
	}
	boot, err := awaitBoot(ch)
	if err != nil {
		return err
	}
	a, err := New(Config{Boot: boot, PID1: true})
	if err != nil {
		return err
	}
	// When the maker is gone so are we, and with PID 1 the kernel ends everything else in the sandbox.
	return a.ServeChannel(ch)
}

func awaitBoot(ch *net.UnixConn) (agentapi.Boot, error) {
	m, fds, err := agentapi.ReceiveMessage(ch)
	if err != nil {
		return agentapi.Boot{}, fmt.Errorf("boot: %w", err)
	}
	agentapi.CloseDescriptors(fds)
	if m.Type != agentapi.MessageBoot {
		return agentapi.Boot{}, fmt.Errorf("the first message is %q, not boot", m.Type)
	}
	return *m.Boot, nil
}
