package sandbox_test

import (
	"context"
	"encoding/json"
	"iter"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

var (
	acme   = auth.Principal{Tenant: "acme"}
	globex = auth.Principal{Tenant: "globex"}
)

// world is a host with its driver and its database; servers come and go on it.
type world struct {
	t        *testing.T
	cfg      sandbox.Config
	driver   *fakeDriver
	store    *fakeStore
	observer *fakeObserver
	logged   lockedBuffer
	*sandbox.Manager
}

// lockedBuffer is a log that several servers write.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// newWorld starts a first server.
func newWorld(t *testing.T, cfg sandbox.Config) *world {
	t.Helper()
	s, err := sqlstore.Open(filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if cfg.BootID == "" {
		cfg.BootID = "boot-1"
	}
	w := &world{t: t, cfg: cfg, driver: newFakeDriver(), store: &fakeStore{Store: s}, observer: &fakeObserver{}}
	t.Cleanup(w.driver.wait)
	w.serve()
	return w
}

// serve starts a server and ends it with the test.
func (w *world) serve() {
	w.t.Helper()
	m := sandbox.NewManager(w.cfg, w.driver, w.store, fakeTemplates{}, w.observer, slog.New(slog.NewTextHandler(&w.logged, nil)))
	if err := m.Open(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { m.Close() })
	w.Manager = m
}

// restart ends the server as a crash would, as far as store and driver can tell, and starts the next.
func (w *world) restart() {
	w.t.Helper()
	w.Manager.Close()
	w.serve()
}

func (w *world) create(spec sandbox.Spec) sandbox.Sandbox {
	w.t.Helper()
	sb, created, err := w.Create(w.t.Context(), acme, spec)
	if err != nil || !created {
		w.t.Fatalf("create: created %v, %v", created, err)
	}
	return sb
}

func (w *world) get(id string) sandbox.Sandbox {
	w.t.Helper()
	sb, err := w.Get(w.t.Context(), acme, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return sb
}

func (w *world) all() []sandbox.Sandbox {
	w.t.Helper()
	page, err := w.List(w.t.Context(), acme, sandbox.ListQuery{})
	if err != nil {
		w.t.Fatal(err)
	}
	return page.Items
}

func (w *world) events(q sandbox.EventQuery) (types []sandbox.LifecycleType) {
	w.t.Helper()
	for e, err := range w.Events(w.t.Context(), acme, q) {
		if err != nil {
			w.t.Fatal(err)
		}
		types = append(types, e.Type)
	}
	return types
}

// wantEnded checks that a sandbox ended once, for this cause, and left nothing at the driver.
func (w *world) wantEnded(id string, cause sandbox.Cause) sandbox.Sandbox {
	w.t.Helper()
	sb := w.get(id)
	if sb.State != sandbox.StateEnded || sb.Cause != cause || sb.EndedAt.IsZero() {
		w.t.Fatalf("sandbox is %s by %q (%s) at %v, want ended by %q", sb.State, sb.Cause, sb.CauseMessage, sb.EndedAt, cause)
	}
	if stored, err := w.store.Get(w.t.Context(), id); err != nil || stored.State != sandbox.StateEnded || stored.Cause != cause {
		w.t.Fatalf("the row says %s by %q, %v", stored.State, stored.Cause, err)
	}
	ends := 0
	for _, kind := range w.events(sandbox.EventQuery{Sandbox: id}) {
		if kind == sandbox.LifecycleEnded {
			ends++
		}
	}
	if ends != 1 {
		w.t.Fatalf("%d ends are recorded, want 1", ends)
	}
	if w.driver.has(id) {
		w.t.Fatal("the driver still has it")
	}
	return sb
}

func wantKind(t *testing.T, err error, kind fault.Kind) {
	t.Helper()
	if !fault.Is(err, kind) {
		t.Fatalf("error is %v (%s), want kind %s", err, fault.KindOf(err), kind)
	}
}

type fakeTemplates struct{}

func (fakeTemplates) Resolve(_ context.Context, tenant, name string) (*template.Template, error) {
	switch name {
	case "python":
		return &template.Template{Name: "python", Digest: "sha256:py", User: "user", Limits: template.Limits{MemoryBytes: 1 << 30}}, nil
	case "base":
		return &template.Template{Name: "base", Digest: "sha256:base", User: "user"}, nil
	case "unbuilt":
		return nil, fault.New(fault.Unavailable, "template %s is not built yet", name)
	case "acmes":
		if tenant == "acme" {
			return &template.Template{Name: "acmes", Digest: "sha256:acmes", User: "user", Tenant: "acme"}, nil
		}
	}
	return nil, fault.New(fault.NotFound, "there is no template %q", name)
}

// failer fails the n-th call of an operation, counted from 1.
type failer struct {
	fmu   sync.Mutex
	calls map[string]int
	fail  func(op string, n int) error
}

func (f *failer) call(op string) error {
	f.fmu.Lock()
	if f.calls == nil {
		f.calls = map[string]int{}
	}
	f.calls[op]++
	n, fail := f.calls[op], f.fail
	f.fmu.Unlock()
	if fail == nil {
		return nil
	}
	return fail(op, n)
}

func (f *failer) count(op string) int {
	f.fmu.Lock()
	defer f.fmu.Unlock()
	return f.calls[op]
}

func (f *failer) failWith(fail func(op string, n int) error) {
	f.fmu.Lock()
	defer f.fmu.Unlock()
	f.fail = fail
}

// failing fails one operation's calls up to the n-th.
func failing(name string, times int, err error) func(string, int) error {
	return func(op string, n int) error {
		if op == name && n <= times {
			return err
		}
		return nil
	}
}

type fakeStore struct {
	failer
	sandbox.Store
	eventReads atomic.Int64
}

func (s *fakeStore) Events(ctx context.Context, tenant string, q sandbox.EventQuery, limit int) ([]sandbox.LifecycleEvent, error) {
	s.eventReads.Add(1)
	return s.Store.Events(ctx, tenant, q, limit)
}

func (s *fakeStore) Insert(ctx context.Context, r sandbox.Record, e ...sandbox.LifecycleEvent) error {
	if err := s.call("insert"); err != nil {
		return err
	}
	return s.Store.Insert(ctx, r, e...)
}

func (s *fakeStore) Save(ctx context.Context, r sandbox.Record, e ...sandbox.LifecycleEvent) error {
	if err := s.call("save " + string(r.State)); err != nil {
		return err
	}
	return s.Store.Save(ctx, r, e...)
}

func (s *fakeStore) InsertAll(ctx context.Context, entries []sandbox.Entry) error {
	for range entries {
		if err := s.call("insert"); err != nil {
			return err
		}
	}
	return s.Store.InsertAll(ctx, entries)
}

func (s *fakeStore) SaveAll(ctx context.Context, entries []sandbox.Entry) error {
	for _, e := range entries {
		if err := s.call("save " + string(e.Record.State)); err != nil {
			return err
		}
	}
	return s.Store.SaveAll(ctx, entries)
}

type fakeObserver struct {
	mu              sync.Mutex
	created, failed int
	adopted         int
	ended           map[string]int
	runs            int
	outcomes        []agentapi.Outcome
	kinds           []sandbox.RunKind
	forked          []told
	paused, resumed []fault.Kind // empty: it happened
}

// kindOf is empty where nothing failed.
func kindOf(err error) fault.Kind {
	if err == nil {
		return ""
	}
	return fault.KindOf(err)
}

// told is one fork as an Observer heard of it.
type told struct {
	n    int
	kind fault.Kind
}

func (o *fakeObserver) Created(_ sandbox.Sandbox, _ time.Duration, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		o.failed++
	} else {
		o.created++
	}
}

func (o *fakeObserver) Forked(_ sandbox.Sandbox, n int, _, _ time.Duration, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forked = append(o.forked, told{n, kindOf(err)})
}

func (o *fakeObserver) Paused(_ sandbox.Sandbox, _ time.Duration, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.paused = append(o.paused, kindOf(err))
}

func (o *fakeObserver) Resumed(_ sandbox.Sandbox, _ time.Duration, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resumed = append(o.resumed, kindOf(err))
}

func (o *fakeObserver) Adopted(sandbox.Sandbox) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.adopted++
}

func (o *fakeObserver) Ended(sb sandbox.Sandbox) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended == nil {
		o.ended = map[string]int{}
	}
	o.ended[sb.ID]++
}

