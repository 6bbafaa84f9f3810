package maker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Start makes a sandbox and returns a channel to its agent, and the token of its default kernel if that was forked; waited when
// that had been done before, and all that belongs to it.
func (m *Maker) Start(ctx context.Context, r wire.Start) (_ *os.File, token string, waited bool, err error) {
	p, done, err := m.pool(poolKey{r.Tenant, r.Digest})
	if err != nil {
		return nil, "", false, err
	}
	defer done()
	if err := cmp.Or(r.Network.Validate(), checkLimits(r.Limits)); err != nil {
		return nil, "", false, err
	}
	asked, err := newMounts(r)
	if err != nil {
		return nil, "", false, err
	}
	if r.Storage != sandbox.StorageTmpfs {
		if err := cmp.Or(m.space.check(0), m.checkTenant(r.Tenant)); err != nil {
			return nil, "", false, err
		}
	}
	s, err := p.take(ctx, form{storage: r.Storage, disk: r.Limits.DiskBytes, mounts: asked})
	if err != nil {
		return nil, "", false, err
	}
	l := m.newLive(r.ID, p, s, r.Limits, r.Env)
	if err := m.register(l); err != nil {
		s.kill()
		m.retire(s)
		return nil, "", false, err
	}
	go m.attendLive(l) // counted by register
	l.turn.RLock()
	defer l.turn.RUnlock()
	defer func() {
		if err != nil {
			m.end(l, sandbox.CauseStartFail, sandbox.StartFailure(err))
		}
	}()
	if err := m.adjust(l, r.Limits, r.Network); err != nil {
		return nil, "", false, err
	}
	l.setDeadline(m, r.Deadline)
	channel, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, "", false, err
	}
	defer theirs.Close()
	token, waited, err = m.furnishLive(ctx, l, theirs, p.warm() && !r.NoKernel)
	if err != nil {
		channel.Close()
		return nil, "", false, err
	}
	return channel, token, waited, nil
}

// furnishLive has an agent begin, with a channel and, if it is to have one, with a kernel: one that has waited goes in the same
// message, because each wakes the agent.
func (m *Maker) furnishLive(ctx context.Context, l *live, channel *os.File, kernel bool) (token string, waited bool, err error) {
	boot := l.boot()
	boot.Channel = true
	var n *newborn
	if kernel {
		n = l.shell.takeKernel()
	}
	if n != nil {
		ready, err := m.settleWith(l, n, boot, channel)
		if !errors.Is(err, errNewbornDied) {
			return n.token, ready, err
		}
	} else if err := l.shell.tell(boot, channel); err != nil {
		return "", false, err
	}
	if kernel {
		token, err = m.fork(ctx, l, agentapi.DefaultKernel)
	}
	return token, false, err
}

func (m *Maker) newLive(id string, p *pool, s *shell, limits template.Limits, env map[string]string) *live {
	return &live{
		id: id, tenant: p.key.tenant, template: p.template.Name, pool: p, shell: s, started: time.Now(), limits: limits,
		given: env, env: merge(p.template.Env, env), kernels: map[string]origin{}, over: make(chan struct{}),
	}
}

// adjust gives a shell somebody's limits and network.
func (m *Maker) adjust(l *live, limits template.Limits, network policy.Network) error {
	if err := m.checkNetwork(network, l.tenant); err != nil {
		return err
	}
	if err := l.shell.setLimits(limits); err != nil {
		return err
	}
	return m.setNetwork(l.shell, network)
}

// boot tells an agent whose it is.
func (l *live) boot() agentapi.Message {
	boot := agentBoot(l.pool.template)
	boot.ID, boot.Env, boot.OpenFiles = l.id, l.env, l.limits.OpenFiles
	return agentapi.Message{Type: agentapi.MessageBoot, Boot: &boot}
}

// agentBoot is what every sandbox of a template has.
func agentBoot(t *template.Template) agentapi.Boot {
	return agentapi.Boot{
		User: t.User, Workdir: t.Workdir, Python: t.Python.Executable, Kernel: "/run/cove/kernel/kernel.py", Sudo: t.Sudo,
	}
}

