package agent

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// runVariable tags what a run starts, so that all of it can be found again however it detached itself.
const runVariable = "COVE_RUN"

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// brokerDir holds our sudo inside the sandbox.
const brokerDir = "/run/cove/bin"

func newID(prefix string) string { return fmt.Sprintf("%s-%016x", prefix, rand.Uint64()) }

// command is a process about to be started.
type command struct {
	argv   []string
	env    map[string]string
	clean  bool
	cwd    string
	user   user
	tag    string // value of runVariable
	files  []uintptr
	tty    bool // descriptor 0 becomes the controlling terminal
	leads  bool // it leads a session of its own; one with a terminal does too
	limits agentapi.RunLimits
	own    bool // it is found by the sandbox's own PATH
	pidfd  *int
}

// environment is what every process of a user sees.
func (a *Agent) environment(u user) map[string]string {
	env := map[string]string{
		"PATH": defaultPath, "HOME": u.home, "USER": u.name, "LOGNAME": u.name, "SHELL": u.shell, "LANG": "C.UTF-8",
	}
	maps.Copy(env, a.cfg.Boot.Env)
	if a.cfg.Boot.Sudo && a.cfg.PID1 {
		env["PATH"] = brokerDir + ":" + env["PATH"]
	}
	return env
}

func (c *command) environ(a *Agent) (list []string, searchPath string, err error) {
	env := map[string]string{}
	if !c.clean {
		env = a.environment(c.user)
	}
	maps.Copy(env, c.env)
	if c.tag != "" {
		env[runVariable] = c.tag
	}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(env[k], "\x00") {
			return nil, "", fault.New(fault.Invalid, "environment variable %q has a name or value that no process can have", k)
		}
		list = append(list, k+"="+env[k])
	}
	searchPath = env["PATH"]
	if c.own {
		searchPath = a.environment(c.user)["PATH"]
	}
	if searchPath == "" {
		searchPath = defaultPath
	}
	return list, searchPath, nil
}

// start forks and executes; onExit is called once when it ends.
func (a *Agent) start(c command, onExit func(exit)) (int, error) {
	if len(c.argv) == 0 || c.argv[0] == "" {
		return 0, fault.New(fault.Invalid, "a command needs at least one word")
	}
	for _, arg := range c.argv {
		if strings.Contains(arg, "\x00") {
			return 0, fault.New(fault.Invalid, "an argument holds a NUL byte")
		}
	}
	env, searchPath, err := c.environ(a)
	if err != nil {
		return 0, err
	}
	dir, err := a.commandDir(c)
	if err != nil {
		return 0, err
	}
	file, err := findProgram(c.argv[0], searchPath)
	if err != nil {
		return 0, err
	}
	if c.own { // an interpreter looks for its home by its name and PATH, which may be another's
		c.argv = append([]string{file}, c.argv[1:]...)
	}
	file, argv, err := a.limited(file, c)
	if err != nil {
		return 0, err
	}
	attr := &syscall.ProcAttr{Dir: dir, Env: env, Files: c.files, Sys: &syscall.SysProcAttr{Setsid: c.leads || c.tty, Setctty: c.tty, PidFD: c.pidfd}}
	if c.user.uid != a.uid || a.cfg.PID1 && a.uid == 0 { // others cannot change who they are, and need not
		groups := make([]uint32, len(c.user.groups))
		for i, g := range c.user.groups {
			groups[i] = uint32(g)
		}
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(c.user.uid), Gid: uint32(c.user.gid), Groups: groups}
	}
	pid, err := a.reaper.start(func() (int, error) {
		defer a.sooner.fork()()
		if attr.Sys.Setsid {
			return syscall.ForkExec(file, argv, attr)
		}
		group, done, err := newGroup()
		if err != nil {
			return 0, err
		}
		defer done()
		attr.Sys.Setpgid, attr.Sys.Pgid = true, group
		return syscall.ForkExec(file, argv, attr)
	}, onExit)
	if err != nil {
		return 0, explain(err, c.argv[0])
	}
	return pid, nil
}

func (a *Agent) commandDir(c command) (string, error) {
	if c.cwd == "" {
		return a.workdir(c.user), nil
	}
	dir := absolute(c.cwd, c.user)
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		return "", explain(err, "working directory "+dir)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return "", fault.New(fault.Invalid, "working directory %s: is not a directory", dir)
	}
	return dir, nil
}

