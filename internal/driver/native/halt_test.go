package native_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

const bootID = "/proc/sys/kernel/random/boot_id"

// halt ends everything in a sandbox, as a cold pause does.
func (b *box) halt() {
	b.t.Helper()
	if err := b.agent.Halt(b.t.Context()); err != nil {
		b.t.Fatalf("halt: %v", err)
	}
}

func TestHaltEndsEverythingAndLeavesFiles(t *testing.T) {
	world.open(t)
	b := start(t)
	b.value("x = 41")
	// A daemon that left its session, a loop that has children as fast as it can, something in memory and on the disk.
	b.sh(`setsid sh -c 'while :; do sleep 0.01; done' >/dev/null 2>&1 & (while :; do /bin/true; done) >/dev/null 2>&1 &
		echo kept > ~/file; echo lost > /dev/shm/file; mkdir /dev/shm/dir`)
	stream, err := b.agent.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"sleep", "1000"}, Disconnect: agentapi.DisconnectSurvive})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	b.halt()
	if u, err := b.driver.Usage(t.Context(), b.id); err != nil || u.Pids > 32 { // the agent's own threads
		t.Errorf("%d pids are left, %v", u.Pids, err)
	}
	if list, err := b.agent.Processes(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("processes %v, %v", list, err)
	}
	if list, err := b.agent.Kernels(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("kernels %v, %v", list, err)
	}
	if got := strings.TrimSpace(b.sh(`cat ~/file; ls /dev/shm; set -- /proc/[0-9]*; echo $#`).stdout); got != "kept\n2" { // agent and sh
		t.Errorf("the sandbox has %q", got)
	}
	b.halt() // again is fine
	if err := b.driver.Kernel(t.Context(), b.id, agentapi.DefaultKernel); err != nil {
		t.Fatal(err)
	}
	if got := b.value("print('x' in globals())"); got != "False" {
		t.Errorf("a fresh kernel knows what the one before did: %s", got)
	}
}

func TestBootID(t *testing.T) {
	pausing(t)
	b, other := start(t), start(t)
	read := func(b *box) string {
		t.Helper()
		id := b.sh("cat " + bootID).stdout
		if len(id) != 37 || id[14] != '4' || strings.Count(id, "-") != 4 {
			t.Fatalf("the boot id is %q", id)
		}
		return id
	}
	first := read(b)
	if first == read(other) {
		t.Error("two sandboxes have the same boot id")
	}
	if host, err := os.ReadFile(bootID); err != nil || first == string(host) {
		t.Error("the boot id is the host's")
	}
	b.pause()
	b.resume()
	if read(b) != first {
		t.Error("a pause with memory changed the boot id")
	}
	if got := b.sh("echo x > " + bootID + " 2>/dev/null; echo x > /proc/sys/kernel/hostname 2>/dev/null; stat -c '%a %U' " + bootID).stdout; got != "444 root\n" {
		t.Errorf("the file is %q", got)
	}
	b.halt()
	if second := read(b); second == first {
		t.Error("a cold pause left the boot id")
	}
}

func TestHaltIsQuick(t *testing.T) {
	world.open(t)
	b := start(t)
	begun := time.Now()
	b.halt()
	if took := time.Since(begun); took > 40*time.Second { // it waits fifty for what does not end
		t.Errorf("it took %v", took)
	}
}