func (o *fakeObserver) RunStarted(sandbox.Sandbox, sandbox.RunKind) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.runs++
}

func (o *fakeObserver) RunEnded(_ sandbox.Sandbox, kind sandbox.RunKind, outcome agentapi.Outcome, _ time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.outcomes = append(o.outcomes, outcome)
	o.kinds = append(o.kinds, kind)
}

// fakeDriver keeps sandboxes in a map and answers as their agent. It outlives servers.
type fakeDriver struct {
	failer
	caps  sandbox.Caps
	conns sync.WaitGroup

	mu       sync.Mutex
	boxes    map[string]*fakeBox
	ends     []sandbox.Ended
	news     chan struct{}
	onStart  func(ctx context.Context, req sandbox.StartRequest) error // instead of an immediate start
	onStop   func(id string)                                           // before a stop takes effect
	requests []sandbox.StartRequest
	changes  []sandbox.Change
	causes   []sandbox.Cause
	usage    sandbox.Usage

	onFork    func(ctx context.Context, req sandbox.ForkRequest) error // before a fork takes effect
	onFreeze  func(op, id string)                                      // before a pause or resume takes effect
	forks     []sandbox.ForkRequest
	snapshots []sandbox.SnapshotRequest
	removed   []string

	onSnapshot func() // after a snapshot has taken effect
}

