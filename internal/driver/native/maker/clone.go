package maker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
)

// birth says how a process is born.
type birth struct {
	program *os.File
	flags   uintptr // namespaces
	socket  *os.File
	stderr  *os.File
}

// birthApart is one with a user namespace of its own.
type birthApart struct {
	birth
	mine  *os.File // the other end of its socket
	owner int      // effective uid of the clone: it owns the user namespace
	uids  string   // a line of its id map
	gids  string
	seen  func(pid int) error // called when the ids are mapped, before it goes on; nil: nobody looks
}

// allIDs maps all ids of a sandbox, whose first is that of the host.
func allIDs(base int) string { return fmt.Sprintf("0 %d %d\n", base, idsPerSandbox) }

// clone starts the shell program, in new namespaces if it has any.
func clone(b birth) (pid int, pidfd *os.File, err error) {
	return b.start([]string{b.program.Name()}, nil)
}

// cloneApart starts the shell program in new namespaces, one of users among them, whose ids are mapped.
//
// The thread's effective uid is the owner while it starts the program, because the kernel gives a user namespace to the
// effective uid of its maker: so the zygote, which is that uid and has no capability at all, has rights over this sandbox
// and over nothing else.
func cloneApart(b birthApart) (pid int, pidfd *os.File, err error) {
	argv := []string{b.program.Name(), strconv.FormatUint(uint64(b.flags|unix.CLONE_NEWUSER), 10)}
	b.flags = 0
	first, firstFD, err := b.start(argv, func() error { return actAs(b.owner) })
	if err != nil {
		return 0, nil, err
	}
	defer firstFD.Close()
	defer waitExit(first, firstFD) //nolint:errcheck // it has told all it had to
	if pid, err = b.child(); err != nil {
		_ = signal(firstFD, unix.SIGKILL)
		return 0, nil, err
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK) // our own child, and not reaped
	if err == nil {
		pidfd = os.NewFile(uintptr(fd), "pidfd")
		err = b.mapIDs(pid)
	}
	if err == nil {
		_, err = b.mine.Write([]byte{'M'})
	}
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
		if pidfd != nil {
			pidfd.Close()
		}
		return 0, nil, err
	}
	return pid, pidfd, nil
}

// child hears of the process in the new namespaces.
func (b birthApart) child() (int, error) {
	if err := b.mine.SetDeadline(time.Now().Add(birthTime)); err != nil {
		return 0, err
	}
	var r report
	answer := make([]byte, binary.Size(r))
	n, err := b.mine.Read(answer)
	switch {
	case err != nil:
		return 0, fmt.Errorf("clone: %w", err)
	case n == 8:
		return int(binary.LittleEndian.Uint64(answer)), nil
	}
	_, _ = binary.Decode(answer, binary.LittleEndian, &r)
	return 0, fmt.Errorf("%s: %w", bytes.TrimRight(r.Step[:], "\x00"), syscall.Errno(r.Err))
}

func (b birthApart) mapIDs(pid int) error {
	for name, line := range map[string]string{"uid_map": b.uids, "gid_map": b.gids} {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", pid, name), []byte(line), 0); err != nil {
			return fmt.Errorf("map ids: %w", err)
		}
	}
	if b.seen == nil {
		return nil
	}
	return b.seen(pid)
}

