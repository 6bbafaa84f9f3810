package seccomp_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/seccomp"
)

func TestUnpackerFilter(t *testing.T) {
	program := seccomp.Unpacker()
	for _, c := range []struct {
		claim string
		nr    int
		args  []uint64
		want  uint32
	}{
		{"files are made", unix.SYS_OPENAT2, nil, allowed},
		{"whiteouts are made", unix.SYS_MKNODAT, nil, allowed},
		{"threads are made", unix.SYS_CLONE, []uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, allowed},
		{"no process", unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD)}, eperm},
		{"no namespace", unix.SYS_CLONE, []uint64{unix.CLONE_THREAD | unix.CLONE_NEWUSER}, eperm},
		{"no clone3", unix.SYS_CLONE3, nil, enosys},
		{"no program", unix.SYS_EXECVE, nil, enosys},
		{"no program by descriptor", unix.SYS_EXECVEAT, nil, enosys},
		{"no socket", unix.SYS_SOCKET, []uint64{unix.AF_UNIX}, enosys},
		{"no mount", unix.SYS_MOUNT, nil, enosys},
		{"no moving of mounts", unix.SYS_MOVE_MOUNT, nil, enosys},
		{"no other root", unix.SYS_CHROOT, nil, enosys},
		{"no ioctl", unix.SYS_IOCTL, nil, enosys},
		{"no tracing", unix.SYS_PTRACE, nil, enosys},
		{"no other namespace", unix.SYS_SETNS, nil, enosys},
		{"no other identity", unix.SYS_SETRESUID, nil, enosys},
		{"no io_uring", unix.SYS_IO_URING_SETUP, nil, enosys},
		{"no bpf", unix.SYS_BPF, nil, enosys},
	} {
		if got := ask(t, program, seccomp.Arch, c.nr, c.args...); got != c.want {
			t.Errorf("%s: %#x, not %#x", c.claim, got, c.want)
		}
	}
	if got := ask(t, program, seccomp.Arch+1, unix.SYS_READ); got != eperm {
		t.Errorf("another instruction set: %#x", got)
	}
}
