package tunnel

import (
	"errors"
	"net"
	"time"
)

// Pipe is a connection within this process. Unlike net.Pipe it can be closed for one direction: a server at its end hears
// that its client has left although that client still listens, which is how a forwarded port tells it.
func Pipe() (one, other net.Conn) {
	there, here := net.Pipe()
	back, front := net.Pipe()
	return &end{in: front, out: there}, &end{in: here, out: back}
}

// end is one end: what it reads, and what it writes.
type end struct{ in, out net.Conn }

func (e *end) Read(p []byte) (int, error)  { return e.in.Read(p) }
func (e *end) Write(p []byte) (int, error) { return e.out.Write(p) }
func (e *end) CloseWrite() error           { return e.out.Close() }
func (e *end) Close() error                { return errors.Join(e.in.Close(), e.out.Close()) }
func (e *end) LocalAddr() net.Addr         { return e.in.LocalAddr() }
func (e *end) RemoteAddr() net.Addr        { return e.in.RemoteAddr() }

func (e *end) SetDeadline(t time.Time) error {
	return errors.Join(e.in.SetReadDeadline(t), e.out.SetWriteDeadline(t))
}

func (e *end) SetReadDeadline(t time.Time) error  { return e.in.SetReadDeadline(t) }
func (e *end) SetWriteDeadline(t time.Time) error { return e.out.SetWriteDeadline(t) }
