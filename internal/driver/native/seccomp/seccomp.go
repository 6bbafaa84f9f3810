// Package seccomp writes the system call filters of sandboxes and zygotes: an allow-list as a balanced tree, so that
// the filter costs the same for every call and is cheap to install. It only computes programs; whoever execs installs.
package seccomp

import (
	"encoding/binary"
	"sort"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Offsets into struct seccomp_data, the same on amd64 and arm64 (both little-endian).
const (
	offNumber = 0
	offArch   = 4
	offArgs   = 16
)

func argLow(n int) uint32 { return uint32(offArgs + 8*n) }

// Return values of a filter.
const (
	retAllow = 0x7fff0000
	retErrno = 0x00050000
)

var (
	allow  = []bpf.Instruction{bpf.RetConstant{Val: retAllow}}
	eperm  = []bpf.Instruction{bpf.RetConstant{Val: retErrno | uint32(unix.EPERM)}}
	enosys = []bpf.Instruction{bpf.RetConstant{Val: retErrno | uint32(unix.ENOSYS)}}
	absent = []bpf.Instruction{bpf.RetConstant{Val: retErrno | uint32(unix.EPROTONOSUPPORT)}}
	// pretend answers success and does nothing.
	pretend = []bpf.Instruction{bpf.RetConstant{Val: retErrno}}
)

// Sandbox is the filter of the agent and of everything that it starts.
func Sandbox() []bpf.RawInstruction {
	return assemble(baseRules())
}

// Zygote is the filter of a zygote: Sandbox plus setns, with which it enters the sandboxes it is handed. It gives it
// nothing else: it has no capability, and owns no namespace but those of its own sandboxes.
func Zygote() []bpf.RawInstruction {
	rules := baseRules()
	rules[unix.SYS_SETNS] = allow
	return assemble(rules)
}

// Delta takes setns away again; a kernel installs it on top of the filter that it inherits.
func Delta() []bpf.RawInstruction {
	return raw([]bpf.Instruction{
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(unix.SYS_SETNS), SkipTrue: 1},
		allow[0], eperm[0],
	})
}

// Bytes is a program as the kernel takes it: an array of struct sock_filter.
func Bytes(program []bpf.RawInstruction) []byte {
	out := make([]byte, 0, 8*len(program))
	for _, ins := range program {
		out = binary.LittleEndian.AppendUint16(out, ins.Op)
		out = append(out, ins.Jt, ins.Jf)
		out = binary.LittleEndian.AppendUint32(out, ins.K)
	}
	return out
}

// rules says what becomes of each system call; a call without a rule does not exist (ENOSYS), which is how libraries
// expect an older kernel to answer.
type ruleSet map[int][]bpf.Instruction

func baseRules() ruleSet {
	rules := ruleSet{}
	for _, list := range [][]int{refused, refusedArch} {
		for _, nr := range list {
			rules[nr] = eperm
		}
	}
	for _, nr := range unknown {
		rules[nr] = enosys
	}
	for _, list := range [][]int{allowed, allowedArch} {
		for _, nr := range list {
			rules[nr] = allow
		}
	}
	rules[unix.SYS_CLONE] = cloneRule()
	rules[unix.SYS_SOCKET] = socketRule()
	rules[unix.SYS_SOCKETPAIR] = socketRule()
	rules[unix.SYS_PERSONALITY] = personalityRule()
	rules[unix.SYS_IOCTL] = ioctlRule()
	rules[unix.SYS_SETSOCKOPT] = sockoptRule()
	rules[unix.SYS_PRLIMIT64] = limitRule(1, 2)
	rules[unix.SYS_SETRLIMIT] = limitRule(0, 1)
	rules[unix.SYS_SYNC] = pretend // it would flush every file system of the host
	return rules
}

// newNamespaces are the flags of clone that make a namespace.
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

func cloneRule() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: newNamespaces, SkipTrue: 1},
		allow[0], eperm[0],
	}
}

// socketRule keeps to the families and protocols that programs need. Every other one is kernel code that unprivileged
// escapes were found in: AF_ALG, AF_PACKET, AF_VSOCK, AF_RXRPC, AF_KEY, netlink's xfrm, SCTP, MPTCP … Netlink says of its
// other protocols that there are none: useradd goes on without an audit log, and gives up where it is forbidden.
func socketRule() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_UNIX, SkipTrue: 15},     // → allow
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET, SkipTrue: 4},      // → type
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET6, SkipTrue: 3},     // → type
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_NETLINK, SkipFalse: 13}, // else → refuse
		bpf.LoadAbsolute{Off: argLow(2), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.NETLINK_ROUTE, SkipTrue: 10, SkipFalse: 12},
		bpf.LoadAbsolute{Off: argLow(1), Size: 4}, // type of an internet socket: without its flags, a stream or datagrams
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xf},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SOCK_STREAM, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SOCK_DGRAM, SkipFalse: 7},
		bpf.LoadAbsolute{Off: argLow(2), Size: 4}, // its protocol
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_TCP, SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_ICMP, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_ICMPV6, SkipFalse: 1},
		allow[0], eperm[0], absent[0],
	}
}

