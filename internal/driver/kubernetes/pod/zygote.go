package pod

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

// zygote is a Python process with the template's imports done, which forks kernels. It lives in the sandbox as its kernels do, so the sandbox's
// code can end it: kernels are then started by exec.
type zygote struct {
	conn *net.UnixConn
	user account
	cwd  string
	gone chan struct{}

	mu      sync.Mutex
	next    int
	waiting map[string]chan forked       // token → who asked
	living  map[string]func(zygoteReply) // token → who wants to know its end
}

// account is who kernels run as.
type account struct{ uid, gid int }

// zygoteOrder and zygoteReply are the protocol of kernel/zygote.py.
type zygoteOrder struct {
	Op        string   `json:"op"`
	Token     string   `json:"token,omitempty"`
	Plain     bool     `json:"plain,omitempty"`
	Preload   []string `json:"preload,omitempty"`
	Warmup    string   `json:"warmup,omitempty"`
	KernelDir string   `json:"kernel_dir,omitempty"`
	UserSite  string   `json:"user_site,omitempty"`
	Home      string   `json:"home,omitempty"`
	UID       int      `json:"uid"`
	GID       int      `json:"gid"`
	Cwd       string   `json:"cwd,omitempty"`
	Ahead     bool     `json:"ahead,omitempty"`
}

type zygoteReply struct {
	Type   string `json:"type"`
	Token  string `json:"token"`
	Error  string `json:"error"`
	Code   int    `json:"code"`
	Signal string `json:"signal"`
}

type forked struct {
	pidfd int
	err   error
}

var errZygoteDied = errors.New("the zygote has died")

// forkFor is how long a fork may take. It takes milliseconds, but more where the zygote waits for a
// processor.
const forkFor = 100 * time.Second

// startZygote starts one and waits until it has imported everything.
func startZygote(ctx context.Context, settings podapi.Settings) (_ *zygote, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	conn, err := agentapi.Channel(fds[0])
	if err != nil {
		syscall.Close(fds[1])
		return nil, err
	}
	z := &zygote{conn: conn, cwd: cmp.Or(settings.Workdir, settings.Home, "/"), gone: make(chan struct{}), waiting: map[string]chan forked{}, living: map[string]func(zygoteReply){}}
	err = z.exec(settings, fds[1])
	syscall.Close(fds[1])
	if err == nil {
		err = z.configure(ctx, settings)
	}
	if err != nil {
		conn.Close() // with it the process ends
		return nil, fmt.Errorf("zygote: %w", err)
	}
	go z.hear() // until its process ends
	return z, nil
}

func (z *zygote) exec(settings podapi.Settings, socket int) error {
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(null)
	python, err := lookPython(settings.Python)
	if err != nil {
		return err
	}
	attr := &syscall.ProcAttr{Dir: "/", Files: []uintptr{uintptr(null), 2, 2, uintptr(socket)}, Sys: &syscall.SysProcAttr{Setsid: true}}
	z.user = account{os.Getuid(), os.Getgid()}
	if z.user.uid == 0 && settings.User != "" {
		// As whoever commands run as: the sandbox's code is to have no more in its kernel than beside it.
		if z.user, err = findAccount(settings.User); err != nil {
			return err
		}
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(z.user.uid), Gid: uint32(z.user.gid)}
	}
	script := filepath.Join(settings.Dir, "kernel", "zygote.py")
	pid, err := syscall.ForkExec(python, []string{python, "-I", script}, attr)
	if err != nil {
		return fmt.Errorf("start %s: %w", python, err)
	}
	goSooner(pid)
	return nil
}

// goSooner has kernels, which inherit it, be ended before PID 1 when memory runs out. Where it cannot be said all are alike.
func goSooner(pid int) {
	var own int
	raw, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return
	}
	if _, err := fmt.Sscan(string(raw), &own); err != nil {
		return
	}
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(min(own+agentapi.SoonerBy, 1000))), 0)
}

