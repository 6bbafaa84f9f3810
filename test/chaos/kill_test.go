package chaos_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/testserver"
)

// soon bounds how long service may stay away after a fault that needs no human. It is ten times what a quiet machine needs.
const soon = 60 * time.Second

// clients is how many work during a fault; two cores are busy with four.
const clients = 4

// atWork is what clients may see while a server is killed under them: their connection ends, nothing listens, or an
// answer that says so. Never a 500, never silence.
var atWork = []string{"ok", "cut", "refused", "503", "stream-unavailable"}

func TestServerKilled(t *testing.T) {
	f := begin(t, "server: kill -9 at random moments, three times")
	s := testserver.New(f)
	residents := f.settle(s, 3, client.CreateRequest{})
	before := f.count(s, residents)
	for range 3 {
		work := f.workload(s, clients)
		f.moment(1500 * time.Millisecond)
		s.Crash(f)
		began := time.Now()
		f.moment(300 * time.Millisecond)
		work.end()
		s.Start(f)
		f.serves(s, began, soon)
	}
	f.stillThere(s, residents)
	f.onlySaw(atWork...)
	f.nothingLeft(s, residents, before)
}

func TestMakerKilled(t *testing.T) {
	f := begin(t, "maker: kill -9 under load, then a new one beside the same server")
	s := testserver.New(f)
	residents := f.settle(s, 3, client.CreateRequest{})
	before := f.count(s, residents)
	inside := s.Inside()
	work := f.workload(s, clients)
	f.moment(1500 * time.Millisecond)
	maker := s.MakerPID()
	f.kill(maker, syscall.SIGKILL)
	began := time.Now()
	f.eventually("all that the maker made has ended with it", soon, func() bool {
		for _, pid := range inside {
			if state := testserver.Status(pid, "State"); state != "" && !strings.HasPrefix(state, "Z") {
				return false
			}
		}
		return true
	})
	f.eventually("/readyz says that nothing can be created, unless another maker runs", soon, func() bool {
		code, _ := f.ready(s)
		return code == http.StatusServiceUnavailable || s.MakerPID() != 0 && s.MakerPID() != maker
	})
	if s.MakerPID() == 0 {
		_, err := s.Create(f.Context(), client.CreateRequest{})
		if s.MakerPID() == 0 && (err == nil || !strings.Contains(err.Error(), "cove maker")) {
			f.Errorf("without a maker a create says %v; want the command that starts one", err)
		}
	}
	f.startMaker(s)
	work.end()
	f.serves(s, began, soon)
	// An end of a sandbox that was to be is an end that is told.
	f.eventually("every resident has ended by maker_died", soon, func() bool {
		for _, r := range residents {
			if sb, err := s.Get(f.Context(), r.id); err != nil || sb.State != "ended" || sb.Cause != "maker_died" {
				return false
			}
		}
		return true
	})
	if code, body := f.ready(s); code != http.StatusOK {
		f.Errorf("/readyz says %d %s although a sandbox was made just now", code, body)
	}
	f.onlySaw(append(atWork, "410", "404")...)
	f.nothingLeft(s, nil, before)
}

func TestZygoteKilled(t *testing.T) {
	f := begin(t, "zygote: kill -9 under load, three times")
	s := testserver.New(f)
	residents := f.settle(s, 3, client.CreateRequest{})
	before := f.count(s, residents)
	work := f.workload(s, clients)
	for range 3 {
		f.moment(time.Second)
		for _, pid := range s.ChildrenOfMaker("zygote.py") {
			f.kill(pid, syscall.SIGKILL)
		}
		f.serves(s, time.Now(), soon)
	}
	work.end()
	f.onlySaw("ok", "503", "stream-unavailable", "stream-run-lost")
	for _, r := range residents {
		if _, err := s.Sandbox(r.id).Exec(f.Context(), client.ExecRequest{Command: "true"}); err != nil {
			f.lost("the sandbox %s: %v", r.id, err)
		}
	}
	f.nothingLeft(s, residents, before)
}

