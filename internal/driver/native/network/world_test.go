package network_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/network"
)

const (
	inWorld = "COVE_TEST_OWN_NETNS"
	pause   = "COVE_TEST_PAUSE" // makes the test binary a process that only waits for its input to end
)

// TestMain runs everything in a network namespace of its own: the firewall and the routes of the machine that runs the
// tests are never touched.
func TestMain(m *testing.M) {
	if os.Getenv(pause) != "" {
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	if os.Getenv(inWorld) != "" || os.Getuid() != 0 {
		os.Exit(m.Run())
	}
	again := exec.Command("/proc/self/exe", os.Args[1:]...)
	again.Env = append(os.Environ(), inWorld+"=1")
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	err := again.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, "network tests need a network namespace:", err)
		os.Exit(1)
	}
}

// Addresses of the fake internet behind the host, all served on port 80 (TCP) and 81 (UDP).
const (
	public      = "198.51.100.10"
	otherPublic = "198.51.100.20"
	uplink      = "203.0.113.1"
	hostAddr    = "203.0.113.2"
)

var unreachable = []string{"10.9.9.9", "172.16.5.5", "192.168.7.7", "100.64.0.9", "198.18.0.9",
	"169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16"}

// world is a host with an uplink to a fake internet; the host is the test process's own namespace.
type world struct {
	t        testing.TB
	internet int

	mu    sync.Mutex
	heard map[string]int // datagrams that arrived, by address and port
}

func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Getenv(inWorld) == "" {
		t.Skip("needs root")
	}
	w := &world{t: t, internet: newNetns(t), heard: map[string]int{}}
	if left := tables(t); len(left) > 0 {
		t.Fatalf("tables of an earlier test: %v", left)
	}
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
	must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0))

	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "wan0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(w.internet)}))
	wan, err := netlink.LinkByName("wan0")
	must(t, err)
	t.Cleanup(func() { _ = netlink.LinkDel(wan) })
	must(t, netlink.AddrAdd(wan, parseAddr(t, hostAddr+"/24")))
	must(t, netlink.LinkSetUp(wan))
	must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: wan.Attrs().Index, Gw: net.ParseIP(uplink)}))
	w.in(w.internet, func() {
		lo, err := netlink.LinkByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(lo))
		eth, err := netlink.LinkByName("eth0")
		must(t, err)
		must(t, netlink.AddrAdd(eth, parseAddr(t, uplink+"/24")))
		must(t, netlink.LinkSetUp(eth))
		for _, a := range append([]string{public, otherPublic}, unreachable...) {
			must(t, netlink.AddrAdd(lo, parseAddr(t, a+"/32")))
		}
		w.serveTCP("0.0.0.0:80")
		for _, a := range append([]string{public, otherPublic, uplink}, unreachable...) {
			w.serveUDP(a + ":81")
		}
	})
	w.awaitUp("wan0", w.internet)
	return w
}

// awaitUp waits until both ends of a veth carry packets. The kernel announces a carrier with up to a second's delay when
// both happen to have the same index.
func (w *world) awaitUp(name string, netns int) {
	w.t.Helper()
	up := func(name string) bool {
		l, err := netlink.LinkByName(name)
		return err == nil && l.Attrs().OperState == netlink.OperUp
	}
	eventually(w.t, name+" is up", func() bool {
		peer := false
		w.in(netns, func() { peer = up("eth0") })
		return peer && up(name)
	})
}

// in runs f on a thread inside a namespace; sockets made by it stay there.
func (w *world) in(netns int, f func()) {
	w.t.Helper()
	inNetns(w.t, netns, f)
}

func inNetns(t testing.TB, netns int, f func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		defer close(done) // also when a test helper calls FailNow
		f()
	}()
	must(t, <-done)
}

