package maker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/cgroup"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// fork copies a running sandbox: its files, as a frozen disk, and the memory of one kernel.
//
// A branch is no child of the kernel's: a process cannot be forked out of its pid namespace. It is born by the same
// zygote in a shell like any other, and what the kernel has changed since its own birth is copied into it. The copying
// is done by a fork of the kernel, in the kernel's own sandbox and with its rights; see kernel/native/branch.c. So a
// kernel that can be forked may do nothing that another may not, and a branch owes nothing to its parent: not an id, not
// a namespace, not its life.
type fork struct {
	m       *Maker
	parent  *live
	zygote  *zygote
	request sandbox.ForkRequest
	talk    *net.UnixConn // to the kernel's copy
	proc    *os.File      // the copy's directory in /proc
	pid     int
	home    uint64 // its pid namespace
	pidfd   *os.File
	copy    *layout
	frozen  *frozenDisk
	long    *longFile
	longs   []run
	pages   *os.File
	bytes   uint64
	babies  []*baby
	payer   *cgroup.Group // the first branch's: what the copy writes is charged to it
}

// baby is one branch that is being made.
type baby struct {
	child  sandbox.ForkChild
	place  *place // until it has a shell
	shell  *shell
	born   *newborn
	proc   *os.File
	layout *layout
	memory *memory
	live   *live
}

// copyTime is how long the copy of a kernel may take to write its memory.
const copyTime = 30 * time.Second

// Fork makes copies of a running sandbox. talk is the maker's end of a socket whose other end goes to the kernel by way
// of the sandbox's agent, which the caller asks; cut is called when files and memory are those of one moment and the
// parent may go on.
func (m *Maker) Fork(ctx context.Context, r sandbox.ForkRequest, talk *net.UnixConn, cut func()) (_ *sandbox.Forked, tokens []string, channels []*os.File, err error) {
	parent, err := m.find(r.Parent)
	if err != nil {
		return nil, nil, nil, err
	}
	awake, err := parent.awake()
	if err != nil {
		return nil, nil, nil, err
	}
	defer awake()
	if len(r.Children) == 0 {
		return nil, nil, nil, fault.New(fault.Invalid, "a fork makes at least one sandbox")
	}
	for _, c := range r.Children {
		if err := c.Network.Validate(); err != nil {
			return nil, nil, nil, err
		}
	}
	if parent.shell.disk == nil {
		return nil, nil, nil, errNoDisk
	}
	f := &fork{m: m, parent: parent, request: r, talk: talk}
	stop := context.AfterFunc(ctx, func() { talk.Close() })
	defer stop()
	if f.zygote, err = parent.zygoteOf(r.Kernel); err != nil {
		if fault.Is(err, fault.Conflict) {
			_, _ = talk.Read(make([]byte, 1)) // the agent knows better what is wrong with that kernel: let it speak first
		}
		return nil, nil, nil, err
	}
	defer f.zygote.release()
	defer f.close()
	defer func() {
		if err != nil {
			f.unmake(err)
			err = parent.whyEnding(err)
		}
	}()
	if err := f.guard(func() error { return f.run(ctx, cut) }); err != nil {
		return nil, nil, nil, err
	}
	for _, b := range f.babies {
		m.wg.Go(b.shell.disk.settle)
		b.live.setDeadline(m, b.child.Deadline)
		c, err := m.channel(b.live)
		if err != nil {
			wire.CloseAll(channels)
			return nil, nil, nil, err
		}
		channels, tokens = append(channels, c), append(tokens, b.born.token)
	}
	return &sandbox.Forked{Memory: int64(f.bytes), NotCopied: f.withheld()}, tokens, channels, nil
}

// withheld names the variables that the parent was given and its branches were not.
func (f *fork) withheld() []sandbox.NotCopied {
	var all []sandbox.NotCopied
	for _, name := range slices.Sorted(maps.Keys(f.parent.given)) {
		if _, again := f.request.Children[0].Env[name]; !again && !f.request.Children[0].InheritEnv {
			all = append(all, sandbox.NotCopied{Kind: "environment", What: name})
		}
	}
	return all
}