type fakeBox struct {
	req     sandbox.StartRequest
	started time.Time
	gone    context.Context
	end     context.CancelFunc
	kernels map[string]agentapi.Kernel
	paused  bool
}

func newFakeDriver() *fakeDriver {
	return &fakeDriver{
		caps:  sandbox.Caps{Name: "fake", Network: true, Limits: true, Fork: true, Pause: true, Snapshot: true},
		boxes: map[string]*fakeBox{}, news: make(chan struct{}),
	}
}

func (d *fakeDriver) has(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.boxes[id] != nil
}

func (d *fakeDriver) size() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.boxes)
}

// wait ends what is left and waits for its connections.
func (d *fakeDriver) wait() {
	d.mu.Lock()
	for _, box := range d.boxes {
		box.end()
	}
	d.mu.Unlock()
	d.conns.Wait()
}

// die ends a sandbox from inside, or tells the end of one that is not there any more.
func (d *fakeDriver) die(end sandbox.Ended) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tell(end)
}

// dieIfLiving ends a sandbox unless somebody else has.
func (d *fakeDriver) dieIfLiving(end sandbox.Ended) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.boxes[end.ID] != nil {
		d.tell(end)
	}
}

// tell is called with mu held.
func (d *fakeDriver) tell(end sandbox.Ended) {
	if box := d.boxes[end.ID]; box != nil {
		box.end()
		delete(d.boxes, end.ID)
	}
	d.ends = append(d.ends, end)
	close(d.news)
	d.news = make(chan struct{})
}

// vanish loses everything without a word.
func (d *fakeDriver) vanish() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, box := range d.boxes {
		box.end()
	}
	clear(d.boxes)
}

func (d *fakeDriver) put(req sandbox.StartRequest) {
	gone, end := context.WithCancel(context.Background()) // ended by die, Stop or wait
	d.mu.Lock()
	defer d.mu.Unlock()
	d.requests = append(d.requests, req)
	d.boxes[req.ID] = &fakeBox{req: req, started: time.Now(), gone: gone, end: end, kernels: map[string]agentapi.Kernel{
		agentapi.DefaultKernel: {Name: agentapi.DefaultKernel, Language: "python", State: agentapi.KernelIdle},
	}}
}

func (d *fakeDriver) Caps() sandbox.Caps { return d.caps }

func (d *fakeDriver) Prepare(context.Context, string, *template.Template) error {
	return d.call("prepare")
}

func (d *fakeDriver) Start(ctx context.Context, req sandbox.StartRequest) error {
	if err := d.call("start"); err != nil {
		return err
	}
	d.mu.Lock()
	hook := d.onStart
	d.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req); err != nil {
			return err
		}
	}
	d.put(req)
	return nil
}

func (d *fakeDriver) box(id string) (*fakeBox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if box := d.boxes[id]; box != nil {
		return box, nil
	}
	return nil, fault.New(fault.NotFound, "no sandbox %q", id)
}

func (d *fakeDriver) Dial(_ context.Context, id string) (net.Conn, error) {
	if err := d.call("dial"); err != nil {
		return nil, err
	}
	box, err := d.box(id)
	if err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	d.conns.Go(func() {
		defer theirs.Close()
		defer context.AfterFunc(box.gone, func() { theirs.Close() })()
		d.answer(box, theirs)
	})
	return ours, nil
}

func (d *fakeDriver) Kernel(_ context.Context, id, kernel string) error {
	if err := d.call("kernel"); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	box := d.boxes[id]
	if box == nil {
		return fault.New(fault.NotFound, "no sandbox %q", id)
	}
	box.kernels[kernel] = agentapi.Kernel{Name: kernel, Language: "python", State: agentapi.KernelIdle, Warm: true}
	return nil
}