func newNetns(t testing.TB) int {
	t.Helper()
	made := make(chan int, 1)
	go func() {
		runtime.LockOSThread()
		fd := -1
		if unix.Unshare(unix.CLONE_NEWNET) == nil {
			fd, _ = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		made <- fd
	}()
	fd := <-made
	if fd < 0 {
		t.Fatal("cannot make a network namespace")
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func (w *world) serveTCP(at string) {
	l, err := net.Listen("tcp", at)
	must(w.t, err)
	w.t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
}

func (w *world) serveUDP(at string) {
	c, err := net.ListenPacket("udp", at)
	must(w.t, err)
	w.t.Cleanup(func() { _ = c.Close() })
	go echo(&hearing{c, w, at})
}

// hearing notes what arrives, for a packet that got through is a failure even if its answer did not.
type hearing struct {
	net.PacketConn
	w  *world
	at string
}

func (h *hearing) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := h.PacketConn.ReadFrom(b)
	if err == nil {
		h.w.mu.Lock()
		h.w.heard[h.at]++
		h.w.mu.Unlock()
	}
	return n, from, err
}

func (w *world) hears(at string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.heard[at]
}

func echo(c net.PacketConn) {
	buf := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = c.WriteTo(buf[:n], from)
	}
}

func (w *world) open(o network.Options) *network.Network {
	w.t.Helper()
	n, err := network.Open(o)
	must(w.t, err)
	w.t.Cleanup(func() {
		if err := n.Close(); err != nil {
			w.t.Error(err)
		}
	})
	return n
}

// sandbox is a namespace attached to a network.
type sandbox struct {
	w     *world
	netns int
	slot  int
	link  network.Link
}

func (w *world) sandbox(n *network.Network, slot int) *sandbox {
	w.t.Helper()
	s := &sandbox{w: w, netns: newNetns(w.t), slot: slot}
	var err error
	s.link, err = n.Attach(slot, s.netns)
	must(w.t, err)
	return s
}

const (
	quick   = 150 * time.Millisecond // for what is thrown away while others arrive
	timeout = 400 * time.Millisecond // for what is not answered
	patient = time.Minute            // for what is answered
)

// dial opens a connection from inside and proves it with an echo.
func (s *sandbox) dial(kind, addr string) (net.Conn, error) { return s.dialWithin(patient, kind, addr) }

func (s *sandbox) dialWithin(limit time.Duration, kind, addr string) (net.Conn, error) {
	var conn net.Conn
	var err error
	s.w.in(s.netns, func() { conn, err = net.DialTimeout(kind, addr, limit) })
	if err != nil {
		return nil, err
	}
	if err := ping(conn, limit); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

func ping(c net.Conn, limit time.Duration) error {
	_ = c.SetDeadline(time.Now().Add(limit))
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

func (s *sandbox) reaches(kind, addr string) bool { return s.reachesWithin(timeout, kind, addr) }

func (s *sandbox) reachesWithin(limit time.Duration, kind, addr string) bool {
	c, err := s.dialWithin(limit, kind, addr)
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

// hangs reports whether an error came from a time limit and not from the peer or the host.
func hangs(err error) bool {
	late, ok := errors.AsType[net.Error](err)
	return ok && late.Timeout()
}

// expect checks many addresses at once, by both protocols.
func (s *sandbox) expect(t *testing.T, want bool, addrs ...string) {
	t.Helper()
	var wg sync.WaitGroup
	for _, a := range addrs {
		for kind, port := range map[string]string{"tcp": ":80", "udp": ":81"} {
			wg.Go(func() {
				before := s.w.hears(a + port)
				limit := timeout
				if want {
					limit = patient
				}
				if got := s.reachesWithin(limit, kind, a+port); got != want {
					t.Errorf("%s %s reached: %v, want %v", kind, a+port, got, want)
				}
				if !want && s.w.hears(a+port) != before {
					t.Errorf("%s %s heard from the sandbox", kind, a+port)
				}
			})
		}
	}
	wg.Wait()
}

func parseAddr(t testing.TB, s string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(s)
	must(t, err)
	return a
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func tables(t testing.TB) []string {
	t.Helper()
	conn, err := nftables.New()
	must(t, err)
	list, err := conn.ListTables()
	must(t, err)
	var names []string
	for _, table := range list {
		names = append(names, table.Name)
	}
	return names
}

func eventually(t testing.TB, claim string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within two minutes: " + claim)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
