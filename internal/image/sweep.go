package image

import (
	"os"
	"path/filepath"
	"time"
)

// partsFor is how long a part of a layer waits for the pull that goes on with it.
const partsFor = 24 * time.Hour

// sweep removes what an earlier server has left: files of imports, which nobody goes on with, and old parts of layers.
func (s *Service) sweep(now time.Time) {
	for _, pattern := range []string{filepath.Join(s.tempDir(), "*"), filepath.Join(filepath.Dir(s.cfg.KeyFile), keyTemp)} {
		left, _ := filepath.Glob(pattern) // the pattern is ours
		for _, name := range left {
			s.swept(name)
		}
	}
	parts, _ := filepath.Glob(filepath.Join(s.blobDir(), "*", "*"))
	for _, name := range parts {
		if info, err := os.Lstat(name); err == nil && now.Sub(info.ModTime()) > partsFor {
			s.swept(name)
		}
	}
	dirs, _ := filepath.Glob(filepath.Join(s.blobDir(), "*"))
	for _, dir := range dirs {
		_ = os.Remove(dir) // one with parts in it stays
	}
}

func (s *Service) swept(name string) {
	if err := os.RemoveAll(name); err != nil {
		s.log.Warn("what an earlier pull has left cannot be removed", "path", name, "error", err)
	}
}
