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
	return r.Regs[8] == unix.SYS_PPOLL && r.Regs[1] == 0 && r.Regs[2] == 0
}

func (r *registers) kept() uint64 { return r.Regs[19] }

const architecture = unix.AUDIT_ARCH_AARCH64

const trapLength = 4 // of the instruction

// order makes the call at which the process is parked another. Here the host has it begin again before it stops.
func (r *registers) order(number uintptr, args []uintptr) {
	r.Regs[8] = uint64(number)
	for i := range 6 {
		r.Regs[i] = 0
		if i < len(args) {
			r.Regs[i] = uint64(args[i])
		}
	}
}

func (r *registers) result() int64 { return int64(r.Regs[0]) }

func (r *registers) start(at, stack, arg uint64) {
	r.Pc, r.Sp, r.Regs[29], r.Regs[30], r.Regs[0] = at, stack, 0, 0, arg
}

// passTrap makes it go on behind a trap: the processor leaves it there.
func (r *registers) passTrap(pid int) error {
	r.Pc += trapLength
	return r.set(pid)
}