// whyEnding explains a failure by the end of the sandbox, where it is ending.
func (l *live) whyEnding(err error) error {
	l.mu.Lock()
	cause := l.cause
	l.mu.Unlock()
	select {
	case <-l.shell.done:
	default:
		if cause == "" {
			return err
		}
	}
	return fault.Wrap(fault.Gone, err, "sandbox %s has ended", l.id)
}

// zygoteOf finds and reserves the zygote that a kernel was forked from.
func (l *live) zygoteOf(kernel string) (*zygote, error) {
	if kernel == "" {
		kernel = agentapi.DefaultKernel
	}
	l.mu.Lock()
	z := l.kernels[kernel]
	l.mu.Unlock()
	switch {
	case !l.pool.warm():
		return nil, fault.New(fault.Unsupported, "template %s has no kernel that could be copied: it preloads nothing", l.template)
	case z == nil:
		return nil, fault.New(fault.Conflict, "there is no kernel %q that was forked from its template's: only their memory can be copied", kernel)
	}
	if z.ready.Way != "shim" {
		return nil, fault.New(fault.Unsupported, "this host's Python cannot copy kernels: %s", z.ready.Reason)
	}
	if _, _, dead := z.load(); dead {
		return nil, fault.New(fault.Unavailable, "what the kernel %q was forked from has ended: its memory cannot be copied any more", kernel)
	}
	z.reserve()
	return z, nil
}

// close lets go of what only the making needs.
func (f *fork) close() {
	f.talk.Close()
	if f.frozen != nil {
		f.frozen.close()
	}
	if f.copy != nil {
		f.copy.close()
	}
	if f.long != nil {
		f.long.close()
	}
	for _, file := range []*os.File{f.proc, f.pidfd, f.pages} {
		if file != nil {
			file.Close()
		}
	}
	for _, b := range f.babies {
		if b.layout != nil {
			b.layout.close()
		}
		if b.proc != nil {
			b.proc.Close()
		}
		if b.place != nil {
			f.m.givePlace(*b.place)
		}
	}
}

// unmake ends every branch: a fork makes all of them or none.
func (f *fork) unmake(why error) {
	for _, b := range f.babies {
		switch {
		case b.live != nil:
			f.m.end(b.live, sandbox.CauseStartFail, fault.Message(why))
		case b.shell != nil:
			if b.born != nil {
				b.born.close()
			}
			b.shell.kill()
			f.m.retire(b.shell)
		}
	}
}

func (f *fork) run(ctx context.Context, cut func()) error {
	// While the kernel finishes its cell, which may take long, nothing is held.
	var before sync.WaitGroup
	before.Go(func() { _ = f.parent.shell.disk.sync() }) // the freeze does it too, and says what is wrong
	err := f.meet()
	before.Wait()
	if err != nil {
		return err
	}
	// The copy is the user's code, and outside its sandbox's cgroup once it may write memory: whoever copies the disk at that
	// time could not stop it. So one fork of a sandbox at a time, and the disk first.
	f.parent.shell.disk.forking.Lock()
	defer f.parent.shell.disk.forking.Unlock()
	defer f.parent.pool.serve()()
	var files, memory error
	frozen, housed := make(chan struct{}), make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		defer close(frozen)
		defer cut()
		files = f.guard(func() (err error) {
			f.frozen, err = f.parent.shell.freezeDisk()
			return err
		})
	})
	err = f.gather(ctx)
	<-frozen
	if err == nil {
		err = files
	}
	if err == nil {
		err = f.adopt()
	}
	if err == nil {
		early, late := f.born()
		work.Go(func() { memory = f.guard(func() error { return f.copyMemory(early, late, housed) }) })
		err = f.each(func(b *baby) error { return f.house(ctx, b) })
	}
	close(housed)
	work.Wait()
	if err := errors.Join(err, memory, f.evict()); err != nil {
		return err
	}
	return f.become()
}

