package opensandbox

import (
	"context"
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// mainTag names the entrypoint among the processes of its sandbox.
const mainTag = "opensandbox-entrypoint"

// idioms are the commands that keep a container alive and do nothing.
var idioms = []string{"tail -f /dev/null", "sleep infinity", "sleep inf"}

// interpreterScripts are what images of OpenSandbox's code interpreter start, newer and older ones, in the place of which templates of
// ours have kernels.
var interpreterScripts = []string{"/opt/code-interpreter/code-interpreter.sh", "/opt/opensandbox/code-interpreter.sh"}

// idles tells whether an entrypoint only keeps a container alive: a sandbox lives without one, and nothing is started.
func idles(argv []string, from *template.Template) bool {
	switch shell := path.Base(argv[0]); {
	case len(argv) == 3 && (shell == "sh" || shell == "bash") && argv[1] == "-c":
		argv = strings.Fields(strings.TrimPrefix(strings.TrimSpace(argv[2]), "exec "))
	case slices.Contains(interpreterScripts, argv[0]):
		return from.Image == nil
	}
	if len(argv) == 0 {
		return false
	}
	argv = slices.Clone(argv)
	argv[0] = path.Base(argv[0])
	return slices.Contains(idioms, strings.Join(argv, " "))
}

// launch starts an entrypoint, which goes on without us, and watches it.
func (a *API) launch(who auth.Principal, sb sandbox.Sandbox, argv []string) error {
	// Of the API's life: the stream is read for as long as the entrypoint runs, whoever made it.
	stream, err := a.run(who, sb.ID, argv)
	if err != nil {
		return entrypointFault(err)
	}
	return a.watch(who, sb.ID, stream)
}

func (a *API) run(who auth.Principal, id string, argv []string) (*agentapi.Stream, error) {
	return a.sandboxes.Exec(a.life, who, id, agentapi.ExecParams{Argv: argv, Disconnect: agentapi.DisconnectSurvive, Tag: mainTag})
}

// entrypointFault is why an entrypoint did not start: mostly, that it is not there.
func entrypointFault(err error) error {
	switch fault.KindOf(err) {
	case fault.Invalid, fault.NotFound, fault.Denied:
		return withStatus(http.StatusBadRequest, codeEntrypoint, fault.Wrap(fault.Invalid, err, "the entrypoint cannot be started: %s", fault.Message(err)))
	case fault.Internal, fault.DiskFull, fault.Unavailable, fault.Timeout:
		return withStatus(http.StatusInternalServerError, codeStart, err)
	case fault.Unauthed, fault.Conflict, fault.Exhausted, fault.Gone, fault.Unsupported:
	}
	return err
}

// adopt watches the entrypoint of a sandbox that another server has started, or that nobody could watch while it was paused.
// One that was ended by a pause is started again.
func (a *API) adopt(sb sandbox.Sandbox) {
	f, err := access.Decode(sb)
	if err != nil || f.Process == "" || sb.State != sandbox.StateRunning || a.creations.find(sb.Tenant, sb.ID) != nil {
		return // of one that is being made the entrypoint may not have begun
	}
	if rawport.IsClosed(a.sandboxes.Stopped(sb.ID)) {
		return // it is another server's
	}
	log, ok := a.mains.begin(sb.ID)
	if !ok {
		return
	}
	who := auth.Principal{Tenant: sb.Tenant}
	begin := func() (*agentapi.Stream, error) { return nil, nil } // which attaches
	if a.mains.thaw(sb.ID) {
		begin = func() (*agentapi.Stream, error) { return a.run(who, sb.ID, f.Entrypoint) }
	}
	a.work.Go(func() {
		stream, err := begin()
		if err != nil {
			a.mains.end(sb.ID)
			a.end(who, sb.ID, sandbox.CauseFailed, "its entrypoint cannot be started again: "+fault.Message(err))
			return
		}
		a.stay(who, sb.ID, stream, log)
	})
}

// chill notes that a pause has ended a sandbox's processes, its entrypoint among them.
func (a *API) chill(sb sandbox.Sandbox) {
	if f, err := access.Decode(sb); err == nil && f.Process != "" && sb.State == sandbox.StatePaused && sb.Cold {
		a.mains.chill(sb.ID)
	}
}

// chilled tells whether an entrypoint has ended because of a pause.
func (a *API) chilled(who auth.Principal, id string) bool {
	if sb, err := a.sandboxes.Get(a.life, who, id); err == nil {
		a.chill(sb)
	}
	return a.mains.cold(id)
}

func (a *API) attach(who auth.Principal, id string) (*agentapi.Stream, error) {
	client, err := a.sandboxes.Agent(a.life, who, id)
	if err != nil {
		return nil, err
	}
	return client.Attach(a.life, agentapi.AttachParams{Target: agentapi.Target{Tag: mainTag}, Ended: true})
}

// watch reads what an entrypoint says from now on. One that somebody watches already is left to him.
func (a *API) watch(who auth.Principal, id string, stream *agentapi.Stream) error {
	log, ok := a.mains.begin(id)
	if !ok {
		return stream.Close()
	}
	a.work.Go(func() { a.stay(who, id, stream, log) })
	return nil
}

// stay watches an entrypoint for as long as its sandbox runs; stream: nil to attach first. One whose sandbox is paused
// meanwhile is adopted again when somebody resumes it.
func (a *API) stay(who auth.Principal, id string, stream *agentapi.Stream, log *tail) {
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		begun := time.Now()
		if a.hear(who, id, stream, log) {
			a.mains.end(id)
			return
		}
		if time.Since(begun) > retryMost {
			pause = retryFirst
		}
		stream = nil
		if a.mains.cold(id) || !a.sleep(pause) || !a.runs(who, id) {
			break
		}
	}
	a.mains.end(id)
	// Whoever resumed it a moment ago has found it watched.
	if sb, err := a.sandboxes.Get(a.life, who, id); err == nil && a.life.Err() == nil {
		a.adopt(sb)
	}
}

