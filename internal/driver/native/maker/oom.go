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
type oomLog struct {
	file   *os.File
	prefix string // of our cgroups, "/cove-x/"
	tell   func(group string, v victim)

	mu      sync.Mutex
	victims map[string]victim // by group name, the latest
}

type victim struct {
	process string
	pid     int
	rssKB   int64
	init    bool // it says that it was the sandbox's PID 1; pid says so too where the maker counts pids as the host does
}

// agentName is what people know the sandbox's PID 1 by.
const agentName = "cove-agent"

func (v victim) String() string {
	if v.rssKB > 0 {
		return fmt.Sprintf("out of memory: the kernel killed %s, which used %d MiB", v.process, v.rssKB>>10)
	}
	return fmt.Sprintf("out of memory: the kernel killed %s", v.process)
}

func followOOM(log *slog.Logger, prefix string, tell func(group string, v victim)) *oomLog {
	o := &oomLog{prefix: prefix, tell: tell, victims: map[string]victim{}}
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
				continue
			}
			return
		}
		o.hear(string(buf[:n]))
	}
}

var (
	oomTask   = regexp.MustCompile(`oom-kill:.*task_memcg=([^,]+),task=(.+),pid=(\d+),uid=(\d+)`)
	oomKilled = regexp.MustCompile(`Killed process (\d+) \(.*\).*anon-rss:(\d+)kB`)
)

// hear reads one record. Process names come from sandboxes: they are only ever shown.
func (o *oomLog) hear(record string) {
	if f := oomTask.FindStringSubmatch(record); f != nil {
		group, ok := strings.CutPrefix(f[1], o.prefix)
		if !ok {
			return
		}
		group, _, _ = strings.Cut(group, "/")
		pid, _ := strconv.Atoi(f[3])
		uid, _ := strconv.Atoi(f[4])
		o.mu.Lock()
		defer o.mu.Unlock()
		o.victims[group] = victim{process: strings.ToValidUTF8(f[2], "?"), pid: pid, init: f[2] == agentName && uid%idsPerSandbox == 0}
		return
	}
	if f := oomKilled.FindStringSubmatch(record); f != nil {
		pid, _ := strconv.Atoi(f[1])
		rss, _ := strconv.ParseInt(f[2], 10, 64)
		if group, v, ok := o.measured(pid, rss); ok {
			o.tell(group, v)
		}
	}
}

// measured adds what a victim used.
func (o *oomLog) measured(pid int, rssKB int64) (string, victim, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for group, v := range o.victims {
		if v.pid == pid {
			v.rssKB = rssKB
			o.victims[group] = v
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

// hearsay is how long the kernel's log may take to say what the count of a group says already.
const hearsay = 250 * time.Millisecond

// awaitVictim waits for the log when something is known to have been killed.
func (o *oomLog) awaitVictim(group string) (victim, bool) {
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		v, ok := o.victim(group)
		if ok || o.file == nil || time.Since(begun) > hearsay {
			return v, ok
		}
	}
}

// forget lets a group's name be used again.
func (o *oomLog) forget(group string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.victims, group)
}

func (o *oomLog) close() {
	if o.file != nil {
		o.file.Close()
	}
}
