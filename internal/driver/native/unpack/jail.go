package unpack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/seccomp"
	"github.com/covehq/cove/internal/fault"
)

// The process is started twice. What belongs to a thread, its cgroups and the capabilities that it can ever have, the first
// changes on one thread and then becomes the second, all of whose threads have that from their first instruction. The second
// leaves every file but the tree behind and then reads.
const (
	stageEnter  = "enter"
	stageInside = "inside"
)

// The descriptors of the process, after standard input, which is the blob, and standard output, which takes the answer.
const (
	fdOrders = 3 // a socket: the tree comes by it
	fdCgroup = 4 // and above: files by which it joins its cgroups

	fdTree = 3 // of the second stage
)

// answer is what the process says at its end.
type answer struct {
	Result  Result     `json:"result"`
	Kind    fault.Kind `json:"kind,omitempty"` // empty: it went well
	Message string     `json:"message,omitempty"`
	Detail  string     `json:"detail,omitempty"`
}

// Main is the process: its arguments are a stage, a Request and how many cgroups it joins. It returns the exit status.
func Main(args []string, stderr io.Writer) int {
	err := errors.New("is started by the maker alone")
	switch {
	case len(args) == 3 && args[0] == stageEnter:
		err = enter(args[1], args[2])
	case len(args) == 2 && args[0] == stageInside:
		err = inside(args[1])
	}
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "cove unpack:", err)
		return 1
	}
	return 0
}

// insideEnv bounds the second stage's heap, and keeps its runtime from holding files of the host's cgroups open.
var insideEnv = []string{"GOMEMLIMIT=384MiB", "GOMAXPROCS=4", "GODEBUG=containermaxprocs=0,updatemaxprocs=0"}

// enter gives up what the second stage does not need and starts it; it returns only on failure.
func enter(request, cgroups string) error {
	runtime.LockOSThread()
	if os.Getuid() != 0 || os.Getpid() != 1 {
		return errors.New("is started by the maker alone, in namespaces of its own")
	}
	tree, err := receiveTree(fdOrders)
	if err != nil {
		return err
	}
	if err := joinCgroups(cgroups); err != nil {
		return err
	}
	if err := giveUp(); err != nil {
		return err
	}
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close descriptors: %w", err)
	}
	if err := unix.Dup3(tree, fdTree, 0); err != nil {
		return fmt.Errorf("keep tree: %w", err)
	}
	err = unix.Exec("/proc/self/exe", []string{"cove", "unpack", stageInside, request}, insideEnv)
	return fmt.Errorf("start again: %w", err)
}

// receiveTree waits for the directory that the layer goes to, as a mount of its own.
func receiveTree(socket int) (int, error) {
	word, control := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	n, cn, _, _, err := unix.Recvmsg(socket, word, control, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n != 1 {
		return -1, fmt.Errorf("the tree did not come: %w", errors.Join(err, io.ErrUnexpectedEOF))
	}
	messages, err := unix.ParseSocketControlMessage(control[:cn])
	if err != nil || len(messages) != 1 {
		return -1, fmt.Errorf("the tree did not come: %w", errors.Join(err, io.ErrUnexpectedEOF))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, fmt.Errorf("the tree did not come: %w", errors.Join(err, io.ErrUnexpectedEOF))
	}
	return fds[0], nil
}

func joinCgroups(count string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	for i := range n {
		if _, err := retry(func() (int, error) { return unix.Write(fdCgroup+i, []byte("0")) }); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	return nil
}

// workplace exists on every host. What is mounted there is seen by nobody else.
const workplace = "/sys"

func changeRoot(tree int) error {
	steps := []struct {
		name string
		do   func() error
	}{
		{"private mounts", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		{"mount tree", func() error { return unix.MoveMount(tree, "", unix.AT_FDCWD, workplace, unix.MOVE_MOUNT_F_EMPTY_PATH) }},
		{"enter tree", func() error { return unix.Chdir(workplace) }},
		{"pivot", func() error { return unix.PivotRoot(".", ".") }},
		{"leave old root", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
		{"change to root", func() error { return unix.Chdir("/") }},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// Capabilities that are left, over the files of the tree alone: to give them to whom the layer says. To make the tree the root
// takes one more.
const (
	kept  = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID
	bound = kept | 1<<unix.CAP_SYS_ADMIN
)

// Limits of the process; its cgroup bounds what it really uses.
const (
	maxAddresses   = 4 << 30
	maxDescriptors = 512
)

// giveUp takes everything away that the second stage does not need.
func giveUp() error {
	for c := range uintptr(64) {
		if bound>>c&1 == 1 {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // past the last capability of this kernel
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	for resource, limit := range map[int]uint64{unix.RLIMIT_AS: maxAddresses, unix.RLIMIT_NOFILE: maxDescriptors, unix.RLIMIT_CORE: 0} {
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return fmt.Errorf("limit: %w", err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	return nil
}

// inside unpacks standard input into the root directory and answers on standard output.
func inside(text string) error {
	var r Request
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil { // again: the exec may have cleared it
		return err
	}
	if err := changeRoot(fdTree); err != nil {
		return err
	}
	if err := dropCapabilities(); err != nil {
		return err
	}
	unix.Umask(0)
	root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Close(fdTree); err != nil {
		return err
	}
	if err := filter(); err != nil {
		return err
	}
	debug.SetGCPercent(400) // most of what it holds lives as long as it does
	var a answer
	// By offset: whoever gave us the file may use it meanwhile.
	a.Result, err = Layer(context.Background(), root, io.NewSectionReader(os.Stdin, 0, math.MaxInt64), r)
	if err != nil {
		a = answer{Kind: fault.KindOf(err), Message: fault.Message(err), Detail: fmt.Sprintf("%.2000s", err)}
	}
	return json.NewEncoder(os.Stdout).Encode(a)
}

// dropCapabilities leaves those that are needed, in every thread. A program that was linked with C cannot be sure of all its
// threads; there the filter alone stands before what the capability is for.
func dropCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{{Effective: kept, Permitted: kept}}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 && errno != unix.ENOTSUP {
		return fmt.Errorf("drop capabilities: %w", errno)
	}
	return nil
}

// filter leaves the few system calls that are needed, in every thread.
func filter() error {
	program := seccomp.Unpacker()
	raw := seccomp.Bytes(program)
	head := unix.SockFprog{Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&raw[0]))}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&head)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}
