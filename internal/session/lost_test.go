package session_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"
)

// lines is a log that a test reads line by line.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

func TestOpen_LostRows(t *testing.T) {
	p := newPlace(t)
	s := p.serve()
	kept, lost := s.open("kept"), s.open("lost")
	s.open("removed")
	if err := s.Remove(t.Context(), acme, "removed"); err != nil {
		t.Fatal(err)
	}
	s.close()
	if err := p.store.RemoveSession(t.Context(), lost.ID); err != nil {
		t.Fatal(err)
	}
	log := make(lines, 1000)
	p.log = slog.NewTextHandler(log, nil)
	p.serve()
	for late := time.After(20 * time.Second); ; {
		select {
		case line := <-log:
			if !strings.Contains(line, "without a row") {
				continue
			}
			if !strings.Contains(line, "count=1 ") || !strings.Contains(line, lost.ID) || strings.Contains(line, kept.ID) {
				t.Errorf("one of two directories has no row, and the log says %s", line)
			}
			return
		case <-late:
			t.Fatal("no line tells of the directory without a row")
		}
	}
}
