package seccomp_test

import (
	"encoding/binary"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/seccomp"
)

const (
	allowed = 0x7fff0000
	eperm   = 0x00050000 | uint32(unix.EPERM)
	absent  = 0x00050000 | uint32(unix.EPROTONOSUPPORT)
	enosys  = 0x00050000 | uint32(unix.ENOSYS)
)

// ask runs a filter as the kernel would. The VM of x/net/bpf reads big-endian words, so the data is laid out that way.
func ask(t *testing.T, program []bpf.RawInstruction, arch uint32, nr int, args ...uint64) uint32 {
	t.Helper()
	instructions, ok := bpf.Disassemble(program)
	if !ok {
		t.Fatal("the filter does not disassemble")
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[0:], uint32(nr))
	binary.BigEndian.PutUint32(data[4:], arch)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[16+8*i:], uint32(a))
		binary.BigEndian.PutUint32(data[20+8*i:], uint32(a>>32))
	}
	got, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(got)
}

func TestSandboxFilter(t *testing.T) {
	for _, c := range []struct {
		claim string
		nr    int
		args  []uint64
		want  uint32
	}{
		{"files are read", unix.SYS_READ, nil, allowed},
		{"processes are forked", unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD)}, allowed},
		{"threads are made", unix.SYS_CLONE, []uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, allowed},
		{"no user namespace by clone", unix.SYS_CLONE, []uint64{unix.CLONE_NEWUSER | uint64(unix.SIGCHLD)}, eperm},
		{"no network namespace by clone", unix.SYS_CLONE, []uint64{unix.CLONE_NEWNET}, eperm},
		{"clone3 does not exist, so libc falls back", unix.SYS_CLONE3, nil, enosys},
		{"io_uring does not exist", unix.SYS_IO_URING_SETUP, nil, enosys},
		{"no unshare", unix.SYS_UNSHARE, []uint64{unix.CLONE_NEWUSER}, eperm},
		{"no setns", unix.SYS_SETNS, nil, eperm},
		{"no mount", unix.SYS_MOUNT, nil, eperm},
		{"no mount by the new calls", unix.SYS_FSOPEN, nil, eperm},
		{"no ptrace", unix.SYS_PTRACE, nil, eperm},
		{"no bpf", unix.SYS_BPF, nil, eperm},
		{"no keyrings", unix.SYS_KEYCTL, nil, eperm},
		{"no vmsplice", unix.SYS_VMSPLICE, nil, eperm},
		{"TCP sockets", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_STREAM, 0}, allowed},
		{"UDP sockets over IPv6", unix.SYS_SOCKET, []uint64{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDP}, allowed},
		{"unix sockets", unix.SYS_SOCKET, []uint64{unix.AF_UNIX, unix.SOCK_STREAM, 0}, allowed},
		{"unix socket pairs", unix.SYS_SOCKETPAIR, []uint64{unix.AF_UNIX, unix.SOCK_STREAM, 0}, allowed},
		{"route netlink", unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, allowed},
		{"no xfrm netlink", unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM}, absent},
		{"no netfilter netlink", unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, absent},
		{"no audit netlink", unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}, absent},
		{"no kernel crypto sockets", unix.SYS_SOCKET, []uint64{unix.AF_ALG, unix.SOCK_SEQPACKET, 0}, eperm},
		{"no packet sockets", unix.SYS_SOCKET, []uint64{unix.AF_PACKET, unix.SOCK_RAW, 0}, eperm},
		{"no vsock", unix.SYS_SOCKET, []uint64{unix.AF_VSOCK, unix.SOCK_STREAM, 0}, eperm},
		{"no rxrpc", unix.SYS_SOCKET, []uint64{unix.AF_RXRPC, unix.SOCK_DGRAM, 0}, eperm},
		{"no SCTP", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, eperm},
		{"no SCTP by its socket type", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_SEQPACKET | unix.SOCK_CLOEXEC, 0}, eperm},
		{"no DCCP by its socket type", unix.SYS_SOCKET, []uint64{unix.AF_INET6, 6, 0}, eperm},
		{"no raw sockets", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP}, eperm},
		{"flags of a socket type do not matter", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_DGRAM | unix.SOCK_NONBLOCK, 0}, allowed},
		{"no kernel AIO", unix.SYS_IO_SETUP, nil, enosys},
		{"sync is heard and not done", unix.SYS_SYNC, nil, 0x00050000},
		{"limits change", unix.SYS_PRLIMIT64, []uint64{0, unix.RLIMIT_NOFILE, 1 << 40}, allowed},
		{"the limit of core dumps is read", unix.SYS_PRLIMIT64, []uint64{0, unix.RLIMIT_CORE, 0, 5}, allowed},
		{"the limit of core dumps stays", unix.SYS_PRLIMIT64, []uint64{0, unix.RLIMIT_CORE, 1 << 40}, 0x00050000},
		{"no MPTCP", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, eperm},
		{"socket options", unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_SOCKET, unix.SO_REUSEADDR}, allowed},
		{"TCP options", unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_TCP, unix.TCP_NODELAY}, allowed},
		{"UDP options", unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_UDP, unix.UDP_CORK}, allowed},
		{"no upper layer protocols", unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_TCP, unix.TCP_ULP}, eperm},
		{"no encapsulation", unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_UDP, unix.UDP_ENCAP}, eperm},
		{"a window size is set", unix.SYS_IOCTL, []uint64{0, unix.TIOCSWINSZ}, allowed},
		{"no typing into a terminal", unix.SYS_IOCTL, []uint64{0, unix.TIOCSTI}, eperm},
		{"no line disciplines", unix.SYS_IOCTL, []uint64{0, unix.TIOCSETD}, eperm},
		{"the plain personality", unix.SYS_PERSONALITY, []uint64{0xffffffff}, allowed},
		{"no address layout switch", unix.SYS_PERSONALITY, []uint64{0x0040000}, eperm},
		{"a call of the future does not exist", 100000, nil, enosys},
	} {
		t.Run(c.claim, func(t *testing.T) {
			if got := ask(t, seccomp.Sandbox(), seccomp.Arch, c.nr, c.args...); got != c.want {
				t.Errorf("call %d%v: got %#x, want %#x", c.nr, c.args, got, c.want)
			}
		})
	}
}