// findProgram searches as a shell does.
func findProgram(name, searchPath string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for dir := range strings.SplitSeq(searchPath, ":") {
		if dir == "" {
			dir = "."
		}
		file := path.Join(dir, name)
		var st syscall.Stat_t
		if syscall.Stat(file, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Mode&0o111 != 0 {
			return file, nil
		}
	}
	return "", fault.New(fault.NotFound, "%s: no such command", name)
}

// settleProgram puts another program in the place of one that is not there; where both are missing, it is the first that is missed.
func settleProgram(argv []string, instead string) []string {
	if instead == "" || len(argv) == 0 || isThere(argv[0]) || !isThere(instead) {
		return argv
	}
	return append([]string{instead}, argv[1:]...)
}

func isThere(p string) bool {
	var st syscall.Stat_t
	return syscall.Stat(p, &st) == nil
}

// limiterName is argv[0] of the agent's own binary when it sets limits on itself and becomes the command: limits must
// hold from the command's first instruction, and a fork in Go cannot set them.
const limiterName = "cove-limit"

func (a *Agent) limited(file string, c command) (string, []string, error) {
	l := c.limits
	if l == (agentapi.RunLimits{}) {
		return file, c.argv, nil
	}
	if l.CPUSeconds < 0 || l.MemoryBytes < 0 || l.OpenFiles < 0 {
		return "", nil, fault.New(fault.Invalid, "a limit cannot be negative")
	}
	if a.cfg.PID1 {
		// In the child /proc/self/exe is still this binary, wherever it came from.
		words := fmt.Sprintf("%d %d %d", l.CPUSeconds, l.MemoryBytes, l.OpenFiles)
		return "/proc/self/exe", append([]string{limiterName, words, file}, c.argv...), nil
	}
	script := ""
	if l.CPUSeconds > 0 {
		script += fmt.Sprintf("ulimit -S -t %d; ulimit -H -t %d; ", l.CPUSeconds, l.CPUSeconds+1) // a hard limit is never below the soft one
	}
	if l.MemoryBytes > 0 {
		script += fmt.Sprintf("ulimit -v %d; ", max(1, l.MemoryBytes>>10))
	}
	if l.OpenFiles > 0 {
		script += fmt.Sprintf("ulimit -n %d; ", l.OpenFiles)
	}
	return "/bin/sh", append([]string{"sh", "-c", script + `exec "$@"`, "sh", file}, c.argv[1:]...), nil
}

// limiter is the main function of limiterName: limits, program, argv.
func limiter(args []string) int {
	if len(args) < 4 {
		return 125
	}
	var cpu, memory, files uint64
	if _, err := fmt.Sscan(args[1], &cpu, &memory, &files); err != nil {
		return 125
	}
	set := func(which int, soft, hard uint64) {
		if soft > 0 {
			// What is refused is more than the sandbox itself may have, and then that limit holds.
			_ = syscall.Setrlimit(which, &syscall.Rlimit{Cur: soft, Max: hard})
		}
	}
	// The runtime has more address space than a run may get, so nothing may be allocated once that limit is set.
	debug.SetGCPercent(-1)
	file, err := syscall.BytePtrFromString(args[2])
	if err != nil {
		return 125
	}
	argv, err := syscall.SlicePtrFromStrings(args[3:])
	if err != nil {
		return 125
	}
	env, err := syscall.SlicePtrFromStrings(os.Environ())
	if err != nil {
		return 125
	}
	set(syscall.RLIMIT_NOFILE, files, files)
	set(syscall.RLIMIT_CPU, cpu, cpu+1) // SIGXCPU first: it can be told from other ends
	failed := []byte(args[3] + ": ")
	space := &syscall.Rlimit{Cur: memory, Max: memory}
	if memory > 0 {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, syscall.RLIMIT_AS, uintptr(unsafe.Pointer(space)), 0, 0, 0)
	}
	_, _, errno := syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(file)),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&env[0])))
	say := func(text []byte) {
		_, _, _ = syscall.RawSyscall(syscall.SYS_WRITE, 2, uintptr(unsafe.Pointer(&text[0])), uintptr(len(text)))
	}
	say(failed)
	why := errno.Error()
	say(unsafe.Slice(unsafe.StringData(why), len(why)))
	say(newline)
	if errno == syscall.ENOENT {
		return 127
	}
	return 126
}

var newline = []byte{'\n'}

func itoa(n int) string { return strconv.Itoa(n) }
