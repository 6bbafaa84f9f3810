package template

import "time"

// Image is how a template came about that is a container image: of a registry, an archive or a build.
type Image struct {
	Reference  string            `json:"reference"` // as it was first asked for, in full
	Digest     string            `json:"digest"`    // of its manifest for this platform
	Config     string            `json:"config"`    // digest of its configuration
	Platform   string            `json:"platform"`  // linux/amd64
	Layers     []string          `json:"layers"`    // digests of the layers without compression, lowest first
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Ports      []string          `json:"ports,omitempty"`   // that it says it listens on: 80/tcp
	Volumes    []string          `json:"volumes,omitempty"` // directories for which it wants a place of their own
	Created    time.Time         `json:"created,omitzero"`
	Bytes      int64             `json:"bytes,omitempty"` // unpacked
	UID        int               `json:"uid"`             // of its user, like GID; −1: only the agent can tell
	GID        int               `json:"gid"`
}

// PullRequest asks for an image by name.
type PullRequest struct {
	Reference string // python:3.12-slim, ghcr.io/a/b@sha256:…; the name of a template, or what the operator maps to one, needs no registry
	Username  string // for its registry; empty: what the tenant has logged in with
	Password  string
	Platform  string // os/arch; empty: this host's
	Refresh   bool   // ask the registry even if the image is here
	Unmapped  bool   // the image itself, whatever the operator maps its name to
	Progress  func(PullProgress)
}

// PullProgress is how far the parts of an image are.
type PullProgress struct {
	Step  string `json:"step"`            // one of the steps below
	Layer string `json:"layer,omitempty"` // a digest; empty: the whole image
	Done  int64  `json:"done,omitempty"`  // bytes
	Total int64  `json:"total,omitempty"`
}

// The steps of a pull.
const (
	PullResolve  = "resolve"  // the registry is asked what the name stands for
	PullDownload = "download" // of a layer
	PullUnpack   = "unpack"   // of a layer
	PullKnown    = "known"    // a layer that is here already
	PullDone     = "done"     // of a layer, or of the whole image
)
