package maker_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/driver/native/maker"
)

func TestPlanIsLaidOutAsTheShellReadsIt(t *testing.T) {
	source := filepath.Join(t.TempDir(), "size.c")
	shell, err := filepath.Abs("shell/shell.c")
	if err != nil {
		t.Fatal(err)
	}
	// A negative array size does not compile: the compiler itself compares.
	text := fmt.Sprintf("#include %q\nchar check[sizeof(struct plan) == %d ? 1 : -1];\n", shell, maker.PlanSize())
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("cc", "-ffreestanding", "-fsyntax-only", "-w", source).CombinedOutput()
	if err != nil {
		t.Errorf("struct plan is not %d bytes: %v\n%s", maker.PlanSize(), err, out)
	}
}

const (
	killLine = "4,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/cove-abc/sb7,task_memcg=/cove-abc/sb7,task=%s,pid=4711,uid=%d\n"
	rssLine  = "3,2,3,-;Memory cgroup out of memory: Killed process 4711 (x) total-vm:1290240kB, anon-rss:262144kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:1kB oom_score_adj:0\n"
)

func TestOOMLog(t *testing.T) {
	told := map[string]string{}
	l := maker.NewOOMLog("/cove-abc/", maker.Kills{"sb7": 1}, func(group, text string) { told[group] = text })
	l.Hear("6,1,1,-;something else\n")
	l.Hear(fmt.Sprintf(strings.Replace(killLine, "/cove-abc/sb7", "/docker/1", 2), "python3", 1000))
	if _, _, ok := l.Victim("1"); ok {
		t.Error("somebody else's victim was taken for ours")
	}
	l.Hear(fmt.Sprintf(killLine, "python3", 536871912))
	l.Hear(rssLine)
	text, init, ok := l.Victim("sb7")
	if want := "out of memory: the kernel killed python3, which used 256 MiB"; !ok || init || text != want || told["sb7"] != want {
		t.Errorf("got %q %t %t, told %q", text, init, ok, told["sb7"])
	}
	l.Hear(fmt.Sprintf(killLine, "cove-agent", 536870912))
	if _, init, _ := l.Victim("sb7"); !init {
		t.Error("PID 1 was not recognised")
	}
	l.Hear(fmt.Sprintf(killLine, "cove-agent", 536871912))
	if _, init, _ := l.Victim("sb7"); init {
		t.Error("a user's process with the agent's name passed for PID 1")
	}
}

// TestOOMLogWithoutTheFirstRecord: beyond ten kills in five seconds the kernel leaves out the record that names the group.
func TestOOMLogWithoutTheFirstRecord(t *testing.T) {
	var told []string
	kills := maker.Kills{}
	l := maker.NewOOMLog("/cove-abc/", kills, func(group, text string) { told = append(told, group+": "+text) })
	bare := func(process string, pid, uid int) {
		l.Hear(fmt.Sprintf("3,2,3,-;Memory cgroup out of memory: Killed process %d (%s) total-vm:9kB, anon-rss:65536kB, file-rss:0kB, shmem-rss:0kB, UID:%d pgtables:1kB oom_score_adj:0\n", pid, process, uid))
	}
	says := func(claim string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, told); diff != "" {
			t.Errorf("%s: %s", claim, diff)
		}
		told = nil
	}
	bare("python3", 11, maker.UID(7, 1000))
	says("a kill that the group has not counted is of another maker's sandbox")
	kills["sb7"]++
	bare("python3", 12, maker.UID(7, 1000))
	says("by the uid", "sb7: out of memory: the kernel killed python3, which used 64 MiB")
	bare("python3", 13, maker.UID(7, 1000))
	says("the same count explains one kill")
	if text, _, ok := l.Await("sb7"); !ok || !strings.Contains(text, "python3") {
		t.Errorf("the last victim: %q %t", text, ok)
	}
	kills["sb7"]++
	if text, _, _ := l.Await("sb7"); strings.Contains(text, "python3") {
		t.Errorf("an earlier victim passes for that of the last kill: %q", text)
	}
	kills["sb7"]--
	bare("python3", 14, 1000)
	bare("python3", 15, maker.UID(7, -1))
	bare("python3", 16, maker.UID(1<<20, 0))
	says("uids of no sandbox")
	kills["sb0"]++
	bare("cove-agent", 17, maker.UID(0, 0))
	says("the first uid", "sb0: out of memory: the kernel killed cove-agent, which used 64 MiB")
	if _, init, _ := l.Victim("sb0"); !init {
		t.Error("PID 1 was not recognised")
	}

	kills["sb7"]++
	l.Hear(fmt.Sprintf(killLine, "node", maker.UID(7, 1000)))
	l.Hear(rssLine)
	says("both records", "sb7: out of memory: the kernel killed node, which used 256 MiB")
	l.Lost()
	says("nothing was lost")
	kills["sb0"]++
	kills["sb7"]++
	l.Hear(fmt.Sprintf(killLine, "ruby", maker.UID(7, 1000)))
	l.Lost()
	says("records are lost", "sb0: out of memory: the kernel killed a process", "sb7: out of memory: the kernel killed ruby")
	l.Lost()
	says("it is told once")
	if text, init, ok := l.Await("sb0"); text != "out of memory: the kernel killed a process" || init || !ok {
		t.Errorf("%q %t %t", text, init, ok)
	}
	kills["sb0"]++
	if text, _, ok := l.Await("sb0"); text != "out of memory: the kernel killed a process" || !ok {
		t.Errorf("a silent log: %q %t", text, ok)
	}
	if _, _, ok := l.Await("sb9"); ok {
		t.Error("a victim where nobody was killed")
	}
}

