package unpack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

// Jail is where a layer is unpacked.
type Jail struct {
	Program []string   // this program's own command that calls Main
	Blob    *os.File   // of the layer; read from its beginning, wherever it stands
	Tree    *os.File   // the directory it goes to: a mount that is attached nowhere, whose owner here is root
	Cgroup  []*os.File // by which the process joins its cgroups
	Base    int        // first of the host's ids that it has; nobody else has any of them
}

// ids is how many a sandbox has, and so a layer.
const ids = maxID

// deadline ends an unpacker whose file never ends.
const deadline = 30 * time.Minute

// maxAnswer bounds what is read of a process that has read a stranger's bytes.
const maxAnswer = 64 << 10

// Run unpacks a layer in a process of its own. When it returns, that is gone.
func Run(ctx context.Context, j Jail, r Request) (Result, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, deadline, fault.New(fault.Timeout, "a layer took longer than %v to unpack", deadline))
	defer cancel()
	blob, err := reopen(j.Blob)
	if err != nil {
		return Result{}, err
	}
	defer blob.Close()
	j.Blob = blob
	request, err := json.Marshal(r)
	if err != nil {
		return Result{}, err
	}
	mine, theirs, err := socketPair()
	if err != nil {
		return Result{}, err
	}
	defer mine.Close()
	out, errs := bounded{room: maxAnswer}, bounded{room: maxAnswer}
	cmd := j.command(ctx, string(request), theirs, &out, &errs)
	// The kernel ends the process when the thread ends that started it: so this thread is ours until then.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return Result{}, fmt.Errorf("start unpacker: %w", err)
	}
	if err := j.hand(mine, cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		return Result{}, errors.Join(err, cmd.Wait())
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return Result{}, context.Cause(ctx)
		}
		return Result{}, fault.Wrap(fault.Internal, fmt.Errorf("%w: %.2000s", err, errs.kept), "the layer could not be unpacked")
	}
	return decodeAnswer(out.kept, r)
}

// reopen gives a plain file anew, so that whoever gave it to us cannot change how it is read. We may read more than they: it
// must be open for reading.
func reopen(blob *os.File) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(blob.Fd()), &st); err != nil {
		return nil, err
	}
	flags, err := unix.FcntlInt(blob.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || flags&unix.O_PATH != 0 || flags&unix.O_ACCMODE == unix.O_WRONLY {
		return nil, fault.New(fault.Invalid, "a layer comes as a plain file that is open for reading")
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", blob.Fd()), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

func (j Jail) command(ctx context.Context, request string, orders *os.File, out, errs io.Writer) *exec.Cmd {
	argv := slices.Concat(j.Program, []string{stageEnter, request, strconv.Itoa(len(j.Cgroup))})
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // our own program
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = j.Blob, out, errs
	cmd.ExtraFiles = append([]*os.File{orders}, j.Cgroup...)
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: j.Base, Size: ids}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings: mapping, GidMappings: mapping, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, // root, of the new namespace
		Pdeathsig:  unix.SIGKILL, Setsid: true,
	}
	return cmd
}

// hand gives the process its tree, in which its ids are what they are in a layer.
func (j Jail) hand(orders *os.File, pid int) error {
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
	if err != nil {
		return err
	}
	defer userns.Close()
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC, Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(int(j.Tree.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("map ids of the layer: %w", err)
	}
	if err := unix.Sendmsg(int(orders.Fd()), []byte{'T'}, unix.UnixRights(int(j.Tree.Fd())), nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("give the unpacker its tree: %w", err)
	}
	return nil
}

// decodeAnswer believes nothing: who answers has read a stranger's bytes.
func decodeAnswer(text []byte, r Request) (Result, error) {
	var a answer
	if err := json.Unmarshal(text, &a); err != nil {
		return Result{}, fmt.Errorf("answer of the unpacker: %w", err)
	}
	if a.Kind != "" {
		if a.Detail == "" || a.Detail == a.Message {
			return Result{}, fault.New(a.Kind, "%s", a.Message)
		}
		return Result{}, fault.Wrap(a.Kind, errors.New(a.Detail), "%s", a.Message)
	}
	if a.Result.Bytes < 0 || a.Result.Bytes > r.MaxBytes || a.Result.Files < 0 || a.Result.Files > r.MaxFiles {
		return Result{}, fault.New(fault.Internal, "the unpacker answers what cannot be")
	}
	return a.Result, nil
}

func socketPair() (mine, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "orders"), os.NewFile(uintptr(fds[1]), "orders"), nil
}

// bounded keeps the beginning of what is written to it.
type bounded struct {
	kept []byte
	room int
}

func (b *bounded) Write(p []byte) (int, error) {
	keep := min(len(p), b.room)
	b.room -= keep
	b.kept = append(b.kept, p[:keep]...)
	return len(p), nil
}
