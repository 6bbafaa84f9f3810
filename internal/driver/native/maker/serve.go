package maker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// SocketPath is where a maker listens.
func SocketPath(dataDir string) string { return filepath.Join(dataDir, "maker", "socket") }

// Serve answers the server until ctx ends or somebody asks for a shutdown.
func (m *Maker) Serve(ctx context.Context, l *net.UnixListener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var conns sync.WaitGroup
	defer conns.Wait()
	slots := make(chan struct{}, cmp.Or(m.cfg.Connections, maxConnections))
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if !passes(err) {
				return fmt.Errorf("accept: %w", err)
			}
			m.log.Error("accept", "error", err)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		if err := m.admit(c); err != nil {
			m.log.Warn("refused a caller", "error", err)
			c.Close()
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			m.crowd.Do(func() {
				m.log.Warn("the server has too many connections to the maker; more are closed", "bound", cap(slots))
			})
			c.Close()
			continue
		}
		conns.Go(func() {
			defer func() { <-slots }()
			unwatch := context.AfterFunc(ctx, func() { c.Close() })
			if m.converse(ctx, c) {
				// Who asked for the end hears of it when the process is gone and the kernel closes this. Without a
				// reference the garbage collector would close it before.
				unwatch()
				m.keepUntilExit(c)
				cancel()
				return
			}
			unwatch()
			c.Close()
		})
	}
}

// keepUntilExit keeps a connection open for as long as the process runs.
func (m *Maker) keepUntilExit(c *net.UnixConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastCallers = append(m.lastCallers, c)
}

// passes tells whether an error of accept is of that moment: a want of descriptors or memory, or a caller who has left. The end
// of this loop is the end of every sandbox.
func passes(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.ECONNABORTED} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// admit lets root and the server's uid in; the socket's permissions say the same.
func (m *Maker) admit(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, credErr); err != nil {
		return err
	}
	if cred.Uid != 0 && int(cred.Uid) != m.cfg.ServerUID {
		return fmt.Errorf("uid %d", cred.Uid)
	}
	return nil
}

// converse answers one connection's requests in order, and tells whether the last was for the maker's end.
func (m *Maker) converse(ctx context.Context, c *net.UnixConn) (end bool) {
	for {
		var r wire.Request
		files, err := wire.Receive(c, &r)
		if err == nil && r.Op == wire.OpFork {
			m.converseFork(ctx, c, r, files)
			return false
		}
		if err == nil && r.Op == wire.OpUnpack {
			m.converseUnpack(ctx, c, r, files)
			return false
		}
		wire.CloseAll(files) // no other request carries any
		if err != nil {
			if !errors.Is(err, io.EOF) && ctx.Err() == nil {
				m.log.Warn("request", "error", err)
			}
			return false
		}
		if r.Op == wire.OpEnded {
			m.tellEnds(ctx, c)
			return false
		}
		there, stay := ctx, func() {}
		if r.Op == wire.OpStart {
			there, stay = whileThere(ctx, c)
		}
		response, give := m.answer(there, r)
		stay()
		err = wire.Send(c, response, give...)
		wire.CloseAll(give)
		if err != nil {
			if r.Op == wire.OpStart && response.Fault == nil {
				// Whoever asked has left and will never name this sandbox.
				_ = m.Stop(ctx, r.Start.ID, sandbox.CauseStartFail, callerLeft)
			}
			if r.Op == wire.OpSnapshot && response.Fault == nil {
				_ = m.RemoveTemplate(ctx, r.Snapshot.Tenant, r.Snapshot.Name)
			}
			return r.Op == wire.OpShutdown
		}
		if r.Op == wire.OpShutdown {
			return true
		}
	}
}

var errLeft = errors.New("whoever asked has left")

// whileThere is a context that ends when the peer closes the connection: a sandbox that nobody waits for any more would be
// made before those that somebody waits for. The connection is the caller's again when the function has returned. It is looked
// at after a moment: most starts are over by then, and another thread that wakes up would make them slower.
func whileThere(ctx context.Context, c *net.UnixConn) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	raw, err := c.SyscallConn()
	if err != nil {
		cancel(errLeft)
		return ctx, func() {}
	}
	done := make(chan struct{})
	watch := time.AfterFunc(5*time.Millisecond, func() {
		defer close(done)
		gone := false
		_ = raw.Read(func(fd uintptr) bool {
			n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
			gone = n <= 0 && err != unix.EAGAIN
			return err != unix.EAGAIN
		})
		if gone {
			cancel(errLeft)
		}
	})
	return ctx, func() {
		if !watch.Stop() {
			_ = c.SetReadDeadline(time.Unix(1, 0))
			<-done
			_ = c.SetReadDeadline(time.Time{})
		}
		cancel(nil)
	}
}

