package build_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// domain is a double of sandboxes and templates. Its sandboxes have no file system: they remember what was asked of them.
// It has no network either, so that tests can let time be false.
type domain struct {
	mu        sync.Mutex
	next      int
	fixed     bool // there are no templates but those that there are
	living    map[string]sandbox.Sandbox
	created   []sandbox.Spec
	commands  []string // what shells were asked to run, with who ran it
	written   map[string]string
	users     map[string]bool
	made      map[string]*template.Template // snapshots
	refuse    map[string]error              // of RemoveTemplate
	conns     map[string][]net.Conn
	pulls     []template.PullRequest // that were asked for
	shells    []string               // that images have
	stuck     bool                   // images are never ready
	failTimes int                    // how often the command "flaky" fails
	onCreate  func(template string)  // called first in Create

	work sync.WaitGroup // the agents' ends of connections
}

func newDomain() *domain {
	return &domain{
		living: map[string]sandbox.Sandbox{}, written: map[string]string{}, users: map[string]bool{"root": true, "user": true},
		made: map[string]*template.Template{}, refuse: map[string]error{}, conns: map[string][]net.Conn{}, shells: []string{"/bin/bash", "/bin/sh"},
	}
}

// registry is what can be pulled.
var registry = map[string]*template.Template{
	"debian:13": {
		Name: "img-debian", Tenant: "acme", Digest: "d-debian", User: "root", Workdir: "/", Env: map[string]string{"LANG": "C.UTF-8"},
		Image: &template.Image{Reference: "docker.io/library/debian:13"},
	},
	"python:3.9-slim": {Name: "img-python", Tenant: "acme", Digest: "d-python39", User: "root", Workdir: "/", Image: &template.Image{}},
}

func (d *domain) Ensure(_ context.Context, tenant string, r template.PullRequest) (*template.Template, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	tell := r.Progress
	r.Progress = nil
	d.pulls = append(d.pulls, r)
	t := registry[r.Reference]
	if t == nil {
		return nil, fault.New(fault.NotFound, "there is no image %s", r.Reference)
	}
	tell(template.PullProgress{Step: template.PullResolve})
	tell(template.PullProgress{Step: template.PullDone, Layer: "sha256:0123456789abcdef0123", Done: 2500, Total: 2500})
	d.made[t.Name] = t
	return t, nil
}

var operators = map[string]*template.Template{
	"base":   {Name: "base", Digest: "d-base", User: "user", Workdir: "/home/user", Description: "this host's userland"},
	"python": {Name: "python", Digest: "d-python", User: "user", Workdir: "/home/user", Python: template.Python{Version: "3.13.0"}},
}

func (d *domain) List(tenant string) []template.Info {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []template.Info
	for _, name := range slices.Sorted(maps.Keys(operators)) {
		all = append(all, template.Info{Name: name, Digest: operators[name].Digest})
	}
	for _, t := range d.made {
		if t.Tenant == tenant {
			all = append(all, template.Info{Name: t.Name, Tenant: tenant, Digest: t.Digest, Source: template.SourceSnapshot})
		}
	}
	return all
}

func (d *domain) Resolve(_ context.Context, tenant, name string) (*template.Template, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t := operators[name]; t != nil {
		return t, nil
	}
	if t := d.made[name]; t != nil && t.Tenant == tenant {
		return t, nil
	}
	return nil, fault.New(fault.NotFound, "there is no template %q", name)
}

func (d *domain) Caps() sandbox.Caps { return sandbox.Caps{Name: "double", Snapshot: !d.fixed} }

func (d *domain) Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error) {
	if d.onCreate != nil {
		d.onCreate(spec.Template)
	}
	if _, err := d.Resolve(ctx, p.Tenant, spec.Template); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next++
	limits := spec.Limits
	if limits.DiskBytes == 0 {
		limits.DiskBytes = 2 << 30
	}
	sb := sandbox.Sandbox{ID: fmt.Sprintf("sb%d", d.next), Tenant: p.Tenant, Template: spec.Template, Limits: limits, Annotations: spec.Annotations}
	d.living[sb.ID] = sb
	d.created = append(d.created, spec)
	return sb, true, nil
}

