package client

import "time"

// Artifact is a file that was kept, and where it came from.
type Artifact struct {
	// ID names it; absent when it could not be kept, and Error says why.
	ID string `json:"id,omitempty"`
	// Name is its file name, Path where it lay below /session/artifacts.
	Name   string `json:"name"`
	Path   string `json:"path"`
	MIME   string `json:"mime"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256,omitempty"`
	// URL is a signed link that needs no key; it holds until URLExpires.
	URL        string    `json:"url,omitempty"`
	URLExpires time.Time `json:"url_expires,omitzero"`
	CreatedAt  time.Time `json:"created_at,omitzero"`
	// ExpiresAt is when it is removed; absent: when somebody does.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	// Session, Sandbox, Run, Cell and ToolCall say who made it, Datasets from what it could be made: they are told where one
	// artifact is asked for, and not in lists and events.
	Session  string            `json:"session,omitempty"`
	Sandbox  string            `json:"sandbox,omitempty"`
	Run      string            `json:"run,omitempty"`
	Cell     int               `json:"cell,omitempty"`
	ToolCall string            `json:"tool_call,omitempty"`
	Datasets []ArtifactDataset `json:"datasets,omitempty"`
	// Error says why the file was not kept: it is still in the sandbox.
	Error string `json:"error,omitempty"`
}

// ArtifactDataset is a dataset that a run could see.
type ArtifactDataset struct {
	ID     string `json:"id"`
	SHA256 string `json:"sha256,omitempty"` // absent: a directory of the host's
}

// ArtifactLineage answers which cell made a file, and from what.
type ArtifactLineage struct {
	Artifact Artifact `json:"artifact"`
	// Code of the cell; absent when its session is gone.
	Code      string    `json:"code,omitempty"`
	Outcome   string    `json:"outcome,omitempty"`
	StartedAt time.Time `json:"started_at,omitzero"`
	// Same are other artifacts of yours with the same bytes, the newest first.
	Same []Artifact `json:"same,omitempty"`
	// SameTruncated says that there are more: a listing by sha256 has them all.
	SameTruncated bool `json:"same_truncated,omitempty"`
}

// ArtifactList is one page of artifacts, newest first.
type ArtifactList struct {
	Artifacts []Artifact `json:"artifacts"`
	Cursor    string     `json:"cursor,omitempty"`
}

// LinkRequest asks for a signed link.
type LinkRequest struct {
	// TTLSeconds is how long it holds; zero is the server's default, ten minutes.
	TTLSeconds float64 `json:"ttl_seconds,omitempty"`
}

// Link needs no key, and ends.
type Link struct {
	URL       string    `json:"url"`
	ExpiresAt time.Time `json:"expires_at"`
}

// KeepRequest keeps a file of a session that is not in /session/artifacts.
type KeepRequest struct {
	// Path in the sandbox, absolute.
	Path     string `json:"path"`
	ToolCall string `json:"tool_call,omitempty"`
}
