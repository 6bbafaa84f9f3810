package agent

import "syscall"

// waitClone selects children that send no signal when they end (__WCLONE).
const waitClone = 0x80000000

// forkIdle forks a child that ends at once. It returns the child's number, or a negative errno. The
// child has the number, and the group that it is put into, until it is collected.
func forkIdle() (pid int)

// newGroup makes an empty process group and gives its number; done lets go of it. The group stays as
// long as it has other members.
//
// A command joins the group instead of leading one. setsid(2) refuses the leader of a group, so
// setsid(1) would fork there, and the command that was asked for would run on as an orphan. A group of
// its own keeps kill(0) of a command away from the agent and from other commands.
//
// The child sends no SIGCHLD, and wait4 without __WCLONE does not see it: the reaper never takes it.
// The parent makes its group, so it need not wait until the child has run.
func newGroup() (group int, done func(), err error) {
	pid := forkIdle()
	if pid < 0 {
		return 0, nil, syscall.Errno(-pid)
	}
	done = func() {
		_ = syscall.Kill(pid, syscall.SIGKILL) // root of the sandbox may have stopped it: it would never end
		_, _ = retry(func() (int, error) { return syscall.Wait4(pid, nil, waitClone, nil) })
	}
	if err := syscall.Setpgid(pid, 0); err != nil {
		done()
		return 0, nil, err
	}
	return pid, done, nil
}
