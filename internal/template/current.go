package template

import (
	"os"
	"time"
)

// stamp tells whether somebody has written definitions or built templates: what is built replaces a file by its name,
// and that changes the directory.
type stamp struct{ definitions, built time.Time }

// Current reads definitions and built templates again if somebody else, such as `cove template build`, wrote some. What
// cannot be read any more is logged, and what was known stays.
func (s *Store) Current() {
	now := stamp{modified(s.options.Dir), modified(s.built())}
	s.mu.Lock()
	same := s.seen == now
	s.seen = now
	s.mu.Unlock()
	if same {
		return
	}
	if err := s.Refresh(); err != nil {
		s.options.Log.Warn("templates cannot be read again; those known stay", "error", err)
	}
}

// modified is zero for a directory that is not there.
func modified(dir string) time.Time {
	info, err := os.Stat(dir)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}
