package resolver_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/covehq/cove/internal/driver/native/resolver"
)

const asProcess = "COVE_TEST_RESOLVER"

func TestMain(m *testing.M) {
	if os.Getenv(asProcess) != "" {
		os.Exit(resolver.Main(os.Args[1:], os.Stderr))
	}
	os.Exit(m.Run())
}

// nameServer is a real one; each name says how it behaves.
type nameServer struct {
	addr  netip.AddrPort
	asked atomic.Int64
	last  atomic.Pointer[dns.Msg]
	hold  chan struct{} // names under hold.test wait for it
	once  sync.Once
}

func (n *nameServer) release() { n.once.Do(func() { close(n.hold) }) }

func newNameServer(t testing.TB) *nameServer {
	t.Helper()
	packets, streams := listen(t)
	n := &nameServer{addr: netip.MustParseAddrPort(packets.LocalAddr().String()), hold: make(chan struct{})}
	for _, s := range []*dns.Server{{PacketConn: packets, Handler: n}, {Listener: streams, Handler: n}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { _ = s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	t.Cleanup(n.release)
	return n
}

func (n *nameServer) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	n.asked.Add(1)
	n.last.Store(q.Copy())
	name := q.Question[0].Name
	m := &dns.Msg{}
	m.SetReply(q)
	answer := func(count int) {
		for i := range count {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
				A: net.IPv4(192, 0, 2, byte(i))})
		}
	}
	_, udp := w.RemoteAddr().(*net.UDPAddr)
	switch {
	case strings.HasSuffix(name, "hold.test."):
		<-n.hold
		answer(1)
	case strings.HasPrefix(name, "big."):
		answer(200)
		if udp {
			m.Truncate(1232)
		}
	case strings.HasPrefix(name, "middle."):
		answer(50) // more than a plain client takes by UDP, less than a datagram holds
	case strings.HasPrefix(name, "missing."):
		m.Rcode = dns.RcodeNameError
	case strings.HasPrefix(name, "silent."):
		return
	case strings.HasPrefix(name, "forged.") && udp:
		for _, spoil := range []func(*dns.Msg){
			func(m *dns.Msg) { m.Id++ },
			func(m *dns.Msg) { m.Question[0].Name = "other.test." },
			func(m *dns.Msg) { m.Response = false },
		} {
			wrong := m.Copy()
			spoil(wrong)
			_ = w.WriteMsg(wrong)
		}
		_, _ = w.Write([]byte("garbage"))
		answer(1)
	default:
		answer(1)
	}
	_ = w.WriteMsg(m)
}

// listen takes a port that is free in both protocols: one that is free in the first may be somebody's in the other.
func listen(t testing.TB) (*net.UDPConn, *net.TCPListener) {
	t.Helper()
	for range 20 {
		udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		must(t, err)
		tcp, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: udp.LocalAddr().(*net.UDPAddr).Port})
		if err == nil {
			return udp, tcp
		}
		_ = udp.Close()
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	t.Fatal("no port is free in both protocols")
	return nil, nil
}

// start runs a resolver in this process and returns where it listens.
func start(t testing.TB, o resolver.Options) string {
	t.Helper()
	o.UDP, o.TCP = listen(t)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- resolver.Run(ctx, o) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return o.UDP.LocalAddr().String()
}

func ask(t testing.TB, network, at string, q *dns.Msg) *dns.Msg {
	t.Helper()
	c := &dns.Client{Net: network, Timeout: 50 * time.Second, UDPSize: 4096}
	got, _, err := c.Exchange(q, at)
	if err != nil {
		t.Fatalf("%s %s: %v", network, q.Question[0].Name, err)
	}
	return got
}

func question(name string, kind uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, kind) }

func TestAnswersAreRelayed(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}})
	for _, network := range []string{"udp", "tcp"} {
		q := question("one.test.", dns.TypeA)
		got := ask(t, network, at, q)
		if got.Id != q.Id || !got.RecursionAvailable || len(got.Answer) != 1 || got.Rcode != dns.RcodeSuccess {
			t.Errorf("%s: %v", network, got)
		}
		if sent := up.last.Load(); sent.Id == q.Id {
			t.Errorf("%s: the client's id went upstream", network)
		}
		if got := ask(t, network, at, question("missing.test.", dns.TypeAAAA)); got.Rcode != dns.RcodeNameError {
			t.Errorf("%s: a name that does not exist: %v", network, got)
		}
		if got := ask(t, network, at, question("forged.test.", dns.TypeA)); len(got.Answer) != 1 || got.Question[0].Name != "forged.test." {
			t.Errorf("%s: forged answers: %v", network, got)
		}
	}
}