// keep notes from where a kernel can be forked.
func (l *live) keep(kernel string, n *newborn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kernels[kernel] = origin{n.zygote, n.anchor}
}

func merge(env, more map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, env)
	maps.Copy(all, more)
	return all
}

func (m *Maker) register(l *live) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return fault.New(fault.Unavailable, "the maker is shutting down")
	}
	if m.sandboxes[l.id] != nil {
		return fault.New(fault.Conflict, "sandbox %s exists", l.id)
	}
	for _, u := range l.shell.volumes {
		if err := u.checkCut(); err != nil {
			return err
		}
	}
	m.sandboxes[l.id] = l
	m.wg.Add(1) // for attendLive, while nobody can be waiting yet
	return nil
}

// Channel gives another channel to a sandbox's agent.
func (m *Maker) Channel(id string) (*os.File, error) {
	l, err := m.find(id)
	if err != nil {
		return nil, err
	}
	done, err := l.awake()
	if err != nil {
		return nil, err
	}
	defer done()
	return m.channel(l)
}

func (m *Maker) channel(l *live) (*os.File, error) {
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	if err := l.shell.tell(agentapi.Message{Type: agentapi.MessageChannel}, theirs); err != nil {
		mine.Close()
		return nil, err
	}
	return mine, nil
}

// Kernel forks a kernel of that name into a sandbox.
func (m *Maker) Kernel(ctx context.Context, id, name string) (token string, err error) {
	l, err := m.find(id)
	if err != nil {
		return "", err
	}
	if !l.pool.warm() {
		return "", fault.New(fault.Unsupported, "template %s has no zygote", l.template)
	}
	done, err := l.awake()
	if err != nil {
		return "", err
	}
	defer done()
	return m.fork(ctx, l, name)
}

// oomKills counts what was killed here for lack of memory before a kernel is forked: nothing, for the first one.
func (l *live) oomKills() int {
	l.mu.Lock()
	first := !l.forked
	l.forked = true
	l.mu.Unlock()
	if first {
		return 0
	}
	return l.shell.group.OOMKills()
}

// kernelExit passes on how a kernel ended; its agent is not its parent and cannot know. It waits
// for the name of a victim, so it is called in a goroutine of its own.
func (m *Maker) kernelExit(l *live, token string, oomBefore int, e exit) {
	told := &agentapi.KernelExit{Token: token, Code: e.code, Signal: e.signal}
	if e.signal == "SIGKILL" && l.shell.group.OOMKills() > oomBefore {
		told.OOM = true
		if v, ok := m.oom.awaitVictim(l.shell.group.Name(), kernelNameDelay); ok && v.process != "" {
			told.Message = v.String()
		}
	}
	_ = l.shell.tell(agentapi.Message{Type: agentapi.MessageExit, Exit: told})
}

// tellShortage passes on that the host killed something in a sandbox: inside, it looks like any other SIGKILL.
func (m *Maker) tellShortage(group string, v victim) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.sandboxes {
		if l.shell.group.Name() == group {
			go func() { _ = l.shell.tell(agentapi.Message{Type: agentapi.MessageOOM, Text: v.String()}) }()
		}
	}
}

// liveGroups are the groups of a maker's sandboxes.
type liveGroups struct{ m *Maker }

func (g liveGroups) names() (all []string) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	for _, l := range g.m.sandboxes {
		all = append(all, l.shell.group.Name())
	}
	return all
}

func (g liveGroups) kills(name string) int {
	g.m.mu.Lock()
	var of *live
	for _, l := range g.m.sandboxes {
		if l.shell.group.Name() == name {
			of = l
		}
	}
	g.m.mu.Unlock()
	if of == nil {
		return 0
	}
	return of.shell.group.OOMKills()
}