// adopt makes what the copy writes from now on the first branch's: memory is charged to who first has it. The copy is
// known by its number only here, so it must live before and after.
func (f *fork) adopt() error {
	alive := func() error { return unix.PidfdSendSignal(int(f.pidfd.Fd()), 0, nil, 0) }
	err := alive()
	if err == nil {
		err = f.payer.Adopt(f.pid)
	}
	if err == nil {
		err = alive()
	}
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "the kernel's copy has ended")
	}
	return nil
}

// born tells the branches that are at rest already from those that have yet to be born.
func (f *fork) born() (early, late []*baby) {
	for _, b := range f.babies {
		if b.shell != nil {
			early = append(early, b)
		} else {
			late = append(late, b)
		}
	}
	return early, late
}

// evict ends the copy and whatever it has left in the first branch's cgroup: it was let in there to write, not to stay.
func (f *fork) evict() error {
	f.talk.Close()
	if f.payer == nil {
		return nil
	}
	for wait := 50 * time.Microsecond; ; wait *= 2 {
		left := 0
		for _, pid := range f.payer.Processes() {
			pidfd, proc, err := openProcess(pid)
			if err != nil {
				continue // it has ended
			}
			if home, err := pidNamespace(proc); err == nil && home == f.home {
				left++
				_ = signal(pidfd, unix.SIGKILL)
			}
			proc.Close()
			pidfd.Close()
		}
		if left == 0 {
			return nil
		}
		if wait > time.Second {
			return fault.New(fault.Unavailable, "the kernel's copy does not end")
		}
		time.Sleep(wait) // a process that was killed leaves its cgroup when it has ended
	}
}

// copyMemory has the copy write all that the branches lack. Those that were born later are looked at last.
func (f *fork) copyMemory(early, late []*baby, housed <-chan struct{}) error {
	if err := f.findLong(early); err != nil {
		return err
	}
	var long error
	var work sync.WaitGroup
	if f.long != nil {
		work.Go(func() { long = f.guard(f.copyLong) })
	}
	err := f.compare(early)
	work.Wait()
	if err = errors.Join(err, long); err != nil {
		return err
	}
	if len(late) > 0 {
		<-housed
		if err := f.compare(late); err != nil {
			return err
		}
	}
	return f.copyPages()
}

func (f *fork) pays(g *cgroup.Group) {
	if f.payer == nil {
		f.payer = g
	}
}

// guard makes a defect of ours a failure of this fork: the maker holds every sandbox of the host.
func (f *fork) guard(do func() error) (err error) {
	defer func() {
		if what := recover(); what != nil {
			f.m.log.Error("fork panicked", "panic", what, "stack", string(debug.Stack()))
			err = fault.New(fault.Internal, "the maker failed at fork")
		}
	}()
	return do()
}

// each does something for every branch at once.
func (f *fork) each(do func(*baby) error) error {
	errs := make([]error, len(f.babies))
	var work sync.WaitGroup
	for i, b := range f.babies {
		work.Go(func() { errs[i] = f.guard(func() error { return do(b) }) })
	}
	work.Wait()
	return errors.Join(errs...)
}

// gather takes shells from the pool, each with a newborn that is told to come to rest. What the pool does not have gets
// a place, and is made when the files are known.
func (f *fork) gather(ctx context.Context) error {
	p := f.parent.pool
	for _, c := range f.request.Children {
		b := &baby{child: c, shell: p.popLiving()}
		f.babies = append(f.babies, b)
		if b.shell == nil {
			at, err := f.m.takePlace(poolLimits(c.Limits))
			if err != nil {
				return err
			}
			b.place = &at
			f.pays(at.group)
			continue
		}
		f.pays(b.shell.group)
		if err := b.shell.setLimits(poolLimits(c.Limits)); err != nil {
			return err
		}
	}
	return f.each(func(b *baby) error {
		if b.shell == nil {
			return nil
		}
		return f.bear(ctx, b)
	})
}