// runs tells whether a sandbox can be attached to. Where nobody knows, that is tried.
func (a *API) runs(who auth.Principal, id string) bool {
	sb, err := a.sandboxes.Get(a.life, who, id)
	if err != nil {
		return !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Gone)
	}
	return sb.State == sandbox.StateRunning && !rawport.IsClosed(a.sandboxes.Stopped(id)) // else another server attaches
}

// hear reads what an entrypoint says until it ends, and then ends its sandbox, as a container ends. It is false when the
// connection ended before: the entrypoint may live.
func (a *API) hear(who auth.Principal, id string, stream *agentapi.Stream, log *tail) (over bool) {
	if stream == nil {
		var err error
		stream, err = a.attach(who, id)
		if fault.Is(err, fault.NotFound) && a.runs(who, id) { // of the agent, which knows each process until a while after its end
			a.end(who, id, sandbox.CauseFailed, "its entrypoint ended while no server watched it")
			return true
		}
		if err != nil {
			a.unheard(who, id, err)
			return false
		}
	}
	defer stream.Close()
	defer context.AfterFunc(a.life, func() { stream.Close() })()
	end, err := follow(stream, log)
	if end == nil || a.chilled(who, id) {
		a.unheard(who, id, err)
		return false
	}
	a.exited(who, id, end)
	return true
}

// unheard notes why an entrypoint is not watched for the moment, unless it is that its sandbox, or the server, ends.
func (a *API) unheard(who auth.Principal, id string, err error) {
	if err != nil && a.life.Err() == nil && !fault.Is(err, fault.Gone) {
		a.log.Debug("an entrypoint is not watched for now", "sandbox", id, "tenant", who.Tenant, "error", err)
	}
}

// follow reads a stream to the end of its process, or to its own: then the end is nil.
func follow(stream *agentapi.Stream, log *tail) (*agentapi.End, error) {
	for event, err := range stream.Events() {
		if err != nil {
			return nil, err
		}
		switch event.Type {
		case agentapi.EventStdout, agentapi.EventStderr:
			log.add(event.Data)
		case agentapi.EventEnd:
			return event.End, nil
		}
	}
	return nil, nil
}

// exited ends the sandbox of an entrypoint that is over.
func (a *API) exited(who auth.Principal, id string, end *agentapi.End) {
	cause, message := sandbox.CauseExited, "its entrypoint ended"
	if end.Outcome != agentapi.OutcomeOK || end.ExitCode != 0 {
		cause, message = sandbox.CauseFailed, fmt.Sprintf("its entrypoint ended with exit status %d", end.ExitCode)
		if end.Signal != "" {
			message = "its entrypoint was ended by " + end.Signal
		}
	}
	a.end(who, id, cause, message)
}

func (a *API) end(who auth.Principal, id string, cause sandbox.Cause, message string) {
	if _, err := a.sandboxes.End(context.WithoutCancel(a.life), who, id, cause, message); err != nil {
		a.log.Warn("sandbox whose entrypoint is over is not ended yet", "sandbox", id, "tenant", who.Tenant, "error", err)
	}
}

// How much of an entrypoint's output is kept, and of how many that are over.
const (
	maxTail  = 256 << 10
	maxTails = 256
)

// mains are the entrypoints that are watched, and the output of those that were.
type mains struct {
	mu    sync.Mutex
	tails map[string]*tail // by sandbox
	going map[string]bool
	iced  map[string]bool // ended by a pause, to be started again
	over  []string        // in the order of their ends
}

func newMains() *mains {
	return &mains{tails: map[string]*tail{}, going: map[string]bool{}, iced: map[string]bool{}}
}

// chill notes that a pause has ended one.
func (m *mains) chill(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.iced[id] = true
}

func (m *mains) cold(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.iced[id]
}

// thaw forgets what chill noted, and tells whether it had.
func (m *mains) thaw(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.iced[id]
	delete(m.iced, id)
	return was
}

func (m *mains) begin(id string) (*tail, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.going[id] {
		return nil, false
	}
	m.going[id] = true
	if m.tails[id] == nil {
		m.tails[id] = &tail{}
	}
	return m.tails[id], true
}

// end keeps what was said, and forgets the oldest when there is too much of it.
func (m *mains) end(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.going, id)
	m.over = append(m.over, id)
	for len(m.over) > maxTails {
		oldest := m.over[0]
		m.over = m.over[1:]
		if !m.going[oldest] {
			delete(m.tails, oldest)
		}
	}
}

func (m *mains) remove(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.tails, id)
}

// output is what an entrypoint has said at last, and whether something was left out before it.
func (m *mains) output(id string) (text string, cut bool) {
	m.mu.Lock()
	t := m.tails[id]
	m.mu.Unlock()
	if t == nil {
		return "", false
	}
	return t.read()
}

// tail keeps the last of what is written to it.
type tail struct {
	mu   sync.Mutex
	kept []byte
	cut  bool
}

func (t *tail) add(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - maxTail; over > maxTail { // copied once for each maxTail bytes
		t.kept, t.cut = slices.Clone(t.kept[over:]), true
	}
}

func (t *tail) read() (string, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if over := len(t.kept) - maxTail; over > 0 {
		return strings.ToValidUTF8(string(t.kept[over:]), "\uFFFD"), true
	}
	return strings.ToValidUTF8(string(t.kept), "\uFFFD"), t.cut
}
