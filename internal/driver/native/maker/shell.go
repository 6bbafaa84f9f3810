package maker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/cgroup"
	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// shell is a sandbox without an occupant: namespaces, cgroup, file tree, network and an agent as PID 1.
type shell struct {
	slot    int
	pid     int
	pidfd   *os.File
	group   *cgroup.Group
	channel *net.UnixConn // to the agent; when it closes, the agent exits
	telling sync.Mutex    // one message at a time on the channel
	form    form
	disk    *disk           // nil: tmpfs
	volumes []*volume       // that it has; held
	limits  template.Limits // in force
	network policy.Network  // in force
	linked  bool

	kernelMu sync.Mutex
	kernel   *newborn // forked ahead, or nil
	anchors  []*trace.Process
	moving   sync.RWMutex // held by those whose processes in its cgroup must move; who stops them all has it alone
	over     bool         // it ends

	done   chan struct{}   // closed when PID 1 was reaped
	status unix.WaitStatus // valid after done
}

// form is what of a shell cannot be changed after it was made.
type form struct {
	storage sandbox.Storage
	disk    int64       // size; a copy of a small disk has that one's
	from    *frozenDisk // whose files it has beside the template's; nil: none
	owns    bool        // nobody else uses what it is from
	mounts  *mounts     // what its owner wants to have in it; nil: nothing
	ahead   bool        // nobody waits for it yet: its agent may rehearse
}

const sandboxNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET

// place is where a shell will be: its number and what its processes are charged to.
type place struct {
	slot  int
	group *cgroup.Group
}

func (m *Maker) takePlace(limits template.Limits) (place, error) {
	slot, err := m.slots.take()
	if err != nil {
		return place{}, err
	}
	group, err := m.groups.New(groupName(slot), cgroupLimits(limits))
	if err != nil {
		m.slots.give(slot)
		return place{}, err
	}
	return place{slot, group}, nil
}

func (m *Maker) givePlace(p place) {
	m.retireGroup(p.group)
	m.slots.give(p.slot)
}

// makeShell climbs the ladder; a failure takes every step back.
func (m *Maker) makeShell(ctx context.Context, t *template.Template, owner int, f form, limits template.Limits) (*shell, error) {
	at, err := m.takePlace(limits)
	if err != nil {
		return nil, err
	}
	return m.makeShellAt(ctx, at, t, owner, f, limits)
}

// makeShellAt takes over the place, also when it fails.
func (m *Maker) makeShellAt(ctx context.Context, at place, t *template.Template, owner int, f form, limits template.Limits) (_ *shell, err error) {
	var undo undo
	defer undo.run()
	undo.add(func() { m.givePlace(at) })
	s := &shell{slot: at.slot, group: at.group, form: f, limits: limits, done: make(chan struct{}), network: policy.Network{Mode: policy.None}}

	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer mine.Close()
	s.pid, s.pidfd, err = cloneApart(birthApart{
		birth: birth{program: m.host.shell, flags: sandboxNamespaces, socket: theirs, stderr: debugStderr()},
		mine:  mine, owner: owner, uids: allIDs(uidBase(at.slot)), gids: allIDs(uidBase(at.slot)),
	})
	theirs.Close()
	if err != nil {
		return nil, err
	}
	undo.add(func() {
		_ = signal(s.pidfd, unix.SIGKILL)
		_, _ = waitExit(s.pid, s.pidfd)
		s.pidfd.Close()
	})
	undo.add(func() {
		if s.disk != nil {
			s.disk.close()
		}
		s.leaveVolumes()
	})
	if err := m.furnish(ctx, s, t, mine); err != nil {
		return nil, fmt.Errorf("make shell: %w", err)
	}
	undo.add(func() { s.channel.Close() })
	if f.ahead {
		boot := agentBoot(t)
		boot.Expected = true
		if err := s.tell(agentapi.Message{Type: agentapi.MessageBoot, Boot: &boot}); err != nil {
			return nil, err
		}
	}
	if err := m.connect(s); err != nil {
		return nil, err
	}
	undo.release()
	m.wg.Go(func() { m.attend(s) })
	return s, nil
}

