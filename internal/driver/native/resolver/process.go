package resolver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The descriptors that the maker passes to the process, after standard input, output and error.
const (
	FDDatagram = 3
	FDStream   = 4
)

// Main is the resolver process: it takes its sockets from descriptors 3 and 4 and the name servers from its arguments
// (address:port each), and runs until it is told to end. It returns the exit status.
func Main(args []string, stderr io.Writer) int {
	if err := run(args, stderr); err != nil {
		_, _ = fmt.Fprintln(stderr, "cove resolver:", err)
		return 1
	}
	return 0
}

func run(args []string, stderr io.Writer) error {
	if os.Geteuid() == 0 {
		return errors.New("refuses to run as root: it reads what sandboxes send")
	}
	// Whoever started us did this already; a parser of hostile packets asks for it again.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("not dumpable: %w", err)
	}
	o, err := inherit(args)
	if err != nil {
		return err
	}
	o.Log = slog.New(slog.NewJSONHandler(stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if info, err := os.Stdin.Stat(); err == nil && info.Mode()&os.ModeNamedPipe != 0 {
		// The maker holds the other end: when it is gone, however that came about, this process has nothing to do.
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			stop()
		}()
	}
	o.Log.Info("resolver ready", "address", o.UDP.LocalAddr().String(), "upstreams", len(o.Upstreams))
	return Run(ctx, o)
}

func inherit(args []string) (o Options, err error) {
	for _, a := range args {
		u, err := netip.ParseAddrPort(a)
		if err != nil {
			return o, fmt.Errorf("name server %q: %w", a, err)
		}
		o.Upstreams = append(o.Upstreams, u)
	}
	datagram, stream := os.NewFile(FDDatagram, "datagram socket"), os.NewFile(FDStream, "stream socket")
	defer func() { _, _ = datagram.Close(), stream.Close() }()
	if o.UDP, err = net.FilePacketConn(datagram); err != nil {
		return o, fmt.Errorf("descriptor %d: %w", FDDatagram, err)
	}
	if o.TCP, err = net.FileListener(stream); err != nil {
		return o, fmt.Errorf("descriptor %d: %w", FDStream, err)
	}
	return o, nil
}

// The host's configuration, and systemd-resolved's of the servers behind its stub.
const (
	systemConfig   = "/etc/resolv.conf"
	resolvedConfig = "/run/systemd/resolve/resolv.conf"
)

// SystemUpstreams reads the host's name servers. Where those are systemd-resolved's stub, it returns the servers behind
// it: the stub also answers for names of the host and its LAN.
func SystemUpstreams() ([]netip.AddrPort, error) { return Upstreams(systemConfig, resolvedConfig) }

// Upstreams reads the name servers of a resolv.conf, or of behind where the first names only systemd-resolved's stub.
func Upstreams(config, behind string) ([]netip.AddrPort, error) {
	servers, err := readConfig(config)
	if err != nil {
		return nil, err
	}
	stub := func(s netip.AddrPort) bool {
		return s.Addr() == netip.MustParseAddr("127.0.0.53") || s.Addr() == netip.MustParseAddr("127.0.0.54")
	}
	if slices.ContainsFunc(servers, func(s netip.AddrPort) bool { return !stub(s) }) {
		return slices.DeleteFunc(servers, stub), nil
	}
	if real, err := readConfig(behind); err == nil && len(real) > 0 {
		return real, nil
	}
	if len(servers) == 0 {
		return nil, fmt.Errorf("%s names no name server", config)
	}
	return servers, nil
}

func readConfig(path string) ([]netip.AddrPort, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var servers []netip.AddrPort
	lines := bufio.NewScanner(io.LimitReader(f, 64<<10))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			servers = append(servers, netip.AddrPortFrom(a, 53))
		}
	}
	return servers, lines.Err()
}