func TestResolverKilled(t *testing.T) {
	f := begin(t, "resolver: kill -9 under load, three times")
	s := testserver.New(f)
	residents := f.settle(s, 1, client.CreateRequest{})
	before := f.count(s, residents)
	sb := s.Sandbox(residents[0].id)
	// Any answer is one, also "no such name" of a host without name servers: what must not be is silence.
	answered := func(ctx context.Context) error {
		return wants(ctx, sb, dnsQuery, "True")
	}
	if err := answered(f.Context()); err != nil {
		f.Fatalf("before the fault a sandbox gets no answer from the resolver: %v", err)
	}
	work := f.workload(s, clients)
	for range 3 {
		f.moment(time.Second)
		pids := s.ChildrenOfMaker("resolver")
		if len(pids) != 1 {
			f.Fatalf("there are %d resolvers", len(pids))
		}
		f.kill(pids[0], syscall.SIGKILL)
		began := time.Now()
		f.eventually("a sandbox is answered again", soon, func() bool {
			ctx, cancel := context.WithTimeout(f.Context(), patience)
			defer cancel()
			return answered(ctx) == nil
		})
		f.row.Service = time.Since(began).Seconds()
	}
	work.end()
	f.stillThere(s, residents)
	f.onlySaw("ok")
	f.nothingLeft(s, residents, before)
}

// dnsQuery asks the sandbox's name server for a name under .invalid over TCP and over UDP, and is True if both answer.
const dnsQuery = `
import socket, struct
server = [l.split()[1] for l in open("/etc/resolv.conf") if l.startswith("nameserver")][0]
q = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + b"\x04test\x07invalid\x00" + struct.pack(">2H", 1, 1)
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); s.sendto(q, (server, 53)); return s.recv(512)[:2] == q[:2]
def tcp():
    s = socket.create_connection((server, 53), 5); s.settimeout(5); s.sendall(struct.pack(">H", len(q)) + q); return s.recv(512)[2:4] == q[:2]
udp() and tcp()
`

func TestAgentKilled(t *testing.T) {
	f := begin(t, "agent: kill -9 of one sandbox's PID 1")
	s := testserver.New(f)
	residents := f.settle(s, 2, client.CreateRequest{})
	before := f.count(s, residents)
	pid := f.initOf(s, residents[0].id)
	f.kill(pid, syscall.SIGKILL)
	began := time.Now()
	f.eventually("its end is recorded with its cause", soon, func() bool {
		sb, err := s.Get(f.Context(), residents[0].id)
		return err == nil && sb.State == "ended" && sb.Cause == "agent_died" && strings.Contains(sb.Message, "SIGKILL")
	})
	f.serves(s, began, soon)
	f.stillThere(s, residents[1:])
	f.nothingLeft(s, residents[1:], before)
}

// TestStopped stops each process for a while as a debugger, a hypervisor or a swapping host does.
func TestStopped(t *testing.T) {
	for name, c := range map[string]struct {
		pids    func(f *fault, s *testserver.Server, r []resident) []int
		allowed []string
	}{
		"server":   {func(_ *fault, s *testserver.Server, _ []resident) []int { return []int{s.PID()} }, []string{"ok"}},
		"maker":    {func(_ *fault, s *testserver.Server, _ []resident) []int { return []int{s.MakerPID()} }, []string{"ok", "503", "504"}},
		"zygote":   {func(_ *fault, s *testserver.Server, _ []resident) []int { return s.ChildrenOfMaker("zygote.py") }, []string{"ok", "503", "504"}},
		"resolver": {func(_ *fault, s *testserver.Server, _ []resident) []int { return s.ChildrenOfMaker("resolver") }, []string{"ok"}},
		"agent":    {func(f *fault, s *testserver.Server, r []resident) []int { return []int{f.initOf(s, r[0].id)} }, []string{"ok"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := begin(t, name+": SIGSTOP for 5 s under load")
			s := testserver.New(f)
			residents := f.settle(s, 2, client.CreateRequest{})
			before := f.count(s, residents)
			pids := c.pids(f, s, residents)
			if len(pids) == 0 {
				f.Fatalf("there is no %s", name)
			}
			work := f.workload(s, clients)
			f.moment(time.Second)
			for _, pid := range pids {
				f.kill(pid, syscall.SIGSTOP)
				defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
			}
			time.Sleep(5 * time.Second) // the fault itself
			for _, pid := range pids {
				_ = syscall.Kill(pid, syscall.SIGCONT) // the maker may have ended a zygote that did not answer
			}
			f.serves(s, time.Now(), soon)
			work.end()
			f.stillThere(s, residents)
			f.onlySaw(c.allowed...)
			f.nothingLeft(s, residents, before)
		})
	}
}