// attendLive records a sandbox's end.
func (m *Maker) attendLive(l *live) {
	defer m.wg.Done()
	<-l.shell.done
	cause, message := m.autopsy(l)
	l.decide(cause, message, m.usage(l))
	l.mu.Lock()
	if l.timer != nil {
		l.timer.Stop()
	}
	l.ended = true
	if l.insisting != nil {
		l.insisting.Stop()
	}
	end := sandbox.Ended{ID: l.id, Cause: l.cause, Message: l.message, At: time.Now(), Usage: l.usage}
	l.mu.Unlock()
	m.mu.Lock()
	delete(m.sandboxes, l.id)
	m.mu.Unlock()
	l.shell.leaveVolumes() // whoever hears of the end may remove them
	m.ends.add(end)
	close(l.over)
	m.retire(l.shell)
}

// autopsy finds out why a PID 1 ended that nobody told to.
func (m *Maker) autopsy(l *live) (sandbox.Cause, string) {
	status := l.shell.status
	if victim, ok := m.oom.awaitVictim(l.shell.group.Name(), endNameDelay); ok {
		killed := status.Signaled() && status.Signal() == unix.SIGKILL
		if killed && (victim.init || victim.pid == l.shell.pid) {
			victim.process = agentName // the kernel calls it by the memory file it was executed from
			return sandbox.CauseOOM, victim.String()
		}
		if killed && victim.process == "" { // its record is lost: the count says that it was one of ours
			return sandbox.CauseOOM, "out of memory"
		}
		return sandbox.CauseAgentDied, describe(status) + "; before that: " + victim.String()
	}
	if status.Signaled() && status.Signal() == unix.SIGKILL && l.shell.group.OOMKills() > 0 {
		return sandbox.CauseOOM, "out of memory"
	}
	return sandbox.CauseAgentDied, describe(status)
}

func describe(s unix.WaitStatus) string {
	if s.Signaled() {
		return "PID 1 was ended by " + unix.SignalName(s.Signal())
	}
	return fmt.Sprintf("PID 1 exited with status %d", s.ExitStatus())
}

// end begins a sandbox's end; the first cause wins.
func (m *Maker) end(l *live, cause sandbox.Cause, message string) {
	l.decide(cause, message, m.usage(l))
	if l.isPaused() || l.isHeld() {
		l.shell.end()
	} else {
		l.shell.kill()
	}
	l.insist()
}

// insist ends a sandbox again and again until it has ended. A frozen task of cgroup v1 does not die, and besides a pause
// there are other freezers: a copy that is being made, and the host's operator.
func (l *live) insist() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.insisting != nil || l.ended {
		return
	}
	l.insisting = time.AfterFunc(insistAfter, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.ended { // what is retired after that has another owner next
			l.shell.end()
			l.insisting.Reset(insistAfter)
		}
	})
}

// insistAfter is how long the processes of a sandbox may take to die before they are killed once more.
const insistAfter = time.Second

// decide records why a sandbox ends and what it used, once.
func (l *live) decide(cause sandbox.Cause, message string, usage sandbox.Usage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == "" {
		l.cause, l.message, l.usage = cause, message, usage
	}
}