func FuzzOOMRecord(f *testing.F) {
	f.Add(fmt.Sprintf(killLine, "a,pid=1,uid=0", 5))
	f.Add(rssLine)
	f.Fuzz(func(_ *testing.T, record string) {
		l := maker.NewOOMLog("/cove-abc/", maker.Kills{"sb7": 1}, func(string, string) {})
		l.Hear(record)
		l.Hear(rssLine)
	})
}

func TestJournal(t *testing.T) {
	j := maker.NewJournal()
	for _, id := range []string{"a", "b", "c"} {
		j.Add(id)
	}
	ids, next := j.From(0)
	if diff := cmp.Diff([]string{"a", "b", "c"}, ids); diff != "" {
		t.Error(diff)
	}
	j.Forget("b")
	j.Add("d")
	if ids, _ := j.From(next); !cmp.Equal(ids, []string{"d"}) {
		t.Errorf("a listener that heard three is told %v", ids)
	}
	if ids, _ := j.From(0); !cmp.Equal(ids, []string{"a", "c", "d"}) {
		t.Errorf("a new listener is told %v", ids)
	}
	j.Forget("a", "c", "d")
	if ids, _ := j.From(0); len(ids) != 0 {
		t.Errorf("forgotten ends are told: %v", ids)
	}
	for i := range 10_100 {
		j.Add(fmt.Sprint(i))
	}
	if ids, _ := j.From(0); len(ids) != 10_000 || ids[0] != "100" {
		t.Errorf("a journal that nobody reads holds %d ends from %s", len(ids), ids[0])
	}
}

func TestStopWantsToKnowWhich(t *testing.T) {
	t.Chdir(t.TempDir()) // where no maker runs
	for _, args := range [][]string{{"stop"}, {}} {
		if err := maker.Main(args, nil, nil); err == nil || !strings.Contains(err.Error(), "--data-dir is needed") {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestUnescape(t *testing.T) {
	if got := maker.Unescape(`/a\040b\134c`); got != `/a b\c` {
		t.Errorf("got %q", got)
	}
}

func TestPoolsThatNobodyUsesArePutAway(t *testing.T) {
	if got := maker.PutAway(maker.MaxPools, 0); len(got) != 0 {
		t.Errorf("put away although there is room: %v", got)
	}
	if diff := cmp.Diff([]string{"0", "2"}, maker.PutAway(maker.MaxPools+2, 1)); diff != "" {
		t.Error(diff)
	}
}
