package cove

import (
	"encoding/json"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func (a *API) create(c *call) error {
	var req client.CreateRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	spec, err := specOf(req)
	if err != nil {
		return err
	}
	spec.IdempotencyKey = c.r.Header.Get("Idempotency-Key")
	main, err := a.fromImage(c, req, &spec)
	if err != nil {
		return err
	}

	sb, created, err := a.sandboxes.Create(c.ctx(), c.who, spec)
	if err != nil {
		return err
	}
	if created && main != nil {
		if err := a.sandboxes.Begin(c.ctx(), c.who, sb.ID, main); err != nil {
			return err
		}
	}

	status := http.StatusOK
	if created {
		status = http.StatusCreated
		c.w.Header().Set("Location", Prefix+"/sandboxes/"+sb.ID)
	}
	return c.answer(status, wireSandbox(&sb))
}

func (a *API) list(c *call) error {
	q := c.query()
	ask := sandbox.ListQuery{
		Template: q.text("template"), Key: q.text("key"), Cursor: q.cursor(momentCursor),
		Limit: int(q.integer("limit", 1, sandbox.MaxPage)),
	}
	for _, s := range q.values["state"] {
		if !sandbox.State(s).Known() {
			q.fail("unknown state %q: use starting, running, paused, stopping or ended", s)
		}
		ask.States = append(ask.States, sandbox.State(s))
	}
	for name := range q.values {
		if key, ok := strings.CutPrefix(name, "metadata."); ok {
			if ask.Metadata == nil {
				ask.Metadata = map[string]string{}
			}
			ask.Metadata[key] = q.text(name)
		}
	}
	if q.err != nil {
		return q.err
	}

	page, err := a.sandboxes.List(c.ctx(), c.who, ask)
	if err != nil {
		return err
	}

	out := client.SandboxList{Sandboxes: make([]client.SandboxInfo, len(page.Items)), Cursor: page.Next}
	for i := range page.Items {
		out.Sandboxes[i] = wireSandbox(&page.Items[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) get(c *call) error {
	sb, err := a.sandboxes.Get(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireSandbox(&sb))
}

func (a *API) kill(c *call) error {
	sb, err := a.sandboxes.Kill(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, wireSandbox(&sb))
}

func (a *API) setTimeout(c *call) error {
	var req client.TimeoutRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	if req.TimeoutSeconds == 0 {
		return fault.New(fault.Invalid, "timeout_seconds is missing: give the seconds from now; DELETE ends a sandbox at once")
	}
	lifetime, err := lifetime("timeout_seconds", req.TimeoutSeconds)
	if err != nil {
		return err
	}

	sb, err := a.sandboxes.SetLifetime(c.ctx(), c.who, c.id(), lifetime)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireSandbox(&sb))
}

func (a *API) setNetwork(c *call) error {
	var req client.Network
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	network, err := networkOf(&req)
	if err != nil {
		return err
	}

	sb, err := a.sandboxes.SetNetwork(c.ctx(), c.who, c.id(), *network)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireSandbox(&sb))
}

func (a *API) usage(c *call) error {
	u, err := a.sandboxes.Usage(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, client.SandboxUsage(u))
}

func (a *API) events(c *call) error {
	q := c.query()
	ask := sandbox.EventQuery{Sandbox: q.text("sandbox"), After: q.integer("after", 0, 1<<62), Follow: q.flag("follow")}
	if q.err != nil {
		return q.err
	}

	lines := newLines(c)
	for e, err := range a.sandboxes.Events(c.ctx(), c.who, ask) {
		if err != nil {
			return lines.fail(a, err, func(f *client.Fault) any { return client.LifecycleEvent{Type: "fault", Fault: f} })
		}
		if err := lines.write(client.LifecycleEvent{
			Seq: e.Seq, At: e.At, Sandbox: e.Sandbox, Type: string(e.Type), Deadline: e.Deadline, Cause: string(e.Cause), Message: e.Message,
		}); err != nil {
			return nil // the client has left
		}
	}
	lines.begin()
	return nil
}

func specOf(req client.CreateRequest) (sandbox.Spec, error) {
	spec := sandbox.Spec{
		Template: req.Template, Key: req.Key, Metadata: req.Metadata, Env: req.Env, Storage: sandbox.Storage(req.Storage),
		IdleAction: sandbox.IdleAction(req.IdleAction), AutoResume: req.AutoResume,
	}
	var err error
	if spec.Lifetime, err = lifetime("timeout_seconds", req.TimeoutSeconds); err != nil {
		return spec, err
	}
	if spec.IdleTimeout, err = lifetime("idle_timeout_seconds", req.IdleTimeoutSeconds); err != nil {
		return spec, err
	}
	if req.Limits != nil {
		spec.Limits = template.Limits(*req.Limits)
	}
	if spec.Mounts, err = mountsOf(req.Mounts); err != nil {
		return spec, err
	}
	spec.Network, err = networkOf(req.Network)
	return spec, err
}

// lifetime reads seconds of which any negative number means none.
func lifetime(name string, seconds float64) (time.Duration, error) {
	if seconds < 0 {
		return -1, nil
	}
	return duration(name, seconds)
}

func networkOf(n *client.Network) (*policy.Network, error) {
	if n == nil {
		return nil, nil
	}
	allow, err := prefixes(n.Allow)
	if err != nil {
		return nil, err
	}
	deny, err := prefixes(n.Deny)
	if err != nil {
		return nil, err
	}
	return &policy.Network{Mode: policy.Mode(n.Mode), Allow: allow, Deny: deny}, nil
}

func prefixes(texts []string) ([]netip.Prefix, error) {
	var list []netip.Prefix
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil {
			list = append(list, netip.PrefixFrom(addr, addr.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fault.New(fault.Invalid, "network prefix %q: want an IPv4 address or prefix such as 203.0.113.0/24; names are not supported yet", text)
		}
		list = append(list, p.Masked())
	}
	return list, nil
}

func texts(list []netip.Prefix) []string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return out
}

func wireSandbox(sb *sandbox.Sandbox) client.SandboxInfo {
	info := client.SandboxInfo{
		ID: sb.ID, State: string(sb.State), Template: sb.Template, Key: sb.Key, Metadata: sb.Metadata,
		Limits: client.Limits(sb.Limits), Storage: string(sb.Storage), IdleTimeoutSeconds: sb.IdleTimeout.Seconds(),
		Network:   client.Network{Mode: string(sb.Network.Mode), Allow: texts(sb.Network.Allow), Deny: texts(sb.Network.Deny)},
		CreatedAt: sb.CreatedAt, StartedAt: sb.StartedAt, LastUsed: sb.LastUsed, Deadline: sb.Deadline, EndedAt: sb.EndedAt,
		ForkedFrom: sb.ForkedFrom, IdleAction: string(sb.IdleAction), AutoResume: sb.AutoResume, PausedAt: sb.PausedAt,
		Cause: string(sb.Cause), Message: sb.CauseMessage,
		Image: sb.Annotations[imageAnnotation], Mounts: wireMounts(sb.Mounts),
	}
	if sb.State == sandbox.StateEnded {
		u := client.SandboxUsage(sb.Usage)
		info.Usage = &u
	}
	return info
}

// lines writes values as NDJSON, each sent at once.
type lines struct {
	c     *call
	rc    *http.ResponseController
	begun bool
}

func newLines(c *call) *lines { return &lines{c: c, rc: http.NewResponseController(c.w)} }

// begin sends the header; until then a failure can still be an HTTP status.
func (l *lines) begin() {
	if l.begun {
		return
	}
	l.begun = true
	h := l.c.w.Header()
	h.Set("Content-Type", "application/x-ndjson")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	l.c.w.WriteHeader(http.StatusOK)
}

func (l *lines) write(value any) error {
	b, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return l.raw(append(b, '\n'))
}

func (l *lines) raw(b []byte) error {
	l.begin()
	if len(b) == 0 {
		return nil
	}
	if _, err := l.c.w.Write(b); err != nil {
		return err
	}
	return l.rc.Flush()
}

// fail ends a stream that has begun with a last line, and otherwise hands err back for an HTTP status.
func (l *lines) fail(a *API, err error, last func(*client.Fault) any) error {
	if !l.begun {
		return err
	}
	_ = l.write(last(a.broken(l.c, err))) // the client has gone: nobody to tell
	return nil
}

// broken is what the client of a stream is told when it cannot go on; the operator is told of what is our defect.
func (a *API) broken(c *call, err error) *client.Fault {
	err = a.explain(c, err)
	a.failed(c.ctx(), err)
	if fault.KindOf(err) == fault.Internal {
		a.log.Error("stream failed", "request", c.w.Header().Get("X-Request-Id"), "tenant", c.who.Tenant, "sandbox", c.id(), "error", err)
	}
	return wireFault(err)
}
