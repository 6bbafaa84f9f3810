package maker

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/seccomp"
	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
)

// An anchor is a process that shares a kernel's memory from outside the sandbox: a copy of the kernel can be made there,
// and sent into another sandbox, which no process inside could be. It has the rights of its zygote, and its memory is
// the sandbox's to write. So from before its kernel is given to anybody it is stopped for good: see package trace.

// holdAnchor stops the anchor of a kernel that waits to be told whose it is. The zygote says which it is, and is not
// believed: only a child of its own, with its own id, is taken. It takes the descriptor over.
func (z *zygote) holdAnchor(pidfd *os.File) (*trace.Process, error) {
	own, err := pollable(pidfd)
	if err != nil {
		z.disown([]*os.File{nil, pidfd})
		return nil, err
	}
	pidfd.Close()
	pid, err := pidOf(own)
	if err == nil {
		err = z.bore(pid)
	}
	var a *trace.Process
	if err != nil {
		own.Close()
	} else {
		a, err = z.tracer.Seize(pid, own)
	}
	// A zygote that is killed takes its children with it, one after the other. What fails meanwhile
	// fails for that reason.
	if err != nil && (hasEnded(z.pid) || hasEnded(pid)) {
		return nil, errors.Join(errZygoteDied, err)
	}
	return a, err
}

// disown ends a kernel that nobody waits for any more: itself it hears that its socket is closed, its anchor hears nothing.
func (z *zygote) disown(pidfds []*os.File) {
	defer wire.CloseAll(pidfds)
	if len(pidfds) < 2 {
		return
	}
	if pid, err := pidOf(pidfds[1]); err == nil && z.bore(pid) == nil {
		_ = signal(pidfds[1], unix.SIGKILL)
	}
}

// pollable gives a descriptor that came from elsewhere once more, so that the runtime's poller can wait for it.
func pollable(f *os.File) (own *os.File, err error) {
	err = wire.Hold([]*os.File{f}, func(fds []int) error {
		fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := unix.SetNonblock(fd, true); err != nil {
			unix.Close(fd)
			return err
		}
		own = os.NewFile(uintptr(fd), "pidfd")
		return nil
	})
	return own, err
}

// bore tells whether a process is a child of the zygote with the zygote's id.
func (z *zygote) bore(pid int) error {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return errZygoteDied
	}
	id := strconv.Itoa(z.owner)
	want := map[string]string{"PPid:": strconv.Itoa(z.pid), "Uid:": id, "Gid:": id, "NSpid:": strconv.Itoa(pid)}
	for line := range bytes.Lines(status) {
		words := bytes.Fields(line)
		if len(words) < 2 {
			continue
		}
		w, ok := want[string(words[0])]
		if !ok {
			continue
		}
		for _, is := range words[1:] {
			if string(is) != w {
				return fmt.Errorf("the zygote names a process that is not its own: %s", bytes.TrimSpace(line))
			}
		}
		delete(want, string(words[0]))
	}
	if len(want) > 0 {
		return errors.New("the zygote names a process that the host does not describe")
	}
	return nil
}

// graftHead is struct graft of shell/graft.c.
type graftHead struct {
	Resume, Room, Size, Word uint64
	UID, GID                 uint32
	Filter, FilterLen        uint32
	Ops, OpsLen              uint32
	NoFile, Joins            uint32
	PidFD, Error             int32
	FD                       [4]int32
}

const (
	graftStacks = 3 * 16 << 10
	maxJoins    = 28 // MAX_JOINS of shell/graft.c
)

// graft makes a copy of a kernel's anchor, stopped since it was made, the anchor of a kernel in a shell.
func (m *Maker) graft(a *trace.Process, z *zygote, s *shell, who account, p *parting, files int) (_ *newborn, err error) {
	n, theirs, err := newNewborn(z)
	if err != nil {
		a.Kill()
		return nil, err
	}
	defer wire.CloseAll(theirs)
	n.anchor = a
	made := false
	defer func() {
		if !made {
			n.end()
		}
	}()
	filter := seccomp.Bytes(seccomp.Delta())
	h := graftHead{Resume: a.Resume(), UID: uint32(who.uid), GID: uint32(who.gid), NoFile: uint32(min(max(files, 0), int(maxOpenFiles()))), Filter: uint32(binary.Size(graftHead{})), FilterLen: uint32(len(filter) / 8)}
	joiners := s.group.Joiners()
	if len(joiners) == 0 || len(joiners) > maxJoins {
		return nil, fmt.Errorf("the branch has %d cgroups", len(joiners)) // none: it was ended while it was made
	}
	h.Joins = uint32(len(joiners))
	h.Ops = h.Filter + uint32(len(filter))
	h.OpsLen = uint32(len(p.ops))
	ops := slices.Clone(p.ops)
	for i := range ops {
		ops[i].Path += h.Ops + uint32(len(ops)*binary.Size(graftOp{}))
	}
	var word [8]byte
	_, _ = rand.Read(word[:]) // never fails
	h.Word = binary.LittleEndian.Uint64(word[:])
	code := (uint64(len(m.host.graft)) + 63) &^ 63
	h.Size = (code + uint64(h.Ops) + uint64(len(p.ops)*binary.Size(graftOp{})+len(p.paths)) + graftStacks + page - 1) &^ (page - 1)
	at, err := a.Call(unix.SYS_MMAP, 0, uintptr(h.Size), unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	if err != nil {
		return nil, err
	}
	h.Room = uint64(at)
	var b bytes.Buffer
	b.Write(m.host.graft)
	b.Write(make([]byte, code-uint64(len(m.host.graft))))
	for _, part := range []any{h, filter, ops, p.paths} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			return nil, err
		}
	}
	if err := a.Write(h.Room, b.Bytes()); err != nil {
		return nil, err
	}
	fd, err := z.begin(a, word[:], append(append([]*os.File{s.pidfd}, theirs...), joiners...), h, code)
	if err != nil {
		return nil, err
	}
	if fd < 0 {
		return nil, fmt.Errorf("enter the sandbox: %w", unix.Errno(-fd))
	}
	if n.pidfd, err = a.Descriptor(int(fd)); err != nil {
		return nil, err
	}
	if err := a.Continue(); err != nil {
		return nil, err
	}
	pid, err := pidOf(n.pidfd)
	if err != nil {
		return nil, err
	}
	s.holds(a)
	if err := z.adopt(n.token, pid, n.ended); err != nil {
		return nil, err
	}
	made = true
	return n, nil
}