func TestOnlyTheQuestionGoesUpstream(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}})
	q := question("one.test.", dns.TypeA)
	q.SetEdns0(4096, true)
	q.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"},
		&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("smuggled")}}
	ask(t, "udp", at, q)
	opt := up.last.Load().IsEdns0()
	if opt == nil || len(opt.Option) != 0 || !opt.Do() || opt.UDPSize() != resolver.MaxDatagram {
		t.Errorf("upstream saw %v", opt)
	}
}

func TestWhatIsNoQuestionAboutANameIsRefused(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}})
	two := question("one.test.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	chaos := question("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	update := question("one.test.", dns.TypeA)
	update.Opcode = dns.OpcodeUpdate
	stuffed := question("one.test.", dns.TypeA)
	stuffed.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: "one.test.", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(1, 2, 3, 4)}}
	for claim, c := range map[string]struct {
		query *dns.Msg
		want  int
	}{
		"any":              {question("one.test.", dns.TypeANY), dns.RcodeRefused},
		"a zone transfer":  {question("one.test.", dns.TypeAXFR), dns.RcodeRefused},
		"another class":    {chaos, dns.RcodeRefused},
		"two questions":    {two, dns.RcodeFormatError},
		"an update":        {update, dns.RcodeNotImplemented},
		"answers in query": {stuffed, dns.RcodeFormatError},
	} {
		for _, network := range []string{"udp", "tcp"} {
			conn, err := dns.DialTimeout(network, at, time.Minute)
			must(t, err)
			must(t, conn.WriteMsg(c.query))
			got, err := conn.ReadMsg()
			must(t, err)
			_ = conn.Close()
			if got.Rcode != c.want || got.Id != c.query.Id || !got.Response {
				t.Errorf("%s by %s: %v", claim, network, got)
			}
		}
	}
	if n := up.asked.Load(); n != 0 {
		t.Errorf("%d of them went upstream", n)
	}
}

func TestALongAnswerIsFetchedWholeAndCutForItsClient(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}})
	edns := func(name string) *dns.Msg {
		q := question(name, dns.TypeA)
		q.SetEdns0(4096, false)
		return q
	}
	if got := ask(t, "tcp", at, question("big.test.", dns.TypeA)); len(got.Answer) != 200 || got.Truncated {
		t.Errorf("by TCP: %d answers, truncated %v", len(got.Answer), got.Truncated)
	}
	if got := ask(t, "udp", at, edns("big.test.")); !got.Truncated || len(got.Answer) == 0 {
		t.Errorf("by UDP: %d answers, truncated %v", len(got.Answer), got.Truncated)
	}
	if got := ask(t, "udp", at, edns("middle.test.")); len(got.Answer) != 50 || got.Truncated {
		t.Errorf("by UDP with room: %d answers, truncated %v", len(got.Answer), got.Truncated)
	}
	if got := ask(t, "udp", at, question("middle.test.", dns.TypeA)); !got.Truncated {
		t.Errorf("by plain UDP: %d answers, truncated %v", len(got.Answer), got.Truncated)
	}
}

func TestAnotherNameServerIsAsked(t *testing.T) {
	up := newNameServer(t)
	dead, err := net.ListenPacket("udp", "127.0.0.1:0") // answers nothing
	must(t, err)
	defer func() { _ = dead.Close() }()
	asked := func() (n int) { // since the last call: what was sent to an address of this host is there at once
		for buf := make([]byte, 512); ; n++ {
			must(t, dead.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
			if _, _, err := dead.ReadFrom(buf); err != nil {
				return n
			}
		}
	}
	at := start(t, resolver.Options{Timeout: 5 * time.Second,
		Upstreams: []netip.AddrPort{netip.MustParseAddrPort(dead.LocalAddr().String()), up.addr}})
	if got := ask(t, "udp", at, question("one.test.", dns.TypeA)); len(got.Answer) != 1 {
		t.Errorf("answer: %v", got)
	}
	if asked() == 0 {
		t.Error("the dead server was not asked first")
	}
	ask(t, "udp", at, question("two.test.", dns.TypeA))
	if n := asked(); n != 0 {
		t.Errorf("the dead server was asked first again: %d times", n)
	}
	if got := ask(t, "udp", at, question("silent.test.", dns.TypeA)); got.Rcode != dns.RcodeServerFailure {
		t.Errorf("no server answers: %v", got)
	}
}

func TestAFloodCostsItsShare(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}, Queries: 128, PerSource: 16, Timeout: 20 * time.Second})
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()

	flood, err := net.Dial("udp", at)
	must(t, err)
	defer func() { _ = flood.Close() }()
	for i := range 20000 {
		q, _ := question(fmt.Sprintf("n%d.hold.test.", i), dns.TypeA).Pack()
		_, _ = flood.Write(q)
	}
	eventually(t, "the flood has its share", func() bool { return up.asked.Load() == 16 })

	// Another address still gets answers while the flood holds all it can.
	other := &dns.Client{Dialer: &net.Dialer{Timeout: time.Second, LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 9)}}}
	eventually(t, "another source is answered", func() bool { // the first try may meet a full socket
		got, _, err := other.Exchange(question("one.test.", dns.TypeA), at)
		return err == nil && len(got.Answer) == 1
	})
	runtime.GC()
	runtime.ReadMemStats(&during)
	if grown := int64(during.HeapInuse) - int64(before.HeapInuse); grown > 16<<20 {
		t.Errorf("heap grew by %d bytes", grown)
	}
	if n := runtime.NumGoroutine(); n > goroutines+16*4+20 { // the name server's own among them
		t.Errorf("%d goroutines, %d before", n, goroutines)
	}
	if n := up.asked.Load(); n > 16+5 {
		t.Errorf("%d queries went upstream", n)
	}
	up.release()
}

