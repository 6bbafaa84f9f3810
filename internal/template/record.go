package template

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// record is a built template on disk. There its layers are named relative to the store's directory, so that a data
// directory can be moved; in memory they are absolute.
type record struct {
	Template *Template         `json:"template"`
	Layers   []string          `json:"layers"`           // names in Dir/built/layers
	Images   []string          `json:"images,omitempty"` // those of the layers that came with it, if it is a snapshot
	Seals    map[string]string `json:"seals,omitempty"`  // of images; one that is not sealed yet cannot be verified
}

// loadRecord reads a record; its layers may be gone.
func (s *Store) loadRecord(file string) (*record, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, err
	}
	if r.Template == nil {
		return nil, errors.New("no template in it")
	}
	r.Template.Trees = relocate(r.Template.Trees, s.absolute)
	return r, nil
}

// writeRecord replaces a record.
func (s *Store) writeRecord(file string, r *record) error {
	stored, bare := *r, *r.Template
	bare.Trees = relocate(bare.Trees, s.relative)
	stored.Template = &bare
	if bare.Tenant == "" {
		return writeJSON(file, stored)
	}
	return writeJSONFor(file, stored, s.permit)
}

// What a tenant owns may hold secrets, such as the environment of a build: the server reads it
// and other accounts of the host do not.
const (
	ownedFile = 0o640
	ownedDir  = 0o750
	openDir   = 0o755
)

// permit lets the readers read an open record of a tenant.
func (s *Store) permit(f *os.File) error {
	gid, known := s.readers()
	if !known {
		return f.Chmod(0o644)
	}
	return errors.Join(f.Chown(-1, gid), f.Chmod(ownedFile))
}

// permitDir does the same for the directory of a tenant's records.
func (s *Store) permitDir(dir string) error {
	gid, known := s.readers()
	if !known {
		return nil
	}
	return errors.Join(os.Lchown(dir, -1, gid), os.Chmod(dir, ownedDir))
}

// permitTenants does it for every tenant: earlier versions let everyone read the records, and the
// server may have become another user's.
func (s *Store) permitTenants() error {
	gid, known := s.readers()
	if !known {
		return nil
	}
	files, _ := filepath.Glob(s.built("tenants", "*", "*.json"))
	for _, file := range files {
		if err := errors.Join(os.Lchown(file, -1, gid), os.Chmod(file, ownedFile)); err != nil {
			return err
		}
	}
	dirs, _ := filepath.Glob(s.built("tenants", "*"))
	for _, dir := range dirs {
		if err := s.permitDir(dir); err != nil {
			return err
		}
	}
	return nil
}

// readers is the group that reads what tenants own.
func (s *Store) readers() (gid int, known bool) {
	if s.options.Readers == "" {
		return 0, false
	}
	info, err := os.Stat(s.options.Readers)
	if err != nil {
		return os.Getegid(), true // no server has started: what is written is the writer's
	}
	return groupOf(info), true
}

// relocate names every layer anew.
func relocate(trees []Tree, name func(string) string) []Tree {
	trees = slices.Clone(trees)
	for i := range trees {
		trees[i].Lower = slices.Clone(trees[i].Lower)
		for j, at := range trees[i].Lower {
			trees[i].Lower[j] = name(at)
		}
	}
	return trees
}

func (s *Store) relative(layer string) string {
	if rel, err := filepath.Rel(s.options.Dir, layer); err == nil && filepath.IsLocal(rel) {
		return rel
	}
	return layer // a tree of the host
}

// absolute also takes the absolute names that earlier versions wrote, when the directory was moved since.
func (s *Store) absolute(layer string) string {
	if !filepath.IsAbs(layer) {
		return filepath.Join(s.options.Dir, layer)
	}
	_, below, ours := strings.Cut(layer, "/templates/built/")
	if ours && !within(s.options.Dir, layer) {
		if moved := s.built(below); exists(moved) && !exists(layer) {
			return moved
		}
	}
	return layer
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}