// furnish gives the newborn its layers, state and channel and waits until it is an agent.
func (m *Maker) furnish(ctx context.Context, s *shell, t *template.Template, socket *os.File) error {
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", s.pid))
	if err != nil {
		return err
	}
	defer userns.Close()

	p := &plan{Mode: modeSandbox, NoFile: maxOpenFiles(), Bound: agentBound, Heir: agentHeir}
	copy(p.Base[:], base)
	copy(p.Hostname[:], "sandbox")
	p.setFilter(sandboxFilter())
	if err := p.setArgv(agentName); err != nil {
		return err
	}
	mount, err := m.planDisk(s, t, p, userns)
	if err != nil {
		return err
	}
	files, err := m.planTrees(p, t, s.below(), userns)
	if mount != nil {
		files = append(files, mount)
	}
	defer func() { wire.CloseAll(files) }()
	if err != nil {
		return err
	}
	rest, err := commonTrees()
	files = append(files, rest...)
	if err != nil {
		return err
	}
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return err
	}
	asked, err := m.showMounts(ctx, s, t, p, userns)
	sent := append(append(append([]*os.File{}, files...), m.host.agent, theirs), asked...)
	files = append(append(files, theirs), asked...)
	joiners := s.group.Joiners()
	p.Cgroups = uint32(len(joiners))
	if err == nil {
		err = order(socket, p, append(sent, joiners...))
	}
	if err != nil {
		mine.Close()
		return err
	}
	s.channel, err = wire.Conn(mine)
	return err
}

// planDisk makes what a sandbox writes to; its mount, or nil where that is memory.
func (m *Maker) planDisk(s *shell, t *template.Template, p *plan, userns *os.File) (mount *os.File, err error) {
	if s.form.storage == sandbox.StorageTmpfs {
		if s.form.from != nil {
			return nil, errNoDisk
		}
		p.Storage, p.TmpfsBytes, p.Volatile = storageTmpfs, uint64(s.form.disk), 1
		return nil, nil
	}
	if s.disk, mount, err = m.disks.make(s.form, len(t.Trees)); err != nil {
		return nil, fmt.Errorf("make disk: %w", err)
	}
	p.Work = uint32(s.disk.work)
	if s.form.storage == sandbox.StorageVolatile {
		p.Volatile = 1
	}
	if err := setAttr(mount, 0, userns); err != nil {
		mount.Close()
		return nil, err
	}
	return mount, nil
}

// commonTrees are what every sandbox and zygote has: /dev and /run/cove.
func commonTrees() ([]*os.File, error) {
	dev, err := makeDev()
	if err != nil {
		return nil, err
	}
	cove, err := cloneTree(base + "/cove")
	if err != nil {
		return []*os.File{dev}, err
	}
	return []*os.File{dev, cove}, nil
}

// below are the frozen layers between the sandbox's own and its template's.
func (s *shell) below() []*frozenDisk {
	if s.disk == nil {
		return nil
	}
	return s.disk.below
}

// planTrees shows frozen disks and the layers of a template, idmapped to a user namespace when there is one. A frozen disk
// holds a layer of every tree, so all of them lie above the template's directories.
func (m *Maker) planTrees(p *plan, t *template.Template, below []*frozenDisk, userns *os.File) (files []*os.File, err error) {
	add := func(f *os.File, err error) error {
		if err != nil {
			return err
		}
		files = append(files, f)
		return setAttr(f, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV, userns)
	}
	if err := checkDepth(t, len(below)); err != nil {
		return nil, err
	}
	for _, f := range below {
		if err := add(f.show()); err != nil {
			return files, err
		}
	}
	images := t.Images()
	for _, path := range images {
		if err := add(m.showImage(path)); err != nil {
			return files, err
		}
	}
	p.Images = uint32(len(files))
	for i, tree := range t.Trees {
		lower := tree.Lower[len(images):]
		p.Tree[i] = planTree{First: uint32(len(files)), Count: uint32(len(lower))}
		copy(p.Tree[i].Target[:], tree.Target[1:])
		for _, dir := range lower {
			if err := add(cloneTree(dir)); err != nil {
				return files, err
			}
		}
	}
	p.Layers, p.Trees = uint32(len(files)), uint32(len(t.Trees))
	return files, nil
}

// showImage mounts the image of a template, which is open as long as somebody uses it.
func (m *Maker) showImage(path string) (*os.File, error) {
	f, err := m.disks.open(path)
	if err != nil {
		return nil, err
	}
	defer f.close()
	return f.show()
}

// connect attaches the network; the policy at first is none.
func (m *Maker) connect(s *shell) error {
	if m.net == nil {
		return nil
	}
	netns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.pid))
	if err != nil {
		return err
	}
	defer netns.Close()
	if _, err := m.net.Attach(s.slot, int(netns.Fd())); err != nil {
		_ = m.net.Detach(s.slot)
		return fmt.Errorf("attach network: %w", err)
	}
	s.linked = true
	return nil
}

// setNetwork changes what may leave.
func (m *Maker) setNetwork(s *shell, n policy.Network) error {
	if m.net == nil {
		if n.Mode == policy.None {
			return nil
		}
		return fault.New(fault.Unsupported, "this server runs without a network for sandboxes; use network mode none")
	}
	if equalNetwork(s.network, n) {
		return nil
	}
	if err := m.net.SetPolicy(s.slot, n); err != nil {
		return fmt.Errorf("network policy: %w", err)
	}
	s.network = n
	return nil
}