// begin has the copy take its descriptors and make its kernel; the descriptor of that, or minus an error number.
func (z *zygote) begin(a *trace.Process, word []byte, files []*os.File, h graftHead, code uint64) (int64, error) {
	z.grafting.Lock()
	defer z.grafting.Unlock()
	if err := z.hand(word, files); err != nil {
		return 0, err
	}
	return a.Run(h.Room, h.Room+h.Size, h.Room+code)
}

// pidOf is the number of the process that a pidfd names.
func pidOf(pidfd *os.File) (int, error) {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return 0, err
	}
	var text []byte
	var readErr error
	err = raw.Control(func(fd uintptr) { text, readErr = os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd)) })
	if err == nil {
		err = readErr
	}
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(text) {
		if number, ok := bytes.CutPrefix(line, []byte("Pid:")); ok {
			if pid, err := strconv.Atoi(string(bytes.TrimSpace(number))); err == nil && pid > 1 {
				return pid, nil
			}
		}
	}
	return 0, fault.New(fault.Unavailable, "the process has ended")
}

// holds notes an anchor that must end with the shell: it is in its cgroup, but in none of its namespaces.
func (s *shell) holds(a *trace.Process) {
	s.kernelMu.Lock()
	defer s.kernelMu.Unlock()
	if s.over {
		a.Kill()
	}
	kept := []*trace.Process{a}
	for _, old := range s.anchors {
		select {
		case <-old.Gone():
		default:
			kept = append(kept, old)
		}
	}
	s.anchors = kept
}

// freeing is how long the memory of a kernel that ended may take to be free. The agent waits longer for the news of the end.
const freeing = 40 * time.Second

// awaitFreed returns when an anchor that was killed is gone, and the memory with it that it shared with its kernel. Who hears of
// the kernel's end wants memory next, and while the last of the two gives theirs back the host sees nobody in the sandbox's
// group that will: it would end the agent instead.
func (s *shell) awaitFreed(a *trace.Process) {
	patience := time.NewTimer(freeing)
	defer patience.Stop()
	select {
	case <-a.Gone():
	case <-s.done:
	case <-patience.C:
	}
}

func (s *shell) killAnchors() {
	s.kernelMu.Lock()
	defer s.kernelMu.Unlock()
	s.over = true
	for _, a := range s.anchors {
		a.Kill()
	}
}

// hand gives descriptors to the copy of an anchor that is about to take them.
func (z *zygote) hand(word []byte, files []*os.File) error {
	if err := z.anchors.SetWriteDeadline(time.Now().Add(zygotePatience)); err != nil {
		return err
	}
	err := wire.SendBytes(z.anchors, word, files...)
	if err != nil && !errors.Is(err, wire.ErrNotHeld) { // that would be a branch that was ended while it was made
		z.stop() // full of what nobody took
	}
	return err
}

// adopt tells the zygote of a child that it did not bear itself, so that it tells of its end.
func (z *zygote) adopt(token string, pid int, onExit func(exit)) error {
	z.mu.Lock()
	if z.dead {
		z.mu.Unlock()
		return errZygoteDied
	}
	z.living[token] = onExit
	z.mu.Unlock()
	z.sendMu.Lock()
	defer z.sendMu.Unlock()
	_ = z.conn.SetWriteDeadline(time.Now().Add(zygotePatience))
	// struct adoption of kernel/native/serve.c; only a zygote with the shim has anchors.
	err := wire.SendBytes(z.conn, append(binary.LittleEndian.AppendUint32([]byte{'A', 0, 0, 0}, uint32(pid)), token...))
	if err != nil {
		z.forget(token)
	}
	return err
}

// anchorSocket makes the socket that every anchor of a zygote's kernels keeps.
func anchorSocket() (mine *net.UnixConn, theirs *os.File, err error) {
	ours, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, nil, err
	}
	if mine, err = wire.Conn(ours); err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return mine, theirs, nil
}
