package agent

import (
	"bufio"
	"cmp"
	"errors"
	"io"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// user is somebody who lives in the sandbox.
type user struct {
	name   string
	uid    int
	gid    int
	groups []int
	home   string
	shell  string
}

// user looks up who somebody is inside the sandbox: a name or a uid, with ":" and a group or without; empty is the sandbox's own
// user.
func (a *Agent) user(name string) (user, error) {
	if name == "" {
		name = a.cfg.Boot.User
	}
	if (!a.cfg.PID1 || a.alone()) && (name == "" || name == a.cfg.Boot.User) {
		return a.self(), nil
	}
	if name == "" {
		name = "user"
	}
	u, err := lookupAccount(name)
	if err != nil {
		return user{}, err
	}
	if u.uid != a.uid && a.uid != 0 {
		return user{}, fault.New(fault.Denied, "this sandbox cannot become the user %q", name)
	}
	return u, nil
}

// alone reports whether the agent is PID 1 and not root: then the one user of the sandbox is its own, whatever name the image has for it.
func (a *Agent) alone() bool { return a.cfg.PID1 && a.uid != 0 }

// self is the user of an agent that has no other: whoever runs it, with a home of its own.
func (a *Agent) self() user {
	id := strconv.Itoa(a.uid)
	u, ok := lookupUser(id)
	if !ok {
		u = user{name: id, uid: a.uid, gid: os.Getgid(), shell: "/bin/sh"}
	}
	if u.name == id && a.alone() { // no name of the image's
		u.name, u.gid = cmp.Or(a.cfg.Boot.User, id), os.Getgid()
	}
	if a.cfg.Home != "" {
		u.home = a.cfg.Home
	}
	return u
}

func (a *Agent) account(params agentapi.AccountParams) (agentapi.Account, error) {
	u, err := a.user(params.User)
	if err != nil {
		return agentapi.Account{}, err
	}
	return agentapi.Account{
		Name: u.name, UID: u.uid, GID: u.gid, Home: u.home, Workdir: a.workdir(u), Env: a.cfg.Boot.Env, Environ: a.environment(u),
	}, nil
}

// makeWorkdir makes the working directory that an image names and does not have, for its user.
func (a *Agent) makeWorkdir() {
	dir := a.cfg.Boot.Workdir
	if !a.cfg.PID1 || !path.IsAbs(dir) {
		return
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		return
	}
	// One that cannot be made, below a file perhaps, is as good as none: workdir says where commands are then.
	if os.MkdirAll(dir, 0o755) != nil {
		return
	}
	if u, err := a.user(""); err == nil {
		_ = os.Chown(dir, u.uid, u.gid)
	}
}

func (a *Agent) workdir(u user) string {
	for _, dir := range []string{a.cfg.Boot.Workdir, u.home} {
		var st syscall.Stat_t
		if dir != "" && syscall.Stat(dir, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			return dir
		}
	}
	return "/"
}

// lookupAccount finds a user, in a group of its own choice where one is named: then it is in no other.
func lookupAccount(account string) (user, error) {
	name, group, grouped := strings.Cut(account, ":")
	u, ok := lookupUser(name)
	if !ok {
		return user{}, fault.New(fault.NotFound, "there is no user %q in the sandbox", name)
	}
	if !grouped {
		return u, nil
	}
	gid, ok := lookupGroup(group)
	if !ok {
		return user{}, fault.New(fault.NotFound, "there is no group %q in the sandbox", group)
	}
	u.gid, u.groups = gid, []int{gid}
	return u, nil
}

func lookupUser(name string) (user, bool) {
	uid, byUID := parseID(name)
	var found user
	ok := false
	eachLine("/etc/passwd", 7, func(f []string) bool {
		u, uok := passwdUser(f)
		if uok && (f[0] == name || byUID && u.uid == uid) {
			found, ok = u, true
		}
		return !ok
	})
	switch {
	case ok:
	case byUID && uid == 0:
		found = user{name: "root", home: "/root", shell: "/bin/sh"}
	case byUID: // images are made for runtimes that give it root's group
		found = user{name: name, uid: uid, home: "/", shell: "/bin/sh"}
	case name == "root": // an image without /etc/passwd still has root
		found = user{name: "root", home: "/root", shell: "/bin/sh"}
	default:
		return user{}, false
	}
	found.groups = groupsOf(found)
	return found, true
}

func passwdUser(f []string) (user, bool) {
	uid, uok := parseID(f[2])
	gid, gok := parseID(f[3])
	u := user{name: f[0], uid: uid, gid: gid, home: f[5], shell: f[6]}
	if u.home == "" {
		u.home = "/"
	}
	if u.shell == "" {
		u.shell = "/bin/sh"
	}
	return u, uok && gok
}

// maxGroups is what the kernel accepts from us; /etc/group is the sandbox's to write.
const maxGroups = 1024

func groupsOf(u user) []int {
	groups := []int{u.gid}
	eachLine("/etc/group", 4, func(f []string) bool {
		gid, ok := parseID(f[2])
		if !ok || gid == u.gid {
			return true
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if member == u.name {
				groups = append(groups, gid)
				break
			}
		}
		return len(groups) < maxGroups
	})
	return groups
}

func lookupGroup(name string) (int, bool) {
	if gid, ok := parseID(name); ok {
		return gid, true
	}
	found := -1
	eachLine("/etc/group", 4, func(f []string) bool {
		if gid, ok := parseID(f[2]); ok && f[0] == name {
			found = gid
		}
		return found < 0
	})
	return found, found >= 0
}

// names maps ids to names for as long as one operation lasts.
type names struct{ users, groups map[int]string }

func loadNames() *names {
	n := &names{users: map[int]string{}, groups: map[int]string{}}
	collect := func(path string, fields int, into map[int]string) {
		eachLine(path, fields, func(f []string) bool {
			if id, ok := parseID(f[2]); ok {
				if _, seen := into[id]; !seen {
					into[id] = f[0]
				}
			}
			return len(into) < 65536
		})
	}
	collect("/etc/passwd", 7, n.users)
	collect("/etc/group", 4, n.groups)
	return n
}

func parseID(s string) (int, bool) {
	id, err := strconv.ParseUint(s, 10, 32)
	if err != nil || id == 1<<32-1 {
		return 0, false
	}
	return int(id), true
}

// eachLine calls f with the fields of each line of a colon-separated file. The sandbox may have put anything there:
// only a regular file is read, and only so much of it.
func eachLine(path string, fields int, f func([]string) bool) {
	fd, err := openRegular(path)
	if err != nil {
		return
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	scanner := bufio.NewScanner(io.LimitReader(file, 4<<20))
	for scanner.Scan() {
		parts := strings.Split(scanner.Text(), ":")
		if len(parts) >= fields && !f(parts) {
			return
		}
	}
}

// as does f with the file rights of u, on this thread only. The thread's capabilities over files go and come back with
// its fsuid, by the kernel's own rule.
func (a *Agent) as(u user, f func() error) error {
	if u.uid == a.uid {
		return f()
	}
	runtime.LockOSThread()
	err := setGroups(u.groups)
	if err == nil {
		err = setFS(u.uid, u.gid)
	}
	if err == nil {
		err = f()
	}
	if setFS(a.uid, os.Getgid()) == nil && setGroups(nil) == nil {
		runtime.UnlockOSThread() // else the thread stays locked and ends with its goroutine, never to serve another
	}
	return err
}

// setGroups sets this thread's supplementary groups. The agent itself has none, so most users need no call.
func setGroups(groups []int) error {
	if len(groups) <= 1 && !threadHasGroups() {
		return nil
	}
	ids := make([]uint32, len(groups)+1)
	for i, g := range groups {
		ids[i] = uint32(g)
	}
	_, _, errno := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&ids[0])), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func threadHasGroups() bool {
	n, _, _ := syscall.RawSyscall(syscall.SYS_GETGROUPS, 0, 0, 0)
	return int(n) > 0
}

func setFS(uid, gid int) error {
	set := func(call uintptr, id int) bool {
		_, _, _ = syscall.RawSyscall(call, uintptr(id), 0, 0)    // it never says that it failed: the next line asks
		now, _, _ := syscall.RawSyscall(call, ^uintptr(0), 0, 0) // −1 changes nothing and tells
		return int(now) == id
	}
	// The group first: a thread that is no longer root may not change it.
	if uid != 0 {
		if !set(syscall.SYS_SETFSGID, gid) || !set(syscall.SYS_SETFSUID, uid) {
			return fault.New(fault.Denied, "the agent cannot act as uid %d", uid)
		}
		return nil
	}
	if !set(syscall.SYS_SETFSUID, uid) || !set(syscall.SYS_SETFSGID, gid) {
		return fault.New(fault.Internal, "the agent cannot become itself again")
	}
	return nil
}
