package agent

import (
	"os"
	"syscall"
	"unsafe"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// openPTY makes a terminal: the side we read and write, and the side that becomes a process's terminal.
func openPTY(size agentapi.PTYSize, u user) (master *os.File, slave int, err error) {
	fd, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err == syscall.ENOSPC { // of names in /dev/pts, which is no disk
		return nil, -1, fault.Wrap(fault.Exhausted, err, "the sandbox has as many terminals as it may have; close one first")
	}
	if err != nil {
		return nil, -1, explain(err, "terminal")
	}
	slave, err = openSlave(fd)
	if err == nil {
		err = resizePTY(fd, size)
	}
	if err != nil {
		syscall.Close(fd)
		if slave >= 0 {
			syscall.Close(slave)
		}
		return nil, -1, explain(err, "terminal")
	}
	_ = syscall.Fchown(slave, u.uid, -1) // where this is not allowed the terminal works, only by its descriptor
	return os.NewFile(uintptr(fd), "pty"), slave, nil
}

func openSlave(master int) (int, error) {
	var unlock int32
	if err := ioctl(master, syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)); err != nil {
		return -1, err
	}
	var number uint32
	if err := ioctl(master, syscall.TIOCGPTN, unsafe.Pointer(&number)); err != nil {
		return -1, err
	}
	return syscall.Open("/dev/pts/"+itoa(int(number)), syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
}

func resizePTY(fd int, size agentapi.PTYSize) error {
	if size.Rows == 0 {
		size.Rows = 24
	}
	if size.Cols == 0 {
		size.Cols = 80
	}
	ws := struct{ rows, cols, x, y uint16 }{rows: size.Rows, cols: size.Cols}
	return ioctl(fd, syscall.TIOCSWINSZ, unsafe.Pointer(&ws))
}
