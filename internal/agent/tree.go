package agent

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// pids lists the processes that are visible here.
func pids() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var list []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			list = append(list, pid)
		}
	}
	return list
}

// procStat is what /proc tells of a process.
type procStat struct {
	state               byte
	parent, group, sess int
	cpu                 time.Duration // used so far
}

// clockTick is the unit of times in /proc, on every architecture that Go supports.
const clockTick = 10 * time.Millisecond

func readStat(pid int) (procStat, bool) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procStat{}, false
	}
	// The name in parentheses is the process's own to choose: the fields follow its last parenthesis.
	at := bytes.LastIndexByte(raw, ')')
	if at < 0 {
		return procStat{}, false
	}
	f := bytes.Fields(raw[at+1:])
	if len(f) < 4 {
		return procStat{}, false
	}
	num := func(b []byte) int { n, _ := strconv.Atoi(string(b)); return n }
	st := procStat{state: f[0][0], parent: num(f[1]), group: num(f[2]), sess: num(f[3])}
	if len(f) > 12 {
		st.cpu = time.Duration(num(f[11])+num(f[12])) * clockTick // utime, stime
	}
	return st, true
}

// tagged reports whether a process carries our variable with that value.
func tagged(pid int, tag string) bool {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	want := []byte(runVariable + "=" + tag)
	for v := range bytes.SplitSeq(raw, []byte{0}) {
		if bytes.Equal(v, want) {
			return true
		}
	}
	return false
}

// tree is everything a run has started: what descends from root, what shares its session or group where these are not the
// agent's too, and what carries its tag. Root is zero once it has been collected, because its number may then be another's.
type tree struct {
	tag  string
	root func() int
	self int
}

// victim is a process that is held by descriptor, so that its number cannot become another's under us.
type victim struct{ pid, fd int }

// scan adds to found what belongs to the tree and was not there.
func (t *tree) scan(found map[int]victim) (added int) {
	root := t.root()
	own, _ := readStat(t.self)
	stats := map[int]procStat{}
	for _, pid := range pids() {
		if st, ok := readStat(pid); ok && pid != t.self && pid != 1 {
			stats[pid] = st
		}
	}
	for pid, st := range stats {
		if _, seen := found[pid]; seen || st.state == 'Z' || st.state == 'X' {
			continue
		}
		fd, err := pidfdOpen(pid)
		if err != nil {
			continue
		}
		// Asked again now that the descriptor is held: a recycled number would not match.
		if now, ok := readStat(pid); !ok || now.state == 'Z' || !t.belongs(pid, root, own, stats) {
			syscall.Close(fd)
			continue
		}
		found[pid] = victim{pid, fd}
		added++
	}
	return added
}

func (t *tree) belongs(pid, root int, own procStat, stats map[int]procStat) bool {
	if first, ok := stats[root]; ok {
		st := stats[pid]
		if pid == root || st.sess == first.sess && st.sess != own.sess || st.group == first.group && st.group != own.group {
			return true
		}
		for up, hops := st.parent, 0; up > 1 && hops < 1024; hops++ {
			if up == root {
				return true
			}
			up = stats[up].parent
		}
	}
	return t.tag != "" && tagged(pid, t.tag)
}

// signal sends to all of the tree as it is now, to the oldest first: a shell that outlives what it waits for by a moment goes
// on with its next command.
func (t *tree) signal(sig syscall.Signal) {
	found := map[int]victim{}
	t.scan(found)
	root := t.root()
	for _, v := range slices.SortedFunc(maps.Values(found), func(x, y victim) int { return rank(x.pid, root) - rank(y.pid, root) }) {
		_ = pidfdSignal(v.fd, sig, 0) // it fails for those that have ended, here and below
		syscall.Close(v.fd)
	}
}

// rank puts a tree's root before everything else.
func rank(pid, root int) int {
	if pid == root {
		return 0
	}
	return pid
}

// maxPasses bounds a fight against something that forks faster than we look; the sandbox's own end is the last resort.
const maxPasses = 100

// kill ends all of the tree. It stops everything first, so that nothing forks while we look, then kills and waits.
func (t *tree) kill() {
	for range maxPasses {
		found := map[int]victim{}
		for range maxPasses {
			if t.scan(found) == 0 {
				break
			}
			for _, v := range found {
				_ = pidfdSignal(v.fd, syscall.SIGSTOP, 0)
			}
		}
		if len(found) == 0 {
			return
		}
		for _, v := range found {
			_ = pidfdSignal(v.fd, syscall.SIGKILL, 0)
		}
		awaitEnd(found)
	}
}

// awaitEnd returns when all victims have ended, or a second has passed: one that hangs in the kernel is not waited for.
func awaitEnd(found map[int]victim) {
	deadline := time.Now().Add(time.Second)
	for _, v := range found {
		left := syscall.NsecToTimespec(int64(max(0, time.Until(deadline))))
		_, _ = poll([]pollfd{{fd: int32(v.fd), events: pollIn}}, &left) // one that does not end is scanned for again
		syscall.Close(v.fd)
	}
}
