package pod

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// gentleConn closes so that what was said last is heard: a TCP socket that is closed with bytes unread resets its connection, and the reset
// overtakes the last words.
type gentleConn struct {
	*tls.Conn
	raw  net.Conn
	once sync.Once
}

const lastWords = time.Second

// SyscallConn is how the agent notices that somebody leaves whose bytes nobody takes.
func (c *gentleConn) SyscallConn() (syscall.RawConn, error) {
	tcp, ok := c.raw.(*net.TCPConn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return tcp.SyscallConn()
}

// Close lets nobody wait: the rest happens beside.
func (c *gentleConn) Close() error {
	c.once.Do(func() {
		_ = c.raw.SetDeadline(time.Now().Add(lastWords))
		go func() { // ends within lastWords
			defer c.raw.Close()
			_ = c.CloseWrite() // one who has left hears no farewell
			if tcp, ok := c.raw.(*net.TCPConn); ok && tcp.CloseWrite() == nil {
				_, _ = io.Copy(io.Discard, tcp)
			}
		}()
	})
	return nil
}

// isShortage tells an accept that failed for lack of descriptors or memory.
func isShortage(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.ENOBUFS) ||
		errors.Is(err, syscall.ECONNABORTED)
}
