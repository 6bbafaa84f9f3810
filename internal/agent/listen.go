package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// Bounds on who asks at a port whether something is ready. Such questions are heard one after the other.
const (
	healthGrace   = time.Second
	healthRequest = 8 << 10 // bytes
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
			if params.Health != "" {
				a.keep(conn)
				health(conn, params.Health)
				a.drop(conn)
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

// health answers one request of HTTP: a path says OK, the others are not there. The package for HTTP would double the agent.
func health(conn net.Conn, path string) {
	_ = conn.SetDeadline(time.Now().Add(healthGrace))
	request := bufio.NewReader(io.LimitReader(conn, healthRequest))
	first, err := request.ReadString('\n')
	for line := first; err == nil && strings.TrimRight(line, "\r\n") != ""; {
		line, err = request.ReadString('\n')
	}
	words := strings.Fields(first)
	if err != nil || len(words) != 3 {
		return
	}
	status, body := "404 Not Found", `{"detail":"Not Found"}`
	if words[1] == path {
		status, body = "200 OK", `"OK"`
	}
	head := fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n", status, len(body))
	if words[0] == "HEAD" {
		body = ""
	}
	_, _ = io.WriteString(conn, head+body) // who asked may have left
}