// start runs the program; as is called on the thread that does, and undone.
func (b birth) start(argv []string, as func() error) (pid int, pidfd *os.File, err error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return 0, nil, err
	}
	defer null.Close()
	stderr := null
	if b.stderr != nil {
		stderr = b.stderr
	}
	fd := -1
	attr := &syscall.ProcAttr{
		Env:   []string{},
		Files: []uintptr{null.Fd(), null.Fd(), stderr.Fd(), b.socket.Fd()},
		Sys:   &syscall.SysProcAttr{Cloneflags: b.flags, PidFD: &fd},
	}
	runtime.LockOSThread()
	if as != nil {
		if err := as(); err != nil {
			runtime.UnlockOSThread()
			return 0, nil, err
		}
	}
	pid, err = syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", b.program.Fd()), argv, attr)
	if as != nil {
		if back := actAs(0); back != nil {
			// The thread is somebody else now: leave it locked, so that it ends with its goroutine.
			return 0, nil, errors.Join(err, back)
		}
	}
	runtime.UnlockOSThread()
	if err != nil {
		return 0, nil, fmt.Errorf("clone: %w", err)
	}
	if fd < 0 {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
		return 0, nil, errors.New("clone: the kernel gave no pidfd")
	}
	_ = unix.SetNonblock(fd, true) // so that the runtime's poller waits for it
	return pid, os.NewFile(uintptr(fd), "pidfd"), nil
}

// actAs changes the effective uid of this thread and keeps its capabilities effective.
func actAs(uid int) error {
	const keep = ^uintptr(0) // −1: leave it
	if _, _, e := syscall.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); e != 0 {
		return fmt.Errorf("become %d: %w", uid, e)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if _, _, e := syscall.RawSyscall(unix.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return fmt.Errorf("capget: %w", e)
	}
	for i := range data {
		data[i].Effective = data[i].Permitted
	}
	if _, _, e := syscall.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return fmt.Errorf("capset: %w", e)
	}
	return nil
}

// birthTime is how long a newborn may take to become what its plan says; it takes milliseconds.
const birthTime = 20 * time.Second

// order sends a plan to a newborn and waits until it has become what the plan says.
func order(socket *os.File, p *plan, files []*os.File) error {
	if err := socket.SetDeadline(time.Now().Add(birthTime)); err != nil {
		return err
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	message := p.bytes()
	err = wire.Hold(files, func(fds []int) error {
		rights := unix.UnixRights(fds...)
		var sendErr error
		err := raw.Write(func(fd uintptr) bool {
			sendErr = unix.Sendmsg(int(fd), message, rights, nil, unix.MSG_NOSIGNAL)
			return sendErr != unix.EAGAIN
		})
		return errors.Join(err, sendErr)
	})
	if err != nil {
		return fmt.Errorf("send plan: %w", err)
	}
	// The newborn's end closes at its exec; before that it only speaks to name a step that failed.
	var r report
	answer := make([]byte, binary.Size(r))
	n, err := socket.Read(answer)
	if errors.Is(err, io.EOF) || n == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("await start: %w", err)
	}
	_, _ = binary.Decode(answer, binary.LittleEndian, &r)
	step := string(bytes.TrimRight(r.Step[:], "\x00"))
	err = fmt.Errorf("%s: %w", step, syscall.Errno(r.Err))
	if i, ok := strings.CutPrefix(step, "mount "); ok {
		return p.badTarget(i, syscall.Errno(r.Err))
	}
	if strings.HasPrefix(step, "/") { // a place that a template or snapshot must have
		return fault.Wrap(fault.Unsupported, err, "no sandbox can have these files: %v, and something must be mounted there", err)
	}
	return err
}

// waitExit waits without a thread until the process of a pidfd has ended, and reaps it.
func waitExit(pid int, pidfd *os.File) (unix.WaitStatus, error) {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return 0, err
	}
	var status unix.WaitStatus
	var waitErr error
	err = raw.Read(func(uintptr) bool {
		var got int
		for {
			got, waitErr = unix.Wait4(pid, &status, unix.WNOHANG, nil)
			if waitErr != unix.EINTR {
				break
			}
		}
		return waitErr != nil || got == pid
	})
	return status, errors.Join(err, waitErr)
}

// signal sends a signal by pidfd: the process cannot be mistaken for a later one with its number.
func signal(pidfd *os.File, sig unix.Signal) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := raw.Control(func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	if isGone(sendErr) {
		return nil
	}
	return sendErr
}
