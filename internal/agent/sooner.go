package agent

import (
	"fmt"
	"os"
	"sync"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
)

// sooner has the kernel end what the agent starts rather than the agent when memory runs out: without the agent the sandbox is
// lost, and it would be the largest among many small ones. Nobody needs a right to be ended sooner. Where /proc cannot be written
// all are as before.
type sooner struct {
	forking sync.Mutex // held while the agent's own is theirs
	known   bool
	ours    int
	theirs  int
}

// learn reads what the agent was started with, which is not zero where its host is among the first to go.
func (s *sooner) learn() {
	raw, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return
	}
	if n, _ := fmt.Sscan(string(raw), &s.ours); n == 1 {
		s.known, s.theirs = true, min(s.ours+agentapi.SoonerBy, 1000)
	}
}

// become sets the agent's own.
func (s *sooner) become(score int) {
	fd := scoreFD
	if fd < 0 {
		var err error
		if fd, err = openScore(); err != nil {
			return
		}
		defer syscall.Close(fd)
	}
	_, _ = syscall.Pwrite(fd, []byte(itoa(score)), 0)
}

// scoreFD is the agent's own score, opened by Harden: afterwards the file is root's, and the agent may be somebody else.
var scoreFD = -1

func openScore() (int, error) {
	return syscall.Open("/proc/self/oom_score_adj", syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
}

// fork has what the agent forks until done inherit theirs: set afterwards, it could come after a first child, which would then be spared
// like the agent while those beside it are ended. To go back to what it was is allowed.
func (s *sooner) fork() (done func()) {
	if !s.known {
		return func() {}
	}
	s.forking.Lock()
	s.become(s.theirs)
	return func() {
		s.become(s.ours)
		s.forking.Unlock()
	}
}