// setLimits changes what the sandbox may use; what stays the same costs nothing.
func (s *shell) setLimits(want template.Limits) error {
	var change cgroup.Limits
	if want.CPUs != s.limits.CPUs {
		change.CPUs = want.CPUs
	}
	if want.MemoryBytes != s.limits.MemoryBytes {
		change.MemoryBytes = want.MemoryBytes
	}
	if want.Pids != s.limits.Pids {
		change.Pids = want.Pids
	}
	if err := s.group.SetLimits(change); err != nil {
		return err
	}
	s.limits = want
	return nil
}

func equalNetwork(a, b policy.Network) bool {
	return a.Mode == b.Mode && len(a.Allow)+len(a.Deny)+len(b.Allow)+len(b.Deny) == 0
}

// attend waits for PID 1's end.
func (m *Maker) attend(s *shell) {
	status, err := waitExit(s.pid, s.pidfd)
	if err != nil {
		m.log.Error("wait for sandbox", "slot", s.slot, "error", err)
	}
	s.status = status
	s.killAnchors()
	close(s.done)
}

// takeKernel gives away the kernel that waits, if one does.
func (s *shell) takeKernel() *newborn {
	s.kernelMu.Lock()
	defer s.kernelMu.Unlock()
	n := s.kernel
	s.kernel = nil
	return n
}

// kill ends the sandbox's PID 1 and with it every process in its pid namespace, and what stands beside it.
func (s *shell) kill() {
	_ = signal(s.pidfd, unix.SIGKILL)
	s.killAnchors()
}

// retire gives back everything a dead shell held; it may take a while and runs off every caller's path.
func (m *Maker) retire(s *shell) {
	m.mu.Lock()
	m.dying[s] = struct{}{}
	m.mu.Unlock()
	m.wg.Add(1)
	go func() {
		defer m.wg.Done()
		<-s.done
		s.channel.Close()
		if s.disk != nil {
			s.disk.close()
		}
		s.leaveVolumes()
		if n := s.takeKernel(); n != nil {
			n.end()
		}
		if s.linked {
			if err := m.net.Detach(s.slot); err != nil {
				m.log.Error("detach network", "slot", s.slot, "error", err)
			}
		}
		m.retireGroup(s.group)
		m.oom.forget(s.group.Name())
		s.pidfd.Close()
		m.mu.Lock()
		delete(m.dying, s)
		m.mu.Unlock()
		m.slots.give(s.slot)
	}()
}

// retireGroup removes a cgroup whose processes are gone or going. The kernel may need most of a second after a kill.
func (m *Maker) retireGroup(g *cgroup.Group) {
	for wait := time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := g.Remove()
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) {
			m.log.Error("remove cgroup", "cgroup", g.Name(), "error", err)
			return
		}
		g.Kill()
		time.Sleep(wait) // rmdir is the only way to learn that the last process has left
	}
}

// tell sends the agent a message with descriptors.
func (s *shell) tell(msg agentapi.Message, files ...*os.File) error {
	s.telling.Lock()
	defer s.telling.Unlock()
	data, err := json.Marshal(msg)
	if err == nil && len(data) > agentapi.MaxMessage { // the agent would end with it
		return fault.New(fault.Invalid, "%d bytes for the agent are over the limit of %d: the environment is too large", len(data), agentapi.MaxMessage)
	}
	if err == nil {
		err = s.channel.SetWriteDeadline(time.Now().Add(tellTime))
	}
	if err == nil {
		err = wire.SendBytes(s.channel, data, files...)
	}
	switch {
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET), errors.Is(err, net.ErrClosed):
		return fault.Wrap(fault.Unavailable, err, "the sandbox ended meanwhile")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Wrap(fault.Unavailable, err, "the sandbox's agent did not answer within %v: the host may be overloaded, try again", tellTime)
	case err != nil:
		return fmt.Errorf("tell agent: %w", err)
	}
	return nil
}

// maxOpenFiles is the hard limit of everything in a sandbox; a sandbox's own limit is the soft one below it. Without
// CAP_SYS_RESOURCE nobody can have more than the maker itself.
func maxOpenFiles() uint32 {
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &own) != nil {
		return 1024
	}
	return uint32(min(own.Max, 65536))
}

func cgroupLimits(l template.Limits) cgroup.Limits {
	return cgroup.Limits{CPUs: l.CPUs, MemoryBytes: l.MemoryBytes, Pids: l.Pids}
}

// debugStderr lets a shell's and agent's own messages through when the operator asked for them.
func debugStderr() *os.File {
	if os.Getenv("COVE_DEBUG_AGENT") != "" {
		return os.Stderr
	}
	return nil
}
