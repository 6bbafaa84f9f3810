package agent

import (
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// dial joins a connection to a port of the sandbox's own loopback.
func (a *Agent) dial(l *link, params agentapi.DialParams) error {
	conn, err := dialLoopback(params)
	if err != nil {
		return err
	}
	a.keep(conn)
	defer a.drop(conn)
	defer conn.Close()
	if err := l.event(agentapi.Event{Type: agentapi.EventStarted}); err != nil {
		return nil
	}
	// Each direction may end first; when both have, the operation has.
	var ways atomic.Int32
	over := func() {
		if ways.Add(1) == 2 {
			_ = l.answer(none{}) // nothing cannot fail to be encoded
		}
	}
	done := make(chan struct{})
	if !a.spawn(func() { defer close(done); portToLink(conn, l, over) }) {
		return fault.New(fault.Unavailable, "the sandbox is ending")
	}
	linkToPort(l, conn, over)
	conn.Close() // the client left, or the port takes no more
	<-done
	return l.answer(none{})
}

func dialLoopback(params agentapi.DialParams) (*net.TCPConn, error) {
	if params.Network != "" && params.Network != "tcp" {
		return nil, fault.New(fault.Unsupported, "only tcp ports can be dialed, not %q", params.Network)
	}
	if params.Port < 1 || params.Port > 65535 {
		return nil, fault.New(fault.Invalid, "%d is not a port", params.Port)
	}
	hosts := []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	if params.Host != "" && params.Host != "localhost" {
		ip := net.ParseIP(params.Host)
		if ip == nil || !ip.IsLoopback() {
			return nil, fault.New(fault.Denied, "only loopback addresses can be dialed, not %q", params.Host)
		}
		hosts = []net.IP{ip}
	}
	var first error
	for _, ip := range hosts {
		d := net.Dialer{Timeout: 10 * time.Second}
		conn, err := d.Dial("tcp", net.JoinHostPort(ip.String(), itoa(params.Port)))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
	}
	if errors.Is(first, syscall.ECONNREFUSED) {
		return nil, fault.Wrap(fault.Unavailable, first, "nothing listens on port %d in the sandbox", params.Port)
	}
	return nil, fault.Wrap(fault.Unavailable, first, "port %d in the sandbox cannot be reached", params.Port)
}

// portToLink passes on what the port says until it has said all.
func portToLink(conn *net.TCPConn, l *link, over func()) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	for {
		b, n, err := readChunk(raw)
		if err != nil {
			break
		}
		err = l.chunk(agentapi.FrameData, b, n)
		chunks.Put(b)
		if err != nil {
			return
		}
	}
	_ = l.frame(agentapi.FrameEOF, nil) // a client that left hears no end
	over()
}

// linkToPort passes on what the client says until it leaves; its EOF is a half close.
func linkToPort(l *link, conn *net.TCPConn, over func()) {
	half := false
	for {
		f, err := l.in.Read()
		switch {
		case err != nil:
			return
		case f.Kind == agentapi.FrameData && !half:
			if _, err := conn.Write(f.Payload); err != nil {
				return
			}
		case f.Kind == agentapi.FrameEOF && !half:
			half = true
			conn.CloseWrite()
			over()
		default:
			return
		}
	}
}
