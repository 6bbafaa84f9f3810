package agent

import (
	"syscall"
	"testing"
	"time"
)

// TestNewGroup_StoppedChild stops the process that holds a group before it has ended.
func TestNewGroup_StoppedChild(t *testing.T) {
	over := make(chan error, 1)
	go func() {
		for range 300 {
			group, done, err := newGroup()
			if err != nil {
				over <- err
				return
			}
			_ = syscall.Kill(group, syscall.SIGSTOP) // it may have ended already
			done()
		}
		over <- nil
	}()
	select {
	case err := <-over:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the agent waits for a process that is stopped")
	}
}