func (d *fakeDriver) Change(_ context.Context, id string, c sandbox.Change) error {
	if err := d.call("change"); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	box := d.boxes[id]
	if box == nil {
		return fault.New(fault.NotFound, "no sandbox %q", id)
	}
	d.changes = append(d.changes, c)
	if c.Deadline != nil {
		box.req.Deadline = *c.Deadline
	}
	if c.Network != nil {
		box.req.Network = *c.Network
	}
	return nil
}

func (d *fakeDriver) Usage(_ context.Context, id string) (sandbox.Usage, error) {
	if _, err := d.box(id); err != nil {
		return sandbox.Usage{}, err
	}
	d.mu.Lock()
	u := d.usage
	d.mu.Unlock()
	return u, d.call("usage")
}

func (d *fakeDriver) Stop(_ context.Context, id string, cause sandbox.Cause) error {
	if err := d.call("stop"); err != nil {
		return err
	}
	d.mu.Lock()
	hook := d.onStop
	d.causes = append(d.causes, cause)
	d.mu.Unlock()
	if hook != nil {
		hook(id)
	}
	d.dieIfLiving(sandbox.Ended{ID: id, Cause: cause, At: time.Now(), Usage: d.usage})
	return nil
}

func (d *fakeDriver) Fork(ctx context.Context, req sandbox.ForkRequest) (sandbox.Forked, error) {
	if err := d.call("fork"); err != nil {
		return sandbox.Forked{}, err
	}
	d.mu.Lock()
	hook := d.onFork
	d.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req); err != nil {
			return sandbox.Forked{}, err
		}
	}
	parent, err := d.box(req.Parent)
	if err != nil {
		return sandbox.Forked{}, err
	}
	d.mu.Lock()
	d.forks = append(d.forks, req)
	d.mu.Unlock()
	for _, c := range req.Children {
		d.put(sandbox.StartRequest{ID: c.ID, Tenant: parent.req.Tenant, Template: parent.req.Template, Deadline: c.Deadline})
	}
	return forked, nil
}

// forked is what every fork tells.
var forked = sandbox.Forked{
	Stall: 7 * time.Millisecond, Memory: 50 << 20, NotCopied: []sandbox.NotCopied{{Kind: "process", What: "sleep 100 (pid 17)"}},
}

func (d *fakeDriver) Pause(_ context.Context, id string) error { return d.freeze("pause", id, true) }

func (d *fakeDriver) Resume(_ context.Context, id string) error { return d.freeze("resume", id, false) }

func (d *fakeDriver) freeze(op, id string, paused bool) error {
	if err := d.call(op); err != nil {
		return err
	}
	d.mu.Lock()
	hook := d.onFreeze
	d.mu.Unlock()
	if hook != nil {
		hook(op, id)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	box := d.boxes[id]
	if box == nil {
		return fault.New(fault.NotFound, "no sandbox %q", id)
	}
	box.paused = paused
	return nil
}

func (d *fakeDriver) Snapshot(_ context.Context, req sandbox.SnapshotRequest) (*template.Template, error) {
	if err := d.call("snapshot"); err != nil {
		return nil, err
	}
	if _, err := d.box(req.ID); err != nil {
		return nil, err
	}
	if d.onSnapshot != nil {
		d.onSnapshot()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.snapshots = append(d.snapshots, req)
	return &template.Template{
		Name: req.Name, Digest: "sha256:" + req.Name, Description: req.Description, Tenant: req.Tenant,
	}, nil
}

func (d *fakeDriver) RemoveTemplate(_ context.Context, tenant, name string) error {
	d.mu.Lock()
	d.removed = append(d.removed, tenant+"/"+name)
	d.mu.Unlock()
	return d.call("remove")
}

func (d *fakeDriver) List(context.Context) (list []sandbox.Instance, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, box := range d.boxes {
		list = append(list, sandbox.Instance{ID: id, Tenant: box.req.Tenant, Deadline: box.req.Deadline, Started: box.started, Paused: box.paused})
	}
	return list, d.call("list")
}

func (d *fakeDriver) Ended(ctx context.Context) iter.Seq2[sandbox.Ended, error] {
	return func(yield func(sandbox.Ended, error) bool) {
		told := map[string]bool{}
		for {
			if err := d.call("ended"); err != nil {
				yield(sandbox.Ended{}, err)
				return
			}
			d.mu.Lock()
			ends, news := slices.Clone(d.ends), d.news
			d.mu.Unlock()
			for _, end := range ends {
				if !told[end.ID] && !yield(end, nil) {
					return
				}
				told[end.ID] = true
			}
			select {
			case <-news:
			case <-ctx.Done():
				return
			}
		}
	}
}

func (d *fakeDriver) Forget(_ context.Context, ids ...string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ends = slices.DeleteFunc(d.ends, func(e sandbox.Ended) bool { return slices.Contains(ids, e.ID) })
	return d.call("forget")
}

func (d *fakeDriver) remembered() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.ends)
}

