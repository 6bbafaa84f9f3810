package agent

import (
	"errors"
	"net"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// listen opens a port of loopback on which connections are taken and closed. Programs outside look there whether something
// is ready that the agent itself does. Where somebody listens already, the port says what it should.
func (a *Agent) listen(params agentapi.ListenParams) (none, error) {
	if params.Port < 1024 || params.Port > 65535 {
		return none{}, fault.New(fault.Invalid, "%d is not a port that a program without rights has", params.Port)
	}
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: params.Port})
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return none{}, nil
	case err != nil:
		return none{}, fault.Wrap(fault.Unavailable, err, "port %d of the sandbox cannot be listened on", params.Port)
	}
	a.keep(l)
	open := a.spawn(func() {
		defer a.drop(l)
		defer l.Close()
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	})
	if !open {
		a.drop(l)
		l.Close()
		return none{}, fault.New(fault.Unavailable, "the sandbox is ending")
	}
	return none{}, nil
}
