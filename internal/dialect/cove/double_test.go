package cove_test

import (
	"context"
	"encoding/json"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// The API is tested with a real Manager, store and agent client. Only the agent's end of a connection is a double, so
// that a test can make a run say exactly what it wants, at once or never.

// world is a server with its keys.
type world struct {
	*httptest.Server
	client *client.Client
	key    string
	keys   *auth.Keys
	driver *driver
	api    *cove.API
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := newUnstarted(t)
	w.Start()
	t.Cleanup(w.Close)
	w.client = newClient(t, w.URL, w.key)
	return w
}

// newUnstarted is a world whose server still needs a listener.
func newUnstarted(t testing.TB) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	templates := &catalogue{}
	d := &driver{root: t.TempDir(), live: map[string]sandbox.Instance{}, ends: make(chan sandbox.Ended, 16), templates: templates}
	m := sandbox.NewManager(sandbox.Config{}, d, store, templates, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	keys := auth.NewKeys(store)
	key, _, err := keys.Create(t.Context(), "acme", "test", true)
	if err != nil {
		t.Fatal(err)
	}
	api := cove.New(m, keys, templates, log)
	return &world{Server: httptest.NewUnstartedServer(api), key: string(key), keys: keys, driver: d, api: api}
}

func newClient(t testing.TB, url, key string) *client.Client {
	t.Helper()
	c, err := client.New(url, key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (w *world) sandbox(t testing.TB) *client.Sandbox {
	t.Helper()
	sb, err := w.client.Create(t.Context(), client.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// catalogue has one template that is built and one that is not, and what snapshots made.
type catalogue struct {
	mu    sync.Mutex
	owned []*template.Template
}

var python = &template.Template{Name: "python", Digest: "d1", User: "user", Python: template.Python{Executable: "/usr/bin/python3", Version: "3.13.0"}}

func (c *catalogue) Resolve(_ context.Context, tenant, name string) (*template.Template, error) {
	switch name {
	case python.Name:
		return python, nil
	case "site":
		return nil, fault.New(fault.Unavailable, "template site is not built yet")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.owned {
		if t.Tenant == tenant && t.Name == name {
			return t, nil
		}
	}
	return nil, fault.New(fault.NotFound, "there is no template %q; there are python", name)
}

func (c *catalogue) List(tenant string) []template.Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := []template.Info{
		{Name: "python", Digest: "d1", Source: "built-in python.toml"}, {Name: "site", From: "python", Source: "/somewhere/secret/site.toml"},
	}
	for _, t := range c.owned {
		if t.Tenant == tenant {
			all = append(all, template.Info{
				Name: t.Name, Description: t.Description, From: t.Snapshot.From, Source: template.SourceSnapshot,
				Digest: t.Digest, Tenant: tenant, Created: t.Snapshot.Created,
			})
		}
	}
	return all
}

// driver starts agents that are goroutines.
type driver struct {
	root      string
	ends      chan sandbox.Ended
	work      sync.WaitGroup
	templates *catalogue

	mu       sync.Mutex
	live     map[string]sandbox.Instance
	forks    []sandbox.ForkRequest
	snapshot sandbox.SnapshotRequest // the last
	conns    map[string][]net.Conn
}

func (*driver) Caps() sandbox.Caps {
	return sandbox.Caps{Name: "double", Isolation: "none", Limits: true, Network: true, Fork: true, Pause: true, Snapshot: true}
}
func (*driver) Prepare(context.Context, string, *template.Template) error { return nil }
func (*driver) Kernel(context.Context, string, string) error {
	return fault.New(fault.Unsupported, "no zygote")
}
func (*driver) Change(context.Context, string, sandbox.Change) error { return nil }
func (*driver) Usage(context.Context, string) (sandbox.Usage, error) {
	return sandbox.Usage{CPUMS: 7, MemoryBytes: 1 << 20}, nil
}
func (*driver) Pause(context.Context, string) error     { return nil }
func (*driver) Resume(context.Context, string) error    { return nil }
func (*driver) Forget(context.Context, ...string) error { return nil }
func (*driver) Close() error                            { return nil }

// Fork refuses a busy kernel when its name says so.
func (d *driver) Fork(_ context.Context, req sandbox.ForkRequest) (sandbox.Forked, error) {
	if req.Kernel == "busy" && req.Refuse {
		return sandbox.Forked{}, fault.New(fault.Conflict, "kernel busy runs a cell")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forks = append(d.forks, req)
	for _, c := range req.Children {
		d.live[c.ID] = sandbox.Instance{ID: c.ID, Deadline: c.Deadline, Started: time.Now()}
	}
	return sandbox.Forked{Stall: 7250 * time.Microsecond, Memory: 50 << 20, NotCopied: []sandbox.NotCopied{{Kind: "process", What: "sleep 100 (pid 17)"}}}, nil
}

var snapshotTime = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func (d *driver) Snapshot(_ context.Context, req sandbox.SnapshotRequest) (*template.Template, error) {
	d.mu.Lock()
	d.snapshot = req
	d.mu.Unlock()
	t := *python
	t.Name, t.Digest, t.Description, t.Tenant = req.Name, "d2", req.Description, req.Tenant
	t.Snapshot = &template.Snapshot{From: "python", Created: snapshotTime}
	d.templates.mu.Lock()
	defer d.templates.mu.Unlock()
	d.templates.owned = append(d.templates.owned, &t)
	return &t, nil
}

func (d *driver) RemoveTemplate(_ context.Context, tenant, name string) error {
	d.templates.mu.Lock()
	defer d.templates.mu.Unlock()
	before := len(d.templates.owned)
	d.templates.owned = slices.DeleteFunc(d.templates.owned, func(t *template.Template) bool { return t.Tenant == tenant && t.Name == name })
	if len(d.templates.owned) == before {
		return fault.New(fault.NotFound, "no such snapshot")
	}
	return nil
}

func (d *driver) Start(_ context.Context, req sandbox.StartRequest) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live[req.ID] = sandbox.Instance{ID: req.ID, Tenant: req.Tenant, Template: req.Template.Name, Deadline: req.Deadline, Started: time.Now()}
	return nil
}

func (d *driver) List(context.Context) ([]sandbox.Instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []sandbox.Instance
	for _, i := range d.live {
		all = append(all, i)
	}
	return all, nil
}

func (d *driver) Ended(ctx context.Context) iter.Seq2[sandbox.Ended, error] {
	return func(yield func(sandbox.Ended, error) bool) {
		for {
			select {
			case e := <-d.ends:
				if !yield(e, nil) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
}

func (d *driver) Stop(_ context.Context, id string, cause sandbox.Cause) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.live[id]; !ok {
		return nil
	}
	delete(d.live, id)
	for _, c := range d.conns[id] {
		c.Close()
	}
	delete(d.conns, id)
	d.ends <- sandbox.Ended{ID: id, Cause: cause, At: time.Now()}
	return nil
}

func (d *driver) Dial(_ context.Context, id string) (net.Conn, error) {
	near, far := net.Pipe()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.live[id]; !ok {
		far.Close()
		near.Close()
		return nil, fault.New(fault.NotFound, "no sandbox %s", id)
	}
	if d.conns == nil {
		d.conns = map[string][]net.Conn{}
	}
	d.conns[id] = append(d.conns[id], far)
	d.work.Go(func() { (&agent{far, agentapi.NewReader(far), d.root}).serve() })
	return near, nil
}

// agent answers one operation.
type agent struct {
	conn net.Conn
	r    *agentapi.Reader
	root string
}

func (a *agent) serve() {
	defer a.conn.Close()
	f, err := a.r.Read()
	if err != nil {
		return
	}
	var req agentapi.Request
	if json.Unmarshal(f.Payload, &req) != nil {
		return
	}
	switch req.Op {
	case agentapi.OpRun:
		a.run(params[agentapi.RunParams](req))
	case agentapi.OpExec:
		a.exec(params[agentapi.ExecParams](req))
	case agentapi.OpWrite:
		a.write(params[agentapi.WriteParams](req))
	case agentapi.OpRead:
		a.read(params[agentapi.ReadParams](req))
	case agentapi.OpStat:
		a.stat(params[agentapi.PathParams](req).Path)
	case agentapi.OpKernels:
		a.value([]agentapi.Kernel{{Name: "default", Language: "python", State: agentapi.KernelIdle}})
	case agentapi.OpProcesses:
		a.value([]agentapi.Process{{ID: "p1", PID: 12, Argv: []string{"sleep"}, Tag: "nap"}})
	case agentapi.OpSignal:
		if t := params[agentapi.SignalParams](req).Target; t != (agentapi.Target{Name: "nap"}) {
			a.refuse(fault.NotFound, "no such process")
			return
		}
		a.end(agentapi.End{Outcome: agentapi.OutcomeOK})
	case agentapi.OpInterrupt, agentapi.OpKernelStop:
		if k := params[agentapi.KernelParams](req).Kernel; k == "none" {
			a.refuse(fault.Gone, "there is no kernel")
			return
		}
		a.end(agentapi.End{Outcome: agentapi.OutcomeOK})
	default:
		a.refuse(fault.Unsupported, "the double does not "+string(req.Op))
	}
}

func params[T any](req agentapi.Request) (p T) {
	_ = json.Unmarshal(req.Params, &p)
	return p
}

func (a *agent) event(e agentapi.Event) { _ = agentapi.WriteJSON(a.conn, agentapi.FrameEvent, e) }
func (a *agent) end(e agentapi.End)     { _ = agentapi.WriteJSON(a.conn, agentapi.FrameEnd, e) }
func (a *agent) out(kind agentapi.FrameKind, b []byte) error {
	return agentapi.WriteFrame(a.conn, kind, b)
}

func (a *agent) value(v any) {
	b, _ := json.Marshal(v)
	a.end(agentapi.End{Outcome: agentapi.OutcomeOK, Value: b})
}

func (a *agent) refuse(kind fault.Kind, message string) {
	a.end(agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: kind, Message: message}})
}

// run does what the code's first word says.
func (a *agent) run(p agentapi.RunParams) {
	word, rest, _ := strings.Cut(p.Code, " ")
	if word == "refuse" {
		a.refuse(fault.Conflict, rest)
		return
	}
	a.event(agentapi.Event{Type: agentapi.EventStarted, Count: 1})
	end := agentapi.End{Outcome: agentapi.OutcomeOK}
	switch word {
	case "1+1":
		a.event(agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Main: true, Data: map[string]json.RawMessage{"text/plain": json.RawMessage(`"2"`)}}})
	case "chunks": // hex chunks, one frame each
		for part := range strings.FieldsSeq(rest) {
			b := make([]byte, len(part)/2)
			for i := range b {
				n, _ := strconv.ParseUint(part[2*i:2*i+2], 16, 8)
				b[i] = byte(n)
			}
			if a.out(agentapi.FrameStdout, b) != nil {
				return
			}
		}
	case "flood": // that many MiB
		n, _ := strconv.Atoi(rest)
		chunk := []byte(strings.Repeat("x", agentapi.ChunkSize))
		for range n << 20 / agentapi.ChunkSize {
			if a.out(agentapi.FrameStdout, chunk) != nil {
				return
			}
		}
	case "notices": // that many
		n, _ := strconv.Atoi(rest)
		for range n {
			a.event(agentapi.Event{Type: agentapi.EventNotice, Message: strings.Repeat("n", 4000)})
		}
	case "metadata": // that many MiB, in results that have nothing else
		n, _ := strconv.Atoi(rest)
		for range n {
			a.event(agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Metadata: map[string]json.RawMessage{"m": json.RawMessage(`"` + strings.Repeat("m", 1<<20) + `"`)}}})
		}
	case "hang":
		_, _ = io.Copy(io.Discard, a.conn)
		return
	case "raise":
		a.event(agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: "ValueError", Value: rest, Traceback: []string{"ValueError: " + rest}}})
		end.Outcome = agentapi.OutcomeError
	}
	a.end(end)
}