func (d *fakeDriver) Close() error { return nil }

func (d *fakeDriver) setKernel(id string, k agentapi.Kernel) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.boxes[id].kernels[k.Name] = k
}

// answer is the agent: cells "die" and "hang" do what they say, every other prints itself.
func (d *fakeDriver) answer(box *fakeBox, conn net.Conn) {
	frame, err := agentapi.NewReader(conn).Read()
	if err != nil {
		return
	}
	req, err := agentapi.DecodeRequest(frame)
	if err != nil {
		return
	}
	_ = d.call("op " + string(req.Op))
	switch req.Op {
	case agentapi.OpRun:
		p, _ := agentapi.DecodeParams[agentapi.RunParams](req)
		d.answerRun(box, conn, p)
	case agentapi.OpExec:
		p, _ := agentapi.DecodeParams[agentapi.ExecParams](req)
		started(conn)
		switch p.Argv[0] {
		case "sleep":
			hang(conn)
		case "false":
			end(conn, agentapi.End{Outcome: agentapi.OutcomeError, ExitCode: 1})
			return
		}
		end(conn, agentapi.End{Outcome: agentapi.OutcomeOK})
	case agentapi.OpKernels:
		d.mu.Lock()
		kernels := slices.Collect(maps.Values(box.kernels))
		d.mu.Unlock()
		value(conn, kernels)
	case agentapi.OpKernelStart:
		p, _ := agentapi.DecodeParams[agentapi.KernelStartParams](req)
		k := agentapi.Kernel{Name: p.Kernel, Language: p.Language, State: agentapi.KernelIdle, Cwd: p.Cwd}
		d.mu.Lock()
		box.kernels[p.Kernel] = k
		d.mu.Unlock()
		value(conn, k)
	case agentapi.OpKernelWait, agentapi.OpKernelStop:
		p, _ := agentapi.DecodeParams[agentapi.KernelParams](req)
		d.mu.Lock()
		k, ok := box.kernels[p.Kernel]
		if req.Op == agentapi.OpKernelStop {
			delete(box.kernels, p.Kernel)
		} else if p.Cwd != "" {
			k.Cwd = p.Cwd
			box.kernels[p.Kernel] = k
		}
		d.mu.Unlock()
		if !ok {
			refuse(conn, fault.NotFound)
			return
		}
		value(conn, k)
	case agentapi.OpHalt:
		d.mu.Lock()
		clear(box.kernels)
		d.mu.Unlock()
		end(conn, agentapi.End{Outcome: agentapi.OutcomeOK})
	default:
		value(conn, agentapi.Hello{Version: agentapi.Version})
	}
}

func (d *fakeDriver) answerRun(box *fakeBox, conn net.Conn, p agentapi.RunParams) {
	d.mu.Lock()
	k, ok := box.kernels[p.Kernel]
	if p.Code == "die" {
		box.kernels[p.Kernel] = agentapi.Kernel{Name: p.Kernel, State: agentapi.KernelDead}
	}
	d.mu.Unlock()
	switch {
	case !ok: // as the agent does: it may be made
		refuse(conn, fault.Gone)
		return
	case k.State == agentapi.KernelDead:
		refuse(conn, fault.Gone)
		return
	}
	started(conn)
	if p.Code == "die" {
		end(conn, agentapi.End{Outcome: agentapi.OutcomeKernelDied, Lost: true})
		return
	}
	if p.Code == "hang" {
		hang(conn)
	}
	_ = agentapi.WriteFrame(conn, agentapi.FrameStdout, []byte(p.Code))
	end(conn, agentapi.End{Outcome: agentapi.OutcomeOK})
}

// hang waits until the other side or the sandbox is gone.
func hang(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) }

func started(conn net.Conn) {
	_ = agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted})
}

func end(conn net.Conn, e agentapi.End) { _ = agentapi.WriteJSON(conn, agentapi.FrameEnd, e) }

func refuse(conn net.Conn, kind fault.Kind) {
	end(conn, agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: kind, Message: "refused"}})
}

func value(conn net.Conn, v any) {
	b, _ := json.Marshal(v)
	end(conn, agentapi.End{Outcome: agentapi.OutcomeOK, Value: b})
}
