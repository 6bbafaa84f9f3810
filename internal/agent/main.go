package agent

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

// channelFD is where whoever executes the agent leaves its first channel.
const channelFD = 3

// Main is the agent's program: PID 1 of a sandbox, or one of the helpers that are the same binary under another name.
func Main(argv []string) int {
	if status, ok := Helper(argv); ok {
		return status
	}
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, "cove-agent: "+err.Error())
		return 1
	}
	return 0
}

// Helper runs what the agent starts its own binary as, and reports whether argv names such a thing.
func Helper(argv []string) (status int, ok bool) {
	switch {
	case isSudo(argv):
		return sudo(argv[1:]), true
	case len(argv) > 0 && argv[0] == limiterName:
		return limiter(argv), true
	}
	return 0, false
}

func serve() error {
	runtime.GOMAXPROCS(1)  // it mostly waits; but for starting a program, what waits in the kernel has a thread of its own all the same
	debug.SetGCPercent(25) // a heap of a megabyte, not four
	time.Local = time.UTC  // and not what a file in the sandbox says
	if err := Harden(); err != nil {
		return err
	}
	ch, err := agentapi.Channel(channelFD)
	if err != nil {
		return fmt.Errorf("descriptor %d is not a channel: %w", channelFD, err)
	}
	m, fds, err := awaitBoot(ch)
	if err != nil {
		return err
	}
	a, err := New(Config{Boot: *m.Boot, PID1: true})
	if err != nil {
		return err
	}
	if m.Boot.Expected {
		rehearse(func() (waits bool) {
			raw, err := ch.SyscallConn()
			return err != nil || raw.Control(func(fd uintptr) { waits = readable(int(fd)) }) != nil || waits
		})
		if m, fds, err = awaitBoot(ch); err != nil {
			return err
		}
		a.become(*m.Boot)
	}
	a.message(m, fds, true)
	// When the maker is gone so are we, and with PID 1 the kernel ends everything else in the sandbox.
	return a.ServeChannel(ch)
}

// spareThreads is how many threads the agent has beyond those that run: as many as may wait in the kernel at once.
const spareThreads = 4

// makeThreads makes threads while there are some to be had. A fork bomb takes all that the sandbox may have, and the
// runtime ends a program that needs one more and gets none; those that exist are kept and used again.
func makeThreads(n int) {
	var made sync.WaitGroup
	release := make(chan struct{})
	for range n {
		made.Add(1)
		go func() {
			runtime.LockOSThread() // a thread of its own, while it waits
			defer runtime.UnlockOSThread()
			made.Done()
			<-release
		}()
	}
	made.Wait()
	close(release)
}

func awaitBoot(ch *net.UnixConn) (agentapi.Message, []int, error) {
	m, fds, err := agentapi.ReceiveMessage(ch)
	if err != nil {
		return agentapi.Message{}, nil, fmt.Errorf("boot: %w", err)
	}
	if m.Type != agentapi.MessageBoot {
		agentapi.CloseDescriptors(fds)
		return agentapi.Message{}, nil, fmt.Errorf("the message is %q, not boot", m.Type)
	}
	return m, fds, nil
}