// converseFork answers twice: when the parent may go on, and when its branches are there. A caller who leaves meanwhile ends
// it, so a fork has a connection of its own.
func (m *Maker) converseFork(ctx context.Context, c *net.UnixConn, r wire.Request, files []*os.File) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the connection, which carries nothing else
		_, _ = c.Read(make([]byte, 1))
		cancel()
	}()
	var response wire.Response
	var give []*os.File
	talk, err := forkTalk(r, files)
	if err == nil {
		cut := func() {
			if wire.Send(c, wire.Response{Cut: true}) != nil {
				cancel() // whoever asked has left
			}
		}
		response.Forked, response.Tokens, give, err = m.guardFork(ctx, *r.Fork, talk, cut)
	}
	if err != nil {
		m.logFailure(r, err)
		response = wire.Failed(err)
	}
	err = wire.Send(c, response, give...)
	wire.CloseAll(give)
	if err != nil && response.Fault == nil {
		for _, child := range r.Fork.Children {
			_ = m.Stop(context.WithoutCancel(ctx), child.ID, sandbox.CauseStartFail, callerLeft)
		}
	}
}

// forkTalk checks a request and takes over its descriptors.
func forkTalk(r wire.Request, files []*os.File) (*net.UnixConn, error) {
	if r.Fork == nil || len(files) != 1 {
		wire.CloseAll(files)
		return nil, fault.New(fault.Invalid, "fork without a request or a socket")
	}
	return wire.Conn(files[0])
}

// guardFork is Fork, whose defects must not end every sandbox on this host.
func (m *Maker) guardFork(ctx context.Context, r sandbox.ForkRequest, talk *net.UnixConn, cut func()) (f *sandbox.Forked, tokens []string, channels []*os.File, err error) {
	defer func() {
		if what := recover(); what != nil {
			m.log.Error("fork panicked", "panic", what, "stack", string(debug.Stack()))
			err = fault.New(fault.Internal, "the maker failed at fork")
		}
	}()
	defer talk.Close()
	return m.Fork(ctx, r, talk, cut)
}

func (m *Maker) answer(ctx context.Context, r wire.Request) (response wire.Response, give []*os.File) {
	// A defect here must not end every sandbox on this host.
	defer func() {
		if what := recover(); what != nil {
			m.log.Error("request panicked", "op", r.Op, "panic", what, "stack", string(debug.Stack()))
			response, give = wire.Failed(fault.New(fault.Internal, "the maker failed at %s", r.Op)), nil
		}
	}()
	var err error
	switch r.Op {
	case wire.OpHello:
		response.Hello = m.hello()
	case wire.OpPrepare:
		err = m.Prepare(ctx, r.Tenant, r.Template, r.ID)
	case wire.OpStart:
		if r.Start == nil {
			err = fault.New(fault.Invalid, "start without a request")
			break
		}
		var f *os.File
		if f, response.Token, response.Waited, err = m.Start(ctx, *r.Start); err == nil {
			give = []*os.File{f}
		}
	case wire.OpChannel:
		var f *os.File
		if f, err = m.Channel(r.ID); err == nil {
			give = []*os.File{f}
		}
	case wire.OpFloor:
		var f *os.File
		if f, err = m.Floor(ctx, poolKey{r.Tenant, r.ID}); err == nil {
			give = []*os.File{f}
		}
	case wire.OpKernel:
		response.Token, err = m.Kernel(ctx, r.ID, r.Kernel)
	case wire.OpChange:
		if r.Change == nil {
			err = fault.New(fault.Invalid, "change without a change")
			break
		}
		err = m.Change(r.ID, *r.Change)
	case wire.OpUsage:
		usage, uerr := m.Usage(r.ID)
		response.Usage, err = &usage, uerr
	case wire.OpStop:
		err = m.Stop(ctx, r.ID, r.Cause, r.Message)
	case wire.OpFork: // by converseFork
	case wire.OpUnpack: // by converseUnpack
	case wire.OpLayers, wire.OpAddImage, wire.OpPruneLayers:
		response, err = m.answerImages(ctx, r)
	case wire.OpPause:
		err = m.Pause(r.ID)
	case wire.OpResume:
		err = m.Resume(r.ID)
	case wire.OpSnapshot:
		if r.Snapshot == nil {
			err = fault.New(fault.Invalid, "snapshot without a request")
			break
		}
		response.Template, err = m.Snapshot(ctx, *r.Snapshot)
	case wire.OpRemove:
		err = m.RemoveTemplate(ctx, r.Tenant, r.Template)
	case wire.OpVolumes:
		response.Volumes, err = m.Volumes(r.Tenant)
	case wire.OpVolumeMake, wire.OpVolumeRemove:
		response.Volumes, err = m.changeVolume(ctx, r)
	case wire.OpList:
		response.Instances = m.List(r.After)
	case wire.OpForget:
		m.ends.forget(r.IDs)
	case wire.OpStats:
		response.Stats = m.stats()
	case wire.OpShutdown:
	case wire.OpEnded:
	default:
		err = fault.New(fault.Unsupported, "unknown request %q", r.Op)
	}
	if err != nil {
		m.logFailure(r, err)
		return wire.Failed(err), nil
	}
	return response, give
}

