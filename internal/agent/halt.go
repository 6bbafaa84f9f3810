package agent

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	// haltGrace bounds how long a halt waits for killed processes to be gone.
	haltGrace = 50 * time.Second
	// bootIDFile is a file of the sandbox's own, mounted there by its driver; where it is the host's, nothing here may
	// write it.
	bootIDFile = "/proc/sys/kernel/random/boot_id"
	shmDir     = "/dev/shm"
)

// halt ends everything but the agent, as a loss of power would, and leaves the files: what comes after is a new boot.
func (a *Agent) halt(l *link, _ none) error {
	a.mu.Lock()
	var processes []*process
	for _, p := range a.processes {
		processes = append(processes, p)
	}
	var kernels []*kernel
	for _, k := range a.kernels {
		kernels = append(kernels, k)
	}
	a.mu.Unlock()
	const why = "the sandbox was stopped"
	for _, k := range kernels {
		k.kill(why)
	}
	for _, p := range processes {
		p.kill(agentapi.OutcomeInterrupted, why)
	}
	if a.cfg.PID1 {
		if err := killAll(a.pid(), haltGrace); err != nil {
			return err
		}
	}
	if err := a.awaitEnds(processes, kernels); err != nil {
		return err
	}
	a.leave(kernels, l)
	if a.cfg.PID1 {
		empty(shmDir)
		renewBootID(bootIDFile)
	}
	return l.answer(none{})
}

// awaitEnds returns when everything that hung on what was killed has heard of it.
func (a *Agent) awaitEnds(processes []*process, kernels []*kernel) error {
	late := time.NewTimer(haltGrace)
	defer late.Stop()
	ends := make([]<-chan struct{}, 0, len(processes)+len(kernels))
	for _, p := range processes {
		ends = append(ends, p.done)
	}
	for _, k := range kernels {
		ends = append(ends, k.done)
	}
	for _, done := range ends {
		select {
		case <-done:
		case <-late.C:
			return fault.New(fault.Timeout, "a process did not end within %v of being killed", haltGrace)
		}
	}
	return nil
}

// leave forgets kernels and ends every other operation: whatever it waits for belongs to the boot before.
func (a *Agent) leave(kernels []*kernel, own *link) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range kernels {
		if a.kernels[k.info.Name] == k {
			delete(a.kernels, k.info.Name)
		}
	}
	for l := range a.links {
		if l != own {
			l.close()
		}
	}
}

// killAll kills every process that is visible to PID 1, which alone is spared, and returns when they are gone.
func killAll(self int, within time.Duration) error {
	until := time.Now().Add(within)
	for {
		// Everything at once, so that nothing is left to fork.
		if err := syscall.Kill(-1, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			return fault.Wrap(fault.Internal, err, "the sandbox's processes cannot be killed")
		}
		left := 0
		for _, pid := range pids() {
			if pid == self {
				continue
			}
			if st, ok := readStat(pid); !ok || st.state == 'Z' || st.state == 'X' {
				continue // its parent, perhaps outside, collects it
			}
			left = pid
			awaitExit(pid, time.Until(until))
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(until) {
			return fault.New(fault.Timeout, "process %d did not end within %v of being killed", left, within)
		}
	}
}

// awaitExit waits for a process's end, but no longer than it may.
func awaitExit(pid int, within time.Duration) {
	fd, err := pidfdOpen(pid)
	if err != nil {
		return // it is gone
	}
	defer syscall.Close(fd)
	timeout := syscall.NsecToTimespec(max(0, within.Nanoseconds()))
	_, _ = poll([]pollfd{{fd: int32(fd), events: pollIn}}, &timeout) // the caller looks again
}

// empty removes what is in a directory; what cannot be removed stays, as it would have.
func empty(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		_ = os.RemoveAll(dir + "/" + e.Name())
	}
}

// renewBootID tells the sandbox that this is another boot.
func renewBootID(file string) {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return
	}
	defer f.Close()
	_, _ = f.WriteAt([]byte(newBootID()), 0)
}

func newBootID() string {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], rand.Uint64())
	binary.LittleEndian.PutUint64(b[8:], rand.Uint64())
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x\n", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
