package maker

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/cgroup"
	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// zygote is a Python process with everything imported that forks itself into sandboxes. It is as weak as a sandbox:
// an unmapped uid, no capability, a filter, a read-only root; what it answers is checked like any stranger's words.
type zygote struct {
	pid      int
	pidfd    *os.File
	owner    int // its id
	conn     *net.UnixConn
	anchors  *net.UnixConn // to the anchors of its kernels
	tracer   *trace.Tracer // who holds them
	grafting sync.Mutex    // whoever is given descriptors takes them before the next
	group    *cgroup.Group
	stderr   *tail
	born     time.Time
	ready    zygoteMessage
	gone     chan struct{} // closed when its process was reaped

	sendMu sync.Mutex // one message at a time

	mapsOnce sync.Once
	mappings *zygoteMaps
	mapsErr  error

	mu       sync.Mutex
	dead     bool
	forks    int
	reserved int                          // callers who were given it and have not asked yet
	waiting  map[string]chan zygoteAnswer // token → who asked
	living   map[string]func(exit)        // token → who wants to know its end
}

// zygoteRequest and zygoteMessage are the protocol of kernel/zygote.py; orders to fork also have a short form.
type zygoteRequest struct {
	Op        string   `json:"op"`
	Token     string   `json:"token,omitempty"`
	Preload   []string `json:"preload,omitempty"`
	Warmup    string   `json:"warmup,omitempty"`
	KernelDir string   `json:"kernel_dir,omitempty"`
	Delta     string   `json:"delta,omitempty"`
	UserSite  string   `json:"user_site,omitempty"`
	Home      string   `json:"home,omitempty"`
	UID       int      `json:"uid"` // zero is root of the sandbox
	GID       int      `json:"gid"`
	Groups    []int    `json:"groups,omitempty"`
	Cwd       string   `json:"cwd,omitempty"`
	Ahead     bool     `json:"ahead,omitempty"` // nobody waits for it yet
	NoFile    int      `json:"nofile,omitempty"`
}

type zygoteMessage struct {
	Type    string         `json:"type"`
	Token   string         `json:"token"`
	PID     int            `json:"pid"`
	Error   string         `json:"error"`
	Code    int            `json:"code"`
	Signal  string         `json:"signal"`
	Python  string         `json:"python"`
	Threads int            `json:"threads"`
	RSSKB   int64          `json:"rss_kb"`
	Seconds float64        `json:"seconds"`
	Imports map[string]any `json:"imports"`    // seconds by module, or why it cannot be imported
	Hollow  []string       `json:"hollow"`     // modules that are a directory without its __init__.py
	Way     string         `json:"way"`        // "shim", or how it forks without
	Reason  string         `json:"way_reason"` // why without
}

type zygoteAnswer struct {
	message zygoteMessage
	pidfds  []*os.File // the kernel's, and its anchor's if it has one
	err     error
}

// exit is how a kernel ended, as its parent saw it.
type exit struct {
	code   int
	signal string
}

const (
	zygoteStart = 60 * time.Second
	// zygotePatience is how long one fork may take. It takes milliseconds, but more where the zygote
	// waits for a processor or a disk.
	zygotePatience = 100 * time.Second
	// stoppedPatience is the same for a zygote that is stopped: it does not go on by itself.
	stoppedPatience = 10 * time.Second
)

var errZygoteDied = fault.New(fault.Unavailable, "the zygote died")

