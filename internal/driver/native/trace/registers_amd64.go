package trace

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// registers of a process.
type registers struct{ unix.PtraceRegs }

func (r *registers) get(pid int) error {
	return regset(unix.PTRACE_GETREGSET, pid, unsafe.Pointer(r), unsafe.Sizeof(*r))
}

func (r *registers) set(pid int) error {
	return regset(unix.PTRACE_SETREGSET, pid, unsafe.Pointer(r), unsafe.Sizeof(*r))
}

// parked tells whether it waits in ppoll for nothing.
func (r *registers) parked() bool {
	return r.Orig_rax == unix.SYS_PPOLL && r.Rdi == 0 && r.Rsi == 0 && r.Rdx == 0
}

func (r *registers) kept() uint64 { return r.Rbx }

const architecture = unix.AUDIT_ARCH_X86_64

const callLength = 2 // of the instruction

// order makes the call at which the process is parked another.
func (r *registers) order(number uintptr, args []uintptr) {
	r.Rip -= callLength
	r.Rax, r.Orig_rax = uint64(number), ^uint64(0) // no call is to be begun again
	for i, to := range []*uint64{&r.Rdi, &r.Rsi, &r.Rdx, &r.R10, &r.R8, &r.R9} {
		*to = 0
		if i < len(args) {
			*to = uint64(args[i])
		}
	}
}

func (r *registers) result() int64 { return int64(r.Rax) }

func (r *registers) start(at, stack, arg uint64) {
	r.Rip, r.Rsp, r.Rbp, r.Rdi, r.Orig_rax = at, stack-8, 0, arg, ^uint64(0) // as after a call
}

// passTrap makes it go on behind a trap: it does.
func (r *registers) passTrap(int) error { return nil }