func (a *agent) exec(p agentapi.ExecParams) {
	if p.Argv[0] == "yes" { // without a process, for tests in which time is false
		a.event(agentapi.Event{Type: agentapi.EventStarted, PID: 12, ID: "p1"})
		for a.out(agentapi.FrameStdout, []byte("y\n")) == nil {
		}
		return
	}
	cmd := exec.Command(p.Argv[0], p.Argv[1:]...)
	stdin, _ := cmd.StdinPipe()
	cmd.Stdout = frames{a, agentapi.FrameStdout}
	cmd.Stderr = frames{a, agentapi.FrameStderr}
	if err := cmd.Start(); err != nil {
		a.refuse(fault.NotFound, err.Error())
		return
	}
	a.event(agentapi.Event{Type: agentapi.EventStarted, PID: cmd.Process.Pid, ID: "p1"})
	if !p.Stdin {
		stdin.Close()
	}
	if p.Disconnect != agentapi.DisconnectSurvive {
		go a.obey(cmd, stdin) // ends with the connection
	}
	err := cmd.Wait()
	end := agentapi.End{Outcome: agentapi.OutcomeOK, ExitCode: cmd.ProcessState.ExitCode()}
	if err != nil {
		end.Outcome = agentapi.OutcomeError
	}
	if end.ExitCode < 0 {
		end.Signal = "SIGTERM"
	}
	a.end(end)
}

