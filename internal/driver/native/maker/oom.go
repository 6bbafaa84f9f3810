package maker

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// oomLog remembers whom the kernel killed for lack of memory, from the kernel's own log: no other place names the
// victim. Without the log (no /dev/kmsg) the counters of the cgroup still tell that it happened.
//
// A kill has two records. The first names the group and is left out beyond ten kills in five seconds; the second has the
// victim's uid, which leads to the group too. Other makers of this host give out the same uids, so the group's own count must
// say that it lacks a victim. Records that were overwritten before they were read name nobody: then only the counts tell.
type oomLog struct {
	file   *os.File
	prefix string // of our cgroups, "/cove-x/"
	tell   func(group string, v victim)
	failed func() // hears that a loop device had an error
	groups oomGroups

	mu      sync.Mutex
	victims map[string]victim // by group name, the latest
	heard   map[string]int    // by group name: how many of its kills were told
}

// oomGroups are the groups of living sandboxes.
type oomGroups interface {
	names() []string
	kills(group string) int // for lack of memory, so far; zero: there is no such group
}

type victim struct {
	process string
	pid     int
	rssKB   int64
	half    bool // its second record has not come
	init    bool // it says that it was the sandbox's PID 1; pid says so too where the maker counts pids as the host does
}

// agentName is what people know the sandbox's PID 1 by.
const agentName = "cove-agent"

func (v victim) String() string {
	if v.process == "" {
		return "out of memory: the kernel killed a process"
	}
	if v.rssKB > 0 {
		return fmt.Sprintf("out of memory: the kernel killed %s, which used %d MiB", v.process, v.rssKB>>10)
	}
	return fmt.Sprintf("out of memory: the kernel killed %s", v.process)
}

func newOOMLog(prefix string, groups oomGroups, tell func(group string, v victim)) *oomLog {
	return &oomLog{prefix: prefix, groups: groups, tell: tell, victims: map[string]victim{}, heard: map[string]int{}}
}

func followOOM(log *slog.Logger, prefix string, groups oomGroups, tell func(group string, v victim), failed func()) *oomLog {
	o := newOOMLog(prefix, groups, tell)
	o.failed = failed
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		log.Warn("no kernel log: out-of-memory victims cannot be named", "error", err)
		return o
	}
	_, _ = unix.Seek(fd, 0, unix.SEEK_END)
	o.file = os.NewFile(uintptr(fd), "/dev/kmsg")
	go o.follow()
	return o
}

func (o *oomLog) follow() {
	buf := make([]byte, 8<<10)
	for {
		n, err := o.file.Read(buf)
		if err != nil {
			if errors.Is(err, unix.EPIPE) { // records were overwritten before we read them
				o.recount()
				if o.failed != nil { // the error of a disk may have been among them
					o.failed()
				}
				continue
			}
			return
		}
		o.hear(string(buf[:n]))
	}
}

var (
	oomTask   = regexp.MustCompile(`oom-kill:.*task_memcg=([^,]+),task=(.*),pid=(\d+),uid=(\d+)`)
	oomKilled = regexp.MustCompile(`Killed process (\d+) \((.*)\).*anon-rss:(\d+)kB(?:.* UID:(\d+))?`)
)

// hear reads one record. Process names come from sandboxes: they are only ever shown.
func (o *oomLog) hear(record string) {
	if o.failed != nil && loopError.MatchString(record) {
		o.failed()
		return
	}
	if f := oomTask.FindStringSubmatch(record); f != nil {
		group, ok := strings.CutPrefix(f[1], o.prefix)
		if !ok {
			return
		}
		group, _, _ = strings.Cut(group, "/")
		v := newVictim(f[2], f[3], f[4])
		v.half = true // and the group has not counted it yet
		o.mu.Lock()
		defer o.mu.Unlock()
		o.victims[group] = v
		return
	}
	if f := oomKilled.FindStringSubmatch(record); f != nil {
		v := newVictim(f[2], f[1], f[4])
		v.rssKB, _ = strconv.ParseInt(f[3], 10, 64)
		if group, named, ok := o.measured(v.pid, v.rssKB); ok {
			o.count(group, named)
		} else if group, ok := groupOf(f[4]); ok && o.lacks(group) {
			o.count(group, v)
		}
	}
}