// house gives a branch the frozen files: a shell from the pool is furnished anew, where there was none it is made.
func (f *fork) house(ctx context.Context, b *baby) error {
	p := f.parent.pool
	select {
	case p.building <- struct{}{}:
		defer func() { <-p.building }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	want := f.parent.shell.form
	want.from, want.owns, want.hurried = f.frozen, len(f.babies) == 1, true
	if b.shell != nil {
		return f.m.reroot(b.shell, p.template, want)
	}
	at := *b.place
	b.place = nil // makeShellAt takes it over
	var err error
	if b.shell, err = f.m.makeShellAt(at, p.template, p.owner, want, poolLimits(b.child.Limits)); err != nil {
		return err
	}
	return f.bear(ctx, b)
}

// bear has the kernel's own zygote put a newborn into a branch's shell, unless one of its waits there, and waits until
// it is at rest.
func (f *fork) bear(ctx context.Context, b *baby) (err error) {
	if n := b.shell.takeKernel(); n != nil {
		if n.zygote == f.zygote {
			b.born = n
			return b.rest()
		}
		n.close() // it ends when its socket does
	}
	if b.born, err = bearFrom(ctx, f.zygote, b.shell, zygoteRequest{Cwd: "/"}); err != nil {
		return err
	}
	return b.rest()
}

// meet waits for the kernel's copy and finds out, from the host, which process it is.
func (f *fork) meet() error {
	buf, oob := make([]byte, 8), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	n, oobn, _, _, err := f.talk.ReadMsgUnix(buf, oob)
	if err != nil || n != 1 || buf[0] != 'R' {
		return fault.New(fault.Unavailable, "the kernel made no copy of itself")
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return fault.New(fault.Unavailable, "the kernel's copy did not say who it is")
	}
	cred, err := unix.ParseUnixCredentials(&messages[0])
	if err != nil {
		return err
	}
	if f.pidfd, f.proc, err = openProcess(int(cred.Pid)); err != nil {
		return err
	}
	mine, err := pidNamespace(f.proc)
	if err != nil {
		return err
	}
	f.home = mine
	shell, err := os.Open("/proc/" + strconv.Itoa(f.parent.shell.pid))
	if err != nil {
		return err
	}
	defer shell.Close()
	theirs, err := pidNamespace(shell)
	if err != nil {
		return err
	}
	if mine != theirs {
		return fault.New(fault.Denied, "the kernel's copy is not in its sandbox")
	}
	f.pid = int(cred.Pid)
	f.copy, err = readLayout(f.proc)
	return err
}

// openProcess opens a process's directory, and makes sure that it is still that process's.
func openProcess(pid int) (pidfd, proc *os.File, err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, nil, fault.Wrap(fault.Unavailable, err, "the kernel's copy has ended")
	}
	pidfd = os.NewFile(uintptr(fd), "pidfd")
	proc, err = os.Open("/proc/" + strconv.Itoa(pid))
	if err == nil {
		// If it lives now, it lived when its directory was opened.
		if err = unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
			proc.Close()
		}
	}
	if err != nil {
		pidfd.Close()
		return nil, nil, fault.Wrap(fault.Unavailable, err, "the kernel's copy has ended")
	}
	return pidfd, proc, nil
}

func pidNamespace(proc *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(proc.Fd()), "ns/pid", &st, 0); err != nil {
		return 0, fmt.Errorf("look at a process: %w", err)
	}
	return st.Ino, nil
}

// order has the copy do something, and waits.
func (f *fork) order(word byte, files ...*os.File) error {
	if err := f.talk.SetDeadline(time.Now().Add(copyTime)); err != nil {
		return err
	}
	err := wire.Hold(files, func(fds []int) error {
		_, _, err := f.talk.WriteMsgUnix([]byte{word}, unix.UnixRights(fds...), nil)
		return err
	})
	var answer [8]byte
	n := 0
	if err == nil {
		n, err = f.talk.Read(answer[:])
	}
	if err != nil || n != 1 || answer[0] != 'D' {
		return f.copyFailed(err)
	}
	return nil
}