// TestMakerStopped_PausedAndForked: `cove maker stop` ends all kinds of sandboxes before it returns.
func TestMakerStopped_PausedAndForked(t *testing.T) {
	f := begin(t, "`cove maker stop` with running, paused and forked sandboxes")
	s := testserver.New(f)
	residents := f.settle(s, 3, client.CreateRequest{})
	before := f.count(s, residents)
	if err := s.Sandbox(residents[0].id).Pause(f.Context(), client.PauseRequest{}); err != nil {
		f.Fatal(err)
	}
	forks, err := s.Sandbox(residents[1].id).Fork(f.Context(), client.ForkRequest{Count: 2})
	if err != nil {
		f.Fatal(err)
	}
	if err := forks.Sandboxes[0].Pause(f.Context(), client.PauseRequest{}); err != nil {
		f.Fatal(err)
	}
	inside := s.Inside()
	maker := s.MakerPID()
	out, err := exec.Command(testserver.Binary(f), "maker", "stop", "--data-dir", s.Dir).CombinedOutput()
	if err != nil {
		f.Errorf("cove maker stop: %v: %s", err, out)
	}
	if now := s.MakerPID(); now == maker {
		f.Errorf("left over: cove maker stop returned and its maker lives")
	}
	for _, pid := range inside {
		if state := testserver.Status(pid, "State"); state != "" && !strings.HasPrefix(state, "Z") {
			f.Errorf("left over: process %d, %q, state %s", pid, testserver.Cmdline(pid), state)
		}
	}
	began := time.Now()
	f.startMaker(s)
	f.serves(s, began, soon)
	f.nothingLeft(s, nil, before)
}

// kill sends a signal to one process.
func (f *fault) kill(pid int, sig syscall.Signal) {
	f.Helper()
	if pid <= 1 {
		f.Fatalf("there is no process to send %v to", sig)
	}
	if err := syscall.Kill(pid, sig); err != nil {
		f.Fatalf("send %v to %d: %v", sig, pid, err)
	}
}

// startMaker starts a maker beside the server, as an operator would, unless there is one.
func (f *fault) startMaker(s *testserver.Server) {
	f.Helper()
	if s.MakerPID() != 0 {
		return
	}
	uid := strings.Fields(testserver.Status(s.PID(), "Uid"))[0]
	maker := exec.Command(testserver.Binary(f), "maker", "--data-dir", s.Dir, "--server-uid", uid)
	said := &testserver.Buffer{}
	maker.Stdout, maker.Stderr = said, said
	if err := maker.Start(); err != nil {
		f.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = maker.Wait() // it ends with the server's own cleanup
		close(ended)
	}()
	f.Cleanup(func() {
		_ = maker.Process.Kill()
		<-ended
	})
	if !f.eventually("a maker that was started by hand runs", soon, func() bool { return s.MakerPID() != 0 }) {
		f.note("the maker said %s", said)
	}
}

// ready asks /readyz on a connection of its own.
func (f *fault) ready(s *testserver.Server) (code int, body string) { return f.get(s.URL + "/readyz") }

func (f *fault) get(url string) (code int, body string) {
	h := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := h.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	var text json.RawMessage
	_ = json.NewDecoder(resp.Body).Decode(&text) // its status is what counts
	return resp.StatusCode, string(text)
}

// initOf finds PID 1 of a sandbox on the host, by a process of it that is told from others by its argument.
func (f *fault) initOf(s *testserver.Server, id string) (found int) {
	f.Helper()
	mark := strconv.FormatInt(50000+f.rand.Int64N(1<<30), 10)
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan struct{})
	defer func() { cancel(); <-done }()
	go func() {
		defer close(done)
		_, _ = s.Sandbox(id).Exec(ctx, client.ExecRequest{Argv: []string{"sleep", mark}}) // cut when it has been seen
	}()
	space := func(pid int) string {
		text, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		return text
	}
	f.eventually("the sandbox's PID 1 is found", soon, func() bool {
		inside := s.Inside()
		for _, pid := range inside {
			if testserver.Cmdline(pid) != "sleep\x00"+mark {
				continue
			}
			for _, other := range inside {
				ids := strings.Fields(testserver.Status(other, "NSpid"))
				if len(ids) > 1 && ids[len(ids)-1] == "1" && space(other) == space(pid) {
					found = other
				}
			}
		}
		return found != 0
	})
	return found
}
