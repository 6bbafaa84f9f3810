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
	return writeJSON(file, stored)
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
