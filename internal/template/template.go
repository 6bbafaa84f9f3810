// Package template describes what a sandbox starts from: which directories make its file tree, who lives there and
// what its kernel has already imported. It builds templates from files a person can read; it starts nothing.
package template

// Template is resolved and ready to start from: every path exists on this host.
type Template struct {
	Name        string            `json:"name"`
	Digest      string            `json:"digest"` // of the definition and everything built from it
	Description string            `json:"description,omitempty"`
	Trees       []Tree            `json:"trees"` // "/" first; parents before children
	Env         map[string]string `json:"env,omitempty"`
	User        string            `json:"user"`    // default user inside; uid 1000 unless the tree says otherwise
	Workdir     string            `json:"workdir"` // default: the user's home
	Sudo        bool              `json:"sudo,omitempty"`
	Python      Python            `json:"python,omitzero"`
	Limits      Limits            `json:"limits"`
	Warnings    []string          `json:"warnings,omitempty"` // what this host lacks or what was left out, and what to do
}

// Tree is one directory tree of the sandbox: an overlay of read-only host directories, uppermost first, below a
// writable layer of the sandbox's own.
type Tree struct {
	Target string   `json:"target"` // absolute path inside
	Lower  []string `json:"lower"`  // absolute host directories, uppermost first
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
