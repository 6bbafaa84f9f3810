// Package access is one sandbox as OpenSandbox's clients see it: whose it is, which port they came to, how it was asked
// for. The lifecycle API finds it once for each request; whoever answers for a port takes it from the request's context.
package access

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/sandbox"
)

// The ports that a sandbox has without anybody listening there: the server answers for them.
const (
	PortExecd  = 44772
	PortEgress = 18080
)

// Target is a sandbox that a request is for, once the request was let in.
type Target struct {
	Who     auth.Principal // of the sandbox's tenant: the caller may have shown the sandbox's token, not a key
	Sandbox sandbox.Sandbox
	Port    int
}

type key struct{}

// With gives a context that carries a target.
func With(ctx context.Context, t *Target) context.Context { return context.WithValue(ctx, key{}, t) }

// From is the target of a request. It panics without one: nobody answers for a port but behind the lifecycle API.
func From(ctx context.Context) *Target {
	t, ok := ctx.Value(key{}).(*Target)
	if !ok {
		panic("no target: the request did not come through the lifecycle API")
	}
	return t
}

// Annotation is the name under which a sandbox's Facts are kept with it.
const Annotation = "opensandbox"

// Facts are what a create of this dialect says beyond the domain's words.
type Facts struct {
	Image      string            `json:"image,omitempty"` // as it was asked for
	SnapshotID string            `json:"snapshot_id,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Platform   *Platform         `json:"platform,omitempty"`
	Extensions map[string]string `json:"extensions,omitempty"`
	Renew      int               `json:"renew,omitempty"`   // seconds that a use of a port lets it live for, at least; zero: nothing
	Policy     *Policy           `json:"policy,omitempty"`  // of the network, as it was asked for last; nil: never
	Volumes    []string          `json:"volumes,omitempty"` // those that end with it
	Secure     bool              `json:"secure,omitempty"`  // its endpoints are of no use without their headers
	Process    string            `json:"process,omitempty"` // the name of its entrypoint among its processes; empty: it has none
}

// Platform is what a sandbox was asked to run on.
type Platform struct {
	OS   string `json:"os"`
	Arch string `json:"arch"`
}

// Idle is the entrypoint that keeps a container alive and does nothing.
func Idle() []string { return []string{"tail", "-f", "/dev/null"} }

// Encode is the annotation.
func (f Facts) Encode() string {
	b, err := json.Marshal(f)
	if err != nil {
		panic(fmt.Sprintf("facts are plain data: %v", err))
	}
	return string(b)
}

// Decode reads a sandbox's Facts. One that was made through another dialect has none: its template is its image.
func Decode(sb sandbox.Sandbox) (Facts, error) {
	text, ok := sb.Annotations[Annotation]
	if !ok {
		return Facts{Image: sb.Template, Entrypoint: Idle()}, nil
	}
	var f Facts
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return Facts{}, fmt.Errorf("annotation %s of sandbox %s: %w", Annotation, sb.ID, err)
	}
	return f, nil
}
