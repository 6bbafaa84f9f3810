package session

import (
	"os"
	"path/filepath"
)

// reportLost logs how many directories of sessions have no row, if there are any.
//
// A row is written before the session's directory and removed after it, so that no crash of the
// server leaves a directory alone. A database that lost its last changes does, or an older copy.
func (m *Manager) reportLost() {
	dirs, err := filepath.Glob(filepath.Join(m.cfg.Dir, "t-*", "ses_*"))
	if err != nil || len(dirs) == 0 {
		return
	}
	ids, err := m.store.SessionIDs(m.life)
	if err != nil {
		if m.life.Err() == nil {
			m.log.Warn("directories of sessions are not compared with the database", "error", err)
		}
		return
	}
	known := make(map[string]bool, len(ids))
	for _, id := range ids {
		known[id] = true
	}
	var lost []string
	for _, dir := range dirs {
		if known[filepath.Base(dir)] {
			continue
		}
		if _, err := os.Lstat(dir); err == nil { // else it was removed after Glob saw it
			lost = append(lost, filepath.Base(dir))
		}
	}
	if len(lost) > 0 {
		m.log.Warn("there are directories of sessions without a row: the database lost its last changes, or is an older copy; "+
			"artifacts of these sessions are gone, and their logs are still there", "count", len(lost), "known", len(ids), "sessions", lost[:min(len(lost), 10)])
	}
}