// copyFailed says why a copy did not write its memory.
func (f *fork) copyFailed(err error) error {
	if f.payer.OOMKills() > 0 {
		return errTooLittle
	}
	if err == nil || errors.Is(err, io.EOF) {
		return fault.New(fault.Unavailable, "the kernel's memory could not be copied")
	}
	return fault.Wrap(fault.Unavailable, err, "the kernel's memory could not be copied")
}

// findLong finds what is long and surely the kernel's own: the zygote, or a child that has changed nothing, has other pages
// there, or none. Too much is no harm, and it need not wait for all branches.
func (f *fork) findLong(early []*baby) error {
	var base *layout
	if len(early) > 0 {
		base = early[0].layout // as good, and read already
	} else {
		proc, err := os.Open("/proc/" + strconv.Itoa(f.zygote.pid))
		if err != nil {
			return err
		}
		defer proc.Close()
		if base, err = readLayout(proc); err != nil {
			return err
		}
		defer base.close()
	}
	var err error
	if f.longs, err = longRuns(f.copy, base); err != nil || len(f.longs) == 0 {
		return err
	}
	f.bytes += runsBytes(f.longs)
	if err := f.fits(f.bytes); err != nil {
		return err
	}
	f.long, err = newLongFile(f.longs, f.copy)
	return err
}

func (f *fork) copyLong() error {
	if err := f.order('L', f.long.list, f.long.file); err != nil {
		return err
	}
	return f.long.seal()
}

// rest tells a newborn what it will be, and waits until it changes nothing more.
func (b *baby) rest() error {
	s := b.born.socket
	if err := s.SetDeadline(time.Now().Add(birthTime)); err != nil {
		return err
	}
	if err := agentapi.WriteJSON(s, agentapi.FrameControl, agentapi.KernelBirth{Branch: true}); err != nil {
		return fmt.Errorf("tell newborn: %w", err)
	}
	var word [1]byte
	if _, err := io.ReadFull(s, word[:]); err != nil || word[0] != 'N' {
		return fault.New(fault.Unavailable, "a branch did not come to rest")
	}
	pid, err := pidOf(b.born.pidfd)
	if err != nil {
		return err
	}
	if b.proc, err = os.Open("/proc/" + strconv.Itoa(pid)); err != nil {
		return err
	}
	b.layout, err = readLayout(b.proc)
	return err
}

// pidOf is the number of the process that a pidfd names.
func pidOf(pidfd *os.File) (int, error) {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return 0, err
	}
	var text []byte
	var readErr error
	err = raw.Control(func(fd uintptr) { text, readErr = os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd)) })
	if err = errors.Join(err, readErr); err != nil {
		return 0, err
	}
	for line := range bytes.Lines(text) {
		var pid int
		if n, _ := fmt.Sscanf(string(line), "Pid:\t%d", &pid); n == 1 && pid > 1 {
			return pid, nil
		}
	}
	return 0, fault.New(fault.Unavailable, "a branch has ended")
}

// compare finds out what branches lack that are at rest. One that could not be born is told of elsewhere.
func (f *fork) compare(babies []*baby) (err error) {
	for _, b := range babies {
		if b.layout == nil {
			return errUnborn
		}
		if b.memory, err = compare(f.copy, b.layout); err != nil {
			return err
		}
	}
	return nil
}

var errUnborn = fault.New(fault.Unavailable, "a branch was not born")

// copyPages has the copy write what any of its branches lacks.
func (f *fork) copyPages() error {
	var runs []run
	var ops []memoryOp
	for _, b := range f.babies {
		runs = union(runs, b.memory.copy)
		ops = append(ops, b.memory.allow...)
	}
	runs = subtract(runs, f.longs)
	f.bytes += runsBytes(runs)
	off := uint64(listSize(len(ops)+len(runs), 0))
	start := off
	for _, r := range runs {
		ops = append(ops, memoryOp{Kind: opCopy, Addr: r.from, Len: r.to - r.from, Off: off})
		off += r.to - r.from
	}
	if err := f.fits(f.bytes); err != nil {
		return err
	}
	var err error
	if f.pages, err = listFile(listHead{}, ops, nil, off-start); err != nil {
		return err
	}
	return f.order('S', f.pages)
}

