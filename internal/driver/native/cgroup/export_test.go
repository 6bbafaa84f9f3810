package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// OpenBare makes a parent group on a v2 mount that has no controllers: enough to freeze and to kill.
func OpenBare(mount, name string) (*Root, error) {
	parent := filepath.Join(mount, name)
	if err := os.Mkdir(parent, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	top, err := os.Open(mount)
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(parent)
	if err != nil {
		return nil, err
	}
	h := hierarchy{controllers: slices.Concat(needed, wanted), joiner: "cgroup.procs", top: top, dir: dir}
	return &Root{version: V2, name: name, dirs: []hierarchy{h}}, nil
}
