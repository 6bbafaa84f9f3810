package podapi

import (
	"net"
	"syscall"
	"time"
	"unsafe"
)

// firmConn ends for the other side too, even if that reads no more: what was written and not taken would otherwise keep the end from being heard
// for as long as the node's kernel tries.
type firmConn struct{ *net.TCPConn }

// takenFor is how long the other side may take what was written last.
const takenFor = time.Second

// Close lets nobody wait.
func (c firmConn) Close() error {
	if c.untaken() == 0 {
		return c.TCPConn.Close()
	}
	_ = c.SetDeadline(time.Unix(1, 0)) // whoever reads or writes learns it now
	go func() {
		look := time.NewTicker(10 * time.Millisecond) // the kernel tells nobody
		defer look.Stop()
		late := time.After(takenFor)
		for c.untaken() > 0 {
			select {
			case <-look.C:
				continue
			case <-late:
				_ = c.SetLinger(0) // a reset
			}
			break
		}
		_ = c.TCPConn.Close()
	}()
	return nil
}

// untaken is how many bytes wait for the other side.
func (c firmConn) untaken() (n int32) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	const outQueue = 0x5411 // SIOCOUTQ
	err = raw.Control(func(fd uintptr) {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, outQueue, uintptr(unsafe.Pointer(&n))); errno != 0 {
			n = 0
		}
	})
	if err != nil {
		return 0
	}
	return n
}