// fits refuses a copy that a branch could not hold.
func (f *fork) fits(bytes uint64) error {
	for _, c := range f.request.Children {
		if limit := c.Limits.MemoryBytes; limit > 0 && bytes > uint64(limit) {
			return errTooLittle
		}
	}
	return nil
}

var errTooLittle = fault.New(fault.Exhausted, "the branch's memory limit is too small for a copy of the kernel")

// become gives each newborn its memory, its place in the world and its agent.
func (f *fork) become() error {
	for _, list := range []*os.File{f.pages, f.longList()} {
		if err := sealList(list); err != nil {
			return err
		}
	}
	for _, b := range f.babies {
		if err := f.becomeOne(b); err != nil {
			return err
		}
	}
	return nil
}

func (f *fork) becomeOne(b *baby) error {
	plan, err := f.plan(b)
	if err != nil {
		return err
	}
	defer plan.Close()
	if err := sealList(plan); err != nil {
		return err
	}
	give := []*os.File{plan, f.pages}
	if f.long != nil {
		give = append(give, f.long.list, f.long.sealed)
	}
	if err := b.born.socket.SetDeadline(time.Now().Add(birthTime)); err != nil {
		return err
	}
	raw, err := b.born.socket.SyscallConn()
	if err != nil {
		return err
	}
	err = wire.Hold(give, func(fds []int) error {
		var sendErr error
		err := raw.Write(func(fd uintptr) bool {
			sendErr = unix.Sendmsg(int(fd), []byte{'G'}, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL)
			return sendErr != unix.EAGAIN
		})
		return errors.Join(err, sendErr)
	})
	if err != nil {
		return fmt.Errorf("give a branch its memory: %w", err)
	}
	return f.settle(b)
}

// settle does for a branch what Start does for a sandbox.
func (f *fork) settle(b *baby) error {
	m, p := f.m, f.parent.pool
	env := map[string]string{}
	if b.child.InheritEnv {
		env = f.parent.given
	}
	l := m.newLive(b.child.ID, p, b.shell, b.child.Limits, merge(env, b.child.Env))
	if err := m.register(l); err != nil {
		return err
	}
	b.live = l
	go m.attendLive(l) // counted by register
	l.turn.RLock()
	defer l.turn.RUnlock()
	if err := m.furnishLive(l, b.child.Limits, b.child.Network); err != nil {
		b.born.close()
		return err
	}
	if err := m.settle(l, b.born, agentapi.DefaultKernel); errors.Is(err, errNewbornDied) {
		return fault.Wrap(fault.Unavailable, err, "a branch could not be put together")
	} else if err != nil {
		return err
	}
	return nil
}

// plan is what makes this newborn the kernel.
func (f *fork) plan(b *baby) (*os.File, error) {
	m := b.memory
	behind := uint64(len(m.ops)*opSize + headSize)
	for i := range m.ops {
		if m.ops[i].Kind == opOpen {
			m.ops[i].A += behind
		}
	}
	size := uint64(roomForStack) + uint64(listSize(len(m.ops), len(m.paths)))
	for _, file := range []*os.File{f.pages, f.longList()} {
		if file != nil {
			st, err := file.Stat()
			if err != nil {
				return nil, err
			}
			size += uint64(st.Size()) + page
		}
	}
	at, err := room(size, f.copy, b.layout)
	if err != nil {
		return nil, err
	}
	return listFile(listHead{Room: at, RoomLen: (size + page - 1) &^ (page - 1)}, m.ops, m.paths, 0)
}

func (f *fork) longList() *os.File {
	if f.long == nil {
		return nil
	}
	return f.long.list
}