// Stop ends a sandbox and returns when its processes are gone and its end is recorded; what it held is cleared afterwards.
func (m *Maker) Stop(ctx context.Context, id string, cause sandbox.Cause, message string) error {
	l, err := m.find(id)
	if err != nil {
		return nil // stopped before: the same result
	}
	m.end(l, cause, message)
	select {
	case <-l.over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Change adjusts a living sandbox.
func (m *Maker) Change(id string, c wire.Change) error {
	l, err := m.find(id)
	if err != nil {
		return err
	}
	if c.Limits != nil {
		l.mu.Lock()
		err := l.shell.setLimits(*c.Limits)
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if c.Network != nil {
		if err := c.Network.Validate(); err != nil {
			return err
		}
		if err := m.checkNetwork(*c.Network, l.tenant); err != nil {
			return err
		}
		l.mu.Lock()
		err := m.setNetwork(l.shell, *c.Network)
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if c.Deadline != nil {
		l.setDeadline(m, *c.Deadline)
	}
	return nil
}

// setDeadline arms the timer that ends the sandbox whether or not a server is there; the zero time disarms it.
func (l *live) setDeadline(m *Maker, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	l.deadline = at
	if !at.IsZero() {
		l.timer = time.AfterFunc(time.Until(at), func() { m.end(l, sandbox.CauseExpired, "") })
	}
}

// Usage of a living sandbox.
func (m *Maker) Usage(id string) (sandbox.Usage, error) {
	l, err := m.find(id)
	if err != nil {
		return sandbox.Usage{}, err
	}
	return m.usage(l), nil
}

func (m *Maker) usage(l *live) sandbox.Usage {
	u := l.shell.group.Usage()
	return sandbox.Usage{
		CPUMS: u.CPUMS, MemoryBytes: u.MemoryBytes, PeakBytes: u.PeakBytes, Pids: u.Pids, OOMKills: u.OOMKills, DiskBytes: l.shell.diskBytes(),
	}
}

// pageSize keeps a page of a list well below wire.MaxMessage.
const pageSize = 256

// List gives the living sandboxes after an id, in order of id.
func (m *Maker) List(after string) []sandbox.Instance {
	m.mu.Lock()
	defer m.mu.Unlock()
	ids := slices.Sorted(maps.Keys(m.sandboxes))
	var page []sandbox.Instance
	for _, id := range ids {
		if id <= after {
			continue
		}
		l := m.sandboxes[id]
		l.mu.Lock()
		page = append(page, sandbox.Instance{ID: id, Tenant: l.tenant, Template: l.template, Deadline: l.deadline, Started: l.started, Paused: l.paused})
		l.mu.Unlock()
		if len(page) == pageSize {
			break
		}
	}
	return page
}

// Floor forks a zygote's child without any isolation, the lower bound of what a create can cost.
func (m *Maker) Floor(ctx context.Context, key poolKey) (*os.File, error) {
	p, done, err := m.pool(key)
	if err != nil {
		return nil, err
	}
	defer done()
	z, err := p.zygote(ctx)
	if err != nil {
		return nil, err
	}
	defer z.release()
	mine, theirs, err := wire.Pair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	pidfds, err := z.fork(ctx, zygoteRequest{Op: "floor", Token: rand.Text()}, nil, theirs)
	if err != nil {
		mine.Close()
		return nil, err
	}
	wire.CloseAll(pidfds)
	return mine, nil
}

// journal keeps the ends until somebody has written them down.
type journal struct {
	mu    sync.Mutex
	ends  []sandbox.Ended
	first int // number of ends that were dropped from the front, so that positions stay valid
	grown chan struct{}
}

// journalSize bounds what a server that never comes back can cost.
const journalSize = 10_000

func newJournal() *journal { return &journal{grown: make(chan struct{})} }

func (j *journal) add(e sandbox.Ended) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ends = append(j.ends, e)
	if extra := len(j.ends) - journalSize; extra > 0 {
		j.ends = slices.Delete(j.ends, 0, extra)
		j.first += extra
	}
	close(j.grown)
	j.grown = make(chan struct{})
}

func (j *journal) forget(ids []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	// Tombstones keep the positions of listeners valid; they go when they reach the front.
	for i := range j.ends {
		if slices.Contains(ids, j.ends[i].ID) {
			j.ends[i] = sandbox.Ended{}
		}
	}
	for len(j.ends) > 0 && j.ends[0].ID == "" {
		j.ends = j.ends[1:]
		j.first++
	}
}

// from gives the ends at and after a position, the next position, and what to wait for when there are none.
func (j *journal) from(position int) (ends []sandbox.Ended, next int, grown <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	start := max(position-j.first, 0)
	for _, e := range j.ends[min(start, len(j.ends)):] {
		if e.ID != "" {
			ends = append(ends, e)
		}
	}
	return ends, j.first + len(j.ends), j.grown
}