// startZygote starts one and waits until it has imported everything.
func (m *Maker) startZygote(ctx context.Context, t *template.Template, owner int, name string) (_ *zygote, err error) {
	var undo undo
	defer undo.run()
	z := &zygote{owner: owner, tracer: trace.New(), born: clock(), gone: make(chan struct{}), waiting: map[string]chan zygoteAnswer{}, living: map[string]func(exit){}}

	// Page tables of children are charged here; leave room, but not without end.
	z.group, err = m.groups.New(name, cgroup.Limits{MemoryBytes: 4 << 30, Pids: 1024})
	if err != nil {
		return nil, err
	}
	undo.add(func() { m.retireGroup(z.group) })
	undo.add(z.tracer.Close)
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer mine.Close()
	errRead, errWrite, err := os.Pipe()
	if err != nil {
		theirs.Close()
		return nil, err
	}
	z.stderr = newTail(errRead)
	undo.add(z.stderr.close)
	z.pid, z.pidfd, err = clone(birth{
		program: m.host.shell, socket: theirs, stderr: errWrite,
		flags: unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET,
	})
	theirs.Close()
	errWrite.Close()
	if err != nil {
		return nil, err
	}
	undo.add(func() {
		_ = signal(z.pidfd, unix.SIGKILL)
		_, _ = waitExit(z.pid, z.pidfd)
		z.pidfd.Close()
	})
	z.goSooner()
	if err := m.furnishZygote(z, t, owner, mine); err != nil {
		return nil, fmt.Errorf("start zygote: %w", err)
	}
	undo.add(func() { z.conn.Close() })
	var anchors *os.File
	if z.anchors, anchors, err = anchorSocket(); err != nil {
		return nil, err
	}
	undo.add(func() { z.anchors.Close() })
	defer anchors.Close()
	if err := z.configure(ctx, t, anchors); err != nil {
		return nil, err
	}
	if err := m.checkImports(t, z.ready); err != nil {
		return nil, err
	}
	undo.release()
	m.wg.Add(1)
	go func() {
		defer m.wg.Done()
		m.attendZygote(z)
	}()
	return z, nil
}

// goSooner has kernels, which inherit it, be ended before the agents of their sandboxes when memory runs out. The agent itself cannot say so of
// a kernel, whose memory belongs to the zygote's namespace. A zygote that goes too is made again; where it cannot be said all are alike.
func (z *zygote) goSooner() {
	var own int
	if raw, err := os.ReadFile("/proc/self/oom_score_adj"); err != nil {
		return
	} else if _, err := fmt.Sscan(string(raw), &own); err != nil {
		return
	}
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", z.pid), []byte(strconv.Itoa(min(own+agentapi.SoonerBy, 1000))), 0)
}

func (m *Maker) furnishZygote(z *zygote, t *template.Template, owner int, socket *os.File) error {
	p := &plan{Mode: modeZygote, UID: uint32(owner), GID: uint32(owner), NoFile: maxOpenFiles()}
	copy(p.Base[:], base)
	copy(p.Hostname[:], "zygote")
	p.setFilter(zygoteFilter())
	if err := p.setArgv(t.Python.Executable, "-I", "/run/cove/kernel/zygote.py"); err != nil {
		return err
	}
	files, err := m.planTrees(p, t, nil, nil)
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
	files = append(files, theirs)
	joiners := z.group.Joiners()
	p.Cgroups = uint32(len(joiners))
	if err := order(socket, p, append(append([]*os.File{}, files...), joiners...)); err != nil {
		mine.Close()
		return err
	}
	z.conn, err = wire.Conn(mine)
	return err
}

// preparedHome is where a build leaves what libraries prepare, whoever the template's user is.
const preparedHome = "/home/user"

func (z *zygote) configure(ctx context.Context, t *template.Template, anchors *os.File) error {
	deadline := time.Now().Add(zygoteStart)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := z.conn.SetDeadline(deadline); err != nil {
		return err
	}
	err := wire.Send(z.conn, zygoteRequest{
		Op: "configure", Preload: t.Python.Preload, Warmup: t.Python.Warmup, KernelDir: "/run/cove/kernel", Delta: "/run/cove/delta.bpf",
		UserSite: t.Python.UserSite, Home: preparedHome,
	}, anchors)
	if err == nil {
		_, err = wire.Receive(z.conn, &z.ready)
	}
	if err != nil {
		return fmt.Errorf("zygote did not start: %w: %s", err, z.stderr.text())
	}
	if z.ready.Type != "ready" {
		return fmt.Errorf("zygote did not start: %s: %s", z.ready.Error, z.stderr.text())
	}
	return z.conn.SetDeadline(time.Time{})
}

// errHollow is a template in which a package has no __init__.py.
var errHollow = errors.New("a hollow package")

// maxImportError bounds the text of an import's error in the log.
const maxImportError = 300

