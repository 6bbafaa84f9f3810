package agent

import (
	"fmt"
	"math/bits"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"unsafe"
)

// Capabilities by number, as in linux/capability.h.
const (
	capChown          = 0
	capDACOverride    = 1
	capFowner         = 3
	capFsetid         = 4
	capKill           = 5
	capSetgid         = 6
	capSetuid         = 7
	capNetBindService = 10
	capSysChroot      = 18
	capSysPtrace      = 19
	capAuditWrite     = 29
	capSetfcap        = 31
	capLast           = 63
)

// sudoCaps is what root inside a sandbox may at most do.
const sudoCaps = uint64(1<<capChown | 1<<capDACOverride | 1<<capFowner | 1<<capFsetid | 1<<capSetuid | 1<<capSetgid |
	1<<capSetfcap | 1<<capKill | 1<<capNetBindService | 1<<capSysChroot | 1<<capAuditWrite)

// agentCaps is one more: root that sudo made is weaker than the agent, and therefore may not trace it.
const agentCaps = sudoCaps | 1<<capSysPtrace

const (
	prSetDumpable = 4
	prCapbsetRead = 23
	prCapbsetDrop = 24
	capVersion3   = 0x20080522
)

// Harden makes the process fit to be PID 1 among code that nobody trusts: unreadable, with threads enough, and with no more
// rights than it needs. no_new_privs and seccomp were installed by whoever executed us.
func Harden() error {
	if err := giveUp(); err != nil {
		return err
	}
	makeThreads(spareThreads) // they are born with what is left: before, each would have to be told
	return nil
}

func giveUp() error {
	os.Clearenv()
	syscall.Umask(0o022)
	// Whatever else was left open belongs to no command. Ours are close-on-exec from birth. It cannot fail since Linux 5.11.
	_, _, _ = syscall.Syscall(sysCloseRange, channelFD, uintptr(^uint32(0)), closeRangeCloexec)
	forgetIgnored()
	// Handlers, not SIG_IGN: ignored signals would stay ignored in every command. Nobody reads the channel. Those of a
	// fault are among them for root inside, who can send them: the runtime dies of one that it was sent, unless somebody
	// wants it, and still takes its own to heart.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGILL, syscall.SIGABRT, syscall.SIGSYS,
		syscall.SIGTRAP, syscall.SIGSTKFLT, syscall.SIGPROF, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1,
		syscall.SIGUSR2, syscall.SIGPIPE, syscall.SIGALRM, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGWINCH,
		syscall.SIGPWR, syscall.SIGIO, syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGVTALRM)
	if fd, err := openScore(); err == nil {
		scoreFD = fd
	}
	if _, _, errno := syscall.Syscall(syscall.SYS_PRCTL, prSetDumpable, 0, 0); errno != 0 { // of the memory, not of a thread
		return fmt.Errorf("become undumpable: %w", errno)
	}
	if os.Geteuid() != 0 {
		return nil // has no capabilities to give away, and no way to others
	}
	if groups, err := syscall.Getgroups(); err != nil || len(groups) > 0 {
		if err := syscall.Setgroups(nil); err != nil {
			return fmt.Errorf("drop groups: %w", err)
		}
	}
	return dropCaps()
}

// forgetIgnored gives signals that whoever started us ignores their usual meaning back: an exec passes "ignored" on, to
// us and to every command. Go can change neither those of its runtime nor the two that C libraries keep for themselves.
func forgetIgnored() {
	const ignore = 1 // SIG_IGN
	for number := uintptr(1); number <= 64; number++ {
		var now, usual [4]uint64 // struct sigaction of the kernel: handler, flags, restorer, mask
		_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, number, 0, uintptr(unsafe.Pointer(&now[0])), 8, 0, 0)
		if errno == 0 && now[0] == ignore {
			_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, number, uintptr(unsafe.Pointer(&usual[0])), 0, 8, 0, 0)
		}
	}
}

func dropCaps() error {
	for c := uintptr(0); c <= capLast; c++ {
		set, _, errno := syscall.Syscall(syscall.SYS_PRCTL, prCapbsetRead, c, 0)
		if errno != 0 {
			break // past the last this kernel knows
		}
		if set == 0 || sudoCaps&(1<<c) != 0 {
			continue
		}
		if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, prCapbsetDrop, c, 0); errno != 0 {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, errno)
		}
	}
	// What whoever executed us has bequeathed is ours alone: a command by root would inherit it. Ambient ones are inheritable,
	// so they go with those.
	header := struct{ version, pid uint32 }{capVersion3, 0}
	var data [2]struct{ effective, permitted, inheritable uint32 }
	if _, _, errno := syscall.Syscall(syscall.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0); errno != 0 {
		return fmt.Errorf("read capabilities: %w", errno)
	}
	have := uint64(data[0].permitted) | uint64(data[1].permitted)<<32
	keep := have & agentCaps
	for i := range data {
		word := uint32(keep >> (32 * i))
		data[i].effective, data[i].permitted, data[i].inheritable = word, word, 0
	}
	_, _, errno := syscall.AllThreadsSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0)
	runtime.KeepAlive(&header)
	runtime.KeepAlive(&data)
	if errno != 0 {
		return fmt.Errorf("keep %d capabilities: %w", bits.OnesCount64(keep), errno)
	}
	return nil
}
