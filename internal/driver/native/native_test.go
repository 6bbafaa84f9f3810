package native_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/resolver"
	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// TestMain is also the maker, the resolver and the unpacker: the driver starts its own program again with those commands.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		var err error
		switch os.Args[1] {
		case "maker":
			err = maker.Main(os.Args[2:], native.Tag, []string{"/proc/self/exe", "resolver"})
		case "resolver":
			os.Exit(resolver.Main(os.Args[2:], os.Stderr))
		case "unpack":
			os.Exit(unpack.Main(os.Args[2:], os.Stderr))
		default:
			status := m.Run()
			world.close()
			os.Exit(status)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	status := m.Run()
	world.close()
	os.Exit(status)
}

const tenant = "acme"

// theWorld is one maker for all tests that do not harm it.
type theWorld struct {
	once   sync.Once
	err    error
	dir    string
	driver *native.Driver
	store  *template.Store
	next   atomic.Int64

	mu    sync.Mutex
	built map[string]*template.Template
}

var world = theWorld{built: map[string]*template.Template{}}

func (w *theWorld) open(t testing.TB) {
	t.Helper()
	w.once.Do(func() { w.err = w.start() })
	if w.err != nil {
		t.Fatal(w.err)
	}
}

func (w *theWorld) start() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("these tests make real sandboxes and need root")
	}
	dir, err := os.MkdirTemp("", "cove-native-test")
	if err != nil {
		return err
	}
	w.dir = dir
	w.driver, err = openDriver(context.Background(), dir)
	if err != nil {
		return err
	}
	w.store, err = openTemplates()
	return err
}

func (w *theWorld) close() {
	if w.driver != nil {
		_ = w.driver.Shutdown(context.Background())
		_ = w.driver.Close()
	}
	if w.dir != "" {
		_ = os.RemoveAll(w.dir)
	}
}

func openDriver(ctx context.Context, dir string) (*native.Driver, error) {
	d, err := native.Open(ctx, native.Config{DataDir: dir, Log: slog.Default(), Launch: native.LaunchSelf("--templates", templatesDir())})
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "maker", "log"))
		return nil, fmt.Errorf("%w\n%s", err, log)
	}
	return d, nil
}

// openTemplates uses templates that are built once per machine: the packages take a minute.
func openTemplates() (*template.Store, error) {
	return template.Open(template.Options{Dir: templatesDir()})
}

func templatesDir() string {
	cache := os.Getenv("COVE_TEST_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			panic(err)
		}
		cache = filepath.Join(dir, "cove-test")
	}
	return filepath.Join(cache, "templates")
}

func buildTemplate(t testing.TB, name string) *template.Template {
	t.Helper()
	world.open(t)
	world.mu.Lock()
	defer world.mu.Unlock()
	if built := world.built[name]; built != nil {
		return built
	}
	built, err := world.store.Ensure(context.Background(), name, func(template.Progress) {})
	if err != nil {
		t.Fatal(err)
	}
	world.built[name] = built
	return built
}

// box is one sandbox of a test.
type box struct {
	t      testing.TB
	id     string
	driver *native.Driver
	agent  *agentapi.Client
}

type change func(*sandbox.StartRequest)

func start(t testing.TB, changes ...change) *box {
	t.Helper()
	b, err := tryStart(t, changes...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func tryStart(t testing.TB, changes ...change) (*box, error) {
	t.Helper()
	return startWithin(t, 60*time.Second, changes...)
}

func startWithin(t testing.TB, limit time.Duration, changes ...change) (*box, error) {
	t.Helper()
	world.open(t)
	r := sandbox.StartRequest{
		ID: fmt.Sprintf("sb%d", world.next.Add(1)), Tenant: tenant, Template: buildTemplate(t, "python"),
		Limits:   template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 128, OpenFiles: 1024},
		Network:  policy.Network{Mode: policy.Internet},
		Deadline: time.Now().Add(5 * time.Minute),
	}
	for _, c := range changes {
		c(&r)
	}
	b := &box{t: t, id: r.ID, driver: world.driver}
	b.agent = newAgent(b)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := b.driver.Start(ctx, r); err != nil {
		return nil, err
	}
	t.Cleanup(func() { b.stop() })
	return b, nil
}

func newAgent(b *box) *agentapi.Client {
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return b.driver.Dial(ctx, b.id) })
}

func (b *box) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := b.driver.Stop(ctx, b.id, sandbox.CauseKilled); err != nil {
		b.t.Errorf("stop: %v", err)
	}
}

// answer is what a run said.
type answer struct {
	stdout, stderr string
	text           string // of the last expression
	err            *agentapi.CodeError
	end            agentapi.End
}

func collect(stream *agentapi.Stream, err error) (answer, error) {
	var a answer
	if err != nil {
		return a, err
	}
	var out, errs bytes.Buffer
	for e, err := range stream.Events() {
		if err != nil {
			return a, err
		}
		switch e.Type {
		case agentapi.EventStdout:
			out.Write(e.Data)
		case agentapi.EventStderr:
			errs.Write(e.Data)
		case agentapi.EventResult:
			a.text = strings.Trim(string(e.Result.Data["text/plain"]), `"`)
		case agentapi.EventError:
			a.err = e.Error
		case agentapi.EventEnd:
			a.end = *e.End
		case agentapi.EventStarted, agentapi.EventFile, agentapi.EventNotice, agentapi.EventReady:
		}
	}
	a.stdout, a.stderr = out.String(), errs.String()
	return a, nil
}

// run runs a cell that must come back, whatever it says.
func (b *box) run(code string) answer {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	a, err := collect(b.agent.Run(ctx, agentapi.RunParams{Code: code}))
	if err != nil {
		b.t.Fatalf("run: %v", err)
	}
	return a
}

// value runs a cell that must succeed and gives what it printed.
func (b *box) value(code string) string {
	b.t.Helper()
	a := b.run(code)
	if a.end.Outcome != agentapi.OutcomeOK {
		b.t.Fatalf("cell ended %s: %v %s", a.end.Outcome, a.err, a.end.Message)
	}
	return strings.TrimSpace(a.stdout)
}

// exec runs a command that must come back, whatever it says.
func (b *box) exec(p agentapi.ExecParams) answer {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 120*time.Second)
	defer cancel()
	a, err := collect(b.agent.Exec(ctx, p))
	if err != nil {
		b.t.Fatalf("exec: %v", err)
	}
	return a
}

func (b *box) sh(line string) answer {
	b.t.Helper()
	return b.exec(agentapi.ExecParams{Argv: []string{"bash", "-c", line}})
}

func limits(f func(*template.Limits)) change { return func(r *sandbox.StartRequest) { f(&r.Limits) } }
func network(n policy.Network) change        { return func(r *sandbox.StartRequest) { r.Network = n } }
func storage(s sandbox.Storage) change       { return func(r *sandbox.StartRequest) { r.Storage = s } }
