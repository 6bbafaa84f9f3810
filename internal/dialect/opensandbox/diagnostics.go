package opensandbox

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/sandbox"
)

// Diagnosis is what diagnostics answer, with everything in it.
type Diagnosis struct {
	SandboxID   string   `json:"sandboxId"`
	Kind        string   `json:"kind"`
	Scope       string   `json:"scope"`
	Delivery    string   `json:"delivery"`
	ContentType string   `json:"contentType"`
	Content     string   `json:"content"`
	Length      int      `json:"contentLength"`
	Truncated   bool     `json:"truncated"`
	Warnings    []string `json:"warnings,omitempty"`
}

// scopes are what may be asked for; what a server like ours has no parts for is empty.
var scopes = []string{"container", "lifecycle", "runtime", "all"}

// known tells whether a sandbox of the caller's is there, made or being made.
func (a *API) known(c *call) error {
	if a.creations.find(c.who.Tenant, c.id) != nil {
		return nil
	}
	_, err := a.find(c)
	return err
}

func (a *API) diagnoseLogs(c *call) error {
	q := c.query()
	lines := q.integer("tail", 0, 1, 10000)
	if q.err != nil {
		return q.err
	}
	if err := a.known(c); err != nil {
		return err
	}
	text, cut := a.mains.output(c.id)
	if !q.Has("scope") {
		if lines == 0 {
			lines = 100
		}
		text, _ = lastLines(text, lines)
		return c.legacy(text)
	}
	if lines > 0 {
		var more bool
		text, more = lastLines(text, lines)
		cut = cut || more
	}
	d := Diagnosis{Kind: "logs", Scope: q.Get("scope"), Content: text, Truncated: cut}
	if d.Scope == "lifecycle" {
		d.Content, d.Truncated = "", false
	}
	return c.diagnose(d)
}

func (a *API) diagnoseEvents(c *call) error {
	q := c.query()
	limit := q.integer("limit", 50, 1, 500)
	if q.err != nil {
		return q.err
	}
	text, cut, err := a.eventText(c, limit)
	if err != nil {
		return err
	}
	if !q.Has("scope") {
		return c.legacy(text)
	}
	return c.diagnose(Diagnosis{Kind: "events", Scope: q.Get("scope"), Content: text, Truncated: cut})
}

func (c *call) diagnose(d Diagnosis) error {
	if !slices.Contains(scopes, d.Scope) {
		return invalid("scope %.40q: use one of %s", d.Scope, strings.Join(scopes, ", "))
	}
	d.SandboxID, d.Delivery, d.ContentType, d.Length = c.id, "inline", "text/plain; charset=utf-8", len(d.Content)
	return c.answer(http.StatusOK, d)
}

// legacy is how diagnostics were answered before they had scopes.
func (c *call) legacy(text string) error {
	c.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	c.w.Header().Set("Deprecation", "true")
	_, _ = io.WriteString(c.w, text) // the client has gone: nobody to tell
	return nil
}

func lastLines(text string, n int) (string, bool) {
	end := strings.TrimSuffix(text, "\n")
	for i := len(end); n > 0; n-- {
		i = strings.LastIndexByte(end[:i], '\n')
		if i < 0 {
			return text, false
		}
		if n == 1 {
			return text[i+1:], true
		}
	}
	return text, false
}

// eventText is the last of what happened to a sandbox, a line each.
func (a *API) eventText(c *call, limit int) (text string, cut bool, err error) {
	if err := a.known(c); err != nil {
		return "", false, err
	}
	var lines []string
	for e, err := range a.sandboxes.Events(c.ctx(), c.who, sandbox.EventQuery{Sandbox: c.id}) {
		if err != nil {
			return "", false, err
		}
		line := e.At.Format(time.RFC3339Nano) + " " + string(e.Type)
		for _, more := range []string{string(e.Cause), e.Message} {
			if more != "" {
				line += " " + more
			}
		}
		lines = append(lines, line)
	}
	if cut = len(lines) > limit; cut {
		lines = lines[len(lines)-limit:]
	}
	if len(lines) == 0 {
		return "", cut, nil
	}
	return strings.Join(lines, "\n") + "\n", cut, nil
}

func (a *API) inspect(c *call) error {
	text, err := a.inspection(c)
	if err != nil {
		return err
	}
	return c.legacy(text)
}

// inspection is a sandbox in a few lines for a person.
func (a *API) inspection(c *call) (string, error) {
	if made := a.creations.find(c.who.Tenant, c.id); made != nil {
		w := a.wireCreation(made)
		return fmt.Sprintf("id: %s\nstate: %s\nmessage: %s\n", w.ID, w.Status.State, w.Status.Message), nil
	}
	sb, err := a.find(c)
	if err != nil {
		return "", err
	}
	f, err := access.Decode(sb)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	status := wireStatus(sb)
	fmt.Fprintf(&b, "id: %s\nstate: %s\nreason: %s\nmessage: %s\n", sb.ID, status.State, status.Reason, status.Message)
	fmt.Fprintf(&b, "image: %s\ntemplate: %s\nentrypoint: %q\ncreated: %s\n", f.Image, sb.Template, f.Entrypoint, sb.CreatedAt.Format(time.RFC3339))
	if !sb.Deadline.IsZero() {
		fmt.Fprintf(&b, "expires: %s\n", sb.Deadline.Format(time.RFC3339))
	}
	fmt.Fprintf(&b, "cpus: %g\nmemory: %d\nnetwork: %s\n", sb.Limits.CPUs, sb.Limits.MemoryBytes, sb.Network.Mode)
	if u, err := a.sandboxes.Usage(c.ctx(), c.who, sb.ID); err == nil {
		fmt.Fprintf(&b, "memory used: %d\ndisk used: %d\nprocesses: %d\n", u.MemoryBytes, u.DiskBytes, u.Pids)
	}
	return b.String(), nil
}

func (a *API) summary(c *call) error {
	q := c.query()
	lines, limit := q.integer("tail", 50, 1, 10000), q.integer("event_limit", 20, 1, 500)
	if q.err != nil {
		return q.err
	}
	about, err := a.inspection(c)
	if err != nil {
		return err
	}
	events, _, err := a.eventText(c, limit)
	if err != nil {
		return err
	}
	logs, _ := a.mains.output(c.id)
	logs, _ = lastLines(logs, lines)
	return c.legacy("== sandbox ==\n" + about + "\n== events ==\n" + events + "\n== logs ==\n" + logs)
}
