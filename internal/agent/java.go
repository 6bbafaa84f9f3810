package agent

import (
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// javaProgram is Java that runs a kernel from its source. What it costs to start counts more than how fast it becomes. What is
// opened is for descriptor 3, which has no path as a socket, and for the environment of a cell.
var javaProgram = []string{
	"java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8", "--add-modules", "jdk.jshell",
	"--add-opens", "java.base/java.io=ALL-UNNAMED", "--add-opens", "java.base/java.lang=ALL-UNNAMED", "--add-opens", "java.base/java.util=ALL-UNNAMED",
}

// javaGrace is how long Java may take to say which version it is.
const javaGrace = 100 * time.Second

// closingSoon is how often a wait looks whether the agent ends.
const closingSoon = 50 * time.Millisecond

func (a *Agent) closing() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// needsJShell refuses a Java that cannot run the kernel: one before 11, or one without JShell, as a JRE is.
func (a *Agent) needsJShell(u user) error {
	status, err := a.status(command{argv: []string{"java", "--source", "11", "--add-modules", "jdk.jshell", "-version"}, user: u}, javaGrace)
	switch {
	case err != nil:
		return err
	case status.Signaled():
		return fault.New(fault.Unavailable, "java was ended by %v when it was asked for its version: the sandbox may have too little memory for it", status.Signal())
	case status.ExitStatus() != 0:
		return fault.New(fault.Unsupported, "this sandbox's image or template has no JDK of version 11 or later with the module jdk.jshell, which kernels of %s need", agentapi.LanguageJava)
	}
	return nil
}

// status runs a command of which nothing else is to be heard.
func (a *Agent) status(c command, within time.Duration) (syscall.WaitStatus, error) {
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, explain(err, "/dev/null")
	}
	defer syscall.Close(null)
	c.files = []uintptr{uintptr(null), uintptr(null), uintptr(null)}
	exits := make(chan exit, 1)
	pid, err := a.start(c, func(e exit) { exits <- e })
	if err != nil {
		return 0, err
	}
	for deadline := time.Now().Add(within); ; {
		select {
		case e := <-exits:
			return e.status, nil
		case <-time.After(closingSoon): // nobody else ends it
			if over := a.closing(); over || time.Now().After(deadline) {
				_ = a.reaper.signalGroup(pid, syscall.SIGKILL) // one that has just ended needs none
				return 0, fault.New(fault.Timeout, "%s did not answer within %s", c.argv[0], within)
			}
		}
	}
}
