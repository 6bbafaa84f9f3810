package cove

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/template"
)

// Sessions is what the API asks of sessions.
type Sessions interface {
	Ensure(ctx context.Context, p auth.Principal, key string, req session.Request) (session.Session, bool, error)
	Get(ctx context.Context, p auth.Principal, key string) (session.Session, error)
	List(ctx context.Context, p auth.Principal, q session.Query) (session.Page, error)
	Stop(ctx context.Context, p auth.Principal, key string) (session.Session, error)
	Remove(ctx context.Context, p auth.Principal, key string) error
	Run(ctx context.Context, p auth.Principal, key string, spec session.RunSpec) iter.Seq2[session.Event, error]
	KeepFile(ctx context.Context, p auth.Principal, key, path, toolCall string) (artifact.Artifact, error)
	Log(ctx context.Context, p auth.Principal, key string, q session.LogQuery) iter.Seq2[json.RawMessage, error]
	State(ctx context.Context, p auth.Principal, key string) (session.PythonState, error)
	Checkpoint(ctx context.Context, p auth.Principal, key, id string, metadata map[string]string) (session.Checkpoint, bool, error)
	Checkpoints(ctx context.Context, p auth.Principal, key string) ([]session.Checkpoint, error)
	RemoveCheckpoint(ctx context.Context, p auth.Principal, key, id string) error
	Restore(ctx context.Context, p auth.Principal, key, id, into string) (session.Session, error)
}

// SetSessions lets the API answer for sessions. It is set before the API serves.
func (a *API) SetSessions(s Sessions) { a.sessions = s }

var errNoSessions = fault.New(fault.Unsupported, "this server has no sessions: where there are several servers they need a volume that all of them have (server.shared_volume)")

func (c *call) key() string { return c.r.PathValue("key") }

// ofSessions is a handler of what only a server with sessions can do.
func ofSessions(handle func(*API, *call) error) func(*API, *call) error {
	return func(a *API, c *call) error {
		if a.sessions == nil {
			return errNoSessions
		}
		return handle(a, c)
	}
}

func (a *API) listSessions(c *call) error {
	q := c.query()
	ask := session.Query{Cursor: q.cursor(momentCursor), Limit: int(q.integer("limit", 1, sandbox.MaxPage))}
	for _, s := range q.values["state"] {
		ask.States = append(ask.States, session.State(s))
	}
	if q.err != nil {
		return q.err
	}

	page, err := a.sessions.List(c.ctx(), c.who, ask)
	if err != nil {
		return err
	}

	out := client.SessionList{Sessions: make([]client.SessionInfo, len(page.Items)), Cursor: page.Next}
	for i := range page.Items {
		out.Sessions[i] = wireSession(&page.Items[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) openSession(c *call) error {
	var req client.SessionRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	ask, err := a.sessionRequest(c, req)
	if err != nil {
		return err
	}

	s, created, err := a.sessions.Ensure(c.ctx(), c.who, c.key(), ask)
	if err != nil {
		return err
	}

	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	return c.answer(status, wireSession(&s))
}

func (a *API) sessionRequest(c *call, req client.SessionRequest) (session.Request, error) {
	out := session.Request{Recreate: req.Recreate, Spec: session.Spec{
		Template: req.Template, Image: req.Image, Storage: session.Storage(req.Storage), Size: req.SizeBytes, KeepFiles: req.KeepFiles,
		Env: req.Env, Metadata: req.Metadata,
	}}
	var err error
	if out.IdleTimeout, err = lifetime("idle_timeout_seconds", req.IdleTimeoutSeconds); err != nil {
		return out, err
	}
	if out.Lifetime, err = lifetime("timeout_seconds", req.TimeoutSeconds); err != nil {
		return out, err
	}
	if req.Datasets != nil {
		out.Datasets = session.Datasets{Access: req.Datasets.Access, Path: req.Datasets.Path}
	}
	if req.Limits != nil {
		out.Limits = template.Limits(*req.Limits)
	}
	if out.Network, err = networkOf(req.Network); err != nil {
		return out, err
	}
	if out.Network != nil { // also where a sandbox lives already, which keeps its own
		if err := out.Network.Validate(); err != nil {
			return out, err
		}
	}
	var spec sandbox.Spec
	_, err = a.fromImage(c, client.CreateRequest{Template: req.Template, Image: req.Image}, &spec)
	if req.Image != "" {
		out.Template = spec.Template
	}
	return out, err
}

func (a *API) getSession(c *call) error {
	s, err := a.sessions.Get(c.ctx(), c.who, c.key())
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireSession(&s))
}

func (a *API) removeSession(c *call) error {
	if err := a.sessions.Remove(c.ctx(), c.who, c.key()); err != nil {
		return err
	}
	return c.nothing()
}

func (a *API) stopSession(c *call) error {
	s, err := a.sessions.Stop(c.ctx(), c.who, c.key())
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireSession(&s))
}

func (a *API) keepFile(c *call) error {
	var req client.KeepRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}

	kept, err := a.sessions.KeepFile(c.ctx(), c.who, c.key(), req.Path, req.ToolCall)
	if err != nil {
		return err
	}

	return c.answer(http.StatusCreated, a.wireArtifact(&kept))
}