func personalityRule() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0x0, SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0x0008, SkipTrue: 3},      // UNAME26's neighbour: PER_LINUX32
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0x20000, SkipTrue: 2},     // UNAME26
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0x20008, SkipTrue: 1},     // both
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0xffffffff, SkipFalse: 1}, // ask
		allow[0], eperm[0],
	}
}

// ioctlRule refuses typing into a terminal on somebody's behalf (TIOCSTI, TIOCLINUX) and loading line disciplines.
func ioctlRule() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(1), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.TIOCSTI, SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: tiocLinux, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.TIOCSETD, SkipTrue: 1},
		allow[0], eperm[0],
	}
}

// sockoptRule refuses to turn a socket into something else: TCP_ULP (kernel TLS, espintcp) and UDP_ENCAP (ESP in UDP)
// lead to the code that page-cache writes were found in.
func sockoptRule() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(1), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SOL_TCP, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SOL_UDP, SkipTrue: 3},
		allow[0],
		bpf.LoadAbsolute{Off: argLow(2), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.TCP_ULP, SkipTrue: 3, SkipFalse: 2},
		bpf.LoadAbsolute{Off: argLow(2), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.UDP_ENCAP, SkipTrue: 1},
		allow[0], eperm[0],
	}
}

// limitRule keeps the limit on core dumps as it is, at one byte, and says that it was changed: at zero the kernel would
// still start a core dump handler where the host pipes dumps to one, as root and on memory that the sandbox arranged.
func limitRule(resource, limit int) []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(resource), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.RLIMIT_CORE, SkipTrue: 1},
		allow[0],
		bpf.LoadAbsolute{Off: argLow(limit), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 3},
		bpf.LoadAbsolute{Off: argLow(limit) + 4, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 1},
		allow[0], pretend[0],
	}
}

const tiocLinux = 0x541c

// span is a run of call numbers with the same rule, up to the next span.
type span struct {
	from int
	rule []bpf.Instruction
}

func assemble(rules ruleSet) []bpf.RawInstruction {
	numbers := make([]int, 0, len(rules))
	for nr := range rules {
		numbers = append(numbers, nr)
	}
	sort.Ints(numbers)
	spans := []span{{0, enosys}}
	push := func(from int, rule []bpf.Instruction) {
		last := &spans[len(spans)-1]
		switch {
		case same(last.rule, rule):
		case last.from == from:
			last.rule = rule
		default:
			spans = append(spans, span{from, rule})
		}
	}
	next := 0
	for _, nr := range numbers {
		if nr > next {
			push(next, enosys)
		}
		push(nr, rules[nr])
		next = nr + 1
	}
	push(next, enosys)

	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: Arch, SkipTrue: 1},
		eperm[0], // another instruction set would bring other numbers: i386 has socketcall
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
	}
	// x32 shares amd64's arch value and sets a high bit: such numbers are past every span and answer ENOSYS.
	return raw(append(program, tree(spans)...))
}

func same(a, b []bpf.Instruction) bool { return len(a) == 1 && len(b) == 1 && a[0] == b[0] }

// tree decides by halves. A conditional jump reaches 255 instructions; a longer way goes over an unconditional one.
func tree(spans []span) []bpf.Instruction {
	if len(spans) == 1 {
		return spans[0].rule
	}
	middle := len(spans) / 2
	left, right := tree(spans[:middle]), tree(spans[middle:])
	at := uint32(spans[middle].from)
	var out []bpf.Instruction
	if len(left) <= 255 {
		out = []bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: at, SkipTrue: uint8(len(left))}}
	} else {
		out = []bpf.Instruction{
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: at, SkipFalse: 1},
			bpf.Jump{Skip: uint32(len(left))},
		}
	}
	return append(append(out, left...), right...)
}

func raw(program []bpf.Instruction) []bpf.RawInstruction {
	out, err := bpf.Assemble(program)
	if err != nil {
		panic("seccomp: " + err.Error()) // a constant program that does not assemble is a defect of this file
	}
	return out
}