func (a *agent) obey(cmd *exec.Cmd, stdin io.WriteCloser) {
	for {
		f, err := a.r.Read()
		if err != nil {
			_ = cmd.Process.Kill()
			return
		}
		switch f.Kind {
		case agentapi.FrameStdin:
			_, _ = stdin.Write(f.Payload)
		case agentapi.FrameEOF:
			stdin.Close()
		case agentapi.FrameControl:
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
	}
}

type frames struct {
	a    *agent
	kind agentapi.FrameKind
}

func (f frames) Write(b []byte) (int, error) { return len(b), f.a.out(f.kind, b) }

func (a *agent) path(name string) string { return filepath.Join(a.root, "file-"+filepath.Base(name)) }

func (a *agent) write(p agentapi.WriteParams) {
	f, err := os.Create(a.path(p.Path))
	if err != nil {
		a.refuse(fault.Internal, err.Error())
		return
	}
	defer f.Close()
	for {
		frame, err := a.r.Read()
		if err != nil {
			return
		}
		if frame.Kind == agentapi.FrameEOF {
			break
		}
		_, _ = f.Write(frame.Payload)
	}
	a.stat(p.Path)
}

func (a *agent) stat(name string) {
	info, err := os.Stat(a.path(name))
	if err != nil {
		a.refuse(fault.NotFound, name+" does not exist")
		return
	}
	a.value(agentapi.Entry{Name: filepath.Base(name), Path: name, Type: agentapi.EntryFile, Size: info.Size(), Mode: 0o644})
}

func (a *agent) read(p agentapi.ReadParams) {
	f, err := os.Open(a.path(p.Path))
	if err != nil {
		a.refuse(fault.NotFound, p.Path+" does not exist")
		return
	}
	defer f.Close()
	a.event(agentapi.Event{Type: agentapi.EventStarted, Entry: &agentapi.Entry{Name: filepath.Base(p.Path), Path: p.Path}})
	_, _ = f.Seek(p.Offset, io.SeekStart)
	var r io.Reader = f
	if p.Length > 0 {
		r = io.LimitReader(f, p.Length)
	}
	buf := make([]byte, agentapi.ChunkSize)
	for {
		n, err := r.Read(buf)
		if n > 0 && a.out(agentapi.FrameData, buf[:n]) != nil {
			return
		}
		if err != nil {
			break
		}
	}
	a.end(agentapi.End{Outcome: agentapi.OutcomeOK})
}
