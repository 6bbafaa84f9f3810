#include "textflag.h"

// func forkGroup() (pid int)
//
// The child shares this stack, so it uses registers only. Signals are blocked meanwhile: a handler
// of Go would run in the child as if it were the thread that forked it.
TEXT ·forkGroup(SB), NOSPLIT, $16-8
	MOVD	$-1, R0
	MOVD	R0, all-8(SP)
	MOVD	$2, R0			// rt_sigprocmask(SIG_SETMASK, &all, &old, 8)
	MOVD	$all-8(SP), R1
	MOVD	$old-16(SP), R2
	MOVD	$8, R3
	MOVD	$135, R8
	SVC

	MOVD	$0x4f00, R0		// clone: VFORK | SIGHAND | FILES | FS | VM, and no signal at the end
	MOVD	ZR, R1
	MOVD	ZR, R2
	MOVD	ZR, R3
	MOVD	ZR, R4
	MOVD	$220, R8
	SVC
	CBNZ	R0, parent

	MOVD	ZR, R0			// setpgid(0, 0)
	MOVD	ZR, R1
	MOVD	$154, R8
	SVC
	MOVD	ZR, R0			// exit_group(0)
	MOVD	$94, R8
	SVC
	BRK

parent:
	MOVD	R0, R19
	MOVD	$2, R0			// rt_sigprocmask(SIG_SETMASK, &old, nil, 8)
	MOVD	$old-16(SP), R1
	MOVD	ZR, R2
	MOVD	$8, R3
	MOVD	$135, R8
	SVC
	MOVD	R19, pid+0(FP)
	RET