// checkImports refuses a zygote whose template has a hollow package: a directory without its
// __init__.py, which Python imports as an empty namespace package. Another import that fails is
// logged, and kernels start without that module.
func (m *Maker) checkImports(t *template.Template, ready zygoteMessage) error {
	for _, module := range t.Python.Preload { // the zygote could invent other names
		if slices.Contains(ready.Hollow, module) {
			m.log.Error("a template is damaged: a Python module has no __init__.py, so no kernel starts; `cove doctor --verify` names the layer, else the host's own packages are damaged",
				"template", t.Name, "module", module)
			return fault.Wrap(fault.Unavailable, errHollow, "template %s is damaged: its Python module %s has no __init__.py", t.Name, module)
		}
		if why, failed := ready.Imports[module].(string); failed {
			m.log.Warn("a template's Python module cannot be imported; kernels start without it", "template", t.Name, "module", module, "error", why[:min(len(why), maxImportError)])
		}
	}
	return nil
}

// attendZygote hears it until it ends.
func (m *Maker) attendZygote(z *zygote) {
	for {
		var msg zygoteMessage
		files, err := wire.Receive(z.conn, &msg)
		if err != nil {
			break
		}
		z.hear(msg, files)
	}
	_ = signal(z.pidfd, unix.SIGKILL)
	_, _ = waitExit(z.pid, z.pidfd)
	z.mu.Lock()
	z.dead = true
	waiting := z.waiting
	z.waiting = map[string]chan zygoteAnswer{}
	z.mu.Unlock()
	for _, c := range waiting {
		c <- zygoteAnswer{err: errZygoteDied}
	}
	z.tracer.Close() // kernels live on, and cannot be forked any more
	z.conn.Close()
	z.anchors.Close()
	z.pidfd.Close()
	z.stderr.close()
	m.retireGroup(z.group)
	close(z.gone)
}

// whyNotForked explains a kernel that a zygote could not fork. It begins in the sandbox's cgroup, so the sandbox's own limit of
// processes ends it with EAGAIN, whose text comes last.
func whyNotForked(text string) error {
	if strings.HasSuffix(text, unix.EAGAIN.Error()) || strings.HasSuffix(text, "Resource temporarily unavailable") {
		return fault.New(fault.Exhausted, "the sandbox has as many processes as it may have (limits.pids), and a kernel is one more")
	}
	return fmt.Errorf("zygote: fork: %s", text)
}

func (z *zygote) hear(msg zygoteMessage, files []*os.File) {
	z.mu.Lock()
	defer z.mu.Unlock()
	switch msg.Type {
	case "forked", "failed":
		c := z.waiting[msg.Token]
		delete(z.waiting, msg.Token)
		a := zygoteAnswer{message: msg}
		if msg.Type == "failed" || len(files) < 1 || len(files) > 2 {
			a.err = whyNotForked(msg.Error)
			delete(z.living, msg.Token)
		} else {
			a.pidfds, files = files, nil
		}
		if c != nil {
			c <- a
		} else {
			z.disown(a.pidfds)
		}
	case "exit":
		if heard := z.living[msg.Token]; heard != nil {
			delete(z.living, msg.Token)
			heard(exit{msg.Code, msg.Signal})
		}
	}
	wire.CloseAll(files)
}

// fork asks for a kernel. onExit is told how it ended; it must not block.
func (z *zygote) fork(ctx context.Context, r zygoteRequest, onExit func(exit), files ...*os.File) ([]*os.File, error) {
	send, err := z.sender(r)
	if err != nil {
		return nil, err
	}
	answer := make(chan zygoteAnswer, 1)
	z.mu.Lock()
	if z.dead {
		z.mu.Unlock()
		return nil, errZygoteDied
	}
	z.waiting[r.Token] = answer
	if onExit != nil {
		z.living[r.Token] = onExit
	}
	z.forks++
	z.mu.Unlock()

	z.sendMu.Lock()
	_ = z.conn.SetWriteDeadline(time.Now().Add(zygotePatience))
	err = send(files)
	z.sendMu.Unlock()
	if err != nil {
		z.forget(r.Token)
		if errors.Is(err, wire.ErrNotHeld) { // the sandbox was ended while it was made, which is not the zygote's fault
			return nil, errors.Join(errEnded, err)
		}
		z.stop()
		return nil, errors.Join(errZygoteDied, err)
	}
	hung, done := awaitHang(func() bool { return isStopped(z.pid) })
	defer done()
	select {
	case a := <-answer:
		return a.pidfds, a.err
	case <-hung:
		// It would hang for the next caller too.
		z.forget(r.Token)
		z.stop()
		return nil, errZygoteDied
	case <-ctx.Done():
		z.forget(r.Token)
		select {
		case a := <-answer: // in the same moment
			z.disown(a.pidfds)
		default:
		}
		return nil, context.Cause(ctx)
	}
}

