package native_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// ownMaker is a maker of one test, with a directory of templates of its own: it may be killed, and what is snapshotted
// there is nobody else's.
type ownMaker struct {
	dir    string
	driver *native.Driver
	store  *template.Store
	next   int
}

func newMaker(t *testing.T) *ownMaker {
	t.Helper()
	for {
		dir, err := os.MkdirTemp("", "cove-own-maker")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat("/run/cove-" + native.Tag(dir) + ".lock"); err != nil {
			return newMakerAt(t, dir)
		}
		os.Remove(dir) // three characters are few: somebody on this machine has the same
	}
}

// newMakerAt uses a directory that goes with the test.
func newMakerAt(t *testing.T, dir string) *ownMaker {
	t.Helper()
	m := &ownMaker{dir: dir}
	t.Cleanup(func() {
		if m.driver != nil {
			m.shutdown(t)
		}
		log, _ := os.ReadFile(filepath.Join(dir, "maker", "log"))
		for _, bad := range []string{"DATA RACE", "panic"} {
			if strings.Contains(string(log), bad) {
				t.Errorf("the maker says:\n%s", log)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	m.borrow(t, "base", "python")
	m.open(t)
	return m
}

// borrow shows the templates that are built once per machine. Others may be writing there, so it is told which they are.
func (m *ownMaker) borrow(t *testing.T, names ...string) {
	t.Helper()
	to := filepath.Join(m.templates(), "built")
	if err := os.MkdirAll(filepath.Join(to, "layers"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := json.Marshal(map[string]any{"template": buildTemplate(t, name)})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, name+".json"), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func (m *ownMaker) templates() string { return filepath.Join(m.dir, "templates") }

func (m *ownMaker) open(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	var err error
	m.driver, err = native.Open(ctx, native.Config{DataDir: m.dir, Log: slog.Default(), Launch: native.LaunchSelf("--pool", "2")})
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(m.dir, "maker", "log"))
		t.Fatalf("%v\n%s", err, log)
	}
	if m.store, err = template.Open(template.Options{Dir: m.templates()}); err != nil {
		t.Fatal(err)
	}
}

func (m *ownMaker) shutdown(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	if err := m.driver.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	m.driver.Close()
	m.driver = nil
}

// crash kills the maker and waits until it is gone.
func (m *ownMaker) crash(t *testing.T) {
	t.Helper()
	pid := m.driver.MakerPID()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		if n, err := unix.Poll(poll, 10_000); n == 1 {
			break
		} else if err != unix.EINTR {
			t.Fatalf("the maker does not die: %v", err)
		}
	}
	m.driver.Close()
	m.driver = nil
}

func (m *ownMaker) start(t *testing.T, changes ...change) *box {
	t.Helper()
	b, err := m.tryStart(t, changes...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (m *ownMaker) tryStart(t *testing.T, changes ...change) (*box, error) {
	t.Helper()
	m.next++
	r := sandbox.StartRequest{
		ID: fmt.Sprintf("own%d", m.next), Tenant: tenant, Template: buildTemplate(t, "base"), Network: policy.Network{Mode: policy.None},
		Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128, OpenFiles: 1024},
	}
	for _, c := range changes {
		c(&r)
	}
	b := &box{t: t, id: r.ID, driver: m.driver}
	b.agent = agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return b.driver.Dial(ctx, b.id) })
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	return b, m.driver.Start(ctx, r)
}
