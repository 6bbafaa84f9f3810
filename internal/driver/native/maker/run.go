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
	for _, trusted := range []string{cfg.DataDir, dir, cfg.Templates} {
		if err := rootsOwn(trusted); err != nil {
			return err
		}
	}
	lock, err := lockFile(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	// Cgroups, links and tables carry the tag: two data directories whose tags are equal would clear each other away.
	tag, err := lockFile(ctx, "/run/cove-"+cfg.Tag+".lock")
	if err != nil {
		return fmt.Errorf("tag %s: %w; choose another data directory", cfg.Tag, err)
	}
	defer tag.Close()
	defer os.Remove(tag.Name())
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

// rootsOwn refuses a directory that somebody else could change under us: the maker works in it as root, by name.
func rootsOwn(dir string) error {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	if errors.Is(err, unix.ENOENT) {
		return nil // made by us, if at all, in one that was checked
	}
	if err != nil {
		return err
	}
	if st.Uid != 0 || st.Mode&0o022 != 0 || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("%s must be a directory of root's that nobody else can write to: chown root %s && chmod go-w %s", dir, dir, dir)
	}
	return nil
}

// ownerTime is how long the lock of a data directory is waited for before another maker is said to run on it.
const ownerTime = 20 * time.Second

func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	// What a maker had just forked when it died has its descriptors for a moment more, a long one on a host that is busy.
	for begun := time.Now(); unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil; {
		if time.Since(begun) > ownerTime {
			f.Close()
			return nil, fmt.Errorf("another maker runs on this data directory")
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		}
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
	if err := os.Lchown(path, uid, -1); err != nil {
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