// loopError is a record of an error of a loop device or of a file system on one. The text begins after the first semicolon,
// so that the name of a process, which a sandbox chooses, is not taken for one.
var loopError = regexp.MustCompile(`^[^;]*;(Buffer I/O error on dev loop\d|EXT4-fs error \(device loop\d|EXT4-fs warning \(device loop\d+\): ext4_end_bio|(I/O|critical [a-z ]+|[a-z ]+) error, dev loop\d)`)

func newVictim(process, pid, uid string) victim {
	v := victim{process: strings.ToValidUTF8(process, "?")}
	v.pid, _ = strconv.Atoi(pid)
	id, err := strconv.Atoi(uid)
	v.init = err == nil && process == agentName && id%idsPerSandbox == 0
	return v
}

// groupOf is the group of the sandbox to which a uid of the host belongs.
func groupOf(uid string) (string, bool) {
	id, err := strconv.Atoi(uid)
	if err != nil || id < firstBase || id >= uidBase(maxSlots) {
		return "", false
	}
	return groupName((id - firstBase) / idsPerSandbox), true
}

// count takes a kill that the group has counted as told. One whose records come late may have been told as nobody's before, so
// no more are told than there were.
func (o *oomLog) count(group string, v victim) {
	kills := o.groups.kills(group)
	o.mu.Lock()
	o.victims[group] = v
	o.heard[group] = min(o.heard[group]+1, kills)
	o.mu.Unlock()
	o.tell(group, v)
}

// lacks says whether a group has counted a kill that was not told.
func (o *oomLog) lacks(group string) bool {
	kills := o.groups.kills(group)
	o.mu.Lock()
	defer o.mu.Unlock()
	return kills > o.heard[group]
}

// recount tells of kills that were counted and whose records are lost, the second at least.
func (o *oomLog) recount() {
	for _, group := range o.groups.names() {
		if o.lacks(group) {
			o.count(group, o.unfinished(group))
		}
	}
}

// unfinished is a victim of which only the first record came; else nobody.
func (o *oomLog) unfinished(group string) victim {
	v, _ := o.victim(group)
	if !v.half {
		return victim{}
	}
	v.half = false
	return v
}

// measured adds what a victim used.
func (o *oomLog) measured(pid int, rssKB int64) (string, victim, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for group, v := range o.victims {
		if v.pid == pid {
			v.rssKB, v.half = rssKB, false
			return group, v, true
		}
	}
	return "", victim{}, false
}

func (o *oomLog) victim(group string) (victim, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	v, ok := o.victims[group]
	return v, ok
}

// How long the kernel's log may take to name what its group has counted as killed. It takes
// milliseconds, except on a busy host.
const (
	endNameDelay    = 25 * time.Second // for the cause of a sandbox's end
	kernelNameDelay = 10 * time.Second // for the end of a cell, which a client waits for
)

// awaitVictim waits for the log when something is known to have been killed. Where the log says
// nothing in time the victim has no name.
func (o *oomLog) awaitVictim(group string, delay time.Duration) (victim, bool) {
	begun := time.Now()
	for poll := time.Millisecond; o.lacks(group); poll = min(2*poll, 100*time.Millisecond) {
		if o.file == nil || time.Since(begun) > delay {
			return o.unfinished(group), true
		}
		time.Sleep(poll)
	}
	return o.victim(group)
}

// forget lets a group's name be used again.
func (o *oomLog) forget(group string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.victims, group)
	delete(o.heard, group)
}

func (o *oomLog) close() {
	if o.file != nil {
		o.file.Close()
	}
}
