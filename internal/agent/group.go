package agent

import "syscall"

// waitClone selects children that send no signal when they end (__WCLONE).
const waitClone = 0x80000000

// forkGroup forks a child that makes a process group of its own number and ends at once. It returns
// the child's number, or a negative errno. The group is there until the child is collected, and then
// as long as it has other members.
//
// The parent waits for the child (CLONE_VFORK). A child beside its parent would mark the agent's
// memory as that of several processes, and each write of the agent's oom_score_adj would then look
// at every process of the host: 0.2 ms where there are 5,000, twice for each command.
func forkGroup() (pid int)

// newGroup makes an empty process group and gives its number; done lets go of it.
//
// A command joins the group instead of leading one. setsid(2) refuses the leader of a group, so
// setsid(1) would fork there, and the command that was asked for would run on as an orphan. A group of
// its own keeps kill(0) of a command away from the agent and from other commands.
//
// The child sends no SIGCHLD, and wait4 without __WCLONE does not see it: the reaper never takes it.
func newGroup() (group int, done func(), err error) {
	pid := forkGroup()
	if pid < 0 {
		return 0, nil, syscall.Errno(-pid)
	}
	return pid, func() {
		_, _ = retry(func() (int, error) { return syscall.Wait4(pid, nil, waitClone, nil) })
	}, nil
}