// lookPython finds the interpreter that a template names, by its path or in the usual places.
func lookPython(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, dir := range []string{"/usr/local/bin", "/usr/bin", "/bin"} {
		if path := filepath.Join(dir, name); syscall.Access(path, 1) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no %s in the image", name)
}

// homeOf is the home that an image names for a user; empty: it does not.
func homeOf(uid int) string {
	file, err := os.OpenFile("/etc/passwd", os.O_RDONLY|syscall.O_NONBLOCK, 0) // the image may have anything there
	if err != nil {
		return ""
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		return ""
	}
	for lines := bufio.NewScanner(io.LimitReader(file, maxAccounts)); lines.Scan(); {
		if f := strings.Split(lines.Text(), ":"); len(f) >= 7 && f[2] == strconv.Itoa(uid) {
			return f[5]
		}
	}
	return ""
}

// maxAccounts is how much of a file of accounts is read.
const maxAccounts = 4 << 20

func findAccount(name string) (account, error) {
	if id, err := strconv.Atoi(name); err == nil {
		return account{id, id}, nil
	}
	raw, err := os.ReadFile("/etc/passwd")
	if err != nil {
		return account{}, err
	}
	for line := range strings.Lines(string(raw)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 || f[0] != name {
			continue
		}
		uid, uerr := strconv.Atoi(f[2])
		gid, gerr := strconv.Atoi(f[3])
		return account{uid, gid}, errors.Join(uerr, gerr)
	}
	return account{}, fmt.Errorf("there is no user %q in the image", name)
}

func (z *zygote) configure(ctx context.Context, settings podapi.Settings) error {
	if deadline, ok := ctx.Deadline(); ok {
		_ = z.conn.SetDeadline(deadline)
	}
	order := zygoteOrder{
		Op: "configure", Plain: true, Preload: settings.Preload, Warmup: settings.Warmup, UserSite: settings.UserSite, Home: settings.Home,
		KernelDir: filepath.Join(settings.Dir, "kernel"), UID: z.user.uid, GID: z.user.gid,
	}
	if err := z.send(order); err != nil {
		return err
	}
	reply, fds, err := z.receive()
	agentapi.CloseDescriptors(fds)
	if err != nil {
		return fmt.Errorf("it ended before it was ready; the container's log may say why: %w", err)
	}
	if reply.Type != "ready" {
		return errors.New(reply.Error)
	}
	return z.conn.SetDeadline(time.Time{})
}

func (z *zygote) send(o zygoteOrder, fds ...int) error {
	payload, err := json.Marshal(o)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	_, _, err = z.conn.WriteMsgUnix(payload, rights, nil)
	return err
}

// receive takes one message; a zygote runs nobody's code, but shares its user with code that does, so its words are bounded.
func (z *zygote) receive() (reply zygoteReply, fds []int, err error) {
	payload, oob := make([]byte, agentapi.MaxMessage), make([]byte, syscall.CmsgSpace(4*4))
	n, oobn, flags, _, err := z.conn.ReadMsgUnix(payload, oob)
	if err != nil {
		return reply, nil, err
	}
	if n == 0 {
		return reply, nil, io.EOF
	}
	if messages, perr := syscall.ParseSocketControlMessage(oob[:oobn]); perr == nil {
		for _, m := range messages {
			if got, rerr := syscall.ParseUnixRights(&m); rerr == nil {
				fds = append(fds, got...)
			}
		}
	}
	if flags&(syscall.MSG_TRUNC|syscall.MSG_CTRUNC) != 0 {
		err = errors.New("a message was cut off")
	} else {
		err = json.Unmarshal(payload[:n], &reply)
	}
	if err != nil {
		agentapi.CloseDescriptors(fds)
		return reply, nil, err
	}
	return reply, fds, nil
}

// hear passes on what it tells until it ends.
func (z *zygote) hear() {
	for {
		reply, fds, err := z.receive()
		if err != nil {
			break
		}
		z.mu.Lock()
		switch reply.Type {
		case "forked", "failed":
			answer := forked{pidfd: -1, err: errors.New(reply.Error)}
			if reply.Type == "forked" && len(fds) == 1 {
				answer, fds = forked{pidfd: fds[0]}, nil
			}
			if asker := z.waiting[reply.Token]; asker != nil {
				delete(z.waiting, reply.Token)
				asker <- answer
			} else if answer.err == nil {
				syscall.Close(answer.pidfd)
			}
		case "exit":
			if heard := z.living[reply.Token]; heard != nil {
				delete(z.living, reply.Token)
				heard(reply)
			}
		}
		z.mu.Unlock()
		agentapi.CloseDescriptors(fds)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	close(z.gone)
	z.conn.Close()
	for token, asker := range z.waiting {
		delete(z.waiting, token)
		asker <- forked{pidfd: -1, err: errZygoteDied}
	}
}

func (z *zygote) dead() bool {
	select {
	case <-z.gone:
		return true
	default:
		return false
	}
}

// newborn is a kernel that waits on its socket to hear whose it is.
type newborn struct {
	zygote *zygote
	token  string
	fds    [agentapi.KernelDescriptors]int // socket, stdout, stderr, pidfd; all −1 once given away
}

// fork asks for a kernel; ahead when nobody waits for it.
func (z *zygote) fork(ctx context.Context, ahead bool) (*newborn, error) {
	ours, theirs, err := kernelEnds()
	if err != nil {
		return nil, err
	}
	defer agentapi.CloseDescriptors(theirs)
	answer := make(chan forked, 1)
	z.mu.Lock()
	if z.dead() {
		z.mu.Unlock()
		agentapi.CloseDescriptors(ours)
		return nil, errZygoteDied
	}
	z.next++
	token := "k" + strconv.Itoa(z.next)
	z.waiting[token] = answer
	err = z.send(zygoteOrder{Op: "fork", Token: token, UID: z.user.uid, GID: z.user.gid, Cwd: z.cwd, Ahead: ahead}, theirs...)
	z.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, forkFor)
	defer cancel()
	if err == nil {
		select {
		case got := <-answer:
			if got.err == nil {
				return &newborn{zygote: z, token: token, fds: [...]int{ours[0], ours[1], ours[2], got.pidfd}}, nil
			}
			err = got.err
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	z.forget(token)
	select {
	case late := <-answer: // in the same moment
		if late.err == nil {
			syscall.Close(late.pidfd)
		}
	default:
	}
	agentapi.CloseDescriptors(ours)
	return nil, err
}

func (z *zygote) forget(token string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	delete(z.waiting, token)
	delete(z.living, token)
}

// kernelEnds joins a kernel to the agent: a socket, and pipes for what it writes.
func kernelEnds() (ours, theirs []int, err error) {
	defer func() {
		if err != nil {
			agentapi.CloseDescriptors(append(ours, theirs...))
		}
	}()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs = append(ours, pair[0]), append(theirs, pair[1])
	for range 2 {
		var pipe [2]int
		if err := syscall.Pipe2(pipe[:], syscall.O_CLOEXEC); err != nil {
			return ours, theirs, err
		}
		ours, theirs = append(ours, pipe[0]), append(theirs, pipe[1])
	}
	return ours, theirs, nil
}

// settle tells a newborn whose it is and gives it to the agent under a name. What is one sandbox's alone goes by the kernel's own socket: the
// zygote's memory is every later kernel's.
func (n *newborn) settle(a *agent.Agent, name string, birth agentapi.KernelBirth) error {
	defer n.close()
	payload, err := json.Marshal(birth)
	if err != nil {
		return err
	}
	frame := make([]byte, agentapi.HeaderSize, agentapi.HeaderSize+len(payload))
	agentapi.PutHeader(frame, agentapi.FrameControl, len(payload))
	if err := writeAll(n.fds[0], append(frame, payload...)); err != nil {
		return fmt.Errorf("the kernel that waited has died: %w", err)
	}
	n.zygote.mu.Lock()
	n.zygote.living[n.token] = func(r zygoteReply) {
		go func() { // it ends with its one message
			exit := agentapi.KernelExit{Token: n.token, Code: r.Code, Signal: r.Signal}
			if r.Signal == "SIGKILL" {
				exit.Message, exit.OOM = a.OutOfMemory()
			}
			a.Exited(exit)
		}()
	}
	n.zygote.mu.Unlock()
	fds := n.fds
	n.fds = [...]int{-1, -1, -1, -1} // Adopt takes them over, whatever happens
	if err := a.Adopt(agentapi.Adoption{Name: name, Token: n.token}, fds[:]); err != nil {
		n.zygote.forget(n.token)
		return err
	}
	return nil
}

// close ends a newborn that nobody took: without its socket it ends by itself.
func (n *newborn) close() {
	for i, fd := range n.fds {
		if fd >= 0 {
			syscall.Close(fd)
			n.fds[i] = -1
		}
	}
}

// birthFor is how long a kernel may take to read whose it is.
const birthFor = 5

func writeAll(fd int, b []byte) error {
	limit := syscall.Timeval{Sec: birthFor}
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit); err != nil {
		return err
	}
	for len(b) > 0 {
		n, err := syscall.SendmsgN(fd, b, nil, nil, syscall.MSG_NOSIGNAL)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	none := syscall.Timeval{}
	return syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &none)
}