func TestOtherInstructionSetsAreRefused(t *testing.T) {
	const i386 = 0x40000003
	if got := ask(t, seccomp.Sandbox(), i386, 102 /* socketcall */); got != eperm {
		t.Errorf("i386: got %#x", got)
	}
	if got := ask(t, seccomp.Sandbox(), seccomp.Arch, 0x40000000|unix.SYS_READ); got != enosys {
		t.Errorf("x32: got %#x", got)
	}
}

func TestZygoteDiffersBySetnsOnly(t *testing.T) {
	for nr := range 600 {
		sandbox, zygote, delta := ask(t, seccomp.Sandbox(), seccomp.Arch, nr), ask(t, seccomp.Zygote(), seccomp.Arch, nr), ask(t, seccomp.Delta(), seccomp.Arch, nr)
		if nr == unix.SYS_SETNS {
			if zygote != allowed || delta != eperm || sandbox != eperm {
				t.Errorf("setns: sandbox %#x, zygote %#x, delta %#x", sandbox, zygote, delta)
			}
			continue
		}
		if sandbox != zygote || delta != allowed {
			t.Errorf("call %d: sandbox %#x, zygote %#x, delta %#x", nr, sandbox, zygote, delta)
		}
	}
}

func TestProgramFits(t *testing.T) {
	if n := len(seccomp.Sandbox()); n > 600 {
		t.Errorf("%d instructions", n)
	}
	if got := len(seccomp.Bytes(seccomp.Delta())); got != 8*4 {
		t.Errorf("delta is %d bytes", got)
	}
}