func (d *domain) Each(yield func(sandbox.Sandbox) bool) {
	d.mu.Lock()
	all := slices.Collect(maps.Values(d.living))
	d.mu.Unlock()
	for _, sb := range all {
		if !yield(sb) {
			return
		}
	}
}

func (d *domain) Kill(_ context.Context, p auth.Principal, id string) (sandbox.Sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sb, ok := d.living[id]
	if !ok || sb.Tenant != p.Tenant {
		return sandbox.Sandbox{}, fault.New(fault.NotFound, "no sandbox %s", id)
	}
	delete(d.living, id)
	for _, c := range d.conns[id] {
		c.Close()
	}
	return sb, nil
}

func (d *domain) SnapshotAs(_ context.Context, p auth.Principal, id string, spec sandbox.SnapshotSpec) (*template.Template, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sb, ok := d.living[id]
	if !ok {
		return nil, fault.New(fault.Gone, "sandbox %s has ended", id)
	}
	t := &template.Template{
		Name: spec.Name, Tenant: p.Tenant, Digest: "d-" + spec.Name, Description: spec.Description, Env: spec.Env, Sudo: spec.Sudo,
		User: cmp.Or(spec.User, "user"), Workdir: cmp.Or(spec.Workdir, "/home/user"), Snapshot: &template.Snapshot{From: sb.Template},
	}
	d.made[spec.Name] = t
	return t, nil
}

func (d *domain) RemoveTemplate(_ context.Context, _ auth.Principal, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refuse[name]; err != nil {
		return err
	}
	if d.made[name] == nil {
		return fault.New(fault.NotFound, "no template %s", name)
	}
	for _, t := range d.made {
		if t.Snapshot != nil && t.Snapshot.From == name {
			return fault.New(fault.Conflict, "template %s is made from %s; remove that first", t.Name, name)
		}
	}
	delete(d.made, name)
	return nil
}

func (d *domain) Explain(_ context.Context, _ auth.Principal, _ string, err error) error { return err }

func (d *domain) Agent(_ context.Context, _ auth.Principal, id string) (*agentapi.Client, error) {
	return agentapi.NewClient(func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		d.mu.Lock()
		defer d.mu.Unlock()
		if _, ok := d.living[id]; !ok {
			return nil, fault.New(fault.Gone, "sandbox %s has ended", id)
		}
		d.conns[id] = append(d.conns[id], far)
		d.work.Go((&agent{far, agentapi.NewReader(far), d}).serve)
		return near, nil
	}), nil
}

func (d *domain) Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error) {
	a, err := d.Agent(ctx, p, id)
	if err != nil {
		return nil, err
	}
	return a.Exec(ctx, params)
}

// ran are the commands since the last call.
func (d *domain) ran() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.commands
	d.commands = nil
	return all
}

func (d *domain) count() (living, made int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.living), len(d.made)
}

// agent answers one operation.
type agent struct {
	conn net.Conn
	r    *agentapi.Reader
	d    *domain
}

func (a *agent) serve() {
	defer a.conn.Close()
	f, err := a.r.Read()
	if err != nil {
		return
	}
	var req agentapi.Request
	_ = json.Unmarshal(f.Payload, &req)
	switch req.Op {
	case agentapi.OpExec:
		var p agentapi.ExecParams
		_ = json.Unmarshal(req.Params, &p)
		a.exec(p)
	case agentapi.OpWrite:
		var p agentapi.WriteParams
		_ = json.Unmarshal(req.Params, &p)
		a.write(p)
	case agentapi.OpStat:
		var p agentapi.PathParams
		_ = json.Unmarshal(req.Params, &p)
		if slices.Contains(a.d.shells, p.Path) {
			a.answer(agentapi.Entry{})
			return
		}
		a.missing()
	case agentapi.OpRead:
		var p agentapi.ReadParams
		_ = json.Unmarshal(req.Params, &p)
		a.read(p)
	case agentapi.OpAccount:
		var p agentapi.AccountParams
		_ = json.Unmarshal(req.Params, &p)
		a.account(p)
	case agentapi.OpMkdir, agentapi.OpChmod:
		a.answer(agentapi.Entry{})
	case agentapi.OpSignal, agentapi.OpRemove, agentapi.OpSymlink:
		a.answer(struct{}{})
	default:
		a.end(agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: fault.Unsupported, Message: string(req.Op)}})
	}
}