// awaitHang watches a zygote that is to answer now: hung is closed when it has had its time. Call
// done after the answer.
func awaitHang(stopped func() bool) (hung <-chan struct{}, done func()) {
	closed := make(chan struct{})
	over := time.AfterFunc(zygotePatience, func() { close(closed) })
	early := time.AfterFunc(stoppedPatience, func() {
		if stopped() && over.Stop() {
			close(closed)
		}
	})
	return closed, func() { early.Stop(); over.Stop() }
}

// isStopped tells whether a signal has stopped a process.
func isStopped(pid int) bool { return processState(pid) == 'T' }

// hasEnded tells whether a process has ended, reaped or not.
func hasEnded(pid int) bool {
	state := processState(pid)
	return state == 0 || state == 'Z' || state == 'X'
}

// processState is the letter of /proc/PID/stat; zero if there is no such process.
func processState(pid int) byte {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, fields, _ := bytes.Cut(raw[max(0, bytes.LastIndexByte(raw, ')')):], []byte(" "))
	if len(fields) == 0 {
		return 0
	}
	return fields[0]
}

// sender is how an order goes to the zygote: to fork, where the shim reads such orders, in its form.
func (z *zygote) sender(r zygoteRequest) (func(files []*os.File) error, error) {
	if r.Op != "fork" || z.ready.Way != "shim" {
		return func(files []*os.File) error { return wire.Send(z.conn, r, files...) }, nil
	}
	order, err := r.short()
	return func(files []*os.File) error { return wire.SendBytes(z.conn, order, files...) }, err
}

// Bounds of kernel/native/serve.c.
const (
	maxOrderGroups = 64
	maxOrderToken  = 63
	maxOrderCwd    = 4096
)

// short is an order to fork as kernel/native/serve.c reads it.
func (r zygoteRequest) short() ([]byte, error) {
	if len(r.Groups) > maxOrderGroups || len(r.Token) > maxOrderToken || len(r.Cwd) > maxOrderCwd {
		return nil, fmt.Errorf("an order with %d groups, a token of %d bytes and a path of %d", len(r.Groups), len(r.Token), len(r.Cwd))
	}
	ahead := byte(0)
	if r.Ahead {
		ahead = 1
	}
	order := []byte{'F', ahead, byte(len(r.Groups)), byte(len(r.Token))}
	for _, number := range append([]int{r.UID, r.GID, r.NoFile}, r.Groups...) {
		order = binary.LittleEndian.AppendUint32(order, uint32(number))
	}
	return append(append(order, r.Token...), r.Cwd...), nil
}

// maps are its mappings, which stay as they are.
func (z *zygote) maps() (*zygoteMaps, error) {
	z.mapsOnce.Do(func() { z.mappings, z.mapsErr = readZygote(z.pid) })
	return z.mappings, z.mapsErr
}

// reserve keeps a zygote from being retired until release.
func (z *zygote) reserve() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.reserved++
}

func (z *zygote) release() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.reserved--
}

func (z *zygote) forget(token string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	delete(z.waiting, token)
	delete(z.living, token)
}

func (z *zygote) load() (living, forks int, dead bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return len(z.living) + z.reserved, z.forks, z.dead
}

func (z *zygote) stop() { _ = signal(z.pidfd, unix.SIGKILL) }

// tail keeps the last words of a process that nobody trusts.
type tail struct {
	r  *os.File
	mu sync.Mutex
	b  []byte
}

const tailSize = 4 << 10

func newTail(r *os.File) *tail {
	t := &tail{r: r}
	go func() {
		buf := make([]byte, 1024)
		for {
			n, err := r.Read(buf)
			t.mu.Lock()
			t.b = append(t.b, buf[:n]...)
			if extra := len(t.b) - tailSize; extra > 0 {
				t.b = append(t.b[:0], t.b[extra:]...)
			}
			t.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return t
}

func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.ToValidUTF8(strings.TrimSpace(string(t.b)), "�")
}

func (t *tail) close() { t.r.Close() }
