package client

import "time"

// ImageInfo is a container image that is on the server and that a sandbox can start from.
type ImageInfo struct {
	// Reference is the image's name in full, such as docker.io/library/python:3.12-slim.
	Reference string `json:"reference"`
	// Digest of its manifest; of an image that was built here, of its files and settings.
	Digest string `json:"digest,omitempty"`
	// Template is what sandboxes of this image start from.
	Template string `json:"template"`
	// Platform is os/arch.
	Platform string    `json:"platform,omitempty"`
	Created  time.Time `json:"created,omitzero"`
	// Pulled is when it came to this server.
	Pulled time.Time `json:"pulled,omitzero"`
	// Bytes is how much disk its files take; layers that images share count for each of them.
	Bytes int64 `json:"bytes"`
	// Layers are digests, lowest first.
	Layers     []string          `json:"layers,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	// User is who processes run as, as the image says it.
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	// Ports are those it says it listens on, such as 80/tcp.
	Ports []string `json:"ports,omitempty"`
}

// ImageList is every image of yours.
type ImageList struct {
	Images []ImageInfo `json:"images"`
}

// PullRequest asks for an image from its registry.
type PullRequest struct {
	// Reference such as python:3.12-slim or ghcr.io/owner/name@sha256:…; the name of a template needs no registry.
	Reference string `json:"reference"`
	// Username and Password for its registry; without them those that you logged in with.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	// Platform is os/arch; empty is the server's own.
	Platform string `json:"platform,omitempty"`
	// IfMissing asks no registry when an image of this name is here already.
	IfMissing bool `json:"if_missing,omitempty"`
}

// PullEvent is a line of the NDJSON stream of a pull.
type PullEvent struct {
	// Type is progress, then image or fault, which is the last line.
	Type string `json:"type" enum:"progress,image,fault"`
	// Step is resolve, download, unpack, known (a layer that is here already) or done.
	Step string `json:"step,omitempty" enum:"resolve,download,unpack,known,done"`
	// Layer is a digest; absent: the whole image.
	Layer string `json:"layer,omitempty"`
	// Done and Total are bytes.
	Done  int64 `json:"done,omitempty"`
	Total int64 `json:"total,omitempty"`
	// Image is what there is now.
	Image *ImageInfo `json:"image,omitempty"`
	// Fault says why the image could not be had.
	Fault *Fault `json:"fault,omitempty"`
}

// TagRequest gives a template of yours, such as that of a snapshot or of another image, the name of an image.
type TagRequest struct {
	// Template is its name.
	Template string `json:"template"`
	// Reference is the name of the image.
	Reference string `json:"reference"`
	// Entrypoint and Cmd are what a container of the image runs.
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	// Ports are those it listens on, such as 80/tcp.
	Ports []string `json:"ports,omitempty"`
}

// PruneResult is what was removed because nobody needs it.
type PruneResult struct {
	// Removed are names of templates that no image has.
	Removed []string `json:"removed"`
	// FreedBytes of disk.
	FreedBytes int64 `json:"freed_bytes"`
}

// LoginRequest keeps a user name and password for a registry.
type LoginRequest struct {
	// Registry is its host, with a port if need be; empty is docker.io.
	Registry string `json:"registry,omitempty"`
	Username string `json:"username"`
	Password string `json:"password"`
}

// RegistryList is where you have logged in.
type RegistryList struct {
	Registries []string `json:"registries"`
}

// Mount is a place outside of a sandbox that is seen inside it.
type Mount struct {
	// Kind is volume (default) or host.
	Kind string `json:"kind,omitempty" enum:",volume,host"`
	// Source is the name of a volume, or a path of the server's host that its operator allows.
	Source string `json:"source"`
	// SubPath below the source.
	SubPath string `json:"sub_path,omitempty"`
	// Target is an absolute path in the sandbox.
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only,omitempty"`
	// Create makes a volume that is not there.
	Create bool `json:"create,omitempty"`
}

// Volume is files that outlive sandboxes.
type Volume struct {
	Name string `json:"name"`
	// Bytes is how much fits.
	Bytes int64 `json:"bytes,omitempty"`
	// UsedBytes is how much of it is used, as far as that is known.
	UsedBytes int64     `json:"used_bytes,omitempty"`
	CreatedAt time.Time `json:"created_at,omitzero"`
	// Sandboxes is how many have it now.
	Sandboxes int `json:"sandboxes"`
}

// VolumeRequest makes a volume.
type VolumeRequest struct {
	// Name of up to 128 letters, digits, dots, dashes and underscores.
	Name string `json:"name"`
	// Bytes is how much fits; zero is the server's default.
	Bytes int64 `json:"bytes,omitempty"`
}

// VolumeList is every volume of yours.
type VolumeList struct {
	Volumes []Volume `json:"volumes"`
}
