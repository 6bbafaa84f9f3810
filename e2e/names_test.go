package e2e_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// names is a name server of a test: every name below a domain is this machine. Who asks it sees it in resolv.conf, in a
// mount namespace of its own.
type names struct{ resolvConf string }

func startNames(t *testing.T, domain string) names {
	t.Helper()
	// A name server must be on port 53: a loopback address of this process's own, where nobody else has one.
	address := fmt.Sprintf("127.53.%d.%d", os.Getpid()>>8&0xff, os.Getpid()&0xff)
	conn, err := net.ListenPacket("udp", address+":53")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	go func() {
		defer close(done)
		serveNames(conn, "."+domain+".")
	}()
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver "+address+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return names{file}
}

func serveNames(conn net.PacketConn, suffix string) {
	buf := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		var msg dnsmessage.Message
		if err != nil || msg.Unpack(buf[:n]) != nil || len(msg.Questions) != 1 {
			continue
		}
		msg.Additionals = nil // an option record is not for us to answer
		msg.Response, msg.Authoritative = true, true
		q := msg.Questions[0]
		switch {
		case !strings.HasSuffix(strings.ToLower(q.Name.String()), suffix):
			msg.RCode = dnsmessage.RCodeNameError
		case q.Type == dnsmessage.TypeA:
			msg.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60},
				Body:   &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}},
			}}
		}
		if packed, err := msg.Pack(); err == nil {
			_, _ = conn.WriteTo(packed, from) // who asked has gone, or asks again
		}
	}
}

// within is a command that asks this name server.
func (n names) within(command []string) []string {
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	return append([]string{"unshare", "--mount", "sh", "-c", script, n.resolvConf}, command...)
}
