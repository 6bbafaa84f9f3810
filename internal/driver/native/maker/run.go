package maker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/resolver"
)

// Run is the whole life of a maker process, inside its private mount namespace.
func Run(ctx context.Context, cfg Config) error {
	if os.Geteuid() != 0 {
		return errors.New("the maker needs root: it makes namespaces, mounts and cgroups for sandboxes, and nothing else does")
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	dir := filepath.Join(cfg.DataDir, "maker")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := lockFile(filepath.Join(dir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	m, err := Open(cfg)
	if err != nil {
		return err
	}
	l, err := listen(SocketPath(cfg.DataDir), cfg.ServerUID)
	if err != nil {
		return errors.Join(err, m.Close())
	}
	cfg.Ready()
	m.log.Info("maker ready", "pid", os.Getpid(), "cgroup", int(m.groups.Version()), "network", m.net != nil)
	err = m.Serve(ctx, l)
	return errors.Join(err, m.Close())
}

func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another maker runs on this data directory")
	}
	return f, nil
}

func listen(path string, uid int) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	unix.Umask(old)
	if err != nil {
		return nil, err
	}
	if err := os.Chown(path, uid, -1); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// nobody is the uid of processes that should own nothing.
const nobody = 65534

// runResolver runs the DNS forwarder with its two sockets and no privilege, until it ends.
func (m *Maker) runResolver(udp, tcp *os.File) error {
	upstreams, err := resolver.SystemUpstreams()
	if err != nil {
		return fmt.Errorf("no name server for sandboxes: %w", err)
	}
	argv := m.cfg.Resolver
	for _, u := range upstreams {
		argv = append(argv, u.String())
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = []string{}
	cmd.ExtraFiles = []*os.File{udp, tcp}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: nobody, Gid: nobody},
		Setsid:     true,
	}
	// Its stdin is a pipe from us: when we are gone, however that came about, it reads the end and leaves.
	if _, err := cmd.StdinPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start resolver: %w", err)
	}
	m.mu.Lock()
	m.resolver = cmd.Process
	closing := m.closing
	m.mu.Unlock()
	if closing {
		_ = cmd.Process.Kill()
	}
	return cmd.Wait()
}

// keepResolver runs the resolver until the maker closes; one that ends is started again, with the host's name servers
// of that moment.
func (m *Maker) keepResolver(udp, tcp *os.File) {
	defer udp.Close()
	defer tcp.Close()
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		began := time.Now()
		err := m.runResolver(udp, tcp)
		if m.isClosing() {
			return
		}
		m.log.Warn("resolver ended", "error", err)
		if time.Since(began) > time.Minute {
			wait = time.Second
		}
		select {
		case <-time.After(wait):
		case <-m.closed:
			return
		}
	}
}

func (m *Maker) isClosing() bool {
	select {
	case <-m.closed:
		return true
	default:
		return false
	}
}