func (a *API) sessionLog(c *call) error {
	q := c.query()
	ask := session.LogQuery{After: q.integer("after", 0, 1<<62), Last: int(q.integer("last", 1, 1<<31-1)), Follow: q.flag("follow")}
	if q.err != nil {
		return q.err
	}

	lines := newLines(c)
	if ask.Follow {
		if _, err := a.sessions.Get(c.ctx(), c.who, c.key()); err != nil {
			return err
		}
		// The head tells the client that it follows. A follower over the tenant's share gets 429 instead.
		ask.Following = func() {
			lines.begin()
			_ = lines.rc.Flush()
		}
	}
	for line, err := range a.sessions.Log(c.ctx(), c.who, c.key(), ask) {
		if err != nil {
			return lines.fail(a, err, func(f *client.Fault) any { return client.Event{Type: client.EventFault, Fault: f} })
		}
		if lines.raw(append(line[:len(line):len(line)], '\n')) != nil {
			return nil // the client has left
		}
	}
	lines.begin()
	return nil
}

func (a *API) sessionState(c *call) error {
	s, err := a.sessions.State(c.ctx(), c.who, c.key())
	if err != nil {
		return err
	}
	out := client.SessionState{Time: s.Time, Variables: make(map[string]client.SessionVariable, len(s.Variables)), Modules: s.Modules, Truncated: s.Truncated}
	for name, v := range s.Variables {
		out.Variables[name] = client.SessionVariable(v)
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) listCheckpoints(c *call) error {
	all, err := a.sessions.Checkpoints(c.ctx(), c.who, c.key())
	if err != nil {
		return err
	}
	out := client.CheckpointList{Checkpoints: make([]client.Checkpoint, len(all))}
	for i := range all {
		out.Checkpoints[i] = wireCheckpoint(&all[i], c.key())
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) checkpointSession(c *call) error {
	var req client.CheckpointRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}

	made, created, err := a.sessions.Checkpoint(c.ctx(), c.who, c.key(), req.ID, req.Metadata)
	if err != nil {
		return err
	}

	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	return c.answer(status, wireCheckpoint(&made, c.key()))
}

func (a *API) removeCheckpoint(c *call) error {
	if err := a.sessions.RemoveCheckpoint(c.ctx(), c.who, c.key(), c.r.PathValue("checkpoint")); err != nil {
		return err
	}
	return c.nothing()
}

func (a *API) restoreSession(c *call) error {
	var req client.RestoreRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}

	s, err := a.sessions.Restore(c.ctx(), c.who, c.key(), req.Checkpoint, req.Session)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireSession(&s))
}

func wireSession(s *session.Session) client.SessionInfo {
	info := client.SessionInfo{
		Key: s.Key, ID: s.ID, State: string(s.State), Sandbox: s.Sandbox, Generation: s.Generation, Template: s.Template,
		Storage: string(s.Storage), SizeBytes: s.Size, Datasets: client.SessionDatasets(s.Datasets), Metadata: s.Metadata,
		Runs: s.Runs, Failed: s.Failed, Artifacts: s.Artifacts, CreatedAt: s.Created, LastUsed: s.LastUsed, StoppedAt: s.Stopped,
		IdleTimeoutSeconds: max(0, s.IdleTimeout.Seconds()), Deadline: s.Deadline,
	}
	if s.IdleTimeout < time.Millisecond { // none
		info.IdleTimeoutSeconds = 0
	}
	if s.Lost != nil {
		info.Lost = &client.SessionLoss{Sandbox: s.Lost.Sandbox, Cause: string(s.Lost.Cause), Message: s.Lost.Message, At: s.Lost.At}
	}
	return info
}

func wireCheckpoint(c *session.Checkpoint, key string) client.Checkpoint {
	out := client.Checkpoint{ID: c.ID, Session: key, CreatedAt: c.Created, Metadata: c.Metadata}
	for _, n := range c.NotCopied {
		out.NotCopied = append(out.NotCopied, client.NotCopied(n))
	}
	return out
}

func (a *API) runSession(c *call) error {
	var req client.SessionRunRequest
	if err := c.decode(maxCode, &req); err != nil {
		return err
	}
	params, err := runParams(client.RunRequest{
		Code: req.Code, Env: req.Env, Cwd: req.Cwd, TimeoutSeconds: req.TimeoutSeconds, OnDisconnect: req.OnDisconnect,
	})
	if err != nil {
		return err
	}
	spec := session.RunSpec{
		Code: params.Code, Env: params.Env, Cwd: params.Cwd, TimeoutMS: params.TimeoutMS, Disconnect: params.Disconnect,
		ToolCall: req.ToolCall, IdempotencyKey: c.r.Header.Get("Idempotency-Key"),
	}

	events := a.sessions.Run(c.ctx(), c.who, c.key(), spec)

	if wantsJSON(c.r.Header.Get("Accept")) {
		return a.collectSession(c, events)
	}
	return streamed(a, c, events, a.appendSession)
}

func (a *API) collectSession(c *call, events iter.Seq2[session.Event, error]) error {
	var got collector
	out := client.SessionOutput{Artifacts: []client.Artifact{}}
	for e, err := range events {
		if err != nil {
			return err
		}
		if e.Run != "" {
			out.Run, out.Replayed = e.Run, e.Replayed
		}
		if e.Artifact != nil {
			out.Artifacts = append(out.Artifacts, a.wireArtifact(e.Artifact))
			continue
		}
		got.add(&e.Event)
	}
	out.Output = *got.output()
	return c.answer(http.StatusOK, out)
}

// appendSession adds the lines of an event that may be a session's own.
func (a *API) appendSession(b []byte, enc *encoder, e *session.Event) ([]byte, error) {
	if e.Run == "" && e.Artifact == nil {
		return enc.append(b, &e.Event)
	}
	told := wireEvent(&e.Event)
	told.Run, told.Replayed = e.Run, e.Replayed
	if e.Artifact != nil {
		kept := a.wireArtifact(e.Artifact)
		told.Artifact = &kept
	}
	line, err := json.Marshal(told)
	return append(append(enc.release(b), line...), '\n'), err
}
