package app

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// user is who a server becomes.
type user struct{ uid, gid int }

// ownID is the uid and gid of a server that nobody else is: no person, no service and no sandbox has it.
const ownID = 0x1ffe0000

// serverUser is who the server of a data directory is: the owner of its state, so that it stays the same; else whoever
// called sudo, so that their commands find the key; else an id of its own.
func serverUser(dataDir string) user {
	if uid := os.Geteuid(); uid != 0 {
		return user{uid, os.Getegid()}
	}
	var st unix.Stat_t
	if unix.Stat(stateDir(dataDir), &st) == nil && st.Uid != 0 {
		return user{int(st.Uid), int(st.Gid)}
	}
	uid, errU := strconv.Atoi(os.Getenv("SUDO_UID"))
	gid, errG := strconv.Atoi(os.Getenv("SUDO_GID"))
	if errU == nil && errG == nil && uid > 0 {
		return user{uid, gid}
	}
	return user{ownID, ownID}
}

// laterUID is who the server will be once it has dropped its privilege: whom the maker must listen to.
func laterUID(dataDir string) int {
	if unreachable(stateDir(dataDir)) != "" {
		return os.Geteuid() // no other user could be the server here
	}
	return serverUser(dataDir).uid
}

// dropPrivilege makes a root server an ordinary user without any capability, for good. Where that user could not reach
// the data directory, the server stays uid 0 and is left with nothing else that makes root.
func (s *Server) dropPrivilege() error {
	if os.Geteuid() != 0 {
		return nil
	}
	if s.cfg.ReadyFile != "" {
		h, err := startHerald(s.cfg.ReadyFile)
		if err != nil {
			return err
		}
		s.herald = h
		s.undo.add("dismiss herald", h.close)
	}
	to, state := serverUser(s.cfg.DataDir), stateDir(s.cfg.DataDir)
	if blocked := unreachable(state); blocked != "" {
		s.log.Warn("the server stays uid 0, without capabilities: an ordinary user cannot reach the data directory", "blocked_by", blocked)
		return dropPrivilege(nil)
	}
	if err := give(state, to); err != nil {
		return fmt.Errorf("give %s to uid %d: %w", state, to.uid, err)
	}
	return dropPrivilege(&to)
}

// unreachable is the first directory above one that others may not pass through.
func unreachable(dir string) string {
	for d := filepath.Dir(dir); ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return d
		}
		if d == filepath.Dir(d) {
			return ""
		}
	}
}

// give makes a directory and the files in it somebody's. It is root's and private until now: nobody can swap them.
func give(dir string, to user) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.Lchown(filepath.Join(dir, e.Name()), to.uid, to.gid); err != nil {
			return err
		}
	}
	return os.Lchown(dir, to.uid, to.gid)
}

// readableHere tells whether the people at this terminal can read a file that the server keeps for itself.
func readableHere(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && (os.Getenv("SUDO_UID") == "" || os.Getenv("SUDO_UID") == strconv.Itoa(int(st.Uid)))
}

// dropPrivilege leaves no capability in any set of any thread, and no program this one starts can win one back. With a
// user given, every thread becomes that user.
func dropPrivilege(to *user) error {
	if os.Geteuid() != 0 {
		return nil
	}
	// The bounding set goes first: dropping from it needs a capability.
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		if err := everyThread(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.EPERM) {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	if err := everyThread(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	if to != nil {
		if err := become(*to); err != nil {
			return err
		}
	}
	if err := everyThread(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // pid 0: the calling thread
	var none [2]unix.CapUserData
	if err := everyThread(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none[0])), 0); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	// Another process of this uid must not read keys out of this one's memory.
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// become changes the identity of every thread; the runtime sees to that.
func become(to user) error {
	if err := syscall.Setgroups([]int{}); err != nil {
		return fmt.Errorf("drop groups: %w", err)
	}
	if err := syscall.Setresgid(to.gid, to.gid, to.gid); err != nil {
		return fmt.Errorf("become gid %d: %w", to.gid, err)
	}
	if err := syscall.Setresuid(to.uid, to.uid, to.uid); err != nil {
		return fmt.Errorf("become uid %d: %w", to.uid, err)
	}
	return nil
}

// everyThread makes a system call that is about one thread on all of them. A binary with cgo cannot: it has threads that
// the runtime does not know.
func everyThread(call, a, b, c uintptr) error {
	_, _, errno := syscall.AllThreadsSyscall6(call, a, b, c, 0, 0, 0)
	switch errno {
	case 0:
		return nil
	case syscall.ENOTSUP:
		return errors.New("this binary was built with cgo and cannot drop privilege; build it with CGO_ENABLED=0")
	}
	return errno
}