func (a *agent) end(e agentapi.End) { _ = agentapi.WriteJSON(a.conn, agentapi.FrameEnd, e) }

func (a *agent) answer(v any) {
	value, _ := json.Marshal(v)
	a.end(agentapi.End{Outcome: agentapi.OutcomeOK, Value: value})
}

func (a *agent) missing() {
	a.end(agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: fault.NotFound, Message: "it does not exist"}})
}

func (a *agent) read(p agentapi.ReadParams) {
	a.d.mu.Lock()
	text, ok := a.d.written[p.Path]
	a.d.mu.Unlock()
	if !ok {
		a.missing()
		return
	}
	_ = agentapi.WriteJSON(a.conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted, Entry: &agentapi.Entry{}})
	_ = agentapi.WriteFrame(a.conn, agentapi.FrameData, []byte(text))
	a.answer(struct{}{})
}

func (a *agent) account(p agentapi.AccountParams) {
	a.d.mu.Lock()
	known := p.User == "" || a.d.users[p.User] || strings.Contains(a.d.written["/etc/passwd"], p.User+":")
	a.d.mu.Unlock()
	if !known {
		a.missing()
		return
	}
	a.answer(agentapi.Account{Name: p.User, Environ: map[string]string{"HOME": "/home/user", "PATH": "/usr/bin"}})
}

func (a *agent) write(p agentapi.WriteParams) {
	var content bytes.Buffer
	for {
		f, err := a.r.Read()
		if err != nil {
			return
		}
		if f.Kind == agentapi.FrameEOF {
			break
		}
		content.Write(f.Payload)
	}
	a.d.mu.Lock()
	if p.Append {
		a.d.written[p.Path] += content.String()
	} else {
		a.d.written[p.Path] = content.String()
	}
	a.d.mu.Unlock()
	a.answer(agentapi.Entry{})
}

func (a *agent) exec(p agentapi.ExecParams) {
	if len(p.Argv) == 4 && p.Argv[1] == "-l" {
		a.d.mu.Lock()
		a.d.commands = append(a.d.commands, p.User+": "+p.Argv[3])
		a.d.mu.Unlock()
	}
	_ = agentapi.WriteJSON(a.conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted, PID: 7, ID: "p7"})
	if p.Stdin {
		for {
			f, err := a.r.Read()
			if err != nil {
				return
			}
			if f.Kind == agentapi.FrameEOF {
				break
			}
		}
	}
	code := a.do(p)
	if code < 0 {
		return
	}
	end := agentapi.End{Outcome: agentapi.OutcomeOK, ExitCode: code}
	if code != 0 {
		end.Outcome = agentapi.OutcomeError
	}
	a.end(end)
}

// do runs what a shell is given: fail N, hang, sleep N, flaky, or anything else, which is printed. −1: its connection is gone.
func (a *agent) do(p agentapi.ExecParams) int {
	say := func(text string) { _ = agentapi.WriteFrame(a.conn, agentapi.FrameStdout, []byte(text)) }
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	if p.Argv[1] == "-c" { // a script of our own
		if a.d.stuck && strings.Contains(p.Argv[2], "/etc/skel") {
			a.d.mu.Unlock()
			defer a.d.mu.Lock()
			_, _ = io.Copy(io.Discard, a.conn)
			return -1
		}
		return 0
	}
	text := p.Argv[3]
	word, rest, _ := strings.Cut(text, " ")
	if word == "flaky" && a.d.failTimes > 0 {
		a.d.failTimes--
		return 1
	}
	a.d.mu.Unlock()
	defer a.d.mu.Lock()
	switch word {
	case "fail":
		code := 0
		_, _ = fmt.Sscan(rest, &code)
		return code
	case "hang":
		_, _ = io.Copy(io.Discard, a.conn)
		return -1
	case "sleep":
		var n int
		_, _ = fmt.Sscan(rest, &n)
		time.Sleep(time.Duration(n) * time.Second)
	default:
		say(text + "\n")
	}
	return 0
}
