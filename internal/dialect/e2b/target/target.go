// Package target is one sandbox as E2B's data plane sees it: whose it is, what guards it, how it was asked for. The edge
// finds it once for each request; whoever answers for a port takes it from the request's context.
package target

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/sandbox"
)

// The ports that a sandbox has without anybody listening there: the server answers for them.
const (
	PortEnvd        = 49983
	PortInterpreter = 49999
)

// Target is a sandbox that a request is for, once its edge has let the request in.
type Target struct {
	Sandbox sandbox.Sandbox
	Who     auth.Principal // of the sandbox's tenant: the caller has shown what guards the sandbox, not a key
	Options Options
	Log     func(Line) // into the sandbox's log, which its owner may read; never nil
}

// Line is one line of a sandbox's log.
type Line struct {
	At      time.Time
	Level   string // debug, info, warn, error
	Logger  string // who says it: "process", "interpreter"
	Message string
	Fields  map[string]string
}

// Annotation is the name under which a sandbox's Options are kept with it.
const Annotation = "e2b"

// Options are what a create of this dialect says beyond the domain's words.
type Options struct {
	TemplateID      string          `json:"template_id"`     // as the caller knows it
	Alias           string          `json:"alias,omitempty"` // of the template
	Secure          bool            `json:"secure,omitempty"`
	Timeout         int             `json:"timeout"` // seconds, as asked for at the create
	AutoPause       bool            `json:"auto_pause,omitempty"`
	AutoPauseMemory bool            `json:"auto_pause_memory,omitempty"`
	AutoResume      bool            `json:"auto_resume,omitempty"`
	Internet        *bool           `json:"internet,omitempty"` // allow_internet_access, as given
	Network         json.RawMessage `json:"network,omitempty"`  // as given, without passwords
	PrivateTraffic  bool            `json:"private_traffic,omitempty"`
	MaskHost        string          `json:"mask_host,omitempty"`
}

// Encode is the annotation.
func (o Options) Encode() string {
	b, err := json.Marshal(o)
	if err != nil {
		panic(fmt.Sprintf("options are plain data: %v", err)) // Network was decoded before
	}
	return string(b)
}

// Decode reads a sandbox's Options. One that was made through another dialect has none: nobody asked for its ports to be
// public, so all of them are guarded.
func Decode(sb sandbox.Sandbox) (Options, error) {
	text, ok := sb.Annotations[Annotation]
	if !ok {
		return Options{TemplateID: sb.Template, Alias: sb.Template, Secure: true, PrivateTraffic: true, AutoResume: sb.AutoResume}, nil
	}
	var o Options
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return Options{}, fmt.Errorf("annotation %s of sandbox %s: %w", Annotation, sb.ID, err)
	}
	return o, nil
}

// Tokens makes what guards a sandbox. They are derived, so that they are the same after a pause and a restart, and
// nothing has to be kept.
type Tokens struct{ tokens auth.Tokens }

// NewTokens takes the server's own secret, of at least 32 random bytes.
func NewTokens(secret []byte) Tokens { return Tokens{auth.NewTokens(secret)} }

// Envd is the token of envd and of signed file URLs.
func (t Tokens) Envd(id string) string { return t.tokens.Derive("envd", id) }

// Traffic is the token of every other port, where public traffic is off.
func (t Tokens) Traffic(id string) string { return t.tokens.Derive("traffic", id) }

// Same compares two tokens in constant time.
func Same(a, b string) bool { return auth.Same(a, b) }

type key struct{}

// With gives a context that carries a target.
func With(ctx context.Context, t *Target) context.Context { return context.WithValue(ctx, key{}, t) }

// From is the target of a request. It panics without one: nobody answers for a port but behind the edge.
func From(ctx context.Context) *Target {
	t, ok := ctx.Value(key{}).(*Target)
	if !ok {
		panic("no target: the request did not come through the edge")
	}
	return t
}
