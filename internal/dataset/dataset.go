// Package dataset is data staged into a sandbox before a run: content that is stored once for a tenant and seen read-only by
// every session that has it. It asks for Blobs and an Index and knows neither disk nor database.
package dataset

import (
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Where code finds data.
const (
	Dir     = "/session/data" // links to what was staged, beside what the user puts there
	Mounted = "/datasets"     // what was staged itself, read-only
	Local   = "/data"         // a directory of the host's, read-only
)

// What a session, or a tenant, may have.
const (
	maxPerSession = 1000
	maxUploads    = 32 // of a tenant at once
	maxError      = 1000
)

// Dataset is data of a session.
type Dataset struct {
	Tenant  string
	Session string // its id
	ID      string // the caller's own name for it
	File    string // its name in Dir
	Status  Status
	Path    string // where code finds it once it is loaded
	Size    int64
	SHA256  string
	Error   string // why it failed
	Updated time.Time
}

// Status is how far a dataset is.
type Status string

// The statuses. A caller is told pending for staging: that only this server knows of an upload, which ends with it.
const (
	Pending Status = "pending" // somebody says that they fetch it
	Staging Status = "staging" // it is arriving
	Loaded  Status = "loaded"
	Failed  Status = "failed" // it can be tried again
)

// Access is where a session's data comes from.
type Access string

// The kinds of access. API with a path of the host's has both.
const (
	AccessNone  Access = "none"
	AccessLocal Access = "local_ro"
	AccessAPI   Access = "api"
)

// ParseAccess reads an Access; nothing is none.
func ParseAccess(text string) (Access, error) {
	switch a := Access(text); a {
	case "":
		return AccessNone, nil
	case AccessNone, AccessLocal, AccessAPI:
		return a, nil
	}
	return "", fault.New(fault.Invalid, "unknown access to datasets %.40q: use none, local_ro or api", text)
}

// ErrNotStaged tells whoever stages data into a session that takes none.
func ErrNotStaged(key string, access Access) error {
	if access == AccessLocal {
		return fault.New(fault.Conflict, "the data of session %s is a directory of the host's (local_ro) at %s, and nothing is staged into it: put files into that directory, or open another session with datasets access api", key, Local)
	}
	return fault.New(fault.Conflict, "session %s has no datasets (access none): remove it, or use another key, and open it with datasets access api", key)
}

// name is what ids and files may be called: no slash, and no dot in front, so no name leads anywhere else.
var name = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}$`)

// ValidID says whether a dataset may be called so.
func ValidID(id string) bool { return name.MatchString(id) }

// fileOf checks an id and the name of its file, which is the id where none is given, with .parquet where that has no extension.
func fileOf(id, file string) (string, error) {
	if !ValidID(id) {
		return "", fault.New(fault.Invalid, "dataset id %.140q: use 1 to 128 letters, digits and . _ : @ = + -, with a letter or digit first", id)
	}
	if file == "" {
		file = id
		if path.Ext(id) == "" {
			file += ".parquet"
		}
	}
	if !name.MatchString(file) {
		return "", fault.New(fault.Invalid, "dataset file %.140q: use 1 to 128 letters, digits and . _ : @ = + -, with a letter or digit first", file)
	}
	return file, nil
}

// idOf is the id that fileOf would give this file.
func idOf(file string) string {
	if stem, ok := strings.CutSuffix(file, ".parquet"); ok && path.Ext(stem) == "" {
		return stem
	}
	return file
}

// sha256Text is a digest as callers write it.
var sha256Text = regexp.MustCompile(`^[0-9a-f]{64}$`)
