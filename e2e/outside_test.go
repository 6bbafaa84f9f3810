package e2e_test

import (
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/test/slow"
)

// The internet of a server that has a network of its own: two addresses that answer with their own name on port 80.
const (
	outsideOne   = "198.51.100.10"
	outsideOther = "198.51.100.20"
)

// startOutside puts an internet behind a server's network: what this machine can reach itself does not matter.
func (a *aloneServer) startOutside(t *testing.T) {
	t.Helper()
	world := exec.Command("unshare", "--net", "cat") // which lives until its input ends
	stdin, err := world.StdinPipe()
	if err == nil {
		err = world.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); _ = world.Wait() })
	eventually(t, "there is a network outside", patience, func() bool { return namespace(world.Process.Pid) != namespace(0) })
	pid := strconv.Itoa(world.Process.Pid)
	for _, step := range []*exec.Cmd{
		a.within("ip", "link", "add", "wan0", "type", "veth", "peer", "name", "eth0", "netns", pid),
		a.within("ip", "address", "add", "203.0.113.2/24", "dev", "wan0"),
		a.within("ip", "link", "set", "wan0", "up"),
		a.within("ip", "route", "add", "default", "via", "203.0.113.1"),
		exec.Command("nsenter", "--net", "--target", pid, "sh", "-ec", "ip link set lo up; ip address add 203.0.113.1/24 dev eth0; ip link set eth0 up; "+
			"ip address add "+outsideOne+"/32 dev lo; ip address add "+outsideOther+"/32 dev lo"),
	} {
		if out, err := step.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(step.Args, " "), err, out)
		}
	}
	answerWithName(t, pid)
}

// namespace is which network a process has; 0 is this one.
func namespace(pid int) string {
	who := "self"
	if pid != 0 {
		who = strconv.Itoa(pid)
	}
	name := make([]byte, 64)
	n, _ := unix.Readlink("/proc/"+who+"/ns/net", name)
	return string(name[:max(n, 0)])
}

// answerWithName serves in the network of a process.
func answerWithName(t *testing.T, pid string) {
	t.Helper()
	listening := make(chan error, 1)
	var l net.Listener
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		fd, err := unix.Open("/proc/"+pid+"/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			_ = unix.Close(fd)
		}
		if err == nil {
			l, err = net.Listen("tcp", "0.0.0.0:80")
		}
		listening <- err
	}()
	if err := <-listening; err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.LocalAddr().String())
			_, _ = io.WriteString(c, host+"\n")
			_ = c.Close()
		}
	}()
}

// The rules of both dialects, as packets.
func TestOpenSandboxS3_47_E2BS0_64RulesHoldForPackets(t *testing.T) {
	slow.Test(t)
	open, e2b := openSandboxPackages(t), e2bPackages(t)
	a := serveAlone(t, nil, "serve")
	if a.ended() {
		t.Fatalf("the server ended:\n%s", a.said)
	}
	a.startOutside(t)
	text, err := os.ReadFile(filepath.Join(a.dir, "server", "api_key"))
	if err != nil {
		t.Fatal(err)
	}
	key := strings.TrimSpace(string(text))
	const at = "127.0.0.1:8080"
	env := []string{"HOME=" + t.TempDir(), "SUITE_OUTSIDE=" + outsideOne + "," + outsideOther}
	t.Run("opensandbox", func(t *testing.T) {
		command := a.within(open.pytest(t, open.python, "outside")...).Args
		runSuite(t, command, append(env, "OPEN_SANDBOX_DOMAIN="+at, "OPEN_SANDBOX_API_KEY="+key))
	})
	t.Run("e2b", func(t *testing.T) {
		command := a.within(e2b.pytest(t, "outside")...).Args
		runSuite(t, command, append(env, "E2B_API_URL=http://"+at, "E2B_SANDBOX_URL=http://"+at, "E2B_API_KEY="+key))
	})
}