func TestIdleConnectionsAreBounded(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}, Connections: 32})
	var mu sync.Mutex
	closed := 0
	for range 20 {
		c, err := net.Dial("tcp", at)
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			if _, err := c.Read(make([]byte, 1)); err != nil {
				mu.Lock()
				closed++
				mu.Unlock()
			}
		}()
	}
	eventually(t, "connections beyond the share are closed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return closed == 16 // four of 32 by one source
	})
	if got := ask(t, "udp", at, question("one.test.", dns.TypeA)); len(got.Answer) != 1 {
		t.Errorf("answer: %v", got)
	}
}

func TestGarbageIsSurvived(t *testing.T) {
	up := newNameServer(t)
	at := start(t, resolver.Options{Upstreams: []netip.AddrPort{up.addr}})
	good, err := question("one.test.", dns.TypeA).Pack()
	must(t, err)
	answer := slices.Clone(good)
	answer[2] |= 0x80
	for _, packet := range [][]byte{{}, {1}, bytes.Repeat([]byte{0xff}, 5000), bytes.Repeat([]byte{0}, 12), answer, good[:len(good)-3], bytes.Repeat([]byte{0xc0, 0x0c}, 100)} {
		c, err := net.Dial("udp", at)
		must(t, err)
		_, _ = c.Write(packet)
		_ = c.Close()
		s, err := net.Dial("tcp", at)
		must(t, err)
		_, _ = s.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...))
		_ = s.Close()
	}
	if got := ask(t, "udp", at, question("one.test.", dns.TypeA)); len(got.Answer) != 1 {
		t.Errorf("answer: %v", got)
	}
}

func TestTheEndIsClean(t *testing.T) {
	up := newNameServer(t)
	before := runtime.NumGoroutine()
	for range 5 {
		var o resolver.Options
		var err error
		o.UDP, err = net.ListenPacket("udp", "127.0.0.1:0")
		must(t, err)
		o.TCP, err = net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		o.Upstreams = []netip.AddrPort{up.addr}
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- resolver.Run(ctx, o) }()
		c, err := net.Dial("tcp", o.TCP.Addr().String())
		must(t, err)
		u, err := net.Dial("udp", o.UDP.LocalAddr().String())
		must(t, err)
		q, _ := question("end.hold.test.", dns.TypeA).Pack()
		was := up.asked.Load()
		_, _ = u.Write(q)
		eventually(t, "a query is under way", func() bool { return up.asked.Load() > was })
		stop()
		must(t, <-done)
		_, _ = c.Close(), u.Close()
	}
	up.release()
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

func TestOptionsThatCannotWork(t *testing.T) {
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer func() { _, _ = udp.Close(), tcp.Close() }()
	itself := netip.MustParseAddrPort(udp.LocalAddr().String())
	for claim, o := range map[string]resolver.Options{
		"no sockets":         {Upstreams: []netip.AddrPort{itself}},
		"no name server":     {UDP: udp, TCP: tcp},
		"itself as a server": {UDP: udp, TCP: tcp, Upstreams: []netip.AddrPort{itself}},
	} {
		if err := resolver.Run(context.Background(), o); err == nil {
			t.Errorf("%s: accepted", claim)
		}
	}
}

func TestNamesAreNotLogged(t *testing.T) {
	var log bytes.Buffer
	at := start(t, resolver.Options{Timeout: 50 * time.Millisecond, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")},
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo}))})
	ask(t, "udp", at, question("secret.test.", dns.TypeA))
	if log.Len() != 0 {
		t.Errorf("logged: %s", log.String())
	}
}

