package maker_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// fewForks make a zygote of these makers old; nine tenths of it have the next one started.
const fewForks = 10

// TestMain is also a maker that is in a hurry: the driver starts its own program again with that command.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != "maker" {
		os.Exit(m.Run())
	}
	hours, err := os.Open(hoursFile(os.Args[slices.Index(os.Args, "--data-dir")+1]))
	if err == nil {
		maker.Hurry(fewForks, 100*time.Millisecond, clockOf(hours))
		err = maker.Main(os.Args[2:], native.Tag, nil)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// hoursFile has a byte for every hour that its test has let pass: whoever writes it knows that the maker has the time at once.
func hoursFile(dataDir string) string { return filepath.Join(dataDir, "hours") }

func clockOf(hours *os.File) func() time.Time {
	return func() time.Time {
		info, err := hours.Stat()
		if err != nil {
			panic(err)
		}
		return time.Now().Add(time.Duration(info.Size()) * time.Hour)
	}
}

// realMaker is a maker of one test, with templates of its own.
type realMaker struct {
	t      *testing.T
	dir    string
	driver *native.Driver
	store  *template.Store
	next   int
}

// newMaker has templates by name.
func newMaker(t *testing.T, definitions map[string]string) *realMaker {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a maker needs root")
	}
	m := &realMaker{t: t, dir: freeDir(t)}
	t.Cleanup(func() {
		m.close()
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(m.dir, "maker", "log"))
			t.Logf("the maker says:\n%s", log)
		}
		if err := os.RemoveAll(m.dir); err != nil {
			t.Error(err)
		}
	})
	noError(t, os.WriteFile(hoursFile(m.dir), nil, 0o600), os.Mkdir(m.templates(), 0o755))
	for name, text := range definitions {
		noError(t, os.WriteFile(filepath.Join(m.templates(), name+".toml"), fmt.Appendf(nil, "name = '%s'\n%s", name, text), 0o644))
	}
	m.open()
	return m
}

// freeDir has a tag that no other maker of this machine has.
func freeDir(t *testing.T) string {
	t.Helper()
	for {
		dir, err := os.MkdirTemp("", "cove-maker-test")
		noError(t, err)
		if _, err := os.Stat("/run/cove-" + native.Tag(dir) + ".lock"); err != nil {
			return dir
		}
		os.Remove(dir)
	}
}

func (m *realMaker) templates() string { return filepath.Join(m.dir, "templates") }

func (m *realMaker) open() {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), time.Minute)
	defer cancel()
	var err error
	m.store, err = template.Open(template.Options{Dir: m.templates(), Log: slog.New(slog.DiscardHandler)})
	noError(m.t, err)
	m.driver, err = native.Open(ctx, native.Config{DataDir: m.dir, Log: slog.Default(), Launch: native.LaunchSelf("--pool", "1", "--network=false")})
	noError(m.t, err)
}

func (m *realMaker) close() {
	m.t.Helper()
	if m.driver == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // the test's own is over
	defer cancel()
	if err := m.driver.Shutdown(ctx); err != nil {
		m.t.Error(err)
	}
	m.driver.Close()
	m.driver = nil
}

// build builds a template, if that was not done.
func (m *realMaker) build(name string) *template.Template {
	m.t.Helper()
	built, err := m.store.Ensure(m.t.Context(), name, nil)
	noError(m.t, err)
	return built
}

// room is a sandbox of a test.
type room struct {
	m     *realMaker
	id    string
	agent *agentapi.Client
}

func (m *realMaker) room() *room {
	m.next++
	r := &room{m: m, id: fmt.Sprint("room", m.next)}
	r.agent = agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return m.driver.Dial(ctx, r.id) })
	return r
}

var roomLimits = template.Limits{CPUs: 1, MemoryBytes: 256 << 20, Pids: 64}

func (m *realMaker) tryStart(tenant string, from *template.Template) (*room, error) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), time.Minute)
	defer cancel()
	r := m.room()
	return r, m.driver.Start(ctx, sandbox.StartRequest{
		ID: r.id, Tenant: tenant, Template: from, Limits: roomLimits, Network: policy.Network{Mode: policy.None},
	})
}

func (m *realMaker) start(from *template.Template) *room {
	m.t.Helper()
	r, err := m.tryStart("acme", from)
	noError(m.t, err)
	return r
}

func (r *room) stop() {
	r.m.t.Helper()
	noError(r.m.t, r.m.driver.Stop(r.m.t.Context(), r.id, sandbox.CauseKilled))
}

// branch copies it.
func (r *room) branch() *room {
	r.m.t.Helper()
	child := r.m.room()
	_, err := r.m.driver.Fork(r.m.t.Context(), sandbox.ForkRequest{
		Parent: r.id, Children: []sandbox.ForkChild{{ID: child.id, Limits: roomLimits, Network: policy.Network{Mode: policy.None}}},
	})
	noError(r.m.t, err)
	return child
}

// says checks what a cell prints.
func (r *room) says(code, want string) {
	r.m.t.Helper()
	check(r.m.t, want)(r.agent.Run(r.m.t.Context(), agentapi.RunParams{Code: code}))
}

// shows checks what a command prints.
func (r *room) shows(want string, argv ...string) {
	r.m.t.Helper()
	check(r.m.t, want)(r.agent.Exec(r.m.t.Context(), agentapi.ExecParams{Argv: argv}))
}

func check(t *testing.T, want string) func(*agentapi.Stream, error) {
	t.Helper()
	return func(stream *agentapi.Stream, err error) {
		t.Helper()
		noError(t, err)
		var out bytes.Buffer
		for e, err := range stream.Events() {
			noError(t, err)
			out.Write(e.Data)
		}
		if got := strings.TrimSpace(out.String()); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func (m *realMaker) stats() wire.Stats {
	m.t.Helper()
	s, err := m.driver.Stats(m.t.Context())
	noError(m.t, err)
	return s
}

// await asks until something has come about.
func await(t *testing.T, what string, there func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !there(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come about", what)
		}
	}
}

func noError(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
