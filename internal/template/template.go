// Package template describes what a sandbox starts from: which directories make its file tree, who lives there and
// what its kernel has already imported. It builds templates from files a person can read; it starts nothing.
package template

import (
	"slices"
	"strings"
	"time"
)

// Template is resolved and ready to start from: every path exists on this host.
type Template struct {
	Name        string            `json:"name"`
	Digest      string            `json:"digest"` // of the definition and everything built from it
	Description string            `json:"description,omitempty"`
	Tenant      string            `json:"tenant,omitempty"` // whose it is; empty: everybody's
	Trees       []Tree            `json:"trees"`            // "/" first; parents before children
	Env         map[string]string `json:"env,omitempty"`
	User        string            `json:"user"`    // default user inside; uid 1000 unless the tree says otherwise
	Workdir     string            `json:"workdir"` // default: the user's home
	Sudo        bool              `json:"sudo,omitempty"`
	Python      Python            `json:"python,omitzero"`
	Limits      Limits            `json:"limits"`
	Warnings    []string          `json:"warnings,omitempty"` // what this host lacks or what was left out, and what to do
	Snapshot    *Snapshot         `json:"snapshot,omitempty"` // nil: it was built from a definition, or is an image
	Image       *Image            `json:"image,omitempty"`    // of the image that it is, or that lies below its snapshots
}

// Snapshot is how a template came about that was made of a sandbox's files.
type Snapshot struct {
	From    string    `json:"from"` // the template of the sandbox
	Base    string    `json:"base"` // name of the built template below all images
	Digest  string    `json:"base_digest"`
	Created time.Time `json:"created"`
	// What the built template gives its sandboxes, where this one gives something else; nil: it does not.
	Defaults *Defaults `json:"base_defaults,omitempty"`
}

// Defaults are what a template gives its sandboxes beyond files.
type Defaults struct {
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user"`
	Workdir string            `json:"workdir"`
}

// Tree is one directory tree of the sandbox: an overlay of read-only layers, uppermost first, below a writable layer of
// the sandbox's own. A layer is a host directory, or an image of a sandbox's disk, whose name ends in ".img": it holds the
// layer of the tree with index i as directory i/u. Every image is a layer of every tree and lies above all directories.
type Tree struct {
	Target string   `json:"target"` // absolute path inside
	Lower  []string `json:"lower"`  // absolute host paths, uppermost first
}

// imageSuffix tells an image from a directory.
const imageSuffix = ".img"

// Images are the disk images among the layers, uppermost first.
func (t *Template) Images() []string {
	if len(t.Trees) == 0 {
		return nil
	}
	lower := t.Trees[0].Lower
	n := 0
	for n < len(lower) && strings.HasSuffix(lower[n], imageSuffix) {
		n++
	}
	return lower[:n]
}

// Base is the built template below all images: what its trees hold was written by the operator's definitions alone.
func (t *Template) Base() *Template {
	if t.Snapshot == nil {
		return t
	}
	base, images := *t, len(t.Images())
	base.Name, base.Digest, base.Description, base.Tenant, base.Snapshot = t.Snapshot.Base, t.Snapshot.Digest, "", "", nil
	if own := t.Snapshot.Defaults; own != nil {
		base.Env, base.User, base.Workdir = own.Env, own.User, own.Workdir
	}
	base.Trees = slices.Clone(t.Trees)
	for i := range base.Trees {
		base.Trees[i].Lower = base.Trees[i].Lower[images:]
	}
	return &base
}

// Python is the interpreter that kernels of this template use; empty when there is none.
type Python struct {
	Executable string   `json:"executable,omitempty"` // path inside, the same as on the host
	Version    string   `json:"version,omitempty"`    // "3.13.0"
	Preload    []string `json:"preload,omitempty"`    // modules the zygote imports; empty: no zygote
	Warmup     string   `json:"warmup,omitempty"`     // code the zygote runs once after the imports, for lazy paths
	UserSite   string   `json:"user_site,omitempty"`  // where pip of the default user installs; exists, belongs on sys.path
}

// Limits are a template's defaults; zero means the server's.
type Limits struct {
	CPUs        float64 `json:"cpus,omitempty"`
	MemoryBytes int64   `json:"memory_bytes,omitempty"`
	Pids        int     `json:"pids,omitempty"`
	DiskBytes   int64   `json:"disk_bytes,omitempty"`
	OpenFiles   int     `json:"open_files,omitempty"`
}
