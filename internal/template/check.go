package template

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// damaged begins the names of layers that putAside renamed: sandboxes that live may still show
// them.
const damaged = ".damaged-"

// Checker compares the layers of built templates with what was built. Templates share layers: it looks
// at each layer once.
type Checker struct {
	store    *Store
	verdicts map[string]string // by layer; empty: it is as it was built
}

// Checker returns one that has looked at nothing yet.
func (s *Store) Checker() *Checker { return &Checker{s, map[string]string{}} }

// Check compares the names and sizes in the layers of a built template with what was built, and tells the layers that
// differ. It fails if the template's Python is gone. It reads no file's content; Verify does.
func (c *Checker) Check(ctx context.Context, name string) (bad map[string]string, err error) {
	r, err := c.store.loadRecord(c.store.built(name + ".json"))
	if err != nil {
		return nil, err
	}
	bad = map[string]string{}
	for _, layer := range r.Layers {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		why, known := c.verdicts[layer]
		if !known {
			why = c.store.checkLayer(layer)
			c.verdicts[layer] = why
		}
		if why != "" {
			bad[layer] = why
		}
	}
	return bad, r.Template.checkPython()
}

// CheckPython fails if the host no longer has the Python of a built template, which an upgrade of
// the distribution may have removed.
func (s *Store) CheckPython(name string) error {
	r, err := s.loadRecord(s.built(name + ".json"))
	if err != nil {
		return err
	}
	return r.Template.checkPython()
}

func (t *Template) checkPython() error {
	if t.Python.Executable == "" {
		return nil
	}
	if _, err := os.Stat(t.Python.Executable); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the Python it was built with is gone from this host: %w", err)
	}
	return nil
}

// checkLayer tells what is wrong with a layer.
func (s *Store) checkLayer(layer string) string {
	made, err := readLayer(filepath.Join(s.layers(), layer))
	if err != nil {
		return fmt.Sprintf("its description cannot be read: %v", err)
	}
	now, err := takeCensus(filepath.Join(s.layers(), layer, "trees"))
	switch was := made.Census; {
	case err != nil:
		return fmt.Sprintf("it cannot be read: %v", err)
	case was == census{}, was == now:
		return ""
	case now.Entries != was.Entries || now.Bytes != was.Bytes:
		return fmt.Sprintf("it has %d entries and %d bytes; %d and %d were built", now.Entries, now.Bytes, was.Entries, was.Bytes)
	default:
		return "its files have other names or sizes than those that were built"
	}
}

// putAside renames a layer that another one replaces: sandboxes that live may still show it. The
// caller holds the lock.
func (s *Store) putAside(layer string) error {
	aside := damaged + layer + "-" + strings.ToLower(rand.Text())
	return os.Rename(filepath.Join(s.layers(), layer), filepath.Join(s.layers(), aside))
}

// damagedLayers are the layers of a built template whose content is not what was built.
func (s *Store) damagedLayers(ctx context.Context, r *record) (map[string]bool, error) {
	bad := map[string]bool{}
	for _, layer := range r.Layers {
		same, err := s.verifyLayer(ctx, r, layer)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil || !same {
			bad[layer] = true
		}
	}
	return bad, nil
}

// saltOf is random for a layer that takes the place of one that was put aside. The maker has zygotes and pools for each
// digest: those of the damaged template must not serve the new one.
func (s *Store) saltOf(layer string) string {
	entries, _ := os.ReadDir(s.layers()) // the build that follows tells
	if !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), damaged+filepath.Base(layer)+"-") }) {
		return ""
	}
	return rand.Text()
}
