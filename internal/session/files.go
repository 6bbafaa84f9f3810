package session

import (
	"errors"
	"time"
)

// metadata is a session as its file tells it.
type metadata struct {
	Key         string            `json:"session_id"`
	ID          string            `json:"id"`
	State       State             `json:"state"`
	Created     time.Time         `json:"created_at"`
	LastUsed    *time.Time        `json:"last_used,omitempty"`
	Stopped     *time.Time        `json:"stopped_at,omitempty"`
	Sandbox     string            `json:"container_id"`
	Generation  int               `json:"generation"`
	Storage     Storage           `json:"session_storage"`
	SizeBytes   int64             `json:"size_bytes"`
	Datasets    string            `json:"dataset_access"`
	Template    string            `json:"template"`
	Image       string            `json:"image"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Runs        int               `json:"execution_count"`
	Failed      int               `json:"failed_count"`
	Artifacts   int               `json:"artifact_count"`
	Final       *int              `json:"final_execution_count,omitempty"`
	Lost        *Loss             `json:"lost,omitempty"`
	IdleSeconds float64           `json:"idle_timeout_seconds,omitempty"`
}

// drawing is what the files of a session tell at one moment.
type drawing struct {
	number   int
	dir      string
	metadata metadata
	state    *PythonState // nil: as it is
}

// draw puts together what the files of a session are to tell; the caller holds the entry.
func (m *Manager) draw(e *entry) drawing {
	s := e.s
	d := metadata{
		Key: s.Key, ID: s.ID, State: s.State, Created: s.Created, Sandbox: s.Sandbox, Generation: s.Generation, Storage: s.Storage,
		SizeBytes: s.Size, Datasets: s.Datasets.Access, Template: s.Template, Image: s.Image, Metadata: s.Metadata, Runs: s.Runs,
		Failed: s.Failed, Artifacts: s.Artifacts, Lost: s.Lost, IdleSeconds: max(0, s.IdleTimeout.Seconds()),
	}
	if d.Image == "" {
		d.Image = s.Template
	}
	if !s.LastUsed.IsZero() {
		d.LastUsed = &s.LastUsed
	}
	if s.State != StateRunning {
		d.Stopped, d.Final = &s.Stopped, &s.Runs
	}
	e.drawn++
	e.late = false
	return drawing{number: e.drawn, dir: m.folder(*s), metadata: d, state: e.state}
}

// write writes the files of a session, unless newer ones are there, and reports whether they tell what was drawn. The row is what
// counts: a file that could not be written is written with the next change.
func (m *Manager) write(e *entry, d drawing) bool {
	e.files.Lock()
	defer e.files.Unlock()
	if d.number <= e.written {
		return false
	}
	e.written = d.number
	err := replaceFile(d.dir, metadataFile, d.metadata)
	if d.state != nil {
		state := *d.state
		if m.cfg.Space.Allow(0) != nil {
			state = state.bare()
		}
		err = errors.Join(err, replaceFile(d.dir, stateFile, state))
	}
	if err != nil {
		m.log.Warn("the files of a session are not written", "session", d.metadata.ID, "tenant", e.tenant, "error", err)
	}
	return err == nil
}

// writeNow writes the files of a session; the caller holds the entry.
func (m *Manager) writeNow(e *entry) {
	d := m.draw(e)
	e.forget(d, m.write(e, d))
}

// forget lets go of what a kernel holds once its file tells it; the caller holds the entry.
func (e *entry) forget(d drawing, written bool) {
	if written && e.state == d.state {
		e.state = nil
	}
}

// writeSoon writes them beside what its caller does next, who holds the entry: a disk that is busy makes no cell wait, and whoever
// asks the Manager is told from memory.
func (m *Manager) writeSoon(e *entry) {
	if e.late {
		return
	}
	e.late = true
	m.mu.Lock()
	e.refs++
	m.mu.Unlock()
	m.work.Go(func() {
		defer m.leave(e)
		e.life <- struct{}{} // whoever has it gives it back
		if !e.late || e.s == nil {
			e.life.free()
			return
		}
		d := m.draw(e)
		e.life.free()
		written := m.write(e, d)
		e.life <- struct{}{}
		e.forget(d, written)
		e.life.free()
	})
}

// forgetFiles waits for who writes the files of a session, and lets nobody do so with what was drawn until now.
func (e *entry) forgetFiles() {
	e.files.Lock()
	defer e.files.Unlock()
	e.written = e.drawn
}
