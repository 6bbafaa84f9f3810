package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// sealFile holds the seal of an image's layer, beside its files.
const sealFile = "seal"

// SealLayers hashes the layers of images that have no seal yet, so that Verify can tell when they were changed. It reads all of
// them: that is better done after the caller has its answer.
func (s *Store) SealLayers(ctx context.Context) error {
	entries, err := os.ReadDir(s.ImagesDir())
	if err != nil {
		return err
	}
	var errs []error // one layer's must not leave the others without a seal
	for _, e := range entries {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		_, err := os.Stat(filepath.Join(s.ImagesDir(), e.Name(), sealFile))
		if err == nil || strings.HasPrefix(e.Name(), HalfUnpacked) {
			continue
		}
		if _, err := s.verifyImageLayer(ctx, e.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) { // pruned meanwhile
			errs = append(errs, fmt.Errorf("layer %s: %.300s", e.Name(), err.Error()))
		}
	}
	return errors.Join(errs...)
}

// verifyImageLayer compares a layer with its seal; one that has none gets it.
func (s *Store) verifyImageLayer(ctx context.Context, name string) (same bool, err error) {
	dir := filepath.Join(s.ImagesDir(), name)
	sealed, err := os.ReadFile(filepath.Join(dir, sealFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	seal, err := sealLayer(ctx, dir)
	if err != nil {
		return false, err
	}
	if len(sealed) > 0 {
		return strings.TrimSpace(string(sealed)) == seal, nil
	}
	tmp := filepath.Join(dir, ".seal")
	if err := os.WriteFile(tmp, []byte(seal+"\n"), 0o600); err != nil {
		return false, err
	}
	return true, os.Rename(tmp, filepath.Join(dir, sealFile))
}

// sealLayer is over names, kinds, modes, owners and contents of what lies in the directories of a layer.
func sealLayer(ctx context.Context, dir string) (string, error) {
	sum := sha256.New()
	err := filepath.WalkDir(dir, func(at string, e fs.DirEntry, err error) error {
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		if filepath.Dir(at) == dir && !e.IsDir() {
			return nil // what is told of the layer
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		content, err := contentDigest(at, info)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(sum, "%q %s %d %s\n", at[len(dir):], info.Mode(), ownerOf(info), content)
		return err
	})
	return hex.EncodeToString(sum.Sum(nil)), err
}
