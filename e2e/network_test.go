package e2e_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// leaves tells of one address whether a rule refused it at once or a packet was let out. Whether somebody answers is the
// machine's business: these tests need no internet.
const leaves = `
import socket
def leaves(address, port=53):
    try:
        socket.create_connection((address, port), 2).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        pass
    return "let out"
`

func TestS0_64_WhatMayLeaveIsASettingOfEach(t *testing.T) {
	s := sharedServer(t)
	for claim, c := range map[string]struct {
		network *client.Network
		want    string // of 1.1.1.1 and 8.8.8.8
	}{
		"everything unless told otherwise": {nil, "('let out', 'let out')"},
		"nothing":                          {&client.Network{Mode: "none"}, "('refused', 'refused')"},
		"a list":                           {&client.Network{Mode: "list", Allow: []string{"1.1.1.1/32"}}, "('let out', 'refused')"},
		"all but some":                     {&client.Network{Mode: "internet", Deny: []string{"1.1.1.0/24"}}, "('refused', 'let out')"},
	} {
		t.Run(claim, func(t *testing.T) {
			t.Parallel()
			if got := s.create(t, client.CreateRequest{Network: c.network}).value(leaves + "leaves('1.1.1.1'), leaves('8.8.8.8')"); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestS0_65_TheHostAndWhatIsNearIsOutOfReach(t *testing.T) {
	s := sharedServer(t)
	var tcp net.Listener // its backlog answers for it
	var udp net.PacketConn
	var err error
	for range 20 { // a port that is free in one protocol may be somebody's in the other
		if tcp, err = net.Listen("tcp4", "0.0.0.0:0"); err != nil {
			t.Fatal(err)
		}
		defer tcp.Close() //nolint:gocritic // held, so that the next is another one
		if udp, err = net.ListenPacket("udp4", tcp.Addr().String()); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	_, port, err := net.SplitHostPort(tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	near := append(addressesOf(t), "127.0.0.1", "169.254.169.254", "10.0.0.1", "192.168.0.1")
	sb := s.create(t, client.CreateRequest{})
	t.Run("by TCP", func(t *testing.T) {
		sb := &sandbox{t, sb.Sandbox}
		code := "import socket\nfor a in %q.split():\n  try: socket.create_connection((a, %s), 0.5); print(a)\n  except OSError: pass"
		if out := sb.cell(fmt.Sprintf(code, strings.Join(near, " "), port)); out.Outcome != client.OutcomeOK || out.Stdout != "" {
			t.Errorf("reached: %s %+v", out.Stdout, out.Error)
		}
	})
	t.Run("by UDP", func(t *testing.T) {
		sb := &sandbox{t, sb.Sandbox}
		code := "import socket\nfor a in %q.split():\n  try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', (a, %s))\n  except OSError: pass"
		sb.cell(fmt.Sprintf(code, strings.Join(near, " "), port))
		// What would have come is faster than a cell; a little longer is waited.
		if err := udp.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if n, from, err := udp.ReadFrom(make([]byte, 16)); err == nil {
			t.Errorf("%d bytes came from %v", n, from)
		}
	})
	t.Run("by names, where nothing may leave", func(t *testing.T) {
		out := s.create(t, client.CreateRequest{Network: &client.Network{Mode: "none"}}).cell("import socket\nsocket.getaddrinfo('example.com', 80)")
		if out.Error == nil || out.Error.Name != "gaierror" {
			t.Errorf("got %+v", out)
		}
	})
	t.Run("a neighbour", func(t *testing.T) {
		other := s.create(t, client.CreateRequest{})
		there := other.value("import socket, subprocess\nserver = socket.create_server(('0.0.0.0', 8123))\nsubprocess.run(['hostname', '-I'], capture_output=True, text=True).stdout.split()[0]")
		sb := &sandbox{t, sb.Sandbox}
		if out := sb.cell(fmt.Sprintf("import socket\nsocket.create_connection((%s, 8123), 2)", there)); out.Error == nil {
			t.Error("a neighbour's port answered")
		}
	})
}

// addressesOf are the addresses that this host has, but for its loopback.
func addressesOf(t *testing.T) []string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, a := range all {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.To4() != nil && !ip.IP.IsLoopback() {
			found = append(found, ip.IP.String())
		}
	}
	return found
}
