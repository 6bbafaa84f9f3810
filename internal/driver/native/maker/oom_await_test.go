package maker

import (
	"fmt"
	"os"
	"testing"
)

// lateLog counts a second kill whose records come while it is waited for.
type lateLog struct {
	log     *oomLog
	records []string
	polls   int
}

func (*lateLog) names() []string { return nil }

func (l *lateLog) kills(string) int {
	if l.polls++; l.polls%3 == 0 && len(l.records) > 0 {
		record := l.records[0]
		l.records = l.records[1:]
		l.log.hear(record)
	}
	return 2
}

func TestAwaitVictim_LateRecords(t *testing.T) {
	const killed = "3,2,3,-;Memory cgroup out of memory: Killed process %d (%s) total-vm:9kB, anon-rss:65536kB, file-rss:0kB, shmem-rss:0kB, UID:%d pgtables:1kB oom_score_adj:0\n"
	uid := uidBase(7) + 1000
	for name, c := range map[string]struct {
		process, want string
	}{
		"a name":  {"python3", "out of memory: the kernel killed python3, which used 64 MiB"},
		"no name": {"", "out of memory: the kernel killed a process"},
	} {
		t.Run(name, func(t *testing.T) {
			var told []string
			late := &lateLog{}
			late.log = newOOMLog("/cove-abc/", late, func(_ string, v victim) { told = append(told, v.String()) })
			var err error
			if late.log.file, err = os.Open(os.DevNull); err != nil { // a log that may still say something
				t.Fatal(err)
			}
			defer late.log.close()
			late.log.count("sb7", victim{process: "earlier", pid: 1})
			late.records = []string{
				"6,1,1,-;something else\n",
				fmt.Sprintf("6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/cove-abc/sb7,task=%s,pid=12,uid=%d\n", c.process, uid),
				fmt.Sprintf(killed, 12, c.process, uid),
			}
			v, ok := late.log.awaitVictim("sb7", kernelNameDelay)
			if got := v.String(); !ok || got != c.want {
				t.Errorf("the victim is %q (%v), want %q", got, ok, c.want)
			}
			if len(told) != 2 {
				t.Errorf("%q were told, want two victims", told)
			}
		})
	}
}
