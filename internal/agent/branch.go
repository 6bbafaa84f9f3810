package agent

import (
	"bytes"
	"net"
	"os"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// branch is the operation: it waits for the kernel's turn, has it stand still to be copied, and holds it until the client
// leaves, who may want files and memory of the same moment.
func (a *Agent) branch(l *link, params agentapi.BranchParams) error {
	k, err := a.kernel(params.Kernel)
	if err != nil || k.dead() {
		return fault.New(fault.Conflict, "there is no living kernel %q to copy", params.Kernel)
	}
	if l.talk == nil {
		return fault.New(fault.Invalid, "a branch needs a socket to whoever makes the copy")
	}
	if !k.warm {
		return fault.New(fault.Unsupported, "the kernel %q was started as a program, not forked from its template's: its memory cannot be copied", k.info.Name)
	}
	r := &run{link: l, branch: true, refuse: params.Refuse, others: a.others(k)}
	if err := k.enqueue(r); err != nil {
		return err
	}
	defer k.leave(r)
	for {
		if _, err := l.in.Read(); err != nil {
			return nil
		}
	}
}

// others are the kernels and processes of this sandbox beside one kernel: a branch has none of them.
func (a *Agent) others(k *kernel) []agentapi.Lost {
	lost := []agentapi.Lost{}
	forked := map[int]bool{k.info.PID: true}
	kernels, _ := a.listKernels(none{})
	for _, other := range kernels {
		forked[other.PID] = true
		if other.Name != k.info.Name && other.State != agentapi.KernelDead {
			lost = append(lost, agentapi.Lost{Kind: "kernel", What: other.Name})
		}
	}
	for _, pid := range pids() {
		st, ok := readStat(pid)
		if !ok || pid == a.pid() || pid == 1 || forked[pid] || st.state == 'Z' || st.parent == 0 || len(lost) == maxLost {
			continue // what has no parent here is a kernel
		}
		raw, _ := os.ReadFile("/proc/" + itoa(pid) + "/cmdline") // it may have ended since
		words := strings.TrimSpace(strings.ToValidUTF8(string(bytes.ReplaceAll(raw, []byte{0}, []byte{' '})), "?"))
		lost = append(lost, agentapi.Lost{Kind: "process", What: clip(words, 120) + " (pid " + itoa(pid) + ")"})
	}
	return lost
}

// sendBranch gives the kernel its order and the socket on which it says that it stands still.
func (k *kernel) sendBranch(r *run) {
	conn, ok := k.conn.(*net.UnixConn)
	if !ok {
		k.finish(r, refusal(fault.New(fault.Unsupported, "this kernel cannot be given descriptors")))
		return
	}
	raw, err := r.link.talk.SyscallConn()
	if err == nil {
		var sendErr error
		err = raw.Control(func(fd uintptr) {
			sendErr = agentapi.WriteWithDescriptors(conn, agentapi.FrameControl, []byte("{}"), int(fd))
		})
		if err == nil {
			err = sendErr
		}
	}
	// A kernel that died is told of by whoever listens to it; a client that left closed the socket.
	r.link.talk.Close()
	if err != nil && r.left.Load() {
		k.finish(r, refusal(fault.New(fault.Unavailable, "the client left")))
	}
}

func (k *kernel) hearBranch(r *run, e agentapi.Event) {
	if e.Message != "" {
		k.finish(r, refusal(fault.New(fault.Conflict, "the kernel cannot be copied: %s", e.Message)))
		return
	}
	if r.branched.Swap(true) {
		return
	}
	e.Lost = r.others
	e.Count = int(time.Since(r.begin).Microseconds())
	_ = r.link.event(e) // a client that left is seen below
	if r.left.Load() {
		k.releaseBranch(r)
	}
}

// leaveBranch lets the kernel go on when it was copied; one that is being copied cannot be stopped.
func (k *kernel) leaveBranch(r *run, running bool) {
	r.left.Store(true)
	if running && r.branched.Load() {
		k.releaseBranch(r)
	}
}

// releaseBranch may be called by the one who hears the kernel and the one who hears the client.
func (k *kernel) releaseBranch(r *run) {
	k.mu.Lock()
	mine := k.current.Load() == r && !r.released
	r.released = true
	k.mu.Unlock()
	if mine {
		k.finish(r, agentapi.End{Outcome: agentapi.OutcomeOK})
	}
}