func TestTheProcessTakesItsSocketsFromDescriptors(t *testing.T) {
	up := newNameServer(t)
	udp, tcp := listen(t)
	u, err := udp.File()
	must(t, err)
	s, err := tcp.File()
	must(t, err)
	at := udp.LocalAddr().String()
	_, _ = udp.Close(), tcp.Close()
	defer func() { _, _ = u.Close(), s.Close() }()

	var stderr bytes.Buffer
	command := exec.Command("/proc/self/exe", up.addr.String())
	command.Env = []string{asProcess + "=1"}
	command.ExtraFiles = []*os.File{u, s}
	command.Stderr = &stderr
	if os.Getuid() == 0 {
		refused := exec.Command("/proc/self/exe", up.addr.String())
		refused.Env, refused.ExtraFiles = command.Env, command.ExtraFiles
		if err := refused.Run(); err == nil {
			t.Error("the process runs as root")
		}
		// The test binary's folder is closed to others, so the program is passed open.
		self, err := os.Open("/proc/self/exe")
		must(t, err)
		defer func() { _ = self.Close() }()
		command.ExtraFiles = append(command.ExtraFiles, self)
		command.Path = "/proc/self/fd/5"
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	must(t, command.Start())
	_, _ = u.Close(), s.Close()
	for _, network := range []string{"udp", "tcp"} {
		if got := ask(t, network, at, question("one.test.", dns.TypeA)); len(got.Answer) != 1 {
			t.Errorf("%s: %v", network, got)
		}
	}
	must(t, command.Process.Signal(syscall.SIGTERM))
	if err := command.Wait(); err != nil {
		t.Errorf("%v: %s", err, stderr.String())
	}
}

func TestUpstreamsComeFromTheHost(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	behind := write("behind", "nameserver 10.0.0.2\nnameserver 2001:db8::1\n")
	for claim, c := range map[string]struct{ config, want string }{
		"plain":          {"# comment\nsearch a b\nnameserver 192.0.2.1\nnameserver 192.0.2.2\noptions edns0\n", "[192.0.2.1:53 192.0.2.2:53]"},
		"the stub":       {"nameserver 127.0.0.53\n", "[10.0.0.2:53 [2001:db8::1]:53]"},
		"a local server": {"nameserver 127.0.0.1\n", "[127.0.0.1:53]"},
		"stub and real":  {"nameserver 127.0.0.53\nnameserver 192.0.2.9\n", "[192.0.2.9:53]"},
		"with a zone":    {"nameserver fe80::1%eth0\n", "[[fe80::1%eth0]:53]"},
		"nonsense":       {"nameserver\nnameserver example\nnameserver 192.0.2.3 trailing\n", "[192.0.2.3:53]"},
	} {
		got, err := resolver.Upstreams(write("config", c.config), behind)
		if err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("%s: %v, %v; want %s", claim, got, err, c.want)
		}
	}
	if got, err := resolver.Upstreams(write("config", ""), filepath.Join(dir, "absent")); err == nil {
		t.Errorf("an empty configuration: %v", got)
	}
}

// FuzzQuery sends arbitrary packets through everything between the socket and the name server.
func FuzzQuery(f *testing.F) {
	for _, q := range []*dns.Msg{question("one.test.", dns.TypeA), question("one.test.", dns.TypeANY), question(".", dns.TypeNS)} {
		plain, _ := q.Pack()
		f.Add(plain, false)
		q.SetEdns0(100, true)
		rich, _ := q.Pack()
		f.Add(rich, true)
	}
	got := new(dns.Msg)
	for i := range 300 {
		got.Answer = append(got.Answer, &dns.A{Hdr: dns.RR_Header{Name: "one.test.", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(1, 2, 3, byte(i))})
	}
	f.Fuzz(func(t *testing.T, packet []byte, stream bool) {
		out := resolver.Respond(packet, got, stream)
		if out == nil {
			return
		}
		if len(out) < 12 || !bytes.Equal(out[:2], packet[:2]) || out[2]&0x80 == 0 {
			t.Errorf("%x answered %x", packet, out)
		}
		if !stream && len(out) > resolver.MaxDatagram {
			t.Errorf("an answer of %d bytes by UDP", len(out))
		}
		if new(dns.Msg).Unpack(out) != nil {
			t.Errorf("%x answered what cannot be read: %x", packet, out)
		}
	})
}

func BenchmarkRelay(b *testing.B) {
	up := newNameServer(b)
	at := start(b, resolver.Options{Upstreams: []netip.AddrPort{up.addr}})
	conn, err := dns.Dial("udp", at)
	must(b, err)
	defer func() { _ = conn.Close() }()
	for b.Loop() {
		must(b, conn.WriteMsg(question("one.test.", dns.TypeA)))
		_, err := conn.ReadMsg()
		must(b, err)
	}
}

func eventually(t testing.TB, claim string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within ten seconds: " + claim)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