// callerLeft is why a sandbox ends whose caller did not wait for it.
const callerLeft = "its caller left while it was starting"

// logFailure logs requests that failed because of this host, not because of the caller.
//
// A full disk and used-up capacity are answers that a tenant can get as often as it asks: a line for
// each would fill the disk with the log.
func (m *Maker) logFailure(r wire.Request, err error) {
	switch r.Op {
	case wire.OpPrepare, wire.OpStart, wire.OpFork, wire.OpKernel, wire.OpPause, wire.OpResume, wire.OpSnapshot:
	default:
		return
	}
	switch fault.KindOf(err) {
	case fault.Internal, fault.Unavailable, fault.Timeout:
	default:
		return
	}
	id, tenant := r.ID, r.Tenant
	switch {
	case r.Start != nil:
		id, tenant = r.Start.ID, r.Start.Tenant
	case r.Fork != nil:
		id = r.Fork.Parent
	}
	m.log.Warn("request failed", "op", r.Op, "sandbox", id, "tenant", tenant, "error", err)
}

func (m *Maker) changeVolume(ctx context.Context, r wire.Request) ([]sandbox.Volume, error) {
	if r.Volume == nil {
		return nil, fault.New(fault.Invalid, "%s without a volume", r.Op)
	}
	if r.Op == wire.OpVolumeRemove {
		return nil, m.RemoveVolume(ctx, r.Tenant, r.Volume.Name)
	}
	made, err := m.MakeVolume(ctx, r.Tenant, *r.Volume)
	return []sandbox.Volume{made}, err
}

func (m *Maker) hello() *wire.Hello {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &wire.Hello{
		Version: wire.Version, PID: os.Getpid(), BootID: m.bootID, Cgroup: int(m.groups.Version()), Disk: "image",
		Network: m.net != nil, Freezer: m.groups.Freezer(), Spoilt: maps.Clone(m.changed),
	}
}

// tellEnds streams ends until the listener leaves.
func (m *Maker) tellEnds(ctx context.Context, c *net.UnixConn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel() // the listener never speaks again: whatever comes means that it left
		var b [1]byte
		_, _ = c.Read(b[:])
	}()
	position := 0
	for {
		ends, next, grown := m.ends.from(position)
		for i := range ends {
			if wire.Send(c, wire.Response{Ended: &ends[i]}) != nil {
				return
			}
		}
		position = next
		select {
		case <-grown:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Maker) stats() *wire.Stats {
	m.mu.Lock()
	s := &wire.Stats{Sandboxes: len(m.sandboxes), Dying: len(m.dying), Slots: m.slots.count(), Goroutine: runtime.NumGoroutine()}
	pools := make([]*pool, 0, len(m.pools))
	for _, p := range m.pools {
		pools = append(pools, p)
	}
	m.mu.Unlock()
	for _, p := range pools {
		p.mu.Lock()
		s.Pooled += len(p.shells)
		if p.started {
			s.Lacking += max(p.size-len(p.shells), 0) + max(p.forks-len(p.bare), 0)
		}
		for _, z := range p.zygotes {
			living, forks, dead := z.load()
			if !dead {
				s.Zygotes = append(s.Zygotes, wire.ZygoteStats{
					Template: p.template.Name, Tenant: p.key.tenant, PID: z.pid, Forks: forks, Live: living, RSSKB: z.ready.RSSKB,
				})
			}
		}
		p.mu.Unlock()
	}
	all := m.groups.Usage()
	s.CPUMS, s.Memory = all.CPUMS, all.MemoryBytes
	s.Disk = m.space.stats(m.groups.Unwritten())
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		s.FDs = len(entries)
	}
	return s
}
